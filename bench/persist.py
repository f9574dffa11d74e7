"""Shards under many small appends: their parts, the size of their state, and the time to read them.

``after_…_appends_parts``, ``…_state_kib``: live parts, and KiB of the uncompressed state, after
that many appends of one row each with concurrent maintenance. The peers are the limits.
``…_state_kib_max``: the largest state in between. ``…_snapshot``: reading all rows, against the
same rows in one part.

    python bench/persist.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter

import anyio
import pyarrow as pa

from actors.durable.persist import (
    AppendCommitted,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
)
from actors.durable.persist.documents import encode, size_of
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from measure import Measure, Report, median

APPENDS = 10_000
PARTS_MAX = 32
STATE_KIB_MAX = 256
SCHEMA = TableSchema((TableColumn("id", "bigint"), TableColumn("name", "string")))
UNCACHED = Settings(decoded_parts_bytes_max=1)
"""Disables the cache of decoded parts, so that every read decodes bytes."""


def rows(first: int, count: int = 1) -> pa.Table:
    """Return `count` rows, each at its own time."""
    numbers = pa.array(range(first, first + count), pa.int64())
    names = [f"name {number % 97}" for number in range(first, first + count)]
    return pa.table({"id": numbers, "name": names, TIME: numbers, DIFF: [1] * count})


async def state_kib(client: PersistClient) -> float:
    """Return the uncompressed size of the shard's document."""
    return size_of(encode(await client.state("s"))) / 1024


async def put(client: PersistClient, table: pa.Table, upper: int) -> None:
    """Append once. Raises `InvalidUsage` if another append was first."""
    lower = (await client.state("s")).upper
    parts = await client.write_parts("s", table)
    done: AppendCommitted | UpperMismatch = await client.append(
        [ShardAppend("s", lower, upper, parts)]
    )
    if not isinstance(done, AppendCommitted):
        raise InvalidUsage(f"not appended: {done}")


async def read_all(client: PersistClient, upper: int) -> float:
    """Return the milliseconds of one full read."""
    reader = await client.open_reader("s", "reader")
    began = perf_counter()
    parts, _ = await reader.snapshot(upper - 1)
    found = sum([(await client.fetch(part, SCHEMA)).num_rows for part in parts])
    took = (perf_counter() - began) * 1000
    await reader.close()
    assert found == upper, f"{found} rows of {upper}"
    return took


async def many_appends(report: Report, folder: Path, appends: int) -> None:
    """Measure the state after `appends` appends, with a service's maintenance running."""
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


async def run(report: Report) -> None:
    """Measure everything in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        await many_appends(report, Path(folder), APPENDS // 20 if report.quick else APPENDS)


def main() -> None:
    """Run the benchmark."""
    report = Report(__doc__ or "")
    asyncio.run(run(report))
    report.close()


if __name__ == "__main__":
    main()
