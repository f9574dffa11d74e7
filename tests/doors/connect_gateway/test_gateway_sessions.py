"""Operations of Connect sessions: what they hold is returned, whatever happens to the call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.doors.connect_gateway.gateway_sessions import GatewaySession, SessionKey, SessionTable
from actors.runtime.settings import Settings


class HeldRows:
    """What an operation holds: it can be returned when the test says so."""

    def __init__(self) -> None:
        self.asked, self.may_return = asyncio.Event(), asyncio.Event()
        self.returned = False

    async def give_back(self) -> None:
        self.asked.set()
        await self.may_return.wait()
        self.returned = True


async def test_a_call_that_is_cancelled_while_it_ends_returns_what_it_holds() -> None:
    """gRPC cancels a call's own task when its client hangs up: PySpark does, after the last
    response."""
    beside: list[asyncio.Task[None]] = []

    def run(effect: Callable[[], Awaitable[None]]) -> None:
        beside.append(asyncio.ensure_future(effect()))

    table, held = SessionTable(Settings(), run), HeldRows()
    session = GatewaySession(SessionKey("ann", "s"), "server-side")
    operation = table.begin(session, "o")
    operation.rows.push_async_callback(held.give_back)
    call = asyncio.create_task(table.end(operation))
    await held.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not held.returned
    held.may_return.set()
    await asyncio.gather(*beside)
    assert held.returned
    assert session.operations == {}


async def test_a_gateway_that_stops_returns_what_is_held_without_effects() -> None:
    """Those of an actor have ended before its `on_stop`."""
    table, held = (
        SessionTable(Settings(), lambda _: pytest.fail("an effect was started")),
        HeldRows(),
    )
    operation = table.begin(GatewaySession(SessionKey("ann", "s"), "server-side"), "o")
    operation.rows.push_async_callback(held.give_back)
    held.may_return.set()
    table.stop()
    await table.end(operation)
    assert held.returned
