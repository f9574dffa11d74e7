"""Standing by: a service that waits until the one that owns the stores is gone, and then starts.

The owner beats: it changes the document `HEARTBEAT_KEY` every `heartbeat_ms`. One that stands by
looks as often, and takes over when nothing has changed for `takeover_ms` of its own clock, or at
once when the owner has said that it stops. That is a guess, and needs not be right: `fence` ends an
owner that was only slow, before anything of it can meet what its successor writes.
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
"""Time for the document that tells of the end; without it a successor waits `takeover_ms`."""

log = logging.getLogger("penstock.persist")


class OwnerHeartbeat(msgspec.Struct, frozen=True):
    """The owner's document."""

    epoch: int
    """Seqno of the epoch's document. That of this one is its number."""
    stopped: bool = False
    """True if the owner has stopped by itself."""


class OwnerObservation(msgspec.Struct, frozen=True):
    """Seqnos of both documents, as one look at the stores found them; None where one is absent."""

    epoch: int | None
    heartbeat: int | None
    stopped: bool = False
    """True if the owner of this epoch has said that it stops."""


class OwnerWatch:
    """Decides when the owner is gone. Pure: looks come with the time at which they were made."""

    def __init__(self, takeover_ms: int) -> None:
        self._takeover_ms = takeover_ms
        self._seen: OwnerObservation | None = None
        self._since_ms = 0.0

    def is_gone(self, seen: OwnerObservation, now_ms: float) -> bool:
        """Return whether the stores have no owner, after a look at `now_ms` (monotonic).

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
        # Any change counts: also a new owner's, whose heartbeat may be at the same seqno.
        if seen != self._seen:
            self._seen, self._since_ms = seen, now_ms
        if seen.epoch is None or seen.stopped:
            return True
        return now_ms - self._since_ms >= self._takeover_ms

    def miss(self) -> None:
        """Count anew from the next look: the stores did not answer, so the owner could not tell
        that it lives either.

        >>> watch = OwnerWatch(takeover_ms=3000)
        >>> watch.is_gone(OwnerObservation(0, 7), 0)
        False
        >>> watch.miss()
        >>> [watch.is_gone(OwnerObservation(0, 7), ms) for ms in (12_000, 15_000)]
        [False, True]
        """
        self._seen = None


async def read_owner(consensus: ConsensusStore) -> OwnerObservation:
    """Return what the stores tell of their owner. Raises `StorageError`, `CorruptData`."""
    epoch = await consensus.head(EPOCH_KEY)
    beat = await consensus.head(HEARTBEAT_KEY)
    if epoch is None or beat is None:
        return OwnerObservation(_seqno(epoch), _seqno(beat))
    told = _decoded(beat.data)
    # A document that an earlier owner left says nothing of this one.
    return OwnerObservation(epoch.seqno, beat.seqno, told.stopped and told.epoch == epoch.seqno)


async def wait_for_stores(
    consensus: ConsensusStore, settings: Settings, clock: ActorClock
) -> OwnerObservation:
    """Wait until the stores have no owner, and return the last look. A store that does not answer
    is asked again. Raises `CorruptData`."""
    watch, told = OwnerWatch(settings.takeover_ms), False
    while True:
        try:
            seen = await read_owner(consensus)
            if watch.is_gone(seen, clock.monotonic_ms()):
                return seen
            if not told:
                log.info("standing by: another service owns the stores")
                told = True
        except CorruptData:
            # Waiting would not help, and a takeover could destroy what a newer release wrote.
            raise
        except StorageError as error:
            watch.miss()
            log.warning("standing by: the stores do not answer: %s", error)
        await anyio.sleep(settings.heartbeat_ms / 1000)


async def send_heartbeats(fence: FencedConsensus, settings: Settings) -> None:
    """Tell that the owner is alive, until cancelled or fenced. Raises nothing."""
    while not fence.fenced.is_set():
        await _tell(fence, stopped=False)
        await anyio.sleep(settings.heartbeat_ms / 1000)


async def announce_stop(fence: FencedConsensus) -> None:
    """Tell a successor that this owner stops, so that it need not wait. The owner's last write.
    Raises nothing."""
    with anyio.move_on_after(_STOP_SECONDS, shield=True):
        await _tell(fence, stopped=True)


async def _tell(fence: FencedConsensus, *, stopped: bool) -> None:
    try:
        # Read each time: whether the set before happened may be unknown.
        head = await fence.head(HEARTBEAT_KEY)
        told = msgspec.msgpack.encode(OwnerHeartbeat(fence.seqno, stopped))
        await fence.compare_and_set([CompareAndSet(HEARTBEAT_KEY, _seqno(head), told)])
    except WriterFenced:
        return  # `follow` tells of it
    except StorageError as error:
        log.warning("a heartbeat was not written: %s", error)


def _seqno(head: VersionedData | None) -> int | None:
    return None if head is None else head.seqno


def _decoded(data: bytes) -> OwnerHeartbeat:
    try:
        return msgspec.msgpack.decode(data, type=OwnerHeartbeat)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"document {HEARTBEAT_KEY} cannot be decoded: {error}", determinate=True
        ) from None
