"""PostgreSQL's own catalog: types, functions, operators and system relations, from a data file.

``postgres_15.json.gz`` was written by ``tests/proof/dump_pg_catalog.py`` from a real PostgreSQL 15.
It is column by column: a list of values; ``{"=": v}`` where all are equal; ``{"~": v, "at":
{row: other}}`` where nearly all are. Flags are 0 and 1, arrays are lists, and what is an OID
there (`regproc` too) is an integer.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

DATA_FILE: Final = Path(__file__).with_name("postgres_15.json.gz")


class SystemColumnShape(msgspec.Struct, frozen=True, array_like=True):
    """A column of a system relation; its type is no domain but what that is made of."""

    name: str
    type: int
    declared: int
    """The declared type: a domain, in `information_schema`."""
    required: bool = False
    dimensions: int = 0
    modifier: int = -1
    collation: int = 0


class SystemRelationShape(msgspec.Struct, frozen=True, array_like=True):
    """A table or view of `pg_catalog` or `information_schema`."""

    oid: int
    schema: str
    name: str
    kind: str
    columns: tuple[SystemColumnShape, ...]


class SystemRows(msgspec.Struct, frozen=True):
    """The rows of one system table."""

    count: int
    columns: dict[str, Any]

    def values_of(self, column: str) -> list[Any]:
        """Return all rows' values of a column.

        >>> SystemRows(3, {"a": {"~": 1, "at": {"2": 5}}}).values_of("a")
        [1, 1, 5]
        """
        held = self.columns[column]
        if isinstance(held, list):
            return held
        if "=" in held:
            return [held["="]] * self.count
        # Most rows have one value: only the others are in the file.
        values = [held["~"]] * self.count
        for row, value in held["at"].items():
            values[int(row)] = value
        return values

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows, with values in the order of `columns`."""
        yield from zip(*(self.values_of(column) for column in self.columns), strict=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows by column name."""
        names = tuple(self.columns)
        for row in self.rows():
            yield dict(zip(names, row, strict=True))


class SystemCatalog(msgspec.Struct, frozen=True):
    """The data file."""

    version: str
    """PostgreSQL's, as `server_version` says it."""
    relations: tuple[SystemRelationShape, ...]
    rows: dict[str, SystemRows]
    keywords: SystemRows
    """Rows of `pg_get_keywords`."""
    views: dict[str, str]
    """Queries of system views, by ``schema.name``."""


@cache
def load_system_catalog() -> SystemCatalog:
    """Return the data file's contents. Kept, as they never change."""
    return msgspec.json.decode(gzip.decompress(DATA_FILE.read_bytes()), type=SystemCatalog)


def pack_column(values: list[Any]) -> Any:
    """Return a column in its shortest form in the file.

    >>> pack_column([7, 7, 7]), pack_column([1, 2, 3])
    ({'=': 7}, [1, 2, 3])
    """
    # By their JSON, as lists cannot be counted, and 1 is not True.
    texts = [msgspec.json.encode(value) for value in values]
    if not values:
        return []
    counts: dict[bytes, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    common = max(counts, key=lambda text: counts[text])
    value = values[texts.index(common)]
    if len(counts) == 1:
        return {"=": value}
    others = {str(at): values[at] for at, text in enumerate(texts) if text != common}
    sparse = {"~": value, "at": others}
    # Row numbers take room, too: only a column that is mostly one value gets shorter so.
    shorter = len(msgspec.json.encode(sparse)) < len(msgspec.json.encode(values))
    return sparse if shorter else values
