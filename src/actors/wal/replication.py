"""Messages inside CopyData while a log is read back: pieces, keepalives, and feedback.

Pure. All integers are big-endian, times are µs since 2000-01-01. Messages to the reader are
XLogData (``w``) and keepalive (``k``); the reader sends standby status (``r``), hot standby
feedback (``h``) and, if it is a consumer of Neon's kind, ``z`` with a `PageserverFeedback`. A
message of a wrong length raises `MalformedFrame`.

Source: PostgreSQL's documentation, "Streaming Replication Protocol"; ``z`` is Neon's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from actors.model.pgwire.type_oids import MS_TO_2000
from actors.runtime.errors import MalformedFrame
from actors.wal.fields import Bytes, MessageFields, pack
from actors.wal.lsn import PAGE_BYTES
from actors.wal.messages import WAL_BYTES_MAX, HotStandbyFeedback, PageserverFeedback

# -- The position of a consumer of the log, as it ends an `AppendResponse` -------------------------
# A number of keys (u8), then per key: its name with a NUL, the value's length (i32), the value. All
# of it is big-endian, in version 2 of the protocol too. Unknown keys are skipped by their length;
# each of four positions has two names, the older of which is written. The last of equal keys
# counts, and missing keys are 0. A reader's ``z`` message has the same bytes as its body.


KEY_BYTES_MAX: Final = 255
_KEYS: Final = struct.Struct(">B")
_LENGTH: Final = struct.Struct(">i")
_U64: Final = struct.Struct(">Q")
_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_U8: Final = struct.Struct(">B")
KEY_BYTES_MIN: Final = 5
"""Bytes of the shortest key: an empty name's NUL, a length, and no value."""

WRITTEN: Final = (
    ("current_timeline_size", "current_timeline_bytes", _U64),
    ("ps_writelsn", "last_received_lsn", _U64),
    ("ps_flushlsn", "disk_consistent_lsn", _U64),
    ("ps_applylsn", "remote_consistent_lsn", _U64),
    ("ps_replytime", "replytime", _I64),
    ("shard_number", "shard_number", _U32),
    ("corruption_detected", "corruption_detected", _U8),
)
"""(key, field of `PageserverFeedback`, layout), in the order in which they are written."""
ALWAYS: Final = 5
"""Number of keys that are written in any case; the others only if they are not 0."""
NEWER: Final = {
    "last_received_lsn": "ps_writelsn",
    "disk_consistent_lsn": "ps_flushlsn",
    "remote_consistent_lsn": "ps_applylsn",
    "replytime": "ps_replytime",
}
"""Keys as newer peers write them, and the older ones."""
_KNOWN: Final = {key: (field, layout) for key, field, layout in WRITTEN} | {
    newer: (field, layout)
    for newer, older in NEWER.items()
    for key, field, layout in WRITTEN
    if key == older
}


def encode_feedback(feedback: PageserverFeedback) -> bytes:
    """Encode the feedback. Raises `LocalProtocolError` for numbers out of range."""
    parts = []
    for index, (key, field, layout) in enumerate(WRITTEN):
        value = int(getattr(feedback, field))
        if value or index < ALWAYS:
            parts += [key.encode(), b"\0", pack(_LENGTH, layout.size), pack(layout, value)]
    return b"".join([pack(_KEYS, len(parts) // 4), *parts])


def decode_feedback(data: Bytes) -> PageserverFeedback:
    """Decode exactly these bytes. Raises `MalformedFrame`."""
    fields = MessageFields(data, "PageserverFeedback")
    feedback = read_feedback(fields)
    fields.end()
    return feedback


def read_feedback(fields: MessageFields) -> PageserverFeedback:
    """Read the feedback that comes next. Raises `MalformedFrame`."""
    found: dict[str, Any] = {}
    for _ in range(fields.count(_KEYS, KEY_BYTES_MIN, "keys of the feedback")):
        key = fields.text(KEY_BYTES_MAX, "a key of the feedback")
        (length,) = fields.unpack(_LENGTH, f"the length of {key!r}")
        if length < 0:
            raise fields.malformed(f"the length of {key!r} is {length}")
        value = fields.take(length, f"the value of {key!r}")
        # Newer peers may send more keys.
        if key not in _KNOWN:
            continue
        field, layout = _KNOWN[key]
        if length != layout.size:
            raise fields.malformed(
                f"the value of {key!r} has {length} bytes, it must have {layout.size}"
            )
        (number,) = layout.unpack(value)
        found[field] = fields.flag(number, key) if key == "corruption_detected" else int(number)
    return PageserverFeedback(**found)


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
    """Return the wall clock as the protocol has it."""
    return (now_ms - MS_TO_2000) * 1000


def xlog_data(begin_lsn: int, end_lsn: int, now_ms: int, wal: bytes) -> bytes:
    """Return the XLogData of a piece that begins at `begin_lsn`; `end_lsn` is the log's current
    end."""
    return _XLOG_DATA.pack(b"w", begin_lsn, end_lsn, pg_time(now_ms)) + wal


def keepalive(end_lsn: int, now_ms: int, *, wants_reply: bool) -> bytes:
    """Return a keepalive with the log's current end."""
    return _KEEPALIVE.pack(b"k", end_lsn, pg_time(now_ms), wants_reply)


def piece_bytes(begin_lsn: int, end_lsn: int) -> int:
    """Return how many bytes of [begin, end) to send next: at most `WAL_BYTES_MAX`, up to a page's
    end unless it is all."""
    if end_lsn - begin_lsn <= WAL_BYTES_MAX:
        return end_lsn - begin_lsn
    cut = begin_lsn + WAL_BYTES_MAX
    return cut - cut % PAGE_BYTES - begin_lsn


def parse_reader(data: bytes) -> ReaderMessage:
    """Parse a message of a reader. Raises `MalformedFrame`."""
    kind, body = data[:1], data[1:]
    if kind == b"r" and len(body) == _STANDBY.size:
        write, flush, apply, ts, wants = _STANDBY.unpack(body)
        return StandbyStatus(write, flush, apply, ts, wants != 0)
    if kind == b"h" and len(body) == _HOT_STANDBY.size:
        # The low half of a 64-bit transaction id comes before its epoch.
        ts, xmin, epoch, catalog_xmin, catalog_epoch = _HOT_STANDBY.unpack(body)
        return HotStandbyFeedback(ts, epoch << 32 | xmin, catalog_epoch << 32 | catalog_xmin)
    if kind == b"z" and len(body) >= 8:
        (length,) = struct.unpack_from("!Q", body)
        if length == len(body) - 8:
            return decode_feedback(body[8:])
    raise MalformedFrame(f"{len(data)} bytes of kind {kind!r} are no message of a reader")


def aggregate(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """Return the oldest transactions that any reader still sees, and the latest time; 0 where no
    reader reports any."""
    ts = xmin = catalog_xmin = 0
    for feedback in feedbacks:
        ts = max(ts, feedback.ts)
        xmin = _older(xmin, feedback.xmin)
        catalog_xmin = _older(catalog_xmin, feedback.catalog_xmin)
    return HotStandbyFeedback(ts, xmin, catalog_xmin)


def _older(found: int, given: int) -> int:
    # The low half is the transaction id: below `XID_FIRST` the reader reports none.
    if given & 0xFFFFFFFF < XID_FIRST:
        return found
    return given if found == 0 else min(found, given)
