"""What is said inside CopyData while a log is read back: pieces, keepalives, and feedback.

Pure. All integers are big-endian, times are µs since 2000-01-01. Messages to the reader are
XLogData (``w``) and keepalive (``k``); from it come standby status (``r``), hot standby feedback
(``h``) and, of consumers of Neon's kind, ``z`` with a `PageserverFeedback`. What is longer or
shorter than it must be raises `MalformedFrame`.

Source: PostgreSQL's documentation, "Streaming Replication Protocol"; ``z`` is Neon's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from actors.errors import MalformedFrame
from actors.wal.feedback import decode_feedback
from actors.wal.lsn import PAGE_BYTES
from actors.wal.messages import WAL_BYTES_MAX, HotStandbyFeedback, PageserverFeedback

EPOCH_OFFSET_MS: Final = 946_684_800_000
"""From 1970 to 2000."""
_XLOG_DATA: Final = struct.Struct("!cQQq")
_KEEPALIVE: Final = struct.Struct("!cQq?")
_STANDBY: Final = struct.Struct("!QQQqB")
_HOT_STANDBY: Final = struct.Struct("!qIIII")
XID_FIRST: Final = 3
"""Below it no transaction is a normal one."""


class StandbyStatus(msgspec.Struct, frozen=True, gc=False):
    """How far the reader is with the log."""

    write_lsn: int
    flush_lsn: int
    apply_lsn: int
    ts: int
    wants_reply: bool


ReaderMessage: TypeAlias = StandbyStatus | HotStandbyFeedback | PageserverFeedback


def pg_time(now_ms: int) -> int:
    """Wall clock as the protocol has it."""
    return (now_ms - EPOCH_OFFSET_MS) * 1000


def xlog_data(begin_lsn: int, end_lsn: int, now_ms: int, wal: bytes) -> bytes:
    """A piece of the log that begins at `begin_lsn`; `end_lsn`: where the log ends just now."""
    return _XLOG_DATA.pack(b"w", begin_lsn, end_lsn, pg_time(now_ms)) + wal


def keepalive(end_lsn: int, now_ms: int, *, wants_reply: bool) -> bytes:
    """Nothing new."""
    return _KEEPALIVE.pack(b"k", end_lsn, pg_time(now_ms), wants_reply)


def piece_bytes(begin_lsn: int, end_lsn: int) -> int:
    """How much to send next of [begin, end): at most `WAL_BYTES_MAX`, up to a page's end unless
    it is all."""
    if end_lsn - begin_lsn <= WAL_BYTES_MAX:
        return end_lsn - begin_lsn
    cut = begin_lsn + WAL_BYTES_MAX
    return cut - cut % PAGE_BYTES - begin_lsn


def parse_reader(data: bytes) -> ReaderMessage:
    """What a reader says. Raises `MalformedFrame`."""
    kind, body = data[:1], data[1:]
    if kind == b"r" and len(body) == _STANDBY.size:
        write, flush, apply, ts, wants = _STANDBY.unpack(body)
        return StandbyStatus(write, flush, apply, ts, wants != 0)
    if kind == b"h" and len(body) == _HOT_STANDBY.size:
        # A 64-bit transaction id is its low half and then its epoch: halves swapped.
        ts, xmin, epoch, catalog_xmin, catalog_epoch = _HOT_STANDBY.unpack(body)
        return HotStandbyFeedback(ts, epoch << 32 | xmin, catalog_epoch << 32 | catalog_xmin)
    if kind == b"z" and len(body) >= 8:
        (length,) = struct.unpack_from("!Q", body)
        if length == len(body) - 8:
            return decode_feedback(body[8:])
    raise MalformedFrame(f"{len(data)} bytes of kind {kind!r} are no message of a reader")


def aggregate(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """Of all readers: the oldest transactions that any still sees, the latest time; 0 where no
    reader says any."""
    ts = xmin = catalog_xmin = 0
    for feedback in feedbacks:
        ts = max(ts, feedback.ts)
        xmin = _older(xmin, feedback.xmin)
        catalog_xmin = _older(catalog_xmin, feedback.catalog_xmin)
    return HotStandbyFeedback(ts, xmin, catalog_xmin)


def _older(found: int, given: int) -> int:
    if given & 0xFFFFFFFF < XID_FIRST:
        return found
    return given if found == 0 else min(found, given)
