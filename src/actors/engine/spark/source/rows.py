"""Decodes parts into the batches that Spark receives. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist.compaction import consolidate_by_hash, row_hashes
from actors.durable.persist.parts import at_its_time, decode_written
from actors.durable.persist.schemas import read_as
from actors.durable.persist.shard import BatchPart, ShardState
from actors.engine.spark.source.pushed_filters import ColumnCheck, passing
from actors.engine.spark.source.read_tasks import SuspectHashes
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import advance, between, consolidate
from actors.runtime.errors import CorruptData, TypeMismatch, ViewInError
from actors.runtime.progress import TIME_MIN, Frontier, Time

BATCH_ROWS_MAX: Final = 65_536
"""Maximum number of rows of a batch for Spark."""


class ReadWindow(msgspec.Struct, frozen=True):
    """Selects the updates of a read: ``lower <= time < upper``, with times below `raise_to` raised
    to it. `changes`: true for updates with their times and diffs, false for rows made by summing
    them."""

    lower: Time
    upper: Frontier
    raise_to: Time
    changes: bool

    @classmethod
    def contents(cls, as_of: Time) -> ReadWindow:
        """Return the window of all rows at one time."""
        return cls(TIME_MIN, as_of + 1, as_of, False)

    def wants(self, part: BatchPart) -> bool:
        """Return whether some updates of the part are in the window."""
        return part.time_min < self.upper and part.time_max >= self.lower


class SchemaHistory(msgspec.Struct, frozen=True):
    """All schemas that a shard has had, the oldest first; its parts were written with them."""

    known: tuple[TableSchema, ...]

    @classmethod
    def of(cls, state: ShardState) -> SchemaHistory:
        """Return all schemas of a shard."""
        return cls((*state.older, state.schema))

    def decode(self, part: BatchPart, data: bytes) -> pa.Table:
        """Return the updates in the bytes of a part, at their times, with the columns that they
        were written with. Raises `CorruptData`."""
        if part.inline is not None:
            return at_its_time(part, decode_written(part, data, None))
        if not 0 <= part.schema_id < len(self.known):
            raise CorruptData(
                f"part {part.key} names schema {part.schema_id} of its shard, which has"
                f" {len(self.known)}",
                determinate=True,
            )
        return at_its_time(part, decode_written(part, data, self.known[part.schema_id]))


def updates_of(
    part: BatchPart,
    data: bytes,
    schemas: SchemaHistory,
    schema: TableSchema,
    window: ReadWindow,
    checks: Sequence[ColumnCheck],
) -> pa.Table:
    """Return the wanted updates of a part in the form of `schema`: the columns, `TIME` (for
    changes) and `DIFF`. Raises `CorruptData`, and `TypeMismatch` for values that do not fit an
    older schema."""
    table = read_as(f"part {part.key}", schemas.decode(part, data), schema)
    if part.time_min < window.lower or part.time_max >= window.upper:
        table = between(table, window.lower, window.upper)
    # Errors in the window were refused when the read was planned.
    if ERROR in table.column_names:
        table = table.filter(pc.is_null(table[ERROR])).drop_columns([ERROR])
    for column in schema.columns:
        if not column.nullable and table[column.name].null_count:
            raise TypeMismatch(
                f"part {part.key} was written with a newer schema and has NULL in {column.name},"
                " which was NOT NULL when the read was loaded: call load() again"
            )
    if checks:
        table = table.filter(passing(table, checks))
    return advance(table, window.raise_to) if window.changes else table.drop_columns([TIME])


def errors_of(part: BatchPart, data: bytes, schemas: SchemaHistory, upper: Frontier) -> pa.Table:
    """Return the error updates below a time: `ERROR` and `DIFF`."""
    table = schemas.decode(part, data)
    table = table.filter(
        pc.and_(pc.is_valid(table[ERROR]), pc.less(table[TIME], pa.scalar(upper, pa.int64())))
    )
    return table.select([ERROR, DIFF])


def refuse_errors(errors: Sequence[pa.Table], what: str) -> None:
    """Raise `ViewInError` for an error whose diffs have a positive sum, and `CorruptData` for a
    negative sum."""
    if not errors:
        return
    rest = consolidate(pa.concat_tables(errors)).to_pylist()
    for row in rest:
        if row[DIFF] < 0:
            raise CorruptData(
                f"{what}: the error {row[ERROR]!r} sums to {row[DIFF]}", determinate=True
            )
    if rest:
        raise ViewInError(f"{what} is in error: {rest[0][ERROR]}")


def identities(updates: pa.Table) -> Any:
    """Return a hash of each update without its diff, so that equal rows have equal hashes."""
    return row_hashes(updates.drop_columns([DIFF]))


def negative_hashes(updates: pa.Table) -> Any | None:
    """Return the hashes of updates with a negative diff; None if there are none."""
    negative = pc.less(updates[DIFF], pa.scalar(0, pa.int64()))
    if not pc.any(negative).as_py():
        return None
    return identities(updates.filter(negative))


def drop_suspects(updates: pa.Table, suspects: SuspectHashes | None) -> pa.Table:
    """Return the updates without those that must be summed."""
    if suspects is None or not updates.num_rows:
        return updates
    return updates.filter(pa.array(~suspects.has(identities(updates))))


def select_suspects(
    updates: pa.Table, suspects: SuspectHashes | None, share: tuple[int, int]
) -> pa.Table:
    """Return the updates of one share that must be summed. `share`: (number, count)."""
    number, shares = share
    if not updates.num_rows or (suspects is None and shares == 1):
        return updates
    hashes = identities(updates)
    # By the high bits, since the bitmap of suspects uses the low ones.
    mine = (hashes >> np.uint64(32)) % np.uint64(shares) == number
    if suspects is not None:
        mine &= suspects.has(hashes)
    return updates.filter(pa.array(mine))


class UpdateSum:
    """Sums equal updates as they arrive. It keeps at most `rows_max` updates in addition to those
    that remain."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        # Updates that are not summed yet, and the sums so far.
        self._held: list[pa.Table] = []
        # Number of rows in them.
        self._rows = 0
        # Number of rows at which they are summed again.
        self._limit = rows_max

    def add(self, updates: pa.Table) -> None:
        """Add updates, and sum up what is held if it exceeds the limit."""
        self._held.append(updates)
        self._rows += updates.num_rows
        if self._rows > self._limit:
            self._held = [consolidate_by_hash(pa.concat_tables(self._held))]
            self._rows = self._held[0].num_rows
            # Twice what remains, so that rows that do not cancel are not summed again at every
            # part.
            self._limit = 2 * max(self._rows_max, self._rows)

    def sums(self) -> pa.Table | None:
        """Return the sums that are not 0; None if no update was added."""
        return consolidate_by_hash(pa.concat_tables(self._held)) if self._held else None


def batches(updates: pa.Table, window: ReadWindow, shape: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches in the form that Spark expects: rows, each repeated as often as it occurs, or
    changes with both columns. Raises `CorruptData` for a row with a negative sum."""
    if window.changes:
        yield from _shaped(updates, shape)
        return
    diffs = updates[DIFF].to_numpy()
    if not len(diffs):
        return
    if diffs.min() < 0:
        bad = updates.filter(pc.less(updates[DIFF], pa.scalar(0, pa.int64()))).slice(0, 1)
        raise CorruptData(
            f"invalid data: a row sums to less than 0: {bad.to_pylist()[0]}", determinate=True
        )
    rows = updates.drop_columns([DIFF])
    if diffs.max() == 1 and diffs.min() == 1:
        yield from _shaped(rows, shape)
        return
    # Rows are repeated one batch at a time, since a single diff may stand for more rows than fit
    # into memory.
    ends = np.cumsum(diffs)
    for start in range(0, int(ends[-1]), BATCH_ROWS_MAX):
        wanted = np.arange(start, min(start + BATCH_ROWS_MAX, int(ends[-1])))
        yield from _shaped(rows.take(pa.array(np.searchsorted(ends, wanted, "right"))), shape)


def _shaped(table: pa.Table, shape: pa.Schema) -> Iterator[pa.RecordBatch]:
    table = table.rename_columns(shape.names)
    if not table.schema.equals(shape):
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(table.columns, shape, strict=True)
        ]
        table = pa.Table.from_arrays(columns, schema=shape)
    yield from table.to_batches(max_chunksize=BATCH_ROWS_MAX)
