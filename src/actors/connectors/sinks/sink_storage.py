"""Storage of sinks and copies: a folder or a place in a bucket, with one interface. Blocking.

Theory of operation. A sink needs new files that are durable before a commit names them (`staging`),
small documents of which the first under a name wins (`write_new`), or the first over a version
(`replace`), and listings. A folder provides them by fsync, link and rename, a bucket by conditional
requests.

Names lie below the place, with ``/`` between. All methods raise `StorageError`.
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
    """One place that one sink writes."""

    @property
    def where(self) -> str:
        """Return the name of the place, for people."""
        ...

    @property
    def options(self) -> dict[str, str] | None:
        """Return the storage options with which `deltalake` reaches it under that name."""
        ...

    @property
    def private(self) -> bool:
        """Return whether texts of libraries about it may hold secrets."""
        ...

    def staging(self, token: str) -> SinkStaging:
        """Return the staging area of the writer with that name."""
        ...

    def begin(self, folder: str) -> None:
        """Create the place, and a folder in it for documents."""
        ...

    def tidy(self, folder: str) -> None:
        """Remove temporary documents of killed writers from that folder."""
        ...

    def other_than(self, folder: str) -> str | None:
        """Return the name of an entry at the place other than a folder; None: there is none."""
        ...

    def newest(self, folder: str) -> str | None:
        """Return the greatest name of a numbered document (20 digits) in a folder."""
        ...

    def numbered(self, folder: str) -> bool:
        """Say whether a folder holds a name that begins with a number of 20 digits."""
        ...

    def read(self, name: str) -> FetchedObject | None:
        """Return a document; None if it does not exist."""
        ...

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """Write a document over the one that was read (None: there was none), durable on return;
        False when another one is there meanwhile. May be repeated after an error."""
        ...

    def lock(self, name: str) -> bool:
        """Lock out other writers until `close`, by a file of that name; False where there are no
        locks. Raises `ResourceBusy`."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders in the place."""
        ...

    def files(self, folder: str, count_max: int) -> list[str]:
        """Return the names of at most so many files right in a folder."""
        ...

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Remove files of a folder, and the folder unless it holds others."""
        ...

    @property
    def stopped(self) -> Event:
        """Return the event that ends uploads early, when nobody waits for them any more."""
        ...

    def close(self) -> None:
        """Unlock."""
        ...

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """Write a document, durable on return; False when another one has that name already: it
        stays."""
        ...

    def sync(self, name: str) -> None:
        """Make a document durable that another library wrote."""
        ...


class FolderSinkStorage:
    """A local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        self._stopped = Event()

    @property
    def where(self) -> str:
        """See `SinkStorage`."""
        return str(self.folder)

    @property
    def options(self) -> dict[str, str] | None:
        """See `SinkStorage`."""
        return None

    @property
    def private(self) -> bool:
        """See `SinkStorage`."""
        return False

    @property
    def stopped(self) -> Event:
        """See `SinkStorage`."""
        return self._stopped

    def staging(self, token: str) -> SinkStaging:
        """See `SinkStorage`."""
        return FolderStaging(self.folder, token, self._stopped)

    def begin(self, folder: str) -> None:
        """See `SinkStorage`."""
        with as_storage_errors(f"make {self.folder / folder}"):
            make_shared_folder(self.folder / folder)
            sync_folder(self.folder)
            # Else a power cut may lose the name of the new folder.
            sync_folder(self.folder.parent)

    def tidy(self, folder: str) -> None:
        """See `SinkStorage`."""
        with as_storage_errors(f"look into {self.folder / folder}"):
            for each in list((self.folder / folder).iterdir()):
                if each.name.startswith("_"):
                    each.unlink(missing_ok=True)

    def other_than(self, folder: str) -> str | None:
        """See `SinkStorage`."""
        with as_storage_errors(f"look into {self.folder}"):
            try:
                others = (each.name for each in self.folder.iterdir())
                return next((name for name in others if name != folder), None)
            except FileNotFoundError:
                return None

    def newest(self, folder: str) -> str | None:
        """See `SinkStorage`."""
        names = self._names(folder)
        return max((name for name in names if _NUMBERED.fullmatch(name)), default=None)

    def numbered(self, folder: str) -> bool:
        """See `SinkStorage`."""
        return any(_NUMBER.match(name) for name in self._names(folder))

    def _names(self, folder: str) -> list[str]:
        with as_storage_errors(f"look into {self.folder}"):
            try:
                return [each.name for each in (self.folder / folder).iterdir()]
            except FileNotFoundError:
                return []

    def read(self, name: str) -> FetchedObject | None:
        """See `SinkStorage`."""
        with as_storage_errors(f"read {self.folder / name}"):
            try:
                data = (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None
            return FetchedObject(data, ObjectVersion(None, None))

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """See `SinkStorage`."""
        path = self.folder / name
        # Unlike a rename, a link fails if the name exists.
        return write_atomically(path, data, path.parent / f"_{token}", os.link)

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """See `SinkStorage`. The caller holds the lock: nobody writes between."""
        path, there = self.folder / name, self.read(name)
        if there is not None and there.data == data:
            sync_names(path.parent)
            return True
        if there != expected:
            return False
        return write_atomically(path, data, self.folder / temporary, os.rename)

    def lock(self, name: str) -> bool:
        """See `SinkStorage`. Also make the folder."""
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
                    f"another copy is being written into {self.folder}: wait for it"
                ) from None
        return True

    def folders(self) -> list[str]:
        """See `SinkStorage`."""
        with as_storage_errors(f"look into {self.folder}"):
            return [each.name for each in self.folder.iterdir() if each.is_dir()]

    def files(self, folder: str, count_max: int) -> list[str]:
        """See `SinkStorage`."""
        return self._names(folder)[:count_max]

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """See `SinkStorage`."""
        with as_storage_errors(f"remove files in {self.folder / folder}"):
            for name in files:
                (self.folder / folder / name).unlink(missing_ok=True)
        # A folder that holds files of others stays.
        with suppress(OSError):
            (self.folder / folder).rmdir()

    def close(self) -> None:
        """See `SinkStorage`."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def sync(self, name: str) -> None:
        """See `SinkStorage`."""
        path = self.folder / name
        with as_storage_errors(f"sync {path}"):
            sync_file(path)
            sync_folder(path.parent)
            sync_folder(self.folder)


class BucketSinkStorage:
    """A place in a bucket."""

    def __init__(
        self,
        place: BucketPath,
        spool: Path,
        settings: Settings,
        opened: Callable[[BucketPath, Settings], BucketCalls] = BucketCalls.open,
    ) -> None:
        """Make an outlet. `spool`: a folder for files to be uploaded, of this outlet alone."""
        self.place = place
        self._spool = spool
        self._settings = settings
        self._opened = opened
        self._calls: BucketCalls | None = None
        self._stopped = Event()

    @property
    def where(self) -> str:
        """See `SinkStorage`."""
        return str(self.place)

    @property
    def options(self) -> dict[str, str] | None:
        """See `SinkStorage`. Credentials come from the environment, as everywhere."""
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
            # A commit must be a request that fails if the version exists; variables of the
            # environment could turn that off.
            given |= {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
        return given

    @property
    def private(self) -> bool:
        """See `SinkStorage`."""
        return True

    @property
    def calls(self) -> BucketCalls:
        """Return the bucket's client; opening it takes some ms."""
        if self._calls is None:
            self._calls = self._opened(self.place, self._settings)
        return self._calls

    @property
    def stopped(self) -> Event:
        """See `SinkStorage`."""
        return self._stopped

    def staging(self, token: str) -> SinkStaging:
        """See `SinkStorage`."""
        return BucketStaging(lambda: self.calls, self.where, self._spool, token, self._stopped)

    def begin(self, folder: str) -> None:
        """See `SinkStorage`. Buckets have no folders."""

    def tidy(self, folder: str) -> None:
        """See `SinkStorage`. Objects are complete, or not there at all."""

    def other_than(self, folder: str) -> str | None:
        """See `SinkStorage`."""
        before = next(self.calls.names(), [])
        behind = next(self.calls.names(after=f"{folder}/~"), [])
        names = (name.partition("/")[0] for name in (*before, *behind))
        return next((name for name in names if name != folder), None)

    def newest(self, folder: str) -> str | None:
        """See `SinkStorage`."""
        number = newest_number(lambda number: self._numbers_after(folder, number))
        return None if number is None else f"{number:020d}.json"

    def numbered(self, folder: str) -> bool:
        """See `SinkStorage`. Digits sort first."""
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
        """See `SinkStorage`."""
        return self.calls.get(name, DOCUMENT_BYTES_MAX)

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """See `SinkStorage`."""
        try:
            return self.replace(name, data, None, "")
        except StorageError as first:
            if first.determinate:
                raise
            # Twice: a failed request may have had no effect.
            try:
                return self.replace(name, data, None, "")
            except StorageError:
                raise first from None

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        """See `SinkStorage`."""
        version = None if expected is None else expected.version
        failure: StorageError | None = None
        try:
            if self.calls.put_if(name, data, version):
                return True
        except StorageError as error:
            if error.determinate:
                raise
            failure = StorageError(
                f"could not write {self.where}/{name}: it may come to be there", determinate=False
            )
            failure.__cause__ = error
        # Another's, or ours in spite of an error. The same bytes are ours: each writer's token is
        # in its documents.
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
        """See `SinkStorage`. Conditional requests take the place of locks."""
        return False

    def folders(self) -> list[str]:
        """See `SinkStorage`."""
        return self.calls.folders()

    def files(self, folder: str, count_max: int) -> list[str]:
        """See `SinkStorage`."""
        found: list[str] = []
        for page in self.calls.names(folder):
            found += (name.removeprefix(f"{folder}/") for name in page)
            if len(found) >= count_max:
                break
        return found[:count_max]

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """See `SinkStorage`."""
        self.calls.delete([f"{folder}/{name}" for name in files])

    def close(self) -> None:
        """See `SinkStorage`."""

    def sync(self, name: str) -> None:
        """See `SinkStorage`. Objects are durable."""


def newest_number(after: Callable[[int], tuple[list[int], bool]]) -> int | None:
    """Return the greatest of numbers from 0 on without a gap after the first. `after` returns the
    first of those after one (-1: all), and whether there may be more."""
    low, high = -1, None
    while high is None or low < high:
        # Doubling, then bisection: few requests, however many numbers there are.
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
    """Return the storage that a destination names, without a request. Follows links.

    Raise `InvalidUsage` unless it lies below `folder` or one of `buckets`, which are the values of
    the settings ``{use}_dir`` and ``{use}_buckets``. `spool`: a folder for files to be uploaded.
    """
    if not is_bucket(destination):
        return FolderSinkStorage(allowed(destination, folder, _PLURALS[use], f"{use}_dir"))
    place = allowed_bucket(destination, buckets, f"{use}_buckets", "write")
    if not place.path:
        raise InvalidUsage(f"{destination!r} is a whole bucket: name a path in it")
    return BucketSinkStorage(place, spool, settings)
