"""Parses one segment for display: its pages, its records, and where and why it ends.

`inspect` reads one file from its first record (after one that continues from the previous segment)
to its end, or to bytes that are not a record. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from actors.runtime.errors import CorruptData, InvalidUsage, storage_error
from actors.wal.lsn import (
    PAGE_BYTES,
    PARTIAL,
    SEGMENT_BYTES,
    aligned,
    lsn_text,
    parse_segment_name,
)
from actors.wal.records import (
    CONTINUED,
    LONG_HEADER_BYTES,
    MAGICS,
    SHORT_HEADER_BYTES,
    RecordScanner,
)

MANAGERS: Final = (
    "XLOG",
    "Transaction",
    "Storage",
    "CLOG",
    "Database",
    "Tablespace",
    "MultiXact",
    "RelMap",
    "Standby",
    "Heap2",
    "Heap",
    "Btree",
    "Hash",
    "Gin",
    "Gist",
    "Sequence",
    "SPGist",
    "BRIN",
    "CommitTs",
    "ReplicationOrigin",
    "Generic",
    "LogicalMessage",
)
"""Resource managers by number, in PostgreSQL 14 to 17."""

_PAGE: Final = Struct("<HHIQI4x")
_LONG: Final = Struct("<QII")
_RECORD: Final = Struct("<IIQBBHI")


class PageHeader(msgspec.Struct, frozen=True):
    """The header of a page."""

    lsn: int
    magic: int
    info: int
    timeline: int
    address: int
    to_come_bytes: int
    """Number of following bytes that belong to a record started before the page."""


class WalRecord(msgspec.Struct, frozen=True):
    """A complete record with a correct CRC."""

    lsn: int
    next_lsn: int
    length_bytes: int
    transaction: int
    previous_lsn: int
    manager: int
    info: int


class InspectedFile(msgspec.Struct, frozen=True):
    """Contents of one file."""

    begin_lsn: int
    whole: bool
    """True if the segment is full, according to the file's name."""
    file_bytes: int
    system_id: int
    """System id in the first page."""
    segment_bytes: int
    """Segment size in the first page."""
    major: int
    """Major version of PostgreSQL according to the pages' magic; 0 if unknown."""
    pages: tuple[PageHeader, ...]
    """Pages that have a header; pages of zeros are omitted."""
    records: tuple[WalRecord, ...]
    end_lsn: int
    """LSN after the last complete record."""
    ends: str
    """Reason why the records end there."""


def inspect(path: Path) -> InspectedFile:
    """Inspect one segment's file.

    Raise `InvalidUsage` for a wrong name or length, `CorruptData` if its first page is zeros, and
    `StorageError`.
    """
    number, whole = parse_segment_name(path.name)
    try:
        with path.open("rb") as file:
            data = file.read(SEGMENT_BYTES + 1)
    except OSError as error:
        raise storage_error(f"read {path}", error) from error
    if not LONG_HEADER_BYTES <= len(data) <= SEGMENT_BYTES:
        raise InvalidUsage(
            f"invalid size of {path}: {len(data)}{'+' if len(data) > SEGMENT_BYTES else ''} bytes;"
            f" expected a segment of {SEGMENT_BYTES}"
        )
    return inspect_bytes(data, number * SEGMENT_BYTES, whole=whole)


def inspect_bytes(data: bytes, begin_lsn: int, *, whole: bool) -> InspectedFile:
    """Inspect a file's bytes like `inspect`. Raise `CorruptData`."""
    pages = tuple(_pages(data, begin_lsn))
    if not pages or pages[0].lsn != begin_lsn:
        raise CorruptData(
            f"not a segment: the first page of {lsn_text(begin_lsn)} is zeros",
            determinate=True,
        )
    system_id, segment_bytes, _ = _LONG.unpack_from(data, SHORT_HEADER_BYTES)
    majors = {magic: major for major, magic in MAGICS.items()}
    records: list[WalRecord] = []

    def found(lsn: int, next_lsn: int, header: bytes) -> None:
        length, transaction, previous, info, manager, _, _ = _RECORD.unpack(header)
        records.append(WalRecord(lsn, next_lsn, length, transaction, previous, manager, info))

    start_lsn, ends = _first_record(data, pages, begin_lsn), ""
    end_lsn = start_lsn
    if start_lsn >= begin_lsn + len(data):
        ends = "a record of an earlier segment fills the whole segment"
    else:
        scanner = RecordScanner(start_lsn, found=found)
        # Feed one page at a time: a failed `feed` takes nothing, but the records before it should
        # be shown.
        try:
            for at in range(start_lsn - begin_lsn, len(data), PAGE_BYTES):
                scanner.feed(data[at : at + PAGE_BYTES])
            ends = _end_of_file(scanner, begin_lsn + len(data))
            end_lsn = scanner.record_lsn
        except CorruptData:
            assert scanner.bad is not None
            ends = f"{scanner.bad.why} at {lsn_text(scanner.bad.lsn)}"
            end_lsn = scanner.bad.record_lsn
            records = [each for each in records if each.next_lsn <= end_lsn]
    return InspectedFile(
        begin_lsn,
        whole,
        len(data),
        system_id,
        segment_bytes,
        majors.get(pages[0].magic, 0),
        pages,
        tuple(records),
        end_lsn,
        ends,
    )


def _end_of_file(scanner: RecordScanner, behind: int) -> str:
    if scanner.record_lsn >= behind:
        return "the segment ends with a complete record"
    return f"the file ends within the record at {lsn_text(scanner.record_lsn)}"


def _pages(data: bytes, begin_lsn: int) -> Iterator[PageHeader]:
    for at in range(0, len(data) - SHORT_HEADER_BYTES + 1, PAGE_BYTES):
        magic, info, timeline, address, to_come = _PAGE.unpack_from(data, at)
        if magic:
            yield PageHeader(begin_lsn + at, magic, info, timeline, address, to_come)


def _first_record(data: bytes, pages: tuple[PageHeader, ...], begin_lsn: int) -> int:
    """Return where the segment's first record starts: after one that continues from the previous
    segment."""
    # The first segment of a log starts with an empty page. The page of the log's start pretends
    # that a record ends there (`segments.first_headers`).
    empty = not any(data[LONG_HEADER_BYTES : LONG_HEADER_BYTES + 8])
    if empty and not pages[0].info & CONTINUED and len(pages) > 1:
        pages = pages[1:]
    for page in pages:
        header = LONG_HEADER_BYTES if page.lsn == begin_lsn else SHORT_HEADER_BYTES
        if not page.info & CONTINUED:
            return page.lsn
        if page.to_come_bytes <= PAGE_BYTES - header:
            return aligned(page.lsn + header + page.to_come_bytes)
    return begin_lsn + SEGMENT_BYTES


def lines(found: InspectedFile) -> Iterator[str]:
    """Yield the lines that ``penstock wal inspect`` prints."""
    name = "whole" if found.whole else f"not full according to its name ({PARTIAL})"
    major = f"PostgreSQL {found.major}" if found.major else "unknown PostgreSQL version"
    yield (
        f"segment of {lsn_text(found.begin_lsn)}, {found.file_bytes} bytes, {name}; {major},"
        f" system {found.system_id}, segments of {found.segment_bytes} bytes"
    )
    yield f"{len(found.pages)} pages with a header, {len(found.records)} complete records"
    for record in found.records:
        known = record.manager < len(MANAGERS)
        manager = MANAGERS[record.manager] if known else "custom"
        yield (
            f"{lsn_text(record.lsn)} {record.length_bytes} bytes, {manager} ({record.manager})"
            f" info {record.info:02X}, transaction {record.transaction},"
            f" previous {lsn_text(record.previous_lsn)}, CRC correct"
        )
    yield f"ends at {lsn_text(found.end_lsn)}: {found.ends}"
