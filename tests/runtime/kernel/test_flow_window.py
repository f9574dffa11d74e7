"""Lanes: their bound, order, room that is given on, and the end of the mailbox behind them."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from actors.runtime.errors import ConnectionBroken, ResourceClosed, WouldBlock
from actors.runtime.kernel import ActorAddress, BoundedMailbox, FlowWindow
from actors.testing.patience import PATIENCE_S


def _lane(limit: int, room: int = 100) -> tuple[BoundedMailbox[int], FlowWindow[int]]:
    box: BoundedMailbox[int] = BoundedMailbox("/x", room)
    return box, FlowWindow(ActorAddress(box), limit)


async def test_a_message_is_under_way_until_the_receiver_is_done_with_it() -> None:
    box, lane = _lane(2)
    sent: list[int] = []

    async def send() -> None:
        for number in range(5):
            await lane.send(number)
            sent.append(number)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            assert sent == [0, 1]
            assert await box.receive() == [0, 1]
            await anyio.wait_all_tasks_blocked()
            assert sent == [0, 1], "received is not done"
            lane.done()
            await anyio.wait_all_tasks_blocked()
            assert sent == [0, 1, 2]
            assert lane.under_way == 2
            for _ in range(4):
                lane.done()
                await anyio.wait_all_tasks_blocked()
    assert sent == [0, 1, 2, 3, 4]
    assert await box.receive() == [2, 3, 4]
    assert lane.under_way == 0


async def test_a_full_lane_leaves_the_mailbox_to_others() -> None:
    box, lane = _lane(1)
    other = FlowWindow(ActorAddress(box), 1)
    lane.send_nowait(1)
    with pytest.raises(WouldBlock, match="1 messages are unfinished"):
        lane.send_nowait(2)
    other.send_nowait(3)
    await ActorAddress(box).send(4)
    assert lane.reply(5)
    assert await box.receive() == [1, 3, 4, 5]


async def test_room_goes_to_who_waits_longest_and_not_to_who_has_left() -> None:
    box, lane = _lane(1)
    await lane.send(0)
    gone = anyio.CancelScope()
    async with anyio.create_task_group() as group:

        async def leaves() -> None:
            with gone:
                await lane.send(1)

        group.start_soon(leaves)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(lane.send, 2)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(lane.send, 3)
        await anyio.wait_all_tasks_blocked()
        gone.cancel()
        await anyio.wait_all_tasks_blocked()
        lane.done()
        await anyio.wait_all_tasks_blocked()
        assert await box.receive() == [0, 2]
        lane.done()
    assert await box.receive() == [3]


async def test_who_is_given_room_and_leaves_passes_it_on() -> None:
    box, lane = _lane(1)
    await lane.send(0)
    first = asyncio.create_task(lane.send(1))
    await anyio.wait_all_tasks_blocked()
    second = asyncio.create_task(lane.send(2))
    await anyio.wait_all_tasks_blocked()
    lane.done()
    first.cancel()  # in the same turn
    with anyio.fail_after(PATIENCE_S):
        await second
    assert first.cancelled()
    assert await box.receive() == [0, 2]
    assert lane.under_way == 1


async def test_who_leaves_while_it_waits_for_the_mailbox_gives_its_room_back() -> None:
    box, lane = _lane(2, room=1)
    await lane.send(0)
    for _ in range(3):
        sender = asyncio.create_task(lane.send(1))
        await anyio.wait_all_tasks_blocked()
        assert lane.under_way == 2
        sender.cancel()
        await anyio.wait_all_tasks_blocked()
        assert sender.cancelled()
        assert lane.under_way == 1
    assert await box.receive() == [0]
    with anyio.fail_after(PATIENCE_S):
        await lane.send(2)
    assert await box.receive() == [2]


@pytest.mark.parametrize(
    ("broken", "error"), [(None, ResourceClosed), ("it did", ConnectionBroken)]
)
async def test_who_waits_learns_that_the_mailbox_has_closed(
    broken: str | None, error: type[Exception]
) -> None:
    box, lane = _lane(1)
    await lane.send(0)
    ends: list[type[Exception]] = []

    async def send() -> None:
        try:
            await lane.send(1)
        except (ResourceClosed, ConnectionBroken) as found:
            ends.append(type(found))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            group.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            box.close(broken=broken)
    assert ends == [error, error]
    with anyio.fail_after(PATIENCE_S), pytest.raises(error):
        await lane.send(2)
