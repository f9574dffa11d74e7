"""Finds the end of a log on disk by reading its records from the commit LSN on.

A record begins at the control file's ``commit_lsn``, and all before it is on disk. Later bytes may
have been interrupted anywhere: the log ends at the first record that is not whole and right, and
what follows it was never acknowledged (or was truncated).
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.errors import CorruptData
from actors.wal.lsn import lsn_text
from actors.wal.records import BadRecord, RecordScanner
from actors.wal.segments import SegmentFiles

PIECE_BYTES: Final = 1 << 20
"""Bytes read at a time."""


class RecoveredLog(msgspec.Struct, frozen=True):
    """The end of a log, and the reason why it is there."""

    end_lsn: int
    bad: BadRecord | None
    """None: the log ends with its last file."""


def recover(segments: SegmentFiles, commit_lsn: int, pg_version: int) -> RecoveredLog:
    """Return the end of the log, durable when this returns. Raises `CorruptData` when committed
    bytes are missing, `OSError`."""
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
                raise CorruptData(
                    f"the segment of {lsn_text(commit_lsn)}, up to where the log was committed, is"
                    f" not in {segments.folder}: restore it, or remove the timeline and let its"
                    " peers fill it again",
                    determinate=True,
                ) from None
            break
        try:
            while begin < (number + 1) * size and bad is None:
                piece = file.read_at(begin % size, min(PIECE_BYTES, (number + 1) * size - begin))
                # A crash inside `SegmentFiles.cut_off` leaves a file shorter than a segment.
                if not piece:
                    bad = BadRecord(begin, scanner.record_lsn, "the file ends")
                else:
                    bad = _fed(scanner, piece)
                    begin += len(piece)
        finally:
            file.close()
        number += 1
    end_lsn = bad.record_lsn if bad else scanner.record_lsn
    # A process that died, or whose flush failed, leaves bytes that can be read and yet are not on
    # disk: the operating system may have dropped them and report the next flush as a success. Only
    # the last segment can have such bytes, since each other one was flushed before the next was
    # created.
    _rewrite(segments, max(commit_lsn, (end_lsn - 1) // size * size), end_lsn)
    return RecoveredLog(end_lsn, bad)


def _fed(scanner: RecordScanner, piece: bytes) -> BadRecord | None:
    try:
        scanner.feed(piece)
    except CorruptData:
        return scanner.bad
    return None


def _rewrite(segments: SegmentFiles, begin_lsn: int, end_lsn: int) -> None:
    """Write the bytes [begin_lsn, end_lsn) of one segment once more, and flush them."""
    size = segments.segment_bytes
    try:
        file, _ = segments.open((end_lsn - 1) // size)
    except FileNotFoundError:
        return  # removed below the horizon: committed, and not needed any more
    try:
        for at in range(begin_lsn, end_lsn, PIECE_BYTES):
            piece = file.read_at(at % size, min(PIECE_BYTES, end_lsn - at))
            file.write_at(at % size, piece)
        file.sync()
    finally:
        file.close()
    segments.sync_names()
