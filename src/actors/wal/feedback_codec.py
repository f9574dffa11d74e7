"""The position of a consumer of the log, as it is appended to an `AppendResponse`.

Format: the number of keys (u8), then for each key its name with a NUL, the length of the value
(i32), and the value. Everything is big-endian, in version 2 of the protocol too. Unknown keys are
skipped by their length. Each of four positions has two names, the older of which is written. The
last of several equal keys counts, and missing keys are 0. The body of a reader's ``z`` message has
the same format.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from actors.wal.fields import Bytes, MessageFields, pack
from actors.wal.messages import PageserverFeedback

KEY_BYTES_MAX: Final = 255
_KEYS: Final = struct.Struct(">B")
_LENGTH: Final = struct.Struct(">i")
_U64: Final = struct.Struct(">Q")
_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_U8: Final = struct.Struct(">B")
KEY_BYTES_MIN: Final = 5
"""Size of the shortest key: the NUL of an empty name, a length, and no value."""

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
"""Number of keys that are always written. The others are written only if they are not 0."""
NEWER: Final = {
    "last_received_lsn": "ps_writelsn",
    "disk_consistent_lsn": "ps_flushlsn",
    "remote_consistent_lsn": "ps_applylsn",
    "replytime": "ps_replytime",
}
"""Keys as newer peers write them, and the older names."""
_KNOWN: Final = {key: (field, layout) for key, field, layout in WRITTEN} | {
    newer: (field, layout)
    for newer, older in NEWER.items()
    for key, field, layout in WRITTEN
    if key == older
}


def encode_feedback(feedback: PageserverFeedback) -> bytes:
    """Encode the feedback. Raise `LocalProtocolError` if a number is out of range."""
    parts = []
    for index, (key, field, layout) in enumerate(WRITTEN):
        value = int(getattr(feedback, field))
        if value or index < ALWAYS:
            parts += [key.encode(), b"\0", pack(_LENGTH, layout.size), pack(layout, value)]
    return b"".join([pack(_KEYS, len(parts) // 4), *parts])


def decode_feedback(data: Bytes) -> PageserverFeedback:
    """Decode exactly these bytes. Raise `MalformedFrame`."""
    fields = MessageFields(data, "PageserverFeedback")
    feedback = read_feedback(fields)
    fields.end()
    return feedback


def read_feedback(fields: MessageFields) -> PageserverFeedback:
    """Read the feedback that comes next in a message. Raise `MalformedFrame`."""
    found: dict[str, Any] = {}
    for _ in range(fields.count(_KEYS, KEY_BYTES_MIN, "keys of the feedback")):
        key = fields.text(KEY_BYTES_MAX, "a key of the feedback")
        (length,) = fields.unpack(_LENGTH, f"the length of {key!r}")
        if length < 0:
            raise fields.malformed(f"negative length of {key!r}: {length}")
        value = fields.take(length, f"the value of {key!r}")
        # Newer peers may send more keys.
        if key not in _KNOWN:
            continue
        field, layout = _KNOWN[key]
        if length != layout.size:
            raise fields.malformed(
                f"the value of {key!r} has {length} bytes: expected {layout.size}"
            )
        (number,) = layout.unpack(value)
        found[field] = fields.flag(number, key) if key == "corruption_detected" else int(number)
    return PageserverFeedback(**found)
