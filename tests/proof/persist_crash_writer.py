"""Run by `persist_crash.py`: writes, compacts and collects until it is killed, and prints each
upper that is durable."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import anyio
import pyarrow as pa
from msgspec.structs import replace

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
SHARDS = ("s", "t")
LARGE = 40
"""Rows at odd times: they make a part of their own, not an inline one."""
SETTINGS = Settings(
    inline_part_bytes_max=1000,
    inline_bytes_per_shard_max=3000,
    batches_per_shard_max=3,
    part_list_parts_min=1,
    blob_orphan_grace_ms=50,
    reader_lease_ms=60_000,
    store_poll_ms=50,
)


def rows_at(time: int) -> int:
    """How many rows are appended at a time, each with the time as its value."""
    return LARGE if time % 2 else 1


def updates(time: int, count: int) -> pa.Table:
    """So many rows of one time."""
    columns = {
        "a": pa.array([time] * count, pa.int64()),
        TIME: pa.array([time] * count, pa.int64()),
        DIFF: pa.array([1] * count, pa.int64()),
    }
    return pa.table(columns)


async def write(client: PersistClient, seed: int) -> None:
    """For ever."""
    dice = random.Random(seed)
    await client.create_shards([NewShard(name, SCHEMA, holds={"h": 0}) for name in SHARDS])
    upper = await client.upper("s")
    while True:
        appends = []
        for name in SHARDS:
            parts = await client.write_parts(name, updates(upper, rows_at(upper)))
            appends.append(ShardAppend(name, upper, upper + 1, parts, ((name, "h", upper),)))
        if dice.random() < 0.2:  # nobody will ever name it, nor discard it
            await client.write_parts("s", updates(upper, LARGE))
        tables = await client.tables_upper()
        assert isinstance(
            await client.append(appends, tables_upper=(tables, upper + 1)), AppendCommitted
        )
        upper += 1
        print(upper, flush=True)
        reader = await client.open_reader("s", "r") if dice.random() < 0.2 else None
        if reader is not None:
            parts, _ = await reader.snapshot(upper - 1)
            for part in parts:
                await client.fetch(part, SCHEMA)
        await client.maintain(dice.choice(SHARDS))
        if reader is not None and dice.random() < 0.5:
            await reader.close()
        if dice.random() < 0.3:
            await client.collect_orphans()


async def main(directory: Path, consensus_url: str, seed: int) -> None:
    settings = replace(SETTINGS, consensus_url=consensus_url)
    client = await PersistClient.open(directory, settings, SystemClock())
    async with anyio.create_task_group() as group:
        if not client.exclusive:
            group.start_soon(client.follow)
        await write(client, seed)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
