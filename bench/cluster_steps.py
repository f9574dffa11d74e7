"""Steps of a view where Spark is a cluster or a Connect server, beside those of a local Spark.

A join and aggregate over a table of 10M rows, maintained by services of the same settings but for
Spark: ``local[2]`` (the peer of the small steps), a standalone cluster of two workers of one core
each, and a Connect server. ``small_step_cluster``, ``small_step_connect``: from a write of 100 rows
until the view has them, in turns. ``large_step_cluster``: the same of 1 % of the rows, beside the
view's query over the whole table by the same cluster, read from files (what a refresh would take).

The environment's ROWS gives another number of rows.
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
    """One service with its Spark, and how many rows it has been given."""

    def __init__(self, settings: Settings) -> None:
        self.bench = Bench(settings)
        self.client: Client
        self.rows = 0
        self.view = VIEW

    async def fill(self, count: int) -> None:
        """Make and fill the tables."""
        for name, columns in TABLES.items():
            await self.client.create_table(name, columns)
        await self.client.insert("products", products())
        while self.rows < count:
            await self.insert(min(CHUNK, count - self.rows))

    async def load(self, count: int) -> None:
        """Fill the tables and make the view."""
        await self.fill(count)
        await self.client.create_materialized_view(VIEW, SQL)
        await self.step(CHANGES)

    async def insert(self, count: int) -> int:
        """Write further rows; return the time of the write."""
        written = await self.client.insert("sales", sales(self.rows, count))
        self.rows += count
        return written

    async def step(self, count: int) -> float:
        """Milliseconds from a write of so many rows until the view has them."""
        began = time.perf_counter()
        written = await self.insert(count)
        await self.client.wait_for(self.view, written, deadline_ms=DEADLINE_MS)
        return (time.perf_counter() - began) * 1000


def stepped(folder: Path, master: str) -> Settings:
    """The settings of a service whose executors have what the cluster's workers give."""
    conf = {} if master.startswith("sc://") else {"spark.executor.memory": "512m"}
    return Settings(
        state_dir=str(folder), listen="127.0.0.1:0", spark_master=master, spark_conf=conf
    )


async def opened(stack: AsyncExitStack, settings: Settings) -> SteppedService:
    """A service that runs."""
    made = SteppedService(settings)
    service = await stack.enter_async_context(made.bench.service)
    made.client = await stack.enter_async_context(await Client.in_process(service))
    return made


async def small(report: Report, name: str, ours: SteppedService, peer: SteppedService) -> None:
    """Small steps of both, in turns."""
    warm, counted = (3, 3) if report.quick else (15, 40)
    taken = [(await ours.step(CHANGES), await peer.step(CHANGES)) for _ in range(warm + counted)]
    mine, theirs = zip(*taken[warm:], strict=True)
    report.add(Measure(name, median(mine), median(theirs), target=SMALL_TARGET))


def written(folder: Path, count: int) -> dict[str, Path]:
    """The tables as files, for the query over all rows."""
    files = {name: folder / f"{name}.parquet" for name in TABLES}
    pq.write_table(products(), files["products"])
    schema: pa.Schema = sales(0, 1).schema
    with pq.ParquetWriter(files["sales"], schema) as writer:
        for start in range(0, count, CHUNK):
            writer.write_table(sales(start, min(CHUNK, count - start)))
    return files


async def run(report: Report, java: JavaHome) -> None:
    """One peer, and one service after the other beside it."""
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
    """Run a benchmark that starts a Java of its own."""
    made = Report(title)
    with tempfile.TemporaryDirectory() as place:
        found = find_java(Path(place))
        if isinstance(found, EngineUnavailable):
            raise SystemExit(str(found))
        anyio.run(run, made, found, backend_options={"use_uvloop": True})
    made.close()


if __name__ == "__main__":
    main("Steps on a cluster and over Connect beside those of a local Spark.", run)
