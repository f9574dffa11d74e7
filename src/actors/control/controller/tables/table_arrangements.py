"""Arrangements of tables' contents by key, for the lookups of writes and for reads by key.

Each table has one arrangement, built from a snapshot when a write or a read first looks for a key,
and fed with every later write. It is a cache in scratch: `forget` drops it, and the next lookup
builds it again from the shard. Small writes are collected and fed together, since a run of one row
costs as much as a run of hundreds; until then, a lookup finds them by their keys.

The table writer owns the arrangements, and does blocking work in the clock's threads, one piece at
a time. Reads on the event loop take a `view` in the meantime: readers of an arrangement see one
moment.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

from actors.control.controller.tables.groups import TableTarget, lookup_key
from actors.control.controller.tables.rows import identities
from actors.durable.arrangement.arrangement import Arrangement
from actors.durable.arrangement.hashing import hash_values, is_exact_kind
from actors.durable.arrangement.snapshot import ArrangementSnapshot
from actors.durable.persist import PersistClient
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.model.plan.updates import between, concat, empty_updates
from actors.runtime.errors import CorruptData, PenstockError
from actors.runtime.kernel import ActorClock
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import Frontier, ObjectId, Time

log = logging.getLogger("penstock.controller")

UNFED_ROWS_MAX = 256
"""Maximum number of written rows to keep outside the arrangements, where they are looked up by key;
with more, they are arranged. Arranging each row as it is written makes a commit of one row take 2.2
× as long (November 2026)."""
LOOP_ROWS_MAX = 1_024
"""Maximum number of rows to arrange on the event loop; more use a thread. With a thread, a commit
of one row takes 3.8 × as long (November 2026)."""
MAINTAIN_EVERY: Final = 16
"""Number of inserts between two merges of an arrangement's runs."""
PROBED_KEYS_MAX: Final = 16
"""Maximum number of keys to probe one by one."""

WrittenUpdates: TypeAlias = Sequence[tuple[TableTarget, pa.Table]]
"""Updates of one commit, by table."""


class _UnfedUpdates:
    """Durable updates that the arrangements lack."""

    def __init__(self, upper: Frontier = 0) -> None:
        self.upper = upper
        """The upper after these updates."""
        self.rows = 0
        """Number of updates."""
        self.tables: dict[ObjectId, tuple[TableTarget, list[pa.Table]]] = {}
        """The updates by table."""
        self._by_key: dict[ObjectId, dict[Hashable, list[pa.Table]]] = {}
        """The updates by table and key, if `has_keys`."""
        self.has_keys = True
        """True if each update can be found by its key."""

    def add(self, written: WrittenUpdates, upper: Frontier) -> None:
        self.upper = max(self.upper, upper)
        for target, table in written:
            self.rows += table.num_rows
            self.tables.setdefault(target.id, (target, []))[1].append(table)
            # Rows of a bag are counted over all columns. A large write is fed next anyway.
            if not target.schema.key or self.rows > UNFED_ROWS_MAX:
                self.has_keys = False
            if self.has_keys:
                by_key = self._by_key.setdefault(target.id, {})
                for key in identities(table, target.schema.key):
                    by_key.setdefault(key, []).append(table)

    def with_keys(self, target: TableTarget, keys: pa.Table) -> list[pa.Table]:
        """Return the updates of the writes that had one of these keys."""
        by_key = self._by_key.get(target.id)
        if not by_key:
            return []
        wanted = identities(keys, keys.column_names)
        found = {id(each): each for key in wanted for each in by_key.get(key, ())}
        return list(found.values())


def _has_none(held: Arrangement, keys: pa.Table) -> bool:
    """Return whether an arrangement certainly has none of these keys, which are few, as in an
    INSERT."""
    if keys.num_rows > PROBED_KEYS_MAX or not all(map(is_exact_kind, keys.schema.types)):
        return False
    view = held.view(held.upper)
    for values in zip(*(column.to_pylist() for column in keys.columns), strict=True):
        hash_ = hash_values(values)
        # Errors, and other rows with the same hash, are left to the lookup.
        if hash_ is None or view.point(hash_) != []:
            return False
    return True


class TableArrangements:
    """The arrangements of the tables in which rows were looked up by key."""

    def __init__(
        self, persist: PersistClient, scratch: Path, clock: ActorClock, history_ms: int
    ) -> None:
        """Start without any. Reads may go back by `history_ms`."""
        self._persist = persist
        self._scratch = scratch
        self._clock = clock
        self._history_ms = history_ms
        self._made = 0
        """Number of arrangements made so far, which names their folders."""
        self._held: dict[ObjectId, Arrangement] = {}
        """The arrangements by table."""
        self._inserts: dict[ObjectId, int] = {}
        """Number of inserts into each arrangement."""
        self._due: set[ObjectId] = set()
        """Tables whose arrangement has had enough inserts for its runs to be merged."""
        self._unfed = _UnfedUpdates()
        """Written updates that are not in the arrangements yet."""
        self._complete: Frontier = 0
        """All updates below this frontier are in the arrangements."""
        self._asked: set[ObjectId] = set()
        """Tables whose arrangement a read has requested."""
        self._feeding = threading.Lock()
        """Held while updates are fed, in a thread or by a read on the loop."""
        persist.ledger.add(self.memory)

    def memory(self) -> Iterator[MemoryUse]:
        """Yield each arrangement's memory, for a `MemoryLedger`."""
        for id_, held in list(self._held.items()):
            sizes = held.statistics()
            yield MemoryUse("table", id_, sizes.rows, sizes.bytes_memory, sizes.bytes_mapped)

    # -- reading -------------------------------------------------------------------------------

    def view(self, id_: ObjectId, time: Time) -> tuple[Arrangement, ArrangementSnapshot] | None:
        """Return the arrangement of a table by its `lookup_key`, and its contents at a time. Return
        None if the table is not arranged, or if the contents at that time are not available now.
        Call it on the event loop."""
        held = self._held.get(id_)
        if held is None:
            return None
        if time >= self._complete:
            self._feed_few()
            if time >= self._complete:
                return None
        try:
            # Only writes to other tables moved the shared upper.
            return held, held.view(min(time + 1, held.upper))
        except PenstockError:
            return None  # earlier than its history, or dropped by a thread in the meantime

    def should_arrange(self, id_: ObjectId, time: Time) -> bool:
        """Return whether the table writer should now arrange the table, for reads at times like
        this one. True once until the writer has done so (`note_arranged`), and not again if that
        failed."""
        there = id_ in self._held and time < self._complete
        if there or id_ in self._asked:
            return False
        self._asked.add(id_)
        return True

    def note_arranged(self, id_: ObjectId) -> None:
        """Record that a table was arranged because a read requested it."""
        self._asked.discard(id_)

    def _feed_few(self) -> None:
        """Feed written updates now, if they are few and no thread is feeding."""
        if self.feeds_many or not self._feeding.acquire(blocking=False):
            return
        try:
            self._feed_all()
        finally:
            self._feeding.release()

    def has(self, id_: ObjectId) -> bool:
        """Return whether the table has an arrangement."""
        return id_ in self._held

    def lookup(self, target: TableTarget, keys: pa.Table) -> pa.Table:
        """Return the updates of the rows with these keys, and perhaps of others. Blocking."""
        held = self._held[target.id]
        # In the meantime a read on the loop must not move updates into the arrangement.
        with self._feeding:
            found = self._unfed.with_keys(target, keys)
            if not _has_none(held, keys):
                found.append(held.lookup(keys.combine_chunks(), held.upper))
        return concat(found, target.schema.arrow_updates())

    # -- building ------------------------------------------------------------------------------

    async def ensure(self, target: TableTarget, upper: Frontier) -> None:
        """Build the table's arrangement, complete below `upper`, unless it exists. All updates
        below must have been noted."""
        if target.id in self._held:
            return
        # All arrangements are complete below the same time.
        await self._clock.run_blocking(self.feed_written)
        updates = await self._snapshot(target, upper)
        self._made += 1
        directory = self._scratch / f"{target.id}-{self._made}"

        def build() -> Arrangement:
            made = Arrangement(directory, target.schema, lookup_key(target.schema))
            made.insert(updates, upper)
            # A snapshot has no history: everything before it is summed.
            made.allow_compaction(max(0, upper - 1))
            return made

        self._held[target.id] = await self._clock.run_blocking(build)
        self._complete = max(self._complete, upper)

    async def _snapshot(self, target: TableTarget, upper: Frontier) -> pa.Table:
        if upper == 0:
            return empty_updates(target.schema)
        reader = await self._persist.open_reader(target.shard, f"table-writer/{target.id}")
        try:
            parts, _ = await reader.snapshot(upper - 1)
            tables = [await self._persist.fetch(part, target.schema) for part in parts]
        finally:
            await reader.close()
        # Only writes fill a table, and a write has no error updates.
        if any(ERROR in table.column_names for table in tables):
            raise CorruptData(f"table {target.name} holds error updates", determinate=True)
        return between(concat(tables, target.schema.arrow_updates()), 0, upper)

    # -- feeding -------------------------------------------------------------------------------

    def note_written(self, written: WrittenUpdates, upper: Frontier) -> None:
        """Record the updates of a commit, and the upper after it."""
        held = [each for each in written if each[0].id in self._held]
        self._unfed.add(held, upper)

    @property
    def feeds_many(self) -> bool:
        """Return whether feeding the updates would take longer than using a thread."""
        return self._unfed.rows > LOOP_ROWS_MAX

    def feed_due(self) -> None:
        """Feed the updates if there are many, or if they cannot be found by their keys.
        Blocking."""
        if self._unfed.rows > UNFED_ROWS_MAX or not self._unfed.has_keys:
            self.feed_written()

    def feed_written(self) -> None:
        """Insert the written updates into the tables' arrangements. Blocking."""
        with self._feeding:
            self._feed_all()

    def _feed_all(self) -> None:
        unfed = self._unfed
        for target, tables in unfed.tables.values():
            try:
                self._feed(target, concat(tables, target.schema.arrow_updates()), unfed.upper)
            except PenstockError:
                # The write is durable: a full scratch disk must not fail it. The next lookup builds
                # the arrangement again.
                log.warning("dropped the arrangement of table %s", target.name, exc_info=True)
                self._drop(target.id)
        self._complete = max(self._complete, unfed.upper)
        self._unfed = _UnfedUpdates(unfed.upper)

    def _feed(self, target: TableTarget, updates: pa.Table, upper: Frontier) -> None:
        held = self._held.get(target.id)
        if held is None:
            return
        held.insert(updates.select([*target.schema.names, TIME, DIFF]), upper)
        held.allow_compaction(max(0, upper - 1 - self._history_ms))
        self._inserts[target.id] = self._inserts.get(target.id, 0) + 1
        if self._inserts[target.id] % MAINTAIN_EVERY == 0:
            self._due.add(target.id)

    @property
    def maintenance_due(self) -> bool:
        """Return whether an arrangement has had many inserts since its runs were merged."""
        return bool(self._due)

    def maintain(self) -> None:
        """Merge the runs that many small writes have left. Blocking, possibly for long."""
        while self._due:
            held = self._held.get(self._due.pop())
            if held is not None:
                held.maintain()

    # -- dropping ------------------------------------------------------------------------------

    def forget(self, id_: ObjectId) -> None:
        """Drop one table's arrangement. Blocking."""
        with self._feeding:
            self._drop(id_)

    def _drop(self, id_: ObjectId) -> None:
        self._inserts.pop(id_, None)
        self._asked.discard(id_)
        held = self._held.pop(id_, None)
        if held is not None:
            held.close(remove=True)

    def clear(self) -> None:
        """Drop all arrangements, and all updates not fed yet. Blocking."""
        with self._feeding:
            self._unfed = _UnfedUpdates()
            for id_ in list(self._held):
                self._drop(id_)
            shutil.rmtree(self._scratch, ignore_errors=True)
