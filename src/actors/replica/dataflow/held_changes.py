"""Changes that are kept while a view is in error.

A view in error leaves its states as they were before the error. As long as there are few changes
since then, they are kept here, and one step over all of them ends the error: a row that was
inserted and deleted again cancels out, and the view need not be recomputed in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import advance, concat, consolidate
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import Frontier, Time

HELD_BYTES_MAX = 8 * 1024 * 1024
"""If the changes exceed this size, the view is recomputed in full to end its error."""


class HeldChanges:
    """Plain updates of a view's imports from `lo` on, limited to `HELD_BYTES_MAX`."""

    def __init__(self, dataflow: str, schemas: Sequence[TableSchema]) -> None:
        self._dataflow = dataflow
        self._shapes = [schema.arrow_updates() for schema in schemas]
        self.lo: Frontier | None = None
        """Upper of the view's states; None if nothing is kept."""
        self._tables: list[list[pa.Table]] = [[] for _ in self._shapes]
        """Kept updates of each import, in order."""
        self._bytes = 0
        """Size of the kept updates."""

    def memory(self) -> list[MemoryUse]:
        """Return the memory of the kept updates, for a `MemoryLedger`."""
        rows = sum(table.num_rows for tables in self._tables for table in tables)
        return [MemoryUse("held", self._dataflow, rows, self._bytes)] if rows else []

    def hold(self, lo: Frontier, plain: Sequence[pa.Table]) -> bool:
        """Keep the updates of a step from `lo`, which has one table for each import or none at all.

        Return False, and keep nothing new, if they would exceed the limit.
        """
        size = self._bytes + sum(table.nbytes for table in plain)
        if size > HELD_BYTES_MAX:
            return False
        self._bytes = size
        self.lo = lo if self.lo is None else self.lo
        for tables, table in zip(self._tables, plain, strict=bool(plain)):
            tables.append(table)
        return True

    def at(self, time: Time, plain: Sequence[pa.Table]) -> tuple[tuple[pa.Table, ...], ...]:
        """Return the kept updates and `plain` as the deltas of one step, summed at `time`."""
        return tuple(
            (consolidate(advance(concat([*tables, table], shape), time)),)
            for tables, table, shape in zip(self._tables, plain, self._shapes, strict=True)
        )

    def release(self) -> list[pa.Table]:
        """Return the kept updates as they arrived, for each import, and clear them."""
        tables, self._tables = self._tables, [[] for _ in self._shapes]
        self.lo, self._bytes = None, 0
        return [concat(each, shape) for each, shape in zip(tables, self._shapes, strict=True)]
