"""Executes statements of the service that Spark Connect clients send.

A statement is the service's if only the service supports it, or if it names an object of the
service. All others are Spark's, whose catalog clients may use as well.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import pyarrow as pa

from actors.doors.client.client import Client
from actors.doors.connect_gateway.callers import CallerIdentity
from actors.doors.connect_gateway.session_settings import statement_effect
from actors.doors.connect_gateway.sql_names import parse_text
from actors.doors.connect_gateway.statement_execution import StatementAnswer
from actors.doors.sql_session import SqlSession
from actors.doors.sql_session.audit import StatementAudit
from actors.doors.sql_session.offloading import run_or_offload
from actors.engine.catalyst.permitted_settings import affects_results
from actors.engine.sql import statements as sql
from actors.engine.sql.tokens import SqlDialect
from actors.engine.views.query_analysis import find_mentioned_tables
from actors.model.protocol.api import TIME_ZONE
from actors.runtime.errors import InvalidUsage, SqlSyntaxError, UnknownObject
from actors.runtime.settings import Settings

_OWN: Final = (
    sql.ChangeStatement,
    sql.CreateTableAsStatement,
    sql.SubscribeStatement,
    sql.CreateTokenStatement,
    sql.ShowRolesStatement,
    sql.ShowGrantsStatement,
)
"""Statements that only the service supports. For Spark's own tables, CREATE TABLE has USING, which
this grammar does not accept."""
_OWN_KINDS: Final = frozenset({"materialized views", "sources", "sinks", "indexes"})
_OWN_OBJECTS: Final = frozenset({"materialized view", "source", "sink", "index"})
_BEGINS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*CREATE\s+(?:OR\s+REPLACE\s+)?(?:MATERIALIZED|SOURCE|SINK|INDEX)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Matches the start of a text that Spark cannot execute, so its syntax errors are reported here."""
_ANSI: Final = "spark.sql.ansi.enabled"
_COMPUTING: Final = (
    sql.InsertStatement,
    sql.UpdateStatement,
    sql.DeleteStatement,
    sql.MergeStatement,
    sql.CreateTableAsStatement,
)


class ServiceStatements:
    """Executes the service's statements, each in its own session."""

    def __init__(self, connect: Callable[[str], Awaitable[Client]], settings: Settings) -> None:
        """`connect` creates a client of the service for a role."""
        self._connect = connect
        self._settings = settings

    async def __call__(
        self, text: str, who: CallerIdentity, conf: Mapping[str, str]
    ) -> StatementAnswer | None:
        """Execute a statement for a caller, as `ExecuteStatement` defines. Return None for a text
        that is Spark's."""
        try:
            statement = await run_or_offload(len(text), lambda: parse_text(text))
        except SqlSyntaxError:
            # Spark's error would not help, because it does not know this grammar.
            if _BEGINS.match(text):
                raise
            return None  # Spark's grammar accepts more than this one
        audit = StatementAudit(self._settings, who.role, who.peer, SqlDialect.SPARK)
        async with await self._connect(who.role) as client:
            session = SqlSession(client, self._settings, SqlDialect.SPARK, who.role or "penstock")
            try:
                if TIME_ZONE in conf:
                    session.context.set_variable("TimeZone", conf[TIME_ZONE])
                if not await _is_own(session, statement):
                    return None
                _check_settings(statement, conf)
                others = {name: value for name, value in conf.items() if name != TIME_ZONE}
                session.context.spark_settings = others
                known = {each.name: each for each in await session.context.catalog.known()}
                with audit.statement(statement, text, known):
                    result = await session.execute(statement)
                    if result.schema is None or result.batches is None:
                        return StatementAnswer(pa.schema([]))
                    return StatementAnswer(result.schema, [batch async for batch in result.batches])
            finally:
                await session.close()


def _check_settings(statement: sql.SqlStatement, conf: Mapping[str, str]) -> None:
    """Raise `InvalidUsage` if a statement would ignore a setting that its session has changed."""
    match statement:
        # Settings that a view cannot have might change the meaning of its query in this session.
        case sql.ChangeStatement(command="CREATE MATERIALIZED VIEW") | sql.ExplainStatement():
            refused = {name for name in conf if not affects_results(name)}
            what = "a view cannot keep a setting of this kind"
        # The ANSI mode of a plain view is the reader's. dbt turns it off in all of its sessions,
        # and otherwise could not create plain views.
        case sql.ChangeStatement(command="CREATE VIEW"):
            refused = conf.keys() - {_ANSI}
            what = "a plain view cannot keep settings (create a materialized view)"
        # The view of a SUBSCRIBE needs no right to create views, so it must not have settings.
        case sql.SubscribeStatement():
            refused = conf.keys() - {TIME_ZONE}
            what = "SUBSCRIBE supports no setting except the time zone"
        case _ if isinstance(statement, _COMPUTING):
            refused = {name for name in conf if statement_effect(name) != "obeyed"}
            what = "Penstock statements do not support this setting"
        case _:
            return
    if refused:
        raise InvalidUsage(f"{what}: reset {min(refused)}, which this session has changed")


async def _is_own(session: SqlSession, statement: sql.SqlStatement) -> bool:
    """Return whether a statement is the service's, by its kind or by the objects that it names."""
    match statement:
        case sql.ExplainStatement():
            # Spark explains queries, but neither views nor statements that create them.
            of_view = bool(statement.view) or isinstance(statement.statement, sql.ChangeStatement)
            return of_view or statement.mode == "incremental"
        case sql.ShowObjectsStatement():
            return statement.kind in _OWN_KINDS
        # Spark does not support these kinds. With IF EXISTS the object may be missing.
        case sql.ChangeStatement() | sql.ShowCreateStatement() if statement.kind in _OWN_OBJECTS:
            return True
        case sql.ChangeStatement() if statement.kind is not None or statement.command == "COMMENT":
            return all([await _is_known(session, name) for name in statement.names])
        case sql.ShowCreateStatement() | sql.RefreshViewStatement():
            return await _is_known(session, statement.name)
        case sql.DescribeStatement() if statement.name is not None:
            return await _is_known(session, statement.name)
        case sql.ShowColumnsStatement():
            return await _is_known(session, statement.object)
        case (
            sql.InsertStatement()
            | sql.UpdateStatement()
            | sql.DeleteStatement()
            | sql.MergeStatement()
        ):
            return await _is_known(session, statement.table)
        # Spark also has plain views, over its own tables.
        case sql.ChangeStatement(command="CREATE VIEW", query=sql.TextSpan() as query):
            return await _reads_objects(session, query)
    return isinstance(statement, _OWN)


async def _reads_objects(session: SqlSession, query: sql.TextSpan) -> bool:
    objects = await session.context.catalog.all()
    schemas = {each.name: each.schema for each in objects if each.schema is not None}
    return bool(find_mentioned_tables(session.context.spark(query).text, schemas))


async def _is_known(session: SqlSession, name: sql.QualifiedName) -> bool:
    try:
        await session.context.catalog.find(name)
    except (UnknownObject, InvalidUsage):
        return False
    return True
