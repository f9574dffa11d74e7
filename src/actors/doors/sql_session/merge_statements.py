"""Executes MERGE, and INSERT … ON CONFLICT as a MERGE.

The MERGE of an ON CONFLICT has the rows to insert as its source, named ``excluded``, and joins on
the PRIMARY KEY. A MERGE that names keys looks up their rows (`keyed_merge`). Any other runs one
query that returns, for each match, the old row, the number of the first clause that applies, and
the new row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.default_values import (
    TableScope,
    cast_or_default,
    is_default,
    open_table,
    with_defaults,
    with_present_definition,
)
from actors.doors.sql_session.keyed_merge import (
    compute_keyed_merge,
    read_keyed_merge,
    repeated_match,
)
from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql, join_sql
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.returning import ReturningList
from actors.doors.sql_session.row_changes import NEW, ComputedChange, change_rows, read_rows
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.store_assignment import cast_column
from actors.doors.sql_session.transaction import PendingChange
from actors.engine.sql.object_names import object_name
from actors.engine.sql.statements import (
    ConflictClause,
    InsertStatement,
    MergeClause,
    MergeMatch,
    MergeStatement,
    TextSpan,
    WrittenRows,
)
from actors.engine.sql.tokens import SqlDialect, quote_name
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage

Parameters = Sequence[SqlParameter]
_PARAMETER_CHARACTERS: Final = 8
"""Characters of text that take as long to process as one parameter."""
_ACTION: Final = "penstock_action"
_ROW: Final = "penstock_row"
_IN_TARGET: Final = "penstock_in_target"
_IN_SOURCE: Final = "penstock_in_source"
_EXCLUDED: Final = "excluded"


async def merge(
    context: SessionContext, statement: MergeStatement, parameters: Parameters
) -> StatementResult:
    """Execute a MERGE. Each row is handled by the first clause that applies to it.

    Raises:
        InvalidUsage: Two rows of the source would change the same row.
    """

    async def work() -> int:
        scope = await open_table(context, statement.table, parameters)
        scope = await with_defaults(scope, lambda: _wanted_by(scope.schema, statement.clauses))
        count, _ = await merge_rows(scope, statement, None)
        return count

    count = await with_present_definition(context, work)
    return StatementResult(f"MERGE {count}")


async def merge_rows(
    scope: TableScope, statement: MergeStatement, returning: ReturningList | None
) -> tuple[int, pa.Table | None]:
    """Execute a MERGE. Return what `change_rows` returns, and raise what `merge` raises."""
    size = len(scope.parameters) * _PARAMETER_CHARACTERS + _length(statement)
    keyed = await run_or_offload(size, lambda: read_keyed_merge(scope, statement))
    text = concat_sql()
    if keyed is None:
        text = await run_or_offload(size, _MergeQuery(scope, statement).text)

    async def compute() -> ComputedChange:
        if keyed is not None:
            return ComputedChange(*await compute_keyed_merge(scope, keyed))
        rows = await read_rows(scope.context, text)
        return _merged(scope.table, scope.schema, statement.clauses, rows)

    return await change_rows(scope, compute, returning)


def _length(statement: MergeStatement) -> int:
    query, rows = statement.source_query, statement.source_rows
    if query is not None:
        return query.query.end - query.query.start
    return 0 if rows is None else rows.rows[-1][-1].end - rows.rows[0][0].start


def _wanted_by(schema: TableSchema, clauses: Sequence[MergeClause]) -> set[str]:
    """Return the columns whose defaults a MERGE may use."""
    wanted = set()
    for clause in clauses:
        given = {fold(each.column[-1]): each.value for each in clause.assignments}
        if clause.action == "insert given":
            wanted |= set(schema.names) - set(clause.columns)
            continue
        inserts = clause.action == "insert"
        if inserts:
            named = zip(clause.columns or schema.names, clause.values, strict=False)
            given = {fold(name): span for name, span in named}
        for name in schema.names:
            span = given.get(fold(name))
            if inserts if span is None else is_default(span):
                wanted.add(name)
    return wanted


class _MergeQuery:
    """Builds the query of a MERGE's matches: old row, number of the clause, new row."""

    def __init__(self, scope: TableScope, statement: MergeStatement) -> None:
        self._scope = scope
        self._schema = scope.schema
        self._statement = statement
        self._clauses = statement.clauses
        name = None if statement.source_name is None else object_name(statement.source_name)
        self._source = quote_name(statement.source_alias or name or "source")
        self._target = quote_name(statement.alias or scope.table)

    def text(self) -> MappedSql:
        """Return the complete query."""
        target = self._target
        new = [
            concat_sql(self._chosen(column), f" AS {NEW}{number}")
            for number, column in enumerate(self._schema.columns)
        ]
        names = map(quote_name, self._schema.names)
        old = ", ".join(f"{target}.{name} AS {name}" for name in names)
        # Number the rows to distinguish equal ones: a table without a key may contain duplicates.
        return concat_sql(
            f"SELECT * FROM (SELECT {old}, {target}.{_ROW} AS {_ROW}, ",
            self._clause_number(),
            f" AS {_ACTION}, ",
            join_sql(", ", new),
            f" FROM (SELECT *, monotonically_increasing_id() AS {_ROW}, true AS {_IN_TARGET} "
            f"FROM {quote_name(self._scope.table)}) AS {target} "
            f"FULL OUTER JOIN (SELECT *, true AS {_IN_SOURCE} FROM ",
            self._source_rows(),
            f") AS {self._source} ",
            self._condition(),
            f" WHERE {_ACTION} IS NOT NULL",
        )

    def _source_rows(self) -> MappedSql:
        """Return the source as a relation of a FROM clause."""
        statement = self._statement
        query, rows = statement.source_query, statement.source_rows
        named = ", ".join(map(quote_name, statement.source_columns))
        if query is not None and named:
            # On a new line, because the query may end with a comment.
            inner = self._scope.spark(query.query).before("\n) AS v(")
            return concat_sql("(SELECT * FROM (", inner, named, "))")
        if query is not None:
            return concat_sql("(", self._scope.spark(query.query).before(")"))
        if rows is None:
            assert statement.source_name is not None
            return concat_sql(quote_name(object_name(statement.source_name)))
        own = {column.name: column for column in self._schema.columns}
        columns = [own[name] for name in rows.names]

        def value(span: TextSpan, column: TableColumn) -> MappedSql:
            literal = self._scope.default(column) if is_default(span) else ""
            return concat_sql(literal) if literal else self._scope.spark(span)

        lines = (
            concat_sql("(", join_sql(", ", map(value, row, columns)), ")") for row in rows.rows
        )
        return concat_sql("(SELECT * FROM (VALUES ", join_sql(", ", lines), f") AS v({named}))")

    def _condition(self) -> MappedSql:
        """Return the ON condition, and the parenthesis that closes the subquery."""
        on = self._statement.on
        if on is not None:
            return concat_sql("ON ", self._scope.spark(on).before(")")).around(on)
        keys = map(quote_name, self._schema.key)
        equal = " AND ".join(f"{self._target}.{key} = {self._source}.{key}" for key in keys)
        return concat_sql(f"ON {equal})")

    def _clause_number(self) -> MappedSql:
        """Return the expression for the number of the first clause that applies, else NULL."""
        cases = []
        for number, clause in enumerate(self._clauses):
            test = concat_sql(f"({_MATCHES[clause.match]})")
            if clause.condition is not None:
                # If the condition is not a Boolean, Spark's error points at the AND.
                condition = self._scope.spark(clause.condition).before(")")
                test = concat_sql(test, " AND (", condition).around(clause.condition)
            result = "NULL" if clause.action == "nothing" else str(number)
            cases.append(concat_sql("WHEN ", test, f" THEN {result}"))
        return concat_sql("CASE ", join_sql(" ", cases), " END")

    def _chosen(self, column: TableColumn) -> MappedSql:
        """Return the expression for a column's new value, by the clause that applies."""
        values = ((number, self._value(each, column)) for number, each in enumerate(self._clauses))
        cases = [concat_sql(f"WHEN {n} THEN ", value) for n, value in values if value is not None]
        if not cases:
            return concat_sql(f"CAST(NULL AS {column.type})")
        return concat_sql("CASE ", self._clause_number(), " ", join_sql(" ", cases), " END")

    def _value(self, clause: MergeClause, column: TableColumn) -> MappedSql | None:
        """Return the value that a clause gives a column, cast to its type; None if the clause makes
        no row."""
        context, name = self._scope.context, quote_name(column.name)
        match clause.action:
            case "update all" | "insert all":
                conf = context.spark_conf()
                return cast_column(f"{self._source}.{name}", column, conf, exact=False)
            case "update":
                given = {fold(each.column[-1]): each.value for each in clause.assignments}
                if fold(column.name) not in given:
                    return concat_sql(f"CAST({self._target}.{name} AS {column.type})")
            case "insert given":
                if column.name not in clause.columns:
                    return concat_sql(self._scope.default(column))
                exact, conf = context.dialect is SqlDialect.POSTGRES, context.spark_conf()
                return cast_column(f"{self._source}.{name}", column, conf, exact=exact)
            case "insert":
                names = [fold(each) for each in clause.columns or self._schema.names]
                if len(names) != len(clause.values):
                    problem = f"MERGE: {len(clause.values)} values for {len(names)} columns"
                    raise InvalidUsage(problem)
                given = dict(zip(names, clause.values, strict=True))
                if fold(column.name) not in given:
                    return concat_sql(self._scope.default(column))
            case _:
                return None
        span = given[fold(column.name)]
        return cast_or_default(self._scope, span, column)


_MATCHES: Final[Mapping[MergeMatch, str]] = {
    "matched": f"{_IN_TARGET} AND {_IN_SOURCE}",
    "not matched": f"{_IN_TARGET} IS NULL",
    "not matched by source": f"{_IN_SOURCE} IS NULL",
}


def _merged(
    table: str, schema: TableSchema, clauses: Sequence[MergeClause], rows: pa.Table
) -> ComputedChange:
    """Return the change that results from the rows of the matches' query."""
    actions = rows[_ACTION]

    def of(*verbs: str) -> pa.Table:
        numbers = [n for n, clause in enumerate(clauses) if clause.action in verbs]
        return rows.filter(pc.is_in(actions, value_set=pa.array(numbers, actions.type)))

    # An update deletes the old row and inserts the new one.
    gone = of("update", "update all", "delete")
    come = of("update", "update all", "insert", "insert all", "insert given")
    numbers = gone[_ROW]
    if pc.count_distinct(numbers).as_py() < len(numbers):
        raise repeated_match(table)
    new = pa.table(
        [come[f"{NEW}{number}"] for number in range(len(schema.columns))], schema=schema.arrow()
    )
    change = PendingChange(gone.select(schema.names), new)
    return ComputedChange(change, rows.num_rows)


# -- ON CONFLICT -----------------------------------------------------------------------------------


def as_merge(
    statement: InsertStatement,
    conflict: ConflictClause,
    schema: TableSchema,
    columns: Sequence[TableColumn],
) -> MergeStatement:
    """Return the MERGE that is equivalent to an INSERT … ON CONFLICT.

    Args:
        statement: The INSERT.
        conflict: Its ON CONFLICT clause.
        schema: The table's columns.
        columns: The columns to insert, in the order of the values.

    Raises:
        InvalidUsage: The table has no PRIMARY KEY, or the clause names other columns.
    """
    _check_target(statement, conflict, schema)
    names = tuple(column.name for column in columns)
    clauses = []
    if conflict.assignments:
        clauses.append(
            MergeClause(
                position=conflict.position,
                match="matched",
                action="update",
                condition=conflict.condition,
                assignments=conflict.assignments,
            )
        )
    clauses.append(
        MergeClause(
            position=statement.position,
            match="not matched",
            action="insert given",
            columns=names,
        )
    )
    return MergeStatement(
        position=statement.position,
        table=statement.table,
        alias=statement.alias,
        on=None,
        clauses=tuple(clauses),
        source_query=statement.query,
        source_columns=names,
        source_rows=None if statement.rows is None else WrittenRows(names, statement.rows),
        source_alias=_EXCLUDED,
    )


def _check_target(
    statement: InsertStatement, conflict: ConflictClause, schema: TableSchema
) -> None:
    table = statement.table[-1]
    if not schema.key:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT: the table has no PRIMARY KEY, so rows cannot "
            f"conflict"
        )
    named = {fold(name) for name in conflict.columns}
    if conflict.columns and named != {fold(name) for name in schema.key}:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT ({', '.join(conflict.columns)}): only the PRIMARY "
            f"KEY ({', '.join(schema.key)}) is unique"
        )
    if conflict.assignments and not conflict.columns:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT DO UPDATE: name the columns of the PRIMARY KEY "
            f"({', '.join(schema.key)})"
        )
