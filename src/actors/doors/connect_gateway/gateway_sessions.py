"""The sessions of Connect clients, and their operations that have not ended.

Spark holds a session, under a user and an id; the gateway stores little of it. Only the session's
temporary views over the service's objects are stored here instead, as definitions, so that each use
of a view reads the objects as they are at that time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final, NamedTuple

import anyio

from actors.control.access.open_sessions import OpenSession, ReadRights
from actors.doors.connect_gateway.callers import NOBODY, CallerIdentity
from actors.doors.connect_gateway.error_status import SparkCondition, operation_abandoned
from actors.doors.connect_gateway.local_operations import LocalOperation
from actors.doors.connect_gateway.pipeline_graph import DataflowGraph
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.session_settings import statement_effect
from actors.engine.views.compile import CHANGES_MEANING
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, InvalidUsage, PenstockError, ResourceBusy
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings

VIEWS_MAX: Final = 256
"""Maximum number of temporary views over the service's objects per session."""
OWN_VIEWS_MAX: Final = 4096
"""Maximum number of names of other temporary views that are remembered per session."""


REFUSED_MAX: Final = 4096
"""Maximum number of stopped operations that are remembered per session."""


class SessionKey(NamedTuple):
    """The name of a session."""

    user_id: str
    session_id: str


def key_of_request(request: ProtoMessage) -> SessionKey:
    """Return the name of a request's session."""
    return SessionKey(request.user_context.user_id, request.session_id)


class OpenOperation:
    """An operation that has not ended, of Spark or of the gateway itself."""

    def __init__(
        self, session: GatewaySession, operation_id: str, write_timeout_ms: int = 30_000
    ) -> None:
        self.session = session
        self.operation_id = operation_id
        self._write_s = write_timeout_ms / 1000
        self.own: LocalOperation | None = None
        """Set when the gateway starts to answer the operation itself; None for one of Spark."""
        self.changes = False
        """True if the gateway's own operation may change something in the service."""
        self.rows = AsyncExitStack()
        """Holds, leases and views for the objects that the operation reads."""
        self.attached = 0
        """Number of calls that are streaming its responses."""
        self.begun_ms = 0.0
        """When it started, on the monotonic clock."""
        self.left_ms = 0.0
        """When the last call that streamed it ended, on the monotonic clock; 0 if none has."""
        self.rights = ReadRights(session.opened)
        """The operation's reads, which are checked before each response is sent."""
        self.ended: PenstockError | None = None
        """The error with which anyone but its client ended it."""
        self._scopes: set[anyio.CancelScope] = set()
        """Scopes of the calls that are working for it."""
        self._writes: set[anyio.CancelScope] = set()
        """Scopes of the responses that are being sent."""

    def check(self) -> None:
        """Raise the error with which it was ended, or `AccessDenied` if the right to an object that
        it reads was revoked."""
        if self.ended is not None:
            raise self.ended
        self.rights.check()

    def denial(self) -> PenstockError | None:
        """Return the error for an object that its role may no longer read; None if there is
        none."""
        try:
            self.rights.check()
        except AccessDenied as denied:
            return denied
        return None

    async def hand_on(self, context: Any, data: bytes) -> None:
        """Send a response to the client. Raises as `check` does, without sending."""
        self.check()
        # Shielded, because after an interrupted write gRPC would not send a status.
        with anyio.CancelScope(shield=True) as scope:
            self._writes.add(scope)
            try:
                await context.write(data)
            finally:
                self._writes.discard(scope)

    def stop(self, error: PenstockError) -> None:
        """Stop all calls that are working for it; each raises the error."""
        # Set this first: a call that is still running checks it before sending anything.
        self.ended = error
        self.session.refuse(self.operation_id, error)
        if self.own is not None:
            self.own.cancel(error)
        for scope in self._scopes:
            scope.cancel()
        # Do not wait any longer than this for a client that does not read.
        for scope in self._writes:
            scope.deadline = anyio.current_time() + self._write_s

    @contextmanager
    def worked_on(self) -> Iterator[None]:
        """Mark the block as working for the operation. `stop` ends the block with its error."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if self.ended is not None:
            raise self.ended


class GatewaySession:
    """The gateway's state of one session."""

    def __init__(
        self,
        key: SessionKey,
        server_side_session_id: str,
        caller: CallerIdentity = NOBODY,
        opened: OpenSession | None = None,
    ) -> None:
        self.key = key
        self.caller = caller
        self.opened = opened
        """The session's entry among those of all protocols."""
        self.server_side_session_id = server_side_session_id
        self.naming = anyio.Lock()
        """Held while Spark analyzes a plan for which temporary views exist in the session."""
        self.views: dict[str, ProtoMessage] = {}
        """Definitions of temporary views over the service's objects, by lower-case name."""
        self.own_views: set[str] = set()
        """Lower-case names of temporary views that Spark stores."""
        self.pipelines: dict[str, DataflowGraph] = {}
        """Pipelines that the client is defining, by id, the oldest first."""
        self.changed_meaning = False
        """True once the client has changed a setting that may alter the meaning of texts."""
        self.first_settings: dict[str, str | None] = {}
        """The original values of settings that the client has changed and that affect statements of
        the service."""
        self.reads_files = False
        """True once the settings for reading parts of shards are set in the session."""
        self.reads_streams = False
        """True once the data source for streams of changes is registered in the session."""
        self.starts_streams = False
        """True once the client has started a stream, which may run without an operation."""
        self.stream_rights = ReadRights(opened)
        """The reads of the streams that were started."""
        self._refused: dict[str, PenstockError] = {}
        """Errors of stopped operations, by id: Spark may still have responses of them."""
        self.noted = False
        """True once the session is in the `SessionLedger`."""
        self.ran_code = False
        """True once the client may have run code in the session, whose functions may remain."""
        self.used_ms = 0.0
        """When the session was last used, on the monotonic clock."""
        self.server = 0
        """Number of the Spark server that has the session (`SparkUpstream.server`)."""
        self.operations: dict[str, OpenOperation] = {}
        """The operations that have not ended, by id."""

    @property
    def hidden(self) -> frozenset[str]:
        """Return the names that, unqualified, mean temporary views of the session."""
        return frozenset(self.own_views) | frozenset(self.views)

    # Needed because Spark keeps unreleased responses and does not know of rights.
    def refuse(self, operation_id: str, error: PenstockError) -> None:
        """Make later calls for an operation fail with this error."""
        self._refused[operation_id] = error
        # By now Spark has dropped the oldest ones as well.
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def check_operation(self, operation_id: str) -> None:
        """Raise the error of an operation if it was stopped."""
        error = self._refused.get(operation_id)
        if error is not None:
            raise error

    def note_setting(self, name: str) -> bool:
        """Record that a setting is about to change. Return whether to store its current value in
        `first_settings`."""
        if name.lower().startswith(CHANGES_MEANING):
            self.changed_meaning = True
        return statement_effect(name) != "none" and name not in self.first_settings

    def note_own_view(self, name: str) -> None:
        """Record that Spark stores a temporary view of this name, which replaces one stored
        here."""
        self.views.pop(fold(name), None)
        # Beyond the limit, a view no longer hides an object of the same name.
        if len(self.own_views) < OWN_VIEWS_MAX:
            self.own_views.add(fold(name))

    def define_view(self, name: str, relation: ProtoMessage, *, replace: bool) -> None:
        """Store a temporary view. Raises `SparkCondition` if it exists, and `InvalidUsage` if there
        are too many."""
        if not replace and fold(name) in self.hidden:
            raise SparkCondition(
                "TEMP_TABLE_OR_VIEW_ALREADY_EXISTS",
                "42P07",
                f"Cannot create the temporary view `{name}` because it already exists.",
                "org.apache.spark.sql.catalyst.analysis.TempTableAlreadyExistsException",
            )
        if len(self.views) >= VIEWS_MAX and fold(name) not in self.views:
            raise InvalidUsage(
                f"too many temporary views over Penstock objects in this session (limit "
                f"{VIEWS_MAX}): drop one first"
            )
        self.views[fold(name)] = relation

    def drop_view(self, name: str) -> bool:
        """Remove a temporary view. Return whether it was stored here."""
        self.own_views.discard(fold(name))
        return self.views.pop(fold(name), None) is not None


class AttachedCall:
    """Counts a call as streaming an operation while the block runs."""

    def __init__(self, operation: OpenOperation | None, clock: ActorClock) -> None:
        """`operation`: None for an unknown one, which is not counted."""
        self._operation = operation
        self._clock = clock

    def __enter__(self) -> None:
        if self._operation is not None:
            self._operation.attached += 1

    def __exit__(self, *_: object) -> None:
        if self._operation is not None:
            self._operation.attached -= 1
            self._operation.left_ms = self._clock.monotonic_ms()


class SessionTable:
    """All sessions of the gateway and their operations."""

    def __init__(
        self, settings: Settings, run: Callable[[Callable[[], Awaitable[None]]], None]
    ) -> None:
        """Set up the table. `run` runs an async function as a separate task."""
        self._settings = settings
        self._run = run
        self._sessions: dict[SessionKey, GatewaySession] = {}
        self._operations = 0
        """Number of operations of all sessions that have not ended."""
        self._carried_out: dict[tuple[SessionKey, str], None] = {}
        """Operations that have ended and may have changed something, the oldest first."""
        self._stopping = False
        """True once `stop` was called."""

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(list(self._sessions.values()))

    def get(self, key: SessionKey) -> GatewaySession | None:
        """Return a session; None if it is unknown."""
        return self._sessions.get(key)

    def check_room(self) -> None:
        """Raise `ResourceBusy` if there are `connect_sessions_max` sessions."""
        limit = self._settings.connect_sessions_max
        if len(self._sessions) >= limit:
            raise ResourceBusy(
                f"too many open Spark Connect sessions (connect_sessions_max = {limit}): try again "
                "later"
            )

    def add(self, session: GatewaySession) -> None:
        """Add a session. Raises `ResourceBusy`."""
        self.check_room()
        self._sessions[session.key] = session

    def remove(self, key: SessionKey) -> GatewaySession | None:
        """Remove a session and return it. The caller must end its operations."""
        # In any case, no longer list the session among those of all protocols.
        removed = self._sessions.pop(key, None)
        if removed is not None and removed.opened is not None:
            removed.opened.close()
        return removed

    def begin(self, session: GatewaySession, operation_id: str) -> OpenOperation:
        """Add a new operation. Raises `ResourceBusy`, and `SparkCondition` if its id already exists
        or was already executed."""
        self.check_carried_out(session, operation_id)
        if operation_id in session.operations:
            raise SparkCondition(
                "INVALID_HANDLE.OPERATION_ALREADY_EXISTS",
                "HY000",
                f"The handle {operation_id} is invalid. Handle already exists.",
            )
        limit = self._settings.connect_operations_max
        if self._operations >= limit:
            raise ResourceBusy(
                f"too many running operations of Spark Connect clients (connect_operations_max = "
                f"{limit}): try again later"
            )
        # Count them here instead of summing over sessions for each `ExecutePlan`.
        self._operations += 1
        made = session.operations[operation_id] = OpenOperation(
            session, operation_id, self._settings.write_timeout_ms
        )
        return made

    def check_carried_out(self, session: GatewaySession, operation_id: str) -> None:
        """Raise `SparkCondition` if an operation has ended and may have changed something."""
        if (session.key, operation_id) in self._carried_out:
            raise operation_abandoned(operation_id)

    def _remember(self, operation: OpenOperation) -> None:
        """Remember an operation that may have changed something, so that it is not repeated."""
        own = operation.own
        if own is None or not operation.changes or own.is_repeatable:
            return
        self._carried_out[operation.session.key, operation.operation_id] = None
        if len(self._carried_out) > self._settings.connect_kept_max:
            # Forget the oldest, whose client has stopped retrying long ago.
            del self._carried_out[next(iter(self._carried_out))]

    async def end(self, operation: OpenOperation) -> None:
        """End an operation and release its resources. Idempotent. If the caller is canceled, the
        release continues without it."""
        # It may be ended by its stream, a release, an interrupt or the sweep.
        if operation.session.operations.get(operation.operation_id) is not operation:
            return
        session = operation.session
        del session.operations[operation.operation_id]
        self._operations -= 1
        if session.opened is not None:
            session.opened.answered(operation.begun_ms)
            if not session.operations:
                session.opened.begin("")
        self._remember(operation)
        if operation.own is not None:
            operation.own.cancel()
        returned = anyio.Event()

        async def return_rows() -> None:
            # Shielded: others wait for these resources, even if the gateway is stopping.
            with anyio.CancelScope(shield=True):
                await operation.rows.aclose()
            returned.set()

        if self._stopping:
            await return_rows()
            return
        # In a separate task: gRPC cancels the task of a call whose client disconnects, and PySpark
        # does so as soon as it has the last response. A shielded scope does not prevent that.
        self._run(return_rows)
        await returned.wait()

    def stop(self) -> None:
        """Make `end` run in its caller's task, because separate tasks no longer run."""
        self._stopping = True
