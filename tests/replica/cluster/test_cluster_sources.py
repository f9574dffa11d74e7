"""A cluster with the real actors below it, over shards in memory: indexes and subscribes."""

from __future__ import annotations

import asyncio
import graphlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.engine.views.compile import compile_view
from actors.model.plan.updates import from_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekResponse,
    ScheduleDataflow,
    ShardImport,
    ShardTarget,
    SubscribeResponse,
    ViewExport,
)
from actors.replica.cluster import ClusterClient, WorkerCluster
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.maintain import EngineCaller
from cluster_house import (  # type: ignore[import-not-found]
    SCHEMA,
    SOURCE,
    index,
    rows_of,
    subscribe,
    updates,
)


class World:
    def __init__(
        self,
        system: ActorSystem,
        cluster: WorkerCluster,
        persist: PersistClient,
        executor: ActorAddress[Any],
        controls: EngineControls,
        workers: int,
    ) -> None:
        self.system = system
        self.executor = executor
        self.controls = controls
        self.cluster = cluster
        self.persist = persist
        self.workers = workers
        self.upper = 0

    async def append(self, upper: int, *rows: tuple[int, str, int, int]) -> None:
        parts = await self.persist.write_parts("s1", updates(*rows)) if rows else ()
        appended = await self.persist.append([ShardAppend("s1", self.upper, upper, tuple(parts))])
        assert isinstance(appended, AppendCommitted)
        self.upper = upper

    async def joined(self, nonce: str, *commands: Command) -> ClusterClient:
        client = await self.cluster.connect()
        start = (Hello(nonce), CreateInstance(self.workers))
        for command in (*start, *commands, InitializationComplete(), AllowWrites()):
            await client.send(command)
        return client


@asynccontextmanager
async def world(tmp_path: Path, workers: int) -> AsyncIterator[World]:
    async with ActorSystem(seed=1) as system:
        settings = Settings(workers=workers, maintenance_ms=5)
        persist = await PersistClient.in_memory(settings, system.clock)
        await persist.create_shards([NewShard("s1", SCHEMA, holds={"test": 0})])
        controls = EngineControls()
        executor = system.spawn(lambda: InMemoryExecutor(controls), "executor")
        cluster = await WorkerCluster.start(system, settings, persist, executor, tmp_path)
        with anyio.fail_after(200):
            yield World(system, cluster, persist, executor, controls, workers)
        await system.stop()
        await persist.close()


async def next_of(client: ClusterClient, kind: Any) -> Any:
    while not isinstance(response := await client.receive(), kind):
        pass
    return response


async def reached(client: ClusterClient, frontier: int) -> None:
    while (await next_of(client, Frontiers)).write != frontier:
        pass


INDEX = (CreateDataflow(index()), ScheduleDataflow("i1"))


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_an_index_follows_its_shard_and_survives_a_reconnection(
    tmp_path: Path, workers: int
) -> None:
    async with world(tmp_path, workers) as w:
        await w.append(6, *[(k, "a", 5, 1) for k in range(50)])
        client = await w.joined("a", *INDEX)
        await reached(client, 6)
        await w.append(9, (7, "a", 7, -1), (7, "b", 7, 1))
        await reached(client, 9)
        for target in (IndexTarget("i1"), ShardTarget("u1", SOURCE)):
            await client.send(Peek(f"{target.id}5", target, 5))
            assert rows_of(await next_of(client, PeekResponse)) == sorted(
                ((k, "a", 1) for k in range(50)), key=str
            )
            await client.send(Peek(f"{target.id}8", target, 8))
            assert (7, "b", 1) in rows_of(await next_of(client, PeekResponse))
        again = await w.joined("b", *INDEX)
        await reached(again, 9)
        await w.append(12, (7, "b", 11, -1))
        await reached(again, 12)
        await again.send(Peek("p", IndexTarget("i1"), 11))
        assert len(rows_of(await next_of(again, PeekResponse))) == 49
        await again.send(AllowCompaction("i1", EMPTY))
        while (await next_of(again, Frontiers)).write != EMPTY:
            pass
        assert not [path for path in w.system.cells if "listen" in path or "fetch" in path]
        await again.close()


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_view_is_maintained_and_a_reconnection_runs_no_step(
    tmp_path: Path, workers: int
) -> None:
    async with world(tmp_path, workers) as w:
        engine = EngineCaller(w.executor, "analysis")
        sql = "SELECT v, count(*) AS n FROM t GROUP BY v"
        plan = await compile_view(sql, {"t": SCHEMA}, engine.analyze(), ())
        new = [NewShard("out", plan.output, holds={"test": 0})]
        hidden = tuple(f"hid{k}" for k in range(len(plan.hidden)))
        new += [NewShard(h, s.schema) for h, s in zip(hidden, plan.hidden, strict=True)]
        await w.persist.create_shards(new)
        await w.append(6, (1, "a", 5, 1), (2, "b", 5, 1))
        flow = DataflowDescription("u2", "v", (SOURCE,), ViewExport(plan, "out", hidden), 5)
        history = (CreateDataflow(flow), ScheduleDataflow("u2"))
        client = await w.joined("a", *history)
        await reached(client, 6)
        await w.append(9, (3, "a", 7, 1), (2, "b", 8, -1))
        await reached(client, 9)
        target = ShardTarget("u2", ShardImport("out", plan.output))
        expected = {5: [("a", 1, 1), ("b", 1, 1)], 7: [("a", 2, 1), ("b", 1, 1)], 8: [("a", 2, 1)]}
        jobs = len(w.controls.jobs)
        again = await w.joined("b", *history)
        await reached(again, 9)
        for time, rows in expected.items():
            await again.send(Peek(f"p{time}", target, time))
            assert rows_of(await next_of(again, PeekResponse)) == rows
        assert len(w.controls.jobs) == jobs
        await w.append(12, (4, "c", 11, 1))
        await reached(again, 12)
        assert len(w.controls.jobs) > jobs
        await again.close()


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_subscribe_streams_every_change_once(tmp_path: Path, workers: int) -> None:
    async with world(tmp_path, workers) as w:
        await w.append(6, (1, "a", 5, 1))
        flow = subscribe(as_of=5)
        client = await w.joined("a", CreateDataflow(flow), ScheduleDataflow("t1"))
        seen: list[Any] = []
        upper = 0

        async def until(frontier: int) -> None:
            nonlocal upper
            while upper < frontier:
                batch = (await next_of(client, SubscribeResponse)).batch
                assert batch.lower == upper or not seen
                upper = batch.upper
                if batch.arrow is not None:
                    seen.extend(tuple(row.values()) for row in from_ipc(batch.arrow).to_pylist())

        await until(6)
        await w.append(9, (2, "b", 7, 1))
        await until(9)
        await w.append(20, (1, "a", 12, -1))
        await until(20)
        assert seen == [(1, "a", 5, 1), (2, "b", 7, 1), (1, "a", 12, -1)]
        await client.close()


async def test_a_read_of_a_shard_waits_and_is_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        client = await w.joined("a")
        target = ShardTarget("u1", SOURCE)
        await client.send(Peek("p1", target, 5))
        await client.send(Peek("p2", target, 50))
        await w.append(6, (1, "a", 5, 1))
        assert rows_of(await client.receive()) == [(1, "a", 1)]
        await client.send(CancelPeek("p2"))
        assert await client.receive() == PeekResponse("p2", PeekCanceled())
        await client.send(Peek("p3", target, 99))
        await client.close()  # takes its read with it
        statistics = await w.cluster.statistics()
        assert [worker.peeks for worker in statistics.workers] == [0, 0]


def _kind(path: str) -> str:
    """An actor's kind: the last part of its path without numbers."""
    return path.rsplit("/", 1)[-1].split("-")[0]


async def test_sends_that_wait_form_an_acyclic_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws who waits for whom while everything happens, and looks for a cycle."""
    edges: set[tuple[str, str]] = set()
    send = ActorAddress.send

    async def drawn(self: ActorAddress[Any], message: Any) -> None:
        task = asyncio.current_task()
        sender = task.get_name() if task is not None else ""
        # An actor's own task bears its path; an effect's does not, and blocks no actor.
        if sender.startswith("/"):
            first, worker0 = _kind(sender), "worker 0"
            source = worker0 if sender == "/worker-0" else first
            target = worker0 if self.path == "/worker-0" else _kind(self.path)
            edges.add((source, target))
        await send(self, message)

    monkeypatch.setattr(ActorAddress, "send", drawn)
    async with world(tmp_path, 3) as w:
        await w.append(6, (1, "a", 5, 1))
        flow = subscribe(as_of=5)
        client = await w.joined("a", *INDEX, CreateDataflow(flow), ScheduleDataflow("t1"))
        await reached(client, 6)
        await w.append(9, (2, "b", 7, 1))
        await reached(client, 9)
        again = await w.joined("b", *INDEX)
        await again.send(Peek("p", IndexTarget("i1"), 8))
        await next_of(again, PeekResponse)
        await again.send(AllowCompaction("i1", EMPTY))
        while (await next_of(again, Frontiers)).write != EMPTY:
            pass
        await again.close()
    known = {
        ("adapter", "worker 0"),
        ("adapter", "worker"),
        ("worker 0", "worker"),
        ("worker 0", "dataflow"),
        ("dataflow", "listen"),
        ("dataflow", "fetch"),
    }
    assert edges == known
    order = graphlib.TopologicalSorter[str]()
    for source, target in edges:
        order.add(source, target)
    assert list(order.static_order())  # raises CycleError
