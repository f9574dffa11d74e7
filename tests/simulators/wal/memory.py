"""The disk of one acceptor, in memory: a crash keeps flushed data, and any part of the rest.

The log's records here are of whole *cells* of 8 bytes, all the same: the number of cells, the life
of the proposer that wrote it, and its number in that life. So no two records of a run are the same,
a partial record is recognised, and equal bytes at an LSN mean the same record. A cell ends with a
byte that is not zero: a torn one, zeros behind the bytes that reached the disk, is no cell.

A crash keeps of the unflushed bytes none, all, a beginning, or any cells at all. Truncated bytes
are zeros on disk, as in a segment.
"""

from __future__ import annotations

import random
import struct
from typing import Final

from actors.runtime.errors import InvalidUsage, StorageError
from actors.wal.acceptor_stores import ControlState
from tests.simulators.service.faults import CRASH, FAIL, InjectedFault
from tests.simulators.wal.files import MachineCrashed

CELL: Final = 8
_CELL: Final = struct.Struct(">HHHxB")
_WHOLE: Final = 0xFF
CELLS_MAX: Final = 6


def record(cells: int, life: int, number: int) -> bytes:
    """Return one record."""
    return _CELL.pack(cells, life, number, _WHOLE) * cells


def record_end(wal: bytes | bytearray, at: int) -> int:
    """Return the offset behind the record that begins at `at`; -1 when there is no whole one."""
    if at + CELL > len(wal):
        return -1
    cells = wal[at] << 8 | wal[at + 1]
    end = at + cells * CELL
    whole = wal[at + CELL - 1] == _WHOLE
    if not (cells and whole) or end > len(wal) or wal[at:end] != wal[at : at + CELL] * cells:
        return -1
    return end


class MemoryDisk:
    """Storage that survives the acceptor's crash. `open` returns its stores for one life."""

    def __init__(self, state: ControlState, dice: random.Random) -> None:
        self.control = state
        self.base_lsn = 0
        """LSN of the first byte; 0: no log yet."""
        self.durable_base_lsn = 0
        self.cached = bytearray()
        """Log as a process sees it."""
        self.durable = bytearray()
        """Log as it is on the platter; shorter where later bytes are not flushed yet."""
        self._dice = dice

    def open(self) -> tuple[MemoryControl, MemoryWal]:
        """Return the stores of a new life."""
        return MemoryControl(self), MemoryWal(self)

    def crash(self) -> None:
        """Lose the unflushed bytes, or some of them."""
        cached = self.cached
        kept: bytes | bytearray = self.durable
        fate = self._dice.randrange(4)
        if fate == 1:
            kept = cached
        elif fate == 2 and len(cached) > len(kept):
            kept = cached[: self._dice.randint(len(kept), len(cached))]
        elif fate == 3:
            cells = self.durable + bytes(max(0, len(cached) - len(kept)))
            for at in range(len(self.durable) // CELL * CELL, len(cached), CELL):
                if self._dice.random() < 0.5:
                    cells[at : at + CELL] = cached[at : at + CELL]
            kept = cells
        self.base_lsn = self.durable_base_lsn
        if not self.base_lsn:
            kept = b""
        self.durable = bytearray(kept)
        self.cached = bytearray(kept)

    def read(self, begin_lsn: int, end_lsn: int) -> bytes:
        """Return the log as a process sees it."""
        return bytes(self.cached[max(0, begin_lsn - self.base_lsn) : end_lsn - self.base_lsn])

    def make_segment_ahead(self) -> bool:
        """Return False: there are no segments."""
        return False

    def arm(self, fault: InjectedFault) -> None:
        """Crash or fail the operation itself, before it happens; a crash behind it is the
        caller's."""
        if fault.kind == CRASH:
            raise MachineCrashed(fault.site)
        if fault.kind == FAIL:
            raise StorageError(f"{fault.site} failed", determinate=True)

    def disarm(self) -> None:
        """Do nothing: no fault stays armed."""

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryControl:
    """A control file in memory."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self.state = disk.control

    def persist(self, state: ControlState) -> None:
        self._disk.control = self.state = state


class MemoryWal:
    """A log in memory."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._refused = True
        """True until it is truncated: writes are refused."""
        self.write_lsn = self.write_record_lsn = self.flush_lsn = self.flush_record_lsn = 0
        if disk.base_lsn:
            at = 0
            while (after := record_end(disk.cached, at)) > 0:
                at = after
            self._at(disk.base_lsn + at)

    def _at(self, lsn: int) -> None:
        self.write_lsn = self.write_record_lsn = self.flush_lsn = self.flush_record_lsn = lsn

    def initialize(self, start_lsn: int) -> None:
        if self.write_lsn:
            raise InvalidUsage(f"the log is not empty: it ends at {self.write_lsn}")
        self._disk.base_lsn = start_lsn
        self._disk.cached.clear()
        self._disk.durable.clear()
        self._at(start_lsn)

    def write(self, begin_lsn: int, wal: bytes) -> None:
        if self._refused or begin_lsn != self.write_lsn:
            raise InvalidUsage(f"write at {begin_lsn}, refused or not at {self.write_lsn}")
        disk, at = self._disk, begin_lsn - self._disk.base_lsn
        disk.cached[at : at + len(wal)] = wal
        self.write_lsn += len(wal)
        record_at = self.write_record_lsn - disk.base_lsn
        while (after := record_end(disk.cached, record_at)) > 0:
            record_at = after
        self.write_record_lsn = disk.base_lsn + record_at

    def flush(self) -> None:
        if self.flush_record_lsn == self.write_record_lsn:
            return
        self._disk.durable = bytearray(self._disk.cached)
        self.flush_lsn = self.write_lsn
        self.flush_record_lsn = self.write_record_lsn

    def truncate(self, end_lsn: int) -> None:
        if end_lsn > self.write_record_lsn:
            raise InvalidUsage(f"truncation to {end_lsn}, beyond the end {self.write_record_lsn}")
        disk = self._disk
        del disk.cached[end_lsn - disk.base_lsn :]
        disk.durable = bytearray(disk.cached)
        disk.durable_base_lsn = disk.base_lsn
        self._at(end_lsn)
        self._refused = False


class CellRecords:
    """Records that a proposer writes, made of cells, no two the same."""

    def __init__(self, start_lsn: int, life: int, dice: random.Random) -> None:
        self._life = life
        self._dice = dice
        self._number = 0

    def next(self) -> bytes:
        """Return the next record."""
        self._number += 1
        return record(self._dice.randint(1, CELLS_MAX), self._life, self._number)
