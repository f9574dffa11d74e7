"""Every metric of the table moves in a wired service: none is always zero."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.doors.client.client import Client
from actors.durable.persist.location import CompareAndSet
from actors.durable.persist.shard import shard_key
from actors.model.protocol.compute import CreateInstance, Hello
from actors.runtime.errors import PenstockError, StorageError, UnknownObject
from actors.runtime.kernel.loop_delays import watch_loop
from actors.runtime.measurement import Measurement, ValueHistogram
from actors.runtime.metric_table import LOOP_DELAY_SECONDS, METRICS
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.runtime.tracing.metrics import start
from actors.service import Service
from actors.testing.engine import EngineControls
from service_house import running_service  # type: ignore[import-not-found]

ELSEWHERE = ("Engine", "WAL")
"""Groups whose metrics have scenarios of their own: a real engine, and acceptors."""
Labels = tuple[str, ...]


class Watched:
    """The series that were seen, with the highest value of each."""

    def __init__(self) -> None:
        self.highest: dict[str, dict[Labels, float]] = defaultdict(dict)

    def note(self, measurements: Iterable[Measurement]) -> None:
        for metric, value, labels in measurements:
            number = sum(value.counts) if isinstance(value, ValueHistogram) else value
            series = self.highest[metric.name]
            series[labels] = max(number, series.get(labels, 0))

    def moved(self, name: str, *labels: str) -> float:
        """The highest value of the series that have these labels, among others."""
        found = self.highest.get(name, {})
        return max((found[each] for each in found if {*labels} <= {*each}), default=0)

    async def until(self, name: str, *labels: str) -> None:
        while not self.moved(name, *labels):
            await anyio.lowlevel.checkpoint()


def settings_of(tmp_path: Path) -> Settings:
    for folder in ("in", "out", "copies"):
        (tmp_path / folder).mkdir()
    return Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_tick_ms=50,
        statistics_ms=50,
        sink_commit_ms=50,
        hold_downgrade_ms=20,
        hydrations_max=1,
        retry_delay_ms_min=10,
        retry_delay_ms_max=50,
        sink_dir=str(tmp_path / "out"),
        source_dirs=str(tmp_path / "in"),
        copy_dir=str(tmp_path / "copies"),
    )


@asynccontextmanager
async def watching(
    settings: Settings, controls: EngineControls
) -> AsyncIterator[tuple[Service, Client, Watched]]:
    """A service whose metrics are noted at each turn of the loop."""
    with start() as metrics:
        async with running_service(settings, controls) as (service, client):
            metrics.watch(service.measures)
            system, watched = service._system, Watched()
            assert system is not None

            async def watch() -> None:
                for turn in itertools.count():
                    watched.note(system.measures())
                    # The whole page, with the account of memory, takes some ms.
                    if turn % 100 == 0:
                        watched.note(metrics.measurements())
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                group.start_soon(watch_loop, lambda late: measure(LOOP_DELAY_SECONDS, late))
                yield service, client, watched
                group.cancel_scope.cancel()


async def tables_and_views(client: Client, watched: Watched, controls: EngineControls) -> None:
    """Writes, steps of all kinds, reads, queries, errors of statements."""
    await client.create_table("t", {"id": "bigint", "k": "bigint"}, ["id"])
    await client.create_table("names", {"k": "bigint", "name": "string"}, ["k"])
    await client.insert("names", [{"k": 1, "name": "one"}])
    joined = "SELECT t.id, names.name FROM t JOIN names ON t.k = names.k"
    await client.create_materialized_view("joined", joined)
    await client.create_materialized_view(
        "full", "SELECT k, count(*) AS n FROM t GROUP BY k", refresh_policy="full"
    )
    await client.create_index("by_k", "t", ["k"])
    for number in range(4):
        time = await client.insert("t", [{"id": number, "k": number % 2}])
        for view in ("joined", "full"):
            await client.wait_for(view, time)
    with pytest.raises(UnknownObject):
        await client.peek("nowhere")
    assert [batch async for batch in client.query("SELECT count(*) AS n FROM t")]


async def failing_view(client: Client, watched: Watched, controls: EngineControls) -> None:
    """A view that fails three times in the same way is in error, until its data change."""
    for _ in range(3):
        controls.fail_next("Step", PenstockError("it was made to fail"))
        controls.fail_next("Difference", PenstockError("it was made to fail"))
    await client.insert("t", [{"id": 100, "k": 1}])
    await watched.until("penstock.object.stalled")
    await watched.until("penstock.object.retries")
    await watched.until("penstock.step.repeated_failures")


async def connectors(tmp_path: Path, client: Client, watched: Watched) -> None:
    """A source and a sink that work, fail, and work again."""
    folder, lake = tmp_path / "in" / "files", tmp_path / "out" / "lake"
    folder.mkdir()
    numbers = pa.table({"a": pa.array(range(50_000), pa.int64())})
    for number in range(8):
        pq.write_table(numbers, folder / f"{number}.parquet")
    config = {"kind": "files", "folder": str(folder), "format": "parquet", "poll_ms": 20}
    # One file at a time, so that it is seen behind the others.
    config |= {"columns": {"a": "bigint"}, "batch_bytes_max": 1}
    await client.create_source("files", config)
    await client.create_index("by_a", "files", ["a"])
    await client.create_source("churn", {"kind": "churn", "keys": 50, "rate": 2_000, "seed": 5})
    await client.create_sink("lake", "t", "delta", {"folder": str(lake)})
    for direction in ("source", "sink"):
        for name in ("lag", "rows"):
            await watched.until(f"penstock.{direction}.{name}")
    await watched.until("penstock.source.rows", "churn", "delete")
    await watched.until("penstock.source.backlog")
    folder.rename(tmp_path / "in" / "gone")
    await watched.until("penstock.source.errors", "files")
    await watched.until("penstock.source.restarts", "files")
    (tmp_path / "in" / "gone").rename(folder)
    shutil.move(lake, tmp_path / "out" / "gone")
    lake.write_text("not a folder")
    await client.insert("t", [{"id": 200, "k": 0}])
    await watched.until("penstock.sink.errors", "lake")
    await watched.until("penstock.sink.restarts", "lake")
    lake.unlink()
    shutil.move(tmp_path / "out" / "gone", lake)


async def displaced(service: Service, client: Client) -> None:
    """Another client takes both halves of the replica; then the controller comes back."""

    async def connections() -> int:
        (replica,) = (await client.replicas()).replicas
        return replica.connections if replica.state == "connected" else 0

    cluster: Any = service._clusters
    before = await connections()
    compute, storage = await cluster.connect(), await cluster.connect("storage")
    for opened in (compute, storage):
        await opened.send(Hello(f"stranger-{before}-{opened.half}"))
    await compute.send(CreateInstance(service.settings.workers))
    while await connections() <= before:
        await anyio.lowlevel.checkpoint()
    for opened in (compute, storage):
        await opened.close()


async def troubled_stores(service: Service, client: Client, watched: Watched) -> None:
    """A document that somebody else has changed, and a folder of blobs that is gone."""
    persist: Any = service._persist
    [shard] = (await client.peek("penstock.shards", where=[("object", "=", "t")])).column("shard")
    key = shard_key(shard.as_py())
    while not watched.moved("penstock.store.retries", "conflict"):
        head = await persist.consensus.head(key)
        await persist.consensus.compare_and_set([CompareAndSet(key, head.seqno, head.data)])
        await client.insert("t", [{"id": 300 + head.seqno, "k": 0}])
    blobs = Path(service.settings.state_dir) / "blob"
    blobs.rename(blobs.with_name("gone"))
    with pytest.raises(StorageError):
        await persist.probe_blobs()
    blobs.with_name("gone").rename(blobs)
    await watched.until("penstock.store.errors", "blobs")


async def test_every_metric_moves(tmp_path: Path) -> None:
    controls = EngineControls()
    async with watching(settings_of(tmp_path), controls) as (service, client, watched):
        await tables_and_views(client, watched, controls)
        async with await Client.connect(service.address) as reader:
            changes = aiter(reader.subscribe("t"))
            await anext(changes)
            await connectors(tmp_path, client, watched)
            # A response is dropped if it meets its client's end on the way.
            while not watched.moved("penstock.adapter.responses", "drop"):
                await displaced(service, client)
            await watched.until("penstock.replicas", "disconnected")
            for half in ("compute", "storage"):
                await watched.until("penstock.reconciliation.objects", half, "kept")
            await watched.until("penstock.reconciliation.replaced", "subscribe")
        await client.copy_to("t", str(tmp_path / "copies" / "t"), format="csv")
        await troubled_stores(service, client, watched)
        await failing_view(client, watched, controls)
        wanted = [metric.name for metric in METRICS if metric.group not in ELSEWHERE]
        still = [name for name in wanted if not watched.moved(name)]
        assert still == []
        known = {metric.name: metric for metric in METRICS}
        for name, series in watched.highest.items():
            assert name in known
            for labels in series:
                assert len(labels) == len(known[name].labels), name
                assert all(isinstance(label, str) for label in labels), name
