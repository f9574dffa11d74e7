"""INSERT … ON CONFLICT as the MERGE that it is. Pure.

The rows that would be inserted are the MERGE's source, named ``excluded``; the PRIMARY KEY is its
condition. So an upsert of literal rows is carried out by keys (`keyed_merge`), and any other one by
Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from actors.doors.sql_session.default_values import (
    NO_DEFAULTS,
    StatementDefaults,
    is_default,
    session_literal,
)
from actors.engine.sql.statements import (
    ConflictClause,
    InsertStatement,
    MergeClause,
    MergeStatement,
    QueryStatement,
    TextSpan,
)
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage

EXCLUDED: Final = "excluded"


def as_merge(
    statement: InsertStatement,
    conflict: ConflictClause,
    schema: TableSchema,
    columns: Sequence[TableColumn],
    dialect: SqlDialect,
    defaults: StatementDefaults = NO_DEFAULTS,
) -> MergeStatement:
    """Return the MERGE that does what an INSERT with this clause does.

    Args:
        statement: The INSERT.
        conflict: Its ON CONFLICT.
        schema: The table's columns.
        columns: Those that are inserted, in the order of the values.
        dialect: That of the statement's texts.
        defaults: What DEFAULT stands for in its rows.

    Raises:
        InvalidUsage: The clause names other columns than the PRIMARY KEY, or DEFAULT stands for a
            value that has no literal.
    """
    _check_target(statement, conflict, schema)
    target = statement.alias or statement.table[-1]

    def quoted(name: str) -> str:
        mark = '"' if dialect is SqlDialect.POSTGRES else "`"
        return f"{mark}{name.replace(mark, mark * 2)}{mark}"

    names = ", ".join(quoted(column.name) for column in columns)
    if statement.query is None:

        def value(column: TableColumn, span: TextSpan) -> str | TextSpan:
            if not is_default(span):
                return span
            return session_literal(defaults.values.get(column.name), column, dialect)

        listed = [_listed(map(value, columns, row)) for row in statement.rows or ()]
        rows = [part for row in listed for part in (", (", *row, ")")]
        # The first comma is before the first row.
        rows[:1] = ["("]
        source = _composed("SELECT * FROM (VALUES ", *rows, f") AS v({names})")
    else:
        source = _composed("SELECT * FROM (", statement.query.query, f"\n) AS v({names})")
    keys = " AND ".join(
        f"{quoted(target)}.{quoted(k)} = {EXCLUDED}.{quoted(k)}" for k in schema.key
    )
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
            action="insert",
            columns=tuple(column.name for column in columns),
            values=tuple(_composed(f"{EXCLUDED}.{quoted(column.name)}") for column in columns),
        )
    )
    return MergeStatement(
        position=statement.position,
        table=statement.table,
        alias=statement.alias,
        on=_composed(keys),
        clauses=tuple(clauses),
        source_query=QueryStatement(position=statement.position, query=source),
        source_alias=EXCLUDED,
    )


def _check_target(
    statement: InsertStatement, conflict: ConflictClause, schema: TableSchema
) -> None:
    table = statement.table[-1]
    if not schema.key:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT: the table has no PRIMARY KEY, so no row is in "
            f"conflict with another"
        )
    named = {fold(name) for name in conflict.columns}
    if conflict.columns and named != {fold(name) for name in schema.key}:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT ({', '.join(conflict.columns)}): rows are unique "
            f"by the PRIMARY KEY alone ({', '.join(schema.key)})"
        )
    if conflict.assignments and not conflict.columns:
        raise InvalidUsage(
            f"INSERT INTO {table} … ON CONFLICT DO UPDATE: name the PRIMARY KEY's columns "
            f"({', '.join(schema.key)})"
        )


def _listed(row: Iterable[str | TextSpan]) -> list[str | TextSpan]:
    """Return the values of a row, with commas between them."""
    return [part for value in row for part in (", ", value)][1:]


def _composed(*parts: str | TextSpan) -> TextSpan:
    """Return a text that stands nowhere in the statement, but for the spans that are in it."""
    texts: list[str] = []
    pieces: list[tuple[int, TextSpan]] = []
    at = 0
    for part in parts:
        if isinstance(part, TextSpan):
            pieces.append((at, part))
        texts.append(part if isinstance(part, str) else part.text)
        at += len(texts[-1])
    text = "".join(texts)
    return TextSpan(0, len(text), text, tuple(pieces))
