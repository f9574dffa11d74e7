"""Answering peeks: rows at one time from an arrangement or a shard, as Arrow IPC.

The rows of a collection at `t` are its updates with ``time <= t``, summed. An error update
present at `t` is the answer instead (`ViewInError`: error or correct, never wrong), and so is a
negative sum (`Corrupt`: invalid data). Keys compare null-safe, all NaNs equal, -0.0 equal 0.0
(`compute.keys`).

Rows go through in batches (`Rows`), and every stage takes them one batch at a time: what is held
is what the answer needs. `at_once` answers a peek of few keys on the event loop; what it declines
goes to a thread (`index_rows`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.arrangement import Arrangement
from actors.arrangement.reading import is_plain
from actors.compute.answers import NOTHING
from actors.compute.keys import narrowed, one_key, select_keys, wanted_keys
from actors.errors import Corrupt, InvalidUsage, ViewInError, to_wire
from actors.plan.schema import DIFF, ERROR, Schema
from actors.plan.updates import between, consolidate, opening_of, stream_of
from actors.progress import Time
from actors.protocol.compute import Peek, PeekError, PeekRows, SourceImport

if TYPE_CHECKING:
    from actors.kernel import Clock
    from actors.persist import PersistClient

_ROWS_AT_ONCE_MAX: Final = 256
"""Rows under one key that are still answered on the event loop."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """Which part of an index a worker has: that of the hashes with ``hash % count == index``."""

    index: int
    count: int


def chosen_worker(name: str, count: int) -> int:
    """The worker that does what only one must do; the same in every process."""
    return zlib.crc32(name.encode()) % count


def error_of(error: Exception) -> PeekError:
    """A failure as the answer to a peek."""
    code, text, _ = to_wire(error)
    return PeekError(code, text)


def answer_schema(schema: Schema) -> pa.Schema:
    """User columns and `DIFF`."""
    return schema.arrow().append(pa.field(DIFF, pa.int64()))


# -- of an index ---------------------------------------------------------------------------------


def at_once(arrangement: Arrangement, peek: Peek, share: Share, bytes_max: int) -> PeekRows | None:
    """The answer where it costs less than a thread: one key of integers and text, few rows. None:
    it does not, or there is something to be said about it; ask `index_rows`. Raises
    `ReadBelowSince`, `InvalidUsage` and `Closed`."""
    key = one_key(arrangement.key, arrangement.key_types, peek)
    if key is None:
        return None
    view = arrangement.view(peek.time + 1)
    if key.hash % share.count != share.index:
        return None if any(run.has_errors for run in view.runs) else NOTHING
    places = view.point(key.hash)
    if places is None or len(places) > 1:
        return None
    if not places:
        return PeekRows(stream_of(arrangement.opening, ()), 0)
    ((run, block, first, beyond),) = places
    if not (is_plain(run, view.before) and run.positive and beyond - first <= _ROWS_AT_ONCE_MAX):
        return None
    rows = block.values.slice(first, beyond - first)
    for name, value in zip(arrangement.key, key.values, strict=True):
        if any(held.as_py() != value for held in rows.column(name)):
            return None  # another key of the same hash
    arrow = stream_of(arrangement.opening, (rows,))
    return PeekRows(arrow, rows.num_rows) if len(arrow) <= bytes_max else None


def index_rows(arrangement: Arrangement, peek: Peek, bytes_max: int) -> PeekRows:
    """Rows of one worker's partition at the peek's time. Blocking.

    Raises `ViewInError`, `Corrupt`, `InvalidUsage`, `ReadBelowSince` and `Closed` (the
    arrangement was replaced meanwhile).
    """
    schema = arrangement.schema
    keys = wanted_keys(schema, peek)
    view = arrangement.view(peek.time + 1)
    raise_error(view.errors())
    wanted = narrowed(arrangement.key, keys)
    return packed(selected(view.rows(wanted), keys), arrangement.opening, bytes_max)


def selected(batches: Iterator[pa.RecordBatch], keys: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """Rows of the keys, checked. Raises `Corrupt` for one that sums to less than 0."""
    for batch in batches:
        if keys is not None:
            batch = select_keys(batch, keys)
        if batch.num_rows:
            check_positive(batch)
            yield batch


def packed(batches: Iterator[pa.RecordBatch], opening: bytes, bytes_max: int) -> PeekRows:
    """The answer. Raises `InvalidUsage` as soon as it is too large."""
    size, rows = len(opening), 0

    def bounded() -> Iterator[pa.RecordBatch]:
        nonlocal size, rows
        for batch in batches:
            rows += batch.num_rows
            size += batch.nbytes
            if size > bytes_max:
                raise too_large(bytes_max)
            yield batch

    arrow = stream_of(opening, bounded())
    if len(arrow) > bytes_max:
        raise too_large(bytes_max)
    return PeekRows(arrow, rows)


def too_large(bytes_max: int) -> InvalidUsage:
    """The refusal of a result."""
    return InvalidUsage(
        f"the result takes more than result_bytes_max ({bytes_max}); read by key, or subscribe"
    )


def raise_error(errors: pa.Table) -> None:
    """Raises `ViewInError` for summed errors (`ERROR`, `DIFF`), `Corrupt` for a negative sum."""
    for text, diff in zip(errors[ERROR].to_pylist(), errors[DIFF].to_pylist(), strict=True):
        if diff < 0:
            raise Corrupt(f"invalid data: the error {text!r} sums to {diff}", determinate=True)
        raise ViewInError(text)


def check_positive(batch: pa.RecordBatch) -> None:
    """Raises `Corrupt` unless every row is there at least once."""
    diffs = batch.column(DIFF)
    if pc.min(diffs).as_py() < 0:
        bad = batch.filter(pc.less(diffs, pa.scalar(0, pa.int64()))).slice(0, 1)
        raise Corrupt(
            f"invalid data: a row sums to less than 0: {bad.to_pylist()[0]}", determinate=True
        )


# -- of a shard ----------------------------------------------------------------------------------


async def shard_rows(
    persist: PersistClient,
    clock: Clock,
    source: SourceImport,
    peek: Peek,
    bytes_max: int,
    reader_id: str,
) -> PeekRows:
    """Rows of a shard at the peek's time; waits until that time is sealed.

    `reader_id` names the lease and must be fresh. Raises as `index_rows` does, and what persist
    raises.
    """
    keys = wanted_keys(source.schema, peek)
    reader = await persist.open_reader(source.shard, reader_id)
    try:
        parts, _ = await reader.snapshot(peek.time)
        tables: list[pa.Table] = []
        for part in parts:
            if part.time_min > peek.time:
                continue
            updates = await persist.fetch(part, source.schema)
            tables.append(_below(updates, peek.time, keys))
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()
    return await clock.run_blocking(lambda: finish(tables, source.schema, keys, bytes_max))


def _below(updates: pa.Table, time: Time, keys: pa.Table | None) -> pa.Table:
    """What of a part can matter, so that a large part is not kept whole."""
    updates = between(updates, 0, time + 1)
    if keys is None:
        return updates
    wanted = select_keys(updates, keys)
    if ERROR not in updates.column_names:
        return wanted
    return pa.concat_tables([wanted.filter(pc.is_null(wanted[ERROR])), _errors(updates)])


def _errors(updates: pa.Table) -> pa.Table:
    return updates.filter(pc.is_valid(updates[ERROR]))


def finish(
    tables: list[pa.Table], schema: Schema, keys: pa.Table | None, bytes_max: int
) -> PeekRows:
    """Sums updates (all at times that count) to rows and packs them. Blocking."""
    errors = [
        _errors(table).select([ERROR, DIFF]) for table in tables if ERROR in table.column_names
    ]
    if errors:
        raise_error(consolidate(pa.concat_tables(errors)))
    healthy = [
        table.filter(pc.is_null(table[ERROR])) if ERROR in table.column_names else table
        for table in tables
    ]
    kind = answer_schema(schema)
    parts = [table.select(kind.names).cast(kind) for table in healthy]
    rows = consolidate(pa.concat_tables(parts) if parts else kind.empty_table())
    return packed(selected(iter(rows.to_batches()), keys), opening_of(kind), bytes_max)
