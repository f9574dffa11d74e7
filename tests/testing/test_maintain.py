"""Maintenance by hand-made plans: lookups, several hidden states, the bits of ``__to``."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import (
    AccumulateTotals,
    DeltaPlan,
    HiddenState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    ReduceGroups,
    SelectColumns,
    StateLookup,
    UnionRows,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import ActorSystem
from actors.testing.analysis import analyze_in_memory
from actors.testing.engine import InMemoryExecutor
from actors.testing.maintain import EngineCaller, MaintainedView, WeightedRows, accumulated
from actors.testing.patience import PATIENCE_S

T = TableSchema((TableColumn("k", "int"), TableColumn("x", "int")))
KEY = TableSchema((TableColumn("k", "int"),))
COUNTS = HiddenState(TableSchema((TableColumn("k", "int"), TableColumn("n", "bigint"))), ("k",))
ROWS = HiddenState(TableSchema((TableColumn("n", "bigint"),)), ())


def wide(node: Node, to: int, **given: str) -> SelectColumns:
    """All columns of the last stratum, NULL where not given."""
    columns = {"o_k": "int", "h0_k": "int", "h0_n": "bigint", "h1_n": "bigint"}
    named = [
        NamedExpression(name, given.get(name, f"CAST(NULL AS {t})")) for name, t in columns.items()
    ]
    return SelectColumns(node, (*named, NamedExpression("__to", str(to))))


def distinct_plan() -> DeltaPlan:
    """``select distinct k from t``, with a needless count of all rows as a second state.

    The counts of keys are kept as they change, that of all rows by total.
    """
    each = ReduceGroups(NamedInput("d0", ("k",)), (NamedExpression("k", "k"),), ())
    every = ReduceGroups(NamedInput("d0", ()), (), ())
    flips = AccumulateTotals(
        NamedInput("r0", ("k", "n")), NamedInput("h0", ("k", "n")), ("k",), (), flips=True
    )
    total = AccumulateTotals(every, NamedInput("h1", ("n",)), (), ())
    last = UnionRows(
        (
            wide(flips, 1, o_k="k"),
            wide(NamedInput("r0", ("k", "n")), 2, h0_k="k", h0_n="n"),
            wide(total, 4, h1_n="n"),
        )
    )
    lookups = (StateLookup("h0", ("k",), (("r0", ("k",)),)), StateLookup("h1", (), ()))
    strata = (PlanStratum((), each, ("d0",)), PlanStratum(lookups, last, ("r0", "h0", "h1", "d0")))
    return DeltaPlan(("t",), (T,), KEY, "", "incremental", "", strata, (COUNTS, ROWS))


DELTAS: list[list[Any]] = [
    [((1, 1), 0, 2), ((None, 1), 1, 1)],
    [((1, 1), 2, -1), ((2, 1), 2, 1), ((2, 1), 3, -1)],
    [((1, 1), 4, -1), ((None, 2), 4, 1), ((None, 1), 5, -1)],
]


async def maintained(
    plan: DeltaPlan, deltas: list[list[Any]], *, fuse: bool | None
) -> MaintainedView:
    async with ActorSystem(seed=1) as system:
        engine = EngineCaller(system.spawn(InMemoryExecutor, "engine"), "t")
        view = MaintainedView(engine, plan, "v", fuse=fuse)
        await view.prepare()
        for step, delta in enumerate(deltas):
            await view.advance([delta], 2 * step, 2 * step + 2)
        return view


@pytest.mark.parametrize("fuse", [None, True, False])
async def test_flips_and_several_hidden_states(fuse: bool | None) -> None:
    view = await maintained(distinct_plan(), DELTAS, fuse=fuse)
    keys: list[set[Any]] = [{1}, {1, None}, {1, 2, None}, {1, None}, {None}, {None}]
    for time, expected in enumerate(keys):
        found = accumulated(view.output, time)
        assert found == dict.fromkeys(((key,) for key in expected), 1), time
    rows = [2, 3, 3, 2, 2, 1]
    # The global one has its row from its first change on.
    for time, count in enumerate(rows):
        assert accumulated(view.hidden[1], time) == {(count,): 1}, time
    sums: dict[Any, int] = {}
    for (key, count), weight in accumulated(view.hidden[0], 9).items():
        sums[key] = sums.get(key, 0) + count * weight
    assert {key: count for key, count in sums.items() if count} == {None: 1}


async def test_rows_read_are_those_that_lookups_return() -> None:
    many: list[Any] = [[((key, 0), 0, 1) for key in range(50)], *DELTAS[1:]]
    view = await maintained(distinct_plan(), many, fuse=False)
    assert len(view.rows_read) == 3
    assert view.rows_read[0] == 0
    assert view.rows_read[1] <= 3
    whole = await maintained(distinct_plan(), many, fuse=True)
    assert whole.rows_read[1] == 51


def null_key_plan() -> DeltaPlan:
    """Pairs of new rows with the old ones that have no key: looked up by a NULL."""
    left = SelectColumns(NamedInput("d0", ("x",)), (NamedExpression("a", "x"),))
    right = SelectColumns(
        NamedInput("s0", ("k", "x")), (NamedExpression("k", "k"), NamedExpression("b", "x"))
    )
    node = SelectColumns(PairRows(left, right, ()), (NamedExpression("k", "a"),))
    lookups = (StateLookup("s0", ("k",), (("d0", ("",)),)),)
    return DeltaPlan(
        ("t",), (T,), KEY, "", "incremental", "", (PlanStratum(lookups, node, ("d0", "s0")),)
    )


async def test_an_origin_without_a_name_is_null() -> None:
    deltas: list[Any] = [[((None, 1), 0, 1), ((7, 2), 0, 1)], [((3, 5), 2, 1)]]
    view = await maintained(null_key_plan(), deltas, fuse=False)
    assert view.output == [((5,), 2, 1)]
    assert view.rows_read == [0, 1]


async def test_from_scratch_all_changes_are_covered() -> None:
    plan = await compile_view(
        "select k, min(x) as lo from t group by k", {"t": T}, analyze_in_memory
    )
    assert plan.covered
    async with ActorSystem(seed=1) as system:
        engine = EngineCaller(system.spawn(InMemoryExecutor, "engine"), "t")
        view = MaintainedView(engine, plan, "v")
        await view.prepare()
        await view.advance([[((1, 5), 1, 1)]], 0, 2)
        # The next time is computed anew; the step after it goes on from its states.
        view.in_error = True
        await view.advance([[((1, 3), 2, 1), ((1, 4), 2, 1)]], 2, 3)
        await view.advance([[((1, 3), 3, -1)]], 3, 4)
    assert [accumulated(view.output, time) for time in (1, 2, 3)] == [
        {(1, lo): 1} for lo in (5, 3, 4)
    ]


async def test_a_lookup_from_rows_that_nobody_looked_up_is_told() -> None:
    plan = null_key_plan()
    lookup = StateLookup("s0", ("k",), (("s0", ("x",)),))
    stratum = msgspec.structs.replace(plan.strata[0], lookups=(lookup,))
    with anyio.fail_after(PATIENCE_S), pytest.raises(InvalidUsage, match="looked up s0 before"):
        await maintained(msgspec.structs.replace(plan, strata=(stratum,)), DELTAS, fuse=False)


def test_state_is_found_by_any_key_null_safe() -> None:
    state = WeightedRows(T)
    state.add([((None, 1), 3, 1), ((1, 1), 4, 2)])
    assert state.find(("k",), [(None,)]) == {(None, 1)}
    state.add([((None, 2), 5, 1), ((None, 1), 5, -1)])
    assert state.find(("k",), [(None,), (1,)]) == {(None, 2), (1, 1)}
    assert state.find(("x", "k"), [(1, 1)]) == {(1, 1)}
    assert state.weighted(state.all(), 9) == [(row, 9, 2 if row[0] else 1) for row in state.all()]
