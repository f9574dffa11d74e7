"""Maintenance: shards that grew, one at a time; failures that do not spread."""

from __future__ import annotations

import anyio

from actors.control.controller.maintenance import MaintenanceTask
from actors.control.controller.messages import ShardsAppended, ShardsDropped
from actors.durable.persist import PersistClient
from actors.runtime.errors import StoreFull
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings

SETTINGS = Settings(maintenance_ms=1, blob_orphan_grace_ms=1)


class CountingPersist(PersistClient):
    """Notes what it is asked to keep small."""

    def begin(self) -> None:
        self.maintained: list[str] = []
        self.reclaimed: list[str] = []
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

    def known_shards(self) -> list[str]:
        return ["idle", "a"]

    async def reclaim(self, shard: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.reclaimed.append(shard)
        self._notify()

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


async def test_space_is_looked_after_while_other_shards_grow_without_end() -> None:
    settings = Settings(maintenance_ms=1, reclaim_ms=1)
    with anyio.fail_after(200):
        persist = await CountingPersist.in_memory(settings, SystemClock())
        assert isinstance(persist, CountingPersist)
        persist.begin()
        async with ActorSystem() as system:
            task = system.spawn(lambda: MaintenanceTask(persist, settings), "maintenance")
            while not {"idle", "a"} <= set(persist.reclaimed) or len(persist.maintained) < 50:
                await task.send(ShardsAppended(("b", "c", "d")))
                await anyio.lowlevel.checkpoint()
        await persist.close()
