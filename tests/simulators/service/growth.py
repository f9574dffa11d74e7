"""A source whose table can be given columns: ``x3`` is three times the number of the row.

It has the values of all rows that it gave, as PostgreSQL has. So the position says how many further
columns have their values; a table with more of them is given these first, as changes of its rows,
before one mark. `checkers.SourcesChecker` compares the shard with the position at every time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.connectors.sources.source import (
    Given,
    PositionMark,
    SourceConnector,
    SourceExport,
    SourceLag,
    SourceRows,
)
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage

_NAME: Final = re.compile(r"x(\d+)")
PIECE_ROWS: Final = 40


def factor_of(name: str) -> int | None:
    """Return the factor of a further column; None for another column."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


class InnerSource:
    """A source that passes all calls to another one; see `SourceConnector`."""

    def __init__(self, inner: SourceConnector) -> None:
        self._inner = inner

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Call the inner source."""
        return await self._inner.describe(wanted)

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Call the inner source."""
        return await self._inner.describe_added(export, columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Call the inner source."""
        await self._inner.open(exports, position)

    async def next(self) -> Given:
        """Call the inner source."""
        return await self._inner.next()

    async def taken(self, position: str) -> None:
        """Call the inner source."""
        await self._inner.taken(position)

    def lag(self) -> SourceLag:
        """Call the inner source."""
        return self._inner.lag()

    async def close(self) -> None:
        """Call the inner source."""
        await self._inner.close()

    async def forget(self) -> None:
        """Call the inner source."""
        await self._inner.forget()


class GrowingSource(InnerSource):
    """A source that counts, with further columns."""

    def __init__(self, inner: SourceConnector) -> None:
        super().__init__(inner)
        self._further: tuple[str, ...] = ()
        self._grown = 0
        self._ready: deque[Given] = deque()

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Accept the columns that it has."""
        if any(factor_of(each.name) is None for each in columns):
            raise InvalidUsage(f"{export.name} has no such columns")
        return tuple(columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Open the inner source with its own columns, and give values that are due first."""
        self._ready.clear()
        self._further, narrow = (), []
        for export in exports:
            columns = [each for each in export.schema.columns if factor_of(each.name) is None]
            self._further = export.schema.names[len(columns) :]
            schema = TableSchema(tuple(columns), export.schema.key)
            narrow.append(msgspec.structs.replace(export, schema=schema))
        known: dict[str, Any] = {} if position is None else msgspec.json.decode(position)
        wanted, grown = len(self._further), known.pop("grown", 0)
        fresh = position is None or any(export.is_new for export in exports)
        self._grown = wanted if fresh else min(grown, wanted)
        plain = None if position is None else msgspec.json.encode(known).decode()
        await self._inner.open(narrow, plain)
        if plain is not None and self._grown < wanted:
            (export,) = exports
            self._grow(export.name, known["events"], wanted)
            self._ready.append(PositionMark(self._text(plain)))

    def _grow(self, export: str, events: int, wanted: int) -> None:
        for first in range(1, events + 1, PIECE_ROWS):
            numbers = range(first, min(events + 1, first + PIECE_ROWS))
            for grown, diff in ((self._grown, -1), (wanted, 1)):
                rows = pa.table({"counter": pa.array(numbers, pa.int64())})
                rows = rows.append_column(DIFF, pa.array([diff] * len(numbers), pa.int64()))
                self._ready.append(SourceRows(export, self._widened(rows, grown)))
        self._grown = wanted

    def _widened(self, rows: pa.Table, grown: int) -> pa.Table:
        """Return rows with the further columns, the first ones with their values."""
        diffs = rows[DIFF]
        rows = rows.drop_columns([DIFF])
        numbers = rows["counter"].to_pylist()
        for place, name in enumerate(self._further):
            factor = factor_of(name) or 0
            values = [number * factor if place < grown else None for number in numbers]
            rows = rows.append_column(name, pa.array(values, pa.int64()))
        return rows.append_column(DIFF, diffs)

    def _text(self, position: str) -> str:
        known = msgspec.json.decode(position)
        return msgspec.json.encode({**known, "grown": self._grown}).decode()

    async def next(self) -> Given:
        """Return what is due, then what the inner source gives, with all columns."""
        if self._ready:
            return self._ready.popleft()
        given = await self._inner.next()
        if isinstance(given, SourceRows):
            updates = self._widened(given.updates, self._grown)
            return msgspec.structs.replace(given, updates=updates)
        if isinstance(given, PositionMark):
            return msgspec.structs.replace(given, position=self._text(given.position))
        return given

    async def taken(self, position: str) -> None:
        """Do nothing: nothing is kept for it."""
