"""Where records end in a stream of WAL that comes in pieces of any size.

What it is: `RecordScanner` is fed the bytes of a log from one place on and says behind which byte
the last whole record ends (`record_lsn`). Nothing else of an acceptor looks into the log.

The format (PostgreSQL's xlogrecord.h, xlog_internal.h; integers are little-endian):

- A page is `PAGE_BYTES`. Its header has 24 bytes, 40 on the first page of a segment: magic u16
  (it names PostgreSQL's major version), info u16, timeline u32, the page's own LSN u64, and how
  many bytes of a record that began earlier follow, u32.
- A record begins at a multiple of 8, anywhere behind a page's header; it goes on behind the header
  of the next page, which then carries `CONTINUED` and the count of bytes to come. Its own header
  has 24 bytes: whole length u32, transaction u32, previous LSN u64, info u8, manager u8, two bytes
  unused, CRC u32. The CRC is CRC-32C of what follows the header, then of its first 20 bytes.
- Behind the record that switches segments nothing is read until the next segment.
- A page whose header has `OVERWRITTEN` says that the record before it was never finished (the
  server died); the record that stands there says so too.

Rules:

- `feed` takes a piece as a whole or not at all: where it raises, nothing has changed, and `bad`
  says where and why.
- ``record_lsn <= lsn``, but for padding: the end of a record is rounded up to a multiple of 8, or
  to the next segment behind a switch, and those bytes need not have come. They are not checked.
- Memory is bounded: less than `_HELD_MAX` bytes wait for the next piece. A record's body is not
  kept, only its CRC; a length is checked before anything is done with it.
- Long pieces go through `runs` first, many records at a time, up to what is not ordinary or not
  right; it gives no other ends or verdicts. (Not where `found` is told of each record.)

It does not read what records say, does not check their chain of previous LSNs (acceptors never
did: a log that begins in the middle has no previous record), and does not check unused bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import google_crc32c
import msgspec

from actors.errors import Corrupt
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES, aligned, lsn_text
from actors.wal.runs import RUN_BYTES_MIN, run_of

MAGICS: Final = {14: 0xD10D, 15: 0xD110, 16: 0xD113, 17: 0xD116}
"""How the pages of a major version begin."""
SHORT_HEADER_BYTES: Final = 24
LONG_HEADER_BYTES: Final = 40
RECORD_HEADER_BYTES: Final = 24
RECORD_BYTES_MAX: Final = 1 << 30
"""No server writes a longer one (1020 MiB since 16, the largest allocation before)."""
CONTINUED: Final = 0x0001
LONG: Final = 0x0002
OVERWRITTEN: Final = 0x0008

_PAGE: Final = Struct("<HHIQI")
_RECORD: Final = Struct("<I12xHxxI")
_SWITCH: Final = 0x0040  # manager 0 (XLOG), info 0x40
_KIND_MASK: Final = 0xFFF0  # the low bits of info are the writer's own
_OVERWRITE: Final = 0x00D0  # manager 0, info 0xD0
_HELD_MAX: Final = LONG_HEADER_BYTES

Found = Callable[[int, int, bytes], None]
"""Told of each whole record: where it begins, where the next may, its 24 bytes of header."""


class Bad(msgspec.Struct, frozen=True):
    """Why a log cannot be read on."""

    lsn: int
    """Where what is wrong stands."""
    record_lsn: int
    """Behind the last whole record before it."""
    why: str

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.why} at {lsn_text(self.lsn)}; the last whole record ends at"
            f" {lsn_text(self.record_lsn)}"
        )


class _Wrong(Exception):
    """What `feed` turns into `Bad`."""

    def __init__(self, lsn: int, why: str) -> None:
        super().__init__(why)
        self.lsn = lsn
        self.why = why


def magics_of(pg_version: int) -> frozenset[int]:
    """The magics that pages of a log of this version (170005) may have; 0: any known one."""
    if not pg_version:
        return frozenset(MAGICS.values())
    known = MAGICS.get(pg_version // 10_000)
    if known is None:
        raise Corrupt(
            f"WAL of PostgreSQL {pg_version} cannot be read here: only of {sorted(MAGICS)}",
            determinate=True,
        )
    return frozenset({known})


class RecordScanner:
    """Finds the ends of records from `lsn` on, where a record must begin.

    Raises `Corrupt` when `pg_version` is none whose log can be read."""

    def __init__(
        self,
        lsn: int,
        *,
        pg_version: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        found: Found | None = None,
    ) -> None:
        self.bad: Bad | None = None
        """Why the last `feed` raised."""
        self._magics = magics_of(pg_version)
        self._segment_bytes = segment_bytes
        self._found = found
        # -- between two pieces; `_scan` alone moves them, and `feed` puts them back
        self._lsn = lsn
        """What comes next; behind `_held`."""
        self._held = b""
        """The first bytes of a header that has not come whole."""
        self._record_lsn = lsn
        self._skip_to = aligned(lsn)
        """Up to here nothing is looked at."""
        self._left = 0
        """Bytes of the record that are still to come; 0: a record is to begin."""
        self._begin = 0
        self._header = b""
        self._crc = 0
        self._overwritten = False
        """The next record must be the one that says so."""

    @property
    def lsn(self) -> int:
        """Behind the last byte taken."""
        return self._lsn

    @property
    def record_lsn(self) -> int:
        """Behind the last whole record: where the next one may begin."""
        return self._record_lsn

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes. Raises `Corrupt` when they are no records; then none was taken,
        though `found` may have been told of some."""
        saved = self.saved()
        try:
            self._scan(piece)
        except _Wrong as error:
            self.bad = Bad(error.lsn, self._record_lsn, error.why)
            self.restore(saved)
            raise Corrupt(f"no WAL: {self.bad}", determinate=True) from None

    def saved(self) -> tuple[Any, ...]:
        """What `restore` takes: all that is known between two pieces."""
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
        """Back to where `saved` was called."""
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
        asked = 0  # before this, runs were looked for
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
                self._held = data[at:]
                return
            at += taken

    def _page_header(self, data: bytes, at: int, lsn: int) -> int:
        """Bytes taken; 0: more are needed."""
        length = SHORT_HEADER_BYTES if lsn % self._segment_bytes else LONG_HEADER_BYTES
        if len(data) - at < length:
            return 0
        magic, info, _, address, to_come = _PAGE.unpack_from(data, at)
        if magic not in self._magics:
            wanted = ", ".join(f"{each:04X}" for each in sorted(self._magics))
            raise _Wrong(lsn, f"the page's magic is {magic:04X}, not {wanted}")
        if address != lsn:
            raise _Wrong(lsn, f"the page says that it is the one of {lsn_text(address)}")
        if self._left and info & OVERWRITTEN:  # what began before is no record, and never will be
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
        """As `runs.run_of`; nothing where each record is of interest."""
        if self._overwritten or self._found is not None:
            return 0, len(data) - at
        taken, looked = run_of(data, at, lsn, self._magics, self._segment_bytes)
        if taken:
            self._record_lsn = self._skip_to = lsn + taken
        return taken, looked

    def _whole_records(self, data: bytes, at: int, lsn: int, room: int) -> int:
        """Bytes of the records that stand whole in this page and this piece, and are no special
        ones. The rest is `_begin_record`'s. All that is asked of most records is in this loop."""
        start, stop = at, min(len(data), at + room)
        last = stop - RECORD_HEADER_BYTES
        unpack, value = _RECORD.unpack_from, google_crc32c.value
        extend, found = google_crc32c.extend, self._found
        shift = lsn - at
        if self._overwritten:
            return 0
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
        """Takes as much of a record's header as the page has; 0: more is needed."""
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
        """More of a record that has begun; 0: more of its header is needed."""
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
        if kind & _KIND_MASK == _SWITCH:
            following = -(-end // self._segment_bytes) * self._segment_bytes
        self._record_lsn = self._skip_to = following
        if self._found is not None:
            self._found(self._begin, following, self._header)
