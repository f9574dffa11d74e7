"""Loads PostgreSQL's own catalog: types, functions, operators and system relations.

``tests/proof/dump_pg_catalog.py`` wrote the data file ``postgres_15.json.gz`` from a real
PostgreSQL 15. Each column is a list of values, ``{"=": v}`` if all values are equal, or ``{"~": v,
"at": {row: other}}`` if nearly all are. Booleans are 0 and 1, arrays are lists, and OIDs, including
`regproc`, are integers.
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
    """A column of a system relation. `type` is never a domain, but its base type."""

    name: str
    type: int
    declared: int
    """The declared type; in `information_schema` a domain."""
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
        """Return the values of a column in all rows.

        >>> SystemRows(3, {"a": {"~": 1, "at": {"2": 5}}}).values_of("a")
        [1, 1, 5]
        """
        held = self.columns[column]
        if isinstance(held, list):
            return held
        if "=" in held:
            return [held["="]] * self.count
        # Most rows have the same value; the file lists the others.
        values = [held["~"]] * self.count
        for row, value in held["at"].items():
            values[int(row)] = value
        return values

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as tuples, in the order of `columns`."""
        yield from zip(*(self.values_of(column) for column in self.columns), strict=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts by column name."""
        names = tuple(self.columns)
        for row in self.rows():
            yield dict(zip(names, row, strict=True))


class SystemCatalog(msgspec.Struct, frozen=True):
    """The contents of the data file."""

    version: str
    """PostgreSQL's version, as in `server_version`."""
    relations: tuple[SystemRelationShape, ...]
    rows: dict[str, SystemRows]
    keywords: SystemRows
    """Rows of `pg_get_keywords`."""
    views: dict[str, str]
    """Queries of system views, by ``schema.name``."""


@cache
def load_system_catalog() -> SystemCatalog:
    """Load the data file. The result is cached."""
    return msgspec.json.decode(gzip.decompress(DATA_FILE.read_bytes()), type=SystemCatalog)


def pack_column(values: list[Any]) -> Any:
    """Encode a column in the shortest form of the file format.

    >>> pack_column([7, 7, 7]), pack_column([1, 2, 3])
    ({'=': 7}, [1, 2, 3])
    """
    # Compare values by their JSON: lists are not hashable, and 1 must differ from True.
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
    # Because of the row numbers, this form is shorter only if most values are equal.
    shorter = len(msgspec.json.encode(sparse)) < len(msgspec.json.encode(values))
    return sparse if shorter else values
