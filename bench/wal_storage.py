"""The log on disk: appends with a flush each, against one file, and how fast a recovery reads.

``append_…``: a piece of records written to the log and flushed, as the median and in total. The
peer writes the same bytes to one preallocated file and calls fdatasync as often. The rounds
alternate. A thread creates segments ahead of time, as `timelines` does. Targets are shares of the
peer's throughput: 0.6, 0.4 and 0.2, so ours may take 1.7, 2.5 and 5 times as long.
``recovery_…``: milliseconds to find the end of a log whose records have that many bytes. The peer
is the time at 40 MB/s.

    python bench/wal_storage.py [--json FILE] [--quick]
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.simulators`
from actors.wal.acceptor_stores import ControlState
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.storage import FileWal
from measure import Measure, Report, median
from tests.simulators.wal.made_up import MadeUpLog

START = 5 * SEGMENT_BYTES
SCAN_BYTES_A_S = 40_000_000
SHARES = {131_072: 0.6, 8_192: 0.4, 1_024: 0.2}
APPENDS = {131_072: 256, 8_192: 400, 1_024: 400}
RECOVERIES = {100: 1 << 28, 300: 1 << 30, 8_000: 1 << 28}
"""Bytes of log, by the size of a record's body: a small change, an average one, a page."""


def state(commit_lsn: int = 0) -> ControlState:
    """Return the state of a log that is committed up to `commit_lsn`."""
    return ControlState("0" * 32, "1" * 32, pg_version=150004, commit_lsn=commit_lsn)


def made_up(size: int, body_bytes: int) -> bytes:
    """Return a log of at least `size` bytes that begins at START."""
    log = MadeUpLog(START)
    body = os.urandom(body_bytes)
    while len(log.wal) < size:
        log.record(body)
    return bytes(log.wal)


def begun(folder: Path) -> FileWal:
    """Return an empty log."""
    folder.mkdir()
    wal = FileWal.open(folder, state())
    wal.initialize(START)
    wal.truncate(START)
    return wal


def appends(report: Report, folder: Path, piece_bytes: int, count: int) -> None:
    """Measure one size of pieces."""
    stream = made_up(piece_bytes * count, 300)
    wal = begun(folder / f"append_{piece_bytes}")
    number = os.open(folder / f"peer_{piece_bytes}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, piece_bytes * count)
    os.fsync(number)
    ours, peer = [], []
    beside = ThreadPoolExecutor(1)
    for at in range(0, piece_bytes * count, piece_bytes):
        if wal.wants_segment:
            beside.submit(wal.prepare)
        piece = stream[at : at + piece_bytes]
        began = perf_counter()
        wal.write(START + at, piece)
        wal.flush()
        ours.append((perf_counter() - began) * 1000)
        began = perf_counter()
        os.pwrite(number, piece, at)
        os.fdatasync(number)
        peer.append((perf_counter() - began) * 1000)
    beside.shutdown()
    os.close(number)
    target = round(1 / SHARES[piece_bytes], 2)
    kib = piece_bytes // 1024
    report.add(Measure(f"wal_append_{kib}kib", median(ours), median(peer), target=target))
    total = f"wal_append_{kib}kib_all_of_{count}"
    report.add(Measure(total, sum(ours), sum(peer), target=target))


def recovery(report: Report, folder: Path, size: int, body_bytes: int) -> None:
    """Measure one size of records. The log consists of complete segments and is scanned from its
    start."""
    # Repeating one segment's worth of records would give wrong page addresses. So the
    # log is generated piece by piece, and only the scan is measured.
    wal = begun(folder / f"recovery_{body_bytes}")
    log = MadeUpLog(START)
    body = os.urandom(body_bytes)
    while wal.write_lsn < START + size:
        log.start_lsn = wal.write_lsn
        log.wal.clear()
        log.records.clear()
        while len(log.wal) < 1 << 20:
            log.record(body)
        wal.write(log.start_lsn, bytes(log.wal))
    wal.flush()
    end = wal.flush_record_lsn
    wal.close()
    began = perf_counter()
    found = FileWal.open(folder / f"recovery_{body_bytes}", state(START))
    took = (perf_counter() - began) * 1000
    assert found.flush_record_lsn == end, "the scan did not find the end of the log"
    name = f"wal_recovery_{size >> 20}mib_of_{body_bytes}_byte_records"
    report.add(Measure(name, took, (end - START) / SCAN_BYTES_A_S * 1000, target=1))


def main() -> None:
    """Run the benchmark."""
    report = Report(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for piece_bytes, count in APPENDS.items():
            appends(report, folder, piece_bytes, count // 10 if report.quick else count)
        for body_bytes, size in RECOVERIES.items():
            recovery(report, folder, 1 << 24 if report.quick else size, body_bytes)
    report.close()


if __name__ == "__main__":
    main()
