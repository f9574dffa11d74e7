"""Copies the complete committed segments of all timelines into a `WalArchive`.

Every ``wal_offload_ms`` each timeline is checked. Its next segment is the one at its `backup_lsn`,
and is due once all of it is committed. It is read here and archived (the archive reads it back);
only then does `backup_lsn` advance to its end. After a crash in between, this is repeated with the
same bytes.

All acceptors of a log have the same committed bytes, so any of them may archive a segment, and two
doing it at the same time is harmless. To share the work they take turns (`archive_turn`) by the
segment's number and their own. The first archives immediately; the others do if the segment is not
archived after ``wal_offload_turn_ms``, or several segments later.

Segments are archived in order, without gaps. A failure is retried after a random, growing pause,
independently for each timeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final

import anyio
import anyio.abc
import msgspec

from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorClock, with_jitter
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import (
    WAL_BACKUP_LAG,
    WAL_OFFLOAD_FAILURES,
    WAL_OFFLOADED,
)
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.wal.archive import WalArchive
from actors.wal.lsn import SEGMENT_BYTES, lsn_text
from actors.wal.timeline import WalTimeline

log = logging.getLogger("penstock.wal")

TURNS: Final = 3
"""Usual number of acceptors of a log."""
READ_BYTES: Final = 1 << 20
"""Number of log bytes read in one call, while appends wait."""


def next_segment(backup_lsn: int, commit_lsn: int) -> int | None:
    """Return the number of the next segment to archive, or None if it is not fully committed yet.

    A `backup_lsn` of 0 means that the start of the log is not known yet.
    """
    if not backup_lsn:
        return None
    number = backup_lsn // SEGMENT_BYTES
    return number if (number + 1) * SEGMENT_BYTES <= commit_lsn else None


def archive_turn(node_id: int, number: int) -> int:
    """Return after how many other acceptors this one archives a segment: 0 to ``TURNS - 1``."""
    return (node_id + number) % TURNS


def is_due(own_turn: int, ahead_segments: int, waited_ms: float, turn_ms: int) -> bool:
    """Return whether an acceptor should stop waiting for those whose turn comes first.

    `ahead_segments` is the number of committed segments after the one in question.
    """
    # Two segments late for each acceptor whose turn comes first: those seem to be down.
    return waited_ms >= own_turn * turn_ms or ahead_segments >= 2 * own_turn


class _Progress(msgspec.Struct):
    """Progress of one timeline."""

    number: int = -1
    """Number of the segment to archive next."""
    since_ms: float = 0.0
    """Time at which this segment was first seen to be due."""
    failures: int = 0
    """Number of consecutive failures."""
    not_before_ms: float = 0.0
    """Time before which it is not tried again."""


class SegmentOffload:
    """Archives segments of the served timelines, which `timelines` returns."""

    def __init__(
        self,
        timelines: Callable[[], Sequence[WalTimeline]],
        node_id: int,
        archive: WalArchive,
        clock: ActorClock,
        settings: Settings,
        random: Random,
    ) -> None:
        self._timelines = timelines
        self._node_id = node_id
        self._archive = archive
        self._clock = clock
        self._settings = settings
        self._random = random
        self._progress: dict[tuple[str, str], _Progress] = {}
        """Progress of each timeline, by tenant and name."""

    async def run(self) -> None:
        """Archive segments, until cancelled."""
        while True:
            # After progress the next segment may already be due.
            if not await self.look():
                await anyio.sleep(self._settings.wal_offload_ms / 1000)

    def measures(self) -> Iterator[Measurement]:
        """Yield how much of each served timeline is not archived yet."""
        for timeline in self._timelines():
            state = timeline.acceptor.state
            lag = max(0, state.commit_lsn - state.backup_lsn)
            yield Measurement(WAL_BACKUP_LAG, lag, (timeline.name,))

    async def look(self) -> bool:
        """Look at every timeline once, and return whether any made progress. Errors of the archive
        are logged."""
        came_on = False
        for timeline in self._timelines():
            # `TimelineRegistry` opens a stopped timeline again, as another object.
            if timeline.acceptor.stopped is None:
                came_on |= await self._look_at(timeline)
        return came_on

    async def _look_at(self, timeline: WalTimeline) -> bool:
        state = timeline.acceptor.state
        number = next_segment(state.backup_lsn, state.commit_lsn)
        if number is None:
            return False
        progress = self._progress.setdefault((timeline.tenant, timeline.name), _Progress())
        now_ms = self._clock.monotonic_ms()
        if progress.number != number:
            progress.number, progress.since_ms = number, now_ms
        if now_ms < progress.not_before_ms:
            return False
        try:
            kept = await self._keep(timeline, number, now_ms - progress.since_ms)
        except PenstockError as error:
            progress.failures += 1
            # Use jitter, because the acceptors of a log must not all retry at the same time.
            delay_ms = self._settings.retry_delay_ms(progress.failures)
            pause_ms = round(with_jitter(delay_ms, self._random))
            progress.not_before_ms = self._clock.monotonic_ms() + pause_ms
            measure(WAL_OFFLOAD_FAILURES, 1)
            log.warning(
                "cannot archive segment %d of timeline %s, next attempt in %d ms: %s: %s",
                number,
                timeline.name,
                pause_ms,
                type(error).__name__,
                error,
            )
            return False
        progress.failures, progress.not_before_ms = 0, 0.0
        return kept

    async def _keep(self, timeline: WalTimeline, number: int, waited_ms: float) -> bool:
        """Archive a segment if it is this acceptor's turn. Return whether any acceptor has archived
        it."""
        begin_lsn, end_lsn = number * SEGMENT_BYTES, (number + 1) * SEGMENT_BYTES
        ahead = (timeline.acceptor.commit_lsn - end_lsn) // SEGMENT_BYTES
        own = archive_turn(self._node_id, number)
        mine = is_due(own, ahead, waited_ms, self._settings.wal_offload_turn_ms)
        if not mine and not await self._archive.has(timeline.tenant, timeline.name, number):
            return False
        # Do this even if another acceptor has archived it: `WalArchive.keep` compares the bytes,
        # and no acceptor removes a segment that it has not verified in the archive.
        pieces = [
            await timeline.read(at, READ_BYTES, None)
            for at in range(begin_lsn, end_lsn, READ_BYTES)
        ]
        data = b"".join(pieces)
        if await self._archive.keep(timeline.tenant, timeline.name, number, data):
            measure(WAL_OFFLOADED, 1)
            log.info("timeline %s is archived up to %s", timeline.name, lsn_text(end_lsn))
        await timeline.backed_up(end_lsn)
        return True
