"""Runs a worker's index partitions: installs one after another, maintenance beside them."""

from __future__ import annotations

import logging
from typing import Any

from actors.durable.arrangement import Arrangement
from actors.model.protocol.compute import StatusResponse
from actors.model.protocol.internal import InstallUpdates, UpdatesInstalled
from actors.replica.compute.events import IndexSealed, StatusSeen
from actors.replica.compute.index import IndexInsertion, IndexPartition
from actors.replica.compute.live import (
    IndexTurn,
    InsertAgain,
    InstallFinished,
    LiveRendering,
    MaintenanceFinished,
    WorkerSite,
)
from actors.runtime.kernel import ActorAddress

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
