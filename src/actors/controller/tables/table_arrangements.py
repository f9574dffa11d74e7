"""Arrangements of tables' contents by key: for the lookups of writes, and for reads by key.

One arrangement a table, built from a snapshot when a write or a read first looks for a key, and fed
with every later write. It is a cache in scratch: `forget` drops it, and the next lookup builds it
again from the shard. Writes look up at the arrangement's upper: all that is durable and was fed.

The table writer owns it, and does blocking work in the clock's threads, one piece at a time. Reads
on the event loop take a `view` meanwhile: an arrangement's readers see one moment.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

from actors.arrangement.arrangement import Arrangement
from actors.arrangement.reading import ArrangementSnapshot
from actors.controller.tables.groups import TableTarget, lookup_key
from actors.errors import CorruptData, PenstockError
from actors.kernel import ActorClock
from actors.memory_ledger import MemoryUse
from actors.persist import PersistClient
from actors.plan.schema import DIFF, ERROR, TIME
from actors.plan.updates import between, concat, empty_updates
from actors.progress import Frontier, ObjectId, Time
from actors.threshold_probes import FED_ON_LOOP

log = logging.getLogger("penstock.controller")

MAINTAIN_EVERY: Final = 16
"""Number of inserts between two merges of an arrangement's runs."""

WrittenUpdates: TypeAlias = Sequence[tuple[TableTarget, pa.Table]]
"""Updates of one commit, by table."""


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
        self._held: dict[ObjectId, Arrangement] = {}
        self._inserts: dict[ObjectId, int] = {}
        self._due: set[ObjectId] = set()
        self._written: list[tuple[WrittenUpdates, Frontier]] = []
        """Durable updates that the arrangements lack, each with the upper after them."""
        self._complete: Frontier = 0
        """All updates below are in the arrangements that are held."""
        self._asked: set[ObjectId] = set()
        """Tables whose arrangement a read asked for."""
        self._feeding = threading.Lock()
        """Held while what was written is fed: in a thread, or by a read on the loop."""
        persist.ledger.add(self.memory)

    def memory(self) -> Iterator[MemoryUse]:
        """Yield each arrangement's memory, for a `MemoryLedger`."""
        for id_, held in list(self._held.items()):
            sizes = held.statistics()
            yield MemoryUse("table", id_, sizes.rows, sizes.bytes_memory, sizes.bytes_mapped)

    # -- reading -------------------------------------------------------------------------------

    def view(self, id_: ObjectId, time: Time) -> ArrangementSnapshot | None:
        """Return a table's contents at a time, arranged by its `lookup_key`; None if it is not
        arranged, or does not hold that time at once. Call it on the event loop."""
        held = self._held.get(id_)
        if held is None:
            return None
        if time >= self._complete:
            self._feed_few()
            if time >= self._complete:
                return None
        try:
            # Writes of other tables moved the shared upper alone.
            return held.view(min(time + 1, held.upper))
        except PenstockError:
            return None  # earlier than its history, or dropped by a thread meanwhile

    def ask(self, id_: ObjectId, time: Time) -> bool:
        """Return whether the table writer should arrange the table, for reads at such times; once
        until it has (`arranged`), and not again after it failed."""
        there = id_ in self._held and time < self._complete
        if there or id_ in self._asked:
            return False
        self._asked.add(id_)
        return True

    def arranged(self, id_: ObjectId) -> None:
        """Note that a table was arranged because a read asked for it."""
        self._asked.discard(id_)

    def _feed_few(self) -> None:
        """Feed what was written here and now, if it is little and no thread does it."""
        if self.feeds_many or not self._feeding.acquire(blocking=False):
            return
        try:
            self._feed_all()
        finally:
            self._feeding.release()

    def keeps(self, id_: ObjectId) -> bool:
        """Return whether the table has an arrangement."""
        return id_ in self._held

    def lookup(self, target: TableTarget, keys: pa.Table) -> pa.Table:
        """Return the updates of (a superset of) the rows with these keys. Blocking."""
        held = self._held[target.id]
        return held.lookup(keys.combine_chunks(), held.upper)

    # -- building ------------------------------------------------------------------------------

    async def ensure(self, target: TableTarget, upper: Frontier) -> None:
        """Build the table's arrangement, complete below `upper`, unless it is there. All that was
        written below must have been fed."""
        if target.id in self._held:
            return
        updates = await self._snapshot(target, upper)
        self._made += 1
        directory = self._scratch / f"{target.id}-{self._made}"

        def build() -> Arrangement:
            made = Arrangement(directory, target.schema, lookup_key(target.schema))
            made.insert(updates, upper)
            # A snapshot has no history: what came before it was summed up.
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
        """Note the updates of a commit, which are fed before anything is looked up next."""
        self._written.append((written, upper))

    @property
    def feeds_many(self) -> bool:
        """Return whether what was written takes longer to feed than a thread to answer."""
        rows = sum(table.num_rows for written, _ in self._written for _, table in written)
        return FED_ON_LOOP.exceeded_by(rows)

    def feed_written(self) -> None:
        """Insert what was written into the tables' arrangements. Blocking."""
        with self._feeding:
            self._feed_all()

    def _feed_all(self) -> None:
        while self._written:
            written, upper = self._written[0]
            for target, table in written:
                try:
                    self._feed(target, table, upper)
                except PenstockError:
                    # The write is durable: a full scratch disk must not fail it. The next lookup
                    # builds the arrangement again.
                    log.warning("dropped the arrangement of table %s", target.name, exc_info=True)
                    self._drop(target.id)
            self._complete = max(self._complete, upper)
            del self._written[0]

    def _feed(self, target: TableTarget, updates: pa.Table, upper: Frontier) -> None:
        held = self._held.get(target.id)
        # It may have been built from a snapshot that has the write.
        if held is None or held.upper >= upper:
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
        """Merge the runs that many small writes have left. Blocking, and may be long."""
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
        """Drop all arrangements, and what was not fed. Blocking."""
        with self._feeding:
            self._written.clear()
            for id_ in list(self._held):
                self._drop(id_)
            shutil.rmtree(self._scratch, ignore_errors=True)
