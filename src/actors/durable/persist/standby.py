"""Standby: a service that waits until the owner of the stores has failed, and then starts.

The owner sends heartbeats: it changes the document `HEARTBEAT_KEY` every `heartbeat_ms`. A standby
checks as often, and takes over if nothing has changed for `takeover_ms` of its own clock, or
immediately if the owner has announced that it stops. This is only a guess, which need not be right:
if the owner was merely slow, `fence` stops it before any of its writes can conflict with its
successor's.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
import msgspec

from actors.durable.persist.fence import EPOCH_KEY, FencedConsensus
from actors.durable.persist.location import CompareAndSet, ConsensusStore, VersionedData
from actors.runtime.errors import CorruptData, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings

HEARTBEAT_KEY: Final = "heartbeat"
_STOP_SECONDS: Final = 2.0
"""Maximum time for writing the document that announces the stop. Without it, a successor waits for
`takeover_ms`."""

log = logging.getLogger("penstock.persist")


class OwnerHeartbeat(msgspec.Struct, frozen=True):
    """The owner's heartbeat document. Its seqno counts the heartbeats."""

    epoch: int
    """Seqno of the owner's epoch document."""
    stopped: bool = False
    """True if the owner has stopped in an orderly way."""


class OwnerObservation(msgspec.Struct, frozen=True):
    """Seqnos of both documents, as read at one time; None where a document does not exist."""

    epoch: int | None
    heartbeat: int | None
    stopped: bool = False
    """True if the owner of this epoch has announced that it stops."""


class OwnerWatch:
    """Decides when the owner has failed. Pure: observations come with the time at which they were
    made."""

    def __init__(self, takeover_ms: int) -> None:
        self._takeover_ms = takeover_ms
        # The last distinct observation (None to start over), and when it was first made.
        self._seen: OwnerObservation | None = None
        self._since_ms = 0.0

    def is_gone(self, seen: OwnerObservation, now_ms: float) -> bool:
        """Return whether the stores have no owner, given an observation at `now_ms` (monotonic).

        >>> watch = OwnerWatch(takeover_ms=3000)
        >>> [watch.is_gone(OwnerObservation(0, 7), ms) for ms in (0, 2000, 3000)]
        [False, False, True]
        >>> watch.is_gone(OwnerObservation(0, 8), 3100)
        False
        >>> watch.is_gone(OwnerObservation(0, 9, stopped=True), 3200)
        True
        >>> OwnerWatch(3000).is_gone(OwnerObservation(None, None), 0)
        True
        """
        # Any change counts, including a new owner, whose heartbeat may be at the same seqno.
        if seen != self._seen:
            self._seen, self._since_ms = seen, now_ms
        if seen.epoch is None or seen.stopped:
            return True
        return now_ms - self._since_ms >= self._takeover_ms

    def miss(self) -> None:
        """Start the period over at the next observation: the stores did not respond, so the owner
        could not send a heartbeat either.

        >>> watch = OwnerWatch(takeover_ms=3000)
        >>> watch.is_gone(OwnerObservation(0, 7), 0)
        False
        >>> watch.miss()
        >>> [watch.is_gone(OwnerObservation(0, 7), ms) for ms in (12_000, 15_000)]
        [False, True]
        """
        self._seen = None


async def read_owner(consensus: ConsensusStore) -> OwnerObservation:
    """Read both documents of the owner. Raises `StorageError` and `CorruptData`."""
    epoch = await consensus.head(EPOCH_KEY)
    beat = await consensus.head(HEARTBEAT_KEY)
    if epoch is None or beat is None:
        return OwnerObservation(_seqno(epoch), _seqno(beat))
    heartbeat = _decoded(beat.data)
    # A document left by an earlier owner says nothing about this one.
    return OwnerObservation(
        epoch.seqno, beat.seqno, heartbeat.stopped and heartbeat.epoch == epoch.seqno
    )


async def wait_for_stores(
    consensus: ConsensusStore, settings: Settings, clock: ActorClock
) -> OwnerObservation:
    """Wait until the stores have no owner, and return the last observation. Keeps trying while the
    store does not respond. Raises `CorruptData`."""
    watch, logged = OwnerWatch(settings.takeover_ms), False
    while True:
        try:
            seen = await read_owner(consensus)
            if watch.is_gone(seen, clock.monotonic_ms()):
                return seen
            if not logged:
                log.info("standing by: another service owns the stores")
                logged = True
        except CorruptData:
            # Waiting would not help, and a takeover could destroy what a newer release wrote.
            raise
        except StorageError as error:
            watch.miss()
            log.warning("standing by: the stores do not respond: %s", error)
        await anyio.sleep(settings.heartbeat_ms / 1000)


async def send_heartbeats(fence: FencedConsensus, settings: Settings) -> None:
    """Send heartbeats until cancelled or fenced. Raises nothing."""
    while not fence.fenced.is_set():
        await _tell(fence, stopped=False)
        await anyio.sleep(settings.heartbeat_ms / 1000)


async def announce_stop(fence: FencedConsensus) -> None:
    """Announce that this owner stops, so that a successor need not wait. The owner's last write.
    Raises nothing."""
    with anyio.move_on_after(_STOP_SECONDS, shield=True):
        await _tell(fence, stopped=True)


async def _tell(fence: FencedConsensus, *, stopped: bool) -> None:
    try:
        # Read each time, because the outcome of the previous set may be unknown.
        head = await fence.head(HEARTBEAT_KEY)
        encoded = msgspec.msgpack.encode(OwnerHeartbeat(fence.seqno, stopped))
        await fence.compare_and_set([CompareAndSet(HEARTBEAT_KEY, _seqno(head), encoded)])
    except WriterFenced:
        return  # `follow` raises it
    except StorageError as error:
        log.warning("could not write a heartbeat: %s", error)


def _seqno(head: VersionedData | None) -> int | None:
    return None if head is None else head.seqno


def _decoded(data: bytes) -> OwnerHeartbeat:
    try:
        return msgspec.msgpack.decode(data, type=OwnerHeartbeat)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"cannot decode document {HEARTBEAT_KEY}: {error}", determinate=True
        ) from None
