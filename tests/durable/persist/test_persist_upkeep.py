"""Shards through their client: holds, leases, compaction and collection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Clock,
    Stores,
    add,
    contents,
    one_shard,
    rows_of,
    updates,
)

from actors.durable.persist import (
    AppendCommitted,
    CompareAndSet,
    LeasedReader,
    NewShard,
    PersistClient,
    ShardAppend,
    shard_key,
)
from actors.runtime.errors import LeaseLost, ReadBelowSince, StorageError, UnknownObject
from actors.runtime.kernel import SystemClock
from files_below import files_below  # type: ignore[import-not-found]


async def test_holds_move_the_since(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA, holds={"a": 0}), NewShard("t", SCHEMA)])
    await add(client, "s", 9, (1, 2, 1))
    await client.set_holds([("s", "b", 3), ("t", "b", 1)])
    assert (await client.state("s")).since == 0
    append = ShardAppend("t", 0, 9, (), holds=(("s", "a", 5), ("s", "b", 4)))
    await client.append([append])
    assert (await client.state("s")).since == 4
    reader = await client.open_reader("s", "r")
    with pytest.raises(ReadBelowSince, match="3 is below its since 4"):
        await reader.snapshot(3)
    with pytest.raises(ReadBelowSince):
        await reader.next(3)
    assert await contents(reader, client, 4) == [(1, 1)]
    await client.set_hold("s", "b", 2)
    assert (await client.state("s")).holds == {"a": 5, "b": 4}
    with pytest.raises(ReadBelowSince, match="cannot hold 2 for c"):
        await client.set_hold("s", "c", 2)
    await client.drop_hold("s", "b")
    assert (await client.state("s")).since == 4, "the reader holds it"
    await reader.downgrade(7)
    await client.set_hold("s", "a", 6)
    assert (await client.state("s")).since == 6
    await client.drop_hold("s", "nobody")
    await client.drop_hold("x", "nobody")
    with pytest.raises(UnknownObject):
        await client.set_hold("x", "a", 1)


async def test_compaction_keeps_contents_and_bounds_batches(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    reader = await client.open_reader("s", "r")
    for time in range(40):
        retracted = [(time % 3, time, -1)] if time > 2 else []
        await add(client, "s", time + 1, (time % 3, time, 1), *retracted)
        await client.set_hold("s", "h", max(0, time - 5))
        await reader.downgrade(max(0, time - 5))
        await client.maintain("s")
        assert len((await client.state("s")).batches) <= 4
        if time > 10:
            for as_of in range(time - 5, time + 1):
                assert await contents(reader, client, as_of) == [(0, 1), (1, 1), (2, 1)]
    state = await client.state("s")
    assert sum(part.rows for batch in state.batches for part in batch.parts) < 40
    await reader.close()
    await client.maintain("s")
    await client.maintain("s")
    state = await client.state("s")
    assert state.retired == ()
    assert state.inline_bytes <= 6000
    assert await client.collect_orphans() == 0


async def test_a_merge_larger_than_memory_goes_through_files(tmp_path: Path) -> None:
    settings = replace(TINY, part_bytes_target=4096)
    client = await PersistClient.open(tmp_path, settings, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    for time in range(6):
        added = [(n, time, 1) for n in range(500)]
        dropped = [(n, time, -1) for n in range(400) if time]
        await add(client, "s", time + 1, *added, *dropped)
    await client.set_hold("s", "h", 5)
    await client.maintain("s")
    state = await client.state("s")
    assert len(state.batches) == 1
    rows = [part.rows for part in state.batches[0].parts]
    assert sum(rows) == 600
    assert len(rows) > 3, "more than is merged at once"
    assert all(one + other > 4096 // 24 for one, other in pairwise(rows)), "each is full"
    reader = await client.open_reader("s", "r")
    found = dict(await contents(reader, client, 5))
    assert found == {n: 1 if n < 400 else 6 for n in range(500)}
    assert [path.name for path in files_below(tmp_path / "scratch")] == []
    await client.close()


async def test_a_reader_that_opens_while_the_since_moves_holds_what_it_is_told() -> None:
    stores = Stores()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 9, (1, 2, 1))
    entered, go_on = anyio.Event(), anyio.Event()
    original = stores.consensus.compare_and_set

    async def slow(ops: Sequence[CompareAndSet]) -> bool:
        entered.set()
        await go_on.wait()
        done: bool = await original(ops)
        return done

    stores.consensus.compare_and_set = slow
    readers: list[LeasedReader] = []

    async def open_() -> None:
        readers.append(await client.open_reader("s", "r"))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(client.set_hold, "s", "h", 5)
            await entered.wait()
            group.start_soon(open_)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
    assert readers[0].since == 5
    await client.set_hold("s", "h", 8)
    assert (await client.state("s")).since == 5
    assert await contents(readers[0], client, 5) == [(1, 1)]


async def test_a_part_that_is_still_held_outlives_the_release_of_another() -> None:
    stores = Stores(exclusive=False)
    writer, other = stores.client(), stores.client()
    await writer.create_shards([NewShard("s", SCHEMA)])
    for time in range(5):
        await add(writer, "s", time + 1, (time, time, 1))
    reader = await other.open_reader("s", "r")
    parts, _ = await reader.snapshot(4)
    await writer.maintain("s")
    assert {part.key for part in parts} <= {gone.key for gone in (await writer.state("s")).retired}
    reader.release([parts[0].key])
    await other.upkeep.heartbeat("s")
    await writer.upkeep.collect("s")
    assert {part.key for part in parts[1:]} <= await stores.keys()
    reader.release([part.key for part in parts])
    await other.upkeep.heartbeat("s")
    await writer.upkeep.collect("s")
    assert not {part.key for part in parts} & await stores.keys()


async def test_who_always_holds_some_part_holds_no_others() -> None:
    """A reader under steady traffic takes the next part before it gives back the last."""
    stores = Stores(exclusive=False)
    writer, other = stores.client(), stores.client()
    await writer.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    reader, held = await other.open_reader("s", "r"), []
    for time in range(60):
        await add(writer, "s", time + 1, (time, time, 1))
        await other.recent_upper("s")
        batches, _ = await reader.next(time)
        held.append([part.key for batch in batches for part in batch.parts])
        if time:
            reader.release(set(held[-2]) - set(held[-1]))
        await reader.downgrade(time)
        await writer.set_hold("s", "h", time)
        await other.upkeep.heartbeat("s")
        await writer.maintain("s")
        state = await writer.state("s")
        assert len(state.retired) <= 12, time
        assert set(held[-1]) <= await stores.keys()


async def test_a_part_in_use_is_not_deleted() -> None:
    stores, client = await one_shard()
    for time in range(5):
        await add(client, "s", time + 1, (time, time, 1))
    reader = await client.open_reader("s", "r")
    parts, _ = await reader.snapshot(4)
    before = await stores.keys()
    assert before == {part.key for part in parts}
    await client.maintain("s")
    assert before < await stores.keys()
    assert await rows_of(client, parts) == [(n, n, 1) for n in range(5)]
    reader.release([parts[0].key, "", "unknown"])
    await client.maintain("s")
    assert parts[0].key not in await stores.keys()
    with pytest.raises(LeaseLost):
        await client.fetch(parts[0], SCHEMA)
    assert len(await rows_of(client, parts[1:])) == 4
    await reader.close()
    await client.maintain("s")
    assert await stores.keys() == (await client.state("s")).blob_keys()
    assert (await client.state("s")).retired == ()


async def test_leases_of_another_process_keep_since_and_parts_until_they_expire() -> None:
    stores = Stores(exclusive=False)
    here, there = stores.client(), stores.client()
    await here.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    for time in range(5):
        await add(here, "s", time + 1, (time, time, 1))
    reader = await there.open_reader("s", "r")
    parts, _ = await reader.snapshot(4)
    await here.set_hold("s", "h", 4)
    assert (await here.state("s")).since == 0
    await here.maintain("s")
    assert len((await here.state("s")).retired) == 5
    assert len(await rows_of(there, parts)) == 5
    sets = stores.consensus.sets
    await there.maintain("s")
    assert stores.consensus.sets <= sets + 1, "a lease is not written while it is young"
    stores.clock.later_ms = stores.settings.reader_lease_ms + 1
    await add(here, "s", 6, (5, 5, 1))
    assert (await here.state("s")).since == 4
    await here.maintain("s")
    assert (await here.state("s")).retired == ()
    await there.append([ShardAppend("s", 5, 7, ())])  # a mismatch: it reads the state again
    with pytest.raises(LeaseLost, match="reader r on shard s expired"):
        await reader.snapshot(5)
    with pytest.raises(LeaseLost):
        await there.fetch(parts[0], SCHEMA)
    await reader.close()


async def test_readers_of_one_name_in_two_processes_have_two_leases() -> None:
    stores = Stores(exclusive=False)
    here, there = stores.client(), stores.client()
    await here.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(here, "s", 1, (1, 0, 1))
    mine, theirs = await here.open_reader("s", "r"), await there.open_reader("s", "r")
    assert mine.lease_id != theirs.lease_id
    await mine.close()
    await here.set_hold("s", "h", 1)
    await here.maintain("s")
    state = await here.state("s")
    assert (set(state.leases), state.since) == ({theirs.lease_id}, 0)
    assert await contents(theirs, there, 0) == [(1, 1)]


@pytest.mark.parametrize("ahead_ms", [-(10**9), 10**9])
async def test_a_lease_runs_out_by_no_clock_that_may_be_wrong(ahead_ms: int) -> None:
    """Its reader renews it now and then; the other process's clock shows anything."""
    stores = Stores(exclusive=False)
    ours, theirs = Clock(), Clock()
    here, there = stores.client(ours), stores.client(theirs)
    await here.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    reader = await there.open_reader("s", "r")
    lease_ms = stores.settings.reader_lease_ms
    ours.ahead_ms = ahead_ms
    for number in range(6):
        await add(here, "s", number + 1, (number, number, 1))
        await here.set_hold("s", "h", number + 1)
        assert (await here.state("s")).since == 0
        ours.later_ms += lease_ms // 2
        theirs.later_ms += lease_ms // 2
        theirs.ahead_ms -= lease_ms
        sets = stores.consensus.sets
        await there.maintain("s")
        assert stores.consensus.sets > sets, "it is renewed in time, whatever the clock shows"
    assert await contents(reader, there, 3) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    ours.later_ms += lease_ms
    await here.set_hold("s", "h", 6)
    await add(here, "s", 9)
    ours.later_ms += lease_ms
    await add(here, "s", 10)
    assert (await here.state("s")).since == 6
    theirs.later_ms += lease_ms
    await there.maintain("s")
    with pytest.raises(LeaseLost, match="expired"):
        await reader.snapshot(5)


async def test_an_expired_lease_holds_nothing_back_in_a_shard_that_nobody_writes_to() -> None:
    """A reader was killed, and no write comes by that would drop its lease."""
    stores = Stores()
    alone = stores.client()
    stores.exclusive = False
    beside = stores.client()
    await alone.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(alone, "s", 1, (1, 0, 1))
    await beside.open_reader("s", "r")
    lease_ms = stores.settings.reader_lease_ms
    await alone.reclaim("s")
    for _ in range(4):  # as often as a lease is renewed
        await alone.set_hold("s", "h", 1)
        assert (await alone.state("s")).since == 0
        stores.clock.later_ms += lease_ms // 4
        await alone.reclaim("s")
    assert (await alone.state("s")).since == 1
    assert (await alone.state("s")).leases == {}


async def test_one_that_is_alone_keeps_the_leases_of_those_that_read_beside_it() -> None:
    stores = Stores()
    alone = stores.client()
    stores.exclusive = False
    beside = stores.client()
    await alone.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(alone, "s", 1, (1, 0, 1))
    reader = await beside.open_reader("s", "r")
    parts, _ = await reader.snapshot(0)
    for number in range(2, 9):
        await add(alone, "s", number, (number, number - 1, 1))
        await alone.set_hold("s", "h", number)
        await alone.maintain("s")
    assert (await alone.state("s")).since == 0
    assert await rows_of(beside, parts) == [(1, 0, 1)]
    stores.clock.later_ms += stores.settings.reader_lease_ms
    await alone.set_hold("s", "h", 9)
    assert (await alone.state("s")).since == 9
    await alone.maintain("s")
    with pytest.raises(LeaseLost):
        await rows_of(beside, parts)


async def test_a_lease_of_a_dead_process_does_not_outlive_it_where_we_are_alone() -> None:
    stores = Stores()
    dead = stores.client()
    await dead.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await dead.open_reader("s", "r")
    await add(dead, "s", 5, (1, 2, 1))
    client = stores.client()
    assert set((await client.state("s")).leases) == {"r"}
    await client.set_hold("s", "h", 3)
    state = await client.state("s")
    assert (state.since, state.leases) == (3, {})


async def test_a_closed_reader_holds_nothing_back_in_a_shard_that_nobody_writes_to() -> None:
    stores, client = await one_shard()
    await client.set_hold("s", "h", 0)
    reader = await client.open_reader("s", "r")
    await add(client, "s", 1, (1, 0, 1))
    await client.set_hold("s", "h", 1)
    await reader.close()
    assert (await client.state("s")).since == 0, "its lease goes with the next write"
    await client.reclaim("s")
    state = await client.state("s")
    assert (state.since, state.leases) == (1, {})
    sets = stores.consensus.sets
    await client.open_reader("s", "another")
    await client.reclaim("s")
    assert stores.consensus.sets == sets, "nothing is held back"


async def test_opening_and_closing_readers_costs_no_write_where_we_are_alone() -> None:
    stores = Stores()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    sets = stores.consensus.sets
    one, two = [await client.open_reader("s", "same") for _ in range(2)]
    assert one.lease_id != two.lease_id
    await one.close()
    assert stores.consensus.sets == sets
    await client.set_hold("s", "h", 5)
    assert (await client.state("s")).since == 0
    assert set((await client.state("s")).leases) == {two.lease_id}


async def test_a_dropped_shard_leaves_no_blob() -> None:
    stores, client = await one_shard()
    await add(client, "s", 5, (1, 2, 1))
    await add(client, "s", 6, (2, 5, 1))
    reader = await client.open_reader("s", "r")
    parts, _ = await reader.snapshot(4)
    await client.drop_shards(["s"])
    assert await stores.keys() == {part.key for part in parts}
    assert await rows_of(client, parts) == [(1, 2, 1)]
    assert await client.collect_orphans() == 0
    stores.clock.later_ms = TINY.blob_orphan_grace_ms
    assert await client.collect_orphans() == 0, "a reader uses it"
    await reader.close()
    assert await client.collect_orphans() == 1
    assert await stores.keys() == set()


async def test_a_compaction_that_lost_the_race_changes_nothing() -> None:
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA)])
    for time in range(6):
        await add(one, "s", time + 1, (time, time, 1))
    assert len((await two.state("s")).batches) == 6
    await one.maintain("s")
    compacted = await one.state("s")
    await two.maintain("s")
    fresh = stores.client()
    assert (await fresh.state("s")).batches == compacted.batches
    reader = await fresh.open_reader("s", "r")
    assert len(await contents(reader, fresh, 5)) == 6


async def test_a_compaction_that_surely_failed_leaves_no_blob() -> None:
    stores, client = await one_shard()
    for time in range(6):
        await add(client, "s", time + 1, (time, time, 1))
    before = await stores.keys()
    stores.consensus.fail = "determinate"
    with pytest.raises(StorageError, match="made up"):
        await client.maintain("s")
    assert await stores.keys() == before


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_open_failure_of_a_compaction_loses_nothing(fail: str) -> None:
    stores, client = await one_shard()
    for time in range(6):
        await add(client, "s", time + 1, (time, time, 1))
    stores.consensus.fail = fail
    await client.maintain("s")
    state = await stores.client().state("s")
    assert len(state.batches) <= 4
    assert await stores.keys() == state.blob_keys()
    reader = await client.open_reader("s", "r")
    assert len(await contents(reader, client, 5)) == 6


async def test_many_actors_on_one_shard(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    won: list[int] = []

    async def write(number: int) -> None:
        while True:
            upper = await client.upper("s")
            parts = await client.write_parts("s", updates((number, upper, 1)))
            found = await client.append([ShardAppend("s", upper, upper + 1, parts)])
            if isinstance(found, AppendCommitted):
                won.append(number)
                return
            await client.discard_parts(parts)

    async def tidy() -> None:
        for _ in range(5):
            await client.maintain("s")
            await client.set_hold("s", "h", max(0, await client.upper("s") - 1))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(write, number)
                if number % 4 == 0:
                    group.start_soon(tidy)
    assert sorted(won) == list(range(12))
    reader = await client.open_reader("s", "r")
    assert await contents(reader, client, 11) == [(n, 1) for n in range(12)]
    assert (await client.state("s")).id == "s"
    assert await client.head(shard_key("s")) is not None
