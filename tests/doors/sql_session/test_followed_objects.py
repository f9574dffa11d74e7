"""Subscribes of plain queries: an object's changes, filtered and projected as they come."""

from __future__ import annotations

import math
from collections import Counter

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.sql_session.subscribe_statements import PROGRESSED, FollowedObject
from actors.engine.views.plain_read import parse_plain_read
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema

SCHEMA = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("name", "string"), TableColumn("x", "double")),
    ("id",),
)
Row = tuple[int, str | None, float | None, int, int]
HEAD = [pa.field(TIME, pa.int64()), pa.field(DIFF, pa.int64())]


def followed(sql: str) -> FollowedObject:
    read = parse_plain_read(sql, {"t": SCHEMA})
    assert read is not None
    return FollowedObject.of(read, SCHEMA)


def changes(*rows: Row) -> pa.Table:
    """Rows of (id, name, x, time, diff)."""
    names = ["id", "name", "x", TIME, DIFF]
    return pa.Table.from_pylist(
        [dict(zip(names, row, strict=True)) for row in rows], SCHEMA.arrow_updates()
    )


def told(sql: str, *rows: Row) -> Counter[tuple[object, ...]]:
    """The rows of the subscribe: (time, diff, columns …), counted."""
    found = followed(sql)
    shape = pa.schema([*HEAD, *found.shown])
    table = found.shaped(changes(*rows), shape)
    assert table.schema == shape
    return Counter(tuple(row.values()) for row in table.to_pylist())


def test_columns_are_chosen_and_renamed() -> None:
    found = told("SELECT x AS y, id FROM t", (1, "a", 0.5, 7, 1))
    assert found == {(7, 1, 0.5, 1): 1}


def test_what_is_not_shown_does_not_change() -> None:
    update = ((1, "a", 1.0, 7, -1), (1, "a", 2.0, 7, 1))
    assert told("SELECT id, name FROM t", *update) == {}
    assert sum(told("SELECT id, x FROM t", *update).values()) == 2


def test_rows_cancel_at_one_time_alone() -> None:
    found = told("SELECT name FROM t", (1, "a", 1.0, 7, 1), (1, "a", 1.0, 8, -1))
    assert found == {(7, 1, "a"): 1, (8, -1, "a"): 1}


def test_equal_rows_are_one_with_their_number() -> None:
    found = told("SELECT name FROM t", (1, "a", 1.0, 7, 1), (2, "a", 2.0, 7, 1))
    assert found == {(7, 2, "a"): 1}


def test_a_row_that_moves_out_of_the_filter_is_retracted() -> None:
    sql = "SELECT * FROM t WHERE x > 1"
    found = told(sql, (1, "a", 2.0, 7, -1), (1, "a", 0.5, 7, 1), (2, "b", 3.0, 7, 1))
    assert found == {(7, -1, 1, "a", 2.0): 1, (7, 1, 2, "b", 3.0): 1}


def test_null_and_nan_compare_as_spark_has_it() -> None:
    rows: tuple[Row, ...] = ((1, None, None, 7, 1), (2, "b", math.nan, 7, 1), (3, "c", 1.0, 7, 1))
    for sql, ids in {
        "SELECT id FROM t WHERE x > 5.0": {2},
        "SELECT id FROM t WHERE x <= 5.0": {3},
        "SELECT id FROM t WHERE x <> 1.0": {2},
        "SELECT id FROM t WHERE name IS NULL": {1},
        "SELECT id FROM t WHERE name <> 'b' AND x IS NOT NULL": {3},
    }.items():
        assert {row[2] for row in told(sql, *rows)} == ids, sql


def test_rows_beside_progress_say_that_they_are_none() -> None:
    found = followed("SELECT id FROM t")
    shape = pa.schema([HEAD[0], pa.field(PROGRESSED, pa.bool_()), HEAD[1], *found.shown])
    table = found.shaped(changes((1, "a", 1.0, 7, 1)), shape)
    assert table.to_pylist() == [{TIME: 7, PROGRESSED: False, DIFF: 1, "id": 1}]


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["a", "b", None]),
        st.sampled_from([0.0, -0.0, 1.5, math.inf, None]),
        st.integers(1, 3),
        st.sampled_from([-1, 1]),
    ),
    max_size=12,
)


@given(ROWS)
def test_the_sum_at_each_time_is_that_of_the_query(rows: list[Row]) -> None:
    expected: Counter[tuple[object, ...]] = Counter()
    for _, name, x, time, diff in rows:
        if x is not None and x >= 0.0:
            expected[time, name] += diff
    found: Counter[tuple[object, ...]] = Counter()
    for (at, weight, shown), count in told("SELECT name FROM t WHERE x >= 0.0", *rows).items():
        found[at, shown] += int(str(weight)) * count
        assert weight, "rows that cancel are left out"
    assert {key: n for key, n in found.items() if n} == {key: n for key, n in expected.items() if n}
