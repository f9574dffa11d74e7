"""SUBSCRIBE: the changes of an object, of some columns and rows of one, or of any query's result.

Theory of operation. A query that is a plain read of one object (`parse_plain_read`, without an
order or a limit) follows that object, and its changes are filtered and projected here as they come.
Rows of one time that cancel then, as an update of a column that is not shown makes them, are left
out. A change that comes in pieces is summed up piece by piece, so that memory holds one.

For every other query a maintained view is created under a name that no user can give
(`is_subscribed_view`). It is followed like any view, and dropped when the rows' generator is
closed. If this process does not get there, the service drops it with the connection, or at its next
start.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final

import anyio
import msgspec
import pyarrow as pa

from actors.doors.client.client import ChangeBatch
from actors.doors.sql_session.context import PLAIN_VIEW, SessionContext
from actors.doors.sql_session.mapped_sql import MappedSql
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.row_values import SqlParameter
from actors.engine.sql.statements import SubscribeStatement, generated_span
from actors.engine.sql.tokens import quote_name
from actors.engine.views.plain_read import PlainRead
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.model.plan.updates import consolidate
from actors.model.protocol.api import TIME_ZONE, CreateView
from actors.model.protocol.relations import SUBSCRIBED_PREFIX
from actors.model.protocol.row_filter import PreparedComparison, passing_rows, prepare_comparison
from actors.runtime.errors import InvalidUsage, PenstockError, from_wire
from actors.runtime.progress import Time

PROGRESSED: Final = "__progressed"
"""Column of a subscribe: true for a row that says only that all earlier times are complete."""
_RESERVED: Final = "__"
"""Prefix of the columns that a subscribe puts before those of the rows."""


class FollowedObject(msgspec.Struct, frozen=True):
    """An object whose changes are followed, and what is made of them. The columns `project` come
    under the names of `shown`."""

    name: str
    project: tuple[str, ...]
    shown: pa.Schema
    tests: tuple[PreparedComparison, ...] = ()
    whole: bool = True
    """True if all columns are shown, so that no two rows become equal."""

    @classmethod
    def of(cls, read: PlainRead, schema: TableSchema) -> FollowedObject:
        """Return the object of a plain read. Raises `InvalidUsage`."""
        kinds = schema.arrow()
        fields = [
            pa.field(name, kinds.field(column).type)
            for name, column in zip(read.names, read.project, strict=True)
        ]
        tests = tuple(prepare_comparison(schema, each) for each in read.filter)
        whole = len(read.project) == len(schema.columns)
        return cls(read.name, read.project, pa.schema(fields), tests, whole)

    def shaped(self, changes: pa.Table, shape: pa.Schema) -> pa.Table:
        """Return the changes of the object as rows of a subscribe."""
        kept = passing_rows(self.tests, changes)
        names = [*self.shown.names, TIME, DIFF]
        rows = kept.select([*self.project, TIME, DIFF]).rename_columns(names)
        # With all columns two rows are equal here just when they are in the object.
        if not self.whole:
            rows = consolidate(rows)
        columns = [
            pa.repeat(pa.scalar(False), rows.num_rows)
            if field.name == PROGRESSED
            else rows[field.name]
            for field in shape
        ]
        return pa.table(columns, schema=shape)


async def subscribe(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> StatementResult:
    """Begin to follow changes: rows with their time and weight before them.

    With progress a row says from time to time that all changes before its time were told. Close
    the result's generator, which drops the view of a query that needed one.

    Raises:
        InvalidUsage: The object has no changes to follow.
        PenstockError: Whatever `Client.create_materialized_view` raises for the query.
    """
    statement = await _query_of_plain_view(context, statement)
    as_of = None if statement.as_of is None else await context.time_of(statement.as_of, parameters)
    up_to = None if statement.up_to is None else await context.time_of(statement.up_to, parameters)
    found = await _plain_object(context, statement, parameters)
    view = ""
    if found is None:
        view = f"{SUBSCRIBED_PREFIX}{secrets.token_hex(8)}"
        found = await _query_view(context, statement, parameters, view, as_of)
    rights = context.read_rights()
    changes = context.client.subscribe(
        found.name,
        rights=rights,
        as_of=as_of,
        up_to=up_to,
        snapshot=statement.snapshot,
        progress=statement.progress,
    )
    shape = _shape(found.shown, progress=statement.progress)
    rows = _rows(context, found, changes, shape, view=view)
    # The generator must have begun: closing one that has not would not drop its view.
    await anext(rows)
    return StatementResult("SUBSCRIBE", shape, rows, rights=rights)


async def subscribe_shape(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> pa.Schema:
    """Return the columns of a subscribe's rows; nothing is created. Raises as `subscribe`."""
    statement = await _query_of_plain_view(context, statement)
    found = await _plain_object(context, statement, parameters)
    if found is not None:
        return _shape(found.shown, progress=statement.progress)
    schema = await context.describe(_query_text(context, statement, parameters))
    return _shape(schema.arrow(), progress=statement.progress)


def _shape(shown: pa.Schema, *, progress: bool) -> pa.Schema:
    head = [pa.field(TIME, pa.int64())]
    if progress:
        head.append(pa.field(PROGRESSED, pa.bool_()))
    return pa.schema([*head, pa.field(DIFF, pa.int64()), *shown])


async def _query_of_plain_view(
    context: SessionContext, statement: SubscribeStatement
) -> SubscribeStatement:
    """Return a subscribe of a plain view by its name as one of a query: it has no changes of its
    own."""
    if statement.name is None:
        return statement
    entry = await context.catalog.find_present(statement.name)
    if entry.kind != PLAIN_VIEW:
        return statement
    # Backticks are quotes in both dialects here.
    query = generated_span(context.dialect, f"SELECT * FROM {quote_name(entry.name)}")
    return msgspec.structs.replace(statement, name=None, query=query)


async def _plain_object(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> FollowedObject | None:
    """Return the object that is followed; None if the query needs a view of its own."""
    if statement.name is not None:
        entry = await context.catalog.find(statement.name)
        if entry.schema is None:
            raise InvalidUsage(f"{entry.name} is a {entry.kind}: it has no changes to follow")
        columns = tuple(entry.schema.names)
        return FollowedObject.of(PlainRead(entry.name, columns, columns), entry.schema)
    schemas = await context.catalog.readable()
    read = context.choose_query(_query_text(context, statement, parameters).text, schemas).read
    # An order says nothing of a stream, and a limit is kept only by who has all rows.
    if read is None or read.finishing is not None:
        return None
    # As in a view, which refuses such names in words of its own.
    if any(name.startswith(_RESERVED) for name in read.names):
        return None
    return FollowedObject.of(read, schemas[read.name])


def _query_text(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> MappedSql:
    assert statement.query is not None, "a subscribe has a name or a query"
    return context.spark(statement.query, parameters)


# -- the view of a query ---------------------------------------------------------------------------


async def _query_view(
    context: SessionContext,
    statement: SubscribeStatement,
    parameters: Sequence[SqlParameter],
    name: str,
    as_of: Time | None,
) -> FollowedObject:
    """Create the view of a subscribe's query, with contents from `as_of` on."""
    client = context.client
    text = _query_text(context, statement, parameters)
    try:
        async with context.placed_errors(text):
            zone = context.spark_zone
            view = CreateView(
                0,
                name,
                text.text,
                conf={TIME_ZONE: zone} if zone else {},
                refresh_policy=context.variables.get("penstock.refresh_policy"),
                as_of=as_of,
                for_subscribe=True,
            )
            await client.submit(view)
            # Its columns: the catalog has analysed the query, and is not asked to do so again.
        schemas = {each.name: each.schema for each in (await client.status()).objects}
        schema = schemas.get(name)
        if schema is None:
            raise InvalidUsage("an object that the query reads was dropped")
    # Also a cancellation: the request is on its way, and will be carried out.
    except BaseException:
        await _drop_view(context, name)
        raise
    # The view has the rows of the query, and is followed whole.
    columns = tuple(schema.names)
    return FollowedObject.of(PlainRead(name, columns, columns), schema)


async def _drop_view(context: SessionContext, name: str) -> None:
    # Bounded: the drop may wait for other statements, and is carried out once it was sent. If it
    # fails, the service drops the view with the connection.
    limit_s = context.settings.connect_timeout_ms / 1000
    with anyio.move_on_after(limit_s, shield=True), suppress(PenstockError):
        await context.client.drop(name)


# -- rows ------------------------------------------------------------------------------------------


async def _rows(
    context: SessionContext,
    found: FollowedObject,
    changes: AsyncGenerator[ChangeBatch, None],
    shape: pa.Schema,
    *,
    view: str,
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield one batch without rows, then those of the changes; drop the view (if any) at the
    end."""
    progress = PROGRESSED in shape.names
    try:
        async with aclosing(changes):
            yield pa.RecordBatch.from_pylist([], schema=shape)
            async for change in changes:
                if change.table is not None and change.table.num_rows:
                    for batch in found.shaped(change.table, shape).to_batches():
                        yield batch
                # A part of an interval says nothing of the interval's end.
                if progress and not change.partial:
                    yield _progress(shape, change.upper)
    except PenstockError as error:
        if not view:
            raise
        # The user knows no view.
        text = str(error).replace(f"view {view}", "the query").replace(view, "the query")
        raise from_wire(type(error).__name__, text, error.determinate) from None
    finally:
        if view:
            await _drop_view(context, view)


def _progress(shape: pa.Schema, upper: int) -> pa.RecordBatch:
    known = {TIME: upper, PROGRESSED: True}
    arrays = [pa.array([known.get(field.name)], field.type) for field in shape]
    return pa.RecordBatch.from_arrays(arrays, schema=shape)
