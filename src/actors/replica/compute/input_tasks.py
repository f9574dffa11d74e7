"""A worker's listen and fetch tasks, for one incarnation of each dataflow at a time.

Every worker has a fetch task for each input. The listen task of an input runs on the worker chosen
by (dataflow, input). Tasks of an earlier incarnation stop before those of the next one start.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from actors.engine.views.input_uses import input_filter
from actors.model.protocol.compute import ShardImport, ViewExport
from actors.model.protocol.internal import InputStarted, ListenFailed, StartInputs
from actors.replica.compute.peeks import chosen_worker
from actors.replica.compute.rendering import (
    DataflowRendering,
    TaskEnded,
    TasksStopped,
    TasksTurn,
    WorkerContext,
)
from actors.runtime.errors import ActorDead
from actors.runtime.kernel import STOP, ActorAddress


class InputTasks:
    """Starts, watches and stops the tasks, which are children of the worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def start(
        self, rendering: DataflowRendering, start: StartInputs, dataflow: ActorAddress[Any]
    ) -> None:
        """Stop the earlier tasks outside the actor, then start those of this incarnation."""
        rendering.tasks_serial += 1
        tasks, rendering.tasks = rendering.tasks, []
        stopped = TasksStopped(rendering.number, rendering.tasks_serial, start, dataflow)
        self._context.ctx.effect(lambda: self.stop(tasks), done=lambda _: stopped)

    def finish(self, rendering: DataflowRendering) -> None:
        """Stop the tasks outside the actor, because the dataflow has ended."""
        rendering.tasks_serial += 1
        tasks, rendering.tasks = rendering.tasks, []
        self._context.ctx.effect(lambda: self.stop(tasks), done=lambda _: None)

    async def stop(self, tasks: list[ActorAddress[Any]]) -> None:
        """Stop tasks and wait for them. Must not be called while a message is being handled."""
        for task in tasks:
            await self._context.ctx.stop_child(task)

    def turn(self, message: TasksTurn) -> None:
        """Start tasks after the earlier ones have stopped, or report a task that has ended."""
        rendering = self._context.renderings.get(message.number)
        if rendering is None or rendering.dropping or rendering.tasks_serial != message.serial:
            return
        if isinstance(message, TasksStopped):
            for index, described in enumerate(rendering.description.imports):
                self._spawn(rendering, message, index, described)
        elif rendering.dataflow is not None:
            # A task never ends on its own: this one has crashed, so its input stops advancing.
            error = ActorDead(f"{message.path} crashed; see the log")
            rendering.dataflow.reply(
                ListenFailed(rendering.id, message.incarnation, message.input_index, error)
            )

    def _spawn(
        self,
        rendering: DataflowRendering,
        message: TasksStopped,
        index: int,
        described: ShardImport,
    ) -> None:
        context, factory, dataflow = self._context, self._context.factory, message.dataflow
        id, incarnation = message.start.dataflow, message.start.incarnation
        tail = f"{rendering.number}-{message.serial}-{index}"
        fetch = context.ctx.spawn(
            partial(factory.fetch, described.schema, id, incarnation, index, dataflow),
            f"fetch-{tail}",
            policy=STOP,
        )
        listen: ActorAddress[Any] | None = None
        if chosen_worker(f"{id}/{index}", context.count) == context.index:
            export = rendering.description.export
            wanted = input_filter(export.plan, index) if isinstance(export, ViewExport) else None
            listen = context.ctx.spawn(
                partial(factory.listen, described, id, incarnation, index, dataflow, wanted),
                f"listen-{tail}",
                policy=STOP,
            )
        for task in (fetch, listen):
            if task is not None:
                rendering.tasks.append(task)
                ended = TaskEnded(rendering.number, message.serial, incarnation, index, task.path)
                context.ctx.watch(task, ended)
        dataflow.reply(InputStarted(id, incarnation, context.index, index, fetch, listen))
