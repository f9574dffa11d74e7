"""Recognises plain reads of one object: columns, simple comparisons, order and limit.

Such a query is answered from an index or a shard, without Spark. It must have the same result as in
Spark, so a literal must have exactly the type of the column that it is compared with, or cast to it
without loss, and each name must have a single meaning. All other queries are left to Spark. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import pyarrow as pa

from actors.engine.sql.expressions import plain_name, plain_names
from actors.engine.sql.reader import StatementReader
from actors.engine.views.plain_sql import (
    ColumnTest,
    NotPlain,
    plain_reader,
    qualified,
    read_conditions,
    value_of,
)
from actors.model.plan.schema import SYSTEM_COLUMNS, TableSchema, arrow_type
from actors.model.plan.updates import to_ipc
from actors.model.protocol.message_parts import ColumnComparison, OrderBy, RowSetFinishing
from actors.runtime.errors import SqlSyntaxError

PLAIN_CHARACTERS_MAX: Final = 16_384
"""Maximum length of a text that is examined."""


class PlainRead(msgspec.Struct, frozen=True):
    """A query as a read of one object. `names` are the names of the result's columns, one for each
    column of `project`."""

    name: str
    project: tuple[str, ...]
    names: tuple[str, ...]
    filter: tuple[ColumnComparison, ...] = ()
    finishing: RowSetFinishing | None = None


def parse_plain_read(sql: str, tables: Mapping[str, TableSchema]) -> PlainRead | None:
    """Return the read that answers the query; None if the query is not a plain read. `tables`: the
    objects that the query may name; a relation of the service goes by its full name."""
    # Examining thousands of values would hold up the service; Spark can run such a query as well.
    if len(sql) > PLAIN_CHARACTERS_MAX:
        return None
    try:
        return _read(plain_reader(sql), tables)
    except (NotPlain, SqlSyntaxError, ValueError):  # ArrowInvalid is a ValueError.
        return None


def _read(reader: StatementReader, tables: Mapping[str, TableSchema]) -> PlainRead:
    reader.need("SELECT")
    listed = _listed(reader)
    reader.need("FROM")
    qualifier, name = qualified(plain_names(reader))
    full = f"{qualifier}.{name}" if qualifier else name
    found = {known.lower(): known for known in tables}.get(full.lower())
    if found is None:
        raise NotPlain(f"no table {full}")
    # An alias, with or without AS.
    clauses = ("WHERE", "ORDER", "LIMIT", "OFFSET")
    if reader.take("AS") or not (reader.ends() or reader.follows_any(*clauses)):
        name = plain_name(reader)
    scope = _Scope(tables[found], name)
    project, names = _columns(listed, scope)
    tests = read_conditions(reader) if reader.take("WHERE") else []
    filters = tuple(_comparison(test, scope) for test in tests)
    finishing = _finishing(reader, scope, dict(zip(names, project, strict=True)))
    reader.need_end()
    return PlainRead(found, project, names, filters, finishing)


def _listed(reader: StatementReader) -> list[tuple[tuple[str, str], str]]:
    """Read a select list: columns and their names in the result; [] means all columns."""
    if reader.take("*"):
        return []

    def item() -> tuple[tuple[str, str], str]:
        column = qualified(plain_names(reader))
        named = column[1]
        if reader.take("AS") or not reader.follows_any(",", "FROM"):
            named = plain_name(reader)
        return column, named

    return list(reader.sequence(item))


class _Scope:
    """The columns of the one object that the query reads."""

    def __init__(self, schema: TableSchema, qualifier: str) -> None:
        self.types = {column.name: column.type.lower() for column in schema.columns}
        self._own = {name.lower(): name for name in schema.names}
        # Spark resolves names case-insensitively: two such columns are ambiguous.
        if len(self._own) < len(schema.names):
            raise NotPlain("columns whose names differ only in case")
        self._qualifier = qualifier.lower()

    def column(self, named: tuple[str, str]) -> str:
        """Return the column with a name. Raises `NotPlain` if there is none."""
        qualifier, name = named
        found = self._own.get(name.lower())
        if found is None or (qualifier and qualifier.lower() != self._qualifier):
            raise NotPlain(f"no column {name}")
        return found


def _columns(
    listed: list[tuple[tuple[str, str], str]], scope: _Scope
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not listed:
        return tuple(scope.types), tuple(scope.types)
    project = tuple(scope.column(column) for column, _ in listed)
    names = tuple(named for _, named in listed)  # Spark keeps the case of the query.
    if any(each.lower() in SYSTEM_COLUMNS for each in names):
        raise NotPlain("a reserved name, which the check of the query reports")
    if len(set(project)) < len(project) or len({each.lower() for each in names}) < len(names):
        raise NotPlain("a column twice")
    return project, names


def _comparison(test: ColumnTest, scope: _Scope) -> ColumnComparison:
    column = scope.column(test.column)
    if test.op == "in":
        raise NotPlain("IN")
    if not test.values:
        return ColumnComparison(column, test.op)
    kind = scope.types[column]
    value = pa.array([value_of(test.values[0], kind)], arrow_type(kind))
    return ColumnComparison(column, test.op, to_ipc(pa.table({column: value})))


def _finishing(
    reader: StatementReader, scope: _Scope, named: Mapping[str, str]
) -> RowSetFinishing | None:
    if not reader.follows_any("ORDER", "LIMIT", "OFFSET"):
        return None
    by: tuple[OrderBy, ...] = ()
    if reader.take("ORDER", "BY"):
        by = reader.sequence(lambda: _order(reader, scope, named))
    if len({each.column for each in by}) < len(by):
        raise NotPlain("ordering by a column twice")
    limit = reader.whole_number("a number of rows") if reader.take("LIMIT") else None
    offset = reader.whole_number("a number of rows") if reader.take("OFFSET") else 0
    return RowSetFinishing(by, limit, offset)


def _order(reader: StatementReader, scope: _Scope, named: Mapping[str, str]) -> OrderBy:
    written = qualified(plain_names(reader))
    column = scope.column(written)
    # For a name in ORDER BY, Spark first tries the columns of the result: it must be the same
    # column.
    for alias, own in named.items():
        if alias.lower() == written[1].lower() and own != column:
            raise NotPlain("ordering by an alias")
    if not _ordered(scope.types[column]):
        raise NotPlain("ordering by a type without an order")
    descending = reader.take("DESC") or (reader.take("ASC") and False)
    first = reader.take("NULLS", "FIRST")
    # Spark's default: NULLs come first in ascending order, last in descending order.
    last = not first and reader.take("NULLS", "LAST")
    return OrderBy(column, descending, first or (not last and not descending))


def _ordered(kind: str) -> bool:
    found = arrow_type(kind)
    return not (pa.types.is_nested(found) or pa.types.is_null(found))
