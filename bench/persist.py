"""Shards under many small appends: parts, the state's size, reading; and what that size costs.

``after_…_appends_parts``, ``…_state_kib``: live parts, and KiB of the state document, once so many
appends of one row each and the maintenance beside them are done; peers are the limits. The largest
while it goes on is ``…_state_kib_max``. ``…_snapshot``: all rows read, against the same rows in one
part. ``append_with_state_…kib``: an append of one row, inline, to a shard whose document has that
size, on SQLite with every commit synced; the peer is a bare commit of one row of 1 KiB in the same
kind of file, and the rounds of both alternate. ``append_with_state_…kib_written``: what is handed
to the disk for each of those, in KiB; the peer is the document itself.

    python bench/persist.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter

import anyio
import apsw
import pyarrow as pa

from actors.errors import InvalidUsage
from actors.kernel import SystemClock
from actors.persist import (
    Append,
    Appended,
    Cas,
    NewShard,
    PersistClient,
    UpperMismatch,
    shard_key,
)
from actors.persist.documents import encode
from actors.plan.schema import DIFF, TIME, Column, Schema
from actors.settings import Settings
from measure import Measure, Report, median

APPENDS = 10_000
PARTS_MAX = 32
STATE_KIB_MAX = 256
SCHEMA = Schema((Column("id", "bigint"), Column("name", "string")))
UNCACHED = Settings(decoded_parts_bytes_max=1)
"""Every read is one of bytes."""
ROOMY = Settings(inline_bytes_per_shard_max=1 << 24, batches_per_shard_max=1 << 20)
"""A state may be as large as is wanted."""
KIB = (1, 8, 32, 64, 128, 256)
ROUNDS = 100


def rows(first: int, count: int = 1, padding: int = 0) -> pa.Table:
    """So many rows, at one time each."""
    numbers = pa.array(range(first, first + count), pa.int64())
    names = [f"name {number % 97}" + "x" * padding for number in range(first, first + count)]
    return pa.table({"id": numbers, "name": names, TIME: numbers, DIFF: [1] * count})


async def state_kib(client: PersistClient) -> float:
    """Of the document of the shard."""
    return len(encode(await client.state("s"))) / 1024


async def put(client: PersistClient, table: pa.Table, upper: int) -> None:
    """One append. Raises `InvalidUsage` when another was first."""
    lower = (await client.state("s")).upper
    parts = await client.write_parts("s", table)
    done: Appended | UpperMismatch = await client.append([Append("s", lower, upper, parts)])
    if not isinstance(done, Appended):
        raise InvalidUsage(f"not appended: {done}")


async def read_all(client: PersistClient, upper: int) -> float:
    """Milliseconds of one whole read."""
    reader = await client.open_reader("s", "reader")
    began = perf_counter()
    parts, _ = await reader.snapshot(upper - 1)
    found = sum([(await client.fetch(part, SCHEMA)).num_rows for part in parts])
    took = (perf_counter() - began) * 1000
    await reader.close()
    assert found == upper, f"{found} rows of {upper}"
    return took


async def many_appends(report: Report, folder: Path, appends: int) -> None:
    """The state after so many appends, with the maintenance beside them that a service does."""
    client = await PersistClient.open(folder / "many", UNCACHED, SystemClock())
    one = await PersistClient.open(folder / "one", UNCACHED, SystemClock())
    for made in (client, one):
        await made.create_shards([NewShard("s", SCHEMA, holds={"retain": 0})])
    grown, largest, ended = anyio.Event(), 0.0, False

    async def maintain() -> None:
        nonlocal grown
        while not ended:
            await grown.wait()
            grown = anyio.Event()
            await client.maintain("s")

    async with anyio.create_task_group() as group:
        group.start_soon(maintain)
        for number in range(appends):
            await put(client, rows(number), number + 1)
            grown.set()
            largest = max(largest, await state_kib(client)) if number % 10 == 0 else largest
        ended = True
        grown.set()
    await client.maintain("s")
    live = sum(len(batch.parts) for batch in (await client.state("s")).batches)
    name = f"after_{appends}_appends"
    report.add(Measure(f"{name}_parts", live, PARTS_MAX, "", 1))
    report.add(Measure(f"{name}_state_kib", await state_kib(client), STATE_KIB_MAX, " KiB", 1))
    report.add(Measure(f"{name}_state_kib_max", largest, STATE_KIB_MAX, " KiB", 1))
    await put(one, rows(0, appends), appends)
    ours, peer = [], []
    for _ in range(9):
        ours.append(await read_all(client, appends))
        peer.append(await read_all(one, appends))
    report.add(Measure(f"{name}_snapshot", median(ours), median(peer), target=2))
    await client.close()
    await one.close()


def handed_out() -> int:
    """Bytes that this process has written so far, to any file."""
    with open("/proc/self/io") as lines:
        return int(next(line for line in lines if line.startswith("wchar")).split()[1])


async def grown_to(folder: Path, kib: int) -> PersistClient:
    """A shard with a document of that size."""
    client = await PersistClient.open(folder / f"state-{kib}", ROOMY, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA)])
    upper = 0
    while (room := kib * 1024 - len(encode(await client.state("s")))) > 2048:
        await put(client, rows(upper, padding=min(12_000, room - 1500)), upper + 1)
        upper += 1
    return client


async def set_back(client: PersistClient, document: bytes) -> None:
    """The document as it was."""
    seqno = (await client.state("s")).seqno
    assert await client.compare_and_set([Cas(shard_key("s"), seqno, document)])
    await client.schemas.evolve("s", 0, SCHEMA)  # changes nothing, and reads the document anew


async def cost_of_state(report: Report, folder: Path, rounds: int) -> None:
    """A small append to a shard with a document of each size, and a bare commit. After each append
    the document is set back to what it was, which is not measured: so it keeps its size."""
    bare = apsw.Connection(str(folder / "bare.db"))
    bare.pragma("journal_mode", "wal")
    bare.pragma("synchronous", "full")
    bare.execute("CREATE TABLE documents (key TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")
    clients = {kib: await grown_to(folder, kib) for kib in KIB}
    took: dict[int, list[float]] = {kib: [] for kib in (0, *KIB)}
    written: dict[int, list[int]] = {kib: [] for kib in KIB}
    for _ in range(rounds):
        began = perf_counter()
        with bare:
            bare.execute("INSERT OR REPLACE INTO documents VALUES ('s', randomblob(1024))")
        took[0].append((perf_counter() - began) * 1000)
        for kib, client in clients.items():
            upper = (await client.state("s")).upper
            document = encode(await client.state("s"))
            before, began = handed_out(), perf_counter()
            await put(client, rows(upper), upper + 1)
            took[kib].append((perf_counter() - began) * 1000)
            written[kib].append(handed_out() - before)
            await set_back(client, document)
    for kib, client in clients.items():
        name = f"append_with_state_{kib}kib"
        report.add(Measure(name, median(took[kib]), median(took[0])))
        size, written_kib = await state_kib(client), median(written[kib]) / 1024
        report.add(Measure(f"{name}_written", written_kib, size, " KiB"))
        await client.close()
    bare.close()


async def run(report: Report) -> None:
    """All of it, in a folder that goes."""
    with tempfile.TemporaryDirectory() as folder:
        await many_appends(report, Path(folder), APPENDS // 20 if report.quick else APPENDS)
        await cost_of_state(report, Path(folder), ROUNDS // 20 if report.quick else ROUNDS)


def main() -> None:
    """The whole benchmark."""
    report = Report(__doc__ or "")
    asyncio.run(run(report))
    report.close()


if __name__ == "__main__":
    main()
