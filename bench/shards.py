"""Durable shards on one disk: appends, reads and wake-ups, against the underlying libraries.

Ours is a `PersistClient` alone, without the service, over files and SQLite in a state directory.

- ``append_small``: one row appended inline, until it is durable. Peer: a bare commit of one row in
  SQLite with the same log and the same fsync, on the same disk. Both are measured once their logs
  have reached their full length, because a growing log takes twice the time.
- ``row_by_thread``: the minimum for such a row (serialize it and await its commit in a thread; a
  commit in the event loop would block on a hanging disk), against the same peer.
- ``part_by_thread``: the minimum for a shard (a described part with a checksum from the row, and
  from that the new seqno and upper; without state, rules or checks), against the same peer.
- ``append_1M``: a million rows. Peer: PyArrow writing the same Parquet, and an fsync.
- ``snapshot_10M``: ten million rows from ten parts, nothing cached. Peer: PyArrow reading the same
  files.
- ``wake_same_process``, ``wake_other_process``: from the commit until a listener has the new upper
  (p50). The other process is notified through PostgreSQL. Peer: the time limit.
- ``append_100_shards``: time per append, with a writer each. Peer: time per row of SQLite
  committing the same documents, a hundred in one transaction. (They differ each time, since SQLite
  skips writes that change nothing.)
- ``append_100_shards_over_rows``: the same against SQLite committing a hundred rows that contain
  only the values.
- ``rows_by_100_futures``: the minimum for such a row with a hundred writers in one loop (serialize
  it, pass it to the next group, await a future; without rules, state or locks), against the same
  peer.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
import numpy
import pyarrow as pa
import pyarrow.parquet as pq

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
)
from actors.durable.persist.documents import sealed
from actors.durable.persist.parts import VERSION, part_schema
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import assemble_stream, encode_stream_header
from actors.runtime.kernel.clock import ThreadedClock
from actors.runtime.settings import Settings
from measure import Measure, Report, median
from postgres_peer import NoPostgres, postgres

SCHEMA = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("k", "bigint"), TableColumn("v", "double"))
)
MILLION = 1_000_000
WAKE_MS, WAKE_OTHER_MS = 1.0, 10.0
MAINTAIN_EVERY = 16
LOGGED = 1_100
"""Commits until a log has been written back once, after which it no longer grows: a thousand
pages."""
SHARDS = 100
CLOCK = ThreadedClock((os.cpu_count() or 1) + 4)
ENCODER = msgspec.msgpack.Encoder()
UVLOOP = {"use_uvloop": True}
"""Runs threads and loop as in a service."""


def updates(rows: int, at: int) -> pa.Table:
    """Return `rows` different rows at one time."""
    ids = numpy.arange(rows, dtype=numpy.int64) + at * rows
    return pa.table(
        {
            "id": ids,
            "k": ids * 7919 % 1009,
            "v": ids / 3,
            TIME: numpy.full(rows, at, numpy.int64),
            DIFF: numpy.ones(rows, numpy.int64),
        }
    )


async def opened(place: Path, *, settings: Settings | None = None) -> PersistClient:
    """Open a client on a state directory of its own."""
    chosen = settings or Settings(state_dir=str(place), decoded_parts_bytes_max=1)
    return await PersistClient.open(place, chosen, CLOCK)


async def append(client: PersistClient, shard: str, at: int, table: pa.Table) -> None:
    """Append rows; they are durable on return."""
    parts = await client.write_parts(shard, table)
    done = await client.append([ShardAppend(shard, at, at + 1, parts)])
    assert isinstance(done, AppendCommitted), done


def bare(place: Path, data: bytes) -> sqlite3.Connection:
    """Open SQLite as the service does: with a log, and an fsync per commit."""
    connection = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE t (key TEXT PRIMARY KEY, seqno INTEGER, data BLOB)")
    rows = [(f"shard/{i}", 0, data) for i in range(SHARDS)]
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    return connection


def commit(connection: sqlite3.Connection, rows: Sequence[bytes]) -> float:
    """Return the milliseconds of one transaction that changes `rows` rows."""
    started = time.perf_counter()
    connection.execute("BEGIN IMMEDIATE")
    for i, data in enumerate(rows):
        connection.execute(
            "UPDATE t SET seqno = seqno + 1, data = ? WHERE key = ?", (data, f"shard/{i}")
        )
    connection.execute("COMMIT")
    return (time.perf_counter() - started) * 1000


def row_of(table: pa.Table) -> bytes:
    """Return the rows as bytes, without a schema."""
    return bytes(table.to_batches()[0].serialize().to_pybytes())


def change_of(opening: bytes, table: pa.Table, at: int) -> bytes:
    """Return the minimal description of an append: the shard's frontiers, and the part."""
    data = assemble_stream(opening, table.to_batches())
    part = BatchPart(
        key="",
        rows=table.num_rows,
        bytes=len(data),
        checksum=zlib.crc32(data),
        inline=data,
        has_errors=False,
        time_min=min(table[TIME].to_pylist()),
        time_max=max(table[TIME].to_pylist()),
        version=VERSION,
        retracts=min(table[DIFF].to_pylist()) < 0,
    )
    return sealed(ENCODER.encode((at, at, at + 1, part)))


async def small(report: Report, place: Path) -> None:
    """Measure small appends in alternation, so that all see the same disk."""
    client = await opened(place / "small")
    await client.create_shards([NewShard("s", SCHEMA, holds={"bench": 0})])
    row, opening = b"x" * 64, encode_stream_header(part_schema(SCHEMA, errors=False))
    connection = bare(place / "bare.db", row)
    times: dict[str, list[float]] = {"ours": [], "peer": [], "row": [], "part": []}
    for at in range(LOGGED + (60 if report.quick else 600)):
        table = updates(1, at)
        started = time.perf_counter()
        await append(client, "s", at, table)
        times["ours"].append(time.perf_counter() - started)
        times["peer"].append(commit(connection, [row]) / 1000)
        started = time.perf_counter()
        await CLOCK.run_blocking(partial(commit, connection, [row_of(table)]))
        times["row"].append(time.perf_counter() - started)
        started = time.perf_counter()
        await CLOCK.run_blocking(partial(commit, connection, [change_of(opening, table, at)]))
        times["part"].append(time.perf_counter() - started)
        if at % MAINTAIN_EVERY == 0:
            await client.set_hold("s", "bench", max(0, at - 10))
            await client.maintain("s")
    connection.close()
    await client.close()
    took_us = {name: median(each[LOGGED:]) * 1e6 for name, each in times.items()}
    report.add(Measure("append_small", took_us["ours"], took_us["peer"], "µs", target=1.5))
    report.add(Measure("row_by_thread", took_us["row"], took_us["peer"], "µs"))
    report.add(Measure("part_by_thread", took_us["part"], took_us["peer"], "µs"))


async def large(report: Report, place: Path) -> None:
    """Measure an append of a million rows, then the snapshot of ten such parts."""
    rows, count = (MILLION // 20, 3) if report.quick else (MILLION, 10)
    client = await opened(place / "large")
    await client.create_shards([NewShard("s", SCHEMA)])
    ours, peer = [], []
    for at in range(count):
        table = updates(rows, at)
        started = time.perf_counter()
        await append(client, "s", at, table)
        ours.append((time.perf_counter() - started) * 1000)
        peer.append(await asyncio.to_thread(written, place / "peer.parquet", table))
    report.add(Measure("append_1M", median(ours), median(peer), target=1 / 0.7))
    state = await client.state("s")
    parts = [part for batch in state.batches for part in batch.parts]
    paths = [path for part in parts if (path := client.path(part)) is not None]
    assert len(paths) == len(parts) >= count
    ours, peer = [], []
    for _ in range(3):
        ours.append(await snapshot_ms(client, count - 1, rows * count))
        peer.append(await asyncio.to_thread(read_ms, paths))
    await client.close()
    report.add(Measure("snapshot_10M", median(ours), median(peer), target=1 / 0.8))


def written(path: Path, table: pa.Table) -> float:
    """Return the milliseconds until PyArrow has written the table and synced it."""
    started = time.perf_counter()
    pq.write_table(table, path, compression="zstd")
    for each, flags in ((path, os.O_RDWR), (path.parent, os.O_RDONLY)):
        handle = os.open(each, flags)
        os.fsync(handle)
        os.close(handle)
    return (time.perf_counter() - started) * 1000


def read_ms(paths: Sequence[str]) -> float:
    """Return the milliseconds of PyArrow reading the files, with all its threads."""
    started = time.perf_counter()
    tables = [pq.read_table(path) for path in paths]
    assert sum(table.num_rows for table in tables)
    return (time.perf_counter() - started) * 1000


async def snapshot_ms(client: PersistClient, as_of: int, rows: int) -> float:
    """Return the milliseconds of a snapshot that reads two parts at a time, as a fetch task
    does."""
    found = 0
    reader = await client.open_reader("s", "bench")
    started = time.perf_counter()
    parts, _ = await reader.snapshot(as_of)
    turn = anyio.Semaphore(2)

    async def fetch(part: BatchPart) -> None:
        nonlocal found
        async with turn:
            table = await client.fetch(part, SCHEMA)
        found += table.num_rows

    async with anyio.create_task_group() as group:
        for part in parts:
            group.start_soon(fetch, part)
    taken = (time.perf_counter() - started) * 1000
    reader.release(part.key for part in parts)
    await reader.close()
    assert found == rows, (found, rows)
    return taken


class Commits:
    """Records when each set of documents was durable, on the machine's monotonic clock."""

    def __init__(self, client: PersistClient) -> None:
        self.ms: list[float] = []
        inner = client.consensus.compare_and_set

        async def timed(ops: object) -> bool:
            done = await inner(ops)  # type: ignore[arg-type]
            self.ms.append(time.monotonic() * 1000)
            return done

        client.consensus.compare_and_set = timed  # type: ignore[method-assign]


async def wakes(report: Report, place: Path) -> None:
    """Measure wake-ups within a process: an append and a waiting listener."""
    client = await opened(place / "wakes")
    await client.create_shards([NewShard("s", SCHEMA)])
    commits, took = Commits(client), []
    reader = await client.open_reader("s", "bench")
    for at in range(20 if report.quick else 200):
        woken = asyncio.create_task(reader.next(at))
        parts = await client.write_parts("s", updates(1, at))
        begun = len(commits.ms)
        appending = asyncio.create_task(client.append([ShardAppend("s", at, at + 1, parts)]))
        batches, _ = await woken
        took.append(time.monotonic() * 1000 - commits.ms[begun])
        await appending
        reader.release(part.key for batch in batches for part in batch.parts)
    await reader.close()
    await client.close()
    report.add(Measure("wake_same_process", median(took), WAKE_MS, target=1.0))


async def shared(place: Path, port: int) -> PersistClient:
    """Return a client with documents in PostgreSQL and blobs in files, shared with other
    processes."""
    settings, clock = Settings(state_dir=str(place)), CLOCK
    url = f"postgresql://bench@127.0.0.1:{port}/postgres"
    blob = await open_blob(f"file:{place}/shared", settings, clock, exclusive=False)
    consensus = await open_consensus(url, settings, clock, random.Random())
    return PersistClient(blob, consensus, settings, clock, exclusive=False)


async def listen(place: Path, port: int, count: int) -> None:
    """Run as the other process: print when each new upper arrives."""
    client = await shared(place, port)
    following = asyncio.create_task(client.follow())
    reader = await client.open_reader("s", "other")
    print("ready", flush=True)
    frontier = 0
    while frontier < count:
        batches, frontier = await reader.next(frontier)
        print(time.monotonic() * 1000, frontier, flush=True)
        reader.release(part.key for batch in batches for part in batch.parts)
    following.cancel()
    await reader.close()
    await client.close()


async def wakes_elsewhere(report: Report, place: Path) -> None:
    """Measure wake-ups across processes: each append waits until the previous one has been
    noticed."""
    count = 10 if report.quick else 100
    try:
        with postgres() as port:
            client = await shared(place, port)
            await client.create_shards([NewShard("s", SCHEMA)])
            commits, took = Commits(client), []
            other = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                "--listen",
                str(place),
                str(port),
                str(count),
                stdout=subprocess.PIPE,
            )
            assert other.stdout is not None
            assert await other.stdout.readline() == b"ready\n"
            for at in range(count):
                parts = await client.write_parts("s", updates(1, at))
                begun = len(commits.ms)
                await client.append([ShardAppend("s", at, at + 1, parts)])
                woken, upper = (await other.stdout.readline()).split()
                assert int(upper) == at + 1, upper
                took.append(float(woken) - commits.ms[begun])
            await other.wait()
            await client.close()
    except NoPostgres as error:
        report.add(Measure("wake_other_process", 0, WAKE_OTHER_MS, missing=str(error)))
        return
    report.add(Measure("wake_other_process", median(took), WAKE_OTHER_MS, target=1.0))


async def write_all(client: PersistClient, tables: Sequence[pa.Table]) -> float:
    """Return the milliseconds to append all tables to each of a hundred shards, each with its own
    writer."""
    names = [f"{i}" for i in range(SHARDS)]
    await client.create_shards([NewShard(name, SCHEMA, holds={"bench": 0}) for name in names])

    async def write(name: str) -> None:
        for at, table in enumerate(tables):
            await append(client, name, at, table)

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(write, name)
    return (time.perf_counter() - started) * 1000


async def written_by(client: PersistClient, tables: Sequence[pa.Table]) -> list[list[bytes]]:
    """Return the documents that the same writes produce, for all shards, append by append."""
    change = client.consensus.compare_and_set
    made: list[list[bytes]] = [[] for _ in range(SHARDS)]

    async def noted(ops: Sequence[CompareAndSet]) -> bool:
        for op in ops:
            if op.expected is not None and op.data is not None:
                made[int(op.key.removeprefix("shard/"))].append(op.data)
        return await change(ops)

    client.consensus.compare_and_set = noted  # type: ignore[method-assign]
    await write_all(client, tables)
    return [list(group) for group in zip(*made, strict=True)]


async def many(report: Report, place: Path) -> None:
    """Measure a hundred independent writers, each on its own shard."""
    tables = [updates(1, at) for at in range(5 if report.quick else 40)]
    appends = len(tables) * SHARDS

    def least_us(name: str, groups: Sequence[Sequence[bytes]]) -> float:
        connection = bare(place / name, b"")
        taken = sum(commit(connection, group) for group in groups)
        connection.close()
        return taken * 1000 / appends

    client = await opened(place / "many")
    ours_us = await write_all(client, tables) * 1000 / appends
    await client.close()
    client = await opened(place / "again")
    groups = await written_by(client, tables)
    await client.close()
    documents_us = least_us("group.db", groups)
    report.add(Measure("append_100_shards", ours_us, documents_us, "µs", target=2.0))
    rows_us = least_us("rows.db", [[row_of(table)] * SHARDS for table in tables])
    report.add(Measure("append_100_shards_over_rows", ours_us, rows_us, "µs"))
    awaited_us = await futures(place / "futures.db", tables) * 1000 / appends
    report.add(Measure("rows_by_100_futures", awaited_us, rows_us, "µs"))


async def futures(place: Path, tables: Sequence[pa.Table]) -> float:
    """Return the milliseconds for the same number of rows with bare futures and groups."""
    connection = bare(place, b"")
    waiting: list[tuple[bytes, asyncio.Future[None]]] = []

    async def lead() -> None:
        group = list(waiting)
        waiting.clear()
        await CLOCK.run_blocking(lambda: commit(connection, [row for row, _ in group]))
        for _, done in group:
            done.set_result(None)

    async def write() -> None:
        for table in tables:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append((row_of(table), done))
            if len(waiting) == SHARDS:
                await lead()
            await done

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(SHARDS):
            group.start_soon(write)
    taken = (time.perf_counter() - started) * 1000
    connection.close()
    return taken


async def run(report: Report) -> None:
    """Run all measures, each in its own folder."""
    with tempfile.TemporaryDirectory() as folder:
        for part in (small, wakes, wakes_elsewhere, many, large):
            await part(report, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--listen"]:
        anyio.run(
            listen, Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), backend_options=UVLOOP
        )
    else:
        made = Report("Durable shards.")
        anyio.run(run, made, backend_options=UVLOOP)
        made.close()
