"""Files as a source, until their rows are durable, against Spark reading and writing them.

Ours: the file source reads a folder of new files; rows are written as parts and appended with the
position mark, as an ingestion does. Peer: Spark, warm, reads the same files and writes the same
rows as Parquet (zstd, like the parts), by the read of `TakeFiles` alone. ``copied_once``: a
one-shot copy of the same files, up to its append. ``parquet``: ten files whose columns have the
target types, which need no Spark; ``parquet_by_spark`` (no target): the same, read by Spark;
``csv``: a tenth of the rows. Twice the peer's time is half of its rate.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from actors import Settings
from actors.connectors.oneshot_task import OneshotEnded, OneshotTask
from actors.connectors.sources import file_reading
from actors.connectors.sources.files import EXPORT, FilesConfig, FilesSource
from actors.connectors.sources.oneshot import CopyFromConfig, OneshotCopy
from actors.connectors.sources.random_draws import DrawStream, decimals, numbered
from actors.connectors.sources.source import (
    ConnectorContext,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceRows,
)
from actors.control.controller.tables.staged import parts_of
from actors.durable.persist.client import PersistClient
from actors.durable.persist.shard import AppendCommitted, BatchPart, NewShard, ShardAppend, placed
from actors.model.plan.jobs import Answer, ExecutorMessage, Job, RowsDone, SubmitJob, TakeFiles
from actors.model.plan.schema import TIME, TableColumn, TableSchema
from actors.model.protocol.storage import FilesStaged
from actors.runtime.kernel import STOP, ActorAddress, ActorSystem, ReplySlot, SystemClock
from actors.service import start_spark
from actors.testing.probe import MessageProbe
from measure import Measure, Report, median, size_name, sizes

SCHEMA = TableSchema(
    (
        TableColumn("id", "bigint"),
        TableColumn("at", "timestamp"),
        TableColumn("product", "bigint"),
        TableColumn("region", "string"),
        TableColumn("customer", "string"),
        TableColumn("quantity", "int"),
        TableColumn("price", "decimal(12,2)"),
        TableColumn("discount", "double"),
    )
)
FILES = 10
CHUNK = 1_000_000
TARGET = 2.0
DEADLINE_MS = 1_800_000
REGIONS = pa.array(["north", "east", "south", "west"])
CUSTOMERS = DrawStream(1, "customers").texts(numbered(0, 10_000), 8, 24)


def rows(start: int, stop: int) -> pa.Table:
    """Return sales `start` to ``stop - 1``."""
    ids = numbered(start, stop)
    columns: list[Any] = [
        ids,
        pa.array(ids * 250_000 + 1_700_000_000_000_000).cast(pa.timestamp("us", tz="UTC")),
        DrawStream(1, "product").below(ids, 100_000),
        REGIONS.take(pa.array(DrawStream(1, "region").below(ids, 4))),
        CUSTOMERS.take(pa.array(DrawStream(1, "customer").below(ids, 10_000))),
        DrawStream(1, "quantity").below(ids, 50).astype(np.int32),
        decimals(DrawStream(1, "price").below(ids, 10_000_000), pa.decimal128(12, 2)),
        DrawStream(1, "discount").below(ids, 100) / 100,
    ]
    return pa.table(columns, schema=SCHEMA.arrow())


def write(folder: Path, kind: str, count: int) -> int:
    """Write `count` rows in files of one format and return their bytes."""
    folder.mkdir()
    each = -(-count // FILES)
    for number in range(FILES):
        first, last = number * each, min(count, (number + 1) * each)
        path = folder / f"{number}.{kind}"
        if kind == "csv":
            pa.csv.write_csv(rows(first, last), path)
            continue
        with pq.ParquetWriter(path, SCHEMA.arrow()) as writer:
            for start in range(first, last, CHUNK):
                writer.write_table(rows(start, min(last, start + CHUNK)))
    return sum(path.stat().st_size for path in folder.iterdir())


class Bench:
    """An engine and a client of shards."""

    def __init__(self, folder: Path, engine: ActorAddress[ExecutorMessage]) -> None:
        self._folder = folder
        self._engine = engine
        self._clock = SystemClock()
        settings = Settings(source_dirs=str(folder))
        self._around = ConnectorContext(self._clock, settings, folder / "scratch", self.run_job)

    async def run_job(self, job: Job) -> Answer:
        """Run a job on the engine and return its answer."""

        def make(reply: ReplySlot[Answer]) -> ExecutorMessage:
            return SubmitJob(job, reply)

        return await self._engine.ask(make, DEADLINE_MS)

    async def ours(self, kind: str, count: int) -> float:
        """Return the milliseconds from opening the source to the last append."""
        options = {"header": "true"} if kind == "csv" else {}
        config = FilesConfig(
            folder=str(self._folder / kind),
            format="csv" if kind == "csv" else "parquet",
            columns=SCHEMA.columns,
            options=options,
        )
        place = self._folder / f"state-{uuid.uuid4().hex}"
        persist = await PersistClient.open(place, self._around.settings, self._clock)
        try:
            await persist.create_shards([NewShard("u1", SCHEMA)])
            source = FilesSource(config, self._around)
            started = time.perf_counter()
            await source.open((SourceExport(EXPORT, SCHEMA),), None)
            done = await self._ingest(source, persist)
            elapsed = (time.perf_counter() - started) * 1000
            await source.close()
            assert done == count, (done, count)
        finally:
            await persist.close()
        return elapsed

    async def copied(self, count: int) -> float:
        """Return the milliseconds of a one-shot copy of the Parquet files: staged, then appended at
        a time chosen at the end."""
        place = self._folder / f"state-{uuid.uuid4().hex}"
        persist = await PersistClient.open(place, self._around.settings, self._clock)
        request = CopyFromConfig(path=str(self._folder / "parquet"), format="parquet")
        try:
            await persist.create_shards([NewShard("u1", SCHEMA)])
            async with ActorSystem() as system:
                probe = MessageProbe.start(system, "owner")
                started = time.perf_counter()
                system.spawn(
                    lambda: OneshotTask(
                        1,
                        "u1",
                        lambda: OneshotCopy(request, SCHEMA, self._around),
                        persist,
                        probe.address,
                        self._around.settings,
                    ),
                    "oneshot",
                    policy=STOP,
                )
                while not isinstance(ended := await probe.expect(object), OneshotEnded):
                    pass  # the frontier so far
                assert isinstance(ended.result, FilesStaged), ended
                parts = parts_of(ended.result)
                assert await persist.claim("u1", parts)
                at = tuple(placed(part, 7) for part in parts)
                assert isinstance(
                    await persist.append([ShardAppend("u1", 0, 8, at)]), AppendCommitted
                )
                elapsed = (time.perf_counter() - started) * 1000
            assert sum(part.rows for part in parts) == count
        finally:
            await persist.close()
        return elapsed

    async def _ingest(self, source: FilesSource, persist: PersistClient) -> int:
        parts: list[BatchPart] = []
        lower = upper = taken = 0
        while not isinstance(given := await source.next(), SourceIdle):
            if isinstance(given, SourceRows):
                times = pa.array(np.full(given.updates.num_rows, upper, np.int64))
                updates = given.updates.append_column(pa.field(TIME, pa.int64()), times)
                parts += await persist.write_parts("u1", updates)
                taken += given.updates.num_rows
            elif isinstance(given, PositionMark):
                append = ShardAppend("u1", lower, upper + 1, tuple(parts))
                assert isinstance(await persist.append([append]), AppendCommitted)
                lower, upper, parts = upper + 1, upper + 1, []
        return taken

    async def peer(self, kind: str, bytes_: int) -> float:
        """Return the milliseconds that Spark takes to read the files and write them."""
        source = "csv" if kind == "csv" else "parquet"
        paths = tuple(sorted(str(path) for path in (self._folder / kind).iterdir()))
        options = (("header", "true"), ("mode", "FAILFAST")) if source == "csv" else ()
        # Makes the answer count as large, so that it is written to files instead of collected.
        size = max(bytes_, 1 << 40)
        job = TakeFiles(uuid.uuid4().hex, paths, source, SCHEMA, SCHEMA.names, options, size)
        answer = await self.run_job(job)
        assert isinstance(answer, RowsDone)
        for path in answer.paths():
            os.unlink(path)
        return answer.spark_ms


async def one(report: Report, bench: Bench, kind: str, count: int, folder: Path) -> None:
    """Measure one format: write the files, warm up each side, then alternate."""
    size = await anyio.to_thread.run_sync(functools.partial(write, folder / kind, kind, count))
    turns = 1 if report.quick else 3
    ours, peer, by_spark, copied = [], [], [], []
    plainly_ours: Callable[..., bool] = file_reading.reads_like_spark
    for turn in range(turns + 1):
        found = await bench.ours(kind, count)
        again = await bench.peer(kind, size)
        if turn:
            ours.append(found)
            peer.append(again)
        if kind == "parquet":
            once = await bench.copied(count)
            copied += [once] if turn else []
            file_reading.reads_like_spark = lambda *_: False
            try:
                slow = await bench.ours(kind, count)
            finally:
                file_reading.reads_like_spark = plainly_ours
            by_spark += [slow] if turn else []
    name = f"files_{kind}_{size_name(count)}"
    report.add(Measure(name, median(ours), median(peer), target=TARGET))
    rate = count / median(ours)
    report.add(Measure(f"{name}_rows_ms", rate, count / median(peer), unit="/ms"))
    if by_spark:
        report.add(Measure(f"{name}_by_spark", median(by_spark), median(peer)))
        report.add(Measure(f"{name}_copied_once", median(copied), median(peer), target=TARGET))


async def run(report: Report) -> None:
    """Measure Parquet, then CSV."""
    counts = sizes([100_000] if report.quick else [10_000_000])
    for count in counts:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            async with ActorSystem() as system:
                engine = start_spark(system, Settings(), folder / "engine")
                bench = Bench(folder, engine)
                await one(report, bench, "parquet", count, folder)
                await one(report, bench, "csv", count // 10, folder)


if __name__ == "__main__":
    made = Report("Files as a source, against Spark reading and writing them.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
