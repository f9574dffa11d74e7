"""The engine's actor: with a made-up child for its rules, and with Spark for what must hold."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from actors.errors import (
    Busy,
    Canceled,
    Closed,
    DefiniteError,
    EngineLost,
    EngineUnavailable,
    InvalidUsage,
    LocalProtocolError,
    PenstockError,
    QueryRejected,
)
from actors.kernel import Address, Clock, Reply, System
from actors.plan.delta import Consolidate, DeltaPlan, Input, Select, Stratum
from actors.plan.jobs import (
    Analyze,
    Analyzed,
    Answer,
    Cancel,
    CancelJob,
    Difference,
    EngineReady,
    ExecutorMessage,
    Forget,
    Job,
    JobFailed,
    Prepare,
    Prepared,
    Progress,
    Rows,
    RowsDone,
    Run,
    Step,
)
from actors.plan.relational import Named
from actors.plan.schema import Column, Schema
from actors.plan.updates import from_ipc, to_ipc
from actors.settings import Settings
from actors.spark.launch import EngineProcess
from actors.spark.start import ChildMessage
from actors.spark_executor import SparkExecutor
from actors.testing.probe import Probe

TABLE = Schema((Column("v", "bigint"),))
PLAN = DeltaPlan(("t",), (TABLE,), TABLE, "SELECT v FROM t", "opaque", "test")


def analyze(name: str) -> Analyze:
    return Analyze(name, (), ("SELECT 1",))


class FakeChild(EngineProcess):
    """A child in memory: the test reads what was sent and says what is answered."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.sent: list[Any] = []
        self.killed = False
        self._answers_in, self._answers_out = anyio.create_memory_object_stream[Any](100)

    def send(self, message: ChildMessage) -> None:
        if isinstance(message, Analyze) and message.texts == ("too large",):
            raise LocalProtocolError("too large for a frame")
        self.sent.append(message)
        self.workshop.note()

    def answer(self, answer: Answer) -> None:
        self._answers_in.send_nowait(answer)

    def die(self) -> None:
        self._answers_in.close()

    async def ready(self) -> EngineReady:
        if self.workshop.refusal is not None:
            raise self.workshop.refusal
        return EngineReady("", "4", "17", 1, 2)

    async def receive(self) -> Answer | None:
        try:
            answer: Answer = await self._answers_out.receive()
        except anyio.EndOfStream:
            return None
        return answer

    def kill(self) -> None:
        self.killed = True
        self.die()

    async def end(self) -> None:
        self.killed = True
        self._answers_in.close()
        self._answers_out.close()
        self.workshop.note()


class Workshop:
    """Makes fake children and tells when something was sent to one."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.refusal: PenstockError | None = None
        self._changed = anyio.Event()

    async def launch(self, settings: Settings, directory: Path, clock: Clock) -> EngineProcess:
        child = FakeChild(self)
        self.children.append(child)
        self.note()
        return child

    def note(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(5):
            while not holds():
                await self._changed.wait()

    async def sent(self, child: int, *names: str) -> None:
        """Waits until exactly these jobs were sent to a child."""
        await self.until(
            lambda: (
                len(self.children) > child
                and [job.job_id for job in self.children[child].sent] == list(names)
            )
        )


def settings(**more: Any) -> Settings:
    return Settings(retry_delay_ms_min=1, retry_delay_ms_max=2, **more)


class Bench:
    """An executor on a workshop, and asks that do not wait."""

    def __init__(self, system: System, path: Path, **more: Any) -> None:
        self.shop = Workshop()
        self.address: Address[Any] = system.spawn(
            lambda: SparkExecutor(settings(**more), path, self.shop.launch), "engine"
        )

    async def run(self, job: Job, watcher: Address[Any] | None = None) -> Reply[Any]:
        reply: Reply[Any] = Reply()
        await self.address.send(Run(job, reply, watcher))
        return reply


async def test_answers_go_to_their_callers(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        a, b = await bench.run(analyze("a")), await bench.run(analyze("b"))
        await bench.shop.sent(0, "a", "b")
        child = bench.shop.children[0]
        child.answer(JobFailed("b", "DefiniteError", "division"))
        child.answer(Analyzed("a", ()))
        child.answer(Analyzed("a", ()))  # a second answer has no taker
        assert await a.wait() == Analyzed("a", ())
        with pytest.raises(DefiniteError, match="division"):
            await b.wait()


async def test_progress_is_told_to_who_watches_and_is_no_answer(tmp_path: Path) -> None:
    async with System() as system:
        bench, heard = Bench(system, tmp_path), Probe.start(system, "heard")
        reply = await bench.run(analyze("a"), heard.address)
        await bench.run(analyze("b"))
        await bench.shop.sent(0, "a", "b")
        child = bench.shop.children[0]
        for name in ("gone", "b", "a"):
            child.answer(Progress(name, 1, 4))
        assert await heard.expect(Progress) == Progress("a", 1, 4)
        child.answer(Analyzed("a", ()))
        assert await reply.wait() == Analyzed("a", ())


async def test_the_queue_and_the_child_are_bounded(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_jobs_in_flight_max=2, engine_queue_max=2)
        replies = [await bench.run(analyze(str(n))) for n in range(2)]
        await bench.shop.sent(0, "0", "1")
        replies += [await bench.run(analyze(str(n))) for n in range(2, 5)]
        with pytest.raises(Busy, match="engine_queue_max = 2"):
            await replies[4].wait()
        bench.shop.children[0].answer(Analyzed("0", ()))
        await bench.shop.sent(0, "0", "1", "2")


async def test_one_name_is_one_job(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        await bench.run(analyze("a"))
        again = await bench.run(analyze("a"))
        with pytest.raises(InvalidUsage, match="'a'"):
            await again.wait()


async def test_a_job_over_the_frame_limit_is_the_callers_fault(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        large = await bench.run(Analyze("large", (), ("too large",)))
        after = await bench.run(analyze("after"))
        with pytest.raises(LocalProtocolError):
            await large.wait()
        await bench.shop.sent(0, "after")
        bench.shop.children[0].answer(Analyzed("after", ()))
        await after.wait()


async def test_a_new_child_gets_the_plans_and_then_what_was_in_flight(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_jobs_in_flight_max=2)
        for name in ("p", "q"):
            reply = await bench.run(Prepare(f"prepare-{name}", name, PLAN))
            await bench.shop.until(lambda: bool(bench.shop.children))
            await bench.shop.until(lambda: len(bench.shop.children[0].sent) > 0)
            await bench.shop.until(
                lambda name=name: bench.shop.children[0].sent[-1].job_id == f"prepare-{name}"  # type: ignore[misc]
            )
            bench.shop.children[0].answer(Prepared(f"prepare-{name}"))
            await reply.wait()
        await bench.run(Forget("f", "q"))
        steps = [await bench.run(Step(f"s{n}", "p", 0, 0, {}, 1, 2)) for n in range(3)]
        await bench.shop.sent(0, "prepare-p", "prepare-q", "f", "s0", "s1")
        bench.shop.children[0].answer(RowsDone("s1", 0, b""))
        await steps[1].wait()
        await bench.shop.sent(0, "prepare-p", "prepare-q", "f", "s0", "s1", "s2")
        bench.shop.children[0].die()
        await bench.shop.sent(1, "prepare-p", "s0", "s2")
        for name in ("prepare-p", "s2", "s0"):
            bench.shop.children[1].answer(RowsDone(name, 0, b"again"))
        for reply in (steps[0], steps[2]):
            assert (await reply.wait()).arrow == b"again"


async def test_a_plan_that_was_refused_is_not_sent_again(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        reply = await bench.run(Prepare("p", "p", PLAN))
        await bench.shop.sent(0, "p")
        bench.shop.children[0].answer(JobFailed("p", "QueryRejected", "no"))
        with pytest.raises(QueryRejected):
            await reply.wait()
        last = await bench.run(analyze("a"))
        await bench.shop.sent(0, "p", "a")
        bench.shop.children[0].die()
        await bench.shop.sent(1, "a")
        assert not last.answered


async def test_a_job_that_kills_every_child_is_given_up(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_attempts_max=3)
        bad = await bench.run(analyze("bad"))
        for number in range(3):
            await bench.shop.sent(number, "bad")
            bench.shop.children[number].die()
        with pytest.raises(EngineLost, match="died 3 times while Analyze bad"):
            await bad.wait()
        good = await bench.run(analyze("good"))
        await bench.shop.sent(3, "good")
        bench.shop.children[3].answer(Analyzed("good", ()))
        await good.wait()


async def test_cancel_of_a_waiting_and_of_a_running_job(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_jobs_in_flight_max=1)
        first, second = await bench.run(analyze("a")), await bench.run(analyze("b"))
        await bench.shop.sent(0, "a")
        for name, reply in (("b", second), ("a", first)):
            await bench.address.send(CancelJob(name))
            with pytest.raises(Canceled):
                await reply.wait()
        third = await bench.run(analyze("c"))
        await bench.shop.sent(0, "a", "a")  # the job, then its cancel
        assert isinstance(bench.shop.children[0].sent[1], Cancel)
        bench.shop.children[0].answer(JobFailed("a", "Canceled", ""))
        await bench.shop.sent(0, "a", "a", "c")
        await bench.address.send(CancelJob("a"))  # of a job that is over: nothing
        bench.shop.children[0].answer(Analyzed("c", ()))
        await third.wait()
        assert len(bench.shop.children) == 1


async def test_a_child_that_does_not_let_go_is_replaced(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_cancel_timeout_ms=20)
        stuck, other = await bench.run(analyze("stuck")), await bench.run(analyze("other"))
        await bench.shop.sent(0, "stuck", "other")
        await bench.address.send(CancelJob("stuck"))
        with pytest.raises(Canceled):
            await stuck.wait()
        await bench.shop.sent(1, "other")
        assert bench.shop.children[0].killed
        bench.shop.children[1].answer(Analyzed("other", ()))
        await other.wait()


async def test_the_file_of_a_dropped_answer_is_removed(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        reply = await bench.run(analyze("a"))
        await bench.shop.sent(0, "a")
        await bench.address.send(CancelJob("a"))
        with pytest.raises(Canceled):
            await reply.wait()
        file = tmp_path / "out" / "rows.arrow"
        file.parent.mkdir()
        file.touch()
        bench.shop.children[0].answer(RowsDone("a", 1, arrow_file=str(file)))
        after = await bench.run(analyze("b"))
        await bench.shop.sent(0, "a", "a", "b")
        bench.shop.children[0].answer(Analyzed("b", ()))
        await after.wait()
    assert not file.exists()


async def test_an_engine_that_never_starts_says_why(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        bench.shop.refusal = EngineUnavailable("Spark needs Java 17")
        reply = await bench.run(analyze("a"))
        with pytest.raises(EngineUnavailable, match="Java 17"):
            await reply.wait()
        again = await bench.run(analyze("b"))
        with pytest.raises(EngineUnavailable, match="Java 17"):
            await again.wait()
        bench.shop.refusal = None  # somebody installs it
        made = len(bench.shop.children)
        await bench.shop.until(lambda: len(bench.shop.children) > made)


async def test_a_failed_replacement_is_tried_again_before_anybody_hears_of_it(
    tmp_path: Path,
) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path)
        reply = await bench.run(analyze("a"))
        await bench.shop.sent(0, "a")
        bench.shop.refusal = EngineUnavailable("no memory just now")
        bench.shop.children[0].die()
        await bench.shop.until(lambda: len(bench.shop.children) == 2)
        bench.shop.refusal = None
        await bench.shop.until(
            lambda: len(bench.shop.children) > 2 and bool(bench.shop.children[-1].sent)
        )
        bench.shop.children[-1].answer(Analyzed("a", ()))
        assert await reply.wait() == Analyzed("a", ())


async def test_a_stop_answers_everybody(tmp_path: Path) -> None:
    async with System() as system:
        bench = Bench(system, tmp_path, engine_jobs_in_flight_max=1)
        replies = [await bench.run(analyze(n)) for n in "ab"]
        await bench.shop.sent(0, "a")
    for reply in replies:
        with pytest.raises(Closed):
            await reply.wait()
    assert bench.shop.children[0].killed


# -- with Spark -----------------------------------------------------------------------------------

SLEEPS = "java_method('java.lang.Thread', 'sleep', {}L) IS NOT NULL"
FOREVER = "SELECT sum(hash(a.id * b.id)) AS v FROM range(10000000) a CROSS JOIN range(10000000) b"


def rows(*updates: tuple[int | None, int, int]) -> Rows:
    columns = zip(*updates, strict=True)
    table = pa.table([pa.array(c, pa.int64()) for c in columns], TABLE.arrow_updates())
    return Rows(TABLE, arrow=to_ipc(table))


def difference(name: str, sql: str) -> Difference:
    return Difference(name, sql, (("t", rows((1, 1, 1))),), TABLE, 9)


def slow_plan(milliseconds: int) -> DeltaPlan:
    """Its step sleeps, then gives ``v + 1``."""
    slow = f"IF({SLEEPS.format(milliseconds)}, v + 1, v + 1)"
    node = Consolidate(Select(Input("d0", ("v",)), (Named("v", slow),)))
    strata = (Stratum((), node, ()),)
    return DeltaPlan(("t",), (TABLE,), TABLE, "", "incremental", "", strata)


async def ask(address: Address[ExecutorMessage], job: Job) -> Any:
    return await address.ask(lambda reply: Run(job, reply), 60_000)


def description(system: System) -> str:
    return next(text for path, text in system.describe() if path == "/engine")


def pids(system: System) -> tuple[int, int]:
    """The child's and the JVM's, as the actor describes itself."""
    text = description(system)
    found = re.search(r"child (\d+), JVM (\d+)", text)
    assert found, text
    return int(found.group(1)), int(found.group(2))


def wait_dead(pid: int) -> None:
    """Waits, without polling, until a process of this machine has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 30)[0], f"process {pid} lives on"
    finally:
        os.close(handle)


class Canceler:
    """Runs a job that must end as canceled within a second of its cancel."""

    def __init__(self, address: Address[ExecutorMessage]) -> None:
        self.address = address

    async def __call__(self, job: Job, before: Callable[[], Any] | None = None) -> None:
        reply: Reply[Any] = Reply()
        await self.address.send(Run(job, reply))
        if before is not None:
            await before()
        started = time.monotonic()
        await self.address.send(CancelJob(job.job_id))
        with pytest.raises(Canceled):
            await reply.wait()
        assert time.monotonic() - started < 1


@pytest.mark.spark
@pytest.mark.timeout(300)
async def test_the_engine_runs_cancels_and_survives(tmp_path: Path) -> None:
    options = Settings(
        spark_master="local[2]", engine_jobs_in_flight_max=2, spark_driver_memory="512m"
    )
    async with System() as system:
        engine: Address[Any] = system.spawn(lambda: SparkExecutor(options, tmp_path), "engine")
        canceled = Canceler(engine)
        await canceled(difference("early", FOREVER))  # while the engine starts

        async def others() -> None:  # FIFO: once this one is answered, the first is at work
            await ask(engine, analyze("between"))

        await canceled(difference("running", FOREVER), others)
        terms = " + ".join(f"sum(CASE WHEN v = {n} THEN v END)" for n in range(100))
        await canceled(difference("planning", f"SELECT {terms} AS v FROM t"), others)
        assert "children lost 0" in description(system)
        first = pids(system)

        assert isinstance(await ask(engine, Prepare("p", "slow", slow_plan(1500))), Prepared)
        for victim in (1, 0):  # the JVM, then the child
            jvm_or_child = pids(system)[victim]
            reply: Reply[Any] = Reply()
            name = f"step-{victim}"
            step = Step(name, "slow", 0, 0, {"d0": rows((1, 5, 1))}, 2, 9)
            await engine.send(Run(step, reply))
            await ask(engine, analyze(f"between-{victim}"))
            assert not reply.answered
            os.kill(jvm_or_child, signal.SIGKILL)
            with anyio.fail_after(60):
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
    async with System() as system:
        engine: Address[Any] = system.spawn(lambda: SparkExecutor(options, tmp_path), "engine")
        with pytest.raises(EngineUnavailable, match="Master must either be"):
            await ask(engine, analyze("a"))
