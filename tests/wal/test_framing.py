"""Changes as records of a WAL: written as PostgreSQL would, read back from pieces of any size."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime.errors import CorruptData, InvalidUsage
from actors.wal.framing import (
    MANAGER,
    PAYLOAD_BYTES_MAX,
    PG_VERSION,
    START_LSN,
    FramedPayload,
    RecordDecoder,
    encode,
    framed_bytes_max,
)
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.records import RecordScanner
from suite_lanes import examples  # type: ignore[import-not-found]

PLACES = (
    START_LSN,
    START_LSN + 800,
    SEGMENT_BYTES,
    SEGMENT_BYTES + PAGE_BYTES,
    SEGMENT_BYTES + PAGE_BYTES - 8,
    SEGMENT_BYTES + PAGE_BYTES - 24,
    2 * SEGMENT_BYTES - 8,
    2 * SEGMENT_BYTES - 32,
)
PATTERN = bytes(range(251)) * 80
PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, len(PATTERN)).map(lambda n: PATTERN[:n])),
    min_size=1,
    max_size=4,
)


def written(payloads: list[bytes], lsn: int) -> tuple[bytes, list[FramedPayload]]:
    """The log from `lsn` on, and what should be read of it."""
    log = b""
    expected = []
    for payload in payloads:
        framed = encode(payload, lsn + len(log), system_id=7)
        assert len(framed) <= framed_bytes_max(len(payload))
        log += framed
        expected.append(FramedPayload(payload, lsn + len(log)))
    return log, expected


def test_a_record_byte_by_byte() -> None:
    """Written out by hand from PostgreSQL's headers; the CRC is that of the check value."""
    log = encode(b"123456789", START_LSN)
    assert log[:20] == struct.pack("<IIQBBxx", 24 + 5 + 9, 0, 0, 0, MANAGER)
    assert log[24:29] == b"\xff\x09\0\0\0"
    assert log[29:] == b"123456789" + b"\0\0", "padding up to a multiple of 8"


def test_the_header_of_a_page_and_of_a_segment() -> None:
    first = encode(b"x" * 8176, SEGMENT_BYTES, system_id=0xABCD)
    assert first[:40] == struct.pack(
        "<HHIQIIQII", 0xD116, 2, 1, SEGMENT_BYTES, 0, 0, 0xABCD, SEGMENT_BYTES, PAGE_BYTES
    )
    missing = 24 + 5 + 8176 - (PAGE_BYTES - 40)
    page = first[PAGE_BYTES : PAGE_BYTES + 24]
    assert page == struct.pack("<HHIQII", 0xD116, 1, 1, SEGMENT_BYTES + PAGE_BYTES, missing, 0)


@pytest.mark.parametrize("lsn", PLACES)
@settings(max_examples=examples(12), deadline=None)
@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 40_000), max_size=5))
def test_what_is_read_is_what_was_written(lsn: int, payloads: list[bytes], cuts: list[int]) -> None:
    log, expected = written(payloads, lsn)
    decoder, scanner = RecordDecoder(lsn), RecordScanner(lsn, pg_version=PG_VERSION)
    found: list[FramedPayload] = []
    edges = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    for begin, end in pairwise(edges):
        found += decoder.feed(log[begin:end])
        assert decoder.next_lsn == (found[-1].end_lsn if found else lsn)
        assert decoder.fed_lsn == lsn + end
        scanner.feed(log[begin:end])
    assert found == expected
    assert scanner.record_lsn == lsn + len(log)
    for number, framed in enumerate(expected[:-1], 1):  # reading can begin at every end
        again = RecordDecoder(framed.end_lsn).feed(log[framed.end_lsn - lsn :])
        assert again == expected[number:]


@settings(max_examples=examples(40), deadline=None)
@given(at=st.integers(0, 20_000), flip=st.integers(1, 255))
def test_a_byte_that_is_wrong_is_never_given(at: int, flip: int) -> None:
    payloads = [b"a" * 9000, b"b" * 30, b"c" * 9000]
    log, expected = written(payloads, START_LSN)
    at %= len(log)
    bad = bytearray(log)
    bad[at] ^= flip
    try:
        found = RecordDecoder(START_LSN).feed(bytes(bad))
    except CorruptData:
        return
    assert found == expected[: len(found)], "nothing wrong is given"


def test_the_log_of_somebody_else_is_refused() -> None:
    log = bytearray(encode(b"x", START_LSN))
    log[17] = 10
    with pytest.raises(CorruptData, match="resource manager 10"):
        RecordDecoder(START_LSN).feed(bytes(log))
    with pytest.raises(CorruptData, match="invalid record length 4294967295"):
        RecordDecoder(START_LSN).feed(b"\xff" * 24)


def test_where_no_record_can_begin() -> None:
    for lsn in (START_LSN + 4, SEGMENT_BYTES + 8, SEGMENT_BYTES + PAGE_BYTES + 16):
        with pytest.raises(InvalidUsage, match="a record cannot start"):
            encode(b"", lsn)
        with pytest.raises(InvalidUsage, match="a record cannot start"):
            RecordDecoder(lsn)


def test_a_payload_has_a_limit() -> None:
    with pytest.raises(InvalidUsage, match="change record too large"):
        encode(bytes(PAYLOAD_BYTES_MAX + 1), START_LSN)
