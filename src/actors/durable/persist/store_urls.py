"""Opens stores by URL, and all stores of a service.

| URL | blobs | documents |
|---|---|---|
| ``mem:``, ``mem:NAME`` | in memory; a NAME is shared within the process | the same |
| ``file:PATH`` | files, synced | – |
| ``sqlite:PATH`` | – | one SQLite file |
| ``s3://``, ``gs://bucket/path``, ``az://container/path`` | objects | – |
| ``postgresql://user@host/database`` | – | one table |

A PATH is absolute (``file:/var/x``, ``file:///var/x``) or relative to the working directory
(``file:x``). In a bucket, the blobs are in ``blobs/`` below its path.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from random import Random
from typing import Final
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from actors.durable.object_store.bucket_paths import BUCKETS, bucket_path
from actors.durable.object_store.bucket_store import BucketStore
from actors.durable.object_store.file_modes import PRIVATE_FOLDER
from actors.durable.persist.blob_bucket import BucketBlob
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.directory import StateDirectory
from actors.durable.persist.fence import FencedConsensus, acquire_epoch, read_epoch
from actors.durable.persist.location import BlobStore, ConsensusStore, SnapshotConsensus
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.durable.persist.replica_fence import ReplicaFence
from actors.durable.persist.standby import wait_for_stores
from actors.runtime.errors import InvalidUsage, StorageError, storage_error
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings, without_user

log = logging.getLogger("penstock.persist")

BLOB_FORMS: Final = (
    "file:PATH, s3://bucket/path, gs://bucket/path, az://container/path, mem: or mem:NAME"
)
CONSENSUS_FORMS: Final = "sqlite:PATH, postgresql://user@host:port/database, mem: or mem:NAME"
_POSTGRES: Final = ("postgresql", "postgres")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_MEMORY_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_blobs: WeakValueDictionary[str, MemoryBlob] = WeakValueDictionary()
_documents: WeakValueDictionary[str, MemoryConsensus] = WeakValueDictionary()
"""Named in-memory stores, as long as a client uses them."""


async def open_blob(
    url: str, settings: Settings, clock: ActorClock, *, exclusive: bool = True, below: str = ""
) -> BlobStore:
    """Open the blob store at a URL.

    `exclusive` means that no other process writes there. `below` is a folder in it; in a bucket, it
    replaces ``blobs/``. Does not send a request to a bucket yet. Raises `InvalidUsage` and
    `StorageError`.
    """
    scheme, rest = _split(url, BLOB_FORMS)
    match scheme:
        case "mem":
            name = _memory_name(url, rest)
            kept = f"{name}/{below}" if below else name
            # A store without a name is private to its client.
            return MemoryBlob(clock) if not name else _blobs.setdefault(kept, MemoryBlob(clock))
        case "file":
            blob = FileBlob(_path(url, rest) / below, clock, settings.disk_timeout_ms)
            await blob.prepare(exclusive=exclusive)
            return blob
        case _ if scheme in BUCKETS:
            store, prefix = await _bucket(url, settings, clock)
            bucket = "/".join(url.split("/")[:3])
            return BucketBlob(store, f"{prefix}{below or 'blobs'}/", settings, clock, bucket)
        case "sqlite" | "postgresql" | "postgres":
            raise InvalidUsage(
                f"invalid URL of a blob store: {scheme}: stores documents (expected {BLOB_FORMS})"
            )
    raise _unknown(url, BLOB_FORMS)


async def open_consensus(
    url: str, settings: Settings, clock: ActorClock, random: Random
) -> SnapshotConsensus:
    """Open the consensus store at a URL. `random` randomizes pauses between retries. Raises
    `InvalidUsage`, `StorageError` and `CorruptData`."""
    scheme, rest = _split(url, CONSENSUS_FORMS)
    match scheme:
        case "mem":
            name = _memory_name(url, rest)
            return MemoryConsensus() if not name else _documents.setdefault(name, MemoryConsensus())
        case "sqlite":
            return await _sqlite(_path(url, rest), clock, settings)
        case _ if scheme in _POSTGRES:
            return await _postgres(url, settings, random)
        case _ if scheme == "file" or scheme in BUCKETS:
            raise InvalidUsage(
                f"invalid URL of a document store: {scheme}: stores blobs (expected "
                f"{CONSENSUS_FORMS})"
            )
    raise _unknown(url, CONSENSUS_FORMS)


async def _sqlite(path: Path, clock: ActorClock, settings: Settings) -> SnapshotConsensus:
    def make_folder() -> None:
        try:
            path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(f"create the folder of {path}", error) from error

    await clock.run_blocking(make_folder)
    consensus = SqliteConsensus(path, clock, settings.store_poll_ms, settings.disk_timeout_ms)
    await consensus.open()
    return consensus


async def _postgres(url: str, settings: Settings, random: Random) -> SnapshotConsensus:
    try:
        # Imported here: psycopg is an optional dependency.
        from actors.durable.persist.consensus_postgres import PostgresConsensus
        from actors.durable.persist.postgres_link import postgres_address
    except ImportError as error:
        raise StorageError(
            f"documents in PostgreSQL need psycopg ({error}): pip install "
            "'penstock-views[postgres]'",
            determinate=True,
        ) from error
    consensus = PostgresConsensus(postgres_address(url), settings, random)
    try:
        await consensus.open()
    except BaseException:
        # It may have opened a connection.
        await consensus.close()
        raise
    return consensus


async def _bucket(url: str, settings: Settings, clock: ActorClock) -> tuple[BucketStore, str]:
    """Open the bucket; return it with the key prefix of objects below the URL."""
    place = bucket_path(url)
    # `BucketStore` uses the limits for copies: pass the limits for stores in their place.
    limits = replace(
        settings,
        copy_request_timeout_ms=settings.store_request_timeout_ms,
        copy_request_retries_max=settings.store_request_retries_max,
    )
    store = await clock.run_blocking(lambda: BucketStore.open(place.kind, place.bucket, limits))
    return store, f"{place.prefix}/" if place.prefix else ""


def _split(url: str, forms: str) -> tuple[str, str]:
    found = _SCHEME.fullmatch(url)
    if found is None:
        raise InvalidUsage(f"invalid URL {without_user(url)!r}: expected {forms}")
    return found[1].lower(), found[2]


def _unknown(url: str, forms: str) -> InvalidUsage:
    scheme = url.partition(":")[0]
    return InvalidUsage(f"unknown kind of store {scheme}: expected {forms}")


def _memory_name(url: str, rest: str) -> str:
    if _MEMORY_NAME.fullmatch(rest) is None:
        raise InvalidUsage(
            f"invalid URL {without_user(url)!r}: expected mem: or mem:NAME, with letters, digits, "
            "'_', '.' and '-'"
        )
    return rest


def _path(url: str, rest: str) -> Path:
    parts = urlsplit(f"file:{rest}")
    path = unquote(parts.path)
    # With one slash too many, the first folder would be taken for a host name.
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidUsage(
            f"invalid URL {without_user(url)!r}: expected a local path, as in "
            f"{url.partition(':')[0]}:/absolute/path or {url.partition(':')[0]}:relative/path"
        )
    if not path.strip("/") or "\0" in path:
        raise InvalidUsage(f"invalid URL {url!r}: it has no path")
    # Absolute, because Spark receives paths of blobs and has another working directory.
    return Path(path).absolute()


# -- the stores of a service -----------------------------------------------------------------------


class OpenStores(msgspec.Struct, frozen=True):
    """The open stores of a service."""

    blob: BlobStore
    consensus: ConsensusStore
    directory: StateDirectory
    process: str
    """Name of this process in documents."""
    exclusive: bool
    """True if no other service writes to these stores."""


def process_name(random: Random) -> str:
    """Return a random name for this process that no other process has."""
    return f"{random.getrandbits(64):016x}"


async def open_stores(
    directory: Path, settings: Settings, clock: ActorClock, random: Random
) -> OpenStores:
    """Open the stores: those in the state directory, or those that URLs name.

    A state directory is always locked, and its stores have a single owner. Several processes may
    use documents at a URL: the service takes them over (`fence`) and is never exclusive. Raises
    `StateDirectoryError`, `InvalidUsage` (an unknown URL), `CorruptData` and `StorageError`.
    """
    place = await clock.run_blocking(lambda: StateDirectory.open(directory))
    try:
        return await _opened(place, settings, clock, random)
    except BaseException:
        # Release the lock, so that a corrected start can take it.
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
        # The directory's lock excludes other services, so no fencing is needed.
        own = SqliteConsensus(
            place.consensus, clock, settings.store_poll_ms, settings.disk_timeout_ms
        )
        await own.open()
        return OpenStores(blob, own, place, process, exclusive=True)
    if place.consensus.exists():
        log.warning(
            "the documents in %s are not used, because consensus_url names other ones",
            place.consensus,
        )
    consensus = await open_consensus(settings.consensus_url, settings, clock, random)
    try:
        fenced = await take_stores(consensus, settings, clock, process)
    except BaseException:
        await consensus.close()
        raise
    return OpenStores(blob, fenced, place, process, exclusive=False)


async def take_stores(
    consensus: ConsensusStore, settings: Settings, clock: ActorClock, process: str
) -> FencedConsensus | ReplicaFence:
    """Take over the stores; a replica waits for their owner instead. Raises the same errors as
    `open_stores`."""
    if settings.role == "replica":
        return ReplicaFence(consensus, settings.store_request_timeout_ms)
    if settings.standby:
        owned = await _taken_over(consensus, settings, clock, process)
    else:
        owned = await acquire_epoch(consensus, process, clock, settings)
    log.info("took over the stores: %s", owned.own)
    return owned


async def _taken_over(
    consensus: ConsensusStore, settings: Settings, clock: ActorClock, process: str
) -> FencedConsensus:
    """Wait until this process owns the stores. Raises `StorageError` if a newer release wrote
    them."""
    while True:
        seen = await wait_for_stores(consensus, settings, clock)
        # Waiting would not help if a newer release wrote the document.
        await read_epoch(consensus)
        try:
            owned = await acquire_epoch(consensus, process, clock, settings, over=seen.epoch)
        except StorageError as error:
            # Another standby may have been first. With SQLite, a process that was stopped during a
            # write may block all others.
            log.warning("standing by: could not take over the stores: %s", error)
            continue
        owned.took_over = seen.epoch is not None and not seen.stopped
        return owned
