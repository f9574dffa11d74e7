"""CREATE, ALTER, COMMENT, DROP, SHOW, DESCRIBE, and EXPLAIN of views."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from actors.doors.sql_session.context import PLAIN_VIEW, QUERIED_KINDS, SessionContext, object_name
from actors.doors.sql_session.default_values import defined_default
from actors.doors.sql_session.reading import explain_query, queried_rows
from actors.doors.sql_session.results import StatementResult, result_of
from actors.doors.sql_session.row_values import SqlParameter, schema_of
from actors.doors.sql_session.writing import named_columns, put_rows
from actors.engine.sql.statements import (
    AddColumnsAction,
    AddTablesAction,
    AlterObjectStatement,
    CommentOnStatement,
    CreateIndexStatement,
    CreateMaterializedViewStatement,
    CreateSinkStatement,
    CreateSourceStatement,
    CreateTableAsStatement,
    CreateTableStatement,
    CreateViewStatement,
    DescribeStatement,
    DropObjectsStatement,
    ExplainStatement,
    MaintainStatement,
    RefreshViewStatement,
    RenameAction,
    SetDefaultAction,
    SetPolicyAction,
    SetPropertiesAction,
    ShowColumnsStatement,
    ShowObjectsStatement,
    TextSpan,
    UnsetPropertiesAction,
)
from actors.model.plan.column_defaults import ColumnDefault
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.api import ObjectStatus, SourceTable
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, ObjectExists, UnknownObject

Parameters = Sequence[SqlParameter]
_PROPERTIES: Final = frozenset({"retain_history_ms", "target_lag_ms"})
_SPARK_CONF: Final = "spark."
"""Prefix of properties that are Spark settings of a view."""


# -- CREATE ----------------------------------------------------------------------------------------


async def create_table(context: SessionContext, statement: CreateTableStatement) -> StatementResult:
    """Create a table."""
    properties = whole_numbers(statement.properties, {"retain_history_ms"})
    name, schema = object_name(statement.name), statement.schema()
    defaults: dict[str, ColumnDefault] = {}
    for column, each in zip(schema.columns, statement.columns, strict=True):
        if each.default is not None:
            found = await defined_default(context, name, column, each.default)
            # NULL is what a column without a default has.
            defaults |= {} if found is None else {column.name: found}
    made = context.client.create_table(
        name,
        schema,
        retain_history_ms=properties.get("retain_history_ms"),
        comment=statement.comment or "",
        column_comments={each.name: each.comment for each in statement.columns if each.comment},
        column_defaults=defaults,
    )
    return await _created(context, made, "CREATE TABLE", if_not_exists=statement.if_not_exists)


async def create_table_as(
    context: SessionContext, statement: CreateTableAsStatement, parameters: Parameters
) -> StatementResult:
    """Create a table with the columns and rows of a query. The rows come after the table: a crash
    between them leaves it empty."""
    rows = await queried_rows(context, statement.query, parameters)
    schema = schema_of(rows.schema)
    name = object_name(statement.name)
    properties = whole_numbers(statement.properties, {"retain_history_ms"})
    made = context.client.create_table(
        name,
        schema,
        retain_history_ms=properties.get("retain_history_ms"),
        comment=statement.comment or "",
    )
    result = await _created(context, made, "CREATE TABLE", if_not_exists=statement.if_not_exists)
    if not result.notices and rows.num_rows:
        await put_rows(context, name, schema, rows)
        return StatementResult(f"SELECT {rows.num_rows}")
    return result


async def create_materialized_view(
    context: SessionContext, statement: CreateMaterializedViewStatement, parameters: Parameters
) -> StatementResult:
    """Create a maintained view; with OR REPLACE, wait until it is in the place of the former."""
    given = dict(statement.properties)
    # Spark's settings share the clause with ours, as in Spark's own TBLPROPERTIES.
    conf = context.spark_conf()
    conf |= {key: given.pop(key) for key in list(given) if key.startswith(_SPARK_CONF)}
    properties = whole_numbers(given, _PROPERTIES)
    policy = statement.policy or context.variables.get("penstock.refresh_policy")
    query = context.spark(statement.query, parameters)
    made = context.client.create_materialized_view(
        object_name(statement.name),
        query.text,
        retain_history_ms=properties.get("retain_history_ms"),
        spark_conf=conf,
        refresh_policy=policy,
        target_lag_ms=properties.get("target_lag_ms", 0),
        replace=statement.or_replace,
        comment=statement.comment or "",
    )
    tag = "CREATE MATERIALIZED VIEW"
    async with context.placed_errors(query):
        return await _created(context, made, tag, if_not_exists=statement.if_not_exists)


async def create_view(
    context: SessionContext, statement: CreateViewStatement, parameters: Parameters
) -> StatementResult:
    """Create or replace a plain view."""
    # Others than ours are metadata that tools attach, and change nothing.
    for key in _PROPERTIES & statement.properties.keys():
        raise InvalidUsage(f"property {key!r} is one of materialized views")
    # Read anew in each session: a time that is the creator's alone is not left to its reader.
    with context.written_in(context.zone, for_others=True):
        query = context.spark(statement.query, parameters)
    made = context.client.create_plain_view(
        object_name(statement.name),
        query.text,
        replace=statement.or_replace,
        comment=statement.comment or "",
    )
    async with context.placed_errors(query):
        return await _created(context, made, "CREATE VIEW", if_not_exists=statement.if_not_exists)


async def create_index(context: SessionContext, statement: CreateIndexStatement) -> StatementResult:
    """Create an index; without a name it gets that of its object and columns."""
    on = object_name(statement.object)
    parts = "_".join((on, *statement.columns, "idx"))
    name = parts if statement.name is None else object_name(statement.name)
    made = context.client.create_index(name, on, statement.columns)
    return await _created(context, made, "CREATE INDEX", if_not_exists=statement.if_not_exists)


async def create_source(
    context: SessionContext, statement: CreateSourceStatement
) -> StatementResult:
    """Create a source and its tables; tables that were left out are notices."""
    tables = statement.tables
    named = None
    if tables is not None:
        named = [
            SourceTable(".".join(each.outside), object_name(each.name) if each.name else "")
            for each in tables
        ]
    config = {"kind": statement.kind, **typed_options(statement.options)}
    made = context.client.create_source(object_name(statement.name), config, named)
    return await _created(context, made, "CREATE SOURCE", if_not_exists=statement.if_not_exists)


async def create_sink(context: SessionContext, statement: CreateSinkStatement) -> StatementResult:
    """Create a sink."""
    made = context.client.create_sink(
        object_name(statement.name),
        object_name(statement.object),
        statement.kind,
        typed_options(statement.options),
    )
    return await _created(context, made, "CREATE SINK", if_not_exists=statement.if_not_exists)


async def _created(
    context: SessionContext, made: Any, tag: str, *, if_not_exists: bool
) -> StatementResult:
    """Wait for a creation. An object of that name is a notice with `if_not_exists`."""
    try:
        told = await made
    # Not looked up before: another session could create it in between.
    except ObjectExists as error:
        if not if_not_exists:
            raise
        return StatementResult(tag, notices=(f"{error}, skipping",))
    finally:
        context.catalog.forget()
    notices = [line for line in (told or "").splitlines() if line]
    if context.transaction is not None:
        notices.append(f"{tag} takes effect at once, also if the transaction is rolled back")
    return StatementResult(tag, notices=tuple(notices))


def option_text(value: Any) -> str:
    """Return the text of an option from which `typed_options` reads this value.

    >>> option_text(100), option_text("/data"), option_text("100")
    ('100', '/data', '"100"')
    """
    if isinstance(value, str) and typed_options({"": value})[""] == value:
        return value
    return json.dumps(value)


def typed_options(options: dict[str, str]) -> dict[str, Any]:
    """Return options with their values read as JSON, or as text where they are none.

    >>> typed_options({"rate": "100", "folder": "/data", "tls": "true"})
    {'rate': 100, 'folder': '/data', 'tls': True}
    """
    found: dict[str, Any] = {}
    for key, text in options.items():
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def whole_numbers(properties: dict[str, str], known: frozenset[str] | set[str]) -> dict[str, int]:
    """Return properties that are whole numbers. Raises `InvalidUsage` for an unknown one, or for
    one that is no number."""
    found = {}
    for key, text in properties.items():
        if key not in known:
            raise InvalidUsage(f"property {key!r}: known are {', '.join(sorted(known))}")
        if not text.strip().lstrip("-").isdecimal():
            raise InvalidUsage(f"property {key!r} = {text!r}: must be a whole number")
        found[key] = int(text)
    return found


# -- ALTER and DROP --------------------------------------------------------------------------------


async def alter_object(context: SessionContext, statement: AlterObjectStatement) -> StatementResult:
    """Change an object's name, policy or properties, or add tables to a source."""
    tag = f"ALTER {statement.kind.upper()}"
    name = object_name(statement.name)
    try:
        if statement.kind not in ("source", "sink"):
            name = (await _of_kind(context, statement.kind, name)).name
        await _altered(context, statement, name)
    except UnknownObject as error:
        if not statement.if_exists:
            raise
        return StatementResult(tag, notices=(f"{error}, skipping",))
    finally:
        context.catalog.forget()
    return StatementResult(tag)


async def _altered(context: SessionContext, statement: AlterObjectStatement, name: str) -> None:
    client, action = context.client, statement.action
    match action:
        case AddTablesAction() if statement.kind == "source":
            tables = [
                SourceTable(".".join(each.outside), object_name(each.name) if each.name else "")
                for each in action.tables
            ]
            await client.alter_source(name, tables)
        case RenameAction():
            await client.alter(name, rename=object_name(action.name))
        case SetPolicyAction():
            await client.alter(name, refresh_policy=action.policy)
        case SetPropertiesAction():
            await _set_properties(context, name, whole_numbers(action.properties, _PROPERTIES))
        case UnsetPropertiesAction():
            # 0 is the default of both.
            given = dict.fromkeys(action.keys, "0")
            await _set_properties(context, name, whole_numbers(given, _PROPERTIES))
        case AddColumnsAction():
            await _add_columns(context, name, action)
        case SetDefaultAction():
            await _set_default(context, name, action)
        case _:
            raise InvalidUsage(
                f"ALTER {statement.kind.upper()} {name}: this change is not made yet; DROP and "
                f"CREATE it"
            )


async def _add_columns(context: SessionContext, name: str, action: AddColumnsAction) -> None:
    found = await context.catalog.find_present((name,))
    there = {fold(each) for each in found.schema.names} if found.schema else set()
    new = [each for each in action.columns if fold(each.name) not in there]
    if len(new) < len(action.columns) and not action.if_not_exists:
        (taken, *_) = (each.name for each in action.columns if fold(each.name) in there)
        raise ObjectExists(f"{found.kind} {name} has a column {taken} already")
    if new:
        columns = [TableColumn(each.name, each.type, not each.not_null) for each in new]
        comments = {each.name: each.comment for each in new if each.comment}
        await context.client.alter(name, add_columns=columns, column_comments=comments)


async def _set_default(context: SessionContext, name: str, action: SetDefaultAction) -> None:
    # Another session may have given the table columns meanwhile.
    context.catalog.forget()
    found = await context.catalog.find_present((name,))
    schema = found.schema or TableSchema(())
    (column,) = named_columns(found.name, schema, [action.column])
    default = None
    if action.default is not None:
        default = await defined_default(context, found.name, column, action.default)
    given = {column.name: default or ColumnDefault("")}
    await context.client.alter(found.name, column_defaults=given)


async def _set_properties(context: SessionContext, name: str, given: dict[str, int]) -> None:
    await context.client.alter(
        name,
        target_lag_ms=given.get("target_lag_ms"),
        retain_history_ms=given.get("retain_history_ms"),
    )


async def refresh_view(context: SessionContext, statement: RefreshViewStatement) -> StatementResult:
    """Wait until a view has caught up with all that was written: it is maintained by itself."""
    found = await context.catalog.find_present(statement.name)
    if found.kind != "view":
        raise InvalidUsage(f"{found.name} is a {found.kind}: only materialized views are refreshed")
    # A read at the latest written time waits for the view.
    await context.client.peek(found.name, limit=0, deadline_ms=context.deadline_ms)
    return StatementResult("REFRESH MATERIALIZED VIEW")


async def maintain(_: SessionContext, statement: MaintainStatement) -> StatementResult:
    """Do nothing: shards are compacted, and plans chosen by measures, by the service itself."""
    return StatementResult(statement.verb)


async def comment_on(context: SessionContext, statement: CommentOnStatement) -> StatementResult:
    """Set or remove the comment of an object or of a column."""
    name, column = statement.name, ""
    if statement.kind == "schema":
        raise InvalidUsage("COMMENT ON SCHEMA: the one schema, public, has no comment")
    if statement.kind == "column":
        *name_parts, column = name
        if not name_parts:
            raise InvalidUsage(f"COMMENT ON COLUMN {column}: write the object and the column")
        name = tuple(name_parts)
    found = await context.catalog.find_present(name)
    await context.client.alter(found.name, comment=statement.comment or "", column=column)
    context.catalog.forget()
    return StatementResult("COMMENT")


async def drop_objects(context: SessionContext, statement: DropObjectsStatement) -> StatementResult:
    """Drop objects, with CASCADE each together with all that depends on it, at once."""
    tag = f"DROP {statement.kind.upper()}"
    notices: list[str] = []
    for name in statement.names:
        try:
            told = await _drop(context, statement, object_name(name))
            notices += told.splitlines()
        except UnknownObject as error:
            if not statement.if_exists:
                raise
            notices.append(f"{error}, skipping")
        finally:
            context.catalog.forget()
    return StatementResult(tag, notices=tuple(notices))


_KINDS: Final = {
    "table": {"table", "source table"},
    "view": {PLAIN_VIEW, "view"},
    "materialized view": {"view"},
    "index": {"index"},
}
"""Kinds of objects that a statement's kind means; DROP VIEW is what tools send for both."""
_SHOWN_KINDS: Final = {"view": "materialized view", PLAIN_VIEW: "view"}


async def _of_kind(context: SessionContext, kind: str, name: str) -> ObjectStatus:
    """Return an object of the kind that a statement names. Raises `InvalidUsage`,
    `UnknownObject`."""
    found = await context.catalog.find_present((name,))
    if found.kind not in _KINDS[kind]:
        shown = _SHOWN_KINDS.get(found.kind, found.kind)
        raise InvalidUsage(f"{found.name} is a {shown}: write {shown.upper()}")
    return found


async def _drop(context: SessionContext, statement: DropObjectsStatement, name: str) -> str:
    """Drop an object. Return a line for each one that it took along."""
    client = context.client
    if statement.kind == "source":
        return await client.drop_source(name, cascade=statement.cascade)
    if statement.kind == "sink":
        await client.drop_sink(name)
        return ""
    found = await _of_kind(context, statement.kind, name)
    return await client.drop(found.name, cascade=statement.cascade)


# -- SHOW and DESCRIBE -----------------------------------------------------------------------------


_TEXT: Final = pa.string()


def text_result(columns: Sequence[str], rows: list[tuple[Any, ...]]) -> StatementResult:
    """Return rows of texts (and booleans) as a result."""
    fields = []
    for number, name in enumerate(columns):
        values = [row[number] for row in rows]
        boolean = bool(values) and all(isinstance(value, bool) for value in values)
        fields.append(pa.field(name, pa.bool_() if boolean else _TEXT))
    return result_of("SELECT", pa.schema(fields), rows)


async def show_objects(context: SessionContext, statement: ShowObjectsStatement) -> StatementResult:
    """List objects of a kind, those whose names fit the pattern."""

    def fits(name: str) -> bool:
        return matches(name, statement.pattern)

    if statement.kind == "schemas":
        return text_result(["namespace"], [("public",)])
    if statement.kind in ("sources", "sinks"):
        sinks = statement.kind == "sinks"
        found = await (context.client.sinks() if sinks else context.client.sources())
        rows: list[tuple[Any, ...]] = [
            (
                *(each.name, each.kind, each.on, each.health.status, each.health.error),
                _since(each.health.since_ms if each.health.status == "stalled" else 0),
                str(each.health.retries),
                "" if each.statistics is None else str(each.statistics.lag_ms),
            )
            for each in found
            if fits(each.name)
        ]
        names = ["name", "kind", "on", "status", "error", "stalled_since", "retries", "lag_ms"]
        return text_result(names, rows)
    if statement.kind == "indexes":
        return await _show_indexes(context, statement)
    objects = [each for each in await context.catalog.all() if fits(each.name)]
    if statement.kind == "tables":
        # As Spark has it, views are among them.
        tables = [each for each in objects if each.kind in QUERIED_KINDS]
        return text_result(
            ["namespace", "tableName", "isTemporary"],
            [("public", each.name, False) for each in tables],
        )
    kinds = {"view"} if statement.kind == "materialized views" else {"view", PLAIN_VIEW}
    rows = [
        (
            *("public", each.name, each.mode or "plain", each.state, str(each.lag_ms)),
            *(each.text, _since(each.state_since_ms), str(each.retries)),
        )
        for each in objects
        if each.kind in kinds
    ]
    names = ["namespace", "viewName", "mode", "state", "lag_ms", "reason", "stalled_since"]
    return text_result([*names, "retries"], rows)


def _since(ms: int) -> str:
    """Return a Unix time as text; empty for 0."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(" ", "milliseconds") if ms else ""


async def _show_indexes(
    context: SessionContext, statement: ShowObjectsStatement
) -> StatementResult:
    on = object_name(statement.object) if statement.object else ""
    rows = (await context.client.peek("penstock.objects")).to_pylist()
    found = [
        (row["name"], row["depends"], row["key"])
        for row in rows
        if row["kind"] == "index"
        and matches(row["name"], statement.pattern)
        and (not on or row["depends"].lower() == on.lower())
    ]
    return text_result(["name", "on", "columns"], found)


def matches(name: str, pattern: str | None) -> bool:
    """Return whether a name fits a pattern of SHOW … LIKE: ``*`` or ``%`` for any text, ``|``
    between alternatives, in any case.

    >>> matches("Orders", "ord*|x"), matches("orders", "%s"), matches("orders", "order")
    (True, True, False)
    """
    if pattern is None:
        return True
    parts = pattern.lower().replace("%", "*").split("|")
    return any(fnmatch.fnmatchcase(name.lower(), part) for part in parts)


async def show_columns(context: SessionContext, statement: ShowColumnsStatement) -> StatementResult:
    """List the columns of an object."""
    found = await context.catalog.find_present(statement.object)
    names = () if found.schema is None else found.schema.names
    return text_result(["col_name"], [(name,) for name in names])


async def describe(
    context: SessionContext, statement: DescribeStatement, parameters: Parameters
) -> StatementResult:
    """List the columns of an object or of a query, with their types."""
    columns = ["col_name", "data_type", "comment"]
    if statement.query is not None:
        schema = await context.describe(context.spark(statement.query.query, parameters))
        return text_result(columns, [(c.name, c.type, None) for c in schema.columns])
    assert statement.name is not None
    found = await context.catalog.find_present(statement.name)
    rows: list[tuple[Any, ...]] = []
    if found.schema is not None:
        comments = found.column_comments
        rows = [(each.name, each.type, comments.get(each.name)) for each in found.schema.columns]
    if statement.extended:
        rows += [("", "", ""), ("# Detailed Table Information", "", "")]
        shown = {
            "Name": found.name,
            "Type": _SHOWN_KINDS.get(found.kind, found.kind),
            "Comment": found.comment,
            "Primary key": ", ".join(found.schema.key) if found.schema else "",
            "Mode": found.mode,
            "State": f"{found.state} {found.text}".strip(),
            "Stalled since": _since(found.state_since_ms),
            "Retries": str(found.retries or ""),
            "Readable from": "" if found.kind == PLAIN_VIEW else str(found.since),
            "Sealed below": "" if found.kind == PLAIN_VIEW else str(found.upper),
            "Age (ms)": "" if found.kind == PLAIN_VIEW else str(found.lag_ms),
            "Target lag (ms)": str(found.target_lag_ms) if found.target_lag_ms else "",
            "View text": found.sql,
        }
        rows += [(key, value, "") for key, value in shown.items() if value]
        rows += _default_rows(found)
    return text_result(columns, rows)


def _default_rows(found: ObjectStatus) -> list[tuple[str, str, str]]:
    """Return the section of a description that Spark has for defaults."""
    if found.schema is None or not found.column_defaults:
        return []
    shown = [
        (each.name, each.type, found.column_defaults[each.name].text)
        for each in found.schema.columns
        if each.name in found.column_defaults
    ]
    return [("", "", ""), ("# Column Default Values", "", ""), *shown]


async def explain(
    context: SessionContext, statement: ExplainStatement, parameters: Parameters
) -> StatementResult:
    """Return the plan of a query's reading, or of a view before it is created, a line each."""
    inner = statement.statement
    if isinstance(inner, CreateMaterializedViewStatement):
        return await _explained(context, inner.query, parameters, inner.policy or "auto")
    if statement.mode == "incremental":
        return await _explained(context, inner.query, parameters)
    return text_result(
        ["plan"], [(line,) for line in await explain_query(context, inner, parameters)]
    )


async def _explained(
    context: SessionContext, span: TextSpan, parameters: Parameters, policy: str = "auto"
) -> StatementResult:
    """Return the plan of a query as a view's."""
    query = context.spark(span, parameters)
    async with context.placed_errors(query):
        text = await context.client.explain_query(
            query.text, spark_conf=context.spark_conf(), refresh_policy=policy
        )
    return text_result(["plan"], [(line,) for line in text.splitlines()])
