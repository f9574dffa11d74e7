"""A service whose shards are in a bucket, over a cluster that sees none of the service's disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from standalone_cluster import (  # type: ignore[import-not-found]
    Cluster,
    quick_java,
    running_cluster,
)

import s3_server  # type: ignore[import-not-found]
from actors import Client, Service, Settings
from actors.engine.spark.java import JavaHome
from actors.testing.check_views import for_short_lives

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROWS = 200_000
GROUPS = 1_000
BY_GROUP = "SELECT g, count(*) AS n, sum(v) AS v FROM t GROUP BY g"
IDS = "SELECT g, count(DISTINCT id) AS ids FROM t GROUP BY g"
"""A view that keeps each row beside it."""
BY_EXECUTOR = re.compile(r"-[0-9a-f]{32}\.parquet$")
"""Ends the key of what an executor wrote."""
EACH = "SELECT id, v * 2 AS w FROM t WHERE id % 2 = 0"


def hides_folders() -> bool:
    """Whether a process may have mounts of its own here."""
    try:
        return subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.S3]:
    with s3_server.serving() as served:
        yield served


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's folder, which the workers see empty."""
    if not hides_folders():
        pytest.skip("the workers' folders cannot be hidden: `unshare --mount` needs root")
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, java: JavaHome, s3: s3_server.S3, hidden: Path
) -> Iterator[Cluster]:
    """Workers with credentials of their own, and without this package."""
    bare = tmp_path_factory.mktemp("bare")
    (bare / "actors.py").write_text("raise ImportError('the executors have no such package')\n")
    variables = s3_server.variables(s3) | {"PYTHONPATH": str(bare)}
    with running_cluster(tmp_path_factory.mktemp("cluster"), java, variables, hidden) as made:
        yield made


@asynccontextmanager
async def far_service(
    cluster: Cluster, java: JavaHome, bucket: str, state: Path
) -> AsyncIterator[Client]:
    settings = Settings(
        state_dir=str(state),
        listen="127.0.0.1:0",
        blob_url=f"s3://{bucket}/x",
        spark_master=cluster.url,
        spark_driver_memory="512m",
        spark_conf={
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": quick_java(java),
        },
        engine_jobs_in_flight_max=2,
        engine_inline_bytes_max=500_000,
        engine_collected_bytes_max=64 * 1024,
        lookup_rows_max=5_000,
        prepared_slot_bytes_max=500_000,
    )
    async with (
        Service(for_short_lives(settings)) as service,
        await Client.in_process(service) as client,
    ):
        yield client


def rows(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "g": pa.array([n % GROUPS for n in numbers], pa.int64()),
            "v": pa.array([n * 7 % 1013 for n in numbers], pa.int64()),
        }
    )


def by_group(*tables: pa.Table) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for table in tables:
        for g, v in zip(table["g"].to_pylist(), table["v"].to_pylist(), strict=True):
            n, total = found.get(g, (0, 0))
            found[g] = (n + 1, total + v)
    return found


def each_of(*tables: pa.Table) -> dict[str, int]:
    rows = [row for table in tables for row in table.to_pylist() if row["id"] % 2 == 0]
    return {"n": len(rows), "w": sum(2 * row["v"] for row in rows)}


async def answer(client: Client, text: str) -> pa.Table:
    """All rows of a query."""
    return pa.Table.from_batches(
        [batch async for batch in client.query(text, deadline_ms=200_000, latest=True)]
    )


async def groups_in(client: Client) -> dict[int, tuple[int, int]]:
    table = await answer(client, "SELECT g, n, v FROM by_group WHERE g + 0 >= 0")
    columns = (table[name].to_pylist() for name in ("g", "n", "v"))
    return {g: (n, v) for g, n, v in zip(*columns, strict=True)}


async def ids_in(client: Client) -> int:
    (found,) = (await answer(client, "SELECT sum(ids) AS n FROM ids")).to_pylist()
    return int(found["n"])


async def test_a_view_over_a_far_bucket_is_right_and_survives_executors(
    cluster: Cluster,
    java: JavaHome,
    s3: s3_server.S3,
    hidden: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3_server.point_to(monkeypatch, s3)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)  # as a user who names none
    bucket = s3.new_bucket()
    async with far_service(cluster, java, bucket, hidden / "state") as client:
        await client.create_table("t", {"id": "bigint", "g": "bigint", "v": "bigint"})
        step = ROWS // 4
        given = [rows(start, step) for start in range(0, ROWS, step)]
        for table in given:
            await client.insert("t", table)
        await client.create_materialized_view("by_group", BY_GROUP)
        assert await groups_in(client) == by_group(*given)
        await client.create_materialized_view("each", EACH)
        found = await answer(client, "SELECT count(*) AS n, sum(w) AS w FROM each")
        assert found.to_pylist() == [each_of(*given)]
        # The executors have written its contents, each attempt under names of its own.
        assert any(BY_EXECUTOR.search(key) for key in s3.keys(bucket))
        await client.create_materialized_view("ids", IDS)
        assert await ids_in(client) == ROWS
        assert any(re.search(r"-hidden0/.*-[0-9a-f]{32}\.parquet$", key) for key in s3.keys(bucket))
        # A small step, a large one, which scans the shard, and one whose answer is large, too.
        before = set(s3.keys(bucket))
        for count in (10, 2_000, 30_000):
            given.append(rows(ROWS + 10 * count, count))
            await client.insert("t", given[-1])
            assert await groups_in(client) == by_group(*given)
            assert await ids_in(client) == len({i for t in given for i in t["id"].to_pylist()})
            found = await answer(client, "SELECT count(*) AS n, sum(w) AS w FROM each")
            assert found.to_pylist() == [each_of(*given)]
        written = {key for key in s3.keys(bucket) if BY_EXECUTOR.search(key)} - before
        assert len({key.rpartition("/")[0] for key in written}) >= 2  # of a view, and a state
        # The death of an executor, and then of a worker with all that it runs.
        assert kill_executor(cluster)
        given.append(rows(2 * ROWS, 100))
        await client.insert("t", given[-1])
        assert await groups_in(client) == by_group(*given)
        await anyio.to_thread.run_sync(cluster.workers[0].kill)
        await client.create_materialized_view("again", f"SELECT max(n) AS n FROM ({BY_GROUP})")
        most = max(n for n, _ in by_group(*given).values())
        assert (await answer(client, "SELECT n FROM again")).to_pylist() == [{"n": most}]
    assert not list((hidden / "state").rglob("*.parquet"))  # nothing went by the service's disk


def kill_executor(cluster: Cluster) -> bool:
    """Kills an executor's JVM, a child of the first worker; its worker starts another."""
    worker = cluster.workers[0].process.pid
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "status").read_text()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        parent = re.search(r"^PPid:\s*(\d+)$", status, re.M)
        ours = parent is not None and int(parent[1]) == worker
        if ours and b"CoarseGrainedExecutorBackend" in line:
            os.kill(int(entry.name), signal.SIGKILL)
            return True
    return False
