"""Compiled views on the in-memory engine: right at every time, however changes arrive."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    PAIRS,
    SETTINGS,
    House,
    contents,
    rows_of,
    shard,
    surroundings,
    table,
    write,
)
from msgspec.structs import replace

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import ConsolidateRows, DeltaPlan, FilterRows, NamedInput, PlanStratum
from actors.model.plan.jobs import ComputeDifference, Job, JobRows, RunStep
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import DataflowDescription, ShardImport, ViewExport
from actors.replica.dataflow import view as view_stages
from actors.replica.dataflow.events import DataflowPhase
from actors.replica.dataflow.filling import fill_hidden
from actors.replica.dataflow.policy import StepChoice, StepChooser
from actors.runtime.settings import Settings
from actors.testing.analysis import analyze_in_memory
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.oracle import run_query

VIEWS = {
    "filter": "select k, v from l where v > 2",
    "join": "select l.k, l.v, r.v as w from l join r on l.k = r.k where l.v <> 1",
    "self join": "select a.v, b.v as w from l a join l b on a.k = b.v",
    "groups": "select k, count(*) as n, sum(v) as s from l group by k having count(*) > 1",
    "global": "select count(*) as n, sum(v) as s from l",
    "join groups": "select r.v as g, count(*) as n, avg(l.v) as a from l join r on l.k = r.k"
    " group by r.v",
    "opaque": "select k from l intersect select v from r",
}
OPAQUE = {"opaque"}


async def _description(persist: Any, sql: str) -> tuple[DataflowDescription, DeltaPlan]:
    plan = await compile_view(sql, {"l": PAIRS, "r": PAIRS}, analyze_in_memory)
    await shard(persist, "out", plan.output)
    hidden = tuple(f"hidden{index}" for index in range(len(plan.hidden)))
    for name, state in zip(hidden, plan.hidden, strict=True):
        await shard(persist, name, state.schema)
    imports = tuple(ShardImport(name, PAIRS) for name in plan.inputs)
    export = ViewExport(plan, "out", hidden)
    return DataflowDescription("u1", "view", imports, export, 0), plan


class Tables:
    """Two tables that change at random; every change takes one time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.history: dict[str, list[tuple[int, tuple[int, int], int]]] = {"l": [], "r": []}
        self.upper = 1

    def changes(self, times: int) -> dict[str, list[tuple[int, int, int, int]]]:
        """Changes of the next `times` times, per table."""
        made: dict[str, list[tuple[int, int, int, int]]] = {"l": [], "r": []}
        for time in range(self.upper, self.upper + times):
            for name in made:
                for _ in range(self.random.choice([0, 0, 1, 2, 3])):
                    row, diff = self._change(name)
                    self.history[name].append((time, row, diff))
                    made[name].append((*row, time, diff))
        self.upper += times
        return made

    def _change(self, name: str) -> tuple[tuple[int, int], int]:
        present = [row for row, count in self.at(name, 1 << 60).items() if count > 0]
        if present and self.random.random() < 0.4:
            return self.random.choice(present), -1
        return (self.random.randrange(4), self.random.randrange(5)), 1

    def at(self, name: str, time: int) -> Counter[tuple[int, int]]:
        """Contents of a table."""
        found: Counter[tuple[int, int]] = Counter()
        for at, row, diff in self.history[name]:
            if at <= time:
                found[row] += diff
        return found


def expected(plan: DeltaPlan, tables: Tables, time: int) -> list[tuple[Any, ...]]:
    """The view's contents, as the oracle computes them."""
    given: dict[str, tuple[TableSchema, Counter[tuple[int, int]]]] = {
        name: (PAIRS, +tables.at(name, time)) for name in plan.inputs
    }
    found = run_query(plan.sql, given, plan.output)
    return sorted(((*row, count) for row, count in found.items()), key=repr)


SMALL = {
    "usual": {},
    "hidden by key": {"hidden_rows_whole_max": 1},
    "state scanned": {"lookup_rows_max": 1},
    "rows in files": {"engine_inline_bytes_max": 1, "lookup_rows_max": 1},
    "halved by pairs": {"step_pairs_max": 1},
}
"""Limits so small that a step takes its other path."""


@pytest.mark.parametrize("limits", SMALL)
@pytest.mark.parametrize("view", VIEWS)
async def test_a_view_is_right_at_every_time(tmp_path: Path, view: str, limits: str) -> None:
    seed = list(SMALL).index(limits) + 5
    counts, jobs = await _live(tmp_path, view, seed, replace(SETTINGS, **SMALL[limits]), None)
    assert len(counts) > 5
    assert max(counts) > 0
    assert any(rows.arrow_file for rows in given_rows(jobs)) == (limits == "rows in files")


@pytest.mark.parametrize("view", sorted(set(VIEWS) - OPAQUE))
async def test_a_view_is_right_however_steps_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    """Recomputed whole at each of a step's times, or stepped, as drawn."""
    drawn = Random(11)
    choices: list[StepChoice] = []

    def choose(*_: object) -> StepChoice:
        choices.append(StepChoice(drawn.random() < 0.5, None, None))
        return choices[-1]

    monkeypatch.setattr(StepChooser, "choose", choose)
    await _live(tmp_path, view, 11, SETTINGS, None)
    assert len({choice.full for choice in choices}) == 2


@pytest.mark.parametrize("view", ["join groups", "opaque"])
async def test_parts_reach_the_engine_as_files(tmp_path: Path, view: str) -> None:
    settings = replace(SETTINGS, inline_part_bytes_max=1, lookup_rows_max=1)
    counts, jobs = await _live(tmp_path, view, 7, settings, tmp_path / "state")
    assert max(counts) > 0
    assert any(rows.files for rows in given_rows(jobs))


def given_rows(jobs: list[Job]) -> list[JobRows]:
    """The inputs of all steps and differences."""
    found = [rows for job in jobs if isinstance(job, RunStep) for rows in job.inputs.values()]
    differences = [job for job in jobs if isinstance(job, ComputeDifference)]
    return found + [rows for job in differences for _, rows in job.tables]


async def _live(
    tmp_path: Path, view: str, seed: int, settings: Settings, state: Path | None
) -> tuple[list[int], list[Job]]:
    """Several lives of one view, with changes and compaction between and during them; returns the
    number of the view's rows at each time, which were right, and the engine's jobs."""
    tables, names, counts, controls = Tables(seed), itertools.count(), [], EngineControls()
    async with surroundings(state, settings) as (system, persist):
        for name in ("l", "r"):
            await shard(persist, name, PAIRS)
            await write(persist, name, 1, table(PAIRS, (1, 1, 0, 1), (2, 1, 0, 1)))
            tables.history[name] = [(0, (1, 1), 1), (0, (2, 1), 1)]
        description, plan = await _description(persist, VIEWS[view])
        assert (plan.mode == "opaque") == (view in OPAQUE), plan.reason
        house: Any = None
        for _ in range(5):
            if house is None or tables.random.random() < 0.3:
                if house is not None:
                    await house.stop()
                engine = InMemoryExecutor(controls)
                name = f"life{next(names)}"
                house = House(
                    system,
                    persist,
                    tmp_path,
                    description,
                    engine=engine,
                    name=name,
                    settings=settings,
                )
                await house.start()
            made = tables.changes(tables.random.randint(1, 4))
            for table_name, rows in made.items():
                await write(persist, table_name, tables.upper, table(PAIRS, *rows))
            await house.reported(tables.upper)
            for shard_name in ("l", "r", "out"):
                await persist.maintain(shard_name)
        for time in range(tables.upper):
            found = await contents(persist, "out", plan.output, time)
            assert found == expected(plan, tables, time), f"at {time}"
            counts.append(len(found))
    return counts, controls.jobs


async def test_changes_that_no_view_looks_at_run_no_job(tmp_path: Path) -> None:
    """Of another column, of rows that WHERE drops, and such as cancel one another."""
    strata = (PlanStratum((), FilterRows(NamedInput("d0", ("k",)), "k > 5"), ("d0",)),)
    keys = TableSchema(PAIRS.columns[:1])
    plan = DeltaPlan(("l",), (PAIRS,), keys, "", "incremental", "", strata)
    jobs: list[int] = []

    def passed(job: RunStep) -> pa.Table:
        jobs.append(rows_of(job.inputs["d0"]).num_rows)
        return rows_of(job.inputs["d0"])

    async with surroundings(None, SETTINGS) as (system, persist):
        await shard(persist, "l", PAIRS)
        await shard(persist, "out", keys)
        await write(persist, "l", 1, table(PAIRS, (9, 1, 0, 1)))
        imports, export = (ShardImport("l", PAIRS),), ViewExport(plan, "out", ())
        description = DataflowDescription("u1", "view", imports, export, 0)
        house = House(system, persist, tmp_path, description, view=passed)
        await house.start()
        await house.reported(1)
        jobs.clear()
        await write(persist, "l", 2, table(PAIRS, (9, 1, 1, -1), (9, 2, 1, 1)))
        await write(persist, "l", 3, table(PAIRS, (4, 1, 2, 1), (3, 1, 2, 1)))
        await write(persist, "l", 4, table(PAIRS, (7, 1, 3, 1), (7, 1, 3, -1)))
        await house.reported(4)
        assert jobs == []
        await write(persist, "l", 5, table(PAIRS, (4, 1, 4, -1), (8, 1, 4, 1)))
        await house.reported(5)
        assert jobs == [1]
        assert await contents(persist, "out", keys, 4) == [(8, 1), (9, 1)]


async def test_while_steps_change_nothing_the_first_stratum_runs_alone(tmp_path: Path) -> None:
    """A view of the large values, in two strata of which the second reads the first alone."""
    small = ConsolidateRows(FilterRows(NamedInput("d0", ("k", "v")), "v + 0 > 5"))
    strata = (
        PlanStratum((), small, ("d0",)),
        PlanStratum((), NamedInput("r0", ("k", "v")), ("r0",)),
    )
    plan = DeltaPlan(("l",), (PAIRS,), PAIRS, "", "incremental", "", strata)
    jobs: list[tuple[int, int]] = []

    def large(job: RunStep) -> pa.Table:
        jobs.append((job.first, job.last))
        given = rows_of(job.inputs["d0"])
        return given.filter(pc.greater(given["v"], 5))

    async with surroundings(None, SETTINGS) as (system, persist):
        for name in ("l", "out"):
            await shard(persist, name, PAIRS)
        await write(persist, "l", 1, table(PAIRS, (1, 9, 0, 1)))
        imports, export = (ShardImport("l", PAIRS),), ViewExport(plan, "out", ())
        description = DataflowDescription("u1", "view", imports, export, 0)
        house = House(system, persist, tmp_path, description, view=large)
        await house.start()
        await house.reported(1)
        whole, alone, there = [(0, 1)], [(0, 0)], [(1, 9, 1)]
        steps = [(1, whole), (2, whole), (3, whole), (4, alone), (7, alone + whole), (8, whole)]
        for time, (v, expected_jobs) in enumerate(steps, start=1):
            jobs.clear()
            await write(persist, "l", time + 1, table(PAIRS, (2, v, time, 1)))
            await house.reported(time + 1)
            assert jobs == expected_jobs, time
            there += [(2, v, 1)] if v > 5 else []
            assert await contents(persist, "out", PAIRS, time) == sorted(there, key=repr)


async def test_a_view_is_readable_before_its_hidden_states_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun = anyio.Event(), anyio.Event()

    async def late(*args: Any) -> None:
        begun.set()
        await read.wait()
        await fill_hidden(*args)

    monkeypatch.setattr(view_stages, "fill_hidden", late)
    async with surroundings() as (system, persist):
        await shard(persist, "l", PAIRS)
        await write(persist, "l", 2, table(PAIRS, (1, 5, 1, 1)))
        description, plan = await _description(persist, VIEWS["groups"])
        description = replace(description, as_of=1)
        house = House(system, persist, tmp_path, description, engine=InMemoryExecutor())
        await house.start()
        await house.reported(2)
        await begun.wait()
        # Steps without rows go on, and the others wait.
        await write(persist, "l", 4, table(PAIRS))
        await house.reported(4)
        await write(persist, "l", 6, table(PAIRS, (1, 6, 5, 1)))
        with anyio.fail_after(200):
            while not house.rests_in(DataflowPhase.RUNNING):
                await anyio.lowlevel.checkpoint()
        read.set()
        await house.reported(6)
        assert await contents(persist, "out", plan.output, 5) == [(1, 2, 11, 1)]
        await house.stop()
