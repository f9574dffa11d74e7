"""The simplest generator: 1, 2, 3, … With `max_cardinality`, it retracts the oldest numbers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import pyarrow as pa

from actors.connectors.sources.generators import (
    GeneratorConfig,
    PreparedSeries,
    at_least,
    updates,
)
from actors.connectors.sources.random_draws import numbered
from actors.connectors.sources.source import SourceExport, SourceRows
from actors.model.plan.schema import TableColumn, TableSchema

EXPORT: Final = "counter"
SCHEMA: Final = TableSchema((TableColumn("counter", "bigint", False),), ("counter",))
PIECE_ROWS: Final = 100_000


class CounterConfig(GeneratorConfig, frozen=True, kw_only=True, tag="counter"):
    """Configuration of a counter. Each event adds the next number."""

    max_cardinality: int | None = None
    """Maximum number of rows at a time. Beyond it, each new row replaces the oldest. None: no
    limit."""

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is out of range."""
        super().check()
        if self.max_cardinality is not None:
            at_least(self, max_cardinality=1)


class CounterSeries(PreparedSeries):
    """Event `n` (from 0) adds the number ``n + 1``."""

    exports = (SourceExport(EXPORT, SCHEMA),)
    events_at_once = PIECE_ROWS

    def __init__(self, config: CounterConfig) -> None:
        self._limit = config.max_cardinality

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the numbers that are present after the first `at` events."""
        first = 0 if self._limit is None else max(0, at - self._limit)
        for start in range(first, at, PIECE_ROWS):
            yield _rows(numbered(start, min(at, start + PIECE_ROWS)) + 1, 1)

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the net changes of the events ``start <= n < stop``. Rows that are both inserted
        and deleted by these events are left out."""
        if self._limit is None:
            yield _rows(numbered(start, stop) + 1, 1)
            return
        come = numbered(max(start, stop - self._limit), stop) + 1
        gone = numbered(max(0, start - self._limit), max(0, min(start, stop - self._limit))) + 1
        diffs = np.concatenate([np.ones_like(come), -np.ones_like(gone)])
        yield _rows(np.concatenate([come, gone]), diffs)


def _rows(numbers: np.ndarray, diffs: int | np.ndarray) -> SourceRows:
    return SourceRows(EXPORT, updates(SCHEMA, [pa.array(numbers)], diffs))
