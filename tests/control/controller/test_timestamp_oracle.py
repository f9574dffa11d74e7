"""The timestamp oracle: pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.control.controller.tables.commit import (
    TimestampOracle,
    decode_reservation,
    encode_reservation,
)
from actors.runtime.errors import CorruptData, InvalidUsage, StateDirectoryError


def _next(oracle: TimestampOracle, now: int, at: int | None = None) -> int:
    time = oracle.candidate(now, at)
    reserved = oracle.reservation(time)
    if reserved is not None:
        oracle.reserve(reserved)
    return oracle.give(time)


def test_follows_the_wall_clock_and_never_repeats() -> None:
    oracle = TimestampOracle(0, 5000)
    assert [_next(oracle, now) for now in (100, 100, 90, 200)] == [100, 101, 102, 200]


def test_goes_on_from_the_reservation_after_a_restart() -> None:
    oracle = TimestampOracle(0, 5000)
    _next(oracle, 100)
    again = TimestampOracle(decode_reservation(encode_reservation(oracle.reserved)), 5000)
    assert _next(again, 101) == 5100


def test_reserves_only_when_it_must() -> None:
    oracle = TimestampOracle(0, 5000)
    assert oracle.reservation(oracle.candidate(100)) == 5100
    oracle.reserve(5100)
    oracle.give(100)
    assert oracle.reservation(oracle.candidate(5099)) is None
    assert oracle.reservation(oracle.candidate(5100)) == 10100


def test_driven_by_hand() -> None:
    oracle = TimestampOracle(0, 10)
    assert _next(oracle, 5, at=1000) == 1000
    with pytest.raises(InvalidUsage, match=r"time 1000 is not later .* 1000"):
        oracle.candidate(5, 1000)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans())))
def test_strictly_increasing_over_clock_jumps_and_restarts(steps: list[tuple[int, bool]]) -> None:
    oracle, last = TimestampOracle(0, 50), -1
    for now, restart in steps:
        if restart:
            oracle = TimestampOracle(oracle.reserved, 50)
        time = _next(oracle, now)
        assert time > last
        last = time


def test_record_of_another_format() -> None:
    newer = encode_reservation(7).replace(b"\xa6format\x01", b"\xa6format\x02")
    with pytest.raises(StateDirectoryError, match="format 2"):
        decode_reservation(newer)
    with pytest.raises(CorruptData):
        decode_reservation(b"\xc1")
