from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.testing.isolation import ActorIsolation
from actors.wal.messages import PageserverFeedback
from actors.wal.registry import (
    FEEDBACK_MAX,
    ReceiverRegistry,
    ReceiverStage,
    SlotGuard,
    TimelineFeeds,
    ValueWatch,
)
from suite_lanes import examples  # type: ignore[import-not-found]


class Slots(RuleBasedStateMachine):
    """Receivers come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = ReceiverRegistry()
        self.open: dict[int, tuple[SlotGuard, str | None, bool]] = {}
        self.most = 0

    @rule(connection=st.sampled_from(["a", "b", None]))
    def register(self, connection: str | None) -> None:
        guard = self.registry.register(connection)
        free = min(set(range(len(self.open) + 1)) - set(self.open))
        assert guard.slot == free
        self.open[guard.slot] = (guard, connection, False)
        self.most = max(self.most, len(self.open))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def elected(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        guard, connection, _ = self.open[slot]
        guard.streaming()
        self.open[slot] = (guard, connection, True)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        guard, _, _ = self.open.pop(slot)
        with guard:
            pass
        guard.release()

    @invariant()
    def they_are_as_registered(self) -> None:
        found = {
            state.slot: (state.connection, state.stage is ReceiverStage.STREAMING)
            for state in self.registry.receivers
        }
        assert found == {slot: (name, moved) for slot, (_, name, moved) in self.open.items()}
        assert all(slot < self.most for slot in found)
        assert self.registry.counts.value == self.registry.count == len(self.open)
        assert self.registry.streaming == sum(
            moved and name is not None for _, name, moved in self.open.values()
        )


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=examples(40), stateful_step_count=30)


def feedback(number: int) -> PageserverFeedback:
    return PageserverFeedback(last_received_lsn=number)


def test_a_feed_holds_the_newest_and_wakes_once() -> None:
    feeds = TimelineFeeds()
    woken: list[str] = []
    slow = feeds.open(lambda: woken.append("slow"))
    quick = feeds.open(lambda: woken.append("quick"))
    for number in range(FEEDBACK_MAX + 3):
        feeds.broadcast(feedback(number))
        assert quick.take() == [feedback(number)]
    assert woken.count("slow") == 1
    assert woken.count("quick") == FEEDBACK_MAX + 3
    assert slow.take() == [feedback(number) for number in range(3, FEEDBACK_MAX + 3)]
    feeds.close(slow)
    feeds.close(slow)
    feeds.broadcast(feedback(99))
    assert slow.take() == []
    assert quick.take() == [feedback(99)]


async def test_a_watch_wakes_who_waits_for_the_value(stage: ActorIsolation) -> None:
    watch = ValueWatch(0)
    async with asyncio.TaskGroup() as group:
        three = group.create_task(watch.until(lambda value: value >= 3))
        gone = group.create_task(watch.until(lambda value: value >= 100))
        for value in (1, 2, 2):
            watch.set(value)
            await stage.advance(1)
            assert not three.done()
        watch.set(5)
        assert await three == 5
        gone.cancel()
    assert gone.cancelled()
    assert watch._waiting == []
