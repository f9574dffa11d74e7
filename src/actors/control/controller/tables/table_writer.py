"""The table writer: one actor that makes every change of every table, in groups.

While one group is being committed the next one collects; the first write of a group waits
`group_commit_ms` for others. The order is first in, first out; a full queue answers `ResourceBusy`.
This actor queues, groups and answers; `commit.WriteGroupCommit` commits a group. A copy from files
waits in the same queue and is a group of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, assert_never

import msgspec

from actors.control.controller.messages import (
    AlterTable,
    AppendCopy,
    ArrangeTable,
    CloseTable,
    CopyAppended,
    EnqueueWrite,
    ShardsAppended,
    TablesAdvanced,
    TableWriterMessage,
    TickTables,
)
from actors.control.controller.tables.commit import CommitOutcome, PlannedWrite, WriteGroupCommit
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.durable.persist import PersistClient
from actors.model.protocol.api import RequestFailed, WriteCommitted
from actors.runtime.errors import PenstockError, ResourceBusy, to_wire
from actors.runtime.kernel import Actor, ActorAddress, ReplySlot, RunningEffect
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings
from actors.runtime.spans import span_below
from actors.runtime.telemetry import GROUP_COMMIT, TIME, TRACEPARENT

GROUP_WRITES_MAX = 256
QUEUED_WRITES_MAX: Final = 1_024

log = logging.getLogger("penstock.controller")


class _Due(msgspec.Struct, frozen=True, gc=False):
    """The group has waited long enough."""


_Group: TypeAlias = tuple[EnqueueWrite | TickTables | AppendCopy, ...]


class _Committed(msgspec.Struct, frozen=True, gc=False):
    group: _Group
    outcome: CommitOutcome


class _Failed(msgspec.Struct, frozen=True, gc=False):
    group: _Group
    error: PenstockError


class _Closed(msgspec.Struct, frozen=True, gc=False):
    request: CloseTable


class _Altered(msgspec.Struct, frozen=True, gc=False):
    reply: ReplySlot[Any]
    error: PenstockError | None = None


class _Arranged(msgspec.Struct, frozen=True, gc=False):
    id: ObjectId
    error: PenstockError | None = None


_Message: TypeAlias = (
    TableWriterMessage | _Due | _Committed | _Failed | _Closed | _Altered | _Arranged
)


class TableWriter(Actor[_Message]):
    """Writes tables. Sends `TablesAdvanced` to `controller` and `ShardsAppended` to
    `maintenance`."""

    def __init__(
        self,
        persist: PersistClient,
        settings: Settings,
        contents: TableArrangements,
        controller: ActorAddress[Any],
        maintenance: ActorAddress[Any] | None = None,
    ) -> None:
        self._persist = persist
        self._settings = settings
        self._contents = contents
        self._controller = controller
        self._maintenance = maintenance
        self._queue: deque[TableWriterMessage] = deque()
        """Messages to handle, in order."""
        self._contexts: dict[tuple[str, int], str] = {}
        """Trace contexts of queued writes, by session and request."""
        self._timer: RunningEffect | None = None
        """Timer of the group that is collecting; None if there is none."""
        self._busy = False
        """True while a group is committed or a table is changed."""
        self._groups = 0
        """Number of groups committed so far."""

    async def on_start(self) -> None:
        self._commit = WriteGroupCommit(
            self._persist, self._contents, self.ctx.clock, self._settings
        )

    async def on_stop(self) -> None:
        await self._commit.close()

    async def receive(self, message: _Message) -> None:
        match message:
            case EnqueueWrite() | TickTables() | CloseTable() | ArrangeTable() | AppendCopy():
                self._enqueue(message)
            case AlterTable():
                self._enqueue(message)
            case _Due():
                self._timer = None
                self._next()
            case _Committed(group, outcome):
                self._done(group, outcome)
            case _Failed(group, error):
                self._refuse(group, error)
                self._go_on()
            case _Closed(request):
                request.reply.set(None)
                self._go_on()
            case _Arranged():
                self._arranged(message)
            case _Altered(reply, error):
                if error is not None:
                    reply.fail(error)
                self._go_on()
            case _:
                assert_never(message)

    def _enqueue(self, message: TableWriterMessage) -> None:
        # Only clients' writes can be many: the senders of ticks, drops and copies limit themselves.
        if isinstance(message, EnqueueWrite) and len(self._queue) >= QUEUED_WRITES_MAX:
            text = f"too many writes are waiting ({QUEUED_WRITES_MAX}): try again later"
            self._refuse((message,), ResourceBusy(text))
            return
        self._queue.append(message)
        if isinstance(message, EnqueueWrite) and (traceparent := TRACEPARENT.get()) is not None:
            self._contexts[message.session.path, message.request] = traceparent
        if self._busy or self._timer is not None:
            return
        if self._settings.group_commit_ms:
            self._timer = self.ctx.after(self._settings.group_commit_ms, _Due())
        else:
            self._next()

    def _next(self) -> None:
        """Start handling the first message of the queue."""
        if self._busy or not self._queue:
            return
        self._busy = True
        first = self._queue[0]
        if isinstance(first, CloseTable):
            self._queue.popleft()
            id_, done = first.id, _Closed(first)
            self.ctx.effect(lambda: self._commit.forget(id_), done=lambda _: done)
            return
        if isinstance(first, ArrangeTable):
            self._queue.popleft()
            self._arrange(first.target)
            return
        if isinstance(first, AlterTable):
            self._queue.popleft()
            self._alter(first)
            return
        if isinstance(first, AppendCopy):
            self._queue.popleft()
            copy = first.copy
            self._begin((first,), lambda: self._commit.commit_copy(copy))
            return
        group, at = self._take_group()
        # A tick is a write without changes.
        writes = [m.write if isinstance(m, EnqueueWrite) else PlannedWrite(()) for m in group]
        keys = [(m.session.path, m.request) for m in group if isinstance(m, EnqueueWrite)]
        traces = [self._contexts.pop(key) for key in keys if key in self._contexts]

        async def commit() -> CommitOutcome:
            first = traces[0] if traces else None
            with span_below(first, GROUP_COMMIT, len(group), links=traces[1:]) as opened:
                outcome = await self._commit.commit(writes, at)
                if opened is not None:
                    opened.note(TIME, outcome.time)
                return outcome

        self._begin(group, commit)

    def _alter(self, request: AlterTable) -> None:
        async def work() -> None:
            request.reply.set(await self._commit.alter(request.target, request.work))

        self.ctx.effect(
            work,
            done=lambda _: _Altered(request.reply),
            failed=lambda error: _Altered(request.reply, _named(error)),
        )

    def _arrange(self, target: TableTarget) -> None:
        self.ctx.effect(
            lambda: self._commit.arrange(target),
            done=lambda _: _Arranged(target.id),
            failed=lambda error: _Arranged(target.id, _named(error)),
        )

    def _arranged(self, message: _Arranged) -> None:
        if message.error is None:
            self._contents.note_arranged(message.id)
        else:
            # Reads scan the table, as they did before.
            log.warning("cannot arrange table %s by key: %s", message.id, message.error)
        self._go_on()

    def _begin(self, group: _Group, commit: Callable[[], Awaitable[CommitOutcome]]) -> None:
        self.ctx.effect(
            commit,
            done=lambda outcome: _Committed(group, outcome),
            failed=lambda error: _Failed(group, _named(error)),
        )

    def _take_group(self) -> tuple[tuple[EnqueueWrite | TickTables, ...], int | None]:
        """Take as many queued writes as may share a time. A write at a given time is a group of its
        own."""
        group: list[EnqueueWrite | TickTables] = []
        while self._queue and len(group) < GROUP_WRITES_MAX:
            message = self._queue[0]
            if isinstance(message, CloseTable | ArrangeTable | AlterTable | AppendCopy):
                break
            driven = isinstance(message, EnqueueWrite) and message.at is not None
            if driven and group:
                break
            self._queue.popleft()
            group.append(message)
            if isinstance(message, EnqueueWrite) and driven:
                return tuple(group), message.at
        return tuple(group), None

    def _done(self, group: _Group, outcome: CommitOutcome) -> None:
        self._groups += 1
        # Before the answers: a read that follows an answer must see that write.
        self._controller.reply(TablesAdvanced(outcome.upper, bool(outcome.shards)))
        if self._maintenance is not None and outcome.shards:
            self._maintenance.reply(ShardsAppended(outcome.shards))
        for message, result in zip(group, outcome.outcomes, strict=True):
            if isinstance(result, PenstockError):
                self._refuse((message,), result)
            elif isinstance(message, AppendCopy):
                appended = CopyAppended(message.name, result, outcome.time, outcome.repeated)
                self._controller.reply(appended)
            elif isinstance(message, TickTables):
                message.reply.set(outcome.time)
            else:
                message.session.reply(WriteCommitted(message.request, outcome.time, result))
        self._go_on()

    def _refuse(self, group: _Group, error: PenstockError) -> None:
        for message in group:
            if isinstance(message, AppendCopy):
                self._controller.reply(CopyAppended(message.name, error=error))
                continue
            if isinstance(message, TickTables):
                message.reply.fail(error)
            else:
                message.session.reply(RequestFailed(message.request, *to_wire(error)))

    def _go_on(self) -> None:
        self._busy = False
        self._next()

    def describe(self) -> str:
        state = "committing a group" if self._busy else "idle"
        return f"{state}; {len(self._queue)} writes waiting; {self._groups} groups committed"


def _named(error: Exception) -> PenstockError:
    """Return the error for the writers. An internal error is logged."""
    if isinstance(error, PenstockError):
        return error
    log.error("a group of writes failed with an internal error", exc_info=error)
    fault = PenstockError(f"internal fault: {type(error).__name__}: {error}")
    fault.determinate = False
    return fault
