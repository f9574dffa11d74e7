"""The file-system calls made by a log's disk side, as protocols that tests can implement.

Calls block and raise `OSError`. *Durable* bytes and names survive a crash of the machine: a file's
bytes after `sync` or `sync_data`, and names (created, renamed, removed) after `sync_folder`. A
rename is atomic in either case. After a failed sync the state of earlier writes is unknown: the
operating system may have dropped them and report the next sync as successful.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from actors.durable.object_store.file_modes import PRIVATE_FOLDER


class OpenFile(Protocol):
    """An open file."""

    def write_at(self, offset: int, data: bytes) -> None:
        """Write all of the data at the offset. Not durable."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at the offset, or fewer at the end of the file."""
        ...

    def set_length(self, length: int) -> None:
        """Truncate the file, or extend it with zeros. Not durable."""
        ...

    def sync(self) -> None:
        """Make the file's bytes and length durable."""
        ...

    def sync_data(self) -> None:
        """Make durable what is needed to read the bytes again."""
        ...

    def close(self) -> None:
        """Close the file. This makes nothing durable."""
        ...


class FileSystem(Protocol):
    """A file system."""

    def create(self, path: Path) -> OpenFile:
        """Create an empty file to read and write. An existing file is emptied."""
        ...

    def open(self, path: Path) -> OpenFile:
        """Open an existing file to read and write. Raises `FileNotFoundError`."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, replacing an entry that has the new name."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file. Raises `FileNotFoundError`."""
        ...

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it exists."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Return the names of all entries, in no particular order."""
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
        # Write zeros instead of leaving a hole: flushing bytes that fill a hole also changes the
        # file's block map.
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
        """Create an empty file to read and write; see `FileSystem.create`."""
        return _DiskFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def open(self, path: Path) -> OpenFile:
        """Open an existing file; see `FileSystem.open`."""
        return _DiskFile(path, os.O_RDWR)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically; see `FileSystem.rename`."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file; see `FileSystem.remove`."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it exists; see `FileSystem.make_folder`."""
        path.mkdir(PRIVATE_FOLDER, exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder; see `FileSystem.remove_folder`."""
        path.rmdir()

    def names(self, folder: Path) -> list[str]:
        """Return the names of all entries; see `FileSystem.names`."""
        return os.listdir(folder)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in the folder durable; see `FileSystem.sync_folder`."""
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
