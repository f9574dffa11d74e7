"""What a far service's campaign kills: each kind of strike by its name.

A strike ends when it has been struck: what was killed has been started again, or is started again
by what watches over it. Everything else must go on by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import anyio
from far_processes import kill_process
from far_world import WORKERS, FarWorld

AWAY_SECONDS: Final = 10
JVM: Final = "org.apache.spark"
ENGINE: Final = "actors.engine.spark"
EXECUTOR: Final = "CoarseGrainedExecutorBackend"


class StrikeChoice:
    """Strikes at one world, in an order that its seed draws."""

    def __init__(self, world: FarWorld, rng: Random) -> None:
        self._world, self._rng = world, rng
        self.kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "worker": self._worker,
            "executor": self._executor,
            "store": lambda: self._away("s3"),
        }
        if world.connect:
            self.kinds["server"] = lambda: self._restarted("connect")
        self._driver_word = ENGINE if world.connect else JVM
        if world.whole:
            self.kinds["service"] = lambda: self._restarted("service")
            self.kinds["driver"] = lambda: self._driver("service")
            return
        self.kinds["replica"] = lambda: self._restarted("replica")
        self.kinds["controller"] = self._controller
        self.kinds["documents"] = lambda: self._away("documents")
        self.kinds["replica-driver"] = lambda: self._driver("replica")
        self.kinds["controller-driver"] = self._controller_driver

    def order(self, count: int, chosen: list[str]) -> list[str]:
        """So many kinds, each once before any comes twice; `chosen`: of these alone."""
        kinds = chosen or list(self.kinds)
        found: list[str] = []
        while len(found) < count:
            found += self._rng.sample(kinds, len(kinds))
        return found[:count]

    async def _restarted(self, name: str) -> str:
        """Kill a process with all that it has started, and start it again."""
        process = self._world.processes[name]
        await self._world.in_thread(process.kill)
        process.start()
        return name

    async def _worker(self) -> str:
        return await self._restarted(self._rng.choice(list(WORKERS)))

    async def _executor(self) -> str:
        found = await self._world.process_below(tuple(WORKERS), EXECUTOR)
        pid = self._rng.choice(sorted(found))
        kill_process(pid)
        return f"process {pid}, of {len(found)} executors"

    async def _driver(self, name: str) -> str:
        """Kill the JVM of a process of the service, or, over Spark Connect, the child that speaks
        to the server. That process replaces it."""
        found = await self._world.process_below((name,), self._driver_word)
        kill_process(found[0])
        return name

    async def _controller(self) -> str:
        """Kill the controller that serves; the one that stands by takes over."""
        return await self._restarted(await self._world.serving())

    async def _controller_driver(self) -> str:
        return await self._driver(await self._world.serving())

    async def _away(self, name: str) -> str:
        """Take a store away for some seconds: connections are cut, and none is accepted."""
        log = self._world.processes[name].log
        for word in ("away", "back"):
            count = log.text.count(f"\n{word}\n") + 1
            log.tell(word)
            await self._world.in_thread(log.wait_for, f"^{word}$", count)
            if word == "away":
                await anyio.sleep(AWAY_SECONDS)
        return f"{name} for {AWAY_SECONDS} s"
