"""The mailbox alone: bounds, order, lanes, closing."""

from __future__ import annotations

import anyio
import pytest

from actors.runtime.errors import ActorDead, ConnectionBroken, ResourceClosed, WouldBlock
from actors.runtime.kernel import BoundedMailbox, ReplySlot, TracedMessage
from actors.runtime.telemetry import activate_context, deactivate_context
from actors.testing.patience import PATIENCE_S


async def test_first_in_first_out_in_one_wake_up() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 10)
    for number in range(5):
        box.send_nowait(number)
    assert await box.receive() == [0, 1, 2, 3, 4]
    assert box.urgent is None


async def test_full_mailbox_refuses_or_waits() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 2)
    box.send_nowait(1)
    box.send_nowait(2)
    with pytest.raises(WouldBlock, match="limit 2"):
        box.send_nowait(3)
    sent: list[int] = []

    async def sender() -> None:
        await box.send(3)
        sent.append(3)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(sender)
            await anyio.wait_all_tasks_blocked()
            assert sent == []
            assert box.statistics().senders_waiting == 1
            await box.receive()
    assert sent == [3]


async def test_reserved_room_is_not_counted_against_the_bound() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 1)
    box.send_nowait(1)
    assert box.deliver(2)
    assert box.deliver(3)
    with pytest.raises(WouldBlock):
        box.send_nowait(4)
    assert await box.receive() == [1, 2, 3]
    box.send_nowait(4)


async def test_control_overtakes() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 4)
    box.send_nowait(1)
    box.control("stop")
    box.control("inspect")
    assert await box.receive() == [1]
    assert box.urgent == ["stop", "inspect"]


async def test_closed_and_broken_are_told_apart() -> None:
    closed: BoundedMailbox[int] = BoundedMailbox("/x", 1)
    closed.close()
    with pytest.raises(ResourceClosed):
        closed.send_nowait(1)
    assert not closed.deliver(1)
    broken: BoundedMailbox[int] = BoundedMailbox("/y", 1)
    broken.close(broken="KeyError: 3")
    with pytest.raises(ConnectionBroken, match="KeyError"):
        await broken.send(1)


async def test_closing_fails_open_asks_and_waiting_senders() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 1)
    reply: ReplySlot[int] = ReplySlot(box.asks)
    box.send_nowait(1)
    errors: list[Exception] = []

    async def sender() -> None:
        try:
            await box.send(2)
        except ResourceClosed as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(sender)
        await anyio.wait_all_tasks_blocked()
        box.close()
    with pytest.raises(ActorDead):
        await reply.wait()
    assert len(errors) == 1
    assert box.statistics().unhandled == 1


async def test_a_cancelled_sender_passes_its_turn_on() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 1)
    box.send_nowait(0)
    sent: list[int] = []

    async def sender(number: int) -> None:
        await box.send(number)
        sent.append(number)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            first = anyio.CancelScope()

            async def cancelled() -> None:
                with first:
                    await sender(1)

            group.start_soon(cancelled)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(sender, 2)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            await box.receive()
    assert sent == [2]


async def test_room_goes_to_who_waits_for_it_and_nobody_overtakes() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 2)
    box.send_nowait(0)
    box.send_nowait(1)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for number in (2, 3, 4):
                group.start_soon(box.send, number)
                await anyio.wait_all_tasks_blocked()
            assert await box.receive() == [0, 1]
            # The room is theirs already, though they have not run.
            with pytest.raises(WouldBlock):
                box.send_nowait(9)
            await anyio.wait_all_tasks_blocked()
            assert await box.receive() == [2, 3]
            await anyio.wait_all_tasks_blocked()
    assert await box.receive() == [4]
    box.send_nowait(5)
    box.send_nowait(6)


async def test_what_was_put_back_comes_first_and_is_over_the_bound() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 2)
    box.send_nowait(0)
    box.send_nowait(1)
    batch = await box.receive()
    box.send_nowait(2)
    box.send_nowait(3)
    box.put_back(batch[1:])
    with pytest.raises(WouldBlock):
        box.send_nowait(4)
    assert await box.receive() == [1, 2, 3]
    assert box.statistics().received == 4
    assert box.statistics().depth_max == 3
    box.send_nowait(4)


async def test_a_message_of_a_trace_carries_it() -> None:
    box: BoundedMailbox[int] = BoundedMailbox("/x", 2)
    token = activate_context("00-1-2-01")
    box.send_nowait(0)
    deactivate_context(token)
    box.send_nowait(1)
    assert await box.receive() == [TracedMessage(0, "00-1-2-01"), 1]
