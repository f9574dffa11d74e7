"""The changes from a replication slot: read, answered, and handed on a batch at a time.

Theory of operation. The server sends a transaction when it has committed, whole, one after
another; it is read as it comes, also while nobody asks, until one buffer is full. Everything in
that up to the last commit is a batch. So batches are as large as the time between two questions
made them: one small transaction when there is little to do, thousands when there is much. Who is
late waits a moment for a larger batch, since most of what a small one costs is not its rows. A
transaction that does not fit the buffer is handed on in pieces.

The server wants to hear from us before its `wal_sender_timeout`: a timer of the loop tells it,
also while nobody asks for more. It may forget what `taken` named, no more. When it has nothing
for us, its keepalives tell how far its log has gone: then that becomes our position, at times.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import anyio
from anyio.lowlevel import checkpoint

from actors.kernel.clock import Clock
from actors.sources import pgoutput
from actors.sources.pgoutput import EPOCH_MS
from actors.sources.postgres_catalog import lsn_text
from actors.sources.postgres_changes import Changes
from actors.sources.postgres_copy import Copy
from actors.sources.postgres_frames import Frames
from actors.sources.postgres_names import identifier, literal
from actors.sources.postgres_wire import Wire
from actors.sources.source import Given, Unreachable

BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
LATE_MS: Final = 1_000
"""What the server sends so long after its commit may wait until a piece is larger (`_gather`)."""
_PIECE_FRAMES: Final = 8_192
_GATHER_S: Final = 0.005
_GATHER_TURNS: Final = 4
IDLE_MARK_MS: Final = 10_000
"""Between two marks that only tell that the server's log went on."""
_STATUS = struct.Struct(">cQQQqB")


class Stream:
    """A slot being read."""

    def __init__(self, wire: Wire, changes: Changes, clock: Clock, feedback_ms: int) -> None:
        self._wire = wire
        self._changes = changes
        self._clock = clock
        self._feedback_s = feedback_ms / 1000
        self._copy: Copy | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._broken: Unreachable | None = None
        self._received = self._taken = changes.lsn
        self._waiting = 0
        """Frames in the buffer."""
        self._whole = 0
        """Of them, up to the last commit."""
        self._late_ms = 0
        """Between the newest commit in the buffer and its sending, by the server's clock."""
        self._idle_lsn = 0
        """The server had nothing more for us before it."""
        self._wants_mark = False
        self._marked_ms = clock.monotonic_ms()

    async def begin(self, slot: str, publication: str) -> None:
        """Raises `Refused`, `Unreachable`."""
        names = literal(identifier(publication))
        self._copy = await self._wire.copy(
            f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {lsn_text(self._changes.lsn)}"
            f" (proto_version '1', publication_names {names})",
            BATCH_BYTES_MAX,
        )
        self._copy.read_ahead()
        self._read(self._copy.frames())  # they came with the server's first word
        self._beat()

    @property
    def reached(self) -> int:
        """Nothing for us is missing before this position."""
        return max(self._changes.lsn, self._idle_lsn if not self._waiting else 0)

    async def next(self, wait_s: float) -> list[Given]:
        """What comes next; empty when nothing came for so long. Cancelled, it has lost nothing.
        Raises `Unreachable`."""
        copy = self._copy
        assert copy is not None, "begun"
        await checkpoint()
        self._read(copy.poll())
        with anyio.move_on_after(wait_s):
            while not self._whole and not copy.full:
                if copy.ended:
                    self._read(copy.poll())  # it says why, if it was told
                    raise Unreachable("PostgreSQL ended the stream", "it is opened again")
                if given := self._idle():
                    return given
                self._read(await copy.fill())
        if self._broken is not None:
            raise self._broken
        await self._gather(copy)
        return self._batch(copy)

    async def _gather(self, copy: Copy) -> None:
        """Waits for a larger piece, where that is in nobody's way: we are late as it is."""
        if not self._whole or self._late_ms < LATE_MS:
            return
        for _ in range(_GATHER_TURNS):
            if self._waiting >= _PIECE_FRAMES or copy.full or copy.ended:
                return
            await anyio.sleep(_GATHER_S)  # it reads ahead meanwhile
            self._read(copy.poll())

    def _read(self, frames: Frames) -> None:
        """Looks over what has just come."""
        if not len(frames):
            return
        self._received = max(self._received, pgoutput.received(frames))
        commits = pgoutput.is_commit(frames).nonzero()[0]
        alive = pgoutput.keepalive(frames)
        if len(commits):
            self._whole = self._waiting + int(commits[-1]) + 1
            self._late_ms = pgoutput.late_ms(frames, int(commits[-1]))
        self._waiting += len(frames)
        if alive is not None:
            self._idle_lsn = max(self._idle_lsn, alive.end)
            if alive.wants_reply:
                self._wants_mark = True
                self._tell()

    def _batch(self, copy: Copy) -> list[Given]:
        """What has come and is whole, or fills the buffer."""
        count = self._whole or (self._waiting if copy.full else 0)
        if not count:
            return self._idle()
        frames = copy.frames()
        batch = Frames(frames.data, frames.starts[:count], frames.ends[:count])
        copy.take(count)
        self._waiting -= count
        self._whole = 0
        given = self._changes.take(pgoutput.messages(batch))
        self._marked_ms = self._clock.monotonic_ms()
        return given

    def _idle(self) -> list[Given]:
        """A mark for where the server's log is, when it is time for one."""
        copy = self._copy
        if self._changes.open or copy is None:
            return []
        if self._waiting:
            frames = copy.frames()
            if (frames.data[frames.starts] == ord("w")).any():
                return []
            copy.take(self._waiting)  # keepalives alone
            self._waiting = 0
        now = self._clock.monotonic_ms()
        if not self._wants_mark and now - self._marked_ms < IDLE_MARK_MS:
            return []
        given = self._changes.idle(self._idle_lsn)
        if given:
            self._wants_mark, self._marked_ms = False, now
        return given

    # -- what the server hears -------------------------------------------------------------

    def taken(self, lsn: int) -> None:
        """The server may forget what lies before it."""
        self._taken = max(self._taken, lsn)
        self._tell()

    def ask(self) -> None:
        """Asks the server how far it is: a keepalive will come."""
        self._tell(reply=True)
        self._wants_mark = True

    def _tell(self, *, reply: bool = False) -> None:
        if self._copy is None:
            return
        now_us = (self._clock.now_ms() - EPOCH_MS) * 1000
        seen = max(self._received, self._taken)
        try:
            self._copy.send(_STATUS.pack(b"r", seen, self._taken, self._taken, now_us, reply))
        except Unreachable as error:
            self._broken = error

    def _beat(self) -> None:
        self._tell()
        self._timer = asyncio.get_running_loop().call_later(self._feedback_s, self._beat)

    def close(self) -> None:
        """Ends the connection; the slot stays."""
        if self._timer is not None:
            self._timer.cancel()
        self._copy = None
        self._wire.close()
