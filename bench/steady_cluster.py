"""A cluster over loopback TCP whose dataflows do nothing, to measure the protocol alone.

Sequencer, workers, adapters, connections and sockets are the real ones; persist is in memory. The
dataflows are `Steady` actors that report one frontier when they start.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    InitializationComplete,
    ScheduleDataflow,
    ShardImport,
    ViewExport,
)
from actors.model.protocol.internal import DataflowProgress
from actors.replica.cluster import ClusterClient, WorkerCluster, connect
from actors.replica.compute.rendering import ActorFactory
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "bigint")))
WORKERS = 2


AS_OF = 5
SQL = "SELECT k, sum(v) AS v FROM numbers WHERE v % 7 < 5 GROUP BY k HAVING sum(v) > 10"


def view(number: int) -> DataflowDescription:
    """Return one small aggregate. Every description is a new object, as if decoded from the
    wire."""
    plan = DeltaPlan(("numbers",), (SCHEMA,), SCHEMA, SQL, "opaque", "a HAVING clause")
    source = ShardImport("s1", SCHEMA)
    export = ViewExport(plan, f"output-{number}")
    return DataflowDescription(f"u{number}", f"view {number}", (source,), export, AS_OF)


class Steady(Actor[Any]):
    """A dataflow that has nothing to do."""

    made = 0
    """Starts of all dataflows so far. A step that is computed again begins with one."""

    def __init__(
        self, description: DataflowDescription, workers: tuple[ActorAddress[Any], ...]
    ) -> None:
        self._id = description.id
        self._workers = workers

    async def on_start(self) -> None:
        """Report the frontier."""
        Steady.made += 1
        for worker in self._workers:
            worker.reply(DataflowProgress(self._id, AS_OF + 1, AS_OF + 1, AS_OF + 1))

    async def receive(self, message: Any) -> None:
        """Accept commands."""


class Executor(Actor[Any]):
    """Counts the jobs that reach the engine."""

    jobs = 0

    async def receive(self, message: Any) -> None:
        """Count a job."""
        Executor.jobs += 1


class House:
    """The cluster and its listener."""

    def __init__(self, cluster: WorkerCluster, port: int, settings: Settings) -> None:
        self._port = port
        self._settings = settings
        self.cluster = cluster

    async def client(self) -> ClusterClient:
        """Return a client connected over loopback."""
        return await connect(f"127.0.0.1:{self._port}", self._settings)


def _nowhere(*_: Any) -> Any:
    raise InvalidUsage("this benchmark has no external systems")


@asynccontextmanager
async def house(*, storage: bool = False, window: int | None = None) -> AsyncIterator[House]:
    """Run everything until the block ends. `storage`: with a storage half that has no external
    systems. `window`: another `commands_in_flight_max`."""
    settings = Settings(workers=WORKERS)
    if window is not None:
        settings = msgspec.structs.replace(settings, commands_in_flight_max=window)
    factory = ActorFactory(
        dataflow=lambda description, workers, scratch: Steady(description, workers),
        listen=lambda *args: Executor(),
        fetch=lambda *args: Executor(),
    )
    with tempfile.TemporaryDirectory() as folder:
        async with ActorSystem() as system:
            persist = await PersistClient.in_memory(settings, system.clock)
            executor = system.spawn(Executor, "executor")
            connectors = StorageConnectors(_nowhere, _nowhere, Path(folder)) if storage else None
            cluster = await WorkerCluster.start(
                system,
                settings,
                persist,
                executor,
                Path(folder),
                factory=factory,
                connectors=connectors,
            )
            listener = await cluster.listen("127.0.0.1:0")
            yield House(cluster, listener.address.port, settings)
            await listener.aclose()
        await persist.close()


def replay(nonce: str, count: int) -> list[Command]:
    """Return the first commands of a controller with `count` views."""
    views: list[Command] = []
    for number in range(count):
        views += [CreateDataflow(view(number)), ScheduleDataflow(f"u{number}")]
    return [Hello(nonce), CreateInstance(WORKERS), *views, InitializationComplete()]


async def joined(client: ClusterClient, commands: list[Command], count: int) -> None:
    """Send the commands and wait for the frontiers of all views."""

    async def send() -> None:
        for command in commands:
            await client.send(command)

    async with anyio.create_task_group() as group:
        group.start_soon(send)
        heard: set[str] = set()
        while len(heard) < count:
            response = await client.receive()
            if isinstance(response, Frontiers):
                heard.add(response.id)
