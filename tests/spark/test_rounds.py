"""What a round's answer means: see `test_prepared` for rounds on Spark."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.spark.rounds import _MARKER, RoundFailed, split_at_markers

MESSAGES = st.lists(st.binary(max_size=4).map(lambda tail: b"\xff\xff\xff\xff" + tail), max_size=3)


def markers(count: int) -> list[bytes]:
    """Of plans made in another order than they are in the round."""
    return [_MARKER + b"%d" % (100 - number) for number in range(count)]


def joined(answers: list[list[bytes]]) -> list[bytes]:
    pairs = zip(answers, markers(len(answers)), strict=True)
    return [message for own, marker in pairs for message in (*own, marker)]


@given(st.lists(MESSAGES, min_size=1, max_size=5))
def test_each_member_gets_its_own(answers: list[list[bytes]]) -> None:
    assert split_at_markers(joined(answers), markers(len(answers))) == answers


@given(st.lists(MESSAGES, min_size=2, max_size=5), st.data())
def test_an_answer_that_lacks_a_marker_or_has_them_out_of_order_is_none(
    answers: list[list[bytes]], data: st.DataObject
) -> None:
    whole = joined(answers)
    places = [i for i, message in enumerate(whole) if message.startswith(_MARKER)]
    lost = data.draw(st.sampled_from(places))
    with pytest.raises(RoundFailed):
        split_at_markers(whole[:lost] + whole[lost + 1 :], markers(len(answers)))
    first, second = data.draw(st.sampled_from(list(itertools.pairwise(places))))
    whole[first], whole[second] = whole[second], whole[first]
    with pytest.raises(RoundFailed):
        split_at_markers(whole, markers(len(answers)))


def test_rows_after_the_last_marker_are_nobodys() -> None:
    with pytest.raises(RoundFailed, match="3 pieces"):
        split_at_markers([*joined([[], []]), b"\xff\xff\xff\xff"], markers(2))


def test_a_marker_of_another_plan_is_no_answer() -> None:
    with pytest.raises(RoundFailed, match="behind plan 2 of 2"):
        split_at_markers([*joined([[]]), _MARKER + b"7"], markers(2))
    with pytest.raises(RoundFailed, match="behind plan 3 of 2"):
        split_at_markers(joined([[], [], []]), markers(2))
