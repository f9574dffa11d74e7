"""Views over a table of 20M rows in a bucket, on a Spark cluster of two workers with one core each.

- ``first_contents``: from creating an aggregate until the view has all rows. The peer is plain
  Spark on the same cluster, reading the same rows as Parquet from the workers' local disk. This
  Spark has no connector to buckets, so the peer is a lower bound for reading from the bucket.
- ``first_contents_bytes``: bytes that the service and its driver read and wrote during that time
  (from the bucket, measured by their credentials, which differ from the executors'; and all that
  the kernel counts for their processes), against the size of the table in the bucket.
- ``kept_contents``, ``kept_contents_bytes``: the same for a view with as many rows of hidden state
  as the table has rows.
- ``kept_first_step``: from a write of 100 rows until this view has them, after the service has read
  the hidden state from the bucket for the first query. The peer is the query, run again.
- ``step_1_percent``: from a write of 1 % of the rows until the view has them. The peer is the
  query, run again over all rows.
- ``step_two_workers``: the same against a service whose Spark may use one core. The driver runs
  such a step without the workers, so they should make no difference.

The environment variable ROWS sets the number of rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from actors import Settings
from actors.engine.spark.java import JavaHome
from cluster_steps import DEADLINE_MS, SteppedService, main, opened, stepped, written
from hydrate import QUERIES
from measure import Measure, Report, median, sizes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from standalone_cluster import Cluster, running_cluster  # type: ignore[import-not-found]

import s3_server  # type: ignore[import-not-found]

ROWS = 20_000_000
CONTENTS_TARGET = 1.3
BYTES_TARGET = 0.01
ANEW_TARGET = 1 / 3
WORKERS_TARGET = 1 / 1.6
VIEW = "by_region"
SQL = QUERIES["aggregate"]
KEPT = "distinct_by_region"
KEPT_SQL = "SELECT region, count(DISTINCT id) AS ids FROM sales GROUP BY region"
OF_EXECUTORS = "AKIDOFEXECUTORS"
MB = 1_000_000


def serve(pipe: Connection) -> None:
    """Serve a bucket until the pipe closes. Send its address, then on each request the bytes stored
    and the bytes that each key moved."""
    with s3_server.serving() as served:
        pipe.send((served.new_bucket(), s3_server.variables(served)))
        with contextlib.suppress(EOFError):
            while True:
                bucket = pipe.recv()
                stored = sum(len(served.get(bucket, key)) for key in served.keys(bucket))
                pipe.send((stored, dict(served.moved)))


class BucketProcess:
    """A bucket served by a separate process, and the environment variables that clients need."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        self.bucket, self.variables = self._pipe.recv()
        self.own = self.variables["AWS_ACCESS_KEY_ID"]
        assert self._process.pid is not None
        self.pid = self._process.pid

    def transferred(self) -> tuple[int, dict[str, int]]:
        """Return the bytes stored, and the bytes that each key id has moved."""
        self._pipe.send(self.bucket)
        stored, moved = self._pipe.recv()
        return int(stored), moved

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def serving() -> Iterator[BucketProcess]:
    """Serve a bucket, and set this process's environment so that it can write there."""
    made = BucketProcess()
    try:
        os.environ.update(made.variables)
        yield made
    finally:
        made.end()


def moved_by(pid: int, others: set[int]) -> int:
    """Return the bytes that a process and its children, except `others`, have read and written."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(
                    int(entry.name)
                )
    total, waiting = 0, [pid]
    while waiting:
        each = waiting.pop()
        if each in others:
            continue
        with contextlib.suppress(OSError):
            lines = dict(
                line.split(": ") for line in Path(f"/proc/{each}/io").read_text().splitlines()
            )
            total += int(lines["rchar"]) + int(lines["wchar"])
        waiting += children.get(each, [])
    return total


def settings(folder: Path, cluster: Cluster, bucket: BucketProcess, cores: int) -> Settings:
    """Return settings for a service over the bucket whose Spark uses `cores` cores."""
    made = stepped(folder, cluster.url)
    conf = {**made.spark_conf, "spark.cores.max": str(cores)}
    return msgspec.structs.replace(made, blob_url=f"s3://{bucket.bucket}/x", spark_conf=conf)


async def first_contents(
    report: Report,
    ours: SteppedService,
    files: dict[str, Path],
    bucket: BucketProcess,
    pids: set[int],
    name: str,
    sql: str,
    turns: int,
) -> None:
    """Alternate between creating (and dropping) a view and running the plain query. The last view
    stays."""
    took, plain, through = [], [], []
    warm = 1 if turns == 1 else 2
    for turn in range(warm + turns):
        if turn:
            await ours.client.drop(ours.view)
        at = await ours.client.write({})
        before, key = moved_by(os.getpid(), pids), bucket.transferred()[1].get(bucket.own, 0)
        began = time.perf_counter()
        await ours.client.create_materialized_view(ours.view, sql)
        await ours.client.wait_for(ours.view, at, deadline_ms=DEADLINE_MS)
        took.append((time.perf_counter() - began) * 1000)
        moved = moved_by(os.getpid(), pids) - before
        through.append(moved + bucket.transferred()[1].get(bucket.own, 0) - key)
        plain.append(await ours.bench.query(sql, files))
    report.add(Measure(name, median(took[warm:]), median(plain[warm:]), target=CONTENTS_TARGET))
    size = sum(path.stat().st_size for path in files.values())
    report.add(
        Measure(
            f"{name}_bytes",
            median(through[warm:]) / MB,
            size / MB,
            unit="MB",
            target=BYTES_TARGET,
        )
    )


async def steps(report: Report, ours: SteppedService, count: int) -> list[float]:
    """Return the milliseconds of each of `count` steps of 1 % of the rows."""
    warm, turns = (1, 1) if report.quick else (3, 5)
    return [await ours.step(count // 100) for _ in range(warm + turns)][warm:]


async def run(report: Report, java: JavaHome) -> None:
    """Measure one service, then another one with one core on the same stores."""
    (count,) = sizes([200_000 if report.quick else ROWS])
    with tempfile.TemporaryDirectory() as place, serving() as bucket:
        folder = Path(place)
        theirs = bucket.variables | {"AWS_ACCESS_KEY_ID": OF_EXECUTORS}
        with running_cluster(folder / "cluster", java, theirs) as cluster:
            daemons = {each.process.pid for each in (cluster.master, *cluster.workers)}
            pids = daemons | {bucket.pid}
            files = written(folder, count)
            del files["products"]
            async with AsyncExitStack() as stack:
                ours = await opened(stack, settings(folder / "state", cluster, bucket, 2))
                await ours.fill(count)
                ours.view = KEPT
                measured = report, ours, files, bucket, pids
                await first_contents(*measured, "kept_contents", KEPT_SQL, 1)
                first = await ours.step(100)
                anew = [await ours.bench.query(KEPT_SQL, files) for _ in range(3)]
                report.add(Measure("kept_first_step", first, median(anew), target=ANEW_TARGET))
                await ours.client.drop(KEPT)
                ours.view = VIEW
                turns = 1 if report.quick else 5
                await first_contents(*measured, "first_contents", SQL, turns)
                two = await steps(report, ours, count)
                anew = [await ours.bench.query(SQL, files) for _ in range(3)]
                report.add(Measure("step_1_percent", median(two), median(anew), target=ANEW_TARGET))
                rows = ours.rows
            async with AsyncExitStack() as stack:
                ours = await opened(stack, settings(folder / "state", cluster, bucket, 1))
                ours.view, ours.rows = VIEW, rows
                one = await steps(report, ours, count)
                report.add(
                    Measure("step_two_workers", median(two), median(one), target=WORKERS_TARGET)
                )


if __name__ == "__main__":
    main("Views over a table in a bucket, against plain Spark.", run)
