"""The step of the demo's view (a), from last input sealed to output durable, against recomputation.

A service with default settings is loaded with N flights (the year 2013, repeated with new ids),
maintains ``delay_by_carrier``, and gets steps of 100 changes (50 updated flights: 50 retractions
and 50 insertions). Ours: from the acknowledgement of the write until the view is durable and
reported beyond it. Peer: plain Spark runs the view's text in full over Parquet files of the same
rows, in the same Spark session. Both are warm. ``spark_share`` compares the part of a step that
Spark takes with the same recomputation.

``beside_spark``: the median over the steps of a step's time minus Spark's part of it; the peer is
the limit, 15 ms. ``10M_beside_1M``: ours is the step over ten million rows, the peer the step over
one million; the same for Spark's part. The environment variable ROWS sets other sizes; the largest
is compared with a tenth of it if that was run (ROWS=10000,100000,1000000 omits the long one).
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

import anyio
import msgspec
import numpy
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors import Client, Service, Settings
from actors.model.plan.jobs import Answer, ExecutorMessage, QueryFiles, RowsDone, SubmitJob
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.service import start_spark
from measure import Measure, Report, median, percentile, size_name, sizes
from penstock_flights import flights
from penstock_flights.play import DELAY_BY_CARRIER

CHANGES = 100
CHUNK = 50_000
FILE_CHUNK = 1_000_000
"""Rows of one row group of the peer's files, and the most that are generated at a time."""
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES_QUICK = (2_000, 20_000)
TARGET_GROWTH = 1.1
BESIDE_SPARK_MS = 15.0
DEADLINE_MS = 1_800_000
WARM = 20
"""Initial steps and recomputations that do not count, because they warm up the JVM."""


class Year:
    """The year's flights in their final state, repeated with new ids."""

    def __init__(self) -> None:
        self.schema = flights.arrow_schema("flights")
        source = flights.read().flights
        moment = source["time_hour"].cast(pa.timestamp("us", tz="UTC"))
        columns = {
            "carrier": source["carrier"],
            "flight": source["flight"],
            "tailnum": source["tailnum"],
            "origin": source["origin"],
            "dest": source["dest"],
            "sched_dep": moment,
            "time_hour": moment,
            "distance": source["distance"],
            "status": pc.if_else(pc.is_null(source["dep_time"]), "cancelled", "arrived"),
            "dep_delay": source["dep_delay"],
            "arr_delay": source["arr_delay"],
        }
        self._once = pa.table(columns).combine_chunks()

    def rows(self, start: int, end: int) -> pa.Table:
        """Return the flights with ids `start` to ``end - 1``."""
        ids = numpy.arange(start, end, dtype=numpy.int64)
        taken = self._once.take(pa.array(ids % self._once.num_rows))
        return taken.append_column("id", pa.array(ids)).select(self.schema.names).cast(self.schema)

    def write(self, file: Path, count: int) -> None:
        """Write the first `count` flights as a Parquet file."""
        with pq.ParquetWriter(file, self.schema) as writer:
            for start in range(0, count, FILE_CHUNK):
                writer.write_table(self.rows(start, min(start + FILE_CHUNK, count)))


class Bench:
    """A service with its engine's address."""

    def __init__(self, settings: Settings) -> None:
        self.engine: ActorAddress[ExecutorMessage] | None = None
        self.service = Service(settings, engine=self._start)

    def _start(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        self.engine = start_spark(system, settings, scratch)
        return self.engine

    async def query(self, sql: str, tables: dict[str, Path]) -> float:
        """Run plain Spark and return the milliseconds of the query alone, without our messages."""
        assert self.engine is not None
        job = QueryFiles(uuid.uuid4().hex, sql, tuple((n, str(p)) for n, p in tables.items()))

        def make(reply: ReplySlot[Answer]) -> ExecutorMessage:
            return SubmitJob(job, reply)

        answer = await self.engine.ask(make, 600_000)
        assert isinstance(answer, RowsDone)
        return answer.spark_ms


class Steps(msgspec.Struct):
    """Milliseconds of each counted step: in total, and Spark's part."""

    whole: list[float] = []
    spark: list[float] = []

    def beside(self) -> list[float]:
        """Return the time of each step without Spark's part."""
        return [whole - spark for whole, spark in zip(self.whole, self.spark, strict=True)]


async def take(client: Client, count: int, steps: int) -> Steps:
    """Run steps over `count` flights that are loaded and maintained."""
    name = DELAY_BY_CARRIER.name
    updates = (CHANGES // 2) * (steps + WARM)
    assert updates <= count, f"{count} flights are not enough: {updates} are updated, each once"
    taken = Steps()
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
        await client.wait_for(name, written, deadline_ms=DEADLINE_MS)
        elapsed = (time.perf_counter() - started) * 1000
        if number >= WARM:
            taken.whole.append(elapsed)
            status = await client.status()
            taken.spark.append(next(o.spark_ms for o in status.objects if o.name == name))
    return taken


async def one(report: Report, year: Year, count: int, steps: int, folder: Path) -> Steps:
    """Measure one size: load, maintain, step, recompute."""
    bench = Bench(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
    carriers = flights.read().carriers
    name = DELAY_BY_CARRIER.name
    async with bench.service as service, await Client.in_process(service) as client:
        for table in ("carriers", "flights"):
            columns, key = flights.TABLES[table]
            await client.create_table(table, columns, primary_key=list(key))
        loaded = await client.insert("carriers", carriers)
        for start in range(0, count, CHUNK):
            loaded = await client.insert("flights", year.rows(start, min(start + CHUNK, count)))
        await client.create_materialized_view(name, DELAY_BY_CARRIER.sql)
        await client.wait_for(name, loaded, deadline_ms=DEADLINE_MS)
        taken = await take(client, count, steps)
        files = {"flights": folder / "flights.parquet", "carriers": folder / "carriers.parquet"}
        year.write(files["flights"], count)
        pq.write_table(carriers, files["carriers"])
        again = [await bench.query(DELAY_BY_CARRIER.sql, files) for _ in range(steps + WARM)]
    peer = median(again[WARM:])
    label = f"view_step_{size_name(count)}"
    report.add(Measure(f"{label}_p50", median(taken.whole), peer))
    report.add(Measure(f"{label}_p95", percentile(taken.whole, 0.95), peer))
    report.add(Measure(f"{label}_spark_share", median(taken.spark), peer))
    beside = median(taken.beside())
    report.add(Measure(f"{label}_beside_spark", beside, BESIDE_SPARK_MS, target=1.0))
    return taken


async def run(report: Report) -> None:
    """Measure all sizes, then compare the largest with a tenth of it."""
    counts = sizes(SIZES_QUICK if report.quick else SIZES)
    year = Year()
    done: dict[int, Steps] = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            done[count] = await one(report, year, count, 5 if report.quick else 50, Path(folder))
    large = counts[-1]
    small = large // 10
    if small not in done:
        return
    label = f"view_step_{size_name(large)}"
    for part, ours, peer in (
        ("", done[large].whole, done[small].whole),
        ("_spark_share", done[large].spark, done[small].spark),
    ):
        name = f"{label}{part}_beside_{size_name(small)}"
        report.add(Measure(name, median(ours), median(peer), target=TARGET_GROWTH))


if __name__ == "__main__":
    made = Report("View (a)'s step against full recomputation, by size of the state.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
