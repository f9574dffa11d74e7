"""Timeouts and cancellation of a session's statements, and the timeout of an idle session.

A statement that is committing or has committed can no longer be canceled. So when a client learns
that its statement was canceled, nothing was written.
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
    """The client was idle for longer than a setting of its session permits."""

    def __init__(self, setting: str) -> None:
        """Make the error for the timeout `setting`."""
        what = setting.removesuffix("_session_timeout").removesuffix("_timeout").replace("_", "-")
        super().__init__(f"terminating connection due to {what} timeout")
        # PostgreSQL's SQLSTATEs for the two timeouts, which connection pools check.
        self.sqlstate = "25P03" if "transaction" in setting else "57P05"


async def receive_in_time(wire: PgWire, session: SqlSession) -> FrontendMessage | None:
    """Return a client's next message. Raises `IdleTooLong` if it does not arrive within the
    session's idle timeout."""
    name = (
        "idle_in_transaction_session_timeout" if session.in_transaction else "idle_session_timeout"
    )
    idle_ms = session.variables.milliseconds(name)
    with anyio.move_on_after(idle_ms / 1000 if idle_ms else None):
        return await wire.receive()
    raise IdleTooLong(name)


class StatementScope:
    """Runs the steps of the protocol one at a time, and cancels them."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        """The scope of the running step; None between steps."""
        self._open: anyio.CancelScope | None = None
        """The same scope while the step may be canceled, else None."""
        self._canceled = False
        """True if `cancel` was called for the running step."""

    async def run(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run one step of the protocol. Raises `OperationCanceled`, and the step's own errors."""
        # A cancellation that came too late was meant for the previous step.
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
        """Cancel the running step, if there is one and it may be canceled."""
        if self._open is not None:
            self._canceled = True
            self._open.cancel()

    def begin_timeout(self, timeout_ms: int | None) -> None:
        """Start a statement: allow its cancellation, and limit its time (None or 0: no limit)."""
        self._open = scope = self._scope
        if scope is not None:
            scope.deadline = anyio.current_time() + timeout_ms / 1000 if timeout_ms else math.inf

    @asynccontextmanager
    async def committing(self) -> AsyncIterator[None]:
        """Prevent cancellation of the statement in the block and, if that succeeds, afterwards."""
        # A statement that was already canceled must not commit.
        await anyio.lowlevel.checkpoint_if_cancelled()
        scope, deadline = self._scope, math.inf
        # From here on `cancel` does nothing.
        self._open = None
        if scope is not None:
            deadline, scope.deadline = scope.deadline, deadline
        try:
            yield
        except BaseException:
            # A failed commit has written nothing, so the statement may be canceled again.
            self._open = scope
            if scope is not None:
                scope.deadline = deadline
            raise
