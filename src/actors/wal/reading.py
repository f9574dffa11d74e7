"""Reading a log from an acceptor (START_REPLICATION): bytes in order, without a gap.

Source: PostgreSQL's documentation, "Streaming Replication Protocol": XLogData, keepalive, standby
status update.
"""

from __future__ import annotations

import struct
from typing import Final

from actors.errors import MalformedFrame
from actors.wal.dialling import AcceptorConnection, start_replication
from actors.wal.lsn import lsn_text

_DATA: Final = struct.Struct("!cQQq")
_KEEPALIVE: Final = struct.Struct("!cQqB")
_STATUS: Final = struct.Struct("!cQQQqB")


class LogReader:
    """Reads a log from `next_lsn` on."""

    def __init__(self, connection: AcceptorConnection, start_lsn: int) -> None:
        self._connection = connection
        self.next_lsn = start_lsn
        self.known_lsn = start_lsn
        """End of the log at the acceptor, by its last report."""
        self.answers_asked = False
        """True if the acceptor asked for a `report`."""

    async def start(self, term: int | None = None) -> None:
        """Start the stream. Raises the errors of `AcceptorConnection`."""
        await start_replication(self._connection, self.next_lsn, term)

    async def next(self) -> bytes:
        """Return the next bytes; empty for a keepalive. Raises as `AcceptorConnection.receive`, and
        `MalformedFrame` for a gap."""
        body = await self._connection.receive()
        if body[:1] == b"w" and len(body) >= _DATA.size:
            _, begin, end, _ = _DATA.unpack_from(body)
            if begin != self.next_lsn:
                raise MalformedFrame(
                    f"log at {lsn_text(begin)} came, and {lsn_text(self.next_lsn)} is next"
                )
            wal = body[_DATA.size :]
            self.next_lsn += len(wal)
            self.known_lsn = max(self.known_lsn, end, self.next_lsn)
            return wal
        if body[:1] == b"k" and len(body) == _KEEPALIVE.size:
            _, end, _, asked = _KEEPALIVE.unpack(body)
            self.known_lsn = max(self.known_lsn, end)
            self.answers_asked = bool(asked)
            return b""
        raise MalformedFrame(f"{body[:1]!r} of {len(body)} bytes is no message of a stream")

    async def report(self, flushed_lsn: int) -> None:
        """Report that all before `flushed_lsn` is durable here."""
        status = _STATUS.pack(b"r", flushed_lsn, flushed_lsn, flushed_lsn, 0, 0)
        self.answers_asked = False
        await self._connection.send([status])

    def abort(self) -> None:
        """Close at once."""
        self._connection.abort()
