"""What tables hold now, kept ready by key for the table writer.

One arrangement a table, made from a snapshot when a write first needs to look something up, and
fed with every later write. It is a cache in scratch: `forget` drops it, and the next need makes
it again from the shard. Lookups are at the arrangement's own upper: everything that is durable
and was fed. Owned by one actor; blocking work runs through the clock's threads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from actors.arrangement.arrangement import Arrangement
from actors.controller.groups import TableTarget, lookup_key
from actors.errors import Corrupt
from actors.kernel import Clock
from actors.memory_ledger import MemoryUse
from actors.persist import PersistClient
from actors.plan.schema import DIFF, ERROR, TIME
from actors.plan.updates import between, concat, empty_updates
from actors.progress import Frontier, ObjectId

MAINTAIN_EVERY: Final = 16
"""Inserts between two merges of an arrangement's runs."""


class TableContents:
    """The arrangements of the tables that writes had to look into."""

    def __init__(self, persist: PersistClient, scratch: Path, clock: Clock) -> None:
        self._persist = persist
        self._scratch = scratch
        self._clock = clock
        self._made = 0
        self._held: dict[ObjectId, Arrangement] = {}
        self._inserts: dict[ObjectId, int] = {}
        persist.ledger.add(self.memory)

    def memory(self) -> Iterator[MemoryUse]:
        """Tell what each arrangement takes, for a `MemoryLedger`."""
        for id_, held in list(self._held.items()):
            sizes = held.statistics()
            yield MemoryUse("table", id_, sizes.rows, sizes.bytes_memory, sizes.bytes_mapped)

    async def ensure(self, target: TableTarget, upper: Frontier) -> None:
        """Makes the table's arrangement, complete below `upper`, if it is not there."""
        if target.id in self._held:
            return
        updates = await self._snapshot(target, upper)
        self._made += 1
        directory = self._scratch / f"{target.id}-{self._made}"

        def build() -> Arrangement:
            made = Arrangement(directory, target.schema, lookup_key(target.schema))
            made.insert(updates, upper)
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
        if any(ERROR in table.column_names for table in tables):
            raise Corrupt(f"table {target.name} holds error updates", determinate=True)
        return between(concat(tables, target.schema.arrow_updates()), 0, upper)

    def keeps(self, id_: ObjectId) -> bool:
        """Whether the table's contents are kept ready."""
        return id_ in self._held

    def lookup(self, target: TableTarget, keys: pa.Table) -> pa.Table:
        """Updates of (a superset of) the rows with these keys. Blocking."""
        held = self._held[target.id]
        return held.lookup(keys.combine_chunks(), held.upper)

    def feed(self, target: TableTarget, updates: pa.Table, upper: Frontier) -> None:
        """A write is durable. Blocking."""
        held = self._held.get(target.id)
        if held is None:
            return
        held.insert(updates.select([*target.schema.names, TIME, DIFF]), upper)
        held.allow_compaction(max(0, upper - 1))
        self._inserts[target.id] = self._inserts.get(target.id, 0) + 1
        if self._inserts[target.id] % MAINTAIN_EVERY == 0:
            held.maintain()

    def forget(self, id_: ObjectId) -> None:
        """Drops one table's arrangement. Blocking."""
        self._inserts.pop(id_, None)
        held = self._held.pop(id_, None)
        if held is not None:
            held.close(remove=True)

    def clear(self) -> None:
        """Drops all of them. Blocking."""
        for id_ in list(self._held):
            self.forget(id_)
        shutil.rmtree(self._scratch, ignore_errors=True)
