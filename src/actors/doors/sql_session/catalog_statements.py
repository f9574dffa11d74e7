"""Executes SHOW of objects and roles, DESCRIBE, EXPLAIN, REFRESH, VACUUM and ANALYZE."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from actors.doors.sql_session.context import PLAIN_VIEW, QUERIED_KINDS, SessionContext
from actors.doors.sql_session.ddl_statements import SHOWN_KINDS
from actors.doors.sql_session.query_statements import explain_query
from actors.doors.sql_session.results import StatementResult, result_of
from actors.doors.sql_session.row_values import SqlParameter
from actors.engine.sql import statements as sql
from actors.engine.sql.object_names import object_name
from actors.model.protocol.api import CreateView, ObjectStatus
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, UnknownObject

Parameters = Sequence[SqlParameter]


async def refresh_view(
    context: SessionContext, statement: sql.RefreshViewStatement
) -> StatementResult:
    """Wait until a view reflects every acknowledged write. Nothing is recomputed: the service keeps
    views up to date anyway."""
    found = await context.catalog.find_present(statement.name)
    if found.kind != "view":
        raise InvalidUsage(
            f"{found.name} is a {found.kind}: only a materialized view can be refreshed"
        )
    # A read at the latest written timestamp waits until the view reaches it.
    await context.client.peek(found.name, limit=0, deadline_ms=context.deadline_ms)
    return StatementResult("REFRESH MATERIALIZED VIEW")


async def maintain(_: SessionContext, statement: sql.MaintainStatement) -> StatementResult:
    """Accept VACUUM and ANALYZE without effect: the service compacts shards and chooses plans by
    itself."""
    return StatementResult(statement.verb)


# -- SHOW and DESCRIBE -----------------------------------------------------------------------------


_TEXT: Final = pa.string()


def text_result(columns: Sequence[str], rows: list[tuple[Any, ...]]) -> StatementResult:
    """Return rows of strings and booleans as a result of type SELECT."""
    fields = []
    for number, name in enumerate(columns):
        values = [row[number] for row in rows]
        boolean = bool(values) and all(isinstance(value, bool) for value in values)
        fields.append(pa.field(name, pa.bool_() if boolean else _TEXT))
    return result_of("SELECT", pa.schema(fields), rows)


async def show_objects(
    context: SessionContext, statement: sql.ShowObjectsStatement
) -> StatementResult:
    """List the objects of a kind whose names match the statement's pattern."""

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
        # As in Spark, the tables include the views.
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
    """Format a Unix time in milliseconds, in UTC; "" for 0."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(" ", "milliseconds") if ms else ""


async def _show_indexes(
    context: SessionContext, statement: sql.ShowObjectsStatement
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
    """Return whether a name matches a pattern of SHOW … LIKE, ignoring case.

    ``*`` and ``%`` match any text; ``|`` separates alternatives. None matches every name.

    >>> matches("Orders", "ord*|x"), matches("orders", "%s"), matches("orders", "order")
    (True, True, False)
    """
    if pattern is None:
        return True
    parts = pattern.lower().replace("%", "*").split("|")
    return any(fnmatch.fnmatchcase(name.lower(), part) for part in parts)


async def show_columns(
    context: SessionContext, statement: sql.ShowColumnsStatement
) -> StatementResult:
    """List the columns of an object."""
    found = await context.catalog.find_present(statement.object)
    names = () if found.schema is None else found.schema.names
    return text_result(["col_name"], [(name,) for name in names])


async def describe(
    context: SessionContext, statement: sql.DescribeStatement, parameters: Parameters
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
            "Type": SHOWN_KINDS.get(found.kind, found.kind),
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
    """Return the rows of Spark's section "Column Default Values"; none without defaults."""
    if found.schema is None or not found.column_defaults:
        return []
    shown = [
        (each.name, each.type, found.column_defaults[each.name].text)
        for each in found.schema.columns
        if each.name in found.column_defaults
    ]
    return [("", "", ""), ("# Column Default Values", "", ""), *shown]


async def explain(
    context: SessionContext, statement: sql.ExplainStatement, parameters: Parameters
) -> StatementResult:
    """Return how a query would be read, or how a view is or would be maintained, one row per
    line."""
    if statement.view:
        found = await context.catalog.find_present(statement.view)
        return _lines_of_plan(await context.client.explain(found.name))
    inner = statement.statement
    if isinstance(inner, sql.ChangeStatement):
        return await _explained_view(context, inner, parameters)
    assert inner is not None
    if statement.mode == "incremental":
        return await _explained(context, inner.query, parameters)
    return text_result(
        ["plan"], [(line,) for line in await explain_query(context, inner, parameters)]
    )


async def _explained_view(
    context: SessionContext, statement: sql.ChangeStatement, parameters: Parameters
) -> StatementResult:
    if statement.refused:
        raise InvalidUsage(statement.refused)
    (request,) = statement.requests
    assert isinstance(request, CreateView)
    assert statement.query is not None
    return await _explained(context, statement.query, parameters, request.refresh_policy or "auto")


async def _explained(
    context: SessionContext, span: sql.TextSpan, parameters: Parameters, policy: str = "auto"
) -> StatementResult:
    """Return the plan that a view of this query would have."""
    query = context.spark(span, parameters)
    async with context.placed_errors(query):
        text = await context.client.explain_query(
            query.text, spark_conf=context.spark_conf(), refresh_policy=policy
        )
    return _lines_of_plan(text)


def _lines_of_plan(text: str) -> StatementResult:
    return text_result(["plan"], [(line,) for line in text.splitlines()])


# -- SHOW of roles ---------------------------------------------------------------------------------

_ROLES: Final = pa.schema(
    [
        ("role", pa.string()),
        ("login", pa.bool_()),
        ("password", pa.bool_()),
        ("tokens", pa.int64()),
        ("rights", pa.string()),
    ]
)
_GRANTS: Final = pa.schema(
    [("role", pa.string()), ("right", pa.string()), ("on", pa.string()), ("kind", pa.string())]
)
EVERYTHING: Final = "*"
"""Shown as the object of a right on the whole service."""


async def show_roles(context: SessionContext, _: sql.ShowRolesStatement) -> StatementResult:
    """List all roles: whether they can log in, whether they have a password, their number of
    tokens, and their rights on the whole service."""
    found = (await context.client.roles()).roles
    rows: list[tuple[Any, ...]] = [
        (
            role.name,
            role.login,
            role.has_password,
            role.tokens,
            ", ".join(each.right for each in role.rights if not each.on),
        )
        for role in sorted(found, key=lambda role: fold(role.name))
    ]
    return result_of("SELECT", _ROLES, rows)


async def show_grants(
    context: SessionContext, statement: sql.ShowGrantsStatement
) -> StatementResult:
    """List the rights of all roles or of one, on all objects or on one.

    Raises:
        UnknownObject: The role does not exist.
    """
    found = (await context.client.roles()).roles
    role = None if statement.role is None else fold(statement.role)
    if role is not None and role not in {fold(each.name) for each in found}:
        raise UnknownObject(f"role {statement.role!r} does not exist: SHOW ROLES lists all roles")
    on = fold(object_name(statement.object)) if statement.object else None
    rows: list[tuple[Any, ...]] = [
        (each.name, right.right, right.on or EVERYTHING, right.kind)
        for each in sorted(found, key=lambda each: fold(each.name))
        if role in (None, fold(each.name))
        for right in each.rights
        # A right on the whole service also applies to the object.
        if on is None or not right.on or fold(right.on) == on
    ]
    return result_of("SELECT", _GRANTS, rows)
