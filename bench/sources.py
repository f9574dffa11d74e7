"""Four measures of sources through a whole service: from the upstream system to durable.

The service is a separate process (`sources_service`), and the client creates its sources. Both
sides of a measure are times; a target is the inverse of the required share of the peer's rate.

- ``sources_postgres_stream``: single-row inserts in transactions of ten, written while the service
  was paused (SIGSTOP), from when it resumes until all are durable. Peer: ``pg_recvlogical`` writes
  the same stream to a file with fsync, while the service is paused.
- ``sources_postgres_snapshot_…``: from creating a source until its table's snapshot is durable.
  Peer: ``COPY … TO`` a file.
- ``sources_files_…``: from creating a source of Parquet files until all rows are durable. Peer:
  Spark, in the service's session, reads these files and writes the same rows.
- ``sources_latency``: from the commit of a transaction in PostgreSQL (which updates ten rows of a
  table with a primary key) until a client has the change of a maintained aggregate, which is
  durable by then. Peer: a one-stage Spark query in the same session, as a lower bound. ``…_p95``,
  and ``…_table``, the same until the change of the table itself, have no target.

A small second table shows what is durable: the last transaction writes a mark into it, and a mark
is never durable before what was committed upstream before it. The rows are counted then.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psycopg

from actors import Client
from actors.runtime.kernel.clock import SystemClock
from actors.testing.postgres_server import NoPostgres, PostgresServer, postgres_server
from files_source import FILES, SCHEMA
from files_source import write as write_files
from measure import Measure, Report, median, percentile, size_name, sizes
from postgres_source import COLUMNS, ROW, receive
from sources_service import Floor, Served, Take, served

STREAM_TARGET = 2.0
SNAPSHOT_TARGET = 2.5
FILES_TARGET = 2.0
LATENCY_TARGET = 4.0
GROUPS = 1000
ACCOUNTS = 100_000
UPDATED = 10
VIEW = "SELECT branch, count(*) AS n, sum(balance) AS s FROM accounts GROUP BY branch"
DEADLINE_S = 200


class UpstreamDatabase:
    """The upstream database, and what is written there."""

    def __init__(self, server: PostgresServer, admin: Any) -> None:
        self.server = server
        self.admin = admin
        self._marks = 0

    def config(self) -> dict[str, Any]:
        """Return the configuration of a source of this database."""
        return {
            "kind": "postgres",
            "host": str(self.server.folder),
            "port": self.server.port,
            "user": "bench",
        }

    async def run(self, sql: str) -> Any:
        """Run a statement and return its single row, if it has one."""
        cursor = await self.admin.execute(sql)
        return await cursor.fetchone() if cursor.description else None

    async def wait_clean(self) -> None:
        """Wait until dropped sources have left nothing in the database."""
        with anyio.fail_after(DEADLINE_S):
            while (await self.run("SELECT count(*) FROM pg_replication_slots"))[0]:
                await anyio.sleep(0.05)

    async def mark(self, table: str) -> int:
        """Write the next mark, after everything written so far, and return it."""
        self._marks += 1
        await self.run(f"INSERT INTO {table} VALUES ({self._marks})")
        return self._marks


async def seen(address: str, marks: str, mark: int) -> int:
    """Wait until a mark is durable, and return the time from which it can be read."""
    with anyio.fail_after(DEADLINE_S):
        async with await Client.connect(address) as client:
            async for change in client.subscribe(marks):
                if change.table is not None and mark in change.table["n"].to_pylist():
                    return change.upper - 1
    raise AssertionError("a subscription ended")


async def count(address: str, table: str, at: int) -> int:
    """Return the number of rows of a table at a time."""
    async with await Client.connect(address) as client:
        sql = f"SELECT count(*) AS n FROM {table}"
        return sum([b["n"][0].as_py() async for b in client.query(sql, as_of=at)])


# -- the measures ------------------------------------------------------------------------------


async def stream(report: Report, service: Served, upstream: UpstreamDatabase) -> None:
    """Measure changes that are already in the log, until they are durable."""
    rows, turns = (20_000, 1) if report.quick else (400_000, 3)
    await upstream.run(f"CREATE TABLE changes ({COLUMNS})")
    await upstream.run("CREATE TABLE marks (n bigint PRIMARY KEY)")
    tables = {"public.changes": "changes", "public.marks": "marks"}
    async with await Client.connect(service.address) as client:
        await client.create_source("stream", upstream.config(), tables)
    await seen(service.address, "marks", await upstream.mark("marks"))
    (name,) = await upstream.run("SELECT pubname FROM pg_publication")
    here, there = [], []
    for turn in range(turns):
        service.pause()
        await upstream.run("SELECT pg_create_logical_replication_slot('peer', 'pgoutput')")
        await upstream.run(
            f"DO $$ BEGIN FOR k IN {turn * rows // 10} .. {(turn + 1) * rows // 10 - 1} LOOP"
            f" INSERT INTO changes SELECT {ROW} FROM generate_series(k * 10, k * 10 + 9) i;"
            " COMMIT; END LOOP; END $$"
        )
        mark = await upstream.mark("marks")
        (end,) = await upstream.run("SELECT pg_current_wal_lsn()::text")
        there.append(
            await SystemClock().run_blocking(lambda: receive(upstream.server, end, name))  # noqa: B023
        )
        await upstream.run("SELECT pg_drop_replication_slot('peer')")
        started = time.perf_counter()
        service.resume()
        at = await seen(service.address, "marks", mark)
        here.append(time.perf_counter() - started)
        assert await count(service.address, "changes", at) == (turn + 1) * rows
    async with await Client.connect(service.address) as client:
        await client.drop_source("stream")
    await upstream.wait_clean()
    add(report, "sources_postgres_stream", rows, here, there, STREAM_TARGET)


async def snapshot(report: Report, service: Served, upstream: UpstreamDatabase, rows: int) -> None:
    """Measure the snapshot of a table, until it is durable."""
    await upstream.run(f"CREATE TABLE contents ({COLUMNS})")
    await upstream.run(f"INSERT INTO contents SELECT {ROW} FROM generate_series(1, {rows}) i")
    await upstream.run("VACUUM (FREEZE, ANALYZE) contents")
    await upstream.run("CREATE TABLE filled (n bigint PRIMARY KEY)")
    mark = await upstream.mark("filled")
    here, there = [], []
    for turn in range(1 if report.quick else 3):
        file = upstream.server.folder / "copied"
        started = time.perf_counter()
        await upstream.run(f"COPY contents TO '{file}'")
        there.append(time.perf_counter() - started)
        file.unlink()
        name = f"snapshot{turn}"
        tables = {"public.contents": f"c{turn}", "public.filled": f"f{turn}"}
        started = time.perf_counter()
        async with await Client.connect(service.address) as client:
            await client.create_source(name, upstream.config(), tables)
            at = await seen(service.address, f"f{turn}", mark)
            here.append(time.perf_counter() - started)
            assert await count(service.address, f"c{turn}", at) == rows
            await client.drop_source(name)
        await upstream.wait_clean()
    add(report, f"sources_postgres_snapshot_{size_name(rows)}", rows, here, there, SNAPSHOT_TARGET)


async def files(report: Report, service: Served, place: Path, rows: int) -> None:
    """Measure Parquet files until their rows are durable, after a warm-up of each side."""
    folder = place / "parquet"
    await anyio.to_thread.run_sync(write_files, folder, "parquet", rows)
    paths = tuple(sorted(str(path) for path in folder.iterdir()))
    assert len(paths) == FILES
    here, there = [], []
    for turn in range(1 if report.quick else 4):
        there += [ms / 1000 for ms in await service.ask(Take(paths, SCHEMA))]
        name = f"files{turn}"
        config = {"kind": "files", "folder": str(folder), "format": "parquet"}
        columns = [{"name": each.name, "type": each.type} for each in SCHEMA.columns]
        started = time.perf_counter()
        async with await Client.connect(service.address) as client:
            await client.create_source(name, config | {"columns": columns})
            with anyio.fail_after(DEADLINE_S):
                while not await taken(client, name, rows):
                    await anyio.sleep(0.02)
            here.append(time.perf_counter() - started)
            await client.drop_source(name)
    cut = 0 if report.quick else 1
    name = f"sources_files_{size_name(rows)}"
    add(report, name, rows, here[cut:], there[cut:], FILES_TARGET)


async def taken(client: Client, name: str, rows: int) -> bool:
    """Return whether `rows` rows of a source are durable (reported every `statistics_ms`)."""
    (source,) = [each for each in await client.sources() if each.name == name]
    done = source.statistics.rows_inserted if source.statistics else 0
    assert done <= rows, f"{done} rows of {rows}"
    return done == rows


async def latency(report: Report, service: Served, upstream: UpstreamDatabase) -> None:
    """Measure a transaction until its changes of an aggregate are durable."""
    accounts = ACCOUNTS // 10 if report.quick else ACCOUNTS
    warm, counted = (5, 10) if report.quick else (150, 200)
    await upstream.run(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, branch bigint, balance numeric(12,2))"
    )
    await upstream.run(
        f"INSERT INTO accounts SELECT i, CASE i WHEN 0 THEN -1 ELSE i % {GROUPS} END, 0"
        f" FROM generate_series(0, {accounts - 1}) i"
    )
    async with await Client.connect(service.address) as client:
        await client.create_source("accounts", upstream.config(), {"public.accounts": "accounts"})
        await client.create_materialized_view("by_branch", VIEW)
    floor = (await service.ask(Floor(warm + counted)))[warm:]
    took: dict[str, list[float]] = {}
    for watched, wanted in (("accounts", counted // 4), ("by_branch", warm + counted)):
        async with following(service.address, watched) as last:
            took[watched] = [
                await one(upstream, last, accounts, number) for number in range(wanted)
            ]
    async with await Client.connect(service.address) as client:
        await client.drop("by_branch")
        await client.drop_source("accounts")
    await upstream.wait_clean()
    ours, tables = took["by_branch"][warm:], took["accounts"][counted // 8 :]
    peer = median(floor)
    report.add(Measure("sources_latency_p50", median(ours), peer, target=LATENCY_TARGET))
    report.add(Measure("sources_latency_p95", percentile(ours, 0.95), peer))
    report.add(Measure("sources_latency_table_p50", median(tables), peer))


class Last:
    """The last value seen of a followed object: the balance of account 0."""

    def __init__(self) -> None:
        self.value = 0
        self.at = 0.0
        self._changed = anyio.Event()

    def see(self, value: int) -> None:
        """Record a value as seen now."""
        self.value, self.at = value, time.perf_counter()
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self, value: int) -> float:
        """Wait for a value, and return when it was seen."""
        with anyio.fail_after(DEADLINE_S):
            while self.value < value:
                await self._changed.wait()
        return self.at


@asynccontextmanager
async def following(address: str, name: str) -> AsyncIterator[Last]:
    """Follow the table or the view with a separate connection."""
    last = Last()
    column = "s" if name == "by_branch" else "balance"

    async def follow(client: Client, started: anyio.Event) -> None:
        async for change in client.subscribe(name):
            if change.table is not None:
                rows = change.table.select(["branch", column, "__diff"]).to_pylist()
                found = [r[column] for r in rows if r["branch"] == -1 and r["__diff"] > 0]
                if found:
                    last.see(int(max(found)))
            if not change.partial:
                started.set()

    async with (
        await Client.connect(address) as client,
        anyio.create_task_group() as group,
    ):
        started = anyio.Event()
        group.start_soon(follow, client, started)
        await started.wait()
        yield last
        group.cancel_scope.cancel()


async def one(upstream: UpstreamDatabase, last: Last, accounts: int, number: int) -> float:
    """Return the milliseconds of one transaction, after a random pause."""
    dice = random.Random(number)
    await anyio.sleep(dice.random() * 0.05)
    value = last.value + 1
    ids = ", ".join(str(dice.randrange(1, accounts)) for _ in range(UPDATED - 1))
    await upstream.run(
        f"UPDATE accounts SET balance = CASE id WHEN 0 THEN {value} ELSE balance + 1 END"
        f" WHERE id IN (0, {ids})"
    )
    committed = time.perf_counter()
    return (await last.wait(value) - committed) * 1000


def add(
    report: Report, name: str, rows: int, here: list[float], there: list[float], target: float
) -> None:
    """Add a measure from both sides' seconds, and print the rates."""
    report.add(Measure(name, median(here) * 1000, median(there) * 1000, target=target))
    print(f"  {rows / median(here):,.0f} rows/s, peer {rows / median(there):,.0f} rows/s")


@asynccontextmanager
async def database(synchronous_commit: str) -> AsyncIterator[UpstreamDatabase]:
    """Run PostgreSQL, and yield it with a connection."""
    with postgres_server(
        wal_level="logical",
        max_wal_size="4GB",
        shared_buffers="512MB",
        synchronous_commit=synchronous_commit,
        wal_sender_timeout="0",
    ) as server:
        connect = psycopg.AsyncConnection.connect(server.conninfo(), autocommit=True)
        async with await connect as admin:
            yield UpstreamDatabase(server, admin)


async def run(report: Report) -> None:
    """Run all measures, or those named by the environment variable SOURCES (``latency,files``)."""
    chosen = os.environ.get("SOURCES", "latency,postgres,files").split(",")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        settings: dict[str, Any] = {
            "state_dir": str(place / "state"),
            "listen": "127.0.0.1:0",
            "source_dirs": folder,
            "statistics_ms": 50,
        }
        async with served(**settings) as service:
            if "latency" in chosen:
                async with database("on") as upstream:
                    await latency(report, service, upstream)
            if "postgres" in chosen:
                async with database("off") as upstream:
                    await stream(report, service, upstream)
                    for rows in sizes([50_000] if report.quick else [5_000_000]):
                        await snapshot(report, service, upstream, rows)
            if "files" in chosen:
                for rows in [100_000] if report.quick else [10_000_000]:
                    await files(report, service, place, rows)


if __name__ == "__main__":
    made = Report("Sources through a whole service, against PostgreSQL's tools and Spark.")
    try:
        anyio.run(run, made, backend_options={"use_uvloop": True})
    except NoPostgres as error:
        for name in ("postgres_stream", "postgres_snapshot", "latency"):
            made.add(Measure(f"sources_{name}", 0.0, 0.0, missing=str(error)))
    made.close()
