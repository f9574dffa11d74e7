"""Starts and stops the dataflow actors, which are children of worker 0.

Two renderings of one object never run at the same time, because jobs and shards are named after the
object. A successor is therefore spawned only after its predecessor has stopped. A crashed actor is
respawned after a delay and gets its past commands again. A drop first stops the actor; then every
worker stops its tasks and removes its partition.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from actors.model.protocol.internal import CompactionAllowed, DataflowScheduled, WritesAllowed
from actors.replica.compute.events import DataflowCrashed
from actors.replica.compute.input_tasks import InputTasks
from actors.replica.compute.rendering import (
    ChildrenTurn,
    DataflowEnded,
    DataflowLink,
    DataflowOrigin,
    DataflowRemoved,
    DataflowRendering,
    DataflowStopped,
    RespawnDue,
    WorkerContext,
)
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import STOP
from actors.runtime.progress import ObjectId

ForDataflow: TypeAlias = DataflowScheduled | CompactionAllowed | WritesAllowed


class DataflowChildren:
    """Spawns and stops dataflows on worker 0, and tears down each worker's tasks and partition.

    `commands_for` returns the past commands of a dataflow that starts late.
    """

    def __init__(
        self,
        context: WorkerContext,
        tasks: InputTasks,
        commands_for: Callable[[int], list[ForDataflow]],
    ) -> None:
        self._context = context
        self._tasks = tasks
        self._commands_for = commands_for
        self._by_id: dict[ObjectId, dict[int, DataflowRendering]] = {}
        """Renderings of each object that have not been torn down, by number."""
        self._stopped_early: set[int] = set()
        """Dataflows that worker 0 stopped before this worker applied the drop, by number."""

    def render(self, rendering: DataflowRendering) -> None:
        """Start the actor, unless a predecessor must stop first."""
        self._by_id.setdefault(rendering.id, {})[rendering.number] = rendering
        if self._context.index == 0 and not self._predecessor_runs(rendering):
            self._spawn(rendering)

    def _predecessor_runs(self, rendering: DataflowRendering) -> bool:
        return any(
            other.number < rendering.number and other.dataflow is not None
            for other in self._same_object(rendering)
        )

    def _same_object(self, rendering: DataflowRendering) -> list[DataflowRendering]:
        """Return all current renderings of the same object, oldest first."""
        return list(self._by_id.get(rendering.id, {}).values())

    def gone(self, rendering: DataflowRendering) -> None:
        """Forget a rendering that has been torn down."""
        same = self._by_id[rendering.id]
        del same[rendering.number]
        if not same:
            del self._by_id[rendering.id]

    def _spawn(self, rendering: DataflowRendering) -> None:
        context = self._context
        rendering.dataflow_serial += 1
        origin = DataflowOrigin(rendering.number)
        links = tuple(DataflowLink(worker, origin) for worker in context.workers)
        description = rendering.description
        scratch = context.scratch / f"d{rendering.number}" / str(rendering.dataflow_serial)
        address = context.ctx.spawn(
            lambda: context.factory.dataflow(description, links, scratch),
            f"dataflow-{rendering.number}-{rendering.dataflow_serial}",
            policy=STOP,
        )
        origin.address = rendering.dataflow = address
        context.ctx.watch(address, DataflowEnded(rendering.number, rendering.dataflow_serial))

    async def tell(self, rendering: DataflowRendering, message: ForDataflow) -> None:
        """Send a command to the dataflow. If it is not running, it gets the command when it
        starts."""
        if self._context.index == 0 and rendering.dataflow is not None:
            with suppress(ResourceClosed, ConnectionBroken):
                await rendering.dataflow.send(message)

    def respawn(self, rendering: DataflowRendering) -> None:
        """Remove the files of a crashed actor, and respawn it after a delay."""
        context, serial = self._context, rendering.dataflow_serial
        directory = context.scratch / f"d{rendering.number}" / str(serial)
        context.ctx.effect(
            lambda: context.ctx.clock.run_blocking(lambda: shutil.rmtree(directory, True)),
            done=lambda _: None,
        )
        delay = context.settings.retry_delay_ms(serial + 1)
        context.ctx.after(delay, RespawnDue(rendering.number, serial))

    async def turn(self, message: ChildrenTurn) -> None:
        """Handle the end of a dataflow's actor, or the end of the delay before its respawn."""
        rendering = self._context.renderings.get(message.number)
        match message:
            case DataflowStopped():
                if rendering is not None and rendering.dropping:
                    self._tear_down(rendering)
                else:
                    self._stopped_early.add(message.number)
            case DataflowEnded(serial=serial):
                if (
                    rendering is not None
                    and rendering.dataflow_serial == serial
                    and not rendering.tearing_down
                ):
                    await self._ended(rendering)
            case RespawnDue(serial=serial):
                if (
                    rendering is not None
                    and rendering.dataflow_serial == serial
                    and not rendering.dropping
                ):
                    await self._start_late(rendering)

    async def _start_late(self, rendering: DataflowRendering) -> None:
        self._spawn(rendering)
        for command in self._commands_for(rendering.number):
            await self.tell(rendering, command)

    async def _ended(self, rendering: DataflowRendering) -> None:
        """Handle the end of the actor, after a drop or a crash."""
        rendering.dataflow = None
        if not rendering.dropping:
            text = f"the dataflow's actor crashed (start {rendering.dataflow_serial}); see the log"
            await self._context.feed(DataflowCrashed(rendering.number, text))
            return
        # Tell the other workers only now: the actor used the tasks and partitions of all workers.
        for worker in self._context.workers[1:]:
            with suppress(ResourceClosed, ConnectionBroken):
                await worker.send(DataflowStopped(rendering.number))
        self._tear_down(rendering)
        for successor in self._same_object(rendering):
            waits = successor.dataflow_serial == 0 and not successor.dropping
            if waits and not self._predecessor_runs(successor):
                await self._start_late(successor)

    def drop(self, rendering: DataflowRendering) -> None:
        """Stop the dataflow's actor, and tear the rendering down once it has stopped."""
        rendering.dropping = True
        context, dataflow = self._context, rendering.dataflow
        if context.index != 0:
            if rendering.number in self._stopped_early:
                self._stopped_early.discard(rendering.number)
                self._tear_down(rendering)
        elif dataflow is None:
            # It never started, or crashed and has not been respawned yet. Continue as if it had
            # just stopped.
            context.ctx.self.reply(DataflowEnded(rendering.number, rendering.dataflow_serial))
        else:
            # Run this outside the actor: the stop may take a while, and the worker must keep
            # handling messages.
            context.ctx.effect(lambda: context.ctx.stop_child(dataflow), done=lambda _: None)

    def _tear_down(self, rendering: DataflowRendering) -> None:
        """Stop the tasks and remove the partition, which nothing uses any more."""
        rendering.tearing_down = True
        # This makes the results of earlier starts stale.
        rendering.tasks_serial += 1
        tasks, rendering.tasks = rendering.tasks, []
        index, context = rendering.index, self._context
        if index is not None:
            index.closed = True

        def remove() -> None:
            if index is not None:
                index.close()
            if context.index == 0:
                shutil.rmtree(context.scratch / f"d{rendering.number}", ignore_errors=True)

        async def run() -> None:
            await self._tasks.stop(tasks)
            await context.ctx.clock.run_blocking(remove)

        context.ctx.effect(run, done=lambda _: DataflowRemoved(rendering.number))
