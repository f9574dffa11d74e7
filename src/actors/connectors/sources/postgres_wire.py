"""One connection to PostgreSQL on the event loop, for simple queries and COPY.

psycopg connects, and libpq runs simple queries, without blocking. `postgres_copy` reads the rows of
a COPY.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psycopg import AsyncConnection, OperationalError
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq import abc as pq

from actors.connectors.sources.postgres_copy import (
    CopyStream,
    LibpqCopy,
    RawCopy,
    next_result,
    ready,
)
from actors.connectors.sources.postgres_errors import (
    ServerRefused,
    connection_lost,
    hint_for,
    refusal,
)
from actors.connectors.sources.source import SourceUnreachable

_FAILED: Final = "connection failed: "
"""Prefix that psycopg adds to libpq's own error text."""


class PostgresConnection:
    """A connection that one task uses at a time (except for `CopyStream.send`)."""

    def __init__(self, opened: AsyncConnection[Any]) -> None:
        # Kept alive, because psycopg warns about an open connection that is garbage-collected.
        self._opened = opened
        self._connection = connection = opened.pgconn
        # Without this, psycopg logs the server's notices.
        connection.notice_handler = None
        connection.nonblocking = 1
        # The COPY in progress, or the last one; None before the first.
        self._copy: CopyStream | None = None
        self._asked = False
        """True while results of a query are unread, in particular after its caller was
        cancelled."""
        self._beginning = False
        """True from the request of a COPY until it starts."""

    @classmethod
    async def connect(cls, parameters: Mapping[str, str]) -> PostgresConnection:
        """Connect with libpq parameters. Raises `SourceUnreachable`."""
        return await cls.open(make_conninfo(**parameters))

    @classmethod
    async def open(cls, conninfo: str) -> PostgresConnection:
        """Connect with libpq's ``key=value`` string or URI. Raises `SourceUnreachable`."""
        # `PGconn.connect` would hold the GIL while it waits for a silent host.
        try:
            made = await AsyncConnection.connect(conninfo, autocommit=True)
        except OperationalError as error:
            text = str(error).removeprefix(_FAILED)
            raise SourceUnreachable(text, hint_for(text)) from None
        return cls(made)

    @property
    def server_version(self) -> int:
        """Return the server's version, such as 150004 for 15.4."""
        return self._connection.server_version

    @property
    def server_pid(self) -> int:
        """Return the id of the server process behind this connection."""
        return self._connection.backend_pid

    async def query(self, sql: str) -> list[tuple[str | None, ...]]:
        """Run simple statements and return the rows of the last one that returned any.

        Raises `ServerRefused` and `SourceUnreachable`.
        """
        connection = self._connection
        rows: list[tuple[str | None, ...]] = []
        error: ServerRefused | None = None
        await self._drain()
        try:
            self._asked = True
            connection.send_query(sql.encode())
            while connection.flush():
                await ready(connection.socket, writable=True)
            while (result := await next_result(connection)) is not None:
                if result.status == ExecStatus.TUPLES_OK:
                    rows = _rows(result)
                elif result.status == ExecStatus.FATAL_ERROR:
                    error = refusal(result)
            self._asked = False
        except OperationalError as lost:
            raise connection_lost(str(lost)) from None
        if error is not None:
            # 57P: the server ends the connection, even if libpq does not know it yet.
            if connection.status != ConnStatus.OK or error.sqlstate.startswith("57P"):
                raise connection_lost(str(error))
            raise error
        return rows

    async def copy(self, sql: str, bytes_max: int) -> CopyStream:
        """Start a COPY … TO STDOUT or START_REPLICATION with a buffer of `bytes_max`.

        Raises `ServerRefused` and `SourceUnreachable`.
        """
        connection = self._connection
        await self._drain()
        if self._copy is not None:
            self._copy.end()
        self._beginning = True
        kind = LibpqCopy if connection.ssl_in_use or connection.used_gssapi else RawCopy
        try:
            self._copy = await kind.begin(connection, sql, bytes_max)
        except ServerRefused:
            self._beginning = False
            raise
        self._beginning = False
        return self._copy

    async def _drain(self) -> None:
        """Read the remaining results of a cancelled query. Raises `SourceUnreachable`."""
        # A COPY was cancelled while it started, so the next bytes may belong to it.
        if self._beginning:
            raise connection_lost("a COPY was cancelled while it started")
        try:
            while self._asked and await next_result(self._connection) is not None:
                pass
        except OperationalError as lost:
            raise connection_lost(str(lost)) from None
        self._asked = False

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if self._copy is not None:
            self._copy.end()
            self._copy = None
        self._connection.finish()


def _rows(result: pq.PGresult) -> list[tuple[str | None, ...]]:
    def value(row: int, column: int) -> str | None:
        raw = result.get_value(row, column)
        return None if raw is None else raw.decode()

    return [
        tuple(value(row, column) for column in range(result.nfields))
        for row in range(result.ntuples)
    ]
