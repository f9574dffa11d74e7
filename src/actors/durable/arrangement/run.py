"""A run: immutable updates sorted by key hash, in memory or as a mapped Arrow IPC file.

A run is a sequence of blocks (record batches) with `HASH` as the first column. Hashes ascend from
row to row and from block to block. A lookup is a binary search in the hash column and a `take` of
the rows found, so its cost depends on its keys, and the rest of a mapped file stays on disk.

A file is written completely, then mapped, and never changes. It is only a cache: nothing is
fsynced, and nothing is read after a restart.

Invariants: ``time_min <= every time <= time_max``; there are no times below `since`, because they
were advanced.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actors.durable.arrangement.hashing import ERROR_HASH, Hashes
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.runtime.errors import StorageError, StoreFull
from actors.runtime.progress import Time

HASH: Final = "__hash"
_SAMPLES_PER_BLOCK: Final = 1024


class RunBlock(msgspec.Struct, frozen=True, gc=False):
    """Consecutive rows of a run. `values` are only their user columns and `DIFF`, and `hashes`
    their hash column as a numpy array. None of these are copies."""

    rows: Any
    values: Any
    hashes: Hashes

    def find(self, wanted: Hashes) -> pa.RecordBatch | None:
        """Return the rows whose hash is among `wanted` (ascending, distinct); None if there are
        none."""
        first = np.searchsorted(self.hashes, wanted, "left")
        last = np.searchsorted(self.hashes, wanted, "right")
        counts = last - first
        total = int(counts.sum())
        if total == 0:
            return None
        before = np.cumsum(counts) - counts
        places = np.repeat(first - before, counts) + np.arange(total)
        return self.rows.take(pa.array(places))


class SortedRun(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Sorted updates with a summary of them."""

    blocks: tuple[RunBlock, ...]
    path: Path | None
    """The mapped file; None if in memory."""
    rows: int
    bytes: int
    since: Time
    """Times below it have been advanced to it."""
    time_min: Time
    time_max: Time
    time_middle: Time
    """About half of the rows have times at or below it."""
    has_errors: bool
    consolidated: bool
    """True if no two rows at one time are equal, and no diff is zero."""
    positive: bool
    """True if every diff is positive."""
    mapping: Any = None
    """The memory map of the file; None if in memory."""

    def find(self, wanted: Hashes) -> list[pa.RecordBatch]:
        """Return rows by hash (`wanted` is ascending and distinct), and all error updates."""
        if self.has_errors:
            # An error belongs to every result.
            wanted = np.unique(np.append(wanted, ERROR_HASH))
        found = []
        for block in self.blocks:
            low = np.searchsorted(wanted, block.hashes[0], "left")
            high = np.searchsorted(wanted, block.hashes[-1], "right")
            if low < high and (rows := block.find(wanted[low:high])) is not None:
                found.append(rows)
        return found

    def between(self, lower: np.uint64, upper: np.uint64 | None) -> list[pa.RecordBatch]:
        """Return rows with ``lower <= hash < upper`` (None: no upper bound) without copying."""
        found = []
        for block in self.blocks:
            first = int(np.searchsorted(block.hashes, lower, "left"))
            last = len(block.hashes)
            if upper is not None:
                last = int(np.searchsorted(block.hashes, upper, "left"))
            if first < last:
                found.append(block.rows.slice(first, last - first))
        return found

    def passed(self) -> None:
        """Release the mapped pages from memory after a walk. Other readers just reload them."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def remove(self) -> None:
        """Delete the file, if there is one."""
        # Safe while readers use it, because the pages live as long as the mapping.
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class _Facts:
    """Accumulates a run's summary while its blocks are written."""

    def __init__(self) -> None:
        # Totals over the blocks so far.
        self.rows = 0
        self.bytes = 0
        self.time_min: int | None = None
        self.time_max = 0
        self.has_errors = False
        self.distinct = True
        """True if no hash has occurred twice so far."""
        # Smallest diff (at most 1), and whether any diff is zero.
        self.diff_min = 1
        self.zeros = False
        self._last: np.uint64 | None = None
        """Last hash of the previous block."""
        self._samples: list[npt.NDArray[np.int64]] = []
        """Samples of the times."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Add a block, which must not be empty."""
        times: npt.NDArray[np.int64] = rows.column(TIME).to_numpy()
        low, high = int(times.min()), int(times.max())
        self.time_min = low if self.time_min is None else min(low, self.time_min)
        self.time_max = max(high, self.time_max)
        # A sample suffices, because the median time only guides compaction.
        self._samples.append(times[:: max(1, len(times) // _SAMPLES_PER_BLOCK)].copy())
        if ERROR in rows.schema.names:
            self.has_errors |= rows.column(ERROR).null_count < rows.num_rows
        hashes, diffs = rows.column(HASH).to_numpy(), rows.column(DIFF).to_numpy()
        # Hashes ascend, so a repeated hash is always in the next row, possibly in the next block.
        self.distinct = self.distinct and bool(
            hashes[0] != self._last and (hashes[1:] != hashes[:-1]).all()
        )
        self._last = hashes[-1]
        self.diff_min = min(self.diff_min, int(diffs.min()))
        self.zeros = self.zeros or not diffs.all()
        self.rows += rows.num_rows
        self.bytes += rows.nbytes

    def run(
        self, blocks: tuple[RunBlock, ...], path: Path | None, since: Time, consolidated: bool
    ) -> SortedRun:
        """Return the run, after all blocks were added."""
        samples = np.concatenate(self._samples)
        middle = int(np.partition(samples, len(samples) // 2)[len(samples) // 2])
        assert self.time_min is not None
        return SortedRun(
            blocks=blocks,
            path=path,
            rows=self.rows,
            bytes=path.stat().st_size if path is not None else self.bytes,
            since=since,
            time_min=self.time_min,
            time_max=self.time_max,
            time_middle=middle,
            has_errors=self.has_errors,
            consolidated=not self.zeros and (consolidated or self.distinct),
            positive=self.diff_min > 0,
        )


def _block(rows: pa.RecordBatch) -> RunBlock:
    hidden = (HASH, TIME, ERROR)
    values = rows.select([name for name in rows.schema.names if name not in hidden])
    return RunBlock(rows, values, rows.column(HASH).to_numpy())


def sort(updates: pa.Table, hashes: Hashes, block_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield updates in hash order, in blocks of `block_rows`, with the column `HASH` added."""
    order = np.argsort(hashes, kind="stable")
    keyed = updates.add_column(0, pa.field(HASH, pa.uint64()), pa.array(hashes)).combine_chunks()
    for start in range(0, len(order), block_rows):
        taken = keyed.take(pa.array(order[start : start + block_rows]))
        yield as_batch(taken)


def as_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table as one record batch."""
    (batch,) = table.combine_chunks().to_batches()
    return batch


def in_memory(
    batches: Iterable[pa.RecordBatch], since: Time, *, consolidated: bool = False
) -> SortedRun | None:
    """Return a run in memory; None if there are no rows. With `consolidated`, the caller guarantees
    that no two rows at one time are equal."""
    facts = _Facts()
    blocks = []
    for batch in batches:
        if batch.num_rows:
            facts.add(batch)
            blocks.append(_block(batch))
    return facts.run(tuple(blocks), None, since, consolidated) if blocks else None


def on_disk(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    since: Time,
    path: Path,
    *,
    consolidated: bool = False,
) -> SortedRun | None:
    """Write sorted batches to `path` and map them. Return None, and write no file, if there are no
    rows.

    With `consolidated`, the caller guarantees that no two rows at one time are equal. Raises
    `StoreFull` and `StorageError`, and then leaves no file.
    """
    facts = _Facts()
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                if batch.num_rows:
                    facts.add(batch)
                    writer.write_batch(batch)
        if facts.rows == 0:
            path.unlink()
            return None
        with path.open("rb") as file:
            # Mapped directly, not by Arrow, because `passed` needs the map for `madvise`.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = pa.ipc.open_file(pa.py_buffer(mapping))
        mapped = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _storage_error(error, path) from error
    made = facts.run(tuple(_block(batch) for batch in mapped), path, since, consolidated)
    return msgspec.structs.replace(made, mapping=mapping)


def _storage_error(error: OSError, path: Path) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space left to write the arrangement run {path}; free space, then try again",
            determinate=True,
        )
    return StorageError(f"cannot write the arrangement run {path}: {error}", determinate=True)
