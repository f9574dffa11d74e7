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
    updates,
)

from actors.errors import StorageError
from actors.persist import (
    Append,
    Appended,
    NewShard,
)
from actors.persist.orphans import Suspects

GRACE_MS = TINY.blob_orphan_grace_ms


async def test_orphans_are_collected_after_the_grace() -> None:
    stores = Stores()
    dead = stores.client()
    await dead.create_shards([NewShard("s", SCHEMA)])
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
    assert isinstance(await client.append([Append("s", 5, 9, waiting)]), Appended)
    stores.clock.later_ms *= 2
    assert await client.collect_orphans() == 0
    assert len(await stores.keys()) == 2


async def test_what_is_claimed_while_orphans_are_removed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = Stores()
    dead = stores.client()
    await dead.create_shards([NewShard("s", SCHEMA)])
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
    assert isinstance(await client.append([Append("s", 0, 9, tuple(kept))]), Appended)


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
    assert isinstance(await there.append([Append("s", 0, 1, young)]), Appended)
    assert (await here.state("s")).upper == 0, "what it knows is old"
    ours.later_ms = 600_000
    assert await here.collect_orphans() == 1
    assert await stores.keys() == {part.key for part in young}
    assert lost[0].key not in await stores.keys()


async def test_what_was_named_for_a_while_begins_its_grace_anew() -> None:
    suspects = Suspects(10)
    assert suspects.seen(["a", "b"], 0) == []
    assert suspects.seen(["a"], 9) == []
    assert suspects.seen(["a", "b"], 10) == ["a"]
    assert suspects.seen(["b"], 19) == []
    assert suspects.seen(["b"], 20) == ["b"]


async def test_a_few_blobs_are_deleted_at_a_time_and_what_fails_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store far away answers one after the other too slowly, and all at once too much."""
    stores = Stores()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA)])
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
