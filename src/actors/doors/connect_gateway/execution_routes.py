"""Decides how a plan is executed: by the gateway itself, or by Spark after replacing names."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.connect.proto import relations_pb2

from actors.control.access.open_sessions import ReadRights
from actors.doors.connect_gateway.callers import caller
from actors.doors.connect_gateway.catalog_answers import SparkCatalogAnswer, answer_catalog
from actors.doors.connect_gateway.change_streams import bind_streams
from actors.doors.connect_gateway.error_status import unsupported
from actors.doors.connect_gateway.frame_writes import FrameWrites
from actors.doors.connect_gateway.gateway_sessions import GatewaySession, OpenOperation
from actors.doors.connect_gateway.local_operations import AnswerStream
from actors.doors.connect_gateway.object_catalog import (
    ObjectDirectory,
    ObjectNames,
    SharedClient,
    canonical_read,
    plain_relation,
    qualifier_of,
)
from actors.doors.connect_gateway.object_rows import ObjectRows, OpenedRows
from actors.doors.connect_gateway.pipelines import PipelineCommands, defines_pipeline
from actors.doors.connect_gateway.plain_reads import DirectRead, direct_read
from actors.doors.connect_gateway.plan_guard import PlanGuard
from actors.doors.connect_gateway.plan_options import (
    check_reads,
)
from actors.doors.connect_gateway.plan_rewriting import (
    EXPRESSION_TEXT,
    TEXT_FIELDS,
    PlanNames,
    ProtoMessage,
    bind_names,
    find_names,
    plan_of,
    relation_of_command,
    statement_of,
    walk_messages,
    written_text_of,
)
from actors.doors.connect_gateway.plan_routes import (
    ForwardRoute,
    LocalRoute,
    nothing,
    nothing_as_command,
)
from actors.doors.connect_gateway.row_messages import (
    RowGatherer,
    answer_relation,
    command_answer,
    complete_answer,
    row_answers,
    schema_answer,
    spark_struct_of,
    table_answers,
)
from actors.doors.connect_gateway.session_settings import (
    COMPUTED_CHANGES,
    WATCHED,
    check_fixed_text,
)
from actors.doors.connect_gateway.show_statements import answer_show_statement
from actors.doors.connect_gateway.spark_calls import SparkCalls
from actors.doors.connect_gateway.sql_names import (
    NameParts,
    TemporaryViewText,
    changed_name_of,
    created_name_of,
    dropped_view_of,
    is_query,
    keep_names,
    names_of,
    needs_no_rows,
    parse_identifier,
    read_names,
    setting_of,
    temporary_view_of,
)
from actors.doors.connect_gateway.statement_arguments import text_with_arguments
from actors.doors.connect_gateway.statement_execution import ExecuteStatement, StatementDeclined
from actors.doors.sql_session.audit import StatementAudit
from actors.doors.sql_session.offloading import run_or_offload
from actors.engine.sql.tokens import SqlDialect
from actors.model.protocol.relations import fold, is_relation
from actors.runtime.errors import (
    AccessDenied,
    InvalidUsage,
)
from actors.runtime.settings import Settings

VIEW_KEY: Final = "penstock.#"
"""Prefix of the keys of a session's views; no object's name starts with it."""


_LOST: Final = {
    "TABLE": (
        "CREATE TABLE {name} with a format or another clause of Spark: the table would be lost "
        "when Spark's process ends. Create a Penstock table with CREATE TABLE {name} (columns) or "
        "CREATE TABLE {name} AS query, or write files to a path."
    ),
    "VIEW": (
        "CREATE VIEW {name} over relations other than Penstock's: the view would be lost when "
        "Spark's process ends. Create a temporary view."
    ),
    "FUNCTION": (
        "CREATE FUNCTION {name}: the function would be lost when Spark's process ends. Create a "
        "temporary function in each session."
    ),
}
"""Errors for objects that would exist only in Spark's process."""


class PlanRouter:
    """Chooses the route of each plan."""

    def __init__(
        self,
        settings: Settings,
        directory: ObjectDirectory,
        client: SharedClient,
        rows: ObjectRows,
        calls: SparkCalls,
        guard: PlanGuard,
        execute_statement: ExecuteStatement | None,
        pipelines: PipelineCommands,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._client = client
        self._rows = rows
        self._calls = calls
        self._guard = guard
        self._execute = execute_statement
        self._pipelines = pipelines
        self._writes = FrameWrites(
            settings, directory, client, calls, guard, self._bound, self._check
        )

    async def route(
        self, operation: OpenOperation, request: ProtoMessage, *, declined: bool = False
    ) -> LocalRoute | ForwardRoute:
        """Return the route of an `ExecutePlanRequest`.

        `declined`: its text turned out not to be a statement of the service. Raises errors of the
        service and of Spark.
        """
        await _split_texts(request)
        session, text = operation.session, statement_of(request.plan)
        command = request.plan.command
        if text is None and not declined:
            text = self._argued_text(session, request.plan, await self._directory.names())
        if command.WhichOneof("command_type") == "pipeline_command":
            return LocalRoute(self._pipelines.answers(session, command.pipeline_command), True)
        if defines_pipeline(request) and command.WhichOneof("command_type") == "sql_command":
            return self._within_pipeline(request.plan)
        if text is not None:
            if self._execute is not None and not declined and not is_query(text):
                filled = await self._writes.filled_from_views(operation, text)
                return filled or LocalRoute(lambda: self._run_statement(text, session), True)
            self._refuse_lost(session, text, await self._directory.names())
            setting = setting_of(text)
            # A role without the right to run code is refused below, whatever the setting.
            if setting is not None and caller().runs_code:
                check_fixed_text(setting.name, resets=setting.resets, assigns=setting.assigns)
                await self._calls.note_settings(session, [setting.name])
            # EXECUTE IMMEDIATE and scripts may change any setting: note the values before that.
            if names_of(text).head in COMPUTED_CHANGES:
                await self._calls.note_settings(session, WATCHED)
            dropped = dropped_view_of(text)
            # Drop the view by a relation: Spark is not given commands of a client that may not run
            # code.
            is_sparks = dropped is not None and fold(dropped) in session.own_views
            if dropped is not None and session.drop_view(dropped):
                return LocalRoute(nothing_as_command)
            if dropped is not None and is_sparks:
                return LocalRoute(lambda: self._drop_view(session, dropped))
        names = await self._directory.names()
        if request.plan.WhichOneof("op_type") == "command":
            return await self._command(operation, request, names)
        return await self._relation(operation, request, names)

    def _argued_text(
        self, session: GatewaySession, plan: ProtoMessage, names: ObjectNames
    ) -> str | None:
        """Return the text of a statement with its arguments written into it; None for a query, and
        for any other plan."""
        if plan.command.WhichOneof("command_type") != "sql_command":
            return None
        relation = relation_of_command(plan.command.sql_command)
        written = written_text_of(relation)
        # Spark binds the arguments of a query.
        if written is None or is_query(written):
            return None
        if relation.WhichOneof("rel_type") == "sql":
            return text_with_arguments(relation.sql)
        target = changed_name_of(written)
        if target is not None and names.key_of(target, session.hidden) is not None:
            raise unsupported(
                "Penstock statements do not support DataFrames as arguments: create temporary "
                "views of them, or use df.writeTo(…).append()."
            )
        return None

    def _within_pipeline(self, plan: ProtoMessage) -> LocalRoute:
        """Return the route of a text in code that defines a pipeline, which answers with the
        relation itself. Raises `SparkCondition` for a text that is not a query."""
        original = relation_of_command(plan.command.sql_command)
        written = written_text_of(original)
        if written is None or not needs_no_rows(written):
            raise unsupported(
                "Code that defines a pipeline may only contain queries, not this statement."
            )
        # Do not analyze the query: it may read datasets that the run has yet to create.
        return LocalRoute(lambda: _of_command(original))

    # -- relations -----------------------------------------------------------------------------

    async def _relation(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | ForwardRoute:
        session, root = operation.session, request.plan.root
        if root.WhichOneof("rel_type") == "catalog":
            own = self._catalog(session, root, names)
            if own is not None:
                return own
        plain = self.plain(session, root, names)
        if plain is not None:
            self._check(session, "read", [plain.read.name], operation.rights)
            return LocalRoute(lambda: self._read(plain, session.caller.role))
        await self._guard.check(session, request, names)
        return await self._bound(operation, request, names)

    def _check(
        self,
        session: GatewaySession,
        right: str,
        keys: Collection[str],
        rights: ReadRights | None = None,
    ) -> None:
        """Raise `AccessDenied` unless a session has a right on these objects. `rights` notes
        them."""
        who = session.caller
        audit = StatementAudit(self._settings, who.role, who.peer, SqlDialect.SPARK)
        if rights is not None:
            rights.note(self._directory.reads_of(keys))
        try:
            self._directory.check(session.caller.role, right, keys)
        except AccessDenied:
            audit.event(f"Plan: {right}", "AccessDenied", tuple(keys))
            raise
        audit.event(f"Plan: {right}", objects=tuple(keys))

    def plain(
        self, session: GatewaySession, relation: ProtoMessage, names: ObjectNames
    ) -> DirectRead | None:
        """Return a relation as a plain read; None if Spark must execute it."""
        # With such settings only Spark knows what a text or a name means.
        if session.changed_meaning:
            return None
        return direct_read(relation, names.resolver(session.hidden), names.schemas)

    async def _read(self, plain: DirectRead, role: str) -> AnswerStream:
        """Answer a plain read for this role from an index or a shard."""
        # Read at the latest written timestamp instead of the latest sealed one, so that users see
        # their own writes.
        time = await self._directory.pin([plain.read.name])
        as_of = None if is_relation(plain.read.name) else time
        schema, offset = plain.columns(), 0
        yield schema_answer(schema)
        async with (
            self._client.reader_of(plain.read.name, role) as client,
            aclosing(client.query(plain.sql, as_of=as_of)) as batches,
        ):
            async for batch in batches:
                told = pa.Table.from_batches([batch]).cast(schema).combine_chunks()
                for each in told.to_batches() or [pa.RecordBatch.from_pylist([], schema=schema)]:
                    for answer in row_answers(each, offset):
                        yield answer
                    offset += each.num_rows
        yield complete_answer()

    def _catalog(
        self, session: GatewaySession, root: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | None:
        catalog = root.catalog
        if catalog.WhichOneof("cat_type") == "drop_temp_view":
            if session.drop_view(catalog.drop_temp_view.view_name):
                return LocalRoute(lambda: _of_table(pa.table({"value": [True]})))
            return None
        kind = catalog.WhichOneof("cat_type")
        if kind in ("create_table", "create_external_table"):
            parts = parse_identifier(getattr(catalog, kind).table_name)
            if parts is not None and names.own_name(parts) is not None:
                raise unsupported(_LOST["TABLE"].format(name=".".join(parts)))
        known = names.with_plain()
        found = answer_catalog(catalog, known, known.resolver(session.hidden))
        if found is None:
            return None
        if not found.added:
            return LocalRoute(lambda: _of_table(found.rows))
        return LocalRoute(lambda: self._listed(session, root, found))

    async def _listed(
        self, session: GatewaySession, root: ProtoMessage, found: SparkCatalogAnswer
    ) -> AnswerStream:
        """Answer a catalog list with the rows of Spark and of the service."""
        for answer in table_answers(await self._merged(session, root, found)):
            yield answer

    async def _shown(
        self, session: GatewaySession, root: ProtoMessage, found: SparkCatalogAnswer
    ) -> AnswerStream:
        """Answer a SHOW statement with the rows of Spark and of the service."""
        yield command_answer(answer_relation(await self._merged(session, root, found)))
        yield complete_answer()

    async def _merged(
        self, session: GatewaySession, root: ProtoMessage, found: SparkCatalogAnswer
    ) -> pa.Table:
        """Return the rows of Spark, if they are wanted, and of the service."""
        if not found.added:
            return found.rows
        gathered = RowGatherer()
        async with aclosing(self._calls.answers(session, plan_of(root))) as answers:
            async for answer in answers:
                gathered.add(answer)
        rows, own = found.rows, gathered.table()
        if own is not None:
            fitted = [rows.column(number).cast(own.schema.field(number).type)
                      for number in range(own.num_columns)]  # fmt: skip
            made = pa.Table.from_arrays(fitted, names=own.column_names)
            rows = pa.concat_tables([own.cast(made.schema), made])
        return rows.combine_chunks()

    # -- commands ------------------------------------------------------------------------------

    async def _command(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | ForwardRoute:
        session, command = operation.session, request.plan.command
        kind = command.WhichOneof("command_type")
        if kind == "sql_command":
            return await self._sql(operation, request, names)
        await self._guard.check(session, request, names)
        match kind:
            case "create_dataframe_view":
                return await self._view(session, request, names)
            case "write_operation" | "write_operation_v2":
                insert = self._writes.route(operation, request, names)
                if insert is not None:
                    return insert
            case "write_stream_operation_start" if command.write_stream_operation_start.table_name:
                parts = parse_identifier(command.write_stream_operation_start.table_name)
                if parts is not None and names.own_name(parts) is not None:
                    raise unsupported(
                        f"Streaming into the Penstock table {parts[-1]} is not supported: append "
                        "the batches with foreachBatch."
                    )
            case "write_stream_operation_start" if command.write_stream_operation_start.query_name:
                return await self._stream(operation, request, names)
        return await self._bound(operation, request, names)

    async def _sql(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | ForwardRoute:
        session, text = operation.session, statement_of(request.plan)
        original = relation_of_command(request.plan.command.sql_command)
        if self.plain(session, original, names) is not None:
            # The client will execute the relation to get the rows.
            return LocalRoute(lambda: _of_command(original))
        shown = None if text is None else answer_show_statement(text, names)
        if shown is not None:
            if not caller().runs_code:
                shown = SparkCatalogAnswer(shown.rows)
            return LocalRoute(lambda: self._shown(session, original, shown))
        view = None if text is None else temporary_view_of(text)
        if view is not None and text is not None:
            found = self._names(session, request, names)
            # Use only the query, so that Spark is not given the statement itself.
            if found.read or found.followed or not caller().runs_code:
                return await self._define_text(session, view, names)
            if view.is_global:
                return ForwardRoute(request)
            return ForwardRoute(request, done=lambda: session.note_own_view(view.name))
        await self._guard.check(session, request, names)
        written = written_text_of(original)
        return await self._bound(operation, request, names, original=original, text=written)

    async def _run_statement(self, text: str, session: GatewaySession) -> AnswerStream:
        """Execute a statement of the service. Raises `StatementDeclined` if it is Spark's."""
        # This runs within the operation, because a statement may take long, and its client may
        # reattach for the answer.
        assert self._execute is not None
        conf = await self._calls.changed_settings(session)
        found = await self._execute(text, session.caller, conf)
        if found is None:
            raise StatementDeclined("the statement is Spark's")
        rows = pa.Table.from_batches(list(found[1]), schema=found[0])
        limit = self._settings.connect_message_bytes_max
        if rows.nbytes > limit:
            raise InvalidUsage(
                f"the statement's result exceeds {limit} bytes (connect_message_bytes_max): "
                "restrict it"
            )
        yield command_answer(answer_relation(rows.combine_chunks()))
        yield complete_answer()

    async def _stream(
        self, operation: OpenOperation, request: ProtoMessage, names: ObjectNames
    ) -> ForwardRoute:
        """Return the route of a named stream. If its sink is memory, the name is that of a view."""
        session, started = operation.session, request.plan.command.write_stream_operation_start
        bound = await self._bound(operation, request, names)
        if started.format != "memory":
            return bound
        name = started.query_name
        return msgspec.structs.replace(bound, done=lambda: session.note_own_view(name))

    def _refuse_lost(self, session: GatewaySession, text: str, names: ObjectNames) -> None:
        """Raise `SparkCondition` for a text that would create something in Spark's catalog under a
        name of the service. It would be lost with Spark's process."""
        made = created_name_of(text)
        if made is not None and names.own_name(made[1]) is not None:
            kind, parts = made
            raise unsupported(_LOST[kind].format(name=".".join(parts)))

    # -- temporary views -----------------------------------------------------------------------

    async def _view(
        self, session: GatewaySession, request: ProtoMessage, names: ObjectNames
    ) -> LocalRoute | ForwardRoute:
        made = request.plan.command.create_dataframe_view
        found = self._names(session, made.input, names)
        if not found.read and not found.followed:
            name = made.name
            if made.is_global:
                return ForwardRoute(request)
            return ForwardRoute(request, done=lambda: session.note_own_view(name))
        # The gateway stores views by session, but sessions of other users would see this one.
        if made.is_global:
            raise unsupported(
                "Global temporary views over Penstock objects are not supported: create a "
                "temporary view."
            )
        await self._define(session, made.name, made.input, names, replace=made.replace)
        return LocalRoute(nothing)

    async def _drop_view(self, session: GatewaySession, name: str) -> AnswerStream:
        """Drop a temporary view that Spark stores."""
        root = relations_pb2.Relation()
        root.catalog.drop_temp_view.view_name = name
        await self._calls.execute(session, plan_of(root))
        async for answer in nothing_as_command():
            yield answer

    async def _define_text(
        self, session: GatewaySession, view: TemporaryViewText, names: ObjectNames
    ) -> LocalRoute:
        if view.is_global or view.columns:
            raise unsupported(
                "Temporary views over Penstock objects cannot be global or have a column list: "
                "name the columns in the query."
            )
        if not (view.if_absent and fold(view.name) in session.hidden):
            relation = relations_pb2.Relation(sql=relations_pb2.SQL(query=view.query))
            await self._guard.check(session, relation, names)
            await self._define(session, view.name, relation, names, replace=view.replace)
        return LocalRoute(nothing_as_command)

    async def _define(
        self,
        session: GatewaySession,
        name: str,
        relation: ProtoMessage,
        names: ObjectNames,
        *,
        replace: bool,
    ) -> None:
        """Store a temporary view, if Spark accepts its query."""
        expanded = self._expanded(session, relation, names)
        # Use names that neither this view nor another one can hide later.
        kept = bind_names(expanded, names.resolver(session.hidden), canonical_read)
        if kept.views:
            raise unsupported(
                "Expressions written as text in a temporary view cannot name Penstock objects: "
                "use DataFrame expressions."
            )
        found = find_names(kept.message, names.resolver())
        _refuse_changes(found)
        empty = self._rows.empty(names, found.read).relations
        bound = bind_names(kept.message, names.resolver(), empty.__getitem__, qualifier_of)
        await self._calls.analyze(session, bound.message)
        session.define_view(name, kept.message, replace=replace)

    def _expanded(
        self, session: GatewaySession, message: ProtoMessage, names: ObjectNames
    ) -> ProtoMessage:
        """Replace the names of the session's views and of plain views in a plan by their
        definitions. Raises `SparkCondition`."""

        def resolve_any(parts: NameParts) -> str | None:
            found = resolve(parts) or resolve_plain(parts)
            return found or names.key_of(parts, session.hidden)

        def resolve(parts: NameParts) -> str | None:
            alone = fold(parts[0]) if len(parts) == 1 else ""
            return f"{VIEW_KEY}{alone}" if alone in session.views else None

        def resolve_plain(parts: NameParts) -> str | None:
            key = names.plain_key_of(parts, session.hidden)
            return None if key is None else f"{VIEW_KEY}{key}"

        check_reads(message, resolve_any)
        # The session's views first, because they may name plain views.
        for found, relation_of in (
            (resolve, session.views.__getitem__),
            (resolve_plain, lambda name: plain_relation(names, name)),
        ):
            if not find_names(message, found).read:
                continue
            bound = bind_names(message, found, lambda key: relation_of(key[len(VIEW_KEY) :]))  # noqa: B023
            if bound.views:
                raise unsupported(
                    "Expressions written as text cannot name views over Penstock objects: use "
                    "DataFrame expressions."
                )
            message = bound.message
        return message

    def _names(
        self, session: GatewaySession, message: ProtoMessage, names: ObjectNames
    ) -> PlanNames:
        expanded = self._expanded(session, message, names)
        return find_names(expanded, names.resolver(session.hidden))

    # -- names ---------------------------------------------------------------------------------

    async def _bound(
        self,
        operation: OpenOperation,
        request: ProtoMessage,
        names: ObjectNames,
        *,
        original: ProtoMessage | None = None,
        text: str | None = None,
    ) -> ForwardRoute:
        """Replace the names in a request by relations.

        `original` becomes that of the `ForwardRoute`. `text`: the statement, if the plan is one.
        """
        session = operation.session
        expanded = await self._streamed(
            session, self._expanded(session, request, names), names, session.stream_rights
        )
        found = find_names(expanded, names.resolver(session.hidden))
        _refuse_others(found)
        if not found.read:
            return ForwardRoute(expanded, original if expanded is not request else None)
        self._check(session, "read", found.read, operation.rights)
        # Spark only analyzes the query now; the client executes its relation later.
        if text is not None and needs_no_rows(text):
            opened = self._rows.empty(names, found.read)
        else:
            opened = await self._opened(operation, names, found)
            streams = request.plan.command.WhichOneof("command_type") == (
                "write_stream_operation_start"
            )
            if opened.lent and streams:
                raise unsupported(
                    "Joining a stream with a Penstock object that is larger than "
                    "connect_inline_bytes_max is not supported."
                )
        bound = bind_names(
            expanded,
            names.resolver(session.hidden),
            opened.relations.__getitem__,
            qualifier_of,
        )
        return ForwardRoute(bound.message, original, bound.views, names_texts=bound.texts)

    async def _streamed(
        self,
        session: GatewaySession,
        message: ProtoMessage,
        names: ObjectNames,
        rights: ReadRights | None = None,
    ) -> ProtoMessage:
        """Replace streams of objects' changes in a plan by streams that Spark reads. `rights` notes
        the objects."""
        bound, keys = bind_streams(message, names.resolver(session.hidden), self._settings)
        if keys:
            self._check(session, "read", keys, rights)
            await self._calls.prepare_streams(session)
        return bound

    async def _opened(
        self, operation: OpenOperation, names: ObjectNames, found: PlanNames
    ) -> OpenedRows:
        time = await self._directory.pin(found.read)
        role = operation.session.caller.role
        opened = await self._rows.open(operation.rows, names, found.read, time, role)
        if opened.lent:
            await self._calls.prepare_files(operation.session)
        return opened

    async def bind_analysis(self, session: GatewaySession, request: ProtoMessage) -> ForwardRoute:
        """Replace the names in an `AnalyzePlanRequest` by empty relations."""
        names = await self._directory.names()
        await self._guard.check(session, request, names)
        expanded = await self._streamed(session, self._expanded(session, request, names), names)
        found = find_names(expanded, names.resolver(session.hidden))
        _refuse_changes(found)
        if not found.read:
            return ForwardRoute(expanded)
        empty = self._rows.empty(names, found.read).relations
        resolve = names.resolver(session.hidden)
        bound = bind_names(expanded, resolve, empty.__getitem__, qualifier_of)
        return ForwardRoute(bound.message, None, bound.views, names_texts=bound.texts)

    async def plain_schema(
        self, session: GatewaySession, request: ProtoMessage
    ) -> ProtoMessage | None:
        """Return the columns if an `AnalyzePlanRequest` asks for those of a plain read; None for
        any other request."""
        await _split_texts(request)
        if request.WhichOneof("analyze") != "schema":
            return None
        plan = request.schema.plan
        if plan.WhichOneof("op_type") != "root":
            return None
        names = await self._directory.names()
        plain = self.plain(session, plan.root, names)
        return None if plain is None else spark_struct_of(plain.columns())


def _refuse_changes(found: PlanNames) -> None:
    """Raise `SparkCondition` if changes of an object are read."""
    if found.followed:
        raise unsupported(
            f"Changes of the Penstock objects {', '.join(sorted(found.followed))} can only be read "
            "as a stream (readStream), and not in a temporary view."
        )


def _refuse_others(found: PlanNames) -> None:
    """Raise `SparkCondition` if a plan uses objects other than by reading their rows."""
    named = sorted({*found.read, *found.written, *found.followed})
    _refuse_changes(found)
    if found.written:
        raise unsupported(f"This command cannot write to the Penstock objects {', '.join(named)}.")


async def _of_table(rows: pa.Table) -> AnswerStream:
    for answer in table_answers(rows):
        yield answer


async def _of_command(relation: ProtoMessage) -> AnswerStream:
    yield command_answer(relation)
    yield complete_answer()


async def _split_texts(request: ProtoMessage) -> None:
    """Split the texts of a request into words once, for all later uses; long ones in a thread."""
    kept = keep_names()
    for message in walk_messages(request):
        name = message.DESCRIPTOR.full_name
        # Skip expressions: only few contain a word for which they are inspected.
        if name not in TEXT_FIELDS or name == EXPRESSION_TEXT:
            continue
        text = str(getattr(message, TEXT_FIELDS[name]))
        if text not in kept:
            kept[text] = await run_or_offload(len(text), partial(read_names, text))
