"""How plans grow with the texts that they are made of, rule by rule, when these double.

Where growth is more than linear that lies in the rule (each of a join's n terms pairs n inputs);
then a view that needs too much is recomputed, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from actors.engine.views.compile import compile_view
from actors.engine.views.operators import children_of, size_of
from actors.model.plan import plan_splitting
from actors.model.plan.delta import DeltaPlan, Node
from actors.model.plan.plan_splitting import PlanLimits, statement_sizes
from actors.model.plan.schema import TableColumn, TableSchema
from actors.testing.analysis import analyze_in_memory

COLUMNS = 33
T = TableSchema(
    (
        *(TableColumn(name, "int") for name in "gabe"),
        *(TableColumn(f"x{i}", ("int", "bigint", "string", "date")[i % 4]) for i in range(COLUMNS)),
    )
)
SIZES = (1, 2, 4, 8, 16)
LIMITS = PlanLimits()


def compiled(sql: str, limits: PlanLimits = LIMITS) -> DeltaPlan:
    return asyncio.run(compile_view(sql, {"t": T}, analyze_in_memory, (), limits))


def expressions_of(node: Node) -> int:
    """Items of all lists below a node: computed columns, keys, measures, equalities."""
    own = sum(
        len(value)
        for field in node.__struct_fields__
        if isinstance(value := getattr(node, field), tuple) and field != "inputs"
    )
    return own + sum(map(expressions_of, children_of(node)))


def distinct_aggregates(count: int) -> str:
    """Plain and filtered ones, of columns of four types."""
    made = [
        (
            f"count(distinct x{i})",
            f"count(distinct x{i}) filter (where a > {i})",
            f"sum(distinct x{i - 2})",
            f"count(distinct x{i} is null)",
        )[i % 4]
        for i in range(count)
    ]
    return (
        f"select g, {', '.join(f'{call} as n{i}' for i, call in enumerate(made))} from t group by g"
    )


@pytest.mark.parametrize(
    ("beside", "most", "states", "strata"),
    [("", 60, 2, 2), (", count(*) as n, sum(a) as s", 60, 2, 2), (", min(a) as m", 140, 4, 3)],
)
def test_distinct_aggregates_cost_a_plan_linear_in_their_number(
    beside: str, most: int, states: int, strata: int
) -> None:
    def plan_of(count: int) -> DeltaPlan:
        return compiled(distinct_aggregates(count).replace(" from t", f"{beside} from t"))

    plans = {count: plan_of(count) for count in SIZES}
    nodes = [sum(size_of(s.node) for s in plan.strata) for plan in plans.values()]
    assert max(nodes[1:]) == nodes[1] < most
    assert {len(plan.hidden) for plan in plans.values()} == {states}
    assert {len(plan.strata) for plan in list(plans.values())[1:]} == {strata}
    written = [sum(expressions_of(s.node) for s in plan.strata) for plan in plans.values()]
    assert max(m / n for n, m in pairwise(written)) < 2.2, written
    texts = [len(msgspec.json.encode(plan.strata)) for plan in plans.values()]
    assert max(m / n for n, m in pairwise(texts)) < 2.2, texts


def chained(join: str, count: int, side: Callable[[int], str] = lambda i: f"t t{i}") -> str:
    """Joins of `count` inputs to the first."""
    joins = " ".join(f"{join} {side(i)} on t0.a = t{i}.a" for i in range(1, count))
    return f"select t0.g, {', '.join(f't{i}.a as a{i}' for i in range(count))} from t t0 {joins}"


def grouped(number: int) -> str:
    return f"(select a, count(*) as n from t where b > {number} group by a) t{number}"


def nested(text: str, count: int, around: Callable[[str, int], str]) -> str:
    for number in range(count):
        text = around(text, number)
    return text


def exists(count: int) -> str:
    tests = (f"exists (select 1 from t u where u.a = t.a and u.b > {i})" for i in range(count))
    return f"select g, a from t where {' and '.join(tests)}"


def listed(count: int, item: Callable[[int], str], rest: str = "") -> str:
    return f"select {', '.join(f'{item(i)} as c{i}' for i in range(count))}, g from t {rest}"


RULES: dict[str, tuple[float, Callable[[int], str]]] = {
    "distinct aggregates": (1.0, distinct_aggregates),
    "filtered aggregates": (
        1.0, lambda n: listed(n, lambda i: f"count(*) filter (where a > {i})", "group by g")),
    "afresh": (1.0, lambda n: listed(n, lambda i: f"max(x{i})", "group by g")),
    "columns": (1.0, lambda n: listed(8 * n, lambda i: f"a + {i}")),
    "distinct columns": (1.0, lambda n: listed(8 * n, lambda i: f"a + {i}").replace(
        "select", "select distinct")),
    "sums": (1.0, lambda n: listed(8 * n, lambda i: f"sum(a + {i})", "group by g")),
    "brackets": (1.0, lambda n: f"select g from t where {'(' * n}a > 1{')' * n}"),
    "conjuncts": (1.0, lambda n: f"select g from t where {' and '.join(['a > b'] * 8 * n)}"),
    "branches": (1.0, lambda n: "select g, case "
        + " ".join(f"when a = {i} then {i}" for i in range(20 * n)) + " end as c from t"),
    "projections": (1.0, lambda n: nested("t", n, lambda q, i: (
        f"(select g, a + 1 as a from {q} q{i})")).strip("()")),
    "unions": (2.0, lambda n: " union all ".join(
        f"select g, a from t where a > {i}" for i in range(n))),
    "distinct unions": (2.0, lambda n: " union ".join(
        f"select g, a from t where a > {i}" for i in range(n))),
    "unions of groupings": (2.0, lambda n: " union all ".join(
        f"select g, count(*) as n from t where a > {i} group by g" for i in range(n))),
    "stacked groupings": (4.0, lambda n: "select * from " + nested("t", n, lambda q, i: (
        f"(select g, a, b, count(*) as n{i} from {q} q{i} group by g, a, b)")) + " z"),
    "inner joins": (4.0, lambda n: chained("join", n)),
    "joins of groupings": (4.0, lambda n: chained("join", n, lambda i: (
        grouped(i)))),
    "outer joins": (4.0, lambda n: chained("left join", n)),
    "exists": (4.0, exists),
}  # fmt: skip


def inputs_of(plan: DeltaPlan) -> set[str]:
    inputs, hidden = range(len(plan.inputs)), range(len(plan.hidden))
    return {*(f"d{i}" for i in inputs), *(f"s{i}" for i in inputs), *(f"h{i}" for i in hidden)}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("rule", RULES)
def test_plans_grow_no_faster_than_their_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_splitting, "COLUMNS_OF_A_NODE", 1_000_000)  # nodes, not their widths
    growth, text = RULES[rule]
    totals = []
    for size in (4, 8, 16):
        plan = compiled(text(size), PlanLimits(plan_nodes_max=1_000_000))
        assert plan.strata, plan.reason
        nodes = [stratum.node for stratum in plan.strata]
        sizes = statement_sizes(nodes, inputs_of(plan), LIMITS.statement_nodes_max)
        assert max(sizes) <= LIMITS.statement_nodes_max
        totals.append(sum(sizes))
    assert max(b / a for a, b in pairwise(totals)) < 1.15 * growth, totals


@pytest.mark.parametrize("rule", ["inner joins", "outer joins", "exists", "stacked groupings"])
def test_what_needs_too_large_a_plan_is_recomputed_with_that_reason(rule: str) -> None:
    plan = compiled(RULES[rule][1](16), PlanLimits(plan_nodes_max=100))
    assert (plan.mode, plan.strata) == ("opaque", ())
    assert "nodes, more than view_plan_nodes_max (100)" in plan.reason
