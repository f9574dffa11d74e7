"""The step of the demo's view (a), from last input sealed to output durable, beside recomputation.

A service with the embedded default is loaded with N flights (the year 2013, repeated under new
ids), maintains ``delay_by_carrier``, and gets steps of 100 changes (50 updated flights: 50
retractions and 50 insertions). Ours: the write is acknowledged → the view is durable and
reported beyond it. Peer: the view's own text run whole by plain Spark over Parquet files of the
same rows, in the same Spark session, both warm. ``spark share`` compares the part of a step that
Spark takes with the same recomputation.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors import Client, Service, Settings
from actors.demo import flights
from actors.demo.views import DELAY_BY_CARRIER
from actors.kernel import Address, Reply, System
from actors.plan.jobs import Answer, ExecutorMessage, Query, RowsDone, Run
from actors.service import start_spark
from measure import Measure, Report, median, percentile

CHANGES = 100
CHUNK = 50_000
WARM = 20
"""First steps and first recomputations that are not counted: they warm the JVM."""


def year(count: int) -> pa.Table:
    """`count` flights in their last known state, ids 0 to count - 1."""
    schema = flights.arrow_schema("flights")
    source = flights.read().flights
    base = min(count, source.num_rows)
    cut = source.slice(0, base)
    moment = cut["time_hour"].cast(pa.timestamp("us", tz="UTC"))
    columns = {
        "carrier": cut["carrier"],
        "flight": cut["flight"],
        "tailnum": cut["tailnum"],
        "origin": cut["origin"],
        "dest": cut["dest"],
        "sched_dep": moment,
        "time_hour": moment,
        "distance": cut["distance"],
        "status": pc.if_else(pc.is_null(cut["dep_time"]), "cancelled", "arrived"),
        "dep_delay": cut["dep_delay"],
        "arr_delay": cut["arr_delay"],
    }
    once = pa.table(columns)
    copies = [once] * (count // base) + [once.slice(0, count % base)]
    many = pa.concat_tables(copies).combine_chunks()
    many = many.append_column("id", pa.array(range(count), pa.int64()))
    return many.select(schema.names).cast(schema)


class Bench:
    """One service with its engine's address."""

    def __init__(self, settings: Settings) -> None:
        self.engine: Address[ExecutorMessage] | None = None
        self.service = Service(settings, engine=self._start)

    def _start(self, system: System, settings: Settings, scratch: Path) -> Address[ExecutorMessage]:
        self.engine = start_spark(system, settings, scratch)
        return self.engine

    async def query(self, sql: str, tables: dict[str, Path]) -> float:
        """Runs plain Spark; milliseconds of the query alone, without our messages."""
        assert self.engine is not None
        job = Query(uuid.uuid4().hex, sql, tuple((n, str(p)) for n, p in tables.items()))

        def make(reply: Reply[Answer]) -> ExecutorMessage:
            return Run(job, reply)

        answer = await self.engine.ask(make, 600_000)
        assert isinstance(answer, RowsDone)
        return answer.spark_ms


async def one(report: Report, count: int, steps: int, folder: Path) -> None:
    """One size: load, maintain, step, recompute."""
    settings = Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0")
    bench = Bench(settings)
    table = year(count)
    carriers = flights.read().carriers
    name = DELAY_BY_CARRIER.name
    async with bench.service as service, await Client.in_process(service) as client:
        for dimension in ("carriers", "flights"):
            columns, key = flights.TABLES[dimension]
            await client.create_table(dimension, columns, primary_key=list(key))
        await client.insert("carriers", carriers)
        for start in range(0, count, CHUNK):
            await client.insert("flights", table.slice(start, CHUNK))
        await client.create_view(name, DELAY_BY_CARRIER.sql)
        updates = (CHANGES // 2) * (steps + WARM)
        assert updates <= count
        whole, spark = [], []
        for number in range(steps + WARM):
            ids = range(number * CHANGES // 2, (number + 1) * CHANGES // 2)
            rows = pa.table(
                {
                    "id": pa.array(ids, pa.int64()),
                    "dep_delay": pa.array([i % 90 for i in ids], pa.int64()),
                }
            )
            written = await client.update("flights", rows)
            started = time.perf_counter()
            await client.wait_for(name, written, deadline_ms=600_000)
            elapsed = (time.perf_counter() - started) * 1000
            if number >= WARM:
                whole.append(elapsed)
                status = await client.status()
                spark.append(next(o.spark_ms for o in status.objects if o.name == name))
        files = {"flights": folder / "flights.parquet", "carriers": folder / "carriers.parquet"}
        pq.write_table(table, files["flights"])
        pq.write_table(carriers, files["carriers"])
        again = [await bench.query(DELAY_BY_CARRIER.sql, files) for _ in range(steps + WARM)]
    peer = median(again[WARM:])
    size = f"{count // 1000}k" if count < 1_000_000 else f"{count // 1_000_000}M"
    report.add(Measure(f"view_step_{size}_p50", median(whole), peer))
    report.add(Measure(f"view_step_{size}_p95", percentile(whole, 0.95), peer))
    report.add(Measure(f"view_step_{size}_spark_share", median(spark), peer))


async def run(report: Report) -> None:
    """All sizes."""
    sizes = [1_000] if report.quick else [10_000, 100_000, 1_000_000]
    for count in sizes:
        with tempfile.TemporaryDirectory() as folder:
            await one(report, count, 5 if report.quick else 50, Path(folder))


if __name__ == "__main__":
    made = Report("View (a)'s step beside full recomputation, by size of the state.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
