"""Reads and waits: each is pending until its time is sealed, it is answered or canceled, or its
deadline passes.

A read: check name and key → check the since → wait until the time is sealed → take the first way
that is ready (`read_choice`): its rows are in this process's memory, or a Peek returns one answer.
Every pending request has a deadline, whose error says what it was waiting for.

A stashed result goes to the session part by part, each after the previous one was written to the
client, so that only one part is in memory. The deadline ends with the peek's answer. Parts are
deleted once they were delivered, or when no client needs them any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.control.controller.catalog.boot import shard_import
from actors.control.controller.catalog.catalog import INDEX, CatalogObject, CatalogSnapshot
from actors.control.controller.catalog.ddl import columns_named
from actors.control.controller.messages import PinnedObjects, PinObjects
from actors.control.controller.open_requests import OpenRequests
from actors.control.controller.reads.memory_reads import (
    KeyedLookup,
    MemoryReads,
    ready_index,
    ways_to_read,
)
from actors.control.controller.roles.revocation import TRUSTED, HeldRights
from actors.control.controller.state import (
    ControllerState,
    NoContentsYet,
    reply_error,
    to_penstock_error,
)
from actors.control.controller.tables.rows import fit
from actors.engine.views.read_choice import ReadChoice, fixed_columns
from actors.model.plan.schema import arrow_type
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import (
    CopyTo,
    ReadContents,
    ReadObject,
    RequestDone,
    RunQuery,
    WaitFor,
)
from actors.model.protocol.compute import (
    CancelPeek,
    IndexTarget,
    Peek,
    PeekCanceled,
    PeekError,
    PeekResponse,
    PeekRows,
    PeekStashed,
    ShardImport,
    ShardTarget,
)
from actors.model.protocol.message_parts import ColumnComparison, OrderBy
from actors.model.protocol.row_finishing import check_finishing
from actors.replica.compute.peeks import PeekFilter, one_key
from actors.runtime.errors import (
    DeadlineExceeded,
    InvalidUsage,
    OperationCanceled,
    PenstockError,
    ReadBelowSince,
    from_wire,
)
from actors.runtime.kernel import ActorAddress, RunningEffect
from actors.runtime.progress import ObjectId, Time
from actors.runtime.spans import use_context
from actors.runtime.telemetry import TRACEPARENT

RELATION: Final = "relation"
"""Kind of the pseudo catalog entry for a system relation."""

# -- requests, fitted to the names and types of their objects --------------------------------------


def fit_keys(entry: CatalogObject, request: ReadObject) -> tuple[tuple[str, ...], bytes | None]:
    """Return the key columns and values of a read, fitted to the object. Raises `InvalidUsage`."""
    if (request.key is None) != (not request.key_columns):
        raise InvalidUsage(f"read of {entry.name}: key and key_columns must be given together")
    if request.key is None:
        return (), None
    columns = columns_named(entry, request.key_columns)
    types = {column.name: column.type for column in entry.schema.columns}
    kinds = tuple(arrow_type(types[name]) for name in columns)
    # Fast path: integers that already have the columns' types need no cast.
    if all(map(pa.types.is_integer, kinds)):
        found = one_key(columns, kinds, request.key)
        if found is not None and None not in found.values:
            return columns, request.key
    rows = _decoded(entry, request.key)
    if rows.num_columns != len(columns):
        raise InvalidUsage(
            f"read of {entry.name}: expected {len(columns)} key values, got {rows.num_columns}"
        )
    fitted = fit(
        entry.name, entry.schema, rows.rename_columns(list(columns)), columns, stored=False
    )
    return columns, to_ipc(fitted.select(list(columns)))


def _decoded(entry: CatalogObject, data: bytes) -> pa.Table:
    try:
        return from_ipc(data)
    except PenstockError as error:
        raise InvalidUsage(f"read of {entry.name}: {error}") from None


def fit_peek(entry: CatalogObject, request: ReadObject, peek: Peek) -> Peek:
    """Return the peek with the request's filter, columns, order and limit. Raises
    `InvalidUsage`."""
    finishing = request.finishing
    if not request.filter and request.project is None and finishing is None:
        return peek
    if finishing is not None:
        check_finishing(finishing)
        order_by = tuple(
            OrderBy(_column(entry, by.column), by.descending, by.nulls_first)
            for by in finishing.order_by
        )
        finishing = msgspec.structs.replace(finishing, order_by=order_by)
    made = msgspec.structs.replace(
        peek,
        filter=tuple(_fit_comparison(entry, one) for one in request.filter),
        project=None if request.project is None else columns_named(entry, request.project),
        finishing=finishing,
    )
    # Built only for its checks, so that a bad comparison is refused here and not by a worker.
    PeekFilter(entry.schema, made)
    return made


def _column(entry: CatalogObject, name: str) -> str:
    return columns_named(entry, (name,))[0]


def _fit_comparison(entry: CatalogObject, given: ColumnComparison) -> ColumnComparison:
    column, value = _column(entry, given.column), given.value
    if value:
        rows = _decoded(entry, value)
        if rows.num_columns == 1 and not rows.column(0).null_count:
            named = rows.rename_columns([column])
            rows = fit(entry.name, entry.schema, named, (column,), stored=False)
            value = to_ipc(rows.select([column]))
    return ColumnComparison(column, given.op, value)


def prototype(entry: CatalogObject, request: ReadObject, time: Time, imported: ShardImport) -> Peek:
    """Return the shard peek that answers the request, without its uuid. Raises `InvalidUsage`."""
    key_columns, keys = fit_keys(entry, request)
    peek = Peek("", ShardTarget(entry.id, imported), time, key_columns, keys)
    return fit_peek(entry, request, peek)


def _object_read(catalog: CatalogSnapshot, name: str) -> CatalogObject:
    """Return the object to read. Raises `InvalidUsage` and `UnknownObject`."""
    entry = catalog.find_stored(name, "read")
    if entry.kind == INDEX:
        on = catalog.by_id(entry.depends[0])
        raise InvalidUsage(f"cannot read from index {entry.name}: read {on.name}, which it indexes")
    return entry


# -- waiting and running requests ------------------------------------------------------------------


class StashedTransfer:
    """A stashed result being transferred to one session, part by part; each part is deleted after
    delivery."""

    def __init__(self, stashed: PeekStashed) -> None:
        self.inline = stashed.inline
        """First rows, which arrived with the answer itself; None once sent."""
        self._left = deque(part.key for part in stashed.parts)
        """Keys of the parts still to be sent."""
        self._sent: str | None = None
        """Key of the part that was sent last and not delivered yet."""

    def next(self) -> str | None:
        """Return the key of the part to send next, or None."""
        return self._left[0] if self._left else None

    def part_sent(self) -> bool:
        """Record that the part was sent to the session. Return whether more follow."""
        self._sent = self._left.popleft()
        return bool(self._left)

    def part_delivered(self) -> list[str]:
        """Return the keys that may be deleted, now that the part was delivered to the client."""
        sent, self._sent = self._sent, None
        return [] if sent is None else [sent]

    def abandon(self) -> list[str]:
        """Return all remaining keys, to be deleted."""
        left = [*self.part_delivered(), *self._left]
        self._left.clear()
        return left


class SinceRead(msgspec.Struct, frozen=True, gc=False):
    """The since of a pending read's shard was read."""

    number: int
    since: Time
    error: PenstockError | None = None


class KeysFound(msgspec.Struct, frozen=True, gc=False):
    """The lookup of many keys in a thread has ended. Without rows the read tries the next way."""

    number: int
    arrow: bytes | None


class PartRead(msgspec.Struct, frozen=True, gc=False):
    """A part of a stashed result was read; None means that it no longer exists."""

    number: int
    arrow: bytes | None
    error: PenstockError | None = None


class DeadlinePassed(msgspec.Struct, frozen=True, gc=False):
    """The deadline of a pending read or wait has passed."""

    number: int


class _Pending(msgspec.Struct, eq=False):
    id: int
    """Number of the request within this service."""
    session: ActorAddress[Any]
    number: int
    """Number that the session gave the request."""
    entry: CatalogObject
    time: Time
    """Time to read at, or to wait for."""
    read: ReadObject | None
    """None for a wait."""
    deadline_ms: int
    """Time within which the request must be answered (ms)."""
    timer: RunningEffect
    """Timer of the deadline."""
    since_ms: float
    """Time of the request (monotonic, ms)."""
    rights: HeldRights = TRUSTED
    peek: Peek | None = None
    """The peek to send, still without its uuid and, if an index serves it, its target."""
    ways: Sequence[ReadChoice] = ()
    """Ways that have not been tried yet."""
    awaits: CatalogObject | None = None
    """The object or index whose upper the request waits for."""
    serve: Callable[[], None] | None = None
    """Serves the request again; set while it waits for a table's first contents."""
    ready: bool = False
    """True once the checks are done, so that only the time is awaited."""
    uuid: str | None = None
    """Id of the peek that was sent; None if none is open."""
    traceparent: str | None = None
    """Trace context of the request."""
    transfer: StashedTransfer | None = None
    """Transfer of the stashed answer to the session."""


class PendingReads(OpenRequests[_Pending]):
    """All pending reads and waits."""

    def __init__(self, state: ControllerState, memory_reads: MemoryReads) -> None:
        super().__init__()
        self._state = state
        self._memory_reads = memory_reads
        self._numbers = 0
        """Number of the last request."""
        self._pending: dict[int, _Pending] = {}
        """Pending requests by number."""
        self._by_uuid: dict[str, int] = {}
        """Numbers of the requests with an open peek, by its uuid."""
        self._waiting: dict[ObjectId, dict[int, None]] = {}
        """Numbers of the requests that wait for an object's upper, by object."""

    # -- starting ----------------------------------------------------------------------------------

    def read(
        self, session: ActorAddress[Any], request: ReadObject, rights: HeldRights = TRUSTED
    ) -> None:
        """Start a read, which needs these rights. Raises `InvalidUsage` and its subclasses."""
        state = self._state
        entry = _object_read(state.catalog, request.name)
        time = state.latest_with_contents(entry) if request.as_of is None else request.as_of
        state.check_time(f"read of {entry.name}", time)
        peek = prototype(entry, request, time, shard_import(entry))
        number = self._begin(
            session, request.request, entry, time, request, request.deadline_ms, rights
        )
        pending = self._pending[number]
        pending.peek, pending.ways = peek, self._ways(entry, peek)
        shard = entry.shard
        assert shard is not None, entry.name
        # If the service's own hold covers the time, it is readable; otherwise the durable since
        # decides.
        if state.retain.keeps(shard, time):
            pending.ready = True
            self._resume(number)
            return
        state.ctx.effect(
            lambda: state.persist.state(shard),
            done=lambda found: SinceRead(number, found.since),
            failed=lambda error: SinceRead(number, 0, to_penstock_error(error)),
        )

    def _ways(self, entry: CatalogObject, peek: Peek) -> Sequence[ReadChoice]:
        by_key = bool(peek.key_columns)
        fixed = peek.key_columns if by_key else fixed_columns(peek.filter)
        return ways_to_read(self._state.catalog, entry, fixed, by_key=by_key)

    def read_relation(
        self, session: ActorAddress[Any], request: ReadObject, entry: CatalogObject, peek: Peek
    ) -> None:
        """Read a relation that every worker keeps about itself, as it is now. Raises
        `InvalidUsage`."""
        number = self._begin(
            session, request.request, entry, peek.time, request, request.deadline_ms
        )
        pending = self._pending[number]
        # Each worker answers with its own rows, as one of them does for a shard.
        pending.peek, pending.ways = peek, [ReadChoice("shard")]
        pending.ready = True
        self._resume(number)

    def wait_for(
        self, session: ActorAddress[Any], request: WaitFor, rights: HeldRights = TRUSTED
    ) -> None:
        """Start a wait, which needs these rights. Raises `InvalidUsage` and its subclasses."""
        state = self._state
        entry = state.catalog.find_stored(request.name, "wait")
        state.check_time(f"wait for {entry.name}", request.time)
        number = self._begin(
            session, request.request, entry, request.time, None, request.deadline_ms, rights
        )
        self._pending[number].ready = True
        self._resume(number)

    def await_contents(
        self,
        session: ActorAddress[Any],
        request: ReadObject | RunQuery | CopyTo,
        table: CatalogObject,
        serve: Callable[[], None],
        rights: HeldRights = TRUSTED,
    ) -> None:
        """Serve a request once a source's table has its first contents. Its deadline starts again
        then."""
        number = self._begin(session, request.request, table, 0, None, request.deadline_ms, rights)
        pending = self._pending[number]
        pending.ready, pending.serve = True, serve
        self._resume(number)

    def _begin(
        self,
        session: ActorAddress[Any],
        request: int,
        entry: CatalogObject,
        time: Time,
        read: ReadObject | None,
        deadline_ms: int | None,
        rights: HeldRights = TRUSTED,
    ) -> int:
        state = self._state
        wait_ms = state.settings.peek_deadline_ms if deadline_ms is None else deadline_ms
        if wait_ms <= 0:
            raise InvalidUsage(f"deadline_ms = {wait_ms}: must be greater than zero")
        self._numbers += 1
        number = self._numbers
        timer = state.ctx.after(wait_ms, DeadlinePassed(number))
        made = self._pending[number] = _Pending(
            number,
            session,
            request,
            entry,
            time,
            read,
            wait_ms,
            timer,
            state.ctx.monotonic_ms(),
            rights,
            traceparent=TRACEPARENT.get(),
        )
        self._opened(made)
        return number

    # -- progress ------------------------------------------------------------------------------

    def since_read(self, message: SinceRead) -> None:
        """Refuse a read below the since, or let it wait for its time."""
        pending = self._pending.get(message.number)
        if pending is None:
            return
        if message.error is not None:
            self._end(pending, message.error)
        elif pending.time < message.since:
            text = (
                f"{pending.entry.kind} {pending.entry.name} cannot be read at {pending.time}: "
                f"its history begins at {message.since}"
            )
            self._end(pending, ReadBelowSince(text))
        else:
            pending.ready = True
            self._resume(message.number)

    def advanced(self, id_: ObjectId | None) -> None:
        """Resume the requests that wait for an object's upper (None: the tables')."""
        # Iterate over copies, since resuming a request removes it.
        for waited in list(self._waiting) if id_ is None else [id_]:
            for number in list(self._waiting.get(waited, ())):
                self._resume(number)

    def _resume(self, number: int) -> None:
        pending = self._pending[number]
        sealed = pending.entry.kind == RELATION or (
            self._state.frontiers.upper(pending.entry) > pending.time
        )
        if not sealed:
            self._wait(number, pending.entry)
            return
        self._stop_waiting(pending)
        if pending.serve is not None:
            # Do this first, since `serve` enters the same request again.
            self._end(pending, None)
            # Continue the request's own trace, not that of the response that moved the upper.
            with use_context(pending.traceparent):
                pending.serve()
            return
        peek = pending.peek
        if peek is None:
            pending.session.reply(RequestDone(pending.number))
            self._end(pending, None)
            return
        self._find_rows(number, pending, peek)

    def _find_rows(self, number: int, pending: _Pending, peek: Peek) -> None:
        """Read in the first way that is ready."""
        ways = pending.ways = deque(pending.ways)
        while ways:
            way = ways.popleft()
            index = ready_index(self._state, way, peek.time)
            if way.index is not None and index is None:
                continue
            # A traced peek goes to the workers, so that its spans show the read.
            here = way.key and (index is None or pending.traceparent is None)
            found = self._memory_reads.look_up(pending.entry, way, peek) if here else None
            # The workers have not advanced that far. They report the frontier before they could
            # answer a peek that waits for it, so wait here.
            if (
                found is None
                and here
                and index is not None
                and self._will_be_in_memory(index, peek)
            ):
                ways.appendleft(way)
                self._wait(number, index)
                return
            if isinstance(found, KeyedLookup) and not found.is_short:
                if index is not None:
                    # If the rows are not available here, the workers look them up.
                    ways.appendleft(ReadChoice("index", (), way.index))
                self._look_up_in_thread(number, found)
                return
            arrow = found.answer() if isinstance(found, KeyedLookup) else found
            if arrow is not None:
                self.keys_found(KeysFound(number, arrow))
                return
            if way.way != "memory":
                self._send_peek(number, pending, peek, way)
                return

    def _will_be_in_memory(self, index: CatalogObject, peek: Peek) -> bool:
        behind = self._state.frontiers.upper(index) <= peek.time
        return behind and self._memory_reads.has_partitions(index)

    def _wait(self, number: int, awaited: CatalogObject) -> None:
        """Let a request wait for an upper to advance."""
        self._pending[number].awaits = awaited
        self._waiting.setdefault(awaited.id, {})[number] = None

    def _look_up_in_thread(self, number: int, keys: KeyedLookup) -> None:
        clock = self._state.ctx.clock
        self._state.ctx.effect(
            lambda: clock.run_blocking(keys.answer),
            done=lambda arrow: KeysFound(number, arrow),
            failed=lambda error: KeysFound(number, None),
        )

    def keys_found(self, message: KeysFound) -> None:
        """Send the rows of some keys to the session, or try the next way."""
        pending = self._pending.get(message.number)
        if pending is None or pending.peek is None:
            return
        if message.arrow is None:
            self._find_rows(message.number, pending, pending.peek)
            return
        self._reply(pending, message.arrow)
        self._end(pending, None)

    def _send_peek(self, number: int, pending: _Pending, peek: Peek, way: ReadChoice) -> None:
        pending.uuid = f"{self._state.ctx.random.getrandbits(128):032x}"
        self._by_uuid[pending.uuid] = number
        target = peek.target
        if way.index is not None:
            target = IndexTarget(self._state.catalog.by_id(way.index.id).dataflow_id)
        with use_context(pending.traceparent):
            self._state.command(msgspec.structs.replace(peek, uuid=pending.uuid, target=target))

    # -- ending --------------------------------------------------------------------------------

    def answered(self, response: PeekResponse) -> None:
        """Handle the answer to a peek. The answer to a canceled peek is dropped."""
        number = self._by_uuid.get(response.uuid)
        result = response.result
        if number is None:
            if isinstance(result, PeekStashed):
                # The read was canceled in the meantime: no client will read the parts.
                self._remove([part.key for part in result.parts])
            return
        pending = self._pending[number]
        match result:
            case PeekRows(arrow):
                self._reply(pending, arrow)
                self._end(pending, None, answered=True)
            case PeekStashed():
                self._begin_transfer(number, pending, result)
            case PeekError(code, text):
                self._end(pending, from_wire(code, text, True), answered=True)
            case PeekCanceled():
                error = OperationCanceled(f"the read of {pending.entry.name} was canceled")
                self._end(pending, error, answered=True)

    def _reply(self, pending: _Pending, arrow: bytes, *, more: bool = False) -> None:
        """Send the rows to the session."""
        request, reads = pending.number, pending.rights.reads
        pending.session.reply(ReadContents(request, pending.time, arrow, more, reads))

    def _begin_transfer(self, number: int, pending: _Pending, stashed: PeekStashed) -> None:
        # The deadline applied to the answer; how fast the client reads it does not matter here.
        pending.timer.cancel()
        transfer = pending.transfer = StashedTransfer(stashed)
        if transfer.inline is None:
            self._read_part(number, transfer)
            return
        inline, transfer.inline = transfer.inline, None
        more = transfer.next() is not None
        self._reply(pending, inline, more=more)
        if not more:
            self._end(pending, None, answered=True)

    def _read_part(self, number: int, transfer: StashedTransfer) -> None:
        state, key = self._state, transfer.next()
        assert key is not None, "a transfer without parts has ended"
        state.ctx.effect(
            lambda: state.persist.stashed.get(key),
            done=lambda arrow: PartRead(number, arrow),
            failed=lambda error: PartRead(number, None, to_penstock_error(error)),
        )

    def part_read(self, message: PartRead) -> None:
        """Send a part to the session."""
        pending = self._pending.get(message.number)
        if pending is None or pending.transfer is None:
            return
        if message.error is not None:
            self._end(pending, message.error, answered=True)
        elif message.arrow is None:
            limit = self._state.settings.stash_orphan_ms
            text = (
                f"the result of the read of {pending.entry.name} was not fetched within {limit} ms "
                "(stash_orphan_ms) and is gone: read again"
            )
            self._end(pending, DeadlineExceeded(text), answered=True)
        else:
            more = pending.transfer.part_sent()
            self._reply(pending, message.arrow, more=more)
            if not more:
                self._end(pending, None, answered=True)

    def delivered(self, session: str, request: int) -> bool:
        """Delete the delivered part and read the next. Return False if there is no such read."""
        pending = self._open.get((session, request))
        if pending is None or pending.transfer is None:
            return False
        self._remove(pending.transfer.part_delivered())
        self._read_part(pending.id, pending.transfer)
        return True

    def unread(self, keys: list[str]) -> None:
        """Delete the parts of an answer that is not used."""
        self._remove(keys)

    def _remove(self, keys: list[str]) -> None:
        """Delete parts that no client needs. A part that cannot be deleted now becomes an
        orphan."""
        stashed = self._state.persist.stashed
        if keys:
            self._state.ctx.effect(lambda: stashed.delete(keys), done=lambda _: None)

    def timed_out(self, number: int) -> None:
        """Fail a request whose deadline has passed."""
        pending = self._pending.get(number)
        if pending is None or pending.transfer is not None:
            return
        if pending.serve is not None:
            text = f"{pending.entry.name} received no contents within "
            why = self._state.waiting_for(pending.entry)
            self._end(pending, DeadlineExceeded(f"{text}{pending.deadline_ms} ms: {why}"))
            return
        what = "wait for" if pending.read is None else "read of"
        if pending.uuid is not None:
            why = "the replica has not answered the peek"
        else:
            why = self._state.waiting_for(pending.awaits or pending.entry)
        text = f"{what} {pending.entry.name} at {pending.time}: not finished within "
        self._end(pending, DeadlineExceeded(f"{text}{pending.deadline_ms} ms: {why}"))

    def dropped(self, entry: CatalogObject) -> None:
        """Fail the requests that wait for a dropped object. If only an index was dropped, reads try
        the next way."""
        if entry.kind == INDEX:
            self.advanced(entry.id)
        super().dropped(entry)

    # -- reporting -----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``penstock.peeks`` about reads and waits."""
        now = self._state.ctx.monotonic_ms()
        for pending in self._pending.values():
            if pending.transfer is not None:
                state = "streaming"
            elif pending.uuid is not None:
                state = "asked"
            else:
                state = "waiting until sealed" if pending.ready else "checking"
            yield (
                pending.session.path,
                pending.number,
                "wait" if pending.read is None else "read",
                pending.entry.name,
                pending.time,
                state,
                now - pending.since_ms,
                pending.deadline_ms,
                pending.uuid,
            )

    def _stop_waiting(self, pending: _Pending) -> None:
        awaited, pending.awaits = pending.awaits, None
        if awaited is not None:
            waiting = self._waiting[awaited.id]
            del waiting[pending.id]
            if not waiting:
                del self._waiting[awaited.id]

    def _end(
        self, pending: _Pending, error: PenstockError | None, *, answered: bool = False
    ) -> None:
        """End a request as `OpenRequests` describes. `answered` means that its peek has ended."""
        if error is not None:
            reply_error(pending.session, pending.number, error)
        self._stop_waiting(pending)
        del self._pending[pending.id]
        pending.timer.cancel()
        if pending.transfer is not None:
            # The peek is over: only its parts remain to be deleted.
            self._remove(pending.transfer.abandon())
            answered = True
        self._closed(pending)
        if pending.uuid is not None:
            del self._by_uuid[pending.uuid]
            # Also removes the peek from the history, so that a replica that connects later does not
            # run it.
            if not answered:
                self._state.command(CancelPeek(pending.uuid))


def pin_objects(state: ControllerState, asked: PinObjects) -> PinnedObjects:
    """Return the catalog and the time at which to read objects together. Raises `UnknownObject`,
    `InvalidUsage`."""
    entries = [state.catalog.find(name) for name in asked.names]
    for entry in entries:
        if entry.shard is None:
            raise InvalidUsage(f"cannot read from {entry.kind} {entry.name}: read what it indexes")
    objects = None if asked.seqno == state.seqno else state.catalog.objects
    time, missing = max(0, state.frontiers.tables_upper - 1), ""
    try:
        # Use the latest time of all: each object is awaited until it is sealed there.
        time = max(map(state.latest_with_contents, entries), default=time)
    except NoContentsYet as error:
        missing = error.table.name
    time = max([time, *(entry.as_of for entry in entries)])
    return PinnedObjects(state.seqno, objects, time, missing, state.access)
