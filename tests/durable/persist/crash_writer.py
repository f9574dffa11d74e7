"""Run by `test_state_directory.py`: appends for ever, and prints each upper that is durable."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pyarrow as pa

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


async def main(directory: Path) -> None:
    settings = Settings(
        inline_part_bytes_max=1000, inline_bytes_per_shard_max=3000, batches_per_shard_max=3
    )
    client = await PersistClient.open(directory, settings, SystemClock())
    names = ("s", "t")
    await client.create_shards([NewShard(name, SCHEMA, holds={"h": 0}) for name in names])
    upper = await client.upper("s")
    while True:
        count = 300 if upper % 2 else 1
        columns = {
            "a": pa.array([upper] * count, pa.int64()),
            TIME: pa.array([upper] * count, pa.int64()),
            DIFF: pa.array([1] * count, pa.int64()),
        }
        appends = []
        for name in names:
            parts = await client.write_parts(name, pa.table(columns))
            appends.append(ShardAppend(name, upper, upper + 1, parts))
        tables = await client.tables_upper()
        assert isinstance(
            await client.append(appends, tables_upper=(tables, upper + 1)), AppendCommitted
        )
        upper += 1
        print(upper, flush=True)
        await client.maintain("s")


anyio.run(main, Path(sys.argv[1]))
