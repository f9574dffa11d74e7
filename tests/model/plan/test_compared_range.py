"""Rows that a changed bound decides anew, beside comparing each row with each bound."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.nearby import ComparedRange, rows_in_range
from actors.model.plan.schema import DIFF, TIME

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge)
VALUES = st.one_of(st.none(), st.integers(-3, 6))


def changed(bounds: Sequence[tuple[int, ...]], times: list[int] | None = None) -> pa.Table:
    """One row replaced by the next, a time each."""
    pairs = [
        (row, time, diff)
        for time, (old, new) in enumerate(itertools.pairwise(bounds))
        for row, diff in ((old, -1), (new, 1))
    ]
    columns = {
        f"b{place}": pa.array([row[place] for row, _, _ in pairs], pa.int64())
        for place in range(len(bounds[0]))
    }
    at = times or [time for _, time, _ in pairs]
    diffs = [diff for _, _, diff in pairs]
    return pa.table({**columns, TIME: pa.array(at, pa.int64()), DIFF: pa.array(diffs, pa.int64())})


@given(
    st.lists(st.tuples(VALUES, VALUES), max_size=12),
    st.lists(st.tuples(st.integers(-3, 6), st.integers(-3, 6)), min_size=2, max_size=4),
    st.sampled_from(COMPARISONS),
    st.sampled_from(COMPARISONS),
)
def test_rows_that_any_bound_decides_otherwise_are_among_them(
    rows: list[tuple[int | None, int | None]],
    bounds: list[tuple[int, int]],
    first: Any,
    second: Any,
) -> None:
    table = pa.table(
        {
            "x": pa.array([x for x, _ in rows], pa.int32()),
            "y": pa.array([y for _, y in rows], pa.int64()),
        }
    )
    wanted = ComparedRange(0, ("x", "y"), ("b0", "b1"))
    kept = rows_in_range(table, changed(bounds), wanted)
    found = [(row["x"], row["y"]) for row in kept.to_pylist()]

    def passes(row: tuple[int | None, int | None], bound: tuple[int, int]) -> bool:
        x, y = row
        return x is not None and y is not None and first(x, bound[0]) and second(y, bound[1])

    decided = [row for row in rows if len({passes(row, bound) for bound in bounds}) > 1]
    assert all(found.count(row) == rows.count(row) for row in decided)
    beyond = [
        row
        for row in rows
        if not any(
            value is not None and min(each) <= value <= max(each)
            for value, each in zip(row, zip(*bounds, strict=True), strict=True)
        )
    ]
    assert not set(beyond) & set(found)


def test_a_row_within_the_range_of_either_bound_is_read() -> None:
    rows = pa.table({"x": pa.array([2, 9, 9, 2]), "y": pa.array([9, 1, 9, 1])})
    wanted = ComparedRange(0, ("x", "y"), ("b0", "b1"))
    kept = rows_in_range(rows, changed([(1, 1), (3, 1)]), wanted)
    assert kept.to_pylist() == [{"x": 2, "y": 9}, {"x": 9, "y": 1}, {"x": 2, "y": 1}]


def only(rows: pa.Table, changes: pa.Table) -> list[Any]:
    found = rows_in_range(rows, changes, ComparedRange(0, ("x",), ("b0",)))
    return list(found["x"].to_pylist())


def test_all_rows_where_the_one_row_is_not_replaced() -> None:
    rows = pa.table({"x": pa.array([1, 5, 9], pa.int64())})
    moved = changed([(4,), (6,)])
    assert only(rows, moved) == [5]
    # It comes and goes at different times: in between there is none.
    assert only(rows, changed([(4,), (6,)], [1, 2])) == [1, 5, 9]
    assert only(rows, moved.slice(0, 1)) == [1, 5, 9]
    null = moved.set_column(0, "b0", pa.array([None, 6], pa.int64()))
    assert only(rows, null) == [1, 5, 9]


def cast(values: Any, kind: pa.DataType) -> Any:
    """Small numbers as another type; Arrow wants to be sure that decimals have room."""
    wide = pa.types.is_decimal(kind)
    return values.cast(pa.decimal128(25, kind.scale)).cast(kind) if wide else values.cast(kind)


@pytest.mark.parametrize(
    ("own", "bound", "found"),
    [
        (pa.float64(), pa.float64(), [5]),
        (pa.int64(), pa.float64(), [5]),
        (pa.int64(), pa.int32(), [1, 5, 9]),
        (pa.float64(), pa.int64(), [1, 5, 9]),
        (pa.decimal128(12, 2), pa.decimal128(16, 6), [5]),
        (pa.decimal128(12, 2), pa.decimal128(12, 2), [5]),
        (pa.decimal128(12, 2), pa.decimal128(16, 2), [5]),
        (pa.decimal128(12, 2), pa.float64(), [1, 5, 9]),
        (pa.int64(), pa.decimal128(21, 2), [1, 5, 9]),
        (pa.int32(), pa.float32(), [1, 5, 9]),
        (pa.int32(), pa.int64(), [5]),
        (pa.int64(), pa.int64(), [5]),
        (pa.int64(), pa.timestamp("us"), [1, 5, 9]),
        (pa.decimal128(12, 2), pa.decimal128(12, 1), [1, 5, 9]),
        (pa.decimal128(12, 2), pa.decimal128(12, 3), [1, 5, 9]),
        (pa.string(), pa.string(), ["1", "5", "9"]),
    ],
)
def test_only_a_cast_that_keeps_the_order_is_compared(
    own: pa.DataType, bound: pa.DataType, found: list[Any]
) -> None:
    values = ["1", "5", "9"] if own == pa.string() else [1, 5, 9]
    rows = pa.table({"x": cast(pa.array(values), own)})
    moved = changed([(4,), (6,)])
    moved = moved.set_column(0, "b0", cast(moved["b0"], bound))
    assert only(rows, moved) == found


def test_a_bound_that_is_no_number_compares_with_nothing() -> None:
    rows = pa.table({"x": pa.array([1.0, 9.0])})
    moved = changed([(4,), (6,)]).set_column(0, "b0", pa.array([float("nan"), 6.0]))
    assert only(rows, moved) == [1.0, 9.0]


def test_days_and_times_have_an_order() -> None:
    rows = pa.table({"x": pa.array([10, 20, 30], pa.timestamp("us", "UTC"))})
    moved = changed([(15,), (25,)])
    moved = moved.set_column(0, "b0", moved["b0"].cast(pa.timestamp("us", "Etc/UTC")))
    assert [each.microsecond for each in only(rows, moved)] == [20]
    for other in (pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.int64()):
        unlike = moved.set_column(0, "b0", moved["b0"].cast(other, safe=False))
        assert len(only(rows, unlike)) == 3, other
    assert len(only(pa.table({"x": rows["x"].cast(pa.int64())}), moved)) == 3
    same = moved.set_column(0, "b0", moved["b0"].cast(pa.timestamp("us", "UTC")))
    assert [each.microsecond for each in only(rows, same)] == [20]
    days = pa.table({"x": pa.array([10, 20, 30], pa.int32()).cast(pa.date32())})
    moved = changed([(15,), (25,)])
    moved = moved.set_column(0, "b0", moved["b0"].cast(pa.int32()).cast(pa.date32()))
    assert [each.day for each in only(days, moved)] == [21]


def test_one_bound_that_says_nothing_reads_all() -> None:
    """Also where another column is out of its bounds' range."""
    rows = pa.table({"x": pa.array([1, 5]), "y": pa.array(["a", "b"])})
    wanted = ComparedRange(0, ("x", "y"), ("b0", "b1"))
    moved = changed([(4, 4), (6, 6)])
    moved = moved.set_column(1, "b1", moved["b1"].cast(pa.string()))
    assert rows_in_range(rows, moved, wanted).num_rows == 2
