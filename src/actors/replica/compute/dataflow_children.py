"""Starts and stops the dataflow actors, which are children of worker 0.

Two renderings of one object never run at once, since jobs and shards are named after the object:
a successor is spawned when its predecessor has stopped. A crashed actor is respawned after a
delay and sent its past commands. A drop stops the actor first; then every worker stops its tasks
and removes its partition.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from actors.model.protocol.internal import CompactionAllowed, DataflowScheduled, WritesAllowed
from actors.replica.compute.events import DataflowCrashed
from actors.replica.compute.input_tasks import InputTasks
from actors.replica.compute.live import (
    ChildrenTurn,
    DataflowEnded,
    DataflowLink,
    DataflowOrigin,
    DataflowRemoved,
    DataflowStopped,
    LiveRendering,
    SpawnAgain,
    WorkerSite,
)
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import STOP
from actors.runtime.progress import ObjectId

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
