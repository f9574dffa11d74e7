"""Space that is given back while nobody writes: a whole service, in virtual time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from actors.doors.client.client import Client
from actors.durable.persist import PersistClient
from actors.durable.persist.location import BlobStore
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.model.plan.jobs import ExecutorMessage
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection import TransportListener
from actors.service import Service
from actors.testing.engine import InMemoryExecutor
from actors.testing.virtual_time import VirtualClock, VirtualTimeLoop

ROWS = 1_000
QUIET_S = 600


class SilentListener:
    """Where nobody connects."""

    address = NetworkAddress(host="memory")

    async def serve(self, converse: Any) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        pass


class MemoryService(Service):
    """A service over stores in memory, without sockets and Spark."""

    def __init__(self, settings: Settings) -> None:
        self.clock = VirtualClock()
        self.blob: BlobStore = MemoryBlob(self.clock)
        super().__init__(settings, engine=self._start_memory, clock=self.clock, seed=1)

    def _start_memory(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        made: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
        return made

    async def _open(self, directory: Path) -> PersistClient:
        return PersistClient(
            self.blob, MemoryConsensus(), self.settings, self.clock, random=random.Random(1)
        )

    async def _bind(self, address: str) -> TransportListener:
        return cast(TransportListener, SilentListener())

    async def blob_bytes(self) -> int:
        return sum(info.bytes for info in await self.blob.list_keys())


@pytest.mark.parametrize("rounds", [(100, 10), (ROWS, 1)], ids=["many writes", "one large write"])
def test_blobs_shrink_to_the_contents_while_nobody_writes(
    rounds: tuple[int, int], tmp_path: Path
) -> None:
    """Updated rows stay for as long as history is retained, and not until the next write."""
    dice = random.Random(5)
    few, times = rounds

    def filled(ids: list[int]) -> list[dict[str, Any]]:
        return [{"id": id, "k": id % 7, "v": dice.randbytes(40).hex()} for id in ids]

    async def run() -> None:
        settings = Settings(
            state_dir=str(tmp_path),
            workers=1,
            retain_history_ms=120_000,
            inline_part_bytes_max=1,
            inline_bytes_per_shard_max=1,
        )
        async with (
            MemoryService(settings) as service,
            await Client.in_process(service) as client,
        ):
            columns = {"id": "bigint", "k": "bigint", "v": "string"}
            await client.create_table("t", columns, ("id",))
            await client.create_materialized_view(
                "sums", "SELECT k, count(*) AS n, max(v) AS m FROM t GROUP BY k"
            )
            await client.create_index("by_k", "t", ["k"])
            rows = filled(list(range(ROWS)))
            await client.insert("t", rows)
            await anyio.sleep(QUIET_S)
            contents = await service.blob_bytes()
            for number in range(times):
                ids = [(number * few + each) % ROWS for each in range(few)]
                rows = filled(ids)
                await client.update("t", rows)
            grown = await service.blob_bytes()
            assert grown > 1.8 * contents
            last = (await client.peek("t")).to_pylist()
            await anyio.sleep(QUIET_S)
            assert await service.blob_bytes() < 1.2 * contents
            found = (await client.peek("t")).to_pylist()
            assert sorted(found, key=str) == sorted(last, key=str)
            assert sum(each["n"] for each in (await client.peek("sums")).to_pylist()) == ROWS

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
