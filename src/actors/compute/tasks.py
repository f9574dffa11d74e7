"""A worker's listen and fetch tasks: one incarnation of a dataflow at a time.

Every worker has a fetch task for each source; the listen task of a source runs on the worker chosen
by (dataflow, source). Tasks of an earlier incarnation stop before those of the next start.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from actors.compute.live import LiveRendering, TaskEnded, TasksStopped, TasksTurn, WorkerSite
from actors.compute.peeks import chosen_worker
from actors.errors import ActorDead
from actors.kernel import STOP, ActorAddress
from actors.protocol.compute import SourceImport, ViewExport
from actors.protocol.internal import ListenFailed, SourceStarted, StartSources
from actors.views.source_uses import source_filter


class InputTasks:
    """Starts, watches and stops the tasks, as children of the worker."""

    def __init__(self, site: WorkerSite) -> None:
        self._site = site

    def start(self, live: LiveRendering, start: StartSources, dataflow: ActorAddress[Any]) -> None:
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
            for source, described in enumerate(live.description.imports):
                self._spawn(live, message, source, described)
        elif live.dataflow is not None:
            # A task never ends by itself: this one has crashed, and its source freezes.
            error = ActorDead(f"{message.path} failed; see the log")
            live.dataflow.reply(ListenFailed(live.id, message.incarnation, message.source, error))

    def _spawn(
        self, live: LiveRendering, message: TasksStopped, source: int, described: SourceImport
    ) -> None:
        site, cast, dataflow = self._site, self._site.cast, message.dataflow
        id, incarnation = message.start.dataflow, message.start.incarnation
        tail = f"{live.number}-{message.serial}-{source}"
        fetch = site.ctx.spawn(
            partial(cast.fetch, described.schema, id, incarnation, source, dataflow),
            f"fetch-{tail}",
            policy=STOP,
        )
        listen: ActorAddress[Any] | None = None
        if chosen_worker(f"{id}/{source}", site.count) == site.index:
            export = live.description.export
            wanted = source_filter(export.plan, source) if isinstance(export, ViewExport) else None
            listen = site.ctx.spawn(
                partial(cast.listen, described, id, incarnation, source, dataflow, wanted),
                f"listen-{tail}",
                policy=STOP,
            )
        for task in (fetch, listen):
            if task is not None:
                live.tasks.append(task)
                ended = TaskEnded(live.number, message.serial, incarnation, source, task.path)
                site.ctx.watch(task, ended)
        dataflow.reply(SourceStarted(id, incarnation, site.index, source, fetch, listen))
