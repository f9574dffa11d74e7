"""Run by `persist_two.py`: one life of a process that appends, reads, listens and compacts on one
shard, and records all of it (`persist_history`) until it is killed, or a file tells it to stop."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pyarrow as pa
from persist_history import APPENDED, FAILED, MASK, MISMATCH, OPEN, summed

from actors.durable.persist import (
    AppendCommitted,
    LeasedReader,
    NewShard,
    PersistClient,
    ShardAppend,
)
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SHARD = "s"
SCHEMA = TableSchema((TableColumn("a", "bigint"), TableColumn("pad", "string")))
CLOCK = SystemClock()
WINDOW = 20
"""Values of a life that stand in the shard; an append of one more takes the oldest away."""
HISTORY = 100
"""Times that can still be read."""
READS = 8
"""By one reader while the upper does not move: others want their turn."""
LARGE_EVERY = 50
"""One value of so many does not fit into a document: its part goes to the blob store."""
LARGE_BYTES = 3_000
SETTINGS = Settings(
    inline_part_bytes_max=2_000,
    inline_bytes_per_shard_max=24_000,
    batches_per_shard_max=12,
    part_list_parts_min=2,
    part_bytes_target=8_000,
    reader_lease_ms=60_000,
    blob_orphan_grace_ms=60_000,
    retry_delay_ms_min=2,
    retry_delay_ms_max=200,
    store_poll_ms=50,
    decoded_parts_bytes_max=4 * 1024 * 1024,
)
_ENCODER = msgspec.json.Encoder()


async def opened(blob_url: str, consensus_url: str, seed: int) -> PersistClient:
    """A client beside others."""
    dice = random.Random(seed)
    blob = await open_blob(blob_url, SETTINGS, CLOCK, exclusive=False)
    consensus = await open_consensus(consensus_url, SETTINGS, CLOCK, dice)
    return PersistClient(blob, consensus, SETTINGS, CLOCK, exclusive=False, random=dice)


def pad(value: int) -> str:
    """What stands beside a value: where it is large, something that does not compress."""
    if value % LARGE_EVERY:
        return ""
    return random.Random(value).randbytes(LARGE_BYTES // 2).hex()


async def contents(client: PersistClient, reader: LeasedReader, as_of: int) -> tuple[int, int]:
    """Rows at a time, and the sum of their hashes."""
    parts, _ = await reader.snapshot(as_of)
    try:
        if not parts:
            return 0, 0
        table = pa.concat_tables([await client.fetch(part, SCHEMA) for part in parts])
        diffs = np.asarray(table[DIFF])
        if any(part.time_max > as_of for part in parts):
            diffs = np.where(np.asarray(table[TIME]) <= as_of, diffs, 0)
        return int(diffs.sum()), summed(np.asarray(table["a"]), diffs) & MASK
    finally:
        reader.release([part.key for part in parts])


class Life:
    """One process until its end."""

    def __init__(self, client: PersistClient, life: int, path: Path, stop: Path) -> None:
        self._client = client
        self._life = life
        self._stop = stop
        self._dice = random.Random(life)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count = 0
        self._values: deque[int] = deque()

    def note(self, *record: Any) -> None:
        """Written at once: a killed process leaves what it has written."""
        os.write(self._file, _ENCODER.encode(record) + b"\n")

    async def run(self) -> None:
        """Until it is told to stop."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._client.follow)
            group.start_soon(self._sync)
            for work in (self._append, self._append, self._read, self._read, self._look):
                group.start_soon(self._repeat, work)
            group.start_soon(self._repeat, self._listen)
            group.start_soon(self._repeat, self._keep)
            while not self._stop.exists():
                await anyio.sleep(0.1)
            group.cancel_scope.cancel()
        os.fsync(self._file)

    async def _sync(self) -> None:
        while True:
            await anyio.sleep(0.2)
            await anyio.to_thread.run_sync(os.fdatasync, self._file)

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except PenstockError as error:
                what = f"{type(error).__name__}: {error}"
                self.note("e", time.monotonic_ns(), work.__name__, what[:60])
            await anyio.lowlevel.checkpoint()

    # -- the work ----------------------------------------------------------------------------------

    async def _append(self) -> None:
        lower = await self._client.upper(SHARD)
        self._count += 1
        id_ = (self._life << 32) | self._count
        gone = [self._values.popleft()] if len(self._values) >= WINDOW else []
        values = [id_, *gone]
        columns: dict[str, Any] = {
            "a": pa.array(values, pa.int64()),
            "pad": pa.array([pad(value) for value in values], pa.string()),
            TIME: pa.array([lower] * len(values), pa.int64()),
            DIFF: pa.array([1, *[-1] * len(gone)], pa.int64()),
        }
        self.note("i", id_, time.monotonic_ns(), lower, id_, gone)
        outcome, current = OPEN, 0
        try:
            parts = await self._client.write_parts(SHARD, pa.table(columns))
            hold = (SHARD, "history", max(0, lower - HISTORY))
            done = await self._client.append([ShardAppend(SHARD, lower, lower + 1, parts, (hold,))])
            if isinstance(done, AppendCommitted):
                outcome = APPENDED
            else:
                outcome, current = MISMATCH, done.current
                await self._client.discard_parts(parts)
        except PenstockError as error:
            outcome = FAILED if error.determinate else OPEN
            raise
        finally:
            if outcome == APPENDED:
                self._values.append(id_)
            elif outcome != OPEN:
                self._values.extendleft(gone)
            self.note("a", id_, time.monotonic_ns(), outcome, current)

    async def _look(self) -> None:
        """The upper as it is in the store, and what is read at it."""
        began = time.monotonic_ns()
        upper = await self._client.recent_upper(SHARD)
        self.note("u", began, time.monotonic_ns(), upper)

    async def _read(self) -> None:
        reader = await self._client.open_reader(SHARD, "read")
        try:
            for turn in range(200):
                upper = await self._client.upper(SHARD)
                if upper == 0 or turn % READS == READS - 1:
                    await self._client.wait_upper(SHARD, upper)
                    continue
                as_of = max(reader.since, upper - 1 - self._dice.randrange(HISTORY // 2))
                if as_of >= upper:
                    return
                began = time.monotonic_ns()
                count, total = await contents(self._client, reader, as_of)
                self.note("r", began, time.monotonic_ns(), as_of, count, total)
                await reader.downgrade(max(0, upper - HISTORY))
                await anyio.lowlevel.checkpoint()
        finally:
            await reader.close()

    async def _listen(self) -> None:
        reader = await self._client.open_reader(SHARD, "listen")
        try:
            frontier = max(reader.since, await self._client.upper(SHARD))
            for _ in range(500):
                began = time.monotonic_ns()
                batches, upper = await reader.next(frontier)
                rows = []
                for batch in batches:
                    for part in batch.parts:
                        table = await self._client.fetch(part, SCHEMA)
                        columns = (table[TIME], table["a"], table[DIFF])
                        rows += [
                            row
                            for row in zip(*(c.to_pylist() for c in columns), strict=True)
                            if frontier <= row[0] < upper
                        ]
                    reader.release([part.key for part in batch.parts])
                self.note("l", began, time.monotonic_ns(), frontier, upper, rows)
                frontier = upper
                await reader.downgrade(frontier)
        finally:
            await reader.close()

    async def _keep(self) -> None:
        """Compacts, and now and then collects."""
        began = time.monotonic_ns()
        await self._client.maintain(SHARD)
        self.note("c", began, time.monotonic_ns(), "maintain")
        if self._dice.random() < 0.02:
            began = time.monotonic_ns()
            await self._client.collect_orphans()
            self.note("c", began, time.monotonic_ns(), "collect")
        await self._client.wait_upper(SHARD, await self._client.upper(SHARD))


async def main(life: int, blob_url: str, consensus_url: str, folder: Path) -> None:
    client = await opened(blob_url, consensus_url, life)
    await client.create_shards([NewShard(SHARD, SCHEMA, holds={"history": 0})])
    print("running", flush=True)
    await Life(client, life, folder / f"life-{life:05d}.jsonl", folder / "stop").run()
    await client.close()


if __name__ == "__main__":
    number, blobs, documents, place = sys.argv[1:5]
    anyio.run(main, int(number), blobs, documents, Path(place))
