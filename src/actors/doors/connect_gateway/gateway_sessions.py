"""The sessions of Connect clients, and their operations that have not ended.

A session is one of Spark's, named by user and id, and the little that the gateway keeps of it. Its
temporary views over the service's objects are kept here alone: as definitions, so that each use
reads its objects at the time of that use.
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
"""Temporary views over the service's objects in one session."""
OWN_VIEWS_MAX: Final = 4096
"""Names of other temporary views that are remembered for one session."""


REFUSED_MAX: Final = 4096
"""Stopped operations that are remembered for one session."""


class SessionKey(NamedTuple):
    """The name of a session."""

    user_id: str
    session_id: str


def key_of_request(request: ProtoMessage) -> SessionKey:
    """Return the session that a request names."""
    return SessionKey(request.user_context.user_id, request.session_id)


class OpenOperation:
    """An operation that has not ended: one of Spark's, or one of the gateway's own."""

    def __init__(
        self, session: GatewaySession, operation_id: str, write_timeout_ms: int = 30_000
    ) -> None:
        self.session = session
        self.operation_id = operation_id
        self._write_s = write_timeout_ms / 1000
        self.own: LocalOperation | None = None
        self.changes = False
        """True if the gateway's own operation may change something of the service."""
        self.rows = AsyncExitStack()
        """Holds, leases and views of the objects that it reads."""
        self.attached = 0
        """Calls that stream its responses now."""
        self.begun_ms = 0.0
        """Time at which it began, on the monotonic clock."""
        self.left_ms = 0.0
        """Time at which the last of them left, on the monotonic clock."""
        self.rights = ReadRights(session.opened)
        """Reads of the operation: checked before each of its responses is handed on."""
        self.ended: PenstockError | None = None
        """Why it was ended by somebody else than its client."""
        self._scopes: set[anyio.CancelScope] = set()
        """Scopes of the calls that work for it now."""
        self._writes: set[anyio.CancelScope] = set()
        """Scopes of the responses that are on their way."""

    def check(self) -> None:
        """Raise the error with which it was ended, or `AccessDenied` if the right to what it reads
        is gone."""
        if self.ended is not None:
            raise self.ended
        self.rights.check()

    def denial(self) -> PenstockError | None:
        """Return the refusal of what it reads; None while its role may read all of it."""
        try:
            self.rights.check()
        except AccessDenied as denied:
            return denied
        return None

    async def hand_on(self, context: Any, data: bytes) -> None:
        """Send a response to the client. Raises as `check`, and sends nothing then."""
        self.check()
        # gRPC sends no status, and so nothing at all, after a write that was left halfway.
        with anyio.CancelScope(shield=True) as scope:
            self._writes.add(scope)
            try:
                await context.write(data)
            finally:
                self._writes.discard(scope)

    def stop(self, error: PenstockError) -> None:
        """Stop all calls that work for it: each raises the error."""
        # First of all: a call that goes on meanwhile looks at it before it hands anything on.
        self.ended = error
        self.session.refuse(self.operation_id, error)
        if self.own is not None:
            self.own.cancel(error)
        for scope in self._scopes:
            scope.cancel()
        # A client that takes nothing is told nothing.
        for scope in self._writes:
            scope.deadline = anyio.current_time() + self._write_s

    @contextmanager
    def worked_on(self) -> Iterator[None]:
        """Work for it in the block, which `stop` leaves with its error."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if self.ended is not None:
            raise self.ended


class GatewaySession:
    """One session."""

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
        """The session as all doors show it."""
        self.server_side_session_id = server_side_session_id
        self.naming = anyio.Lock()
        """Held while Spark analyses a text for which temporary views of the session exist."""
        self.views: dict[str, ProtoMessage] = {}
        """Definitions of temporary views over the service's objects, by name in lower case."""
        self.own_views: set[str] = set()
        """Names, in lower case, of temporary views that Spark keeps."""
        self.pipelines: dict[str, DataflowGraph] = {}
        """Pipelines that the client defines, by id, the oldest first."""
        self.changed_meaning = False
        """True if a setting of the session may give texts another meaning than by default."""
        self.first_settings: dict[str, str | None] = {}
        """Settings that mean something to statements of the service and that the client has
        changed, with the values that they had before."""
        self.reads_files = False
        """True if the session's settings are those under which Spark may read parts of shards."""
        self.reads_streams = False
        """True if the session knows the data source that streams objects' changes."""
        self.starts_streams = False
        """True if the client has started a stream, which may run on without an operation."""
        self.stream_rights = ReadRights(opened)
        """Reads of the streams that were started."""
        self._refused: dict[str, PenstockError] = {}
        """Errors of operations that were stopped, by id: Spark may have responses of them still."""
        self.noted = False
        """True if it is in the `SessionLedger`."""
        self.ran_code = False
        """True if code of the client may have run in it: functions of it may be left."""
        self.used_ms = 0.0
        self.server = 0
        """Number of the server that has the session (`SparkUpstream.server`)."""
        self.operations: dict[str, OpenOperation] = {}

    @property
    def hidden(self) -> frozenset[str]:
        """Return the names that mean temporary views of the session where they stand alone."""
        return frozenset(self.own_views) | frozenset(self.views)

    # Spark keeps responses that were not released, and knows nothing of rights.
    def refuse(self, operation_id: str, error: PenstockError) -> None:
        """Let an operation not be taken up again."""
        self._refused[operation_id] = error
        # By then Spark has let go of the oldest, too.
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def check_operation(self, operation_id: str) -> None:
        """Raise the error of an operation that was stopped."""
        error = self._refused.get(operation_id)
        if error is not None:
            raise error

    def note_setting(self, name: str) -> bool:
        """Note that a setting is changed. Return whether its value before that is to be kept."""
        if name.lower().startswith(CHANGES_MEANING):
            self.changed_meaning = True
        return statement_effect(name) != "none" and name not in self.first_settings

    def note_own_view(self, name: str) -> None:
        """Note that Spark keeps a temporary view of this name, in place of one that is kept
        here."""
        self.views.pop(fold(name), None)
        # Beyond the bound a view no longer hides an object of its name.
        if len(self.own_views) < OWN_VIEWS_MAX:
            self.own_views.add(fold(name))

    def define_view(self, name: str, relation: ProtoMessage, *, replace: bool) -> None:
        """Keep a temporary view. Raises `SparkCondition`, and `InvalidUsage` if there are too
        many."""
        if not replace and fold(name) in self.hidden:
            raise SparkCondition(
                "TEMP_TABLE_OR_VIEW_ALREADY_EXISTS",
                "42P07",
                f"Cannot create the temporary view `{name}` because it already exists.",
                "org.apache.spark.sql.catalyst.analysis.TempTableAlreadyExistsException",
            )
        if len(self.views) >= VIEWS_MAX and fold(name) not in self.views:
            raise InvalidUsage(
                f"a session has at most {VIEWS_MAX} temporary views over objects of the service"
            )
        self.views[fold(name)] = relation

    def drop_view(self, name: str) -> bool:
        """Forget a temporary view. Return whether it was kept here."""
        self.own_views.discard(fold(name))
        return self.views.pop(fold(name), None) is not None


class AttachedCall:
    """Counts a call that streams an operation, while the block runs."""

    def __init__(self, operation: OpenOperation | None, clock: ActorClock) -> None:
        """Take the operation; None for one that is not known."""
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
    """All sessions and operations."""

    def __init__(
        self, settings: Settings, run: Callable[[Callable[[], Awaitable[None]]], None]
    ) -> None:
        """Take the limits. `run` runs a coroutine function beside all calls."""
        self._settings = settings
        self._run = run
        self._sessions: dict[SessionKey, GatewaySession] = {}
        self._operations = 0
        self._carried_out: dict[tuple[SessionKey, str], None] = {}
        """Operations that are over and may have changed something, oldest first."""
        self._stopping = False

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(list(self._sessions.values()))

    def get(self, key: SessionKey) -> GatewaySession | None:
        """Return a session; None if it is not known."""
        return self._sessions.get(key)

    def check_room(self) -> None:
        """Raise `ResourceBusy` if there are as many sessions as there may be."""
        limit = self._settings.connect_sessions_max
        if len(self._sessions) >= limit:
            raise ResourceBusy(
                f"{limit} Spark Connect sessions are open (connect_sessions_max): try again later"
            )

    def add(self, session: GatewaySession) -> None:
        """Add a session. Raises `ResourceBusy`."""
        self.check_room()
        self._sessions[session.key] = session

    def remove(self, key: SessionKey) -> GatewaySession | None:
        """Remove a session and return it; its operations are the caller's to end."""
        # Whatever the reason: a session without a client is not shown.
        removed = self._sessions.pop(key, None)
        if removed is not None and removed.opened is not None:
            removed.opened.close()
        return removed

    def begin(self, session: GatewaySession, operation_id: str) -> OpenOperation:
        """Begin an operation. Raises `ResourceBusy`, and `SparkCondition` if it has begun
        already, or was carried out."""
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
                f"{limit} operations of Spark Connect clients run (connect_operations_max): try "
                "again later"
            )
        # Counted here and not by the sessions: each `ExecutePlan` asks.
        self._operations += 1
        made = session.operations[operation_id] = OpenOperation(
            session, operation_id, self._settings.write_timeout_ms
        )
        return made

    def check_carried_out(self, session: GatewaySession, operation_id: str) -> None:
        """Raise `SparkCondition` for an operation that is over and may have changed something."""
        if (session.key, operation_id) in self._carried_out:
            raise operation_abandoned(operation_id)

    def _remember(self, operation: OpenOperation) -> None:
        """Let an operation that may have changed something not be carried out again."""
        own = operation.own
        if own is None or not operation.changes or own.is_repeatable:
            return
        self._carried_out[operation.session.key, operation.operation_id] = None
        if len(self._carried_out) > self._settings.connect_kept_max:
            # The oldest: its client has long stopped to ask.
            del self._carried_out[next(iter(self._carried_out))]

    async def end(self, operation: OpenOperation) -> None:
        """End an operation and return what it holds. Idempotent. If the caller is cancelled
        meanwhile, the return goes on without it."""
        # Several calls may end it: its stream, a release, an interrupt, the sweep.
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
            # Shielded: others wait for what it holds, also if the gateway stops meanwhile.
            with anyio.CancelScope(shield=True):
                await operation.rows.aclose()
            returned.set()

        if self._stopping:
            await return_rows()
            return
        # Beside this call: gRPC cancels the task of a call whose client has hung up, and PySpark
        # hangs up as soon as it has the last response. No shielded scope holds that off.
        self._run(return_rows)
        await returned.wait()

    def stop(self) -> None:
        """Have `end` return in its caller's task: nothing runs beside the calls any more."""
        self._stopping = True
