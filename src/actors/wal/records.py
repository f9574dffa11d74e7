"""Finds the ends of records in a stream of WAL that arrives in pieces of any size.

Only `RecordScanner` parses the log in an acceptor. It checks page headers, lengths and CRCs, but
not the contents of records, unused bytes, or the chain of previous LSNs (a log that starts in the
middle has no previous record).

The format (PostgreSQL's xlogrecord.h, xlog_internal.h; integers are little-endian):

- A page has `PAGE_BYTES`. Its header has 24 bytes, or 40 on the first page of a segment: magic u16
  (PostgreSQL's major version), info u16, timeline u32, the page's own LSN u64, and the number of
  following bytes that belong to a record started earlier, u32.
- A record starts at a multiple of 8 after a page's header. It continues after the header of the
  next page, which then has the flag `CONTINUED` and the number of bytes to come. Its own header has
  24 bytes: total length u32, transaction u32, previous LSN u64, info u8, manager u8, two unused
  bytes, CRC u32. The CRC is the CRC-32C of what follows the header, then of the header's first 20
  bytes.

A record's end is rounded up to a multiple of 8 or, after a switch of segments, to the next segment.
Those bytes need not have arrived, so ``record_lsn`` may exceed ``lsn``; they are not checked.
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
"""No server writes a longer record (1020 MiB since version 16, the largest allocation before)."""
CONTINUED: Final = 0x0001
LONG: Final = 0x0002
OVERWRITTEN: Final = 0x0008

_PAGE: Final = Struct("<HHIQI")
_RECORD: Final = Struct("<I12xHxxI")
_SWITCH: Final = 0x0040  # manager 0 (XLOG), info 0x40
_KIND_MASK: Final = 0xFFF0  # the low bits of info are the writer's own
_OVERWRITE: Final = 0x00D0  # manager 0, info 0xD0

Found = Callable[[int, int, bytes], None]
"""Called with each complete record: its start, the start of the next one, its header of 24
bytes."""


class BadRecord(msgspec.Struct, frozen=True):
    """The reason why a log cannot be read further."""

    lsn: int
    """LSN of the error."""
    record_lsn: int
    """LSN after the last complete record before the error."""
    why: str

    def __str__(self) -> str:
        """Return the reason as text."""
        return (
            f"{self.why} at {lsn_text(self.lsn)}; the last complete record ends at"
            f" {lsn_text(self.record_lsn)}"
        )


class _InvalidLog(Exception):
    """Raised inside the scanner; `feed` turns it into a `BadRecord`."""

    def __init__(self, lsn: int, why: str) -> None:
        super().__init__(why)
        self.lsn = lsn
        self.why = why


def magics_of(pg_version: int) -> frozenset[int]:
    """Return the magics that pages of a log of this version (such as 170005) may have; 0: any known
    one.

    Raise `CorruptData` for an unknown version.
    """
    if not pg_version:
        return frozenset(MAGICS.values())
    known = MAGICS.get(pg_version // 10_000)
    if known is None:
        raise CorruptData(
            f"cannot read WAL of PostgreSQL {pg_version}: expected one of {sorted(MAGICS)}",
            determinate=True,
        )
    return frozenset({known})


class RecordScanner:
    """Finds the ends of records from `lsn` on, where a record must start.

    Long pieces first go through `record_runs`, many records at a time, with the same results.
    Raises `CorruptData` for a `pg_version` whose log cannot be read.
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
        """Error that made the last failed `feed` raise."""
        self._magics = magics_of(pg_version)
        self._segment_bytes = segment_bytes
        self._found = found
        # -- state between two pieces: only `_scan` changes it, and a failed `feed` restores it
        self._lsn = lsn
        """LSN of the next byte to arrive, after `_held`."""
        self._held = b""
        """First bytes of an incomplete header."""
        self._record_lsn = lsn
        """LSN after the last complete record."""
        self._skip_to = aligned(lsn)
        """Bytes before this LSN are not examined."""
        self._left = 0
        """Number of bytes of the record still to come; 0: a record is about to start."""
        self._begin = 0
        """LSN at which the current record starts."""
        self._header = b""
        """The part of its header that has arrived."""
        self._crc = 0
        """CRC of the part of its body that has arrived."""
        self._overwritten = False
        """True if the next record must be the one that reports an unfinished record."""

    @property
    def lsn(self) -> int:
        """Return the LSN after the last byte taken."""
        return self._lsn

    @property
    def record_lsn(self) -> int:
        """Return the LSN after the last complete record, where the next one may start."""
        return self._record_lsn

    def feed(self, piece: bytes) -> None:
        """Scan the next bytes.

        Raise `CorruptData` if they are not records. Then none of them counts, though `found` may
        have been called for some.
        """
        saved = self.saved()
        try:
            self._scan(piece)
        except _InvalidLog as error:
            self.bad = BadRecord(error.lsn, self._record_lsn, error.why)
            # Take a piece completely or not at all: callers write only pieces that were scanned.
            self.restore(saved)
            raise CorruptData(f"invalid WAL: {self.bad}", determinate=True) from None

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
                taken = self._continue_record(data, at, lsn, room)
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
        """Check a page's header and return its length, or 0 if more bytes are needed."""
        length = SHORT_HEADER_BYTES if lsn % self._segment_bytes else LONG_HEADER_BYTES
        if len(data) - at < length:
            return 0
        magic, info, _, address, to_come = _PAGE.unpack_from(data, at)
        if magic not in self._magics:
            wanted = ", ".join(f"{each:04X}" for each in sorted(self._magics))
            raise _InvalidLog(lsn, f"wrong page magic {magic:04X}: expected {wanted}")
        if address != lsn:
            raise _InvalidLog(lsn, f"the page's own LSN is {lsn_text(address)}")
        # The server died inside the previous record. That record stays unfinished, and the next one
        # says so.
        if self._left and info & OVERWRITTEN:
            self._left, self._overwritten = 0, True
        if bool(info & CONTINUED) != bool(self._left):
            is_so = "is marked" if info & CONTINUED else "is not marked"
            raise _InvalidLog(lsn, f"the page {is_so} as continuing a record")
        if to_come != self._left:
            raise _InvalidLog(
                lsn, f"the page has {to_come} bytes of a record: expected {self._left}"
            )
        return length

    def _run(self, data: bytes, at: int, lsn: int) -> tuple[int, int]:
        """Return `record_runs.run_of` of the bytes from `at` on."""
        # A run neither reports individual records nor checks the record that follows an unfinished
        # one.
        if self._overwritten or self._found is not None:
            return 0, len(data) - at
        taken, looked = run_of(data, at, lsn, self._magics, self._segment_bytes)
        if taken:
            self._record_lsn = self._skip_to = lsn + taken
        return taken, looked

    def _whole_records(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Check the ordinary records that are complete in this page and piece, and return their
        size.

        `_begin_record` handles the rest.
        """
        start, stop = at, min(len(data), at + room)
        last = stop - RECORD_HEADER_BYTES
        unpack, value = _RECORD.unpack_from, google_crc32c.value
        extend, found = google_crc32c.extend, self._found
        shift = lsn - at
        if self._overwritten:
            return 0
        # Most records pass only through this loop, so all their checks are inline.
        while at <= last:
            length, kind, crc = unpack(data, at)
            end = at + length
            if length < RECORD_HEADER_BYTES or end > stop or kind & _KIND_MASK == _SWITCH:
                break
            if extend(value(data[at + 24 : end]), data[at : at + 20]) != crc:
                if at != start:
                    self._record_lsn = shift + at
                raise _InvalidLog(shift + at, f"the CRC of a record of {length} bytes is wrong")
            following = end + (-(shift + end) & 7)
            if found is not None:
                found(shift + at, shift + following, data[at : at + 24])
            at = following
        if at == start:
            return 0
        self._record_lsn = self._skip_to = shift + at
        return min(at, stop) - start

    def _begin_record(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Take as much of a record's header as the page has. Return 0 if more is needed."""
        part = min(RECORD_HEADER_BYTES, room)  # a multiple of 8: records are aligned
        if len(data) - at < part:
            return 0
        length = int.from_bytes(data[at : at + 4], "little")
        if not RECORD_HEADER_BYTES <= length <= RECORD_BYTES_MAX:
            raise _InvalidLog(lsn, f"invalid record length {length}")
        self._begin, self._header, self._crc = lsn, b"", 0
        self._left = length
        self._take_header(data[at : at + part], lsn + part)
        return part

    def _continue_record(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Take more of a record that has started. Return 0 if more of its header is needed."""
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
                raise _InvalidLog(
                    self._begin,
                    "an unfinished record is not followed by the record that reports it",
                )
            self._overwritten = False
            if not self._left:
                self._end_record(behind)

    def _end_record(self, end: int) -> None:
        length, kind, crc = _RECORD.unpack(self._header)
        if google_crc32c.extend(self._crc, self._header[:20]) != crc:
            raise _InvalidLog(self._begin, f"the CRC of a record of {length} bytes is wrong")
        following = aligned(end)
        # Nothing is read between a record that switches segments and the next segment.
        if kind & _KIND_MASK == _SWITCH:
            following = -(-end // self._segment_bytes) * self._segment_bytes
        self._record_lsn = self._skip_to = following
        if self._found is not None:
            self._found(self._begin, following, self._header)
