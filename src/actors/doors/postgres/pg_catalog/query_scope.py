"""Names that a query can see: the columns of its FROM, of the queries around it, and its CTEs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from actors.doors.postgres.pg_catalog.catalog_errors import AMBIGUOUS_COLUMN, CatalogQueryError
from actors.doors.postgres.pg_catalog.typed_sql import TypedSql
from actors.model.pgwire.type_oids import CID, OID, TID, XID

_SYSTEM_COLUMNS = {
    # Values of a row that was never changed: clients only compare them with later ones.
    "xmin": TypedSql("1", XID),
    "xmax": TypedSql("0", XID),
    "cmin": TypedSql("0", CID),
    "cmax": TypedSql("0", CID),
    "ctid": TypedSql("'(0,1)'", TID),
}


class RelationColumn(msgspec.Struct, frozen=True):
    """A column that a query reads or makes: its name, and its name in SQLite."""

    name: str
    sql: str
    type: int
    fields: tuple[tuple[str, int], ...] = ()


class RelationShape(msgspec.Struct, frozen=True):
    """The columns of a table, a CTE or a subquery."""

    columns: tuple[RelationColumn, ...]
    oid: int = 0
    """The OID of a system relation; 0: it is none."""


class ScopeSource(msgspec.Struct, frozen=True):
    """One entry of FROM: its alias, and its columns as expressions."""

    alias: str
    columns: tuple[tuple[str, TypedSql], ...]
    oid: int = 0
    scalar: bool = False
    """True for a function's result of one column, which its alias names, too."""

    def find(self, name: str) -> list[TypedSql]:
        """Return the columns of a name."""
        return [value for each, value in self.columns if each == name]


class QueryScope:
    """The names of one query, and through its parent those of the queries around it."""

    def __init__(self, parent: QueryScope | None = None, *, lateral: bool = False) -> None:
        self.parent = parent
        self.sources: list[ScopeSource] = []
        self.merged: list[tuple[str, TypedSql]] = []
        """Columns of joins by USING, which stand for those of both sides."""
        self.ctes: dict[str, RelationShape] = {}
        self.aliases: dict[str, TypedSql] = {}
        """Columns of the result by name, for ORDER BY and GROUP BY."""
        self.outside: dict[str, str] | None = {} if lateral else None
        """Values of the queries around a lateral subquery that it reads, and the names under which
        they are bound, as such a subquery is run for itself; None: this is no such subquery."""

    def name_results(self, shape: RelationShape) -> None:
        """Let ORDER BY and GROUP BY name the columns of the result; the first of a name counts."""
        for column in shape.columns:
            value = TypedSql(column.sql, column.type, column.fields)
            self.aliases.setdefault(column.name, value)

    def find_cte(self, name: str) -> RelationShape | None:
        """Return the shape of a CTE that is visible here."""
        scope: QueryScope | None = self
        # A CTE of an inner query hides an outer one of its name.
        while scope is not None:
            if name in scope.ctes:
                return scope.ctes[name]
            scope = scope.parent
        return None

    def resolve(self, table: str, name: str) -> TypedSql | None:
        """Return a column by its name, qualified or not (""); None if there is none."""
        found = self._find(table, name)
        if found is not None or self.parent is None:
            return found
        outer = self.parent.resolve(table, name)
        return outer and self.carry_in(outer)

    def carry_in(self, value: TypedSql) -> TypedSql:
        """Return a value of the queries around this one as this one reads it."""
        if self.outside is None:
            return value
        bound = self.outside.setdefault(value.sql, f":l{len(self.outside)}")
        return TypedSql(bound, value.type, value.fields)

    def carry_in_all(self, value: TypedSql) -> TypedSql:
        """Return a value that stands outside of all queries, as a parameter does."""
        return self.carry_in(self.parent.carry_in_all(value) if self.parent else value)

    def source(self, alias: str) -> ScopeSource | None:
        """Return an entry of FROM by its alias, here or around."""
        for each in self.sources:
            if each.alias == alias:
                return each
        return self.parent.source(alias) if self.parent else None

    def _find(self, table: str, name: str) -> TypedSql | None:
        if not table:
            # USING makes one column of two: it is not ambiguous.
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
            # FROM f() AS x makes x a name of the only column.
            scalars = [each for each in self.sources if each.scalar and each.alias == name]
            if scalars:
                return scalars[0].columns[0][1]
        return self._find_system_column(sources, table, name)

    def _find_system_column(
        self, sources: list[ScopeSource], table: str, name: str
    ) -> TypedSql | None:
        # Only tables have them; a subquery has what it selects.
        stored = [each for each in sources if each.oid]
        if not stored or (not table and len(stored) > 1):
            return None
        if name == "tableoid":
            return TypedSql(str(stored[0].oid), OID)
        return _SYSTEM_COLUMNS.get(name)

    def star(self, table: str = "") -> Iterator[tuple[str, TypedSql]]:
        """Yield the columns that ``*`` or ``table.*`` stands for."""
        if not table:
            yield from self.merged
        merged = set() if table else {name for name, _ in self.merged}
        for each in self.sources:
            if not table or each.alias == table:
                yield from (column for column in each.columns if column[0] not in merged)
