"""Peeks of an index of 1M rows: by key over TCP, and in full.

``peek_key_*``: one key, from the request to the rows as Arrow, over the replica protocol
(``replica``), and with the public client through the controller (``client``). Peer: PostgreSQL's
prepared point select on its primary key, with asyncpg, over the same loopback interface. ``_16``:
sixteen clients at once, as milliseconds per peek. A replica serves one connection, so over the
replica protocol these are sixteen peeks in flight. Both servers are separate processes.

``scan_*``: all rows, from the arrangement to Arrow streams in memory, in pieces as a worker passes
them to the stash. Peer: pyarrow's copy of the same table, the fastest of: `take` of every row,
writing it as a stream, copying its buffers.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import numpy
import pyarrow as pa

from actors import Client, Service, Settings
from actors.doors.client.rows import encode_keys
from actors.durable.arrangement import Arrangement
from actors.durable.persist import NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc, with_time
from actors.model.protocol.compute import (
    AllowWrites,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardImport,
)
from actors.replica.cluster import WireClient, WorkerCluster, connect
from actors.replica.compute.peeks import index_answer
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.testing.engine import InMemoryExecutor
from measure import Measure, Report, median, percentile, size_name
from postgres_peer import NoPostgres, postgres

SCHEMA = TableSchema(
    (
        TableColumn("id", "bigint", nullable=False),
        TableColumn("product", "bigint"),
        TableColumn("region", "string"),
        TableColumn("amount", "bigint"),
    )
)
CLIENTS = 16
CHUNK = 200_000
KEY_TARGET = 4.0
CLIENTS_TARGET = 1 / 0.15
SCAN_TARGET = 2.0
SOURCE = ShardImport("s1", SCHEMA)
INDEX = DataflowDescription("i1", "by_id", (SOURCE,), IndexExport(("id",), SCHEMA), 1)


def rows(start: int, count: int) -> pa.Table:
    """Return rows `start` to ``start + count - 1``."""
    ids = numpy.arange(start, start + count, dtype=numpy.int64)
    regions = pa.DictionaryArray.from_arrays(
        pa.array(ids % 4, pa.int32()), pa.array(["north", "east", "south", "west"])
    )
    columns = [ids, ids * 7919 % 10_000, regions.cast(pa.string()), ids % 997]
    return pa.table(columns, schema=SCHEMA.arrow())


# -- the service, in a separate process ----------------------------------------------------------


async def serve(count: int, place: Path) -> None:
    """Serve a cluster with the index (first port) and a whole service with it (second)."""
    settings = Settings(state_dir=str(place / "state"), listen="127.0.0.1:0", maintenance_ms=50)
    service = Service(settings, engine=lambda system, *_: system.spawn(InMemoryExecutor, "engine"))
    async with ActorSystem() as system, service:
        persist = await PersistClient.in_memory(settings, SystemClock())
        await persist.create_shards([NewShard("s1", SCHEMA)])
        parts = await persist.write_parts("s1", with_time(rows(0, count), 1, 1))
        await persist.append([ShardAppend("s1", 0, 10, parts)])
        executor = system.spawn(InMemoryExecutor, "executor")
        cluster = await WorkerCluster.start(system, settings, persist, executor, place / "cluster")
        listener = await cluster.listen("127.0.0.1:0")
        print(listener.address.port, service.address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)  # until the parent exits
        await system.stop()


@contextlib.asynccontextmanager
async def served(count: int) -> AsyncIterator[tuple[int, str]]:
    """Yield the port of the cluster and the address of the service."""
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, __file__, "--serve", str(count), place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port, address = process.stdout.readline().split()
            yield int(port), address
        finally:
            process.stdin.close()
            process.wait(30)


class Replica:
    """A client of the replica protocol. Sends peeks by uuid and passes each response to its
    caller."""

    def __init__(self, client: WireClient) -> None:
        self._client = client
        self._waiting: dict[str, tuple[anyio.Event, list[Any]]] = {}
        self._count = 0

    async def start(self, workers: int) -> None:
        """Create the index and wait until it can be read."""
        start: list[Command] = [Hello("bench"), CreateInstance(workers)]
        index: list[Command] = [CreateDataflow(INDEX), ScheduleDataflow("i1")]
        commands = [*start, *index, InitializationComplete(), AllowWrites()]
        for command in commands:
            await self._client.send(command)
        while True:
            response = await self._client.receive()
            if isinstance(response, Frontiers) and (response.write or 0) > 1:
                return

    async def read(self) -> None:
        """Receive responses forever."""
        while True:
            response = await self._client.receive()
            if isinstance(response, PeekResponse):
                event, answer = self._waiting.pop(response.uuid)
                answer.append(response.result)
                event.set()

    async def peek(self, key: int) -> None:
        """Return one row by key."""
        self._count += 1
        uuid, event = str(self._count), anyio.Event()
        answer: list[Any] = []
        self._waiting[uuid] = (event, answer)
        keys, _ = encode_keys("i1", {"id": key})
        await self._client.send(Peek(uuid, IndexTarget("i1"), 9, ("id",), keys))
        await event.wait()
        (result,) = answer
        assert isinstance(result, PeekRows), result
        assert from_ipc(result.arrow).num_rows == 1


# -- measuring -----------------------------------------------------------------------------------


Asks = Sequence[Callable[[int], Awaitable[Any]]]


async def one_by_one(asks: Asks, count: int, seconds: float) -> list[float]:
    """Return the milliseconds of each request by one client."""
    random, took = Random(1), []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        key = random.randrange(count)
        started = time.perf_counter()
        await asks[0](key)
        took.append((time.perf_counter() - started) * 1000)
    return took[len(took) // 10 :]  # warm-up


async def together(asks: Asks, count: int, seconds: float) -> float:
    """Return the milliseconds per request with all clients at once."""
    done = 0
    ends = time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal done
        random = Random(number)
        while time.perf_counter() < ends:
            await asks[number](random.randrange(count))
            done += 1

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(CLIENTS):
            group.start_soon(client, number)
    return (time.perf_counter() - started) * 1000 / done


async def measured(asks: Asks, count: int, seconds: float) -> tuple[float, float, float]:
    """Return p50 and p99 of one client, and milliseconds per request of all together."""
    alone = await one_by_one(asks, count, seconds)
    return median(alone), percentile(alone, 0.99), await together(asks, count, seconds)


async def peer(count: int, seconds: float) -> tuple[float, float, float]:
    """Measure PostgreSQL. Raises `NoPostgres`."""
    try:
        asyncpg: Any = importlib.import_module("asyncpg")
    except ImportError:
        raise NoPostgres("asyncpg is not installed (requirements/bench.txt)") from None
    with postgres() as port:
        connections = [
            await asyncpg.connect(host="127.0.0.1", port=port, user="bench", database="postgres")
            for _ in range(CLIENTS)
        ]
        first = connections[0]
        await first.execute(
            "CREATE TABLE sales (id bigint PRIMARY KEY, product bigint, region text, amount bigint)"
        )
        for start in range(0, count, CHUNK):
            columns = [c.to_pylist() for c in rows(start, min(CHUNK, count - start)).columns]
            records = zip(*columns, strict=True)
            await first.copy_records_to_table("sales", records=records)
        await first.execute("ANALYZE sales")
        statements = [
            await connection.prepare("SELECT * FROM sales WHERE id = $1")
            for connection in connections
        ]
        found = await measured([one.fetch for one in statements], count, seconds)
        for connection in connections:
            await connection.close()
        return found


async def by_replica(port: int, count: int, seconds: float) -> tuple[float, float, float]:
    """Measure ours over the replica protocol."""
    settings = Settings()
    client = await connect(f"127.0.0.1:{port}", settings)
    replica = Replica(client)
    await replica.start(settings.workers)
    async with anyio.create_task_group() as group:
        group.start_soon(replica.read)
        found = await measured([replica.peek] * CLIENTS, count, seconds)
        group.cancel_scope.cancel()
    await client.close()
    return found


async def by_client(address: str, count: int, seconds: float) -> tuple[float, float, float]:
    """Measure ours with the public client."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await Client.connect(address)) for _ in range(CLIENTS)
        ]
        first = clients[0]
        await first.create_table("sales", SCHEMA)
        for start in range(0, count, CHUNK):
            written = await first.insert("sales", rows(start, min(CHUNK, count - start)))
        await first.create_index("by_id", "sales", ["id"])
        written = await first.write({})
        await first.wait_for("by_id", written)

        def ask(client: Client) -> Callable[[int], Awaitable[Any]]:
            return lambda key: client.peek("sales", written, {"id": key})

        asks = [ask(client) for client in clients]
        found = await asks[0](7)
        assert found.num_rows == 1, found
        return await measured(asks, count, seconds)


def add_keys(report: Report, name: str, ours: Sequence[float], peer: Sequence[float] | str) -> None:
    """Add the three measures of one way."""
    names = (f"peek_key_{name}_p50", f"peek_key_{name}_p99", f"peek_key_{name}_{CLIENTS}")
    targets = (KEY_TARGET, None, CLIENTS_TARGET)
    for index, (measure, target) in enumerate(zip(names, targets, strict=True)):
        if isinstance(peer, str):
            report.add(Measure(measure, ours[index], 0.0, target=target, missing=peer))
        else:
            report.add(Measure(measure, ours[index], peer[index], target=target))


async def keys(report: Report, count: int) -> None:
    """Measure peeks by key."""
    seconds = 0.5 if report.quick else 5.0
    against: tuple[float, float, float] | str
    try:
        against = await peer(count, seconds)
    except NoPostgres as error:
        against = str(error)
    async with served(count) as (port, address):
        add_keys(report, "replica", await by_replica(port, count, seconds), against)
        add_keys(report, "client", await by_client(address, count, seconds), against)


# -- in full -------------------------------------------------------------------------------------


def best(run: Callable[[], Any], turns: int = 9) -> float:
    """Return the median in ms, after two runs that do not count."""
    took = []
    for _ in range(turns + 2):
        started = time.perf_counter()
        run()
        took.append((time.perf_counter() - started) * 1000)
    return median(took[2:])


def copied_buffers(table: pa.Table) -> list[bytes]:
    """Return a copy of every buffer of the table."""
    return [
        buffer.to_pybytes()
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None
    ]


def scans(report: Report, count: int) -> None:
    """Measure reads of the whole index, in each of its possible forms."""
    name = size_name(count)
    table = with_time(rows(0, count), 1, 1).drop_columns(["__time"]).combine_chunks()
    everything = pa.array(numpy.arange(count))
    copy = min(
        best(lambda: table.take(everything)),
        best(lambda: to_ipc(table)),
        best(lambda: copied_buffers(table)),
    )
    changes, piece = max(1, count // 1000), Settings().inline_bytes_max
    for shape in ("one_run", "changed", "by_region"):
        key = ("region",) if shape == "by_region" else ("id",)
        with tempfile.TemporaryDirectory() as place:
            arrangement = Arrangement(Path(place), SCHEMA, key)
            # In the form that an index's dataflow installs.
            arrangement.insert(with_time(rows(0, count), 1, 1), 2, consolidated=True)
            if shape == "changed":
                for number in range(2, 6):
                    some = rows(number * changes, changes)
                    arrangement.insert(with_time(some, number, -1), number + 1)
                arrangement.allow_compaction(1)
                arrangement.maintain()
            before = arrangement.upper
            peek = Peek("p", IndexTarget("i1"), int(before) - 1)
            took = best(lambda: deque(index_answer(arrangement, peek, piece), 0))  # noqa: B023
            report.add(Measure(f"scan_{name}_{shape}", took, copy, target=SCAN_TARGET))
            arrangement.close()


async def run(report: Report) -> None:
    """Measure peeks by key, then scans."""
    count = 20_000 if report.quick else 1_000_000
    scans(report, count)
    await keys(report, count)


if __name__ == "__main__":
    uvloop = {"use_uvloop": True}
    if sys.argv[1:2] == ["--serve"]:
        anyio.run(serve, int(sys.argv[2]), Path(sys.argv[3]), backend_options=uvloop)
    else:
        made = Report("Peeks of an index, against PostgreSQL and pyarrow.")
        anyio.run(run, made, backend_options=uvloop)
        made.close()
