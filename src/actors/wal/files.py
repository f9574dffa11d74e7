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

import msgspec

from actors.durable.object_store.file_modes import PRIVATE_FOLDER
from actors.wal.messages import MembershipConfig, TermEntry

# -- The disk of an acceptor, as protocols: a control file and a log -------------------------------
# `control` and `storage` implement them with files, simulations with disks that lose what was not
# flushed. Calls block, so callers run them off the loop. They raise `StorageError` (`CorruptData`
# where bytes are wrong), which says whether the call may have happened.


class ControlState(msgspec.Struct, frozen=True):
    """All state of an acceptor besides the log (the protocol's control file).

    Invariants: `term` and `commit_lsn` never fall; ``history`` is by term strictly ascending and by
    LSN ascending, its last term at most `term`; `commit_lsn`, `backup_lsn` and
    `remote_consistent_lsn` are at least `timeline_start_lsn` once that is known.
    """

    tenant: str
    timeline: str
    membership: MembershipConfig = MembershipConfig()
    term: int = 0
    history: tuple[TermEntry, ...] = ()
    pg_version: int = 0
    system_id: int = 0
    segment_bytes: int = 0
    """0 until it is known."""
    proposer_id: bytes = bytes(16)
    timeline_start_lsn: int = 0
    local_start_lsn: int = 0
    commit_lsn: int = 0
    backup_lsn: int = 0
    peer_horizon_lsn: int = 0
    """LSN up to which every acceptor has flushed: the wire's ``truncate_lsn``."""
    remote_consistent_lsn: int = 0
    created_at_ms: int = 0


class ControlStore(Protocol):
    """The control file of one timeline."""

    @property
    def state(self) -> ControlState:
        """Return the state on disk."""
        ...

    def persist(self, state: ControlState) -> None:
        """Replace the state, atomically; on disk when this returns. Raises `StorageError`."""
        ...


class WalStore(Protocol):
    """The log of one timeline.

    ``flush_lsn <= write_lsn`` and ``flush_record_lsn <= write_record_lsn``; all are 0 while the log
    is empty. A record position is at most the byte position beside it, but for padding, and after a
    switch of segments, when it is the next segment's begin at once. After opening, writes are
    refused until `truncate`; after a `StorageError` that is not `CorruptData` all is refused until
    the log is opened again."""

    @property
    def write_lsn(self) -> int:
        """Return the LSN after the last byte written; 0 for an empty log."""
        ...

    @property
    def write_record_lsn(self) -> int:
        """Return the LSN after the last whole record written (a multiple of 8; after a switch of
        segments, the next segment's begin)."""
        ...

    @property
    def flush_lsn(self) -> int:
        """Return the LSN after the last byte on disk."""
        ...

    @property
    def flush_record_lsn(self) -> int:
        """Return the LSN after the last whole record on disk: acceptors report this one."""
        ...

    def initialize(self, start_lsn: int) -> None:
        """Create the first segment of an empty log, so that `start_lsn` can be written. May be
        repeated; not fsynced. Raises `StorageError`."""
        ...

    def write(self, begin_lsn: int, wal: bytes) -> None:
        """Append bytes; `begin_lsn` must be `write_lsn`, or the log be empty. A segment that
        becomes full is on disk when this returns. Raises `CorruptData` for bytes that are no
        records, `InvalidUsage` for a gap, a rewrite, or a log not yet truncated, `StorageError`."""
        ...

    def flush(self) -> None:
        """Make the written bytes durable; does nothing when no record became whole since the last
        flush. Raises `StorageError`."""
        ...

    def truncate(self, end_lsn: int) -> None:
        """Remove all from `end_lsn` on, durably, and allow writing. After an interruption the next
        opening shows no old byte from `end_lsn` on, or all of the old log, and writing stays
        refused. Raises `InvalidUsage` when the log ends earlier, `StorageError`."""
        ...


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
