"""The dataflow actor: performs the machine's effects and feeds it the resulting events.

Each dataflow has one actor. It sends commands to the listen and fetch tasks of its inputs, jobs to
the executor, and reports to the workers. Long work runs beside it as effects, at most one stage at
a time; a stage's result is a message.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, assert_never

import msgspec

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import ExecutorMessage, JobProgress
from actors.model.protocol.compute import (
    DataflowDescription,
    StatusResponse,
    SubscribeBatch,
    SubscribeExport,
    ViewExport,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    CompactionAllowed,
    DataflowMessage,
    DataflowReport,
    DataflowScheduled,
    EmitBatch,
    FetchFailed,
    FetchMessage,
    FetchPart,
    GrantDescriptions,
    InputStarted,
    InspectInputs,
    ListenFailed,
    ListenMessage,
    PartFetched,
    PartsDescribed,
    ReleaseLeases,
    StartInputs,
    StartListen,
    StopInputs,
    UpdatesInstalled,
    WritesAllowed,
)
from actors.replica.dataflow import events as m
from actors.replica.dataflow.dataflow_input import PartInterval, SnapshotProgress
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.events import REST, DataflowPhase, DataflowStep
from actors.replica.dataflow.frontier_reports import FrontierReports
from actors.replica.dataflow.hydrate import ResumedHydration
from actors.replica.dataflow.machine import DataflowMachine
from actors.replica.dataflow.passthrough import PassThrough, PassthroughStep, SubscribeOpening
from actors.replica.dataflow.step_metrics import forget_steps, measured, record_step
from actors.replica.dataflow.traces import StepTraces
from actors.replica.dataflow.view import StepOutcome, ViewStages
from actors.replica.dataflow.view_upkeep import ViewUpkeep
from actors.runtime.errors import (
    ConnectionBroken,
    DefiniteError,
    EngineError,
    EngineUnavailable,
    JobTooLarge,
    LocalProtocolError,
    PenstockError,
    ReadBelowSince,
    ResourceClosed,
)
from actors.runtime.kernel import Actor, ActorAddress, RunningEffect, with_jitter
from actors.runtime.metric_table import HYDRATION_SECONDS
from actors.runtime.progress import EMPTY, Frontier
from actors.runtime.settings import Settings
from actors.runtime.spans import measure, use_context

T = TypeVar("T")

log = logging.getLogger("penstock.dataflow")

# -- stages of a view that races with other replicas -----------------------------------------------


class StageDone(msgspec.Struct, frozen=True, gc=False):
    """Message of the actor to itself: a stage ended with this event and result."""

    event: m.Event
    result: Any = None


Stage: TypeAlias = tuple[int, Callable[[], Awaitable[Any]], Callable[[Any], StageDone]]
"""The step's number, the function to run, and the one that maps its result to an event."""


def commit_stage(view: ViewStages, step: DataflowStep, outcome: StepOutcome) -> Stage:
    """Return the stage that appends the step, unless another replica was first."""
    number = step.number

    def committed(upper: Frontier | None) -> StageDone:
        return StageDone(
            m.StepCommitted(number) if upper is None else m.UpperMismatched(number, upper)
        )

    return number, lambda: view.commit(step, outcome), committed


def standby_stage(view: ViewStages, step: DataflowStep) -> Stage:
    """Return the stage that waits until another replica has committed the step."""
    number = step.number

    def overtaken(upper: Frontier) -> StageDone:
        return StageDone(m.UpperMismatched(number, upper))

    return number, lambda: view.stand_by(step), overtaken


def follow_stage(view: ViewStages, step: DataflowStep) -> Stage:
    """Return the stage that reads another replica's append."""
    number = step.number

    def followed(made: tuple[StepOutcome, str | None]) -> StageDone:
        return StageDone(m.ReplicaFollowed(number, made[1]), made[0])

    return number, lambda: view.follow(step), followed


# -- addresses of the tasks ------------------------------------------------------------------------


class TaskAddresses:
    """Addresses of the tasks of the current incarnation, as workers report them. Commands go down
    and may wait for room; answers come up in reserved room, so the wait ends."""

    def __init__(self, inputs: int, workers: int) -> None:
        self._inputs = inputs
        self._workers = workers
        self._listens: dict[int, ActorAddress[ListenMessage]] = {}
        self._fetches: dict[int, dict[int, ActorAddress[FetchMessage]]] = {}
        self._turns = [0] * inputs
        """Counters for each input, since inputs that are asked alternately must not share one."""

    def clear(self) -> None:
        """Forget the tasks of the earlier incarnation."""
        self._listens.clear()
        self._fetches.clear()

    def started(self, message: InputStarted) -> bool:
        """Note a worker's task; return whether all tasks run."""
        self._fetches.setdefault(message.input_index, {})[message.worker] = message.fetch
        if message.listen is not None:
            self._listens[message.input_index] = message.listen
        return all(
            index in self._listens and len(self._fetches.get(index, ())) == self._workers
            for index in range(self._inputs)
        )

    async def tell(self, input_index: int, message: ListenMessage) -> None:
        """Send a message to the input's listen task."""
        listen = self._listens.get(input_index)
        if listen is None:
            return
        try:
            await listen.send(message)
        except (ResourceClosed, ConnectionBroken):
            return  # no error: a new incarnation has its own tasks, and a shutdown needs none

    async def ask(self, input_index: int, piece: PartInterval) -> None:
        """Ask the input's fetch tasks in turn. Raise `ResourceClosed` or `ConnectionBroken`."""
        self._turns[input_index] += 1
        fetches = self._fetches[input_index]
        turn = self._turns[input_index] % len(fetches)
        await fetches[turn].send(FetchPart(piece.time, piece.part))


# -- the actor -------------------------------------------------------------------------------------


_STEP_SHARE: Final = 1.5
"""Factor by which a paced step may exceed the expected time before its view gets too old."""
_FADING: Final = 0.9
"""Weight of the last expectation in the expected time of a step."""

_Message: TypeAlias = DataflowMessage | StageDone | m.RetryDue | m.StepDue | JobProgress


class DataflowActor(Actor[_Message]):
    """Runs one dataflow.

    It writes nothing until `WritesAllowed` comes. `arrangements` are shared within the replica,
    which has a name (`replica`) if there are others.
    """

    def __init__(
        self,
        description: DataflowDescription,
        workers: tuple[ActorAddress[DataflowReport], ...],
        executor: ActorAddress[ExecutorMessage],
        persist: PersistClient,
        settings: Settings,
        scratch: Path,
        *,
        arrangements: SharedArrangements | None = None,
        replica: str = "",
    ) -> None:
        self._description = description
        self._workers = workers
        self._executor = executor
        self._persist = persist
        self._settings = settings
        self._scratch = scratch
        self._arrangements = arrangements or SharedArrangements(scratch / "arrangements")
        self._replica = replica
        self._writable = False
        export = description.export
        self._machine = DataflowMachine(
            inputs=len(description.imports),
            durable=isinstance(export, ViewExport),
            opaque=isinstance(export, ViewExport) and not export.plan.strata,
            temporal=isinstance(export, ViewExport) and export.plan.temporal,
            paced=isinstance(export, ViewExport) and export.target_lag_ms > 0,
            as_of=description.as_of,
            until=description.until,
            budget_bytes=settings.inflight_bytes_per_dataflow_max,
            fetches_max=settings.fetches_in_flight_max * max(1, len(workers)),
        )
        self._view: ViewStages | None = None
        self._passing: PassThrough | None = None
        self._engine: EngineClient | None = None
        self._tasks = TaskAddresses(len(description.imports), len(workers))
        self._stage: RunningEffect | None = None
        self._patience: RunningEffect | None = None
        self._pace: RunningEffect | None = None
        self._step_ms = 0.0
        """Expected time of a step, from its cut until it is durable."""
        self._outcome: StepOutcome | PassthroughStep | None = None
        self._held_commit: m.CommitStep | None = None
        self._opened: m.StateRestored | None = (
            None  # fed once the subscribe's snapshot is acknowledged
        )
        self._restoring: m.RestoreState | None = None  # a view's, while its restore runs
        self._awaiting: set[int] = set()
        self._restore_began_ms = 0.0
        self._step_began_ms = 0.0
        self._status = StatusResponse(description.id, "")
        """Status with the measures of the last step."""
        self._frontiers = FrontierReports(description, self._machine, workers)
        persist.ledger.add(self._frontiers.memory)
        self._traces = StepTraces(persist, description)
        self._upkeep: ViewUpkeep | None = None

    async def on_start(self) -> None:
        """Create the members that need the actor's context."""
        description, export = self._description, self._description.export
        if isinstance(export, ViewExport):
            self._engine = EngineClient(
                self._executor,
                self.ctx.clock,
                self._settings,
                self._scratch,
                description.id,
                self.ctx.self,
                self._replica,
            )
            self._view = ViewStages(
                self._engine,
                self._persist,
                description,
                export,
                self._scratch,
                self._arrangements,
                raced=bool(self._replica),
            )
            self._upkeep = ViewUpkeep(self.ctx, self._view, self._settings.hold_downgrade_ms)
        else:
            self._passing = PassThrough(
                description,
                len(self._workers),
                self._persist,
                self.ctx.clock,
                self._settings,
                self._scratch,
            )

    async def on_stop(self) -> None:
        """Release the engine's plan and the arrangements."""
        self._traces.end()
        forget_steps(self._description.id)
        if self._engine is not None:
            # Jobs are cancelled already, with their stage.
            self._engine.forget()
        if self._view is not None:
            await self._view.close()

    def describe(self) -> str:
        """Return what the dataflow waits for, as text for people."""
        return self._machine.waiting_for()

    # -- messages ----------------------------------------------------------------------------------

    async def receive(self, message: _Message) -> None:
        """Handle one `DataflowMessage` or the result of a stage."""
        try:
            await self._receive(message)
        except BaseException:
            # `on_stop` does not run after a crash: release the arrangements here.
            self._traces.end()
            if self._view is not None:
                self._view.abandon()
            raise

    async def _receive(self, message: _Message) -> None:
        match message:
            case StageDone(event=event, result=result):
                await self._stage_done(event, result)
            case PartsDescribed():
                self._traces.described(message)
                with use_context(None):
                    await self._feed(message)
            case PartFetched() | FetchFailed() | ListenFailed() | m.RetryDue() | m.StepDue():
                await self._feed(message)
            case InputStarted():
                await self._input_started(message)
            case UpdatesInstalled(incarnation=incarnation, worker=worker):
                await self._acknowledged(incarnation, worker, message.upper)
            case BatchEmitted(incarnation=incarnation):
                await self._acknowledged(incarnation, 0, message.upper)
            case DataflowScheduled():
                self._traces.scheduled()
                await self._feed(m.SuspensionEnded())
            case InspectInputs(reply):
                named = zip(self._machine.inputs, self._description.imports, strict=False)
                reply.set(tuple(s.statistics(self._description.id, i.shard) for s, i in named))
            case JobProgress():
                # At rest only rehearsals run, which are not the dataflow's progress.
                if self._machine.state not in REST:
                    self._show(self._machine.state.value, message.shown())
            case WritesAllowed():
                self._writable = True
                held, self._held_commit = self._held_commit, None
                if held is not None:
                    await self._perform(held)
                elif self._restoring is not None and self._stage is not None:
                    # The read-only restore may wait for another writer: now it may write itself.
                    self._stage.cancel()
                    self._restore(self._restoring)
            case CompactionAllowed(frontier=frontier):
                if frontier >= EMPTY:
                    # The worker stops this actor soon; until then it rests.
                    await self._feed(m.DropRequested())
            case _:
                assert_never(message)

    async def _feed(self, event: m.Event) -> None:
        number = self._machine.number
        try:
            effects = self._machine.handle(event)
        except LocalProtocolError as error:
            # A task broke the protocol, so its input cannot be trusted: freeze the incarnation.
            log.warning("%s: %s", self.ctx.path, error)
            broken = ListenFailed(self._description.id, self._machine.incarnation, 0, error)
            effects = self._machine.handle(broken)
        for effect in effects:
            await self._perform(effect)
        self._frontiers.after(event, number)
        if isinstance(event, PartsDescribed | PartFetched) and self._machine.reading() is not None:
            self._show("hydrating", "")

    async def _stage_done(self, event: m.Event, result: Any) -> None:
        machine = self._machine
        current = getattr(event, "number", None) == machine.number
        match event:
            case m.StateRestored(incarnation=incarnation) if incarnation == machine.incarnation:
                if isinstance(result, SubscribeBatch):
                    # Listening starts only when the subscriber has acknowledged the snapshot.
                    self._opened = event
                    self._emit(result)
                    return
                if not isinstance(self._description.export, SubscribeExport):
                    took_ms = self.ctx.monotonic_ms() - self._restore_began_ms
                    measure(HYDRATION_SECONDS, took_ms / 1000)
                if self._upkeep is not None:
                    self._upkeep.warm(incarnation)
            case m.DropRequested() if isinstance(result, SubscribeBatch):
                self._emit(result)  # the batch has the error that ends the subscribe
            case m.StepInstalled():
                self._traces.installed(machine.step, self._status)
                if self._upkeep is not None:
                    self._upkeep.merge()
                    self._upkeep.rehearse(machine.incarnation)
            case m.StandbyExpired() | m.UpperMismatched() if (
                current and machine.state is DataflowPhase.STANDING_BY
            ):
                # The append and its timeout race: the first ends the other.
                self._end_stage()
            case m.StepComputed() | m.ReplicaFollowed() if current:
                self._outcome = result
            case m.StepCommitted() if current:
                step_ms = self.ctx.monotonic_ms() - self._step_began_ms
                self._status = msgspec.structs.replace(self._status, step_ms=step_ms)
                self._step_ms = max(step_ms, _FADING * self._step_ms)
                record_step(self._status)
        await self._feed(event)

    async def _input_started(self, message: InputStarted) -> None:
        if message.incarnation != self._machine.incarnation:
            return
        if self._tasks.started(message):
            await self._feed(m.InputsReady(message.incarnation))

    async def _acknowledged(self, incarnation: int, worker: int, upper: Frontier) -> None:
        """Note that a worker has installed or passed on the step's updates, or the snapshot."""
        opened = self._opened
        if opened is not None and (incarnation, upper) == (opened.incarnation, opened.lo):
            self._opened = None
            await self._feed(opened)
            return
        step = self._machine.step
        if step is None or (incarnation, upper) != (step.incarnation, step.hi):
            return
        if worker in self._awaiting:
            self._awaiting.discard(worker)
            if not self._awaiting:
                self._traces.installed(step, self._status)
                await self._feed(m.StepInstalled(step.number))

    # -- effects -----------------------------------------------------------------------------------

    async def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.RestoreState():
                self._restore(effect)
            case m.StartTasks(incarnation=incarnation):
                self._tasks.clear()
                self._tell_workers(StartInputs(self._description.id, incarnation))
            case m.StartListening():
                start = StartListen(effect.as_of, effect.snapshot, self._description.until)
                await self._tasks.tell(effect.input_index, start)
            case m.RequestPart(input_index=input_index, piece=piece):
                await self._ask(input_index, piece)
            case m.ReleaseParts(input_index=input_index, keys=keys):
                await self._tasks.tell(input_index, ReleaseLeases(keys))
            case m.GrantCredit(input_index=input_index, bytes=size):
                await self._tasks.tell(input_index, GrantDescriptions(size))
            case m.ComputeStep(step=step):
                self._compute(step)
            case m.CommitStep():
                self._commit(effect)
            case m.StandBy(step=step):
                self._stand_by(step)
            case m.FollowReplica(step=step):
                self._follow(step)
            case m.InstallStep(step=step):
                if self._install(step):
                    await self._feed(m.DropRequested())
            case m.ReportFrontier():
                self._report(effect)
            case m.PublishStatus(state=state, text=text):
                self._show(state, text)
            case m.RetryLater(attempt=attempt):
                # Jitter keeps dataflows that failed together from retrying together.
                delay = self._settings.retry_delay_ms(attempt)
                self.ctx.after(with_jitter(delay, self.ctx.random), m.RetryDue(attempt))
            case m.PaceStep(number=number, lo=lo):
                self._pace_step(number, lo)
            case m.CancelWork():
                self._cancel_work()
            case m.FinishDataflow(lo=lo):
                if isinstance(self._description.export, SubscribeExport) and lo < EMPTY:
                    self._emit(SubscribeBatch(lo, EMPTY))
                self._tell_workers(StopInputs(self._description.id, self._machine.incarnation))
                self._show("dropped", "complete: nothing more will come")

    def _run_stage(
        self,
        number: int,
        run: Callable[[], Awaitable[T]],
        done: Callable[[T], StageDone],
    ) -> None:
        """Run a stage beside the actor; failures become the machine's events."""
        incarnation = self._machine.incarnation

        def failed(error: Exception) -> StageDone:
            self._restoring = None
            if isinstance(error, DefiniteError) and number:
                return StageDone(m.FailedDefinitely(number, str(error)))
            if not isinstance(error, PenstockError):
                log.exception("%s: a stage failed", self.ctx.path, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            restart, final = isinstance(error, ReadBelowSince), isinstance(error, JobTooLarge)
            # Memory may do for half of the rows.
            too_large = isinstance(error, EngineError) and not isinstance(error, EngineUnavailable)
            return StageDone(m.StageFailed(incarnation, number, text, restart, too_large, final))

        self._stage = self.ctx.effect(self._traces.inside(run), done=done, failed=failed)

    def _restore(self, effect: m.RestoreState) -> None:
        self._restore_began_ms = self.ctx.monotonic_ms()
        incarnation, lo = effect.incarnation, effect.lo
        view, passing = self._view, self._passing
        restoring = self._traces.restoring
        if view is not None:
            self._restoring = effect
            writable = self._writable

            def resumed(found: ResumedHydration) -> StageDone:
                self._restoring = None
                as_of = min(found.lo, EMPTY - 1) - 1
                # A view's arrangements read their own snapshots.
                none = (False,) * len(self._description.imports)
                in_error = bool(found.output_errors)
                return StageDone(
                    m.StateRestored(incarnation, found.lo, as_of, none, in_error=in_error)
                )

            def hydrating() -> None:
                if self._upkeep is not None:
                    self._upkeep.rehearse_first(incarnation)

            restore = restoring(
                incarnation, lambda: view.restore(incarnation, hydrating, writable=writable)
            )
            self._run_stage(0, restore, resumed)
        elif passing is not None:

            def started(found: m.StateRestored | SubscribeOpening) -> StageDone:
                if isinstance(found, SubscribeOpening):
                    return StageDone(found.restored or m.DropRequested(), found.batch)
                return StageDone(found)

            restart = restoring(incarnation, lambda: passing.restore(incarnation, lo))
            self._run_stage(0, restart, started)

    def _compute(self, step: DataflowStep) -> None:
        self._traces.begin(step)
        self._outcome = None
        rows_in = sum(table.num_rows for tables in step.deltas for table in tables)
        self._begin_measures(rows_in)
        computed, work = m.StepComputed(step.number), self._view or self._passing
        assert work is not None, "made at the start"
        self._run_stage(
            step.number, lambda: work.compute(step), lambda made: StageDone(computed, made)
        )

    def _commit(self, effect: m.CommitStep) -> None:
        view, step = self._view, effect.step
        assert view is not None, "only a view is durable"
        if not self._writable:
            # Kept until `WritesAllowed` comes: a read-only replica computes but does not write.
            self._held_commit = effect
            return
        if step.error is not None or not step.times:
            if not step.times:
                self._begin_measures()
            self._outcome = view.without_change(step)
        outcome = self._outcome
        assert isinstance(outcome, StepOutcome)
        self._status = measured(self._status, outcome)
        self._run_stage(*commit_stage(view, step, outcome))

    def _stand_by(self, step: DataflowStep) -> None:
        assert self._view is not None, "only a view is raced for"
        done = StageDone(m.StandbyExpired(step.number))
        # The other replica may have died: this one makes the step itself after `standby_ms`.
        self._patience = self.ctx.after(self._settings.standby_ms, done)
        self._run_stage(*standby_stage(self._view, step))

    def _follow(self, step: DataflowStep) -> None:
        assert self._view is not None, "only a view is raced for"
        self._begin_measures()
        self._run_stage(*follow_stage(self._view, step))

    def _install(self, step: DataflowStep) -> bool:
        """Pass the step on; return True if a subscribe ends with it, in error."""
        if not step.times and not step.snapshot:
            self._begin_measures()
        # Cleared here, so that the step's rows are not kept until the next step.
        view, outcome, self._outcome = self._view, self._outcome, None
        if view is not None:
            assert isinstance(outcome, StepOutcome)
            computed = outcome
            installed = StageDone(m.StepInstalled(step.number))
            self._run_stage(step.number, lambda: view.install(step, computed), lambda _: installed)
            return False
        assert self._passing is not None
        if not isinstance(outcome, PassthroughStep) or outcome.number != step.number:
            outcome = self._passing.make(step)  # without changes, so it does not block
        self._status = msgspec.structs.replace(self._status, rows_out=outcome.rows)
        if outcome.batch is not None:
            self._awaiting = {0}
            self._emit(outcome.batch)
            return outcome.batch.error is not None
        self._awaiting = set(range(len(self._workers)))
        with use_context(self._traces.here):
            for worker, install in zip(self._workers, outcome.installs, strict=True):
                worker.reply(install)
        return False

    def _pace_step(self, number: int, lo: Frontier) -> None:
        """Set the timer of the next step so that it ends just before the output is too old."""
        export = self._description.export
        assert isinstance(export, ViewExport), "only a view is paced"
        target_ms = export.target_lag_ms
        age_ms = max(0, self.ctx.now_ms() - lo)
        delay_ms = max(0.0, target_ms - age_ms - _STEP_SHARE * self._step_ms)
        if self._pace is not None:
            self._pace.cancel()
        self._pace = self.ctx.after(delay_ms, m.StepDue(number))

    def _end_stage(self) -> None:
        for work in (self._stage, self._patience):
            if work is not None:
                work.cancel()
        self._stage = self._patience = None

    def _cancel_work(self) -> None:
        self._traces.end()
        self._end_stage()
        if self._pace is not None:
            self._pace.cancel()
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._held_commit = None

    # -- telling others ----------------------------------------------------------------------------

    def _tell_workers(self, message: DataflowReport) -> None:
        """Send a message to every worker."""
        for worker in self._workers:
            # In reserved room: the worker may wait for room here, so a wait could deadlock.
            worker.reply(message)

    async def _ask(self, input_index: int, piece: PartInterval) -> None:
        try:
            with use_context(self._traces.of(input_index, piece)):
                await self._tasks.ask(input_index, piece)
        except (ResourceClosed, ConnectionBroken) as error:
            name, incarnation = self._description.id, self._machine.incarnation
            lost = FetchFailed(name, incarnation, input_index, piece.time, piece.part.key, error)
            self.ctx.self.reply(lost)

    def _emit(self, batch: SubscribeBatch) -> None:
        signed = self._traces.sign(batch)
        self._workers[0].reply(EmitBatch(self._description.id, self._machine.incarnation, signed))

    def _report(self, effect: m.ReportFrontier) -> None:
        self._frontiers.report()
        self._show(self._machine.state.value, "")
        if self._upkeep is not None and self._writable:
            self._upkeep.move_holds(effect.frontier)

    def _show(self, state: str, text: str) -> None:
        machine = self._machine
        if not text and self._view is not None and state == DataflowPhase.ERRORED.value:
            text = self._view.held_error
        far = machine.reading() or SnapshotProgress()
        self._status = msgspec.structs.replace(
            self._status,
            state=state,
            text=text,
            hi=machine.lo,
            steps=machine.steps,
            parts_read=far.parts_read,
            parts_total=far.parts_total,
            bytes_read=far.bytes_read,
            bytes_total=far.bytes_total,
        )
        self._workers[0].reply(self._status)

    def _begin_measures(self, rows_in: int = 0) -> None:
        """Begin to measure a step."""
        self._step_began_ms = self.ctx.monotonic_ms()
        self._status = StatusResponse(self._description.id, "", rows_in=rows_in)
