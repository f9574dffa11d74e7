"""Maintenance: shards that grew, one at a time; failures that do not spread."""

from __future__ import annotations

import anyio

from actors.controller.maintenance import MaintenanceTask
from actors.controller.messages import ShardsAppended, ShardsDropped
from actors.errors import StoreFull
from actors.kernel import ActorSystem, SystemClock
from actors.persist import PersistClient
from actors.settings import Settings

SETTINGS = Settings(maintenance_ms=1, blob_orphan_grace_ms=1)


class CountingPersist(PersistClient):
    """Notes what it is asked to keep small."""

    def begin(self) -> None:
        self.maintained: list[str] = []
        self.collections = 0
        self.running = 0
        self.changed = anyio.Event()

    def _notify(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def maintain(self, shard: str) -> None:
        self.running += 1
        assert self.running == 1, "one shard at a time"
        await anyio.lowlevel.checkpoint()
        self.running -= 1
        self.maintained.append(shard)
        self._notify()
        if shard == "bad":
            raise StoreFull("no space left", determinate=True)

    async def collect_orphans(self) -> int:
        self.collections += 1
        self._notify()
        return 0


async def test_grown_shards_are_maintained_one_by_one() -> None:
    with anyio.fail_after(200):
        persist = await CountingPersist.in_memory(SETTINGS, SystemClock())
        assert isinstance(persist, CountingPersist)
        persist.begin()
        async with ActorSystem() as system:
            task = system.spawn(lambda: MaintenanceTask(persist, SETTINGS), "maintenance")
            await task.send(ShardsAppended(("a", "bad", "b", "gone")))
            await task.send(ShardsAppended(("a",)))
            await task.send(ShardsDropped(("gone",)))
            while len(persist.maintained) < 3 or persist.collections < 2:
                await persist.changed.wait()
        assert persist.maintained == ["a", "bad", "b"]
        await persist.close()
