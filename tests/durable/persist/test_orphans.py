"""Blobs that no state names, and when they may go."""

from __future__ import annotations

from itertools import count

import anyio
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Clock,
    Stores,
    add,
    one_shard,
    rows_of,
    updates,
)

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
    shard_key,
)
from actors.durable.persist.orphans import SuspectBlobs
from actors.runtime.errors import InvalidUsage, StorageError

GRACE_MS = TINY.blob_orphan_grace_ms


async def test_orphans_are_collected_after_the_grace() -> None:
    stores, dead = await one_shard()
    await add(dead, "s", 5, (1, 2, 1))
    lost = await dead.write_parts("s", updates((1, 6, 1)))
    client = stores.client()
    waiting = await client.write_parts("s", updates((2, 6, 1)))
    unwanted = await client.write_parts("s", updates((3, 6, 1)))
    await client.discard_parts(unwanted)
    assert len(await stores.keys()) == 3
    assert await client.collect_orphans() == 0
    stores.clock.later_ms = GRACE_MS
    assert await client.collect_orphans() == 1
    assert lost[0].key not in await stores.keys()
    assert isinstance(await client.append([ShardAppend("s", 5, 9, waiting)]), AppendCommitted)
    stores.clock.later_ms *= 2
    assert await client.collect_orphans() == 0
    assert len(await stores.keys()) == 2


async def test_what_is_claimed_while_orphans_are_removed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores, dead = await one_shard()
    parts = [(await dead.write_parts("s", updates((n, 6, 1))))[0] for n in range(3)]
    client = stores.client()
    assert await client.collect_orphans() == 0
    stores.clock.later_ms = GRACE_MS
    delete = stores.blob.delete
    deleted: list[str] = []

    async def claiming(key: str) -> bool:
        others = [part for part in parts if part.key not in (key, *deleted)]
        if not deleted:
            assert await client.claim("s", others)
        deleted.append(key)
        done: bool = await delete(key)
        return done

    monkeypatch.setattr(stores.blob, "delete", claiming)
    assert await client.collect_orphans() == 1
    claimed = {part.key for part in parts} - set(deleted)
    assert await stores.keys() == claimed
    kept = [part for part in parts if part.key in claimed]
    assert isinstance(await client.append([ShardAppend("s", 0, 9, tuple(kept))]), AppendCommitted)


@pytest.mark.parametrize("ahead_ms", [-(10**9), 0, 10**9])
async def test_the_grace_is_over_when_we_say_so_whatever_clocks_show(ahead_ms: int) -> None:
    """Of the store's clock, and of one that jumps, nobody depends."""
    stores = Stores(replace(TINY, blob_orphan_grace_ms=600_000), exclusive=False)
    ours = Clock()
    ours.ahead_ms = ahead_ms
    here, there = stores.client(ours), stores.client()
    await there.create_shards([NewShard("s", SCHEMA)])
    young = await there.write_parts("s", updates((1, 0, 1)))
    lost = await there.write_parts("s", updates((2, 0, 1)))
    assert await here.collect_orphans() == 0
    ours.ahead_ms = -2 * ahead_ms
    assert await here.collect_orphans() == 0
    assert isinstance(await there.append([ShardAppend("s", 0, 1, young)]), AppendCommitted)
    assert (await here.state("s")).upper == 0, "what it knows is old"
    ours.later_ms = 600_000
    assert await here.collect_orphans() == 1
    assert await stores.keys() == {part.key for part in young}
    assert lost[0].key not in await stores.keys()


async def test_what_was_named_for_a_while_begins_its_grace_anew() -> None:
    suspects = SuspectBlobs(10)
    assert suspects.seen(["a", "b"], 0) == []
    assert suspects.seen(["a"], 9) == []
    assert suspects.seen(["a", "b"], 10) == ["a"]
    assert suspects.seen(["b"], 19) == []
    assert suspects.seen(["b"], 20) == ["b"]


async def test_a_few_blobs_are_deleted_at_a_time_and_what_fails_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store far away answers one after the other too slowly, and all at once too much."""
    stores, client = await one_shard()
    parts = [(await client.write_parts("s", updates((n, 6, 1))))[0] for n in range(100)]
    delete, under_way, most, numbers = stores.blob.delete, 0, 0, count()

    async def slow(key: str) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await anyio.lowlevel.checkpoint()
            if next(numbers) % 10 == 0:
                raise StorageError("made up", determinate=False)
            return bool(await delete(key))
        finally:
            under_way -= 1

    monkeypatch.setattr(stores.blob, "delete", slow)
    await client.discard_parts(parts)
    assert most == 8
    assert len(await stores.keys()) == 10
    monkeypatch.setattr(stores.blob, "delete", delete)
    stores.clock.later_ms = 2 * GRACE_MS
    assert await client.collect_orphans() == 0
    stores.clock.later_ms *= 2
    assert await client.collect_orphans() == 10
    assert await stores.keys() == set()


# -- appends that end without an answer -----------------------------------------------------------

LISTED = replace(TINY, part_list_parts_min=2, part_bytes_target=1)
"""Parts of one row, and a list of any two."""
ROWS = ((1, 5, 1), (2, 6, 1))


async def unanswered(stores: Stores, client: PersistClient, how: str) -> tuple[BatchPart, ...]:
    """Two parts, and a list, of an append that never heard what became of it."""
    await client.create_shards([NewShard("s", SCHEMA)])
    parts = tuple(await client.write_parts("s", updates(*ROWS)))
    assert len(parts) == 2
    append = ShardAppend("s", 0, 9, parts)
    if how == "cancelled":
        async with (
            client._machine._locked([shard_key("s")]),
            anyio.create_task_group() as group,
        ):
            group.start_soon(client.append, [append])
            while len(await stores.keys()) < 3:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()  # for the lock
            group.cancel_scope.cancel()
    else:
        stores.consensus.fail, stores.consensus.reads_fail = how, 1000
        with pytest.raises(StorageError) as caught:
            await client.append([append])
        assert not caught.value.determinate
        stores.consensus.reads_fail = 0
    assert len(await stores.keys()) == 3
    return parts


async def held(client: PersistClient) -> list[tuple[int, int, int]]:
    """Its rows."""
    parts = [part for batch in (await client.state("s")).batches for part in batch.parts]
    rows: list[tuple[int, int, int]] = await rows_of(client, parts)
    return rows


async def collected(stores: Stores, client: PersistClient) -> int:
    """How many blobs, after all the time that anything is waited for."""
    count = 0
    for wait_ms in (TINY.stash_orphan_ms, GRACE_MS, GRACE_MS):
        stores.clock.later_ms += wait_ms
        count += await client.collect_orphans()
    return count


@pytest.mark.parametrize("discarded", [False, True], ids=["left", "discarded"])
@pytest.mark.parametrize("how", ["cancelled", "before", "after"])
async def test_what_an_append_without_an_answer_leaves_is_collected_unless_it_is_named(
    how: str, discarded: bool
) -> None:
    """They lay there as long as the process lived (seed 9100750 of the whole service)."""
    stores = Stores(LISTED)
    client = stores.client()
    parts = await unanswered(stores, client, how)
    stores.clock.later_ms += 2 * GRACE_MS
    assert await client.collect_orphans() == 0
    if discarded:
        await client.discard_parts(parts)
        assert len(await stores.keys()) == 3, "a state may name them"
    assert await collected(stores, client) == (0 if how == "after" else 3)
    state = await client.state("s")
    assert await stores.keys() == state.blob_keys()
    assert state.upper == (9 if how == "after" else 0)
    if how == "after":
        assert await held(client) == list(ROWS)


@pytest.mark.parametrize("how", ["cancelled", "before"])
async def test_parts_that_were_left_may_be_appended_again(how: str) -> None:
    stores = Stores(LISTED)
    client = stores.client()
    parts = await unanswered(stores, client, how)
    assert isinstance(await client.append([ShardAppend("s", 0, 9, parts)]), AppendCommitted)
    assert await collected(stores, client) == 1, "the list of the first attempt"
    assert await stores.keys() == (await client.state("s")).blob_keys()
    assert await held(client) == list(ROWS)


@pytest.mark.parametrize("how", ["before", "after"])
async def test_what_a_compaction_without_an_answer_leaves_is_collected(how: str) -> None:
    stores, client = await one_shard()
    for row in ROWS:
        await add(client, "s", row[1] + 1, row)

    async def cut_off(_: object) -> None:
        stores.consensus.reads_fail = 1000

    stores.consensus.fail, stores.consensus.meanwhile = how, cut_off
    with pytest.raises(StorageError):
        await client.upkeep.compact("s")
    stores.consensus.reads_fail = 0
    assert len(await stores.keys()) == 3
    await client.upkeep.collect("s")
    assert await collected(stores, client) == (0 if how == "after" else 1)
    assert await stores.keys() == (await client.state("s")).blob_keys()
    assert len(await stores.keys()) == (1 if how == "after" else 2)
    assert await held(client) == list(ROWS)


@pytest.mark.parametrize("how", ["discarded", "given up"])
async def test_parts_that_are_no_longer_kept_are_not_appended(how: str) -> None:
    """Their blobs are gone, or may be: a state would name what is not there."""
    stores, client = await one_shard()
    parts = tuple(await client.write_parts("s", updates(*ROWS)))
    if how == "discarded":
        await client.discard_parts(parts)
    else:
        assert isinstance(await client.append([ShardAppend("s", 3, 9, parts)]), UpperMismatch)
        assert await collected(stores, client) == 1
    with pytest.raises(InvalidUsage, match="was given up or discarded"):
        await client.append([ShardAppend("s", 0, 9, parts)])
    assert isinstance(await client.append([ShardAppend("s", 3, 9, parts)]), UpperMismatch)
    assert (await client.state("s")).upper == 0
