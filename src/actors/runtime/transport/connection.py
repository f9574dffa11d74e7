"""Framed message connections over TCP, Unix sockets and TLS, for both sides.

A connection starts with TLS, if `TransportSecurity` has a certificate, and with the handshake of
`actors.runtime.transport.handshake`. Then both sides exchange the frames of
`actors.runtime.frames` over a `ByteStream`, which also writes keepalives and watches progress in
both directions. One task receives; any number may send. A connection knows no message types and
does not reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    PenstockError,
    ResourceClosed,
)
from actors.runtime.frames import FrameBuffer, FrameCodec
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage
from actors.runtime.transport import sockets
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate
from actors.runtime.transport.handshake import (
    BUSY_MAGIC,
    HandshakeOpening,
    check_token,
    exchange,
    send_token,
)
from actors.runtime.transport.security import TransportSecurity
from actors.runtime.transport.stream import SLICE_BYTES, ByteStream

S = TypeVar("S")
R = TypeVar("R")

log = logging.getLogger("penstock.transport")

READ_TURNS: Final = 2
"""Turns of the event loop for reading a socket: one to poll it, one to read it."""


class FramedConnection(Generic[S, R]):
    """One open connection that sends messages `S` and receives messages `R`."""

    def __init__(
        self,
        stream: ByteStream,
        send_codec: FrameCodec[S],
        receive_codec: FrameCodec[R],
        settings: Settings,
        prove: Callable[[], None] | None = None,
    ) -> None:
        """Take over a stream after its handshake.

        `prove` is called when the first message was received, before `receive` returns it. It may
        refuse the connection by raising a `PenstockError`.
        """
        self._stream = stream
        self._prove = prove
        """Called with the first message; None afterwards."""
        self._send_codec = send_codec
        self._receive_codec = receive_codec
        self._close_s = settings.connect_timeout_ms / 1000
        self._error: PenstockError | None = None
        """The error that ended receiving; None until then."""
        self._closed = False
        """True once this side has closed the connection."""
        self._lock = anyio.Lock(fast_acquire=True)
        """Held while a frame is written."""
        self.peer = stream.peer
        """Name of the peer, for logs and errors."""
        stream.watch()

    # -- sending --

    async def send(self, message: S | TracedMessage[S]) -> None:
        """Send one message, waiting while the peer is slow. A trace context becomes its header.

        Raises `LocalProtocolError` if it does not fit into a frame (nothing is sent and the
        connection remains usable), `ResourceClosed` after `aclose`, and `ConnectionBroken` if the
        peer is gone or has read nothing for ``write_timeout_ms``.
        """
        frame = self._send_codec.encode(message)
        async with self._lock:
            if self._closed:
                raise self._closed_here()
            await self._stream.write_frame(frame)

    def try_send(self, messages: Sequence[S | TracedMessage[S]]) -> int:
        """Send the first messages in one write, without waiting; return how many were sent.

        Sends as many as fit into a slice. Returns 0 if the peer is slow or another task is sending:
        then use `send`, which waits. Raises the errors of `send`, for the first message only.
        """
        if self._closed:
            raise self._closed_here()
        stream = self._stream
        if self._lock.locked() or not stream.is_ready:
            return 0
        data = bytearray()
        taken = 0
        for message in messages:
            try:
                data += self._send_codec.encode(message)
            except PenstockError:
                if taken:
                    break  # send those before it; the next call raises the error
                raise
            taken += 1
            if len(data) >= SLICE_BYTES:
                break
        if taken:
            stream.write(data)
        return taken

    # -- receiving --

    async def receive(self) -> Any:
        """Return the next message, in a `TracedMessage` if it has a trace context.

        Cancellation loses nothing, because received bytes stay in the buffer. Raises
        `ConnectionBroken` at the end of the stream or after a timeout, `FrameTooLarge`,
        `MalformedFrame`, `UnknownCommand`, and `ResourceClosed` after `aclose`. Once it has raised,
        every further call raises the same error.
        """
        stream = self._stream
        while True:
            # The error ends this direction only: until `aclose` this side can still send the peer
            # the reason.
            if self._error is not None:
                raise self._error
            if self._closed:
                raise self._closed_here()
            try:
                body = stream.frames.next()
                if body is not None:
                    return self._taken(body)
                await stream.more()
            except PenstockError as error:
                self._error = self._closed_here() if self._closed else error
                raise self._error from None

    def receive_nowait(self, count_max: int) -> list[Any]:
        """Return messages that have arrived already, at most `count_max`, without waiting.

        If an error follows them, the next `receive` raises it.
        """
        found: list[Any] = []
        stream = self._stream
        while len(found) < count_max and self._error is None and not self._closed:
            try:
                body = stream.frames.next()
                if body is None:
                    break
                found.append(self._taken(body))
            except PenstockError as error:
                self._error = error
        return found

    def _taken(self, body: memoryview) -> Any:
        """Decode the body of a frame. The first one proves the connection."""
        self._stream.frame_taken()
        message = self._receive_codec.decode(body)
        if self._prove is not None:
            prove, self._prove = self._prove, None
            prove()
            # Only now, because `body` may be a view of the buffer.
            self._stream.frames.widen()
        return message

    def _closed_here(self) -> ResourceClosed:
        return ResourceClosed(f"the connection to {self.peer} was closed by this side")

    # -- closing --

    def abort(self) -> None:
        """Close immediately. Unsent bytes are lost."""
        self._closed = True
        self._stream.abort()

    async def aclose(self) -> None:
        """Send the waiting bytes, for at most ``connect_timeout_ms``, and close. Idempotent.

        Closes immediately if the caller is cancelled.
        """
        if self._closed and self._stream.is_over:
            return
        self._closed = True
        try:
            with anyio.move_on_after(self._close_s):
                async with self._lock:  # let a task finish the frame that it is writing
                    pass
                # Read the socket first: closing it with unread bytes would reset the connection,
                # and the peer might lose the last bytes sent to it.
                for _ in range(READ_TURNS):
                    await anyio.lowlevel.checkpoint()
        finally:
            await self._stream.aclose(self._close_s)


async def dial(
    address: NetworkAddress | str,
    send_type: Any,
    receive_type: Any,
    settings: Settings,
    magic: bytes,
    version: int = 1,
    *,
    identity: str = "",
    security: TransportSecurity | None = None,
    frame_bytes_max: int | None = None,
) -> FramedConnection[Any, Any]:
    """Connect to an address and authenticate both sides, within ``connect_timeout_ms``.

    `send_type` and `receive_type` are message types or unions of them. `identity` is the expected
    name of the service; "" accepts any. Raises `ConnectionBroken` if nobody answers,
    `AuthenticationFailed` if one side does not trust the other, and the handshake's
    `ResourceBusy`, `MalformedFrame`, `IncompatibleVersion` and `WrongService`.
    """
    address = NetworkAddress.parse(address) if isinstance(address, str) else address
    limit = frame_bytes_max or settings.frame_bytes_max
    receive_codec: FrameCodec[Any] = FrameCodec(receive_type, limit)
    stream = ByteStream(FrameBuffer(receive_codec), settings, str(address))
    made = False
    try:
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            await sockets.connect(lambda: stream, address, security)
            made = True
            await exchange(stream, HandshakeOpening(magic, version, identity))
            # After `exchange`, so that the token is sent only to the expected service.
            await send_token(stream, security.token if security is not None else b"")
    # On cancellation as well, because the socket must not leak.
    except BaseException as error:
        if made:
            stream.abort()
        if isinstance(error, OSError | TimeoutError | PenstockError):
            in_tls = made and security is not None and security.has_tls
            raise _named(error, f"cannot connect to {address}", settings, in_tls) from None
        raise
    return FramedConnection(stream, FrameCodec(send_type, limit), receive_codec, settings)


def _named(error: Exception, what: str, settings: Settings, in_tls: bool) -> PenstockError:
    """Return a `PenstockError` that explains why `what` failed."""
    if isinstance(error, PenstockError) and type(error) is not ConnectionBroken:
        return error
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in text:
        return AuthenticationFailed(f"{what}: {text}; {_ADVICE}")
    if in_tls and isinstance(error, ConnectionBroken):
        # With TLS 1.3 the listener checks this side's certificate after this side has completed its
        # handshake. Some event loops then report a lost connection without the TLS alert.
        return ConnectionBroken(
            f"{what}: {text}; the listener may have rejected the certificate: {_ADVICE}"
        )
    if isinstance(error, TimeoutError):
        text = text or f"no answer in {settings.connect_timeout_ms} ms"
    return ConnectionBroken(f"{what}: {text or type(error).__name__}")


_ADVICE: Final = (
    "check tls_certificate, tls_key and tls_authority of both sides, and the name in the address"
)


class TransportListener:
    """Accepts connections and runs a handler for each. A bad peer does not affect the others."""

    def __init__(
        self,
        send_type: Any,
        receive_type: Any,
        settings: Settings,
        opening: HandshakeOpening,
        security: TransportSecurity | None,
        frame_bytes_max: int | None,
        first_bytes_max: int | None,
    ) -> None:
        self._first_bytes_max = first_bytes_max or settings.unproven_bytes_max
        limit = frame_bytes_max or settings.frame_bytes_max
        self._send_codec: FrameCodec[Any] = FrameCodec(send_type, limit)
        self._receive_codec: FrameCodec[Any] = FrameCodec(receive_type, limit)
        self._settings = settings
        self._opening = opening
        self._security = security
        self._tls = security.context(server=True) if security and security.has_tls else None
        self._bound: sockets.BoundSockets | None = None
        """The listening sockets, from `bind` on."""
        self._group: anyio.abc.TaskGroup | None = None
        """Tasks of the connections, while `serve` runs."""
        self._handler: Callable[[FramedConnection[Any, Any]], Awaitable[None]] | None = None
        """The handler given to `serve`."""
        self._ended = anyio.Event()
        """Set by `aclose`."""
        self._gate = ConnectionGate(
            settings.unproven_connections_max, settings.connections_max, "connections_max"
        )
        self.address = NetworkAddress()
        """The bound address, with the port that was chosen."""

    @classmethod
    async def bind(
        cls,
        address: NetworkAddress | str,
        send_type: Any,
        receive_type: Any,
        settings: Settings,
        magic: bytes,
        version: int = 1,
        *,
        identity: str = "",
        security: TransportSecurity | None = None,
        frame_bytes_max: int | None = None,
        first_bytes_max: int | None = None,
    ) -> TransportListener:
        """Return a listener bound to an address; port 0 picks a free port (see `address`).

        Connections wait until `serve`. `identity` is the service's name. The first frame of a
        connection may have `first_bytes_max` bytes (default: `unproven_bytes_max`). Raises
        `AddressInUse`, and `BadSettings` for invalid certificates.
        """
        address = NetworkAddress.parse(address) if isinstance(address, str) else address
        opening = HandshakeOpening(magic, version, identity)
        # Encoded once here, so that a too long identity fails now and not at each connection.
        opening.encode()
        self = cls(
            send_type, receive_type, settings, opening, security, frame_bytes_max, first_bytes_max
        )
        self._bound = await sockets.bind(address)
        self.address = self._bound.address
        return self

    @property
    def connections(self) -> int:
        """Return the number of open connections, including those still in their handshake."""
        return self._gate.connections

    @property
    def port(self) -> int:
        """Return the TCP port."""
        return self.address.port

    async def serve(self, handler: Callable[[FramedConnection[Any, Any]], Awaitable[None]]) -> None:
        """Run `handler` for every connection until `aclose`, then end all connections.

        A connection is closed when its handler returns. A `PenstockError` from a handler ends only
        its connection; any other exception is a bug and is raised here.
        """
        assert self._bound is not None
        self._handler = handler
        if self._ended.is_set():
            return
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                for sock in self._bound.sockets:
                    group.start_soon(self._gate.accept, sock, group, self._converse)
                await self._ended.wait()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            self._bound.close()

    async def aclose(self) -> None:
        """Stop listening and end `serve`."""
        self._ended.set()
        # Otherwise `serve` closes the sockets itself.
        if self._group is None and self._bound is not None:
            self._bound.close()

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        """Run one connection from its TLS handshake to its end."""
        settings = self._settings
        frames = FrameBuffer(self._receive_codec, self._first_bytes_max)
        stream = ByteStream(frames, settings, "a peer")
        made = False
        connection: FramedConnection[Any, Any] | None = None
        try:
            async with asyncio.timeout(settings.connect_timeout_ms / 1000):
                await sockets.attach_accepted(lambda: stream, sock, self._tls)
                made = True
                if self._gate.is_full:
                    await self._say_busy(stream)
                    return
                await exchange(stream, self._opening)
                needed = self._security is not None and self._security.has_tokens
                await check_token(
                    stream, self._security.knows if needed and self._security else None
                )
            # Every client sends its first message right away, and with it the connection is proved.
            # If there are tokens, they were checked before; if not, the message is all there is.
            connection = FramedConnection(
                stream, self._send_codec, self._receive_codec, settings, accepted.prove
            )
            accepted.abort = connection.abort
            assert self._handler is not None
            await self._handler(connection)
        except TimeoutError:
            log.info("%s did not complete its handshake in time (connect_timeout_ms)", stream.peer)
        except (OSError, PenstockError) as error:
            log.info("connection of %s ended: %s: %s", stream.peer, type(error).__name__, error)
        finally:
            # Shielded, because a cancelled listener must still close its sockets.
            with anyio.CancelScope(shield=True), contextlib.suppress(OSError):
                if accepted.dropped:
                    if made:
                        stream.abort()
                elif connection is not None:
                    await connection.aclose()
                elif made:
                    await stream.aclose(settings.connect_timeout_ms / 1000)

    async def _say_busy(self, stream: ByteStream) -> None:
        """Tell the peer that the listener accepts no more connections."""
        log.warning("refused a connection: %s", self._gate.busy)
        with contextlib.suppress(PenstockError):
            # Read the peer's opening as well: closing with unread bytes would reset the connection
            # before the peer has read this one.
            await exchange(stream, HandshakeOpening(BUSY_MAGIC, self._opening.version))
