"""Where a log on disk ends: found by reading its records from a known place on.

The known place is the control file's ``commit_lsn``: a record begins there, and all before is on
disk. What follows may have been interrupted at any byte; the log ends at the first record that is
not whole and right, and what stands behind it was never acknowledged (or was cut off).

A program that died, or whose flush failed, leaves bytes that can be read and yet are not on disk:
the operating system may have dropped what it could not write and call the next flush a success.
Only the last segment can have such bytes (every other one was flushed before the next was made),
so what was found in it is written once more, the same bytes, and flushed. Only then is the end that
was found on disk.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.errors import Corrupt
from actors.wal.lsn import lsn_text
from actors.wal.records import Bad, RecordScanner
from actors.wal.segments import SegmentFiles

PIECE_BYTES: Final = 1 << 20
"""Read at a time."""


class Recovered(msgspec.Struct, frozen=True):
    """Where a log ends, and why there."""

    end_lsn: int
    bad: Bad | None
    """None: the last segment ends there, or its last file."""


def recover(segments: SegmentFiles, commit_lsn: int, pg_version: int) -> Recovered:
    """The end of the log, durable when this returns. Raises `Corrupt` when what was committed is
    not there, `OSError`."""
    scanner = RecordScanner(commit_lsn, pg_version=pg_version, segment_bytes=segments.segment_bytes)
    size = segments.segment_bytes
    number = commit_lsn // size
    bad = None
    while bad is None:
        begin = max(commit_lsn, number * size)
        try:
            file, _ = segments.open(number)
        except FileNotFoundError:
            if number == commit_lsn // size and commit_lsn % size:
                raise Corrupt(
                    f"the segment of {lsn_text(commit_lsn)}, up to where the log was committed, is"
                    f" not in {segments.folder}: restore it, or remove the timeline and let its"
                    " peers fill it again",
                    determinate=True,
                ) from None
            break
        try:
            while begin < (number + 1) * size and bad is None:
                piece = file.read_at(begin % size, min(PIECE_BYTES, (number + 1) * size - begin))
                if not piece:  # cut off, and the crash came before it had its length again
                    bad = Bad(begin, scanner.record_lsn, "the file ends")
                else:
                    bad = _fed(scanner, piece)
                    begin += len(piece)
        finally:
            file.close()
        number += 1
    end_lsn = bad.record_lsn if bad else scanner.record_lsn
    _rewrite(segments, max(commit_lsn, (end_lsn - 1) // size * size), end_lsn)
    return Recovered(end_lsn, bad)


def _fed(scanner: RecordScanner, piece: bytes) -> Bad | None:
    try:
        scanner.feed(piece)
    except Corrupt:
        return scanner.bad
    return None


def _rewrite(segments: SegmentFiles, begin_lsn: int, end_lsn: int) -> None:
    """[begin_lsn, end_lsn), all in one segment."""
    size = segments.segment_bytes
    try:
        file, _ = segments.open((end_lsn - 1) // size)
    except FileNotFoundError:
        return  # removed: it was committed, and read by all who need it
    try:
        for at in range(begin_lsn, end_lsn, PIECE_BYTES):
            piece = file.read_at(at % size, min(PIECE_BYTES, end_lsn - at))
            file.write_at(at % size, piece)
        file.sync()
    finally:
        file.close()
    segments.sync_names()
