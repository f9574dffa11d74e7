"""The Spark Connect gateway against the Connect server behind it, used by an unmodified PySpark.

One service, whose Spark serves both: through the gateway, and directly at the server in its JVM.

- ``connect_select_1``: ``spark.sql("SELECT 1").collect()``, p50.
- ``connect_rows``: a million rows that Spark generates, to Arrow, so that both sides do the same
  work except for the gateway's.
- ``connect_plain_read``: a read of one row by its key, which the gateway answers without Spark
  (p50; the limit applies to ours). The peer is ``SELECT 1`` at the direct server, the cheapest read
  there.

The environment variable ROWS sets another number of rows than a million.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from pyspark.sql.connect import functions as sf
from pyspark.sql.connect.session import SparkSession

from actors.doors.client.client import Client
from actors.model.plan.jobs import EngineReady, ExecutorMessage, LocateConnect
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.runtime.settings import Settings
from actors.service import Service, start_spark
from measure import Measure, Report, median

ROWS = int(os.environ.get("ROWS", "1000000"))
KEPT = 10_000
SERVE = "--serve"
"""Flag that runs the service instead of the benchmark."""
MADE = "id", "CAST(id AS string) AS name", "id / 8 AS value", "timestamp_seconds(id) AS at"


def one(spark: Any) -> object:
    return spark.sql("SELECT 1 AS a").collect()


def rows(spark: Any, count: int) -> object:
    found = spark.range(count).selectExpr(*MADE).toArrow()
    assert found.num_rows == count
    return found


def timed(run: Callable[[], object]) -> float:
    """Return the duration of one call in ms."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1000


def beside(report: Report, name: str, count: int, mine: Any, theirs: Any) -> None:
    """Report the medians of two calls, in alternation because the JVM keeps compiling."""
    for run in (mine, theirs) * max(2, count // 10):
        run()
    times = [(timed(mine), timed(theirs)) for _ in range(count)]
    ours, peer = zip(*times, strict=True)
    report.add(Measure(name, median(ours), median(peer), target=1.2))


def measure(report: Report, ours: Any, peer: Any) -> None:
    calls = 30 if report.quick else 200
    # Figures taken before the JVM has compiled frequent code measure its compiler.
    for _ in range(calls * 4):
        one(ours), one(peer)
    beside(report, "connect_select_1", calls, partial(one, ours), partial(one, peer))
    count, rounds = (100_000, 3) if report.quick else (ROWS, 7)
    beside(report, "connect_rows", rounds, partial(rows, ours, count), partial(rows, peer, count))

    def read(number: int) -> object:
        found = ours.table("points").filter(sf.col("id") == number * 37 % KEPT).toArrow()
        assert found.num_rows == 1
        return found

    for number in range(calls):
        read(number)
    reads = median([timed(partial(read, number)) for number in range(calls)])
    least = median([timed(partial(one, peer)) for _ in range(calls)])
    report.add(Measure("connect_plain_read", reads, least, most=8.0))


# -- the service, in a separate process -----------------------------------------------------------


def serve(folder: str) -> None:
    """Run a service until its input ends, and print the addresses of its two servers."""
    settings = Settings(
        state_dir=folder,
        listen="127.0.0.1:0",
        connect_listen="127.0.0.1:0",
        spark_master="local[2]",
    )
    executors: list[ActorAddress[ExecutorMessage]] = []

    def engine(
        system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        executors.append(start_spark(system, settings, scratch))
        return executors[-1]

    async def ready() -> EngineReady:
        def ask(reply: ReplySlot[EngineReady]) -> ExecutorMessage:
            return LocateConnect(reply)

        return await executors[0].ask(ask)

    with start_blocking_portal("asyncio", {"use_uvloop": True}) as portal:
        service = Service(settings, engine=engine)
        with portal.wrap_async_context_manager(service):
            client = portal.call(partial(Client.in_process, service))
            portal.call(client.create_table, "points", {"id": "bigint", "name": "string"}, ["id"])
            kept = [{"id": number, "name": f"name {number}"} for number in range(KEPT)]
            portal.call(client.insert, "points", kept)
            portal.call(client.create_index, "by_id", "points", ["id"])
            found = portal.call(ready)
            direct = f"127.0.0.1:{found.connect_port}/;authorization=Bearer%20{found.connect_token}"
            print(service.connect_address, direct, flush=True)
            sys.stdin.read()
            portal.call(client.aclose)


@contextmanager
def addresses(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of the gateway and of the server behind it."""
    command = [sys.executable, __file__, SERVE, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            ours, peer = process.stdout.readline().split()
            yield ours, peer
        finally:
            process.stdin.close()


def main() -> None:
    report = Report(__doc__ or "")
    with (
        tempfile.TemporaryDirectory() as folder,
        addresses(Path(folder) / "state") as (mine, theirs),
    ):
        ours, peer = SparkSession(f"sc://{mine}"), SparkSession(f"sc://{theirs}")
        try:
            measure(report, ours, peer)
        finally:
            ours.stop()
            peer.stop()
    report.close()


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2])
    else:
        main()
