"""The delta nodes in pure Python, against what they are defined to be at every time."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.delta import (
    AccumulateTotals,
    ExpandRows,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    ReduceGroups,
    SelectColumns,
    SparkCall,
    UnionRows,
    WeighRows,
)
from actors.model.plan.relational import NamedExpression
from actors.runtime.errors import InvalidUsage, QueryRejected
from actors.testing.aggregates import compile_aggregates
from actors.testing.nodes import NodeRelation, NodeRunner, Update, consolidated, frozen

LO, HI = 5, 9
COLUMNS = (("k", "int"), ("x", "int"))
OLD, CHANGES = NamedInput("s0", ("k", "x")), NamedInput("d0", ("k", "x"))
VALUE = st.one_of(st.none(), st.integers(-2, 2))
ROW = st.tuples(st.one_of(st.none(), st.integers(0, 1)), VALUE)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Update], list[Update], int]:
    """(updates below LO, updates in [LO, HI), lo): weights never become negative."""
    lo = draw(st.sampled_from([0, LO]))
    present: Counter[Any] = Counter(draw(st.lists(ROW, max_size=5)) if lo else [])
    old = [(row, LO - 1, weight) for row, weight in present.items()]
    changes: list[Update] = []
    for time in range(LO, HI):
        for row in draw(st.lists(ROW, max_size=3)):
            diff = -1 if present[row] and draw(st.booleans()) else 1
            present[row] += diff
            changes.append((row, time, diff))
    return old, changes, lo


def run(node: Node, lo: int, **inputs: Any) -> NodeRelation:
    relations = {name: NodeRelation(columns, rows) for name, (columns, rows) in inputs.items()}
    return NodeRunner(relations, lo, HI).run(node)


def until(updates: list[Update], time: int) -> Counter[Any]:
    sums: Counter[Any] = Counter()
    for row, at, diff in updates:
        if at <= time:
            sums[row] += diff
    return Counter({row: weight for row, weight in sums.items() if weight})


def aggregated(contents: Counter[Any], *, keyed: bool) -> Counter[Any]:
    """(key, max, count of distinct, number of rows) of each group."""
    groups: dict[Any, list[Any]] = {} if keyed else {(): []}
    for row in contents.elements():
        groups.setdefault((row[0],) if keyed else (), []).append(row[1])
    made: Counter[Any] = Counter()
    for key, values in groups.items():
        plain = [value for value in values if value is not None]
        made[(*key, max(plain, default=None), len(set(plain)), len(values))] += 1
    return made


@pytest.mark.parametrize("keyed", [True, False])
@given(history=histories())
def test_recompute_is_the_aggregate_at_every_time(
    keyed: bool, history: tuple[list[Update], list[Update], int]
) -> None:
    old, changes, lo = history
    calls = (
        SparkCall("m", "max(x)", "int"),
        SparkCall("c", "count(DISTINCT x)", "bigint"),
        SparkCall("n", "count(*)", "bigint"),
    )
    node = RecomputeGroups(OLD, CHANGES, ("k",) if keyed else (), calls)
    found = run(node, lo, s0=(COLUMNS, old), d0=(COLUMNS, changes))
    names = [name for name, _ in found.columns]
    assert names == [*(["k"] if keyed else []), "m", "c", "n"]
    first = min((time for _, time, _ in changes), default=HI - 1)
    before = aggregated(until(old, LO), keyed=keyed) if lo else Counter()
    for time in range(first, HI):
        expected = aggregated(until([*old, *changes], time), keyed=keyed)
        expected.subtract(before)
        assert until(found.updates, time) == {r: w for r, w in expected.items() if w}


@given(history=histories())
def test_flips_keep_the_distinct_keys(history: tuple[list[Update], list[Update], int]) -> None:
    old, changes, lo = history
    reduce = ReduceGroups(CHANGES, (NamedExpression("k", "k"),), ())
    node = AccumulateTotals(reduce, NamedInput("h0", ("k", "n")), ("k",), (), flips=True)
    counts: Counter[Any] = Counter()
    for (key, _), _, weight in old:
        counts[key] += weight
    hidden = [((key, n), 3, 1) for key, n in counts.items()]
    columns = (("k", "int"), ("n", "bigint"))
    found = run(node, lo, d0=(COLUMNS, changes), h0=(columns, hidden))
    assert found.columns == (("k", "int"),)
    assert all(abs(diff) == 1 for _, _, diff in found.updates)
    for time in range(LO, HI):
        keys = {(row[0],) for row in until([*old, *changes], time)}
        expected = Counter(keys)
        expected.subtract({(key,) for key in counts})
        assert until(found.updates, time) == {k: w for k, w in expected.items() if w}


def test_flips_without_keys_tell_whether_there_is_anything() -> None:
    reduce = ReduceGroups(CHANGES, (), ())
    node = AccumulateTotals(reduce, NamedInput("h0", ("n",)), (), (), flips=True)
    changes = [((1, 1), 6, 1), ((1, 2), 6, 1), ((1, 1), 7, -1), ((1, 2), 8, -1)]
    found = run(node, 0, d0=(COLUMNS, changes), h0=((("n", "bigint"),), []))
    assert found.updates == [((), 6, 1), ((), 8, -1)]
    assert run(node, 0, d0=(COLUMNS, []), h0=((("n", "bigint"),), [])).updates == []


def test_expanded_updates_are_there_once_for_each_number() -> None:
    changes = [((1, None), 6, 1), ((2, 5), 7, -3)]
    found = run(ExpandRows(CHANGES, "tag", 2), LO, d0=(COLUMNS, changes))
    assert found.columns == (*COLUMNS, ("tag", "int"))
    assert found.updates == [
        ((1, None, 0), 6, 1),
        ((1, None, 1), 6, 1),
        ((2, 5, 0), 7, -3),
        ((2, 5, 1), 7, -3),
    ]


def test_pairs_compare_null_safe_where_told() -> None:
    left = SelectColumns(CHANGES, (NamedExpression("a", "k"), NamedExpression("b", "x")))
    right = SelectColumns(OLD, (NamedExpression("c", "k"), NamedExpression("d", "x")))
    inputs = {
        "d0": (COLUMNS, [((None, 1), 6, 2), ((1, None), 7, 1)]),
        "s0": (COLUMNS, [((None, 1), 4, 1), ((1, None), 4, 3)]),
    }
    same = PairRows(left, right, (), None, (("a", "c"), ("b", "d")))
    assert run(same, LO, **inputs).updates == [
        ((None, 1, None, 1), 6, 2),
        ((1, None, 1, None), 7, 3),
    ]
    mixed = PairRows(left, right, (("a", "c"),), None, (("b", "d"),))
    assert run(mixed, LO, **inputs).updates == [((1, None, 1, None), 7, 3)]


def test_weigh_multiplies_and_drops_zeros() -> None:
    changes = [((1, 2), 6, 3), ((1, 0), 6, 1), ((1, -1), 7, 1)]
    found = run(WeighRows(CHANGES, "x"), LO, d0=(COLUMNS, changes))
    assert found.updates == [((1, 2), 6, 6), ((1, -1), 7, -1)]
    assert run(WeighRows(CHANGES, "-1"), LO, d0=(COLUMNS, changes)).updates[0] == ((1, 2), 6, -3)
    with pytest.raises(QueryRejected, match="not an integer"):
        run(WeighRows(CHANGES, "x > 1"), LO, d0=(COLUMNS, changes))


def test_unions_widen_types_and_want_the_same_columns() -> None:
    void = SelectColumns(
        CHANGES, (NamedExpression("k", "CAST(NULL AS decimal(4,1))"), NamedExpression("x", "NULL"))
    )
    found = run(UnionRows((CHANGES, void)), LO, d0=(COLUMNS, [((1, 2), 6, 1)]))
    assert dict(found.columns)["k"].startswith("decimal(")
    assert [row for row, _, _ in found.updates] == [(Decimal("1.0"), 2), (None, None)]
    other = SelectColumns(CHANGES, (NamedExpression("k", "k"), NamedExpression("y", "x")))
    with pytest.raises(InvalidUsage, match="union"):
        run(UnionRows((CHANGES, other)), LO, d0=(COLUMNS, []))


def test_rows_compare_by_their_bits() -> None:
    nan = float("nan")
    updates = [((-0.0,), 6, 1), ((0.0,), 6, -1), ((nan,), 6, 1), ((float("nan"),), 6, -1)]
    found = consolidated(updates)
    assert [(math.copysign(1, row[0]), diff) for row, _, diff in found] == [(-1.0, 1), (1.0, -1)]
    assert frozen(-0.0) + 0.0 == 0.0
    assert frozen([nan]) == frozen([float("nan")])


ROWS = [((1, 2, True), 2), ((1, 5, False), 1), ((1, None, None), 1), ((1, 5, None), 3)]
PLAIN = [2, 2, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("count(*)", "bigint", 7),
        ("count(x)", "bigint", 6),
        ("count(1)", "bigint", 7),
        ("count(distinct x)", "bigint", 2),
        ("count(distinct x, b)", "bigint", 2),
        ("count(x, b)", "bigint", 3),
        ("sum(x)", "bigint", 24),
        ("sum(distinct x)", "bigint", 7),
        ("avg(x)", "double", 4.0),
        ("avg(distinct x)", "double", 3.5),
        ("min(x)", "int", 2),
        ("max(x) + 1", "int", 6),
        ("max(x) filter (where b)", "int", 2),
        ("min(x) filter (where x > 9)", "int", None),
        ("count(x) filter (where x > 9)", "bigint", 0),
        ("stddev(x)", "double", statistics.stdev(PLAIN)),
        ("std(x)", "double", statistics.stdev(PLAIN)),
        ("stddev_pop(x)", "double", statistics.pstdev(PLAIN)),
        ("var_samp(x)", "double", statistics.variance(PLAIN)),
        ("var_pop(x)", "double", statistics.pvariance(PLAIN)),
        ("bool_and(b)", "boolean", False),
        ("every(b)", "boolean", False),
        ("bool_or(b)", "boolean", True),
        ("any(b)", "boolean", True),
        ("some(b)", "boolean", True),
        ("count_if(b)", "bigint", 2),
        ("max_by(k, x)", "int", 1),
        ("any_value(k)", "int", 1),
        ("coalesce(sum(x), 0) / count(*)", "double", 24 / 7),
    ],
)
def test_aggregates_are_sparks(text: str, kind: str, value: Any) -> None:
    columns = {"k": (0, "int"), "x": (1, "int"), "b": (2, "boolean")}
    found, function = compile_aggregates(text, columns)
    assert found == kind
    if isinstance(value, float):
        assert function(ROWS) == pytest.approx(value, rel=1e-12)
    else:
        assert function(ROWS) == value


def test_aggregates_of_nothing_and_of_one() -> None:
    columns = {"x": (0, "int"), "d": (1, "decimal(4,2)"), "b": (2, "boolean"), "f": (3, "double")}
    for text in ("sum(x)", "avg(d)", "min(x)", "stddev(x)", "bool_and(b)", "any_value(x)"):
        assert compile_aggregates(text, columns)[1]([]) is None
    one = [((1, Decimal("0.10"), True, math.nan), 1)]
    assert compile_aggregates("stddev_samp(x)", columns)[1](one) is None
    assert compile_aggregates("var_pop(x)", columns)[1](one) == 0.0
    three = [*one, ((2, Decimal("0.15"), True, 7.0), 2)]
    assert compile_aggregates("avg(d)", columns)[0] == "decimal(8,6)"
    assert compile_aggregates("avg(d)", columns)[1](three) == Decimal("0.133333")
    assert math.isnan(compile_aggregates("max(f)", columns)[1](three))
    assert compile_aggregates("min(f)", columns)[1](three) == 7.0
