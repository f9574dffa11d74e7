"""A flood on one half stands before few commands of the other, wherever those wait."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.protocol.compute import (
    AllowCompaction,
    CreateInstance,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.internal import ProposeCommand
from actors.model.protocol.storage import UpdateStorageConfiguration
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.sequencer import CommandOrder
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from cluster_house import Fake, InlineClock, Stage  # type: ignore[import-not-found]

PROBES = 20
FLOOD = 400
HOPS = 10
"""More than there are between a client and the order; at each a window of the flood may pass."""
WINDOW = 4
MOST = HOPS * WINDOW


async def most_before(tmp_path: Path, flooded: str, window: int) -> int:
    """Commands of the flood that came into the one order between a command's being sent on the
    other half and its place in that order, at most; not looked for beyond `MOST`."""
    settings = Settings(workers=3, commands_in_flight_max=window)
    order: Counter[str] = Counter()
    news = anyio.Event()
    right = CommandOrder.propose

    def propose(self: CommandOrder, proposal: ProposeCommand) -> Any:
        nonlocal news
        order[proposal.half] += 1
        found, news = news, anyio.Event()
        found.set()
        return right(self, proposal)

    def nowhere(*_: Any) -> Any:
        raise AssertionError("nothing is reached")

    stage = Stage()
    most = 0
    with mock.patch.object(CommandOrder, "propose", propose):
        async with ActorSystem(clock=InlineClock()) as system:
            persist = await PersistClient.in_memory(settings, system.clock)
            executor = system.spawn(lambda: Fake("executor", (), stage), "executor")
            connectors = StorageConnectors(nowhere, nowhere, tmp_path)
            cluster = await WorkerCluster.start(
                system,
                settings,
                persist,
                executor,
                tmp_path,
                factory=stage.factory(),
                connectors=connectors,
            )
            compute: Any = await cluster.connect()
            stored: Any = await cluster.connect("storage")
            for command in (Hello("c"), CreateInstance(3), InitializationComplete()):
                await compute.send(command)
            for command in (Hello("s"), InitializationComplete()):
                await stored.send(command)
            wide = AllowCompaction("unknown", 7), UpdateStorageConfiguration(7)
            clients = {"compute": (compute, wide[0]), "storage": (stored, wide[1])}
            flood, drop = clients.pop(flooded)
            ((other, (client, probe)),) = clients.items()

            async def pour() -> None:
                while True:
                    await flood.send(drop)

            async with anyio.create_task_group() as group:
                group.start_soon(pour)
                while order[flooded] < FLOOD:
                    await news.wait()
                for _ in range(PROBES):
                    before, sent = order[other], order.total()
                    await client.send(probe)
                    while order[other] == before:
                        await news.wait()
                    most = max(most, order.total() - 1 - sent)
                    if most > MOST:
                        break
                group.cancel_scope.cancel()
            await compute.close()
            await stored.close()
        await persist.close()
    return most


@pytest.mark.parametrize("flooded", ["compute", "storage"])
async def test_a_flood_passes_by_a_window_at_each_hop_at_most(tmp_path: Path, flooded: str) -> None:
    assert await most_before(tmp_path, flooded, WINDOW) <= MOST
    assert await most_before(tmp_path, flooded, 100_000) > MOST, "it would see a flood"
