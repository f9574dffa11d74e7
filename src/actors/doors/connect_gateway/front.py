"""The gateway's listener, which accepts connections and relays their bytes to the gRPC server.

gRPC accepts any connection and any amount of data, and does not report a connection before it has
received a complete call. So the gRPC server listens on a Unix socket in a folder that only this
process's user can access, and this front listens on the address that clients know. The front does
not inspect bytes: the client and gRPC speak TLS and HTTP/2 with each other. Until a call on a
connection is authenticated (`prove`), only ``unproven_bytes_max`` bytes pass. That suffices for a
TLS handshake and the headers of a call, but not for a body.

Each connection to the gRPC server comes from a socket that is named by the connection's number. The
peer that gRPC reports for a call thus identifies the connection.
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
"""Bytes read at a time on either side, after and before the client is authenticated."""


class RelayEnd(asyncio.BufferedProtocol):
    """One side of a relayed connection. What it receives is written to `other`; while `other` is
    slow, this side is not read."""

    def __init__(self, bytes_max: int | None = None) -> None:
        """Receive at most `bytes_max` bytes (None: no limit), with a small buffer, until `widen` is
        called."""
        self.other: RelayEnd | None = None
        self.ended: asyncio.Event | None = None
        """Set when the socket of this side or of `other` is closed."""
        self.settled = asyncio.Event()
        """Set when `bytes_max` no longer applies, or the socket is closed."""
        self.over = asyncio.Event()
        """Set when the socket is closed."""
        self._left = bytes_max
        """Bytes that may still be received; None: no limit."""
        self._buffer = bytearray(UNPROVEN_READ_BYTES)
        self._transport: Any = None
        """None until the socket is attached."""
        self._early = bytearray()
        """Bytes to send that arrived before this side's socket was attached."""
        self._slow = False
        """True while the peer of `other` is slow, so that this side is not read."""

    def write(self, data: bytes) -> None:
        """Send bytes to this side's peer."""
        # The server may send bytes before the client's socket is attached.
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    def widen(self) -> None:
        """Receive without a limit from now on."""
        if not self.settled.is_set():
            self._left = None
            self._buffer = bytearray(READ_BYTES)
            self.settled.set()
            self._read()

    def close(self, *, at_once: bool = False) -> None:
        """Close the socket: immediately if `at_once`, else after sending all bytes."""
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """Send the bytes that arrived early."""
        self._transport = transport
        if self._early:
            transport.write(bytes(self._early))
            self._early.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes, no larger than what may still be received."""
        return memoryview(self._buffer)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Relay received bytes."""
        assert self.other is not None
        # Copy them: the transport may still hold them when the buffer is reused.
        self.other.write(bytes(memoryview(self._buffer)[:nbytes]))
        if self._left is not None:
            self._left -= nbytes
            self._read()

    def pause_writing(self) -> None:
        """Stop reading the other side, because this side's peer is slow."""
        assert self.other is not None
        self.other.hold(slow=True)

    def resume_writing(self) -> None:
        """Resume reading the other side."""
        assert self.other is not None
        self.other.hold(slow=False)

    def eof_received(self) -> bool:
        """End the connection, since HTTP/2 has no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other side as well."""
        self.over.set()
        self.settled.set()
        if self.ended is not None:
            self.ended.set()
        if self.other is not None:
            self.other.close()

    def hold(self, *, slow: bool) -> None:
        """Stop receiving while the other side's peer is slow, or resume."""
        self._slow = slow
        self._read()

    def _read(self) -> None:
        """Pause or resume reading, depending on the state."""
        if self._transport is None or self._transport.is_closing():
            return
        # Do not read a client that has sent all it may: the rest stays in its kernel.
        if self._slow or self._left == 0:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class RelayedConnection:
    """A client's connection together with its connection to the gRPC server."""

    def __init__(self, accepted: AcceptedConnection, name: str, bytes_max: int) -> None:
        self.accepted = accepted
        self.name = name
        """The client's address, in gRPC's format."""
        self.client = RelayEnd(bytes_max)
        self.server = RelayEnd()
        self.ended = asyncio.Event()
        """Set when either socket is closed."""
        for end, other in ((self.client, self.server), (self.server, self.client)):
            end.other, end.ended = other, self.ended

    def prove(self) -> None:
        """Remove the limit on bytes, because the client is authenticated. Raises `ResourceBusy`."""
        self.accepted.prove()
        self.client.widen()
        self.server.widen()

    def abort(self) -> None:
        """Close both sockets immediately."""
        self.client.close(at_once=True)
        self.server.close(at_once=True)


class ConnectFront:
    """Listens for clients, and relays their connections to a server on `inner_address`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # The folder has mode 0700, so that no other user can reach its sockets. It is not below the
        # state directory, whose path may be too long for a Unix socket.
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
        """Return the address on which the gRPC server must listen, in gRPC's format."""
        return f"unix:{self._inner_path}"

    @property
    def _inner_path(self) -> str:
        return str(self._folder / "server")

    async def bind(self, place: NetworkAddress) -> NetworkAddress:
        """Bind the address for clients, and return it with the actual port. Raises
        `AddressInUse`."""
        self._bound = await sockets.bind(place)
        return self._bound.address

    def open(self) -> None:
        """Allow `serve` to start, once the gRPC server is running."""
        self._opened.set()

    def stop_listening(self) -> None:
        """Stop listening for clients. Existing connections stay open."""
        if self._bound is not None:
            self._bound.close()

    def close(self) -> None:
        """Close the listener, and remove the folder. Idempotent."""
        self.stop_listening()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self) -> None:
        """Accept and relay connections once `open` is called, until canceled."""
        assert self._bound is not None
        await self._opened.wait()
        async with anyio.create_task_group() as group:
            for sock in self._bound.sockets:
                group.start_soon(self._gate.accept, sock, group, self._converse)

    def prove(self, peer: str) -> str:
        """Record that a call on a connection was authenticated. Return the client's address.

        `peer` is the connection's peer as gRPC reports it. Raises `ResourceBusy`.
        """
        found = self._connections.get(peer.rpartition("/")[2])
        if found is None:
            # The client has disconnected in the meantime.
            return ""
        found.prove()
        return found.name

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        """Relay one connection until either side closes it."""
        settings, number = self._settings, str(accepted.number)
        connection = RelayedConnection(accepted, _peer_name(sock), settings.unproven_bytes_max)
        accepted.abort = connection.abort
        # Register the connection before any call can arrive on it.
        self._connections[number] = connection
        try:
            # Connect the server's side first, so that the client's bytes have a destination.
            await self._reach_server(connection.server, number)
            await sockets.attach_accepted(lambda: connection.client, sock, None)
            with anyio.move_on_after(settings.connect_timeout_ms / 1000) as limit:
                await connection.client.settled.wait()
            if limit.cancelled_caught:
                log.info("%s made no call within connect_timeout_ms", connection.name)
                return
            await connection.ended.wait()
            # If the server closed the connection, let the client receive the remaining bytes.
            with anyio.move_on_after(settings.write_timeout_ms / 1000):
                await connection.client.over.wait()
        except OSError as error:
            log.info("connection of %s ended: %s", connection.name, error)
        finally:
            del self._connections[number]
            # The socket may not have a transport yet.
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
            # The socket keeps its name; the file is no longer needed.
            with contextlib.suppress(OSError):
                path.unlink()


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a disconnected peer"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
