"""Writes copies, whole or not at all, and writes them to local folders.

A copy is written to a `CopyDestination` place: a `FolderCopy`, or a bucket (`copy_buckets`).

Theory of operation of a folder. A copy's files lie in a subfolder of its own, ``copy-ID``, and mean
nothing until ``_manifest.json`` beside it names them. The manifest is written last. A subfolder
without a manifest belongs to a failed copy, and the next copy to the folder removes it.

Rules of a folder:

- one copy at a time writes to a folder: it locks ``_lock``;
- a folder with a manifest is refused, unless the copy is to overwrite it;
- folders lie below `copy_dir`, wherever ``..`` and symbolic links lead.

Names that begin with ``_`` are not data to Spark. All methods of a folder block, and errors of the
operating system are raised as `StorageError`.
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

from actors.connectors.sinks.formats import FilePlace
from actors.connectors.sinks.outlets import allowed
from actors.errors import InvalidUsage, ResourceBusy
from actors.persist.blob_file import sync_folder
from actors.persist.location import storage_error
from actors.plan.copy_manifest import MANIFEST, CopyManifest, decode_manifest, encode_manifest
from actors.progress import ObjectId
from actors.settings import Settings

R = TypeVar("R")

LOCK: Final = "_lock"
OWN: Final = re.compile(r"copy-[A-Za-z0-9_-]{1,64}")
"""Name of a copy's subfolder."""
FILE: Final = re.compile(r"\d{5,}\.(parquet|csv|json)|" + re.escape(MANIFEST))
"""Name of a file in a copy's subfolder."""


class PublishedCopy(msgspec.Struct, frozen=True):
    """A finished copy: its manifest, and the path of the manifest."""

    manifest: CopyManifest
    path: str


class CopyDestination(FilePlace, Protocol):
    """Place that one copy is written to.

    Files have unique names and become visible only when `publish` names them, all at once. All
    methods raise `StorageError`. None blocks but those of `FilePlace`.
    """

    async def begin(self) -> PublishedCopy | None:
        """Prepare to write, or return the finished copy if this copy was written before.

        Raise `InvalidUsage` if the place holds another copy or may not be written, and
        `ResourceBusy`.
        """
        ...

    async def settle(self) -> None:
        """Upload the sealed files, so that few of them wait in scratch."""
        ...

    async def publish(self, manifest: CopyManifest) -> PublishedCopy:
        """Put the manifest in its place. Raise `InvalidUsage` if another copy was published
        meanwhile."""
        ...

    async def abandon(self) -> None:
        """Remove the files written; do nothing after `publish`."""
        ...


OpenPlace: TypeAlias = Callable[[str, ObjectId, bool], CopyDestination]
"""Opens (destination, copy, overwrite). Raises `InvalidUsage`."""


class BlockingRunner(Protocol):
    """Runs a blocking call and waits until it has ended."""

    async def __call__(self, function: Callable[[], R], /) -> R:
        """Return the call's result."""
        ...


def place_of(destination: str, settings: Settings) -> Path:
    """Return the folder that a destination names, below `copy_dir`: see `folders.allowed`."""
    below = settings.copy_dir or str(Path(settings.state_dir) / "copies")
    return allowed(destination, below, "copies", "copy_dir")


class OnThreads:
    """Makes a `CopyDestination` place of a `FolderCopy`; `run` executes its blocking calls."""

    def __init__(self, folder: Callable[[], FolderCopy], run: BlockingRunner) -> None:
        self._open = folder
        self._run = run
        self._folder: FolderCopy | None = None

    async def begin(self) -> PublishedCopy | None:
        """See `CopyDestination`."""
        self._folder = await self._run(self._open)
        return await self._run(self._folder.begin)

    async def settle(self) -> None:
        """Do nothing: sealed files are in their folder already."""

    async def publish(self, manifest: CopyManifest) -> PublishedCopy:
        """See `CopyDestination`."""
        folder = self._begun
        return PublishedCopy(
            manifest, await self._run(lambda: folder.publish(encode_manifest(manifest)))
        )

    async def abandon(self) -> None:
        """See `CopyDestination`."""
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
    def _begun(self) -> FolderCopy:
        assert self._folder is not None, "it was begun"
        return self._folder


class FolderCopy:
    """Files of a copy below one folder. All methods block."""

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
        self._replaced: CopyManifest | None = None
        self._published = False

    def begin(self) -> PublishedCopy | None:
        """See `CopyDestination`. Also take the folder's lock."""
        with self._doing("begin a copy in"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            old = self._manifest()
            # This copy was finished before, and only its response was lost.
            if old is not None and old.copy == self._copy:
                self._published = True
                self._unlock()
                return PublishedCopy(old, str(self._folder / MANIFEST))
            if old is not None and not self._overwrite:
                raise InvalidUsage(
                    f"{self._folder} holds a copy of {old.object} at {old.as_of} already: choose "
                    "another folder, or overwrite"
                )
            self._replaced = old
            # An overwritten copy stays readable until the new manifest is published.
            kept = set() if old is None else {Path(file.path).parts[0] for file in old.files}
            for entry in list(self._folder.iterdir()):
                if OWN.fullmatch(entry.name) and entry.name not in kept:
                    _remove(entry)
            self._own.mkdir()
            sync_folder(self._folder)
            # The folder itself may be new: its name must survive a power cut.
            sync_folder(self._folder.parent)
            return None

    def _take_lock(self) -> None:
        # The operating system releases the lock when the process dies.
        self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise ResourceBusy(
                f"another copy is being written into {self._folder}: wait for it"
            ) from None

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _manifest(self) -> CopyManifest | None:
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
        """See `FilePlace`. Also sync the file and its name to disk."""
        with self._doing("write"):
            os.fsync(file.fileno())
            file.close()
            self._files.remove(file)
            sync_folder(self._own)

    def path(self, name: str) -> str:
        """See `FilePlace`."""
        return f"{self._name}/{name}"

    def publish(self, manifest: bytes) -> str:
        """See `CopyDestination`. Return the manifest's path.

        If the last sync fails, the copy is in place but may not survive a power cut.
        """
        place = self._folder / MANIFEST
        with self._doing("write the manifest of a copy in"):
            file = self.create(MANIFEST)
            view = memoryview(manifest)
            while view:
                view = view[file.write(view) :]
            self.seal(file)
            # Renamed last, when all files are durable: a manifest never names a missing file,
            # whenever the process dies. It replaces the manifest of an overwritten copy atomically.
            os.rename(self._own / MANIFEST, place)
        self._published = True
        try:
            sync_folder(self._folder)
        except OSError as error:
            raise storage_error(f"sync {self._folder}", error, determinate=False) from error
        finally:
            # After the rename: until then a reader may use the overwritten copy.
            self._remove_replaced()
            self._unlock()
        return str(place)

    def _remove_replaced(self) -> None:
        """Remove the files of the overwritten copy; the next copy to this folder removes the
        rest."""
        if self._replaced is None:
            return
        for name in {Path(file.path).parts[0] for file in self._replaced.files}:
            if OWN.fullmatch(name) and name != self._name:
                with suppress(OSError):
                    _remove(self._folder / name)

    def abandon(self) -> None:
        """See `CopyDestination`."""
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
    """Remove a copy's subfolder and the files that a copy writes.

    A foreign file stays, and then the subfolder does, too.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(own.iterdir()):
            if FILE.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        with suppress(OSError):
            own.rmdir()
