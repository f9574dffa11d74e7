"""However many small appends: few parts, a small document, whoever does the upkeep."""

from __future__ import annotations

import anyio
import pytest
from msgspec.structs import replace
from persist_world import SCHEMA, Stores, add, one_shard, rows_of  # type: ignore[import-not-found]

from actors.durable.persist import NewShard, PersistClient
from actors.durable.persist.documents import encode, size_of
from actors.runtime.errors import StorageError
from actors.runtime.settings import Settings

APPENDS = 1000
PARTS_MAX = 32
STATE_BYTES_MAX = 256 * 1024
SETTINGS = Settings(decoded_parts_bytes_max=1)


async def grown(client: PersistClient, appends: int, every: int | None) -> tuple[int, int]:
    """Appends, with upkeep after each `every`; the most parts and bytes that there ever were."""
    await client.create_shards([NewShard("s", SCHEMA, holds={"retain": 0})])
    parts = size = 0
    for number in range(appends):
        await add(client, "s", number + 1, (number, number, 1))
        if every and number % every == every - 1:
            await client.maintain("s")
        state = await client.state("s")
        parts = max(parts, sum(len(batch.parts) for batch in state.batches))
        if number % 5 == 4:
            size = max(size, size_of(encode(state)))
    return parts, size


@pytest.mark.parametrize(
    "settings", [SETTINGS, replace(SETTINGS, inline_part_bytes_max=1)], ids=["inline", "blobs"]
)
async def test_small_appends_leave_few_parts_and_a_small_state(settings: Settings) -> None:
    stores = Stores(settings)
    client = stores.client()
    parts, size = await grown(client, APPENDS, every=8)
    assert parts <= PARTS_MAX
    assert size <= STATE_BYTES_MAX
    reader = await client.open_reader("s", "r")
    found, _ = await reader.snapshot(APPENDS - 1)
    assert len(found) <= PARTS_MAX
    assert await rows_of(client, found) == [(n, n, 1) for n in range(APPENDS)]
    await reader.close()
    await client.maintain("s")
    assert await stores.keys() <= (await client.state("s")).blob_keys(), "blobs nobody names"


@pytest.mark.parametrize("inline", [1, 16 * 1024], ids=["blobs", "inline"])
async def test_without_any_upkeep_the_state_stays_bounded(inline: int) -> None:
    limit = 32 * 1024
    settings = replace(
        SETTINGS,
        inline_part_bytes_max=inline,
        state_bytes_max=limit,
        inline_bytes_per_shard_max=limit // 2,
    )
    client = Stores(settings).client()
    appends = APPENDS
    _, size = await grown(client, appends, every=None)
    assert limit // 2 < size <= limit, "it is what the limit says that bounds it"
    reader = await client.open_reader("s", "r")
    found, _ = await reader.snapshot(appends - 1)
    assert await rows_of(client, found) == [(n, n, 1) for n in range(appends)]


async def test_an_append_does_not_fail_with_the_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(
        SETTINGS,
        state_bytes_max=2000,
        inline_bytes_per_shard_max=2000,
        inline_part_bytes_max=1,
        batches_per_shard_max=2,
    )
    client = Stores(settings).client()
    await client.create_shards([NewShard("s", SCHEMA)])
    asked: list[str] = []

    async def full(shard: str) -> None:
        asked.append(shard)
        raise StorageError("made up", determinate=True)

    monkeypatch.setattr(client.upkeep, "_compact_once", full)
    for number in range(12):
        await add(client, "s", number + 1, (number, number, 1))
    assert asked
    assert await client.upper("s") == 12


async def test_appends_wait_for_a_collection_only_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An append waited for a store to delete hundreds of blobs, one after the other: 30 s and
    more, until its part was too old to be linked. Without any wait the document grows for ever."""
    limit = 8_000
    settings = replace(
        SETTINGS, state_bytes_max=limit, inline_part_bytes_max=1, batches_per_shard_max=2
    )
    stores, client = await one_shard(settings)
    deleting, go = anyio.Event(), anyio.Event()
    delete = stores.blob.delete
    sizes: list[int] = []

    async def slow(key: str) -> bool:
        deleting.set()
        await go.wait()
        there: bool = await delete(key)
        return there

    async def appending() -> None:
        for number in range(4, 160):
            await add(client, "s", number + 1, (number, number, 1))
            sizes.append(size_of(encode(await client.state("s"))))

    monkeypatch.setattr(stores.blob, "delete", slow)
    async with anyio.create_task_group() as group:
        with anyio.fail_after(60):
            for number in range(4):
                await add(client, "s", number + 1, (number, number, 1))
            group.start_soon(client.maintain, "s")
            await deleting.wait()
            group.start_soon(appending)
            while not client.upkeep._collecting.statistics().tasks_waiting and len(sizes) < 156:
                await anyio.sleep(0.001)
        assert len(sizes) < 156, f"nothing bounds the document: {sizes[-1]} bytes"
        assert limit < sizes[-1] < 2 * limit, sizes[-1]
        assert sum(size > 0.75 * limit for size in sizes) > 5, "within the limit nobody waits"
        go.set()
    assert await client.upper("s") == 160
    assert sizes[-1] <= 2 * limit
    await client.maintain("s")
    assert await stores.keys() <= (await client.state("s")).blob_keys(), "blobs nobody names"


async def test_what_is_deleted_is_forgotten_little_by_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a collection of much that is cut off has not to begin anew, nor to say it all at once."""
    monkeypatch.setattr("actors.durable.persist.upkeep._COLLECTED_AT_ONCE", 10)
    stores, client = await one_shard(
        replace(SETTINGS, inline_part_bytes_max=1, batches_per_shard_max=100)
    )
    for number in range(35):
        await add(client, "s", number + 1, (number, number, 1))
    left: list[int] = []
    delete = stores.blob.delete

    async def counted(key: str) -> bool:
        left.append(len((await client.state("s")).retired))
        there: bool = await delete(key)
        return there

    monkeypatch.setattr(stores.blob, "delete", counted)
    assert await client.upkeep.compact("s") == (35, 1)
    assert [left.count(count) for count in (35, 25, 15, 5)] == [10, 10, 10, 5]
    state = await client.state("s")
    assert state.retired == ()
    assert await stores.keys() == state.blob_keys()
