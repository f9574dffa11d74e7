"""Restores a backup into empty stores.

First all blobs, each compared with its size and checksum, then all documents, by one
compare-and-set that expects none of them: so what is cut off leaves no document at all, and the
next run goes on with the blobs that are still missing. Stores that hold anything else are refused.
A state directory says in a file of its own that a restore has not ended, so that no service starts
on half of one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec

from actors.durable.persist.attach import StoreLocation
from actors.durable.persist.backup_format import (
    BackupManifest,
    BackupTarget,
    SavedBlob,
    SavedDocument,
    check_bytes,
    sorted_documents,
)
from actors.durable.persist.backup_run import BlobCopier, Progress
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.directory import StateDirectory
from actors.durable.persist.location import (
    BlobStore,
    CompareAndSet,
    SnapshotConsensus,
)
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings

_SHOWN_MAX: Final = 3
"""Names in a message."""


class RestoreReport(msgspec.Struct, frozen=True):
    """A backup that was restored, and how much of it this run copied."""

    manifest: BackupManifest
    copied_blobs: int
    copied_bytes: int


class RestoreStores(msgspec.Struct, frozen=True):
    """Open stores to restore into."""

    blob: BlobStore
    consensus: SnapshotConsensus
    shown: str
    finish: Callable[[], None]
    """Makes them usable for services; blocking."""


@asynccontextmanager
async def open_empty(
    place: StoreLocation, settings: Settings, clock: ActorClock
) -> AsyncIterator[RestoreStores]:
    """Open the stores of a place, and make them where there are none. Raises `StateDirectoryError`,
    `InvalidUsage`, `StorageError`."""
    async with AsyncExitStack() as stack:
        directory: StateDirectory | None = None
        if (folder := place.state_dir) is not None:
            path = Path(folder)
            directory = await clock.run_blocking(lambda: StateDirectory.open(path, restoring=True))
            stack.callback(directory.close)
        blob: BlobStore
        consensus: SnapshotConsensus
        if place.blob_url is not None:
            blob = await open_blob(place.blob_url, settings, clock, exclusive=False)
        else:
            assert directory is not None
            blob = FileBlob(directory.blobs, clock, settings.disk_timeout_ms)
            await blob.prepare()
        if place.consensus_url is not None:
            consensus = await open_consensus(place.consensus_url, settings, clock, SystemRandom())
        else:
            assert directory is not None
            own = SqliteConsensus(
                directory.consensus, clock, settings.store_poll_ms, settings.disk_timeout_ms
            )
            await own.open()
            consensus = own
        stack.push_async_callback(consensus.close)
        finish = (lambda: None) if directory is None else directory.finish_restore
        yield RestoreStores(blob, consensus, place.shown(), finish)


async def restore_backup(
    target: BackupTarget,
    name: str | None,
    stores: RestoreStores,
    settings: Settings,
    clock: ActorClock,
    progress: Progress,
) -> RestoreReport:
    """Restore a backup, None: the latest one. Raises `InvalidUsage` (there is no such backup, or
    the stores hold something else), `CorruptData`, `StorageError`."""
    manifest = await target.find(name)
    documents = await target.read_documents(manifest)
    blobs = await target.read_blobs(manifest)
    if await _is_complete(stores, documents):
        await clock.run_blocking(stores.finish)
        return RestoreReport(manifest, 0, 0)
    missing = await _missing(stores, blobs, clock)
    total, copied = sum(blob.bytes for blob in missing), 0
    progress(0, total)

    def note(size: int) -> None:
        nonlocal copied
        copied += size
        progress(copied, total)

    copier = BlobCopier(
        target.parts, stores.blob, clock, settings.backup_blobs_in_flight_max, target.shown
    )
    await copier.copy(missing, note)
    made = [CompareAndSet(each.key, None, each.data, first=each.seqno) for each in documents]
    if made and not await stores.consensus.compare_and_set(made):
        raise InvalidUsage(f"{stores.shown}: another process has written there meanwhile")
    await clock.run_blocking(stores.finish)
    return RestoreReport(manifest, len(missing), total)


async def _is_complete(stores: RestoreStores, documents: list[SavedDocument]) -> bool:
    """Return whether a run before has written the documents, which come last. Raises `InvalidUsage`
    for any other documents."""
    keys = await stores.consensus.list_keys()
    if not keys:
        return False
    if sorted_documents(await stores.consensus.snapshot()) == documents:
        return True
    raise InvalidUsage(
        f"{stores.shown} is not empty, it holds {len(keys)} documents: restore into stores that"
        " hold nothing"
    )


async def _missing(
    stores: RestoreStores, blobs: list[SavedBlob], clock: ActorClock
) -> list[SavedBlob]:
    """Return the blobs that are not there yet; those of a run before are read and compared. Raises
    `InvalidUsage` for blobs of no such run, `CorruptData`."""
    there = {info.key for info in await stores.blob.list_keys()}
    strange = sorted(there - {blob.key for blob in blobs})
    if strange:
        raise InvalidUsage(
            f"{stores.shown} is not empty, it holds {', '.join(strange[:_SHOWN_MAX])}, which the"
            " backup does not: restore into stores that hold nothing"
        )
    for blob in blobs:
        if blob.key in there:
            data = await stores.blob.get(blob.key)
            await clock.run_blocking(partial(check_bytes, blob, data, stores.shown))
    return [blob for blob in blobs if blob.key not in there]
