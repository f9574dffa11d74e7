"""10M rows read by a plain Spark session: through the data source, and from plain Parquet.

Ours: `spark.read.format("penstock")` over a shard of ten appends, summing all columns. Peer: the
same query in the same session over the same rows as ten Parquet files. ``_changed``: the same after
1% of the rows were deleted, so that deletions must be consolidated. There is no target: the peer's
rows never leave the JVM, while ours are decoded in Python and passed as Arrow.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from actors.durable.persist import NewShard, PersistClient, ShardAppend
from actors.engine.spark.java import JavaHome, find_java
from actors.engine.spark.source import PenstockDataSource
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import with_time
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from measure import Measure, Report, median

SCHEMA = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("region", "string"), TableColumn("amount", "bigint"))
)
SHARD = "s1"
APPENDS = 10
SUMS = ("count(*)", "sum(id)", "sum(amount)", "max(region)")


def rows(start: int, count: int) -> pa.Table:
    """Return rows `start` to ``start + count - 1``."""
    ids = numpy.arange(start, start + count, dtype=numpy.int64)
    regions = pa.DictionaryArray.from_arrays(
        pa.array(ids % 4, pa.int32()), pa.array(["north", "east", "south", "west"])
    )
    columns = {"id": ids, "region": regions.cast(pa.string()), "amount": ids % 997}
    return pa.table(columns, schema=SCHEMA.arrow())


async def fill(folder: Path, count: int) -> None:
    """Write the shard and the files."""
    client = await PersistClient.open(folder / "state", Settings(), SystemClock())
    await client.create_shards([NewShard(SHARD, SCHEMA, holds={"bench": 0})])
    (folder / "parquet").mkdir()
    for number in range(APPENDS):
        table = rows(number * count // APPENDS, count // APPENDS)
        pq.write_table(table, folder / "parquet" / f"{number}.parquet", compression="zstd")
        parts = await client.write_parts(SHARD, with_time(table, number, 1))
        await client.append([ShardAppend(SHARD, number, number + 1, parts)])
    await client.close()


async def change(folder: Path, count: int) -> None:
    """Delete one row of a hundred."""
    client = await PersistClient.open(folder / "state", Settings(), SystemClock())
    parts = await client.write_parts(SHARD, with_time(rows(0, count // 100), APPENDS, -1))
    await client.append([ShardAppend(SHARD, APPENDS, APPENDS + 1, parts)])
    await client.close()


def timed(frame: Any, turns: int) -> tuple[float, Any]:
    """Return the milliseconds per run, without the first one, and the result."""
    took, answer = [], None
    for _ in range(turns + 1):
        started = time.perf_counter()
        answer = frame().selectExpr(*SUMS).collect()
        took.append((time.perf_counter() - started) * 1000)
    return median(took[1:]), answer


def main() -> None:
    """Measure both."""
    report = Report(__doc__ or "")
    count, turns = (1_000_000, 1) if report.quick else (10_000_000, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        java = find_java(folder)
        if not isinstance(java, JavaHome):
            raise java
        os.environ |= {"JAVA_HOME": str(java.home), "PYSPARK_PYTHON": sys.executable}
        anyio.run(fill, folder, count)
        builder = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
        )
        spark = builder.config("spark.python.unix.domain.socket.enabled", "true").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(PenstockDataSource)

        def ours() -> Any:
            reader = spark.read.format("penstock").option("stateDir", str(folder / "state"))
            return reader.option("shard", SHARD).load()

        peer, wanted = timed(lambda: spark.read.parquet(str(folder / "parquet")), turns)
        mine, answer = timed(ours, turns)
        assert answer == wanted, (answer, wanted)
        report.add(Measure("spark_source_read", mine, peer))
        anyio.run(change, folder, count)
        mine, answer = timed(ours, turns)
        assert answer[0][0] == count - count // 100, answer
        report.add(Measure("spark_source_read_changed", mine, peer))
        spark.stop()
    report.close()


if __name__ == "__main__":
    main()
