"""Sockets for listening and connecting: TCP and Unix, optionally with TLS.

The file of a Unix socket has mode 0600. A stale file is removed if it is a socket without a
listener and its lock file ``PATH.lock``, which a live listener holds, is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Callable
from typing import IO, Any, Final

from actors.runtime.errors import AddressInUse, ConnectionBroken
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.security import TransportSecurity

BACKLOG: Final = 512
"""Connections that may wait in the kernel to be accepted."""
SHUTDOWN_S: Final = 2.0
"""Timeout of the TLS shutdown."""


class BoundSockets:
    """The listening sockets of one address. `address` contains the port that was bound."""

    def __init__(
        self, address: NetworkAddress, found: list[socket.socket], lock: IO[bytes] | None = None
    ) -> None:
        self.address = address
        self.sockets = found
        self._lock = lock
        self._inode = os.stat(address.path).st_ino if address.is_unix else 0

    def close(self) -> None:
        """Close the sockets and remove the file of a Unix socket. Idempotent."""
        for sock in self.sockets:
            sock.close()
        if self._lock is not None and not self._lock.closed:
            with contextlib.suppress(OSError):
                # Another listener may have replaced the file.
                if os.lstat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)
            self._lock.close()


async def bind(address: NetworkAddress) -> BoundSockets:
    """Listen on an address, or on all addresses of a host name. Raises `AddressInUse`."""
    if address.is_unix:
        return _bind_unix(address)
    loop = asyncio.get_running_loop()
    found: list[socket.socket] = []
    port = address.port
    try:
        infos = await loop.getaddrinfo(
            address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, place in dict.fromkeys(infos):
            sock = socket.create_server((place[0], port), family=family, backlog=BACKLOG)
            sock.setblocking(False)
            found.append(sock)
            # With port 0, all addresses of the name share the port of the first.
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in found:
            sock.close()
        why = error.strerror or str(error)
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            why = f"{why}; choose another port, or 0 for a free one"
        raise AddressInUse(f"cannot listen on {address}: {why}") from None
    return BoundSockets(NetworkAddress(host=address.host, port=port), found)


def _bind_unix(address: NetworkAddress) -> BoundSockets:
    path = address.path
    lock = None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock = open(f"{path}.lock", "ab", opener=_private)  # noqa: SIM115
        # The lock prevents a race between two listeners that find the same stale file.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_stale(path)
        sock.bind(path)
        os.chmod(path, 0o600)  # before `listen`, so that nobody connects under another mode
        sock.listen(BACKLOG)
        sock.setblocking(False)
        return BoundSockets(address, [sock], lock)
    except OSError as error:
        sock.close()
        if lock is not None:
            lock.close()
        why = "another process listens there" if isinstance(error, BlockingIOError) else error
        raise AddressInUse(f"cannot listen on {address}: {why}") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_stale(path: str) -> None:
    """Remove the file of a socket without a listener. Raises `OSError` for any other file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Non-blocking, because a listener with a full backlog would block the probe.
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # there is a listener, and its backlog is full
    raise OSError("another process listens there")


async def connect(
    factory: Callable[[], asyncio.BaseProtocol],
    address: NetworkAddress,
    security: TransportSecurity | None,
) -> None:
    """Connect a protocol to an address, with TLS if `security` has a certificate.

    Raises `OSError`, or `ConnectionBroken` for an unknown host.
    """
    loop = asyncio.get_running_loop()
    if address.is_unix:
        await loop.create_unix_connection(factory, address.path)
        return
    options: dict[str, Any] = {}
    if security is not None and security.has_tls:
        options = {"ssl": security.context(server=False), "server_hostname": address.host}
        options["ssl_shutdown_timeout"] = SHUTDOWN_S
    try:
        await loop.create_connection(factory, address.host, address.port, **options)
    except socket.gaierror as error:
        raise ConnectionBroken(f"cannot connect to {address}: {error.strerror}") from None


async def attach_accepted(
    factory: Callable[[], asyncio.BaseProtocol],
    sock: socket.socket,
    context: ssl.SSLContext | None,
) -> None:
    """Attach a protocol to an accepted socket, with TLS if `context` is given.

    Raises `OSError`, after closing the socket.
    """
    options: dict[str, Any] = {}
    if context is not None:
        options = {"ssl": context, "ssl_shutdown_timeout": SHUTDOWN_S}
    try:
        await asyncio.get_running_loop().connect_accepted_socket(factory, sock, **options)
    except BaseException:
        sock.close()
        raise


async def attach_streams(
    sock: socket.socket, context: ssl.SSLContext | None, limit_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Attach a reader and a writer to an accepted socket; see `attach_accepted`.

    While more than twice `limit_bytes` wait to be read, the socket is not read.
    """
    reader = asyncio.StreamReader(limit=limit_bytes)
    return reader, await _writer(sock, context, reader)


async def attach_growing_streams(
    sock: socket.socket, limit_bytes: int
) -> tuple[GrowingReader, asyncio.StreamWriter]:
    """Attach a reader whose limit can be raised, and a writer, without TLS.

    Otherwise like `attach_streams`.
    """
    reader = GrowingReader(limit=limit_bytes)
    return reader, await _writer(sock, None, reader)


async def _writer(
    sock: socket.socket, context: ssl.SSLContext | None, reader: asyncio.StreamReader
) -> asyncio.StreamWriter:
    made: list[asyncio.StreamWriter] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)

    await attach_accepted(lambda: asyncio.StreamReaderProtocol(reader, connected), sock, context)
    return made[0]


class GrowingReader(asyncio.StreamReader):
    """A reader whose limit can be raised once its peer has proved itself.

    It calls `on_end` when the peer stops sending or the connection is lost, even if nobody reads.
    """

    _limit: int
    """Half of the bytes that may wait before the socket is not read; `widen` raises it."""
    _buffer: bytearray
    """Bytes received and not read yet."""
    on_end: Callable[[], None] = staticmethod(lambda: None)
    """Called at the end of the connection."""

    @property
    def waiting(self) -> bytes:
        """Return the bytes that were received and not read yet."""
        return bytes(self._buffer)

    def feed_eof(self) -> None:
        """Record that the peer sends nothing more."""
        super().feed_eof()
        self.on_end()

    def set_exception(self, exc: Exception) -> None:
        """Record that the connection is lost."""
        super().set_exception(exc)
        self.on_end()

    def widen(self, limit_bytes: int) -> None:
        """Raise the limit: up to twice `limit_bytes` may wait to be read."""
        self._limit = limit_bytes
