"""Arrangements of tables' contents by key, for the table writer's lookups.

One arrangement a table, built from a snapshot when a write first needs a lookup, and fed with every
later write. It is a cache in scratch: `forget` drops it, and the next lookup builds it again from
the shard. Lookups read at the arrangement's upper: all that is durable and was fed. Owned by one
actor; blocking work runs in the clock's threads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from actors.arrangement.arrangement import Arrangement
from actors.controller.tables.groups import TableTarget, lookup_key
from actors.errors import CorruptData
from actors.kernel import ActorClock
from actors.memory_ledger import MemoryUse
from actors.persist import PersistClient
from actors.plan.schema import DIFF, ERROR, TIME
from actors.plan.updates import between, concat, empty_updates
from actors.progress import Frontier, ObjectId

MAINTAIN_EVERY: Final = 16
"""Number of inserts between two merges of an arrangement's runs."""


class TableArrangements:
    """The arrangements of the tables in which writes had to look rows up."""

    def __init__(self, persist: PersistClient, scratch: Path, clock: ActorClock) -> None:
        self._persist = persist
        self._scratch = scratch
        self._clock = clock
        self._made = 0
        self._held: dict[ObjectId, Arrangement] = {}
        self._inserts: dict[ObjectId, int] = {}
        persist.ledger.add(self.memory)

    def memory(self) -> Iterator[MemoryUse]:
        """Yield each arrangement's memory, for a `MemoryLedger`."""
        for id_, held in list(self._held.items()):
            sizes = held.statistics()
            yield MemoryUse("table", id_, sizes.rows, sizes.bytes_memory, sizes.bytes_mapped)

    async def ensure(self, target: TableTarget, upper: Frontier) -> None:
        """Build the table's arrangement, complete below `upper`, unless it is there."""
        if target.id in self._held:
            return
        updates = await self._snapshot(target, upper)
        self._made += 1
        directory = self._scratch / f"{target.id}-{self._made}"

        def build() -> Arrangement:
            made = Arrangement(directory, target.schema, lookup_key(target.schema))
            made.insert(updates, upper)
            # Lookups are at the upper alone: all history may be merged.
            made.allow_compaction(max(0, upper - 1))
            return made

        self._held[target.id] = await self._clock.run_blocking(build)

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

    def keeps(self, id_: ObjectId) -> bool:
        """Return whether the table has an arrangement."""
        return id_ in self._held

    def lookup(self, target: TableTarget, keys: pa.Table) -> pa.Table:
        """Return the updates of (a superset of) the rows with these keys. Blocking."""
        held = self._held[target.id]
        return held.lookup(keys.combine_chunks(), held.upper)

    def feed(self, target: TableTarget, updates: pa.Table, upper: Frontier) -> None:
        """Insert a durable write's updates into the table's arrangement. Blocking."""
        held = self._held.get(target.id)
        if held is None:
            return
        held.insert(updates.select([*target.schema.names, TIME, DIFF]), upper)
        held.allow_compaction(max(0, upper - 1))
        # Many small writes would leave many runs: merge them now and then.
        self._inserts[target.id] = self._inserts.get(target.id, 0) + 1
        if self._inserts[target.id] % MAINTAIN_EVERY == 0:
            held.maintain()

    def forget(self, id_: ObjectId) -> None:
        """Drop one table's arrangement. Blocking."""
        self._inserts.pop(id_, None)
        held = self._held.pop(id_, None)
        if held is not None:
            held.close(remove=True)

    def clear(self) -> None:
        """Drop all arrangements. Blocking."""
        for id_ in list(self._held):
            self.forget(id_)
        shutil.rmtree(self._scratch, ignore_errors=True)
