"""The listener for PostgreSQL's clients."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import msgspec

from actors.access.open_sessions import OpenSession, OpenSessions
from actors.client.client import Client
from actors.controller.reads.point_reads import PointReads
from actors.errors import AddressInUse
from actors.kernel import Actor
from actors.pg_server.catalog_door import SharedCatalog
from actors.pg_server.connection import FindRole, PgConnection
from actors.pg_server.wire import READ_BYTES, PgWire
from actors.pgwire.messages import CANCEL_KEY_BYTES
from actors.settings import Settings
from actors.sql.tokens import SqlDialect
from actors.sql_session.session import SqlSession
from actors.transport.address import NetworkAddress
from actors.transport.security import TransportSecurity, for_listener

log = logging.getLogger("penstock.pg")


class PgListener:
    """A bound listener of PostgreSQL's protocol."""

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self.server = server
        self.address = address
        self.begun = anyio.Event()
        """Set when connections are served."""
        self.accepted: (
            Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None
        ) = None

    @classmethod
    async def bind(cls, address: str) -> PgListener:
        """Bind an address. Raises `AddressInUse` and `BadSettings`."""
        place = NetworkAddress.parse(address, "pg_listen")
        listener: PgListener | None = None
        begun = anyio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A client may come before the actor that serves it has begun.
            await begun.wait()
            assert listener is not None
            assert listener.accepted is not None
            await listener.accepted(reader, writer)

        try:
            if place.is_unix:
                server = await asyncio.start_unix_server(accept, place.path, limit=READ_BYTES)
                shown = str(place)
            else:
                server = await asyncio.start_server(
                    accept, place.host, place.port, limit=READ_BYTES
                )
                port = server.sockets[0].getsockname()[1]
                shown = f"{place.host}:{port}"
        except OSError as error:
            raise AddressInUse(f"pg_listen = {address}: {error.strerror or error}") from None
        listener = cls(server, shown)
        listener.begun = begun
        return listener

    async def aclose(self) -> None:
        """Close the listener."""
        self.server.close()


def listener_security(settings: Settings) -> TransportSecurity | None:
    """Return what the listener demands of its peers. Raises `BadSettings` for an address that other
    machines reach without TLS, and without tokens or `roles_required`."""
    place = NetworkAddress.parse(settings.pg_listen, "pg_listen")
    required = settings.roles_required
    return for_listener("pg_listen", place, settings, "token_file", checks=required)


class _ListenerEnded(msgspec.Struct, frozen=True, gc=False):
    """The listener was closed."""


class PgServer(Actor[_ListenerEnded]):
    """Accepts PostgreSQL's clients, at most `pg_connections_max` at a time."""

    def __init__(
        self,
        listener: PgListener,
        settings: Settings,
        connect: Callable[[OpenSession], Awaitable[Client]],
        find_role: FindRole,
        sessions: OpenSessions,
        points: PointReads | None = None,
    ) -> None:
        """Take the environment. `connect` makes the client of a session, `find_role` says how a
        user is let in, `sessions` are those of all doors."""
        self._listener = listener
        self._settings = settings
        self._connect = connect
        self._points = points or PointReads()
        self._find_role = find_role
        self._security = listener_security(settings)
        self._tls = self._tls_context()
        self._connections: dict[int, PgConnection] = {}
        self._sessions = sessions
        self._shared = SharedCatalog()

    def _tls_context(self) -> ssl.SSLContext | None:
        if self._security is None or not self._security.has_tls:
            return None
        context = self._security.context(server=True)
        # A password proves a client, so that it needs no certificate.
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    async def on_start(self) -> None:
        self.ctx.effect(self._serve, done=lambda _: _ListenerEnded())

    async def on_stop(self) -> None:
        await self._listener.aclose()

    async def receive(self, message: _ListenerEnded) -> None:
        log.info("%s is closed", self._listener.address)

    async def _serve(self) -> None:
        """Accept connections until canceled, which ends them too."""
        async with anyio.create_task_group() as group:
            self._group = group

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                group.start_soon(self._converse, reader, writer)

            self._listener.accepted = accept
            self._listener.begun.set()
            await anyio.sleep_forever()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings = self._settings
        number = self._sessions.next_number()
        wire = PgWire(reader, writer, settings.frame_bytes_max, settings.write_timeout_ms)
        # Secret: who knows it can cancel statements. Not from the seeded generator.
        key = secrets.token_bytes(max(CANCEL_KEY_BYTES.values()))
        security = self._security
        connection = PgConnection(
            wire,
            settings,
            self._session,
            sessions=self._sessions,
            tls=self._tls,
            knows=security.knows if security is not None and security.has_tokens else None,
            find_role=self._find_role,
            process_id=number,
            secret_key=key,
            cancel_other=self._cancel,
            shared=self._shared,
            points=self._points,
            full=len(self._connections) >= settings.pg_connections_max,
        )
        self._connections[number] = connection
        try:
            await connection.serve()
        except Exception:
            # One client's fault must not end the others' connections.
            log.exception("%s: a fault of this program ended the connection", wire.peer)
        finally:
            del self._connections[number]

    async def _session(self, user: str, opened: OpenSession) -> SqlSession:
        client = await self._connect(opened)
        return SqlSession(
            client,
            self._settings,
            SqlDialect.POSTGRES,
            user,
            spawn=self._spawn,
            roles_change=True,
        )

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._group.start_soon(run)

    def _cancel(self, process_id: int, secret_key: bytes) -> None:
        connection = self._connections.get(process_id)
        if connection is not None:
            connection.cancel(secret_key)

    def describe(self) -> str:
        return f"{self._listener.address}: {len(self._connections)} clients"
