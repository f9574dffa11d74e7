"""Runs one dataflow's jobs in the executor: rows are sent inline or as files, answers come as
Arrow.

A job's id names its step: ``dataflow/incarnation/number/what``, with the replica's name in front if
several replicas run. Rows larger than `engine_inline_bytes_max` travel as files in the dataflow's
own scratch folder, which are removed when the job has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
from anyio import Lock, create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import (
    Answer,
    CancelJob,
    ComputeDifference,
    ExecutorMessage,
    FileDone,
    ForgetPlan,
    JobRows,
    LikelyRun,
    ObjectDone,
    PlanPrepared,
    PreparePlan,
    RehearseSteps,
    RowsDone,
    SelectContents,
    SubmitJob,
)
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.replica.dataflow.repeated_failures import RepeatedFailures
from actors.runtime.errors import (
    ConnectionBroken,
    LocalProtocolError,
    MalformedFrame,
    ResourceClosed,
    StorageError,
    WouldBlock,
)
from actors.runtime.kernel import ActorAddress, ActorClock, ReplySlot
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings
from actors.runtime.spans import OpenSpan, export_engine_span, span
from actors.runtime.telemetry import BYTES, PREPARED, ROWS, SPARK_JOB, SPARK_MS
from actors.runtime.threshold_probes import ENGINE_ANSWER, ENGINE_INPUT

LOOP_ROWS_MAX = 5_000
"""Maximum number of rows that are processed on the event loop: for a few rows, a thread makes a
filter take twice as long (November 2026)."""

T = TypeVar("T")


class JobResult(msgspec.Struct, frozen=True):
    """Rows that a job produced, and the time that Spark took."""

    rows: pa.Table
    spark_ms: float
    prepared: bool = False
    wait_ms: float = 0.0
    """Time in ms spent waiting for the engine, and within it for other jobs."""


class MadeFiles(msgspec.Struct, frozen=True):
    """Parquet files that a job wrote, to be adopted or removed (none if there is no row), or
    objects in a bucket, to be adopted."""

    files: tuple[FileDone, ...]
    objects: tuple[ObjectDone, ...] = ()
    spark_ms: float = 0.0
    wait_ms: float = 0.0


class EngineClient:
    """Client of the executor for one dataflow."""

    def __init__(
        self,
        executor: ActorAddress[ExecutorMessage],
        clock: ActorClock,
        settings: Settings,
        scratch: Path,
        dataflow: ObjectId,
        watcher: ActorAddress[Any] | None = None,
        replica: str = "",
    ) -> None:
        """Create the client. `watcher` receives the progress of long jobs.

        `replica` distinguishes the jobs and plans of several replicas that share an engine.
        """
        self.clock = clock
        self.settings = settings
        self.dataflow = f"{replica}/{dataflow}" if replica else dataflow
        self.failures = RepeatedFailures(self.dataflow, dataflow)
        self._executor = executor
        self._watcher = watcher
        self._scratch = scratch
        self._files = 0
        """Number of files created so far; it names the next one."""
        self._announced: PreparePlan | None = None
        """Plan that has not yet been sent to the engine."""
        self._prepared = False
        """True once the engine has prepared the plan."""
        self._preparing = Lock()
        """Held while the plan is being prepared."""
        self.frequent: LikelyRun | None = None
        """Run whose rehearsal the engine last recommended; the caller that rehearses it clears
        this."""
        self._maybe_known = False
        """True if the engine may know the plan, whether prepared or not."""

    def job_id(self, incarnation: int, number: int, what: str) -> str:
        """Return the name of one job of a step."""
        return f"{self.dataflow}/{incarnation}/{number}/{what}"

    def announce(self, plan: DeltaPlan, incarnation: int) -> None:
        """Set the plan. It is sent with the first job that names it, or by `prepared`."""
        # The executor itself prepares the plan in every new engine process.
        if not self._prepared:
            job_id = self.job_id(incarnation, 0, "prepare")
            self._announced = PreparePlan(job_id, self.dataflow, plan)

    async def prepared(self) -> None:
        """Prepare the plan in the engine, if this has not been done yet. Raise the executor's
        errors."""
        async with self._preparing:
            job = self._announced
            if job is None:
                return
            # Set it before the answer: a canceled or lost check may leave the plan in the engine.
            self._maybe_known = True
            answer = await self._ask(job)
            if not isinstance(answer, PlanPrepared):
                raise LocalProtocolError(f"{job.job_id} was answered with {type(answer).__name__}")
            self._announced, self._prepared = None, True

    async def _ask_while_checking(
        self, job: StepJob | ComputeDifference | SelectContents
    ) -> Answer:
        """Run a job while its plan is being checked."""
        refused: list[Exception] = []
        answers: list[Answer] = []

        async def check() -> None:
            try:
                await self.prepared()
            except Exception as error:  # noqa: BLE001 - raised below, as itself
                # Put it before the job's own error, which may only follow from the refused plan.
                refused.insert(0, error)

        async with create_task_group() as tasks:
            # Run both concurrently: the engine knows a plan as soon as it was sent, so the job need
            # not wait.
            tasks.start_soon(check)
            await checkpoint()  # the plan must be sent before the job that names it
            try:
                answers.append(await self._ask(job))
            except Exception as error:  # noqa: BLE001 - raised below, as itself
                refused.append(error)
        if refused:
            paths = [
                path for made in answers if isinstance(made, RowsDone) for path in made.paths()
            ]
            await self.clock.run_blocking(lambda: _remove(paths))
            raise refused[0]
        return answers[0]

    async def rehearse(
        self, runs: Sequence[LikelyRun], incarnation: int, what: str = "again"
    ) -> None:
        """Have the engine build the plans of `runs`. `what` keeps job ids unique.

        Raise the executor's errors.
        """
        job_id = self.job_id(incarnation, 0, f"rehearse-{what}")
        await self._ask(RehearseSteps(job_id, self.dataflow, tuple(runs)))

    async def work(self, rows: int, run: Callable[[], T]) -> T:
        """Run a computation on `rows` rows: here if there are few, otherwise in a thread."""
        return await self.clock.run_blocking(run) if rows > LOOP_ROWS_MAX else run()

    async def pack(
        self, schema: TableSchema, updates: pa.Table, advance_to: int | None = None
    ) -> JobRows:
        """Return updates as a job's input: inline if small, otherwise as a file in the scratch
        folder."""
        updates = updates.select([*schema.names, "__time", "__diff"]).cast(schema.arrow_updates())
        if not ENGINE_INPUT.crossed(updates.nbytes > self.settings.engine_inline_bytes_max):
            return JobRows(schema=schema, arrow=to_ipc(updates), advance_to=advance_to)
        path = self.new_path("arrow")
        await self.clock.run_blocking(lambda: _write_file(path, updates))
        return JobRows(schema=schema, arrow_file=str(path), advance_to=advance_to)

    def new_path(self, kind: str) -> Path:
        """Return the path of a new file for a job."""
        self._files += 1
        return self._scratch / "jobs" / f"rows-{self._files}.{kind}"

    async def discard(self, rows: JobRows) -> None:
        """Remove the file that `pack` may have written."""
        path = rows.arrow_file
        if path is not None:
            await self.clock.run_blocking(lambda: Path(path).unlink(missing_ok=True))

    async def run(self, job: StepJob | ComputeDifference | SelectContents) -> JobResult:
        """Run a job. Raise `DefiniteError`, `EngineLost` and the job's other errors."""
        made = await self.run_into_files(job)
        if isinstance(made, MadeFiles):
            raise LocalProtocolError(
                f"{job.job_id} was answered with files that were not requested"
            )
        return made

    async def run_into_files(
        self, job: StepJob | ComputeDifference | SelectContents
    ) -> JobResult | MadeFiles:
        """Run a job whose answer may be files, if the job allows that. Raise what `run` raises."""
        with span(SPARK_JOB, job.job_id, self.dataflow) as opened:
            known = self._announced is None
            asked = self.clock.monotonic_ms()
            answer = await (self._ask(job) if known else self._ask_while_checking(job))
            if not isinstance(answer, RowsDone):
                raise LocalProtocolError(f"{job.job_id} was answered with {type(answer).__name__}")
            if opened is not None:
                _record_result(opened, answer)
            if answer.frequent is not None:
                self.frequent = answer.frequent
        wait_ms = max(0.0, self.clock.monotonic_ms() - asked - answer.spark_ms)
        inline, path = answer.arrow, answer.arrow_file
        if answer.files is not None or answer.objects is not None:
            files, objects = answer.files or (), answer.objects or ()
            return MadeFiles(files, objects, answer.spark_ms, wait_ms)
        if ENGINE_ANSWER.crossed(path is not None):
            assert path is not None
            mapped = await self.clock.run_blocking(lambda: _take_file(Path(path)))
            return JobResult(mapped, answer.spark_ms, answer.prepared, wait_ms)
        if inline is None:
            raise LocalProtocolError(f"{job.job_id} was answered without rows or a file")
        return JobResult(from_ipc(inline), answer.spark_ms, answer.prepared, wait_ms)

    async def _ask(
        self, job: PreparePlan | RehearseSteps | StepJob | ComputeDifference | SelectContents
    ) -> Answer:
        def run(reply: ReplySlot[Answer]) -> ExecutorMessage:
            return SubmitJob(job, reply, self._watcher)

        try:
            return await self._executor.ask(run)
        except get_cancelled_exc_class():
            # Best effort: a job that is not canceled ends on its own, and its answer is discarded.
            with suppress(WouldBlock, ResourceClosed, ConnectionBroken):
                self._executor.send_nowait(CancelJob(job.job_id))
            raise

    def forget(self) -> None:
        """Drop the prepared plan, without waiting."""
        if self._maybe_known:
            job = ForgetPlan(f"{self.dataflow}/forget", self.dataflow)
            with suppress(WouldBlock, ResourceClosed, ConnectionBroken):
                self._executor.send_nowait(SubmitJob(job, ReplySlot[Answer]()))


def _record_result(opened: OpenSpan, answer: RowsDone) -> None:
    """Record the job's results in its span, and export the engine's own spans."""
    opened.note(ROWS, answer.rows)
    opened.note(SPARK_MS, round(answer.spark_ms, 3))
    opened.note(PREPARED, answer.prepared)
    if answer.arrow is not None:
        opened.note(BYTES, len(answer.arrow))
    if answer.trace is None:
        return
    made: list[str | None] = []
    for each in answer.trace.spans:
        above = opened.traceparent if each.parent < 0 else made[each.parent]
        interval = (each.start_ns, each.end_ns)
        made.append(
            export_engine_span(each.name, interval, each.attributes, answer.trace.pid, above)
        )


def _write_file(path: Path, updates: pa.Table) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, updates.schema) as writer,
        ):
            writer.write_table(updates)
    except OSError as error:
        raise StorageError(
            f"cannot write rows for the engine to {path}: {error}", determinate=True
        ) from None


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)


def _take_file(path: Path) -> pa.Table:
    """Return the table in an IPC file, mapped into memory, and unlink the file."""
    try:
        source = pa.memory_map(str(path))
        table = pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise MalformedFrame(f"the engine's answer {path} is not an Arrow file: {error}") from None
    # The mapping keeps the pages for as long as the table is in use.
    path.unlink(missing_ok=True)
    return table
