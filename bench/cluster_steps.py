"""Steps of a view whose Spark is a cluster or a Connect server, against those of a local Spark.

A join and aggregate over a table of 10M rows is maintained by services that differ only in their
Spark: ``local[2]`` (the peer of the small steps), a standalone cluster of two workers with one core
each, and a Connect server. ``small_step_cluster``, ``small_step_connect``: from a write of 100 rows
until the view has them, in alternation. ``large_step_cluster``: the same for 1 % of the rows; the
peer is the view's query over the whole table on the same cluster, read from files, as a refresh
would do.

The environment variable ROWS sets the number of rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Settings
from actors.engine.spark.java import JavaHome, find_java
from actors.runtime.errors import EngineUnavailable
from hydrate import CHUNK, QUERIES, TABLES, products, sales
from measure import Measure, Report, median, sizes
from view_step import Bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engine" / "spark"))

from connect_server import running_server  # type: ignore[import-not-found]
from standalone_cluster import running_cluster  # type: ignore[import-not-found]

ROWS = 10_000_000
CHANGES = 100
SMALL_TARGET = 3.0
LARGE_TARGET = 1 / 3
DEADLINE_MS = 1_800_000
VIEW = "by_category"
SQL = QUERIES["join_aggregate"]


class SteppedService:
    """A service with its Spark, and the number of rows inserted so far."""

    def __init__(self, settings: Settings) -> None:
        self.bench = Bench(settings)
        self.client: Client
        self.rows = 0
        self.view = VIEW

    async def fill(self, count: int) -> None:
        """Create and fill the tables."""
        for name, columns in TABLES.items():
            await self.client.create_table(name, columns)
        await self.client.insert("products", products())
        while self.rows < count:
            await self.insert(min(CHUNK, count - self.rows))

    async def load(self, count: int) -> None:
        """Fill the tables and create the view."""
        await self.fill(count)
        await self.client.create_materialized_view(VIEW, SQL)
        await self.step(CHANGES)

    async def insert(self, count: int) -> int:
        """Insert `count` more rows and return the time of the write."""
        written = await self.client.insert("sales", sales(self.rows, count))
        self.rows += count
        return written

    async def step(self, count: int) -> float:
        """Return the milliseconds from a write of `count` rows until the view has them."""
        began = time.perf_counter()
        written = await self.insert(count)
        await self.client.wait_for(self.view, written, deadline_ms=DEADLINE_MS)
        return (time.perf_counter() - began) * 1000


def stepped(folder: Path, master: str) -> Settings:
    """Return settings for a service whose executors use what the cluster's workers offer."""
    conf = {} if master.startswith("sc://") else {"spark.executor.memory": "512m"}
    return Settings(
        state_dir=str(folder), listen="127.0.0.1:0", spark_master=master, spark_conf=conf
    )


async def opened(stack: AsyncExitStack, settings: Settings) -> SteppedService:
    """Start a service and return it with its client."""
    made = SteppedService(settings)
    service = await stack.enter_async_context(made.bench.service)
    made.client = await stack.enter_async_context(await Client.in_process(service))
    return made


async def small(report: Report, name: str, ours: SteppedService, peer: SteppedService) -> None:
    """Measure small steps of both services in alternation."""
    warm, counted = (3, 3) if report.quick else (15, 40)
    taken = [(await ours.step(CHANGES), await peer.step(CHANGES)) for _ in range(warm + counted)]
    mine, theirs = zip(*taken[warm:], strict=True)
    report.add(Measure(name, median(mine), median(theirs), target=SMALL_TARGET))


def written(folder: Path, count: int) -> dict[str, Path]:
    """Write the tables as files, for the query over all rows."""
    files = {name: folder / f"{name}.parquet" for name in TABLES}
    pq.write_table(products(), files["products"])
    schema: pa.Schema = sales(0, 1).schema
    with pq.ParquetWriter(files["sales"], schema) as writer:
        for start in range(0, count, CHUNK):
            writer.write_table(sales(start, min(CHUNK, count - start)))
    return files


async def run(report: Report, java: JavaHome) -> None:
    """Measure each service against the peer."""
    (count,) = sizes([200_000 if report.quick else ROWS])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        async with AsyncExitStack() as stack:
            peer = await opened(stack, stepped(folder / "local", "local[2]"))
            await peer.load(count)
            with running_cluster(folder / "cluster", java) as cluster:
                async with AsyncExitStack() as inner:
                    ours = await opened(inner, stepped(folder / "far", cluster.url))
                    await ours.load(count)
                    await small(report, "small_step_cluster", ours, peer)
                    files = written(folder, count)
                    large, whole = [], []
                    for _ in range(1 if report.quick else 3):
                        large.append(await ours.step(count // 100))
                        whole.append(await ours.bench.query(SQL, files))
                    found = Measure("large_step_cluster", median(large), median(whole))
                    found.target = LARGE_TARGET
                    report.add(found)
            with running_server(folder / "connect", java) as server:
                async with AsyncExitStack() as inner:
                    ours = await opened(inner, stepped(folder / "connected", server.url))
                    await ours.load(count)
                    await small(report, "small_step_connect", ours, peer)


def main(title: str, run: Callable[[Report, JavaHome], Awaitable[None]]) -> None:
    """Run a benchmark that starts its own Java."""
    made = Report(title)
    with tempfile.TemporaryDirectory() as place:
        found = find_java(Path(place))
        if isinstance(found, EngineUnavailable):
            raise SystemExit(str(found))
        anyio.run(run, made, found, backend_options={"use_uvloop": True})
    made.close()


if __name__ == "__main__":
    main("Steps on a cluster and over Connect, against those of a local Spark.", run)
