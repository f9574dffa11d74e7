"""The state machine of a worker's storage half: events in, effects out. Pure.

Theory of operation. Every worker receives the client's commands. They render nothing; they change
which objects are *wanted* (`history.StorageDefinitions`) and which the client *knows*. Worker 0
arranges for the wanted objects to be rendered (`desired_state`): it looks up the state a source
resumes from, then proposes an internal command. Internal commands reach every worker in one order
for both halves, and only they change what is *rendered* (`renderings`), so all workers have the
same renderings. The owner of an object runs its task (`tasks`) and reports its frontier. The others
report the empty frontier immediately, so the minimum over all workers is the owner's.

Rules:
- `Hello` starts an iteration: commands are collected until `InitializationComplete` and then
  applied together. Worker 0 compares them with its desired state (`reconcile`). Commands of any
  connection but the current one are discarded.
- Objects are reported as `client_view` describes. Frontiers are reported again after each
  reconciliation.
- Worker 0 refuses an update that is not allowed and reports the object as stalled. The running
  object continues.
- When a task fails, its object is stalled. After a delay a sequenced command suspends it and it is
  rendered again, unless it has been dropped meanwhile.
- While an iteration initializes, or its client is gone, tasks continue and no response is sent.

`validate` checks the invariants. `handle` gets the time as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.internal import ProposeCommand, SequencedCommand, TaggedCommand
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    FilesStaged,
    IngestionDescription,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    StagingFailed,
    UpdateStorageConfiguration,
)
from actors.model.protocol.storage_internal import (
    ForStorage,
    ForwardedCommand,
    StatisticsUpdate,
    SuspendAndRestart,
)
from actors.replica.storage import events as e
from actors.replica.storage.client_view import ClientView
from actors.replica.storage.desired_state import DesiredState, Step
from actors.replica.storage.health_board import HealthBoard, HealthCondition
from actors.replica.storage.reconciliation import reconcile, refusal, unchanged
from actors.replica.storage.renderings import (
    ConfigurationChanged,
    ObjectRendering,
    RenderingEnded,
    RenderingSet,
    RenderingStarted,
    UnrenderedSourceDropped,
    owner_of,
)
from actors.replica.storage.task_statistics import Kind, LocalStatistics, StatisticsSums
from actors.replica.storage.tasks import StorageTaskRunner
from actors.runtime.errors import LocalProtocolError, OperationCanceled
from actors.runtime.progress import Frontier, ObjectId, is_empty


class StorageState:
    """State of one worker; see the module's docstring."""

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.generation = 0
        """Count of the client's connections; the sequencer drops proposals of earlier
        generations."""
        self.next_index = 0
        """Position of the next sequenced command."""
        self.ignored = 0
        """Number of commands that were ignored: of other connections, or about unknown objects."""
        self.proposed = 0
        """Worker 0: number of commands proposed to the sequencer."""
        self.ordered = 0
        """Worker 0: number of proposals that came back sequenced."""
        self.writes_allowed = False
        """True from the first `AllowWrites` on."""
        self.renderings = RenderingSet()
        """Current renderings; only sequenced commands change them."""
        self.tasks = StorageTaskRunner()
        """Tasks of the objects that this worker owns."""
        self.health = HealthBoard()
        """Health of the objects that this worker owns."""
        self.client = ClientView(index, count, self.tasks, self.health)
        self.desired = DesiredState()
        """Worker 0: objects that should run, and their look-ups and proposals."""
        self.aggregate = StatisticsSums()
        """Worker 0: sums of the statistics of all workers."""
        self._measured = LocalStatistics()
        """Statistics that this worker has measured and not sent yet."""

    def handle(self, event: e.Event, now_ms: int = 0) -> list[e.Effect]:
        """Apply an event, and return its effects in the order to perform them.

        `now_ms` is the Unix time for reports. Raise `LocalProtocolError` if a sequenced command is
        missing.
        """
        self.client.now_ms = now_ms
        match event:
            case TaggedCommand():
                return self._tagged(event)
            case SequencedCommand():
                return self._sequenced(event)
            case e.StorageClientLost():
                return self.client.lost(event.nonce)
            case ForwardedCommand():
                return self._steps([event.command])
            case e.ResumeFound():
                return self._steps(self.desired.found(event.ticket, event.resume))
            case e.ResumeFailed():
                return self._look_up_failed(event)
            case e.StatisticsDue():
                return self._statistics_due()
            case e.TaskStopped():
                self._measured.end(event.number)
                return self.tasks.stopped(event.number)
            case e.OneshotDone():
                return self._oneshot_done(event)
            case e.StatisticsMeasured():
                self._measured.measure(event.number, event.statistics)
                return []
            case e.FrontierReached():
                self.tasks.reached(event.number, event.id, event.upper)
                return self.client.report(event.id)
            case e.HealthObserved():
                return self._observed(event)
            case e.TaskFailed():
                return self._failed(event)
            case e.RestartDue():
                return self._restart(event.number)
            case _:
                assert_never(event)

    def _steps(self, steps: Sequence[Step]) -> list[e.Effect]:
        """Convert worker 0's steps into effects: internal commands become proposals."""
        self.proposed += sum(not isinstance(step, e.LookUp | e.CancelLookUp) for step in steps)
        return [
            step
            if isinstance(step, e.LookUp | e.CancelLookUp)
            else e.OfferStorageCommand(ProposeCommand(self.generation, ForStorage(step)))
            for step in steps
        ]

    # -- commands of the client --------------------------------------------------------------------

    def _tagged(self, event: TaggedCommand[Command]) -> list[e.Effect]:
        command, client = event.command, self.client
        if isinstance(command, Hello):
            # The sequencer drops late proposals of earlier generations.
            self.generation += 1
            return client.hello(command)
        if event.nonce != client.nonce:
            self.ignored += 1
            return []
        if client.incoming is None:
            return self._apply(command)
        if isinstance(command, InitializationComplete):
            return self._reconcile()
        client.incoming.push(command)
        return []

    def _reconcile(self) -> list[e.Effect]:
        """Adopt what the new client wants. Worker 0 also proposes the difference to what runs."""
        client = self.client
        skipped = client.initialized()
        self.ignored += skipped
        self.aggregate.forget_reported()
        wanted = client.wanted
        effects: list[e.Effect] = []
        for description in wanted.ingestions.values():
            effects += client.know(description.ids)
        effects += client.know(tuple(wanted.sinks))
        for oneshot in wanted.oneshots.values():
            effects += self._expect(oneshot)
        if self.index == 0:
            effects += self._reconcile_desired(skipped)
        for id, frontier in wanted.allowed.items():
            self._allow(id, frontier)
        return effects if wanted.writes is None else effects + self._allow_writes()

    def _reconcile_desired(self, skipped: int) -> list[e.Effect]:
        client = self.client
        before = self.desired.running()
        plan = reconcile(before, client.wanted)
        replaced = sum(what.id in before for what in plan.run)
        wanted, running = client.wanted.oneshots, self.desired.oneshots
        # A one-shot ingestion that is still wanted continues. If it is done, its owner reports it
        # (`_expect`).
        gone = sorted(uuid for uuid in running if wanted.get(uuid) != running[uuid])
        steps = self.desired.drop(*plan.drop, *gone)
        for what in plan.run:
            steps += self.desired.run(what)
        for oneshot in wanted.values():
            if running.get(oneshot.uuid) != oneshot:
                steps += self.desired.run_oneshot(oneshot)
        if client.wanted.configuration is not None:
            steps.append(client.wanted.configuration)
        effects = self._steps(steps)
        for refused in plan.refused:
            effects += client.stalled(refused.id, refused.text())
        for id, (error, hint) in self.desired.failing().items():
            effects += client.stalled(id, error, hint)
        counts = (len(plan.keep), len(plan.run), len(plan.drop), skipped)
        done = e.LogStorageReconciliation(client.nonce or "", *counts, plan.refused, replaced)
        return [*effects, done]

    def _apply(self, command: Command) -> list[e.Effect]:
        wanted = self.client.wanted
        match command:
            case RunIngestion():
                return self._run_ingestion(command)
            case RunSink(description=description):
                wanted.add(command)
                return self.client.know((description.id,)) + self._render_desired(description)
            case RunOneshotIngestion() if command.uuid not in wanted.oneshots:
                wanted.add(command)
                steps = self.desired.run_oneshot(command) if self.index == 0 else []
                return self._expect(command) + self._steps(steps)
            case CancelOneshotIngestion(uuid=uuid) if uuid in wanted.oneshots:
                return self._cancel_oneshot(uuid)
            case AllowCompaction(id=id, frontier=frontier) if wanted.knows(id):
                if is_empty(frontier):
                    return self._drop(id)
                self._allow(id, frontier)
                return []
            case AllowWrites():
                return self._allow_writes()
            case UpdateStorageConfiguration():
                return self._steps([command]) if self.index == 0 else []
        self.ignored += 1
        return []

    def _run_ingestion(self, command: RunIngestion) -> list[e.Effect]:
        new, client = command.description, self.client
        former = client.wanted.ingestions.get(new.id)
        effects: list[e.Effect] = []
        for id in () if former is None else former.ids:
            if id not in new.ids:
                effects += client.dropped(id)
        client.wanted.add(command)
        return effects + client.know(new.ids) + self._render_desired(new)

    def _render_desired(self, what: IngestionDescription | SinkDescription) -> list[e.Effect]:
        """Render an object on worker 0, unless it already runs unchanged or the update must be
        refused."""
        old = self.desired.get(what.id)
        if self.index != 0 or unchanged(old, what):
            return []
        refused = refusal(old, what)
        if refused is None:
            return self._steps(self.desired.run(what))
        return [*self.client.stalled(what.id, refused.text()), e.LogRefusedUpdate(refused)]

    def _expect(self, oneshot: RunOneshotIngestion) -> list[e.Effect]:
        """Answer a one-shot ingestion, unless it is still running on this worker."""
        if not self.client.owns(oneshot.uuid):
            # Only the owner stages parts, so this worker has none.
            return self.client.answer(oneshot.uuid)
        task = self.tasks.oneshot(oneshot)
        result = None if task is None else task.result or task.reported
        if task is None or result is None or self.client.muted:
            return []
        task.result, task.reported = None, result
        return self.client.answer(oneshot.uuid, result)

    def _cancel_oneshot(self, uuid: str) -> list[e.Effect]:
        client = self.client
        effects: list[e.Effect] = []
        if client.awaits(uuid):
            text = f"one-shot ingestion {uuid} was canceled"
            effects += client.answer(uuid, StagingFailed(OperationCanceled.__name__, text))
        client.known.pop(uuid, None)
        del client.wanted.oneshots[uuid]
        return effects + (self._steps(self.desired.drop(uuid)) if self.index == 0 else [])

    def _drop(self, id: ObjectId) -> list[e.Effect]:
        wanted = self.client.wanted
        source = wanted.source_of.get(id)
        effects: list[e.Effect] = []
        # Report before `wanted.drop`, because reports need the owner of each object.
        for gone in wanted.ingestions[id].ids if id in wanted.ingestions else (id,):
            effects += self.client.dropped(gone)
        wanted.drop(id)
        if self.index != 0:
            return effects
        drop = self.desired.drop(id) if source is None else self.desired.drop_export(source, id)
        return effects + self._steps(drop)

    def _allow(self, id: ObjectId, frontier: Frontier) -> None:
        # Tasks need not know: the controller moves the holds of shards, and a sink's task its own.
        wanted = self.client.wanted
        allowed = wanted.allowed[id] = max(wanted.allowed.get(id, 0), frontier)
        if self.index == 0:
            self.desired.allow(id, allowed)

    def _allow_writes(self) -> list[e.Effect]:
        if self.writes_allowed:
            return []
        self.writes_allowed = True
        return [e.AllowTaskWrites()]

    # -- the one order -----------------------------------------------------------------------------

    def _sequenced(self, event: SequencedCommand) -> list[e.Effect]:
        if event.index != self.next_index:
            raise LocalProtocolError(
                f"worker {self.index} got command {event.index}: expected {self.next_index}"
            )
        self.next_index += 1
        if not isinstance(event.command, ForStorage):
            return []
        command = event.command.command
        effects: list[e.Effect] = []
        if self.index == 0:
            self.ordered += 1
            self.desired.applied(command)
            if isinstance(command, StatisticsUpdate):
                self.aggregate.absorb(command)
        for change in self.renderings.apply(event.index, command):
            match change:
                case RenderingStarted():
                    effects += self._began(change.rendering, change.former)
                case RenderingEnded():
                    effects += self._ended(change)
                case UnrenderedSourceDropped(description=description):
                    if self._mine(description.id):
                        effects += self.tasks.forget(description)
                case ConfigurationChanged(configuration=configuration):
                    effects.append(e.ConfigureTasks(configuration))
        return effects + self.client.report_health()

    def _mine(self, id: ObjectId) -> bool:
        return owner_of(id, self.count) == self.index

    def _began(self, rendering: ObjectRendering, former: ObjectRendering | None) -> list[e.Effect]:
        kind = _kind(rendering)
        if former is not None:
            self.aggregate.remove(set(former.ids) - set(rendering.ids))
        self.aggregate.begin(kind, rendering.ids, rendering.number)
        if not self._mine(rendering.id):
            return []
        if kind != "oneshot":
            self.health.begin(rendering.id, _tables(rendering))
        effects = self.tasks.begin(rendering, former)
        if rendering.complete:
            for id in rendering.ids:
                self.health.observe(
                    id, 1, HealthCondition("ceased", None, "all exports are complete")
                )
                effects += self.client.report(id)
        return effects

    def _ended(self, change: RenderingEnded) -> list[e.Effect]:
        rendering, dropped = change.rendering, change.dropped
        effects: list[e.Effect] = []
        if dropped:
            self.aggregate.remove(rendering.ids)
        else:
            self.aggregate.restarted(rendering.ids)
        if self._mine(rendering.id):
            effects += self.tasks.end(rendering, dropped=dropped)
            if dropped:
                self.health.remove(rendering.id)
        if self.index == 0 and not dropped:
            effects += self._steps(self.desired.suspended(rendering.id))
        return effects

    def _look_up_failed(self, event: e.ResumeFailed) -> list[e.Effect]:
        id, steps = self.desired.failed(event.ticket, event.error, event.hint)
        effects = [] if id is None else self.client.stalled(id, event.error, event.hint)
        return [*effects, *self._steps(steps)]

    # -- messages of tasks -------------------------------------------------------------------------

    def _observed(self, event: e.HealthObserved) -> list[e.Effect]:
        task = self.tasks.running.get(event.number)
        # An observation from before the failure must not hide the failure.
        if task is None or task.failed:
            return []
        for seen in event.observations:
            if seen.id in task.rendering.ids:
                condition = HealthCondition(seen.status, seen.error, seen.hint)
                self.health.observe(seen.id, event.round, condition)
                well = seen.id == task.rendering.id and seen.status == "running"
                if well and event.has_progressed:
                    self.tasks.note_progress(event.number)
        return self.client.report_health()

    def _failed(self, event: e.TaskFailed) -> list[e.Effect]:
        effects = self.tasks.failed(event.number)
        if not effects:
            return []
        # An object that is being dropped is not reported as failed. If the drop does not come, the
        # look-up before the restart fails and that failure is reported.
        if not event.is_dropped:
            id = self.tasks.running[event.number].rendering.id
            self.health.fail(id, event.error, event.hint)
        return effects + self.client.report_health()

    def _restart(self, number: int) -> list[e.Effect]:
        task = self.tasks.running.get(number)
        if task is None or not task.failed:
            return []
        shown = self.health.shown(task.rendering.id)
        reason = "" if shown is None else shown.error or ""
        return self._propose(SuspendAndRestart(task.rendering.id, number, reason))

    def _propose(self, command: SuspendAndRestart | StatisticsUpdate) -> list[e.Effect]:
        """Propose a command. Workers other than 0 forward it to worker 0."""
        return (
            self._steps([command])
            if self.index == 0
            else [e.ForwardCommand(ForwardedCommand(command))]
        )

    def _oneshot_done(self, event: e.OneshotDone) -> list[e.Effect]:
        task, result, client = self.tasks.running.get(event.number), event.result, self.client
        if task is None:
            # The ingestion was dropped meanwhile, so no later event will discard its parts.
            return [e.DiscardParts(result.batches)] if isinstance(result, FilesStaged) else []
        if client.awaits(task.rendering.id) and not client.muted:
            # The requesting client may be gone, and another one may be waiting for the same uuid.
            task.reported = result
            return client.answer(task.rendering.id, result)
        # The client's command may not have reached this worker yet. Keep the result until it does
        # (`_expect`), or until the rendering ends.
        task.result = result
        return []

    def _statistics_due(self) -> list[e.Effect]:
        measured = self._measured.take()
        effects = self._propose(StatisticsUpdate(self.index, measured)) if measured else []
        if self.index == 0 and not self.client.muted:
            known = self.client.known.keys() | self.client.wanted.oneshots.keys()
            news = self.aggregate.news(known)
            effects += [] if news is None else [e.SendStorageResponse(news)]
        return effects

    # -- checks ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert the invariants."""
        self.renderings.validate()
        self.tasks.validate()
        self.health.validate()
        self.desired.validate()
        self.client.validate()
        assert self.index == 0 or not self.desired.running(), "only worker 0 has a desired state"
        for number, task in self.tasks.running.items():
            assert self._mine(task.rendering.id), "this worker does not own the task's object"
            current = self.renderings.current.get(task.rendering.id)
            assert current is not None, "the task's object is not rendered"
            assert current.number == number, "the task belongs to an earlier rendering"


def _tables(rendering: ObjectRendering) -> dict[ObjectId, str]:
    """Return the exports of a source, with their display names."""
    what = rendering.what
    exports = what.exports if isinstance(what, IngestionDescription) else ()
    return {export.id: export.name or export.outside for export in exports}


def _kind(rendering: ObjectRendering) -> Kind:
    match rendering.what:
        case IngestionDescription():
            return "source"
        case SinkDescription():
            return "sink"
        case RunOneshotIngestion():
            return "oneshot"
