"""The names that a query can use: columns of its FROM and of the enclosing queries, and CTEs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from actors.doors.postgres.pg_catalog.catalog_errors import AMBIGUOUS_COLUMN, CatalogQueryError
from actors.doors.postgres.pg_catalog.typed_sql import TypedSql
from actors.model.pgwire.type_oids import CID, OID, TID, XID

_SYSTEM_COLUMNS = {
    # The values of a row that was never changed. Clients only compare them with later ones.
    "xmin": TypedSql("1", XID),
    "xmax": TypedSql("0", XID),
    "cmin": TypedSql("0", CID),
    "cmax": TypedSql("0", CID),
    "ctid": TypedSql("'(0,1)'", TID),
}


class RelationColumn(msgspec.Struct, frozen=True):
    """A column of a relation or of a query's result; `sql` is its name in SQLite."""

    name: str
    sql: str
    type: int
    fields: tuple[tuple[str, int], ...] = ()


class RelationShape(msgspec.Struct, frozen=True):
    """The columns of a table, a CTE or a subquery."""

    columns: tuple[RelationColumn, ...]
    oid: int = 0
    """The OID of a system relation; 0 for any other relation."""


class ScopeSource(msgspec.Struct, frozen=True):
    """One item of FROM: its alias, and its columns as expressions."""

    alias: str
    columns: tuple[tuple[str, TypedSql], ...]
    oid: int = 0
    scalar: bool = False
    """True for a function with a single result column, which the alias also names."""

    def find(self, name: str) -> list[TypedSql]:
        """Return the columns with this name."""
        return [value for each, value in self.columns if each == name]


class QueryScope:
    """The names of one query and, through its parent, those of the enclosing queries."""

    def __init__(self, parent: QueryScope | None = None, *, lateral: bool = False) -> None:
        self.parent = parent
        self.sources: list[ScopeSource] = []
        self.merged: list[tuple[str, TypedSql]] = []
        """The columns of USING joins, each of which replaces one of either side."""
        self.ctes: dict[str, RelationShape] = {}
        self.aliases: dict[str, TypedSql] = {}
        """The columns of the result by name, for ORDER BY and GROUP BY."""
        self.outside: dict[str, str] | None = {} if lateral else None
        """For a LATERAL subquery, which runs as a separate statement: maps the values that it uses
        of the enclosing queries to the names of their bindings. None for any other query."""

    def name_results(self, shape: RelationShape) -> None:
        """Make the columns of the result available to ORDER BY and GROUP BY. The first column of a
        name wins."""
        for column in shape.columns:
            value = TypedSql(column.sql, column.type, column.fields)
            self.aliases.setdefault(column.name, value)

    def find_cte(self, name: str) -> RelationShape | None:
        """Return the shape of a visible CTE; None if there is none with this name."""
        scope: QueryScope | None = self
        # A CTE of an inner query hides an outer one with the same name.
        while scope is not None:
            if name in scope.ctes:
                return scope.ctes[name]
            scope = scope.parent
        return None

    def resolve(self, table: str, name: str) -> TypedSql | None:
        """Return a column by its name, with the qualifier `table` or "" for none; None if it does
        not exist."""
        found = self._find(table, name)
        if found is not None or self.parent is None:
            return found
        outer = self.parent.resolve(table, name)
        return outer and self.carry_in(outer)

    def carry_in(self, value: TypedSql) -> TypedSql:
        """Return a value of an enclosing query in the form in which this query can use it."""
        if self.outside is None:
            return value
        bound = self.outside.setdefault(value.sql, f":l{len(self.outside)}")
        return TypedSql(bound, value.type, value.fields)

    def carry_in_all(self, value: TypedSql) -> TypedSql:
        """Return a value from outside all queries, such as a parameter, for use in this query."""
        return self.carry_in(self.parent.carry_in_all(value) if self.parent else value)

    def source(self, alias: str) -> ScopeSource | None:
        """Return an item of FROM of this query or an enclosing one, by its alias."""
        for each in self.sources:
            if each.alias == alias:
                return each
        return self.parent.source(alias) if self.parent else None

    def _find(self, table: str, name: str) -> TypedSql | None:
        if not table:
            # USING merges two columns into one, so the name is not ambiguous.
            merged = [value for each, value in self.merged if each == name]
            if merged:
                return merged[0]
        sources = [each for each in self.sources if not table or each.alias == table]
        found = [value for each in sources for value in each.find(name)]
        if len(found) > 1:
            raise CatalogQueryError(f'column reference "{name}" is ambiguous', AMBIGUOUS_COLUMN)
        if found:
            return found[0]
        if not table:
            # In FROM f() AS x, x also names the only column.
            scalars = [each for each in self.sources if each.scalar and each.alias == name]
            if scalars:
                return scalars[0].columns[0][1]
        return self._find_system_column(sources, table, name)

    def _find_system_column(
        self, sources: list[ScopeSource], table: str, name: str
    ) -> TypedSql | None:
        # Only tables have system columns; a subquery has only what it selects.
        stored = [each for each in sources if each.oid]
        if not stored or (not table and len(stored) > 1):
            return None
        if name == "tableoid":
            return TypedSql(str(stored[0].oid), OID)
        return _SYSTEM_COLUMNS.get(name)

    def star(self, table: str = "") -> Iterator[tuple[str, TypedSql]]:
        """Yield the names and expressions of the columns of ``*`` or ``table.*``."""
        if not table:
            yield from self.merged
        merged = set() if table else {name for name, _ in self.merged}
        for each in self.sources:
            if not table or each.alias == table:
                yield from (column for column in each.columns if column[0] not in merged)
