"""A process that appends to a log until it is killed: ``wal_appender.py FOLDER``. Each number it
prints was acknowledged: the log was flushed up to there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import create_timeline
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.storage import FileWal
from tests.simulators.wal.made_up import MadeUpLog

START = 2 * SEGMENT_BYTES - 300_000
"""Soon a segment is full."""
STATE = ControlState("0" * 32, "1" * 32, pg_version=150004, commit_lsn=START)


def main() -> None:
    """Without end."""
    folder = Path(sys.argv[1])
    create_timeline(folder, STATE)
    wal = FileWal.open(folder, ControlState("0" * 32, "1" * 32, pg_version=150004))
    wal.initialize(START)
    wal.truncate(START)
    log = MadeUpLog(START)
    while True:
        log.wal.clear()
        log.start_lsn = wal.write_lsn
        for size in (50, 20_000, 7):
            log.record(bytes([wal.write_lsn // 8 % 255 + 1]) * size)
        wal.write(log.start_lsn, bytes(log.wal))
        wal.flush()
        print(wal.flush_record_lsn, flush=True)


if __name__ == "__main__":
    main()
