"""One socket's bytes, both ways, and the watch over their progress.

Theory of operation. A `ByteStream` is the protocol of one asyncio transport (TCP, Unix or TLS).
What comes is read right into a `FrameBuffer`; while that has no room the socket is not read, so
that the peer is held back. What goes out is written in slices, waiting while the peer is slow.

One timer watches, after `watch`:

- nothing was written for ``keepalive_ms``: a keepalive is written (never on top of what waits,
  never inside a frame);
- somebody waits for bytes and none came for ``idle_timeout_ms``: the peer is gone, however the
  socket looks; part of a frame counts as life;
- a frame was begun and was waited for ``frame_timeout_ms`` in all: its sender does not go on;
- bytes wait to be written, here or in the kernel, and the peer has taken none of them for
  ``write_timeout_ms`` (at most ``idle_timeout_ms``): it does not read. Life of the other
  direction does not count here, and what the kernel has merely accepted neither.

Time in which this side does not read (nobody calls `more`) is never held against the peer. The
first error is final. A frame leaves whole or the connection ends: a cancelled `write_frame` hands
the rest to the transport.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
from typing import Any, Final

from actors.errors import Broken, PenstockError
from actors.protocol.frames import KEEPALIVE, FrameBuffer
from actors.settings import Settings
from actors.threshold_probes import FRAME_SLICE

TICKS: Final = 8
"""Looks at the write side's progress in one of its limits."""


class ByteStream(asyncio.BufferedProtocol):
    """See the module. `name` of the peer is for people."""

    def __init__(self, frames: FrameBuffer, settings: Settings, name: str) -> None:
        self.frames = frames
        self.peer = name
        self.error: PenstockError | None = None
        """Why nothing more comes or goes."""
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
        """The socket is not read, for want of room."""
        self._held_since = self._held_s = 0.0
        # writing
        self._full = False
        self._drains: list[asyncio.Future[None]] = []
        self._inside = False
        """A part of a frame was written."""
        self._written = 0
        self._left = 0
        self._progress = self._last_write = self._received

    # -- called by the transport --

    def connection_made(self, transport: Any) -> None:
        """The transport is there."""
        self._transport = transport
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        found = transport.get_extra_info("peername")
        if isinstance(found, tuple):
            self.peer = f"{found[0]}:{found[1]}"

    def get_buffer(self, sizehint: int) -> Any:
        """Where the next bytes belong."""
        return self.frames.place()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        self._received = self._loop.time()
        more = self.frames.wrote(nbytes)
        if self.frames.room == 0:
            self._held = True
            self._held_since = self._received
            self._transport.pause_reading()
        if more:
            self._wake()

    def eof_received(self) -> bool:
        """The peer sends nothing more; over TLS it takes nothing more either."""
        self._eof = True
        self._wake()
        return not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._stop_watch()
        if self.error is None and not (self._eof and exc is None):
            self.error = Broken(f"{self.peer} is gone{f': {exc}' if exc else ''}{self._late()}")
        self._eof = True
        self._full = False
        self._gone.set()
        self._wake()
        self._wake_drains()

    def pause_writing(self) -> None:
        """The transport has enough to write."""
        self._full = True

    def resume_writing(self) -> None:
        """It takes more."""
        self._full = False
        self._wake_drains()

    # -- reading --

    async def more(self) -> None:
        """Waits until more came into `frames`. Raises `Broken` when none will."""
        self._raise_if_over()
        begun = self.frames.begun > 0
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
                self._frame_waited_s += self._loop.time() - self._wait_began

    async def exactly(self, count: int) -> bytes:
        """The next so many bytes, outside of frames. Raises `Broken`."""
        while (taken := self.frames.take(count)) is None:
            await self.more()
        return taken

    def frame_taken(self) -> None:
        """A whole frame was found."""
        self._frame_waited_s = 0.0

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error
        if self._eof:
            begun = self.frames.begun
            where = f" inside a frame ({begun} bytes of it came)" if begun else ""
            raise Broken(f"{self.peer} closed the connection{where}{self._late()}")

    def _late(self) -> str:
        """Words about this side, when it may itself be why the peer has closed."""
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
        """Whether nothing more can be written."""
        return self.error is not None or self._transport.is_closing()

    @property
    def is_ready(self) -> bool:
        """Whether a write would leave at once, as far as this side knows."""
        return not self._full and not self._inside and not self.is_over

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hands bytes to the transport."""
        self._last_write = self._loop.time()
        if self._written == self._left:
            self._progress = self._last_write
        self._written += len(data)
        self._transport.write(data)

    async def write_frame(self, frame: bytearray) -> None:
        """Writes a whole frame, waiting while the peer is slow. Raises `Broken`."""
        rest = memoryview(frame)
        # More of a large frame is handed to the transport when a slice of it has gone.
        FRAME_SLICE.exceeded_by(len(rest))
        try:
            while True:
                if self.is_over:
                    raise self.error or Broken(f"{self.peer} is gone")
                part, rest = rest[: FRAME_SLICE.limit], rest[FRAME_SLICE.limit :]
                self._inside = bool(rest)
                self.write(part)
                await self.drain()
                if not rest:
                    return
        except asyncio.CancelledError:
            if rest and not self.is_over:
                self.write(rest)
            raise
        finally:
            self._inside = False

    async def drain(self) -> None:
        """Waits until the transport takes more. Raises `Broken`."""
        if self._full and not self.is_over:
            room: asyncio.Future[None] = self._loop.create_future()
            self._drains.append(room)
            await room
        if self.is_over:
            raise self.error or Broken(f"{self.peer} is gone")

    def _wake_drains(self) -> None:
        drains, self._drains = self._drains, []
        for room in drains:
            if not room.done():
                room.set_result(None)

    # -- watching --

    def watch(self) -> None:
        """From now on progress is watched and keepalives are written."""
        self._last_write = self._progress = self._loop.time()
        self._tick()

    def _tick(self) -> None:
        """Looks at all the limits, and says when to look again."""
        now = self._loop.time()
        step = min(self._keepalive_s, self._write_s / TICKS)
        due = [now + step]
        late = self._reading_late(now, due) or self._writing_late(now, step)
        if late:
            self.fail(Broken(f"{self.peer} {late}"))
            return
        if now - self._last_write >= self._keepalive_s and not self._inside:
            if self._transport.get_write_buffer_size() == 0:
                self.write(KEEPALIVE)
        else:
            due.append(self._last_write + self._keepalive_s)
        self._timer = self._loop.call_at(max(min(due), now + 0.001), self._tick)

    def _reading_late(self, now: float, due: list[float]) -> str:
        if self._waiter is None:
            return ""
        since = max(self._received, self._wait_began)
        if now - since >= self._idle_s:
            return f"sent nothing for {self._idle_s * 1000:.0f} ms (idle_timeout_ms)"
        due.append(since + self._idle_s)
        if self.frames.begun == 0:
            return ""
        rest_s = self._frame_s - self._frame_waited_s - (now - self._wait_began)
        if rest_s <= 0:
            return (
                f"has sent {self.frames.begun} bytes of a frame and not the rest in "
                f"{self._frame_s * 1000:.0f} ms (frame_timeout_ms)"
            )
        due.append(now + rest_s)
        return ""

    def _writing_late(self, now: float, step: float) -> str:
        waiting = self._transport.get_write_buffer_size() + self._in_kernel()
        left = self._written - waiting  # over TLS more than the bytes, but it moves with them
        if waiting == 0 or left != self._left:
            # The last byte left at some moment since the last look.
            self._left, self._progress = left, now
            return ""
        if now - self._progress < self._write_s - step:
            return ""
        return (
            f"has taken nothing for {self._write_s * 1000:.0f} ms (write_timeout_ms) of "
            f"{waiting} bytes that wait for it"
        )

    def _in_kernel(self) -> int:
        """Bytes that the kernel holds and the peer's has not yet taken."""
        sock = self._transport.get_extra_info("socket")
        count = array.array("i", [0])
        try:
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
        except (OSError, ValueError, AttributeError):
            return 0  # closed, or a kernel that does not tell
        return count[0]

    def _stop_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- ending --

    def fail(self, error: PenstockError) -> None:
        """The connection is over, at once, and why. The first reason stays."""
        if self.error is None:
            self.error = error
        self.abort()
        self._wake()
        self._wake_drains()

    def abort(self) -> None:
        """Closes at once; what was not yet sent is lost."""
        self._stop_watch()
        self._transport.abort()

    async def aclose(self, limit_s: float) -> None:
        """Sends what waits, for at most `limit_s`, and closes."""
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
