"""Reads COPY from PostgreSQL in large pieces: many messages in one buffer (`CopyFrames`).

Theory of operation. libpq returns one row of a COPY per call, which costs more than everything else
that is done with a row. So on an unencrypted connection `RawCopy` sends the query itself, and reads
libpq's socket into one buffer. With TLS, libpq reads (`LibpqCopy`).

Rules. Nothing blocks. Every wait can be cancelled without losing data, because data that was read
stays in the buffer. The buffer is bounded: only a single message that exceeds it makes it grow, up
to `MESSAGE_BYTES_MAX`. Frames that were returned are never overwritten.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Final, Protocol

import anyio
import msgspec
import numpy as np
from anyio.lowlevel import checkpoint
from psycopg import OperationalError
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from actors.connectors.sources.postgres_errors import (
    ServerRefused,
    connection_lost,
    refusal,
    refused_raw,
)
from actors.connectors.sources.source import SourceUnreachable
from actors.model.pgwire.encoded_values import PAD_BYTES, ByteValues, Places, be32
from actors.runtime.errors import PenstockError

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size of one row or one change."""
_TURN_BYTES_MAX: Final = 512 * 1024
"""Maximum number of bytes read in one turn of the event loop."""
_HEADER_BYTES: Final = 5
# Pause between reads in the background, so that pieces get larger.
_PACE_S: Final = 0.001
_ASK_AGAIN_S_MIN, _ASK_AGAIN_S_MAX = 0.001, 0.25
_DATA: Final = ord("d")
_LENGTH = struct.Struct(">I")
_CHAIN_BYTES_MIN: Final = 4096
"""Below this size, walking from frame to frame is faster."""


class CopyFrames(msgspec.Struct):
    """Payloads of CopyData messages: ``data[starts[i]:ends[i]]``, in ascending order. `PAD_BYTES`
    are readable after the last one."""

    data: ByteValues
    starts: Places
    ends: Places

    def __len__(self) -> int:
        return len(self.starts)


def chain(data: ByteValues, place: int, end: int) -> tuple[Places, int]:
    """Return the starts of consecutive complete CopyData frames from `place` on, and the end of the
    last one.

    May return fewer frames than there are, but always a prefix of those that walking from frame to
    frame would find.
    """
    none = np.empty(0, np.int64)
    if end - place < _CHAIN_BYTES_MIN:
        return none, place
    # Find all bytes that could start a frame at once. Most bytes that do not start one do not lead
    # to another candidate.
    found = np.flatnonzero(data[place : end - _HEADER_BYTES + 1] == _DATA) + place
    ends = found + 1 + be32(data, found + 1)
    leads = (ends >= found + _HEADER_BYTES) & (ends <= end)
    leads[leads] = (data[ends[leads]] == _DATA) | (ends[leads] == end)
    found, ends = found[leads], ends[leads]
    if not len(found) or int(found[0]) != place:
        return none, place
    broken = np.flatnonzero(found[1:] != ends[:-1])
    count = int(broken[0]) + 1 if len(broken) else len(found)
    return found[:count], int(ends[count - 1])


class CopyStream(Protocol):
    """A COPY in progress, with a buffer of its frames."""

    ended: bool
    """True if nothing follows the buffer's contents."""

    async def fill(self) -> CopyFrames:
        """Wait for data, read as much as fits the buffer, and return the frames that became
        complete.

        A cancelled call has read nothing. Raises `SourceUnreachable` and `ServerRefused`.
        """
        ...

    def poll(self) -> CopyFrames:
        """Read without waiting, and return the frames that became complete."""
        ...

    def read_ahead(self) -> None:
        """From now on, read in the background until the buffer is full."""
        ...

    def frames(self) -> CopyFrames:
        """Return all complete frames in the buffer."""
        ...

    def take(self, count: int) -> None:
        """Remove the first frames from the buffer. The others move to a new buffer."""
        ...

    @property
    def full(self) -> bool:
        """Return whether the buffer has no room until frames are taken."""
        ...

    def send(self, payload: bytes) -> None:
        """Send a CopyData message, at once or together with a later one. Raises
        `SourceUnreachable`."""
        ...

    def end(self) -> None:
        """Release the copy's own socket and timer. The connection stays open."""
        ...


def _view(data: ByteValues) -> memoryview:
    return data.data


class _Buffer:
    """Data that was read and not yet taken: consecutive frames, of which the last may be
    incomplete."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # The bytes; `size` of them are filled.
        self.data: ByteValues = np.empty(bytes_max + PAD_BYTES, np.uint8)
        self.size = 0


class RawCopy:
    """Reads libpq's socket directly. The buffer holds the protocol's frames as they arrive."""

    def __init__(self, connection: PGconn, bytes_max: int) -> None:
        # A descriptor of our own: libpq may close its descriptor while the event loop waits for
        # this one.
        self._socket = socket.socket(fileno=os.dup(connection.socket))
        self._socket.setblocking(False)
        self._buffer = _Buffer(bytes_max)
        self._scanned = 0
        """Position in the buffer up to which frames have been found."""
        self._starts: list[Places] = []
        """Starts of payloads that were returned, one array per read."""
        self._fresh: list[Places] = []
        """Starts of payloads that have not been returned yet."""
        self._ahead: asyncio.AbstractEventLoop | None = None
        """Event loop that reads in the background; None if it does not."""
        # True while the event loop watches the socket for data.
        self._watched = False
        # Timer that resumes watching after a pause.
        self._timer: asyncio.TimerHandle | None = None
        # Wakes `fill` when the background read has found something.
        self._come: asyncio.Future[None] | None = None
        # Error of the last read, raised after the frames before it were returned.
        self._failure: PenstockError | None = None
        # Data that the socket has not accepted yet.
        self._unsent = b""
        # The server's error; raised when the server is ready for another query.
        self._refusal: PenstockError | None = None
        # True once the server has started the COPY.
        self.began = False
        # True once the COPY has ended and the connection can be used again.
        self.ended = False

    @classmethod
    async def begin(cls, connection: PGconn, sql: str, bytes_max: int) -> RawCopy:
        """Send the query and wait until the COPY starts. Raises `ServerRefused` and
        `SourceUnreachable`."""
        copy = cls(connection, bytes_max)
        try:
            query = sql.encode() + b"\0"
            # libpq never learns about this query: its buffer is empty now, and the answer ends when
            # the server is idle again (ReadyForQuery).
            copy._write(b"Q" + _LENGTH.pack(len(query) + 4) + query)
            while not copy.began and not copy.ended:
                await copy.fill()
        except BaseException:
            copy.end()
            raise
        return copy

    async def fill(self) -> CopyFrames:
        await checkpoint()  # lets other tasks run even if the socket always has data
        self._write(b"")
        while not self._attempt():
            if self._ahead is None:
                await ready(self._socket.fileno())
            else:
                self._come = self._ahead.create_future()
                await self._come
        return self._tell()

    def poll(self) -> CopyFrames:
        self._write(b"")
        self._attempt()
        return self._tell()

    def _attempt(self) -> bool:
        """Read the socket's data; return whether there is something to return or to raise."""
        if self._failure is None and not self.full:
            try:
                self._read()
            except PenstockError as error:  # frames before the error are returned first
                self._failure = error
        # A full buffer counts, because the caller must take frames before more data can arrive.
        return bool(self._fresh) or self.full or self.ended or self._failure is not None

    def _tell(self) -> CopyFrames:
        new, self._fresh = self._fresh, []
        if not new and self._failure is not None:
            raise self._failure
        self._starts += new
        return self._frames(new)

    # -- read ahead --------------------------------------------------------------------------

    def read_ahead(self) -> None:
        # Otherwise the server would wait for us whenever the kernel's small buffers are full.
        self._ahead = asyncio.get_running_loop()
        self._watch()

    def _watch(self) -> None:
        """Read as soon as the socket has data."""
        self._timer = None
        if self._ahead is not None and not self._watched and not self.full:
            self._watched = True
            self._ahead.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._ahead is not None, "read_ahead was called"
        self._unwatch()
        # A busy server sends small amounts often; a pause makes the pieces larger.
        if not self._attempt() or self._failure is None:
            self._timer = self._ahead.call_later(_PACE_S, self._watch)
        if self._come is not None and not self._come.done():
            self._come.set_result(None)

    def _unwatch(self) -> None:
        if self._ahead is not None and self._watched:
            self._ahead.remove_reader(self._socket.fileno())
        self._watched = False

    def _read(self) -> bool:
        """Read the socket's data; return whether there was any."""
        buffer, turn = self._buffer, 0
        while not self.full:
            space = _view(buffer.data)[buffer.size : len(buffer.data) - PAD_BYTES]
            try:
                count = self._socket.recv_into(space)
            except BlockingIOError:
                break
            except OSError as error:
                raise connection_lost(str(error)) from None
            if not count:
                self._scan()
                raise self._refusal or connection_lost("server closed the connection unexpectedly")
            buffer.size += count
            turn += count
            if turn >= _TURN_BYTES_MAX:
                break
        if turn:
            self._scan()
        return turn > 0 or self.full

    @property
    def full(self) -> bool:
        return self._buffer.size >= len(self._buffer.data) - PAD_BYTES

    def _scan(self) -> None:
        """Find the frames in the data that was read last."""
        buffer = self._buffer
        data, end, place = _view(buffer.data), buffer.size, self._scanned
        read, found, length = _LENGTH.unpack_from, [], 0
        many, place = chain(buffer.data, place, end)
        while place + _HEADER_BYTES <= end:
            length = read(data, place + 1)[0] + 1
            if place + length > end:
                break
            found.append(place + _HEADER_BYTES)
            place += length
        else:
            length = 0
        self._scanned = place
        starts = np.concatenate([many + _HEADER_BYTES, np.array(found, np.int64)])
        others = buffer.data[starts - _HEADER_BYTES] != _DATA
        if others.any():
            for start in starts[others].tolist():
                self._other(start)
            starts = starts[~others]
        if len(starts):
            self._fresh.append(starts)
        if place + length > len(buffer.data) - PAD_BYTES and not self._starts and not self._fresh:
            self._grow(length)

    def _other(self, start: int) -> None:
        """Handle a frame that is not CopyData."""
        data = self._buffer.data
        kind = chr(data[start - _HEADER_BYTES])
        if kind in "HW":
            self.began = True
        elif kind == "E":
            end = start - 4 + _LENGTH.unpack_from(_view(data), start - 4)[0]
            self._refusal = refused_raw(data[start:end].tobytes())
            if isinstance(self._refusal, SourceUnreachable):
                raise self._refusal
        elif kind == "Z":
            self.ended = True
            if self._refusal is not None:  # the connection is ready for another query
                raise self._refusal
        elif kind not in "cCNSAT":
            raise connection_lost(f"the server sent a message of type {kind!r} during a COPY")

    def _grow(self, length: int) -> None:
        """Make room for a message that exceeds the buffer."""
        if length > MESSAGE_BYTES_MAX:
            raise connection_lost(f"row too large: {length} bytes (limit {MESSAGE_BYTES_MAX})")
        self._move(self._scanned, length)

    def _move(self, start: int, room: int) -> None:
        """Move the data from `start` on to the front of a new buffer."""
        old = self._buffer
        # Always use a new buffer: returned frames still point into the old one.
        self._buffer = fresh = _Buffer(old.bytes_max)
        rest = old.size - start
        if max(room, rest) > old.bytes_max:
            fresh.data = np.empty(max(room, rest) + PAD_BYTES, np.uint8)
        fresh.data[:rest] = old.data[start : old.size]
        fresh.size = rest
        self._scanned -= start
        self._starts = [places - start for places in self._starts]
        self._fresh = [places - start for places in self._fresh]

    def frames(self) -> CopyFrames:
        """Return all complete frames that were returned before and not taken."""
        return self._frames(self._starts)

    def _frames(self, found: list[Places]) -> CopyFrames:
        starts = np.concatenate([np.empty(0, np.int64), *found])
        return CopyFrames(
            self._buffer.data, starts, starts - 4 + be32(self._buffer.data, starts - 4)
        )

    def take(self, count: int) -> None:
        """Remove the first frames from the buffer. Frames that were returned are never
        overwritten."""
        left = np.concatenate([np.empty(0, np.int64), *self._starts])[count:]
        rest = np.concatenate([left, *self._fresh])
        start = int(rest[0]) - _HEADER_BYTES if len(rest) else self._scanned
        self._starts = [left] if len(left) else []
        length = 0
        if not len(rest) and self._buffer.size - start >= _HEADER_BYTES:
            length = _LENGTH.unpack_from(_view(self._buffer.data), start + 1)[0] + 1
        if length > MESSAGE_BYTES_MAX:
            self._grow(length)
        self._move(start, length)
        if self._timer is None:
            self._watch()

    def send(self, payload: bytes) -> None:
        self._write(b"d" + _LENGTH.pack(len(payload) + 4) + payload)

    def _write(self, data: bytes) -> None:
        self._unsent += data
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                break
            except OSError as error:
                raise connection_lost(str(error)) from None
            self._unsent = self._unsent[sent:]

    def end(self) -> None:
        self._unwatch()
        self._ahead = None
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()


class LibpqCopy:
    """Reads through libpq, one call per message."""

    def __init__(self, connection: PGconn, bytes_max: int) -> None:
        self._connection = connection
        self._bytes_max = bytes_max
        # Messages that were read and not yet taken, and their total size.
        self._parts: list[memoryview] = []
        self._bytes = 0
        # True once libpq has returned the last message of the COPY.
        self._read_out = False
        # True once the final results were read, too.
        self.ended = False

    @classmethod
    async def begin(cls, connection: PGconn, sql: str, bytes_max: int) -> LibpqCopy:
        """Send the query and wait until the COPY starts. Raises `ServerRefused` and
        `SourceUnreachable`."""
        try:
            connection.send_query(sql.encode())
            while connection.flush():
                await ready(connection.socket, writable=True)
            result = await next_result(connection)
            if result is not None and result.status == ExecStatus.FATAL_ERROR:
                while await next_result(connection) is not None:
                    pass
                raise refusal(result)
        except OperationalError as error:
            raise connection_lost(str(error)) from None
        return cls(connection, bytes_max)

    async def fill(self) -> CopyFrames:
        await checkpoint()
        before = len(self._parts)
        patience = _Patience()
        try:
            while not self._read() and not self._read_out:
                await patience.ready(self._connection.socket)
            if len(self._parts) == before and not self.ended:
                await self._finish()
        except OperationalError as error:
            raise connection_lost(str(error)) from None
        return self._frames(self._parts[before:])

    def poll(self) -> CopyFrames:
        before = len(self._parts)
        try:
            self._read()
        except OperationalError as error:
            raise connection_lost(str(error)) from None
        return self._frames(self._parts[before:])

    def read_ahead(self) -> None:
        """Do nothing: libpq's own buffer grows as needed."""

    def _read(self) -> bool:
        turn = 0
        if self._read_out:
            return False
        self._connection.flush()
        self._connection.consume_input()
        while turn < _TURN_BYTES_MAX and not self.full:
            size, data = self._connection.get_copy_data(1)
            if size <= 0:
                self._read_out = size < 0
                break
            self._parts.append(data)
            self._bytes += size
            turn += size
        return turn > 0 or self.full

    async def _finish(self) -> None:
        """Read the results that end the COPY. Raises `ServerRefused` and `SourceUnreachable`."""
        refused: ServerRefused | None = None
        while (result := await next_result(self._connection)) is not None:
            if result.status == ExecStatus.FATAL_ERROR:
                refused = refusal(result)
        self.ended = True
        if refused is not None:
            raise connection_lost(str(refused)) if refused.sqlstate.startswith("57P") else refused

    @property
    def full(self) -> bool:
        return self._bytes >= self._bytes_max

    def frames(self) -> CopyFrames:
        """Return all complete frames in the buffer."""
        return self._frames(self._parts)

    def _frames(self, parts: list[memoryview]) -> CopyFrames:
        joined = b"".join([*parts, bytes(PAD_BYTES)])
        ends = np.cumsum(np.array([len(part) for part in parts], np.int64))
        starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
        return CopyFrames(np.frombuffer(joined, np.uint8), starts, ends)

    def take(self, count: int) -> None:
        del self._parts[:count]
        self._bytes = sum(map(len, self._parts))

    def send(self, payload: bytes) -> None:
        try:
            self._connection.put_copy_data(payload)
            self._connection.flush()
        except OperationalError as error:
            raise connection_lost(str(error)) from None

    def end(self) -> None:
        self._parts = []


# -- waiting for libpq ------------------------------------------------------------------------


async def ready(descriptor: int, *, writable: bool = False) -> None:
    """Wait until the descriptor is readable or, on request, writable."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def come() -> None:
        if not waiter.done():
            waiter.set_result(None)

    add, remove = (
        (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    )
    add(descriptor, come)
    try:
        await waiter
    finally:
        remove(descriptor)


async def next_result(connection: PGconn) -> PGresult | None:
    """Return the next result of a query; None after the last one."""
    patience = _Patience()
    while connection.is_busy():
        await patience.ready(connection.socket)
        connection.consume_input()
    return connection.get_result()


class _Patience:
    """Waits for a socket that libpq reads."""

    def __init__(self) -> None:
        # Time until libpq is polled next; grows up to `_ASK_AGAIN_S_MAX`.
        self._wait_s = _ASK_AGAIN_S_MIN

    async def ready(self, descriptor: int) -> None:
        """Wait until data may have arrived."""
        # Under TLS, libpq may hold decrypted bytes that the socket no longer shows. So poll, too,
        # at growing intervals.
        with anyio.move_on_after(self._wait_s):
            await ready(descriptor)
        self._wait_s = min(2 * self._wait_s, _ASK_AGAIN_S_MAX)
