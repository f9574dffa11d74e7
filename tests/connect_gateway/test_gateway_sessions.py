"""Operations of Connect sessions: what they hold is returned, whatever happens to the call."""

from __future__ import annotations

import asyncio

import pytest

from actors.connect_gateway.gateway_sessions import GatewaySession, SessionKey, SessionTable
from actors.settings import Settings


async def test_a_call_that_is_cancelled_while_it_ends_returns_what_it_holds() -> None:
    """gRPC cancels a call's own task when its client hangs up: PySpark does, after the last
    response."""
    table = SessionTable(Settings())
    session = GatewaySession(SessionKey("ann", "s"), "server-side")
    table.add(session)
    operation = table.begin(session, "o")
    returns, may_return, returned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def give_back() -> None:
        returns.set()
        await may_return.wait()
        returned.set()

    operation.rows.push_async_callback(give_back)
    call = asyncio.create_task(table.end(operation))
    await returns.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not returned.is_set()
    may_return.set()
    await table.wait_returned()
    assert returned.is_set()
    assert session.operations == {}
