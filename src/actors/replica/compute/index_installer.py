"""Runs a worker's index partitions: performs insertions in order, with maintenance alongside."""

from __future__ import annotations

import logging
from typing import Any

from actors.durable.arrangement import Arrangement
from actors.model.protocol.compute import StatusResponse
from actors.model.protocol.internal import InstallUpdates, UpdatesInstalled
from actors.replica.compute.events import IndexSealed, StatusSeen
from actors.replica.compute.index import IndexInsertion, IndexPartition
from actors.replica.compute.rendering import (
    DataflowRendering,
    IndexTurn,
    InstallFinished,
    MaintenanceFinished,
    RetryInsertion,
    WorkerContext,
)
from actors.runtime.kernel import ActorAddress

log = logging.getLogger("penstock.worker")


class IndexInstaller:
    """Runs the blocking work of `IndexPartition` as effects of the worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def queue(
        self, rendering: DataflowRendering, install: InstallUpdates, dataflow: ActorAddress[Any]
    ) -> None:
        """Queue an insertion. No time is readable while a snapshot replaces the contents."""
        assert rendering.index is not None
        if install.snapshot:
            # From now on peeks wait until the snapshot has been installed.
            await self._context.feed(IndexSealed(rendering.number, 0))
        rendering.index.queue(IndexInsertion(install, dataflow))
        self._next(rendering, rendering.index)

    def _next(self, rendering: DataflowRendering, index: IndexPartition) -> None:
        insertion = index.next()
        if insertion is None:
            return
        ctx, number = self._context.ctx, rendering.number
        ctx.effect(
            lambda: ctx.clock.run_blocking(lambda: index.perform(insertion)),
            done=lambda arrangement: InstallFinished(number, insertion, arrangement),
            failed=lambda error: InstallFinished(number, insertion, error),
        )

    async def turn(self, message: IndexTurn) -> None:
        """Handle the result of an insertion or of maintenance."""
        rendering = self._context.renderings.get(message.number)
        if rendering is None or rendering.index is None:
            return
        index = rendering.index
        match message:
            case InstallFinished(result=Arrangement() as arrangement, insertion=insertion):
                index.done(arrangement)
                install = insertion.install
                await self._context.feed(
                    IndexSealed(rendering.number, install.upper, insertion.since)
                )
                insertion.dataflow.reply(
                    UpdatesInstalled(
                        install.dataflow, install.incarnation, self._context.index, install.upper
                    )
                )
            case InstallFinished(result=error, insertion=insertion):
                assert isinstance(error, Exception)
                await self._failed(rendering, index, insertion, error)
            case RetryInsertion():
                index.again(message.insertion)
            case MaintenanceFinished():
                rendering.maintaining = False
                if message.error is not None:
                    index.wants_maintenance = True
                    log.warning(
                        "%s: index maintenance failed: %s", self._context.ctx.path, message.error
                    )
        self._next(rendering, index)

    async def _failed(
        self,
        rendering: DataflowRendering,
        index: IndexPartition,
        insertion: IndexInsertion,
        error: Exception,
    ) -> None:
        retry = index.failed(insertion)
        if retry is None or rendering.dropping:
            return
        context = self._context
        log.warning("%s: cannot install updates: %s", context.ctx.path, error, exc_info=error)
        text = f"worker {context.index} cannot install updates: {type(error).__name__}: {error}"
        await context.feed(
            StatusSeen(rendering.number, StatusResponse(rendering.id, "stalled", text))
        )
        # Retrying is safe: a failed insertion changed nothing, and the index's frontier does not
        # move meanwhile.
        delay = context.settings.retry_delay_ms(retry.attempt + 1)
        context.ctx.after(delay, RetryInsertion(rendering.number, retry))

    def maintain(self) -> None:
        """Merge the runs inserted since the last call, off the event loop."""
        for rendering in self._context.renderings.values():
            index = rendering.index
            if (
                index is None
                or rendering.maintaining
                or rendering.dropping
                or not index.wants_maintenance
            ):
                continue
            rendering.maintaining, index.wants_maintenance = True, False
            self._maintain(rendering.number, index)

    def _maintain(self, number: int, index: IndexPartition) -> None:
        ctx = self._context.ctx
        ctx.effect(
            lambda: ctx.clock.run_blocking(index.maintain),
            done=lambda _: MaintenanceFinished(number),
            failed=lambda error: MaintenanceFinished(number, error),
        )
