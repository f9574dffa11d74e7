"""One process of a run: life after life, each with a client of its own and no memory of the last.

A life opens persist, follows other processes if there are any, keeps its shards small, and runs
those operations of its tasks that have not begun yet. It ends when the process is killed (none of
its code ever runs again), or stopped (its tasks are cancelled wherever they are, then its client is
closed).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from actors.durable.persist import PersistClient
from actors.durable.persist.reader import LeasedReader
from actors.runtime.errors import CorruptData, StorageError
from actors.testing.virtual_time import VirtualClock
from tests.simulators.service.crash import LIFE, CrashableLoop
from tests.simulators.service.history import CheckerViolation
from tests.simulators.shards.schedule import ShardOperation
from tests.simulators.shards.stores import ShardBlob, ShardConsensus
from tests.simulators.shards.work import ProcessWork

if TYPE_CHECKING:
    from actors.durable.persist.location import CompareAndSet
    from tests.simulators.shards.run import ShardsWorld

DOWN_S: Final = 0.005
"""Time between two lives, in s."""
COLLECT_S: Final = 0.7
TASKS: Final = 3


class ShardProcess:
    """One process; see the module's docstring."""

    def __init__(self, world: ShardsWorld, number: int) -> None:
        self.world = world
        self.number = number
        setting = world.schedule.setting
        self.alone = setting.processes == 1
        self.clock = VirtualClock(setting.skews_ms[number])
        self.client: PersistClient | None = None
        self.life = 0
        self.programs: list[deque[ShardOperation]] = [
            deque(
                each
                for each in world.schedule.operations
                if (each.process, each.task) == (number, task)
            )
            for task in range(TASKS)
        ]
        self.mine: dict[str, list[int]] = {"s": [], "t": []}
        """Values that surely are in a shard, and that no other task touches."""
        self.left: set[str] = set()
        """Keys of parts that it wrote for nothing: the process keeps them as long as it lives."""
        self.readers = 0
        self._ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._closing = False
        self._working: asyncio.Task[Any] | None = None

    # -- as the checkers see it ----------------------------------------------------------------

    def owns(self, name: str) -> bool:
        """Return whether a lease is of one of this process's readers that is no longer open."""
        return name.startswith(f"p{self.number}-") and name not in self._open_leases()

    def _open_leases(self) -> set[str]:
        return {reader.lease_id for reader in self.open_readers()}

    def open_readers(self) -> list[LeasedReader]:
        """Return the open readers of the present life."""
        if self.client is None:
            return []
        book = self.client._book._readers
        return [reader for readers in book.values() for reader in readers.values()]

    def committed(self, ops: Any) -> None:
        """Check documents that changed."""
        self.world.guarded(self._committed)(ops)

    def _committed(self, ops: list[CompareAndSet]) -> None:
        self.world.truth.committed(ops, self)

    def missing(self, key: str) -> None:
        """Ignore a request for a missing blob: its reader's checks judge that."""

    def deleting(self, key: str) -> None:
        """Check the deletion of a blob."""
        readers = [reader for process in self.world.processes for reader in process.open_readers()]
        self.world.guarded(self.world.truth.deleting)(key, readers)

    # -- lives ---------------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Run life after life."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            self.life = self.world.new_life()
            self._ended, self._stop = asyncio.Event(), asyncio.Event()
            context = contextvars.copy_context()
            context.run(LIFE.set, self.life)
            self.world.trace.note("life", self.life, "of", self.number)
            task = loop.create_task(self._live(self.life), context=context)
            await self._ended.wait()
            self.client = None
            if self.life and task.done() and not task.cancelled() and task.exception():
                error = task.exception()
                self.world.fail(CheckerViolation(f"crash: {type(error).__name__}: {error}"))
            await asyncio.sleep(DOWN_S)

    async def _live(self, life: int) -> None:
        try:
            await self._work(life)
        finally:
            if life == self.life:
                self._ended.set()

    async def _work(self, life: int) -> None:
        client = self.client = self.open(life)
        await self.world.prepare(client)
        loop = asyncio.get_running_loop()
        work = ProcessWork(self, client, life)
        stop: asyncio.Task[Any] = loop.create_task(self._stop.wait())
        background = loop.create_task(_all(self._background(client)))
        self._working = loop.create_task(_all([work.all_of(each) for each in self.programs]))
        await asyncio.wait([stop, background], return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, background, self._working):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await client.close()

    def open(self, life: int) -> PersistClient:
        """Return a client with connections to the stores of its own."""
        world = self.world

        def crash() -> None:
            self.kill(life)

        outlives = not self.alone
        return PersistClient(
            ShardBlob(world.disk, world.injector, crash, self, outlives=outlives),
            ShardConsensus(world.disk, world.injector, crash, self, outlives=outlives),
            world.settings,
            self.clock,
            exclusive=self.alone,
            random=random.Random(f"{world.schedule.seed} life {life}"),
        )

    def _background(self, client: PersistClient) -> list[Any]:
        upkeep_s = self.world.schedule.setting.upkeep_ms / 1000

        async def upkeep() -> None:
            while True:
                await asyncio.sleep(upkeep_s)
                for shard in sorted(self.world.truth.shards):
                    await self.await_excusing_storage(client.maintain(shard))

        async def collect() -> None:
            while True:
                await asyncio.sleep(COLLECT_S)
                await self.await_excusing_storage(client.collect_orphans())

        found = [upkeep(), collect()]
        return found if self.alone else [*found, client.follow()]

    async def await_excusing_storage(self, doing: Any) -> bool:
        """Await `doing`; return whether it succeeded. A failure of the stores is excused."""
        try:
            await doing
        except CorruptData:
            raise
        except StorageError as error:
            self.world.trace.note("excused", type(error).__name__)
            return False
        return True

    def kill(self, life: int | None = None) -> None:
        """Kill the process at once."""
        life = self.life if life is None else life
        if life != self.life or self._ended.is_set():
            return
        self.world.trace.note("kill", life)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CrashableLoop)
        loop.kill(life)
        self.client = None
        self.life = 0
        self._ended.set()

    def stop(self, *, for_good: bool = False) -> None:
        """End the life in order; `for_good`: no other follows."""
        self._closing = self._closing or for_good
        self._stop.set()

    @property
    def idle(self) -> bool:
        """Return whether all its tasks have run all their operations."""
        return not any(self.programs) and self._working is not None and self._working.done()

    @property
    def ended(self) -> asyncio.Event:
        """Return an event that is set when the present life is over."""
        return self._ended

    def fail(self, what: str) -> None:
        """Note a violation."""
        self.world.fail(CheckerViolation(what))


async def _all(doing: list[Any]) -> None:
    await asyncio.gather(*doing)
