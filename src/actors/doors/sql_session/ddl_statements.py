"""Executes statements that change objects and roles: CREATE, ALTER, DROP, COMMENT, GRANT, REVOKE.

The grammar builds their requests. The session completes them with what only it knows, such as its
Spark settings, and sends them. Passwords become verifiers here, and tokens become digests, so
neither leaves the session; the only exception is that a new token is shown once to its creator.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import pyarrow as pa
from msgspec.structs import replace

from actors.control.access.role_registry import TOKEN_BYTES, token_digest
from actors.doors.sql_session.context import PLAIN_VIEW, SessionContext
from actors.doors.sql_session.default_values import defined_default
from actors.doors.sql_session.mapped_sql import MappedSql
from actors.doors.sql_session.query_statements import queried_rows
from actors.doors.sql_session.results import StatementResult, result_of
from actors.doors.sql_session.row_values import SqlParameter, schema_of
from actors.doors.sql_session.write_statements import named_columns, put_rows
from actors.engine.sql.statements import (
    ChangeStatement,
    CreateTableAsStatement,
    CreateTokenStatement,
    TextSpan,
)
from actors.model.pgwire.scram import MECHANISM, SALT_BYTES, make_verifier, parse_verifier
from actors.model.plan.column_defaults import ColumnDefault
from actors.model.plan.schema import TableSchema
from actors.model.protocol import api
from actors.model.protocol.relations import fold
from actors.model.protocol.role_messages import AlterRole, CreateRole, RoleStatement
from actors.runtime.errors import InvalidUsage, ObjectExists

Parameters = Sequence[SqlParameter]
_CREATIONS: Final = (
    api.CreateTable,
    api.CreateView,
    api.CreateIndex,
    api.CreateSource,
    api.CreateSink,
)
_APART: Final = ("source", "sink")
"""Kinds of objects that have their own namespaces."""


async def change(
    context: SessionContext, statement: ChangeStatement, parameters: Parameters = ()
) -> StatementResult:
    """Execute a statement by sending its requests one after the other.

    CREATE OR REPLACE of a maintained view returns once the new view has replaced the old one. DROP
    with CASCADE also drops everything that depends on the object, atomically.
    """
    if statement.refused:
        raise InvalidUsage(statement.refused)
    notices: list[str] = []
    for request in statement.requests:
        try:
            notices += await _carry_out(context, statement, request, parameters)
        # Handle the error instead of checking first: another session could create or drop the
        # object in between.
        except statement.skipped as error:
            notices.append(f"{error}, skipping")
        finally:
            context.catalog.forget()
    return StatementResult(statement.command, notices=tuple(notices))


async def create_table_as(
    context: SessionContext, statement: CreateTableAsStatement, parameters: Parameters
) -> StatementResult:
    """Create a table with the columns and rows of a query.

    The rows are inserted after the table is created: a crash in between leaves it empty.
    """
    rows = await queried_rows(context, statement.query, parameters)
    schema = schema_of(rows.schema)
    requests = tuple(replace(each, schema=schema) for each in statement.created.requests)
    result = await change(context, replace(statement.created, requests=requests))
    if result.notices or not rows.num_rows:
        return result
    (request,) = requests
    assert isinstance(request, api.CreateTable)
    await put_rows(context, request.name, schema, rows)
    return StatementResult(f"SELECT {rows.num_rows}")


async def _carry_out(
    context: SessionContext,
    statement: ChangeStatement,
    request: api.CatalogStatement | RoleStatement,
    parameters: Parameters,
) -> list[str]:
    """Complete a request, send it, and return its notices."""
    query: MappedSql | None = None
    match request:
        case api.CreateTable(name=name, schema=schema):
            defaults = await _defined(context, name, schema, statement.defaults)
            # A column with DEFAULT NULL is the same as one without a default.
            defaults = {column: each for column, each in defaults.items() if each.text}
            request = replace(request, column_defaults=defaults)
        case api.CreateView():
            assert statement.query is not None
            query = _view_query(context, statement.query, parameters, plain=request.plain)
            request = _view_request(context, request, query)
        case api.AlterObject() if statement.kind not in _APART:
            request = await _alteration(context, statement, request)
            if not request.add_columns and statement.only_new_columns:
                return []
        case api.DropObject():
            request = replace(request, name=(await _present(context, statement, request.name)).name)
        case CreateRole() | AlterRole() if statement.password is not None:
            request = replace(request, verifier=_verifier(statement.password.value))
    async with nullcontext() if query is None else context.placed_errors(query):
        told = await context.client.submit(request)
    notices = [line for line in told.splitlines() if line]
    if context.transaction is not None and isinstance(request, _CREATIONS):
        notices.append(
            f"{statement.command} takes effect immediately, even if the transaction is rolled back"
        )
    return notices


# -- views -----------------------------------------------------------------------------------------


def _view_query(
    context: SessionContext, span: TextSpan, parameters: Parameters, *, plain: bool
) -> MappedSql:
    if not plain:
        return context.spark(span, parameters)
    # Each session reads a plain view's text again, so a time that only the creator's zone explains
    # is refused.
    with context.written_in(context.zone, for_others=True):
        return context.spark(span, parameters)


def _view_request(
    context: SessionContext, request: api.CreateView, query: MappedSql
) -> api.CreateView:
    if request.plain:
        return replace(request, sql=query.text)
    return replace(
        request,
        sql=query.text,
        conf={**context.spark_conf(), **request.conf},
        refresh_policy=request.refresh_policy or context.variables.get("penstock.refresh_policy"),
    )


# -- existing objects ------------------------------------------------------------------------------

_KINDS: Final = {
    "table": {"table", "source table"},
    "view": {PLAIN_VIEW, "view"},
    "materialized view": {"view"},
    "index": {"index"},
}
"""Maps a statement's kind to the kinds of objects that it covers. VIEW covers both kinds of views:
tools send DROP VIEW for either."""
SHOWN_KINDS: Final = {"view": "materialized view", PLAIN_VIEW: "view"}


async def _present(
    context: SessionContext, statement: ChangeStatement, name: str
) -> api.ObjectStatus:
    """Return the named object. Raises `UnknownObject`, and `InvalidUsage` if it is of another kind
    than the statement names."""
    found = await context.catalog.find_present((name,))
    if statement.kind is not None and found.kind not in _KINDS[statement.kind]:
        shown = SHOWN_KINDS.get(found.kind, found.kind)
        raise InvalidUsage(f"{found.name} is a {shown}: use {shown.upper()} in the statement")
    return found


async def _alteration(
    context: SessionContext, statement: ChangeStatement, request: api.AlterObject
) -> api.AlterObject:
    """Complete an ALTER request from the object's current columns.

    Raises `ObjectExists` for a column that already exists, unless the statement says IF NOT EXISTS.
    """
    found = await _present(context, statement, request.name)
    schema = found.schema or TableSchema(())
    there = {fold(each) for each in schema.names}
    new = tuple(each for each in request.add_columns if fold(each.name) not in there)
    if len(new) < len(request.add_columns) and not statement.only_new_columns:
        (taken, *_) = (each.name for each in request.add_columns if fold(each.name) in there)
        raise ObjectExists(f"{found.kind} {found.name} already has a column {taken}")
    names = {each.name for each in new}
    comments = {name: each for name, each in request.column_comments.items() if name in names}
    return replace(
        request,
        name=found.name,
        add_columns=new,
        column_comments=comments,
        column_defaults=await _defined(context, found.name, schema, statement.defaults),
    )


async def _defined(
    context: SessionContext,
    table: str,
    schema: TableSchema,
    expressions: Mapping[str, TextSpan | None],
) -> dict[str, ColumnDefault]:
    """Return the columns' defaults from their expressions, by column name.

    For no default and for NULL the text of the `ColumnDefault` is empty.
    """
    found = {}
    for name, span in expressions.items():
        (column,) = named_columns(table, schema, [name])
        default = None if span is None else await defined_default(context, table, column, span)
        found[column.name] = default or ColumnDefault("")
    return found


# -- roles -----------------------------------------------------------------------------------------

TOKEN_COLUMNS: Final = pa.schema([("role", pa.string()), ("token", pa.string())])


async def create_token(context: SessionContext, statement: CreateTokenStatement) -> StatementResult:
    """Add a token to a role and return it. It is never shown again."""
    # Hexadecimal, so that it can be put into a Spark Connect URL without escapes.
    token = secrets.token_hex(TOKEN_BYTES)
    request = AlterRole(0, statement.role, add_token=token_digest(token))
    text = await context.client.submit(request)
    made = result_of("SELECT", TOKEN_COLUMNS, [(statement.role, token)])
    made.notices = tuple(text.splitlines())
    return made


def _verifier(password: str) -> str:
    """Return the verifier of a new password.

    Raises `InvalidUsage` for an empty password, and for one that starts like a verifier but is not
    a valid one.
    """
    if not password:
        raise InvalidUsage("the password must not be empty: use PASSWORD NULL to remove it")
    # psql's \password and other tools send a verifier, so that the server never sees the password.
    if password.startswith(f"{MECHANISM}$"):
        return parse_verifier(password).text()
    return make_verifier(password, secrets.token_bytes(SALT_BYTES)).text()
