"""The calls that a log's disk side makes to a file system, as protocols that tests can implement.

Calls block and raise `OSError`. *Durable* bytes and names survive a crash of the machine: a file's
bytes after `sync` or `sync_data`, names (created, renamed, removed) after `sync_folder`. A rename
is atomic either way. After a failed sync the state of earlier writes is unknown: the operating
system may have dropped them and report the next sync as a success.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from actors.durable.object_store.file_modes import PRIVATE_FOLDER


class OpenFile(Protocol):
    """An open file."""

    def write_at(self, offset: int, data: bytes) -> None:
        """Write all of the data; not durable."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes; fewer at the file's end."""
        ...

    def set_length(self, length: int) -> None:
        """Truncate the file, or extend it with zeros; not durable."""
        ...

    def sync(self) -> None:
        """Make bytes and length durable."""
        ...

    def sync_data(self) -> None:
        """Make durable what is needed to read the bytes again."""
        ...

    def close(self) -> None:
        """Close the file; nothing becomes durable."""
        ...


class FileSystem(Protocol):
    """A file system."""

    def create(self, path: Path) -> OpenFile:
        """Create an empty file to read and write; an existing one is emptied."""
        ...

    def open(self, path: Path) -> OpenFile:
        """Open an existing file to read and write. Raises `FileNotFoundError`."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, in place of what has the new name."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file. Raises `FileNotFoundError`."""
        ...

    def make_folder(self, path: Path) -> None:
        """Create a folder, which may exist."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Return the names of all entries, in no order."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make the names in the folder durable."""
        ...


ZEROS: Final = memoryview(bytes(1024 * 1024))


class _DiskFile:
    def __init__(self, path: Path, flags: int) -> None:
        self._number = os.open(path, flags | os.O_CLOEXEC, 0o600)

    def write_at(self, offset: int, data: bytes) -> None:
        # One call may write less than it was given.
        done = os.pwrite(self._number, data, offset)
        while done < len(data):
            done += os.pwrite(self._number, memoryview(data)[done:], offset + done)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._number, size, offset)

    def set_length(self, length: int) -> None:
        at = os.fstat(self._number).st_size
        if length <= at:
            os.ftruncate(self._number, length)
        # Zeros, not a hole: each flush of bytes that fill a hole changes the file's map, too.
        while at < length:
            at += os.pwrite(self._number, ZEROS[: length - at], at)

    def sync(self) -> None:
        os.fsync(self._number)

    def sync_data(self) -> None:
        os.fdatasync(self._number)

    def close(self) -> None:
        os.close(self._number)


class OperatingSystemFiles:
    """The operating system's file system."""

    def create(self, path: Path) -> OpenFile:
        """See `FileSystem`."""
        return _DiskFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def open(self, path: Path) -> OpenFile:
        """See `FileSystem`."""
        return _DiskFile(path, os.O_RDWR)

    def rename(self, old: Path, new: Path) -> None:
        """See `FileSystem`."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """See `FileSystem`."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """See `FileSystem`."""
        path.mkdir(PRIVATE_FOLDER, exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """See `FileSystem`."""
        path.rmdir()

    def names(self, folder: Path) -> list[str]:
        """See `FileSystem`."""
        return os.listdir(folder)

    def sync_folder(self, folder: Path) -> None:
        """See `FileSystem`."""
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
