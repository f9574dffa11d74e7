"""Storage of sinks and copies: a folder or a path in a bucket, behind one interface. Blocking.

Theory of operation. A sink needs new files that are durable before a commit names them (`staging`),
listings, and small documents with compare-and-set: the first write under a name wins (`write_new`),
or the first write over a version (`replace`). A folder provides them with fsync, link and rename, a
bucket with conditional requests.

Names are relative to the destination, with ``/`` as separator. All methods raise `StorageError`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Final, Protocol

from actors.connectors.sinks.local_folders import allowed, sync_names, write_atomically
from actors.connectors.sinks.staging import (
    BucketStaging,
    FolderStaging,
    SinkStaging,
    as_storage_errors,
)
from actors.durable.object_store.bucket_calls import BucketCalls
from actors.durable.object_store.bucket_paths import BucketPath, allowed_bucket, is_bucket
from actors.durable.object_store.bucket_store import (
    PAGE_KEYS,
    FetchedObject,
    ObjectVersion,
    allows_http,
)
from actors.durable.object_store.file_modes import make_shared_folder
from actors.durable.object_store.folder_calls import sync_file, sync_folder
from actors.runtime.errors import InvalidUsage, ResourceBusy, StorageError
from actors.runtime.settings import Settings

DOCUMENT_BYTES_MAX: Final = 64 << 20
_NUMBER: Final = re.compile(r"\d{20}\.")
_NUMBERED: Final = re.compile(r"\d{20}\.json")


class SinkStorage(Protocol):
    """The destination of one sink or copy."""

    @property
    def where(self) -> str:
        """Return the name of the destination for display."""
        ...

    @property
    def options(self) -> dict[str, str] | None:
        """Return the storage options with which `deltalake` accesses it under that name."""
        ...

    @property
    def private(self) -> bool:
        """Return whether error texts of libraries about it may contain secrets."""
        ...

    def staging(self, token: str) -> SinkStaging:
        """Return the staging area of the writer with this token."""
        ...

    def begin(self, folder: str) -> None:
        """Create the destination, and a folder in it for documents."""
        ...

    def tidy(self, folder: str) -> None:
        """Remove temporary documents of crashed writers from this folder."""
        ...

    def other_than(self, folder: str) -> str | None:
        """Return the name of an entry at the destination other than `folder`; None if there is
        none."""
        ...

    def newest(self, folder: str) -> str | None:
        """Return the greatest name of a numbered document (20 digits) in a folder; None if there is
        none."""
        ...

    def numbered(self, folder: str) -> bool:
        """Return whether a folder contains a name that starts with a 20-digit number."""
        ...

    def read(self, name: str) -> FetchedObject | None:
        """Return a document; None if it does not exist."""
        ...

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """Write a document over the one that was read (None: there was none). It is durable on
        return.

        Return False if another one is in place by now. May be repeated after an error.
        """
        ...

    def lock(self, name: str) -> bool:
        """Lock out other writers until `close`, using a file with this name. Return False if there
        are no locks. Raises `ResourceBusy`."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders at the destination."""
        ...

    def files(self, folder: str, count_max: int) -> list[str]:
        """Return the names of at most `count_max` files directly in a folder."""
        ...

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Remove files from a folder, and the folder itself unless it contains others."""
        ...

    @property
    def stopped(self) -> Event:
        """Return the event that stops uploads early, when nobody waits for them."""
        ...

    def close(self) -> None:
        """Release the lock."""
        ...

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """Write a document, durable on return. Return False if one with this name exists; it
        stays."""
        ...

    def sync(self, name: str) -> None:
        """Make a document durable that another library wrote."""
        ...


class FolderSinkStorage:
    """A local folder as the destination."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        """Descriptor of the lock file; None while unlocked."""
        self._stopped = Event()

    @property
    def where(self) -> str:
        """Return the folder's path."""
        return str(self.folder)

    @property
    def options(self) -> dict[str, str] | None:
        """Return None: `deltalake` needs no options for a local folder."""
        return None

    @property
    def private(self) -> bool:
        """Return False: errors about local files contain no secrets."""
        return False

    @property
    def stopped(self) -> Event:
        """Return the event that stops writing early."""
        return self._stopped

    def staging(self, token: str) -> SinkStaging:
        """Return the staging area in this folder for the writer with this token."""
        return FolderStaging(self.folder, token, self._stopped)

    def begin(self, folder: str) -> None:
        """Create the folder, and a folder in it for documents, durably."""
        with as_storage_errors(f"make {self.folder / folder}"):
            make_shared_folder(self.folder / folder)
            sync_folder(self.folder)
            # Otherwise a power failure may lose the name of the new folder.
            sync_folder(self.folder.parent)

    def tidy(self, folder: str) -> None:
        """Remove temporary documents of crashed writers, whose names start with ``_``."""
        with as_storage_errors(f"look into {self.folder / folder}"):
            for each in list((self.folder / folder).iterdir()):
                if each.name.startswith("_"):
                    each.unlink(missing_ok=True)

    def other_than(self, folder: str) -> str | None:
        """Return the name of an entry other than `folder`; None if there is none."""
        with as_storage_errors(f"look into {self.folder}"):
            try:
                others = (each.name for each in self.folder.iterdir())
                return next((name for name in others if name != folder), None)
            except FileNotFoundError:
                return None

    def newest(self, folder: str) -> str | None:
        """Return the greatest name of a numbered document in a folder; None if there is none."""
        names = self._names(folder)
        return max((name for name in names if _NUMBERED.fullmatch(name)), default=None)

    def numbered(self, folder: str) -> bool:
        """Return whether a folder contains a name that starts with a 20-digit number."""
        return any(_NUMBER.match(name) for name in self._names(folder))

    def _names(self, folder: str) -> list[str]:
        with as_storage_errors(f"look into {self.folder}"):
            try:
                return [each.name for each in (self.folder / folder).iterdir()]
            except FileNotFoundError:
                return []

    def read(self, name: str) -> FetchedObject | None:
        """Return a document; None if it does not exist."""
        with as_storage_errors(f"read {self.folder / name}"):
            try:
                data = (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None
            return FetchedObject(data, ObjectVersion(None, None))

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """Write a document under a free name. Return False if the name is taken."""
        path = self.folder / name
        # Unlike a rename, a link fails if the name exists.
        return write_atomically(path, data, path.parent / f"_{token}", os.link)

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """Replace a document if it is still the expected one. The caller holds the lock, so nobody
        writes in between."""
        path, there = self.folder / name, self.read(name)
        if there is not None and there.data == data:
            sync_names(path.parent)
            return True
        if there != expected:
            return False
        return write_atomically(path, data, self.folder / temporary, os.rename)

    def lock(self, name: str) -> bool:
        """Create the folder, and lock it with a file of this name. Raises `ResourceBusy`."""
        with as_storage_errors(f"lock {self.folder}"):
            make_shared_folder(self.folder)
            # The operating system releases the lock when the process dies.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock = os.open(self.folder / name, flags, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise ResourceBusy(
                    f"another copy is being written to {self.folder}: wait for it to finish"
                ) from None
        return True

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder."""
        with as_storage_errors(f"look into {self.folder}"):
            return [each.name for each in self.folder.iterdir() if each.is_dir()]

    def files(self, folder: str, count_max: int) -> list[str]:
        """Return the names of at most `count_max` files in a folder."""
        return self._names(folder)[:count_max]

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Remove files from a folder, and the folder itself unless it contains others."""
        with as_storage_errors(f"remove files in {self.folder / folder}"):
            for name in files:
                (self.folder / folder / name).unlink(missing_ok=True)
        # A folder with other files stays.
        with suppress(OSError):
            (self.folder / folder).rmdir()

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def sync(self, name: str) -> None:
        """Sync a document, and the folders above it."""
        path = self.folder / name
        with as_storage_errors(f"sync {path}"):
            sync_file(path)
            sync_folder(path.parent)
            sync_folder(self.folder)


class BucketSinkStorage:
    """A path in a bucket as the destination."""

    def __init__(
        self,
        place: BucketPath,
        spool: Path,
        settings: Settings,
        opened: Callable[[BucketPath, Settings], BucketCalls] = BucketCalls.open,
    ) -> None:
        """Make a storage. `spool` is a folder for files to be uploaded, used by this storage
        alone."""
        self.place = place
        self._spool = spool
        self._settings = settings
        self._opened = opened
        self._calls: BucketCalls | None = None
        """Client of the bucket; opened at the first use."""
        self._stopped = Event()

    @property
    def where(self) -> str:
        """Return the URL."""
        return str(self.place)

    @property
    def options(self) -> dict[str, str] | None:
        """Return the options with which `deltalake` accesses the bucket. Credentials come from the
        environment, as everywhere."""
        limits = self._settings
        timeout_ms = limits.copy_request_timeout_ms
        retries = limits.copy_request_retries_max
        given = {
            "timeout": f"{timeout_ms}ms",
            "connect_timeout": f"{min(timeout_ms, limits.connect_timeout_ms)}ms",
            "allow_http": str(allows_http(self.place.kind)).lower(),
            "max_retries": str(retries),
            "retry_timeout": f"{timeout_ms * (retries + 1)}ms",
        }
        if self.place.kind == "s3":
            # A commit must be a request that fails if the version exists; environment variables
            # could turn that off.
            given |= {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
        return given

    @property
    def private(self) -> bool:
        """Return True: errors of bucket clients may contain signed URLs and credentials."""
        return True

    @property
    def calls(self) -> BucketCalls:
        """Return the bucket's client. Opening it takes some ms."""
        if self._calls is None:
            self._calls = self._opened(self.place, self._settings)
        return self._calls

    @property
    def stopped(self) -> Event:
        """Return the event that stops uploads early."""
        return self._stopped

    def staging(self, token: str) -> SinkStaging:
        """Return the staging area below this URL for the writer with this token."""
        return BucketStaging(lambda: self.calls, self.where, self._spool, token, self._stopped)

    def begin(self, folder: str) -> None:
        """Do nothing: buckets have no folders."""

    def tidy(self, folder: str) -> None:
        """Do nothing: objects are complete, or do not exist."""

    def other_than(self, folder: str) -> str | None:
        """Return the name of an entry other than `folder`; None if there is none."""
        before = next(self.calls.names(), [])
        behind = next(self.calls.names(after=f"{folder}/~"), [])
        names = (name.partition("/")[0] for name in (*before, *behind))
        return next((name for name in names if name != folder), None)

    def newest(self, folder: str) -> str | None:
        """Return the greatest name of a numbered document in a folder, found with few requests;
        None if there is none."""
        number = newest_number(lambda number: self._numbers_after(folder, number))
        return None if number is None else f"{number:020d}.json"

    def numbered(self, folder: str) -> bool:
        """Return whether a folder contains a name that starts with a 20-digit number. Digits sort
        first, so one page suffices."""
        first = next(self.calls.names(folder), [])
        return any(_NUMBER.match(name.rpartition("/")[2]) for name in first)

    def _numbers_after(self, folder: str, number: int) -> tuple[list[int], bool]:
        after = f"{folder}/{number:020d}.json" if number >= 0 else ""
        found: list[str] = []
        for page in self.calls.names(folder, after):
            found += page
            if len(found) >= PAGE_KEYS:
                break
        names = [name.rpartition("/")[2] for name in found]
        numbers = [int(name[:20]) for name in names if _NUMBERED.fullmatch(name)]
        return numbers, len(found) >= PAGE_KEYS

    def read(self, name: str) -> FetchedObject | None:
        """Return a document; None if it does not exist."""
        return self.calls.get(name, DOCUMENT_BYTES_MAX)

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """Write a document under a free name. Return False if the name is taken."""
        try:
            return self.replace(name, data, None, "")
        except StorageError as first:
            if first.determinate:
                raise
            # Try twice, because a failed request may have had no effect.
            try:
                return self.replace(name, data, None, "")
            except StorageError:
                raise first from None

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """Replace a document with a conditional request, if it is still the expected version."""
        version = None if expected is None else expected.version
        failure: StorageError | None = None
        try:
            if self.calls.put_if(name, data, version):
                return True
        except StorageError as error:
            if error.determinate:
                raise
            failure = StorageError(
                f"could not write {self.where}/{name}: it may still appear", determinate=False
            )
            failure.__cause__ = error
        # Either another document, or ours despite an error. The same bytes are ours, because each
        # writer's token is in its documents.
        try:
            found = self.calls.get(name, DOCUMENT_BYTES_MAX)
        except StorageError as error:
            raise failure or error from None
        if found is not None and found.data == data:
            return True
        if failure is None or (found is not None and found.version != version):
            return False
        raise failure

    def lock(self, name: str) -> bool:
        """Return False: conditional requests take the place of locks."""
        return False

    def folders(self) -> list[str]:
        """Return the names of the folders directly below this URL."""
        return self.calls.folders()

    def files(self, folder: str, count_max: int) -> list[str]:
        """Return the names of at most `count_max` objects in a folder."""
        found: list[str] = []
        for page in self.calls.names(folder):
            found += (name.removeprefix(f"{folder}/") for name in page)
            if len(found) >= count_max:
                break
        return found[:count_max]

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Delete objects of a folder."""
        self.calls.delete([f"{folder}/{name}" for name in files])

    def close(self) -> None:
        """Do nothing: there is no lock."""

    def sync(self, name: str) -> None:
        """Do nothing: objects are durable once written."""


def newest_number(after: Callable[[int], tuple[list[int], bool]]) -> int | None:
    """Return the greatest of numbers that have no gaps after the first one; None if there are none.

    `after` returns the first of the numbers after a given one (-1: from the start), and whether
    there may be more.
    """
    low, high = -1, None
    while high is None or low < high:
        # Doubling and then bisection takes few requests, however many numbers there are.
        at = max(low, 2 * low) if high is None else (low + high) // 2
        page, more = after(at)
        if page:
            low = max(page)
            if not more:
                return low
        else:
            high = at
    return None if low < 0 else low


_PLURALS: Final = {"copy": "copies", "sink": "sinks"}


def open_storage(
    destination: str,
    use: str,
    folder: str,
    buckets: Sequence[str],
    spool: Path,
    settings: Settings,
) -> SinkStorage:
    """Return the storage that a destination names, without making a request. Resolves links.

    Raises `InvalidUsage` unless the destination is below `folder` or one of `buckets`, the values
    of the settings ``{use}_dir`` and ``{use}_buckets``. `spool` is a folder for files to be
    uploaded.
    """
    if not is_bucket(destination):
        return FolderSinkStorage(allowed(destination, folder, _PLURALS[use], f"{use}_dir"))
    place = allowed_bucket(destination, buckets, f"{use}_buckets", "write")
    if not place.path:
        raise InvalidUsage(f"{destination!r} names a whole bucket: name a path in it")
    return BucketSinkStorage(place, spool, settings)
