"""ListenTask alone: a fake shard on one side, a probe on the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from actors.listen_task import ListenTask
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import ShardImport
from actors.model.protocol.internal import (
    GrantDescriptions,
    ListenFailed,
    PartsDescribed,
    ReleaseLeases,
    StartListen,
)
from actors.runtime.errors import (
    LeaseLost,
    LocalProtocolError,
    PenstockError,
    ReadBelowSince,
    StorageError,
)
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

RETRYING = Settings(retry_delay_ms_min=1, retry_delay_ms_max=2, fetch_attempts_max=3)
SOURCE = ShardImport("s1", TableSchema((TableColumn("a", "bigint"),)))


class FakePart(msgspec.Struct, frozen=True):
    key: str
    time_min: int
    time_max: int
    bytes: int = 10
    rows: int = 1


class FakeBatch(msgspec.Struct, frozen=True):
    lower: int
    upper: int
    parts: tuple[FakePart, ...]


class FakeShard:
    """A shard and its only reader, which records what is done to it."""

    def __init__(self) -> None:
        self.batches: list[FakeBatch] = []
        self.upper = 0
        self.held: set[str] = set()
        self.downgrades: list[int] = []
        self.opened: list[tuple[str, str]] = []
        self.closed = False
        self.waiting_in_next = 0
        self.fail_with: PenstockError | None = None
        self.fail_opening: list[PenstockError] = []
        self.failures: list[PenstockError] = []
        """Of the next answers."""
        self.asked_next = 0
        self.open_gate = anyio.Event()
        self.open_gate.set()
        self._changed = anyio.Event()

    # what the test does

    def append(self, upper: int, *keys: str, bytes: int = 10) -> None:
        lower = self.upper
        parts = tuple(FakePart(key, lower, upper - 1, bytes) for key in keys)
        self.batches.append(FakeBatch(lower, upper, parts))
        self.move(upper)

    def move(self, upper: int) -> None:
        self.upper = upper
        self.wake()

    def fail(self, error: PenstockError) -> None:
        self.fail_with = error
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # what the task does

    async def open_reader(self, shard: str, reader_id: str) -> FakeShard:
        self.opened.append((shard, reader_id))
        await self.open_gate.wait()
        if self.fail_opening:
            raise self.fail_opening.pop()
        return self

    async def _wait(self, beyond: int) -> None:
        if self.failures:
            raise self.failures.pop()
        self.waiting_in_next += 1
        try:
            while self.upper <= beyond and self.fail_with is None:
                await self._changed.wait()
        finally:
            self.waiting_in_next -= 1
        if self.fail_with is not None:
            raise self.fail_with

    def _hold(self, batches: Iterable[FakeBatch]) -> None:
        self.held |= {part.key for batch in batches for part in batch.parts if part.key}

    async def snapshot(self, as_of: int) -> tuple[tuple[FakePart, ...], int]:
        await self._wait(as_of)
        found = [batch for batch in self.batches if batch.lower <= as_of]
        self._hold(found)
        return tuple(part for batch in found for part in batch.parts), self.upper

    async def next(self, frontier: int) -> tuple[tuple[FakeBatch, ...], int]:
        self.asked_next += 1
        await self._wait(frontier)
        found = tuple(batch for batch in self.batches if batch.upper > frontier)
        self._hold(found)
        return found, self.upper

    async def downgrade(self, since: int) -> None:
        self.downgrades.append(since)

    def release(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.held.remove(key)

    async def close(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        self.closed = True
        self.held.clear()


def spawn(
    stage: ActorIsolation, shard: FakeShard, settings: Settings | None = None
) -> tuple[SubjectActor[Any], PeerProbe]:
    """The task, and its consumer."""
    persist: Any = shard
    probe = stage.probe()
    limits = settings or Settings()
    task = stage.start(
        lambda: ListenTask(persist, SOURCE, "u7", 3, 1, probe.address, limits), "listen"
    )
    return task, probe


def spans(described: PartsDescribed) -> list[tuple[str, int, int]]:
    return [(part.part.key, part.lower, part.upper) for part in described.parts]


async def test_snapshot_then_batches_each_with_its_interval(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p1")
    shard.append(9, "p2")
    task, probe = spawn(stage, shard)
    await probe.expect_nothing()  # waits for the start signal, with its reader open
    assert [name for name, _ in shard.opened] == ["s1"]

    await task.send(StartListen(6, True))
    first = await probe.expect(
        PartsDescribed, dataflow="u7", incarnation=3, input_index=1, lower=0, upper=7, snapshot=True
    )
    assert spans(first) == [("p1", 0, 7), ("p2", 0, 7)]
    assert all(part.snapshot for part in first.parts)
    # The batch [5, 9) reaches beyond the snapshot: described again for what is left of it.
    second = await probe.expect(PartsDescribed, lower=7, upper=9, snapshot=False)
    assert spans(second) == [("p2", 7, 9)]
    keys = [part.key for part in (*first.parts, *second.parts)]
    assert len(set(keys)) == 3

    shard.append(12, "p3", "p4")
    third = await probe.expect(PartsDescribed, lower=9, upper=12)
    assert spans(third) == [("p3", 9, 12), ("p4", 9, 12)]
    await probe.expect_nothing()


async def test_without_snapshot_listening_begins_after_as_of(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p1")
    shard.append(9, "p2")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, False))
    only = await probe.expect(PartsDescribed, lower=5, upper=9, snapshot=False)
    assert spans(only) == [("p2", 5, 9)]
    assert shard.held == {"p2"}


async def test_a_part_stays_held_until_every_description_of_it_is_released(
    stage: ActorIsolation,
) -> None:
    shard = FakeShard()
    shard.append(9, "p1")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    snapshot = await probe.expect(PartsDescribed, snapshot=True)
    rest = await probe.expect(PartsDescribed, lower=5, upper=9)
    await task.send(ReleaseLeases(tuple(part.key for part in snapshot.parts)))
    await stage.idle()
    assert shard.held == {"p1"}
    await task.send(ReleaseLeases(tuple(part.key for part in snapshot.parts)))  # again: no effect
    await stage.idle()
    assert shard.held == {"p1"}
    await task.send(ReleaseLeases(tuple(part.key for part in rest.parts)))
    await stage.idle()
    assert shard.held == set()


async def test_a_release_while_a_repeated_part_is_on_its_way_does_not_free_it(
    stage: ActorIsolation,
) -> None:
    shard = FakeShard()
    shard.append(6, "p1")
    shard.upper = 6
    task, probe = spawn(stage, shard)
    await task.send(StartListen(5, True))
    snapshot = await probe.expect(PartsDescribed, snapshot=True)
    # Compaction puts p1's part into a wider batch; the release arrives in the same turn.
    shard.batches = [FakeBatch(0, 8, (FakePart("p1", 0, 7),))]
    shard.move(8)
    await task.send(ReleaseLeases(tuple(part.key for part in snapshot.parts)))
    again = await probe.expect(PartsDescribed, lower=6, upper=8)
    assert spans(again) == [("p1", 6, 8)]
    await stage.idle()
    assert shard.held == {"p1"}


async def test_parts_outside_the_interval_are_not_described_and_released_at_once(
    stage: ActorIsolation,
) -> None:
    shard = FakeShard()
    shard.batches = [
        FakeBatch(0, 10, (FakePart("old", 0, 3), FakePart("late", 8, 9), FakePart("both", 2, 8)))
    ]
    shard.upper = 10
    task, probe = spawn(stage, shard)
    await task.send(StartListen(5, True))
    assert spans(await probe.expect(PartsDescribed, snapshot=True)) == [
        ("old", 0, 6),
        ("both", 0, 6),
    ]
    assert spans(await probe.expect(PartsDescribed, lower=6)) == [("late", 6, 10), ("both", 6, 10)]
    assert shard.held == {"old", "late", "both"}


async def test_discarded_parts_go_back(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.batches = [FakeBatch(0, 10, (FakePart("old", 0, 3), FakePart("new", 7, 9)))]
    shard.upper = 10
    task, probe = spawn(stage, shard)
    await task.send(StartListen(5, False))
    assert spans(await probe.expect(PartsDescribed, lower=6)) == [("new", 6, 10)]
    assert shard.held == {"new"}


async def test_inline_parts_have_keys_of_their_own(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(3, "", "")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(-1, False))
    described = await probe.expect(PartsDescribed, lower=0, upper=3)
    keys = [part.key for part in described.parts]
    assert len(set(keys)) == 2
    assert all(keys)
    await task.send(ReleaseLeases(tuple(keys)))
    await stage.idle()


async def test_no_more_than_the_credit_is_described_but_always_one_batch(
    stage: ActorIsolation,
) -> None:
    settings = Settings(inflight_bytes_per_dataflow_max=100)
    shard = FakeShard()
    for index in range(5):
        shard.append(index + 1, f"p{index}", bytes=60)
    task, probe = spawn(stage, shard, settings)
    await task.send(StartListen(-1, False))
    assert spans(await probe.expect(PartsDescribed)) == [("p0", 0, 1)]
    await probe.expect_nothing()  # 40 bytes are left, the next takes 60
    await task.send(GrantDescriptions(60))
    assert spans(await probe.expect(PartsDescribed)) == [("p1", 1, 2)]
    await probe.expect_nothing()
    await task.send(
        GrantDescriptions(0)
    )  # nothing is unanswered: one batch may come whatever its size
    assert spans(await probe.expect(PartsDescribed)) == [("p2", 2, 3)]
    await probe.expect_nothing()
    await task.send(GrantDescriptions(180))
    assert spans(await probe.expect(PartsDescribed)) == [("p3", 3, 4)]


async def test_it_says_that_it_pauses_and_that_it_goes_on(stage: ActorIsolation) -> None:
    settings = Settings(inflight_bytes_per_dataflow_max=100)
    shard = FakeShard()
    task, probe = spawn(stage, shard, settings)
    await stage.idle()
    assert task.statistics().doing == "waiting for the start signal"
    await task.send(StartListen(-1, False))
    await stage.idle()
    assert task.statistics().doing == "listening to s1 from [0]"
    for index in range(3):
        shard.append(index + 1, f"p{index}", bytes=60)
    await probe.expect(PartsDescribed, upper=1)
    await stage.idle()
    doing = (
        "waiting for a grant (1 descriptions unanswered): 2 descriptions of 120 bytes, credit 40"
    )
    assert task.statistics().doing == doing
    assert shard.waiting_in_next == 0, "it takes no more from the shard"
    await task.send(GrantDescriptions(60))
    await probe.expect(PartsDescribed, upper=2)
    await task.send(GrantDescriptions(60))
    await probe.expect(PartsDescribed, upper=3)
    await task.send(GrantDescriptions(60))
    await stage.idle()
    assert task.statistics().doing == "listening to s1 from [3]"


async def test_what_was_described_is_held_beyond_the_last_description(
    stage: ActorIsolation,
) -> None:
    """Also when nothing more is asked for, as after a dataflow's `until`: releases decide."""
    shard = FakeShard()
    shard.append(5, "p")
    shard.append(9, "q")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(-1, False))
    described = await probe.expect(PartsDescribed, upper=9)
    shard.move(EMPTY)
    await probe.expect(PartsDescribed, upper=EMPTY, parts=())
    assert shard.held == {"p", "q"}
    first, second = (part.key for part in described.parts)
    await task.send(ReleaseLeases((first,)))
    await stage.idle()
    assert shard.held == {"q"}
    assert not shard.closed
    await task.send(ReleaseLeases((second,)))
    await stage.idle()
    assert shard.held == set()


async def test_a_grant_gives_its_bytes_and_no_more(stage: ActorIsolation) -> None:
    settings = Settings(inflight_bytes_per_dataflow_max=100, described_in_flight_max=9)
    shard = FakeShard()
    task, probe = spawn(stage, shard, settings)
    await task.send(StartListen(-1, False))
    for upper, key in ((1, "p"), (2, "q")):
        shard.append(upper, key, bytes=40)
        await probe.expect(PartsDescribed, upper=upper)
    shard.append(3, "r", bytes=70)
    await probe.expect_nothing()
    await task.send(GrantDescriptions(40))
    await probe.expect_nothing()
    assert "credit 60" in task.statistics().doing
    await task.send(GrantDescriptions(10))
    await probe.expect(PartsDescribed, upper=3)


async def test_a_failure_of_no_store_is_a_bug_here(stage: ActorIsolation) -> None:
    shard: Any = FakeShard()
    shard.append(5, "p")
    shard.fail_with = ValueError("a bug")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    await stage.expect_crash(ValueError)
    await probe.expect_nothing()
    assert shard.closed, "nobody stops an actor that crashed: its lease would be for ever"


async def test_a_grant_never_raises_the_credit_above_its_start(stage: ActorIsolation) -> None:
    settings = Settings(inflight_bytes_per_dataflow_max=100)
    shard = FakeShard()
    task, probe = spawn(stage, shard, settings)
    await task.send(GrantDescriptions(1_000_000))
    await task.send(StartListen(-1, False))
    for index in range(3):
        shard.append(index + 1, f"p{index}", bytes=60)
    await probe.expect(PartsDescribed, upper=1)
    await probe.expect_nothing()
    assert "credit 40" in task.statistics().doing


async def test_empty_progress_coalesces_behind_unanswered_descriptions(
    stage: ActorIsolation,
) -> None:
    settings = Settings(described_in_flight_max=2)
    shard = FakeShard()
    task, probe = spawn(stage, shard, settings)
    await task.send(StartListen(-1, False))
    for upper in (1, 2):
        shard.move(upper)
        await probe.expect(PartsDescribed, parts=(), lower=upper - 1, upper=upper)
    for upper in range(3, 50):
        shard.move(upper)
        await probe.expect_nothing()
    await task.send(GrantDescriptions(0))
    await probe.expect(PartsDescribed, parts=(), lower=2, upper=49)  # only the newest
    shard.move(51)
    await probe.expect_nothing()
    shard.append(60, "p")  # parts join the progress that waits
    await probe.expect_nothing()
    assert shard.waiting_in_next == 0  # parts wait: it takes no more from the shard
    await task.send(GrantDescriptions(0))
    last = await probe.expect(PartsDescribed, lower=49, upper=60)
    assert [key for key, _, _ in spans(last)] == ["p"]


async def test_small_batches_that_wait_together_are_described_together(
    stage: ActorIsolation,
) -> None:
    shard = FakeShard()
    for upper in range(1, 40):
        shard.append(upper, f"p{upper}")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(-1, False))
    together = await probe.expect(PartsDescribed, lower=0, upper=39)
    assert len(together.parts) == 39
    # Each in its own batch's interval: one that is missing holds up no time before its own.
    intervals = [(part.lower, part.upper) for part in together.parts]
    assert intervals == [(upper - 1, upper) for upper in range(1, 40)]
    assert len({part.key for part in together.parts}) == 39


async def test_the_end_of_a_shard_is_final(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    await probe.expect(PartsDescribed, snapshot=True, upper=5)
    shard.move(EMPTY)
    await probe.expect(PartsDescribed, lower=5, upper=EMPTY, parts=())
    await task.send(GrantDescriptions(0))
    await probe.expect_nothing()
    assert shard.waiting_in_next == 0
    assert shard.held == {"p"}  # still described, still held


async def test_since_follows_what_was_listened_to(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    await probe.expect(PartsDescribed, snapshot=True)
    await stage.idle()
    assert shard.downgrades == [4, 5]  # before the snapshot, then before each listening
    shard.append(9, "q")
    await probe.expect(PartsDescribed, upper=9)
    await stage.idle()
    assert shard.downgrades == [4, 5, 9]


async def test_a_snapshot_that_waits_holds_nothing_below_its_time(stage: ActorIsolation) -> None:
    """The shard is not sealed up to `as_of` yet, and may not be for long: what lies below it can
    be compacted meanwhile."""
    shard = FakeShard()
    shard.append(3, "p1")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(6, True))
    await probe.expect_nothing()
    assert (shard.waiting_in_next, shard.downgrades) == (1, [6])
    shard.append(9, "p2")
    await probe.expect(PartsDescribed, snapshot=True)


async def test_a_failed_listing_is_the_last_message(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    snapshot = await probe.expect(PartsDescribed, snapshot=True)
    error = LeaseLost("the lease of r1 expired", determinate=True)
    shard.fail(error)
    await probe.expect(ListenFailed, dataflow="u7", incarnation=3, input_index=1, error=error)
    shard.fail_with = None
    shard.append(9, "q")
    await task.send(GrantDescriptions(1000))
    await probe.expect_nothing()
    # It still obeys: leases return, and it stops.
    await task.send(ReleaseLeases(tuple(part.key for part in snapshot.parts)))
    await stage.idle()
    assert shard.held == set()
    assert task.statistics().doing.startswith("frozen at [5]")
    await task.stop()
    assert shard.closed


async def test_nothing_that_waits_is_told_after_a_failure(stage: ActorIsolation) -> None:
    shard = FakeShard()
    task, probe = spawn(stage, shard, Settings(described_in_flight_max=1))
    await task.send(StartListen(-1, False))
    shard.move(5)
    await probe.expect(PartsDescribed, upper=5)
    shard.move(7)  # waits for the grant
    await probe.expect_nothing()
    shard.fail(LeaseLost("the lease of r1 expired", determinate=True))
    await probe.expect(ListenFailed)
    await task.send(GrantDescriptions(0))
    await probe.expect_nothing()
    assert task.statistics().doing == "frozen at [7]: the lease of r1 expired"


async def test_a_store_that_fails_is_asked_again(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    shard.fail_opening = [StorageError("no answer", determinate=True)]
    task, probe = spawn(stage, shard, RETRYING)
    await task.send(StartListen(4, True))
    await probe.expect_nothing()
    assert "failed 1 times: no answer" in task.statistics().doing
    shard.failures = [StorageError("timed out", determinate=True) for _ in range(2)]
    await stage.advance(1)
    await probe.expect_nothing()
    assert len(shard.opened) == 2
    for delay_ms in (1, 2):  # doubled each time, less the jitter
        assert "timed out" in task.statistics().doing
        await stage.advance(delay_ms)
    await probe.expect(PartsDescribed, snapshot=True)
    assert task.statistics().doing == "listening to s1 from [5]"
    # Each asking has all attempts.
    shard.failures = [StorageError("timed out", determinate=True) for _ in range(2)]
    shard.append(9, "q")
    await task.send(GrantDescriptions(1000))
    await stage.advance(3)
    await probe.expect(PartsDescribed, lower=5, upper=9)
    await task.stop()


async def test_a_store_that_fails_on_and_on_freezes_the_source(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard, RETRYING)
    await task.send(StartListen(4, True))
    await probe.expect(PartsDescribed, snapshot=True)
    error = StorageError("timed out", determinate=True)
    shard.fail(error)
    await stage.advance(3)
    failed = await probe.expect(ListenFailed)
    assert failed.error is error
    assert task.statistics().doing.startswith("frozen at [5]")
    assert shard.asked_next == 3


async def test_the_pause_between_two_attempts_varies(stage: ActorIsolation) -> None:
    """Many that listen to one store do not ask it all at once when it is back."""
    shard = FakeShard()
    shard.fail_opening = [StorageError("no answer", determinate=True) for _ in range(8)]
    limits = Settings(retry_delay_ms_min=1000, retry_delay_ms_max=1000, fetch_attempts_max=9)
    spawn(stage, shard, limits)
    asked = []
    for _ in range(9):
        await stage.idle()
        asked.append(stage.now_ms())
        while len(shard.opened) == len(asked) < 9:
            await stage.advance(10)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert all(500 <= pause <= 1010 for pause in pauses)
    assert len(set(pauses)) > 4


async def test_it_stops_at_once_between_two_attempts(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.fail_with = StorageError("timed out", determinate=True)
    task, probe = spawn(stage, shard, replace(RETRYING, retry_delay_ms_max=9000))
    await task.send(StartListen(4, True))
    await probe.expect_nothing()
    await task.stop()
    assert shard.closed
    assert stage.now_ms() == 0


async def test_a_snapshot_below_since_fails_by_name(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    shard.fail_with = ReadBelowSince("as_of 2 is below since 3")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(2, True))
    failed = await probe.expect(ListenFailed)
    assert isinstance(failed.error, ReadBelowSince)


async def test_it_stops_at_once_while_idle_and_closes_its_reader(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True))
    await probe.expect(PartsDescribed)
    assert shard.waiting_in_next == 1  # caught up and idle
    await task.stop()
    assert shard.closed
    assert stage.now_ms() == 0


async def test_a_stop_while_the_reader_opens_still_closes_it(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.open_gate = anyio.Event()
    task, _ = spawn(stage, shard)
    await stage.idle()
    async with anyio.create_task_group() as group:
        group.start_soon(task.stop)
        await stage.idle()
        assert task.running
        shard.open_gate.set()
    assert shard.closed


async def test_a_second_start_signal_is_a_bug_of_the_sender(stage: ActorIsolation) -> None:
    shard = FakeShard()
    task, _ = spawn(stage, shard)
    await task.send(StartListen(4, True))
    await task.send(StartListen(5, True))
    error = await stage.expect_crash(LocalProtocolError)
    assert "send it once" in str(error)
    assert shard.closed
