"""The actor that listens for PostgreSQL clients and serves their connections."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import msgspec

from actors.control.access.open_sessions import OpenSession, OpenSessions
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.doors.client.client import Client
from actors.doors.postgres.pg_server.connection import FindRole, PgConnection
from actors.doors.postgres.pg_server.connection_catalog import SharedCatalog
from actors.doors.postgres.pg_server.login import TokenProof
from actors.doors.postgres.pg_server.parameter_inference import place_roles
from actors.doors.postgres.pg_server.wire import PgWire
from actors.doors.sql_session.session import SqlSession
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.messages import CANCEL_KEY_BYTES
from actors.runtime.errors import AddressInUse
from actors.runtime.kernel import Actor
from actors.runtime.settings import Settings
from actors.runtime.transport import sockets
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate
from actors.runtime.transport.security import TransportSecurity, for_listener

log = logging.getLogger("penstock.pg")


class PgListener:
    """A bound listener for PostgreSQL's protocol. Connections wait until `PgServer` serves them."""

    def __init__(self, bound: sockets.BoundSockets) -> None:
        self.bound = bound
        self.address = str(bound.address)

    @classmethod
    async def bind(cls, address: str) -> PgListener:
        """Bind an address. Raises `AddressInUse` and `BadSettings`."""
        place = NetworkAddress.parse(address, "pg_listen")
        try:
            return cls(await sockets.bind(place))
        except AddressInUse as error:
            raise AddressInUse(f"pg_listen: {error}") from None

    async def aclose(self) -> None:
        """Close the listener."""
        self.bound.close()


def listener_security(settings: Settings) -> TransportSecurity | None:
    """Return the listener's security. Raises `BadSettings` for an address that other machines can
    reach without TLS, or without tokens and without `roles_required`."""
    place = NetworkAddress.parse(settings.pg_listen, "pg_listen")
    required = settings.roles_required
    return for_listener("pg_listen", place, settings, "token_file", checks=required)


class _ListenerEnded(msgspec.Struct, frozen=True, gc=False):
    """The listener was closed."""


class PgServer(Actor[_ListenerEnded]):
    """Accepts PostgreSQL clients, at most `pg_connections_max` at a time."""

    def __init__(
        self,
        listener: PgListener,
        settings: Settings,
        connect: Callable[[OpenSession], Awaitable[Client]],
        find_role: FindRole,
        sessions: OpenSessions,
        memory_reads: MemoryReads | None = None,
    ) -> None:
        """Set up the server.

        `connect` creates the client of a session, `find_role` returns how a user must authenticate,
        `sessions` are the sessions of all protocols, and `memory_reads` reads rows by key from
        memory.
        """
        self._listener = listener
        self._settings = settings
        self._connect = connect
        self._memory_reads = memory_reads or MemoryReads()
        self._find_role = find_role
        self._security = listener_security(settings)
        self._tls = self._tls_context()
        has_tokens = self._security is not None and self._security.has_tokens
        self._tokens = TokenProof(self._security) if self._security and has_tokens else None
        self._connections: dict[int, PgConnection] = {}
        self._sessions = sessions
        self._gate = ConnectionGate(
            settings.unproven_connections_max, settings.pg_connections_max, "pg_connections_max"
        )
        self._shared = SharedCatalog()

    def _tls_context(self) -> ssl.SSLContext | None:
        if self._security is None or not self._security.has_tls:
            return None
        context = self._security.context(server=True)
        # A certificate is optional, because a client may authenticate with a password.
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    async def on_start(self) -> None:
        self.ctx.effect(self._serve, done=lambda _: _ListenerEnded())

    async def on_stop(self) -> None:
        await self._listener.aclose()

    async def receive(self, message: _ListenerEnded) -> None:
        log.info("%s is closed", self._listener.address)

    async def _serve(self) -> None:
        """Accept and serve connections until canceled, which also ends them."""
        async with anyio.create_task_group() as group:
            self._group = group

            for sock in self._listener.bound.sockets:
                group.start_soon(self._gate.accept, sock, group, self._serve_connection)
            await anyio.sleep_forever()

    async def _serve_connection(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        settings = self._settings
        number = self._sessions.next_number()
        try:
            reader, writer = await sockets.attach_growing_streams(
                sock, settings.unproven_bytes_max // 2
            )
        except OSError:
            return
        # Look up the transport on each call: TLS replaces it.
        accepted.abort = lambda: writer.transport.abort()
        wire = PgWire(reader, writer, settings)
        # Not from the seeded generator: anyone who knows this key can cancel statements.
        key = secrets.token_bytes(max(CANCEL_KEY_BYTES.values()))
        connection = PgConnection(
            wire,
            settings,
            self._session,
            sessions=self._sessions,
            tls=self._tls,
            tokens=self._tokens,
            find_role=self._find_role,
            process_id=number,
            secret_key=key,
            cancel_other=self._cancel,
            shared=self._shared,
            memory_reads=self._memory_reads,
            admit=accepted.prove,
        )
        self._connections[number] = connection
        try:
            await connection.serve()
        except Exception:
            # An error in one connection must not end the others.
            log.exception("%s: an internal error ended the connection", wire.peer)
        finally:
            del self._connections[number]

    async def _session(self, user: str, opened: OpenSession) -> SqlSession:
        client = await self._connect(opened)
        session = SqlSession(
            client,
            self._settings,
            SqlDialect.POSTGRES,
            user,
            spawn=self._spawn,
            roles_change=True,
        )
        session.context.find_places = place_roles
        return session

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run_apart() -> None:
            try:
                await run()
            except Exception:
                # The error would end the task group, and with it all connections.
                log.exception("an internal error ended a task of a session")

        self._group.start_soon(run_apart)

    def _cancel(self, process_id: int, secret_key: bytes) -> None:
        connection = self._connections.get(process_id)
        if connection is not None:
            connection.cancel(secret_key)

    def describe(self) -> str:
        return f"{self._listener.address}: {len(self._connections)} clients"
