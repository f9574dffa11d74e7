"""Opens shards from another process, alongside the service that owns the stores or without one.

`open_as_guest` returns a `PersistClient` that is a guest (`split_leases.py`): it reads under leases
that the owner preserves, and may compact, but deletes nothing and moves no since. `open_as_owner`
opens a state directory as its owner, and fails while a service uses it.

The stores are named by a state directory or by two URLs (`store_urls.py`).
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.client import PersistClient
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.directory import FORMAT, StateDirectory
from actors.durable.persist.location import BlobStore, SnapshotConsensus
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.runtime.errors import InvalidUsage, StateDirectoryError, StorageError, UnknownObject
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ShardId
from actors.runtime.settings import Settings, without_user

_NAMED_MAX: Final = 8
"""Maximum number of names in a message."""


class StoreLocation(msgspec.Struct, frozen=True):
    """Locations of the blobs and the documents: each a URL, or in a state directory."""

    state_dir: str | None = None
    blob_url: str | None = None
    consensus_url: str | None = None

    def shown(self) -> str:
        """Return the location for messages, without passwords."""
        given = (self.state_dir, self.blob_url, self.consensus_url)
        return " with ".join(without_user(one) for one in given if one)


def store_location(
    state_dir: str | None, blob_url: str | None, consensus_url: str | None
) -> StoreLocation:
    """Return the location of the stores. The state directory is only needed if a URL is missing.
    Raises `InvalidUsage` if neither is given."""
    if state_dir is None and (blob_url is None or consensus_url is None):
        raise InvalidUsage(
            "name the stores: give a state directory, or the URLs of blobs and documents, or a "
            "state directory and the URL of what is not in it"
        )
    directory = None if blob_url is not None and consensus_url is not None else state_dir
    return StoreLocation(
        state_dir=None if directory is None else str(Path(directory).absolute()),
        blob_url=blob_url,
        consensus_url=consensus_url,
    )


class AttachedClient(msgspec.Struct, frozen=True):
    """An open client and its stores."""

    client: PersistClient
    blob: BlobStore
    consensus: SnapshotConsensus
    place: StoreLocation
    name: str
    """Name of this guest in leases; "" for an owner."""


async def open_blobs(place: StoreLocation, settings: Settings, clock: ActorClock) -> BlobStore:
    """Open only the blobs, to read parts that another process keeps under a lease. Raises
    `InvalidUsage`, `StorageError` and `StateDirectoryError`."""
    if place.blob_url is None:
        assert place.state_dir is not None
        return FileBlob(_looked_at(place.state_dir).blobs, clock, settings.disk_timeout_ms)
    _check_there(place.blob_url)
    # Not exclusive, because the owner may be writing temporary files.
    return await open_blob(place.blob_url, settings, clock, exclusive=False)


async def open_documents(
    place: StoreLocation, settings: Settings, clock: ActorClock, random: Random
) -> SnapshotConsensus:
    """Open only the documents. Raises the same errors as `open_blobs`, and `CorruptData`."""
    if place.consensus_url is None:
        assert place.state_dir is not None
        path = _looked_at(place.state_dir).consensus
        _check_documents(path)
        consensus = SqliteConsensus(path, clock, settings.store_poll_ms, settings.disk_timeout_ms)
        await consensus.open()
        return consensus
    _check_there(place.consensus_url)
    return await open_consensus(place.consensus_url, settings, clock, random)


@asynccontextmanager
async def open_as_guest(
    place: StoreLocation, settings: Settings, clock: ActorClock, random: Random | None = None
) -> AsyncGenerator[AttachedClient]:
    """Open the stores as a guest, whose leases are dropped at the end.

    The caller renews them (`ShardUpkeep.heartbeat`, `maintain`). Raises `InvalidUsage`,
    `StateDirectoryError`, `StorageError` and `CorruptData`.
    """
    random = random or SystemRandom()
    name = f"{random.getrandbits(64):016x}"
    scratch = Path(tempfile.gettempdir()) / f"penstock-{name}"
    async with AsyncExitStack() as stack:
        blob = await open_blobs(place, settings, clock)
        consensus = await open_documents(place, settings, clock, random)
        client = PersistClient(
            blob,
            consensus,
            settings,
            clock,
            random=random,
            process=name,
            guest=True,
            scratch=scratch,
        )
        # Pushed first, so it runs last: the client may spill to this folder until it is closed.
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.push_async_callback(client.close)
        yield AttachedClient(client, blob, consensus, place, name)


@asynccontextmanager
async def open_as_owner(
    place: StoreLocation, settings: Settings, clock: ActorClock
) -> AsyncGenerator[AttachedClient]:
    """Open the stores as their owner, like a service; if the documents are at a URL, as one of
    several processes.

    Raises the same errors as `open_as_guest`, and `StateDirectoryError` while a service uses the
    directory.
    """
    random = SystemRandom()
    async with AsyncExitStack() as stack:
        blob = await open_blobs(place, settings, clock)
        if place.consensus_url is None:
            assert place.state_dir is not None
            folder = _looked_at(place.state_dir).path
            # The lock makes this process the single owner, like a service.
            directory = await clock.run_blocking(lambda: StateDirectory.open(folder))
            stack.callback(directory.close)
        else:
            _check_shared(place)
        consensus = await open_documents(place, settings, clock, random)
        alone = place.consensus_url is None
        client = PersistClient(blob, consensus, settings, clock, random=random, exclusive=alone)
        stack.push_async_callback(client.close)
        yield AttachedClient(client, blob, consensus, place, "")


async def find_shard(client: PersistClient, shard: str) -> ShardId:
    """Return the shard with this name. Raises `UnknownObject` with similar names."""
    shards = await client.list_shards()
    if shard in shards:
        return shard
    raise UnknownObject(f"shard {shard!r} does not exist; {suggest_names(shard, shards, 'shards')}")


def suggest_names(name: str, names: Sequence[str], what: str) -> str:
    """Return the end of an error message: similar names, or the first ones that exist."""
    if not names:
        return f"there are no {what}"
    # Prefer similar names: a typo is more likely than a wrong store.
    close = difflib.get_close_matches(name, names, _NAMED_MAX)
    shown = close or sorted(names)[:_NAMED_MAX]
    more = "" if close or len(names) <= len(shown) else f" and {len(names) - len(shown)} more"
    return f"{'similar' if close else 'available'} {what}: {', '.join(shown)}{more}"


def _looked_at(state_dir: str) -> StateDirectory:
    """Return the paths in an existing state directory, without locking it. Raises
    `StateDirectoryError`."""
    # Without a descriptor there is no lock, which a service may hold.
    directory = StateDirectory(Path(state_dir), -1)
    directory.check_whole()
    mark = directory.path / "FORMAT"
    if not mark.exists():
        raise StateDirectoryError(
            f"{directory.path} is not a state directory (it has no FORMAT file): give the one that "
            "was passed to `penstock serve --state-dir`"
        )
    text = mark.read_text(errors="replace").strip()
    # Not even a guest may touch a directory of a newer format.
    if not text.isdecimal() or int(text) > FORMAT:
        raise StateDirectoryError(
            f"the state directory {directory.path} has format {text[:40]!r}, this version supports "
            f"up to {FORMAT}: use a newer version of Penstock"
        )
    return directory


def _check_documents(path: Path) -> None:
    if not path.exists():
        raise StateDirectoryError(
            f"{path.parent} contains no documents ({path.name}): its service stores them elsewhere "
            "(consensus_url); give that URL, too"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        raise StateDirectoryError(
            f"no permission to read and write {path}: run the command as the user of the service"
        )


def _local(url: str) -> Path | None:
    """Return the local path that a URL names; None for a remote store."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() not in ("file", "sqlite"):
        return None
    return Path(unquote(urlsplit(f"file:{rest}").path)).absolute()


def _check_there(url: str) -> None:
    """Raise `StorageError` if a local store does not exist."""
    # Opening would create an empty store for a mistyped name.
    path = _local(url)
    if path is not None and not path.exists():
        raise StorageError(
            f"{without_user(url)}: {path} does not exist; give the URL that the service uses",
            determinate=True,
        )


def _check_shared(place: StoreLocation) -> None:
    """Raise `InvalidUsage` for a URL that points into a state directory."""
    # Only the directory's lock shows whether a service, its single owner, is running.
    for url in (place.blob_url or "", place.consensus_url or ""):
        path = _local(url)
        if path is not None and (path.parent / "FORMAT").exists():
            raise InvalidUsage(
                f"{url} is in the state directory {path.parent}: give that directory instead, so "
                "that a running service can be detected"
            )
