"""The bytes of one connection: messages in, bytes out, TLS between.

A client that sends faster than its statements run is not read meanwhile, and one that does not read
holds back only itself: a write waits until the socket's buffer has room. A connection that takes
nothing for `write_timeout_ms` ends.
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
"""Bytes read at a time from a client that has proved itself."""
SEND_BYTES: Final = 64 * 1024
"""Answers wait until so many bytes are together, or the client waits for them."""


_LAST: Final = (SyncPipeline, FlushOutput, TerminateSession)
"""Messages that ask for nothing."""
_SYNC, _TERMINATE = b"S\0\0\0\4", b"X\0\0\0\4"
_UNREAD: Final = (b"", _SYNC, _TERMINATE, _SYNC + _TERMINATE)


class PgWire:
    """Reads and writes the messages of one connection. One task uses it."""

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
        """Bytes that were read while the client was watched."""
        self.encrypted = False
        found = writer.get_extra_info("peername")
        self.is_local = not isinstance(found, tuple) or NetworkAddress(host=found[0]).is_local
        """True if the peer is on this machine."""
        self.peer = f"{found[0]}:{found[1]}" if isinstance(found, tuple) else "a local peer"

    def admit(self) -> None:
        """Take messages of any type and size from now on: the client has proved itself."""
        self.decoder.admit()
        self._read_bytes = READ_BYTES
        self._reader.widen(READ_BYTES)

    async def receive(self) -> FrontendMessage | None:
        """Return the next message; None at the connection's end.

        Sends what waits before it waits itself. Raises `MalformedFrame`, `FrameTooLarge` and
        `ConnectionBroken`.
        """
        message = await self.peek()
        if message is not None:
            self._messages.popleft()
        return message

    async def peek(self) -> FrontendMessage | None:
        """Return the next message and keep it for `receive`."""
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
        """Return up to so many of the messages that have come already, without taking them."""
        # The decoder keeps what it was not asked for, so it is asked for all that it has.
        self._messages.extend(self.decoder.feed(b""))
        return list(islice(self._messages, count))

    def on_leave(self, left: Callable[[], None]) -> None:
        """Have `left` called when the client has ended the connection and asks for nothing more
        than what runs."""

        def ended() -> None:
            # What a client sent ahead of its end is carried out, as PostgreSQL does.
            try:
                messages = self.ahead(len(self._messages) + len(_LAST) + 1)
            except PenstockError:
                return
            unread = bytes(self._ahead) + self._reader.waiting
            if unread in _UNREAD and all(isinstance(each, _LAST) for each in messages):
                left()

        self._reader.on_end = ended

    def skip(self, count: int) -> None:
        """Drop so many messages that `ahead` has shown."""
        for _ in range(count):
            self._messages.popleft()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(self._read_bytes)
        except OSError as error:
            raise ConnectionBroken(f"{self.peer}: {error}") from None

    async def watch(self) -> None:
        """Wait until the client has ended the connection; keep what it sends until then. A client
        that sends much is held back, and not watched any more."""
        with suppress(ConnectionBroken):
            while len(self._ahead) < READ_BYTES:
                data = await self._read()
                if not data:
                    return
                self._ahead += data
            await anyio.sleep_forever()

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes to what is sent. Waits while the client is slow. Raises `ConnectionBroken`."""
        self._out += data
        if len(self._out) >= SEND_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Send what waits. Raises `ConnectionBroken`."""
        if not self._out:
            return
        # A new buffer before the wait: the transport may keep the old one until it is sent.
        out, self._out = self._out, bytearray()
        try:
            self._writer.write(out)
            async with asyncio.timeout(self._write_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionBroken(
                f"{self.peer} took nothing for {self._write_s:.0f} s (write_timeout_ms)"
            ) from None
        except OSError as error:
            raise ConnectionBroken(f"{self.peer}: {error}") from None

    async def encrypt(self, context: ssl.SSLContext | None) -> None:
        """Answer a request for encryption, and begin it if there is a context. Raises
        `ConnectionBroken` and `MalformedFrame`."""
        if context is None:
            self.decoder.decline_encryption()
            await self.send(ENCRYPTION_DECLINED)
            return
        # Checks that nothing came in the clear after the request, before the answer is sent.
        self.decoder.begin_encryption()
        await self.send(ENCRYPTION_ACCEPTED)
        await self.flush()
        try:
            await self._writer.start_tls(context)
        except OSError as error:  # ssl.SSLError is one, too
            raise ConnectionBroken(f"{self.peer}: TLS: {error}") from None
        self.encrypted = True

    def certificate_name(self) -> str:
        """Return the common name in the certificate that the client has shown, which TLS has
        checked; "" if it has shown none."""
        found = self._writer.get_extra_info("peercert") if self.encrypted else None
        names = [
            value
            for part in (found or {}).get("subject", ())
            for key, value in part
            if key == "commonName"
        ]
        # Of several it could not be said which one is the client's.
        return names[0] if len(names) == 1 else ""

    async def close(self) -> None:
        """Send what waits, and close; a peer that does not read is cut off."""
        try:
            await self.flush()
            self._writer.close()
            async with asyncio.timeout(self._write_s):
                await self._writer.wait_closed()
        except (ConnectionBroken, OSError, TimeoutError):
            self._writer.transport.abort()
