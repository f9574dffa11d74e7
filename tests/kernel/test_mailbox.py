"""The mailbox alone: bounds, order, lanes, closing."""

from __future__ import annotations

import anyio
import pytest

from actors.errors import ActorDead, Broken, Closed, WouldBlock
from actors.kernel import Mailbox, Reply


async def test_first_in_first_out_in_one_wake_up() -> None:
    box: Mailbox[int] = Mailbox("/x", 10)
    for number in range(5):
        box.send_nowait(number)
    control, batch = await box.receive()
    assert control == []
    assert [envelope.message for envelope in batch] == [0, 1, 2, 3, 4]


async def test_full_mailbox_refuses_or_waits() -> None:
    box: Mailbox[int] = Mailbox("/x", 2)
    box.send_nowait(1)
    box.send_nowait(2)
    with pytest.raises(WouldBlock, match="limit 2"):
        box.send_nowait(3)
    sent: list[int] = []

    async def sender() -> None:
        await box.send(3)
        sent.append(3)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(sender)
            await anyio.wait_all_tasks_blocked()
            assert sent == []
            assert box.statistics().senders_waiting == 1
            await box.receive()
    assert sent == [3]


async def test_reserved_room_is_not_counted_against_the_bound() -> None:
    box: Mailbox[int] = Mailbox("/x", 1)
    box.send_nowait(1)
    assert box.deliver(2)
    assert box.deliver(3)
    with pytest.raises(WouldBlock):
        box.send_nowait(4)
    _, batch = await box.receive()
    assert [envelope.message for envelope in batch] == [1, 2, 3]
    box.send_nowait(4)


async def test_control_overtakes() -> None:
    box: Mailbox[int] = Mailbox("/x", 4)
    box.send_nowait(1)
    box.control("stop")
    control, batch = await box.receive()
    assert control == ["stop"]
    assert len(batch) == 1


async def test_closed_and_broken_are_told_apart() -> None:
    closed: Mailbox[int] = Mailbox("/x", 1)
    closed.close()
    with pytest.raises(Closed):
        closed.send_nowait(1)
    assert not closed.deliver(1)
    broken: Mailbox[int] = Mailbox("/y", 1)
    broken.close(broken="KeyError: 3")
    with pytest.raises(Broken, match="KeyError"):
        await broken.send(1)


async def test_closing_fails_open_asks_and_waiting_senders() -> None:
    box: Mailbox[int] = Mailbox("/x", 1)
    reply: Reply[int] = Reply(box.asks)
    box.send_nowait(1)
    errors: list[Exception] = []

    async def sender() -> None:
        try:
            await box.send(2)
        except Closed as error:
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
    box: Mailbox[int] = Mailbox("/x", 1)
    box.send_nowait(0)
    sent: list[int] = []

    async def sender(number: int) -> None:
        await box.send(number)
        sent.append(number)

    with anyio.fail_after(5):
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
