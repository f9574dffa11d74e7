"""One socket of PostgreSQL's protocol on the acceptor's side: messages in, bytes out, with TLS.

While `BUFFER_BYTES_MAX` wait to be taken the socket is not read (backpressure). Until `widen` is
called, the limit of the buffer and of a message is ``unproven_bytes_max``. A peer is disconnected
if it sends nothing for ``wal_idle_timeout_ms`` while a task waits for it, or accepts nothing for
``write_timeout_ms``. One task receives, one sends.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

from actors.model.pgwire.decoder import packet_bytes
from actors.model.pgwire.messages import encode_copy_data
from actors.runtime.errors import ConnectionBroken, MalformedFrame, PenstockError
from actors.runtime.settings import Settings
from actors.wal.receiver import CopyEnd
from actors.wal.startup import COPY_BYTES_MAX, body_bytes

BUFFER_BYTES_MAX: Final = 2 * COPY_BYTES_MAX
TLS_SHUTDOWN_S: Final = 2.0


class PgStream(asyncio.Protocol):
    """Reads and writes the messages of one connection."""

    def __init__(self, settings: Settings) -> None:
        self._idle_s = settings.wal_idle_timeout_ms / 1000
        self._write_s = settings.write_timeout_ms / 1000
        self._buffer = bytearray()
        """Received bytes that have not been taken yet."""
        self._buffer_max = self._message_max = settings.unproven_bytes_max
        """Limits of the buffer and of a message; `widen` raises them."""
        self._transport: Any = None
        """The transport, once connected; TLS replaces it."""
        self._wanted: asyncio.Future[None] | None = None
        """Future of the task that waits for bytes."""
        self._waits_since_s: float | None = None
        """Time since which a task has been waiting for bytes."""
        self._watch: asyncio.TimerHandle | None = None
        """Checks now and then how long a task has waited; a timer for each wait would cost more."""
        self._is_idle = False
        """True once a task has waited for too long."""
        self._room = asyncio.Event()
        """Set while the transport has room for more bytes."""
        self._room.set()
        self._gone = asyncio.Event()
        """Set once the transport is gone."""
        self._eof = False
        """True once no more bytes can arrive."""
        self._held = False
        """True while reading is paused because the buffer is full."""
        self.peer = "a peer"
        """The peer's address, for logs and errors."""

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """Keep the transport, and the peer's address."""
        self._transport = transport
        found = transport.get_extra_info("peername")
        if isinstance(found, tuple):
            self.peer = f"{found[0]}:{found[1]}"

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes, and pause reading if the buffer is full."""
        self._buffer += data
        if len(self._buffer) >= self._buffer_max and not self._held:
            self._held = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Record that the peer sends nothing more. Return whether it may still read, which TLS does
        not allow."""
        self._eof = True
        self._wake()
        return self._transport.get_extra_info("ssl_object") is None

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake up all waiting tasks, because the transport is gone."""
        self._eof = True
        self._gone.set()
        if self._watch is not None:
            self._watch.cancel()
        self._wake()
        self._room.set()

    def pause_writing(self) -> None:
        """Make senders wait, because the transport's buffer is full."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Let senders continue."""
        self._room.set()

    def widen(self) -> None:
        """Accept messages of any size that the protocol allows, because the peer was
        authenticated."""
        self._buffer_max, self._message_max = BUFFER_BYTES_MAX, COPY_BYTES_MAX

    # -- receiving --

    async def _filled(self, count: int) -> bool:
        """Wait for `count` bytes. Return False if the stream ends before the first. Raise
        `ConnectionBroken`."""
        while len(self._buffer) < count:
            if self._eof:
                if self._buffer:
                    raise ConnectionBroken(f"{self.peer} disconnected in the middle of a message")
                return False
            # Reading was paused when the buffer was full, but the next message is not complete yet.
            if self._held:
                self._held = False
                self._transport.resume_reading()
            await self._bytes()
            if self._is_idle:
                raise ConnectionBroken(
                    f"{self.peer} sent nothing for {self._idle_s:.0f} s (wal_idle_timeout_ms)"
                )
        return True

    async def _bytes(self) -> None:
        """Wait until bytes arrive, or none will."""
        loop = asyncio.get_running_loop()
        self._wanted = loop.create_future()
        self._waits_since_s = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._idle_s, self._look)
        try:
            await self._wanted
        finally:
            self._wanted = self._waits_since_s = None

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        waits = self._wanted is not None and not self._wanted.done()
        since_s = self._waits_since_s if waits else None
        since_s = loop.time() if since_s is None else since_s
        left_s = since_s + self._idle_s - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._look)
        else:
            self._is_idle = True
            self._wake()

    async def packet(self) -> bytes | None:
        """Read a startup packet without its length, or return None at the end.

        Raise `ConnectionBroken`, `MalformedFrame` or `FrameTooLarge`.
        """
        if not await self._filled(4):
            return None
        # The length is checked before any of the body is awaited.
        size = packet_bytes(bytes(self._buffer[:4]))
        await self._filled(4 + size)
        packet = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return packet

    async def message(self) -> tuple[bytes, bytes] | None:
        """Read the next message as (type, body), or return None at the end. Raise what `packet`
        raises."""
        if len(self._buffer) < 5 and not await self._filled(5):
            return None
        kind, size = body_bytes(bytes(self._buffer[:5]), self._message_max)
        if len(self._buffer) < 5 + size:
            await self._filled(5 + size)
        # Copy only once: slicing a bytearray would make another copy.
        body = bytes(memoryview(self._buffer)[5 : 5 + size])
        del self._buffer[: 5 + size]
        return kind, body

    async def next_copy(self) -> bytes | CopyEnd:
        """Return the body of the next CopyData, or how the peer ended; see
        `ReceiverConnection.next_copy`."""
        found = await self.message()
        match found:
            case None:
                return CopyEnd.EOF
            case (b"d", body):
                return body
            case (b"c", _):
                return CopyEnd.DONE
            case (b"f", _):
                return CopyEnd.FAIL
            case (b"X", _):
                return CopyEnd.TERMINATE
            case (kind, _):
                raise MalformedFrame(f"unexpected message of type {kind!r} inside a copy")

    # -- sending --

    async def send(self, data: bytes) -> None:
        """Send the data, waiting while the peer is slow. Raise `ConnectionBroken`."""
        if self._gone.is_set() or self._transport.is_closing():
            raise ConnectionBroken(f"{self.peer} is gone")
        self._transport.write(data)
        # Backpressure: the transport's buffer is full.
        if not self._room.is_set():
            try:
                async with asyncio.timeout(self._write_s):
                    await self._room.wait()
            except TimeoutError:
                raise ConnectionBroken(
                    f"{self.peer} accepted nothing for {self._write_s:.0f} s (write_timeout_ms)"
                ) from None
            if self._gone.is_set():
                raise ConnectionBroken(f"{self.peer} is gone")

    async def send_copy(self, data: bytes) -> None:
        """Send one CopyData, waiting while the peer is slow; see `ReceiverConnection.send_copy`."""
        await self.send(encode_copy_data(data))

    async def begin_tls(self, context: ssl.SSLContext) -> None:
        """Encrypt everything that follows. Raise `ConnectionBroken` or `MalformedFrame`."""
        # An attacker in the middle could have injected these bytes before the encrypted ones.
        if self._buffer:
            raise MalformedFrame(f"{self.peer} sent unencrypted bytes before TLS started")
        try:
            # This protocol object stays; only its transport changes.
            self._transport = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                context,
                server_side=True,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
        except OSError as error:  # ssl.SSLError is an OSError too
            raise ConnectionBroken(f"{self.peer}: TLS: {error}") from None

    # -- ending --

    def abort(self) -> None:
        """Close immediately. Bytes that have not been sent yet are lost."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self, limit_s: float, last: bytes = b"") -> None:
        """Send `last` and the buffered bytes, for at most `limit_s`, and close."""
        try:
            async with asyncio.timeout(limit_s):
                if last and not self._transport.is_closing():
                    self._transport.write(last)
                self._transport.close()
                await self._gone.wait()
        except (TimeoutError, PenstockError):
            self._transport.abort()
