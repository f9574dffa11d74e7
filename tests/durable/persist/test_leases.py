"""Leases that were lost: who hears of it, and how."""

from __future__ import annotations

import anyio
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    INLINE,
    SCHEMA,
    Stores,
    add,
    contents,
)

from actors.durable.persist import NewShard
from actors.durable.persist.reader import why_missing
from actors.runtime.errors import (
    CorruptData,
    LeaseLost,
    ResourceClosed,
)


async def grown(stores: Stores, *, upper: int = 9) -> None:
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, since=2, upper=2)])
    await add(client, "s", upper, (1, 3, 1))


async def test_a_reader_learns_by_name_that_its_lease_is_lost() -> None:
    stores = Stores(exclusive=False)
    await grown(stores, upper=4)
    slow, other = stores.client(), stores.client()
    reader = await slow.open_reader("s", "slow")
    quick = await slow.open_reader("s", "quick")
    (part,), _ = await reader.snapshot(3)
    assert await contents(reader, slow, 3) == [(1, 1)]
    await slow.upkeep.heartbeat(reader.shard)
    reader.check()
    await other.maintain("s")  # sees the lease: from now on its time counts
    stores.clock.later_ms += stores.settings.reader_lease_ms + 1
    for upper in range(5, 12):
        await add(other, "s", upper, (1, upper - 1, 1))
    await other.maintain("s")
    await other.maintain("s")
    assert part.key not in await stores.keys()
    with pytest.raises(LeaseLost, match="lease of reader slow has expired"):
        await slow.fetch(part, SCHEMA)
    with pytest.raises(LeaseLost, match="lease of reader slow on shard s expired"):
        await slow.upkeep.heartbeat(reader.shard)
        reader.check()
    with pytest.raises(LeaseLost, match="reader quick"):
        await quick.snapshot(9)
    await reader.close()
    with pytest.raises(ResourceClosed):
        reader.check()
    with pytest.raises(LeaseLost, match="no reader holds it"):
        await slow.fetch(part, SCHEMA)


async def test_a_blob_that_is_missing_though_leased_is_the_stores_fault() -> None:
    stores = Stores(exclusive=False)
    await grown(stores, upper=4)
    client = stores.client()
    reader = await client.open_reader("s", "r")
    (part,), _ = await reader.snapshot(3)
    await stores.blob.delete(part.key)
    with pytest.raises(CorruptData, match="shard s names it"):
        await client.fetch(part, SCHEMA)
    state = replace(await client.state("s"), batches=())
    unnamed = why_missing("s", part.key, state, [reader])
    assert isinstance(unnamed, CorruptData)
    assert "reader r of this process holds it" in str(unnamed)
    await client.drop_shards(["s"])
    with pytest.raises(LeaseLost, match="shard s was dropped"):
        await client.fetch(part, SCHEMA)


async def test_a_reader_that_waits_hears_that_its_lease_is_lost() -> None:
    stores = Stores(INLINE, exclusive=False)
    await grown(stores)
    client, other = stores.client(), stores.client()
    reader = await client.open_reader("s", "r")
    caught: list[LeaseLost] = []

    async def wait() -> None:
        with pytest.raises(LeaseLost, match="the lease of reader r") as lost:
            await reader.next(9)
        caught.append(lost.value)

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await other.state("s")
            stores.clock.later_ms += stores.settings.reader_lease_ms + 1
            await other.upkeep.heartbeat("s")  # drops what was not renewed
            await client.recent_upper("s")
    assert caught


async def test_readers_of_a_dropped_shard_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    stores = Stores(INLINE, exclusive=False)
    await grown(stores)
    client, other = stores.client(), stores.client()
    reader = await client.open_reader("s", "r")
    await other.drop_shards(["s"])
    await client.upkeep.renew_leases()
    await reader.close()
    await client.upkeep.renew_leases()
    assert client._book.to_renew() == []
    assert not caplog.records, "nothing is wrong, and nothing is to be renewed"
