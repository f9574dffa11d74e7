"""Sessions of Connect clients among those of all doors, and what others than their clients end.

A session ends with its role and its token, and on an administrator's request; its operations end
when they are canceled so, or when the role loses the right to what they read. Each is stopped here
at once, so that no response of it leaves, and at Spark beside the call that asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from actors.control.access.open_sessions import OpenSession, OpenSessions
from actors.control.access.role_registry import CONNECT, EXECUTE_CODE
from actors.doors.connect_gateway.callers import CallerIdentity
from actors.doors.connect_gateway.error_status import operation_canceled
from actors.doors.connect_gateway.gateway_sessions import (
    GatewaySession,
    OpenOperation,
    SessionKey,
    SessionTable,
)
from actors.runtime.errors import AccessDenied, PenstockError, ResourceBusy, SessionEnded


class SessionTerminator:
    """Adds sessions, and ends them."""

    def __init__(
        self,
        opened: OpenSessions,
        table: SessionTable,
        run: Callable[[Callable[[], Awaitable[None]]], None],
        release: Callable[[GatewaySession], Awaitable[None]],
        give_up: Callable[[OpenOperation], Awaitable[None]],
    ) -> None:
        """Take the parts.

        Args:
            opened: The sessions of all doors.
            table: Those of this one.
            run: Runs a coroutine function beside all calls.
            release: Ends a session at Spark, too.
            give_up: Ends an operation at Spark, too.
        """
        self._opened = opened
        self._table = table
        self._run = run
        self._release = release
        self._give_up = give_up

    def add_session(
        self, key: SessionKey, server_side_session_id: str, who: CallerIdentity, server: int
    ) -> GatewaySession:
        """Add a session that Spark's server of this number has opened. Raises `SessionEnded` if the
        caller's role or token is gone since, and `ResourceBusy`."""
        # First, so that a role that is gone since its proof has no session here.
        opened = self._opened.open("connect", who.role, who.peer, token=who.token, proven=True)
        made = GatewaySession(key, server_side_session_id, who, opened)
        made.server = server
        try:
            self._table.add(made)
        except ResourceBusy:
            opened.close()
            raise
        opened.on_end = lambda error: self._end_session(made, error)
        opened.on_cancel = lambda: self._stop_operations(made, lambda _: operation_canceled())
        opened.on_rules = lambda: self._end_revoked(made, opened)
        return made

    def _end_session(self, session: GatewaySession, error: SessionEnded) -> None:
        self._stop_operations(session, lambda _: error)
        self._run(lambda: self._release(session))

    def _end_revoked(self, session: GatewaySession, opened: OpenSession) -> None:
        """End what the session's role may not go on with."""
        self._stop_operations(session, OpenOperation.denial)
        rules, role = opened.rules, session.caller.role
        lost = ""
        try:
            session.stream_rights.check()
        except AccessDenied as denied:
            # Spark runs streams by itself: they end with their session alone.
            lost = str(denied) if session.starts_streams else ""
        # Functions of the client may be left in a session that was given the right to run them.
        if role and session.ran_code and not rules.may(role, EXECUTE_CODE):
            lost = rules.refusal(role, EXECUTE_CODE)
        if role and not rules.may(role, CONNECT):
            lost = rules.refusal(role, CONNECT)
        if lost:
            opened.end(SessionEnded(f"terminating session: {lost}"))

    def _stop_operations(
        self, session: GatewaySession, why: Callable[[OpenOperation], PenstockError | None]
    ) -> None:
        """Stop the operations of a session for which there is an error."""
        for operation in list(session.operations.values()):
            error = why(operation)
            if error is not None:
                operation.stop(error)
                self._run(lambda each=operation: self._give_up(each))  # type: ignore[misc]
