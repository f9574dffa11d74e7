"""Where plain Spark is free: which answers are accepted, and which are not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from actors.testing.nodes import frozen
from actors.testing.nondeterminism import QueryNondeterminism, nondeterminism_of


def wrong(choices: QueryNondeterminism, expected: Any, found: Any) -> int:
    return len(choices.differences(Counter(expected), Counter(found), exact_decimals=True))


@pytest.mark.parametrize(
    "sql",
    [
        "select a, max(b) as m from t group by a order by a",
        "select a from t where exists (select 1 from u where u.a = t.a limit 1)",
        "select sort_array(collect_list(a)) as c from t",
        "select rank() over (order by a) as r from t",
        "not sql at all (",
    ],
)
def test_nothing_is_open(sql: str) -> None:
    assert nondeterminism_of(sql).kind == "none"


@pytest.mark.parametrize(
    "sql",
    [
        "select a from (select a from t limit 1) q",
        "select a, first(b) + 1 as f from t group by a",
        "select a from t group by a having first(b) > 1",
        "select row_number() over (order by a) as r from t",
        "select collect_list(a) as c from t",
        "select sum(a) over (order by b rows between 1 preceding and current row) as s from t",
        "select first(a) as f from t limit 1",
        "select a from t limit a",
        "select * from t order by a limit 3",
    ],
)
def test_what_cannot_be_listed_is_unknown(sql: str) -> None:
    found = nondeterminism_of(sql)
    assert found.kind == "unknown"
    assert "may choose freely" in found.why


def test_a_chosen_value_must_be_one_of_the_group() -> None:
    found = nondeterminism_of(
        "select g, first(x) as f, any_value(y) filter (where x > 0) as y from t group by g"
    )
    assert found.kind == "columns"
    assert "COLLECT_SET(STRUCT(x AS v)) AS f" in found.sql
    assert "FILTER(WHERE x > 0)" in found.sql
    rows = {("a", frozen([{"v": 1}, {"v": None}]), frozen([])): 1}
    assert wrong(found, rows, {("a", 1, None): 1}) == 0
    assert wrong(found, rows, {("a", None, None): 1}) == 0
    assert wrong(found, rows, {("a", 2, None): 1}) == 2
    assert wrong(found, rows, {("a", 1, 5): 1}) == 2
    assert wrong(found, rows, {("a", 1, None): 1, ("a", None, None): 1}) == 1
    assert wrong(found, rows, {}) == 1


def test_nulls_are_passed_over_when_told() -> None:
    found = nondeterminism_of("select first(x, true) as f from t")
    assert wrong(found, {(frozen([{"v": 1}, {"v": None}]),): 1}, {(None,): 1}) == 2
    assert wrong(found, {(frozen([{"v": None}]),): 1}, {(None,): 1}) == 0


def test_ties_of_max_by_and_min_by() -> None:
    found = nondeterminism_of("select max_by(x, y) as a, min_by(x, y) as b from t")
    rows = frozen(
        [{"k": 2, "v": "p"}, {"k": 2, "v": "q"}, {"k": 1, "v": "r"}, {"k": None, "v": "s"}]
    )
    for value, fits in (("p", True), ("q", True), ("r", False), ("s", False), (None, False)):
        assert (wrong(found, {(rows, rows): 1}, {(value, "r"): 1}) == 0) is fits
    assert wrong(found, {(frozen([]), frozen([])): 1}, {(None, None): 1}) == 0


def test_indistinct_groups_are_matched_one_to_one() -> None:
    found = nondeterminism_of("select first(x) as f from t group by g")
    one, two = frozen([{"v": 1}]), frozen([{"v": 1}, {"v": 2}])
    assert wrong(found, {(one,): 1, (two,): 1}, {(1,): 1, (2,): 1}) == 0
    assert wrong(found, {(one,): 1, (two,): 1}, {(1,): 2}) == 0
    assert wrong(found, {(one,): 1, (two,): 1}, {(2,): 2}) == 2


def test_a_limit_takes_whole_ranks_and_any_of_the_last() -> None:
    found = nondeterminism_of("select x, y from t order by y desc limit 3")
    assert (found.kind, found.limit, found.offset, found.width) == ("limit", 3, 0, 2)
    assert "rank() OVER (ORDER BY `y` DESC" in found.sql
    rows = {(1, 9, 1): 2, (2, 5, 3): 1, (3, 5, 3): 2, (4, 1, 6): 1}
    assert wrong(found, rows, {(1, 9): 2, (2, 5): 1}) == 0
    assert wrong(found, rows, {(1, 9): 2, (3, 5): 1}) == 0
    assert wrong(found, rows, {(1, 9): 1, (3, 5): 2}) > 0
    assert wrong(found, rows, {(1, 9): 2, (4, 1): 1}) > 0
    assert wrong(found, rows, {(1, 9): 2}) > 0
    assert wrong(found, rows, {(1, 9): 2, (2, 5): 1, (3, 5): 1}) > 0


def test_an_offset_opens_the_first_rank_too() -> None:
    found = nondeterminism_of("select x from t order by x + y limit 2 offset 1")
    assert "AS `__o0`" in found.sql or "AS __o0" in found.sql
    rows = {("a", 1): 1, ("b", 1): 1, ("c", 3): 1, ("d", 3): 1}
    assert wrong(found, rows, {("a",): 1, ("c",): 1}) == 0
    assert wrong(found, rows, {("b",): 1, ("d",): 1}) == 0
    assert wrong(found, rows, {("a",): 1, ("b",): 1}) > 0
    assert wrong(found, rows, {("c",): 1, ("d",): 1}) > 0


def test_a_limit_without_an_order_takes_any_rows() -> None:
    found = nondeterminism_of("with q as (select x from t) select x from q limit 2")
    assert found.kind == "limit"
    assert wrong(found, {(1, 1): 3, (2, 1): 1}, {(1,): 2}) == 0
    assert wrong(found, {(1, 1): 3, (2, 1): 1}, {(2,): 2}) > 0
    assert wrong(found, {(1, 1): 1}, {(1,): 1}) == 0
    assert wrong(found, {}, {}) == 0
