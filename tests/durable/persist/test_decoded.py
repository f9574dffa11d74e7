"""Parts kept as they were decoded: read once for all, bounded, failures told to their caller."""

from __future__ import annotations

from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from persist_world import SCHEMA, add  # type: ignore[import-not-found]

from actors.durable.persist import NewShard, PersistClient
from actors.durable.persist.decoded_parts import LARGEST_SHARE, DecodedParts, held_bytes
from actors.durable.persist.shard import BatchPart
from actors.runtime.errors import StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings


def part(key: str, inline: bytes | None = None) -> BatchPart:
    return BatchPart(key, 1, 1, 0, inline, False, 0, 0, 1)


def rows(count: int) -> pa.Table:
    return pa.table({"a": pa.array(range(count), pa.int64())})


class Store:
    """Counts reads; each waits until it is let go."""

    def __init__(self) -> None:
        self.reads = 0
        self.go = anyio.Event()
        self.errors: list[Exception] = []

    async def read(self) -> pa.Table:
        self.reads += 1
        await self.go.wait()
        if self.errors:
            raise self.errors.pop()
        return rows(1)


async def test_who_comes_meanwhile_waits_and_all_get_one_reading() -> None:
    decoded, store, found = DecodedParts(100_000), Store(), []

    async def get() -> None:
        found.append(await decoded.get(part("p"), store.read))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(get)
        await anyio.wait_all_tasks_blocked()
        store.go.set()
    assert (store.reads, len(found)) == (1, 5)
    assert all(table is found[0] for table in found)
    assert await decoded.get(part("p"), store.read) is found[0]
    decoded.drop("p")
    assert decoded.bytes == 0
    await decoded.get(part("p"), store.read)
    assert store.reads == 2


async def test_a_failure_is_told_to_its_caller_only() -> None:
    decoded, store, told = DecodedParts(100_000), Store(), []
    store.errors = [StorageError("the disk is gone", determinate=False)]

    async def get() -> None:
        try:
            told.append(await decoded.get(part("p"), store.read))
        except StorageError as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(get)
        await anyio.wait_all_tasks_blocked()
        store.go.set()
    assert sorted(isinstance(one, StorageError) for one in told) == [False, False, True]


async def test_a_canceled_reader_leaves_the_others_alone() -> None:
    decoded, store, found = DecodedParts(100_000), Store(), []

    async def get(scope: anyio.CancelScope) -> None:
        with scope:
            found.append(await decoded.get(part("p"), store.read))

    first = anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(get, first)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(get, anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        store.go.set()
    assert (store.reads, len(found)) == (2, 1)


def test_it_is_bounded_by_bytes_and_keeps_what_was_used_last() -> None:
    size = held_bytes("p0", rows(10))
    decoded = DecodedParts(LARGEST_SHARE * size)
    decoded.put(part("large"), rows(11))
    assert decoded.bytes == 0, "it would drive out the others"
    for number in range(LARGEST_SHARE + 1):
        decoded.put(part(f"p{number}"), rows(10))
    assert decoded.bytes == LARGEST_SHARE * size
    decoded.put(part("", b"inline"), rows(9))
    assert LARGEST_SHARE * (size - 8) < decoded.bytes <= LARGEST_SHARE * size
    for number in range(LARGEST_SHARE + 1):
        decoded.drop(f"p{number}")
    assert decoded.bytes == held_bytes(b"inline", rows(9))


def test_parts_of_a_few_rows_count_with_what_a_table_takes() -> None:
    decoded = DecodedParts(1 << 20)
    for number in range(5000):
        decoded.put(part("", b"%d" % number + bytes(700)), rows(3))
    # Arrow's own objects and the bytes of the part take some 2 KiB, the values 24 bytes.
    kept = [n for n in range(5000) if _kept(decoded, b"%d" % n + bytes(700))]
    assert 100 < len(kept) < (1 << 20) // 1900
    assert kept == list(range(5000 - len(kept), 5000))


def _kept(decoded: DecodedParts, inline: bytes) -> bool:
    before = decoded.bytes
    decoded.drop(inline)
    return decoded.bytes < before


@pytest.mark.parametrize("bytes_max", [1, 1 << 20])
async def test_what_was_written_is_there_without_a_reading(tmp_path: Path, bytes_max: int) -> None:
    settings = Settings(inline_part_bytes_max=1, decoded_parts_bytes_max=bytes_max)
    client = await PersistClient.open(tmp_path, settings, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA)])
    await add(client, "s", 5, (1, 2, 1))
    (written,) = (await client.state("s")).batches[0].parts
    path = client.path(written)
    assert path is not None
    await SystemClock().run_blocking(Path(path).unlink)
    if bytes_max > 1:
        assert (await client.fetch(written, SCHEMA)).num_rows == 1
    else:
        with pytest.raises(StorageError, match=written.key):
            await client.fetch(written, SCHEMA)
    await client.close()
