"""Histories of terms: what is visible of them, and where two logs part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.errors import WalRefused
from actors.wal.history import (
    check_history,
    highest_common_point,
    history_text,
    last_log_term,
    visible,
)
from actors.wal.messages import TermEntry


def history(*pairs: tuple[int, int]) -> tuple[TermEntry, ...]:
    return tuple(TermEntry(*pair) for pair in pairs)


def test_an_entry_at_the_end_of_the_log_is_visible() -> None:
    both = history((1, 10), (3, 20))
    assert visible(both, 19) == history((1, 10))
    assert visible(both, 20) == both
    assert [last_log_term(both, lsn) for lsn in (0, 9, 10, 19, 20, 21)] == [0, 0, 1, 1, 3, 3]
    assert last_log_term((), 100) == 0


@pytest.mark.parametrize(
    ("proposer", "acceptor", "end", "expected"),
    [
        # nothing in common: one is empty, or the first terms differ
        (history((1, 1)), history(), 0, None),
        (history(), history((1, 1)), 5, None),
        (history((2, 1)), history((1, 1)), 5, None),
        # the last common term is the proposer's last: it goes on there without end
        (history((1, 1)), history((1, 1)), 7, TermEntry(1, 7)),
        (history((1, 1), (2, 5)), history((1, 1), (2, 5)), 9, TermEntry(2, 9)),
        # ... also when the acceptor has later terms
        (history((1, 1)), history((1, 1), (3, 5)), 9, TermEntry(1, 9)),
        # the acceptor's log ends within the common term, or behind its end
        (history((1, 1), (2, 5)), history((1, 1)), 3, TermEntry(1, 3)),
        (history((1, 1), (2, 5)), history((1, 1)), 5, TermEntry(1, 5)),
        (history((1, 1), (2, 5)), history((1, 1)), 9, TermEntry(1, 5)),
        # both go on, in other terms
        (history((1, 1), (3, 5)), history((1, 1), (2, 4)), 9, TermEntry(1, 4)),
        (history((1, 1), (3, 5)), history((1, 1), (2, 7)), 9, TermEntry(1, 5)),
        (
            history((1, 1), (2, 10), (3, 20)),
            history((1, 1), (2, 10), (4, 20)),
            30,
            TermEntry(2, 20),
        ),
        # a term that has an equal again behind the first difference does not count
        (history((1, 1), (3, 5), (4, 7)), history((1, 1), (2, 5), (4, 7)), 9, TermEntry(1, 5)),
    ],
)
def test_highest_common_point(
    proposer: tuple[TermEntry, ...],
    acceptor: tuple[TermEntry, ...],
    end: int,
    expected: TermEntry | None,
) -> None:
    assert highest_common_point(proposer, acceptor, end) == expected


def test_a_term_that_begins_at_two_places_is_fatal() -> None:
    with pytest.raises(WalRefused, match="term 2 starts at 0/5 for the proposer and at 0/6 for"):
        highest_common_point(history((1, 1), (2, 5)), history((1, 1), (2, 6)), 9)


def test_a_history_behind_the_end_of_the_log_is_fatal() -> None:
    with pytest.raises(WalRefused, match=r"\[1@0/1 2@0/6\] extends beyond the log's end 0/5"):
        highest_common_point(history((1, 1), (2, 5)), history((1, 1), (2, 6)), 5)


def test_terms_rise_and_lsns_do_not_fall() -> None:
    check_history(())
    check_history(history((1, 5), (2, 5), (9, 6)))
    for wrong in (history((1, 5), (1, 6)), history((2, 5), (1, 6)), history((1, 5), (2, 4))):
        with pytest.raises(WalRefused, match="terms must ascend and LSNs not decrease"):
            check_history(wrong)


def test_long_histories_are_shown_by_their_newest_entries() -> None:
    assert history_text(()) == "[]"
    assert history_text(history(*((term, term) for term in range(1, 5))), 2) == "[... 3@0/3 4@0/4]"


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Two logs as the terms of their bytes, the second with an end; a term lies in both at one
    place, as with one leader for each term."""
    common = sorted(draw(st.lists(st.integers(1, 3), max_size=8)))
    left = common + sorted(draw(st.lists(st.sampled_from([4, 6, 8]), max_size=6)))
    right = common + sorted(draw(st.lists(st.sampled_from([5, 7, 9]), max_size=6)))
    return left, right, len(common)


def history_of(terms: list[int]) -> tuple[TermEntry, ...]:
    firsts: dict[int, int] = {}
    for lsn, term in enumerate(terms):
        firsts.setdefault(term, lsn)
    return history(*firsts.items())


@given(logs=logs())
def test_the_common_point_is_where_bytes_begin_to_differ(
    logs: tuple[list[int], list[int], int],
) -> None:
    """Against the definition: the longest beginning that two logs have in common."""
    left, right, common = logs
    mine, theirs = history_of(left), history_of(right)
    found = highest_common_point(mine, visible(theirs, len(right)), len(right))
    if not common:
        assert found is None
    elif len(left) == common:
        # the proposer's log goes on in its last term without end: all the rest could be its own
        assert found == TermEntry(left[-1], len(right))
    else:
        assert found == TermEntry(left[common - 1], common)
