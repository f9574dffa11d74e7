"""Statements that replace a view (CREATE OR REPLACE), which take as long as its computation.

The statement creates the view beside the old one and is answered when that one is in its place: by
statements of the service's own, which `advanced` queues as uppers move. `replacements` has what
each of them does to the catalog.
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
    """The views that are being replaced, and who is answered then."""

    def __init__(
        self, state: ControllerState, backlog: StatementBacklog, go: Callable[[], None]
    ) -> None:
        """Take the queue of statements; `go` carries out the next one of it, if none runs."""
        self._state = state
        self._backlog = backlog
        self._go = go
        self._replacing: dict[ObjectId, QueuedStatement] = {}
        """Statements that are answered when their view is in its place: by the id of the view that
        is computed, then by that of the one whose contents it became."""
        self._given_up: set[tuple[str, int]] = set()
        """The session and the request of the running statement, if it was canceled."""
        self._ended: dict[ObjectId, ObjectId] = {}
        """Views whose dataflow was ended, so that the one that comes in their place gets ahead; and
        those dataflows."""

    # -- beginning, and giving up --------------------------------------------------------------

    async def begin(self, statement: CreateView) -> CatalogChanged:
        """Create the view that comes in another one's place; or the view, if there is none."""
        state = self._state
        store, catalog, seqno = state.store, state.catalog, state.seqno
        entry = find_replaced(catalog, check_name("view", statement.name), VIEW)
        if entry is None:
            return await store.create_view(catalog, seqno, statement)
        if catalog.replacement(entry.id) is not None:
            raise ObjectInUse(f"view {entry.name} is being replaced already: wait for that")
        idle = entry.id in catalog.quarantined
        if idle:
            # Only for its check: it cannot hand over its shard to the new one.
            catalog.remove(entry)
        elif (entry.written, entry.conf) == (statement.sql, statement.conf):
            return await alter_object(store, catalog, seqno, _as_alteration(entry, statement))
        sql, conf, policy = statement.sql, statement.conf, statement.refresh_policy
        plan = await store.compile(catalog, sql, conf, policy)
        inputs = [catalog.find(name).id for name in plan.inputs]
        check_circle(catalog, entry, [*inputs, *catalog.inlined(sql)[1]])
        if not is_extension(entry.schema, plan.output):
            # Only for its check: with other columns nothing may depend on it.
            catalog.remove(entry)
        elif plan.output != entry.schema:
            users = catalog.dependents(entry.id)
            await check_dependents(store, catalog, entry, plan.output, users)
        name = replacement_name(entry.name)
        return await store.add_view(catalog, seqno, name, statement, plan, entry.id)

    def advanced(self, entry: CatalogObject) -> None:
        """Go on with a replacement, now that the upper of a view has moved."""
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
        # After a restart nobody waits for it.
        session, request = self._state.ctx.self, 0
        if waiting is not None:
            session, request = waiting.session, waiting.statement.request
        statement = step(entry.id, entry.name, request)
        self._backlog.waiting.append(QueuedStatement(session, statement))
        self._go()

    def cancel(self, session: str, request: int) -> bool:
        """Give up the replacement that a request began, if its view is still being computed.
        Return False if there is none. Other statements are short, and are not canceled."""
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
            # Its view may be in the catalog already: it is given up when that is known.
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
        """Give up the replacements that a closed session began."""
        for queued in (*self._replacing.values(), *self._backlog.all):
            if queued.session.path == session:
                self.cancel(session, queued.statement.request)

    # -- the service's own statements ----------------------------------------------------------

    async def swap(self, statement: SwapView) -> CatalogChanged:
        """Put a view in the place of the one that it replaces. If that fails, the old one stays."""
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
            # Those that were taken for the dataflow that was to go on.
            await store.drop_holds(catalog, replace(replacement, dataflow=catalog.new_id))
            changed = await store.drop(catalog, seqno, replacement)
            return replace(changed, refusal=error)

    def find_own(self, id_: ObjectId) -> CatalogObject:
        """Return the object of a statement of the service's own. Raises `UnknownObject`."""
        entry = self._state.catalog.get(id_)
        if entry is None:
            raise UnknownObject(f"object {id_} was dropped meanwhile")
        return entry

    async def _swap_shard(self, entry: CatalogObject, replacement: CatalogObject) -> CatalogChanged:
        """Swap a view that keeps its shard, as soon as the new one is further than the old one."""
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
                # From here on the old one stands still, so that the new one passes it.
                self._ended[entry.id] = entry.dataflow_id
                state.command(AllowCompaction(entry.dataflow_id, EMPTY))
            # Without writes no upper would move, and both would stand at the same.
            await state.writer.ask(TickTables)
            await retry.pause()
        raise DeadlineExceeded(
            f"the new view {entry.name} was not further than the old one at any time within "
            f"{limit_ms} ms (replace_deadline_ms): the old one stays"
        )

    async def restart(self, entry: CatalogObject) -> CatalogChanged:
        """Let a view go on by another dataflow, however long the store takes."""
        state = self._state
        retry = RetryLoop(state.settings)
        while True:
            try:
                return await restart_view(state.store, state.catalog, state.seqno, entry, entry)
            except StorageError as error:
                if not error.determinate:
                    raise
                log.warning("view %s does not go on yet, trying again: %s", entry.name, error)
            await retry.pause()

    # -- after a statement ---------------------------------------------------------------------

    def statement_ended(self, queued: QueuedStatement) -> None:
        """Forget cancellations of other statements than this one, which has ended."""
        self._given_up &= {queued.key}

    def answer(self, queued: QueuedStatement, result: CatalogChanged) -> None:
        """Answer a statement, or note that it is answered when its view is in its place."""
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
                error = OperationCanceled(f"{entry.name} was dropped before it was in its place")
                reply_error(lost.session, lost.statement.request, error)

    def restart_ended(self, queued: QueuedStatement) -> None:
        """Queue the restart of views that stand still and that nothing will replace any more."""
        for id_, dataflow in list(self._ended.items()):
            entry = self._state.catalog.get(id_)
            if entry is None or entry.dataflow_id != dataflow:
                del self._ended[id_]
            elif self._state.catalog.replacement(id_) is None:
                statement = RestartView(id_, entry.name, queued.statement.request)
                # First: it stands still until then.
                self._backlog.waiting.appendleft(
                    QueuedStatement(queued.session, statement, queued.traceparent)
                )


def _as_alteration(entry: CatalogObject, statement: CreateView) -> AlterObject:
    """Return the change of a view that is replaced by one of the same query."""
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
