"""Prepares statements: checks that their relations exist, and infers the types of parameters."""

from __future__ import annotations

from actors.doors.postgres.pg_server.point_statements import find_point
from actors.doors.postgres.pg_server.statements import (
    PreparedStatement,
    infer_parameters,
    relations_of,
)
from actors.doors.sql_session.context import READABLE_KINDS, schemas_of
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.session import SqlSession
from actors.engine.sql import statements as sql
from actors.engine.sql.grammar import ParsedStatement


async def prepare_statement(
    session: SqlSession, parsed: ParsedStatement, given: tuple[int, ...]
) -> PreparedStatement:
    """Prepare a statement. `given` are the parameter types that the client specified.

    Raises:
        SqlSyntaxError: The text is not a valid statement.
        UnknownObject: The statement reads or changes an object that does not exist.
    """
    text, span, context = parsed.text, parsed.span, session.context
    size, statement = len(text), parsed.statement()
    if not session.failed:
        for name in await run_or_offload(size, lambda: relations_of(span, statement)):
            await context.catalog.find((name,))
    # Without parameters there is nothing to infer, so do not ask the catalog.
    schemas = schemas_of(await context.catalog.known()) if "$" in text else {}
    oids = await run_or_offload(size, lambda: infer_parameters(span, statement, given, schemas))
    point = None
    if isinstance(statement, sql.QueryStatement) and schemas:
        readable = schemas_of(await context.catalog.known(), READABLE_KINDS)
        point = find_point(text, statement, oids, readable, context.settings.spark_conf)
    return PreparedStatement(text, statement, oids, point=point)
