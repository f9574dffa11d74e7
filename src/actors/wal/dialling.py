"""A connection to an acceptor, opened as libpq does it: startup, password, one command, the copy.

`dial` has a timeout; all other waits must be bounded by the caller. An acceptor's error is raised
as `WalRefused` with its text (depending on its SQLSTATE as `WalRemoved` if the log is no longer
kept, or as `PeerRejected` if reconnecting does not help). The end of the stream is raised as
`ConnectionBroken`, and bytes that are not valid messages as `MalformedFrame`. One task receives,
one sends.

With TLS nothing is sent in clear text: an acceptor without TLS is an error, and its certificate
must be issued by the trusted authority for the host that was dialled.

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
"""Maximum size of a message: a piece of log, or a vote with a long history."""
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
    """Parse ``host:port,host,[::1]:port``. Raise `InvalidUsage`."""
    return tuple(_parse_address(part.strip()) for part in text.split(","))


def _parse_address(text: str) -> AcceptorAddress:
    host, sign, port = text.rpartition(":")
    # A bracketed IPv6 address without a port also contains colons.
    if not sign or text.endswith("]"):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidUsage(f"invalid address of an acceptor {text!r}: expected host:port")
    return AcceptorAddress(host, int(port))


class AcceptorConnection:
    """One connection to an acceptor. `dial` opens it."""

    def __init__(
        self, address: AcceptorAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.address = address
        self._reader = reader
        self._writer = writer

    async def send(self, bodies: Sequence[bytes]) -> None:
        """Send each body as one CopyData, waiting while the peer is slow. Raise
        `ConnectionBroken`."""
        try:
            for body in bodies:
                self._writer.write(_HEADER.pack(b"d", len(body) + 4))
                self._writer.write(body)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None

    async def receive(self) -> bytes:
        """Return the body of the next CopyData.

        Raise `ConnectionBroken` at the end of the copy or the stream, `WalRefused`,
        `MalformedFrame` or `FrameTooLarge`.
        """
        while True:
            kind, body = await self._message()
            if kind == b"d":
                return body
            if kind == b"c":
                raise ConnectionBroken(f"acceptor {self.address} ended the stream")
            # Notices, parameters, CommandComplete and ReadyForQuery carry no log.
            if kind not in b"NSCZ":
                raise MalformedFrame(
                    f"unexpected message of type {kind!r} in the copy from {self.address}"
                )

    async def end_copy(self) -> None:
        """End our side of the copy, and wait until the peer has received all of it. Raise what
        `receive` raises."""
        await self._write(b"c", b"")
        while True:
            kind, _ = await self._message()
            if kind == b"c":
                return

    async def command(self, query: str) -> None:
        """Send a command that starts a copy in both directions, and wait until it has started."""
        await self._write(b"Q", query.encode() + b"\0")
        while True:
            kind, _ = await self._message()
            if kind == b"W":
                return
            if kind not in b"NS":
                raise MalformedFrame(
                    f"{query.split()[0]} was answered with {kind!r}, not with a copy"
                )

    async def query(self, text: str) -> list[tuple[str | None, ...]]:
        """Return the rows of a query as text; NULL is None. Raise what `receive` raises."""
        await self._write(b"Q", text.encode() + b"\0")
        found: list[tuple[str | None, ...]] = []
        while True:
            kind, body = await self._message()
            if kind == b"Z":
                return found
            if kind == b"D":
                found.append(read_row(body))
            elif kind not in b"TCNS":
                raise MalformedFrame(f"{text!r} was answered with {kind!r}")

    async def start_up(self, tenant: str, timeline: str, token: str) -> None:
        """Authenticate: from the startup packet until the acceptor accepts commands."""
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
            # 0 means accepted; 3 requests a password in clear text.
            if kind == b"R" and body != _U32.pack(0):
                if body != _U32.pack(3) or not token:
                    raise PeerRejected(f"acceptor {self.address} requires a token: provide one")
                # Send a token only over TLS, or to an acceptor on this machine.
                is_safe = self._writer.get_extra_info("ssl_object") is not None
                if not is_safe and not is_of_this_machine(self._writer.get_extra_info("peername")):
                    raise PeerRejected(
                        f"acceptor {self.address} requires a token, which would be sent in"
                        " clear text: set tls_certificate, tls_key and tls_authority"
                    )
                await self._write(b"p", token.encode() + b"\0")
            elif kind not in b"RSKN":
                raise MalformedFrame(
                    f"unexpected message of type {kind!r} from acceptor {self.address} at startup"
                )

    async def _write(self, kind: bytes, body: bytes) -> None:
        try:
            self._writer.write(_HEADER.pack(kind, len(body) + 4) + body)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None

    async def _message(self) -> tuple[bytes, bytes]:
        try:
            kind, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            # Check the length before any of the body is kept.
            if length < 4:
                raise MalformedFrame(
                    f"invalid message length {length} from acceptor {self.address}"
                )
            if length - 4 > BODY_BYTES_MAX:
                raise FrameTooLarge(
                    f"message of acceptor {self.address} too large: {length - 4} bytes"
                    f" (limit {BODY_BYTES_MAX}): is it an acceptor?"
                )
            body = await self._reader.readexactly(length - 4)
        except asyncio.IncompleteReadError:
            raise ConnectionBroken(f"acceptor {self.address} closed the connection") from None
        except OSError as error:
            raise ConnectionBroken(f"acceptor {self.address}: {error}") from None
        if kind == b"E":
            refused = _REFUSED_AS.get(_error_field(body, b"C"), WalRefused)
            text = _error_field(body, b"M") or "an error without text"
            raise refused(f"acceptor {self.address}: {text}")
        return kind, body

    def abort(self) -> None:
        """Close the connection immediately."""
        self._writer.transport.abort()


def read_row(body: bytes) -> tuple[str | None, ...]:
    """Parse the cells of a DataRow; NULL is None. Raise `MalformedFrame`."""
    try:
        (count,) = struct.unpack_from("!H", body)
        at, cells = 2, list[str | None]()
        for _ in range(count):
            (size,) = struct.unpack_from("!i", body, at)
            at += 4
            cell = body[at : at + max(size, 0)]
            if len(cell) != max(size, 0):
                raise MalformedFrame(f"a cell of {size} bytes has only {len(cell)}")
            cells.append(None if size < 0 else cell.decode())
            at += len(cell)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"invalid row: {error}") from None
    return tuple(cells)


def _error_field(body: bytes, code: bytes) -> str:
    fields = {part[:1]: part[1:] for part in body.split(b"\0") if part}
    return fields.get(code, b"").decode(errors="replace")


def is_of_this_machine(peer: Any) -> bool:
    """Return whether a socket's peer, as returned by ``getpeername``, must be on this machine."""
    if not isinstance(peer, tuple):
        return True  # a Unix socket
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
    """Connect and authenticate. Raise `ConnectionBroken`, `WalRefused` or `MalformedFrame`."""
    writer = None
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            if tls is None:
                reader, writer = await asyncio.open_connection(address.host, address.port)
            else:
                reader, writer = await _open_encrypted(address, tls)
            raw = writer.get_extra_info("socket")
            if raw is not None:
                # Small messages wait for replies, and Nagle's algorithm would delay them.
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = AcceptorConnection(address, reader, writer)
            await connection.start_up(tenant, timeline, token)
            return connection
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, OSError):  # TimeoutError is an OSError too
            text = str(error) or f"no answer within {timeout_ms} ms"
            raise ConnectionBroken(f"cannot connect to acceptor {address}: {text}") from None
        raise


async def _open_encrypted(
    address: AcceptorAddress, tls: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and start TLS. Raise `OSError` or `PeerRejected`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            await loop.sock_sendall(sock, _SSL_REQUEST)
            # Read exactly one byte: bytes injected after it must not count as sent over TLS.
            answer = await loop.sock_recv(sock, 1)
            if answer != b"S":
                raise PeerRejected(f"acceptor {address} does not support TLS, which is required")
            return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=address.host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def start_push(connection: AcceptorConnection) -> None:
    """Start to exchange messages of version 3, in both directions."""
    await connection.command("START_WAL_PUSH (proto_version '3', allow_timeline_creation 'true')")


async def start_replication(
    connection: AcceptorConnection, start_lsn: int, term: int | None = None
) -> None:
    """Start to read the committed log from `start_lsn` on.

    With a term, read everything that is flushed, for as long as the acceptor is in that term.
    """
    options = f" (term='{term}')" if term is not None else ""
    await connection.command(f"START_REPLICATION PHYSICAL {lsn_text(start_lsn)}{options}")
