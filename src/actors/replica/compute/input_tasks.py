"""A worker's listen and fetch tasks: one incarnation of a dataflow at a time.

Every worker has a fetch task for each input; the listen task of an input runs on the worker
chosen by (dataflow, input). Tasks of an earlier incarnation stop before those of the next start.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from actors.engine.views.input_uses import input_filter
from actors.model.protocol.compute import ShardImport, ViewExport
from actors.model.protocol.internal import InputStarted, ListenFailed, StartInputs
from actors.replica.compute.live import (
    LiveRendering,
    TaskEnded,
    TasksStopped,
    TasksTurn,
    WorkerSite,
)
from actors.replica.compute.peeks import chosen_worker
from actors.runtime.errors import ActorDead
from actors.runtime.kernel import STOP, ActorAddress


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
