"""Encodes Penstock's own changes as records of a WAL, and decodes them. Pure.

Acceptors report positions only at the ends of records, so our log has PostgreSQL's format: pages of
`PAGE_BYTES`, each with a header, and records that start at multiples of 8, may span pages, and have
a CRC-32C. A payload is the main data of one record of the resource manager `MANAGER`.

A record consists of its 24-byte header (total length u32, transaction u32, previous record u64,
info u8, manager u8, 2 bytes, CRC u32; little-endian), the header of the main data (255, u32
length), the payload, and zeros up to a multiple of 8. The CRC covers what follows the header, then
the header's first 20 bytes.

Source: PostgreSQL's xlogrecord.h, xlog_internal.h, rmgr.h, version 17.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import google_crc32c
import msgspec

from actors.runtime.errors import CorruptData, InvalidUsage
from actors.wal.lsn import ALIGNMENT, PAGE_BYTES, SEGMENT_BYTES, aligned, lsn_text

PG_VERSION: Final = 170005
"""Version of PostgreSQL whose format is written."""
MAGIC: Final = 0xD116
MANAGER: Final = 169
"""One of PostgreSQL's custom resource managers (128 to 255). It is not registered."""
PAYLOAD_BYTES_MAX: Final = 8 * 1024 * 1024
START_LSN: Final = SEGMENT_BYTES + 40
"""LSN at which a new log of ours starts: after the first page's header, in the first segment that
PostgreSQL would use."""

_SHORT: Final = struct.Struct("<HHIQI4x")
_LONG: Final = struct.Struct("<HHIQI4xQII")
_HEADER: Final = struct.Struct("<IIQBB2xI")
_HEAD: Final = struct.Struct("<BI")
_MAIN_DATA_LONG: Final = 255
_CONTINUED: Final = 0x0001
_LONG_HEADER: Final = 0x0002
_OVERHEAD: Final = _HEADER.size + _HEAD.size


def _record(payload: bytes) -> bytes:
    body = _HEAD.pack(_MAIN_DATA_LONG, len(payload)) + payload
    length = _HEADER.size + len(body)
    # Leave the previous record's LSN at 0, so that the bytes depend only on payload and LSN, and a
    # proposer that has not read the log can continue it. Acceptors do not check that field.
    first = _HEADER.pack(length, 0, 0, 0, MANAGER, 0)[:20]
    crc: int = google_crc32c.extend(google_crc32c.value(body), first)
    return first + crc.to_bytes(4, "little") + body


def _page_header(lsn: int, rest: int, system_id: int) -> bytes:
    info = _CONTINUED if rest else 0
    if lsn % SEGMENT_BYTES:
        return _SHORT.pack(MAGIC, info, 1, lsn, rest)
    return _LONG.pack(
        MAGIC, info | _LONG_HEADER, 1, lsn, rest, system_id, SEGMENT_BYTES, PAGE_BYTES
    )


def framed_bytes_max(payload_bytes: int) -> int:
    """Return the maximum number of bytes that a payload of this size takes in the log."""
    record = _OVERHEAD + payload_bytes + ALIGNMENT
    pages = record // (PAGE_BYTES - _LONG.size) + 2
    return record + pages * _LONG.size


def encode(payload: bytes, lsn: int, system_id: int = 0) -> bytes:
    """Return the log's bytes from `lsn` on that contain the payload.

    `lsn` must be the end of another record, or the start of the log. Raise `InvalidUsage`.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidUsage(
            f"change record too large: {len(payload)} bytes (limit {PAYLOAD_BYTES_MAX})"
        )
    if lsn % ALIGNMENT or not _is_content(lsn):
        raise InvalidUsage(f"a record cannot start at {lsn_text(lsn)}")
    record = _record(payload)
    out: list[bytes] = []
    at = 0
    while at < len(record):
        # If a log starts inside a page, the acceptor that created it wrote that page's header.
        if lsn % PAGE_BYTES == 0:
            header = _page_header(lsn, len(record) - at if at else 0, system_id)
            out.append(header)
            lsn += len(header)
        piece = record[at : at + PAGE_BYTES - lsn % PAGE_BYTES]
        out.append(piece)
        at += len(piece)
        lsn += len(piece)
    out.append(bytes(aligned(lsn) - lsn))
    return b"".join(out)


def _header_bytes(page_lsn: int) -> int:
    return _SHORT.size if page_lsn % SEGMENT_BYTES else _LONG.size


def _is_content(lsn: int) -> bool:
    """Return whether `lsn` is at the start of a page or after that page's header."""
    within = lsn % PAGE_BYTES
    return within == 0 or within >= _header_bytes(lsn - within)


class FramedPayload(msgspec.Struct, frozen=True, gc=False):
    """One payload of a log."""

    payload: bytes
    end_lsn: int
    """LSN after the record and its padding, at which reading can resume."""


class RecordDecoder:
    """Decodes the payloads of a log that is fed in pieces of any size, from the start of a record
    on.

    `next_lsn` is the start of the next payload's record. The decoder keeps the bytes of one
    incomplete record and of the last piece. A record of another manager, or anything that is not a
    record, raises `CorruptData`.
    """

    def __init__(self, lsn: int) -> None:
        if lsn % ALIGNMENT or not _is_content(lsn):
            raise InvalidUsage(f"a record cannot start at {lsn_text(lsn)}")
        self.next_lsn = lsn
        """LSN at which the next payload's record starts."""
        self._lsn = lsn
        """LSN of the first byte in `_raw`."""
        self._raw = bytearray()
        """Bytes that were fed but not processed yet."""
        self._record = bytearray()
        """Bytes of the next record so far, without page headers."""
        self._length = 0
        """Length of the next record including padding; 0 while it is unknown."""

    @property
    def fed_lsn(self) -> int:
        """Return the LSN after the last byte that was fed."""
        return self._lsn + len(self._raw)

    def feed(self, wal: bytes) -> list[FramedPayload]:
        """Return the payloads that are complete after `wal`, the log's next bytes.

        Raise `CorruptData`; the decoder must not be used afterwards.
        """
        return list(self.payloads(wal))

    def payloads(self, wal: bytes) -> Iterator[FramedPayload]:
        """Yield what `feed` returns, one by one, including the payloads before a `CorruptData`.

        The iterator must be exhausted before more is fed.
        """
        self._raw += wal
        at = 0
        while at < len(self._raw):
            lsn = self._lsn + at
            left = len(self._raw) - at
            if lsn % PAGE_BYTES == 0:
                size = _header_bytes(lsn)
                if left < size:
                    break
                self._check_page(lsn, bytes(self._raw[at : at + size]))
                at += size
                continue
            # Read the header first: it contains the length of the rest.
            wanted = (self._length or _HEADER.size) - len(self._record)
            size = min(wanted, left, PAGE_BYTES - lsn % PAGE_BYTES)
            self._record += self._raw[at : at + size]
            at += size
            if size < wanted:
                continue
            if self._length:
                yield self._complete_record(lsn + size)
            else:
                self._length = self._check_length()
        del self._raw[:at]
        self._lsn += at

    def _check_page(self, lsn: int, header: bytes) -> None:
        magic, info, _, page_lsn, rest = _SHORT.unpack_from(header)
        within = bool(self._record)
        # The part of a record on its first page has at least 8 bytes, so its length is known here.
        missing = self._unpadded() - len(self._record) if within else 0
        if magic != MAGIC or page_lsn != lsn or bool(info & _CONTINUED) != within:
            raise self._corrupt(lsn, "invalid page header")
        if rest != missing:
            raise self._corrupt(
                lsn,
                f"{rest} bytes of the record left by the page header, expected {missing}",
            )

    def _unpadded(self) -> int:
        return int.from_bytes(self._record[:4], "little")

    def _check_length(self) -> int:
        length = self._unpadded()
        # Check it before any byte of the body is kept.
        if not _OVERHEAD <= length <= _OVERHEAD + PAYLOAD_BYTES_MAX:
            raise self._corrupt(self.next_lsn, f"invalid record length {length}")
        if self._record[17] != MANAGER:
            raise self._corrupt(
                self.next_lsn,
                f"record of resource manager {self._record[17]}, not Penstock's ({MANAGER})",
            )
        return aligned(length)

    def _complete_record(self, end_lsn: int) -> FramedPayload:
        length = self._unpadded()
        record = bytes(self._record[:length])
        crc = google_crc32c.extend(google_crc32c.value(record[_HEADER.size :]), record[:20])
        head, size = _HEAD.unpack_from(record, _HEADER.size)
        if crc != int.from_bytes(record[20:24], "little"):
            raise self._corrupt(self.next_lsn, "record with a wrong CRC")
        if head != _MAIN_DATA_LONG or size != length - _OVERHEAD:
            raise self._corrupt(self.next_lsn, "record that is not a change")
        self._record.clear()
        self._length = 0
        self.next_lsn = end_lsn
        return FramedPayload(record[_OVERHEAD:], end_lsn)

    def _corrupt(self, lsn: int, why: str) -> CorruptData:
        return CorruptData(
            f"{why}, at {lsn_text(lsn)}: was this log written by penstock wal push?",
            determinate=True,
        )
