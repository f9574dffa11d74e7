"""MERGE of literal rows by a table's primary key: an upsert, executed without Spark.

The statement ``MERGE INTO t USING (SELECT * FROM (VALUES (1, 'a')) AS v(id, name)) AS s ON t.id =
s.id WHEN MATCHED THEN UPDATE SET name = s.name WHEN NOT MATCHED THEN INSERT (id, name) VALUES
(s.id, s.name)`` looks up the rows with these keys and writes the result.

A MERGE is executed here only if the result is certain to be Spark's. Its values must be literals,
as in an INSERT, of one kind per column; its keys integers or strings; and its clauses must have no
conditions and use only literals and columns of the source. Spark runs every other MERGE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.doors.sql_session.default_values import TableScope
from actors.doors.sql_session.row_values import (
    DEFAULT_MARK,
    NotLocal,
    SqlParameter,
    column_array,
    literal_value,
)
from actors.doors.sql_session.transaction import PendingChange
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import MergeClause, MergeStatement, TextSpan
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

KEYED_ROWS_MAX: Final = 10_000
"""Maximum number of rows of a MERGE that are looked up by key; Spark joins larger ones."""
_EFFECTS: Final = {
    "matched": ("update", "update all", "delete", "nothing"),
    "not matched": ("insert", "insert all", "insert given", "nothing"),
}


class ClauseEffect(msgspec.Struct, frozen=True):
    """The effect of one clause.

    `verb` is its action. `values` maps each column that it sets to its new values, one for each row
    of the source.
    """

    verb: str
    values: Mapping[str, pa.Array]


class KeyedMerge(msgspec.Struct, frozen=True):
    """A MERGE that can be executed by key.

    `keys` are the source's values for the table's key columns. `matched` and `unmatched` are the
    effects of source rows with and without a matching table row (None: no clause).
    """

    keys: pa.Table
    matched: ClauseEffect | None
    unmatched: ClauseEffect | None


def read_keyed_merge(scope: TableScope, statement: MergeStatement) -> KeyedMerge | None:
    """Analyze a MERGE for execution by key. Return None if Spark must execute it."""
    transaction = scope.context.transaction
    # Only Spark overlays the transaction's own changes on the table.
    if transaction is not None and scope.table in transaction.tables:
        return None
    try:
        return _KeyedRows(scope, statement).merge()
    except (NotLocal, SqlSyntaxError):
        return None


class _KeyedRows:
    """Reads the source rows and the clauses of one MERGE.

    Every method raises `NotLocal` for what only Spark can execute.
    """

    def __init__(self, scope: TableScope, statement: MergeStatement) -> None:
        schema = scope.schema
        rows = statement.source_rows
        if not schema.key or not statement.source_alias or rows is None:
            raise NotLocal
        names = [fold(name) for name in rows.names]
        if len(set(names)) < len(names) or len(rows.rows) > KEYED_ROWS_MAX:
            raise NotLocal
        if {len(row) for row in rows.rows} != {len(names)}:
            raise NotLocal
        self._scope = scope
        self._statement = statement
        self._own = {fold(column.name): column for column in schema.columns}
        self._schema = schema
        self._target = fold(statement.alias or scope.table)
        self._source = fold(statement.source_alias)
        self._count = len(rows.rows)
        self._values = {
            name: self._of_one_kind([self._value(span, name) for span in spans])
            for name, spans in zip(names, zip(*rows.rows, strict=True), strict=True)
        }

    def _value(self, span: TextSpan, name: str) -> Any:
        value = literal_value(span, self._scope.parameters)
        # Only the rows of an INSERT … ON CONFLICT may contain DEFAULT; their columns are named as
        # the table's.
        if value is DEFAULT_MARK and self._statement.on is None:
            default = self._scope.values.get(self._own[name].name)
            return None if default is None else default.as_py()
        return value

    @staticmethod
    def _of_one_kind(values: list[Any]) -> list[Any]:
        """Return a column's values. Raises `NotLocal` if they are of several kinds: Spark converts
        them to a common type, which may change a value."""
        plain = [each.value if isinstance(each, SqlParameter) else each for each in values]
        if len({type(each) for each in plain if each is not None}) > 1:
            raise NotLocal
        return values

    def merge(self) -> KeyedMerge:
        """Return the MERGE in executable form."""
        # Keys first: most statements that are not upserts fail here.
        keys = self._keys()
        clauses: dict[str, MergeClause] = {}
        for clause in self._statement.clauses:
            if clause.condition is not None or clause.action not in _EFFECTS.get(clause.match, ()):
                raise NotLocal
            # The first clause that matches wins, and a clause without a condition always matches.
            clauses.setdefault(clause.match, clause)
        effects = {match: self._effect(clause) for match, clause in clauses.items()}
        return KeyedMerge(keys, effects.get("matched"), effects.get("not matched"))

    # -- conditions and clauses ----------------------------------------------------------------

    def _keys(self) -> pa.Table:
        """Return the source's values for the key columns. ON must equate each of them once."""
        on = self._statement.on
        own = [fold(name) for name in self._schema.key]
        pairs = [(name, name) for name in own] if on is None else self._equated(on)
        if sorted(column for column, _ in pairs) != sorted(own):
            raise NotLocal
        found = dict(pairs)
        columns = [self._key_values(self._own[name], found[name]) for name in own]
        return pa.table(columns, names=list(self._schema.key))

    def _equated(self, on: TextSpan) -> list[tuple[str, str]]:
        """Return the pairs of a table column and a source column that a condition equates."""
        reader = StatementReader.of(on)
        found = []
        while True:
            one = _qualified(reader)
            reader.need("=")
            sides = dict((one, _qualified(reader)))
            if sides.keys() != {self._target, self._source} or self._target == self._source:
                raise NotLocal
            found.append((sides[self._target], sides[self._source]))
            if not reader.take("AND"):
                reader.need_end()
                return found

    def _key_values(self, column: TableColumn, source: str) -> pa.Array:
        kind = arrow_type(column.type)
        wanted: type = int if pa.types.is_integer(kind) else str
        # For these types, equality in Python is equality in Spark.
        if wanted is str and not pa.types.is_string(kind):
            raise NotLocal
        for value in self._column(source):
            plain = value.value if isinstance(value, SqlParameter) else value
            if plain is not None and type(plain) is not wanted:
                raise NotLocal
        return self._array(column, source)

    def _effect(self, clause: MergeClause) -> ClauseEffect:
        columns = self._schema.columns
        match clause.action:
            case "update all" | "insert all":
                values = {each.name: self._array(each, fold(each.name)) for each in columns}
            case "insert given":
                given = [self._own[fold(name)] for name in clause.columns]
                values = {each.name: self._array(each, fold(each.name)) for each in given}
                values = self._left_out() | values
            case "update":
                pairs = [(fold(each.column[-1]), each.value) for each in clause.assignments]
                values = self._assigned(pairs)
            case "insert":
                names = [fold(name) for name in clause.columns or self._schema.names]
                if len(names) != len(clause.values):
                    raise NotLocal  # an error, which the general path reports
                values = self._left_out() | self._assigned(
                    list(zip(names, clause.values, strict=True))
                )
            case _:
                values = {}
        return ClauseEffect(clause.action, values)

    def _left_out(self) -> dict[str, pa.Array]:
        """Return the defaults of all columns that have one, repeated for each source row."""
        return {name: pa.repeat(value, self._count) for name, value in self._scope.values.items()}

    def _assigned(self, pairs: Sequence[tuple[str, TextSpan]]) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        for name, span in pairs:
            column = self._own.get(name)
            # A column that is set twice is an error, which the general path reports.
            if column is None or column.name in found:
                raise NotLocal
            found[column.name] = self._assigned_value(column, span)
        return found

    def _assigned_value(self, column: TableColumn, span: TextSpan) -> pa.Array:
        if [token.text for token in span.tokens[1:2]] == ["."]:
            reader = StatementReader.of(span)
            qualifier, name = _qualified(reader)
            if qualifier != self._source or not reader.ends():
                raise NotLocal
            return self._array(column, name)
        value = column_array(
            [literal_value(span, self._scope.parameters)],
            column,
            times=self._scope.context.times,
            defaults=self._scope.values,
        )
        return pa.repeat(value[0], self._count)

    def _column(self, source: str) -> list[Any]:
        # An unknown column is an error, which Spark reports in its own words.
        values = self._values.get(source)
        if values is None:
            raise NotLocal
        return values

    def _array(self, column: TableColumn, source: str) -> pa.Array:
        return column_array(self._column(source), column, times=self._scope.context.times)


def _qualified(reader: StatementReader) -> tuple[str, str]:
    """Read ``alias.column``. Return both names, folded."""
    qualifier = fold(reader.name())
    reader.need(".")
    return qualifier, fold(reader.name())


# -- execution -------------------------------------------------------------------------------------


async def compute_keyed_merge(scope: TableScope, merge: KeyedMerge) -> tuple[PendingChange, int]:
    """Look up the rows by key. Return the change, and the number of source rows that had an effect.

    Raises `InvalidUsage` if two source rows change the same row.
    """
    context, table, schema = scope.context, scope.table, scope.schema
    wanted = merge.keys.to_pylist()
    # NULL equals nothing, and a repeated key is looked up once.
    whole = list({tuple(k.values()): k for k in wanted if None not in k.values()}.values())
    as_of = None if context.transaction is None else await context.transaction_time()
    if whole:
        found = await context.client.peek(table, as_of, whole, deadline_ms=context.deadline_ms)
    else:
        found = schema.arrow().empty_table()
    found = found.select(schema.names)
    places = {
        tuple(row.values()): place
        for place, row in enumerate(found.select(list(schema.key)).to_pylist())
    }
    pairs = [(row, places.get(tuple(key.values()))) for row, key in enumerate(wanted)]
    matched = [(row, place) for row, place in pairs if place is not None]
    unmatched = [row for row, place in pairs if place is None]
    return _changed(table, schema, merge, found, matched, unmatched)


def _changed(
    table: str,
    schema: TableSchema,
    merge: KeyedMerge,
    found: pa.Table,
    matched: Sequence[tuple[int, int]],
    unmatched: Sequence[int],
) -> tuple[PendingChange, int]:
    # An update deletes the old row and inserts the new one.
    gone, come, count = schema.arrow().empty_table(), [], 0
    update, insert = merge.matched, merge.unmatched
    if update is not None and update.verb != "nothing":
        rows = pa.array([row for row, _ in matched], pa.int64())
        gone = found.take(pa.array([place for _, place in matched], pa.int64()))
        if len({place for _, place in matched}) < len(matched):
            raise repeated_match(table)
        if update.verb != "delete":
            come.append(_filled(schema, update.values, rows, gone))
        count += len(matched)
    if insert is not None and insert.verb != "nothing":
        come.append(_filled(schema, insert.values, pa.array(unmatched, pa.int64()), None))
        count += len(unmatched)
    new = pa.concat_tables(come) if come else None
    return PendingChange(gone, new), count


def _filled(
    schema: TableSchema, values: Mapping[str, pa.Array], rows: pa.Array, old: pa.Table | None
) -> pa.Table:
    """Build new rows: each column from `values` at the source's row numbers `rows`, else from the
    old row, else NULL."""
    columns = []
    for field in schema.arrow():
        if field.name in values:
            columns.append(values[field.name].take(rows))
        elif old is not None:
            columns.append(old[field.name])
        else:
            columns.append(pa.nulls(len(rows), field.type))
    return pa.table(columns, schema=schema.arrow())


def repeated_match(table: str) -> InvalidUsage:
    """Return the error for a MERGE that would change a row twice."""
    return InvalidUsage(
        f"MERGE INTO {table}: two source rows match the same table row: make the source unique by "
        "its join columns"
    )
