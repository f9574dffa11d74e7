"""Positions in a log (LSN: log sequence numbers), as PostgreSQL counts, writes and divides them.

An LSN is the number of bytes before a position, in [0, 2**64). 0 (`INVALID`) means "no position". A
log is divided into segments of `segment_bytes` each (a power of two, 1 MiB to 1 GiB), and a segment
into pages of `PAGE_BYTES`. Records start at multiples of `ALIGNMENT`.

Source: PostgreSQL's xlogdefs.h and xlog_internal.h (file names, "X/X" in texts).
"""

from __future__ import annotations

from typing import Final

from actors.runtime.errors import InvalidUsage

INVALID: Final = 0
PAGE_BYTES: Final = 8192
ALIGNMENT: Final = 8
SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""PostgreSQL's default size, and the only one whose records can be read here."""
SEGMENT_BYTES_MIN: Final = 1024 * 1024
SEGMENT_BYTES_MAX: Final = 1024 * 1024 * 1024
PARTIAL: Final = ".partial"
"""Suffix of the newest segment's file name while the segment is not full."""


def lsn_text(lsn: int) -> str:
    """Return the LSN as PostgreSQL writes it: two hexadecimal halves of 32 bits,
    ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Parse the text of an LSN, as written by `lsn_text`. Raise `InvalidUsage`."""
    high, slash, low = text.partition("/")
    digits = "0123456789abcdefABCDEF"
    # Check the digits one by one, because `int` would accept signs, underscores and spaces.
    if not slash or not all(
        half and len(half) <= 8 and not half.strip(digits) for half in (high, low)
    ):
        raise InvalidUsage(f"invalid LSN {text[:40]!r}: expected a form like 16/B374D848")
    return int(high, 16) << 32 | int(low, 16)


def check_segment_bytes(segment_bytes: int) -> None:
    """Raise `InvalidUsage` for a segment size that PostgreSQL does not allow."""
    if not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX or segment_bytes & (
        segment_bytes - 1
    ):
        raise InvalidUsage(
            f"invalid segment size {segment_bytes}: expected a power of two, "
            f"{SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
        )


def segment_name(number: int, segment_bytes: int = SEGMENT_BYTES, timeline: int = 1) -> str:
    """Return the segment's file name as in ``pg_wal``: 24 hexadecimal digits."""
    # PostgreSQL groups segments by 4 GiB: digits 9 to 16 name the group, the last 8 the segment in
    # it.
    a_part = 0x1_0000_0000 // segment_bytes
    return f"{timeline:08X}{number // a_part:08X}{number % a_part:08X}"


def parse_segment_name(name: str, segment_bytes: int = SEGMENT_BYTES) -> tuple[int, bool]:
    """Return (number, whether full) of a file's name, with or without ``.partial``. Raise
    `InvalidUsage`."""
    stem = name.removesuffix(PARTIAL)
    a_part = 0x1_0000_0000 // segment_bytes
    if len(stem) == 24 and not stem.strip("0123456789ABCDEF") and int(stem[16:], 16) < a_part:
        return int(stem[8:16], 16) * a_part + int(stem[16:], 16), stem == name
    raise InvalidUsage(f"invalid segment name {name!r}")


def aligned(lsn: int) -> int:
    """Return the next LSN at which a record may start."""
    return -(-lsn // ALIGNMENT) * ALIGNMENT
