"""The rules of a worker's storage half: a pure state machine, events in → effects out.

Theory of operation. Commands of the client come to every worker, and render nothing: they change
what is *wanted* (`history.Wanted`), and which objects the client *knows*. Worker 0 also sees to it
that what is wanted is rendered (`pursuits`): it looks up where a source goes on, then proposes an
internal command. Internal commands come back to every worker in the one order of both halves, and
only they change what is *rendered* (`renderings`): all workers render alike. The owner of an
object runs its task (`tasks`), and reports for it; the others report the empty frontier at once,
so that the meet over all workers is the owner's.

Rules:
- `Hello` begins an iteration: commands are collected until `InitializationComplete`, then taken
  all at once; worker 0 compares them with what it has had rendered (`reconcile`). Commands of any
  other connection than the present one are discarded;
- an object is reported from the command on that runs it, never earlier, however early it was
  rendered; frontiers begin anew after each reconciliation, and never go back in between. They
  belong to a shard: what another shard of the same id has reached is not reported;
- `DroppedId` is given when the object is dropped, and only of one that this client knows;
- an update that may not be is refused by worker 0, which says so of that object alone; what runs
  goes on;
- a task that failed: its object is stalled, and after a delay suspended and rendered again, by
  the one order; one that was dropped meanwhile is not;
- while an iteration is initializing, or its client is gone, nothing is answered, and tasks go on.

Invariants: `validate`. It performs nothing and reads no clock (`handle` is told the time).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from actors.errors import Canceled, LocalProtocolError
from actors.progress import Frontier, ObjectId, is_empty
from actors.protocol.compute import AllowCompaction, AllowWrites, Hello, InitializationComplete
from actors.protocol.internal import Propose, Sequenced
from actors.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    IngestionDescription,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    Staged,
    StagingFailed,
    StorageTagged,
    UpdateConfiguration,
)
from actors.protocol.storage_internal import (
    ForStorage,
    Forwarded,
    StatisticsUpdate,
    SuspendAndRestart,
)
from actors.storage import events as e
from actors.storage.client import ClientView
from actors.storage.health import Condition, Health
from actors.storage.pursuits import Pursuits, Step
from actors.storage.reconcile import reconcile, refusal, unchanged
from actors.storage.renderings import (
    Began,
    Configured,
    Ended,
    Passed,
    Rendering,
    Renderings,
    owner_of,
)
from actors.storage.statistics import Aggregate, Kind, LocalStatistics
from actors.storage.tasks import Tasks


class StorageState:
    """One worker's state; see the module's text."""

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.generation = 0
        self.next_index = 0
        self.ignored = 0
        """Commands of no connection that is served, or about objects that are not there."""
        self.proposed = 0
        """Worker 0: commands that were offered to the sequencer, in order …"""
        self.ordered = 0
        """… and how many of them have come back in the one order."""
        self.writes_allowed = False
        self.renderings = Renderings()
        self.tasks = Tasks()
        self.health = Health()
        self.client = ClientView(index, count, self.tasks, self.health)
        self.pursuits = Pursuits()
        self.aggregate = Aggregate()
        self._measured = LocalStatistics()

    def handle(self, event: e.Event, now_ms: int = 0) -> list[e.Effect]:
        """What an event leads to, in the order to perform it; `now_ms`: Unix time, for people.

        Raises `LocalProtocolError` when the one order of commands has a gap.
        """
        self.client.now_ms = now_ms
        match event:
            case StorageTagged():
                return self._tagged(event)
            case Sequenced():
                return self._sequenced(event)
            case e.ClientLost():
                return self.client.lost(event.nonce)
            case Forwarded():
                return self._steps([event.command])
            case e.ResumeFound():
                return self._steps(self.pursuits.found(event.ticket, event.resume))
            case e.ResumeFailed():
                return self._look_up_failed(event)
            case e.StatisticsDue():
                return self._statistics_due()
            case e.Stopped():
                self._measured.end(event.number)
                return self.tasks.stopped(event.number)
            case e.OneshotDone():
                return self._oneshot_done(event)
            case e.Measured():
                self._measured.measure(event.number, event.statistics)
                return []
            case e.Reached():
                self.tasks.reached(event.number, event.id, event.upper)
                return self.client.report(event.id)
            case e.Observed():
                return self._observed(event)
            case e.Failed():
                return self._failed(event)
            case e.RestartDue():
                return self._restart(event.number)
            case _:
                assert_never(event)

    def _steps(self, steps: Sequence[Step]) -> list[e.Effect]:
        """Worker 0's steps as effects: internal commands are offered."""
        self.proposed += sum(not isinstance(step, e.LookUp | e.CancelLookUp) for step in steps)
        return [
            step
            if isinstance(step, e.LookUp | e.CancelLookUp)
            else e.Offer(Propose(self.generation, ForStorage(step)))
            for step in steps
        ]

    def commands_for(
        self, number: int
    ) -> list[e.AllowTaskCompaction | e.AllowTaskWrites | e.Configure]:
        """What the actor of a rendering must be told when it starts, besides its description."""
        task = self.tasks.running.get(number)
        if task is None:
            return []
        told: list[e.AllowTaskCompaction | e.AllowTaskWrites | e.Configure] = [
            e.Configure(self.renderings.configuration)
        ]
        if self.writes_allowed:
            told.append(e.AllowTaskWrites())
        allowed = self.client.wanted.allowed
        ids = [id for id in task.rendering.ids if id in allowed]
        return told + [e.AllowTaskCompaction(number, id, allowed[id]) for id in ids]

    # -- commands of the client --------------------------------------------------------------------

    def _tagged(self, event: StorageTagged) -> list[e.Effect]:
        command, client = event.command, self.client
        if isinstance(command, Hello):
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
        """Takes what the new client wants; worker 0 drops and runs what that comes to."""
        client = self.client
        skipped = client.initialized()
        self.ignored += skipped
        self.aggregate.forget_told()
        wanted = client.wanted
        effects: list[e.Effect] = []
        for description in wanted.ingestions.values():
            effects += client.know(description.ids)
        effects += client.know(tuple(wanted.sinks))
        for oneshot in wanted.oneshots.values():
            effects += self._expect(oneshot)
        if self.index == 0:
            effects += self._pursue_all(skipped)
        for id, frontier in wanted.allowed.items():
            effects += self._allow(id, frontier)
        return effects if wanted.writes is None else effects + self._allow_writes()

    def _pursue_all(self, skipped: int) -> list[e.Effect]:
        client = self.client
        plan = reconcile(self.pursuits.running(), client.wanted)
        wanted, running = client.wanted.oneshots, self.pursuits.oneshots
        # One that is wanted again goes on, or has its result, which its owner tells (`_expect`).
        gone = sorted(uuid for uuid in running if wanted.get(uuid) != running[uuid])
        steps = self.pursuits.drop(*plan.drop, *gone)
        for what in plan.run:
            steps += self.pursuits.run(what)
        for oneshot in wanted.values():
            if running.get(oneshot.uuid) != oneshot:
                steps += self.pursuits.run_oneshot(oneshot)
        if client.wanted.configuration is not None:
            steps.append(client.wanted.configuration)
        effects = self._steps(steps)
        for refused in plan.refused:
            effects += client.stalled(refused.id, refused.text())
        for id, (error, hint) in self.pursuits.failing().items():
            effects += client.stalled(id, error, hint)
        counts = (len(plan.keep), len(plan.run), len(plan.drop), skipped)
        return [*effects, e.Reconciled(client.nonce or "", *counts, plan.refused)]

    def _apply(self, command: Command) -> list[e.Effect]:
        wanted = self.client.wanted
        match command:
            case RunIngestion():
                return self._run_ingestion(command)
            case RunSink(description=description):
                wanted.add(command)
                return self.client.know((description.id,)) + self._pursue(description)
            case RunOneshotIngestion() if command.uuid not in wanted.oneshots:
                wanted.add(command)
                steps = self.pursuits.run_oneshot(command) if self.index == 0 else []
                return self._expect(command) + self._steps(steps)
            case CancelOneshotIngestion(uuid=uuid) if uuid in wanted.oneshots:
                return self._cancel_oneshot(uuid)
            case AllowCompaction(id=id, frontier=frontier) if wanted.knows(id):
                return self._drop(id) if is_empty(frontier) else self._allow(id, frontier)
            case AllowWrites():
                return self._allow_writes()
            case UpdateConfiguration():
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
        return effects + client.know(new.ids) + self._pursue(new)

    def _pursue(self, what: IngestionDescription | SinkDescription) -> list[e.Effect]:
        """Worker 0: has it rendered, unless it is or may not be."""
        old = self.pursuits.get(what.id)
        if self.index != 0 or unchanged(old, what):
            return []
        refused = refusal(old, what)
        if refused is None:
            return self._steps(self.pursuits.run(what))
        return [*self.client.stalled(what.id, refused.text()), e.Unfit(refused)]

    def _expect(self, oneshot: RunOneshotIngestion) -> list[e.Effect]:
        """All but the owner have nothing to stage; the owner may be done already."""
        if not self.client.owns(oneshot.uuid):
            return self.client.answer(oneshot.uuid)
        task = self.tasks.oneshot(oneshot)
        result = None if task is None else task.result or task.told
        if task is None or result is None or self.client.muted:
            return []
        task.result, task.told = None, result
        return self.client.answer(oneshot.uuid, result)

    def _cancel_oneshot(self, uuid: str) -> list[e.Effect]:
        client = self.client
        effects: list[e.Effect] = []
        if client.awaits(uuid):
            text = f"the one-shot ingestion {uuid} was canceled"
            effects += client.answer(uuid, StagingFailed(Canceled.__name__, text))
        client.known.pop(uuid, None)
        del client.wanted.oneshots[uuid]
        return effects + (self._steps(self.pursuits.drop(uuid)) if self.index == 0 else [])

    def _drop(self, id: ObjectId) -> list[e.Effect]:
        wanted = self.client.wanted
        source = wanted.source_of.get(id)
        effects: list[e.Effect] = []
        for gone in wanted.ingestions[id].ids if id in wanted.ingestions else (id,):
            effects += self.client.dropped(gone)
        wanted.drop(id)
        if self.index != 0:
            return effects
        drop = self.pursuits.drop(id) if source is None else self.pursuits.drop_export(source, id)
        return effects + self._steps(drop)

    def _allow(self, id: ObjectId, frontier: Frontier) -> list[e.Effect]:
        wanted = self.client.wanted
        allowed = wanted.allowed[id] = max(wanted.allowed.get(id, 0), frontier)
        if self.index == 0:
            self.pursuits.allow(id, allowed)
        rendering = self.renderings.current.get(wanted.source_of.get(id, id))
        if rendering is None or rendering.number not in self.tasks.running:
            return []
        return [e.AllowTaskCompaction(rendering.number, id, allowed)]

    def _allow_writes(self) -> list[e.Effect]:
        if self.writes_allowed:
            return []
        self.writes_allowed = True
        return [e.AllowTaskWrites()]

    # -- the one order -----------------------------------------------------------------------------

    def _sequenced(self, event: Sequenced) -> list[e.Effect]:
        if event.index != self.next_index:
            raise LocalProtocolError(
                f"worker {self.index} got command {event.index}, {self.next_index} is next"
            )
        self.next_index += 1
        if not isinstance(event.command, ForStorage):
            return []
        command = event.command.command
        effects: list[e.Effect] = []
        if self.index == 0:
            self.ordered += 1
            self.pursuits.applied(command)
            if isinstance(command, StatisticsUpdate):
                self.aggregate.absorb(command)
        for change in self.renderings.apply(event.index, command):
            match change:
                case Began():
                    effects += self._began(change.rendering, change.former)
                case Ended():
                    effects += self._ended(change)
                case Passed(description=description):
                    if self._mine(description.id):
                        effects += self.tasks.forget(description)
                case Configured(configuration=configuration):
                    effects.append(e.Configure(configuration))
        return effects + self.client.tell_health()

    def _mine(self, id: ObjectId) -> bool:
        return owner_of(id, self.count) == self.index

    def _began(self, rendering: Rendering, former: Rendering | None) -> list[e.Effect]:
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
                self.health.observe(id, 1, Condition("ceased", None, "nothing more will come"))
                effects += self.client.report(id)
        return effects

    def _ended(self, change: Ended) -> list[e.Effect]:
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
            effects += self._steps(self.pursuits.suspended(rendering.id))
        return effects

    def _look_up_failed(self, event: e.ResumeFailed) -> list[e.Effect]:
        id, steps = self.pursuits.failed(event.ticket, event.error, event.hint)
        told = [] if id is None else self.client.stalled(id, event.error, event.hint)
        return [*told, *self._steps(steps)]

    # -- what tasks say ----------------------------------------------------------------------------

    def _observed(self, event: e.Observed) -> list[e.Effect]:
        task = self.tasks.running.get(event.number)
        if task is None or task.failed:
            return []
        for seen in event.observations:
            if seen.id in task.rendering.ids:
                condition = Condition(seen.status, seen.error, seen.hint)
                self.health.observe(seen.id, event.round, condition)
                well = seen.id == task.rendering.id and seen.status == "running"
                if well and event.gets_on:
                    self.tasks.well(event.number)
        return self.client.tell_health()

    def _failed(self, event: e.Failed) -> list[e.Effect]:
        effects = self.tasks.failed(event.number)
        if not effects:
            return []
        # Of what is being dropped nothing is told. Should it not be dropped after all, the look-up
        # before the restart fails, and is told.
        if not event.is_dropped:
            id = self.tasks.running[event.number].rendering.id
            self.health.fail(id, event.error, event.hint)
        return effects + self.client.tell_health()

    def _restart(self, number: int) -> list[e.Effect]:
        task = self.tasks.running.get(number)
        if task is None or not task.failed:
            return []
        shown = self.health.shown(task.rendering.id)
        reason = "" if shown is None else shown.error or ""
        return self._propose(SuspendAndRestart(task.rendering.id, number, reason))

    def _propose(self, command: SuspendAndRestart | StatisticsUpdate) -> list[e.Effect]:
        """Any worker: by way of worker 0."""
        return self._steps([command]) if self.index == 0 else [e.Forward(Forwarded(command))]

    def _oneshot_done(self, event: e.OneshotDone) -> list[e.Effect]:
        task, result, client = self.tasks.running.get(event.number), event.result, self.client
        if task is None:
            return [e.Discard(result.batches)] if isinstance(result, Staged) else []
        if client.awaits(task.rendering.id) and not client.muted:
            # Its client may be gone, and another one wait for this: worker 0 was quicker.
            task.told = result
            return client.answer(task.rendering.id, result)
        # Who wants it may not have been heard of here: worker 0 was quicker. If nobody does, it
        # goes with its rendering.
        task.result = result
        return []

    def _statistics_due(self) -> list[e.Effect]:
        measured = self._measured.take()
        effects = self._propose(StatisticsUpdate(self.index, measured)) if measured else []
        if self.index == 0 and not self.client.muted:
            known = self.client.known.keys() | self.client.wanted.oneshots.keys()
            news = self.aggregate.news(known)
            effects += [] if news is None else [e.Respond(news)]
        return effects

    # -- checks ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Asserts the invariants."""
        self.renderings.validate()
        self.tasks.validate()
        self.health.validate()
        self.pursuits.validate()
        self.client.validate()
        assert self.index == 0 or not self.pursuits.running(), "only worker 0 pursues"
        for number, task in self.tasks.running.items():
            assert self._mine(task.rendering.id), "a task of another worker's"
            current = self.renderings.current.get(task.rendering.id)
            assert current is not None, "a task of something that is not rendered"
            assert current.number == number, "a task of a former rendering"


def _tables(rendering: Rendering) -> dict[ObjectId, str]:
    """Return the exports of a source, and how people call them."""
    what = rendering.what
    exports = what.exports if isinstance(what, IngestionDescription) else ()
    return {export.id: export.name or export.outside for export in exports}


def _kind(rendering: Rendering) -> Kind:
    match rendering.what:
        case IngestionDescription():
            return "source"
        case SinkDescription():
            return "sink"
        case RunOneshotIngestion():
            return "oneshot"
