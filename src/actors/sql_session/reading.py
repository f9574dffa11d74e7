"""Queries, subscribes, and the plans of both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.schema import DIFF, TIME
from actors.protocol.relations import fold
from actors.sql.statements import QueryStatement, SubscribeStatement
from actors.sql_session.context import (
    PLAIN_VIEW,
    QUERIED_KINDS,
    READABLE_KINDS,
    SessionContext,
    object_name,
)
from actors.sql_session.results import StatementResult
from actors.sql_session.row_values import SqlParameter
from actors.views.plain_views import find_relations, inline_views
from actors.views.query_analysis import find_mentioned_tables
from actors.views.simple import simple_read

PROGRESSED: Final = "__progressed"
"""Column of a subscribe: true for a row that says only that all earlier times are complete."""


async def read_query(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> StatementResult:
    """Begin a query. Raises as `Client.query` does, before the result is returned."""
    text, as_of = await query_text(context, statement, parameters)
    found = context.rows(text, as_of)
    return await begun(found)


async def query_text(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> tuple[str, int | None]:
    """Return a query in Spark's dialect, and the time at which it is read (None: the latest).
    Raises `InvalidUsage`."""
    as_of = await context.pinned_time(statement, parameters)
    text = context.spark(_without_pins(statement), parameters)
    # Names without a time would be read at it as well, which is not what was written.
    if statement.pins and statement.as_of is None:
        await _check_all_pinned(context, statement, text)
    if context.transaction is not None and as_of is None:
        as_of = await context.transaction_time()
        if context.transaction.tables:
            # Before the changes are laid over, so that a view's query sees them, too.
            text = inline_views(text, await context.catalog.plain_views())
        text = context.transaction.overlaid(text)
    return text, as_of


def _without_pins(statement: QueryStatement) -> str:
    """Return the query's text with blanks for the times of its names."""
    text, start = statement.query.text, statement.query.start
    for pin in statement.pins:
        first, last = pin.clause.start - start, pin.clause.end - start
        # Blanks keep every later position.
        text = text[:first] + " " * (last - first) + text[last:]
    return text


async def _check_all_pinned(context: SessionContext, statement: QueryStatement, text: str) -> None:
    """Raise `InvalidUsage` if a name of the query has no time while another has."""
    pinned = {object_name(pin.name).lower() for pin in statement.pins}
    schemas = {
        each.name: each.schema
        for each in await context.catalog.all()
        if each.kind in QUERIED_KINDS and each.schema is not None
    }
    free = [name for name in find_mentioned_tables(text, schemas) if name.lower() not in pinned]
    if free:
        raise InvalidUsage(
            f"{free[0]} has no TIMESTAMP AS OF, and another name of the query has: all names are "
            "read at one time; write AS OF once, at the query's end"
        )


async def begun(found: AsyncGenerator[pa.RecordBatch, None]) -> StatementResult:
    """Return the result of rows whose first batch is there, so that errors come before it."""
    try:
        first = await anext(found)
    except BaseException:
        await found.aclose()
        raise
    return StatementResult("SELECT", first.schema, _with_first(first, found))


async def _with_first(
    first: pa.RecordBatch, rest: AsyncGenerator[pa.RecordBatch, None]
) -> AsyncGenerator[pa.RecordBatch, None]:
    async with aclosing(rest):
        yield first
        async for batch in rest:
            yield batch


async def subscribe(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> StatementResult:
    """Begin to follow a table's or view's changes: rows with their time and weight before them.

    With progress a row says from time to time that all changes before its time were told.

    Raises:
        InvalidUsage: The query is more than ``SELECT * FROM`` an object.
    """
    entry = await context.catalog.find((_subscribed(context, statement),))
    if entry.schema is None:
        raise InvalidUsage(f"{entry.name} is a {entry.kind}: it has no changes to follow")
    as_of = None if statement.as_of is None else await context.time_of(statement.as_of, parameters)
    up_to = None if statement.up_to is None else await context.time_of(statement.up_to, parameters)
    changes = context.client.subscribe(
        entry.name,
        as_of=as_of,
        up_to=up_to,
        snapshot=statement.snapshot,
        progress=statement.progress,
    )
    head = [pa.field(TIME, pa.int64())]
    if statement.progress:
        head.append(pa.field(PROGRESSED, pa.bool_()))
    shape = pa.schema([*head, pa.field(DIFF, pa.int64()), *entry.schema.arrow()])

    async def rows() -> AsyncGenerator[pa.RecordBatch, None]:
        async with aclosing(changes):
            async for change in changes:
                if change.table is not None and change.table.num_rows:
                    for batch in _shaped(change.table, shape).to_batches():
                        yield batch
                # A part of an interval says nothing of the interval's end.
                if statement.progress and not change.partial:
                    yield _progress(shape, change.upper)

    return StatementResult("SUBSCRIBE", shape, rows())


def _subscribed(context: SessionContext, statement: SubscribeStatement) -> str:
    """Return the name of the object that is followed."""
    if statement.name is not None:
        return object_name(statement.name)
    assert statement.query is not None
    text = context.spark(statement.query.text)
    words = text.split()
    if [word.upper() for word in words[:3]] == ["SELECT", "*", "FROM"] and len(words) == 4:
        return words[3].strip("`")
    raise InvalidUsage(
        "SUBSCRIBE follows a table or view whole: CREATE MATERIALIZED VIEW name AS the query "
        "first, then SUBSCRIBE name"
    )


def _shaped(table: pa.Table, shape: pa.Schema) -> pa.Table:
    columns = [
        pa.repeat(pa.scalar(False), table.num_rows)
        if field.name == PROGRESSED
        else table[field.name]
        for field in shape
    ]
    return pa.table(columns, schema=shape)


def _progress(shape: pa.Schema, upper: int) -> pa.RecordBatch:
    known = {TIME: upper, PROGRESSED: True}
    arrays = [pa.array([known.get(field.name)], field.type) for field in shape]
    return pa.RecordBatch.from_arrays(arrays, schema=shape)


async def explain_query(
    context: SessionContext, statement: QueryStatement, parameters: Sequence[SqlParameter]
) -> list[str]:
    """Return how a query will be read, a line each."""
    text, as_of = await query_text(context, statement, parameters)
    objects = await context.catalog.all()
    schemas = {
        each.name: each.schema
        for each in objects
        if each.kind in READABLE_KINDS and each.schema is not None
    }
    when = "at the latest written time" if as_of is None else f"at {as_of}"
    read = simple_read(text, schemas)
    if read is None:
        views = {fold(each.name): each.name for each in objects if each.kind == PLAIN_VIEW}
        inlined = [views[name] for name in map(fold, find_relations(text)) if name in views]
        named = ", ".join([*find_mentioned_tables(text, schemas), *inlined]) or "no table"
        return [f"Run by Spark, {when}, over {named}"]
    lines = [f"Read of {read.name}, without Spark, {when}"]
    lines.append(f"  columns: {', '.join(read.project)}")
    if read.filter:
        lines.append(f"  filter: {', '.join(f'{each.column} {each.op}' for each in read.filter)}")
    if read.finishing is not None:
        order = ", ".join(each.column for each in read.finishing.order_by) or "none"
        lines.append(f"  order: {order}; limit: {read.finishing.limit}")
    return lines
