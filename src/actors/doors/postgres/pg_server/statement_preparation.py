"""Preparing of statements: parsed, their relations looked up, their parameters given types."""

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
    """Return a statement with the types of its parameters, of which the client gave some.

    Raises:
        SqlSyntaxError: The text is no statement.
        UnknownObject: It reads or changes what is not there.
    """
    text, span, context = parsed.text, parsed.span, session.context
    size, statement = len(text), parsed.statement()
    if not session.failed:
        for name in await run_or_offload(size, lambda: relations_of(span, statement)):
            await context.catalog.find((name,))
    # Without a parameter nothing is inferred, so the catalog is not asked.
    schemas = schemas_of(await context.catalog.known()) if "$" in text else {}
    oids = await run_or_offload(size, lambda: infer_parameters(span, statement, given, schemas))
    point = None
    if isinstance(statement, sql.QueryStatement) and schemas:
        readable = schemas_of(await context.catalog.known(), READABLE_KINDS)
        point = find_point(text, statement, oids, readable, context.settings.spark_conf)
    return PreparedStatement(text, statement, oids, point=point)
