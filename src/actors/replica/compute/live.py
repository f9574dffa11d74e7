"""State of one rendering on a worker, and the messages that concern it.

A dataflow's actor gets a `DataflowLink` for each worker instead of the plain address: it signs
messages with the render number and the sender's address. So a worker can distinguish a dataflow
from a former rendering of the same object, and knows whom to answer.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from actors.durable.arrangement import Arrangement, SharedStatistics
from actors.durable.persist import PartFilter
from actors.engine.views.input_uses import input_filter
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import (
    DataflowDescription,
    ShardImport,
    StatusResponse,
    ViewExport,
)
from actors.model.protocol.internal import (
    CompactionAllowed,
    DataflowReport,
    DataflowScheduled,
    InputStarted,
    InstallUpdates,
    ListenFailed,
    StartInputs,
    UpdatesInstalled,
    WritesAllowed,
)
from actors.replica.compute.events import DataflowCrashed, Event, IndexSealed, PeekDone, StatusSeen
from actors.replica.compute.index import IndexInsertion, IndexPartition
from actors.replica.compute.peeks import chosen_worker
from actors.runtime.errors import ActorDead, ConnectionBroken, ResourceClosed
from actors.runtime.kernel import STOP, Actor, ActorAddress, ActorContext
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings

# -- A worker's listen and fetch tasks: one incarnation of a dataflow at a time --------------------
# Every worker has a fetch task for each input; the listen task of an input runs on the worker
# chosen by (dataflow, input). Tasks of an earlier incarnation stop before those of the next start.


class InputTasks:
    """Starts, watches and stops the tasks, as children of the worker."""

    def __init__(self, site: WorkerSite) -> None:
        self._site = site

    def start(self, live: LiveRendering, start: StartInputs, dataflow: ActorAddress[Any]) -> None:
        """Stop the earlier tasks beside the actor, then start those of this incarnation."""
        live.tasks_serial += 1
        tasks, live.tasks = live.tasks, []
        stopped = TasksStopped(live.number, live.tasks_serial, start, dataflow)
        self._site.ctx.effect(lambda: self.stop(tasks), done=lambda _: stopped)

    def finish(self, live: LiveRendering) -> None:
        """Stop the tasks beside the actor: the dataflow has ended."""
        live.tasks_serial += 1
        tasks, live.tasks = live.tasks, []
        self._site.ctx.effect(lambda: self.stop(tasks), done=lambda _: None)

    async def stop(self, tasks: list[ActorAddress[Any]]) -> None:
        """Stop tasks and wait; not to be called while handling a message."""
        for task in tasks:
            await self._site.ctx.stop_child(task)

    def turn(self, message: TasksTurn) -> None:
        """Start tasks when the earlier ones have stopped, or report one that ended."""
        live = self._site.live.get(message.number)
        if live is None or live.dropping or live.tasks_serial != message.serial:
            return
        if isinstance(message, TasksStopped):
            for index, described in enumerate(live.description.imports):
                self._spawn(live, message, index, described)
        elif live.dataflow is not None:
            # A task never ends by itself: this one has crashed, and its input freezes.
            error = ActorDead(f"{message.path} failed; see the log")
            live.dataflow.reply(
                ListenFailed(live.id, message.incarnation, message.input_index, error)
            )

    def _spawn(
        self, live: LiveRendering, message: TasksStopped, index: int, described: ShardImport
    ) -> None:
        site, cast, dataflow = self._site, self._site.cast, message.dataflow
        id, incarnation = message.start.dataflow, message.start.incarnation
        tail = f"{live.number}-{message.serial}-{index}"
        fetch = site.ctx.spawn(
            partial(cast.fetch, described.schema, id, incarnation, index, dataflow),
            f"fetch-{tail}",
            policy=STOP,
        )
        listen: ActorAddress[Any] | None = None
        if chosen_worker(f"{id}/{index}", site.count) == site.index:
            export = live.description.export
            wanted = input_filter(export.plan, index) if isinstance(export, ViewExport) else None
            listen = site.ctx.spawn(
                partial(cast.listen, described, id, incarnation, index, dataflow, wanted),
                f"listen-{tail}",
                policy=STOP,
            )
        for task in (fetch, listen):
            if task is not None:
                live.tasks.append(task)
                ended = TaskEnded(live.number, message.serial, incarnation, index, task.path)
                site.ctx.watch(task, ended)
        dataflow.reply(InputStarted(id, incarnation, site.index, index, fetch, listen))


class ActorFactory(msgspec.Struct, frozen=True, gc=False):
    """Factories of the actors that a worker starts (tests replace them)."""

    dataflow: Callable[[DataflowDescription, tuple[ActorAddress[Any], ...], Path], Actor[Any]]
    """Takes (description, workers, scratch). The dataflow is read-only until `WritesAllowed`."""
    listen: Callable[
        [ShardImport, ObjectId, int, int, ActorAddress[Any], PartFilter | None], Actor[Any]
    ]
    """Takes (import, dataflow, incarnation, input number, consumer, rows wanted)."""
    fetch: Callable[[TableSchema, ObjectId, int, int, ActorAddress[Any]], Actor[Any]]
    """Takes (schema, dataflow, incarnation, input number, consumer)."""
    shared: Callable[[], list[SharedStatistics]] = list
    """Returns the arrangements that dataflows share now."""


class FromDataflow(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's message, signed with its render number and the sender's address."""

    number: int
    dataflow: ActorAddress[Any]
    message: DataflowReport


class DataflowStopped(msgspec.Struct, frozen=True, gc=False):
    """Worker 0 → the others: the dropped dataflow's actor has stopped."""

    number: int


# -- results of a worker's own effects -------------------------------------------------------------


class MaintenanceDue(msgspec.Struct, frozen=True, gc=False):
    """Maintenance is due."""


class PeekFinished(msgspec.Struct, frozen=True, gc=False):
    """A peek was answered."""

    done: PeekDone


class InstallFinished(msgspec.Struct, frozen=True, gc=False):
    """An install succeeded, or failed."""

    number: int
    insertion: IndexInsertion
    result: Arrangement | Exception


class InsertAgain(msgspec.Struct, frozen=True, gc=False):
    """The delay after a failed install has passed."""

    number: int
    insertion: IndexInsertion


class MaintenanceFinished(msgspec.Struct, frozen=True, gc=False):
    """A partition's maintenance was done, or failed."""

    number: int
    error: Exception | None = None


class TasksStopped(msgspec.Struct, frozen=True, gc=False):
    """The tasks of earlier incarnations have stopped."""

    number: int
    serial: int
    start: StartInputs
    dataflow: ActorAddress[Any]


class TaskEnded(msgspec.Struct, frozen=True, gc=False):
    """A listen or fetch task has stopped."""

    number: int
    serial: int
    incarnation: int
    input_index: int
    path: str


class DataflowEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a dataflow's actor has stopped."""

    number: int
    serial: int


class SpawnAgain(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: the delay after a dataflow's crash has passed."""

    number: int
    serial: int


class DataflowRemoved(msgspec.Struct, frozen=True, gc=False):
    """A dropped dataflow was torn down."""

    number: int


IndexTurn: TypeAlias = InstallFinished | InsertAgain | MaintenanceFinished
TasksTurn: TypeAlias = TasksStopped | TaskEnded
ChildrenTurn: TypeAlias = DataflowEnded | SpawnAgain | DataflowStopped


# -- signed addresses ------------------------------------------------------------------------------


class DataflowOrigin:
    """Sender behind a `DataflowLink`; the address is known once the actor is spawned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address: ActorAddress[Any] | None = None


class DataflowLink(ActorAddress[Any]):
    """Address of a worker for one dataflow, which signs all messages."""

    __slots__ = ("_origin",)

    def __init__(self, worker: ActorAddress[Any], origin: DataflowOrigin) -> None:
        super().__init__(worker._mailbox)
        self._origin = origin

    def _sign(self, message: Any) -> FromDataflow:
        address = self._origin.address
        assert address is not None, "a dataflow speaks only after it was spawned"
        return FromDataflow(self._origin.number, address, message)

    async def send(self, message: Any) -> None:
        """Send a signed message as `ActorAddress.send` does."""
        await super().send(self._sign(message))

    def send_nowait(self, message: Any) -> None:
        """Send a signed message as `ActorAddress.send_nowait` does."""
        super().send_nowait(self._sign(message))

    def reply(self, message: Any) -> bool:
        """Send a signed message as `ActorAddress.reply` does."""
        return super().reply(self._sign(message))


# -- state of a rendering --------------------------------------------------------------------------


class LiveRendering:
    """State of one rendering on one worker."""

    def __init__(self, number: int, description: DataflowDescription) -> None:
        self.number = number
        self.description = description
        self.dataflow: ActorAddress[Any] | None = None
        """Worker 0: the child actor, while it runs. Other workers: the last sender."""
        self.dataflow_serial = 0
        self.tasks: list[ActorAddress[Any]] = []
        self.tasks_serial = 0
        self.index: IndexPartition | None = None
        self.maintaining = False
        self.dropping = False
        self.tearing_down = False

    @property
    def id(self) -> ObjectId:
        """Return the id of the maintained object."""
        return self.description.id


class WorkerSite(msgspec.Struct, frozen=True, gc=False):
    """Context that the parts of one worker share."""

    ctx: ActorContext[Any]
    index: int
    count: int
    workers: Sequence[ActorAddress[Any]]
    cast: ActorFactory
    settings: Settings
    scratch: Path
    live: dict[int, LiveRendering]
    feed: Callable[[Event], Awaitable[None]]
    """Feeds an event to the state machine and performs its effects."""
    life: int = 0
    """Number of the cluster's incarnation among all of the process, for names that must differ."""


# -- Runs a worker's index partitions: installs one after another, maintenance beside them ---------


log = logging.getLogger("penstock.worker")


class IndexInstaller:
    """Runs `IndexPartition`'s blocking work as effects of the worker."""

    def __init__(self, site: WorkerSite) -> None:
        self._site = site

    async def queue(
        self, live: LiveRendering, install: InstallUpdates, dataflow: ActorAddress[Any]
    ) -> None:
        """Queue an install. While a snapshot replaces the contents no time is readable."""
        assert live.index is not None
        if install.snapshot:
            # Peeks wait from now on, until the snapshot is installed.
            await self._site.feed(IndexSealed(live.number, 0))
        live.index.queue(IndexInsertion(install, dataflow))
        self._next(live, live.index)

    def _next(self, live: LiveRendering, index: IndexPartition) -> None:
        insertion = index.next()
        if insertion is None:
            return
        ctx, number = self._site.ctx, live.number
        ctx.effect(
            lambda: ctx.clock.run_blocking(lambda: index.perform(insertion)),
            done=lambda arrangement: InstallFinished(number, insertion, arrangement),
            failed=lambda error: InstallFinished(number, insertion, error),
        )

    async def turn(self, message: IndexTurn) -> None:
        """Handle the result of an install or of maintenance."""
        live = self._site.live.get(message.number)
        if live is None or live.index is None:
            return
        index = live.index
        match message:
            case InstallFinished(result=Arrangement() as arrangement, insertion=insertion):
                index.done(arrangement)
                install = insertion.install
                await self._site.feed(IndexSealed(live.number, install.upper, insertion.since))
                insertion.dataflow.reply(
                    UpdatesInstalled(
                        install.dataflow, install.incarnation, self._site.index, install.upper
                    )
                )
            case InstallFinished(result=error, insertion=insertion):
                assert isinstance(error, Exception)
                await self._failed(live, index, insertion, error)
            case InsertAgain():
                index.again(message.insertion)
            case MaintenanceFinished():
                live.maintaining = False
                if message.error is not None:
                    index.wants_maintenance = True
                    log.warning("%s: maintenance: %s", self._site.ctx.path, message.error)
        self._next(live, index)

    async def _failed(
        self,
        live: LiveRendering,
        index: IndexPartition,
        insertion: IndexInsertion,
        error: Exception,
    ) -> None:
        retry = index.failed(insertion)
        if retry is None or live.dropping:
            return
        site = self._site
        log.warning("%s: cannot install: %s", site.ctx.path, error, exc_info=error)
        text = f"worker {site.index} cannot install: {type(error).__name__}: {error}"
        await site.feed(StatusSeen(live.number, StatusResponse(live.id, "stalled", text)))
        # Retry is safe: a failed install changed nothing. The index's frontier does not move
        # meanwhile.
        delay = site.settings.retry_delay_ms(retry.attempt + 1)
        site.ctx.after(delay, InsertAgain(live.number, retry))

    def maintain(self) -> None:
        """Merge the runs inserted since the last turn, off the loop."""
        for live in self._site.live.values():
            index = live.index
            if index is None or live.maintaining or live.dropping or not index.wants_maintenance:
                continue
            live.maintaining, index.wants_maintenance = True, False
            self._maintain(live.number, index)

    def _maintain(self, number: int, index: IndexPartition) -> None:
        ctx = self._site.ctx
        ctx.effect(
            lambda: ctx.clock.run_blocking(index.maintain),
            done=lambda _: MaintenanceFinished(number),
            failed=lambda error: MaintenanceFinished(number, error),
        )


# -- Starts and stops the dataflow actors, which are children of worker 0 --------------------------
# Two renderings of one object never run at once, since jobs and shards are named after the object:
# a successor is spawned when its predecessor has stopped. A crashed actor is respawned after a
# delay and sent its past commands. A drop stops the actor first; then every worker stops its tasks
# and removes its partition.


ForDataflow: TypeAlias = DataflowScheduled | CompactionAllowed | WritesAllowed


class DataflowChildren:
    """Spawns and stops dataflows on worker 0; tears down each worker's tasks and partition.

    `commands_for` returns the past commands for a dataflow that starts late.
    """

    def __init__(
        self, site: WorkerSite, tasks: InputTasks, commands_for: Callable[[int], list[ForDataflow]]
    ) -> None:
        self._site = site
        self._tasks = tasks
        self._commands_for = commands_for
        self._by_id: dict[ObjectId, dict[int, LiveRendering]] = {}
        self._stopped_early: set[int] = set()
        """Dataflows that worker 0 has stopped before this worker applied the drop."""

    def render(self, live: LiveRendering) -> None:
        """Start the actor, unless a predecessor must stop first."""
        self._by_id.setdefault(live.id, {})[live.number] = live
        if self._site.index == 0 and not self._predecessor_runs(live):
            self._spawn(live)

    def _predecessor_runs(self, live: LiveRendering) -> bool:
        return any(
            other.number < live.number and other.dataflow is not None
            for other in self._same_object(live)
        )

    def _same_object(self, live: LiveRendering) -> list[LiveRendering]:
        """Return all present renderings of one object, oldest first."""
        return list(self._by_id.get(live.id, {}).values())

    def gone(self, live: LiveRendering) -> None:
        """Forget a rendering that has been torn down."""
        same = self._by_id[live.id]
        del same[live.number]
        if not same:
            del self._by_id[live.id]

    def _spawn(self, live: LiveRendering) -> None:
        site = self._site
        live.dataflow_serial += 1
        origin = DataflowOrigin(live.number)
        links = tuple(DataflowLink(worker, origin) for worker in site.workers)
        description = live.description
        scratch = site.scratch / f"d{live.number}" / str(live.dataflow_serial)
        address = site.ctx.spawn(
            lambda: site.cast.dataflow(description, links, scratch),
            f"dataflow-{live.number}-{live.dataflow_serial}",
            policy=STOP,
        )
        origin.address = live.dataflow = address
        site.ctx.watch(address, DataflowEnded(live.number, live.dataflow_serial))

    async def tell(self, live: LiveRendering, message: ForDataflow) -> None:
        """Send a command to the dataflow. One that is not running gets it when it starts."""
        if self._site.index == 0 and live.dataflow is not None:
            with suppress(ResourceClosed, ConnectionBroken):
                await live.dataflow.send(message)

    def respawn(self, live: LiveRendering) -> None:
        """Remove a crashed actor's files, and respawn it after a delay."""
        site, serial = self._site, live.dataflow_serial
        directory = site.scratch / f"d{live.number}" / str(serial)
        site.ctx.effect(
            lambda: site.ctx.clock.run_blocking(lambda: shutil.rmtree(directory, True)),
            done=lambda _: None,
        )
        delay = site.settings.retry_delay_ms(serial + 1)
        site.ctx.after(delay, SpawnAgain(live.number, serial))

    async def turn(self, message: ChildrenTurn) -> None:
        """Handle the end or the restart of a dataflow."""
        live = self._site.live.get(message.number)
        match message:
            case DataflowStopped():
                if live is not None and live.dropping:
                    self._tear_down(live)
                else:
                    self._stopped_early.add(message.number)
            case DataflowEnded(serial=serial):
                if live is not None and live.dataflow_serial == serial and not live.tearing_down:
                    await self._ended(live)
            case SpawnAgain(serial=serial):
                if live is not None and live.dataflow_serial == serial and not live.dropping:
                    await self._start_late(live)

    async def _start_late(self, live: LiveRendering) -> None:
        self._spawn(live)
        for command in self._commands_for(live.number):
            await self.tell(live, command)

    async def _ended(self, live: LiveRendering) -> None:
        """Handle the end of the actor, by a drop or a crash."""
        live.dataflow = None
        if not live.dropping:
            text = f"the dataflow's actor failed (start {live.dataflow_serial}); see the log"
            await self._site.feed(DataflowCrashed(live.number, text))
            return
        # Only now: the actor used the tasks and partitions of all workers.
        for worker in self._site.workers[1:]:
            with suppress(ResourceClosed, ConnectionBroken):
                await worker.send(DataflowStopped(live.number))
        self._tear_down(live)
        for successor in self._same_object(live):
            waits = successor.dataflow_serial == 0 and not successor.dropping
            if waits and not self._predecessor_runs(successor):
                await self._start_late(successor)

    def drop(self, live: LiveRendering) -> None:
        """Stop the dataflow; tear it down when it has stopped."""
        live.dropping = True
        site, dataflow = self._site, live.dataflow
        if site.index != 0:
            if live.number in self._stopped_early:
                self._stopped_early.discard(live.number)
                self._tear_down(live)
        elif dataflow is None:
            # Never started, or crashed and not yet respawned: go on as if it had just stopped.
            site.ctx.self.reply(DataflowEnded(live.number, live.dataflow_serial))
        else:
            # Beside the actor: the stop waits, and the worker must handle messages meanwhile.
            site.ctx.effect(lambda: site.ctx.stop_child(dataflow), done=lambda _: None)

    def _tear_down(self, live: LiveRendering) -> None:
        """Stop the tasks and remove the partition, which nothing uses any more."""
        live.tearing_down = True
        # Makes results of earlier starts stale.
        live.tasks_serial += 1
        tasks, live.tasks = live.tasks, []
        index, site = live.index, self._site
        if index is not None:
            index.closed = True

        def remove() -> None:
            if index is not None:
                index.close()
            if site.index == 0:
                shutil.rmtree(site.scratch / f"d{live.number}", ignore_errors=True)

        async def run() -> None:
            await self._tasks.stop(tasks)
            await site.ctx.clock.run_blocking(remove)

        site.ctx.effect(run, done=lambda _: DataflowRemoved(live.number))
