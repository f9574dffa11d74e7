"""Streams a timeline's log to a reader that asked for it by START_REPLICATION.

Pieces of the log go out in order, from the LSN that was asked for, up to the commit LSN; with a
term, up to the flushed LSN, for as long as the acceptor is in that term. After `KEEPALIVE_MS`
without news a keepalive goes. Concurrently, what the reader sends is handled: a standby's oldest
transactions count for as long as it is connected, a consumer's feedback goes to all proposers.
"""

from __future__ import annotations

from typing import Final

import anyio

from actors.kernel import ActorClock
from actors.wal.messages import HotStandbyFeedback, PageserverFeedback
from actors.wal.receiver import CopyEnd, ReceiverConnection
from actors.wal.replication import keepalive, parse_reader, piece_bytes, xlog_data
from actors.wal.startup import StartReplication
from actors.wal.timeline import LogEnds, WalTimeline

KEEPALIVE_MS: Final = 1_000


class WalSender:
    """Serves one reader; `run` is its whole life."""

    def __init__(
        self,
        wire: ReceiverConnection,
        timeline: WalTimeline,
        asked: StartReplication,
        number: int,
        clock: ActorClock,
    ) -> None:
        self._wire = wire
        self._timeline = timeline
        self._asked = asked
        self._number = number
        self._clock = clock
        self._at = asked.start_lsn
        self._consumed = 0
        """LSN up to which a consumer has all, as it reported; 0: no consumer."""

    async def run(self) -> CopyEnd | None:
        """Serve the reader, and return how it ended that; None: it has all, and no proposer is
        connected. Raises `WalRefused`, `InvalidUsage`, `StorageError`, `ConnectionBroken`,
        `MalformedFrame`."""
        ended: list[CopyEnd | None] = []
        try:
            async with anyio.create_task_group() as group:

                async def hear() -> None:
                    ended.append(await self._hear())
                    group.cancel_scope.cancel()

                group.start_soon(hear)
                await self._send()
                ended.append(None)
                group.cancel_scope.cancel()
        finally:
            self._timeline.hot_standby(self._number, None)
        return ended[0]

    def _target(self, ends: LogEnds) -> int:
        return ends.commit_lsn if self._asked.term is None else ends.flush_lsn

    async def _send(self) -> None:
        timeline, term = self._timeline, self._asked.term
        while True:
            target = self._target(timeline.ends.value)
            if self._at < target:
                size = piece_bytes(self._at, target)
                wal = await timeline.read(self._at, size, term)
                await self._wire.send_copy(xlog_data(self._at, target, self._clock.now_ms(), wal))
                self._at += size
                continue
            with anyio.move_on_after(KEEPALIVE_MS / 1000):
                await timeline.ends.until(self._moved)
                if self._target(timeline.ends.value) > self._at:
                    continue
            timeline.check_running()
            if term is not None:
                # Reads no bytes, but checks the term under the disk's lock.
                await timeline.read(self._at, 0, term)
            # A consumer may leave when it has all that is committed and no proposer is connected
            # that could bring more (one that votes will); it comes back when there is more.
            if self._is_done():
                return
            said = keepalive(target, self._clock.now_ms(), wants_reply=True)
            await self._wire.send_copy(said)

    def _moved(self, ends: LogEnds) -> bool:
        other = self._asked.term is not None and ends.term != self._asked.term
        return other or self._target(ends) > self._at

    def _is_done(self) -> bool:
        commit = self._timeline.ends.value.commit_lsn
        return 0 < commit <= self._consumed and not self._timeline.registry.count

    async def _hear(self) -> CopyEnd:
        while True:
            data = await self._wire.next_copy()
            if isinstance(data, CopyEnd):
                return data
            match parse_reader(data):
                case HotStandbyFeedback() as feedback:
                    self._timeline.hot_standby(self._number, feedback)
                case PageserverFeedback() as feedback:
                    self._consumed = feedback.remote_consistent_lsn
                    await self._timeline.consumed(feedback)
                case _:
                    pass  # a standby's position is not used
