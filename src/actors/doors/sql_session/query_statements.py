"""Executes and explains queries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import pyarrow as pa

from actors.control.access.open_sessions import ReadRights
from actors.doors.sql_session.context import (
    QUERIED_KINDS,
    SessionContext,
    schemas_of,
)
from actors.doors.sql_session.mapped_sql import MappedSql
from actors.doors.sql_session.own_changes import OWN_ROW, choose_own_read, read_own_row
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.row_values import SqlParameter, spark_literal
from actors.engine.sql.object_names import object_name
from actors.engine.sql.statements import QueryStatement
from actors.engine.sql.tokens import lex_sql
from actors.engine.views.plain_views import inline_views
from actors.engine.views.query_analysis import find_mentioned_tables
from actors.engine.views.read_choice import NOT_PLAIN, explain_read
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import PREFIX, RELATION_SCHEMAS
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

SYSTEM_ROWS_MAX: Final = 10_000
"""Maximum rows of one of the service's relations that are inlined into a query."""


async def read_query(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> StatementResult:
    """Start a query, and return its result once the first batch has arrived.

    Raises as `Client.query` does.
    """
    # A read of one changed key is answered here. For every other query the service decides how to
    # read it.
    changed = await _changed_text(context, statement, parameters)
    if changed is not None:
        rights = context.read_rights()
        own = await read_own_row(context, changed, rights)
        if own is not None:
            return StatementResult("SELECT", own.schema, _batches(own), rights=rights)
    text, as_of = await query_text(context, statement, parameters)
    rights = context.read_rights()
    found = context.rows(text, as_of, rights)
    return await start_result(found, rights)


async def _changed_text(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> str | None:
    """Return the query in Spark's dialect if it reads at the time of an open transaction that has
    changes; else None."""
    transaction = context.transaction
    if transaction is None or not transaction.tables or statement.pins:
        return None
    if await context.pinned_time(statement, parameters) is not None:
        return None
    return (await context.spark_off_loop(statement.query, parameters)).text


async def _batches(rows: pa.Table) -> AsyncGenerator[pa.RecordBatch, None]:
    for batch in rows.to_batches():
        yield batch


async def query_text(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> tuple[MappedSql, int | None]:
    """Return a query in Spark's dialect, and the time at which to read it (None: the latest).

    The text includes the open transaction's changes and the rows of the service's relations. Raises
    `InvalidUsage`.
    """
    as_of = await context.pinned_time(statement, parameters)
    unpinned = statement.query.without([pin.clause for pin in statement.pins])
    query = await context.spark_off_loop(unpinned, parameters)
    # All objects are read at one time. Objects that the query did not pin must not be read at the
    # time of the pinned ones.
    if statement.pins and statement.as_of is None:
        await _check_all_pinned(context, statement, query.text)
    text = query.text
    if context.transaction is not None and as_of is None:
        as_of = await context.transaction_time()
        if context.transaction.tables:
            # Inline views before overlaying the changes, so that their queries see them as well.
            text = inline_views(text, await context.catalog.plain_views())
        text = context.transaction.overlaid(text)
    return query.within(await with_system_rows(context, text)), as_of


async def _check_all_pinned(context: SessionContext, statement: QueryStatement, text: str) -> None:
    """Raise `InvalidUsage` if only some of the query's objects have a TIMESTAMP AS OF."""
    pinned = {object_name(pin.name).lower() for pin in statement.pins}
    schemas = schemas_of(await context.catalog.all(), QUERIED_KINDS)
    free = [name for name in find_mentioned_tables(text, schemas) if name.lower() not in pinned]
    if free:
        raise InvalidUsage(
            f"{free[0]} has no TIMESTAMP AS OF, but another object of the query has: all are read "
            "at one timestamp; write AS OF once, at the end of the query"
        )


async def start_result(
    found: AsyncGenerator[pa.RecordBatch, None], rights: ReadRights | None = None
) -> StatementResult:
    """Wait for the first batch and return the result, so that early errors are raised here."""
    try:
        first = await anext(found)
    except BaseException:
        await found.aclose()
        raise
    return StatementResult("SELECT", first.schema, _with_first(first, found), rights=rights)


async def _with_first(
    first: pa.RecordBatch, rest: AsyncGenerator[pa.RecordBatch, None]
) -> AsyncGenerator[pa.RecordBatch, None]:
    async with aclosing(rest):
        yield first
        async for batch in rest:
            yield batch


async def explain_query(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> list[str]:
    """Return lines that explain how a query will be read."""
    query, as_of = await query_text(context, statement, parameters)
    when = f"  time: {'the latest written' if as_of is None else as_of}"
    changed = await _changed_text(context, statement, parameters)
    own = None if changed is None else choose_own_read(context, changed)
    if own is not None and own.read is not None:
        return [*explain_read(own.read, OWN_ROW), when]
    text = await context.client.explain_query(
        query.text, spark_conf=context.spark_conf(), refresh_policy="none"
    )
    lines = text.splitlines()
    # The service sees the transaction's changes as part of the query, and so gives another reason.
    if own is not None and own.reason != NOT_PLAIN:
        lines[1] = f"  reason: {own.reason}"
    return [*lines, when]


async def queried_rows(
    context: SessionContext, query: QueryStatement, parameters: Sequence[SqlParameter]
) -> pa.Table:
    """Return all rows of a query.

    It is read at the time that it names, else at the open transaction's time with its changes, else
    at the latest time.
    """
    text, as_of = await query_text(context, query, parameters)
    return await context.collect(text, as_of)


async def with_system_rows(context: SessionContext, text: str) -> str:
    """Define the relations such as ``penstock.objects`` that a query names in a WITH before it.

    Plain reads of one relation are left as they are. With its rows inlined, Spark can join, group
    and order a relation, also with tables. Raises `InvalidUsage` for a relation with more than
    `SYSTEM_ROWS_MAX` rows.
    """
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
                f"{name} has {rows.num_rows} rows, too many for joins, grouping or ordering (limit "
                f"{SYSTEM_ROWS_MAX}): select from it with only column comparisons in WHERE"
            )
        queries[name] = rows_query(rows, RELATION_SCHEMAS[name])
    return inline_views(renamed, queries)


def quote_relations(text: str) -> tuple[str, list[str]]:
    """Quote the service's relations in a query as one-part names. Return the query and the names.

    >>> quote_relations("SELECT o.name FROM Penstock.objects o -- penstock.peeks")
    ('SELECT o.name FROM `penstock.objects` o -- penstock.peeks', ['penstock.objects'])
    """
    try:
        tokens = lex_sql(text)
    # Spark will report the error.
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
    """Return a query in Spark's dialect whose result is these rows.

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
