"""The engine's actor alone, with a made-up child; with Spark: test_spark_executor_on_spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.engine.spark.launch import EngineProcess
from actors.engine.spark_executor import DEATHS_OUTSIDE, SparkExecutor
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.job_log import JobNote
from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    CancelChildJob,
    CancelJob,
    EngineCondition,
    EngineReady,
    ForgetPlan,
    InspectEngine,
    InspectJobs,
    Job,
    JobFailed,
    JobProgress,
    PlanPrepared,
    PreparePlan,
    QueryAnalyzed,
    RowsDone,
    RunStep,
    SubmitJob,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    ActorDead,
    DefiniteError,
    EngineUnavailable,
    InvalidUsage,
    JobTooLarge,
    LocalProtocolError,
    OperationCanceled,
    PenstockError,
    QueryRejected,
    ResourceBusy,
    ResourceClosed,
)
from actors.runtime.kernel import ActorAddress, ActorClock, ReplySlot
from actors.runtime.measurement import ValueHistogram
from actors.runtime.metric_table import METRICS
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation

TABLE = TableSchema((TableColumn("v", "bigint"),))
PLAN = DeltaPlan(("t",), (TABLE,), TABLE, "SELECT v FROM t", "opaque", "test")


def analyze(name: str) -> AnalyzeStatement:
    return AnalyzeStatement(name, (), "SELECT 1")


class FakeChild(EngineProcess):
    """A child in memory: the test reads what was sent and says what is answered."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.sent: list[Any] = []
        self.killed = False
        self._answers_in, self._answers_out = anyio.create_memory_object_stream[Any](100)

    def send(self, message: Any) -> None:
        if isinstance(message, AnalyzeStatement) and message.sql == "too large":
            raise LocalProtocolError("too large for a frame")
        self.sent.append(message)

    def answer(self, answer: Answer) -> None:
        self._answers_in.send_nowait(answer)

    def die(self) -> None:
        self._answers_in.close()

    async def ready(self) -> EngineReady:
        if self.workshop.refusal is not None:
            raise self.workshop.refusal
        return EngineReady("", "4", "17", os.getpid(), 2)

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


class Workshop:
    """Makes fake children."""

    def __init__(self, stage: ActorIsolation) -> None:
        self.stage = stage
        self.children: list[FakeChild] = []
        self.refusal: PenstockError | None = None

    async def launch(self, settings: Settings, directory: Path, clock: ActorClock) -> EngineProcess:
        child = FakeChild(self)
        self.children.append(child)
        return child

    async def sent(self, child: int, *names: str) -> None:
        """Exactly these jobs were sent to a child, once everything has run."""
        await self.stage.idle()
        assert len(self.children) > child, "no such child was started"
        assert [job.job_id for job in self.children[child].sent] == list(names)


RETRY_MS = 2


def settings(**more: Any) -> Settings:
    return Settings(retry_delay_ms_min=1, retry_delay_ms_max=RETRY_MS, **more)


class Bench:
    """An executor on a workshop, and asks that do not wait."""

    def __init__(self, stage: ActorIsolation, path: Path, **more: Any) -> None:
        self.stage = stage
        self.shop = Workshop(stage)
        self.executor = stage.start(
            lambda: SparkExecutor(settings(**more), path, self.shop.launch), "engine"
        )

    async def run(self, job: Job, watcher: ActorAddress[Any] | None = None) -> ReplySlot[Any]:
        reply: ReplySlot[Any] = await self.executor.request(
            lambda slot: SubmitJob(job, slot, watcher)
        )
        return reply

    async def restarted(self) -> None:
        """The delay before the next child is over."""
        await self.stage.advance(RETRY_MS)


async def test_answers_go_to_their_callers(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path)
    a, b = await bench.run(analyze("a")), await bench.run(analyze("b"))
    await bench.shop.sent(0, "a", "b")
    child = bench.shop.children[0]
    child.answer(JobFailed("b", "DefiniteError", "division"))
    child.answer(QueryAnalyzed("a"))
    child.answer(QueryAnalyzed("a"))  # a second answer has no taker
    assert await stage.answer(a) == QueryAnalyzed("a")
    with pytest.raises(DefiniteError, match="division"):
        await stage.answer(b)


async def test_all_metrics_of_the_engine_move(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=1, engine_attempts_max=1)

    def seen() -> dict[str, float]:
        return {
            " ".join((each.metric.name, *each.labels[1:])): sum(each.value.counts)
            if isinstance(each.value, ValueHistogram)
            else each.value
            for each in stage.system.measures()
            if each.metric.group == "Engine"
        }

    await stage.idle()
    done, failed, canceled = [await bench.run(analyze(name)) for name in "abc"]
    await bench.shop.sent(0, "a")
    before = seen()
    assert before["penstock.engine.up"] == 1
    assert before["penstock.engine.jobs running"] == 1
    assert before["penstock.engine.jobs waiting"] == 2
    # The stand-in has this process's own number.
    assert before["penstock.engine.memory child"] > 1_000_000
    await bench.executor.send(CancelJob("c"))
    bench.shop.children[0].answer(QueryAnalyzed("a"))
    await bench.shop.sent(0, "a", "b")
    bench.shop.children[0].answer(JobFailed("b", "DefiniteError", "division"))
    killer = await bench.run(RunStep("s", "p", 0, 0, {}, 1, 2))
    await bench.shop.sent(0, "a", "b", "s")
    bench.shop.children[0].die()
    await stage.idle()
    assert all(each.answered for each in (done, failed, canceled, killer))
    after = seen()
    assert after["penstock.engine.up"] == 0
    assert after["penstock.engine.deaths"] == 1
    assert after["penstock.engine.quarantined"] == 1
    ended = {name.split()[1]: n for name, n in after.items() if "jobs_ended" in name}
    assert ended == {"done": 1, "failed": 2, "canceled": 1}
    assert after["penstock.engine.job.wait"] == 4
    assert after["penstock.engine.job.duration"] == 3
    moved = {name.split()[0] for name in before.keys() | after.keys()}
    assert moved == {metric.name for metric in METRICS if metric.group == "Engine"}


async def test_an_engine_may_wait_for_its_first_job(stage: ActorIsolation, tmp_path: Path) -> None:
    shop = Workshop(stage)
    executor = stage.start(
        lambda: SparkExecutor(settings(), tmp_path, shop.launch, at_first_job=True), "engine"
    )
    await stage.idle()
    asked: ReplySlot[Any] = await executor.request(InspectEngine)
    assert await stage.answer(asked) == EngineCondition("idle")
    assert not shop.children
    reply: ReplySlot[Any] = await executor.request(lambda slot: SubmitJob(analyze("a"), slot))
    await shop.sent(0, "a")
    shop.children[0].answer(QueryAnalyzed("a"))
    assert await stage.answer(reply) == QueryAnalyzed("a")
    # From then on it is started again like any other.
    shop.children[0].die()
    await stage.advance(RETRY_MS)
    assert len(shop.children) == 2


async def test_progress_is_told_to_who_watches_and_is_no_answer(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench, heard = Bench(stage, tmp_path), stage.probe("heard")
    reply = await bench.run(analyze("a"), heard.address)
    await bench.run(analyze("b"))
    await bench.shop.sent(0, "a", "b")
    child = bench.shop.children[0]
    for name in ("gone", "b", "a"):
        child.answer(JobProgress(name, 1, 4))
    assert await heard.expect(JobProgress) == JobProgress("a", 1, 4)
    child.answer(QueryAnalyzed("a"))
    assert await stage.answer(reply) == QueryAnalyzed("a")


async def test_the_queue_and_the_child_are_bounded(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=2, engine_queue_max=2)
    replies = [await bench.run(analyze(str(n))) for n in range(2)]
    await bench.shop.sent(0, "0", "1")
    replies += [await bench.run(analyze(str(n))) for n in range(2, 5)]
    with pytest.raises(ResourceBusy, match="engine_queue_max = 2"):
        await stage.answer(replies[4])
    bench.shop.children[0].answer(QueryAnalyzed("0"))
    await bench.shop.sent(0, "0", "1", "2")


async def test_one_name_is_one_job(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path)
    await bench.run(analyze("a"))
    again = await bench.run(analyze("a"))
    with pytest.raises(InvalidUsage, match="'a'"):
        await stage.answer(again)


async def test_a_job_over_the_frame_limit_is_the_callers_fault(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path)
    large = await bench.run(AnalyzeStatement("large", (), "too large"))
    after = await bench.run(analyze("after"))
    with pytest.raises(LocalProtocolError):
        await stage.answer(large)
    await bench.shop.sent(0, "after")
    bench.shop.children[0].answer(QueryAnalyzed("after"))
    await stage.answer(after)


async def test_a_new_child_gets_the_plans_and_then_what_was_in_flight(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=2)
    for name in ("p", "q"):
        reply = await bench.run(PreparePlan(f"prepare-{name}", name, PLAN))
        await stage.idle()
        assert bench.shop.children[0].sent[-1].job_id == f"prepare-{name}"
        bench.shop.children[0].answer(PlanPrepared(f"prepare-{name}"))
        await stage.answer(reply)
    await bench.run(ForgetPlan("f", "q"))
    steps = [await bench.run(RunStep(f"s{n}", "p", 0, 0, {}, 1, 2)) for n in range(3)]
    await bench.shop.sent(0, "prepare-p", "prepare-q", "f", "s0", "s1")
    bench.shop.children[0].answer(RowsDone("s1", 0, b""))
    await stage.answer(steps[1])
    await bench.shop.sent(0, "prepare-p", "prepare-q", "f", "s0", "s1", "s2")
    bench.shop.children[0].die()
    await bench.restarted()
    await bench.shop.sent(1, "prepare-p", "s0")
    assert bench.shop.children[1].sent[0].known
    bench.shop.children[1].answer(RowsDone("s0", 0, b"again"))
    assert (await stage.answer(steps[0])).arrow == b"again"
    await bench.shop.sent(1, "prepare-p", "s0", "s2")
    bench.shop.children[1].answer(RowsDone("s2", 0, b"again"))
    assert (await stage.answer(steps[2])).arrow == b"again"


async def test_a_plan_that_was_refused_is_not_sent_again(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path)
    reply = await bench.run(PreparePlan("p", "p", PLAN))
    await bench.shop.sent(0, "p")
    bench.shop.children[0].answer(JobFailed("p", "QueryRejected", "no"))
    with pytest.raises(QueryRejected):
        await stage.answer(reply)
    last = await bench.run(analyze("a"))
    await bench.shop.sent(0, "p", "a")
    bench.shop.children[0].die()
    await bench.restarted()
    await bench.shop.sent(1, "a")
    assert not last.answered


async def test_a_job_that_kills_every_child_is_given_up(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_attempts_max=3)
    bad = await bench.run(analyze("bad"))
    for number in range(3):
        await bench.shop.sent(number, "bad")
        bench.shop.children[number].die()
        await bench.restarted()
    with pytest.raises(JobTooLarge, match="bad ended the engine 3 times while running alone"):
        await stage.answer(bad)
    good = await bench.run(other("good"))
    await bench.shop.sent(3, "good")
    bench.shop.children[3].answer(QueryAnalyzed("good"))
    await stage.answer(good)


def other(name: str) -> AnalyzeStatement:
    """A job of its own content."""
    return AnalyzeStatement(name, (), f"SELECT '{name}'")


async def test_what_was_beside_a_killer_is_cleared_at_its_next_run(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_attempts_max=2)
    replies = [await bench.run(other(name)) for name in ("a", "bad", "c", "d")]
    await bench.shop.sent(0, "a", "bad", "c", "d")
    bench.shop.children[0].answer(QueryAnalyzed("d"))
    await stage.idle()
    bench.shop.children[0].die()
    await bench.restarted()
    late = await bench.run(other("late"))
    # Each of them alone, and what came later waits.
    await bench.shop.sent(1, "a")
    bench.shop.children[1].answer(QueryAnalyzed("a"))
    await bench.shop.sent(1, "a", "bad")
    bench.shop.children[1].die()
    await bench.restarted()
    # Now all others have their turn before the one that was alone has its second.
    await bench.shop.sent(2, "c")
    bench.shop.children[2].answer(QueryAnalyzed("c"))
    await bench.shop.sent(2, "c", "late")
    bench.shop.children[2].answer(QueryAnalyzed("late"))
    await bench.shop.sent(2, "c", "late", "bad")
    bench.shop.children[2].die()
    with pytest.raises(JobTooLarge, match="Analyze bad ended the engine twice while running alone"):
        await stage.answer(replies[1])
    for reply in (replies[0], *replies[2:], late):
        await stage.answer(reply)


async def test_a_killer_is_run_again_only_after_a_pause_that_doubles(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_attempts_max=1, engine_killer_retry_ms_min=1_000)
    child = 0

    async def killed() -> None:
        nonlocal child
        reply = await bench.run(RunStep(f"s{child}", "p", 0, 0, {}, 1, 2))
        await bench.shop.sent(child, f"s{child}")
        bench.shop.children[child].die()
        await bench.restarted()
        child += 1
        with pytest.raises(JobTooLarge, match="ended the engine once while running alone"):
            await stage.answer(reply)

    async def refused(seconds: int) -> None:
        reply = await bench.run(RunStep("again", "p", 0, 0, {}, 1, 2))
        with pytest.raises(JobTooLarge, match=f"it will not be run again for {seconds} s"):
            await stage.answer(reply)

    await killed()
    await refused(1)
    smaller = await bench.run(RunStep("half", "p", 0, 0, {}, 1, 3))
    await bench.shop.sent(1, "half")
    await stage.advance(1_000)
    beside = await bench.run(other("beside"))
    await bench.shop.sent(1, "half")  # of a dataflow that has killed: nothing runs beside it
    bench.shop.children[1].answer(RowsDone("half", 0, b""))
    await stage.answer(smaller)
    await bench.shop.sent(1, "half", "beside")
    bench.shop.children[1].answer(QueryAnalyzed("beside"))
    await stage.answer(beside)
    bench.shop.children[1].sent.clear()
    await killed()
    await refused(2)
    await stage.advance(2_000)
    good = await bench.run(RunStep("good", "p", 0, 0, {}, 1, 2))
    await bench.shop.sent(2, "good")
    bench.shop.children[2].answer(RowsDone("good", 0, b""))
    await stage.answer(good)
    bench.shop.children[2].sent.clear()
    await killed()
    await refused(1)


async def test_a_child_that_was_killed_proves_little_of_its_job(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_attempts_max=2)
    reply = await bench.run(analyze("a"))
    for number in range(2 * DEATHS_OUTSIDE):
        assert not reply.answered
        await bench.shop.sent(number, "a")
        bench.shop.children[number].killed_outside = True
        bench.shop.children[number].die()
        await bench.restarted()
    with pytest.raises(JobTooLarge):
        await stage.answer(reply)


async def test_a_plan_that_kills_is_not_sent_to_the_next_child(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_attempts_max=1)
    reply = await bench.run(PreparePlan("p", "p", PLAN))
    await bench.shop.sent(0, "p")
    bench.shop.children[0].die()
    await bench.restarted()
    with pytest.raises(JobTooLarge):
        await stage.answer(reply)
    await bench.shop.sent(1)


async def test_cancel_of_a_waiting_and_of_a_running_job(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=1)
    first, second = await bench.run(analyze("a")), await bench.run(analyze("b"))
    await bench.shop.sent(0, "a")
    for name, reply in (("b", second), ("a", first)):
        await bench.executor.send(CancelJob(name))
        with pytest.raises(OperationCanceled):
            await stage.answer(reply)
    third = await bench.run(analyze("c"))
    await bench.shop.sent(0, "a", "a")  # the job, then its cancel
    assert isinstance(bench.shop.children[0].sent[1], CancelChildJob)
    bench.shop.children[0].answer(JobFailed("a", "OperationCanceled", ""))
    await bench.shop.sent(0, "a", "a", "c")
    await bench.executor.send(CancelJob("a"))  # of a job that is over: nothing
    bench.shop.children[0].answer(QueryAnalyzed("c"))
    await stage.answer(third)
    assert len(bench.shop.children) == 1


async def test_jobs_are_told_with_their_fate(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=2, log_rows_max=3)

    async def told() -> dict[str, str]:
        await stage.idle()
        notes: tuple[JobNote, ...] = await bench.executor.ask(InspectJobs)
        assert all(note.waited_ms >= 0 for note in notes)
        return {note.id: note.state for note in notes}

    for name in "abcd":
        await bench.run(analyze(name))
    assert await told() == {"a": "running", "b": "running", "c": "waiting", "d": "waiting"}
    await bench.executor.send(CancelJob("d"))
    bench.shop.children[0].answer(QueryAnalyzed("a"))
    assert await told() == {"b": "running", "c": "running", "d": "canceled", "a": "done"}
    bench.shop.children[0].answer(JobFailed("b", "DefiniteError", "x"))
    await stage.idle()
    bench.shop.children[0].die()
    await stage.idle()
    assert (await told())["c"] == "running", "it waits for the next child, and is not asked anew"
    await bench.restarted()
    await bench.shop.sent(1, "c")
    await bench.executor.send(CancelJob("c"))
    assert await told() == {"c": "canceled", "b": "failed", "a": "done"}, (
        "the last three that ended"
    )
    bench.shop.children[1].answer(JobFailed("c", "OperationCanceled", ""))
    oversized = AnalyzeStatement("e", (), "too large")
    await bench.run(oversized)
    assert (await told())["e"] == "failed"


async def test_a_child_that_does_not_let_go_is_replaced(
    stage: ActorIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.engine.spark_executor.CANCEL_TIMEOUT_MS", 20)
    bench = Bench(stage, tmp_path)
    stuck, innocent = await bench.run(analyze("stuck")), await bench.run(analyze("innocent"))
    await bench.shop.sent(0, "stuck", "innocent")
    await bench.executor.send(CancelJob("stuck"))
    with pytest.raises(OperationCanceled):
        await stage.answer(stuck)
    await stage.advance(19)
    assert not bench.shop.children[0].killed
    await stage.advance(1)
    assert bench.shop.children[0].killed
    await bench.restarted()
    later = await bench.run(analyze("later"))
    await bench.shop.sent(1, "innocent", "later")  # nobody is to blame: they run side by side
    for name, reply in (("innocent", innocent), ("later", later)):
        bench.shop.children[1].answer(QueryAnalyzed(name))
        await stage.answer(reply)


async def test_the_file_of_a_dropped_answer_is_removed(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path)
    reply = await bench.run(analyze("a"))
    await bench.shop.sent(0, "a")
    await bench.executor.send(CancelJob("a"))
    with pytest.raises(OperationCanceled):
        await stage.answer(reply)
    file = tmp_path / "out" / "rows.arrow"
    file.parent.mkdir()
    file.touch()
    bench.shop.children[0].answer(RowsDone("a", 1, arrow_file=str(file)))
    after = await bench.run(analyze("b"))
    await bench.shop.sent(0, "a", "a", "b")
    bench.shop.children[0].answer(QueryAnalyzed("b"))
    await stage.answer(after)
    assert not file.exists()


async def test_an_engine_that_never_starts_says_why(stage: ActorIsolation, tmp_path: Path) -> None:
    bench = Bench(stage, tmp_path)
    bench.shop.refusal = EngineUnavailable("Spark needs Java 17")
    reply = await bench.run(analyze("a"))
    with pytest.raises(EngineUnavailable, match="Java 17"):
        await stage.answer(reply)
    again = await bench.run(analyze("b"))
    with pytest.raises(EngineUnavailable, match="Java 17"):
        await stage.answer(again)
    bench.shop.refusal = None  # somebody installs it
    made = len(bench.shop.children)
    await bench.restarted()
    assert len(bench.shop.children) == made + 1


async def test_a_failed_replacement_is_tried_again_before_anybody_hears_of_it(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    bench = Bench(stage, tmp_path)
    reply = await bench.run(analyze("a"))
    await bench.shop.sent(0, "a")
    bench.shop.refusal = EngineUnavailable("no memory just now")
    bench.shop.children[0].die()
    await stage.advance(1)
    assert len(bench.shop.children) == 2
    bench.shop.refusal = None
    await bench.restarted()
    await bench.shop.sent(2, "a")
    bench.shop.children[2].answer(QueryAnalyzed("a"))
    assert await stage.answer(reply) == QueryAnalyzed("a")


async def test_deaths_of_a_running_engine_are_no_failed_starts(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    """It died twice under work; then one start fails, and only three would be told."""
    bench = Bench(stage, tmp_path, engine_attempts_max=5)
    reply = await bench.run(analyze("a"))
    for number in range(2):
        await bench.shop.sent(number, "a")
        if number:
            bench.shop.refusal = EngineUnavailable("no memory just now")
        bench.shop.children[number].die()
        await bench.restarted()
    await stage.idle()
    assert len(bench.shop.children) == 3
    bench.shop.refusal = None
    await bench.restarted()
    await bench.shop.sent(3, "a")
    bench.shop.children[3].answer(QueryAnalyzed("a"))
    assert await stage.answer(reply) == QueryAnalyzed("a")


async def test_a_stop_answers_everybody(stage: ActorIsolation, tmp_path: Path) -> None:
    """Slots by the executor itself; askers (`ActorAddress.ask`) hear from the kernel first."""
    bench = Bench(stage, tmp_path, engine_jobs_in_flight_max=1)
    slots: list[ReplySlot[Any]] = [ReplySlot(), ReplySlot()]
    for name, slot in zip("ab", slots, strict=True):
        await bench.executor.send(SubmitJob(analyze(name), slot))
    asked = await bench.run(analyze("c"))
    await bench.shop.sent(0, "a")
    await bench.executor.stop()
    for slot in slots:
        with pytest.raises(ResourceClosed):
            await stage.answer(slot)
    with pytest.raises(ActorDead):
        await stage.answer(asked)
    assert bench.shop.children[0].killed
