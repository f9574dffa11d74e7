"""Disks in memory for acceptors: what was not flushed may be gone after a crash.

A `MemoryDisk` outlives the acceptor's process: `MemoryControl` and `MemoryWal` open it, `crash`
takes the process away with as much of the unflushed bytes as one likes. Records are simplified:
one ends at every multiple of 8. As a real log does, it flushes a segment that becomes full, refuses
writes after an opening until it was truncated, and is empty to an opening while nothing is
committed.

`MemoryDisk.fault` decides before each operation (``persist``, ``initialize``, ``write``, ``flush``,
``truncate``) what becomes of it: see `Fault`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from actors.runtime.errors import InvalidUsage, StorageError
from actors.wal.acceptor_stores import ControlState
from actors.wal.lsn import ALIGNMENT, SEGMENT_BYTES


class Fault(enum.Enum):
    """What becomes of one operation."""

    NONE = "it happens"
    REFUSED = "an error that says that it surely did not happen"
    LOST = "an error that does not know; it did not happen"
    DONE = "an error that does not know; it happened"


def no_fault(operation: str) -> Fault:
    """Everything happens."""
    return Fault.NONE


class MemoryDisk:
    """The control file and the log of one timeline. `segment_bytes` is the log's."""

    def __init__(self, state: ControlState, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.state = state
        self.segment_bytes = segment_bytes
        self.start_lsn = 0
        """Where `wal` begins; 0: nowhere yet."""
        self.wal = bytearray()
        self.flushed_bytes = 0
        """So many of `wal` survive a crash."""
        self.fault: Callable[[str], Fault] = no_fault
        self.persists = 0
        self.flushes = 0
        """Those that had something to do."""

    @property
    def unflushed_bytes(self) -> int:
        """What a crash may take."""
        return len(self.wal) - self.flushed_bytes

    def crash(self, kept_bytes: int = 0) -> None:
        """The process is gone, and what it wrote without a flush, but for the first
        `kept_bytes` of it. What stays is on disk."""
        kept = min(kept_bytes, self.unflushed_bytes)
        del self.wal[self.flushed_bytes + kept :]
        self.flushed_bytes = len(self.wal)

    def attempt(self, operation: str, call: Callable[[], None]) -> None:
        """Does `call`, or what the fault says."""
        fault = self.fault(operation)
        if fault is Fault.REFUSED:
            raise StorageError(f"no {operation}: injected", determinate=True)
        if fault is not Fault.LOST:
            call()
        if fault is not Fault.NONE:
            raise StorageError(f"{operation} failed: injected", determinate=False)


class MemoryControl:
    """The control file (`ControlStore`)."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._state = disk.state

    @property
    def state(self) -> ControlState:
        """What it knows to be on disk."""
        return self._state

    def persist(self, state: ControlState) -> None:
        """Replaces it. Raises `StorageError`."""

        def put() -> None:
            self._disk.state = state
            self._disk.persists += 1

        self._disk.attempt("persist", put)
        self._state = state


class MemoryWal:
    """The log (`WalStore`). Opening finds the last whole record, if anything is committed."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._writable = False
        self._write_lsn = 0
        self._flush_lsn = 0
        if disk.state.commit_lsn:
            self._write_lsn = _whole(disk.start_lsn + len(disk.wal))
            self._flush_lsn = self._write_lsn

    @property
    def write_lsn(self) -> int:
        """Behind the last byte written; 0: empty."""
        return self._write_lsn

    @property
    def write_record_lsn(self) -> int:
        """Behind the last whole record written."""
        return _whole(self._write_lsn)

    @property
    def flush_lsn(self) -> int:
        """Behind the last byte on disk."""
        return self._flush_lsn

    @property
    def flush_record_lsn(self) -> int:
        """Behind the last whole record on disk."""
        return _whole(self._flush_lsn)

    def initialize(self, start_lsn: int) -> None:
        """An empty log will begin there. Raises `InvalidUsage`, `StorageError`."""
        if self._write_lsn:
            raise InvalidUsage(f"the log is not empty, it ends at {self._write_lsn}")

        def put() -> None:
            self._disk.start_lsn = start_lsn
            self._disk.wal.clear()
            self._disk.flushed_bytes = 0

        self._disk.attempt("initialize", put)

    def write(self, begin_lsn: int, wal: bytes) -> None:
        """Appends. Raises `InvalidUsage`, `StorageError`."""
        if not self._writable:
            raise InvalidUsage("the log was not truncated since it was opened")
        if begin_lsn != self._write_lsn:
            raise InvalidUsage(f"a write at {begin_lsn}, the log ends at {self._write_lsn}")

        def put() -> None:
            self._disk.wal.extend(wal)

        self._disk.attempt("write", put)
        self._write_lsn += len(wal)
        full_lsn = self._write_lsn // self._disk.segment_bytes * self._disk.segment_bytes
        if full_lsn > self._flush_lsn:
            self._flush(full_lsn)

    def flush(self) -> None:
        """Nothing where no record became whole. Raises `StorageError`."""
        if self.flush_record_lsn != self.write_record_lsn:
            self._flush(self._write_lsn)

    def truncate(self, end_lsn: int) -> None:
        """Cuts off all from there, durably. Raises `InvalidUsage`, `StorageError`."""
        if self._write_lsn and end_lsn > self.write_record_lsn:
            raise InvalidUsage(f"the log ends at {self.write_record_lsn}, before {end_lsn}")
        self._writable = False

        def put() -> None:
            del self._disk.wal[end_lsn - self._disk.start_lsn :]
            self._disk.flushed_bytes = len(self._disk.wal)

        self._disk.attempt("truncate", put)
        self._write_lsn = self._flush_lsn = end_lsn
        self._writable = True

    def read(self, begin_lsn: int, size: int) -> bytes:
        """What is written there. Raises `InvalidUsage` for bytes that are not."""
        at = begin_lsn - self._disk.start_lsn
        if at < 0 or begin_lsn + size > self._write_lsn:
            raise InvalidUsage(
                f"{size} bytes at {begin_lsn} are not all in the log, which goes from"
                f" {self._disk.start_lsn} to {self._write_lsn}"
            )
        return bytes(self._disk.wal[at : at + size])

    def _flush(self, end_lsn: int) -> None:
        def put() -> None:
            self._disk.flushed_bytes = end_lsn - self._disk.start_lsn
            self._disk.flushes += 1

        self._disk.attempt("flush", put)
        self._flush_lsn = end_lsn


def _whole(lsn: int) -> int:
    return lsn // ALIGNMENT * ALIGNMENT


OPERATIONS: Final = ("persist", "initialize", "write", "flush", "truncate")
"""All that `MemoryDisk.fault` is asked about."""
