"""Restores a backup into empty stores.

First all blobs are copied, each checked against its size and checksum. Then all documents are
written by one compare-and-set that expects none of them to exist. So an interrupted restore leaves
no documents, and the next run continues with the missing blobs. Stores that contain anything else
are refused. A file in the state directory marks an unfinished restore, so that no service starts on
it.
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
"""Maximum number of names in a message."""


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
    """Makes the stores usable for services. Blocking."""


@asynccontextmanager
async def open_empty(
    place: StoreLocation, settings: Settings, clock: ActorClock
) -> AsyncIterator[RestoreStores]:
    """Open the stores at a location, and create them if they do not exist. Raises
    `StateDirectoryError`, `InvalidUsage` and `StorageError`."""
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
    """Restore a backup; `name` None stands for the latest.

    Raises `InvalidUsage` (the backup does not exist, or the stores contain something else),
    `CorruptData` and `StorageError`.
    """
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
        raise InvalidUsage(f"another process wrote to {stores.shown} during the restore")
    await clock.run_blocking(stores.finish)
    return RestoreReport(manifest, len(missing), total)


async def _is_complete(stores: RestoreStores, documents: list[SavedDocument]) -> bool:
    """Return whether an earlier run has written the documents, which come last. Raises
    `InvalidUsage` if there are any other documents."""
    keys = await stores.consensus.list_keys()
    if not keys:
        return False
    if sorted_documents(await stores.consensus.snapshot()) == documents:
        return True
    raise InvalidUsage(
        f"{stores.shown} is not empty, it contains {len(keys)} documents: restore into empty stores"
    )


async def _missing(
    stores: RestoreStores, blobs: list[SavedBlob], clock: ActorClock
) -> list[SavedBlob]:
    """Return the blobs that are still missing. Those of an earlier run are read and checked. Raises
    `InvalidUsage` for blobs that are not in the backup, and `CorruptData`."""
    there = {info.key for info in await stores.blob.list_keys()}
    strange = sorted(there - {blob.key for blob in blobs})
    if strange:
        raise InvalidUsage(
            f"{stores.shown} is not empty, it contains {', '.join(strange[:_SHOWN_MAX])}, which "
            "the backup does not: restore into empty stores"
        )
    for blob in blobs:
        if blob.key in there:
            data = await stores.blob.get(blob.key)
            await clock.run_blocking(partial(check_bytes, blob, data, stores.shown))
    return [blob for blob in blobs if blob.key not in there]
