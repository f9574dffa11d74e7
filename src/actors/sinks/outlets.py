"""Where a sink writes: a folder, or a place in a bucket; one face for both. Blocking.

Theory of operation. A sink needs few things of a place: new files that are durable before
something names them (`staging`), small documents of which the first to come under a name stays
(`write_new`), and to look what is there. A folder has them by fsync and link, a bucket by
conditional requests: when it is not known whether one was done, what is there is looked at, and
the same document counts as ours, since none of two writers writes the same one.

Names lie below the place, with ``/`` between. All raise `StorageError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from actors.buckets.bucket_calls import BucketCalls
from actors.buckets.bucket_paths import BucketPath
from actors.buckets.bucket_store import PAGE_KEYS, allows_http
from actors.errors import StorageError
from actors.persist.blob_file import sync_folder
from actors.settings import Settings
from actors.sinks.bucket_staging import BucketStaging
from actors.sinks.folders import write_new
from actors.sinks.staging import FolderStaging, Staging, doing, sync_file

DOCUMENT_BYTES_MAX: Final = 64 << 20
_NUMBER: Final = re.compile(r"\d{20}\.")
_NUMBERED: Final = re.compile(r"\d{20}\.json")


class Outlet(Protocol):
    """One place that one sink writes."""

    @property
    def where(self) -> str:
        """Its name, for people."""
        ...

    @property
    def options(self) -> dict[str, str] | None:
        """Of `deltalake`, to reach it under that name."""
        ...

    @property
    def private(self) -> bool:
        """Whether what libraries say of it may hold secrets."""
        ...

    def staging(self, token: str) -> Staging:
        """Where files of the writer of that name go."""
        ...

    def begin(self, folder: str) -> None:
        """Makes the place, and a folder in it for documents."""
        ...

    def tidy(self, folder: str) -> None:
        """Removes what killed writers left of documents in that folder."""
        ...

    def other_than(self, folder: str) -> str | None:
        """Something that is there, beside a folder; None: there is nothing else."""
        ...

    def newest(self, folder: str) -> str | None:
        """The greatest name of a numbered document (20 digits) in a folder."""
        ...

    def numbered(self, folder: str) -> bool:
        """Whether something in a folder has a name that begins with a number of 20 digits."""
        ...

    def read(self, name: str) -> bytes | None:
        """A document, if it is there."""
        ...

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """Writes a document, durable on return; False when there is another of that name already,
        which stays."""
        ...

    def sync(self, name: str) -> None:
        """Makes a document outlast a power cut that somebody else wrote."""
        ...


class FolderOutlet:
    """A folder of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def where(self) -> str:
        """See `Outlet`."""
        return str(self.folder)

    @property
    def options(self) -> dict[str, str] | None:
        """See `Outlet`."""
        return None

    @property
    def private(self) -> bool:
        """See `Outlet`."""
        return False

    def staging(self, token: str) -> Staging:
        """See `Outlet`."""
        return FolderStaging(self.folder, token)

    def begin(self, folder: str) -> None:
        """See `Outlet`."""
        with doing(f"make {self.folder / folder}"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)

    def tidy(self, folder: str) -> None:
        """See `Outlet`."""
        with doing(f"look into {self.folder / folder}"):
            for each in list((self.folder / folder).iterdir()):
                if each.name.startswith("_"):
                    each.unlink(missing_ok=True)

    def other_than(self, folder: str) -> str | None:
        """See `Outlet`."""
        with doing(f"look into {self.folder}"):
            try:
                others = (each.name for each in self.folder.iterdir())
                return next((name for name in others if name != folder), None)
            except FileNotFoundError:
                return None

    def newest(self, folder: str) -> str | None:
        """See `Outlet`."""
        names = self._names(folder)
        return max((name for name in names if _NUMBERED.fullmatch(name)), default=None)

    def numbered(self, folder: str) -> bool:
        """See `Outlet`."""
        return any(_NUMBER.match(name) for name in self._names(folder))

    def _names(self, folder: str) -> list[str]:
        with doing(f"look into {self.folder}"):
            try:
                return [each.name for each in (self.folder / folder).iterdir()]
            except FileNotFoundError:
                return []

    def read(self, name: str) -> bytes | None:
        """See `Outlet`."""
        with doing(f"read {self.folder / name}"):
            try:
                return (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """See `Outlet`."""
        path = self.folder / name
        return write_new(path, data, path.parent / f"_{token}")

    def sync(self, name: str) -> None:
        """See `Outlet`."""
        path = self.folder / name
        sync_file(path)
        with doing(f"sync {path.parent}"):
            sync_folder(path.parent)
            sync_folder(self.folder)


class BucketOutlet:
    """A place in a bucket. What is not known for sure is looked up."""

    def __init__(
        self,
        place: BucketPath,
        spool: Path,
        settings: Settings,
        opened: Callable[[BucketPath, Settings], BucketCalls] = BucketCalls.open,
    ) -> None:
        """`spool`: a folder for files on their way, of this outlet alone."""
        self.place = place
        self._spool = spool
        self._settings = settings
        self._opened = opened
        self._calls: BucketCalls | None = None

    @property
    def where(self) -> str:
        """See `Outlet`."""
        return str(self.place)

    @property
    def options(self) -> dict[str, str] | None:
        """See `Outlet`: credentials are in the environment, as everywhere."""
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
            # A commit is a request that fails where there is one already, whatever the
            # environment says of other ways.
            given |= {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
        return given

    @property
    def private(self) -> bool:
        """See `Outlet`."""
        return True

    @property
    def calls(self) -> BucketCalls:
        """The bucket; opening it takes some ms."""
        if self._calls is None:
            self._calls = self._opened(self.place, self._settings)
        return self._calls

    def staging(self, token: str) -> Staging:
        """See `Outlet`."""
        return BucketStaging(lambda: self.calls, self.where, self._spool, token)

    def begin(self, folder: str) -> None:
        """See `Outlet`: there are no folders."""

    def tidy(self, folder: str) -> None:
        """See `Outlet`: an object is there whole, or not at all."""

    def other_than(self, folder: str) -> str | None:
        """See `Outlet`."""
        before = next(self.calls.names(), [])
        behind = next(self.calls.names(after=f"{folder}/~"), [])
        names = (name.partition("/")[0] for name in (*before, *behind))
        return next((name for name in names if name != folder), None)

    def newest(self, folder: str) -> str | None:
        """See `Outlet`."""
        number = newest_number(lambda number: self._numbers_after(folder, number))
        return None if number is None else f"{number:020d}.json"

    def numbered(self, folder: str) -> bool:
        """See `Outlet`: digits come first."""
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

    def read(self, name: str) -> bytes | None:
        """See `Outlet`."""
        return self.calls.get(name, DOCUMENT_BYTES_MAX)

    def write_new(self, name: str, data: bytes, token: str) -> bool:
        """See `Outlet`."""
        failure: StorageError | None = None
        for _ in range(2):
            try:
                if self.calls.create(name, data):
                    return True
            except StorageError as error:
                if error.determinate and failure is None:
                    raise
                failure = error
            # It may have been there already, or be there in spite of an error: and then be ours.
            found = self.calls.get(name, DOCUMENT_BYTES_MAX)
            if found is not None:
                return found == data
        raise StorageError(
            f"could not write {self.where}/{name}: it may come to be there", determinate=False
        ) from failure

    def sync(self, name: str) -> None:
        """See `Outlet`: what is there stays."""


def newest_number(after: Callable[[int], tuple[list[int], bool]]) -> int | None:
    """The greatest of numbers from 0 on without a gap behind the first. `after` tells some of
    those that come behind one (-1: all), the first, and whether there may be more. Asks few times,
    however many there are."""
    low, high = -1, None
    while high is None or low < high:
        at = max(low, 2 * low) if high is None else (low + high) // 2
        page, more = after(at)
        if page:
            low = max(page)
            if not more:
                return low
        else:
            high = at
    return None if low < 0 else low
