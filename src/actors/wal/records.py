"""Finds the ends of records in a stream of WAL that comes in pieces of any size.

`RecordScanner` alone parses the log in an acceptor. It checks page headers, lengths and CRCs, but
not the content of records, unused bytes, or the chain of previous LSNs (a log that begins in the
middle has no previous record).

The format (PostgreSQL's xlogrecord.h, xlog_internal.h; integers are little-endian):

- A page is `PAGE_BYTES`. Its header has 24 bytes, 40 on the first page of a segment: magic u16
  (PostgreSQL's major version), info u16, timeline u32, the page's own LSN u64, and the number of
  bytes that follow of a record begun earlier, u32.
- A record begins at a multiple of 8 after a page's header; it continues after the header of the
  next page, which then carries `CONTINUED` and the count of bytes to come. Its own header has 24
  bytes: total length u32, transaction u32, previous LSN u64, info u8, manager u8, two bytes
  unused, CRC u32. The CRC is CRC-32C of what follows the header, then of its first 20 bytes.

A record's end is rounded up to a multiple of 8, or, after a switch of segments, to the next
segment. Those bytes need not have come, so ``record_lsn`` may exceed ``lsn``; they are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import google_crc32c
import msgspec

from actors.runtime.errors import CorruptData
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES, aligned, lsn_text
from actors.wal.record_runs import RUN_BYTES_MIN, run_of

MAGICS: Final = {14: 0xD10D, 15: 0xD110, 16: 0xD113, 17: 0xD116}
"""Magic number of the pages of each major version."""
SHORT_HEADER_BYTES: Final = 24
LONG_HEADER_BYTES: Final = 40
RECORD_HEADER_BYTES: Final = 24
RECORD_BYTES_MAX: Final = 1 << 30
"""No server writes a longer record (1020 MiB since 16, the largest allocation before)."""
CONTINUED: Final = 0x0001
LONG: Final = 0x0002
OVERWRITTEN: Final = 0x0008

_PAGE: Final = Struct("<HHIQI")
_RECORD: Final = Struct("<I12xHxxI")
_SWITCH: Final = 0x0040  # manager 0 (XLOG), info 0x40
_KIND_MASK: Final = 0xFFF0  # the low bits of info are the writer's own
_OVERWRITE: Final = 0x00D0  # manager 0, info 0xD0

Found = Callable[[int, int, bytes], None]
"""Called with each whole record: its begin, the begin of the next, its header of 24 bytes."""


class BadRecord(msgspec.Struct, frozen=True):
    """The reason why a log cannot be read further."""

    lsn: int
    """LSN of the fault."""
    record_lsn: int
    """LSN after the last whole record before the fault."""
    why: str

    def __str__(self) -> str:
        """Return the reason as text."""
        return (
            f"{self.why} at {lsn_text(self.lsn)}; the last whole record ends at"
            f" {lsn_text(self.record_lsn)}"
        )


class _Wrong(Exception):
    """Raised inside the scanner; `feed` turns it into a `BadRecord`."""

    def __init__(self, lsn: int, why: str) -> None:
        super().__init__(why)
        self.lsn = lsn
        self.why = why


def magics_of(pg_version: int) -> frozenset[int]:
    """Return the magics that pages of a log of this version (170005) may have; 0: any known one.
    Raises `CorruptData` for an unknown version."""
    if not pg_version:
        return frozenset(MAGICS.values())
    known = MAGICS.get(pg_version // 10_000)
    if known is None:
        raise CorruptData(
            f"WAL of PostgreSQL {pg_version} cannot be read here: only of {sorted(MAGICS)}",
            determinate=True,
        )
    return frozenset({known})


class RecordScanner:
    """Finds the ends of records from `lsn` on, where a record must begin.

    Long pieces go through `runs` first, many records at a time, with the same results. Raises
    `CorruptData` for a `pg_version` whose log cannot be read.
    """

    def __init__(
        self,
        lsn: int,
        *,
        pg_version: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        found: Found | None = None,
    ) -> None:
        self.bad: BadRecord | None = None
        """Fault that made the last failed `feed` raise."""
        self._magics = magics_of(pg_version)
        self._segment_bytes = segment_bytes
        self._found = found
        # -- state between two pieces: only `_scan` changes it, and a failed `feed` restores it
        self._lsn = lsn
        """LSN of the next byte to come, after `_held`."""
        self._held = b""
        """First bytes of an incomplete header."""
        self._record_lsn = lsn
        self._skip_to = aligned(lsn)
        """Bytes before this LSN are not examined."""
        self._left = 0
        """Bytes of the record still to come; 0: a record is to begin."""
        self._begin = 0
        self._header = b""
        self._crc = 0
        self._overwritten = False
        """True if the next record must be the one that reports an unfinished record."""

    @property
    def lsn(self) -> int:
        """Return the LSN after the last byte taken."""
        return self._lsn

    @property
    def record_lsn(self) -> int:
        """Return the LSN after the last whole record, where the next one may begin."""
        return self._record_lsn

    def feed(self, piece: bytes) -> None:
        """Scan the next bytes. Raises `CorruptData` when they are no records; then none counts,
        though `found` may have been called for some."""
        saved = self.saved()
        try:
            self._scan(piece)
        except _Wrong as error:
            self.bad = BadRecord(error.lsn, self._record_lsn, error.why)
            # A piece is taken in whole or not at all: callers write only pieces that were scanned.
            self.restore(saved)
            raise CorruptData(f"no WAL: {self.bad}", determinate=True) from None

    def saved(self) -> tuple[Any, ...]:
        """Return all state between two pieces, for `restore`."""
        return (
            self._lsn,
            self._held,
            self._record_lsn,
            self._skip_to,
            self._left,
            self._begin,
            self._header,
            self._crc,
            self._overwritten,
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Restore the state that `saved` returned."""
        (
            self._lsn,
            self._held,
            self._record_lsn,
            self._skip_to,
            self._left,
            self._begin,
            self._header,
            self._crc,
            self._overwritten,
        ) = saved

    def _scan(self, piece: bytes) -> None:
        data = self._held + piece if self._held else piece
        base = self._lsn - len(self._held)  # the LSN of data[0]
        self._lsn += len(piece)
        self._held = b""
        at, size = 0, len(data)
        asked = 0  # `_run` has examined the bytes before this offset
        while at < size:
            lsn = base + at
            if lsn < self._skip_to:
                at = self._skip_to - base
                continue
            room = PAGE_BYTES - lsn % PAGE_BYTES
            if room == PAGE_BYTES:
                taken = self._page_header(data, at, lsn)
            elif self._left:
                taken = self._go_on(data, at, lsn, room)
            else:
                taken = 0
                if at >= asked and size - at >= RUN_BYTES_MIN:
                    taken, looked = self._run(data, at, lsn)
                    asked = at + looked
                taken = taken or self._whole_records(data, at, lsn, room)
                taken = taken or self._begin_record(data, at, lsn, room)
            if not taken:
                # At most an incomplete header (`LONG_HEADER_BYTES`) is kept; of a record's body
                # only the CRC is.
                self._held = data[at:]
                return
            at += taken

    def _page_header(self, data: bytes, at: int, lsn: int) -> int:
        """Check a page's header and return its length; 0: more bytes are needed."""
        length = SHORT_HEADER_BYTES if lsn % self._segment_bytes else LONG_HEADER_BYTES
        if len(data) - at < length:
            return 0
        magic, info, _, address, to_come = _PAGE.unpack_from(data, at)
        if magic not in self._magics:
            wanted = ", ".join(f"{each:04X}" for each in sorted(self._magics))
            raise _Wrong(lsn, f"the page's magic is {magic:04X}, not {wanted}")
        if address != lsn:
            raise _Wrong(lsn, f"the page says that it is the one of {lsn_text(address)}")
        # The server died inside the record before: it stays unfinished, and the next one says so.
        if self._left and info & OVERWRITTEN:
            self._left, self._overwritten = 0, True
        if bool(info & CONTINUED) != bool(self._left):
            is_so = "says" if info & CONTINUED else "does not say"
            raise _Wrong(lsn, f"the page {is_so} that a record goes on in it")
        if to_come != self._left:
            raise _Wrong(
                lsn, f"the page says that {to_come} bytes of a record come, not {self._left}"
            )
        return length

    def _run(self, data: bytes, at: int, lsn: int) -> tuple[int, int]:
        """Return `runs.run_of` of the bytes from `at` on."""
        # A run neither reports single records nor checks the one that follows an unfinished record.
        if self._overwritten or self._found is not None:
            return 0, len(data) - at
        taken, looked = run_of(data, at, lsn, self._magics, self._segment_bytes)
        if taken:
            self._record_lsn = self._skip_to = lsn + taken
        return taken, looked

    def _whole_records(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Check the ordinary records that lie whole in this page and piece; return their bytes.
        `_begin_record` handles the rest."""
        start, stop = at, min(len(data), at + room)
        last = stop - RECORD_HEADER_BYTES
        unpack, value = _RECORD.unpack_from, google_crc32c.value
        extend, found = google_crc32c.extend, self._found
        shift = lsn - at
        if self._overwritten:
            return 0
        # Most records pass through this loop alone, so all their checks are inline.
        while at <= last:
            length, kind, crc = unpack(data, at)
            end = at + length
            if length < RECORD_HEADER_BYTES or end > stop or kind & _KIND_MASK == _SWITCH:
                break
            if extend(value(data[at + 24 : end]), data[at : at + 20]) != crc:
                if at != start:
                    self._record_lsn = shift + at
                raise _Wrong(shift + at, f"the CRC of a record of {length} bytes is wrong")
            following = end + (-(shift + end) & 7)
            if found is not None:
                found(shift + at, shift + following, data[at : at + 24])
            at = following
        if at == start:
            return 0
        self._record_lsn = self._skip_to = shift + at
        return min(at, stop) - start

    def _begin_record(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Take as much of a record's header as the page has; return 0 when more is needed."""
        part = min(RECORD_HEADER_BYTES, room)  # a multiple of 8: records are aligned
        if len(data) - at < part:
            return 0
        length = int.from_bytes(data[at : at + 4], "little")
        if not RECORD_HEADER_BYTES <= length <= RECORD_BYTES_MAX:
            raise _Wrong(lsn, f"a record cannot have {length} bytes")
        self._begin, self._header, self._crc = lsn, b"", 0
        self._left = length
        self._take_header(data[at : at + part], lsn + part)
        return part

    def _go_on(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Take more of a record that has begun; return 0 when more of its header is needed."""
        missing = RECORD_HEADER_BYTES - len(self._header)
        if missing:
            if len(data) - at < missing:
                return 0
            self._take_header(data[at : at + missing], lsn + missing)
            return missing
        part = data[at : at + min(self._left, room)]
        self._crc = google_crc32c.extend(self._crc, part)
        self._left -= len(part)
        if not self._left:
            self._end_record(lsn + len(part))
        return len(part)

    def _take_header(self, part: bytes, behind: int) -> None:
        self._header += part
        self._left -= len(part)
        if len(self._header) == RECORD_HEADER_BYTES:
            _, kind, _ = _RECORD.unpack(self._header)
            if self._overwritten and kind & _KIND_MASK != _OVERWRITE:
                raise _Wrong(
                    self._begin, "an unfinished record is not followed by the one that says so"
                )
            self._overwritten = False
            if not self._left:
                self._end_record(behind)

    def _end_record(self, end: int) -> None:
        length, kind, crc = _RECORD.unpack(self._header)
        if google_crc32c.extend(self._crc, self._header[:20]) != crc:
            raise _Wrong(self._begin, f"the CRC of a record of {length} bytes is wrong")
        following = aligned(end)
        # Nothing is read between a record that switches segments and the next segment.
        if kind & _KIND_MASK == _SWITCH:
            following = -(-end // self._segment_bytes) * self._segment_bytes
        self._record_lsn = self._skip_to = following
        if self._found is not None:
            self._found(self._begin, following, self._header)
