"""Where copies are written: so that a copy is there whole or not at all; and local folders.

A copy's place is `Begun`, by what its destination is: a `Folder`, or a bucket (`copy_buckets`).

Theory of operation of a folder. A copy's files lie in a subfolder of its own, ``copy-ID``, and
mean nothing by themselves. ``_manifest.json`` beside it names them. It is written last: into the
subfolder, made durable, and renamed to its place; so it names files that are all there, whenever
the process dies. What has no manifest naming it is the rest of a copy that failed, told apart by
its name, and removed by the next copy to the same folder.

Rules of a folder:

- one copy at a time writes to a folder: it holds a lock on ``_lock``, which dies with its process;
- a folder that has a manifest is refused, unless the copy is to overwrite it: then the new
  manifest takes the old one's place at once, and the old one's files go afterwards;
- a manifest of this very copy (it is named in it) means that the copy was done before, and only
  its answer was lost: it is not done again;
- folders lie below `copy_dir`, wherever ``..`` and symbolic links lead.

Names that begin with ``_`` are not data to Spark. All of it blocks; errors of the operating
system come as `StorageError`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, Protocol, TypeAlias, TypeVar

import msgspec

from actors.errors import Busy, InvalidUsage
from actors.persist.blob_file import sync_folder
from actors.persist.location import storage_error
from actors.plan.copy_manifest import MANIFEST, Manifest, decode_manifest, encode_manifest
from actors.progress import ObjectId
from actors.settings import Settings
from actors.sinks.folders import allowed
from actors.sinks.formats import FilePlace

R = TypeVar("R")

LOCK: Final = "_lock"
OWN: Final = re.compile(r"copy-[A-Za-z0-9_-]{1,64}")
"""The subfolder of a copy."""
FILE: Final = re.compile(r"\d{5,}\.(parquet|csv|json)|" + re.escape(MANIFEST))
"""A file in there."""


class Copied(msgspec.Struct, frozen=True):
    """A copy that is there already, and where its manifest is."""

    manifest: Manifest
    path: str


class Begun(FilePlace, Protocol):
    """Where one copy goes. Files have unique names and are nobody's until `publish` has named
    them, at once or not at all. All raise `StorageError`. Nothing here blocks but what
    `FilePlace` says."""

    async def begin(self) -> Copied | None:
        """Makes ready to write; what is there already when this copy was done before. Raises
        `InvalidUsage` (there is another copy, or none may be made there), `Busy`."""
        ...

    async def settle(self) -> None:
        """Brings sealed files to where they belong, so that no more than these few wait."""
        ...

    async def publish(self, manifest: Manifest) -> Copied:
        """Puts the manifest in its place. Raises `InvalidUsage` when another copy has come
        meanwhile."""
        ...

    async def abandon(self) -> None:
        """Removes what was written; nothing after `publish`."""
        ...


OpenPlace: TypeAlias = Callable[[str, ObjectId, bool], Begun]
"""(destination, copy, overwrite). Raises `InvalidUsage`."""


class Work(Protocol):
    """Runs a blocking call to its end."""

    async def __call__(self, function: Callable[[], R], /) -> R:
        """Its result."""
        ...


def place_of(destination: str, settings: Settings) -> Path:
    """The folder that a destination names, below `copy_dir`: see `folders.allowed`."""
    below = settings.copy_dir or str(Path(settings.state_dir) / "copies")
    return allowed(destination, below, "copies", "copy_dir")


class OnThreads:
    """A `Folder` as a `Begun` place: what blocks goes where `run` says, to its end."""

    def __init__(self, folder: Callable[[], Folder], run: Work) -> None:
        self._open = folder
        self._run = run
        self._folder: Folder | None = None

    async def begin(self) -> Copied | None:
        """See `Begun`."""
        self._folder = await self._run(self._open)
        return await self._run(self._folder.begin)

    async def settle(self) -> None:
        """Sealed files are there."""

    async def publish(self, manifest: Manifest) -> Copied:
        """See `Begun`."""
        folder = self._begun
        return Copied(manifest, await self._run(lambda: folder.publish(encode_manifest(manifest))))

    async def abandon(self) -> None:
        """See `Begun`."""
        if self._folder is not None:
            await self._run(self._folder.abandon)

    def create(self, name: str) -> IO[bytes]:
        """See `FilePlace`."""
        return self._begun.create(name)

    def seal(self, file: IO[bytes]) -> None:
        """See `FilePlace`."""
        self._begun.seal(file)

    def path(self, name: str) -> str:
        """See `FilePlace`."""
        return self._begun.path(name)

    @property
    def _begun(self) -> Folder:
        assert self._folder is not None, "it was begun"
        return self._folder


class Folder:
    """A copy's files below one folder. Blocking."""

    def __init__(self, folder: Path, copy: ObjectId, *, overwrite: bool) -> None:
        self._name = f"copy-{copy}"
        if OWN.fullmatch(self._name) is None:
            raise InvalidUsage(f"{copy!r} does not name a copy: letters, digits, - and _ do")
        self._folder = folder
        self._own = folder / self._name
        self._copy = copy
        self._overwrite = overwrite
        self._lock: int | None = None
        self._files: list[IO[bytes]] = []
        self._replaced: Manifest | None = None
        self._published = False

    def begin(self) -> Copied | None:
        """See `Begun`. Takes the folder's lock."""
        with self._doing("begin a copy in"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            old = self._manifest()
            if old is not None and old.copy == self._copy:
                self._published = True
                self._unlock()
                return Copied(old, str(self._folder / MANIFEST))
            if old is not None and not self._overwrite:
                raise InvalidUsage(
                    f"{self._folder} holds a copy of {old.object} at {old.as_of} already: choose "
                    "another folder, or overwrite"
                )
            self._replaced = old
            kept = set() if old is None else {Path(file.path).parts[0] for file in old.files}
            for entry in list(self._folder.iterdir()):
                if OWN.fullmatch(entry.name) and entry.name not in kept:
                    _remove(entry)
            self._own.mkdir()
            sync_folder(self._folder)
            sync_folder(self._folder.parent)
            return None

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise Busy(f"another copy is being written into {self._folder}: wait for it") from None

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _manifest(self) -> Manifest | None:
        path = self._folder / MANIFEST
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode_manifest(text, str(path))

    def create(self, name: str) -> IO[bytes]:
        """See `FilePlace`."""
        with self._doing("write"):
            file: IO[bytes] = (self._own / name).open("xb", buffering=0)
            self._files.append(file)
            return file

    def seal(self, file: IO[bytes]) -> None:
        """See `FilePlace`. It is made durable, with its name."""
        with self._doing("write"):
            os.fsync(file.fileno())
            file.close()
            self._files.remove(file)
            sync_folder(self._own)

    def path(self, name: str) -> str:
        """See `FilePlace`."""
        return f"{self._name}/{name}"

    def publish(self, manifest: bytes) -> str:
        """See `Begun`; where it is. When the last sync fails the copy is there, and may not
        survive a power cut."""
        place = self._folder / MANIFEST
        with self._doing("write the manifest of a copy in"):
            file = self.create(MANIFEST)
            view = memoryview(manifest)
            while view:
                view = view[file.write(view) :]
            self.seal(file)
            os.rename(self._own / MANIFEST, place)
        self._published = True
        try:
            sync_folder(self._folder)
        except OSError as error:
            raise storage_error(f"sync {self._folder}", error, determinate=False) from error
        finally:
            self._remove_replaced()
            self._unlock()
        return str(place)

    def _remove_replaced(self) -> None:
        """What could not be removed now goes with the next copy to this folder."""
        if self._replaced is None:
            return
        for name in {Path(file.path).parts[0] for file in self._replaced.files}:
            if OWN.fullmatch(name) and name != self._name:
                with suppress(OSError):
                    _remove(self._folder / name)

    def abandon(self) -> None:
        """See `Begun`."""
        for file in self._files:
            file.close()
        self._files.clear()
        if self._lock is None:
            return
        try:
            with self._doing("remove what was written of a copy in"):
                if not self._published:
                    _remove(self._own)
        finally:
            self._unlock()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(f"{what} {self._folder}", error) from error


def _remove(own: Path) -> None:
    """A copy's subfolder, with the files that a copy makes; others stay, and it with them."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(own.iterdir()):
            if FILE.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        with suppress(OSError):
            own.rmdir()
