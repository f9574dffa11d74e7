"""What several clients of the same stores do to one another: found by simulating shards."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    INLINE,
    SCHEMA,
    Stores,
    add,
    contents,
)

from actors.errors import LeaseLost
from actors.persist import NewShard, PersistClient


async def pair(stores: Stores) -> tuple[PersistClient, PersistClient]:
    one, other = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    assert await other.upper("s") == 0
    return one, other


async def test_a_retired_part_that_is_gone_is_a_lost_lease_not_damage() -> None:
    """Its file is deleted before the state forgets it: who came in between was told that a file
    was missing, and to restore it from a copy (seed 44)."""
    stores = Stores(exclusive=False)
    one, other = await pair(stores)
    for upper in range(1, 6):
        await add(one, "s", upper, (upper, upper - 1, 1))
    await other._machine.refresh("s")
    (part,) = (await other.state("s")).batches[0].parts
    reader = await other.open_reader("s", "r")
    await reader.snapshot(3)
    await reader.close()  # and yet somebody reads on
    await one.maintain("s")
    state = await other._machine.refresh("s")
    assert state is not None
    assert part.key in state.blob_keys() - state.live_keys()
    await stores.blob.delete(part.key)
    with pytest.raises(LeaseLost, match="compacted away"):
        await other.fetch(part, SCHEMA)


async def test_what_is_merged_with_nothing_is_merged() -> None:
    """An inline part that was merged with an empty batch came out as it was, was taken for an
    earlier attempt's, and the batches stayed two for ever (seed 100021)."""
    stores = Stores(replace(INLINE, batches_per_shard_max=1))
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 1)
    await add(client, "s", 3, (1, 1, 1), (2, 2, 1))
    assert len((await client.state("s")).batches) == 2
    await client.maintain("s")
    (batch,) = (await client.state("s")).batches
    assert (batch.lower, batch.upper) == (0, 3)
    assert await contents(await client.open_reader("s", "r"), client, 2) == [(1, 1), (2, 1)]
