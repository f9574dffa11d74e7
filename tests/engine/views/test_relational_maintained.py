"""Every query of the corpus, maintained over random histories, equals the oracle at all times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest
import view_corpus  # type: ignore[import-not-found]
from dense_history import dense_history  # type: ignore[import-not-found]
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from view_steps import Update, assert_exact, follow  # type: ignore[import-not-found]

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableSchema
from actors.runtime.kernel import ActorSystem
from actors.testing.engine import InMemoryExecutor
from actors.testing.maintain import EngineCaller, MaintainedView, accumulated
from suite_lanes import examples  # type: ignore[import-not-found]

TABLES: dict[str, TableSchema] = view_corpus.TABLES


def rows(schema: TableSchema) -> st.SearchStrategy[tuple[Any, ...]]:
    whole = st.integers(-1, 2)
    kinds = {"int": whole, "bigint": whole, "string": st.sampled_from("xpz")}
    return st.tuples(
        *(
            st.one_of(st.none(), kinds[c.type]) if c.nullable else kinds[c.type]
            for c in schema.columns
        )
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Update], list[int]]:
    """Updates that never remove what is not there, and where the steps end."""
    present: dict[str, list[tuple[Any, ...]]] = {name: [] for name in "abcd"}
    updates: list[Update] = []
    time = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 16))):
        time += draw(st.integers(0, 1))
        table = draw(st.sampled_from("aabbcd"))
        there = present[table]
        kind = draw(st.integers(0, 5))
        if there and kind < 2:
            updates.append((time, table, there.pop(draw(st.integers(0, len(there) - 1))), -1))
        else:
            row = there[0] if there and kind == 2 else draw(rows(TABLES[table]))
            there.append(row)
            updates.append((time, table, row, 1))
    cuts = draw(st.sets(st.integers(1, time + 1)))
    return updates, sorted({*cuts, time + 1})


PLANS: dict[str, DeltaPlan] = {}
"""Compiled once a query."""


async def maintained(name: str, history: list[Update], cuts: list[int]) -> int:
    """Returns how many rows of the view were compared, over all times."""
    sql = view_corpus.PORTABLE[name]
    async with ActorSystem(seed=1) as system:
        engine = EngineCaller(system.spawn(InMemoryExecutor, "engine"), "t")
        if name not in PLANS:
            PLANS[name] = await compile_view(sql, TABLES, engine.analyze())
        plan = PLANS[name]
        assert plan.strata, plan.reason
        view = MaintainedView(engine, plan, "v")
        await follow(view, history, cuts)
    compared: int = assert_exact(view, sql, {name: TABLES[name] for name in "abcd"}, history, cuts)
    for state, updates in zip(plan.hidden, view.hidden, strict=True):
        hidden = accumulated(updates, cuts[-1])
        assert all(weight > 0 for weight in hidden.values())
        width = len(state.keys)
        if state.keys == state.schema.names:  # first rows, as often as they count
            continue
        assert all(weight == 1 for weight in hidden.values())
        assert all(n == 1 for n in Counter(row[:width] for row in hidden).values())
    return compared


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", sorted(view_corpus.PORTABLE))
def test_the_plan_is_exact_at_every_time(name: str) -> None:
    compared = 0

    @settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
    @given(history=histories())
    @example(history=dense_history({name: TABLES[name] for name in "abcd"}, 9))
    def maintain(history: tuple[list[Update], list[int]]) -> None:
        nonlocal compared
        compared += anyio.run(maintained, name, *history)

    maintain()
    assert compared > 0
