"""Reads the changes of a replication slot in batches, and acknowledges positions.

Theory of operation. The server sends each transaction in full after its commit. The stream reads
ahead until one buffer is full. All data in the buffer up to the last commit is one batch: a single
small transaction when there is little load, thousands when there is much. A transaction that
exceeds the buffer is returned in pieces.

A timer of the event loop sends feedback within the server's `wal_sender_timeout`, whether or not
the stream is being read. Only positions passed to `taken` are acknowledged.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import anyio
from anyio.lowlevel import checkpoint

from actors.connectors.sources import pgoutput
from actors.connectors.sources.postgres_changes import Decoded, DecodedChanges
from actors.connectors.sources.postgres_copy import CopyFrames, CopyStream
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceUnreachable
from actors.model.pgwire.quoting import quote_literal, quote_name
from actors.runtime.kernel.clock import ActorClock
from actors.wal.lsn import lsn_text
from actors.wal.replication import pg_time

BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
LATE_MS: Final = 1_000
"""Age of a commit from which the stream waits for a larger piece (`_gather`)."""
_PIECE_FRAMES: Final = 8_192
_GATHER_S: Final = 0.005
_GATHER_TURNS: Final = 4
IDLE_MARK_MS: Final = 10_000
"""Interval of marks without changes, which only advance the position."""
_STATUS = struct.Struct(">cQQQqB")


class ReplicationStream:
    """Reads one replication slot."""

    def __init__(
        self, wire: PostgresConnection, changes: DecodedChanges, clock: ActorClock, feedback_ms: int
    ) -> None:
        self._wire = wire
        self._changes = changes
        self._clock = clock
        self._feedback_s = feedback_ms / 1000
        # The replication COPY; None before `begin` and after `close`.
        self._copy: CopyStream | None = None
        # Timer that sends feedback.
        self._timer: asyncio.TimerHandle | None = None
        # Error of a failed send; raised by `next`.
        self._broken: SourceUnreachable | None = None
        # LSN received, and LSN acknowledged; both only advance.
        self._received = self._taken = changes.lsn
        self._waiting = 0
        """Number of frames in the buffer."""
        self._whole = 0
        """Number of buffered frames up to the last commit."""
        self._late_ms = 0
        """Delay between the newest buffered commit and its sending, by the server's clock."""
        self._idle_lsn = 0
        """LSN before which the server had nothing more to send."""
        # True if a mark for the end of the log was requested, by the server or by `ask`.
        self._wants_mark = False
        # Monotonic times of the last mark, and of the last message from the server.
        self._marked_ms = self.heard_ms = clock.monotonic_ms()

    async def begin(self, slot: str, publication: str) -> None:
        """Start the replication. Raises `ServerRefused` and `SourceUnreachable`."""
        names = quote_literal(quote_name(publication))
        self._copy = await self._wire.copy(
            f"START_REPLICATION SLOT {quote_name(slot)} LOGICAL {lsn_text(self._changes.lsn)}"
            f" (proto_version '1', publication_names {names})",
            BATCH_BYTES_MAX,
        )
        self._copy.read_ahead()
        self._read(self._copy.frames())  # frames that arrived with the first response
        self._beat()

    @property
    def reached(self) -> int:
        """Return the LSN before which no relevant change is missing."""
        return max(self._changes.lsn, self._idle_lsn if not self._waiting else 0)

    async def next(self, wait_s: float) -> list[Decoded]:
        """Return changes and marks; empty if none arrive within `wait_s`. A cancelled call loses
        nothing.

        Raises `SourceUnreachable`.
        """
        copy = self._copy
        assert copy is not None, "started"
        await checkpoint()
        self._read(copy.poll())
        with anyio.move_on_after(wait_s):
            while not self._whole and not copy.full:
                if copy.ended:
                    self._read(copy.poll())  # raises the server's error if it sent one
                    raise SourceUnreachable(
                        "PostgreSQL ended the stream", "the service will reopen it"
                    )
                if given := self._idle():
                    return given
                self._read(await copy.fill())
        if self._broken is not None:
            raise self._broken
        await self._gather(copy)
        return self._batch(copy)

    async def _gather(self, copy: CopyStream) -> None:
        """Wait briefly for a larger piece if the stream is late anyway."""
        if not self._whole or self._late_ms < LATE_MS:
            return
        # Most of the cost of a small piece is not in its rows, so larger pieces catch up faster.
        for _ in range(_GATHER_TURNS):
            if self._waiting >= _PIECE_FRAMES or copy.full or copy.ended:
                return
            await anyio.sleep(_GATHER_S)  # the copy reads ahead meanwhile
            self._read(copy.poll())

    def _read(self, frames: CopyFrames) -> None:
        """Record commits, keepalives and positions in frames that have just arrived."""
        if not len(frames):
            return
        self.heard_ms = self._clock.monotonic_ms()
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

    def _batch(self, copy: CopyStream) -> list[Decoded]:
        """Return the changes of all complete transactions, or of a full buffer."""
        count = self._whole or (self._waiting if copy.full else 0)
        if not count:
            return self._idle()
        frames = copy.frames()
        batch = CopyFrames(frames.data, frames.starts[:count], frames.ends[:count])
        copy.take(count)
        self._waiting -= count
        self._whole = 0
        given = self._changes.take(pgoutput.messages(batch))
        self._marked_ms = self._clock.monotonic_ms()
        return given

    def _idle(self) -> list[Decoded]:
        """Return a mark for the end of the server's log, if one is due."""
        copy = self._copy
        if self._changes.open or copy is None:
            return []
        if self._waiting:
            frames = copy.frames()
            if (frames.data[frames.starts] == ord("w")).any():
                return []
            copy.take(self._waiting)  # only keepalives
            self._waiting = 0
        now = self._clock.monotonic_ms()
        if not self._wants_mark and now - self._marked_ms < IDLE_MARK_MS:
            return []
        # Otherwise the slot would retain other tables' log until one of our tables changes.
        given = self._changes.idle(self._idle_lsn)
        if given:
            self._wants_mark, self._marked_ms = False, now
        return given

    # -- feedback to the server ------------------------------------------------------------

    def taken(self, lsn: int) -> None:
        """Acknowledge an LSN: the server may remove the log before it."""
        self._taken = max(self._taken, lsn)
        self._tell()

    def ask(self) -> None:
        """Request a keepalive, which contains the end of the server's log."""
        self._tell(reply=True)
        self._wants_mark = True

    def _tell(self, *, reply: bool = False) -> None:
        if self._copy is None:
            return
        now_us = pg_time(self._clock.now_ms())
        seen = max(self._received, self._taken)
        try:
            # Written, flushed, applied: the server may remove the log before the flushed LSN.
            self._copy.send(_STATUS.pack(b"r", seen, self._taken, self._taken, now_us, reply))
        except SourceUnreachable as error:
            self._broken = error

    def _beat(self) -> None:
        self._tell()
        self._timer = asyncio.get_running_loop().call_later(self._feedback_s, self._beat)

    def close(self) -> None:
        """Close the connection. The slot stays."""
        if self._timer is not None:
            self._timer.cancel()
        self._copy = None
        self._wire.close()
