"""The gateway's listener: accepts connections, and passes their bytes to the gRPC server.

gRPC accepts whatever comes, as much of it as comes, and tells nobody of a connection before it has
a whole call. So it listens on a Unix socket in a folder that only this process's user may enter,
and this front stands before it, on the address that clients know. The front looks at no byte: TLS
and HTTP/2 are between the client and gRPC. Until a call on a connection has shown what the service
asks for (`prove`), only ``unproven_bytes_max`` bytes pass: enough for a TLS handshake and the
headers of a call, and for no body.

A connection to the gRPC server comes from a socket that is named by the connection's number, so
that the peer that gRPC reports for a call tells which connection it came on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import anyio

from actors.runtime.settings import Settings
from actors.runtime.transport import sockets
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate

log = logging.getLogger("penstock.connect")

READ_BYTES, UNPROVEN_READ_BYTES = 64 * 1024, 4 * 1024
"""Bytes read at a time on either side, when a client has proved itself and before."""


class RelayEnd(asyncio.BufferedProtocol):
    """One side of a connection that is passed on. What it receives is written to `other`; while
    that one is slow, it is not read."""

    def __init__(self, bytes_max: int | None = None) -> None:
        """With `bytes_max` no more is received until `widen` is called. Until then the buffer is
        small, too."""
        self.other: RelayEnd | None = None
        self.ended: asyncio.Event | None = None
        """Set when this socket is closed, or that of `other`."""
        self.settled = asyncio.Event()
        """Set when more may be received than `bytes_max`, or the socket is closed."""
        self.over = asyncio.Event()
        """Set when the socket is closed."""
        self._left = bytes_max
        self._buffer = bytearray(UNPROVEN_READ_BYTES)
        self._transport: Any = None
        self._early = bytearray()
        """Bytes that the other side received before this one had its socket."""
        self._slow = False

    def write(self, data: bytes) -> None:
        """Send bytes to this side's peer."""
        # The server greets before the client's socket is attached.
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    def widen(self) -> None:
        """Receive as much as comes from now on."""
        if not self.settled.is_set():
            self._left = None
            self._buffer = bytearray(READ_BYTES)
            self.settled.set()
            self._read()

    def close(self, *, at_once: bool = False) -> None:
        """Close the socket, when all has been sent unless `at_once`."""
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """Send what came early."""
        self._transport = transport
        if self._early:
            transport.write(bytes(self._early))
            self._early.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: no larger than what may still come."""
        return memoryview(self._buffer)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass bytes on."""
        assert self.other is not None
        # A copy: the transport may keep it while the buffer is used again.
        self.other.write(bytes(memoryview(self._buffer)[:nbytes]))
        if self._left is not None:
            self._left -= nbytes
            self._read()

    def pause_writing(self) -> None:
        """Hold back the other side: this one's peer is slow."""
        assert self.other is not None
        self.other.hold(slow=True)

    def resume_writing(self) -> None:
        """Let the other side go on."""
        assert self.other is not None
        self.other.hold(slow=False)

    def eof_received(self) -> bool:
        """End the connection: HTTP/2 closes no direction alone."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other side, too."""
        self.over.set()
        self.settled.set()
        if self.ended is not None:
            self.ended.set()
        if self.other is not None:
            self.other.close()

    def hold(self, *, slow: bool) -> None:
        """Receive nothing while the other side's peer is slow."""
        self._slow = slow
        self._read()

    def _read(self) -> None:
        """Read the socket, or not, as things stand."""
        if self._transport is None or self._transport.is_closing():
            return
        # A client that has sent all it may is not read, so that its own kernel holds the rest.
        if self._slow or self._left == 0:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class RelayedConnection:
    """A client's connection, and the one to the gRPC server that belongs to it."""

    def __init__(self, accepted: AcceptedConnection, name: str, bytes_max: int) -> None:
        self.accepted = accepted
        self.name = name
        """The client's address, as gRPC would tell it."""
        self.client = RelayEnd(bytes_max)
        self.server = RelayEnd()
        self.ended = asyncio.Event()
        """Set when one of both sockets is closed."""
        for end, other in ((self.client, self.server), (self.server, self.client)):
            end.other, end.ended = other, self.ended

    def prove(self) -> None:
        """Let all bytes pass. Raises `ResourceBusy`."""
        self.accepted.prove()
        self.client.widen()
        self.server.widen()

    def abort(self) -> None:
        """Close both sockets at once."""
        self.client.close(at_once=True)
        self.server.close(at_once=True)


class ConnectFront:
    """Listens for clients, and passes their connections to a server on `inner_address`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Its mode is 0700, so that nobody else reaches the sockets in it. Not below the state
        # directory, whose path may be longer than that of a Unix socket can be.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-connect-"))
        self._bound: sockets.BoundSockets | None = None
        self._opened = anyio.Event()
        self._connections: dict[str, RelayedConnection] = {}
        self._gate = ConnectionGate(
            settings.unproven_connections_max,
            settings.connect_connections_max,
            "connect_connections_max",
        )

    @property
    def inner_address(self) -> str:
        """Return where the gRPC server must listen, as gRPC writes it."""
        return f"unix:{self._inner_path}"

    @property
    def _inner_path(self) -> str:
        return str(self._folder / "server")

    async def bind(self, place: NetworkAddress) -> NetworkAddress:
        """Bind the clients' address, and return it with its port. Raises `AddressInUse`."""
        self._bound = await sockets.bind(place)
        return self._bound.address

    def open(self) -> None:
        """Let `serve` begin: the gRPC server has been started."""
        self._opened.set()

    def stop_listening(self) -> None:
        """Free the clients' address. Connections go on."""
        if self._bound is not None:
            self._bound.close()

    def close(self) -> None:
        """Close the listener, and remove the folder. Idempotent."""
        self.stop_listening()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self) -> None:
        """Serve connections from `open` on, until cancelled."""
        assert self._bound is not None
        await self._opened.wait()
        async with anyio.create_task_group() as group:
            for sock in self._bound.sockets:
                group.start_soon(self._gate.accept, sock, group, self._converse)

    def prove(self, peer: str) -> str:
        """Note that a call has shown what the service asks for, on the connection of this peer of
        the gRPC server. Return the client's own address. Raises `ResourceBusy`."""
        found = self._connections.get(peer.rpartition("/")[2])
        if found is None:
            # Its client has left meanwhile.
            return ""
        found.prove()
        return found.name

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        """Pass on one connection until either side closes it."""
        settings, number = self._settings, str(accepted.number)
        connection = RelayedConnection(accepted, _peer_name(sock), settings.unproven_bytes_max)
        accepted.abort = connection.abort
        # By then no call can have come on it.
        self._connections[number] = connection
        try:
            # First the server's side: what a client sends has somewhere to go then.
            await self._reach_server(connection.server, number)
            await sockets.attach_accepted(lambda: connection.client, sock, None)
            with anyio.move_on_after(settings.connect_timeout_ms / 1000) as limit:
                await connection.client.settled.wait()
            if limit.cancelled_caught:
                log.info("%s made no call in time (connect_timeout_ms)", connection.name)
                return
            await connection.ended.wait()
            # The rest of what the server has sent, if it was the server that closed.
            with anyio.move_on_after(settings.write_timeout_ms / 1000):
                await connection.client.over.wait()
        except OSError as error:
            log.info("connection of %s ended: %s", connection.name, error)
        finally:
            del self._connections[number]
            # It may not have got a transport yet.
            sock.close()
            connection.abort()

    async def _reach_server(self, end: RelayEnd, number: str) -> None:
        path = self._folder / number
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.bind(str(path))
            loop = asyncio.get_running_loop()
            await loop.sock_connect(inner, self._inner_path)
            await loop.create_unix_connection(lambda: end, sock=inner)
        except BaseException:
            inner.close()
            raise
        finally:
            # The name stays with the socket; its file is not needed.
            with contextlib.suppress(OSError):
                path.unlink()


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
