"""Queries over the service's relations about itself (``penstock.objects``), beyond plain reads.

Their rows, as they are now, become a WITH before the query: so Spark may join, group and order
them, alone or with tables. A plain read of one goes the way of all plain reads.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.row_values import spark_literal
from actors.engine.sql.tokens import lex_sql
from actors.engine.views.plain_views import inline_views
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import PREFIX, RELATION_SCHEMAS
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

SYSTEM_ROWS_MAX: Final = 10_000
"""Rows of one relation that are written into a query."""


async def with_system_rows(context: SessionContext, text: str) -> str:
    """Return a query with the relations that it names defined before it. Raises `InvalidUsage` for
    one with too many rows."""
    if PREFIX not in text.lower():
        return text
    renamed, names = quote_relations(text)
    schemas = {**await context.catalog.readable(), **RELATION_SCHEMAS}
    if not names or context.choose_query(text, schemas).read is not None:
        return text
    queries = {}
    for name in names:
        rows = await context.client.peek(name)
        if rows.num_rows > SYSTEM_ROWS_MAX:
            raise InvalidUsage(
                f"{name} has {rows.num_rows} rows, and at most {SYSTEM_ROWS_MAX} are joined or "
                f"grouped: select those that you want by comparisons alone"
            )
        queries[name] = rows_query(rows, RELATION_SCHEMAS[name])
    return inline_views(renamed, queries)


def quote_relations(text: str) -> tuple[str, list[str]]:
    """Return a query whose relations are names of one part, and these names.

    >>> quote_relations("SELECT o.name FROM Penstock.objects o -- penstock.peeks")
    ('SELECT o.name FROM `penstock.objects` o -- penstock.peeks', ['penstock.objects'])
    """
    try:
        tokens = lex_sql(text)
    # Spark says what is wrong with it.
    except SqlSyntaxError:
        return text, []
    found: dict[str, None] = {}
    made, done = "", 0
    for first, dot, last in zip(tokens, tokens[1:], tokens[2:], strict=False):
        name = f"{first.name}.{last.name}".lower()
        if dot.text == "." and name in RELATION_SCHEMAS and first.start >= done:
            found[name] = None
            made += f"{text[done : first.start]}`{name}`"
            done = last.end
    return made + text[done:], list(found)


def rows_query(rows: pa.Table, schema: TableSchema) -> str:
    """Return a query of these rows, in Spark's dialect.

    >>> from actors.model.plan.schema import TableColumn
    >>> one = TableSchema((TableColumn("n", "bigint"),))
    >>> rows_query(pa.table({"n": [7]}), one)
    'SELECT * FROM VALUES (CAST(7 AS bigint)) AS v (`n`)'
    >>> rows_query(pa.table({"n": pa.array([], pa.int64())}), one)
    'SELECT * FROM VALUES (CAST(NULL AS bigint)) AS v (`n`) WHERE false'
    """
    names = ", ".join(f"`{name}`" for name in schema.names)
    columns = [rows[name].to_pylist() or [None] for name in schema.names]
    lines = (
        ", ".join(
            spark_literal(value, column.type)
            for value, column in zip(row, schema.columns, strict=True)
        )
        for row in zip(*columns, strict=True)
    )
    text = ", ".join(f"({line})" for line in lines)
    return f"SELECT * FROM VALUES {text} AS v ({names}){'' if rows.num_rows else ' WHERE false'}"
