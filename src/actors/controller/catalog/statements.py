"""Statements that change the catalog: queued, carried out strictly one at a time.

Each is an effect of `ddl.CatalogStore` on the present catalog. When it is durable the catalog in
memory follows, the replica is told, and only then the client.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec

from actors.controller.catalog.boot import describe_dataflow
from actors.controller.catalog.catalog import (
    CONNECTOR_KINDS,
    INDEX,
    TABLE,
    CatalogObject,
    CatalogSnapshot,
)
from actors.controller.catalog.ddl import CatalogChanged
from actors.controller.catalog.subscribed_views import SubscribedViews
from actors.controller.holds import RETAIN, dataflow_holder
from actors.controller.messages import CloseTable, ShardsDropped, TickTables
from actors.controller.state import ControllerState, reply_error, to_penstock_error
from actors.errors import PenstockError, StorageError
from actors.kernel import ActorAddress, RetryLoop
from actors.progress import EMPTY, ObjectId, ShardId, Time
from actors.protocol.api import (
    AlterSource,
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
from actors.protocol.compute import AllowCompaction, CreateDataflow, ScheduleDataflow
from actors.spans import forget_measures, span_below
from actors.telemetry import LAG_MS, STATEMENT, TRACEPARENT
from actors.views.explain import explain

log = logging.getLogger("penstock.controller")

Statement = (
    CreateTable
    | CreateView
    | CreateIndex
    | DropObject
    | CreateSource
    | AlterSource
    | DropSource
    | CreateSink
    | DropSink
)

DROP_HOLD_ROUNDS: Final = 5
"""Rounds in which a dropped dataflow's holds are dropped again, since it may still be moving
them."""


class StatementDone(msgspec.Struct, frozen=True, gc=False):
    """The running statement has ended; `result` is the change or the error."""

    result: CatalogChanged | PenstockError
    read_back: tuple[CatalogSnapshot, int | None] | None = None


class _Queued(msgspec.Struct, frozen=True, gc=False):
    """A statement, its session, and its trace context."""

    session: ActorAddress[Any]
    statement: Statement
    traceparent: str | None = None


class StatementQueue:
    """The queue of statements, and the consequences of each."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._queue: deque[_Queued] = deque()
        self._current: _Queued | None = None
        self._closing: set[ObjectId] = set()
        self._zombies: list[tuple[ShardId, str, int]] = []
        self._subscribed = SubscribedViews()
        self._opening = False

    def is_closing(self, id_: ObjectId) -> bool:
        """Return whether a table is being dropped: writes are refused."""
        return id_ in self._closing

    def submit(self, session: ActorAddress[Any], statement: Statement) -> None:
        """Queue a statement."""
        self._subscribed.submitted(session, statement)
        self._queue.append(_Queued(session, statement, TRACEPARENT.get()))
        self._next()

    def session_closed(self, path: str) -> None:
        """Drop the views of the subscribes of a closed session."""
        self._subscribed.session_closed(path)
        self._drop_left()

    def _drop_left(self) -> None:
        for session, name in self._subscribed.left():
            # Nobody takes the answer: the session is gone.
            self.submit(session, DropObject(0, name))

    def explain(self, session: ActorAddress[Any], request: ExplainQuery) -> None:
        """Answer with the plan of a view that is not created."""
        store, catalog = self._state.store, self._state.catalog

        async def answer() -> None:
            try:
                plan = await store.compile(
                    catalog, request.sql, request.conf, request.refresh_policy
                )
                session.reply(RequestDone(request.request, explain(plan)))
            except Exception as error:  # noqa: BLE001 - each is the client's answer
                reply_error(session, request.request, to_penstock_error(error))

        # Beside the queue: it changes nothing, and a statement may take long.
        self._state.ctx.effect(answer, done=lambda _: None)

    def describe(self) -> str:
        """Return the running statement, for people."""
        if self._current is None:
            return "no statement under way"
        statement = self._current.statement
        waiting = len(self._queue)
        return f"{type(statement).__name__} {statement.name} under way, {waiting} wait"

    def _next(self) -> None:
        if self._current is not None or not self._queue:
            return
        self._current = self._queue.popleft()
        queued = self._current
        self._state.ctx.effect(lambda: self._carry_out(queued), done=lambda done: done)

    async def _carry_out(self, queued: _Queued) -> StatementDone:
        statement = queued.statement
        values = (type(statement).__name__, statement.name)
        try:
            with span_below(queued.traceparent, STATEMENT, *values):
                return StatementDone(await self._change(statement))
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.error("a statement failed by a fault of this program", exc_info=error)
            named = to_penstock_error(error)
            if named.determinate:
                return StatementDone(named)
            # The change may be durable or not: the catalog that is read back decides (`_settled`).
            return StatementDone(named, await self._read_back())

    async def _read_back(self) -> tuple[CatalogSnapshot, int | None]:
        """Return the durable catalog, however long the store takes."""
        retry = RetryLoop(self._state.settings)
        # Retried forever: with another seqno than the durable one, every later statement would
        # fail.
        while True:
            try:
                return await self._state.store.read_back()
            except StorageError as error:
                log.warning("the catalog cannot be read back, trying again: %s", error)
            await retry.pause()

    def _change(self, statement: Statement) -> Coroutine[Any, Any, CatalogChanged]:
        state = self._state
        store, catalog, seqno = state.store, state.catalog, state.seqno
        match statement:
            case CreateTable():
                return self._create_table(statement)
            case CreateView():
                return store.create_view(catalog, seqno, statement)
            case CreateIndex():
                return store.create_index(catalog, seqno, statement)
            case DropObject():
                return self._drop(statement)
        connectors = state.connector_store
        match statement:
            case CreateSource():
                return connectors.create_source(catalog, seqno, statement)
            case AlterSource():
                return connectors.alter_source(catalog, seqno, statement)
            case DropSource():
                return connectors.drop_source(catalog, seqno, statement.name)
            case CreateSink():
                return connectors.create_sink(catalog, seqno, statement)
            case DropSink():
                return connectors.drop_sink(catalog, seqno, statement.name)

    async def _create_table(self, statement: CreateTable) -> CatalogChanged:
        """Create a table; the first one is given a first time, so that views on it can start."""
        state = self._state
        changed = await state.store.create_table(state.catalog, state.seqno, statement)
        if state.frontiers.tables_upper == 0 and state.writer is not None:
            with suppress(PenstockError):  # `open_times` tries again
                await state.writer.ask(TickTables)
        return changed

    def open_times(self) -> None:
        """Give the tables a first time, if they have none."""
        state = self._state
        tables = any(entry.kind == TABLE for entry in state.catalog.objects)
        # Before its first time neither a table nor a view on it can be read. A crash or a store's
        # failure may have come between the first table and its time.
        if tables and not self._opening and state.frontiers.tables_upper == 0:
            self._opening = True
            state.ctx.effect(self._open_times, done=lambda _: None)

    async def _open_times(self) -> None:
        state = self._state
        assert state.writer is not None, "statements are carried out by it"
        retry = RetryLoop(state.settings)
        while state.frontiers.tables_upper == 0:
            try:
                await state.writer.ask(TickTables)
                break
            except PenstockError as error:
                log.warning("the tables have no first time yet, trying again: %s", error)
            await retry.pause()
        self._opening = False

    async def _drop(self, statement: DropObject) -> CatalogChanged:
        state = self._state
        entry = state.catalog.find(statement.name)
        # Only for its check: an object in use is refused before its writes are.
        state.catalog.remove(entry, *state.catalog.subscribed_on(entry.id))
        if entry.kind != TABLE or state.writer is None:
            return await state.store.drop(state.catalog, state.seqno, entry)
        self._closing.add(entry.id)
        try:
            # Writes that were accepted earlier must find the shard.
            await state.writer.ask(lambda reply: CloseTable(entry.id, reply))
            return await state.store.drop(state.catalog, state.seqno, entry)
        finally:
            self._closing.discard(entry.id)

    # -- after a statement ---------------------------------------------------------------------

    def done(self, message: StatementDone) -> tuple[CatalogObject, ...]:
        """Take the end of a statement. Return the objects that it dropped."""
        assert self._current is not None
        queued, self._current = self._current, None
        session, statement = queued.session, queued.statement
        result = message.result
        if message.read_back is not None and isinstance(result, PenstockError):
            result = self._settled(statement, message.read_back, result)
        dropped: tuple[CatalogObject, ...] = ()
        if isinstance(result, CatalogChanged):
            self._state.catalog, self._state.seqno = result.catalog, result.seqno
            if result.created is not None:
                self._created(result.created, queued.traceparent)
                for entry in result.also:
                    self._track(entry)
            if result.dropped is not None:
                dropped = (result.dropped, *result.also)
                for entry in dropped:
                    self._dropped(entry)
            for notice in result.notices:
                log.warning("%s %s: %s", type(statement).__name__, statement.name, notice)
            session.reply(RequestDone(statement.request, "\n".join(result.notices)))
        else:
            self._subscribed.failed(statement, result)
            reply_error(session, statement.request, result)
        self._next()
        return dropped

    def _settled(
        self,
        statement: Statement,
        found: tuple[CatalogSnapshot, int | None],
        error: PenstockError,
    ) -> CatalogChanged | PenstockError:
        """Return the change that the durable catalog shows, or the error."""
        before, (catalog, seqno) = self._state.catalog, found
        # Even if no object came or went: the next statement needs the present seqno.
        self._state.seqno = seqno
        if seqno is None:
            return error
        came = [each for each in catalog.objects if before.get(each.id) is None]
        went = [each for each in before.objects if catalog.get(each.id) is None]
        if came:
            return CatalogChanged(catalog, seqno, created=came[0], also=tuple(came[1:]))
        if went:
            return CatalogChanged(catalog, seqno, dropped=went[0], also=tuple(went[1:]))
        return error

    def _track(self, entry: CatalogObject) -> None:
        """Track the retained history and the upper of a new object."""
        state = self._state
        if entry.shard is not None:
            retain = entry.retain_history_ms or state.settings.retain_history_ms
            state.retain.track(entry.shard, retain, entry.as_of)
        state.frontiers.track(entry, 0)

    def _created(self, entry: CatalogObject, traceparent: str | None) -> None:
        self._track(entry)
        if entry.kind == TABLE:
            self.open_times()
        elif entry.kind in CONNECTOR_KINDS:
            self._state.connector_created(entry)
        else:
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
        state.frontiers.track(entry, upper, as_of if entry.kind == INDEX else 0)
        state.command(CreateDataflow(describe_dataflow(state.catalog, entry, as_of)))
        state.command(ScheduleDataflow(entry.id, traceparent))

    def _dropped(self, entry: CatalogObject) -> None:
        state = self._state
        self._subscribed.dropped(entry.name)
        state.frontiers.forget(entry.id)
        forget_measures(entry.name, LAG_MS)
        for own in entry.shards:
            state.retain.forget(own)
        if entry.shards and state.maintenance is not None:
            state.maintenance.reply(ShardsDropped(entry.shards))
        if entry.kind in CONNECTOR_KINDS:
            state.connector_dropped(entry)
        if entry.kind == TABLE or entry.kind in CONNECTOR_KINDS:
            return
        state.command(AllowCompaction(entry.id, EMPTY))
        for id_ in entry.depends:
            below = state.catalog.get(id_)
            # A view of a subscribe is dropped together with what it reads.
            if below is not None and below.shard is not None:
                self._zombies.append((below.shard, dataflow_holder(entry.id), DROP_HOLD_ROUNDS))

    def drop_zombie_holds(self) -> None:
        """Drop the holds of dropped dataflows, for one more round. Drops views of ended subscribes
        again whose drop failed."""
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
