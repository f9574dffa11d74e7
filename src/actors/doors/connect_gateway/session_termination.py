"""Registering the sessions of Connect clients, and ending them from outside.

A session ends when its role or token is removed, or when an administrator ends it. An operation
also ends when an administrator cancels it, or when its role loses a right to what it reads. It is
stopped here immediately, so that it sends no more responses, and at Spark in a separate task.
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
    """Registers sessions, and ends them on request of other parts of the service."""

    def __init__(
        self,
        opened: OpenSessions,
        table: SessionTable,
        run: Callable[[Callable[[], Awaitable[None]]], None],
        release: Callable[[GatewaySession], Awaitable[None]],
        give_up: Callable[[OpenOperation], Awaitable[None]],
    ) -> None:
        """Set up without sessions.

        Args:
            opened: The open sessions of all protocols.
            table: The sessions of Spark Connect.
            run: Runs an async function as a separate task.
            release: Ends a session here and at Spark.
            give_up: Ends an operation here and at Spark.
        """
        self._opened = opened
        self._table = table
        self._run = run
        self._release = release
        self._give_up = give_up

    def add_session(
        self, key: SessionKey, server_side_session_id: str, who: CallerIdentity, server: int
    ) -> GatewaySession:
        """Add a session that Spark has opened. `server`: the number of Spark's server, see
        `SparkUpstream.server`. Raises `SessionEnded` if the caller's role or token was removed
        since its authentication, and `ResourceBusy` if there are too many sessions."""
        # First, because it fails if the role was removed since the authentication.
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
        """End the operations, or the session, that the session's role may not continue."""
        self._stop_operations(session, OpenOperation.denial)
        rules, role = opened.rules, session.caller.role
        lost = ""
        try:
            session.stream_rights.check()
        except AccessDenied as denied:
            # Streams run inside Spark, and can only be ended with their session.
            lost = str(denied) if session.starts_streams else ""
        # A session whose client ran code may still contain the client's functions.
        if role and session.ran_code and not rules.may(role, EXECUTE_CODE):
            lost = rules.refusal(role, EXECUTE_CODE)
        if role and not rules.may(role, CONNECT):
            lost = rules.refusal(role, CONNECT)
        if lost:
            opened.end(SessionEnded(f"terminating session: {lost}"))

    def _stop_operations(
        self, session: GatewaySession, why: Callable[[OpenOperation], PenstockError | None]
    ) -> None:
        """Stop the operations of a session for which `why` returns an error."""
        for operation in list(session.operations.values()):
            error = why(operation)
            if error is not None:
                operation.stop(error)
                self._run(lambda each=operation: self._give_up(each))  # type: ignore[misc]
