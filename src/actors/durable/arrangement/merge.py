"""Merges runs: chooses which ones, and merges them in bounded memory.

Runs are ordered by age. `merge_from` keeps every run larger than all newer ones together, so there
are at most ``log2(rows) + 1`` runs, and a row is rewritten at most that often. A merge walks the
hash space in slices of about one block of rows each. It takes the slice from every run without
copying, raises times to `since`, sums the diffs of equal rows, drops zeros, and writes the block.
Equal rows have equal hashes, so they are in the same slice. So memory is limited to a few blocks
whatever the runs' size (except if one key alone fills more than a block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.hashing import Hashes
from actors.durable.arrangement.run import HASH, SortedRun, as_batch, in_memory, on_disk
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.model.plan.updates import advance, consolidate
from actors.runtime.progress import Time


def merge_from(sizes: Sequence[int]) -> int:
    """Return the index of the oldest run to merge together with all newer ones; ``len(sizes)`` if
    none need merging.

    `sizes` are numbers of rows, oldest run first.
    """
    start = len(sizes)
    newer = 0
    for index in range(len(sizes) - 1, -1, -1):
        if newer and sizes[index] <= newer:
            start = index
        newer += sizes[index]
    return start


def wants_compaction(run: SortedRun, since: Time) -> bool:
    """Return whether rewriting this run alone, with times advanced to `since`, is likely to pay
    off."""
    # True once half of the rows would share a time, because their history may then cancel out. This
    # happens at most once per run (``run.since < run.time_middle``), so the cost is amortized.
    return run.time_min < min(since, run.time_max) and run.since < run.time_middle <= since


def merge(
    runs: Sequence[SortedRun],
    schema: pa.Schema,
    since: Time,
    path: Path,
    *,
    memory_bytes: int,
    block_bytes: int,
) -> SortedRun | None:
    """Merge the runs into one consolidated run; None if everything cancels out.

    `schema` is that of the rows with `HASH` and without `ERROR`. The result stays in memory if the
    inputs have at most `memory_bytes`, and is written to `path` otherwise. Raises `StoreFull` and
    `StorageError`.
    """
    if any(run.has_errors for run in runs):
        schema = schema.append(pa.field(ERROR, pa.string()))
    rows = sum(run.rows for run in runs)
    bytes_ = sum(run.bytes for run in runs)
    if bytes_ <= memory_bytes:
        return in_memory(_slices(runs, schema, since, 1), since, consolidated=True)
    count = max(1, min(bytes_ // block_bytes + 1, rows))
    slices = _slices(runs, schema, since, count)
    return on_disk(slices, schema, since, path, consolidated=True)


def _slices(
    runs: Sequence[SortedRun], schema: pa.Schema, since: Time, count: int
) -> Iterator[pa.RecordBatch]:
    lower = np.uint64(0)
    for upper in [*boundaries(runs, count), None]:
        batches = [batch for run in runs for batch in run.between(lower, upper)]
        if batches:
            tables = [_with_schema(pa.Table.from_batches([batch]), schema) for batch in batches]
            merged = _consolidate(advance(pa.concat_tables(tables), since))
            if merged.num_rows:
                yield as_batch(merged)
        if upper is not None:
            lower = upper


def boundaries(runs: Sequence[SortedRun], count: int) -> Hashes:
    """Return ascending hashes that cut the rows of all runs into about `count` slices of equal
    size."""
    if count <= 1:
        return np.empty(0, np.uint64)
    rows = sum(run.rows for run in runs)
    stride = max(1, rows // (count * 64))
    samples = np.sort(
        np.concatenate([block.hashes[::stride] for run in runs for block in run.blocks])
    )
    picked = np.unique(samples[(np.arange(1, count) * len(samples)) // count])
    return picked[picked > 0]


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if ERROR in schema.names and ERROR not in table.column_names:
        nulls = pa.nulls(table.num_rows, pa.string())
        table = table.append_column(pa.field(ERROR, pa.string()), nulls)
    return table.select(schema.names)


def _consolidate(updates: pa.Table) -> pa.Table:
    """Return the updates consolidated and in hash order."""
    # Only rows that share hash and time with another row can be equal, so only those are grouped,
    # which is slow.
    hashes = updates[HASH].to_numpy()
    times = updates[TIME].to_numpy()
    order = np.lexsort((times, hashes))
    hashes, times = hashes[order], times[order]
    same = (hashes[1:] == hashes[:-1]) & (times[1:] == times[:-1])
    updates = updates.combine_chunks().take(pa.array(order))
    if not same.any():
        return updates.filter(pc.not_equal(updates[DIFF], pa.scalar(0, pa.int64())))
    shared = np.append(same, False) | np.append(False, same)
    alone = updates.filter(pa.array(~shared))
    alone = alone.filter(pc.not_equal(alone[DIFF], pa.scalar(0, pa.int64())))
    both = pa.concat_tables([alone, consolidate(updates.filter(pa.array(shared)))])
    return both.take(pa.array(np.argsort(both[HASH].to_numpy(), kind="stable")))
