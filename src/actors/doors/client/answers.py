"""Answers of a read, checked and finished for the client's caller."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import pyarrow as pa

from actors.doors.client.requests import RequestExchange, reads_of
from actors.doors.client.rows import ReadSpec
from actors.model.plan.updates import from_ipc
from actors.model.protocol.api import (
    CopiedFrom,
    CopiedInto,
    CopyFromFiles,
    CopyFromProgress,
    CopyProgressed,
    CopyTo,
    ReadContents,
    RequestDone,
    RequestFailed,
    SubscribeChanges,
    SubscribeObject,
)
from actors.model.protocol.row_finishing import RowFinisher
from actors.runtime.errors import OperationCanceled, PenstockError, RemoteProtocolError, from_wire
from actors.runtime.progress import Frontier, Time
from actors.runtime.spans import accept_context, make_request_context, root_span, span_below
from actors.runtime.telemetry import CLIENT_CHANGES, CLIENT_REQUEST, split_context

if TYPE_CHECKING:
    from actors.control.access.open_sessions import ReadRights

# -- The client's side of a subscribe: changes out of answers, with a pause when too many wait -----


class ChangeBatch(msgspec.Struct, frozen=True):
    """Updates of a subscribe with ``lower <= time < upper``, complete: a subscriber resumes after
    them with ``from_=upper``. `table` has the object's columns, ``__time`` and ``__diff`` (+1
    insertion, -1 retraction); None for progress without updates.

    A large interval comes in pieces: `partial` ones, whose `upper` is `lower`, then one with the
    interval's upper. If the subscribe ends before that one, discard the partial ones and resume
    from the upper of the last change that was not partial.
    """

    lower: Frontier
    upper: Frontier
    table: pa.Table | None = None
    partial: bool = False


class SubscribeSpec(msgspec.Struct, frozen=True):
    """The arguments of a subscribe; see `Client.subscribe`."""

    name: str
    from_: Frontier | None = None
    as_of: Time | None = None
    up_to: Frontier | None = None
    snapshot: bool = True
    progress: bool = True


async def follow(
    exchange: RequestExchange,
    wanted: SubscribeSpec,
    waiting_bytes_max: int,
    rights: ReadRights | None = None,
) -> AsyncGenerator[ChangeBatch, None]:
    """Yield the changes, and note in `rights` the objects that they are of.

    When more than `waiting_bytes_max` wait here, between two intervals, the subscribe is cancelled,
    the waiting changes are yielded, and another subscribe resumes after them. Raises the service's
    error, and `ConnectionBroken`.
    """
    name, frontier, start = wanted.name, wanted.from_, wanted.as_of
    while True:
        number = exchange.number()
        with root_span(CLIENT_REQUEST, number, name) as opened:
            request = SubscribeObject(
                number,
                name,
                frontier,
                start,
                wanted.up_to,
                wanted.snapshot,
                wanted.progress,
            )
            slot = await exchange.open(request, make_request_context(opened))
        paused = ended = False
        kept: list[ChangeBatch] = []
        try:
            while True:
                answer = await exchange.next_answer(slot)
                if isinstance(answer, RequestDone | RequestFailed):
                    ended = True
                    break
                change = _change(answer)
                if rights is not None:
                    rights.note(reads_of(split_context(answer)[0]))
                if paused and change.partial:
                    # The cancel may cut this interval short. Then the next subscribe sends it
                    # again from its lower, so its pieces are withheld until one more arrives.
                    kept.append(change)
                    continue
                while kept:
                    yield kept.pop(0)
                yield change
                if change.partial:
                    continue
                # The next subscribe resumes here, and no longer at the as_of.
                frontier, start = change.upper, None
                if not paused and slot.bytes > waiting_bytes_max:
                    paused = True
                    await exchange.cancel(number)
        finally:
            exchange.close(number)
            # The caller has left the loop: the service need not go on.
            if not ended and not paused and exchange.lost is None:
                await exchange.cancel(number)
        if isinstance(answer, RequestDone):
            return
        # `OperationCanceled` is the answer to this client's own pause: subscribe again from
        # `frontier`.
        if not (paused and answer.code == OperationCanceled.__name__):
            raise from_wire(answer.code, answer.text, answer.determinate)


async def concatenate_pieces(
    changes: AsyncGenerator[ChangeBatch, None],
) -> AsyncGenerator[ChangeBatch, None]:
    """Yield the same changes with pieces concatenated, so that each is a complete interval. Holds
    one interval in memory, however large. The `changes` are closed with it."""
    tables: list[pa.Table] = []
    async with contextlib.aclosing(changes):
        async for change in changes:
            if change.table is not None:
                tables.append(change.table)
            if not change.partial:
                table = pa.concat_tables(tables) if tables else None
                yield ChangeBatch(change.lower, change.upper, table)
                tables = []


def _change(received: Any) -> ChangeBatch:
    answer, traceparent = split_context(received)
    if not isinstance(answer, SubscribeChanges):
        raise RemoteProtocolError(f"the service answered Subscribe with {type(answer).__name__}")
    arrow = answer.arrow
    if arrow is None:
        return ChangeBatch(answer.lower, answer.upper, None, answer.partial)
    with span_below(accept_context(traceparent), CLIENT_CHANGES) as opened:
        if opened is not None:
            opened.describe(answer.request, answer.lower, answer.upper, len(arrow))
        return ChangeBatch(answer.lower, answer.upper, from_ipc(arrow), answer.partial)


# -- The client's side of copies into and from files: progress messages, then one answer -----------


CopyFormat: TypeAlias = Literal["parquet", "csv", "json"]


class CopiedTo(msgspec.Struct, frozen=True):
    """A finished copy: `rows` in so many `files`, which `manifest` names; contents at `as_of`."""

    rows: int
    files: int
    manifest: str
    as_of: Time


class CopiedRows(msgspec.Struct, frozen=True):
    """A durable copy from files: so many `rows`, all at `time`. `repeated`: an earlier request with
    the same uuid made it."""

    rows: int
    time: Time
    repeated: bool


async def await_copy_to(
    exchange: RequestExchange, request: CopyTo, progress: Callable[[CopyProgressed], object] | None
) -> CopiedTo:
    """Send the request and wait for its answer. Cancellation drops the copy. Raises the service's
    error, and `ConnectionBroken`."""
    answer = await _answered(exchange, request, progress)
    if not isinstance(answer, CopiedInto):
        raise RemoteProtocolError(f"the service answered CopyTo with {type(answer).__name__}")
    return CopiedTo(answer.rows, answer.files, answer.manifest, answer.as_of)


async def await_copy_from(
    exchange: RequestExchange,
    request: CopyFromFiles,
    progress: Callable[[CopyFromProgress], object] | None,
) -> CopiedRows:
    """Send a request for a copy from files and wait for its answer, as `await_copy_to` does."""
    answer = await _answered(exchange, request, progress)
    if not isinstance(answer, CopiedFrom):
        raise RemoteProtocolError(f"the service answered CopyFrom with {type(answer).__name__}")
    return CopiedRows(answer.rows, answer.time, answer.repeated)


async def _answered(
    exchange: RequestExchange,
    request: CopyTo | CopyFromFiles,
    progress: Callable[[Any], object] | None,
) -> Any:
    number = request.request
    slot = await exchange.open(request)
    answered = False
    try:
        answer: Any = await exchange.next_answer(slot)
        while isinstance(answer, CopyProgressed | CopyFromProgress):
            if progress is not None:
                progress(answer)
            answer = await exchange.next_answer(slot)
        answered = True
    finally:
        exchange.close(number)
        # This task was cancelled: the service must drop the copy.
        if not answered and exchange.lost is None:
            await exchange.cancel(number)
    if isinstance(answer, RequestFailed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    return answer


def contents(answer: Any) -> ReadContents:
    """Return the answer of a read. Raises the error that the service sent instead."""
    if isinstance(answer, RequestFailed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    if not isinstance(answer, ReadContents):
        raise RemoteProtocolError(f"the service answered Read with {type(answer).__name__}")
    return answer


class AnswerCollector:
    """Collects the answers of one read and finishes their rows."""

    def __init__(self, spec: ReadSpec) -> None:
        self._spec = spec
        self._finisher: RowFinisher | None = None
        self._yielded = False
        self.ended = False
        """True if the service sends no further answer."""
        self.over = False
        """True if no further answer can change the rows."""

    def take(self, answer: Any) -> pa.Table | None:
        """Return the rows with their weight that are final after one more answer, or None; at least
        one table by the last answer unless `rest` has it. Raises the error that the service sent
        instead."""
        try:
            said = contents(answer)
        except PenstockError:
            self.ended = self.over = True
            raise
        self.ended = not said.more
        piece = from_ipc(said.arrow)
        if self._finisher is None:
            self._finisher = self._spec.finisher(piece.column_names)
        rows = self._finisher.add(piece)
        # A LIMIT without an order may be reached before the last answer: the rest is not waited
        # for.
        self.over = self.ended or self._finisher.complete
        if rows is None or not (rows.num_rows or (self.over and not self._yielded)):
            return None
        self._yielded = True
        return rows

    def rest(self) -> pa.Table | None:
        """Return the rows that an ORDER BY withheld until the last answer."""
        return None if self._finisher is None else self._finisher.end()
