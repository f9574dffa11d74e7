"""Statements that change the catalog: queued and carried out strictly one at a time.

Each is an effect of `ddl.CatalogStore` on the current catalog. Once it is durable, the catalog in
memory follows, then the replicas are told, and only then the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec

from actors.control.controller.catalog.added_columns import add_columns, grown_schema
from actors.control.controller.catalog.alterations import (
    alter_object,
    create_plain_view,
)
from actors.control.controller.catalog.backlog import (
    DropTakenShard,
    OwnStatement,
    QueuedStatement,
    RestartView,
    StatementBacklog,
    SwapView,
)
from actors.control.controller.catalog.boot import describe_dataflow, last_sealed_time
from actors.control.controller.catalog.catalog import (
    CONNECTOR_KINDS,
    INDEX,
    PLAIN_VIEW,
    SOURCE_TABLE,
    TABLE,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import CatalogChanged, cascade_notices
from actors.control.controller.catalog.replacements import (
    drop_taken_shard,
)
from actors.control.controller.catalog.subscribed_views import SubscribedViews
from actors.control.controller.catalog.view_replacements import ViewReplacements
from actors.control.controller.connectors.objects import ConnectorObjects
from actors.control.controller.holds import RETAIN, dataflow_holder
from actors.control.controller.messages import AlterTable, CloseTable, ShardsDropped, TickTables
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.control.controller.tables.groups import TableTarget
from actors.engine.views.explain import explain
from actors.model.protocol.api import (
    AlterObject,
    AlterSource,
    CatalogStatement,
    CreateIndex,
    CreateSink,
    CreateSource,
    CreateTable,
    CreateView,
    DropObject,
    DropSink,
    DropSource,
    ExplainQuery,
    RequestDone,
)
from actors.model.protocol.compute import AllowCompaction, CreateDataflow, ScheduleDataflow
from actors.runtime.errors import (
    PenstockError,
    StorageError,
)
from actors.runtime.kernel import ActorAddress, RetryLoop
from actors.runtime.progress import EMPTY, ObjectId, ShardId, Time
from actors.runtime.spans import span_below, use_context
from actors.runtime.telemetry import STATEMENT, TRACEPARENT

log = logging.getLogger("penstock.controller")

DROP_HOLD_ROUNDS: Final = 5
"""How many times the holds of a dropped dataflow are dropped, since it may still be moving them."""


class StatementDone(msgspec.Struct, frozen=True, gc=False):
    """The running statement has ended. `result` is the change or the error."""

    result: CatalogChanged | PenstockError
    read_back: tuple[CatalogSnapshot, int | None] | None = None
    """The durable catalog and its seqno, if the error left it open whether the change was made."""


class StatementQueue:
    """Queues statements and applies the consequences of each."""

    def __init__(
        self,
        state: ControllerState,
        connectors: ConnectorObjects,
        owned: Callable[[str | None, tuple[CatalogObject, ...]], None],
    ) -> None:
        """Start with an empty queue. `owned` is called with a session's role and the objects that
        the session created."""
        self._state = state
        self._connectors = connectors
        self._owned = owned
        self._backlog = StatementBacklog()
        self._replacements = ViewReplacements(state, self._backlog, self._next)
        self._closing: set[ObjectId] = set()
        """Tables that are being dropped: writes to them are refused."""
        self._zombies: list[tuple[ShardId, str, int]] = []
        """Holds of dropped dataflows, each as shard, holder and the number of rounds left."""
        self._subscribed = SubscribedViews()
        self._opening = False
        """True while the tables are being given their first time."""

    def is_closing(self, id_: ObjectId) -> bool:
        """Return whether a table is being dropped, so that writes to it are refused."""
        return id_ in self._closing

    def submit(
        self, session: ActorAddress[Any], statement: CatalogStatement, role: str | None = None
    ) -> None:
        """Queue a statement from a session with this role."""
        self._subscribed.submitted(session, statement)
        self._backlog.waiting.append(QueuedStatement(session, statement, TRACEPARENT.get(), role))
        self._next()

    def _drop_left(self) -> None:
        for session, name in self._subscribed.left():
            # The answer is discarded: the session is closed.
            self.submit(session, DropObject(0, name))

    def explain(self, session: ActorAddress[Any], request: ExplainQuery) -> None:
        """Answer with the plan that a view would have; nothing is created."""
        store, catalog = self._state.store, self._state.catalog

        async def answer() -> None:
            try:
                plan = await store.compile(
                    catalog, request.sql, request.conf, request.refresh_policy
                )
                session.reply(RequestDone(request.request, explain(plan)))
            except Exception as error:  # noqa: BLE001 - each is the client's answer
                reply_error(session, request.request, to_penstock_error(error))

        # Runs outside the queue: it changes nothing, and a queued statement may take long.
        self._state.ctx.effect(answer, done=lambda _: None)

    def describe(self) -> str:
        """Return a readable description of the running statement."""
        if self._backlog.running is None:
            return "no statement is running"
        statement = self._backlog.running.statement
        waiting = len(self._backlog.waiting)
        return f"{type(statement).__name__} {statement.name} is running, {waiting} are waiting"

    def _next(self) -> None:
        backlog = self._backlog
        if backlog.running is not None or not backlog.waiting:
            return
        queued = backlog.running = backlog.waiting.popleft()
        self._state.ctx.effect(lambda: self._carry_out(queued), done=lambda done: done)

    async def _carry_out(self, queued: QueuedStatement) -> StatementDone:
        statement = queued.statement
        values = (type(statement).__name__, statement.name)
        try:
            with span_below(queued.traceparent, STATEMENT, *values):
                return StatementDone(await self._change(statement, queued.role))
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.error("a statement failed with an internal error", exc_info=error)
            named = to_penstock_error(error)
            if named.determinate:
                return StatementDone(named)
            # The change may or may not be durable: `_settled` decides from the catalog read back.
            return StatementDone(named, await self._read_back())

    async def _read_back(self) -> tuple[CatalogSnapshot, int | None]:
        """Read the durable catalog, retrying until the store answers."""
        retry = RetryLoop(self._state.settings)
        # Retried forever: every later statement would fail if our seqno were not the durable one.
        while True:
            try:
                catalog, seqno = await self._state.store.read_back()
                former = self._state.catalog
                kept = {
                    id_: found
                    for id_, found in former.quarantined.items()
                    if catalog.get(id_) == former.by_id(id_)
                }
                return catalog.quarantine(kept), seqno
            except StorageError as error:
                log.warning("cannot read the catalog back, retrying: %s", error)
            await retry.pause()

    def _change(
        self, statement: CatalogStatement | OwnStatement, role: str | None
    ) -> Coroutine[Any, Any, CatalogChanged]:
        state = self._state
        store, catalog, seqno = state.store, state.catalog, state.seqno
        replacements = self._replacements
        match statement:
            case CreateTable():
                return self._create_table(statement)
            case CreateView(plain=True):
                return create_plain_view(store, catalog, seqno, statement)
            case CreateView(replace=True):
                return replacements.begin(statement)
            case CreateView():
                return store.create_view(catalog, seqno, statement)
            case AlterObject():
                return self._alter(statement)
            case SwapView():
                return replacements.swap(statement)
            case DropTakenShard(id=id_):
                return drop_taken_shard(store, catalog, seqno, replacements.find_own(id_))
            case RestartView(id=id_):
                return replacements.restart(replacements.find_own(id_))
            case CreateIndex():
                return store.create_index(catalog, seqno, statement)
            case DropObject():
                return self._drop(statement)
        connectors = state.connector_store
        match statement:
            case CreateSource():
                free = state.access.is_free(role)
                return connectors.create_source(catalog, seqno, statement, privileged=free)
            case AlterSource():
                return connectors.alter_source(catalog, seqno, statement)
            case DropSource():
                return connectors.drop_source(catalog, seqno, statement)
            case CreateSink():
                return connectors.create_sink(catalog, seqno, statement)
            case DropSink():
                return connectors.drop_sink(catalog, seqno, statement.name)

    async def _alter(self, statement: AlterObject) -> CatalogChanged:
        """Change an object's definition. Columns are added to a table between two of its writes."""
        state = self._state
        if not statement.add_columns:
            return await alter_object(state.store, state.catalog, state.seqno, statement)
        entry = state.catalog.find(statement.name)
        schema = grown_schema(entry, statement.add_columns)

        async def work() -> CatalogChanged:
            comments = statement.column_comments
            found = state.store, state.catalog, state.seqno
            return await add_columns(*found, entry, schema, comments)

        if entry.kind == SOURCE_TABLE:
            columns = schema.columns[len(entry.schema.columns) :]
            described = state.connector_store.describe_added(state.catalog, entry, columns)
            schema = grown_schema(entry, await described)
            return await work()
        target = TableTarget(entry.id, entry.name, entry.shard or "", schema)
        return await state.writer.ask(lambda reply: AlterTable(target, work, reply))

    async def _create_table(self, statement: CreateTable) -> CatalogChanged:
        """Create a table. The first table gets a first time, so that views on it can start."""
        state = self._state
        changed = await state.store.create_table(state.catalog, state.seqno, statement)
        if state.frontiers.tables_upper == 0:
            with suppress(PenstockError):  # `open_times` tries again
                await state.writer.ask(TickTables)
        return changed

    def open_times(self) -> None:
        """Set the tables' first time, if they have none."""
        state = self._state
        tables = any(entry.kind == TABLE for entry in state.catalog.objects)
        # Until then neither a table nor a view on it can be read. A crash or a store failure may
        # have come between the creation of the first table and its first time.
        if tables and not self._opening and state.frontiers.tables_upper == 0:
            self._opening = True
            state.ctx.effect(self._open_times, done=lambda _: None)

    async def _open_times(self) -> None:
        state = self._state
        retry = RetryLoop(state.settings)
        while state.frontiers.tables_upper == 0:
            try:
                await state.writer.ask(TickTables)
                break
            except PenstockError as error:
                log.warning("cannot give the tables their first time, retrying: %s", error)
            await retry.pause()
        self._opening = False

    async def _drop(self, statement: DropObject) -> CatalogChanged:
        state = self._state
        entry = state.catalog.find(statement.name, quarantined=True)
        catalog = state.catalog
        # Views of subscribes are always dropped with what they read, even without CASCADE.
        also = catalog.dropped_with(entry) if statement.cascade else catalog.subscribed_on(entry.id)
        # Called only for its check: refuse an object in use before refusing its writes.
        state.catalog.remove(entry, *also)
        notices = cascade_notices(also) if statement.cascade else ()
        if entry.kind != TABLE:
            changed = await state.store.drop(state.catalog, state.seqno, entry, also)
            return msgspec.structs.replace(changed, notices=notices)
        self._closing.add(entry.id)
        try:
            # Wait for writes accepted earlier, which need the shard.
            await state.writer.ask(lambda reply: CloseTable(entry.id, reply))
            changed = await state.store.drop(state.catalog, state.seqno, entry, also)
            return msgspec.structs.replace(changed, notices=notices)
        finally:
            self._closing.discard(entry.id)

    # -- replacing a view ----------------------------------------------------------------------

    def advanced(self, entry: CatalogObject) -> None:
        """Continue a replacement, now that the upper of a view has advanced."""
        self._replacements.advanced(entry)

    def cancel(self, session: str, request: int) -> bool:
        """Abandon the replacement that a request started, if its view is still being computed.
        Return False if there is none. Other statements are short and cannot be canceled."""
        return self._replacements.cancel(session, request)

    def session_closed(self, session: str) -> None:
        """Abandon the replacements that a closed session started, and drop the views of its
        subscribes."""
        self._subscribed.session_closed(session)
        self._drop_left()
        self._replacements.session_closed(session)

    # -- after a statement ---------------------------------------------------------------------

    def done(self, message: StatementDone) -> tuple[CatalogObject, ...]:
        """Handle the end of the running statement. Return the objects that it dropped."""
        queued = self._backlog.running
        assert queued is not None
        self._backlog.running = None
        self._replacements.statement_ended(queued)
        session, statement = queued.session, queued.statement
        result = message.result
        if message.read_back is not None and isinstance(result, PenstockError):
            result = self._settled(statement, message.read_back, result)
        dropped: tuple[CatalogObject, ...] = ()
        if isinstance(result, CatalogChanged):
            dropped = self._changed(result, queued)
            for notice in result.notices:
                log.warning("%s %s: %s", type(statement).__name__, statement.name, notice)
            self._replacements.answer(queued, result)
        elif not isinstance(statement, OwnStatement):
            self._subscribed.failed(statement, result)
            reply_error(session, statement.request, result)
        else:
            # The next report of an upper starts it again (`advanced`).
            log.warning("%s %s: %s", type(statement).__name__, statement.name, result)
        self._replacements.restart_ended(queued)
        self._next()
        return dropped

    def _changed(
        self, result: CatalogChanged, queued: QueuedStatement
    ) -> tuple[CatalogObject, ...]:
        """Apply a change of the catalog. Return the objects that it dropped."""
        before = self._state.catalog
        self._state.catalog, self._state.seqno = result.catalog, result.seqno
        if result.created is not None:
            self._created(result.created, queued.traceparent)
            for entry in result.also:
                self._track(entry)
            self._owned(queued.role, (result.created, *result.also))
        for entry in result.altered:
            self._altered(before, entry, queued.traceparent)
        if result.dropped is None:
            return ()
        dropped = (result.dropped, *(result.also if result.created is None else ()))
        for entry in dropped:
            self._dropped(entry)
        # Treat a view that got another shard as dropped, so that its readers and subscribers start
        # again.
        moved = (before.by_id(entry.id) for entry in result.altered)
        return (*dropped, *(each for each in moved if self._has_moved(each)))

    def _has_moved(self, before: CatalogObject) -> bool:
        return self._state.catalog.by_id(before.id).shard != before.shard

    def _settled(
        self,
        statement: CatalogStatement | OwnStatement,
        found: tuple[CatalogSnapshot, int | None],
        error: PenstockError,
    ) -> CatalogChanged | PenstockError:
        """Return the change that the durable catalog shows, or the error if there is none."""
        before, (catalog, seqno) = self._state.catalog, found
        # Needed even if no object came or went: the next statement must use the current seqno.
        self._state.seqno = seqno
        if seqno is None:
            return error
        came = [each for each in catalog.objects if before.get(each.id) is None]
        went = [each for each in before.objects if catalog.get(each.id) is None]
        altered = tuple(each for each in catalog.objects if before.get(each.id) not in (None, each))
        if came:
            return CatalogChanged(catalog, seqno, created=came[0], also=tuple(came[1:]))
        if went:
            also = tuple(went[1:])
            return CatalogChanged(catalog, seqno, dropped=went[0], also=also, altered=altered)
        if altered:
            return CatalogChanged(catalog, seqno, altered=altered)
        return error

    def _track(self, entry: CatalogObject) -> None:
        """Start tracking the retained history and the upper of a new object."""
        state = self._state
        if entry.shard is not None:
            retain = entry.retain_history_ms or state.settings.retain_history_ms
            state.retain.track(entry.shard, retain, entry.as_of)
        state.frontiers.track(entry, 0, now_ms=state.ctx.now_ms())

    def _created(self, entry: CatalogObject, traceparent: str | None) -> None:
        self._track(entry)
        if entry.kind == TABLE:
            self.open_times()
        elif entry.kind in CONNECTOR_KINDS:
            self._connectors.created(entry)
        elif entry.kind != PLAIN_VIEW:
            self.build(entry, entry.as_of, traceparent=traceparent)

    def build(
        self,
        entry: CatalogObject,
        as_of: Time,
        upper: Time = 0,
        traceparent: str | None = None,
    ) -> None:
        """Run the dataflow of a view or an index on the replicas, from `as_of` on."""
        state = self._state
        readable_from = as_of if entry.kind == INDEX else 0
        state.frontiers.track(entry, upper, readable_from, now_ms=state.ctx.now_ms())
        state.command(CreateDataflow(describe_dataflow(state.catalog, entry, as_of)))
        with use_context(traceparent):
            state.command(ScheduleDataflow(entry.dataflow_id))

    def _altered(
        self, catalog: CatalogSnapshot, entry: CatalogObject, traceparent: str | None
    ) -> None:
        """Apply a change of an object's definition to the running parts of the service. `catalog`
        contains the former definition, `entry` the new one."""
        state, before = self._state, catalog.by_id(entry.id)
        self._forget_shards(before)
        if entry.shard is not None and entry.retain_history_ms != before.retain_history_ms:
            retain = entry.retain_history_ms or state.settings.retain_history_ms
            state.retain.track(entry.shard, retain, state.retain.since(entry.shard))
        if entry.kind == SOURCE_TABLE and entry.schema != before.schema:
            self._connectors.created(entry)
        if entry.dataflow_id == before.dataflow_id:
            return
        self._end_dataflow(before)
        state.faults.forget(entry.id)
        running = catalog.of_dataflow(entry.dataflow_id)
        if running is not None:
            # This dataflow maintained the replacement of the view, and keeps running.
            upper = state.frontiers.upper(running)
            state.frontiers.track(entry, upper, now_ms=state.ctx.now_ms())
            return
        if entry.kind == INDEX:
            # Indexes are in memory: a new one is readable once it is built.
            self.build(entry, entry.as_of, traceparent=traceparent)
            return
        upper = state.frontiers.upper(before)
        as_of = max(last_sealed_time(upper), entry.as_of)
        self.build(entry, as_of, upper, traceparent)

    def _dropped(self, entry: CatalogObject) -> None:
        state = self._state
        self._subscribed.dropped(entry.name)
        state.frontiers.forget(entry.id)
        self._forget_shards(entry)
        if entry.kind in CONNECTOR_KINDS:
            self._connectors.dropped(entry)
        # Keep a dataflow that now maintains another object.
        elif entry.kind not in (TABLE, PLAIN_VIEW) and (
            state.catalog.of_dataflow(entry.dataflow_id) is None
        ):
            self._end_dataflow(entry)
        # Do this last: a quarantined object runs nowhere, so there is no dataflow to end.
        state.faults.forget(entry.id)

    def _forget_shards(self, before: CatalogObject) -> None:
        """Forget those of an object's shards that belong to no object any more."""
        state = self._state
        named = {shard for entry in state.catalog.objects for shard in entry.shards}
        gone = tuple(shard for shard in before.shards if shard not in named)
        for shard in gone:
            state.retain.forget(shard)
        if gone and state.maintenance is not None:
            state.maintenance.reply(ShardsDropped(gone))

    def _end_dataflow(self, entry: CatalogObject) -> None:
        """Drop an object's dataflow, and its holds for as long as it may still move them."""
        state, holder = self._state, dataflow_holder(entry.dataflow_id)
        if not state.faults.is_quarantined(entry.id):
            state.command(AllowCompaction(entry.dataflow_id, EMPTY))
        below = [state.catalog.get(id_) for id_ in entry.depends]
        shards = [each.shard for each in below if each is not None and each.shard is not None]
        # If the object was replaced, another dataflow owns its shards by now.
        named = {shard for each in state.catalog.objects for shard in each.shards}
        shards += [shard for shard in entry.shards if shard in named]
        for shard in shards:
            self._zombies.append((shard, holder, DROP_HOLD_ROUNDS))

    def drop_zombie_holds(self) -> None:
        """Drop the holds of dropped dataflows once more, and retry dropping views of ended
        subscribes."""
        self._drop_left()
        state = self._state
        zombies, self._zombies = self._zombies, []
        for shard, holder, rounds in zombies:
            assert holder != RETAIN
            state.ctx.effect(
                lambda shard=shard, holder=holder: state.store.drop_hold(shard, holder),  # type: ignore[misc]
                done=lambda _: None,
            )
            if rounds > 1:
                self._zombies.append((shard, holder, rounds - 1))
