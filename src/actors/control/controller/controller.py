"""The controller: the one actor that knows all objects and answers for the service.

It takes requests from sessions, sends commands to the replicas, and follows frontiers. Its parts
make the decisions: `StatementQueue` (the catalog), `PendingReads` (reads and waits),
`RunningSubscribes`, `RunningCopies`; writes go to the `TableWriter`. All parts share one
`ControllerState` and run in this actor's task.

The table writer is its child; the links to the replicas are parts of it. A restart rebuilds
everything from the durable catalog: each object's dataflow is created again and resumes where its
durable output ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, assert_never

from msgspec.structs import replace

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import OpenSessions
from actors.control.controller import messages
from actors.control.controller.catalog.boot import BootState, describe_dataflow, restart_as_of
from actors.control.controller.catalog.catalog import (
    CONNECTOR_KINDS,
    INDEX,
    PLAIN_VIEW,
    TABLE,
    VIEW,
    CatalogObject,
)
from actors.control.controller.catalog.connector_ddl import (
    ConnectorMakers,
    ConnectorStore,
    NoConnectors,
)
from actors.control.controller.catalog.ddl import CatalogStore
from actors.control.controller.catalog.statements import StatementDone, StatementQueue
from actors.control.controller.connectors.external_cleanup import CleanupForgotten, CleanupTurn
from actors.control.controller.connectors.objects import ConnectorObjects
from actors.control.controller.frontiers import ObjectFrontiers
from actors.control.controller.hold_moves import HoldMoves, HoldsDue, HoldsMoved
from actors.control.controller.holds import RETAIN, RetainHolds
from actors.control.controller.object_conditions import (
    note_quarantined,
    note_report,
    observe_objects,
    settle,
)
from actors.control.controller.object_metrics import object_measures
from actors.control.controller.reads.copies import CopyHoldAcquired, CopyTimedOut, RunningCopies
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.control.controller.reads.queries import (
    InputsChecked,
    QueryEnded,
    QueryPiece,
    QueryTimedOut,
    RunningQueries,
)
from actors.control.controller.reads.reads import (
    DeadlinePassed,
    KeysFound,
    PartRead,
    PendingReads,
    SinceRead,
    pin_objects,
)
from actors.control.controller.reads.relations import RelationRead, SystemRelations
from actors.control.controller.reads.status import (
    StatusRead,
    inspect_objects,
    read_sinces,
    report,
    running_state_text,
)
from actors.control.controller.reads.subscribes import (
    PieceDue,
    PieceRead,
    RunningSubscribes,
    SubscribeHoldAcquired,
)
from actors.control.controller.replicas.instance import (
    ComputeInstance,
    ReplicasChanged,
    ReplicasFound,
    ReplicasNoted,
    ReplicaSupply,
)
from actors.control.controller.replicas.replica import (
    LinkNews,
    LinkTurn,
    ReplicaConnected,
    ReplicaLost,
    ReplicaResponse,
)
from actors.control.controller.replicas.replica_merge import MergedResponses
from actors.control.controller.roles.request_rights import check_request, needed_rights
from actors.control.controller.roles.revocation import (
    TRUSTED,
    HeldRights,
    held_rights,
    lost_right,
    revoked,
)
from actors.control.controller.roles.role_store import RolesStored, RoleStore
from actors.control.controller.state import (
    ControllerState,
    NoContentsYet,
    reply_error,
    to_penstock_error,
)
from actors.control.controller.tables.commit import PlannedWrite
from actors.control.controller.tables.copies_from import CopiesFrom
from actors.control.controller.tables.groups import TableTarget, check_definitions
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.control.controller.tables.table_ticks import ClockDue, TablesTicked, TableTicks
from actors.control.controller.tables.table_writer import TableWriter
from actors.durable.persist import PersistClient
from actors.engine.catalyst.permitted_settings import check_settings
from actors.engine.views.explain import explain
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.api import (
    ActorReport,
    CatalogStatement,
    ChangeReplicas,
    CopyFromFiles,
    CopyTo,
    CreateView,
    DescribeQuery,
    EndRequest,
    ExplainQuery,
    ExplainView,
    ForgetSource,
    ListActors,
    ListSources,
    ReadObject,
    ReadStatus,
    Request,
    RequestDone,
    RunQuery,
    SetTracing,
    SignalSession,
    SubscribeObject,
    TracingReport,
    WaitFor,
    WriteTables,
)
from actors.model.protocol.compute import (
    AllowWrites,
    Command,
    ConnectionRefused,
    CopyToResponse,
    CreateDataflow,
    CreateInstance,
    Frontiers,
    InitializationComplete,
    PeekResponse,
    Response,
    ScheduleDataflow,
    StatusResponse,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.model.protocol.relations import is_relation
from actors.model.protocol.role_messages import CheckRight, ListRoles, RoleStatement
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    ResourceBusy,
    UnknownObject,
    WouldBlock,
)
from actors.runtime.kernel import Actor, ActorAddress
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import OPEN_REQUESTS
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings
from actors.runtime.tracing.setup import current_tracing

log = logging.getLogger("penstock.controller")


ControllerMessage: TypeAlias = (
    messages.SubmitRequest
    | messages.PinObjects
    | messages.BytesDelivered
    | messages.SessionClosed
    | messages.TablesAdvanced
    | LinkTurn
    | ReplicasChanged
    | ReplicasFound
    | ReplicasNoted
    | StatementDone
    | SinceRead
    | DeadlinePassed
    | PartRead
    | KeysFound
    | SubscribeHoldAcquired
    | PieceRead
    | PieceDue
    | CopyHoldAcquired
    | CopyTimedOut
    | messages.CopyTurn
    | StatusRead
    | RelationRead
    | QueryPiece
    | QueryEnded
    | QueryTimedOut
    | TablesTicked
    | ClockDue
    | HoldsDue
    | HoldsMoved
    | CleanupTurn
    | CleanupForgotten
    | messages.FindLogin
    | messages.CountReplicas
    | messages.InspectObjects
    | messages.FindToken
    | RolesStored
    | InputsChecked
)


class Controller(Actor[ControllerMessage]):
    """The controller actor; see the module. `boot` is the result of `boot.load`."""

    def __init__(
        self,
        boot: BootState,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        supply: ReplicaSupply,
        settings: Settings,
        scratch: Path,
        maintenance: ActorAddress[Any] | None = None,
        connectors: ConnectorMakers | None = None,
        memory_reads: MemoryReads | None = None,
        queries: ActorAddress[ExecutorMessage] | None = None,
        sessions: OpenSessions | None = None,
    ) -> None:
        """Set up the actor; `on_start` makes its state.

        Args:
            connectors: Makes sources and sinks; None if there are none.
            memory_reads: Reads rows by key from memory; also used by listeners directly.
            queries: Executor for queries; None to use `executor`.
            sessions: The sessions of all listeners; None to make an empty set.
        """
        self._boot = boot
        self._persist = persist
        self._store = CatalogStore(persist, executor, settings)
        self._supply = supply
        self._settings = settings
        self._scratch = scratch
        self._maintenance = maintenance
        self._watched: set[str] = set()
        """Paths of the watched sessions: those that have sent a request."""
        self._sessions = sessions
        self._executor = executor
        self._query_executor = queries or executor
        self._connectors = connectors or NoConnectors()
        self._memory_reads = memory_reads or MemoryReads()

    async def on_start(self) -> None:
        boot = self._boot
        contents = TableArrangements(
            self._persist, self._scratch, self.ctx.clock, self._settings.index_history_ms
        )
        state = self._state = self._make_state(contents)
        self._instance = state.instance
        self._memory_reads.attach_state(state, contents)
        link = self._storage_link = self._instance.storage()
        self._roles = RoleStore(state, boot.roles, boot.roles_seqno)
        self._roles.on_rules = self._rules_changed
        copies = self._copies_from = CopiesFrom(state, self._target, link)
        self._sources = ConnectorObjects(
            state, link, copies, self._connectors, boot.cleanup_records
        )
        self._statements = StatementQueue(state, self._sources, self._roles.created)
        self._reads = PendingReads(state, self._memory_reads)
        self._subscribes = RunningSubscribes(state)
        scratch = self._scratch / "queries"
        self._queries = RunningQueries(state, self._query_executor, scratch, self._await_contents)
        self._copies = RunningCopies(state)
        self._parts = (
            self._subscribes,
            self._copies,
            copies,
            self._reads,
            self._queries,
            self._statements,
        )
        # The parts whose requests keep running, and need their rights for as long.
        self._running = (self._subscribes, self._copies, copies, self._reads, self._queries)
        note_quarantined(state)
        self._statements.open_times()
        self._instance.begin()
        if link is not None:
            link.connect()
        self._relations = SystemRelations(
            state,
            self._reads,
            self._subscribes,
            self._queries,
            self._copies,
            tuple(dict.fromkeys((self._executor, self._query_executor))),
            self._sources,
        )
        self._ticks = TableTicks(state)
        self._ticks.begin()
        self._holds = HoldMoves(state)
        self._holds.begin()

    def _make_state(self, contents: TableArrangements) -> ControllerState:
        boot, settings, persist = self._boot, self._settings, self._persist
        frontiers = ObjectFrontiers(boot.tables_upper)
        retain = RetainHolds(settings.hold_downgrade_ms)
        given = persist, settings, contents, self.ctx.self, self._maintenance
        writer = self.ctx.spawn(lambda: TableWriter(*given), "table-writer")
        instance = ComputeInstance(
            self.ctx,
            self._supply,
            settings,
            self._initial_commands(frontiers, retain),
        )
        return ControllerState(
            self.ctx,
            settings,
            persist,
            self._store,
            boot.catalog,
            boot.seqno,
            frontiers,
            retain,
            instance,
            writer,
            ConnectorStore(self._store, self._connectors),
            self._supply.statistics,
            self._maintenance,
            self._sessions or OpenSessions(self.ctx.now_ms),
        )

    async def on_stop(self) -> None:
        # So that each replica learns immediately that its client is gone.
        await self._instance.aclose()
        if self._storage_link is not None:
            await self._storage_link.aclose()

    def _initial_commands(self, frontiers: ObjectFrontiers, retain: RetainHolds) -> list[Command]:
        """Return the command history for a fresh replica: every object, from where its output ends.
        Start tracking the frontiers and retained histories of all objects."""
        boot, settings = self._boot, self._settings
        commands: list[Command] = [
            CreateInstance(settings.workers, expiration_ms=settings.expiration_ms),
            UpdateConfiguration(result_bytes_max=settings.result_bytes_max),
        ]
        schedules: list[Command] = []
        for entry in boot.catalog.objects:
            stored = boot.states.get(entry.shard or "")
            if stored is not None:
                kept_ms = entry.retain_history_ms or settings.retain_history_ms
                retain.track(stored.id, kept_ms, stored.holds.get(RETAIN, stored.since))
            if entry.kind in (TABLE, PLAIN_VIEW):
                continue
            upper = 0 if stored is None else stored.upper
            if entry.kind in CONNECTOR_KINDS or entry.id in boot.catalog.quarantined:
                frontiers.track(entry, upper, now_ms=self.ctx.now_ms())
                continue
            as_of = restart_as_of(boot, entry)
            # An index is rebuilt in memory, so it is readable only from its new as_of.
            readable_from = as_of if entry.kind == INDEX else 0
            frontiers.track(entry, upper, readable_from, now_ms=self.ctx.now_ms())
            commands.append(CreateDataflow(describe_dataflow(boot.catalog, entry, as_of)))
            schedules.append(ScheduleDataflow(entry.dataflow_id))
        return [*commands, *schedules, InitializationComplete(), AllowWrites()]

    async def receive(self, message: ControllerMessage) -> None:
        match message:
            case messages.SubmitRequest():
                self._submit(message)
            case messages.PinObjects():
                self._pin(message)
            case messages.CountReplicas(reply):
                reply.set(self._instance.connected_count)
            case messages.InspectObjects(reply):
                reply.set(inspect_objects(self._state, self._sources))
            case messages.BytesDelivered():
                self._delivered(message)
            case messages.SessionClosed(session_path):
                self._session_closed(session_path)
            case messages.TablesAdvanced(upper):
                self._ticks.tables_advanced(message)
                if self._state.frontiers.advance_tables(upper):
                    self._reads.advanced(None)
            case LinkTurn(link):
                for news in link.turn(message):
                    self._of_replica(news)
            case TablesTicked():
                self._ticks.tick_ended(message)
            case ClockDue():
                self._ticks.clock_due()
            case ReplicasFound():
                for merged in self._instance.found(message):
                    self._merged(merged)
            case ReplicasChanged() | ReplicasNoted():
                self._replicas_changed(message)
            case StatementDone():
                self._dropped(self._statements.done(message))
            case SinceRead() | DeadlinePassed() | PartRead() | KeysFound():
                self._read_turn(message)
            case SubscribeHoldAcquired():
                self._subscribes.hold_acquired(message)
            case PieceRead():
                self._subscribes.piece_read(message)
            case PieceDue():
                self._subscribes.piece_due(message)
            case CopyHoldAcquired() | CopyTimedOut():
                self._copies.turn(message)
            case messages.CopyTurn():
                self._copies_from.turn(message)
            case StatusRead():
                message.session.reply(report(self._state, self._sources, message))
            case RelationRead():
                self._relations.answered(message)
            case QueryPiece() | QueryEnded() | QueryTimedOut():
                self._queries.turn(message)
            case HoldsDue():
                self._move_holds()
            case HoldsMoved():
                self._holds.moved(message)
            case CleanupTurn() | CleanupForgotten():
                self._sources.cleanup.turn(message)
            case messages.FindLogin() | messages.FindToken() | RolesStored() | InputsChecked():
                self._role_turn(message)
            case _:
                assert_never(message)

    def _of_replica(self, news: LinkNews) -> None:
        match news:
            case ReplicaResponse(half="storage"):
                self._connectors_responded(news)
            case ReplicaConnected(half="storage"):
                self._sources.connected(news)
            case ReplicaLost(half="storage"):
                self._sources.lost(news)
            case ReplicaResponse():
                self._merged(self._instance.responded(news))
            case ReplicaConnected():
                self._merged(self._instance.connected(news))
            case ReplicaLost():
                self._merged(self._instance.lost(news))
            case _:
                assert_never(news)

    def _read_turn(self, message: SinceRead | DeadlinePassed | PartRead | KeysFound) -> None:
        match message:
            case SinceRead():
                self._reads.since_read(message)
            case DeadlinePassed(number):
                self._reads.timed_out(number)
            case PartRead():
                self._reads.part_read(message)
            case KeysFound():
                self._reads.keys_found(message)

    def _role_turn(
        self, message: messages.FindLogin | messages.FindToken | RolesStored | InputsChecked
    ) -> None:
        access = self._state.access
        match message:
            case messages.FindLogin(name, reply):
                reply.set(access.login(name))
            case messages.FindToken(digest, asked):
                asked.set(access.token_login(digest))
            case RolesStored():
                self._roles.stored(message)
            case InputsChecked(session, request, role):
                # Check although nothing runs yet: otherwise the view's owner would keep access to
                # what it reads.
                denied = lost_right(access, message.rights)
                if denied is None:
                    self._serve(session, request, role)
                else:
                    reply_error(session, request.request, denied)

    def _dropped(self, entries: tuple[CatalogObject, ...]) -> None:
        for entry in entries:
            self._reads.dropped(entry)
            self._subscribes.dropped(entry)
            self._copies.dropped(entry)
            self._copies_from.dropped(entry)
        # A view that moved to another shard is dropped only for its readers; its rights stay.
        gone = tuple(each for each in entries if self._state.catalog.get(each.id) is None)
        if gone:
            self._roles.dropped(gone)

    # -- requests ------------------------------------------------------------------------------

    def _session_closed(self, path: str) -> None:
        self._watched.discard(path)
        self._roles.session_closed(path)
        for part in self._parts:
            part.session_closed(path)

    def _submit(self, submitted: messages.SubmitRequest) -> None:
        session, request = submitted.session, submitted.request
        if session.path not in self._watched:
            self._watched.add(session.path)
            # Watch a session from its first request: before that, it has no state here.
            self.ctx.watch(session, messages.SessionClosed(session.path))
        role = self._roles.role_of(session.path, submitted.role)
        self._serve(session, request, role, unchecked=True)

    def _rules_changed(self, rules: AccessRules, asker: str) -> None:
        """End whatever the new rules no longer allow: first sessions, then individual requests.
        `asker` is the path of the session that changed the rules."""
        self._state.sessions.apply(rules, asker)
        for part in self._running:
            # Iterate over a list, since ending a request removes it.
            for each, denied in list(revoked(part.running(), rules, self._roles.role_of)):
                part.cancel(each.session, each.request, denied)

    def _held(self, request: Request, role: str | None) -> HeldRights:
        """Return the rights that a request needs for as long as it runs."""
        if role is None:
            return TRUSTED
        return held_rights(role, needed_rights(self._state.catalog, request))

    def _is_permitted(self, session: ActorAddress[Any], request: Request, role: str | None) -> bool:
        """Return whether a request may be handled now; False means that its inputs are being
        checked first. Raises `InvalidUsage` for settings that a view or query may not have, and as
        `check_request` does."""
        check_request(self._state.access, self._state.catalog, role, request)
        if not isinstance(request, CreateView | ExplainQuery | RunQuery | DescribeQuery):
            return True
        # Applies to administrators, too: a view would apply its settings again at each start.
        check_settings(request.conf, self._settings.engine_shuffle_partitions_max)
        if isinstance(request, RunQuery | DescribeQuery) or self._state.access.is_free(role):
            return True
        if isinstance(request, ExplainQuery) and request.refresh_policy == "none":
            return True
        # Only the analysis of a view's text shows what it reads.
        self._queries.check_inputs(session, request, role)
        return False

    def _delivered(self, told: messages.BytesDelivered) -> None:
        parts = (self._reads, self._queries, self._copies, self._copies_from)
        if not any(each.delivered(told.session, told.request) for each in parts):
            self._subscribes.bytes_delivered(told.session, told.request, told.bytes)

    def _pin(self, asked: messages.PinObjects) -> None:
        """Answer with the catalog and a time. An error fails only this request."""
        try:
            asked.reply.set(pin_objects(self._state, asked))
        except PenstockError as error:
            asked.reply.fail(error)

    def _serve(
        self,
        session: ActorAddress[Any],
        request: Request,
        role: str | None,
        *,
        unchecked: bool = False,
    ) -> None:
        try:
            try:
                if not unchecked or self._is_permitted(session, request, role):
                    self._handle(session, request, role)
            except NoContentsYet as error:
                assert isinstance(request, ReadObject | RunQuery | CopyTo), request
                self._await_contents(session, request, role, error.table)
        except PenstockError as error:
            reply_error(session, request.request, error)
        except Exception as error:
            # An internal error fails only this request, not the controller and all other requests.
            log.exception("%s failed with an internal error", type(request).__name__)
            reply_error(session, request.request, to_penstock_error(error))

    def _await_contents(
        self,
        session: ActorAddress[Any],
        request: ReadObject | RunQuery | CopyTo,
        role: str | None,
        table: CatalogObject,
    ) -> None:
        """Serve a request once a source's table has its first contents."""
        again = partial(self._serve, session, request, role)
        held = self._held(request, role)
        self._reads.await_contents(session, request, table, again, held)

    def _handle(self, session: ActorAddress[Any], request: Request, role: str | None) -> None:
        match request:
            case WriteTables():
                self._write(session, request)
            case ReadObject(name=name) if is_relation(name):
                self._relations.read(session, request, role)
            case ReadObject():
                self._reads.read(session, request, self._held(request, role))
            case WaitFor():
                self._reads.wait_for(session, request, self._held(request, role))
            case RunQuery():
                self._queries.query(session, request, role)
            case DescribeQuery():
                self._queries.describe(session, request, role)
            case ExplainQuery(refresh_policy="none"):
                self._queries.explain(session, request)
            case ExplainQuery():
                self._statements.explain(session, request)
            case SubscribeObject():
                self._subscribes.subscribe(session, request, self._held(request, role))
            case EndRequest(number, target):
                # An unknown target is not an error: its answer may be on its way to the client.
                any(part.cancel(session.path, target) for part in self._parts)
                session.reply(RequestDone(number))
            case CopyTo():
                self._copies.copy(session, request, self._held(request, role))
            case CopyFromFiles():
                self._copies_from.copy(session, request, self._held(request, role))
            case ReadStatus(number):
                read_sinces(self._state, session, number, role)
            case ExplainView():
                self._explain(session, request, role)
            case ListActors(number):
                found = tuple(self.ctx.actors())
                session.reply(ActorReport(number, self.ctx.monotonic_ms(), found))
            case SetTracing(number, ratio):
                session.reply(self._set_tracing(number, ratio))
            case ListSources():
                session.reply(self._sources.report(request, role))
            case ForgetSource():
                self._sources.cleanup.forget(session, request)
            case _ if isinstance(request, CatalogStatement):
                self._statements.submit(session, request, role)
            case ChangeReplicas():
                self._change_replicas(session, request)
            case _ if isinstance(request, RoleStatement):
                self._roles.submit(session, request, role)
            case ListRoles():
                session.reply(self._roles.report(request))
            case CheckRight(number):
                # Already checked, as every request is.
                session.reply(RequestDone(number))
            case SignalSession(number, target, end):
                self._state.sessions.find(target).signal(end=end)
                session.reply(RequestDone(number))

    def _set_tracing(self, number: int, ratio: float | None) -> TracingReport:
        tracing = current_tracing()
        if ratio is not None:
            if tracing is None:
                raise InvalidUsage(
                    "tracing is not configured: start the service with --otlp URL or "
                    "--trace-file FILE"
                )
            tracing.ratio = ratio
            log.info("the sampling ratio of new traces is now %g", ratio)
        return TracingReport(number, tracing is not None, 0.0 if tracing is None else tracing.ratio)

    def _write(self, session: ActorAddress[Any], request: WriteTables) -> None:
        named = ((self._state.catalog.find(each.table), each) for each in request.changes)
        changes = tuple((self._target(entry), change) for entry, change in named)
        check_definitions(changes)
        try:
            enqueue = messages.EnqueueWrite(session, request.request, PlannedWrite(changes))
            # The controller never waits to send: if the writer's queue is full, the client gets
            # `ResourceBusy`.
            self._state.writer.send_nowait(enqueue)
        except WouldBlock:
            raise ResourceBusy("too many writes are waiting: try again later") from None

    def _target(self, entry: CatalogObject) -> TableTarget:
        if entry.kind != TABLE or entry.shard is None:
            raise InvalidUsage(f"cannot write to {entry.name}: it is a {entry.kind}, not a table")
        # Let the drop wait only for writes that the table writer already has.
        if self._statements.is_closing(entry.id):
            raise UnknownObject(f"table {entry.name} is being dropped")
        return TableTarget(entry.id, entry.name, entry.shard, entry.schema, entry.column_defaults)

    def _explain(self, session: ActorAddress[Any], request: ExplainView, role: str | None) -> None:
        entry = self._state.catalog.find(request.name)
        if entry.kind != VIEW or entry.plan is None:
            raise InvalidUsage(f"{entry.name} is a {entry.kind}: only views have a plan to explain")
        live = running_state_text(self._state, self._sources, role, entry)
        session.reply(RequestDone(request.request, f"{explain(entry.plan)}\n{live}"))

    # -- the replicas --------------------------------------------------------------------------

    def _change_replicas(self, session: ActorAddress[Any], request: ChangeReplicas) -> None:
        found = self._instance.change(session, request)
        if found is not None:
            session.reply(found)

    def _replicas_changed(self, message: ReplicasChanged | ReplicasNoted) -> None:
        try:
            if isinstance(message, ReplicasNoted):
                self._merged(self._instance.noted(message))
            else:
                message.session.reply(self._instance.changed(message))
        except PenstockError as error:
            reply_error(message.session, message.request.request, error)

    def _merged(self, merged: MergedResponses) -> None:
        for dataflow, upper in merged.regressed:
            index = self._state.catalog.of_dataflow(dataflow)
            if index is not None:
                self._state.frontiers.lower_index_upper(index.id, upper)
        self._reads.unread(merged.unread)
        for response in merged.responses:
            self._responded(response)

    def _responded(self, response: Response) -> None:
        match response:
            case Frontiers(id=id_):
                entry = self._state.catalog.of_dataflow(id_)
                # The index may have been dropped or replaced.
                if entry is None:
                    return
                moved = self._state.frontiers.report(replace(response, id=entry.id))
                self._sealed(entry.id if moved else None)
            case PeekResponse():
                self._reads.answered(response)
            case SubscribeResponse():
                self._subscribes.responded(response)
            case StatusResponse(id=id_):
                entry = self._state.catalog.of_dataflow(id_)
                if entry is not None:
                    self._state.frontiers.note(replace(response, id=entry.id))
                    note_report(self._state, entry, response.state, response.text)
                # Copies are dataflows that belong to no object.
                self._copies.noted(response)
            case CopyToResponse():
                self._copies.responded(response)
            case ConnectionRefused():
                log.warning("unexpected response from a replica: %s", response)
            case _:
                assert_never(response)

    def _connectors_responded(self, message: ReplicaResponse) -> None:
        moved = self._sources.responded(message)
        self._sealed(moved)
        if moved is not None:
            # A view over this table and clients' tables needs those sealed as far, too.
            self._ticks.advanced(moved)

    def _sealed(self, id_: ObjectId | None) -> None:
        """Resume the reads that wait for the object's upper, and tell maintenance that its shard
        has grown."""
        if id_ is None:
            return
        self._reads.advanced(id_)
        entry = self._state.catalog.get(id_)
        if entry is None:
            return
        self._statements.advanced(entry)
        settle(self._state, entry)
        if entry.shards and self._maintenance is not None:
            self._maintenance.reply(messages.ShardsAppended(entry.shards))

    # -- holds ---------------------------------------------------------------------------------

    def _move_holds(self) -> None:
        observe_objects(self._state)
        self._statements.drop_zombie_holds()
        # Before the moves, so that the hold of a subscribe that is cut off is dropped, not moved.
        self._subscribes.cut_off()
        self._holds.move(self._subscribes.hold_moves())

    def measures(self) -> Iterator[Measurement]:
        yield from object_measures(self._state)
        yield from self._sources.measures()
        yield from self._instance.measures()
        requests: dict[str, Sized] = {
            "read": self._reads,
            "query": self._queries,
            "subscribe": self._subscribes,
            "copy to": self._copies,
            "copy from": self._copies_from,
        }
        for kind, running in requests.items():
            yield Measurement(OPEN_REQUESTS, len(running), (kind,))

    def describe(self) -> str:
        return (
            f"{len(self._state.catalog.objects)} objects, {len(self._watched)} sessions, "
            f"{len(self._reads)} reads and waits, {len(self._queries)} queries, "
            f"{len(self._subscribes)} subscribes, "
            f"{len(self._copies) + len(self._copies_from)} copies; "
            f"{self._roles.describe()}; {self._statements.describe()}; {self._instance.describe()}"
        )
