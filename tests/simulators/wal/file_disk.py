"""The disk of one acceptor as files: the real control file and log, on files that lose unsynced
data.

The files are in memory (`files.MemoryFiles`), and crash at any single call the acceptor makes of
them, in the middle of a write too: a fault of the schedule arms a call a little ahead. Segments are
of 1 MiB and logs begin shortly before the end of one, so that runs cross it. Records have
PostgreSQL's format, with made-up contents.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from actors.wal.acceptor_stores import ControlState
from actors.wal.control import FileControl
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES_MIN
from actors.wal.records import MAGICS, SHORT_HEADER_BYTES
from actors.wal.storage import FileWal
from tests.simulators.service.faults import FAIL, InjectedFault
from tests.simulators.wal.files import MemoryFiles
from tests.simulators.wal.made_up import MadeUpLog

SEGMENT_BYTES: Final = SEGMENT_BYTES_MIN
START_LSN: Final = 4 * SEGMENT_BYTES - 3 * PAGE_BYTES + SHORT_HEADER_BYTES
_FOLDER: Final = Path("/timeline")
_CALLS_AHEAD: Final = 8
"""An operation makes one to twice so many calls."""
_BODY_BYTES: Final = (8, 60, 300, 3_000)


class FileAcceptorDisk:
    """A disk made of files; see the module's docstring."""

    def __init__(self, state: ControlState, dice: random.Random) -> None:
        self._dice = dice
        self._files = MemoryFiles()
        self._files.make_folder(_FOLDER)
        self._files.sync_folder(Path("/"))
        FileControl.create(_FOLDER, state, self._files)
        self._wal: FileWal | None = None

    def open(self) -> tuple[FileControl, FileWal]:
        """Return the stores of a new life."""
        control = FileControl.open(_FOLDER, self._files)
        self._wal = FileWal.open(_FOLDER, control.state, self._files, segment_bytes=SEGMENT_BYTES)
        return control, self._wal

    def make_segment_ahead(self) -> bool:
        """Make the next segment, if it is time; return whether it was."""
        wal = self._wal
        if wal is None or not wal.wants_segment:
            return False
        wal.prepare()
        return True

    def arm(self, fault: InjectedFault) -> None:
        """Arm a crash, or a failure, of one of the next calls, if there are so many."""
        ahead = 1 + self._dice.randrange(_CALLS_AHEAD)
        if fault.kind == FAIL:
            self._files.fail_at(ahead)
        else:
            self._files.crash_at(ahead)

    def disarm(self) -> None:
        """Let later calls succeed."""
        self._files.crash_at(0)
        self._files.fail_at(0)

    def crash(self) -> None:
        """Kill the process, or the machine, which keeps all, none or some of the unsynced data."""
        self._wal = None
        fate = self._dice.randrange(3)
        self._files.restart(keep=fate == 0, rng=self._dice if fate == 1 else None)

    def read(self, begin_lsn: int, end_lsn: int) -> bytes:
        """Return the log as a process sees it."""
        assert self._wal is not None, "it is open"
        return self._wal.read(begin_lsn, end_lsn - begin_lsn)

    def close(self) -> None:
        """Do nothing: no file is open."""


class RealRecords:
    """Records that a proposer writes, in PostgreSQL's format, no two the same."""

    def __init__(self, start_lsn: int, life: int, dice: random.Random) -> None:
        self._log = MadeUpLog(start_lsn, magic=MAGICS[17], segment_bytes=SEGMENT_BYTES)
        self._life = life
        self._dice = dice
        self._number = 0

    def next(self) -> bytes:
        """Return the next record."""
        begin = len(self._log.wal)
        self._number += 1
        body = f"{self._life} {self._number} ".encode()
        self._log.record(body * (1 + self._dice.choice(_BODY_BYTES) // len(body)))
        return bytes(self._log.wal[begin:])
