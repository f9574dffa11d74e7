"""Executes SHOW CREATE, which returns the statement that would create an existing object."""

from __future__ import annotations

import json
from collections.abc import Callable

from actors.doors.sql_session.catalog_statements import text_result
from actors.doors.sql_session.context import PLAIN_VIEW, SessionContext
from actors.doors.sql_session.results import StatementResult
from actors.engine.sql.object_names import object_name
from actors.engine.sql.statements import ShowCreateStatement
from actors.engine.sql.tokens import SqlDialect, quote_name, quote_text
from actors.model.pgwire import quoting
from actors.model.protocol.api import ObjectStatus
from actors.model.protocol.connector_options import option_text
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, InvalidUsage, UnknownObject


async def show_create(context: SessionContext, statement: ShowCreateStatement) -> StatementResult:
    """Return the CREATE statement of the named object."""
    if statement.kind in ("source", "sink"):
        text = await _connector_text(context, statement.kind, object_name(statement.name))
    else:
        text = await creation_text(context, await context.catalog.find_present(statement.name))
    return text_result(["createtab_stmt"], [(text,)])


async def _connector_text(context: SessionContext, kind: str, name: str) -> str:
    """Return the CREATE statement of a source or a sink, in the session's dialect.

    Raises `UnknownObject`, and `AccessDenied` if the options are hidden from the session's role.
    """
    listed = await (context.client.sources() if kind == "source" else context.client.sinks())
    found = next((each for each in listed if fold(each.name) == fold(name)), None)
    if found is None:
        raise UnknownObject(f"{kind} {name!r} does not exist")
    if not found.options:
        raise AccessDenied(f"only the owner of {kind} {found.name} may see its options")
    is_spark = context.dialect is SqlDialect.SPARK
    own: Callable[[str], str] = quote_name if is_spark else quoting.quote_name
    literal: Callable[[str], str] = quote_text if is_spark else quoting.quote_text
    text = f"CREATE {kind.upper()} {own(found.name)}"
    if found.on:
        text += f" ON {own(found.on)}"
    text += f" USING {found.kind}"
    options = [
        f"  {key} = {literal(option_text(value))}"
        for key, value in json.loads(found.options).items()
    ]
    if options:
        text += " OPTIONS (\n" + ",\n".join(options) + "\n)"
    tables = [
        f"  {'.'.join(map(own, each.outside.split('.')))} AS {own(each.name)}"
        for each in found.tables
    ]
    if tables:
        text += " FOR TABLES (\n" + ",\n".join(tables) + "\n)"
    if found.retain_history_ms is not None:
        text += f"\n-- retain_history_ms = {found.retain_history_ms} can only be set from Python"
    return text


async def creation_text(context: SessionContext, found: ObjectStatus) -> str:
    """Return the CREATE statement of an object. Raises `InvalidUsage` for a table of a source,
    which has no CREATE statement of its own."""
    name = quote_name(found.name)
    if found.kind == PLAIN_VIEW:
        return f"CREATE VIEW {name} AS\n{found.sql}"
    if found.kind == "view":
        plan = await context.client.peek(
            "penstock.operators", where=[("name", "=", found.name)], columns=["policy"], limit=1
        )
        policy = str(plan["policy"][0].as_py() or "auto") if plan.num_rows else "auto"
        text = f"CREATE MATERIALIZED VIEW {name}"
        if policy != "auto":
            text += f" REFRESH POLICY {policy.upper()}"
        return f"{text}{_shown_properties(found)} AS\n{found.sql}"
    if found.kind == "table" and found.schema is not None:
        defaults = found.column_defaults
        lines = [
            f"  {quote_name(each.name)} {each.type.upper()}{'' if each.nullable else ' NOT NULL'}"
            + (f" DEFAULT {defaults[each.name].text}" if each.name in defaults else "")
            + _shown_comment(found.column_comments.get(each.name))
            for each in found.schema.columns
        ]
        if found.schema.key:
            lines.append(f"  PRIMARY KEY ({', '.join(map(quote_name, found.schema.key))})")
        columns = ",\n".join(lines)
        return f"CREATE TABLE {name} (\n{columns}){_shown_properties(found)}"
    if found.kind == "index":
        rows = await context.client.peek("penstock.objects", where=[("name", "=", found.name)])
        row = rows.to_pylist()[0]
        return f"CREATE INDEX {name} ON {quote_name(row['depends'])} ({row['key']})"
    raise InvalidUsage(f"{found.name} is a {found.kind}: it is created with its source")


def _shown_comment(comment: str | None) -> str:
    return f" COMMENT {quote_text(comment)}" if comment else ""


def _shown_properties(found: ObjectStatus) -> str:
    """Return the COMMENT and TBLPROPERTIES clauses of an object."""
    properties = dict(sorted(found.spark_conf.items()))
    if found.retain_history_ms is not None:
        properties["retain_history_ms"] = str(found.retain_history_ms)
    if found.target_lag_ms:
        properties["target_lag_ms"] = str(found.target_lag_ms)
    pairs = ", ".join(f"{quote_text(key)} = {quote_text(each)}" for key, each in properties.items())
    return _shown_comment(found.comment) + (f" TBLPROPERTIES ({pairs})" if pairs else "")
