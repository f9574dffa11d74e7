"""The cost of the size of a shard's document, which every change writes in full.

- ``append_with_state_…kib_STORE``: an append of one row, inline, to a shard whose document has that
  uncompressed size (mostly random text, which does not compress), with documents in SQLite or
  PostgreSQL (each commit synced). The peer overwrites 1 KiB in the same kind of store without us: a
  row of the same file or server, committed. The rounds of all alternate.
- ``append_with_state_…kib_written``: KiB written to SQLite's disk for each of those. The peer is
  the document as stored.
- ``append_beside_10000_parts``: an append of one row to a shard with ten thousand parts of 64 MiB
  (named, but not present), on SQLite. The peer is one to an empty shard.
- ``open_with_10000_parts``: the first read of that shard's state. The peer is the time limit.

    python bench/persist_state.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import perf_counter

import apsw
import pyarrow as pa

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
    shard_key,
)
from actors.durable.persist.documents import encode, size_of
from actors.durable.persist.statistics import ColumnStatistics
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.postgres_server import NoPostgres, postgres_server
from measure import Measure, Report, median

SCHEMA = TableSchema((TableColumn("id", "bigint"), TableColumn("name", "string")))
ROOMY = Settings(inline_bytes_per_shard_max=1 << 24, batches_per_shard_max=1 << 20)
"""Settings without limits on the size of a state."""
KIB = (1, 8, 32, 64, 128, 256)
PARTS = 10_000
OPEN_MS = 500
ROUNDS = {"sqlite": 100, "postgres": 100}
Bare = Callable[[], Awaitable[None]]
"""Overwrites 1 KiB."""


def row(number: int, padding: int = 0) -> pa.Table:
    """Return one row at its own time."""
    text = base64.b64encode(random.randbytes(padding)).decode()[:padding]
    values = ([number], [f"name {number % 97}{text}"], [number], [1])
    return pa.table(dict(zip(("id", "name", TIME, DIFF), values, strict=True)))


async def put(client: PersistClient, shard: str, padding: int = 0) -> None:
    """Append one row. Raises `InvalidUsage` if another append was first."""
    upper = (await client.state(shard)).upper
    parts = await client.write_parts(shard, row(upper, padding))
    done = await client.append([ShardAppend(shard, upper, upper + 1, parts)])
    if not isinstance(done, AppendCommitted):
        raise InvalidUsage(f"not appended: {done}")


async def grown_to(client: PersistClient, kib: int) -> str:
    """Return a shard with a document of that size."""
    shard = f"s{kib}"
    await client.create_shards([NewShard(shard, SCHEMA)])
    while (room := kib * 1024 - size_of(encode(await client.state(shard)))) > 2048:
        await put(client, shard, min(12_000, room - 1500))
    return shard


async def set_back(client: PersistClient, shard: str, document: bytes) -> None:
    """Restore the document, so that the shard keeps its size."""
    seqno = (await client.state(shard)).seqno
    assert await client.compare_and_set([CompareAndSet(shard_key(shard), seqno, document)])
    await client.schemas.evolve(
        shard, 0, SCHEMA
    )  # changes nothing; the client reads the document again


def handed_out() -> int:
    """Return the bytes that this process has written so far, to any file."""
    with open("/proc/self/io") as lines:
        return int(next(line for line in lines if line.startswith("wchar")).split()[1])


async def compare(
    report: Report, store: str, client: PersistClient, bare: Bare, rounds: int
) -> None:
    """Measure all sizes on one store."""
    shards = {kib: await grown_to(client, kib) for kib in KIB}
    took: dict[int, list[float]] = {kib: [] for kib in (0, *KIB)}
    written: dict[int, list[int]] = {kib: [] for kib in KIB}
    for _ in range(rounds):
        began = perf_counter()
        await bare()
        took[0].append((perf_counter() - began) * 1000)
        for kib, shard in shards.items():
            document = encode(await client.state(shard))
            before, began = handed_out(), perf_counter()
            await put(client, shard)
            took[kib].append((perf_counter() - began) * 1000)
            written[kib].append(handed_out() - before)
            await set_back(client, shard, document)
    for kib, shard in shards.items():
        name = f"append_with_state_{kib}kib"
        report.add(Measure(f"{name}_{store}", median(took[kib]), median(took[0])))
        if store == "sqlite":
            size = len(encode(await client.state(shard))) / 1024
            report.add(Measure(f"{name}_written", median(written[kib]) / 1024, size, " KiB"))


@contextlib.asynccontextmanager
async def client_of(documents: str, folder: Path) -> AsyncIterator[PersistClient]:
    """Yield the only client of that store of documents, which holds all parts inline."""
    clock = SystemClock()
    blob = await open_blob(f"file:{folder}/blobs", ROOMY, clock)
    consensus = await open_consensus(documents, ROOMY, clock, random.Random(1))
    client = PersistClient(blob, consensus, ROOMY, clock)
    try:
        yield client
    finally:
        await client.close()


async def on_sqlite(report: Report, folder: Path, rounds: int) -> None:
    """Measure against a file of the same kind."""
    bare = apsw.Connection(str(folder / "bare.db"))
    bare.pragma("journal_mode", "wal")
    bare.pragma("synchronous", "full")
    bare.execute("CREATE TABLE documents (key TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")

    async def change() -> None:
        with bare:
            bare.execute("INSERT OR REPLACE INTO documents VALUES ('s', randomblob(1024))")

    async with client_of(f"sqlite:{folder}/documents.db", folder) as client:
        await compare(report, "sqlite", client, change, rounds)
        await beside_many_parts(report, client, rounds)
    bare.close()
    async with client_of(f"sqlite:{folder}/documents.db", folder) as client:
        began = perf_counter()
        await client.state("large")
        took = (perf_counter() - began) * 1000
        report.add(Measure(f"open_with_{PARTS}_parts", took, OPEN_MS, target=1))


async def beside_many_parts(report: Report, client: PersistClient, rounds: int) -> None:
    """Measure the same append to a large shard and to an empty one, in alternation."""
    known = tuple(ColumnStatistics(f"column_{n}", 0, n, 1 << 40) for n in range(8))
    parts = tuple(
        BatchPart(
            f"large/{n:08x}.parquet", 1 << 20, 1 << 26, n, None, False, 0, 0, 1, statistics=known
        )
        for n in range(PARTS)
    )
    await client.create_shards([NewShard("large", SCHEMA), NewShard("small", SCHEMA)])
    for shard, held in (("large", parts), ("small", ())):
        done = await client.append([ShardAppend(shard, 0, 1, held)])
        assert isinstance(done, AppendCommitted), done
    took: dict[str, list[float]] = {"large": [], "small": []}
    for _ in range(rounds):
        for shard, times in took.items():
            began = perf_counter()
            await put(client, shard)
            times.append((perf_counter() - began) * 1000)
    ours, peer = median(took["large"]), median(took["small"])
    report.add(Measure(f"append_beside_{PARTS}_parts", ours, peer, target=1.2))


async def on_postgres(report: Report, folder: Path, rounds: int) -> None:
    """Measure against a table of the same server."""
    import psycopg

    with postgres_server() as server:
        place = f"127.0.0.1:{server.port}/postgres"
        bare = await psycopg.AsyncConnection.connect(f"postgresql://bench@{place}", autocommit=True)
        async with bare:
            await bare.execute("CREATE TABLE bare (key text PRIMARY KEY, data bytea NOT NULL)")
            await bare.execute("INSERT INTO bare VALUES ('s', '')")

            async def change() -> None:
                data = os.urandom(1024)
                await bare.execute("UPDATE bare SET data = %s WHERE key = 's'", (data,))

            async with client_of(f"postgresql://bench@{place}", folder) as client:
                await compare(report, "postgres", client, change, rounds)


async def run(report: Report) -> None:
    """Measure everything in temporary folders."""
    for store, measure in (("sqlite", on_sqlite), ("postgres", on_postgres)):
        rounds = ROUNDS[store] // 20 if report.quick else ROUNDS[store]
        with tempfile.TemporaryDirectory() as folder:
            try:
                await measure(report, Path(folder), rounds)
            except NoPostgres as error:
                print(f"not measured on {store}: {error}", file=sys.stderr)


def main() -> None:
    """Run the benchmark."""
    report = Report(__doc__ or "")
    asyncio.run(run(report))
    report.close()


if __name__ == "__main__":
    main()
