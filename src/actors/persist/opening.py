"""Opens the stores of one service: those of its state directory, or those that URLs name.

A state directory is always locked, and its stores have a single owner. Documents by URL may be used
by several processes: the service takes them over (`fence`), and is never exclusive.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import msgspec

from actors.errors import BadSettings
from actors.kernel import ActorClock
from actors.persist.blob_file import FileBlob
from actors.persist.consensus_sqlite import SqliteConsensus
from actors.persist.directory import StateDirectory
from actors.persist.fence import acquire_epoch
from actors.persist.location import BlobStore, ConsensusStore, several_at_once
from actors.persist.places import open_blob, open_consensus
from actors.settings import Settings, without_user

log = logging.getLogger("penstock.persist")


class OpenStores(msgspec.Struct, frozen=True):
    """Open stores of one service."""

    blob: BlobStore
    consensus: ConsensusStore
    directory: StateDirectory
    process: str
    """Name of this process in the documents."""
    exclusive: bool
    """True if no other service writes there."""


def process_name(random: Random) -> str:
    """Return a name that no other process has."""
    return f"{random.getrandbits(64):016x}"


async def open_stores(
    directory: Path, settings: Settings, clock: ActorClock, random: Random
) -> OpenStores:
    """Open the stores. Raises `StateDirectoryError`, `BadSettings` (documents that change one at a
    time), `InvalidUsage` (an unknown URL), `CorruptData`, `StorageError`."""
    place = await clock.run_blocking(lambda: StateDirectory.open(directory))
    try:
        return await _opened(place, settings, clock, random)
    except BaseException:
        # Frees the lock, so that a corrected start can take it.
        place.close()
        raise


async def _opened(
    place: StateDirectory, settings: Settings, clock: ActorClock, random: Random
) -> OpenStores:
    process, shared = process_name(random), bool(settings.consensus_url)
    blob: BlobStore
    if settings.blob_url:
        blob = await open_blob(settings.blob_url, settings, clock, exclusive=not shared)
    else:
        blob = FileBlob(place.blobs, clock, settings.disk_timeout_ms)
        await blob.prepare(exclusive=not shared)
    if not shared:
        # The directory's lock excludes other services: no fencing needed.
        own = SqliteConsensus(
            place.consensus, clock, settings.store_poll_ms, settings.disk_timeout_ms
        )
        await own.open()
        return OpenStores(blob, own, place, process, exclusive=True)
    if place.consensus.exists():
        log.warning(
            "%s holds documents that are not used: consensus_url names others", place.consensus
        )
    consensus = await open_consensus(settings.consensus_url, settings, clock, random)
    try:
        # Checked before the takeover: a refused service must not fence the present one.
        if not several_at_once(consensus):
            raise BadSettings(
                f"consensus_url: {without_user(settings.consensus_url)} changes one document at a"
                " time, and a service writes several tables at once: give sqlite:PATH or"
                " postgresql://user@host/database (blobs may lie in a bucket: blob_url)"
            )
        fenced = await acquire_epoch(consensus, process, clock, settings)
    except BaseException:
        await consensus.close()
        raise
    log.info("the stores are ours: %s", fenced.own)
    return OpenStores(blob, fenced, place, process, exclusive=False)
