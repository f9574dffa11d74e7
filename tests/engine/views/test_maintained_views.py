"""Random updates in random splits, through compile and steps, equal the oracle at every time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from dense_history import dense_history  # type: ignore[import-not-found]
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from view_steps import Update, assert_exact, follow  # type: ignore[import-not-found]

from actors.engine.views.compile import compile_view
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem
from actors.testing.engine import InMemoryExecutor
from actors.testing.maintain import EngineCaller, MaintainedView, accumulated
from suite_lanes import examples  # type: ignore[import-not-found]

TABLES = {
    "a": TableSchema(
        (TableColumn("k", "int"), TableColumn("g", "string"), TableColumn("v", "int"))
    ),
    "b": TableSchema(
        (TableColumn("k", "int"), TableColumn("c", "int"), TableColumn("w", "bigint"))
    ),
    "c": TableSchema((TableColumn("c", "int"), TableColumn("name", "string"))),
}

VIEWS = {
    "filter": "select k, v + 1 as v1 from a where v > 0 or g is null",
    "two": "select a.g, b.w from a join b on a.k = b.k",
    "three": "select a.v, b.w, c.name from a join b on a.k = b.k join c on b.c = c.c",
    "theta": "select a.k, c.c from a join c on a.k < c.c",
    "star": "select a.v, c.name from a, b, c where a.k = b.k and a.k = c.c and b.w > a.v",
    "self": "select l.v, r.v as rv from a l join a r on l.k = r.k and l.g = r.g",
    "hierarchy": "select x.k, z.w from b x join b y on x.c = y.k join b z on y.c = z.k",
    "group": "select g, count(*) as n, sum(v) as s, avg(v) as m, count(v) as c from a group by g",
    "joined_group": "select c.name, a.g, sum(a.v) as s, count(*) as n "
    "from a join b on a.k = b.k join c on b.c = c.c group by c.name, a.g having count(*) > 1",
    "total": "select count(*) as n, sum(w) as s, avg(w) as m from b",
}

VALUE = st.one_of(st.none(), st.integers(-1, 2))
ROWS = {
    "a": st.tuples(VALUE, st.one_of(st.none(), st.sampled_from("xy")), VALUE),
    "b": st.tuples(VALUE, VALUE, VALUE),
    "c": st.tuples(VALUE, st.one_of(st.none(), st.sampled_from("pq"))),
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Update], list[int]]:
    """Updates that never remove what is not there, and where the steps end."""
    present: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
    updates = []
    time = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 14))):
        time += draw(st.integers(0, 1))
        table = draw(st.sampled_from(sorted(TABLES)))
        rows = present[table]
        remove: bool = draw(st.booleans())
        if rows and remove:
            row = rows.pop(draw(st.integers(0, len(rows) - 1)))
            updates.append((time, table, row, -1))
        else:
            row = rows[0] if rows and draw(st.integers(0, 3)) == 0 else draw(ROWS[table])
            rows.append(row)
            updates.append((time, table, row, 1))
    cuts = draw(st.sets(st.integers(1, time + 1)))
    return updates, sorted({*cuts, time + 1})


async def maintained(sql: str, history: list[Update], cuts: list[int]) -> int:
    """Returns how many rows of the view were compared, over all times."""
    async with ActorSystem(seed=1) as system:
        engine = EngineCaller(system.spawn(InMemoryExecutor, "engine"), "t")
        plan = await compile_view(sql, TABLES, engine.analyze())
        assert plan.strata, plan.reason
        view = MaintainedView(engine, plan, "v")
        await follow(view, history, cuts)
    compared: int = assert_exact(view, sql, TABLES, history, cuts)
    for state, updates in zip(plan.hidden, view.hidden, strict=True):
        hidden = accumulated(updates, cuts[-1])
        assert all(weight == 1 for weight in hidden.values())
        width = len(state.keys)
        assert all(n == 1 for n in Counter(row[:width] for row in hidden).values())
    return compared


@pytest.mark.sampled
@pytest.mark.parametrize("name", VIEWS)
def test_every_split_is_exact_at_every_time(name: str) -> None:
    import anyio

    compared = 0

    @settings(
        max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(history=histories())
    @example(history=dense_history(TABLES, 1))
    def maintain(history: tuple[list[Update], list[int]]) -> None:
        nonlocal compared
        compared += anyio.run(maintained, VIEWS[name], *history)

    maintain()
    assert compared > 0
