"""The replica without a client, under load: frontiers advance, memory is flat, no step repeats.

Run: ``python tests/proof/absent_client.py [--minutes 10]``. The demo's stream is written while the
controller's connection to the cluster is cut and kept away. Meanwhile the outputs' uppers (read
from the shards) must advance with the writes and the service's memory must stay flat. Then the
controller may come back, with a new nonce: the same dataflows go on (no plan is prepared again,
no contents are computed anew), every view reaches the last write and equals plain Spark.
Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from crash_campaign import report
from soak import GROWTH_MAX, resident_mb

from actors import Client, Service, Settings
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import ExecutorMessage, SubmitJob
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.client import LocalClient
from actors.runtime.errors import ConnectionBroken
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.service import start_spark
from penstock_flights import flights
from penstock_flights.play import VIEWS, ChangeLog, changes_of
from penstock_flights.proof import differences, expected


class Counting(Actor[ExecutorMessage]):
    """Stands before the engine and counts its jobs by kind."""

    def __init__(self, engine: ActorAddress[ExecutorMessage], counts: Counter[str]) -> None:
        self.engine = engine
        self.counts = counts

    async def receive(self, message: ExecutorMessage) -> None:
        if isinstance(message, SubmitJob):
            self.counts[type(message.job).__name__] += 1
        await self.engine.send(message)


class World:
    """A service whose cluster connection this script holds in its hand."""

    def __init__(self, settings: Settings) -> None:
        self.away = False
        self.clients: list[LocalClient] = []
        self.persist: PersistClient | None = None
        self.counts: Counter[str] = Counter()
        self._patch()
        self.service = Service(settings, engine=self._engine)

    def _engine(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        engine = start_spark(system, settings, scratch)
        return system.spawn(lambda: Counting(engine, self.counts), "counting")

    def _patch(self) -> None:
        connect, open_ = WorkerCluster.connect, PersistClient.open

        async def connect_if_allowed(cluster: WorkerCluster) -> LocalClient:
            if self.away:
                raise ConnectionBroken("the controller is kept away")
            self.clients.append(await connect(cluster))
            return self.clients[-1]

        async def open_and_keep(*args: Any, **kwargs: Any) -> PersistClient:
            self.persist = await open_(*args, **kwargs)
            return self.persist

        WorkerCluster.connect = connect_if_allowed  # type: ignore[assignment, method-assign]
        PersistClient.open = open_and_keep  # type: ignore[method-assign]

    async def uppers(self) -> list[int]:
        """Uppers of all shards that are no table's."""
        assert self.persist is not None
        states = [await self.persist.state(shard) for shard in await self.persist.list_shards()]
        return [state.upper for state in states if not state.tables]


async def run(minutes: float, folder: Path) -> int:
    """The whole run; the number of faults."""
    settings = Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0")
    world = World(settings)
    log, wrong = ChangeLog(), 0
    stream = iter(flights.history(flights.read(), days=120, tick_minutes=30))
    async with world.service as service, await Client.in_process(service) as client:
        for name, (columns, key) in flights.TABLES.items():
            await client.create_table(name, columns, primary_key=list(key))
        for view in VIEWS:
            await client.create_materialized_view(view.name, view.sql)

        async def write() -> int:
            transaction = next(stream)
            log.add(await client.write(changes_of(transaction)), transaction.deltas)
            return log.times[-1]

        for _ in range(30):
            last = await write()
        for view in VIEWS:
            await client.wait_for(view.name, last, deadline_ms=120_000)
        before = Counter(world.counts)
        world.away = True
        await world.clients[-1].close()
        wrong += await absent(world, write, minutes * 60)
        connections = len(world.clients)
        world.away = False
        last = await write()
        for view in VIEWS:
            await client.wait_for(view.name, last, deadline_ms=120_000)
        again = {kind: world.counts[kind] - before[kind] for kind in ("Prepare", "Difference")}
        print(f"after the return: {dict(world.counts)}; since the cut: {again}", flush=True)
        wrong += report("jobs", last, [f"repeated {k}" for k, n in again.items() if n])
        wrong += report("nonces", last, [] if len(world.clients) > connections else ["none new"])
        scratch = folder / "proof"
        scratch.mkdir()
        wanted = await expected(log, VIEWS, [last], scratch)
        for view in VIEWS:
            found = await client.peek(view.name, as_of=last)
            wrong += report(view.name, last, differences(wanted[view.name, last], found))
    print(f"{len(log.entries)} writes, {log.changes} changes: {wrong} wrong", flush=True)
    return wrong


async def absent(world: World, write: Any, seconds: float) -> int:
    """Writes for so long without a client; the number of faults."""
    memory: list[float] = []
    started = anyio.current_time()
    before = await world.uppers()
    wrong = 0
    writes = 0
    while anyio.current_time() - started < seconds:
        last = await write()
        writes += 1
        await anyio.sleep(0.25)
        if writes % 80:
            continue
        memory.append(resident_mb(os.getpid()))
        now = await world.uppers()
        behind = last - min(now)
        stuck = [old for old, new in zip(before, now, strict=True) if new <= old]
        wrong += report("uppers", last, [f"{len(stuck)} stand still"] if stuck else [])
        before = now
        print(f"{writes} writes, {behind} ms behind, {memory[-1]:.0f} MiB", flush=True)
    memory.append(resident_mb(os.getpid()))
    quarter = max(1, len(memory) // 4)
    early, late = median(memory[quarter : 2 * quarter] or memory), median(memory[-quarter:])
    wrong += report("memory", 0, [] if late <= early * GROWTH_MAX else [f"{early} → {late} MiB"])
    print(
        f"memory of the service: {early:.0f} MiB in the second quarter, {late:.0f} MiB in the last"
    )
    return wrong


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if anyio.run(run, arguments.minutes, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
