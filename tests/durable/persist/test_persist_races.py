"""What several clients of the same stores do to one another: found by simulating shards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    INLINE,
    SCHEMA,
    Stores,
    add,
    contents,
    rows_of,
    updates,
)

from actors.durable.persist import BatchPart, CompareAndSet, NewShard, PersistClient, ShardAppend
from actors.durable.persist.memory_stores import MemoryConsensus
from actors.runtime.errors import LeaseLost, StorageError


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


async def test_what_was_compacted_in_doubt_and_replaced_stays_for_its_readers() -> None:
    """The answer to a compaction was lost, and what it wrote was read and replaced by another
    process before that was found out: it took its parts for never linked, and deleted them under
    the reader (seed 1052774)."""
    stores = Stores(
        replace(INLINE, inline_part_bytes_max=1, batches_per_shard_max=1), exclusive=False
    )
    one, other = await pair(stores)
    for end in range(1, 4):
        await add(one, "s", end, (end, end - 1, 1))
    reader = await other.open_reader("s", "r")
    await one._machine.refresh("s")
    held: list[BatchPart] = []

    async def read_and_replace(_: Sequence[CompareAndSet]) -> None:
        await other._machine.refresh("s")
        parts = (await reader.snapshot(2))[0]
        held.extend(parts)
        await add(other, "s", 4, (4, 3, 1))
        await other.maintain("s")
        assert not {part.key for part in parts} & (await other.state("s")).live_keys()

    stores.consensus.fail, stores.consensus.meanwhile = "after", read_and_replace
    await one.maintain("s")
    assert len(held) == 1
    assert held[0].key in await stores.keys()
    assert await rows_of(other, held) == [(1, 0, 1), (2, 1, 1), (3, 2, 1)]
    await reader.close()
    await other.maintain("s")
    assert held[0].key not in await stores.keys()  # and then it goes


async def test_behind_an_attempt_in_doubt_no_failure_says_that_nothing_happened() -> None:
    """A set took effect after it was given up, the next attempt met it, and reading what it was
    failed: that failure said that surely nothing was appended, and who believed it deleted the
    parts (seed 1105148)."""
    stores = Stores(exclusive=False)
    one, other = await pair(stores)
    parts = await one.write_parts("s", updates((1, 0, 1)))
    late: list[Sequence[CompareAndSet]] = []

    async def keep(ops: Sequence[CompareAndSet]) -> None:
        late.append(ops)

    class Late(MemoryConsensus):
        """The set that was given up comes first."""

        async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
            if late:
                assert await stores.consensus.compare_and_set(late.pop())
                stores.consensus.reads_fail = 1
            done: bool = await stores.consensus.compare_and_set(ops)
            return done

    one._machine._consensus = late_one = Late()
    late_one.head = stores.consensus.head  # type: ignore[method-assign]
    stores.consensus.fail, stores.consensus.meanwhile = "before", keep
    with pytest.raises(StorageError, match="earlier attempt may have succeeded") as told:
        await one.append([ShardAppend("s", 0, 1, parts)])
    assert not told.value.determinate
    await one.discard_parts(parts)  # as of a copy that is not known to be there: they stay
    await other._machine.refresh("s")
    assert await contents(await other.open_reader("s", "r"), other, 0) == [(1, 1)]
