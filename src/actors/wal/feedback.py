"""How far a consumer of the log is, as it stands at the end of an `AppendResponse`.

A number of keys (u8), then per key: its name with a NUL, the value's length (i32), the value. All
of it is big-endian, in version 2 of the protocol too. Keys that are not known are skipped by their
length; each of the four positions has two names, the older of which is written. A key that comes
twice counts as it came last. Keys that do not come are 0. The same bytes are the body of a
standby's ``z`` message.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from actors.wal.fields import Bytes, Fields, pack
from actors.wal.messages import PageserverFeedback

KEY_BYTES_MAX: Final = 255
_KEYS: Final = struct.Struct(">B")
_LENGTH: Final = struct.Struct(">i")
_U64: Final = struct.Struct(">Q")
_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_U8: Final = struct.Struct(">B")
KEY_BYTES_MIN: Final = 5
"""A NUL and a length: an empty name and no value."""

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
"""So many are written in any case, the others unless they are 0."""
NEWER: Final = {
    "last_received_lsn": "ps_writelsn",
    "disk_consistent_lsn": "ps_flushlsn",
    "remote_consistent_lsn": "ps_applylsn",
    "replytime": "ps_replytime",
}
"""Names that newer peers write, and the older ones."""
_KNOWN: Final = {key: (field, layout) for key, field, layout in WRITTEN} | {
    newer: (field, layout)
    for newer, older in NEWER.items()
    for key, field, layout in WRITTEN
    if key == older
}


def encode_feedback(feedback: PageserverFeedback) -> bytes:
    """Its bytes. Raises `LocalProtocolError` for numbers that have no room."""
    parts = []
    for index, (key, field, layout) in enumerate(WRITTEN):
        value = int(getattr(feedback, field))
        if value or index < ALWAYS:
            parts += [key.encode(), b"\0", pack(_LENGTH, layout.size), pack(layout, value)]
    return b"".join([pack(_KEYS, len(parts) // 4), *parts])


def decode_feedback(data: Bytes) -> PageserverFeedback:
    """What these bytes say, all of them. Raises `MalformedFrame`."""
    fields = Fields(data, "PageserverFeedback")
    feedback = read_feedback(fields)
    fields.end()
    return feedback


def read_feedback(fields: Fields) -> PageserverFeedback:
    """The feedback that comes next. Raises `MalformedFrame`."""
    found: dict[str, Any] = {}
    for _ in range(fields.count(_KEYS, KEY_BYTES_MIN, "keys of the feedback")):
        key = fields.text(KEY_BYTES_MAX, "a key of the feedback")
        (length,) = fields.unpack(_LENGTH, f"the length of {key!r}")
        if length < 0:
            raise fields.malformed(f"the length of {key!r} is {length}")
        value = fields.take(length, f"the value of {key!r}")
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
