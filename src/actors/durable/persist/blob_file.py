"""Blobs as files in one folder. After a power failure, a blob exists either completely or not at
all.

Order of a write: new temporary file, bytes, fsync, rename to its final place, fsync of the folder
(and of its parent, unless the folder's name is known to be durable). Stashed results are not
synced, because nobody reads them after a power failure. Temporary files are in ``.tmp`` next to the
folders, and are removed at the next start. Disk calls block, so each has a deadline.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from actors.durable.object_store.file_modes import PRIVATE_FILE, PRIVATE_FOLDER, private_opener
from actors.durable.object_store.folder_calls import sync_folder, write_file
from actors.durable.persist.location import STASH_FOLDER, BlobInfo, check_blob_key
from actors.runtime.errors import StorageError, storage_error
from actors.runtime.kernel import ActorClock
from actors.runtime.kernel.clock import CallOverdue

R = TypeVar("R")

# -- disk calls under a deadline -------------------------------------------------------------------


DISK_TIMEOUT_MS: Final = 60_000
"""Default if no settings are given."""


def timeout_error(what: str, timeout_ms: int, *, determinate: bool) -> StorageError:
    """Return the error for a call that was given up."""
    late = "" if determinate else ", and may still do it"
    return StorageError(
        f"could not {what}: the disk did not respond within {timeout_ms} ms "
        f"(disk_timeout_ms){late}; check the file system, then try again",
        determinate=determinate,
    )


async def run_with_timeout(
    clock: ActorClock, use: Callable[[], R], timeout_ms: int, what: str, *, determinate: bool
) -> R:
    """Call `use` in a thread. Raises what `use` raises, and `StorageError` at the deadline.

    A thread cannot be stopped, so a call that is given up continues and may still take effect. Such
    a write is indeterminate. Its result is dropped.
    """
    try:
        return await clock.run_blocking_within(timeout_ms, use)
    except CallOverdue:
        raise timeout_error(what, timeout_ms, determinate=determinate) from None


# -- files -----------------------------------------------------------------------------------------

TEMPORARY: Final = ".tmp"
_CHUNK_BYTES: Final = 1024 * 1024
_INSTALLS_MAX: Final = 4
"""Maximum number of attempts to rename a blob while collectors remove its folder."""
_LEFT_MS: Final = 24 * 60 * 60 * 1000
"""Age above which a temporary file belongs to a dead process, because no write of one file takes
that long."""


class FileBlob:
    """A `BlobStore` on a local file system."""

    def __init__(self, root: Path, clock: ActorClock, timeout_ms: int = DISK_TIMEOUT_MS) -> None:
        """Make a store. `timeout_ms` limits an operation, which then continues without its
        caller."""
        self._timeout_ms = timeout_ms
        self._root = root
        self._temporary = root / TEMPORARY
        self._clock = clock
        self._synced: set[str] = set()
        """Folders, one per shard, whose names are durable. Added to by any thread."""
        # Two processes may write one key at the same time, and a crashed one leaves its file.
        self._mark = os.urandom(8)
        """Hash key of this process's temporary names."""

    async def prepare(self, *, exclusive: bool = True) -> None:
        """Create the folders and remove temporary files. Raises `StorageError`."""
        await self._in_time("prepare", "", lambda: self._prepare(exclusive), reads=True)

    async def _in_time(
        self, what: str, key: str, use: Callable[[], R], *, reads: bool = False
    ) -> R:
        what = f"{what} blob {self._root / key}"
        return await run_with_timeout(self._clock, use, self._timeout_ms, what, determinate=reads)

    def _prepare(self, exclusive: bool) -> None:
        try:
            self._root.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._temporary.mkdir(PRIVATE_FOLDER, exist_ok=True)
            for entry in list(self._temporary.iterdir()):
                # A single owner may remove all of them. If others write, too, only files older than
                # a day are removed.
                if exclusive or self._is_left(entry):
                    entry.unlink(missing_ok=True)
            sync_folder(self._root)
            sync_folder(self._root.parent)
        except OSError as error:
            raise storage_error(f"prepare the blob folder {self._root}", error) from error

    def _is_left(self, entry: Path) -> bool:
        with suppress(FileNotFoundError):
            return self._clock.now_ms() - entry.stat().st_mtime_ns // 1_000_000 > _LEFT_MS
        return False

    async def get(self, key: str) -> bytes | None:
        """Return the file's bytes; None if it does not exist. Raises `StorageError`."""
        path = self._place(key)
        return await self._in_time("read", key, lambda: _read(path), reads=True)

    async def set(self, key: str, data: bytes) -> None:
        """Write a new file. Raises `StoreFull` and `StorageError`."""
        await self._in_time("write", key, lambda: self._set(key, data))

    def _set(self, key: str, data: bytes) -> None:
        temporary = self._written_at(key)
        try:
            with _no_leftover(temporary):
                # Waiting for the disk twice per piece of an answer would take most of its time.
                durable = not key.startswith(f"{STASH_FOLDER}/")
                write_file(temporary, data, os.O_EXCL, durable=durable)
                self._install(temporary, key, durable=durable)
        except OSError as error:
            raise storage_error(f"write blob {self._place(key)}", error) from error

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Move a file into the store, or copy it from another file system. Raises
        `StorageError`."""
        return await self._in_time("take over", key, lambda: self._adopt(key, path))

    def _adopt(self, key: str, path: Path) -> tuple[int, int]:
        temporary = self._written_at(key)
        try:
            with _no_leftover(temporary):
                try:
                    os.rename(path, temporary)
                except OSError as error:
                    # A rename cannot cross file systems.
                    if error.errno != errno.EXDEV:
                        raise
                    _copy(path, temporary)
                    path.unlink()
                size, checksum = _sync_and_sum(temporary)
                self._install(temporary, key)
        except OSError as error:
            raise storage_error(f"take over {path} as blob {key}", error) from error
        return size, checksum

    def _written_at(self, key: str) -> Path:
        """Return the temporary path of a blob that is being written."""
        # Hashed, because a key may be longer than the file system allows for a name.
        named = hashlib.blake2b(key.encode(), digest_size=16, key=self._mark)
        return self._temporary / named.hexdigest()

    def _install(self, temporary: Path, key: str, *, durable: bool = True) -> None:
        """Rename a file to its place. If `durable`, make its name and that of its folder
        durable."""
        place = self._place(key)
        folder = place.parent
        for attempt in range(_INSTALLS_MAX):
            try:
                os.rename(temporary, place)
                break
            except FileNotFoundError:  # no folder yet, or a collector removed the empty folder
                if attempt == _INSTALLS_MAX - 1:
                    raise
                self._synced.discard(folder.name)
                folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
        if not durable:
            return
        try:
            sync_folder(folder)
            # Checked after the rename, when the folder certainly exists. Another process may have
            # created it and not synced it yet.
            if folder.name not in self._synced:
                sync_folder(self._root)
                self._synced.add(folder.name)
        except OSError as error:
            # Indeterminate: the rename is visible, but may not be durable.
            raise storage_error(
                f"sync the folder of blob {place}", error, determinate=False
            ) from error

    async def delete(self, key: str) -> bool:
        """Remove a file, and its folder if it was the last one. Raises `StorageError`."""
        place = self._place(key)
        return await self._in_time("delete", key, lambda: self._delete(place))

    def _delete(self, place: Path) -> bool:
        try:
            place.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(f"delete blob {place}", error) from error
        # Before the rmdir: a write that creates the folder again must sync its name again.
        self._synced.discard(place.parent.name)
        with suppress(OSError):  # not the last file in its folder
            place.parent.rmdir()
        return True

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return files whose keys start with `prefix`, sorted by key. Raises `StorageError`."""
        return await self._in_time("list", prefix, lambda: self._list(prefix), reads=True)

    def _list(self, prefix: str) -> list[BlobInfo]:
        found = []
        try:
            for folder in os.scandir(self._root):
                matches = folder.name.startswith(prefix.partition("/")[0])
                if folder.name == TEMPORARY or not matches or not folder.is_dir():
                    continue
                found += _files(Path(folder.path), prefix)
        except OSError as error:
            raise storage_error(f"list the blobs in {self._root}", error) from error
        return sorted(found, key=lambda info: info.key)

    def path(self, key: str) -> str:
        """Return the file's path."""
        return str(self._place(key))

    def place(self, key: str) -> None:
        """Return None: a file is not in a bucket."""
        check_blob_key(key)

    def _place(self, key: str) -> Path:
        folder, name = check_blob_key(key)
        return self._root / folder / name


class _no_leftover:  # noqa: N801 - reads as a statement
    """Removes the temporary file if the block fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._path.unlink(missing_ok=True)


def _files(folder: Path, prefix: str) -> list[BlobInfo]:
    """Return a folder's files. Files that are removed meanwhile, or whose folder is, are left
    out."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            key = f"{folder.name}/{entry.name}"
            if key.startswith(prefix):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    modified = status.st_mtime_ns // 1_000_000
                    found.append(BlobInfo(key, status.st_size, modified))
    return found


def _sync_and_sum(path: Path) -> tuple[int, int]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
        # A file that was moved in has the mode that Spark gave it.
        os.fchmod(file.fileno(), PRIVATE_FILE)
        os.fsync(file.fileno())
    return size, checksum


def _copy(path: Path, to: Path) -> None:
    with path.open("rb") as source, open(to, "xb", opener=private_opener) as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(f"read blob {path}", error) from error
