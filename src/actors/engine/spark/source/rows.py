"""Decodes parts into the batches that Spark gets. Pure."""

from __future__ import annotations

import zlib
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
from actors.engine.spark.source.options import ColumnCheck, passing
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import advance, between, consolidate
from actors.runtime.errors import CorruptData, TypeMismatch, ViewInError
from actors.runtime.progress import TIME_MIN, Frontier, Time

# Cuts a read into tasks, and divides its rows into those that must be summed and others. Pure
# A row's diffs may lie in several parts: an insert in one, its deletion in another. Only their sum
# says whether the row is there, so a task that gives out such a row must have seen all of them. But
# a row of which **no** diff is negative needs no sum: each part's updates of it can be given out
# where they are read. So the rows are divided by their hash:
#
# - *suspects*: rows whose hash is that of some negative update. A `SuspectHashes` is a bitmap of
#   the hashes' low bits, of a fixed size however many there are: it may take an innocent row for a
#   suspect, never the reverse.
# - A *direct* task reads its parts once and gives out all rows but suspects. It holds one part.
# - A *summing* task reads all parts, keeps the suspects of its share (by the hashes' high bits),
#   sums them, and gives out the sums. There are as many as it takes for each to keep no more than
#   `sum_rows_max` rows, as far as can be estimated.
#
# Without any part that may retract there are only direct tasks; with few rows one summing task does
# it all, and nothing is read to plan. Both kinds together give out each row exactly once.


_BITS: Final = 23
"""A bitmap has 2**23 bits: 1 MiB, less when it is compressed."""
TASKS_MAX: Final = 256


class SuspectHashes:
    """Hashes of rows that must be summed."""

    def __init__(self) -> None:
        self._bits = np.zeros(1 << (_BITS - 3), np.uint8)

    def add(self, hashes: Any) -> None:
        """Add uint64 hashes."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        marks = np.left_shift(np.uint8(1), (low & np.uint64(7)).astype(np.uint8))
        # By `at`, since several hashes may fall into one byte.
        np.bitwise_or.at(self._bits, (low >> np.uint64(3)).astype(np.int64), marks)

    def has(self, hashes: Any) -> Any:
        """Return a bool for each hash; never False for one that was added."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        found = self._bits[(low >> np.uint64(3)).astype(np.int64)]
        return (found >> (low & np.uint64(7)).astype(np.uint8)) & np.uint8(1) == 1

    def share(self) -> float:
        """Return the share of all rows that are taken for suspects if their hashes are spread
        evenly."""
        return float(np.unpackbits(self._bits).mean())

    def packed(self) -> bytes:
        """Return the bitmap, compressed, to be sent to tasks."""
        return zlib.compress(self._bits.tobytes(), 1)

    @staticmethod
    def unpacked(data: bytes) -> SuspectHashes:
        """Return the bitmap that `packed` packed."""
        made = SuspectHashes()
        made._bits = np.frombuffer(zlib.decompress(data), np.uint8)
        return made


class ReadTask(msgspec.Struct, frozen=True):
    """The read of one task. `share` (number, of how many): it sums the suspects of that share;
    None: it gives out rows that are no suspects. `suspects` is None: with a share every row is one,
    without a share none is."""

    parts: tuple[BatchPart, ...]
    share: tuple[int, int] | None = None
    suspects: bytes | None = None


def grouped(parts: Sequence[BatchPart], bytes_max: int) -> list[tuple[BatchPart, ...]]:
    """Return adjacent parts together as long as they are small; no more groups than tasks may
    be."""
    total = sum(part.bytes for part in parts)
    # The other half of the tasks is left to those that sum.
    most = max(bytes_max, -(-total // (TASKS_MAX // 2)))
    groups: list[list[BatchPart]] = []
    held = 0
    for part in parts:
        if not groups or held + part.bytes > most:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += part.bytes
    while len(groups) > TASKS_MAX // 2:  # many parts just over the half: pairs of them
        pairs = zip(groups[::2], [*groups[1::2], []], strict=False)
        groups = [one + other for one, other in pairs]
    return [tuple(group) for group in groups]


def direct(parts: Sequence[BatchPart], bytes_max: int) -> list[ReadTask]:
    """Return the tasks for parts without a negative diff."""
    return [ReadTask(group) for group in grouped(parts, bytes_max)]


def summing(parts: Sequence[BatchPart]) -> list[ReadTask]:
    """Return one task, which sums all parts."""
    return [ReadTask(tuple(parts), (0, 1))]


def divide_tasks(
    parts: Sequence[BatchPart], suspects: SuspectHashes, bytes_max: int, sum_rows_max: int
) -> list[ReadTask]:
    """Return direct tasks, and those that sum the suspects."""
    packed = suspects.packed()
    rows = sum(part.rows for part in parts)
    count = max(1, -(-int(rows * suspects.share()) // sum_rows_max))
    shares = min(count, TASKS_MAX // 2)
    tasks = [ReadTask(group, None, packed) for group in grouped(parts, bytes_max)]
    return tasks + [ReadTask(tuple(parts), (number, shares), packed) for number in range(shares)]


BATCH_ROWS_MAX: Final = 65_536
"""Rows of one batch for Spark."""


class ReadWindow(msgspec.Struct, frozen=True):
    """Selects the updates of a read: ``lower <= time < upper``, times below `raise_to` raised to
    it. `changes`: with their times and diffs; else summed to rows."""

    lower: Time
    upper: Frontier
    raise_to: Time
    changes: bool

    @classmethod
    def contents(cls, as_of: Time) -> ReadWindow:
        """Return the window of all rows at one time."""
        return cls(TIME_MIN, as_of + 1, as_of, False)

    def wants(self, part: BatchPart) -> bool:
        """Return whether some of the part's updates lie in the window."""
        return part.time_min < self.upper and part.time_max >= self.lower


class SchemaHistory(msgspec.Struct, frozen=True):
    """The schemas that a shard has had, oldest first, with which its parts were written."""

    known: tuple[TableSchema, ...]

    @classmethod
    def of(cls, state: ShardState) -> SchemaHistory:
        """Return all schemas of a shard."""
        return cls((*state.older, state.schema))

    def decode(self, part: BatchPart, data: bytes) -> pa.Table:
        """Return the updates in a part's bytes, at their times, with the columns that they were
        written with. Raises `CorruptData`."""
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
    """Return the updates of a part that are wanted, as that schema: the columns, `TIME` (of
    changes) and `DIFF`. Raises `CorruptData`, and `TypeMismatch` for what does not fit an older
    schema."""
    table = read_as(f"part {part.key}", schemas.decode(part, data), schema)
    if part.time_min < window.lower or part.time_max >= window.upper:
        table = between(table, window.lower, window.upper)
    # Errors inside the window were refused when the read was planned.
    if ERROR in table.column_names:
        table = table.filter(pc.is_null(table[ERROR])).drop_columns([ERROR])
    for column in schema.columns:
        if not column.nullable and table[column.name].null_count:
            raise TypeMismatch(
                f"part {part.key} was written with a newer schema, and holds NULL in"
                f" {column.name}, which was NOT NULL when this was loaded: load() it again"
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
    """Raise `ViewInError` for an error that their sum has, `CorruptData` for a negative sum."""
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
    """Return a hash of each update but its diff: equal ones have equal hashes."""
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
    """Return the updates that must be summed, of one share. `share`: (number, of how many)."""
    number, shares = share
    if not updates.num_rows or (suspects is None and shares == 1):
        return updates
    hashes = identities(updates)
    # By the high bits: the bitmap of suspects takes the low ones.
    mine = (hashes >> np.uint64(32)) % np.uint64(shares) == number
    if suspects is not None:
        mine &= suspects.has(hashes)
    return updates.filter(pa.array(mine))


class UpdateSum:
    """Sums equal updates, as they come. Keeps no more than `rows_max` beside those that remain."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._held: list[pa.Table] = []
        self._rows = 0
        self._limit = rows_max

    def add(self, updates: pa.Table) -> None:
        """Add updates."""
        self._held.append(updates)
        self._rows += updates.num_rows
        if self._rows > self._limit:
            self._held = [consolidate_by_hash(pa.concat_tables(self._held))]
            self._rows = self._held[0].num_rows
            # Twice what remains: rows that do not cancel out are not summed again at every part.
            self._limit = 2 * max(self._rows_max, self._rows)

    def sums(self) -> pa.Table | None:
        """Return the sums, none of them 0; None if no update was added."""
        return consolidate_by_hash(pa.concat_tables(self._held)) if self._held else None


def batches(updates: pa.Table, window: ReadWindow, shape: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches as Spark wants them: rows as often as they are there, or changes with both
    columns. Raises `CorruptData` for a row that is there less than no time."""
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
    # Rows are repeated a batch at a time: one diff alone may stand for more than memory holds.
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
