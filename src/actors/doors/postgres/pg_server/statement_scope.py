"""Ends what a session takes too long for: a statement, also because another connection asks for
it, and the wait for the next one.

A statement that is committing, or has committed, is no longer canceled. So a client that hears that
its statement was canceled knows that nothing was written.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from actors.doors.postgres.pg_server.wire import PgWire
from actors.doors.sql_session.session import SqlSession
from actors.model.pgwire.messages import FrontendMessage
from actors.runtime.errors import OperationCanceled, SessionEnded


class IdleTooLong(SessionEnded):
    """The client has sent nothing for longer than a setting of its session permits."""

    def __init__(self, setting: str) -> None:
        """Take the setting."""
        what = setting.removesuffix("_session_timeout").removesuffix("_timeout").replace("_", "-")
        super().__init__(f"terminating connection due to {what} timeout")
        # As PostgreSQL tells the two apart: pools look at the state.
        self.sqlstate = "25P03" if "transaction" in setting else "57P05"


async def receive_in_time(wire: PgWire, session: SqlSession) -> FrontendMessage | None:
    """Return a client's next message. Raises `IdleTooLong` if it does not come in the time that the
    session's settings leave."""
    name = (
        "idle_in_transaction_session_timeout" if session.in_transaction else "idle_session_timeout"
    )
    idle_ms = session.variables.milliseconds(name)
    with anyio.move_on_after(idle_ms / 1000 if idle_ms else None):
        return await wire.receive()
    raise IdleTooLong(name)


class StatementScope:
    """Runs the parts of the protocol, one after the other."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        """Around the part that runs."""
        self._open: anyio.CancelScope | None = None
        """The same, while it may be canceled."""
        self._canceled = False

    async def run(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the protocol. Raises `OperationCanceled`, and what it raises."""
        # A cancel that came too late was of the part before.
        self._canceled = False
        with anyio.CancelScope() as scope:
            self._scope = self._open = scope
            try:
                await part()
            finally:
                self._scope = self._open = None
        if scope.cancelled_caught:
            why = "user request" if self._canceled else "statement timeout"
            raise OperationCanceled(f"canceling statement due to {why}")

    def cancel(self) -> None:
        """Cancel what runs, if anything does and it may be canceled."""
        if self._open is not None:
            self._canceled = True
            self._open.cancel()

    def begin_timeout(self, timeout_ms: int | None) -> None:
        """Begin the time that the next statement may take; None: as long as it likes."""
        self._open = scope = self._scope
        if scope is not None:
            scope.deadline = anyio.current_time() + timeout_ms / 1000 if timeout_ms else math.inf

    @asynccontextmanager
    async def committing(self) -> AsyncIterator[None]:
        """Let nothing cancel the statement while it commits, and after it has."""
        # One that was canceled already does not begin to.
        await anyio.lowlevel.checkpoint_if_cancelled()
        scope, deadline = self._scope, math.inf
        # From here on a cancel finds nothing that it may end.
        self._open = None
        if scope is not None:
            deadline, scope.deadline = scope.deadline, deadline
        try:
            yield
        except BaseException:
            # What failed has surely not committed, and goes on as before.
            self._open = scope
            if scope is not None:
                scope.deadline = deadline
            raise
