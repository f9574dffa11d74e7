"""A connection to an acceptor, opened as libpq does: startup, password, one command, the copy.

`dial` has a timeout; all other waits are the caller's to bound. An acceptor's error is raised as
`WalRefused` with its text (by its SQLSTATE as `WalRemoved` where the log is no longer kept, and as
`PeerRejected` where reconnecting does not help), an end of the stream as `ConnectionBroken`, bytes
that are no messages as `MalformedFrame`. One task receives, one sends.

With TLS nothing is sent in the clear: an acceptor without TLS is an error, and its certificate must
be of the trusted authority and for the host that was dialled.

Source: PostgreSQL's documentation, "Message Formats"; the parameters are those of Neon's proposer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from actors.runtime.errors import (
    ConnectionBroken,
    FrameTooLarge,
    InvalidUsage,
    MalformedFrame,
    PeerRejected,
    WalRefused,
    WalRemoved,
)
from actors.wal.lsn import lsn_text
from actors.wal.messages import WAL_BYTES_MAX
from actors.wal.startup import NO_PASSWORD, REJECTED, REMOVED

PORT: Final = 5454
BODY_BYTES_MAX: Final = WAL_BYTES_MAX + 64 * 1024
"""Most bytes of one message: a piece of log, or a vote with a long history."""
_HEADER: Final = struct.Struct("!cI")
_U32: Final = struct.Struct("!I")
_VERSION_3: Final = 3 << 16
_REFUSED_AS: Final[Mapping[str, type[WalRefused]]] = {
    NO_PASSWORD: PeerRejected,
    REJECTED: PeerRejected,
    REMOVED: WalRemoved,
}
_SSL_REQUEST: Final = struct.pack("!II", 8, 80877103)


class AcceptorAddress(msgspec.Struct, frozen=True):
    """Host and port of an acceptor."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_addresses(text: str) -> tuple[AcceptorAddress, ...]:
    """Parse ``host:port,host,[::1]:port``. Raises `InvalidUsage`."""
    return tuple(_parse_address(part.strip()) for part in text.split(","))


def _parse_address(text: str) -> AcceptorAddress:
    host, sign, port = text.rpartition(":")
    # An IPv6 address in brackets without a port has colons, too.
    if not sign or text.endswith("]"):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidUsage(f"{text!r} is no address of an acceptor: write host:port")
    return AcceptorAddress(host, int(port))


class AcceptorConnection:
    """One connection; `dial` makes it."""

    def __init__(
        self, address: AcceptorAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.address = address
        self._reader = reader
        self._writer = writer

    async def send(self, bodies: Sequence[bytes]) -> None:
        """Send each body as one CopyData; wait while the peer is slow. Raises
        `ConnectionBroken`."""
        try:
            for body in bodies:
                self._writer.write(_HEADER.pack(b"d", len(body) + 4))
                self._writer.write(body)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None

    async def receive(self) -> bytes:
        """Return the body of the next CopyData. Raises `ConnectionBroken` at the end of the copy or
        the stream, `WalRefused`, `MalformedFrame`, `FrameTooLarge`."""
        while True:
            kind, body = await self._message()
            if kind == b"d":
                return body
            if kind == b"c":
                raise ConnectionBroken(f"acceptor {self.address} ended the stream")
            # Notices, parameters, CommandComplete and ReadyForQuery carry no log.
            if kind not in b"NSCZ":
                raise MalformedFrame(f"a message of type {kind!r} in a copy of {self.address}")

    async def end_copy(self) -> None:
        """End the own side of the copy, and wait until the peer has taken it all. Raises as
        `receive`."""
        await self._write(b"c", b"")
        while True:
            kind, _ = await self._message()
            if kind == b"c":
                return

    async def command(self, query: str) -> None:
        """Send a command that begins a copy both ways, and wait for its begin."""
        await self._write(b"Q", query.encode() + b"\0")
        while True:
            kind, _ = await self._message()
            if kind == b"W":
                return
            if kind not in b"NS":
                raise MalformedFrame(f"{query.split()[0]} was answered by {kind!r}, not by a copy")

    async def query(self, text: str) -> list[tuple[str | None, ...]]:
        """Return the rows of a query, as text; NULL is None. Raises as `receive`."""
        await self._write(b"Q", text.encode() + b"\0")
        found: list[tuple[str | None, ...]] = []
        while True:
            kind, body = await self._message()
            if kind == b"Z":
                return found
            if kind == b"D":
                found.append(read_row(body))
            elif kind not in b"TCNS":
                raise MalformedFrame(f"{text!r} was answered by {kind!r}")

    async def start_up(self, tenant: str, timeline: str, token: str) -> None:
        """Authenticate: from the startup packet until the acceptor takes commands."""
        parameters = {
            "user": "penstock",
            "database": "replication",
            "application_name": "penstock",
            "options": f"-c timeline_id={timeline} tenant_id={tenant}",
        }
        texts = "".join(f"{name}\0{value}\0" for name, value in parameters.items()) + "\0"
        packet = _U32.pack(_VERSION_3) + texts.encode()
        self._writer.write(_U32.pack(len(packet) + 4) + packet)
        while True:
            kind, body = await self._message()
            if kind == b"Z":
                return
            # 0: let in. 3: a password is asked for, in clear text.
            if kind == b"R" and body != _U32.pack(0):
                if body != _U32.pack(3) or not token:
                    raise PeerRejected(f"acceptor {self.address} wants a token: give it one")
                # A token is sent over TLS, or to an acceptor on this machine.
                is_safe = self._writer.get_extra_info("ssl_object") is not None
                if not is_safe and not is_of_this_machine(self._writer.get_extra_info("peername")):
                    raise PeerRejected(
                        f"acceptor {self.address} wants a token, which would cross the network in"
                        " the clear: set tls_certificate, tls_key and tls_authority"
                    )
                await self._write(b"p", token.encode() + b"\0")
            elif kind not in b"RSKN":
                raise MalformedFrame(f"acceptor {self.address} began with {kind!r}")

    async def _write(self, kind: bytes, body: bytes) -> None:
        try:
            self._writer.write(_HEADER.pack(kind, len(body) + 4) + body)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None

    async def _message(self) -> tuple[bytes, bytes]:
        try:
            kind, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            # The length is checked before any of the body is kept.
            if length < 4:
                raise MalformedFrame(f"a message of {length} bytes from {self.address}")
            if length - 4 > BODY_BYTES_MAX:
                raise FrameTooLarge(
                    f"acceptor {self.address} announces {length - 4} bytes"
                    f" (limit {BODY_BYTES_MAX}): is it one?"
                )
            body = await self._reader.readexactly(length - 4)
        except asyncio.IncompleteReadError:
            raise ConnectionBroken(f"acceptor {self.address} closed the connection") from None
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None
        if kind == b"E":
            refused = _REFUSED_AS.get(_error_field(body, b"C"), WalRefused)
            text = _error_field(body, b"M") or "an error without a text"
            raise refused(f"acceptor {self.address}: {text}")
        return kind, body

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


def read_row(body: bytes) -> tuple[str | None, ...]:
    """Parse the cells of a DataRow; NULL is None. Raises `MalformedFrame`."""
    try:
        (count,) = struct.unpack_from("!H", body)
        at, cells = 2, list[str | None]()
        for _ in range(count):
            (size,) = struct.unpack_from("!i", body, at)
            at += 4
            cell = body[at : at + max(size, 0)]
            if len(cell) != max(size, 0):
                raise MalformedFrame(f"a cell of {size} bytes, and {len(cell)} came")
            cells.append(None if size < 0 else cell.decode())
            at += len(cell)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a row that is none: {error}") from None
    return tuple(cells)


def _error_field(body: bytes, code: bytes) -> str:
    fields = {part[:1]: part[1:] for part in body.split(b"\0") if part}
    return fields.get(code, b"").decode(errors="replace")


def is_of_this_machine(peer: Any) -> bool:
    """Return whether a socket's other end, as ``getpeername`` says, cannot be another machine."""
    if not isinstance(peer, tuple):
        return True  # a Unix socket's
    return ipaddress.ip_address(str(peer[0]).partition("%")[0]).is_loopback


async def dial(
    address: AcceptorAddress,
    tenant: str,
    timeline: str,
    *,
    timeout_ms: int,
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> AcceptorConnection:
    """Connect and authenticate. Raises `ConnectionBroken`, `WalRefused`, `MalformedFrame`."""
    writer = None
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            if tls is None:
                reader, writer = await asyncio.open_connection(address.host, address.port)
            else:
                reader, writer = await _open_encrypted(address, tls)
            raw = writer.get_extra_info("socket")
            if raw is not None:
                # Small messages await replies: Nagle's algorithm would delay them.
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = AcceptorConnection(address, reader, writer)
            await connection.start_up(tenant, timeline, token)
            return connection
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, OSError):  # TimeoutError is one, too
            text = str(error) or f"no answer in {timeout_ms} ms"
            raise ConnectionBroken(f"cannot connect to acceptor {address}: {text}") from None
        raise


async def _open_encrypted(
    address: AcceptorAddress, tls: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and begin TLS. Raises `OSError` and `PeerRejected`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure = OSError(f"no address of {address.host}")
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            await loop.sock_sendall(sock, _SSL_REQUEST)
            # One byte and no more: injected bytes after it must not count as sent over TLS.
            answer = await loop.sock_recv(sock, 1)
            if answer != b"S":
                raise PeerRejected(
                    f"acceptor {address} has no TLS, and it is asked for: not spoken"
                )
            return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=address.host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def start_push(connection: AcceptorConnection) -> None:
    """Begin to exchange messages of version 3, both ways."""
    await connection.command("START_WAL_PUSH (proto_version '3', allow_timeline_creation 'true')")


async def start_replication(
    connection: AcceptorConnection, start_lsn: int, term: int | None = None
) -> None:
    """Begin to read the committed log from `start_lsn` on; with a term, all that is flushed, for as
    long as the acceptor is in that term."""
    options = f" (term='{term}')" if term is not None else ""
    await connection.command(f"START_REPLICATION PHYSICAL {lsn_text(start_lsn)}{options}")
