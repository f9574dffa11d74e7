"""A small world for the tests of the client: stores that fail when told to, and short words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pyarrow as pa
from msgspec.structs import replace

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    CompareAndSet,
    LeasedReader,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
    VersionedData,
)
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
TINY = Settings(
    inline_part_bytes_max=1,
    inline_bytes_per_shard_max=1,
    batches_per_shard_max=4,
    decoded_parts_bytes_max=1,
    retry_delay_ms_min=1,
    retry_delay_ms_max=2,
    blob_orphan_grace_ms=1,
)
"""Everything goes to blobs."""
INLINE = replace(TINY, inline_part_bytes_max=2000, inline_bytes_per_shard_max=6000)


class Clock(SystemClock):
    """The machine's clock, which a test may put forward: what it shows, and what it measures."""

    ahead_ms = 0
    later_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.later_ms


class FlakyConsensus(MemoryConsensus):
    """Fails once when told to, before or after it did what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: str | None = None
        self.then: str | None = None
        """How the set after the one that failed fails."""
        self.meanwhile: Callable[[Sequence[CompareAndSet]], Awaitable[object]] | None = None
        """What comes to pass before the answer that is lost: of the sets that fail."""
        self.sets = 0
        self.reads_fail = 0

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        self.sets += 1
        fail, self.fail, self.then = self.fail, self.then, None
        if fail == "determinate":
            raise StorageError("made up", determinate=True)
        done = fail != "before" and await super().compare_and_set(ops)
        if fail is not None:
            if self.meanwhile is not None:
                await self.meanwhile(ops)
            raise StorageError("made up", determinate=False)
        return done

    async def head(self, key: str) -> VersionedData | None:
        if self.reads_fail:
            self.reads_fail -= 1
            raise StorageError("made up", determinate=True)
        return await super().head(key)


class Stores:
    """Stores in memory that several clients share."""

    def __init__(self, settings: Settings = TINY, *, exclusive: bool = True) -> None:
        if not exclusive and settings.blob_orphan_grace_ms == TINY.blob_orphan_grace_ms:
            # What is not linked within half of it is refused.
            settings = replace(settings, blob_orphan_grace_ms=600_000)
        self.clock = Clock()
        self.blob = MemoryBlob(self.clock)
        self.consensus = FlakyConsensus()
        self.settings = settings
        self.exclusive = exclusive

    def client(self, clock: Clock | None = None) -> PersistClient:
        return PersistClient(
            self.blob, self.consensus, self.settings, clock or self.clock, exclusive=self.exclusive
        )

    async def keys(self) -> set[str]:
        return {info.key for info in await self.blob.list_keys()}


async def one_shard(
    settings: Settings = TINY, *, exclusive: bool = True
) -> tuple[Stores, PersistClient]:
    """Stores, and a client of them that has created the shard "s"."""
    stores = Stores(settings, exclusive=exclusive)
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA)])
    return stores, client


KINDS = ("file", "memory", "inline")


async def client_of(kind: str, folder: Path) -> PersistClient:
    """Over each pair of stores, and with all parts inline."""
    if kind == "file":
        return await PersistClient.open(folder / "state", TINY, SystemClock())
    return await PersistClient.in_memory(TINY if kind == "memory" else INLINE, SystemClock())


def updates(*rows: tuple[int | None, int, int]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(values, pa.int64()) for values in columns]
    return pa.table(arrays, names=["a", TIME, DIFF])


async def add(
    client: PersistClient, shard: str, upper: int, *rows: tuple[int | None, int, int]
) -> AppendCommitted | UpperMismatch:
    lower = (await client.state(shard)).upper
    parts = await client.write_parts(shard, updates(*rows))
    return await client.append([ShardAppend(shard, lower, upper, parts)])


async def rows_of(
    client: PersistClient, parts: Sequence[BatchPart], low: int = 0, high: int = EMPTY
) -> list[tuple[int, int, int]]:
    """The sum of all updates with low <= time < high."""
    total: dict[tuple[int, int], int] = {}
    for part in parts:
        table = await client.fetch(part, SCHEMA)
        for a, time, diff in zip(*[c.to_pylist() for c in table.columns], strict=True):
            if low <= time < high:
                total[(a, time)] = total.get((a, time), 0) + diff
    return sorted((a, time, diff) for (a, time), diff in total.items() if diff)


async def contents(
    reader: LeasedReader, client: PersistClient, as_of: int
) -> list[tuple[int, int]]:
    parts, upper = await reader.snapshot(as_of)
    assert upper > as_of
    total: dict[int, int] = {}
    for a, _, diff in await rows_of(client, parts, high=as_of + 1):
        total[a] = total.get(a, 0) + diff
    return sorted(item for item in total.items() if item[1])
