"""The engine's actor with Spark: what must hold of a real child process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.engine.spark_executor import SparkExecutor
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    NamedInput,
    PlanStratum,
    SelectColumns,
)
from actors.model.plan.jobs import (
    AnalyzeStatement,
    CancelJob,
    ComputeDifference,
    ExecutorMessage,
    InspectJobs,
    Job,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RunStep,
    SubmitJob,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.runtime.errors import EngineUnavailable, OperationCanceled
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives
from processes import wait_dead  # type: ignore[import-not-found]

TABLE = TableSchema((TableColumn("v", "bigint"),))


def analyze(name: str) -> AnalyzeStatement:
    return AnalyzeStatement(name, (), "SELECT 1")


SLEEPS = "java_method('java.lang.Thread', 'sleep', 3600000L) IS NOT NULL"
ENDS = "java_method('java.lang.System', 'getenv', '{}') = 'ends'"
FOREVER = "SELECT sum(hash(a.id * b.id)) AS v FROM range(10000000) a CROSS JOIN range(10000000) b"


def rows(*updates: tuple[int | None, int, int]) -> JobRows:
    columns = zip(*updates, strict=True)
    table = pa.table([pa.array(c, pa.int64()) for c in columns], TABLE.arrow_updates())
    return JobRows(TABLE, arrow=to_ipc(table))


def difference(name: str, sql: str) -> ComputeDifference:
    return ComputeDifference(name, sql, (("t", rows((1, 1, 1))),), TABLE, 9)


def slow_plan(variable: str) -> DeltaPlan:
    """Its step gives ``v + 1``, in a JVM with that variable of the environment; in others never."""
    slow = f"IF({ENDS.format(variable)} OR {SLEEPS}, v + 1, v + 1)"
    node = ConsolidateRows(SelectColumns(NamedInput("d0", ("v",)), (NamedExpression("v", slow),)))
    strata = (PlanStratum((), node, ()),)
    return DeltaPlan(("t",), (TABLE,), TABLE, "", "incremental", "", strata)


async def ask(address: ActorAddress[ExecutorMessage], job: Job) -> Any:
    return await address.ask(lambda reply: SubmitJob(job, reply), 200_000)


def description(system: ActorSystem) -> str:
    return next(text for path, text in system.describe() if path == "/engine")


def pids(system: ActorSystem) -> tuple[int, int]:
    """The child's and the JVM's, as the actor describes itself."""
    text = description(system)
    found = re.search(r"child (\d+), JVM (\d+)", text)
    assert found, text
    return int(found.group(1)), int(found.group(2))


class Canceler:
    """Runs a job that never ends; it must end as canceled when the cancel is handled."""

    def __init__(self, address: ActorAddress[ExecutorMessage]) -> None:
        self.address = address

    async def __call__(self, job: Job, before: Callable[[], Any] | None = None) -> None:
        reply: ReplySlot[Any] = ReplySlot()
        await self.address.send(SubmitJob(job, reply))
        if before is not None:
            await before()
        assert not reply.answered
        await self.address.send(CancelJob(job.job_id))
        await self.address.ask(InspectJobs)  # in order: the cancel was handled
        assert reply.answered, "whoever cancels does not wait for Spark"
        with pytest.raises(OperationCanceled):
            await reply.wait()


@pytest.mark.long
@pytest.mark.spark
async def test_the_engine_runs_cancels_and_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Settings(
        spark_master="local[2]", engine_jobs_in_flight_max=2, spark_driver_memory="512m"
    )
    options = for_short_lives(options)
    async with ActorSystem() as system:
        engine: ActorAddress[Any] = system.spawn(lambda: SparkExecutor(options, tmp_path), "engine")
        canceled = Canceler(engine)
        await canceled(difference("early", FOREVER))  # while the engine starts

        async def others() -> None:  # FIFO: once this one is answered, the first is at work
            await ask(engine, analyze("between"))

        await canceled(difference("running", FOREVER), others)
        terms = " + ".join(f"sum(CASE WHEN v = {n} THEN v END)" for n in range(100))
        endless = f"SELECT {terms} + max(y) AS v FROM t CROSS JOIN ({FOREVER}) AS forever (y)"
        await canceled(difference("planning", endless), others)
        assert "children lost 0" in description(system)
        first = pids(system)

        for victim in (1, 0):  # the JVM, then the child
            prepare = PreparePlan(f"p-{victim}", f"slow-{victim}", slow_plan(f"SLOW_{victim}"))
            assert isinstance(await ask(engine, prepare), PlanPrepared)
            jvm_or_child = pids(system)[victim]
            reply: ReplySlot[Any] = ReplySlot()
            step = RunStep(f"step-{victim}", f"slow-{victim}", 0, 0, {"d0": rows((1, 5, 1))}, 2, 9)
            await engine.send(SubmitJob(step, reply))
            await ask(engine, analyze(f"between-{victim}"))
            assert not reply.answered
            monkeypatch.setenv(f"SLOW_{victim}", "ends")  # in the next child's JVM
            os.kill(jvm_or_child, signal.SIGKILL)
            answer = await reply.wait()
            assert from_ipc(answer.arrow).to_pylist() == [{"v": 2, "__time": 5, "__diff": 1}]
        last = pids(system)
        assert "running 0 []" in description(system)
        assert "children lost 2" in description(system)
        assert not {*first} & {*last}
    for pid in (*first, *last):
        wait_dead(pid)
    assert not (tmp_path / "child").exists()


@pytest.mark.spark
async def test_an_engine_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    options = Settings(spark_master="nonsense://", engine_jobs_in_flight_max=1)
    async with ActorSystem() as system:
        engine: ActorAddress[Any] = system.spawn(lambda: SparkExecutor(options, tmp_path), "engine")
        with pytest.raises(EngineUnavailable, match="Master must either be"):
            await ask(engine, analyze("a"))
