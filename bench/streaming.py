"""A view's step against a micro-batch of Spark Structured Streaming, 100 rows each.

Ours: from the acknowledgement of the insert until the view is durable beyond it, as the client sees
it. Peer: the time of a micro-batch as Spark reports it (``triggerExecution``: from the trigger to
the commit), so without polling, notice of arrival or a durable input: its source generates the same
rows (``rate-micro-batch``, one partition). Its output is durable: ``foreachBatch`` takes the batch
with `toArrow` and writes one Parquet file, fsynced, named after the batch; the file sink is
measured too. Input: 100 rows per batch, 1,000 groups.

The peer's session is in this process (with its own JVM), with the engine's configuration and one
shuffle partition; with Spark's default of 200 a stateful batch takes seconds. ``defaults`` leaves
the other settings of Structured Streaming alone, ``best`` sets those in `BEST`. The sides
alternate; one is idle while the other works.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Service, Settings
from actors.engine.spark.java import JavaHome, find_java
from actors.engine.spark.session import open_session, spark_conf
from measure import Measure, Report, median, percentile

BATCH = 100
GROUPS = 1000
PRELOADED = 100_000
SPREAD = 7919
"""Coprime to the number of groups: 10 consecutive batches affect every group."""
QUERIES = {
    "stateless": f"SELECT id, id * {SPREAD} % {GROUPS} AS k, v * 2 AS w FROM events WHERE v >= 10",
    "aggregate": f"SELECT id * {SPREAD} % {GROUPS} AS k, count(*) AS n, sum(v) AS s FROM events "
    "GROUP BY 1",
}
TARGETS = {
    ("stateless", "defaults"): 1 / 3,
    ("aggregate", "defaults"): 1 / 3.5,
    ("aggregate", "best"): 1 / 2,
}
BEST = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.stateStore.rowChecksum.enabled": "false",
}
SETTLE_SECONDS = 0.25
BATCH_SECONDS_MAX = 30


class Size(msgspec.Struct, frozen=True):
    """The extent of a run: warm-up batches, counted batches, rounds."""

    warm: int
    counted: int
    rounds: int


def events(start: int, count: int) -> pa.Table:
    """Return rows `start` to ``start + count - 1``. The peer generates the same from its row
    numbers."""
    ids = numpy.arange(start, start + count, dtype=numpy.int64)
    return pa.table({"id": ids, "v": ids % 90})


class Ours:
    """The service with one view at a time."""

    def __init__(self, client: Client, preloaded: int) -> None:
        self._client = client
        self._rows = 0
        self._views = 0
        self._preloaded = preloaded

    async def load(self) -> None:
        """Create the table, with rows as in a running system."""
        await self._client.create_table("events", {"id": "bigint", "v": "bigint"})
        await self._insert(self._preloaded)

    async def _insert(self, count: int) -> int:
        written = await self._client.insert("events", events(self._rows, count))
        self._rows += count
        return written

    async def turn(self, kind: str, size: Size) -> list[float]:
        """Return the milliseconds of each counted step."""
        self._views += 1
        name = f"{kind}{self._views}"
        await self._client.create_materialized_view(name, QUERIES[kind])
        times = []
        for number in range(size.warm + size.counted):
            written = await self._insert(BATCH)
            started = time.perf_counter()
            await self._client.wait_for(name, written, deadline_ms=600_000)
            if number >= size.warm:
                times.append((time.perf_counter() - started) * 1000)
        await self._client.drop(name)
        return times


def write_durably(folder: Path, frame: Any, batch: int) -> None:
    """Write one batch as one Parquet file, atomically."""
    table = frame.toArrow()
    place = folder / f"{batch}.parquet"
    with place.with_suffix(".new").open("wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    place.with_suffix(".new").rename(place)


def _quietly(start: Callable[[], Any], log: Path) -> Any:
    """Start a JVM whose standard error goes to a file, because a stopped query fills it with
    traces.

    A streaming query over this source is never idle, so it is always stopped within a batch.
    """
    kept = os.dup(2)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        return start()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Peer:
    """Structured Streaming in a session of this process."""

    def __init__(self, folder: Path) -> None:
        java = find_java(folder / "java")
        if not isinstance(java, JavaHome):
            raise java
        os.environ["JAVA_HOME"] = str(java.home)
        self._folder = folder
        conf = spark_conf(Settings(), folder)
        # Spark's own scheduler for one user, and room for the progress of all batches.
        conf |= {"spark.sql.shuffle.partitions": "1", "spark.scheduler.mode": "FIFO"}
        conf |= {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
        self.session = _quietly(partial(open_session, conf, folder), folder / "jvm.log")
        self._queries = 0

    def close(self) -> None:
        """Stop the session."""
        self.session.stop()

    def turn(self, kind: str, settings: str, sink: str, size: Size) -> list[float]:
        """Return the milliseconds of each counted batch."""
        self._queries += 1
        place = self._folder / f"query{self._queries}"
        (place / "out").mkdir(parents=True)
        session = self.session.newSession()
        if settings == "best":
            for key, value in BEST.items():
                session.conf.set(key, value)
        source = session.readStream.format("rate-micro-batch")
        rows = source.option("rowsPerBatch", str(BATCH)).option("numPartitions", "1").load()
        rows.selectExpr("value AS id", "value % 90 AS v").createTempView("events")
        writer = session.sql(QUERIES[kind]).writeStream
        writer = writer.outputMode("append" if kind == "stateless" else "update")
        writer = writer.option("checkpointLocation", str(place / "checkpoint"))
        if sink == "file":
            query = writer.format("parquet").option("path", str(place / "out")).start()
        else:
            query = writer.foreachBatch(partial(write_durably, place / "out")).start()
        try:
            times = self._batches(query, size.warm + size.counted)
        finally:
            query.stop()
        assert any((place / "out").glob("*.parquet"))
        return times[size.warm : size.warm + size.counted]

    def _batches(self, query: Any, count: int) -> list[float]:
        """Return the durations of the first `count` batches. The query keeps running meanwhile."""
        limit = time.monotonic() + BATCH_SECONDS_MAX * count
        while True:
            time.sleep(SETTLE_SECONDS)
            if query.exception() is not None:
                raise query.exception()
            last = query.lastProgress
            if last is not None and last["batchId"] >= count:
                break
            assert time.monotonic() < limit, "the streaming query makes no progress"
        done = [p for p in query.recentProgress if p["numInputRows"]]
        assert all(p["numInputRows"] == BATCH for p in done)
        return [float(p["durationMs"]["triggerExecution"]) for p in done]


async def run(report: Report) -> None:
    """Run both sides in alternation, then add all measures."""
    size = Size(10, 10, 1) if report.quick else Size(300, 50, 2)
    peers = [
        ("stateless", "defaults", "foreach"),
        ("stateless", "best", "foreach"),
        ("stateless", "defaults", "file"),
        ("aggregate", "defaults", "foreach"),
        ("aggregate", "best", "foreach"),
    ]
    ours: dict[str, list[float]] = {kind: [] for kind in QUERIES}
    theirs: dict[tuple[str, str, str], list[float]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        service = Service(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
        async with service, await Client.in_process(service) as client:
            side = Ours(client, PRELOADED // 10 if report.quick else PRELOADED)
            await side.load()
            peer = await anyio.to_thread.run_sync(Peer, folder / "peer")
            for _ in range(size.rounds):
                for kind in QUERIES:
                    ours[kind] += await side.turn(kind, size)
                    for other in peers:
                        if other[0] == kind:
                            turn: Callable[[], list[float]] = partial(peer.turn, *other, size)
                            theirs[other] += await anyio.to_thread.run_sync(turn)
            await anyio.to_thread.run_sync(peer.close)
    for other, times in theirs.items():
        kind, settings, sink = other
        name = f"streaming_{kind}_{settings}{'_file_sink' if sink == 'file' else ''}"
        target = TARGETS.get((kind, settings)) if sink == "foreach" else None
        report.add(Measure(f"{name}_p50", median(ours[kind]), median(times), target=target))
        p95 = percentile(ours[kind], 0.95), percentile(times, 0.95)
        report.add(Measure(f"{name}_p95", *p95))


if __name__ == "__main__":
    logging.getLogger("SQLQueryContextLogger").disabled = True
    made = Report("A view's step against a micro-batch of Structured Streaming.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
