"""Messages inside CopyData while a log is read: pieces, keepalives, and feedback.

Pure. All integers are big-endian; times are in µs since 2000-01-01. Messages to the reader are
XLogData (``w``) and keepalive (``k``). The reader sends standby status (``r``), hot standby
feedback (``h``) and, if it is a consumer of Neon's kind, ``z`` with a `PageserverFeedback`. A
message of a wrong length raises `MalformedFrame`.

Source: PostgreSQL's documentation, "Streaming Replication Protocol"; ``z`` is Neon's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from actors.model.pgwire.type_oids import MS_TO_2000
from actors.runtime.errors import MalformedFrame
from actors.wal.feedback_codec import decode_feedback
from actors.wal.lsn import PAGE_BYTES
from actors.wal.messages import WAL_BYTES_MAX, HotStandbyFeedback, PageserverFeedback

_XLOG_DATA: Final = struct.Struct("!cQQq")
_KEEPALIVE: Final = struct.Struct("!cQq?")
_STANDBY: Final = struct.Struct("!QQQqB")
_HOT_STANDBY: Final = struct.Struct("!qIIII")
XID_FIRST: Final = 3
"""First id of a normal transaction."""


class StandbyStatus(msgspec.Struct, frozen=True, gc=False):
    """The position of a standby in the log."""

    write_lsn: int
    flush_lsn: int
    apply_lsn: int
    ts: int
    wants_reply: bool


ReaderMessage: TypeAlias = StandbyStatus | HotStandbyFeedback | PageserverFeedback


def pg_time(now_ms: int) -> int:
    """Convert Unix time in ms to the protocol's µs since 2000-01-01."""
    return (now_ms - MS_TO_2000) * 1000


def xlog_data(begin_lsn: int, end_lsn: int, now_ms: int, wal: bytes) -> bytes:
    """Return the XLogData of a piece that starts at `begin_lsn`. `end_lsn` is the log's current
    end."""
    return _XLOG_DATA.pack(b"w", begin_lsn, end_lsn, pg_time(now_ms)) + wal


def keepalive(end_lsn: int, now_ms: int, *, wants_reply: bool) -> bytes:
    """Return a keepalive with the log's current end."""
    return _KEEPALIVE.pack(b"k", end_lsn, pg_time(now_ms), wants_reply)


def piece_bytes(begin_lsn: int, end_lsn: int) -> int:
    """Return how many bytes of [begin, end) to send next.

    At most `WAL_BYTES_MAX`; unless it is everything, the piece ends with a page.
    """
    if end_lsn - begin_lsn <= WAL_BYTES_MAX:
        return end_lsn - begin_lsn
    cut = begin_lsn + WAL_BYTES_MAX
    return cut - cut % PAGE_BYTES - begin_lsn


def parse_reader(data: bytes) -> ReaderMessage:
    """Parse a message of a reader. Raise `MalformedFrame`."""
    kind, body = data[:1], data[1:]
    if kind == b"r" and len(body) == _STANDBY.size:
        write, flush, apply, ts, wants = _STANDBY.unpack(body)
        return StandbyStatus(write, flush, apply, ts, wants != 0)
    if kind == b"h" and len(body) == _HOT_STANDBY.size:
        # The low half of a 64-bit transaction id precedes its epoch.
        ts, xmin, epoch, catalog_xmin, catalog_epoch = _HOT_STANDBY.unpack(body)
        return HotStandbyFeedback(ts, epoch << 32 | xmin, catalog_epoch << 32 | catalog_xmin)
    if kind == b"z" and len(body) >= 8:
        (length,) = struct.unpack_from("!Q", body)
        if length == len(body) - 8:
            return decode_feedback(body[8:])
    raise MalformedFrame(f"invalid message of a reader: {len(data)} bytes of kind {kind!r}")


def aggregate(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """Return the oldest transactions that any reader still sees (0 if none is reported), and the
    latest time."""
    ts = xmin = catalog_xmin = 0
    for feedback in feedbacks:
        ts = max(ts, feedback.ts)
        xmin = _older(xmin, feedback.xmin)
        catalog_xmin = _older(catalog_xmin, feedback.catalog_xmin)
    return HotStandbyFeedback(ts, xmin, catalog_xmin)


def _older(found: int, given: int) -> int:
    # The low half is the transaction id; below `XID_FIRST` the reader reports none.
    if given & 0xFFFFFFFF < XID_FIRST:
        return found
    return given if found == 0 else min(found, given)
