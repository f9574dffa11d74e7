from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.errors import MalformedFrame
from actors.wal.feedback_codec import encode_feedback
from actors.wal.lsn import PAGE_BYTES
from actors.wal.messages import WAL_BYTES_MAX, HotStandbyFeedback, PageserverFeedback
from actors.wal.replication import (
    StandbyStatus,
    aggregate,
    keepalive,
    parse_reader,
    piece_bytes,
    xlog_data,
)

NOON_MS = 946_684_800_000 + 1
"""A millisecond after the protocol's epoch."""


def test_what_is_sent() -> None:
    assert xlog_data(0x1000, 0x2000, NOON_MS, b"abc") == (
        b"w\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0\x03\xe8abc"
    )
    assert keepalive(0x2000, NOON_MS, wants_reply=True) == (
        b"k\0\0\0\0\0\0\x20\0\0\0\0\0\0\0\x03\xe8\x01"
    )


def test_what_comes() -> None:
    status = b"r" + struct.pack("!QQQqB", 3, 2, 1, -5, 1)
    assert parse_reader(status) == StandbyStatus(3, 2, 1, -5, True)
    hot = b"h" + struct.pack("!qIIII", 7, 0xAAAA, 1, 0xBBBB, 2)
    assert parse_reader(hot) == HotStandbyFeedback(7, 1 << 32 | 0xAAAA, 2 << 32 | 0xBBBB)
    told = PageserverFeedback(remote_consistent_lsn=77, shard_number=3)
    body = encode_feedback(told)
    assert parse_reader(b"z" + struct.pack("!Q", len(body)) + body) == told


@given(st.binary(max_size=60), st.sampled_from([b"", b"r", b"h", b"z", b"q"]))
def test_anything_is_a_message_or_one_named_error(body: bytes, kind: bytes) -> None:
    try:
        parse_reader(kind + body)
    except MalformedFrame:
        return
    assert kind + body != b""


@pytest.mark.parametrize("wrong", [b"", b"r", b"h" + bytes(23), b"z" + bytes(8), b"z\0"])
def test_what_is_no_message(wrong: bytes) -> None:
    with pytest.raises(MalformedFrame):
        parse_reader(wrong)


@given(st.integers(0, 1 << 40), st.integers(0, 4 * WAL_BYTES_MAX))
def test_pieces_end_at_pages_or_at_the_end(begin: int, size: int) -> None:
    piece = piece_bytes(begin, begin + size)
    assert 0 <= piece <= min(size, WAL_BYTES_MAX)
    assert (begin + piece) % PAGE_BYTES == 0 or piece == size
    assert piece > WAL_BYTES_MAX - PAGE_BYTES or piece == size


def test_feedback_of_all_readers() -> None:
    """The oldest that is valid; a reader that says nothing holds nobody back."""
    assert aggregate([]) == HotStandbyFeedback()
    found = aggregate(
        [
            HotStandbyFeedback(10, 500, 0),
            HotStandbyFeedback(30, 0, 900),
            HotStandbyFeedback(20, 400, 2),
        ]
    )
    assert found == HotStandbyFeedback(30, 400, 900)
