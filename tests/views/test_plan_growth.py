"""How plans grow with the texts that they are made of."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest

from actors.plan.delta import DeltaPlan, Node
from actors.plan.jobs import Analyzed
from actors.plan.schema import Column, Schema
from actors.testing.analysis import analyze
from actors.views.compile import compile_view
from actors.views.operators import children_of, size_of

COLUMNS = 33
T = Schema(
    (
        *(Column(name, "int") for name in "gabe"),
        *(Column(f"x{i}", ("int", "bigint", "string", "date")[i % 4]) for i in range(COLUMNS)),
    )
)
SIZES = (1, 2, 4, 8, 16)


def compiled(sql: str) -> DeltaPlan:
    async def asked(
        tables: tuple[tuple[str, Schema], ...],
        texts: tuple[str, ...],
        conf: tuple[tuple[str, str], ...],
    ) -> Analyzed:
        known = dict(tables)
        return Analyzed("", tuple(analyze(t, known) for t in texts), tuple(True for _ in texts))

    return asyncio.run(compile_view(sql, {"t": T}, asked))


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


@pytest.mark.parametrize("beside", ["", ", count(*) as n, sum(a) as s", ", min(a) as m"])
def test_distinct_aggregates_cost_a_plan_linear_in_their_number(beside: str) -> None:
    def plan_of(count: int) -> DeltaPlan:
        return compiled(distinct_aggregates(count).replace(" from t", f"{beside} from t"))

    plans = {count: plan_of(count) for count in SIZES}
    nodes = [sum(size_of(s.node) for s in plan.strata) for plan in plans.values()]
    assert max(nodes[1:]) == nodes[1] < 60
    assert {len(plan.hidden) for plan in plans.values()} == {2}
    assert {len(plan.strata) for plan in list(plans.values())[1:]} == {2}
    written = [sum(expressions_of(s.node) for s in plan.strata) for plan in plans.values()]
    assert max(m / n for n, m in pairwise(written)) < 2.2, written
    texts = [len(msgspec.json.encode(plan.strata)) for plan in plans.values()]
    assert max(m / n for n, m in pairwise(texts)) < 2.2, texts
