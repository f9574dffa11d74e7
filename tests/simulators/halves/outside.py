"""The parts below the workers: look-ups, tasks of the storage half, dataflows, reads.

The uppers of shards and external systems (`durable`) outlive tasks, clients, and the workers
themselves. A task or a dataflow acts when an operation or a delivery makes it, and reports to its
worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from actors.model.protocol import compute, storage
from actors.model.protocol.compute import StatusResponse
from actors.model.protocol.internal import DataflowProgress, DataflowScheduled, EmitBatch
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import FilesStaged, StagingFailed
from actors.model.protocol.storage_internal import ResumeState
from actors.replica.compute import events as ce
from actors.replica.storage import events as e
from actors.replica.storage.renderings import owner_of
from actors.runtime.progress import EMPTY, Frontier, ObjectId
from tests.simulators.halves.checkers import require
from tests.simulators.halves.clients import AS_OF
from tests.simulators.halves.wishes import Shape, shapes

if TYPE_CHECKING:
    from tests.simulators.halves.nodes import WorkerNode
    from tests.simulators.halves.run import HalvesWorld

T = TypeVar("T")
STATED: Final = ("running", "running", "paused", "stalled")


class SimulatedTask(msgspec.Struct):
    """A task of the storage half, on its owner."""

    number: int
    id: ObjectId
    what: Any
    node: Any
    at_work: bool = False
    """True if it may write."""
    failed: bool = False
    stopping: bool = False
    hangs: bool = False
    forgets: bool = False
    counted: int = 0
    round: int = 0


class SimulatedDataflow(msgspec.Struct):
    """A dataflow, known by its number on all workers that have rendered it."""

    number: int
    description: compute.DataflowDescription
    upper: Frontier = 0
    incarnation: int = 1
    begun: bool = False
    """True if worker 0 has rendered it."""
    scheduled: bool = False
    crashed: bool = False
    emitted: Frontier = 0
    waits: bool = False
    """True if it waits for the receipt of a batch."""
    over: bool = False
    dropping: set[int] = msgspec.field(default_factory=set)
    """Workers that are dropping it."""
    stopped: bool = False
    sealed: dict[int, Frontier] = msgspec.field(default_factory=dict)
    """Worker → upper of its partition."""
    since: dict[int, int] = msgspec.field(default_factory=dict)
    compacted: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def id(self) -> ObjectId:
        """Return the id of its export."""
        return self.description.id

    @property
    def is_index(self) -> bool:
        """Return whether workers have partitions of it."""
        return isinstance(self.description.export, compute.IndexExport)


class SimulatedRead(msgspec.Struct):
    """A read under way on a worker."""

    node: Any
    start: ce.StartPeek
    incarnation: int


class SimulatedConnectors:
    """Shards, external systems, tasks, dataflows and reads; see the module's docstring."""

    def __init__(self, world: HalvesWorld) -> None:
        self._world = world
        self.durable: dict[Shape, Frontier] = {}
        self.clock = AS_OF
        self._parts = 0
        self.restart()

    def restart(self) -> None:
        """Forget all workers, and their tasks with them."""
        self.tasks: dict[int, SimulatedTask] = {}
        self.look_ups: dict[int, tuple[e.LookUp, bool]] = {}
        self.delayed: list[SimulatedTask] = []
        self._failures: list[SimulatedTask] = []
        self._crashes: list[SimulatedDataflow] = []
        self.flows: dict[int, SimulatedDataflow] = {}
        self.reads: dict[tuple[int, int], SimulatedRead] = {}
        self.kept: set[ObjectId] = set()
        """Sources with external resources (a slot, a lock), since these workers began."""
        self.to_go: set[ObjectId] = set()
        """Dropped sources whose external resources are not removed yet."""
        self.forgetting: dict[tuple[int, int], ObjectId] = {}
        """(worker, its number of the removal) → source whose external resources are being
        removed."""

    def ways(self) -> list[tuple[Sized, Callable[[], bool]]]:
        """Return the queues with their deliveries."""
        return [
            (self.look_ups, self.look_up_answered),
            (self.tasks, self.task_stops),
            (self.delayed, self.delay_is_over),
            (self._failures, self.failure_is_told),
            (self.flows, self.flow_stops),
            (self._crashes, self.crash_is_told),
            (self.reads, self.read_ends),
            (self.forgetting, self.forgotten),
        ]

    # -- look-ups and tasks ------------------------------------------------------------------------

    def look_up(self, effect: e.LookUp) -> None:
        """Start worker 0's look-up of a source's resume position."""
        self.look_ups[effect.ticket] = (effect, self._world.fault("look-up"))

    def look_up_answered(self) -> bool:
        """Deliver the answer of a look-up."""
        ticket = self._world.pick(list(self.look_ups))
        asked, fails = self.look_ups.pop(ticket)
        node = self._world.nodes[0]
        what = asked.description
        if fails:
            node.feed(e.ResumeFailed(ticket, f"<{what.id}>: no store"))
            return True
        uppers = tuple((each.id, self._upper(("export", each.shard))) for each in what.exports)
        remap = self._upper(("remap", what.remap_shard))
        node.feed(e.ResumeFound(ticket, ResumeState(0, remap, uppers)))
        return True

    def _upper(self, shape: Shape) -> Frontier:
        return self.durable.get(shape, 0)

    def rendered(self, what: Any) -> None:
        """Complete the remap shard of a source all of whose exports are complete."""
        if isinstance(what, storage.IngestionDescription) and what.exports:
            found = shapes(what)
            remap = found.pop(what.id)
            if all(self._upper(shape) == EMPTY for shape in found.values()):
                self.durable[remap] = EMPTY

    def start(self, node: WorkerNode, number: int, what: Any) -> None:
        """Start a task of a worker."""
        id_ = what.uuid if isinstance(what, storage.RunOneshotIngestion) else what.id
        others = [task.number for task in self.tasks.values() if task.id == id_]
        require(not others, "wanted", "task {} of {} starts, there are {}", number, id_, others)
        going = id_ in self.to_go or id_ in self.forgetting.values()
        require(not going, "holds", "task {} of {} starts, and what it keeps is going", number, id_)
        right = owner_of(id_, len(self._world.nodes)) == node.index
        require(
            right, "wanted", "worker {} starts {}, of which it is not the owner", node.index, id_
        )
        if isinstance(what, storage.IngestionDescription):
            self.kept.add(id_)
        task = self.tasks[number] = SimulatedTask(
            number, id_, what, node, node.storage.writes_allowed
        )
        if isinstance(what, storage.SinkDescription):
            (shape,) = shapes(what).values()
            self._world.holds.sink(what, self._upper(shape), AS_OF)
        if self._world.fault("task"):
            self._fail(task)

    def stop(self, number: int, forget: bool) -> None:
        """Request a task to stop; `forget`: and to remove its external resources."""
        task = self.tasks[number]
        task.stopping, task.forgets = True, forget
        task.hangs = self._world.fault("stop")

    def forget(self, node: WorkerNode, effect: e.CleanUpSource) -> None:
        """Start to remove a source's external resources: no task may use them."""
        id_ = effect.description.id
        users = [task.number for task in self.tasks.values() if task.id == id_]
        require(not users, "holds", "what {} keeps outside goes, and tasks {} use it", id_, users)
        self.forgetting[node.index, effect.number] = id_

    def dropped_for_good(self, ids: Iterable[ObjectId]) -> None:
        """Note a drop when the owner comes to it in the one order."""
        self.to_go |= self.kept.intersection(ids)

    def _gone(self, id_: ObjectId) -> None:
        self.kept.discard(id_)
        self.to_go.discard(id_)

    def forgotten(self) -> bool:
        """Finish a removal of external resources."""
        index, number = self._world.pick(list(self.forgetting))
        id_ = self.forgetting.pop((index, number))
        self._gone(id_)
        self._world.nodes[index].feed_about(id_, e.TaskStopped(number))
        return True

    def task_stops(self) -> bool:
        """Finish a task that was requested to stop."""
        stopping = [t for t in self.tasks.values() if t.stopping and not t.hangs]
        if not stopping:
            return False
        task = self._world.pick(stopping)
        del self.tasks[task.number]
        if task.forgets:
            self._gone(task.id)
        task.node.feed_about(task.id, e.TaskStopped(task.number))
        return True

    def delay_is_over(self) -> bool:
        """End the delay of a task that has failed."""
        task = self._world.pick(self.delayed)
        self.delayed.remove(task)
        self._world.blame.failed.add((task.id, task.number))
        task.node.feed(e.RestartDue(task.number))
        return True

    def _fail(self, task: SimulatedTask) -> None:
        """Fail a task; its worker is told later."""
        task.failed = True
        self._failures.append(task)

    def failure_is_told(self) -> bool:
        """Tell a worker that a task has failed: the task is started again, or was a one-shot
        ingestion, whose result that is."""
        task = self._failures.pop(0)
        text = f"<{task.id}>: broken"
        if isinstance(task.what, storage.RunOneshotIngestion):
            self.done(task, StagingFailed("PenstockError", text))
        else:
            task.node.feed(e.TaskFailed(task.number, text))
        return True

    def done(self, task: SimulatedTask, result: storage.StagingResult) -> None:
        """End a one-shot ingestion."""
        task.failed = True
        self._world.told.staged.setdefault(task.id, []).append(result)
        task.node.feed(e.OneshotDone(task.number, result))

    def at_work(self) -> list[SimulatedTask]:
        """Return the tasks that can act."""
        return [t for t in self.tasks.values() if t.at_work and not (t.failed or t.stopping)]

    def act(self, dice: random.Random) -> bool:
        """Let a task act; return False if none is at work."""
        working = self.at_work()
        if working:
            self._act(working[int(dice.random() * len(working))], dice)
        return bool(working)

    def _act(self, task: SimulatedTask, dice: random.Random) -> None:
        which = dice.random()
        if isinstance(task.what, storage.RunOneshotIngestion):
            if which < 0.3:
                self._measure(task, (task.id,))
            elif which < 0.45:
                self._fail(task)
            else:
                self.done(task, self.batch())
            return
        ids = list(shapes(task.what))
        if which < 0.25:
            self._fail(task)
        elif which < 0.65:
            self.clock += 1
            self.reach(task, self.clock)
        elif which < 0.70 and isinstance(task.what, storage.IngestionDescription):
            self.reach(task, EMPTY)
        elif which < 0.90:
            self._observe(task, ids, dice)
        else:
            self._measure(task, ids)

    def batch(self) -> FilesStaged:
        """Return a staged batch with a fresh part."""
        self._parts += 1
        return FilesStaged((storage.StagedBatch(b"part %d" % self._parts, 1, 1),))

    def reach(self, task: SimulatedTask, upper: Frontier) -> None:
        """Make a task's shapes durable below `upper`; complete ones stay complete."""
        for id_, shape in shapes(task.what).items():
            if upper == EMPTY and shape[0] == "remap":
                continue
            now = self.durable[shape] = max(self._upper(shape), upper)
            task.node.feed(e.FrontierReached(task.number, id_, now))

    def _observe(self, task: SimulatedTask, ids: list[ObjectId], dice: random.Random) -> None:
        task.round += 1
        seen = []
        for id_ in ids:
            status: Any = dice.choice(STATED)
            error = f"<{id_}>: no route" if status == "stalled" else None
            seen.append(e.HealthObservation(id_, status, error))
        has_progressed = dice.random() < 0.5
        task.node.feed(e.HealthObserved(task.number, task.round, tuple(seen), has_progressed))

    def _measure(self, task: SimulatedTask, ids: Any) -> None:
        task.counted += 1
        for id_ in ids:
            self._world.told.measured[id_] += 1
            task.node.feed(e.StatisticsMeasured(task.number, ObjectStatistics(id_, task.counted)))

    # -- dataflows ---------------------------------------------------------------------------------

    def render(self, node: WorkerNode, effect: ce.RenderDataflow) -> None:
        """Render a dataflow on a worker; worker 0 runs its actor."""
        known = self.flows.get(effect.number)
        flow = known or SimulatedDataflow(effect.number, effect.description)
        self.flows[effect.number] = flow
        if node.index == 0:
            flow.begun = True
            flow.crashed = self._world.fault("dataflow")
            if flow.crashed:
                self._crashes.append(flow)

    def heard(self, number: int, message: Any) -> None:
        """Take worker 0's message to a dataflow."""
        if isinstance(message, DataflowScheduled):
            self.flows[number].scheduled = True

    def flow_stops(self) -> bool:
        """Stop a dropped dataflow on worker 0, then on all workers."""
        going = [flow for flow in self.flows.values() if flow.dropping]
        for flow in going:
            if not flow.stopped:
                if 0 in flow.dropping:
                    flow.stopped = True
                    return True
                continue
            index = self._world.pick(sorted(flow.dropping))
            flow.dropping.discard(index)
            self._world.nodes[index].feed_compute(ce.DropCompleted(flow.number))
            return True
        return False

    def crash_is_told(self) -> bool:
        """Tell worker 0 that a dataflow's actor has failed."""
        flow = self._crashes.pop(0)
        if self._lives(flow):
            self._world.nodes[0].feed_compute(ce.DataflowCrashed(flow.number, "its actor failed"))
        return True

    def respawn(self, number: int) -> None:
        """Restart the actor of a dataflow: an index begins with a snapshot again."""
        flow = self.flows[number]
        flow.crashed = False
        flow.incarnation += 1
        for node in self._world.nodes:
            if flow.is_index and flow.sealed.pop(node.index, None) is not None:
                node.feed_compute(ce.IndexSealed(number, 0))

    def _lives(self, flow: SimulatedDataflow) -> bool:
        return flow.begun and 0 not in flow.dropping and not flow.stopped

    def living(self) -> list[SimulatedDataflow]:
        """Return the dataflows that can act."""
        flows = self.flows.values()
        return [f for f in flows if self._lives(f) and f.scheduled and not f.crashed]

    def flow_acts(self, dice: random.Random) -> bool:
        """Let a dataflow act; return False if none can."""
        living = self.living()
        if living:
            self._flow_acts(living[int(dice.random() * len(living))], dice)
        return bool(living)

    def _flow_acts(self, flow: SimulatedDataflow, dice: random.Random) -> None:
        which = dice.random()
        if which < 0.12:
            flow.crashed = True
            self._crashes.append(flow)
        elif which < 0.2:
            status = StatusResponse(flow.id, "running")
            self._world.nodes[0].feed_compute(ce.StatusSeen(flow.number, status))
        else:
            self.clock += 1
            self.get_on(flow, self.clock, lambda: dice.random() < 0.6)

    def get_on(self, flow: SimulatedDataflow, upper: Frontier, hears: Callable[[], bool]) -> None:
        """Advance a dataflow to `upper`; report that to workers for which `hears()` is true."""
        export = flow.description.export
        if isinstance(export, compute.CopyToExport):
            if not flow.over:
                flow.over = True
                done = compute.CopyDone(1, 1, "manifest")
                self._world.nodes[0].feed_compute(ce.CopyEnded(flow.number, done))
            return
        flow.upper = upper = max(upper, flow.upper, flow.description.as_of)
        if isinstance(export, compute.SubscribeExport):
            self._emit(flow, export, upper)
            return
        for node in self._world.nodes:
            if hears() and node.compute.by_number(flow.number) is not None:
                self._tell(node, flow)

    def _emit(
        self, flow: SimulatedDataflow, export: compute.SubscribeExport, upper: Frontier
    ) -> None:
        lower = flow.emitted or (0 if export.snapshot else flow.description.as_of + 1)
        if flow.waits or upper + 1 <= lower:
            return
        flow.emitted, flow.waits = upper + 1, True
        batch = compute.SubscribeBatch(lower, flow.emitted)
        emit = EmitBatch(flow.id, flow.incarnation, batch)
        self._world.nodes[0].feed_compute(ce.SubscribeBatchReady(flow.number, emit))

    def _tell(self, node: WorkerNode, flow: SimulatedDataflow) -> None:
        upper = flow.upper
        if flow.is_index:
            made = node.compute.by_number(flow.number)
            first = flow.sealed.get(node.index) is None
            since = made.allowed if first and made is not None else 0
            if since >= upper:
                return  # its snapshot is not readable yet
            flow.sealed[node.index] = upper
            if first:
                flow.since[node.index] = since
            node.feed_compute(ce.IndexSealed(flow.number, upper, since))
        progress = DataflowProgress(flow.id, upper, upper, upper)
        node.feed_compute(ce.DataflowProgressed(flow.number, progress))

    def dropped(self, node: WorkerNode, number: int) -> None:
        """Drop a dataflow on a worker."""
        self.flows[number].dropping.add(node.index)

    # -- reads -------------------------------------------------------------------------------------

    def read(self, node: WorkerNode, start: ce.StartPeek) -> None:
        """Start a read on a worker."""
        incarnation = 0
        if start.number:
            flow, time = self.flows[start.number], start.peek.time
            incarnation = flow.incarnation
            sealed = flow.sealed.get(node.index, 0)
            require(
                sealed > time, "holds", "{} is read at {}, sealed below {}", flow.id, time, sealed
            )
            since = max(flow.since.get(node.index, 0), flow.compacted.get(node.index, 0))
            require(
                since <= time, "holds", "{} is read at {}, its since is {}", flow.id, time, since
            )
        self.reads[node.index, start.ticket] = SimulatedRead(node, start, incarnation)

    def read_ends(self) -> bool:
        """End a read with an answer, or without one if a snapshot has replaced its partition."""
        index, ticket = self._world.pick(list(self.reads))
        read = self.reads.pop((index, ticket))
        flow = self.flows.get(read.start.number)
        replaced = flow is not None and flow.incarnation != read.incarnation
        rows = None if replaced else compute.PeekRows(b"", 0)
        read.node.feed_compute(ce.PeekDone(ticket, rows))
        return True

    def compacts(self, node: WorkerNode, effect: ce.CompactIndex) -> None:
        """Compact a worker's partition."""
        flow = self.flows[effect.number]
        made = node.compute.by_number(effect.number)
        if made is not None:
            self._world.holds.compaction(flow.id, effect.since, made.allowed)
        times = [
            read.start.peek.time
            for (index, _), read in self.reads.items()
            if index == node.index and read.start.number == effect.number
        ]
        self._world.holds.reads(effect.number, effect.since, times)
        flow.compacted[node.index] = effect.since

    # -- calm --------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Let hanging tasks stop."""
        for task in self.tasks.values():
            task.hangs = False
