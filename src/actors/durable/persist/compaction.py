"""Compaction: chooses batches to merge, and merges them in bounded memory, clustered by key.

**Choice.** The number of a shard's batches and the inline bytes in its document are limited. When a
limit is exceeded, the newest batches are merged until half the allowed number is left, and older
ones are included as long as they are at most twice the size of what is merged already. So sizes
decrease geometrically from old to new, an update is rewritten a logarithmic number of times, and
updates that cancel out are at most a constant factor of the live ones.

**Merge.** Times are raised to `shard.compact_to`, and equal rows are consolidated. Parts are read
one by one and merged in memory if they fit the budget. Otherwise rows spill to files: by ranges of
the first column of the shard's key if that is a number, a date or a timestamp, else by a hash of
their user columns. Either way equal rows end up in the same file. The budget counts decoded bytes,
and a merge takes about four times as much. One huge group of equal rows still needs its file in
memory.

**Clustering.** Rows of a part are sorted by time and, within a time, by the key's columns. Parts
that were split by ranges of the key cover disjoint ranges. So the statistics of parts are
selective, and partition pruning works on them.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist.parts import part_schema
from actors.durable.persist.shard import BatchPart, ShardBatch, ShardState, compact_to
from actors.durable.persist.statistics import column_of
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import advance, consolidate
from actors.runtime.errors import storage_error
from actors.runtime.progress import Time
from actors.runtime.threshold_probes import (
    BATCH_COUNT,
    COMPACTION_SPILL,
    INLINE_COMPACTION,
)

# -- clustering by key -----------------------------------------------------------------------------

POINTS: Final = 64
"""Number of sample points that represent the values of one part."""


def sort_by_key(updates: pa.Table, schema: TableSchema) -> pa.Table:
    """Return the updates in the order in which parts store them."""
    keys = [name for name in schema.key if not pa.types.is_nested(updates[name].type)]
    if not keys or updates.num_rows < 2:
        return updates
    order = [(name, "ascending") for name in (TIME, *keys)]
    return updates.take(pc.sort_indices(updates, sort_keys=order))


class KeyRanges:
    """Ranges of a key's first column with about equally many rows each. Equal rows have equal keys,
    so they are in the same range."""

    def __init__(self, column: str, cuts: Any) -> None:
        """Make ranges from ascending int64 cuts. Range n + 1 starts at cut n."""
        self._column = column
        self._cuts = cuts

    @property
    def count(self) -> int:
        """Return the number of ranges."""
        return len(self._cuts) + 1

    def places(self, rows: pa.Table) -> Any:
        """Return the range of each row. NULL is in the first range."""
        values = rows[self._column].combine_chunks()
        whole = _as_numbers(values)
        found = np.searchsorted(self._cuts, whole, side="right")
        if values.null_count:
            found[pc.is_null(values).to_numpy(zero_copy_only=False)] = 0
        return found


def choose_ranges(schema: TableSchema, parts: Iterable[BatchPart], count: int) -> KeyRanges | None:
    """Return at most `count` ranges for the rows of the parts; None without usable statistics."""
    if not schema.key or count < 2:
        return None
    column = schema.key[0]
    kind = schema.arrow().field(column).type
    if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return None
    # An estimate, as if each part's values were distributed evenly between its bounds. If it is
    # wrong, a range is too large and the merger splits it by hash.
    points: list[Any] = []
    weights: list[float] = []
    for part in parts:
        known = column_of(part.statistics, column)
        if known is not None and known.low is not None and known.high is not None:
            low, high = int(known.low), int(known.high)
            points += [low + (high - low) * step // (POINTS - 1) for step in range(POINTS)]
            weights += [part.rows / POINTS] * POINTS
    if not points:
        return None
    values = np.array(points, np.int64)
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.array(weights)[order])
    wanted = below[-1] * np.arange(1, count) / count
    cuts = np.unique(values[order][np.searchsorted(below, wanted)])
    # A cut at the minimum would leave the first range empty.
    cuts = cuts[cuts > values.min()]
    return KeyRanges(column, cuts) if len(cuts) else None


def _as_numbers(values: pa.Array) -> Any:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if pa.types.is_temporal(values.type):
        values = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
    whole = pc.fill_null(values.cast(pa.int64()), pa.scalar(0, pa.int64()))
    return whole.to_numpy(zero_copy_only=False)


# -- choice and merge of batches -------------------------------------------------------------------

GROWTH: Final = 2
BATCH_BYTES_MIN: Final = 4096
"""Minimum size that counts for a batch, because even an empty one has a cost."""
FILES_MAX: Final = 256
FILE_BUDGETS_MAX = 4
"""A spilled file of up to this many times the merge's byte budget is merged in one piece."""
HASHED_ROWS = 131_072


def choose_batches(
    state: ShardState, batches_max: int, inline_bytes_max: int
) -> tuple[tuple[ShardBatch, ...], bool] | None:
    """Return the adjacent batches to merge, and whether the result must be a blob; None if no merge
    is due."""
    batches = state.batches
    over = INLINE_COMPACTION.crossed(state.inline_bytes > inline_bytes_max)
    if not BATCH_COUNT.crossed(len(batches) > batches_max) and not over:
        return None
    sizes = [max(BATCH_BYTES_MIN, batch.bytes) for batch in batches]
    keep = max(1, batches_max // 2)
    first = len(batches) - 1
    # The document exceeds its limit: all inline parts, and the batches after them, go to a blob.
    if over:
        first = min(i for i, batch in enumerate(batches) if batch.inline_bytes)
    total = sum(sizes[first:])
    while first > 0 and (first >= keep or sizes[first - 1] <= GROWTH * total):
        first -= 1
        total += sizes[first]
    return batches[first:], over


def worth_merging(state: ShardState) -> bool:
    """Return whether merging all batches would combine any of them, or advance any times."""
    filled = [batch for batch in state.batches if batch.parts]
    if not filled:
        return False
    to = compact_to(state, state.batches[-1].upper)
    return len(filled) > 1 or any(part.time_min < to for part in filled[0].parts)


RECLAIM_SHARE: Final = 10
"""A merge of all batches is worthwhile if it can free one part in this many of a shard's bytes."""


def worth_reclaiming(state: ShardState) -> bool:
    """Return whether merging all batches would free a considerable part of the blobs: rows that
    were retracted at times that can no longer be read.

    Because sizes decrease geometrically, up to as many such rows as live rows remain as long as
    nothing is appended.
    """
    parts = [part for batch in state.batches for part in batch.parts]
    if not any(part.key for part in parts):
        return False
    # Rows of a single time are already summed; a merge would not change anything.
    if len({time for part in parts for time in (part.time_min, part.time_max)}) == 1:
        return False
    to = compact_to(state, state.batches[-1].upper)
    # A part with later times would have to be merged again once the since has passed them.
    gone = sum(part.bytes for part in parts if part.retracts and part.time_max <= to)
    return gone * RECLAIM_SHARE >= sum(part.bytes for part in parts)


class UpdateMerger:
    """Merges updates, spilling to files beyond a memory budget. Blocking; calls are serialized."""

    def __init__(
        self,
        schema: TableSchema,
        *,
        to: Time,
        rows: int,
        errors: bool,
        bytes_max: int,
        scratch: Path | None,
        parts: Sequence[BatchPart] = (),
        part_bytes: int = 0,
    ) -> None:
        """Make a merger. Without `scratch` nothing is spilled.

        `rows` is the number of updates to come, and `parts` are their parts, used for statistics.
        `part_bytes` is the decoded size of the tables that `take` returns.
        """
        self._schema = schema
        self._parts = parts
        self._ranges: KeyRanges | None = None
        """How spilled rows are split; None to split by hash."""
        self._shape = part_schema(schema, errors=errors)
        self._names = list(schema.names)
        self._to = to
        self._rows = rows
        self._bytes_max = bytes_max
        self._part_bytes = part_bytes
        self._scratch = scratch
        # Rows in memory: their tables, and their bytes and number.
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._held_rows = 0
        self._writers: list[Any] = []
        """Files that rows are spilled to; empty while everything is in memory."""
        # If its caller is cancelled, a call continues in its thread; `close` waits for it.
        self._turn = threading.Lock()
        self._closed = False
        self._tables: Iterator[pa.Table] | None = None
        """Results of the merge; None before the first `take`."""

    def add(self, updates: pa.Table) -> None:
        """Add the updates of one part. Raises `StorageError` and `StoreFull`."""
        with self._turn:
            if not self._closed:
                self._add(updates)

    def take(self) -> pa.Table | None:
        """Return the next table of consolidated updates, disjoint from all others; None at the end.
        Raises `StorageError`."""
        with self._turn:
            if self._closed:
                return None
            if self._tables is None:
                # Results of several files fill one part. Otherwise a large shard would have more
                # parts, and a larger document, after each merge.
                self._tables = concat_to_size(self._merged(), self._part_bytes)
            table = next(self._tables, None)
            if table is None:
                self._tables = None
            return table

    def _add(self, table: pa.Table) -> None:
        if ERROR in self._shape.names and ERROR not in table.column_names:
            table = table.append_column(ERROR, pa.nulls(table.num_rows, pa.string()))
        table = advance(table.select(self._shape.names), self._to)
        if self._writers:
            self._spill(table)
            return
        self._held.append(table)
        self._held_bytes += table.nbytes
        self._held_rows += table.num_rows
        if self._held_bytes > self._bytes_max:
            # Consolidate before spilling, because updates that cancel out may be all that exceeds
            # the budget.
            self._consolidate_held()
            if self._scratch is not None and self._held_bytes > self._bytes_max:
                COMPACTION_SPILL.crossed(True)
                self._start_spilling(self._scratch)

    def _consolidate_held(self) -> None:
        merged = consolidate_by_hash(pa.concat_tables(self._held))
        self._held, self._held_bytes = [merged], merged.nbytes

    def _start_spilling(self, scratch: Path) -> None:
        # Extrapolated from the rows so far, so that each file fits the budget.
        share = self._held_bytes // self._bytes_max + 1
        count = share * max(1, -(-self._rows // max(1, self._held_rows)))
        try:
            scratch.mkdir(parents=True)
            count = min(FILES_MAX, max(2, count))
            self._ranges = choose_ranges(self._schema, self._parts, count)
            count = count if self._ranges is None else self._ranges.count
            self._writers = self._open(scratch, "", count)
        except OSError as error:
            raise storage_error(f"spill to {scratch}", error) from error
        for table in self._held:
            self._spill(table)
        self._held, self._held_bytes = [], 0

    def _open(self, scratch: Path, prefix: str, count: int) -> list[Any]:
        writers = []
        for index in range(count):
            sink = pa.OSFile(str(scratch / f"{prefix}{index}.arrow"), "wb")
            writers.append((pa.ipc.new_stream(sink, self._shape), sink))
        return writers

    def _spill(self, table: pa.Table) -> None:
        if self._ranges is None:
            places = self._by_hash(table, len(self._writers))
        else:
            places = self._ranges.places(table)
        try:
            _write(self._writers, table, places)
        except OSError as error:
            raise storage_error(f"spill to {self._scratch}", error) from error

    def _by_hash(self, table: pa.Table, count: int) -> Any:
        return row_hashes(table.select(self._names)) % np.uint64(count)

    def _merged(self) -> Iterator[pa.Table]:
        if not self._writers:
            COMPACTION_SPILL.crossed(False)
            if self._held:
                yield sort_by_key(consolidate_by_hash(pa.concat_tables(self._held)), self._schema)
            return
        assert self._scratch is not None
        try:
            _end(self._writers)
            for index in range(len(self._writers)):  # computed once, because `_cut` appends writers
                for path in self._cut(self._scratch, self._scratch / f"{index}.arrow"):
                    with pa.OSFile(str(path), "rb") as source:
                        table = pa.ipc.open_stream(source).read_all()
                    os.unlink(path)
                    yield sort_by_key(consolidate_by_hash(table), self._schema)
        except OSError as error:
            raise storage_error(f"read back {self._scratch}", error) from error

    def _cut(self, scratch: Path, path: Path) -> list[Path]:
        """Split a file that is far too large by hash. Return the files that replace it."""
        count = min(FILES_MAX, path.stat().st_size // self._bytes_max)
        # The estimate of a range may be wrong; hashing has already spread the rows evenly.
        if self._ranges is None or count <= FILE_BUDGETS_MAX:
            return [path]
        prefix = f"{path.stem}-"
        writers = self._open(scratch, prefix, count)
        self._writers += writers  # so that they are closed in any case
        with pa.OSFile(str(path), "rb") as source:
            for batch in pa.ipc.open_stream(source):
                table = pa.Table.from_batches([batch])
                _write(writers, table, self._by_hash(table, count))
        _end(writers)
        os.unlink(path)
        return [scratch / f"{prefix}{index}.arrow" for index in range(count)]

    def close(self) -> None:
        """Remove the files after the current call has ended."""
        with self._turn:
            self._closed = True
            self._close()

    def _close(self) -> None:
        self._held = []
        if self._writers:
            for writer, sink in self._writers:
                try:
                    writer.close()
                    sink.close()
                except (OSError, pa.ArrowException):
                    continue  # they are removed anyway
            self._writers = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _write(writers: Sequence[Any], table: pa.Table, places: Any) -> None:
    for index, (writer, _) in enumerate(writers):
        rows = np.flatnonzero(places == index)
        if len(rows):
            writer.write_table(table.take(pa.array(rows)))


def _end(writers: Sequence[Any]) -> None:
    for writer, sink in writers:
        writer.close()
        sink.close()


def concat_to_size(tables: Iterator[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yield the tables, concatenated up to `size` bytes."""
    held: list[pa.Table] = []
    bytes_held = 0
    for table in tables:
        if held and bytes_held + table.nbytes > size:
            yield pa.concat_tables(held)
            held, bytes_held = [], 0
        held.append(table)
        bytes_held += table.nbytes
    if held:
        yield pa.concat_tables(held)


def input_rows(inputs: Sequence[ShardBatch]) -> int:
    """Return the number of rows in all parts."""
    return sum(batch.rows for batch in inputs)


def consolidate_by_hash(updates: pa.Table) -> pa.Table:
    """Consolidate the updates, with the same result as `consolidate`."""
    # Grouping takes several times the memory of its rows, so group only rows whose hash occurs more
    # than once.
    hashes = row_hashes(updates.drop_columns([DIFF]))
    order = np.argsort(hashes)
    same = hashes[order][1:] == hashes[order][:-1]
    shared = np.zeros(len(hashes), np.bool_)
    shared[order[1:]] = same
    shared[order[:-1]] |= same
    del order, same
    alone = ~shared & (updates[DIFF].to_numpy() != 0)
    if alone.all():
        return updates
    rest = consolidate(updates.filter(pa.array(shared)))
    return pa.concat_tables([updates.filter(pa.array(alone)), rest])


def row_hashes(rows: pa.Table) -> Any:
    """Return a uint64 hash for each row, equal for rows with equal bits.

    Nested columns count only if there are no others. Memory in addition to the result is bounded.
    """
    # Each text value becomes a Python object meanwhile.
    starts = range(0, max(1, rows.num_rows), HASHED_ROWS)
    return np.concatenate([_row_hashes(rows.slice(start, HASHED_ROWS)) for start in starts])


def _row_hashes(rows: pa.Table) -> Any:
    total = np.zeros(rows.num_rows, dtype=np.uint64)
    flat = [name for name in rows.column_names if not pa.types.is_nested(rows[name].type)]
    with np.errstate(over="ignore"):
        for name in flat or rows.column_names:
            total = (total ^ _column_hashes(rows[name])) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(29)
    return total


def _column_hashes(column: pa.ChunkedArray) -> Any:
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # no chunks, or too many bytes for one
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], column.type)
    kind = values.type
    if pa.types.is_nested(kind):
        texts = (repr(value).encode() for value in values.to_pylist())
        return np.fromiter((zlib.crc32(text) for text in texts), np.uint64, len(values))
    if pa.types.is_null(kind):
        return np.zeros(len(values), dtype=np.uint64)
    if pa.types.is_floating(kind):
        values = values.view(pa.int64() if pa.types.is_float64(kind) else pa.int32())
    elif pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif pa.types.is_decimal128(kind):
        return _decimal_hashes(values)
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return _by_dictionary(values)
    whole = pc.fill_null(values.cast(pa.int64()), pa.scalar(-1, pa.int64()))
    return np.asarray(whole.to_numpy(zero_copy_only=False)).view(np.uint64)


def _decimal_hashes(values: pa.Array) -> Any:
    """Hash both 64-bit halves of each number."""
    if not len(values):
        return np.zeros(0, np.uint64)
    whole = np.frombuffer(values.buffers()[1], np.uint64)
    halves = whole[2 * values.offset : 2 * (values.offset + len(values))].reshape(-1, 2)
    hashes = halves[:, 0] ^ (halves[:, 1] * np.uint64(0x9E3779B97F4A7C15))
    if values.null_count:
        hashes[pc.is_null(values).to_numpy(zero_copy_only=False)] = np.uint64(1)
    return hashes


def _by_dictionary(values: pa.Array) -> Any:
    """Hash strings, binaries and other types, each distinct value once."""
    encoded = values.dictionary_encode()
    texts = (
        value if isinstance(value, bytes) else str(value).encode()
        for value in encoded.dictionary.to_pylist()
    )
    sums = np.fromiter((zlib.crc32(t) for t in texts), np.uint64, len(encoded.dictionary))
    codes = pc.fill_null(encoded.indices, len(sums)).to_numpy(zero_copy_only=False)
    return np.append(sums, np.uint64(0))[codes]
