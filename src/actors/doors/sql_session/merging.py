"""MERGE, also of INSERT … ON CONFLICT.

Where the statement names keys, the rows are looked up by them (`keyed_merge`). Else one query has
the old row of each match, the number of the first clause that fits, and the new row beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.default_values import (
    StatementDefaults,
    cast_or_default,
    is_default,
    statement_defaults,
    with_present_definition,
)
from actors.doors.sql_session.keyed_merge import (
    compute_keyed_merge,
    read_keyed_merge,
    repeated_match,
)
from actors.doors.sql_session.long_texts import work_on
from actors.doors.sql_session.placed_text import PlacedText, joined, placed, quoted
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.returning import ReturningList
from actors.doors.sql_session.row_changes import NEW, ComputedChange, change_rows, read_rows
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.store_assignment import assigned_cast
from actors.doors.sql_session.transaction import PendingChange
from actors.engine.sql.object_names import object_name
from actors.engine.sql.statements import MergeClause, MergeStatement
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage

Parameters = Sequence[SqlParameter]
_PARAMETER_CHARACTERS: Final = 8
"""Length of a text whose work is that of one parameter."""
_ACTION: Final = "penstock_action"
_ROW: Final = "penstock_row"
_IN_TARGET: Final = "penstock_in_target"
_IN_SOURCE: Final = "penstock_in_source"


async def merge(
    context: SessionContext, statement: MergeStatement, parameters: Parameters
) -> StatementResult:
    """Change a table by the rows of another relation. Each row takes the first clause that fits.

    Raises:
        InvalidUsage: Two rows of the source would change the same row.
    """

    async def work() -> int:
        table, schema = await context.catalog.find_table(statement.table)
        defaults = await statement_defaults(
            context, table, schema, lambda: _wanted_by(schema, statement.clauses)
        )
        count, _ = await merge_rows(context, statement, parameters, None, defaults)
        return count

    count = await with_present_definition(context, work)
    return StatementResult(f"MERGE {count}")


async def merge_rows(
    context: SessionContext,
    statement: MergeStatement,
    parameters: Parameters,
    returning: ReturningList | None,
    defaults: StatementDefaults,
) -> tuple[int, pa.Table | None]:
    """Carry a MERGE out; return as `change_rows` does, and raise as `merge`."""
    table, schema = await context.catalog.find_table(statement.table)
    size = len(parameters) * _PARAMETER_CHARACTERS + _length(statement)
    keyed = await work_on(
        size,
        lambda: read_keyed_merge(context, schema, table, statement, parameters, defaults.values),
    )
    text = placed()
    if keyed is None:
        text = await work_on(
            size, lambda: _merge_query(context, table, schema, statement, parameters, defaults)
        )

    async def compute() -> ComputedChange:
        if keyed is not None:
            return ComputedChange(*await compute_keyed_merge(context, table, schema, keyed))
        return _merged(table, schema, statement.clauses, await read_rows(context, text))

    return await change_rows(context, table, schema, compute, returning, defaults)


def _length(statement: MergeStatement) -> int:
    query = statement.source_query
    return 0 if query is None else len(query.query.text)


def _wanted_by(schema: TableSchema, clauses: Sequence[MergeClause]) -> set[str]:
    """Return the columns whose defaults a MERGE may take."""
    wanted = set()
    for clause in clauses:
        given = {fold(each.column[-1]): each.value for each in clause.assignments}
        inserts = clause.action == "insert"
        if inserts:
            named = zip(clause.columns or schema.names, clause.values, strict=False)
            given = {fold(name): span for name, span in named}
        for name in schema.names:
            span = given.get(fold(name))
            if inserts if span is None else is_default(span):
                wanted.add(name)
    return wanted


def _merge_query(
    context: SessionContext,
    table: str,
    schema: TableSchema,
    statement: MergeStatement,
    parameters: Parameters,
    defaults: StatementDefaults,
) -> PlacedText:
    """Return the query of the matches: the old row, the number of its clause, and the new row."""
    target = quoted(statement.alias or table)
    if statement.source_query is not None:
        source_rows = placed(
            "(", context.spark(statement.source_query.query, parameters).before(")")
        )
        source = quoted(statement.source_alias or "source")
    else:
        assert statement.source_name is not None
        name = object_name(statement.source_name)
        source_rows, source = placed(quoted(name)), quoted(statement.source_alias or name)
    clauses = statement.clauses
    new = [
        placed(
            _chosen(context, schema, clauses, column, source, target, parameters, defaults),
            f" AS {NEW}{number}",
        )
        for number, column in enumerate(schema.columns)
    ]
    old = [f"{target}.{quoted(name)} AS {quoted(name)}" for name in schema.names]
    # Numbers tell rows apart that are equal: a bag may hold two of a kind.
    return placed(
        f"SELECT * FROM (SELECT {', '.join(old)}, {target}.{_ROW} AS {_ROW}, ",
        _clause_number(context, clauses, parameters),
        f" AS {_ACTION}, ",
        joined(", ", new),
        f" FROM (SELECT *, monotonically_increasing_id() AS {_ROW}, true AS {_IN_TARGET} "
        f"FROM {quoted(table)}) AS {target} "
        f"FULL OUTER JOIN (SELECT *, true AS {_IN_SOURCE} FROM ",
        source_rows,
        f") AS {source} ",
        placed("ON ", context.spark(statement.on, parameters).before(")")).around(statement.on),
        f" WHERE {_ACTION} IS NOT NULL",
    )


def _clause_number(
    context: SessionContext, clauses: Sequence[MergeClause], parameters: Parameters
) -> PlacedText:
    """Return the expression of the first clause that fits; NULL if none does."""
    kinds = {
        "matched": f"{_IN_TARGET} AND {_IN_SOURCE}",
        "not matched": f"{_IN_TARGET} IS NULL",
        "not matched by source": f"{_IN_SOURCE} IS NULL",
    }
    cases = []
    for number, clause in enumerate(clauses):
        test = placed(f"({kinds[clause.match]})")
        if clause.condition is not None:
            condition = context.spark(clause.condition, parameters)
            # One that is no condition is told of at the AND.
            test = placed(test, " AND (", condition.before(")")).around(clause.condition)
        result = "NULL" if clause.action == "nothing" else str(number)
        cases.append(placed("WHEN ", test, f" THEN {result}"))
    return placed("CASE ", joined(" ", cases), " END")


def _chosen(
    context: SessionContext,
    schema: TableSchema,
    clauses: Sequence[MergeClause],
    column: TableColumn,
    source: str,
    target: str,
    parameters: Parameters,
    defaults: StatementDefaults,
) -> PlacedText:
    """Return the expression of a column's new value, by the clause that fits."""
    number_of = _clause_number(context, clauses, parameters)
    cases = []
    for number, clause in enumerate(clauses):
        value = _new_value(context, schema, clause, column, source, target, parameters, defaults)
        if value is not None:
            cases.append(placed(f"WHEN {number} THEN ", value))
    if not cases:
        return placed(f"CAST(NULL AS {column.type})")
    return placed("CASE ", number_of, " ", joined(" ", cases), " END")


def _new_value(
    context: SessionContext,
    schema: TableSchema,
    clause: MergeClause,
    column: TableColumn,
    source: str,
    target: str,
    parameters: Parameters,
    defaults: StatementDefaults,
) -> PlacedText | None:
    """Return what a clause gives a column, of its type; None if it makes no row."""
    old = f"{target}.{quoted(column.name)}"

    match clause.action:
        case "update all" | "insert all":
            value = placed(f"{source}.{quoted(column.name)}")
            return assigned_cast(value, column, context.spark_conf())
        case "update":
            given = {fold(each.column[-1]): each.value for each in clause.assignments}
            span = given.get(fold(column.name))
            if span is None:
                return placed(f"CAST({old} AS {column.type})")
            return cast_or_default(context, span, column, parameters, defaults)
        case "insert":
            names = [fold(name) for name in clause.columns or schema.names]
            if len(names) != len(clause.values):
                raise InvalidUsage(f"MERGE: {len(clause.values)} values for {len(names)} columns")
            found = dict(zip(names, clause.values, strict=True)).get(fold(column.name))
            if found is None:
                return placed(defaults.literal(column))
            return cast_or_default(context, found, column, parameters, defaults)
    return None


def _merged(
    table: str, schema: TableSchema, clauses: Sequence[MergeClause], rows: pa.Table
) -> ComputedChange:
    """Return the change that the matches make."""
    actions = rows[_ACTION]

    def of(*verbs: str) -> pa.Table:
        numbers = [n for n, clause in enumerate(clauses) if clause.action in verbs]
        return rows.filter(pc.is_in(actions, value_set=pa.array(numbers, actions.type)))

    # An update is the old row's end and the new row's begin.
    gone = of("update", "update all", "delete")
    come = of("update", "update all", "insert", "insert all")
    numbers = gone[_ROW]
    if pc.count_distinct(numbers).as_py() < len(numbers):
        raise repeated_match(table)
    new = pa.table(
        [come[f"{NEW}{number}"] for number in range(len(schema.columns))], schema=schema.arrow()
    )
    change = PendingChange(gone.select(schema.names), new)
    return ComputedChange(change, rows.num_rows)
