"""Background tasks of the controller, which run as long as the service does.

Maintenance compacts shards that grew, at intervals, reclaims the space of those that no longer
grow, and removes orphaned blobs. A shard whose maintenance fails is retried when it grows again;
failures are only logged.

A second task follows the changes that other processes make in the same stores. When its watch ends,
it halts the service: either another service has taken over the stores (`WriterFenced`), or the
stores no longer report changes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, assert_never

import msgspec

from actors.control.controller.messages import MaintenanceMessage, ShardsAppended, ShardsDropped
from actors.durable.persist import PersistClient
from actors.durable.persist.reader import RENEWALS
from actors.runtime.errors import ResourceClosed, UnknownObject
from actors.runtime.kernel import Actor, RunningEffect
from actors.runtime.progress import ShardId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.maintenance")

# -- changes of other processes --------------------------------------------------------------------


class _Ended(msgspec.Struct, frozen=True, gc=False):
    error: Exception


class FollowTask(Actor[_Ended]):
    """Runs `watch` over the changes of other processes for as long as the service runs. When
    `watch` ends, calls `halt` once with its error: another service has taken over the stores
    (`WriterFenced`), or the stores no longer report changes."""

    def __init__(
        self, watch: Callable[[], Awaitable[None]], halt: Callable[[Exception], None]
    ) -> None:
        self._watch = watch
        self._halt = halt

    async def on_start(self) -> None:
        self.ctx.effect(
            self._watch,
            done=lambda _: _Ended(ResourceClosed("the stores no longer report changes")),
            failed=_Ended,
        )

    async def receive(self, message: _Ended) -> None:
        log.error("halting: %s", message.error)
        self._halt(message.error)


# -- maintenance -----------------------------------------------------------------------------------


class _Due(msgspec.Struct, frozen=True, gc=False):
    """The timer of the next round has fired."""


class _ReclaimDue(msgspec.Struct, frozen=True, gc=False):
    """Another `reclaim_ms` has passed."""


class _OrphansDue(msgspec.Struct, frozen=True, gc=False):
    """The grace period of orphans has passed."""


class _Maintained(msgspec.Struct, frozen=True, gc=False):
    shard: ShardId
    error: Exception | None = None


class _Collected(msgspec.Struct, frozen=True, gc=False):
    count: int
    error: Exception | None = None


_Message: TypeAlias = (
    MaintenanceMessage | _Due | _ReclaimDue | _OrphansDue | _Maintained | _Collected
)


class MaintenanceTask(Actor[_Message]):
    """Compacts shards and removes orphans."""

    def __init__(self, persist: PersistClient, settings: Settings) -> None:
        self._persist = persist
        self._settings = settings
        self._grown: dict[ShardId, None] = {}
        """Shards that grew, in the order in which they first did; maintained and removed one by
        one."""
        self._kept: dict[ShardId, None] = {}
        """Shards whose space will be reclaimed, whether they grew or not; refilled every
        `reclaim_ms`."""
        self._grown_last = False
        """True if the last maintained shard was one that grew: the others have their turn next."""
        self._running: str | None = None
        """Readable description of the running work; None if idle."""
        # The first collection of a process only lists orphans; a later one removes what an earlier
        # process left.
        self._orphans_due = True
        self._orphans_timer: RunningEffect | None = None
        """Timer of the next collection of orphans."""
        self._done = 0
        """Number of maintenance runs and collections that have ended."""
        self._failed = 0
        """Number of them that failed."""

    async def on_start(self) -> None:
        self.ctx.after(self._settings.maintenance_ms, _Due())
        self.ctx.after(self._reclaim_ms, _ReclaimDue())

    @property
    def _reclaim_ms(self) -> int:
        # Within a lease's lifetime, so that the lease of a dead process is noticed long before it
        # expires.
        return max(1, min(self._settings.reclaim_ms, self._settings.reader_lease_ms // RENEWALS))

    async def receive(self, message: _Message) -> None:
        match message:
            case ShardsAppended(shards):
                self._grown.update(dict.fromkeys(shards))
            case ShardsDropped(shards):
                for shard in shards:
                    self._grown.pop(shard, None)
                    self._kept.pop(shard, None)
                self._orphans_due = True
            case _ReclaimDue():
                self.ctx.after(self._reclaim_ms, _ReclaimDue())
                self._kept |= dict.fromkeys(self._persist.known_shards())
            case _Due():
                self.ctx.after(self._settings.maintenance_ms, _Due())
                self._next()
            case _OrphansDue():
                self._orphans_due = True
            case _Maintained(shard, error):
                self._finished(f"maintenance of shard {shard}", error)
                self._next()
            case _Collected(count, error):
                self._finished("collection of orphans", error)
                if count:
                    log.info("removed %d orphaned blobs", count)
                if self._orphans_timer is not None:
                    self._orphans_timer.cancel()
                # A blob is removed only after two collections, one grace period apart, found no
                # reference to it.
                delay = self._settings.blob_orphan_grace_ms
                self._orphans_timer = self.ctx.after(delay, _OrphansDue())
            case _:
                assert_never(message)

    def _next(self) -> None:
        # Maintain one shard at a time, to limit the resources that compaction takes.
        if self._running is not None:
            return
        if self._orphans_due:
            self._orphans_due = False
            self._running = "collecting orphans"
            self.ctx.effect(
                self._persist.collect_orphans,
                done=_Collected,
                failed=lambda error: _Collected(0, error),
            )
        elif self._grown and not (self._kept and self._grown_last):
            self._grown_last = True
            shard = next(iter(self._grown))
            del self._grown[shard]
            self._keep_small(shard, self._persist.maintain)
        elif self._kept:
            self._grown_last = False
            shard = next(iter(self._kept))
            del self._kept[shard]
            self._keep_small(shard, self._persist.reclaim)

    def _keep_small(self, shard: ShardId, run: Callable[[ShardId], Awaitable[None]]) -> None:
        self._running = f"maintaining {shard}"
        self.ctx.effect(
            lambda: run(shard),
            done=lambda _: _Maintained(shard),
            failed=lambda error: _Maintained(shard, error),
        )

    def _finished(self, what: str, error: Exception | None) -> None:
        self._running = None
        self._done += 1
        # A shard that was dropped in the meantime is not a failure.
        if error is not None and not isinstance(error, UnknownObject):
            self._failed += 1
            log.warning("%s failed: %s: %s", what, type(error).__name__, error)

    def describe(self) -> str:
        state = self._running or "idle"
        waiting = len(self._grown)
        return f"{state}; {waiting} shards waiting; {self._done} done, {self._failed} failed"
