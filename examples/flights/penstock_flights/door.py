"""A small client for the PostgreSQL protocol, which connects the demo to its own service.

It supports only what the demo needs: simple queries with results in text format, and COPY into a
table. So the demo does not depend on a driver. User programs use libpq, psycopg, JDBC and others.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, Self

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from actors.runtime.errors import ConnectionBroken, PenstockError, RemoteProtocolError

_VERSION: Final = 3 << 16
_HEADER: Final = struct.Struct("!cI")
_MESSAGE_BYTES_MAX: Final = 64 << 20
_COPY_BYTES: Final = 1 << 16
"""Data bytes in one message of a COPY."""


class StatementRefused(PenstockError):
    """The service rejected a statement. The text is the service's message, with the SQLSTATE."""


class DoorResult(msgspec.Struct):
    """The result of one statement."""

    tag: str = ""
    """The command tag."""
    columns: tuple[str, ...] = ()
    """Column names; empty if the statement returns no rows."""
    rows: list[tuple[str | None, ...]] = []
    """Rows in text format."""


class _Message(NamedTuple):
    kind: bytes
    body: bytes


class DoorConnection:
    """A connection, for one statement at a time."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        """Use `connect`."""
        self._stream = stream
        self._reader = BufferedByteReceiveStream(stream)

    @classmethod
    async def connect(cls, address: str, user: str = "demo") -> Self:
        """Connect to ``host:port``. Raises `ConnectionBroken` and `StatementRefused`."""
        host, _, port = address.rpartition(":")
        try:
            stream = await anyio.connect_tcp(host, int(port))
        except OSError as error:
            raise ConnectionBroken(f"{address}: {error}") from None
        made = cls(stream)
        body = struct.pack("!I", _VERSION) + b"user\0" + user.encode() + b"\0\0"
        await made._send_raw(struct.pack("!I", len(body) + 4) + body)
        # A rejected login is reported like an error of a statement.
        try:
            await made._until_ready()
        except BaseException:
            await stream.aclose()
            raise
        return made

    async def aclose(self) -> None:
        """End the session."""
        with anyio.move_on_after(1, shield=True):
            try:
                await self._send(b"X")
                await self._stream.aclose()
            except (ConnectionBroken, OSError):
                pass  # the connection is already closed

    async def query(self, text: str) -> list[DoorResult]:
        """Execute the statements of a text, and return a result for each. Raises `StatementRefused`
        and `ConnectionBroken`."""
        await self._send(b"Q", text.encode() + b"\0")
        return await self._until_ready()

    async def copy_in(self, text: str, data: bytes) -> DoorResult:
        """Execute a ``COPY … FROM STDIN`` with rows in text format. Raises the same as `query`."""
        await self._send(b"Q", text.encode() + b"\0")
        # If the statement fails, an error arrives instead of CopyInResponse.
        message = await self._receive()
        if message.kind == b"G":
            for start in range(0, len(data), _COPY_BYTES):
                await self._send(b"d", data[start : start + _COPY_BYTES])
            await self._send(b"c")
            message = await self._receive()
        (result,) = await self._until_ready(message)
        return result

    # -- messages ------------------------------------------------------------------------------

    async def _until_ready(self, first: _Message | None = None) -> list[DoorResult]:
        """Read results until the service is ready for the next statement. `first`: a message that
        was already read."""
        found: list[DoorResult] = []
        current = DoorResult(rows=[])
        refused: StatementRefused | None = None
        message = first
        # An error ends the statements of a text, but the response ends only with ReadyForQuery.
        while message is None or message.kind != b"Z":
            if message is not None:
                match message.kind:
                    case b"T":
                        current.columns = _column_names(message.body)
                    case b"D":
                        current.rows.append(_row(message.body))
                    case b"C":
                        current.tag = message.body[:-1].decode()
                        found.append(current)
                        current = DoorResult(rows=[])
                    case b"E":
                        refused = _refusal(message.body)
                    case b"R" if message.body != struct.pack("!I", 0):
                        raise RemoteProtocolError("the service requires authentication")
            message = await self._receive()
        if refused is not None:
            raise refused
        return found

    async def _receive(self) -> _Message:
        try:
            kind, length = _HEADER.unpack(await self._reader.receive_exactly(_HEADER.size))
            # Check the length before allocating memory for it.
            if not 4 <= length <= _MESSAGE_BYTES_MAX:
                raise RemoteProtocolError(f"invalid length of a message: {length} bytes")
            return _Message(kind, await self._reader.receive_exactly(length - 4))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            raise ConnectionBroken("the service closed the connection") from None

    async def _send(self, kind: bytes, body: bytes = b"") -> None:
        await self._send_raw(_HEADER.pack(kind, len(body) + 4) + body)

    async def _send_raw(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, OSError) as error:
            raise ConnectionBroken(f"the service closed the connection: {error}") from None


def _column_names(body: bytes) -> tuple[str, ...]:
    names, at = [], 2
    for _ in range(int.from_bytes(body[:2], "big")):
        end = body.index(b"\0", at)
        names.append(body[at:end].decode())
        at = end + 1 + 18  # skip the column's type and origin
    return tuple(names)


def _row(body: bytes) -> tuple[str | None, ...]:
    values: list[str | None] = []
    at = 2
    for _ in range(int.from_bytes(body[:2], "big")):
        (length,) = struct.unpack_from("!i", body, at)
        at += 4
        values.append(None if length < 0 else body[at : at + length].decode())
        at += max(length, 0)
    return tuple(values)


def _refusal(body: bytes) -> StatementRefused:
    fields = {part[:1]: part[1:].decode() for part in body.split(b"\0") if part}
    return StatementRefused(f"{fields.get(b'M', '')} (SQLSTATE {fields.get(b'C', '')})")
