"""The client's side of subscribes, copies and reads: turns the service's answers into results."""

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

# -- subscribes ------------------------------------------------------------------------------------


class ChangeBatch(msgspec.Struct, frozen=True):
    """All updates of a subscribe with ``lower <= time < upper``.

    To resume after them, subscribe with ``from_=upper``. `table` has the object's columns,
    ``__time`` and ``__diff`` (+1 for an insertion, -1 for a retraction); None for progress without
    updates.

    A large interval arrives in pieces: first `partial` ones, whose `upper` is their `lower`, then
    one with the interval's upper. If the subscribe ends before the last piece, discard the partial
    ones and resume from the upper of the last change that was not partial.
    """

    lower: Frontier
    upper: Frontier
    table: pa.Table | None = None
    partial: bool = False


class SubscribeSpec(msgspec.Struct, frozen=True):
    """The arguments of a subscribe, with the meaning that they have in `Client.subscribe`."""

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
    """Yield the changes of a subscribe, and note the objects that they come from in `rights`.

    If more than `waiting_bytes_max` bytes of changes are waiting here at the end of an interval,
    the subscribe is canceled, the waiting changes are yielded, and a new subscribe resumes after
    them. Raises the service's error, and `ConnectionBroken`.
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
                    # The cancellation may cut this interval short, and the next subscribe then
                    # sends it again from its lower. So withhold its pieces until the next arrives.
                    kept.append(change)
                    continue
                while kept:
                    yield kept.pop(0)
                yield change
                if change.partial:
                    continue
                # From now on, another subscribe resumes here instead of at the as_of.
                frontier, start = change.upper, None
                if not paused and slot.bytes > waiting_bytes_max:
                    paused = True
                    await exchange.cancel(number)
        finally:
            exchange.close(number)
            # The caller left the loop early, so tell the service to stop.
            if not ended and not paused and exchange.lost is None:
                await exchange.cancel(number)
        if isinstance(answer, RequestDone):
            return
        # If this client paused the subscribe, `OperationCanceled` is the expected answer: subscribe
        # again from `frontier`.
        if not (paused and answer.code == OperationCanceled.__name__):
            raise from_wire(answer.code, answer.text, answer.determinate)


async def concatenate_pieces(
    changes: AsyncGenerator[ChangeBatch, None],
) -> AsyncGenerator[ChangeBatch, None]:
    """Concatenate the pieces of changes, so that each yielded change is a complete interval.

    Holds one interval in memory, however large. Closes `changes` when it ends.
    """
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


# -- copies into and from files: progress messages, then one answer --------------------------------


CopyFormat: TypeAlias = Literal["parquet", "csv", "json"]


class CopiedTo(msgspec.Struct, frozen=True):
    """The result of a copy into files: `rows` as of `as_of`, in as many `files`, which the file
    `manifest` lists."""

    rows: int
    files: int
    manifest: str
    as_of: Time


class CopiedRows(msgspec.Struct, frozen=True):
    """The result of a durable copy from files: the number of `rows`, all at timestamp `time`.

    `repeated`: an earlier request with the same uuid made the copy.
    """

    rows: int
    time: Time
    repeated: bool


async def await_copy_to(
    exchange: RequestExchange, request: CopyTo, progress: Callable[[CopyProgressed], object] | None
) -> CopiedTo:
    """Send a request for a copy into files and wait for its answer.

    `progress` is called with each report. Cancellation also cancels the copy. Raises the service's
    error, and `ConnectionBroken`.
    """
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
        # This task was canceled, so the service must drop the copy.
        if not answered and exchange.lost is None:
            await exchange.cancel(number)
    if isinstance(answer, RequestFailed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    return answer


def contents(answer: Any) -> ReadContents:
    """Return the contents that answer a read. Raises the error if the service sent one instead."""
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
        """Orders and limits the rows; made from the columns of the first answer."""
        self._yielded = False
        """True once `take` has returned a table."""
        self.ended = False
        """True once the service has sent its last answer."""
        self.over = False
        """True once no other answer can change the result."""

    def take(self, answer: Any) -> pa.Table | None:
        """Add an answer, and return the rows that are final after it, with their diffs, or None.

        By the last answer at least one table was returned, unless ORDER BY left all rows to `rest`.
        Raises the error if the service sent one instead.
        """
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
        # A LIMIT without ORDER BY may be reached before the last answer.
        self.over = self.ended or self._finisher.complete
        if rows is None or not (rows.num_rows or (self.over and not self._yielded)):
            return None
        self._yielded = True
        return rows

    def rest(self) -> pa.Table | None:
        """Return the rows that ORDER BY held back until the last answer; None if there are none."""
        return None if self._finisher is None else self._finisher.end()
