"""Statements that replace a view (CREATE OR REPLACE), which take as long as computing the new one.

The statement creates the new view alongside the old one and is answered once the new one has
replaced it. The remaining steps are internal statements, which `advanced` queues as uppers advance.
`replacements` contains what each does to the catalog.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from actors.control.controller.catalog.alterations import (
    alter_object,
    check_circle,
    check_dependents,
    find_replaced,
)
from actors.control.controller.catalog.backlog import (
    DropTakenShard,
    OwnStatement,
    QueuedStatement,
    RestartView,
    StatementBacklog,
    SwapView,
)
from actors.control.controller.catalog.catalog import VIEW, CatalogObject
from actors.control.controller.catalog.ddl import CatalogChanged
from actors.control.controller.catalog.replacements import (
    check_computed,
    is_extension,
    rename_view,
    replacement_name,
    restart_view,
    swap_view,
)
from actors.control.controller.messages import TickTables
from actors.control.controller.state import ControllerState, reply_error
from actors.model.protocol.api import AlterObject, CreateView, RequestDone
from actors.model.protocol.compute import AllowCompaction
from actors.model.protocol.relations import check_name
from actors.runtime.errors import (
    DeadlineExceeded,
    ObjectInUse,
    OperationCanceled,
    PenstockError,
    StorageError,
    UnknownObject,
    WriterFenced,
)
from actors.runtime.kernel import RetryLoop
from actors.runtime.progress import EMPTY, ObjectId, is_empty

log = logging.getLogger("penstock.controller")


class ViewReplacements:
    """The views that are being replaced, and the statements to answer afterwards."""

    def __init__(
        self, state: ControllerState, backlog: StatementBacklog, go: Callable[[], None]
    ) -> None:
        """Share the queue of statements. `go` starts its next statement if none is running."""
        self._state = state
        self._backlog = backlog
        self._go = go
        self._replacing: dict[ObjectId, QueuedStatement] = {}
        """Statements to answer once the replacement is done: by the id of the view being computed,
        and later by the id of the view that took over its contents."""
        self._given_up: set[tuple[str, int]] = set()
        """Session and request of the running statement, if that was canceled."""
        self._ended: dict[ObjectId, ObjectId] = {}
        """Views whose dataflow was stopped so that the replacement gets ahead, each with that
        dataflow's id."""

    # -- starting and canceling --------------------------------------------------------------------

    async def begin(self, statement: CreateView) -> CatalogChanged:
        """Create the replacement of an existing view; or simply the view, if there is none yet."""
        state = self._state
        store, catalog, seqno = state.store, state.catalog, state.seqno
        entry = find_replaced(catalog, check_name("view", statement.name), VIEW)
        if entry is None:
            return await store.create_view(catalog, seqno, statement)
        if catalog.replacement(entry.id) is not None:
            raise ObjectInUse(f"view {entry.name} is already being replaced: wait until that ends")
        idle = entry.id in catalog.quarantined
        if idle:
            # Called only for its check: a quarantined view cannot hand over its shard.
            catalog.remove(entry)
        elif (entry.written, entry.conf) == (statement.sql, statement.conf):
            return await alter_object(store, catalog, seqno, _as_alteration(entry, statement))
        sql, conf, policy = statement.sql, statement.conf, statement.refresh_policy
        plan = await store.compile(catalog, sql, conf, policy)
        inputs = [catalog.find(name).id for name in plan.inputs]
        check_circle(catalog, entry, [*inputs, *catalog.inlined(sql)[1]])
        if not is_extension(entry.schema, plan.output):
            # Called only for its check: nothing may depend on a view whose columns change.
            catalog.remove(entry)
        elif plan.output != entry.schema:
            users = catalog.dependents(entry.id)
            await check_dependents(store, catalog, entry, plan.output, users)
        name = replacement_name(entry.name)
        return await store.add_view(catalog, seqno, name, statement, plan, entry.id)

    def advanced(self, entry: CatalogObject) -> None:
        """Continue a replacement, now that the upper of a view has advanced."""
        upper = self._state.frontiers.upper(entry)
        if entry.replaces and upper > entry.as_of:
            self._queue_step(entry, SwapView)
        elif entry.taken_shard is not None and upper > entry.rebuilt_at:
            self._queue_step(entry, DropTakenShard)

    def _queue_step(self, entry: CatalogObject, step: type[SwapView | DropTakenShard]) -> None:
        if any(
            isinstance(each.statement, step) and each.statement.id == entry.id
            for each in self._backlog.all
        ):
            return
        waiting = self._replacing.get(entry.id)
        # After a restart no client waits for the answer.
        session, request = self._state.ctx.self, 0
        if waiting is not None:
            session, request = waiting.session, waiting.statement.request
        statement = step(entry.id, entry.name, request)
        self._backlog.waiting.append(QueuedStatement(session, statement))
        self._go()

    def cancel(self, session: str, request: int) -> bool:
        """Abandon the replacement that a request started, if its view is still being computed.
        Return False if there is none. Other statements are short and cannot be canceled."""
        wanted = session, request
        for id_, queued in self._replacing.items():
            if queued.key == wanted:
                entry = self._state.catalog.get(id_)
                if entry is not None and entry.replaces:
                    error = OperationCanceled("canceled on request")
                    statement = SwapView(id_, entry.name, request, error)
                    self._backlog.waiting.append(
                        QueuedStatement(queued.session, statement, queued.traceparent)
                    )
                    self._go()
                return True
        current = self._backlog.running
        if current is not None and current.key == wanted and current.replaces:
            # Its view may be in the catalog already: `answer` abandons it when that is known.
            self._given_up.add(wanted)
            return True
        for queued in self._backlog.waiting:
            if queued.key == wanted and queued.replaces:
                self._backlog.waiting.remove(queued)
                error = OperationCanceled("canceled on request")
                reply_error(queued.session, request, error)
                return True
        return False

    def session_closed(self, session: str) -> None:
        """Abandon the replacements that a closed session started."""
        for queued in (*self._replacing.values(), *self._backlog.all):
            if queued.session.path == session:
                self.cancel(session, queued.statement.request)

    # -- the service's own statements --------------------------------------------------------------

    async def swap(self, statement: SwapView) -> CatalogChanged:
        """Replace a view by its replacement. If that fails, the old view stays."""
        state = self._state
        store, catalog, seqno = state.store, state.catalog, state.seqno
        replacement = self.find_own(statement.id)
        entry = self.find_own(replacement.replaces)
        try:
            if statement.error is not None:
                raise statement.error
            await check_computed(state.persist, entry.name, replacement)
            ended = is_empty(state.frontiers.upper(entry)) or is_empty(
                state.frontiers.upper(replacement)
            )
            if (
                ended
                or entry.id in catalog.quarantined
                or not is_extension(entry.schema, replacement.schema)
            ):
                return await rename_view(store, catalog, seqno, entry, replacement)
            return await self._swap_shard(entry, replacement)
        except PenstockError as error:
            if not error.determinate or isinstance(error, WriterFenced):
                raise
            # The holds that were taken for the dataflow that would have taken over.
            await store.drop_holds(catalog, replace(replacement, dataflow=catalog.new_id))
            changed = await store.drop(catalog, seqno, replacement)
            return replace(changed, refusal=error)

    def find_own(self, id_: ObjectId) -> CatalogObject:
        """Return the object of an internal statement. Raises `UnknownObject`."""
        entry = self._state.catalog.get(id_)
        if entry is None:
            raise UnknownObject(f"object {id_} was dropped in the meantime")
        return entry

    async def _swap_shard(self, entry: CatalogObject, replacement: CatalogObject) -> CatalogChanged:
        """Swap in a replacement that keeps the old shard, once its upper is beyond the old
        view's."""
        state = self._state
        limit_ms = state.settings.replace_deadline_ms
        begun = state.ctx.monotonic_ms()
        retry = RetryLoop(state.settings)
        while state.ctx.monotonic_ms() < begun + limit_ms:
            changed = await swap_view(
                state.store,
                state.catalog,
                state.seqno,
                entry,
                replacement,
                ended=entry.id in self._ended,
            )
            if changed is not None:
                return changed
            if entry.id not in self._ended:
                # From here on the old view does not advance, so that the new one can pass it.
                self._ended[entry.id] = entry.dataflow_id
                state.command(AllowCompaction(entry.dataflow_id, EMPTY))
            # Without writes no upper would move, and the two would stay equal.
            await state.writer.ask(TickTables)
            await retry.pause()
        raise DeadlineExceeded(
            f"the new view {entry.name} did not catch up with the old one within {limit_ms} ms "
            f"(replace_deadline_ms): the old one stays"
        )

    async def restart(self, entry: CatalogObject) -> CatalogChanged:
        """Continue a view with a new dataflow, retrying until the store answers."""
        state = self._state
        retry = RetryLoop(state.settings)
        while True:
            try:
                return await restart_view(state.store, state.catalog, state.seqno, entry, entry)
            except StorageError as error:
                if not error.determinate:
                    raise
                log.warning("cannot restart view %s, retrying: %s", entry.name, error)
            await retry.pause()

    # -- after a statement ---------------------------------------------------------------------

    def statement_ended(self, queued: QueuedStatement) -> None:
        """Forget cancellations of statements other than the one that has ended."""
        self._given_up &= {queued.key}

    def answer(self, queued: QueuedStatement, result: CatalogChanged) -> None:
        """Answer a statement, or record that it is answered when the replacement is done."""
        statement = queued.statement
        asked = queued
        if isinstance(statement, OwnStatement):
            waiting = self._replacing.pop(statement.id, None)
            if waiting is None:
                return
            asked = waiting
        elif result.created is not None and result.created.replaces:
            self._replacing[result.created.id] = queued
            if queued.key in self._given_up:
                self.cancel(*queued.key)
            return
        taking = next((each for each in result.altered if each.taken_shard is not None), None)
        if result.refusal is not None:
            reply_error(asked.session, asked.statement.request, result.refusal)
        elif isinstance(statement, SwapView) and taking is not None:
            self._replacing[taking.id] = asked
        else:
            text = "\n".join(result.notices)
            asked.session.reply(RequestDone(asked.statement.request, text))
        gone = () if result.dropped is None else (result.dropped, *result.also)
        for entry in gone:
            lost = self._replacing.pop(entry.id, None)
            if lost is not None:
                error = OperationCanceled(f"{entry.name} was dropped before it was replaced")
                reply_error(lost.session, lost.statement.request, error)

    def restart_ended(self, queued: QueuedStatement) -> None:
        """Queue a restart of the views that were stopped and will not be replaced after all."""
        for id_, dataflow in list(self._ended.items()):
            entry = self._state.catalog.get(id_)
            if entry is None or entry.dataflow_id != dataflow:
                del self._ended[id_]
            elif self._state.catalog.replacement(id_) is None:
                statement = RestartView(id_, entry.name, queued.statement.request)
                # Put it first: the view is stopped until then.
                self._backlog.waiting.appendleft(
                    QueuedStatement(queued.session, statement, queued.traceparent)
                )


def _as_alteration(entry: CatalogObject, statement: CreateView) -> AlterObject:
    """Turn a replacement by the same query into an ALTER of the remaining definitions."""
    policy = None if entry.plan is None else entry.plan.policy
    return AlterObject(
        statement.request,
        entry.name,
        refresh_policy=None if statement.refresh_policy == policy else statement.refresh_policy,
        target_lag_ms=(
            None if statement.target_lag_ms == entry.target_lag_ms else statement.target_lag_ms
        ),
        retain_history_ms=statement.retain_history_ms or 0,
        comment=statement.comment,
    )
