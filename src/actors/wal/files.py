"""All that the disk side of a log asks of a file system, so that tests can take its place.

Calls block and raise `OSError`. What is *durable* survives a crash of the machine: a file's bytes
after `sync` or `sync_data`, names (made, renamed, removed) after `sync_folder`. A rename is atomic
either way. After a sync that failed nothing is known of what was written before it: the operating
system may have dropped it and call the next sync a success.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol


class File(Protocol):
    """An open file."""

    def write_at(self, offset: int, data: bytes) -> None:
        """All of it; not durable."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Fewer bytes at the file's end."""
        ...

    def set_length(self, length: int) -> None:
        """Cuts it off, or adds zeros; not durable."""
        ...

    def sync(self) -> None:
        """Bytes and length are durable when this returns."""
        ...

    def sync_data(self) -> None:
        """As `sync`, without what is not needed to read the bytes again."""
        ...

    def close(self) -> None:
        """Does not make anything durable."""
        ...


class Files(Protocol):
    """A file system."""

    def create(self, path: Path) -> File:
        """An empty file of that name, to read and write; one that was there is emptied."""
        ...

    def open(self, path: Path) -> File:
        """A file that is there, to read and write. Raises `FileNotFoundError`."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Takes the place of what has the new name, atomically."""
        ...

    def remove(self, path: Path) -> None:
        """A file. Raises `FileNotFoundError`."""
        ...

    def make_folder(self, path: Path) -> None:
        """May be there."""
        ...

    def remove_folder(self, path: Path) -> None:
        """An empty one."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Of all that is in it, in no order."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """The names in it are durable when this returns."""
        ...


ZEROS: Final = memoryview(bytes(1024 * 1024))


class _DiskFile:
    def __init__(self, path: Path, flags: int) -> None:
        self._number = os.open(path, flags | os.O_CLOEXEC, 0o600)

    def write_at(self, offset: int, data: bytes) -> None:
        done = os.pwrite(self._number, data, offset)
        while done < len(data):
            done += os.pwrite(self._number, memoryview(data)[done:], offset + done)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._number, size, offset)

    def set_length(self, length: int) -> None:
        at = os.fstat(self._number).st_size
        if length <= at:
            os.ftruncate(self._number, length)
        while at < length:  # zeros, not a hole: to fill one, each flush changes the file's map, too
            at += os.pwrite(self._number, ZEROS[: length - at], at)

    def sync(self) -> None:
        os.fsync(self._number)

    def sync_data(self) -> None:
        os.fdatasync(self._number)

    def close(self) -> None:
        os.close(self._number)


class Disk:
    """The operating system's."""

    def create(self, path: Path) -> File:
        """See `Files`."""
        return _DiskFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def open(self, path: Path) -> File:
        """See `Files`."""
        return _DiskFile(path, os.O_RDWR)

    def rename(self, old: Path, new: Path) -> None:
        """See `Files`."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """See `Files`."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """See `Files`."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """See `Files`."""
        path.rmdir()

    def names(self, folder: Path) -> list[str]:
        """See `Files`."""
        return os.listdir(folder)

    def sync_folder(self, folder: Path) -> None:
        """See `Files`."""
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
