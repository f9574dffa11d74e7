"""Estimates the decoded size of a msgpack frame before it is decoded. Pure.

A single byte of msgpack can become an object: an empty map of one byte becomes a message with all
its defaults. So the values of a large frame are counted first. The contents of binary and string
values, which make up most of a large frame, are skipped.

Source: the msgpack specification.
"""

from __future__ import annotations

from typing import Final

from actors.runtime.errors import MalformedFrame

GROWTH_MAX: Final = 4
"""A frame may decode to this many times the size limit of frames."""
COUNTED_BYTES_MIN: Final = 64 * 1024
"""Frames up to this size are not counted, because they cannot become large."""
DEPTH_MAX: Final = 512
"""Deepest nesting of arrays and maps."""
_OBJECT_BYTES: Final = 64
"""Estimated bytes of a decoded value."""
_MAP_BYTES: Final = 512
"""Estimated additional bytes of a map: a message with many fields."""
_FIXED: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""First byte of a value of fixed length → number of bytes that follow."""
_SIZED: Final = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
"""First byte of a binary, string or extension value → size of its length field, and number of bytes
that the length does not include."""
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte of an array or map → size of its count field, and number of values per entry."""


def check_frame(body: bytes | bytearray | memoryview, decoded_bytes_max: int) -> None:
    """Check a frame before it is decoded.

    Raises `MalformedFrame` if it would decode to more than `decoded_bytes_max` bytes, is nested
    deeper than `DEPTH_MAX`, or is truncated.
    """
    if len(body) <= COUNTED_BYTES_MIN:
        return
    end, at, left = len(body), 0, decoded_bytes_max - len(body)
    waiting: list[int] = [1]
    """Number of values still to come, at each depth."""
    try:
        while waiting:
            if not waiting[-1]:
                waiting.pop()
                continue
            waiting[-1] -= 1
            head = body[at]
            at += 1
            values = 0
            left -= _OBJECT_BYTES
            # The most frequent kinds come first.
            if head < 0x80 or head >= 0xE0:
                pass
            elif head < 0x90:
                values = 2 * (head & 15)
                left -= _MAP_BYTES
            elif head < 0xA0:
                values = head & 15
            elif head < 0xC0:
                at += head & 31
            elif head in _FIXED:
                at += _FIXED[head]
            elif head in _SIZED:
                size, beside = _SIZED[head]
                at += size + beside + int.from_bytes(body[at : at + size], "big")
            else:
                size, each = _COUNTED[head]
                values = each * int.from_bytes(body[at : at + size], "big")
                at += size
                left -= _MAP_BYTES if each == 2 else 0
            if left < 0:
                raise MalformedFrame(
                    f"a frame of {end} bytes decodes to more than {decoded_bytes_max} bytes"
                )
            # Every value takes at least one byte.
            if values > end - at:
                raise MalformedFrame(
                    "invalid msgpack message: it claims to contain more values than it has bytes"
                )
            # No recursion, because the peer would choose its depth.
            if values:
                waiting.append(values)
                if len(waiting) > DEPTH_MAX:
                    raise MalformedFrame(f"a msgpack message is nested deeper than {DEPTH_MAX}")
    except (IndexError, KeyError):
        raise MalformedFrame("a msgpack message is truncated") from None
