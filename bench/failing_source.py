"""Nine healthy sources, with and without a tenth one that fails every ten seconds.

The whole service runs on the in-memory engine. It has nine counters, each committed ten times a
second, and a table in a PostgreSQL database that is written as often. Every ten seconds that source
loses its connections, and every other time the server also refuses connections for three seconds.
``freshness_p50`` and ``freshness_p99``: the age, at any moment, of what a subscriber of one of the
nine has. Ours is with the tenth source, the peer is the same service without it. Both alternate
within one run, so that other load on the machine affects both.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import psycopg

from actors.doors.client.client import Client
from actors.model.plan.jobs import ExecutorMessage
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import InMemoryExecutor
from actors.testing.postgres_server import NoPostgres, PostgresServer, postgres_server
from measure import Measure, Report

TARGET_P99 = 1.2
HEALTHY = tuple(f"well{number}" for number in range(9))
FAILING = "ill"
DATABASE = "shop"
FAILS_EVERY_S = 10.0
REFUSED_S = 3.0
SETTLE_S = 3.0
SAMPLE_MS = 5
WRITE_EVERY_S = 0.1


class Seen:
    """Records when a subscriber received which upper."""

    def __init__(self) -> None:
        self.at_ms: list[float] = []
        self.upper: list[float] = []

    async def follow(self, client: Client, name: str) -> None:
        """Record every change of an object, forever."""
        async for change in client.subscribe(name, snapshot=False):
            self.at_ms.append(time.time() * 1000)
            self.upper.append(change.upper)

    def ages(self, begin_ms: float, end_ms: float) -> np.ndarray:
        """Return the age of the subscriber's contents at sampled moments of an interval, in ms."""
        moments = np.arange(begin_ms, end_ms, SAMPLE_MS)
        last = np.searchsorted(np.array(self.at_ms), moments, side="right") - 1
        if last.min() < 0:
            raise SystemExit("a healthy source was not sealed before the measurement started")
        ages: np.ndarray = moments - (np.array(self.upper)[last] - 1)
        return ages


def in_memory(
    system: ActorSystem, settings: Settings, scratch: Path
) -> ActorAddress[ExecutorMessage]:
    """Return an engine that runs no jobs."""
    address: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


class UpstreamDatabase:
    """The upstream database with a writer, and the failures of its reader."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._admin: psycopg.AsyncConnection[Any] | None = None
        self.failures = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Create the database with its table, and write changes to it while the block lasts."""
        with psycopg.connect(self._server.conninfo(), autocommit=True) as made:
            made.execute(f"CREATE DATABASE {DATABASE}")
        info = self._server.conninfo(dbname=DATABASE)
        with psycopg.connect(info, autocommit=True) as made:
            made.execute("CREATE TABLE orders (id bigserial PRIMARY KEY, at timestamptz)")
        async with (
            await psycopg.AsyncConnection.connect(
                self._server.conninfo(), autocommit=True
            ) as self._admin,
            await psycopg.AsyncConnection.connect(info, autocommit=True) as writer,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._write, writer)
            yield
            group.cancel_scope.cancel()

    async def _write(self, writer: psycopg.AsyncConnection[Any]) -> None:
        while True:
            await writer.execute("INSERT INTO orders (at) VALUES (now())")
            await anyio.sleep(WRITE_EVERY_S)

    async def run(self, sql: str) -> None:
        """Run a statement as the superuser, from another database."""
        assert self._admin is not None, "there"
        await self._admin.execute(sql.encode())

    async def fail(self) -> None:
        """Close the source's connections; every other time also refuse new ones for a while."""
        self.failures += 1
        long = self.failures % 2 == 0
        if long:
            await self.run(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        await self.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{DATABASE}' AND application_name = 'penstock'"
        )
        if long:
            await anyio.sleep(REFUSED_S)
            await self.run(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS true")

    async def fail_for(self, while_s: float) -> None:
        """Fail every ten seconds for `while_s` seconds, the first time in the middle of an
        interval."""
        start = anyio.current_time() + FAILS_EVERY_S / 2
        for number in range(int(while_s / FAILS_EVERY_S)):
            await anyio.sleep_until(start + number * FAILS_EVERY_S)
            await self.fail()


async def run_with_failures(
    client: Client, upstream: UpstreamDatabase, server: PostgresServer, while_s: float
) -> Any:
    """Return the (begin, end) of a period with the tenth source, in which it failed repeatedly."""
    config = {"kind": "postgres", "host": str(server.folder), "port": server.port}
    config |= {"database": DATABASE, "user": server.user}
    await client.create_source(FAILING, config, {"public.orders": "orders"})
    await anyio.sleep(SETTLE_S)
    before = upstream.failures
    async with anyio.create_task_group() as group:
        group.start_soon(upstream.fail_for, while_s)
        found = await wait_period(while_s)
    ((tenth,),) = [[each for each in await client.sources() if each.name == FAILING]]
    restarts = 0 if tenth.statistics is None else tenth.statistics.restarts
    if not restarts or upstream.failures == before:
        raise SystemExit(f"the source did not fail: {tenth}")
    print(f"  {upstream.failures - before} failures, {restarts} restarts", flush=True)
    await client.drop_source(FAILING)
    await anyio.sleep(SETTLE_S)
    return found


async def wait_period(while_s: float) -> tuple[float, float]:
    """Wait, and return the (begin, end) of the period in ms."""
    begin = time.time() * 1000
    await anyio.sleep(while_s)
    return begin, time.time() * 1000


async def run(report: Report) -> None:
    """Measure periods with and without the failing source in alternation."""
    while_s, turns = (15.0, 1) if report.quick else (30.0, 3)
    seen = {name: Seen() for name in HEALTHY}
    whiles: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with TemporaryDirectory() as folder, postgres_server(wal_level="logical") as server:
        settings = Settings(state_dir=str(Path(folder) / "state"), listen="127.0.0.1:0")
        upstream = UpstreamDatabase(server)
        async with (
            upstream.running(),
            Service(settings, engine=in_memory) as service,
            await Client.connect(service.address) as client,
            anyio.create_task_group() as group,
        ):
            for name in HEALTHY:
                await client.create_source(name, {"kind": "counter", "rate": 100.0})
                group.start_soon(seen[name].follow, client, name)
            await anyio.sleep(SETTLE_S)
            for _ in range(turns):
                whiles[False].append(await wait_period(while_s))
                whiles[True].append(await run_with_failures(client, upstream, server, while_s))
            group.cancel_scope.cancel()
    ages = {
        ill: np.concatenate([each.ages(*one) for each in seen.values() for one in found])
        for ill, found in whiles.items()
    }
    for share, target in ((50, None), (99, TARGET_P99), (99.9, None), (100, None)):
        ours, peer = (float(np.percentile(ages[ill], share)) for ill in (True, False))
        name = "freshness_worst" if share == 100 else f"freshness_p{share:g}"
        report.add(Measure(f"failing_source_{name}", ours, peer, target=target))


if __name__ == "__main__":
    made = Report("Nine sources, with and without one that fails every ten seconds.")
    try:
        anyio.run(run, made, backend_options={"use_uvloop": True})
    except NoPostgres as error:
        made.add(Measure("failing_source_freshness_p99", 0.0, 0.0, missing=str(error)))
    made.close()
