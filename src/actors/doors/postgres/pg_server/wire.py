"""Reads messages from and writes bytes to one connection, with optional TLS.

While statements run, a client that sends ahead is not read any further. A client that does not read
delays only itself: a write waits until the socket's buffer has room. A connection whose client
reads nothing for `write_timeout_ms` is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

import anyio

from actors.model.pgwire.decoder import FrontendDecoder
from actors.model.pgwire.messages import (
    ENCRYPTION_ACCEPTED,
    ENCRYPTION_DECLINED,
    FlushOutput,
    FrontendMessage,
    SyncPipeline,
    TerminateSession,
)
from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.sockets import GrowingReader

READ_BYTES: Final = 64 * 1024
"""Bytes read at a time from an authenticated client."""
SEND_BYTES: Final = 64 * 1024
"""Answers are buffered until they reach this size or the client waits for them."""


_LAST: Final = (SyncPipeline, FlushOutput, TerminateSession)
"""Messages that do not start new work."""
_SYNC, _TERMINATE = b"S\0\0\0\4", b"X\0\0\0\4"
_UNREAD: Final = (b"", _SYNC, _TERMINATE, _SYNC + _TERMINATE)


class PgWire:
    """Reads and writes the messages of one connection. Only one task may use it."""

    def __init__(
        self,
        reader: GrowingReader,
        writer: asyncio.StreamWriter,
        settings: Settings,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._write_s = settings.write_timeout_ms / 1000
        self._read_bytes = settings.unproven_bytes_max
        self.decoder = FrontendDecoder(settings.frame_bytes_max, settings.unproven_bytes_max)
        self._messages: deque[FrontendMessage] = deque()
        self._out = bytearray()
        self._ahead = bytearray()
        """Bytes that `watch` has read, for `peek` to decode."""
        self.encrypted = False
        found = writer.get_extra_info("peername")
        self.is_local = not isinstance(found, tuple) or NetworkAddress(host=found[0]).is_local
        """True if the peer is on this machine."""
        self.peer = f"{found[0]}:{found[1]}" if isinstance(found, tuple) else "a local peer"

    def admit(self) -> None:
        """Accept messages of any type and size from now on, because the client is authenticated."""
        self.decoder.admit()
        self._read_bytes = READ_BYTES
        self._reader.widen(READ_BYTES)

    async def receive(self) -> FrontendMessage | None:
        """Wait for the next message and return it; None when the client has disconnected.

        Buffered answers are sent before waiting. Raises `MalformedFrame`, `FrameTooLarge` and
        `ConnectionBroken`.
        """
        message = await self.peek()
        if message is not None:
            self._messages.popleft()
        return message

    async def peek(self) -> FrontendMessage | None:
        """Wait for the next message and return it without consuming it."""
        while not self._messages:
            self._messages.extend(self.decoder.feed(b""))
            if self._messages:
                break
            if self._ahead:
                data, self._ahead = bytes(self._ahead), bytearray()
            else:
                await self.flush()
                data = await self._read()
            if not data:
                return None
            self._messages.extend(self.decoder.feed(data))
        return self._messages[0]

    def ahead(self, count: int) -> list[FrontendMessage]:
        """Return up to `count` messages that have already arrived, without consuming them."""
        # Drain the decoder, which holds on to further messages.
        self._messages.extend(self.decoder.feed(b""))
        return list(islice(self._messages, count))

    def on_leave(self, left: Callable[[], None]) -> None:
        """Call `left` when the client has disconnected and no statement waits behind the running
        one."""

        def ended() -> None:
            # Like PostgreSQL, execute what a client sent before it disconnected.
            try:
                messages = self.ahead(len(self._messages) + len(_LAST) + 1)
            except PenstockError:
                return
            unread = bytes(self._ahead) + self._reader.waiting
            if unread in _UNREAD and all(isinstance(each, _LAST) for each in messages):
                left()

        self._reader.on_end = ended

    def skip(self, count: int) -> None:
        """Consume `count` messages that `ahead` has returned."""
        for _ in range(count):
            self._messages.popleft()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(self._read_bytes)
        except OSError as error:
            raise ConnectionBroken(f"{self.peer}: {error}") from None

    async def watch(self) -> None:
        """Wait until the client disconnects, and keep what it sends until then.

        After `READ_BYTES` nothing more is read, so a disconnect is no longer noticed.
        """
        with suppress(ConnectionBroken):
            while len(self._ahead) < READ_BYTES:
                data = await self._read()
                if not data:
                    return
                self._ahead += data
            await anyio.sleep_forever()

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, buffered. Waits while the client is slow. Raises `ConnectionBroken`."""
        self._out += data
        if len(self._out) >= SEND_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Send the buffered bytes. Raises `ConnectionBroken`."""
        if not self._out:
            return
        # Replace the buffer before waiting: the transport may hold the old one until it is sent.
        out, self._out = self._out, bytearray()
        try:
            self._writer.write(out)
            async with asyncio.timeout(self._write_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionBroken(
                f"{self.peer} read nothing for {self._write_s:.0f} s (write_timeout_ms)"
            ) from None
        except OSError as error:
            raise ConnectionBroken(f"{self.peer}: {error}") from None

    async def encrypt(self, context: ssl.SSLContext | None) -> None:
        """Answer a request for TLS: start it, or decline if `context` is None. Raises
        `ConnectionBroken` and `MalformedFrame`."""
        if context is None:
            self.decoder.decline_encryption()
            await self.send(ENCRYPTION_DECLINED)
            return
        # Check, before answering, that no plaintext followed the request.
        self.decoder.begin_encryption()
        await self.send(ENCRYPTION_ACCEPTED)
        await self.flush()
        try:
            await self._writer.start_tls(context)
        except OSError as error:  # ssl.SSLError is one, too
            raise ConnectionBroken(f"{self.peer}: TLS: {error}") from None
        self.encrypted = True

    def certificate_name(self) -> str:
        """Return the common name in the client's verified certificate; "" if it has none."""
        found = self._writer.get_extra_info("peercert") if self.encrypted else None
        names = [
            value
            for part in (found or {}).get("subject", ())
            for key, value in part
            if key == "commonName"
        ]
        # With several common names, it is unclear which one is the client's.
        return names[0] if len(names) == 1 else ""

    async def close(self) -> None:
        """Send the buffered bytes and close the connection. Abort it if the peer does not read."""
        try:
            await self.flush()
            self._writer.close()
            async with asyncio.timeout(self._write_s):
                await self._writer.wait_closed()
        except (ConnectionBroken, OSError, TimeoutError):
            self._writer.transport.abort()
