"""Where records end: made-up logs in made-up pieces against a writer that knows, and damage."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right
from struct import pack_into

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.errors import CorruptData
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.records import MAGICS, RecordScanner
from tests.simulators.wal.fuzzing import read, seeds
from tests.simulators.wal.made_up import MadeUpLog

MIB = 1024 * 1024
START = 5 * MIB + PAGE_BYTES * 3 + 24
SMALL = 1 << 16
"""Segments of this size make a switch cheap; the format does not depend on it."""


def made_up(
    sizes: list[int | None], start: int = START, segment_bytes: int = SEGMENT_BYTES
) -> MadeUpLog:
    """None: a switch."""
    log = MadeUpLog(start, segment_bytes=segment_bytes)
    for number, size in enumerate(sizes):
        if size is None:
            log.switch()
        else:
            log.record(bytes([number % 251 + 1]) * size)
    return log


def ends(log: MadeUpLog) -> list[int]:
    """Behind the last byte of each record (its padding, and what a switch skips, come after)."""
    found = []
    for begin, _ in log.records:
        at = begin - log.start_lsn
        left, end = int.from_bytes(log.wal[at : at + 4], "little"), begin
        while left:
            if end % PAGE_BYTES == 0:
                end += 24 if end % log.segment_bytes else 40
            step = min(left, PAGE_BYTES - end % PAGE_BYTES)
            end, left = end + step, left - step
        found.append(end)
    return found


def whole_before(log: MadeUpLog, known: list[int], lsn: int) -> int:
    """Behind the last record that ends at `lsn` or before."""
    count = bisect_right(known, lsn)
    return log.records[count - 1][1] if count else log.start_lsn


SIZES = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.integers(8000, 8300),
        st.integers(0, 40_000),
        st.none(),
    ),
    min_size=1,
    max_size=8,
)
STEPS = (1, 3, 7, 8, 24, 39, 100, 997, 4096, 8192, 131072)


@given(SIZES, st.integers(0, SMALL // 8 - 1), st.data())
def test_ends_are_found_whatever_the_pieces(
    sizes: list[int | None], where: int, data: st.DataObject
) -> None:
    start = 8 * SMALL + where * 8
    if 0 < start % SMALL < 40 or 0 < start % PAGE_BYTES < 24:
        start += 40  # a record cannot begin inside a header
    log = made_up(sizes, start, SMALL)
    found: list[tuple[int, int]] = []
    scanner = RecordScanner(
        start, segment_bytes=SMALL, found=lambda begin, behind, _: found.append((begin, behind))
    )
    at, known = 0, ends(log)
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=20))
    while at < len(log.wal):
        step = steps[at % len(steps)] if at < 20_000 else 8_191
        scanner.feed(bytes(log.wal[at : at + step]))
        at = min(len(log.wal), at + step)
        assert scanner.lsn == start + at
        assert scanner.record_lsn == whole_before(log, known, start + at)
    first = log.records[0][0]
    assert found == log.records
    assert first >= start
    assert scanner.record_lsn == log.end_lsn


def test_byte_by_byte_and_at_once_are_the_same() -> None:
    log = made_up([0, 1, 7, 8, 9, 8200, 20_000, 3], 2 * SMALL, SMALL)
    known = ends(log)
    one = RecordScanner(log.start_lsn, segment_bytes=SMALL)
    one.feed(bytes(log.wal))
    each = RecordScanner(log.start_lsn, segment_bytes=SMALL)
    for at in range(len(log.wal)):
        each.feed(bytes(log.wal[at : at + 1]))
        assert each.record_lsn == whole_before(log, known, each.lsn), at
    assert one.record_lsn == each.record_lsn == log.end_lsn


@given(st.data())
def test_a_changed_byte_of_a_record_or_header_is_seen(data: st.DataObject) -> None:
    log = made_up([10, 200, 9000, 64], SMALL + 40, SMALL)
    at = data.draw(st.integers(0, len(log.wal) - 1))
    lsn = log.start_lsn + at
    # Padding is not looked at; everything else of a record is.
    inside = any(begin <= lsn < end for (begin, _), end in zip(log.records, ends(log), strict=True))
    # Of a page's header: magic, what is said of a record that goes on, address, bytes to come.
    offset = lsn % PAGE_BYTES
    wal = bytearray(log.wal)
    wal[at] ^= 1
    scanner = RecordScanner(log.start_lsn, segment_bytes=SMALL)
    header = offset < 24
    if not inside or (header and (3 <= offset < 8 or offset >= 20)):
        scanner.feed(bytes(wal))
        return
    # The length may become one that wants more than there is: then the record never ends.
    whole = whole_before(log, ends(log), lsn)
    try:
        scanner.feed(bytes(wal))
    except CorruptData:
        assert scanner.bad is not None
        assert scanner.bad.record_lsn <= max(lsn, whole)
        assert scanner.lsn == scanner.record_lsn == log.start_lsn, "nothing was taken"
    else:
        assert scanner.record_lsn <= lsn, "the record that was changed is not whole"


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, 0x11, "magic D111: expected D110"),
        (0, 0x0D, "magic D10D: expected D110"),
        (2, 0, "is not marked as continuing a record"),
        (8, 1, "own LSN is"),
        (16, 1, "bytes of a record: expected"),
    ],
)
def test_a_page_that_does_not_fit_is_refused(offset: int, value: int, why: str) -> None:
    log = made_up([9000])
    page = -(-log.start_lsn // PAGE_BYTES) * PAGE_BYTES - log.start_lsn
    log.wal[page + offset] = value
    scanner = RecordScanner(log.start_lsn, pg_version=150004)
    with pytest.raises(CorruptData, match=why):
        scanner.feed(bytes(log.wal))


def test_a_record_that_goes_on_where_none_did_is_refused() -> None:
    log = made_up([16, 16], 3 * PAGE_BYTES)
    log.wal[2] |= 1
    with pytest.raises(CorruptData, match="the page is marked as continuing a record"):
        RecordScanner(log.start_lsn).feed(bytes(log.wal))


@pytest.mark.parametrize("length", [0, 1, 23, (1 << 30) + 1, 0xFFFFFFFF])
def test_a_length_that_cannot_be_is_refused_before_anything_is_kept(length: int) -> None:
    log = made_up([64])
    pack_into("<I", log.wal, 0, length)
    scanner = RecordScanner(log.start_lsn)
    with pytest.raises(CorruptData, match=f"invalid record length {length}"):
        scanner.feed(bytes(log.wal))
    assert scanner.bad is not None
    assert scanner.bad.lsn == log.start_lsn


def test_the_place_of_the_first_bad_record_is_told() -> None:
    log = made_up([10, 20, 30, 40])
    begin = log.records[2][0]
    log.wal[begin - log.start_lsn + 30] ^= 0x80
    scanner = RecordScanner(log.start_lsn)
    with pytest.raises(CorruptData, match="the CRC of a record of 54 bytes is wrong"):
        scanner.feed(bytes(log.wal))
    assert scanner.bad is not None
    assert (scanner.bad.lsn, scanner.bad.record_lsn) == (begin, log.records[1][1])
    # What is right is still taken after that.
    log.wal[begin - log.start_lsn + 30] ^= 0x80
    scanner.feed(bytes(log.wal))
    assert scanner.record_lsn == log.end_lsn


@pytest.mark.parametrize("major", sorted(MAGICS))
def test_each_version_has_its_magic(major: int) -> None:
    log = MadeUpLog(3 * PAGE_BYTES, magic=MAGICS[major])
    log.record(b"x")
    scanner = RecordScanner(log.start_lsn, pg_version=major * 10_000 + 3)
    scanner.feed(bytes(log.wal))
    RecordScanner(log.start_lsn).feed(bytes(log.wal))
    assert scanner.record_lsn == log.end_lsn
    other = 31 - major
    with pytest.raises(CorruptData, match="magic"):
        RecordScanner(log.start_lsn, pg_version=other * 10_000).feed(bytes(log.wal))


def test_a_version_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(CorruptData, match="cannot read WAL of PostgreSQL 130004"):
        RecordScanner(0, pg_version=130004)


def test_the_bytes_of_a_header_by_hand() -> None:
    """Written out from the format: a page of PostgreSQL 15 with one record of two bytes."""
    body = b"\xff\x00"
    head = bytes.fromhex("1a000000 01000000 0000000000000000 20 0a 0000".replace(" ", ""))
    crc = google_crc32c.value(body + head).to_bytes(4, "little")
    page = bytes.fromhex("10d1 0000 01000000 0060010000000000 00000000 00000000".replace(" ", ""))
    scanner = RecordScanner(0x16000, pg_version=150000)
    scanner.feed(page + head + crc + body)
    assert scanner.record_lsn == 0x16000 + 24 + 32


def unfinished(kind: int) -> bytes:
    """A record that was never finished, and what a server writes in its place afterwards."""
    log = made_up([9000])
    page = -(-log.start_lsn // PAGE_BYTES) * PAGE_BYTES
    after = MadeUpLog(page)
    after.record(b"0123456789abcdef", manager=0, info=kind)
    after.wal[2] |= 8
    return bytes(log.wal[: page - log.start_lsn] + after.wal)


def test_a_record_that_was_never_finished_gives_way() -> None:
    scanner = RecordScanner(START, pg_version=150000)
    data = unfinished(0xD0)
    scanner.feed(data)
    assert scanner.record_lsn == START + len(data)
    with pytest.raises(CorruptData, match="an unfinished record is not followed"):
        RecordScanner(START).feed(unfinished(0x30))


def test_a_long_record_is_not_kept() -> None:
    log = MadeUpLog(START)
    log.record(bytes(8 * MIB))
    pieces = [bytes(log.wal[at : at + 4096]) for at in range(0, len(log.wal), 4096)]
    scanner = RecordScanner(START)
    tracemalloc.start()
    try:
        for piece in pieces:
            scanner.feed(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scanner.record_lsn == log.end_lsn
    assert peak < MIB


def test_what_a_fuzzer_begins_with_is_read() -> None:
    """The targets of the proof run; pieces of any size must say the same."""
    given = seeds()
    for data in given:
        read(data)
        for at in range(0, len(data), 997):
            read(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
    assert {data[0] for data in given} == {0, 1, 2, 3}


def test_a_bad_record_at_the_begin_of_a_page_leaves_the_end_before_the_header() -> None:
    log = made_up([10, 20], 3 * PAGE_BYTES)
    log.wal[30] ^= 1
    scanner = RecordScanner(log.start_lsn)
    with pytest.raises(CorruptData):
        scanner.feed(bytes(log.wal))
    assert scanner.bad is not None
    assert (scanner.bad.record_lsn, scanner.bad.lsn) == (log.start_lsn, log.start_lsn + 24)
