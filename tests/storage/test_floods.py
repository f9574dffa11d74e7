"""A flood on one half stands before few commands of the other, wherever those wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from actors.cluster import Cluster
from actors.kernel import System
from actors.persist import PersistClient
from actors.protocol.compute import (
    AllowCompaction,
    CreateInstance,
    Hello,
    InitializationComplete,
)
from actors.protocol.internal import Propose
from actors.protocol.storage import UpdateConfiguration
from actors.sequencer import Order
from actors.settings import Settings
from actors.storage.half import Outside
from cluster_house import Fake, InlineClock, Stage  # type: ignore[import-not-found]

PROBES = 20
FLOOD = 400
HOPS = 10
"""More than there are between a client and the order; at each a window of the flood may pass."""


async def most_before(tmp_path: Path, flooded: str, window: int) -> int:
    """Commands of the flood that came into the one order between a command's being sent on the
    other half and its place in that order, at most."""
    settings = Settings(workers=3, commands_in_flight_max=window)
    order: list[str] = []
    news = anyio.Event()
    right = Order.propose

    def propose(self: Order, proposal: Propose) -> Any:
        nonlocal news
        order.append(proposal.half)
        found, news = news, anyio.Event()
        found.set()
        return right(self, proposal)

    def nowhere(*_: Any) -> Any:
        raise AssertionError("nothing is reached")

    stage = Stage()
    most = 0
    with mock.patch.object(Order, "propose", propose):
        async with System(clock=InlineClock()) as system:
            persist = await PersistClient.in_memory(settings, system.clock)
            executor = system.spawn(lambda: Fake("executor", (), stage), "executor")
            outside = Outside(nowhere, nowhere, tmp_path)
            cluster = await Cluster.start(
                system, settings, persist, executor, tmp_path, cast=stage.cast(), outside=outside
            )
            compute: Any = await cluster.connect()
            stored: Any = await cluster.connect_storage()
            for command in (Hello("c"), CreateInstance(3), InitializationComplete()):
                await compute.send(command)
            for command in (Hello("s"), InitializationComplete()):
                await stored.send(command)
            wide = AllowCompaction("unknown", 7), UpdateConfiguration(7)
            clients = {"compute": (compute, wide[0]), "storage": (stored, wide[1])}
            flood, drop = clients.pop(flooded)
            ((other, (client, probe)),) = clients.items()

            async def pour() -> None:
                while True:
                    await flood.send(drop)

            async with anyio.create_task_group() as group:
                group.start_soon(pour)
                while order.count(flooded) < FLOOD:
                    await news.wait()
                for _ in range(PROBES):
                    before, sent = order.count(other), len(order)
                    await client.send(probe)
                    while order.count(other) == before:
                        await news.wait()
                    most = max(most, len(order) - 1 - sent)
                group.cancel_scope.cancel()
            await compute.close()
            await stored.close()
        await persist.close()
    return most


@pytest.mark.parametrize("flooded", ["compute", "storage"])
async def test_a_flood_passes_by_a_window_at_each_hop_at_most(tmp_path: Path, flooded: str) -> None:
    with anyio.fail_after(60):
        assert await most_before(tmp_path, flooded, 4) <= HOPS * 4
        assert await most_before(tmp_path, flooded, 100_000) > HOPS * 4, "it would see a flood"
