"""Up to where a batch reaches: against a model that looks at every time."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.connectors.sinks.sink_batches import (
    ErrorInterval,
    ListedBatch,
    SinkBatchChoice,
    choose_batch,
    error_intervals,
    move_out_of_intervals,
)
from actors.model.plan.schema import TIME
from actors.runtime.progress import EMPTY

ERRORS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("xy"), st.sampled_from([-2, -1, 1, 2])),
    max_size=8,
)


def in_error(errors: list[tuple[int, str, int]], time: int) -> bool:
    sums: dict[str, int] = {}
    for at, text, diff in errors:
        if at <= time:
            sums[text] = sums.get(text, 0) + diff
    return any(total > 0 for total in sums.values())


@given(ERRORS, st.integers(1, 14))
def test_stretches_are_the_times_in_error(errors: list[tuple[int, str, int]], sealed: int) -> None:
    intervals = error_intervals(errors, sealed)
    told = {t for each in intervals for t in range(each.lower, each.upper)}
    assert told == {t for t in range(sealed) if in_error(errors, t)}
    for before, after in pairwise(intervals):
        assert before.upper < after.lower


@given(
    ERRORS,
    st.integers(0, 10),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=6),
    st.integers(1, 60),
)
def test_a_batch_ends_where_there_are_contents(
    errors: list[tuple[int, str, int]],
    lower: int,
    length: int,
    steps: list[tuple[int, int]],
    bytes_max: int,
) -> None:
    """Whatever it is cut by: it goes on, it ends at a time with contents, and when it cannot go on
    there is none."""
    listed: list[ListedBatch] = []
    upper = lower
    for step, size in steps:
        upper += step
        listed.append(ListedBatch(upper, size))
    sealed = max(lower + length, upper)
    intervals = error_intervals(errors, sealed)
    found = choose_batch(lower, sealed, listed, intervals, bytes_max)
    good = [t for t in range(lower, sealed) if not in_error(errors, t)]
    if found.upper is None:
        assert good == []
        assert found.error is not None
        return
    assert lower < found.upper <= sealed
    assert found.upper - 1 in good
    for each in found.intervals:
        assert each.upper < found.upper
    ahead = found.upper < sealed and in_error(errors, found.upper)
    assert (found.error is not None) == ahead


def test_it_keeps_to_the_bytes_where_it_can() -> None:
    listed = [ListedBatch(5, 40), ListedBatch(7, 40), ListedBatch(9, 40)]
    assert choose_batch(0, 20, listed, (), 100).upper == 7
    assert choose_batch(0, 20, listed, (), 1000).upper == 20
    assert choose_batch(0, 20, listed, (), 10).upper == 5  # one batch of the shard is never divided
    assert choose_batch(5, 20, listed, (), 40).upper == 7
    assert choose_batch(0, 20, [ListedBatch(9, 0)], (), 10).upper == 20


def test_before_an_error_then_over_it() -> None:
    assert choose_batch(0, 9, [], error_intervals([(4, "bad", 1)], 9), 10) == SinkBatchChoice(
        4, (), "bad"
    )
    assert choose_batch(4, 9, [], error_intervals([(4, "bad", 1)], 9), 10) == SinkBatchChoice(
        None, (), "bad"
    )
    gone = error_intervals([(4, "bad", 1), (7, "bad", -1)], 9)
    assert gone == (ErrorInterval(4, 7, "bad"),)
    assert choose_batch(4, 9, [], gone, 10) == SinkBatchChoice(9, gone, None)


def test_a_shard_that_has_ended() -> None:
    assert choose_batch(3, EMPTY, [], (), 10).upper == EMPTY
    assert choose_batch(3, EMPTY, [], error_intervals([(2, "x", 1)], EMPTY), 10).upper is None


@pytest.mark.parametrize(
    ("before", "after"), [(3, 3), (4, 7), (6, 7), (7, 7), (9, 11), (10, 11), (12, 12)]
)
def test_times_in_error_become_the_first_behind(before: int, after: int) -> None:
    table = pa.table({TIME: pa.array([before], pa.int64())})
    moved = move_out_of_intervals(table, (ErrorInterval(4, 7, "x"), ErrorInterval(9, 11, "y")))
    assert moved[TIME].to_pylist() == [after]
