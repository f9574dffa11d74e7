"""Executes SUBSCRIBE, which follows the changes of an object or of any query's result.

A query that is a plain read of one object (`parse_plain_read`, without ORDER BY or LIMIT) follows
that object; its changes are filtered and projected here. Afterwards, changes at the same timestamp
may cancel out, for example after an update of a column that is not selected: these are dropped. A
batch that arrives in pieces is consolidated piece by piece, so only one piece is in memory.

Every other query gets a maintained view, under a name that users cannot choose
(`is_subscribed_view`). The view is followed like any other, and dropped when the rows' generator is
closed. If this process cannot drop it, the service does, when the connection ends or at its next
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
"""Column of a subscribe with progress: true for a row that only says that all earlier times are
complete."""
_RESERVED: Final = "__"
"""Prefix of the columns that a subscribe adds before those of the rows."""


class FollowedObject(msgspec.Struct, frozen=True):
    """An object whose changes are followed, with the projection and filter to apply to them.

    The object's columns `project` are returned under the names and types of `shown`. Only rows that
    pass `tests` are returned.
    """

    name: str
    project: tuple[str, ...]
    shown: pa.Schema
    tests: tuple[PreparedComparison, ...] = ()
    whole: bool = True
    """True if all columns are returned, so that different rows stay different."""

    @classmethod
    def of(cls, read: PlainRead, schema: TableSchema) -> FollowedObject:
        """Return the object that a plain read follows. Raises `InvalidUsage`."""
        kinds = schema.arrow()
        fields = [
            pa.field(name, kinds.field(column).type)
            for name, column in zip(read.names, read.project, strict=True)
        ]
        tests = tuple(prepare_comparison(schema, each) for each in read.filter)
        whole = len(read.project) == len(schema.columns)
        return cls(read.name, read.project, pa.schema(fields), tests, whole)

    def shaped(self, changes: pa.Table, shape: pa.Schema) -> pa.Table:
        """Convert changes of the object to rows of the subscribe."""
        kept = passing_rows(self.tests, changes)
        names = [*self.shown.names, TIME, DIFF]
        rows = kept.select([*self.project, TIME, DIFF]).rename_columns(names)
        # Dropping columns can make rows equal, so insertions and deletions may cancel out.
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
    """Start to follow changes. Each row is preceded by its time and its diff.

    With progress, additional rows say that all changes before their time were returned. Close the
    result's generator to drop the view of a query that needed one.

    Raises:
        InvalidUsage: The object has no changes to follow.
        PenstockError: As `Client.create_materialized_view` does for the query.
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
    # Start the generator: closing one that never ran would not drop its view.
    await anext(rows)
    return StatementResult("SUBSCRIBE", shape, rows, rights=rights)


async def subscribe_shape(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> pa.Schema:
    """Return the columns of a subscribe's rows without creating anything. Raises as `subscribe`
    does."""
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
    """Rewrite a subscribe to a plain view, which stores no changes, as a subscribe to a query.
    Return any other statement unchanged."""
    if statement.name is None:
        return statement
    entry = await context.catalog.find_present(statement.name)
    if entry.kind != PLAIN_VIEW:
        return statement
    # Backticks quote a name in either dialect here.
    query = generated_span(context.dialect, f"SELECT * FROM {quote_name(entry.name)}")
    return msgspec.structs.replace(statement, name=None, query=query)


async def _plain_object(
    context: SessionContext, statement: SubscribeStatement, parameters: Sequence[SqlParameter]
) -> FollowedObject | None:
    """Return the object to follow; None if the query needs its own view."""
    if statement.name is not None:
        entry = await context.catalog.find(statement.name)
        if entry.schema is None:
            raise InvalidUsage(f"cannot subscribe to {entry.name}, which is a {entry.kind}")
        columns = tuple(entry.schema.names)
        return FollowedObject.of(PlainRead(entry.name, columns, columns), entry.schema)
    schemas = await context.catalog.readable()
    read = context.choose_query(_query_text(context, statement, parameters).text, schemas).read
    # ORDER BY and LIMIT need all rows, so they are left to a view.
    if read is None or read.finishing is not None:
        return None
    # A view refuses reserved names, with its own error.
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
    """Create the internal view of a subscribe's query, readable from `as_of` on, and return it."""
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
            # The catalog has analyzed the query, so read the columns from its status report.
        schemas = {each.name: each.schema for each in (await client.status()).objects}
        schema = schemas.get(name)
        if schema is None:
            raise InvalidUsage("an object that the query reads was dropped")
    # Drop the view even after a cancellation: the request was sent and will be executed.
    except BaseException:
        await _drop_view(context, name)
        raise
    # The view's rows are those of the query, so all of its columns are returned.
    columns = tuple(schema.names)
    return FollowedObject.of(PlainRead(name, columns, columns), schema)


async def _drop_view(context: SessionContext, name: str) -> None:
    # Do not wait long: the drop may queue behind other statements, but it is executed once it was
    # sent. If it fails, the service drops the view when the connection ends.
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
    """Yield an empty batch, then the changes. At the end, drop the view `view` unless it is ""."""
    progress = PROGRESSED in shape.names
    try:
        async with aclosing(changes):
            yield pa.RecordBatch.from_pylist([], schema=shape)
            async for change in changes:
                if change.table is not None and change.table.num_rows:
                    for batch in found.shaped(change.table, shape).to_batches():
                        yield batch
                # A partial batch does not complete its interval.
                if progress and not change.partial:
                    yield _progress(shape, change.upper)
    except PenstockError as error:
        if not view:
            raise
        # The user does not know of the internal view.
        text = str(error).replace(f"view {view}", "the query").replace(view, "the query")
        raise from_wire(type(error).__name__, text, error.determinate) from None
    finally:
        if view:
            await _drop_view(context, view)


def _progress(shape: pa.Schema, upper: int) -> pa.RecordBatch:
    known = {TIME: upper, PROGRESSED: True}
    arrays = [pa.array([known.get(field.name)], field.type) for field in shape]
    return pa.RecordBatch.from_arrays(arrays, schema=shape)
