"""One view's changes to a hundred subscribers over TCP.

The service is a separate process, on the in-memory engine. All clients are in this process, which
decodes every change to Arrow. A writer inserts rows, each write as soon as the previous one is
acknowledged; all of them are in the view. ``fan_out_R_100``: milliseconds from the first write of R
rows until every client has every update. Peer: the time that this many updates (over all clients)
may take at `UPDATES_A_SECOND`. ``fan_out_R_beside_1``: the same, against the time with one client.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy
import pyarrow as pa

from actors import Client, Service, Settings
from actors.testing.engine import InMemoryExecutor
from measure import Measure, Report, median

CLIENTS = 100
UPDATES_A_SECOND = 200_000
ROWS = (100, 1_000)
"""Rows per write."""
WRITES = 100
TURNS = 3
VIEW = "SELECT id, k, v * 2 AS w FROM events WHERE v >= 0"


async def serve(place: Path) -> None:
    """Serve until the parent exits."""
    settings = Settings(
        state_dir=str(place / "service"), listen="127.0.0.1:0", connections_max=2 * CLIENTS
    )
    service = Service(settings, engine=lambda system, *_: system.spawn(InMemoryExecutor, "engine"))
    async with service:
        print(service.address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Yield the address of a service in a separate process."""
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, __file__, "--serve", place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


class Subscriber:
    """Counts the updates that it receives."""

    def __init__(self) -> None:
        self.updates = 0
        self.upper = 0
        self._news = anyio.Event()

    async def run(self, client: Client) -> None:
        """Subscribe until cancelled."""
        async for change in client.subscribe("shown"):
            self.updates += 0 if change.table is None else change.table.num_rows
            self.upper = change.upper
            self._news.set()
            self._news = anyio.Event()

    async def beyond(self, written: int) -> None:
        """Wait until all changes up to a time have arrived."""
        while self.upper <= written:
            await self._news.wait()


class Source:
    """Writes new rows."""

    def __init__(self, writer: Client) -> None:
        self._writer = writer
        self._rows = 0

    async def write(self, count: int) -> int:
        """Insert `count` new rows and return the time of the write."""
        ids = numpy.arange(self._rows, self._rows + count, dtype=numpy.int64)
        self._rows += count
        table = pa.table({"id": ids, "k": ids % 1000, "v": ids % 90})
        return await self._writer.insert("events", table)


async def turn(source: Source, clients: list[Client], rows: int, writes: int) -> float:
    """Return the milliseconds until all these clients have all updates."""
    subscribers = [Subscriber() for _ in clients]
    async with anyio.create_task_group() as group:
        for subscriber, client in zip(subscribers, clients, strict=True):
            group.start_soon(subscriber.run, client)
        written = await source.write(rows)
        for subscriber in subscribers:
            await subscriber.beyond(written)
        before = [subscriber.updates for subscriber in subscribers]
        started = time.perf_counter()
        for _ in range(writes):
            written = await source.write(rows)
        for subscriber in subscribers:
            await subscriber.beyond(written)
        took = (time.perf_counter() - started) * 1000
        heard = [now.updates - then for now, then in zip(subscribers, before, strict=True)]
        assert heard == [rows * writes] * len(clients), heard
        group.cancel_scope.cancel()
    return took


async def run(report: Report) -> None:
    """Measure each number of rows, with a hundred clients and with one."""
    count, writes = (10, 10) if report.quick else (CLIENTS, WRITES)
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(served())
        clients = [
            await stack.enter_async_context(await Client.connect(address)) for _ in range(count)
        ]
        writer = await stack.enter_async_context(await Client.connect(address))
        columns = {"id": "bigint", "k": "bigint", "v": "bigint"}
        await writer.create_table("events", columns)
        await writer.create_materialized_view("shown", VIEW)
        source = Source(writer)
        await turn(source, clients[:1], ROWS[0], writes)  # warm-up
        for rows in ROWS:
            took, alone = [], []
            for _ in range(1 if report.quick else TURNS):
                took.append(await turn(source, clients, rows, writes))
                alone.append(await turn(source, clients[:1], rows, writes))
            allowed = count * rows * writes / UPDATES_A_SECOND * 1000
            name = f"fan_out_{rows}"
            report.add(Measure(f"{name}_{count}", median(took), allowed, target=1.0))
            report.add(Measure(f"{name}_beside_1", median(took), median(alone)))


if __name__ == "__main__":
    uvloop = {"use_uvloop": True}
    if sys.argv[1:2] == ["--serve"]:
        anyio.run(serve, Path(sys.argv[2]), backend_options=uvloop)
    else:
        made = Report("One view's changes to a hundred subscribers.")
        anyio.run(run, made, backend_options=uvloop)
        made.close()
