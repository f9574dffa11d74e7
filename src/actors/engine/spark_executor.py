"""The engine's actor: the only owner of Spark, which runs in a child process.

Theory of operation. Jobs wait in a bounded queue and go to the child while it has fewer than
`engine_jobs_in_flight_max`. A single effect owns a child for its whole life: it starts the child,
reads its answers, and finally kills it together with all processes that it started. A child that
died is replaced after a delay that doubles with each failure.

Rules
- Every `SubmitJob` is answered exactly once; the job's entry is then removed from the tables.
- A new child first gets every prepared plan, then the jobs that were in flight, in order.
- If a child dies on its own, the jobs in flight become suspects and run alone until they are
  answered, so an innocent job is cleared at its next run. A job during which
  `engine_attempts_max` children died while it ran alone fails with `JobTooLarge`, and is refused
  for a while (`actors.engine.spark.job_quarantine`).
- A cancellation is answered immediately. The job's slot in the child becomes free when the child
  confirms; a child that does not confirm within `CANCEL_TIMEOUT_MS` is replaced.
- Messages from a child carry its number, and those of an earlier child are ignored.
- If the engine cannot be started, waiting jobs fail with `EngineUnavailable`: immediately if it
  has never been up, else after `START_FAILURES_MAX` failures in a row. The start is retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Final, TypeAlias, assert_never

import msgspec

from actors.engine.spark.job_quarantine import JobQuarantine
from actors.engine.spark.launch import EngineProcess, launch, make_clean_folder
from actors.model.plan.job_log import JobLog
from actors.model.plan.jobs import (
    Answer,
    CancelChildJob,
    CancelJob,
    EngineCondition,
    EngineReady,
    ExecutorMessage,
    ForgetPlan,
    InspectEngine,
    InspectJobs,
    Job,
    JobFailed,
    JobProgress,
    LocateConnect,
    PlanPrepared,
    PreparePlan,
    RowsDone,
    SubmitJob,
    kind_of,
)
from actors.runtime.errors import (
    ConnectionBroken,
    EngineUnavailable,
    InvalidUsage,
    OperationCanceled,
    PenstockError,
    ResourceBusy,
    ResourceClosed,
    from_wire,
)
from actors.runtime.kernel import Actor, ActorClock, RunningEffect
from actors.runtime.measurement import Measurement
from actors.runtime.memory_ledger import resident_bytes
from actors.runtime.metric_table import (
    ENGINE_DEATHS,
    ENGINE_JOB_SECONDS,
    ENGINE_JOBS,
    ENGINE_JOBS_ENDED,
    ENGINE_MEMORY,
    ENGINE_QUARANTINED,
    ENGINE_UP,
    ENGINE_WAIT_SECONDS,
)
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TRACEPARENT, with_context

CANCEL_TIMEOUT_MS: Final = 30_000
START_FAILURES_MAX: Final = 3
DEATHS_OUTSIDE: Final = 3
"""Number of SIGKILLs that count as one death.

They come from an operator, or from a system that is short of memory, so a job may not be to blame.
"""

Launch: TypeAlias = Callable[[Settings, Path, ActorClock], Awaitable[EngineProcess]]
"""Starts a child (tests replace it)."""


class _Started(msgspec.Struct, frozen=True, gc=False):
    number: int
    process: EngineProcess
    ready: EngineReady


class _Answered(msgspec.Struct, frozen=True, gc=False):
    number: int
    answer: Answer


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """A child exited (`why`), or could not be started (`error`)."""

    number: int
    error: PenstockError | None
    why: str = ""
    outside: bool = False
    """True if the child was killed from outside, which says little about its jobs."""


class _StartAgain(msgspec.Struct, frozen=True, gc=False):
    pass


class _CancelOverdue(msgspec.Struct, frozen=True, gc=False):
    number: int
    job_id: str


_Message: TypeAlias = ExecutorMessage | _Started | _Answered | _Ended | _StartAgain | _CancelOverdue


class _Entry:
    """A job that is waiting or in flight."""

    __slots__ = ("alone", "attempts", "canceled", "order", "overdue", "run", "traceparent")

    def __init__(self, run: SubmitJob, order: int, *, alone: bool) -> None:
        self.run = run
        self.order = order
        self.attempts = Fraction(0)
        """Number of times that the engine died while the job ran alone."""
        self.alone = alone
        """True if no other job may run at the same time."""
        # True once the job was canceled and its caller answered; it then only occupies its slot.
        self.canceled = False
        self.overdue: RunningEffect | None = None
        """Timer of a canceled job, which replaces a child that does not confirm."""
        self.traceparent = TRACEPARENT.get()
        """Trace context of the caller. The answer to a traced job has a `JobTrace`."""

    @property
    def job(self) -> Job:
        return self.run.job


class SparkExecutor(Actor[_Message]):
    """Runs jobs in a child process that holds PySpark (see the docstring of the module).

    `directory` is the engine's scratch folder, used by no other engine. Answers are written to its
    folder ``out``; files of an earlier service are removed at the start. `SubmitJob` is answered
    with `QueryAnalyzed`, `StatementParsed`, `PlanPrepared` or `RowsDone`, or fails with
    `DefiniteError`, `QueryRejected`, `AccessDenied`, `JobTooLarge`, `OperationCanceled`,
    `EngineLost`, `EngineUnavailable`, `ResourceBusy` or `InvalidUsage`.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        launch_engine: Launch = launch,
        *,
        at_first_job: bool = False,
    ) -> None:
        """Store the environment. `at_first_job`: start the engine only when there is a job for
        it."""
        self._settings = settings
        self._at_first_job = at_first_job
        self._launch = launch_engine
        self._directory = directory
        # Number of the current child; 0 before the first start.
        self._number = 0
        # The effect that owns the current child.
        self._life: RunningEffect | None = None
        # The current child once it is up; None while none is.
        self._process: EngineProcess | None = None
        # What the child reported when it came up; None while none is up.
        self._ready: EngineReady | None = None
        self._failures = 0
        """Number of deaths and failed starts since the last answer; each makes the next start wait
        longer."""
        self._failed_starts = 0
        """Number of failed starts since the engine was last up."""
        # Why no child can be started; None if that is not known, or once a child is up.
        self._unavailable: PenstockError | None = None
        # Number of jobs accepted so far, which gives each its place in the order.
        self._order = 0
        # Number of children that died after they were up.
        self._deaths = 0
        self._replaced = False
        """True if this actor itself killed the child."""
        self._quarantine = JobQuarantine(settings)
        # Prepared plans by dataflow, which every new child gets.
        self._plans: dict[str, PreparePlan] = {}
        # Jobs that are not sent yet, in the order in which they are sent.
        self._waiting: deque[_Entry] = deque()
        # Jobs in the child by id; canceled ones stay until the child confirms.
        self._flying: dict[str, _Entry] = {}
        self._locating: list[LocateConnect] = []
        """Callers that asked where the engine is while none was up."""
        self._log = JobLog(settings.log_rows_max)

    async def on_start(self) -> None:
        """Clean the folder and start the first child."""
        await self.ctx.clock.run_blocking(lambda: make_clean_folder(self._directory))
        if not self._at_first_job:
            self._start()

    async def on_stop(self) -> None:
        """Fail the remaining jobs; the child is dead by now."""
        for entry in self._entries():
            entry.run.reply.fail(ResourceClosed("the engine was stopped"))
        for asked in self._locating:
            asked.reply.fail(ResourceClosed("the engine was stopped"))
        await self.ctx.clock.run_blocking(lambda: make_clean_folder(self._directory))

    async def receive(self, message: _Message) -> None:
        """Handle one message."""
        match message:
            case SubmitJob():
                self._start_first()
                self._run(message)
            case CancelJob():
                self._cancel(message.job_id)
            case InspectJobs():
                message.reply.set(self._log.notes(self.ctx.monotonic_ms()))
            case InspectEngine():
                message.reply.set(self._condition())
            case LocateConnect():
                self._start_first()
                self._locate(message)
            case _Answered() if message.number == self._number:
                self._answered(message.answer)
            case _Answered():
                self._discard(message.answer)
            case _Started() if message.number == self._number:
                self._started(message)
            case _Ended() if message.number == self._number:
                self._ended(message)
            case _StartAgain():
                self._start()
            case _CancelOverdue() if message.number == self._number:
                self._overdue(message.job_id)
            case _Started() | _Ended() | _CancelOverdue():
                pass  # From a child that has been replaced.
            case _:
                assert_never(message)
        self._send_waiting()

    def _condition(self) -> EngineCondition:
        if self._ready is not None:
            return EngineCondition("up")
        if self._unavailable is not None:
            return EngineCondition("unavailable", str(self._unavailable).partition("\n")[0])
        return EngineCondition("starting" if self._number else "idle")

    def measures(self) -> Iterator[Measurement]:
        """Yield the engine's metrics, by the actor's name."""
        name, log = self.ctx.path.rpartition("/")[2], self._log
        yield Measurement(ENGINE_UP, int(self._ready is not None), (name,))
        yield Measurement(ENGINE_JOBS, len(self._waiting), (name, "waiting"))
        yield Measurement(ENGINE_JOBS, len(self._flying), (name, "running"))
        for outcome, count in log.outcomes.items():
            yield Measurement(ENGINE_JOBS_ENDED, count, (name, outcome))
        yield Measurement(ENGINE_WAIT_SECONDS, log.waited, (name,))
        yield Measurement(ENGINE_JOB_SECONDS, log.took, (name,))
        yield Measurement(ENGINE_DEATHS, self._deaths, (name,))
        yield Measurement(ENGINE_QUARANTINED, len(self._quarantine), (name,))
        if self._ready is not None:
            for process, pid in (("child", self._ready.pid), ("jvm", self._ready.jvm_pid)):
                # Behind a Spark Connect server there is no JVM of ours.
                if pid and (size := resident_bytes(pid)):
                    yield Measurement(ENGINE_MEMORY, size, (name, process))

    def describe(self) -> str:
        """Return the engine's state and its jobs as readable text."""
        if self._ready is not None:
            ready = self._ready
            where = f"on Java {ready.java_version}" if ready.jvm_pid else "over Spark Connect"
            jvm = f", JVM {ready.jvm_pid}" if ready.jvm_pid else ""
            state = f"Spark {ready.spark_version} {where}, child {ready.pid}{jvm}"
        elif self._unavailable is not None:
            state = f"unavailable: {str(self._unavailable).splitlines()[0]}"
        elif self._number:
            state = f"starting child number {self._number}"
        else:
            state = "not started: no job has been submitted yet"
        names = ", ".join(
            f"{kind_of(entry.job)} {entry.job.job_id}{' (canceled)' * entry.canceled}"
            for entry in self._flying.values()
        )
        return (
            f"{state}; running {len(self._flying)} [{names}], waiting {len(self._waiting)}, "
            f"plans {len(self._plans)}, children lost {self._deaths}, "
            f"jobs in quarantine {len(self._quarantine)}"
        )

    # -- jobs -----------------------------------------------------------------------------------

    def _run(self, run: SubmitJob) -> None:
        job = run.job
        if isinstance(job, ForgetPlan):
            self._plans.pop(job.dataflow, None)
            self._quarantine.forget(job.dataflow)
            self._send(job)
            run.reply.set(PlanPrepared(job.job_id))
            return
        if isinstance(job, CancelChildJob):
            self._cancel(job.job_id)
            run.reply.set(PlanPrepared(job.job_id))
            return
        if any(entry.job.job_id == job.job_id for entry in self._entries()):
            run.reply.fail(InvalidUsage(f"a job named {job.job_id!r} is already running"))
        elif refusal := self._quarantine.find_refusal(job, self.ctx.monotonic_ms()):
            run.reply.fail(refusal)
        elif self._unavailable is not None:
            run.reply.fail(EngineUnavailable(str(self._unavailable)))
        elif len(self._waiting) >= self._settings.engine_queue_max:
            run.reply.fail(
                ResourceBusy(
                    f"{len(self._waiting)} jobs are waiting for the engine "
                    f"(engine_queue_max = {self._settings.engine_queue_max}); try again later"
                )
            )
        else:
            self._order += 1
            self._log.asked(job, self.ctx.now_ms(), self.ctx.monotonic_ms())
            self._waiting.append(_Entry(run, self._order, alone=self._quarantine.is_suspect(job)))

    def _locate(self, asked: LocateConnect) -> None:
        """Answer with the engine that is up, or as soon as one is."""
        if self._ready is not None:
            asked.reply.set(self._ready)
        elif self._unavailable is not None:
            asked.reply.fail(EngineUnavailable(str(self._unavailable)))
        else:
            # Callers that have left are dropped, so that they do not accumulate during a start that
            # hangs.
            self._locating = [one for one in self._locating if not one.reply.answered]
            self._locating.append(asked)

    def _cancel(self, job_id: str) -> None:
        for entry in self._waiting:
            if entry.job.job_id == job_id:
                self._waiting.remove(entry)
                self._fail(entry, OperationCanceled(f"job {job_id} was canceled"))
                return
        flying = self._flying.get(job_id)
        if flying is None or flying.canceled:
            return
        # The entry stays, since its slot is occupied until the child confirms.
        flying.canceled = True
        self._fail(flying, OperationCanceled(f"job {job_id} was canceled"))
        self._send(CancelChildJob(job_id))
        overdue = _CancelOverdue(self._number, job_id)
        flying.overdue = self.ctx.after(CANCEL_TIMEOUT_MS, overdue)

    def _fail(self, entry: _Entry, error: PenstockError) -> None:
        """Answer a job with an error."""
        self._log.ended(entry.job.job_id, self.ctx.monotonic_ms(), error)
        entry.run.reply.fail(error)

    def _overdue(self, job_id: str) -> None:
        entry = self._flying.get(job_id)
        if entry is not None and entry.canceled and self._process is not None:
            # The jobs in flight do not become suspects because of this death.
            self._replaced = True
            self._process.kill()  # `_Ended` follows, as after any other end.

    def _send_waiting(self) -> None:
        while self._process is not None and self._waiting and self._has_room(self._waiting[0]):
            entry = self._waiting.popleft()
            if entry.run.reply.answered:  # The caller has gone.
                self._log.ended(
                    entry.job.job_id, self.ctx.monotonic_ms(), OperationCanceled.__name__
                )
                continue
            try:
                self._process.send(with_context(entry.job, entry.traceparent))
            except PenstockError as error:  # Too large for a frame; nothing was sent.
                self._fail(entry, error)
                continue
            self._log.started(entry.job.job_id, self.ctx.monotonic_ms())
            self._flying[entry.job.job_id] = entry
            if isinstance(entry.job, PreparePlan):
                self._plans[entry.job.dataflow] = entry.job

    def _has_room(self, entry: _Entry) -> bool:
        """Return whether a job may go to the child in addition to the jobs in flight."""
        if entry.alone or any(other.alone for other in self._flying.values()):
            return not self._flying
        return len(self._flying) < self._settings.engine_jobs_in_flight_max

    def _send(self, job: Job) -> None:
        if self._process is not None:
            self._process.send(job)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, JobProgress):
            self._log.progressed(answer)
            running = self._flying.get(answer.job_id)
            if running is not None and running.run.watcher is not None:
                with suppress(ResourceClosed, ConnectionBroken):
                    running.run.watcher.reply(answer)
            return
        entry = self._flying.pop(answer.job_id, None)
        if entry is not None and entry.overdue is not None:
            entry.overdue.cancel()
        if entry is None or entry.canceled:
            self._discard(answer)
        elif isinstance(answer, JobFailed):
            self._failures = 0
            # A plan that failed must not be sent to new children.
            if (
                isinstance(entry.job, PreparePlan)
                and self._plans.get(entry.job.dataflow) is entry.job
            ):
                del self._plans[entry.job.dataflow]
            self._fail(entry, from_wire(answer.code, answer.text, True))
        else:
            self._failures = 0
            # An answer proves that the job does not kill the engine.
            self._quarantine.release(entry.job)
            self._log.ended(answer.job_id, self.ctx.monotonic_ms(), answer)
            if entry.run.reply.answered:  # The caller has gone.
                self._discard(answer)
            entry.run.reply.set(answer)

    def _discard(self, answer: Answer) -> None:
        """Remove the files of an answer that nobody reads."""
        paths = answer.paths() if isinstance(answer, RowsDone) else ()

        def remove_all() -> None:
            for path in paths:
                Path(path).unlink(missing_ok=True)

        async def remove() -> None:
            await self.ctx.clock.run_blocking(remove_all)

        if paths:
            self.ctx.effect(remove, done=lambda _: None, failed=lambda _: None)

    def _entries(self) -> Iterable[_Entry]:
        return [*self._flying.values(), *self._waiting]

    # -- the child ------------------------------------------------------------------------------

    def _start_first(self) -> None:
        """Start the first child unless it was started before."""
        if self._number == 0:
            self._start()

    def _start(self) -> None:
        self._number += 1
        number = self._number

        async def live() -> _Ended:
            process = await self._launch(self._settings, self._directory, self.ctx.clock)
            try:
                self.ctx.self.reply(_Started(number, process, await process.ready()))
                while (answer := await process.receive()) is not None:
                    self.ctx.self.reply(_Answered(number, answer))
            finally:
                await process.end()
            return _Ended(number, None, process.why, process.killed_outside)

        self._life = self.ctx.effect(
            live,
            done=lambda ended: ended,
            failed=lambda error: _Ended(number, _as_engine_error(error)),
        )

    def _started(self, message: _Started) -> None:
        self._process, self._ready = message.process, message.ready
        self._unavailable, self._failed_starts = None, 0
        for asked in self._locating:
            asked.reply.set(message.ready)
        self._locating.clear()
        for plan in self._plans.values():
            # This is cheap: the child neither builds nor answers a known plan.
            self._process.send(msgspec.structs.replace(plan, known=True))

    def _ended(self, message: _Ended) -> None:
        error, why = message.error, message.why
        was_up, self._process, self._ready = self._process is not None, None, None
        self._failures += 1
        if was_up:
            self._deaths += 1
            why = str(error or why or "the child exited")
            self._take_back(why, DEATHS_OUTSIDE if message.outside else 1)
        else:
            self._failed_starts += 1
            # Deaths of a running engine do not count, since it could be started.
            if self._failed_starts >= START_FAILURES_MAX or not self._deaths:
                self._report_unavailable(
                    error or EngineUnavailable("the engine exited while starting")
                )
        self.ctx.after(self._settings.retry_delay_ms(self._failures), _StartAgain())

    def _report_unavailable(self, error: PenstockError) -> None:
        """Fail everything that waits for the engine."""
        self._unavailable = error
        for entry in self._waiting:
            self._fail(entry, EngineUnavailable(str(error)))
        self._waiting.clear()
        for asked in self._locating:
            asked.reply.fail(EngineUnavailable(str(error)))
        self._locating.clear()

    def _take_back(self, why: str, share: int) -> None:
        """Requeue the jobs that were in flight: at the front, in their order, except that jobs
        which ran alone go last.

        `share` such deaths count as one.
        """
        blamed = not self._replaced
        single = len(self._flying) == 1
        self._replaced = False
        again: list[_Entry] = []
        for entry in self._flying.values():
            entry.attempts += Fraction(blamed and single, share)
            entry.alone |= blamed
            if entry.overdue is not None:
                entry.overdue.cancel()
            # A canceled job was already answered.
            if entry.canceled:
                continue
            if entry.run.reply.answered:
                self._log.ended(
                    entry.job.job_id, self.ctx.monotonic_ms(), OperationCanceled.__name__
                )
            elif entry.attempts and entry.attempts >= self._attempts_max(entry):
                self._give_up(entry, why)
            else:
                again.append(entry)
        self._flying.clear()
        # Running a job again is safe: it is a pure function of its message.
        again.sort(key=lambda entry: entry.order)
        self._waiting.extendleft(entry for entry in reversed(again) if not entry.attempts)
        # Last, so that all other jobs get their turn between two deaths.
        self._waiting.extend(entry for entry in again if entry.attempts)

    def _attempts_max(self, entry: _Entry) -> int:
        known = self._quarantine.is_suspect(entry.job)
        return 1 if known else self._settings.engine_attempts_max

    def _give_up(self, entry: _Entry, why: str) -> None:
        job, words = entry.job, {1: "once", 2: "twice"}
        times = words.get(int(entry.attempts), f"{int(entry.attempts)} times")
        text = (
            f"{kind_of(job)} {job.job_id} ended the engine {times} while running alone; last: {why}"
        )
        self._fail(entry, self._quarantine.add(job, text, self.ctx.monotonic_ms()))
        if isinstance(job, PreparePlan) and self._plans.get(job.dataflow) is job:
            del self._plans[job.dataflow]


def _as_engine_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return EngineUnavailable(f"cannot start the engine: {type(error).__name__}: {error}")
