"""Answers queries of PostgreSQL's catalog, from snapshots of this service's catalog.

`actors.doors.postgres.pg_catalog` runs the queries. All connections share one database of catalog
rows, which is refilled when objects have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.control.access.open_sessions import OpenSession, OpenSessions, dialect_of, may_signal
from actors.control.access.role_registry import ADMIN
from actors.doors.postgres.pg_catalog.catalog_queries import CatalogQueries
from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogColumnRow,
    CatalogObjectRow,
    CatalogRoleRow,
    CatalogSession,
    ObjectKind,
    PgCatalogSnapshot,
)
from actors.doors.postgres.pg_catalog.pg_types import format_catalog_value
from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.results import StatementResult, result_of
from actors.engine.sql.object_names import DATABASE
from actors.engine.sql.redaction import redact_statement
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.messages import FieldDescription
from actors.model.protocol.api import ObjectStatus
from actors.model.protocol.role_messages import RolesReport
from actors.runtime.errors import UnknownObject

_KINDS: Final[Mapping[str, ObjectKind]] = {
    "table": "table",
    "source table": "table",
    "view": "materialized view",
    "plain view": "view",
    "index": "index",
}
_SCALARS: Final = {
    pg.BOOL: pa.bool_(),
    pg.INT2: pa.int16(),
    pg.INT4: pa.int32(),
    pg.INT8: pa.int64(),
    pg.OID: pa.int32(),
    pg.FLOAT4: pa.float32(),
    pg.FLOAT8: pa.float64(),
}


class SharedCatalog:
    """The database of catalog rows that all connections share."""

    def __init__(self) -> None:
        self._queries: CatalogQueries | None = None
        """The database; None until it is first needed."""
        self._shown: object = None
        """The objects and roles in the database; None before the first `show`."""
        self._version = 0
        """Version of the last snapshot."""
        self.started = _moment()
        """When the server started, as PostgreSQL writes it."""

    @property
    def queries(self) -> CatalogQueries:
        """Return the database, and create it on first use."""
        if self._queries is None:
            self._queries = CatalogQueries()
        return self._queries

    def show(self, objects: Sequence[CatalogObjectRow], roles: Sequence[CatalogRoleRow]) -> None:
        """Replace the objects and roles in the database, unless they are the same."""
        content = (tuple(objects), tuple(roles))
        # Comparing is cheaper than filling the rows, and objects rarely change.
        if content == self._shown:
            return
        self._version += 1
        self.queries.apply_snapshot(
            PgCatalogSnapshot(self._version, tuple(objects), tuple(roles), DATABASE)
        )
        self._shown = content


class ConnectionCatalog:
    """Answers the catalog queries of one connection."""

    def __init__(
        self,
        shared: SharedCatalog,
        context: SessionContext,
        opened: OpenSession,
        sessions: OpenSessions,
    ) -> None:
        """Answer for the session `opened`. `sessions` are those of all protocols, which
        `pg_stat_activity` shows."""
        self._shared = shared
        self._context = context
        self._opened = opened
        self._sessions = sessions

    async def answers(self, text: str) -> bool:
        """Return whether a statement is a catalog query, which is answered here."""
        if not CatalogQueries.may_be_catalog_query(text):
            return False  # do not create the database for statements that cannot need it
        queries = self._shared.queries
        return await run_or_offload(len(text), lambda: queries.is_catalog_query(text))

    def parameter_oids(self, text: str, given: Sequence[int]) -> tuple[int, ...]:
        """Return the types of a catalog query's parameters, of which the client gave some. Raises
        `CatalogQueryError`."""
        return self._shared.queries.describe_catalog_query(text, given).parameters

    async def describe(self, text: str, oids: Sequence[int]) -> tuple[FieldDescription, ...]:
        """Return the columns of a catalog query's result. Raises `CatalogQueryError`."""
        found = self._shared.queries.describe_catalog_query(text, oids)
        return tuple(FieldDescription(each.name, pg.sized(each.type)) for each in found.columns)

    async def answer(
        self, text: str, values: Sequence[Any], oids: Sequence[int] = ()
    ) -> StatementResult:
        """Execute a catalog query, and apply the settings and signals that it asks for. Raises
        `CatalogQueryError`."""
        await self._refresh()
        if self._context.transaction is not None:
            self._context.transaction.queried = True
        variables, opened = self._context.variables, self._opened
        settings = {name.lower(): value for name, value in variables.all()}
        session = msgspec.structs.replace(
            self._shown(opened),
            user=variables.current_user,
            session_user=variables.session_user,
            settings=settings,
            now=_moment(),
            started=self._shared.started,
        )
        queries = self._shared.queries
        # There is no await from here to the answer, so no other session's query intervenes.
        queries.apply_sessions([self._shown(each) for each in self._sessions])
        found = queries.answer_catalog_query(text, values, session, oids)
        # Some drivers change settings with set_config() instead of SET.
        for name, value, local in found.settings:
            self._context.set_variable(name, value, local=local)
        for signal in found.signals:
            # The session may have ended in the meantime.
            with suppress(UnknownObject):
                self._sessions.find(signal.process_id).signal(end=signal.end)
        shape = pa.schema([(column.name, _kind(column.type)) for column in found.columns])
        # Values other than numbers are sent as text.
        rows = [
            tuple(
                value if column.type in _SCALARS else format_catalog_value(value, column.type)
                for value, column in zip(row, found.columns, strict=True)
            )
            for row in found.rows
        ]
        result = result_of("SELECT", shape, rows)
        result.oids = tuple(column.type for column in found.columns)
        result.notices = found.warnings
        return result

    def _shown(self, session: OpenSession) -> CatalogSession:
        """Return a session as `pg_stat_activity` shows it to this one."""
        role = session.role or self._shown_user(session)
        if not may_signal(self._sessions.rules, self._opened.role, session):
            return CatalogSession(
                user=role,
                process_id=session.number,
                query="<insufficient privilege>",
                state="",
                now="",
                connected="",
                may_signal=False,
            )
        limit = self._context.settings.audit_text_characters_max
        address, _, port = session.peer.rpartition(":")
        is_host = port.isdecimal()
        return CatalogSession(
            user=role,
            process_id=session.number,
            client_address=address if is_host else "",
            client_port=int(port) if is_host else 0,
            connected=_shown_time(session.since_ms),
            now=_shown_time(session.statement_ms),
            state="active" if session.statement else "idle",
            query=redact_statement(session.statement, dialect_of(session.door))[:limit],
        )

    def _shown_user(self, session: OpenSession) -> str:
        own = session is self._opened
        return self._context.variables.session_user if own else DATABASE

    @property
    def _user(self) -> str:
        return self._context.variables.session_user

    async def _refresh(self) -> None:
        objects = await self._context.catalog.all()
        indexes = {
            row["name"]: row
            for row in (await self._context.client.peek("penstock.objects")).to_pylist()
        }
        shown = [
            _object_row(each, indexes.get(each.name, {})) for each in objects if each.kind in _KINDS
        ]
        report = await self._context.client.roles()
        self._shared.show(shown, _role_rows(report, self._user))


def _role_rows(report: RolesReport, user: str) -> list[CatalogRoleRow]:
    """Return the roles that the catalog shows. While roles are not required, the asking user is
    shown as a superuser."""
    found = {DATABASE: CatalogRoleRow(DATABASE, superuser=True, can_login=not report.wanted)}
    if not report.wanted:
        found[user] = CatalogRoleRow(user, superuser=True)
    for role in report.roles:
        admin = any(each.right == ADMIN and not each.on for each in role.rights)
        found[role.name] = CatalogRoleRow(
            role.name, superuser=admin, can_login=role.login, create_role=admin
        )
    return [found[name] for name in sorted(found)]


def _object_row(status: ObjectStatus, row: Mapping[str, Any]) -> CatalogObjectRow:
    schema = status.schema
    is_index = status.kind == "index"
    depends = tuple(name.strip() for name in (row.get("depends") or "").split(",") if name.strip())
    keys = tuple(name.strip() for name in (row.get("key") or "").split(",") if name.strip())
    columns = () if schema is None or is_index else schema.columns
    comments, defaults = status.column_comments, status.column_defaults
    return CatalogObjectRow(
        id=str(row.get("id") or status.name),
        name=status.name,
        kind=_KINDS[status.kind],
        columns=tuple(
            CatalogColumnRow(
                c.name,
                c.type,
                c.nullable,
                comments.get(c.name, ""),
                defaults[c.name].text if c.name in defaults else "",
            )
            for c in columns
        ),
        comment=status.comment,
        key=() if schema is None or is_index else schema.key,
        sql=status.sql,
        on=depends[0] if is_index and depends else "",
        index_columns=keys if is_index else (),
        depends=() if is_index else depends,
    )


def _kind(oid: int) -> pa.DataType:
    """Return the Arrow type in which values of a catalog column's type are sent."""
    return _SCALARS.get(oid, pa.string())


def _moment() -> str:
    return datetime.now(UTC).isoformat(sep=" ")


def _shown_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(sep=" ")
