"""Checks for leaks when all objects were dropped and every client has gone.

Does not cover: memory that no statistic shows, and files in scratch folders.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from tests.simulators.service.cluster import SimulatedCluster
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.storage_checkers import leftovers

WAIT_S: Final = 10.0
"""Virtual time for deferred clean-up (blobs wait for the grace of orphans)."""
ROUND_S: Final = 0.25


async def check_rest(world: SimulatedCluster) -> None:
    """Wait until nothing is left; anything left after `WAIT_S` has leaked."""
    left: list[str] = []
    for _ in range(int(WAIT_S / ROUND_S)):
        left = await left_behind(world)
        if not left:
            return
        await asyncio.sleep(ROUND_S)
    world.fail(CheckerViolation(f"leaks: {'; '.join(left)}"))


_REPLICA: Final = re.compile(r"^/r\d+(?=/)")
_CONTROLLER: Final = re.compile(
    r"0 objects, 0 sessions, 0 reads and waits, 0 queries, 0 subscribes, 0 copies"
)


async def left_behind(world: SimulatedCluster) -> list[str]:
    """Return the leaks, for people."""
    left = []
    if world.history.shards:
        left.append(f"shards {sorted(world.history.shards)}")
    blobs = world.disk.blobs.keys()
    if blobs:
        left.append(f"blobs {blobs[:4]}")
    if world.readers():
        left.append(f"readers of {world.readers()}")
    for actor in world.actors():
        path = _REPLICA.sub("", actor.path)
        if path == "/controller" and not _CONTROLLER.match(actor.doing):
            left.append(f"controller: {actor.doing}")
        elif path.startswith("/sessions/"):
            left.append(f"session {path}: {actor.doing}")
        elif path == "/engine" and actor.doing != "0 jobs, 0 plans":
            left.append(f"engine: {actor.doing}")
        elif path.startswith("/worker-") and path.count("/") > 1:
            left.append(f"{path}: {actor.doing}")
    for workers in world.worker_halves():
        left += leftovers(each._storage.state for each in workers if each._storage is not None)
    found = await world.statistics()
    for index, worker in enumerate(found.workers if found else ()):
        if worker.rendered or worker.dropping or worker.peeks or worker.responses_waiting:
            left.append(f"worker {index}: {worker}")
    for index, adapter in enumerate(found.adapters if found else ()):
        if adapter.stashed or adapter.holding:
            left.append(f"adapter {index}: {adapter}")
    return left
