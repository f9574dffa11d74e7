"""Filters by the clock: where comparisons turn, and views over them, exact at every millisecond."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from view_steps import follow  # type: ignore[import-not-found]

from actors.durable.persist import PersistClient
from actors.engine.views.delta import derive
from actors.engine.views.fingerprint import FULL, with_policy
from actors.engine.views.rule_temporal import first_ms
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    GroupKey,
    JoinNode,
    NamedExpression,
    Plan,
    ProjectNode,
    ScanNode,
    TemporalFilter,
    TimeBound,
    TimeEdge,
    ViewPlan,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import QueryRejected
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.engine import InMemoryExecutor
from actors.testing.maintain import EngineCaller, MaintainedView, accumulated
from actors.testing.stage import ScriptStage
from suite_lanes import examples  # type: ignore[import-not-found]

DAY = 86_400_000_000
TABLES = {
    "event": TableSchema(
        (TableColumn("k", "int"), TableColumn("a", "bigint"), TableColumn("b", "bigint"))
    ),
    "kind": TableSchema((TableColumn("k", "int"), TableColumn("name", "string"))),
}
TYPES = (("i0_k", "int"), ("i0_a", "bigint"), ("i0_b", "bigint"))
"""Times of the tables are microseconds, in whole numbers: the engine in memory has no instants."""


# -- where a comparison turns ----------------------------------------------------------------------


def value_of(text: str, micros: int) -> int:
    """The number that a formula of `first_ms` makes."""
    python = re.sub(r"(\d)L", r"\1", text).replace(" div ", " // ")
    found = eval(python, {"pmod": lambda a, b: a % b, "m": micros})
    assert isinstance(found, int)
    return found


@given(
    micros=st.integers(-3 * DAY, 3 * DAY),
    strict=st.booleans(),
    before=st.integers(-2 * DAY, 2 * DAY) | st.integers(-1500, 1500),
    unit=st.sampled_from([1, DAY]),
    after=st.integers(-2, 2).map(lambda days: days * DAY),
)
@example(micros=0, strict=False, before=0, unit=1, after=0)
@example(micros=-1, strict=True, before=0, unit=1, after=0)
@example(micros=-DAY, strict=True, before=0, unit=DAY, after=DAY)
def test_a_comparison_turns_at_the_first_millisecond(
    micros: int, strict: bool, before: int, unit: int, after: int
) -> None:
    edge = TimeEdge("m", ends=False, strict=strict, before=before, unit=unit, after=after)

    def has_turned(ms: int) -> bool:
        clock = (ms * 1000 + before) // unit * unit + after
        return clock > micros if strict else clock >= micros

    found = value_of(first_ms("m", edge), micros)
    assert has_turned(found)
    assert not has_turned(found - 1)


# -- views -----------------------------------------------------------------------------------------

LATER = TimeBound("a <= now", (TimeEdge("i0_a", ends=False, strict=False),))
SOONER = TimeBound("b > now - 2 ms", (TimeEdge("i0_b", ends=True, strict=False, before=-2000),))
EQUAL = TimeBound(
    "a = now",
    (TimeEdge("i0_a", ends=False, strict=False), TimeEdge("i0_a", ends=True, strict=True)),
)
BOUNDS = {"from": (LATER,), "until": (SOONER,), "between": (LATER, SOONER), "at": (EQUAL,)}
EVENTS = ScanNode(0, (("i0_k", "k"), ("i0_a", "a"), ("i0_b", "b")))


def root_of(shape: str, bounds: tuple[TimeBound, ...]) -> tuple[ProjectNode, TableSchema]:
    rows: Plan = TemporalFilter(EVENTS, bounds, TYPES)
    if shape == "counted":
        calls = (AggregateCall("a0_n", "count", None, "bigint"),)
        rows = AggregationNode(rows, (GroupKey("k0", "i0_k", "int"),), calls)
        pair = (NamedExpression("k", "k0"), NamedExpression("n", "a0_n"))
        return ProjectNode(rows, pair), TableSchema(
            (TableColumn("k", "int"), TableColumn("n", "bigint"))
        )
    if shape == "joined":
        names = ScanNode(1, (("i1_k", "k"), ("i1_name", "name")))
        types = (*TYPES, ("i1_k", "int"), ("i1_name", "string"))
        rows = JoinNode((rows, names), (ColumnEquality("i0_k", "i1_k"),), (), types)
        pair = (NamedExpression("a", "i0_a"), NamedExpression("name", "i1_name"))
        return ProjectNode(rows, pair), TableSchema(
            (TableColumn("a", "bigint"), TableColumn("name", "string"))
        )
    if shape == "twice":
        rows = TemporalFilter(rows, (SOONER,), TYPES)
    named = (
        NamedExpression("k", "i0_k"),
        NamedExpression("a", "i0_a"),
        NamedExpression("b", "i0_b"),
    )
    return ProjectNode(rows, named), TABLES["event"]


def plan_of(shape: str, bounds: tuple[TimeBound, ...]) -> DeltaPlan:
    root, output = root_of(shape, bounds)
    schemas = tuple(TABLES.values())
    derived = derive(ViewPlan(tuple(TABLES), root, output), schemas)
    return DeltaPlan(
        inputs=tuple(TABLES),
        input_schemas=schemas,
        output=output,
        sql="",
        mode=derived.mode,
        reason=derived.reason,
        strata=derived.strata,
        hidden=derived.hidden,
    )


def is_there(row: tuple[Any, ...], bounds: tuple[TimeBound, ...], ms: int) -> bool:
    """Whether a row of `event` passes at a time, from what the bounds say."""
    for edge in (edge for bound in bounds for edge in bound.edges):
        micros = row[1 if edge.micros == "i0_a" else 2]
        if micros is None:
            return False
        clock = ms * 1000 + edge.before
        turned = clock > micros if edge.strict else clock >= micros
        if turned == edge.ends:
            return False
    return True


def expected(
    shape: str, bounds: tuple[TimeBound, ...], tables: dict[str, Counter[Any]], ms: int
) -> Counter[Any]:
    bounds = (*bounds, SOONER) if shape == "twice" else bounds
    rows = {row: n for row, n in tables["event"].items() if is_there(row, bounds, ms)}
    found: Counter[Any] = Counter()
    if shape == "counted":
        groups: Counter[Any] = Counter()
        for row, n in rows.items():
            groups[row[0]] += n
        return Counter((k, n) for k, n in groups.items())
    if shape == "joined":
        for row, n in rows.items():
            for (k, name), m in tables["kind"].items():
                if k == row[0] and k is not None:
                    found[row[1], name] += n * m
        return found
    return Counter(rows)


moments = st.none() | st.integers(-2000, 14_000)
events = st.tuples(st.none() | st.integers(0, 2), moments, moments)
kinds = st.tuples(st.integers(0, 2), st.sampled_from("xy"))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, str, Any, int]], list[int]]:
    there: dict[str, list[Any]] = {"event": [], "kind": []}
    updates = []
    for time in sorted(draw(st.lists(st.integers(1, 11), min_size=1, max_size=14))):
        table = draw(st.sampled_from(["event", "event", "kind"]))
        if there[table] and draw(st.integers(0, 2)) == 0:
            gone = there[table].pop(draw(st.integers(0, len(there[table]) - 1)))
            updates.append((time, table, gone, -1))
        else:
            row = draw(events if table == "event" else kinds)
            there[table].append(row)
            updates.append((time, table, row, draw(st.sampled_from([1, 1, 2]))))
            there[table] += [row] * (updates[-1][3] - 1)
    return updates, sorted({1, *draw(st.sets(st.integers(1, 17))), 18})


def dense_history(seed: int) -> tuple[list[tuple[int, str, Any, int]], list[int]]:
    """Rows that come and go at whole milliseconds, which are seldom drawn, and between them; the
    steps end where nothing is written, too."""
    dice = random.Random(seed)
    updates: list[tuple[int, str, Any, int]] = [(1, "kind", (k, "xyx"[k]), 1) for k in range(3)]
    for time in range(1, 11, 3):
        for _ in range(6):
            turn = 1000 * (time + dice.randrange(-1, 6)) + dice.choice([0, 0, 0, 1, 500])
            row = (dice.choice([None, 0, 1, 2]), turn, turn + dice.randrange(4000))
            updates.append((time, "event", row, dice.choice([1, 1, 2])))
    return updates, [1, 6, 7, 12, 18]


async def maintained(shape: str, bounds: str, history: Any, cuts: list[int]) -> tuple[int, int]:
    """Returns how many rows were compared, and how many went as time passed."""
    plan = plan_of(shape, BOUNDS[bounds])
    assert plan.temporal
    async with ActorSystem(seed=1) as system:
        view = MaintainedView(
            EngineCaller(system.spawn(InMemoryExecutor, "engine"), "t"), plan, "v"
        )
        await follow(view, history, cuts)
    compared = gone = 0
    written = {time for time, *_ in history}
    before: Counter[Any] = Counter()
    for ms in range(cuts[0] - 1, cuts[-1]):
        tables = {
            name: accumulated(((row, t, d) for t, each, row, d in history if each == name), ms)
            for name in TABLES
        }
        found = accumulated(view.output, ms)
        assert found == expected(shape, BOUNDS[bounds], tables, ms), ms
        compared += len(found)
        gone += (before - found).total() if ms not in written else 0
        before = found
    (due,) = {plan.hidden[0].schema.names.index(plan.hidden[0].due)}
    assert all(row[due] >= cuts[-1] for row in accumulated(view.hidden[0], cuts[-1]))
    return compared, gone


@pytest.mark.sampled
@pytest.mark.parametrize("shape", ["rows", "counted", "joined", "twice"])
@pytest.mark.parametrize("bounds", sorted(BOUNDS))
def test_rows_come_and_go_exactly_in_their_millisecond(shape: str, bounds: str) -> None:
    compared = gone = 0

    @settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
    @given(history=histories())
    @example(history=dense_history(1))
    def maintain(history: tuple[Any, list[int]]) -> None:
        nonlocal compared, gone
        found = anyio.run(maintained, shape, bounds, *history)
        compared, gone = compared + found[0], gone + found[1]

    maintain()
    assert compared > 0
    # A filter with a lower bound alone lets rows come, and nothing go but the counts that change.
    assert (gone > 0) == (bounds != "from" or shape in ("counted", "twice"))


# -- as dataflows ----------------------------------------------------------------------------------


async def run_live(
    folder: Path, shape: str, history: Any, ends: list[int], bytes_max: int
) -> dict[int, int]:
    """Dataflows over real shards: written in groups, started anew behind each, compared always.
    Returns the number of the view's rows by time."""
    counts = {}
    changes = {"inflight_bytes_per_dataflow_max": bytes_max, "hidden_rows_whole_max": 1}
    limits = msgspec.structs.replace(Settings(), **changes)
    plan = plan_of(shape, BOUNDS["between"])
    async with ActorSystem(seed=1) as system:
        executor = system.spawn(InMemoryExecutor, "engine")
        persist = await PersistClient.in_memory(limits, SystemClock())
        stage = ScriptStage(system, executor, persist, folder, limits, "temporal")
        stage.wait_seconds = 60
        try:
            await stage.open(TABLES, {"v": plan})
            lo = 0
            for hi in ends:
                rows = {
                    name: [(row, t, d) for t, each, row, d in history if each == name]
                    for name in TABLES
                }
                within = {n: [u for u in found if lo <= u[1] < hi] for n, found in rows.items()}
                await stage.write(within, hi)
                await stage.start(hi - 1, limits)
                await stage.wait(hi)
                times = range(lo or hi - 1, hi)
                found = await stage.contents("v", times)
                for ms in times:
                    tables = {name: accumulated(rows[name], ms) for name in TABLES}
                    wanted = expected(shape, BOUNDS["between"], tables, ms)
                    assert found[ms] == wanted, ms
                    counts[ms] = len(wanted)
                await stage.stop()
                lo = hi
        finally:
            await stage.stop()
            await persist.close()
    return counts


@pytest.mark.parametrize("shape", ["rows", "counted", "joined"])
@pytest.mark.parametrize("bytes_max", [1, 1 << 24])
def test_dataflows_follow_the_clock_over_restarts(
    tmp_path: Path, shape: str, bytes_max: int
) -> None:
    draw = random.Random(f"{shape} {bytes_max}")
    history: list[tuple[int, str, Any, int]] = []
    for time in range(1, 40):
        micros = [draw.randrange(time - 5, time + 9) * 1000 + draw.choice([0, 1, 999, 500])]
        micros.append(micros[0] + draw.randrange(9000))
        history.append((time, "event", (draw.randrange(3), *micros), 1))
        if draw.random() < 0.3:
            history.append((time, "kind", (draw.randrange(3), "x"), 1))
        if draw.random() < 0.3:
            gone = draw.choice([change for change in history if change[3] == 1])
            if (time, *gone[1:3], -1) not in history and (gone[1:3], -1) not in [
                (each[1:3], each[3]) for each in history
            ]:
                history.append((time, *gone[1:3], -1))
    counts = anyio.run(run_live, tmp_path, shape, history, [10, 12, 30, 41, 60], bytes_max)
    assert list(counts) == list(range(9, 60))
    # The last rows are written at 39, and go within 20 milliseconds.
    assert max(counts.values()) > 0
    assert counts[59] == 0


def test_a_view_that_follows_the_clock_is_never_recomputed() -> None:
    with pytest.raises(QueryRejected, match="compares rows with the clock"):
        with_policy(plan_of("rows", BOUNDS["from"]), FULL)
    assert plan_of("joined", BOUNDS["between"]).mode == "incremental"
