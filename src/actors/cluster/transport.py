"""Framed message connections over TCP: dialling, listening, keepalive, and nothing else.

Theory of operation. Each side at once writes an opening (8 bytes of magic, a u16 version) and
reads the peer's; both must be equal, because messages are decoded by shape. Then both exchange
the frames of `actors.protocol.frames`. A frame of length 0 is a keepalive: sent when nothing
else was for ``keepalive_ms``, skipped by the reader. No byte for ``idle_timeout_ms`` means the
peer is gone, however the socket looks; part of a frame counts as life.

Rules:

- a length over the limit is refused before any of the body is kept;
- the first error of the receiving side is final: every later `receive` raises it again.
  Sending stays possible until `aclose`, so that the peer can be told what was wrong;
- `receive` may be cancelled without loss (bytes stay in this object's buffer);
  one task receives, any number may send;
- a listener that is full answers with another magic, which the dialler raises as `Busy`.

It knows no message types; it does not reconnect; it spawns no task for a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.abc

from actors.errors import (
    AddressInUse,
    Broken,
    Busy,
    Closed,
    IncompatibleVersion,
    MalformedFrame,
    PenstockError,
)
from actors.protocol.frames import HEADER, KEEPALIVE, FrameCodec
from actors.settings import Settings

S = TypeVar("S")
R = TypeVar("R")

log = logging.getLogger("penstock.transport")

OPENING: Final = struct.Struct(">8sH")
BUSY_MAGIC: Final = b"PENSBUSY"
READ_BYTES: Final = 256 * 1024


class FramedConnection(Generic[S, R]):
    """One open connection that sends messages `S` and receives messages `R`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_codec: FrameCodec[S],
        receive_codec: FrameCodec[R],
        settings: Settings,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_codec = send_codec
        self._receive_codec = receive_codec
        self._keepalive_s = settings.keepalive_ms / 1000
        self._idle_s = settings.idle_timeout_ms / 1000
        self._close_s = settings.connect_timeout_ms / 1000
        self._buffer = bytearray()
        self._error: PenstockError | None = None
        self._closed = False
        self._lock = anyio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_send = self._loop.time()
        self._timer = self._loop.call_later(self._keepalive_s, self._keep_alive)
        name = writer.get_extra_info("peername")
        self.peer: str = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "peer"

    # -- sending --

    async def send(self, message: S) -> None:
        """Sends one message, waiting while the peer is slow.

        Raises `LocalProtocolError` when it does not fit a frame (nothing is sent and the
        connection goes on), `Closed` after `aclose`, `Broken` when the peer is gone.
        """
        frame = self._send_codec.encode(message)
        async with self._lock:
            if self._closed:
                raise Closed(f"the connection to {self.peer} was closed by this side")
            try:
                self._writer.write(frame)
                self._last_send = self._loop.time()
                await self._writer.drain()
            except (OSError, RuntimeError) as error:
                raise Broken(f"{self.peer} is gone: {error or type(error).__name__}") from None
            if self._writer.is_closing():
                raise Broken(f"{self.peer} is gone")

    def _keep_alive(self) -> None:
        """Writes a keepalive when one is due; never piles them up on a slow peer."""
        if self._closed or self._writer.is_closing():
            return
        quiet = self._loop.time() - self._last_send
        if quiet >= self._keepalive_s:
            if self._writer.transport.get_write_buffer_size() == 0:
                self._writer.write(KEEPALIVE)
            self._last_send = self._loop.time()
            quiet = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - quiet, self._keep_alive)

    # -- receiving --

    async def receive(self) -> R:
        """The next message.

        Raises `Broken` at the end of the stream or after an idle timeout, `FrameTooLarge`,
        `MalformedFrame`, `UnknownCommand`, and `Closed` after `aclose`; then the same again.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise Closed(f"the connection to {self.peer} was closed by this side")
            try:
                found, message = self._take()
                if found:
                    result: R = message
                    return result
                self._buffer += await self._read()
            except PenstockError as error:
                self._error = error
                raise

    def _take(self) -> tuple[bool, Any]:
        """The first whole frame of the buffer, if there is one."""
        buffer = self._buffer
        while len(buffer) >= HEADER.size:
            length = self._receive_codec.check_length(bytes(buffer[: HEADER.size]))
            end = HEADER.size + length
            if length == 0:
                del buffer[: HEADER.size]
                continue
            if len(buffer) < end:
                return False, None
            body = bytes(memoryview(buffer)[HEADER.size : end])
            del buffer[:end]
            return True, self._receive_codec.decode(body)
        return False, None

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                data = await self._reader.read(READ_BYTES)
        except TimeoutError:
            raise Broken(f"{self.peer} sent nothing for {self._idle_s * 1000:.0f} ms") from None
        except OSError as error:
            if self._closed:
                raise Closed(f"the connection to {self.peer} was closed by this side") from None
            raise Broken(f"{self.peer} is gone: {error}") from None
        if not data:
            if self._closed:
                raise Closed(f"the connection to {self.peer} was closed by this side")
            where = (
                f" inside a frame ({len(self._buffer)} bytes of it came)" if self._buffer else ""
            )
            raise Broken(f"{self.peer} closed the connection{where}")
        return data

    # -- closing --

    def abort(self) -> None:
        """Closes at once; what was not yet sent is lost."""
        self._closed = True
        self._timer.cancel()
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Sends what waits (for at most ``connect_timeout_ms``) and closes. Twice is harmless."""
        if self._closed and self._writer.transport.is_closing():
            return
        self._closed = True
        self._timer.cancel()
        await _close_writer(self._writer, self._close_s)


async def _close_writer(writer: asyncio.StreamWriter, limit_s: float) -> None:
    writer.close()
    try:
        async with asyncio.timeout(limit_s):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise


async def _open(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, magic: bytes, version: int
) -> None:
    """Exchanges openings. Raises `Busy`, `MalformedFrame`, `IncompatibleVersion`, `Broken`."""
    writer.write(OPENING.pack(magic, version))
    try:
        theirs, their_version = OPENING.unpack(await reader.readexactly(OPENING.size))
    except asyncio.IncompleteReadError as error:
        part = bytes(error.partial)
        if part and not magic.startswith(part[: len(magic)]):
            raise MalformedFrame(f"the peer opened with {part!r}, not with {magic!r}") from None
        raise Broken("the peer closed the connection before its opening") from None
    except OSError as error:
        raise Broken(f"the peer is gone: {error}") from None
    if theirs == BUSY_MAGIC:
        raise Busy("the service has as many connections as it takes (connections_max); try later")
    if theirs != magic:
        raise MalformedFrame(f"the peer opened with {theirs!r}, not with {magic!r}")
    if their_version != version:
        raise IncompatibleVersion(
            f"the peer speaks version {their_version} of {magic!r}, this side {version}"
        )


def _check_magic(magic: bytes) -> None:
    assert len(magic) == 8, f"a magic has 8 bytes, {magic!r} has {len(magic)}"


async def dial(
    host: str,
    port: int,
    send_type: Any,
    receive_type: Any,
    settings: Settings,
    magic: bytes,
    version: int = 1,
    *,
    frame_bytes_max: int | None = None,
) -> FramedConnection[Any, Any]:
    """Connects and exchanges openings, within ``connect_timeout_ms``.

    `send_type` and `receive_type` are message types or unions of them. Raises `Broken` when
    nobody answers, and what the opening raises: `Busy`, `MalformedFrame`,
    `IncompatibleVersion`.
    """
    _check_magic(magic)
    limit = frame_bytes_max or settings.frame_bytes_max
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
            await _open(reader, writer, magic, version)
    except (OSError, TimeoutError, PenstockError) as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, PenstockError):
            raise
        why = str(error) or f"no answer in {settings.connect_timeout_ms} ms"
        raise Broken(f"cannot connect to {host}:{port}: {why}") from None
    except asyncio.CancelledError:
        if writer is not None:
            writer.transport.abort()
        raise
    return FramedConnection(
        reader, writer, FrameCodec(send_type, limit), FrameCodec(receive_type, limit), settings
    )


class Listener:
    """Accepts connections and runs a handler for each; one bad peer harms no other."""

    def __init__(
        self,
        send_type: Any,
        receive_type: Any,
        settings: Settings,
        magic: bytes,
        version: int,
        frame_bytes_max: int | None,
    ) -> None:
        _check_magic(magic)
        limit = frame_bytes_max or settings.frame_bytes_max
        self._send_codec: FrameCodec[Any] = FrameCodec(send_type, limit)
        self._receive_codec: FrameCodec[Any] = FrameCodec(receive_type, limit)
        self._settings = settings
        self._magic = magic
        self._version = version
        self._server: asyncio.Server | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._handler: Callable[[FramedConnection[Any, Any]], Awaitable[None]] | None = None
        self._ended = anyio.Event()
        self._early: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.connections = 0
        self.host = ""
        self.port = 0

    @classmethod
    async def bind(
        cls,
        host: str,
        port: int,
        send_type: Any,
        receive_type: Any,
        settings: Settings,
        magic: bytes,
        version: int = 1,
        *,
        frame_bytes_max: int | None = None,
    ) -> Listener:
        """A listener on host:port (empty host: loopback; port 0: a free one, see `port`).

        Connections wait until `serve`. Raises `AddressInUse`.
        """
        self = cls(send_type, receive_type, settings, magic, version, frame_bytes_max)
        host = host or "127.0.0.1"
        try:
            self._server = await asyncio.start_server(self._accepted, host, port, limit=READ_BYTES)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise AddressInUse(
                    f"cannot listen on {host}:{port}: {error.strerror}; choose another port, "
                    "or 0 for a free one"
                ) from None
            raise AddressInUse(f"cannot listen on {host}:{port}: {error}") from None
        self.host = host
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def serve(self, handler: Callable[[FramedConnection[Any, Any]], Awaitable[None]]) -> None:
        """Runs `handler` for every connection, until `aclose`; then ends them all.

        The connection is closed when its handler returns. A `PenstockError` of a handler ends
        that connection alone; any other exception is a fault of ours and is raised here.
        """
        assert self._server is not None
        self._handler = handler
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                while self._early:
                    self._accepted(*self._early.pop(0))
                await self._ended.wait()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            self._server.close()

    async def aclose(self) -> None:
        """Stops listening and ends `serve`."""
        if self._server is not None:
            self._server.close()
        for _, writer in self._early:
            writer.transport.abort()
        self._early.clear()
        self._ended.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ended.is_set() or len(self._early) >= self._settings.connections_max:
            writer.transport.abort()
            return
        if self._group is None:
            self._early.append((reader, writer))
            return
        self.connections += 1
        self._group.start_soon(self._converse, reader, writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its opening to its end."""
        connection: FramedConnection[Any, Any] | None = None
        try:
            if self.connections > self._settings.connections_max:
                log.warning("refused a connection: %d are open", self.connections - 1)
                async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                    # Reads the peer's opening too: closing over unread bytes would reset the
                    # connection before the peer has seen why.
                    with contextlib.suppress(PenstockError):
                        await _open(reader, writer, BUSY_MAGIC, self._version)
                return
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                await _open(reader, writer, self._magic, self._version)
            connection = FramedConnection(
                reader, writer, self._send_codec, self._receive_codec, self._settings
            )
            assert self._handler is not None
            await self._handler(connection)
        except TimeoutError:
            log.info("a peer did not open the conversation in time")
        except PenstockError as error:
            peer = connection.peer if connection else "a peer"
            log.info("connection of %s ended: %s: %s", peer, type(error).__name__, error)
        finally:
            self.connections -= 1
            with anyio.CancelScope(shield=True), contextlib.suppress(OSError):
                if connection is not None:
                    await connection.aclose()
                else:
                    await _close_writer(writer, self._settings.connect_timeout_ms / 1000)
