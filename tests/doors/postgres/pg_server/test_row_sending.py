"""Rows on their way to a client of PostgreSQL's: none leaves once the right to it is gone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import OpenSessions, ReadRights
from actors.control.access.role_registry import READ, RoleRegistry
from actors.doors.postgres.pg_server import copy_protocol
from actors.doors.postgres.pg_server.copy_protocol import copy_to_client
from actors.doors.postgres.pg_server.row_sending import send_portal, send_result
from actors.doors.postgres.pg_server.statements import OpenPortal, PreparedStatement
from actors.doors.sql_session.results import StatementResult
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.messages import BindPortal
from actors.runtime.errors import AccessDenied

ROLES = RoleRegistry().create("boss", login=True).create("app", login=True)
READER = ROLES.grant(("app",), (READ,), ("u1",))
ROWS = 3_000
SHAPE = pa.schema([("s", pa.string())])


class RevokingWire:
    """Takes what is sent; the right is revoked after the first piece of rows."""

    def __init__(self) -> None:
        self.sessions = OpenSessions(lambda: 0)
        self.sessions.apply(AccessRules(READER))
        self.rights = ReadRights(self.sessions.open("postgresql", "app"))
        self.rights.note((("u1", "t"),))
        self.sent = b""

    async def send(self, data: Any) -> None:
        self.sent += bytes(data)
        if b"row-" in self.sent:
            self.sessions.apply(AccessRules(ROLES))

    async def flush(self) -> None:
        """All that was sent is here."""

    def rows(self) -> int:
        return self.sent.count(b"row-")


async def batches() -> AsyncGenerator[pa.RecordBatch, None]:
    values = [f"row-{number}-" + "x" * 100 for number in range(ROWS)]
    yield pa.RecordBatch.from_arrays([pa.array(values)], schema=SHAPE)


async def by_result(wire: RevokingWire) -> None:
    found = StatementResult("SELECT", SHAPE, batches(), rights=wire.rights)
    await send_result(wire, found, "UTC")  # type: ignore[arg-type]


async def by_portal(wire: RevokingWire) -> None:
    kept = PreparedStatement("SELECT 1", None, ())
    portal = OpenPortal(kept, BindPortal("", "", (), (), ()), "SELECT", SHAPE)
    portal.batches, portal.rights = batches(), wire.rights
    await send_portal(wire, portal, 0, "UTC")  # type: ignore[arg-type]


async def by_copy(wire: RevokingWire) -> None:
    session: Any = SimpleNamespace(context=None, begin_statement=lambda _: None)
    statement: Any = parse_statement("COPY t TO STDOUT", SqlDialect.POSTGRES)
    await copy_to_client(wire, session, statement, "UTC")  # type: ignore[arg-type]


@pytest.mark.parametrize("send", [by_result, by_portal, by_copy])
async def test_the_rest_of_the_rows_stays(
    send: Callable[[RevokingWire], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = RevokingWire()

    async def source(*_: Any) -> StatementResult:
        return StatementResult("SELECT", SHAPE, batches(), rights=wire.rights)

    monkeypatch.setattr(copy_protocol, "_source", source)
    monkeypatch.setattr(copy_protocol, "end_on_disconnect", lambda _, result: result)
    with pytest.raises(AccessDenied, match="app may not read t"):
        await send(wire)
    assert 0 < wire.rows() < ROWS
