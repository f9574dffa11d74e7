"""An arrangement: a collection indexed by key, with the times of its updates.

Inserts become runs (`run`), sorted by key hash (`hashing`). A lookup searches every run. `maintain`
merges runs (`merge`), so that there are few. Readers use one immutable record (`_State`) that is
replaced atomically, so lookups take no lock and see one moment. Small runs stay in memory, within a
budget; larger ones are mapped files.

Rules.
- One thread inserts at a time. `maintain` may run concurrently with it and with any number of
  readers.
- ``lower <= time < upper`` for every insert, where `lower` is the previous upper. Only the initial
  contents may arrive in pieces, with `fill`, before the first insert.
- Reads are at ``time < before`` with ``since < before <= upper``. Other reads are refused, never
  wrong.
- A lookup returns a superset: all updates whose key columns equal a given row as Spark may see it,
  some others, and every error update (an error belongs to the whole collection). The result is
  neither consolidated nor ordered.

An arrangement is not persistent: a new one starts empty, whatever its directory contains.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.hashing import Hashes, check_key_type, hash_columns, key_hashes
from actors.durable.arrangement.key_conversion import conform
from actors.durable.arrangement.merge import merge, merge_from, wants_compaction
from actors.durable.arrangement.run import HASH, SortedRun, in_memory, on_disk, sort
from actors.durable.arrangement.snapshot import ArrangementSnapshot
from actors.model.plan.schema import ERROR, TIME, TableSchema
from actors.model.plan.updates import advance, encode_stream_header
from actors.runtime.errors import InvalidUsage, ReadBelowSince, ResourceClosed
from actors.runtime.progress import Frontier, Time, format_frontier

_RUN_NUMBERS: Final = itertools.count()
"""Numbers unique in the process, so that a new arrangement in an old one's directory never reuses a
file name."""


class ArrangementLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one arrangement; sizes in bytes."""

    memory_run_bytes_max: int = 1 << 20
    """Size above which a run is written to a file."""
    memory_bytes_max: int = 4 << 20
    """Maximum total size of runs in memory."""
    memory_runs_max: int = 8
    """Number of runs in memory above which an insert merges small runs itself, so that lookups stay
    fast between calls of `maintain`."""
    block_bytes: int = 64 << 20
    """Target size of a block in a merged run. A merge holds a block in memory."""


DEFAULT_LIMITS = ArrangementLimits()


class ArrangementStatistics(msgspec.Struct, frozen=True):
    """Sizes of an arrangement at one moment."""

    rows: int
    """Number of updates before consolidation."""
    runs: int
    bytes_mapped: int
    bytes_memory: int
    rows_read: int
    """Number of updates that lookups have copied out of runs so far."""


class _State(msgspec.Struct, frozen=True):
    """Runs, oldest first, and the range of times that readers can ask for."""

    runs: tuple[SortedRun, ...] = ()
    upper: Frontier = 0
    since: Time = 0


def partition(updates: pa.Table, key: tuple[str, ...], count: int) -> list[pa.Table]:
    """Split updates over `count` owners by key hash, in the same way in every process.

    Equal keys, and all error updates, have the same owner. Raises `InvalidUsage` for a count below
    1.
    """
    if count < 1:
        raise InvalidUsage(f"invalid number of partitions {count}: expected at least 1")
    if count == 1:
        return [updates]
    owners = key_hashes(updates, key) % np.uint64(count)
    # One stable sort, then slices that are not copied.
    order = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners.astype(np.int64), minlength=count)
    sorted_updates = updates.take(pa.array(order))
    starts = np.cumsum(sizes) - sizes
    return [
        sorted_updates.slice(int(start), int(size))
        for start, size in zip(starts, sizes, strict=True)
    ]


def check_key(schema: TableSchema, key: tuple[str, ...]) -> None:
    """Raise `InvalidUsage` if a key column is not in the schema or cannot be compared."""
    updates = schema.arrow_updates()
    for name in key:
        if name not in schema.names:
            raise InvalidUsage(
                f"key column {name} does not exist (available: {', '.join(schema.names)})"
            )
        check_key_type(name, updates.field(name).type)


class Arrangement:
    """A collection indexed by key. Its calls block (on files), so call it off the event loop."""

    def __init__(
        self,
        directory: Path,
        schema: TableSchema,
        key: tuple[str, ...],
        limits: ArrangementLimits | None = None,
    ) -> None:
        """Start empty, with files in `directory` (created if needed; old runs in it are removed).

        With an empty `key` every lookup is a scan. Raises `InvalidUsage` if a key column is not in
        the schema or cannot be compared.
        """
        check_key(schema, key)
        self.schema = schema
        self.key = key
        self._limits = limits or DEFAULT_LIMITS
        self._updates_schema = schema.arrow_updates()
        self.opening = encode_stream_header(self._updates_schema.remove(len(schema.columns)))
        """Header of an Arrow IPC stream of rows: the user's columns and their weight."""
        self.key_types = tuple(self._updates_schema.field(name).type for name in key)
        self._run_schema = self._updates_schema.insert(0, pa.field(HASH, pa.uint64()))
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # Runs of a crashed process, which are never read again.
        for left in directory.glob("run-*.arrow"):
            left.unlink()
        self._state = _State()
        """Replaced as a whole by every insert, merge and compaction."""
        self._rows_read = 0
        self._closed = False
        self._lock = threading.Lock()
        """Guards the replacement of `_state`; held only briefly."""
        self._merging = threading.Lock()
        """Held while runs are merged, so that there is one merge at a time."""

    @property
    def upper(self) -> Frontier:
        """Return the upper: all updates below it are inserted."""
        return self._state.upper

    @property
    def since(self) -> Time:
        """Return the since: reads need ``before > since`` (any `before` while it is 0)."""
        return self._state.since

    # -- writing ----------------------------------------------------------------------------------

    def fill(self, updates: pa.Table) -> None:
        """Add updates before the first insert, which must move the upper beyond all of them. Times
        below `since` are advanced to it. Raises the same errors as `insert`."""
        self._check_open()
        if self._state.upper:
            raise InvalidUsage("cannot fill an arrangement that already has inserts")
        if updates.num_rows:
            self._append(self._make_run(advance(updates, self._state.since)), 0)

    def insert(self, updates: pa.Table, upper: Frontier, *, consolidated: bool = False) -> None:
        """Add updates with times from the current upper to below `upper`, and advance the upper.

        `consolidated` means that no two updates at the same time are equal, which makes reading
        them cheap. Raises `InvalidUsage` if `upper` goes back or a time is out of range,
        `ResourceClosed`, and `StorageError` (then nothing was inserted).
        """
        self._check_open()
        lower = self._state.upper
        if upper < lower:
            raise InvalidUsage(
                f"cannot insert up to {format_frontier(upper)}: the arrangement's upper is already "
                f"{format_frontier(lower)}"
            )
        if updates.num_rows:
            times = pc.min_max(updates[TIME])
            low, high = times["min"].as_py(), times["max"].as_py()
            if low < lower or high >= upper:
                raise InvalidUsage(
                    f"updates at times {low} to {high} are not in [{lower}, {upper})"
                )
        self._append(self._make_run(updates, consolidated) if updates.num_rows else None, upper)

    def _append(self, run: SortedRun | None, upper: Frontier) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                runs = self._state.runs if run is None else (*self._state.runs, run)
                self._state = _State(runs, upper, self._state.since)
        if closed:  # `close` did not see this run's file
            if run is not None:
                run.remove()
            self._check_open()
        self._merge_small()

    def _make_run(self, updates: pa.Table, consolidated: bool = False) -> SortedRun | None:
        schema = self._updates_schema
        if ERROR in updates.column_names and updates[ERROR].null_count < updates.num_rows:
            schema = schema.append(pa.field(ERROR, pa.string()))
        updates = updates.select(schema.names).cast(schema)
        hashes = key_hashes(updates, self.key)
        state, limits = self._state, self._limits
        size = updates.nbytes + hashes.nbytes
        in_use = sum(run.bytes for run in state.runs if run.path is None)
        if size <= limits.memory_run_bytes_max and in_use + size <= limits.memory_bytes_max:
            batches = sort(updates, hashes, len(hashes))
            return in_memory(batches, state.since, consolidated=consolidated)
        block_rows = max(1, limits.block_bytes * updates.num_rows // max(1, size))
        schema = schema.insert(0, pa.field(HASH, pa.uint64()))
        batches = sort(updates, hashes, block_rows)
        path = self._new_path()
        return on_disk(batches, schema, state.since, path, consolidated=consolidated)

    def allow_compaction(self, since: Time) -> None:
        """Advance the since; `maintain` may then advance times to it. An earlier since has no
        effect."""
        with self._lock:
            state = self._state
            self._state = _State(state.runs, state.upper, max(state.since, since))

    # -- maintenance ------------------------------------------------------------------------------

    def merge_due(self) -> bool:
        """Return whether `maintain` has work to do."""
        state = self._state
        sizes = [run.rows for run in state.runs]
        return merge_from(sizes) < len(sizes) or any(
            wants_compaction(run, state.since) for run in state.runs
        )

    def maintain(self) -> None:
        """Merge runs until few are left, and compact old times. May run concurrently with an
        insert.

        Raises `StoreFull` and `StorageError`; then the arrangement is unchanged.
        """
        with self._merging:
            while not self._closed and self._maintain_once():
                pass

    def _maintain_once(self) -> bool:
        state = self._state
        start = merge_from([run.rows for run in state.runs])
        if start < len(state.runs):
            self._replace(start, len(state.runs), state)
            return True
        for index, run in enumerate(state.runs):
            if wants_compaction(run, state.since):
                self._replace(index, index + 1, state)
                return True
        return False

    def _merge_small(self) -> None:
        """Limit the number of runs in memory between calls of `maintain`."""
        limits = self._limits
        small = sum(run.path is None for run in self._state.runs)
        if small <= limits.memory_runs_max:
            return
        if not self._merging.acquire(blocking=False):
            return  # the merge in progress does it
        try:
            state = self._state
            start = merge_from([run.rows for run in state.runs])
            while start < len(state.runs) and (
                # Limited by the memory budget, because an insert must not wait for files to be
                # merged.
                sum(run.bytes for run in state.runs[start:]) > limits.memory_bytes_max
            ):
                start += 1
            # A single run would only be rewritten.
            if len(state.runs) - start > 1:
                self._replace(start, len(state.runs), state)
        finally:
            self._merging.release()

    def _replace(self, first: int, last: int, seen: _State) -> None:
        """Merge ``seen.runs[first:last]`` into one run, and replace them."""
        old = seen.runs[first:last]
        limits = self._limits
        new = merge(
            old,
            self._run_schema,
            seen.since,
            self._new_path(),
            memory_bytes=limits.memory_run_bytes_max,
            block_bytes=limits.block_bytes,
        )
        with self._lock:
            # Inserts only append, and there is one merge at a time, so the positions of the old
            # runs are still valid.
            state = self._state
            swapped = not self._closed
            if swapped:
                assert state.runs[first:last] == old, "one merge at a time"
                middle = () if new is None else (new,)
                runs = (*state.runs[:first], *middle, *state.runs[last:])
                self._state = _State(runs, state.upper, state.since)
        # The old files, or the new one if the arrangement was closed meanwhile.
        for run in old if swapped else [new]:
            if run is not None:
                run.remove()

    # -- reading ----------------------------------------------------------------------------------

    def lookup(self, keys: pa.Table, before: Time) -> pa.Table:
        """Return updates with ``time < before`` whose key equals a row of `keys` (columns by
        position): a superset, and all error updates (then with column ``__error``).

        The cost is proportional to the keys and their matches. For key types that can only be
        compared after a rounding conversion (a bigint with a double), it is a scan. Raises
        `ReadBelowSince`, `InvalidUsage` (`before` beyond the upper, or a wrong number of columns)
        and `ResourceClosed`.
        """
        return self.lookup_all((keys,), before)

    def lookup_all(self, tables: Sequence[pa.Table], before: Time) -> pa.Table:
        """Look up the rows of several tables, whose types may differ, at once. A key that occurs
        several times is looked up once. Otherwise like `lookup`."""
        for keys in tables:
            if keys.num_columns != len(self.key):
                raise InvalidUsage(
                    f"got {keys.num_columns} key columns ({', '.join(keys.column_names)}), "
                    f"expected {len(self.key)}: {', '.join(self.key)}"
                )
        state = self._readable(before)
        hashes = [self._wanted(keys) for keys in tables]
        narrow = [found for found in hashes if found is not None]
        if len(narrow) < len(hashes) or not self.key:
            # A superset is allowed; the caller compares the keys itself.
            return self._scan(state, before)
        wanted = np.unique(np.concatenate(narrow)) if narrow else np.empty(0, np.uint64)
        found = [batch for run in state.runs if run.time_min < before for batch in run.find(wanted)]
        with self._lock:
            self._rows_read += sum(batch.num_rows for batch in found)
        return self._answer(found, state, before)

    def _wanted(self, keys: pa.Table) -> Hashes | None:
        """Return the hashes to look for; None if the lookup cannot be narrowed."""
        columns = []
        kept = np.ones(keys.num_rows, np.bool_)
        for name, given in zip(self.key, keys.columns, strict=True):
            conformed = conform(given, self._updates_schema.field(name).type)
            if conformed is None:
                return None
            columns.append(conformed[0])
            if conformed[1]:
                kept &= np.array(conformed[1], np.bool_)
        return hash_columns(columns, keys.num_rows)[kept]

    def scan(self, before: Time) -> pa.Table:
        """Return all updates with ``time < before``. Mapped rows are copied only if a filter by
        time is needed. Raises the same errors as `lookup`."""
        return self._scan(self._readable(before), before)

    def _scan(self, state: _State, before: Time) -> pa.Table:
        found = [block.rows for run in state.runs if run.time_min < before for block in run.blocks]
        return self._answer(found, state, before)

    def view(self, before: Time) -> ArrangementSnapshot:
        """Return the contents before a time, to be read piece by piece (`snapshot`).

        The view stays valid when the arrangement changes or is closed. Raises the same errors as
        `lookup`.
        """
        return ArrangementSnapshot(self._readable(before).runs, before, self.schema)

    def _readable(self, before: Time) -> _State:
        state = self._state
        self._check_open()  # after the read of the state: `close` sets the flag, then clears it
        if state.since and before <= state.since:
            raise ReadBelowSince(
                f"contents before {before} are no longer available: the arrangement's since is "
                f"{state.since}"
            )
        if before > state.upper:
            raise InvalidUsage(
                f"contents before {before} are not complete yet: the arrangement's upper is "
                f"{format_frontier(state.upper)}"
            )
        return state

    def _answer(self, batches: list[pa.RecordBatch], state: _State, before: Time) -> pa.Table:
        if not batches:
            return self._updates_schema.empty_table()
        if any(ERROR in batch.schema.names for batch in batches):
            tables = [pa.Table.from_batches([batch]) for batch in batches]
            table = pa.concat_tables(tables, promote_options="default")
        else:
            table = pa.Table.from_batches(batches)
        # Most reads are at the upper, where no filter is needed.
        if any(run.time_max >= before for run in state.runs):
            table = table.filter(pc.less(table[TIME], pa.scalar(before, pa.int64())))
        names = list(self._updates_schema.names)
        if ERROR in table.column_names and table[ERROR].null_count < table.num_rows:
            names.append(ERROR)
        return table.select(names)

    # -- the rest ---------------------------------------------------------------------------------

    def statistics(self) -> ArrangementStatistics:
        """Return the current sizes."""
        runs = self._state.runs
        return ArrangementStatistics(
            rows=sum(run.rows for run in runs),
            runs=len(runs),
            bytes_mapped=sum(run.bytes for run in runs if run.path is not None),
            bytes_memory=sum(run.bytes for run in runs if run.path is None),
            rows_read=self._rows_read,
        )

    def close(self, remove: bool = True) -> None:
        """Close the arrangement; with `remove`, delete its files, too. Tables already read stay
        valid."""
        with self._lock:
            self._closed = True
            runs = self._state.runs
            # Without runs, their mappings can be freed.
            self._state = _State((), self._state.upper, self._state.since)
        if remove:
            for run in runs:
                run.remove()

    @property
    def closed(self) -> bool:
        """Return whether it is closed."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosed(f"the arrangement in {self._directory} is closed")

    def _new_path(self) -> Path:
        return self._directory / f"run-{next(_RUN_NUMBERS):08d}.arrow"
