"""Lists garbage blobs, and removes orphans: blobs that crashed processes wrote and never appended,
and stashed results that no reader fetched.

A blob that is about to be appended looks like an orphan. This process knows which of its own blobs
are pending (`PartStore.pending`). Another process's blob is removed only after it was seen unnamed
twice, a grace period apart.

If several processes collect orphans, a writer must name its part within half of the grace period,
or is refused (`part_store.py`). So all processes need the same `blob_orphan_grace_ms`. The
remaining risk is a request that the store executes later than the other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import anyio
import msgspec

from actors.durable.persist.location import STASH_FOLDER, BlobInfo, BlobStore
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.part_store import PartStore
from actors.durable.persist.reader import LeaseBook
from actors.durable.persist.shard import ShardState
from actors.runtime.errors import StorageError, UnknownObject
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ShardId
from actors.runtime.settings import Settings

# -- garbage blobs ---------------------------------------------------------------------------------

RETIRED = "retired"
UNNAMED = "unnamed"
STASHED = "stashed"


class GarbageBlob(msgspec.Struct, frozen=True):
    """A garbage blob, and why it is kept ("" if it may be deleted).

    - *retired*: a compaction replaced it. May be deleted if no lease was taken before that.
    - *unnamed*: no document names it, because it is about to be appended or its writer has died.
      May be deleted once it is older than the grace period.
    - *stashed*: a result on its way to a reader. May be deleted if it is not fetched in time.
    """

    key: str
    bytes: int
    age_ms: int
    kind: str
    kept: str = ""


def list_garbage(
    states: Mapping[ShardId, ShardState],
    infos: Sequence[BlobInfo],
    now_ms: int,
    *,
    grace_ms: int,
    stash_ms: int,
    ignored: frozenset[str] = frozenset(),
) -> list[GarbageBlob]:
    """Return all garbage blobs, sorted by key. Leases in `ignored` (of dead processes) pin nothing.

    This predicts, for operators, what collection (`upkeep.py`) would do. A collector also spares
    what its own process writes and reads. `states` must have been read after the listing; otherwise
    a blob that was appended in between looks unnamed.
    """
    live: set[str] = set()
    retired: dict[str, str] = {}
    for state in states.values():
        # Retired blobs are named, too, but may be deleted.
        live |= state.blob_keys() - {gone.key for gone in state.retired}
        for gone in state.retired:
            holders = [
                name
                for name, lease in state.leases.items()
                # A lease taken before the retirement may still use the blob.
                if name not in ignored and lease.seqno < gone.seqno
            ]
            retired[gone.key] = f"lease {', '.join(sorted(holders))}" if holders else ""
    found = []
    for info in infos:
        age = now_ms - info.modified_ms
        if info.key in live:
            continue
        if info.key in retired:
            found.append(GarbageBlob(info.key, info.bytes, age, RETIRED, retired[info.key]))
        elif info.key.startswith(f"{STASH_FOLDER}/"):
            kept = "" if age >= stash_ms else f"taken within {stash_ms} ms"
            found.append(GarbageBlob(info.key, info.bytes, age, STASHED, kept))
        else:
            kept = "" if age >= grace_ms else f"younger than {grace_ms} ms"
            found.append(GarbageBlob(info.key, info.bytes, age, UNNAMED, kept))
    return found


# -- collection of orphans -------------------------------------------------------------------------


class SuspectBlobs:
    """Blobs that were unnamed in every listing since they first appeared. Pure."""

    def __init__(self, grace_ms: int) -> None:
        self._grace_ms = grace_ms
        self._since: dict[str, float] = {}
        """Monotonic time of the first of these listings, by key."""

    def seen(self, keys: Iterable[str], now_ms: float) -> list[str]:
        """Process the unnamed blobs of a complete listing, made at a monotonic time. Return those
        past the grace period."""
        # Measured on our own monotonic clock between two of our listings, because a store's clock
        # is not trusted. So the first listing of a process removes nothing.
        before = self._since
        self._since = {key: before.get(key, now_ms) for key in keys}
        limit = now_ms - self._grace_ms
        return [key for key, since in self._since.items() if since <= limit]


class OrphanCollector:
    """Collects the orphans of one store, one collection at a time."""

    def __init__(
        self,
        machine: ShardMachine,
        parts: PartStore,
        blob: BlobStore,
        book: LeaseBook,
        settings: Settings,
        clock: ActorClock,
    ) -> None:
        self._machine = machine
        self._parts = parts
        self._blob = blob
        self._book = book
        self._clock = clock
        self._unnamed = SuspectBlobs(settings.blob_orphan_grace_ms)
        self._stashed = SuspectBlobs(settings.stash_orphan_ms)
        self._one = anyio.Lock()

    async def collect(self) -> int:
        """Collect once, and return the number of removed blobs. Raises `StorageError`."""
        async with self._one:
            self._parts.give_up()
            now = self._clock.monotonic_ms()
            keys = [info.key for info in await self._blob.list_keys()]
            stash = f"{STASH_FOLDER}/"
            stashed = self._stashed.seen((key for key in keys if key.startswith(stash)), now)
            count = len(await self._parts.delete(stashed))
            folders: dict[ShardId, list[str]] = {}
            for key in keys:
                if not key.startswith(stash):
                    folders.setdefault(key.partition("/")[0], []).append(key)
            unnamed: list[str] = []
            for shard, found in folders.items():
                unnamed += await self._unnamed_of(shard, found)
            due: dict[ShardId, list[str]] = {}
            for key in self._unnamed.seen(unnamed, now):
                due.setdefault(key.partition("/")[0], []).append(key)
            for shard, found in due.items():
                count += await self._remove(shard, found)
            return count

    async def _unnamed_of(self, shard: ShardId, keys: list[str]) -> list[str]:
        """Return the blobs that the cached state does not name, as a first, cheap check."""
        try:
            named = (await self._machine.state(shard)).blob_keys()
        except UnknownObject:
            named = set()
        except StorageError:
            return []  # an unreadable state may name all of them
        return [key for key in keys if key not in named and not self._parts.pending(key)]

    async def _remove(self, shard: ShardId, keys: list[str]) -> int:
        try:
            # Read after the listing, so that this state names what was appended meanwhile.
            state = await self._machine.refresh(shard)
        except StorageError:
            return 0
        named = set() if state is None else state.blob_keys()
        used = self._book.used(keys)
        # A generator: each key is checked right before it is deleted, because it may be claimed
        # meanwhile.
        gone = (
            key
            for key in keys
            if key not in named and key not in used and not self._parts.pending(key)
        )
        return len(await self._parts.delete(gone))
