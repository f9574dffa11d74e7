"""The in-memory executor: jobs, files, cancelling, holding, failing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.engine.views.compile import compile_view
from actors.model.plan.jobs import (
    AnalyzeStatement,
    CancelJob,
    ComputeDifference,
    ForgetPlan,
    Job,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RunStep,
    SubmitJob,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.runtime.errors import (
    DefiniteError,
    EngineLost,
    InvalidUsage,
    OperationCanceled,
    QueryRejected,
)
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.testing.engine import EngineControls, InMemoryExecutor, relation_of, table_of
from actors.testing.maintain import EngineCaller
from actors.testing.nodes import NodeRelation

T = TableSchema((TableColumn("a", "int"), TableColumn("g", "string")))


class Bench:
    def __init__(self, system: ActorSystem) -> None:
        self.controls = EngineControls()
        self.address: ActorAddress[Any] = system.spawn(
            lambda: InMemoryExecutor(self.controls), "engine"
        )
        self.engine = EngineCaller(self.address, "t")

    async def run(self, job: Job) -> Any:
        return await self.engine.run(job)

    async def prepared(self, sql: str) -> str:
        plan = await compile_view(sql, {"t": T}, self.engine.analyze())
        self.last = len(plan.strata) - 1
        await self.run(PreparePlan("p", "v", plan))
        return "v"


def with_bench(body: Callable[[Bench], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """A test with a separate engine, started and stopped in the test's own task."""

    async def test() -> None:
        with anyio.fail_after(30):
            async with ActorSystem(seed=1) as system:
                await body(Bench(system))

    return test


def rows(*updates: tuple[tuple[Any, ...], int, int]) -> JobRows:
    columns = tuple((column.name, column.type) for column in T.columns)
    return JobRows(schema=T, arrow=to_ipc(table_of(NodeRelation(columns, list(updates)))))


@with_bench
async def test_a_step_runs_the_prepared_plan(bench: Bench) -> None:
    name = await bench.prepared("select g, count(*) as n from t group by g")
    made = await bench.run(
        RunStep("s", name, 0, bench.last, {"d0": rows(((1, "x"), 3, 1), ((2, "x"), 4, 1))}, 3, 5)
    )
    table = from_ipc(made.arrow).to_pylist()
    output = [row for row in table if row["__to"] & 1]
    assert [(r["o_g"], r["o_n"], r["__time"], r["__diff"]) for r in output] == [
        ("x", 1, 3, 1),
        ("x", 1, 4, -1),
        ("x", 2, 4, 1),
    ]
    assert made.rows == len(table)
    assert bench.controls.counts["Step"] == 1


def test_rows_come_from_files_within_their_interval(tmp_path: Path) -> None:
    given = rows(((1, "x"), 1, 1), ((2, "y"), 5, 1), ((3, "z"), 9, 1))
    assert given.arrow is not None
    part = tmp_path / "part.parquet"
    pq.write_table(from_ipc(given.arrow), part)
    file = tmp_path / "rows.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, T.arrow_updates()) as writer:
        writer.write_table(from_ipc(given.arrow))
    found = relation_of(
        JobRows(
            schema=T,
            arrow_file=str(file),
            files=(str(part),),
            lower=2,
            upper=9,
            advance_to=4,
        )
    )
    assert [(row[0], time) for row, time, _ in found.updates] == [(1, 4), (2, 5), (3, 9), (2, 5)]


@with_bench
async def test_difference_is_the_query_less_the_old(bench: Bench) -> None:
    output = TableSchema((TableColumn("g", "string"), TableColumn("n", "bigint")))
    sql = "select g, count(*) as n from t group by g having count(*) > 1"
    old = JobRows(
        schema=output,
        arrow=to_ipc(
            table_of(NodeRelation((("g", "string"), ("n", "bigint")), [(("y", 5), 1, 1)]))
        ),
    )
    tables = (("t", rows(((1, "x"), 1, 2), ((2, "y"), 1, 1))),)
    made = await bench.run(ComputeDifference("d", sql, tables, output, 7, old))
    assert {tuple(row.values()) for row in from_ipc(made.arrow).to_pylist()} == {
        ("x", 2, 7, 1),
        ("y", 5, 7, -1),
    }


@with_bench
async def test_errors_of_the_data_are_definite_on_both_routes(bench: Bench) -> None:
    name = await bench.prepared("select 1 / a as r from t")
    with pytest.raises(DefiniteError, match="DIVIDE_BY_ZERO"):
        await bench.run(RunStep("s", name, 0, 0, {"d0": rows(((0, "x"), 1, 1))}, 1, 2))
    output = TableSchema((TableColumn("r", "double"),))
    tables = (("t", rows(((0, "x"), 1, 1))),)
    with pytest.raises(DefiniteError, match="DIVIDE_BY_ZERO"):
        await bench.run(ComputeDifference("d", "select 1 / a as r from t", tables, output, 1))


@with_bench
async def test_refusals_reach_the_caller(bench: Bench) -> None:
    with pytest.raises(QueryRejected):
        await bench.run(AnalyzeStatement("a", (("t", T),), "select nothing from t"))
    with pytest.raises(InvalidUsage, match="not prepared"):
        await bench.run(RunStep("s", "unknown", 0, 0, {}, 0, 1))


@with_bench
async def test_a_forgotten_plan_is_gone(bench: Bench) -> None:
    name = await bench.prepared("select a from t")
    assert isinstance(await bench.run(ForgetPlan("f", name)), PlanPrepared)
    with pytest.raises(InvalidUsage):
        await bench.run(RunStep("s", name, 0, 0, {}, 0, 1))


@with_bench
async def test_a_held_job_waits_and_can_be_cancelled(bench: Bench) -> None:
    name = await bench.prepared("select a from t")
    bench.controls.hold("Step")
    done: list[str] = []

    async def step(job_id: str) -> None:
        try:
            await bench.run(RunStep(job_id, name, 0, 0, {}, 0, 1))
            done.append(f"{job_id} done")
        except OperationCanceled:
            done.append(f"{job_id} canceled")

    async with anyio.create_task_group() as group:
        group.start_soon(step, "one")
        group.start_soon(step, "two")
        await bench.controls.wait_started("Step", 2)
        assert done == []
        await bench.address.send(CancelJob("one"))
        while not done:
            await anyio.lowlevel.checkpoint()
        assert done == ["one canceled"]
        bench.controls.release("Step")
    assert done == ["one canceled", "two done"]


@with_bench
async def test_the_next_job_fails_as_told(bench: Bench) -> None:
    bench.controls.fail_next("Analyze", EngineLost("gone"))
    job = AnalyzeStatement("a", (("t", T),), "select a from t")
    with pytest.raises(EngineLost):
        await bench.run(job)
    assert (await bench.run(job)).schema.names == ("a",)


@with_bench
async def test_an_answer_may_be_asked_for_without_the_helper(bench: Bench) -> None:
    answer: Any = await bench.address.ask(
        lambda reply: SubmitJob(AnalyzeStatement("a", (("t", T),), "select g from t"), reply), 5_000
    )
    assert answer.schema.names == ("g",)
