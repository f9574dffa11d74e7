"""Takes a backup, from an external process, of stores that a service may be using.

**Consistent.** All documents are read by one statement of the store, as of one instant. Blobs never
change, so the backup represents exactly that instant once every blob that the documents name is in
the target. Each blob is checked against its size and checksum.

**Guaranteed to finish.** A blob may be deleted once it is compacted away or its table is dropped.
So first every shard gets a guest reader's lease at its since (`split_leases.py`), which the owner
preserves as long as it is renewed: no blob of a leased state is deleted. Blobs of a dropped shard
may still be deleted; then the documents, which no longer name them, are read again.

An interrupted backup leaves blobs that the next one reuses, leases that expire, and no manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from random import SystemRandom
from typing import Final, TypeVar

import anyio
import msgspec

from actors.durable.persist.attach import AttachedClient
from actors.durable.persist.backup_format import (
    BackupManifest,
    BackupTarget,
    SavedBlob,
    SavedDocument,
    check_bytes,
    sorted_documents,
)
from actors.durable.persist.documents import decode_shard
from actors.durable.persist.location import BlobStore
from actors.durable.persist.part_lists import PartLists, Parts, with_parts
from actors.durable.persist.registrations import REGISTRATION_PREFIX
from actors.durable.persist.shard import shard_key
from actors.durable.persist.split_leases import SplitLease, SplitLeases
from actors.runtime.errors import (
    PenstockError,
    ReadBelowSince,
    StorageError,
    UnknownObject,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ShardId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.backup")

R = TypeVar("R")
ATTEMPTS_MAX: Final = 8
RENEWALS: Final = 4
"""Number of renewals within the duration of a lease."""
Progress = Callable[[int, int], None]
"""Called with the number of bytes copied, and the total."""


class BackupReport(msgspec.Struct, frozen=True):
    """A backup that was taken, and how much of it had to be copied."""

    manifest: BackupManifest
    copied_blobs: int
    copied_bytes: int
    removed_blobs: int = 0


class _BlobVanished(StorageError):
    """A blob was deleted before it was copied."""


class BackupLeases:
    """Leases on shards while their blobs are copied."""

    def __init__(self, attached: AttachedClient, settings: Settings, clock: ActorClock) -> None:
        self._handed = SplitLeases(attached.consensus, attached.blob, settings, clock)
        self._name = f"backup-{attached.name}"
        self._interval_s = settings.reader_lease_ms / RENEWALS / 1000
        self.held: dict[ShardId, SplitLease] = {}
        """Leases held, by shard."""

    async def hold_during(self, call: Callable[[], Awaitable[R]]) -> R:
        """Return the result of a call. Renew the leases while it runs, and drop them when it ends.
        Raises what the call raises."""
        made: list[R] = []
        failures: list[PenstockError] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._renew)
            try:
                made.append(await call())
            # Raised below, because the task group would wrap it.
            except PenstockError as error:
                failures.append(error)
            finally:
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._drop()
        if failures:
            raise failures[0]
        return made[0]

    async def take(self, shards: Iterable[ShardId]) -> None:
        """Lease the shards, each at its since. Shards that do not exist are skipped. Raises
        `StorageError` and `ResourceBusy`."""
        for shard in shards:
            with suppress(UnknownObject):
                self.held[shard] = await self._take(shard)

    async def _take(self, shard: ShardId) -> SplitLease:
        for _ in range(ATTEMPTS_MAX):
            state, _ = await self._handed.look(shard)
            with suppress(ReadBelowSince):  # the since has moved meanwhile
                return (await self._handed.take(shard, self._name, state.since))[1]
        raise StorageError(
            f"cannot lease shard {shard}: its since advances too fast", determinate=True
        )

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(self._interval_s)
            for lease in list(self.held.values()):
                # A lost lease does no harm: a missing blob is detected when it is read.
                with suppress(PenstockError):
                    await self._handed.keep(lease, ())

    async def _drop(self) -> None:
        # Forgotten immediately, because another attempt must take new ones.
        held, self.held = self.held, {}
        for lease in held.values():
            try:
                await self._handed.drop(lease)
            except UnknownObject:
                pass
            except PenstockError as error:
                log.warning(
                    "could not drop the lease on %s, it will expire: %s", lease.shard, error
                )


class BlobCopier:
    """Copies blobs from one store to another, several at a time, each checked against its
    description."""

    def __init__(
        self, source: BlobStore, into: BlobStore, clock: ActorClock, at_once: int, where: str
    ) -> None:
        """Make a copier. `where` names the source for display, and `at_once` limits the concurrent
        copies."""
        self._source = source
        self._into = into
        self._clock = clock
        self._at_once = at_once
        self._where = where

    async def copy(
        self,
        blobs: Sequence[SavedBlob],
        note: Callable[[int], None],
        vanished: Callable[[SavedBlob], PenstockError] | None = None,
    ) -> None:
        """Copy the blobs, calling `note` with the size of each. Raises `CorruptData` and
        `StorageError`, and what `vanished` returns for a missing blob."""
        left = iter(blobs)
        failures: list[PenstockError] = []

        async def work(scope: anyio.CancelScope) -> None:
            for blob in left:
                try:
                    await self._copy(blob, vanished)
                    note(blob.bytes)
                # Raise one error of several tasks, not a group.
                except PenstockError as error:
                    failures.append(error)
                    scope.cancel()
                    return

        async with anyio.create_task_group() as group:
            for _ in range(min(self._at_once, len(blobs))):
                group.start_soon(work, group.cancel_scope)
        if failures:
            raise failures[0]

    async def _copy(
        self, blob: SavedBlob, vanished: Callable[[SavedBlob], PenstockError] | None
    ) -> None:
        data = await self._source.get(blob.key)
        if data is None and vanished is not None:
            raise vanished(blob)
        await self._clock.run_blocking(lambda: check_bytes(blob, data, self._where))
        assert data is not None
        await self._into.set(blob.key, data)


async def take_backup(
    attached: AttachedClient,
    target: BackupTarget,
    settings: Settings,
    clock: ActorClock,
    progress: Progress,
    *,
    keep: int | None = None,
) -> BackupReport:
    """Take a backup, copying only blobs that the target lacks.

    With `keep`, remove all but that many backups afterwards. Raises `InvalidUsage`, `CorruptData`
    and `StorageError`.
    """
    run = _BackupRun(attached, target, settings, clock, progress)
    for _ in range(ATTEMPTS_MAX):
        try:
            report = await run.leases.hold_during(run.attempt)
        except _BlobVanished as gone:
            log.info("reading the documents again, because a blob was deleted: %s", gone)
            continue
        if keep is not None:
            removed = await target.keep_newest(keep)
            report = msgspec.structs.replace(report, removed_blobs=removed)
        return report
    raise StorageError(
        f"gave up after {ATTEMPTS_MAX} attempts: blobs are deleted faster than they are copied; "
        "drop fewer tables and views during a backup, or run `penstock shard verify` to look for "
        "missing blobs",
        determinate=True,
    )


class _BackupRun:
    """One run of a backup, in one or more attempts."""

    def __init__(
        self,
        attached: AttachedClient,
        target: BackupTarget,
        settings: Settings,
        clock: ActorClock,
        progress: Progress,
    ) -> None:
        self._attached = attached
        self._consensus = attached.consensus
        self._target = target
        self._clock = clock
        self._progress = progress
        self._in_flight = settings.backup_blobs_in_flight_max
        self._copied_blobs = self._copied_bytes = 0
        """Counters over all attempts."""
        self.leases = BackupLeases(attached, settings, clock)

    async def attempt(self) -> BackupReport:
        """Take the backup with the current documents. Raises `_BlobVanished`."""
        taken_ms, documents = await self._documents()
        blobs = await self._named(documents)
        there = {info.key: info.bytes for info in await self._target.parts.list_keys()}
        # A key is never rewritten with other bytes, so a blob of the right size is the right blob.
        missing = [blob for blob in blobs if there.get(blob.key) != blob.bytes]
        left = sum(blob.bytes for blob in missing)
        total = self._copied_bytes + left
        self._progress(self._copied_bytes, total)

        def note(size: int) -> None:
            self._copied_blobs += 1
            self._copied_bytes += size
            self._progress(self._copied_bytes, total)

        copier = BlobCopier(
            self._attached.blob,
            self._target.parts,
            self._clock,
            self._in_flight,
            self._attached.place.shown(),
        )
        await copier.copy(missing, note, lambda blob: _BlobVanished(blob.key, determinate=True))
        name = _backup_name(taken_ms)
        manifest = await self._target.finish(name, taken_ms, documents, blobs)
        return BackupReport(manifest, self._copied_blobs, self._copied_bytes)

    async def _documents(self) -> tuple[int, list[SavedDocument]]:
        """Read all documents at one instant at which each of their shards is leased."""
        leases, prefix = self.leases, shard_key("")
        for _ in range(ATTEMPTS_MAX):
            taken_ms = self._clock.now_ms()
            found = await self._consensus.snapshot()
            shards = [key.removeprefix(prefix) for key, _ in found if key.startswith(prefix)]
            if leases.held.keys() >= set(shards):
                break
            await leases.take(shard for shard in shards if shard not in leases.held)
        # If shards are created faster than leases, the last ones have none. A missing blob of those
        # is detected.
        #
        # Replicas belong to the original stores, not to a copy of them, so their registrations are
        # left out.
        kept = [each for each in found if not each[0].startswith(REGISTRATION_PREFIX)]
        # Sorted here, because a database may order text differently.
        return taken_ms, sorted_documents(kept)

    async def _named(self, documents: Sequence[SavedDocument]) -> list[SavedBlob]:
        """Return all blobs that the shards' documents name, except replaced ones, which only wait
        to be deleted."""
        lists = PartLists(self._attached.blob, self._clock)
        blobs: dict[str, SavedBlob] = {}
        for document in documents:
            if not document.key.startswith(shard_key("")):
                continue
            state = decode_shard(document.key, document.data)
            known: dict[str, Parts] = {}
            if (lost := await lists.read_all(state, known)) is not None:
                raise _BlobVanished(lost.key, determinate=True)
            for batch in with_parts(state, known).batches:
                if (listed := batch.listed) is not None:
                    blobs[listed.key] = SavedBlob(listed.key, listed.bytes, listed.checksum)
                for part in batch.parts:
                    if part.key:
                        blobs[part.key] = SavedBlob(part.key, part.bytes, part.checksum)
        return list(blobs.values())


def _backup_name(now_ms: int) -> str:
    """Return a unique name that sorts by time."""
    when = datetime.fromtimestamp(now_ms / 1000, UTC)
    return f"{when:%Y%m%dT%H%M%SZ}-{SystemRandom().getrandbits(32):08x}"
