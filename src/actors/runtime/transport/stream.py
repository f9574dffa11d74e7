"""The bytes of one socket in both directions, with timeouts for their progress.

A `ByteStream` is the protocol of one asyncio transport (TCP, Unix or TLS). It receives bytes into a
`FrameBuffer`. While that is full, the socket is not read, which is backpressure on the peer. It
sends bytes in slices and waits while the peer is slow. After `watch`, one timer checks:

- If nothing was written for ``keepalive_ms``, a keepalive is written.
- If a reader waits and no bytes arrived for ``idle_timeout_ms``, the peer is considered gone.
- If a reader has waited ``frame_timeout_ms`` in total for the rest of a frame, the peer is
  considered stuck.
- If bytes wait to be written, here or in the kernel, and the peer has accepted none of them for
  ``write_timeout_ms`` (at most ``idle_timeout_ms``), the peer does not read.

All but the first end the connection. The first error is final.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
from typing import Any, Final

from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.frames import KEEPALIVE, FrameBuffer
from actors.runtime.settings import Settings

SLICE_BYTES = 1 << 20
"""Bytes of a frame that are passed to the transport at a time."""

TICKS: Final = 8
"""Number of checks of write progress within its timeout."""


class ByteStream(asyncio.BufferedProtocol):
    """Sends and receives the bytes of one socket.

    `name` is the peer's name for logs and errors, until its TCP address is known.
    """

    def __init__(self, frames: FrameBuffer, settings: Settings, name: str) -> None:
        self.frames = frames
        self.peer = name
        self.error: PenstockError | None = None
        """The error with which the stream ended; None while it works."""
        self._keepalive_s = settings.keepalive_ms / 1000
        self._idle_s = settings.idle_timeout_ms / 1000
        self._write_s = min(settings.write_timeout_ms, settings.idle_timeout_ms) / 1000
        self._frame_s = settings.frame_timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        """The transport; set when it connects."""
        self._is_tls = False
        self._eof = False
        """True once the peer sends nothing more."""
        self._gone = asyncio.Event()
        """Set when the transport is closed."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next check; None before `watch` and after the end."""
        # Reading. Times are in seconds of the loop's clock.
        self._waiter: asyncio.Future[None] | None = None
        """The future that the reader awaits; None while it does not wait."""
        self._wait_began = 0.0
        """Time at which the reader began to wait."""
        self._frame_waited_s = 0.0
        """Time spent waiting for the rest of the current frame."""
        self._received = self._loop.time()
        """Time at which bytes last arrived."""
        self._held = False
        """True while the socket is not read because the buffer is full."""
        self._held_since = self._held_s = 0.0
        """Time at which that began last, and its longest duration so far."""
        # Writing.
        self._full = False
        """True while the transport's write buffer is full."""
        self._drains: list[asyncio.Future[None]] = []
        """Futures of the tasks that wait for room to write."""
        self._inside = False
        """True while a frame is partly written."""
        self._written = 0
        """Bytes passed to the transport."""
        self._left = 0
        """Number of them that the peer had accepted at the last check."""
        self._progress = self._last_write = self._received
        """Times of the last progress in writing, and of the last write."""

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """Keep the transport and the peer's address."""
        self._transport = transport
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        found = transport.get_extra_info("peername")
        if isinstance(found, tuple):
            self.peer = f"{found[0]}:{found[1]}"

    def get_buffer(self, sizehint: int) -> Any:
        """Return the buffer for the next bytes."""
        return self.frames.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        """Record that bytes arrived, and stop reading if the buffer is full."""
        self._received = self._loop.time()
        more = self.frames.advance(nbytes)
        if self.frames.room == 0:
            self._held = True
            self._held_since = self._received
            self._transport.pause_reading()
        if more:
            self._wake()

    def eof_received(self) -> bool:
        """Record that the peer sends nothing more. With TLS it also receives nothing more."""
        self._eof = True
        self._wake()
        # TCP closes each direction separately, so this side may still send.
        return not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the transport is closed, and wake all waiters."""
        self._stop_watch()
        if self.error is None and not (self._eof and exc is None):
            self.error = ConnectionBroken(
                f"{self.peer} is gone{f': {exc}' if exc else ''}{self._late()}"
            )
        self._eof = True
        self._full = False
        self._gone.set()
        self._wake()
        self._wake_drains()

    def pause_writing(self) -> None:
        """Record that the transport's write buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Record that the transport's write buffer has room again."""
        self._full = False
        self._wake_drains()

    # -- reading --

    async def more(self) -> None:
        """Wait until `frames` contains more bytes. Raises `ConnectionBroken` if none will come."""
        self._raise_if_over()
        begun = self.frames.partial_bytes > 0
        if self._held and self.frames.room:
            self._held = False
            self._held_s = max(self._held_s, self._loop.time() - self._held_since)
            self._transport.resume_reading()
        if not begun:
            self._frame_waited_s = 0.0
        self._waiter = self._loop.create_future()
        self._wait_began = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if begun:
                # Only waiting time counts: the peer is not responsible for this side's pauses.
                self._frame_waited_s += self._loop.time() - self._wait_began

    async def read_exactly(self, count: int) -> bytes:
        """Return the next `count` bytes outside of frames. Raises `ConnectionBroken`."""
        while (taken := self.frames.take(count)) is None:
            await self.more()
        return taken

    def frame_taken(self) -> None:
        """Record that a complete frame was taken out of `frames`."""
        self._frame_waited_s = 0.0

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error
        if self._eof:
            begun = self.frames.partial_bytes
            where = f" inside a frame ({begun} bytes of it received)" if begun else ""
            raise ConnectionBroken(f"{self.peer} closed the connection{where}{self._late()}")

    def _late(self) -> str:
        """Return a note for an error if this side's own delay may have made the peer close."""
        now_s = self._loop.time() - self._held_since if self._held else 0.0
        held_s = max(self._held_s, now_s)
        if held_s < self._write_s - self._write_s / TICKS:
            return ""
        return (
            f"; this side had read nothing for {held_s * 1000:.0f} ms, and the peer may have closed"
            " the connection for that (write_timeout_ms)"
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- writing --

    @property
    def is_over(self) -> bool:
        """Return whether nothing more can be written."""
        return self.error is not None or self._transport.is_closing()

    @property
    def is_ready(self) -> bool:
        """Return whether a write need not wait, as far as this side knows."""
        return not self._full and not self._inside and not self.is_over

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Pass bytes to the transport."""
        self._last_write = self._loop.time()
        # Nothing was waiting: the peer's time to accept these bytes begins now.
        if self._written == self._left:
            self._progress = self._last_write
        self._written += len(data)
        self._transport.write(data)

    async def write_frame(self, frame: bytearray) -> None:
        """Write a complete frame, waiting while the peer is slow. Raises `ConnectionBroken`."""
        rest = memoryview(frame)
        try:
            while True:
                if self.is_over:
                    raise self.error or ConnectionBroken(f"{self.peer} is gone")
                part, rest = rest[:SLICE_BYTES], rest[SLICE_BYTES:]
                self._inside = bool(rest)
                self.write(part)
                await self.drain()
                if not rest:
                    return
        except asyncio.CancelledError:
            # Write the rest of the frame: otherwise the peer could not read what follows.
            if rest and not self.is_over:
                self.write(rest)
            raise
        finally:
            self._inside = False

    async def drain(self) -> None:
        """Wait until the transport accepts more bytes. Raises `ConnectionBroken`."""
        if self._full and not self.is_over:
            room: asyncio.Future[None] = self._loop.create_future()
            self._drains.append(room)
            await room
        if self.is_over:
            raise self.error or ConnectionBroken(f"{self.peer} is gone")

    def _wake_drains(self) -> None:
        drains, self._drains = self._drains, []
        for room in drains:
            if not room.done():
                room.set_result(None)

    # -- watching --

    def watch(self) -> None:
        """Start checking progress and writing keepalives."""
        self._last_write = self._progress = self._loop.time()
        self._tick()

    def _tick(self) -> None:
        """Check all timeouts, and schedule the next check."""
        now = self._loop.time()
        step = min(self._keepalive_s, self._write_s / TICKS)
        due = [now + step]
        late = self._reading_late(now, due) or self._writing_late(now, step)
        if late:
            self.fail(ConnectionBroken(f"{self.peer} {late}"))
            return
        if now - self._last_write >= self._keepalive_s and not self._inside:
            # While bytes wait to be sent, a keepalive would only make the buffer grow.
            if self._transport.get_write_buffer_size() == 0:
                self.write(KEEPALIVE)
        else:
            due.append(self._last_write + self._keepalive_s)
        # At least a millisecond, so that rounding of a deadline cannot make the loop spin.
        self._timer = self._loop.call_at(max(min(due), now + 0.001), self._tick)

    def _reading_late(self, now: float, due: list[float]) -> str:
        # While this side does not read, nothing counts against the peer.
        if self._waiter is None:
            return ""
        # Any byte is a sign of life, even part of a frame.
        since = max(self._received, self._wait_began)
        if now - since >= self._idle_s:
            return f"sent nothing for {self._idle_s * 1000:.0f} ms (idle_timeout_ms)"
        due.append(since + self._idle_s)
        if self.frames.partial_bytes == 0:
            return ""
        rest_s = self._frame_s - self._frame_waited_s - (now - self._wait_began)
        if rest_s <= 0:
            return (
                f"sent {self.frames.partial_bytes} bytes of a frame, but not the rest within "
                f"{self._frame_s * 1000:.0f} ms (frame_timeout_ms)"
            )
        due.append(now + rest_s)
        return ""

    def _writing_late(self, now: float, step: float) -> str:
        waiting = self._transport.get_write_buffer_size() + self._in_kernel()
        # Bytes in the kernel count as waiting, because only the peer's acknowledgement is
        # progress. With TLS the numbers do not match, but they change together.
        left = self._written - waiting
        if waiting == 0 or left != self._left:
            # At least one byte has left since the last check.
            self._left, self._progress = left, now
            return ""
        if now - self._progress < self._write_s - step:
            return ""
        return (
            f"accepted none of {waiting} waiting bytes for {self._write_s * 1000:.0f} ms "
            "(write_timeout_ms)"
        )

    def _in_kernel(self) -> int:
        """Return the number of bytes in the kernel that the peer's has not acknowledged."""
        sock = self._transport.get_extra_info("socket")
        count = array.array("i", [0])
        try:
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
        except (OSError, ValueError, AttributeError):
            return 0  # closed, or a kernel without this ioctl
        return count[0]

    def _stop_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- ending --

    def fail(self, error: PenstockError) -> None:
        """End the connection immediately with an error. The first error is kept."""
        if self.error is None:
            self.error = error
        self.abort()
        self._wake()
        self._wake_drains()

    def abort(self) -> None:
        """Close immediately. Unsent bytes are lost."""
        self._stop_watch()
        self._transport.abort()

    async def aclose(self, limit_s: float) -> None:
        """Send the waiting bytes, for at most `limit_s` seconds, and close."""
        self._stop_watch()
        self._transport.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._gone.wait()
        except TimeoutError:
            self._transport.abort()
        except asyncio.CancelledError:
            self._transport.abort()
            raise
