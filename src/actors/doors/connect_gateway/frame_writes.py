"""Writes DataFrames into tables of the service. Spark computes the rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Final

import pyarrow as pa
from pyspark.sql.connect.proto import base_pb2, commands_pb2, relations_pb2

from actors.doors.client.client import TableWrite
from actors.doors.connect_gateway.error_status import unsupported
from actors.doors.connect_gateway.gateway_sessions import GatewaySession, OpenOperation
from actors.doors.connect_gateway.local_operations import AnswerStream
from actors.doors.connect_gateway.object_catalog import ObjectDirectory, ObjectNames, SharedClient
from actors.doors.connect_gateway.plan_guard import PlanGuard
from actors.doors.connect_gateway.plan_options import check_write, creates, wants_absence
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, plan_of
from actors.doors.connect_gateway.plan_routes import (
    ForwardRoute,
    LocalRoute,
    nothing,
    nothing_as_command,
)
from actors.doors.connect_gateway.row_messages import RowGatherer, complete_answer
from actors.doors.connect_gateway.spark_calls import SparkCalls
from actors.doors.connect_gateway.sql_names import (
    NameParts,
    find_text_reads,
    parse_identifier,
    parse_text,
)
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.row_values import schema_of
from actors.engine.sql.statements import InsertStatement
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, ObjectExists, SqlSyntaxError, UnknownObject
from actors.runtime.settings import Settings

INSERTED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of a DataFrame that is written into a table."""


class FrameWrites:
    """Chooses the route of each write of a DataFrame, and executes it."""

    def __init__(
        self,
        settings: Settings,
        directory: ObjectDirectory,
        client: SharedClient,
        calls: SparkCalls,
        guard: PlanGuard,
        bind: Callable[[OpenOperation, ProtoMessage, ObjectNames], Awaitable[ForwardRoute]],
        check: Callable[[GatewaySession, str, list[str]], None],
    ) -> None:
        """Set up the writes. `bind` replaces the names in a request by relations; `check` raises
        `AccessDenied` unless a session has a right on objects."""
        self._settings = settings
        self._directory = directory
        self._client = client
        self._calls = calls
        self._guard = guard
        self._bound = bind
        self._check = check

    async def filled_from_views(self, operation: OpenOperation, text: str) -> LocalRoute | None:
        """Return the route of an INSERT whose query reads temporary views of the session.

        Only Spark knows these views, so it computes the rows. Return None for any other text.
        """
        hidden = operation.session.hidden
        # Most sessions have no such views; do not parse their texts twice.
        if not hidden:
            return None
        try:
            statement = await run_or_offload(len(text), lambda: parse_text(text))
        except SqlSyntaxError:
            return None  # the error is reported when the statement is executed
        if not isinstance(statement, InsertStatement) or statement.query is None:
            return None
        query, names = statement.query.query.text, await self._directory.names()
        key = names.key_of(statement.table, hidden)

        def resolve(parts: NameParts) -> str | None:
            return parts[0] if len(parts) == 1 and fold(parts[0]) in hidden else None

        # An INSERT with a column list is left to the usual execution, which orders the columns.
        if key is None or statement.columns is not None or not find_text_reads(query, resolve):
            return None
        relation = relations_pb2.Relation(sql=relations_pb2.SQL(query=query))
        plan = base_pb2.ExecutePlanRequest(plan=plan_of(relation))
        await self._guard.check(operation.session, plan, names)
        return LocalRoute(lambda: self._fill(operation, plan, names, key), True)

    async def _fill(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames, key: str
    ) -> AnswerStream:
        """Insert the rows of a query that Spark executes, and answer as for a statement."""
        async with aclosing(
            self._insert(operation, request, names, key, by_position=True)
        ) as answers:
            async for _ in answers:
                pass
        async for answer in nothing_as_command():
            yield answer

    def route(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | None:
        """Return the route of a write into an existing or new table of the service; None for any
        other write."""
        command = request.plan.command
        first = command.WhichOneof("command_type") == "write_operation"
        write = command.write_operation if first else command.write_operation_v2
        # A write to a path is left to Spark, and allowed only to clients that may run code.
        if first and not write.HasField("table"):
            return None
        session = operation.session
        parts = parse_identifier(write.table.table_name if first else write.table_name)
        name = None if parts is None else names.own_name(parts, session.hidden)
        if parts is None or name is None:
            return None
        check_write(write, name)
        plan = base_pb2.ExecutePlanRequest(plan=plan_of(write.input))
        key = names.key_of(parts, session.hidden)
        if key is None:
            if not creates(write):
                raise UnknownObject(f"table {name!r} does not exist: create it first")
            return LocalRoute(lambda: self._create(operation, plan, names, name), True)
        if wants_absence(write):
            raise ObjectExists(f"table or view {key!r} already exists")
        # The mode `ignore` leaves an existing table unchanged.
        if first and write.mode == commands_pb2.WriteOperation.SAVE_MODE_IGNORE:
            return LocalRoute(nothing)
        by_position = first and write.table.save_method == (
            commands_pb2.WriteOperation.SaveTable.TABLE_SAVE_METHOD_INSERT_INTO
        )
        if not _appends(write, first=first, by_position=by_position):
            raise unsupported(
                f"A DataFrame cannot replace the Penstock table {key}: use insertInto or mode "
                "append."
            )
        self._check(session, "write", [key])
        return LocalRoute(
            lambda: self._insert(operation, plan, names, key, by_position=by_position), True
        )

    async def _create(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames, name: str
    ) -> AnswerStream:
        """Create a table with the columns and rows of a plan that Spark executes.

        As for CREATE TABLE AS, the rows are inserted after the table is created.
        """
        session = operation.session
        rows = await self._gathered(session, await self._bound(operation, request, names), name)
        if rows is None:
            raise InvalidUsage("the DataFrame has no columns")
        rows = _in_utc(rows)
        async with await self._client.of_role(session.caller.role) as client:
            # Use a client of the caller's role, so that the role owns the table.
            await client.create_table(name, schema_of(rows.schema))
            if rows.num_rows:
                await client.insert(name, rows)
        yield complete_answer()

    async def _insert(
        self,
        operation: OpenOperation,
        request: ProtoMessage,
        names: ObjectNames,
        key: str,
        *,
        by_position: bool,
    ) -> AnswerStream:
        """Insert the rows of a plan that Spark executes, atomically."""
        bound = await self._bound(operation, request, names)
        rows = await self._gathered(operation.session, bound, key)
        columns = names.schemas[key].names
        if by_position and rows is not None:
            if len(columns) != rows.num_columns:
                raise InvalidUsage(
                    f"{key} has {len(columns)} columns, but the DataFrame {rows.num_columns}"
                )
            # `insertInto` matches columns by position instead of by name.
            rows = rows.rename_columns(list(columns))
        if rows is not None and rows.num_rows:
            # Refuse the write if the table's columns have changed in the meantime.
            write = TableWrite(_in_utc(rows), columns=names.schemas[key].digest)
            await (await self._client.get()).write({key: write})
        yield complete_answer()

    async def _gathered(
        self, session: GatewaySession, bound: ForwardRoute, key: str
    ) -> pa.Table | None:
        """Return the rows of a plan that Spark executes; None if it returns no batches. Raises
        `InvalidUsage` if the rows exceed `INSERTED_BYTES_MAX`."""
        gathered = RowGatherer()
        async with AsyncExitStack() as naming:
            if bound.names_texts or bound.views:
                await naming.enter_async_context(self._calls.naming(session, bound.views))
            async with aclosing(self._calls.answers(session, bound.request.plan)) as answers:
                async for answer in answers:
                    # Spark has analyzed the plan, so the names are no longer needed.
                    await naming.aclose()
                    gathered.add(answer)
                    if gathered.bytes > INSERTED_BYTES_MAX:
                        raise InvalidUsage(
                            f"DataFrame too large to insert into {key} (limit "
                            f"{INSERTED_BYTES_MAX} bytes): insert it in parts"
                        )
        return gathered.table()


def _appends(write: ProtoMessage, *, first: bool, by_position: bool) -> bool:
    if not first:
        return bool(write.mode == commands_pb2.WriteOperationV2.MODE_APPEND)
    if by_position:
        return bool(write.mode != commands_pb2.WriteOperation.SAVE_MODE_OVERWRITE)
    return bool(write.mode == commands_pb2.WriteOperation.SAVE_MODE_APPEND)


def _in_utc(rows: pa.Table) -> pa.Table:
    """Convert timestamps to UTC; Spark sends them in the session's time zone."""
    fields = [
        field.with_type(pa.timestamp("us", "UTC"))
        if pa.types.is_timestamp(field.type) and field.type.tz is not None
        else field
        for field in rows.schema
    ]
    # The cast changes only the zone, not the instants.
    return rows.cast(pa.schema(fields))
