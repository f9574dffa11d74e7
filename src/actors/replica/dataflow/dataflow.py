"""The dataflow actor: performs the machine's effects and feeds it the resulting events.

Each dataflow has one actor. It sends commands to the listen and fetch tasks of its inputs, jobs to
the executor, and reports to the workers. Long work runs in effects outside the actor, at most one
stage at a time. The result of a stage arrives as a message.
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
"""Number of the step, the function to run, and the function that turns its result into an event."""


def commit_stage(view: ViewStages, step: DataflowStep, outcome: StepOutcome) -> Stage:
    """Return the stage that appends the step unless another replica was first."""
    number = step.number

    def committed(upper: Frontier | None) -> StageDone:
        return StageDone(
            m.StepCommitted(number) if upper is None else m.UpperMismatched(number, upper)
        )

    return number, lambda: view.commit(step, outcome), committed


def standby_stage(view: ViewStages, step: DataflowStep) -> Stage:
    """Return the stage that waits for another replica to commit the step."""
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
    """Addresses of the tasks of the current incarnation, as the workers report them.

    Commands to tasks may wait for room. Their answers come in reserved room, so the wait ends.
    """

    def __init__(self, inputs: int, workers: int) -> None:
        self._inputs = inputs
        self._workers = workers
        self._listens: dict[int, ActorAddress[ListenMessage]] = {}
        """Listen task of each input."""
        self._fetches: dict[int, dict[int, ActorAddress[FetchMessage]]] = {}
        """Fetch tasks of each input, by worker."""
        self._turns = [0] * inputs
        """Number of requests for each input. The inputs must not share one counter, because they
        may be asked alternately."""

    def clear(self) -> None:
        """Forget the tasks of the previous incarnation."""
        self._listens.clear()
        self._fetches.clear()

    def started(self, message: InputStarted) -> bool:
        """Add a worker's task, and return whether all tasks are running."""
        self._fetches.setdefault(message.input_index, {})[message.worker] = message.fetch
        if message.listen is not None:
            self._listens[message.input_index] = message.listen
        return all(
            index in self._listens and len(self._fetches.get(index, ())) == self._workers
            for index in range(self._inputs)
        )

    async def tell(self, input_index: int, message: ListenMessage) -> None:
        """Send a message to the input's listen task, if it is running."""
        listen = self._listens.get(input_index)
        if listen is None:
            return
        try:
            await listen.send(message)
        except (ResourceClosed, ConnectionBroken):
            return  # no error: a new incarnation has its own tasks, and a shutdown needs none

    async def ask(self, input_index: int, piece: PartInterval) -> None:
        """Request a part from the input's fetch tasks in turn. Raise `ResourceClosed` or
        `ConnectionBroken`."""
        self._turns[input_index] += 1
        fetches = self._fetches[input_index]
        turn = self._turns[input_index] % len(fetches)
        await fetches[turn].send(FetchPart(piece.time, piece.part))


# -- the actor -------------------------------------------------------------------------------------


_STEP_SHARE: Final = 1.5
"""Safety factor on the expected time of a paced step, so that its view does not get too old."""
_FADING: Final = 0.9
"""Weight of the previous expectation in the expected time of a step."""

_Message: TypeAlias = DataflowMessage | StageDone | m.RetryDue | m.StepDue | JobProgress


class DataflowActor(Actor[_Message]):
    """Runs one dataflow.

    It writes nothing until it gets `WritesAllowed`. `arrangements` are shared within the replica.
    `replica` is the replica's name, or "" if it is the only one.
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
        """True once `WritesAllowed` has arrived."""
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
        """Stages of a view; None for an index or subscribe."""
        self._passthrough: PassThrough | None = None
        """Stages of an index or subscribe; None for a view."""
        self._engine: EngineClient | None = None
        """Client of the executor, for a view."""
        self._tasks = TaskAddresses(len(description.imports), len(workers))
        """Addresses of the current incarnation's tasks."""
        self._stage: RunningEffect | None = None
        """The stage in progress."""
        self._standby_timer: RunningEffect | None = None
        """Timer that ends the wait for another replica's append."""
        self._pace_timer: RunningEffect | None = None
        """Timer of a paced dataflow's next step."""
        self._step_ms = 0.0
        """Expected time in ms from the cut of a step until it is durable."""
        self._outcome: StepOutcome | PassthroughStep | None = None
        """Result of the current step, from its computation until it is installed."""
        self._held_commit: m.CommitStep | None = None
        """Commit that waits for `WritesAllowed`."""
        self._opened: m.StateRestored | None = None
        """Event to feed once the subscribe's snapshot has been acknowledged."""
        self._restoring: m.RestoreState | None = None
        """The restore in progress, of a view."""
        self._unacknowledged: set[int] = set()
        """Workers that have not acknowledged the current step."""
        self._restore_began_ms = self._step_began_ms = 0.0
        """Monotonic times at which the current restore began, and the current step was cut."""
        self._status = StatusResponse(description.id, "")
        """Last reported status, with the measures of the last step."""
        self._frontiers = FrontierReports(description, self._machine, workers)
        persist.ledger.add(self._frontiers.memory)
        self._traces = StepTraces(persist, description)
        self._upkeep: ViewUpkeep | None = None
        """Background work of a view."""

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
            self._passthrough = PassThrough(
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
            # Jobs were already cancelled with their stage.
            self._engine.forget()
        if self._view is not None:
            await self._view.close()

    def describe(self) -> str:
        """Return what the dataflow is waiting for, as readable text."""
        return self._machine.waiting_for()

    # -- messages ----------------------------------------------------------------------------------

    async def receive(self, message: _Message) -> None:
        """Handle a `DataflowMessage`, a timer, or the result of a stage."""
        try:
            await self._receive(message)
        except BaseException:
            # `on_stop` does not run after a crash, so release the arrangements here.
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
                # At rest only rehearsals run, and these are not progress of the dataflow.
                if self._machine.state not in REST:
                    self._show(self._machine.state.value, message.shown())
            case WritesAllowed():
                self._writable = True
                held, self._held_commit = self._held_commit, None
                if held is not None:
                    await self._perform(held)
                elif self._restoring is not None and self._stage is not None:
                    # The read-only restore may be waiting for another writer; now it may write
                    # itself.
                    self._stage.cancel()
                    self._restore(self._restoring)
            case CompactionAllowed(frontier=frontier):
                if frontier >= EMPTY:
                    # The worker will stop this actor soon; it idles until then.
                    await self._feed(m.DropRequested())
            case _:
                assert_never(message)

    async def _feed(self, event: m.Event) -> None:
        number = self._machine.number
        try:
            effects = self._machine.handle(event)
        except LocalProtocolError as error:
            # A task broke the protocol, so its input cannot be trusted. Freeze the incarnation.
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
                    # Start listening only after the subscriber has acknowledged the snapshot.
                    self._opened = event
                    self._emit(result)
                    return
                if not isinstance(self._description.export, SubscribeExport):
                    took_ms = self.ctx.monotonic_ms() - self._restore_began_ms
                    measure(HYDRATION_SECONDS, took_ms / 1000)
                if self._upkeep is not None:
                    self._upkeep.warm(incarnation)
            case m.DropRequested() if isinstance(result, SubscribeBatch):
                self._emit(result)  # the batch contains the error that ends the subscribe
            case m.StepInstalled():
                self._traces.installed(machine.step, self._status)
                if self._upkeep is not None:
                    self._upkeep.merge()
                    self._upkeep.rehearse(machine.incarnation)
            case m.StandbyExpired() | m.UpperMismatched() if (
                current and machine.state is DataflowPhase.STANDING_BY
            ):
                # The append and its timeout race; whichever is first cancels the other.
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
        """Record that a worker has installed or passed on the step's updates, or the snapshot."""
        opened = self._opened
        if opened is not None and (incarnation, upper) == (opened.incarnation, opened.lo):
            self._opened = None
            await self._feed(opened)
            return
        step = self._machine.step
        if step is None or (incarnation, upper) != (step.incarnation, step.hi):
            return
        if worker in self._unacknowledged:
            self._unacknowledged.discard(worker)
            if not self._unacknowledged:
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
                self._show("dropped", "complete: no more changes will follow")

    def _run_stage(
        self,
        number: int,
        run: Callable[[], Awaitable[T]],
        done: Callable[[T], StageDone],
    ) -> None:
        """Run a stage outside the actor. Its failures become events of the machine."""
        incarnation = self._machine.incarnation

        def failed(error: Exception) -> StageDone:
            self._restoring = None
            if isinstance(error, DefiniteError) and number:
                return StageDone(m.FailedDefinitely(number, str(error)))
            if not isinstance(error, PenstockError):
                log.exception("%s: a stage failed", self.ctx.path, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            restart, final = isinstance(error, ReadBelowSince), isinstance(error, JobTooLarge)
            # The memory may be enough for half of the rows.
            too_large = isinstance(error, EngineError) and not isinstance(error, EngineUnavailable)
            return StageDone(m.StageFailed(incarnation, number, text, restart, too_large, final))

        self._stage = self.ctx.effect(self._traces.inside(run), done=done, failed=failed)

    def _restore(self, effect: m.RestoreState) -> None:
        self._restore_began_ms = self.ctx.monotonic_ms()
        incarnation, lo = effect.incarnation, effect.lo
        view, passing = self._view, self._passthrough
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
        computed, work = m.StepComputed(step.number), self._view or self._passthrough
        assert work is not None, "on_start creates it"
        self._run_stage(
            step.number, lambda: work.compute(step), lambda made: StageDone(computed, made)
        )

    def _commit(self, effect: m.CommitStep) -> None:
        view, step = self._view, effect.step
        assert view is not None, "only a view is durable"
        if not self._writable:
            # Keep it until `WritesAllowed`: a read-only replica computes but does not write.
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
        assert self._view is not None, "only views race with other replicas"
        done = StageDone(m.StandbyExpired(step.number))
        # The other replica may have died, so this one computes the step itself after `standby_ms`.
        self._standby_timer = self.ctx.after(self._settings.standby_ms, done)
        self._run_stage(*standby_stage(self._view, step))

    def _follow(self, step: DataflowStep) -> None:
        assert self._view is not None, "only views race with other replicas"
        self._begin_measures()
        self._run_stage(*follow_stage(self._view, step))

    def _install(self, step: DataflowStep) -> bool:
        """Pass the step on. Return True if it ends a subscribe with an error."""
        if not step.times and not step.snapshot:
            self._begin_measures()
        # Clear it here, so that the step's rows are not kept until the next step.
        view, outcome, self._outcome = self._view, self._outcome, None
        if view is not None:
            assert isinstance(outcome, StepOutcome)
            computed = outcome
            installed = StageDone(m.StepInstalled(step.number))
            self._run_stage(step.number, lambda: view.install(step, computed), lambda _: installed)
            return False
        assert self._passthrough is not None
        if not isinstance(outcome, PassthroughStep) or outcome.number != step.number:
            outcome = self._passthrough.make(step)  # there are no changes, so this does not block
        self._status = msgspec.structs.replace(self._status, rows_out=outcome.rows)
        if outcome.batch is not None:
            self._unacknowledged = {0}
            self._emit(outcome.batch)
            return outcome.batch.error is not None
        self._unacknowledged = set(range(len(self._workers)))
        with use_context(self._traces.here):
            for worker, install in zip(self._workers, outcome.installs, strict=True):
                worker.reply(install)
        return False

    def _pace_step(self, number: int, lo: Frontier) -> None:
        """Set the timer of the next step so that the step ends just before the output gets too
        old."""
        export = self._description.export
        assert isinstance(export, ViewExport), "only a view is paced"
        target_ms = export.target_lag_ms
        age_ms = max(0, self.ctx.now_ms() - lo)
        delay_ms = max(0.0, target_ms - age_ms - _STEP_SHARE * self._step_ms)
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        self._pace_timer = self.ctx.after(delay_ms, m.StepDue(number))

    def _end_stage(self) -> None:
        for work in (self._stage, self._standby_timer):
            if work is not None:
                work.cancel()
        self._stage = self._standby_timer = None

    def _cancel_work(self) -> None:
        self._traces.end()
        self._end_stage()
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._held_commit = None

    # -- telling others ----------------------------------------------------------------------------

    def _tell_workers(self, message: DataflowReport) -> None:
        """Send a message to every worker."""
        for worker in self._workers:
            # Use reserved room: the worker may be waiting for room here, so waiting could deadlock.
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
        """Start the measurements of a step."""
        self._step_began_ms = self.ctx.monotonic_ms()
        self._status = StatusResponse(self._description.id, "", rows_in=rows_in)
