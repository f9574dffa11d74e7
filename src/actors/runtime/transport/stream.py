"""The bytes of one socket, both ways, and timeouts for their progress.

A `ByteStream` is the protocol of one asyncio transport (TCP, Unix or TLS). Bytes are received into
a `FrameBuffer`; while that is full the socket is not read, which is backpressure on the peer. Bytes
are sent in slices, waiting while the peer is slow. One timer checks, after `watch`:

- nothing was written for ``keepalive_ms``: a keepalive is written;
- a reader waits and no bytes came for ``idle_timeout_ms``: the peer is gone;
- a begun frame was waited for ``frame_timeout_ms`` in all: its sender does not go on;
- bytes wait to be written, here or in the kernel, and the peer has taken none of them for
  ``write_timeout_ms`` (at most ``idle_timeout_ms``): it does not read.

The first error is final.
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
"""Bytes of a frame that are handed to the transport at a time."""

TICKS: Final = 8
"""Checks of the write side's progress within its timeout."""


class ByteStream(asyncio.BufferedProtocol):
    """One socket's bytes; see the module. `name`: of the peer, for people."""

    def __init__(self, frames: FrameBuffer, settings: Settings, name: str) -> None:
        self.frames = frames
        self.peer = name
        self.error: PenstockError | None = None
        """Error with which the stream ended, if it has."""
        self._keepalive_s = settings.keepalive_ms / 1000
        self._idle_s = settings.idle_timeout_ms / 1000
        self._write_s = min(settings.write_timeout_ms, settings.idle_timeout_ms) / 1000
        self._frame_s = settings.frame_timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._is_tls = False
        self._eof = False
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        # reading
        self._waiter: asyncio.Future[None] | None = None
        self._wait_began = 0.0
        self._frame_waited_s = 0.0
        self._received = self._loop.time()
        self._held = False
        """True while the socket is not read, for want of room."""
        self._held_since = self._held_s = 0.0
        # writing
        self._full = False
        self._drains: list[asyncio.Future[None]] = []
        self._inside = False
        """True while a part of a frame was written."""
        self._written = 0
        self._left = 0
        self._progress = self._last_write = self._received

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        found = transport.get_extra_info("peername")
        if isinstance(found, tuple):
            self.peer = f"{found[0]}:{found[1]}"

    def get_buffer(self, sizehint: int) -> Any:
        """Return the buffer for the next bytes."""
        return self.frames.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        """Note that bytes came; pause reading if there is no more room."""
        self._received = self._loop.time()
        more = self.frames.advance(nbytes)
        if self.frames.room == 0:
            self._held = True
            self._held_since = self._received
            self._transport.pause_reading()
        if more:
            self._wake()

    def eof_received(self) -> bool:
        """Note that the peer sends nothing more; over TLS it receives nothing more either."""
        self._eof = True
        self._wake()
        # TCP closes each direction apart: this side may still send.
        return not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the transport is gone, and wake all waiters."""
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
        """Note that the transport's write buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Note that the transport's write buffer has room again."""
        self._full = False
        self._wake_drains()

    # -- reading --

    async def more(self) -> None:
        """Wait until more bytes are in `frames`. Raises `ConnectionBroken` if none will come."""
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
                # Only time spent waiting counts: the peer is not to blame for this side's pauses.
                self._frame_waited_s += self._loop.time() - self._wait_began

    async def read_exactly(self, count: int) -> bytes:
        """Return the next `count` bytes, outside of frames. Raises `ConnectionBroken`."""
        while (taken := self.frames.take(count)) is None:
            await self.more()
        return taken

    def frame_taken(self) -> None:
        """Note that a whole frame was taken."""
        self._frame_waited_s = 0.0

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error
        if self._eof:
            begun = self.frames.partial_bytes
            where = f" inside a frame ({begun} bytes of it came)" if begun else ""
            raise ConnectionBroken(f"{self.peer} closed the connection{where}{self._late()}")

    def _late(self) -> str:
        """Return words about this side's own delay, if it may be the reason for which the peer has
        closed."""
        now_s = self._loop.time() - self._held_since if self._held else 0.0
        held_s = max(self._held_s, now_s)
        if held_s < self._write_s - self._write_s / TICKS:
            return ""
        return (
            f"; this side had once read nothing for {held_s * 1000:.0f} ms, and a peer that does "
            "not read is cut off (write_timeout_ms)"
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
        """Return whether a write would leave at once, as far as this side knows."""
        return not self._full and not self._inside and not self.is_over

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hand bytes to the transport."""
        self._last_write = self._loop.time()
        # Nothing waited before: the peer's time to take these bytes begins now.
        if self._written == self._left:
            self._progress = self._last_write
        self._written += len(data)
        self._transport.write(data)

    async def write_frame(self, frame: bytearray) -> None:
        """Write a whole frame, waiting while the peer is slow. Raises `ConnectionBroken`."""
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
            # A frame leaves whole or the connection ends: the rest must follow, or the peer cannot
            # read on.
            if rest and not self.is_over:
                self.write(rest)
            raise
        finally:
            self._inside = False

    async def drain(self) -> None:
        """Wait until the transport takes more. Raises `ConnectionBroken`."""
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
        """Begin to check progress and to write keepalives."""
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
            # Waiting bytes are no silence: a keepalive on top of them would only grow the buffer.
            if self._transport.get_write_buffer_size() == 0:
                self.write(KEEPALIVE)
        else:
            due.append(self._last_write + self._keepalive_s)
        # At least a millisecond: a deadline that is reached up to rounding must not spin the loop.
        self._timer = self._loop.call_at(max(min(due), now + 0.001), self._tick)

    def _reading_late(self, now: float, due: list[float]) -> str:
        # This side does not read: nothing counts against the peer.
        if self._waiter is None:
            return ""
        # Any byte counts as life, also a part of a frame.
        since = max(self._received, self._wait_began)
        if now - since >= self._idle_s:
            return f"sent nothing for {self._idle_s * 1000:.0f} ms (idle_timeout_ms)"
        due.append(since + self._idle_s)
        if self.frames.partial_bytes == 0:
            return ""
        rest_s = self._frame_s - self._frame_waited_s - (now - self._wait_began)
        if rest_s <= 0:
            return (
                f"has sent {self.frames.partial_bytes} bytes of a frame and not the rest in "
                f"{self._frame_s * 1000:.0f} ms (frame_timeout_ms)"
            )
        due.append(now + rest_s)
        return ""

    def _writing_late(self, now: float, step: float) -> str:
        waiting = self._transport.get_write_buffer_size() + self._in_kernel()
        # Bytes in the kernel count as waiting: only the peer's acknowledgement is progress. Over
        # TLS the numbers do not match, but they change together.
        left = self._written - waiting
        if waiting == 0 or left != self._left:
            # Some byte left after the last check.
            self._left, self._progress = left, now
            return ""
        if now - self._progress < self._write_s - step:
            return ""
        return (
            f"has taken nothing for {self._write_s * 1000:.0f} ms (write_timeout_ms) of "
            f"{waiting} bytes that wait for it"
        )

    def _in_kernel(self) -> int:
        """Return the bytes in the kernel that the peer's has not acknowledged."""
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
        """End the connection at once with a reason. The first reason stays."""
        if self.error is None:
            self.error = error
        self.abort()
        self._wake()
        self._wake_drains()

    def abort(self) -> None:
        """Close at once; unsent bytes are lost."""
        self._stop_watch()
        self._transport.abort()

    async def aclose(self, limit_s: float) -> None:
        """Send the waiting bytes, for at most `limit_s`, and close."""
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
