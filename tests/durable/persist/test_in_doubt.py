"""Sets whose callers were gone before their answer came: a process that is alone does not believe
what they may still change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    FlakyConsensus,
    Stores,
    add,
    contents,
    one_shard,
    updates,
)

from actors.durable.persist import (
    AppendCommitted,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
)
from actors.durable.persist.location import VersionedData
from actors.durable.persist.memory_stores import MemoryConsensus
from actors.durable.persist.shard import TABLES_UPPER
from actors.runtime.errors import StorageError
from actors.testing.patience import PATIENCE_S


class SlowConsensus(MemoryConsensus):
    """One set at a time waits, before it takes effect or before its answer; an abandoned one takes
    effect when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: str | None = None
        self.waiting = asyncio.Event()
        self.late: Sequence[CompareAndSet] = ()
        self.sets_fail = False
        self.sets = 0

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        self.sets += 1
        if self.sets_fail:
            raise StorageError("the disk is full", determinate=True)
        wait, self.wait = self.wait, None
        if wait == "before":
            self.late = ops
        done = wait != "before" and await super().compare_and_set(ops)
        if wait is not None:
            self.waiting.set()
            await asyncio.Event().wait()
        return done

    async def land(self) -> bool:
        """The abandoned set reaches the store at last; whether it still fits."""
        return await super().compare_and_set(self.late)


async def world(*, tables: bool = False) -> tuple[SlowConsensus, PersistClient]:
    stores = Stores()
    stores.consensus = consensus = SlowConsensus()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0}, tables=tables)])
    return consensus, client


async def abandon(
    consensus: SlowConsensus, client: PersistClient, wait: str, **more: object
) -> None:
    """An append of [0, 1) whose task is cancelled in the middle of its set."""
    parts = await client.write_parts("s", updates((1, 0, 1)))
    consensus.wait = wait
    task = asyncio.ensure_future(client.append([ShardAppend("s", 0, 1, parts)], **more))  # type: ignore[arg-type]
    await consensus.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_mismatch_is_told_from_what_an_abandoned_set_did() -> None:
    """The cache of a process that was alone was believed for good (seed 1201287)."""
    consensus, client = await world()
    await abandon(consensus, client, "after")
    assert await client.append([ShardAppend("s", 3, 4, ())]) == UpperMismatch("s", 3, 1)
    assert await contents(await client.open_reader("s", "r"), client, 0) == [(1, 1)]


async def test_who_waits_hears_of_what_an_abandoned_set_did() -> None:
    consensus, client = await world()
    waiter = asyncio.ensure_future(client.wait_upper("s", 0))
    await abandon(consensus, client, "after")
    assert await asyncio.wait_for(waiter, PATIENCE_S) == 1


async def test_an_abandoned_set_comes_too_late_once_its_document_was_believed() -> None:
    consensus, client = await world()
    await abandon(consensus, client, "before")
    assert await client.upper("s") == 0
    assert not await consensus.land()
    assert (await client.recent_upper("s"), await client.upper("s")) == (0, 0)
    sets = consensus.sets
    assert await client.append([ShardAppend("s", 3, 4, ())]) == UpperMismatch("s", 3, 0)
    assert consensus.sets == sets  # it was settled once


async def test_an_abandoned_set_that_comes_first_is_seen() -> None:
    consensus, client = await world()
    await abandon(consensus, client, "before")
    assert await consensus.land()
    assert await client.upper("s") == 1
    assert consensus.sets == 2  # it has moved on: nothing is in doubt


async def test_who_is_out_of_attempts_leaves_a_doubt_too() -> None:
    stores, client = await one_shard()
    late: list[Sequence[CompareAndSet]] = []

    async def keep(ops: Sequence[CompareAndSet]) -> None:
        late.append(ops)
        stores.consensus.reads_fail = 100  # nor can it be read back

    stores.consensus.fail, stores.consensus.meanwhile = "before", keep
    with pytest.raises(StorageError) as told:
        await add(client, "s", 1, (1, 0, 1))
    assert not told.value.determinate
    stores.consensus.reads_fail = 0
    assert await client.upper("s") == 0
    assert not await stores.consensus.compare_and_set(late[0])


async def test_while_nothing_can_be_written_what_is_in_doubt_is_read_each_time() -> None:
    consensus, client = await world()
    await abandon(consensus, client, "before")
    consensus.sets_fail = True
    assert await client.upper("s") == 0
    assert await consensus.land()  # the doubt was right
    assert await client.upper("s") == 1


async def test_a_set_of_ones_own_ends_the_doubt() -> None:
    consensus, client = await world()
    await abandon(consensus, client, "before")
    parts = await client.write_parts("s", updates((2, 0, 1)))
    await client.append([ShardAppend("s", 0, 1, parts)])
    assert not await consensus.land()
    assert await contents(await client.open_reader("s", "r"), client, 0) == [(2, 1)]


async def test_the_tables_upper_is_in_doubt_as_shards_are() -> None:
    consensus, client = await world(tables=True)
    waiter = asyncio.ensure_future(client.wait_upper("s", 0))
    await abandon(consensus, client, "after", tables_upper=(0, 1))
    assert await asyncio.wait_for(waiter, PATIENCE_S) == 1
    assert await client.tables_upper() == 1


async def test_a_tables_upper_that_was_believed_stays() -> None:
    consensus, client = await world(tables=True)
    await abandon(consensus, client, "before", tables_upper=(0, 1))
    assert await client.tables_upper() == 0
    assert not await consensus.land()
    head = await consensus.head(TABLES_UPPER)
    assert isinstance(head, VersionedData)
    await client.append([], tables_upper=(0, 5))
    assert await client.tables_upper() == 5
    assert await client.upper("s") == 5


async def test_what_is_read_in_two_halves_is_no_answer() -> None:
    """An append over two shards was given up and took effect between the reads of the first and of
    the second: the first had no mark, the second was another upper's (seeds 1734602, 1743213)."""
    late: list[Sequence[CompareAndSet]] = []

    class Landing(FlakyConsensus):  # type: ignore[misc]
        async def head(self, key: str) -> VersionedData | None:
            if key == "shard/t" and late:
                assert await self.compare_and_set(late.pop())
            found: VersionedData | None = await super().head(key)
            return found

    stores = Stores()
    stores.consensus = consensus = Landing()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA), NewShard("t", SCHEMA)])

    async def keep(ops: Sequence[CompareAndSet]) -> None:
        late.append(ops)

    consensus.fail, consensus.meanwhile = "before", keep
    appends = [ShardAppend(s, 0, 1, await client.write_parts(s, updates((1, 0, 1)))) for s in "st"]
    assert await client.append(appends) == AppendCommitted((("s", 1), ("t", 1)))
    assert not late
