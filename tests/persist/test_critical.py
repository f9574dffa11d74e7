"""Critical readers: durable holds that move by their token alone; and leases that were lost."""

from __future__ import annotations

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    INLINE,
    SCHEMA,
    Stores,
    add,
    contents,
)

from actors.errors import (
    CorruptData,
    InvalidUsage,
    LeaseLost,
    ResourceClosed,
    UnknownObject,
    WriterFenced,
)
from actors.persist import CriticalReader, NewShard
from actors.persist.documents import decode_shard, encode, unsealed
from actors.persist.reader import why_missing
from actors.persist.shard import FORMAT, WRITERS_MAX, shard_key


async def grown(stores: Stores, *, upper: int = 9) -> None:
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, since=2, upper=2)])
    await add(client, "s", upper, (1, 3, 1))


async def test_a_critical_reader_holds_the_since_until_its_owner_moves_it() -> None:
    stores = Stores(INLINE)
    await grown(stores)
    client = stores.client()
    assert await client.critical.open("s", "c", b"one") == CriticalReader("c", 2, b"one")
    moved = await client.critical.downgrade("s", "c", b"one", b"one", 5)
    assert moved == CriticalReader("c", 5, b"one")
    stores.clock.ahead_ms += 1 << 40  # it never expires
    again = stores.client()
    state = await again.state("s")
    assert (state.since, state.holds, state.tokens) == (5, {"c": 5}, {"c": b"one"})
    with pytest.raises(InvalidUsage, match="its since is 5"):
        await again.set_hold("s", "late", 4)
    back = await again.critical.downgrade("s", "c", b"one", b"two", 3)
    assert back == CriticalReader("c", 5, b"two"), "a since goes back"
    await again.critical.close("s", "c", b"two")
    await again.critical.close("s", "c", b"whatever")
    assert (await again.state("s")).tokens == (await again.state("s")).holds == {}
    with pytest.raises(UnknownObject):
        await again.critical.open("t", "c", b"one")


async def test_whoever_took_over_fences_the_one_before() -> None:
    stores = Stores(INLINE, exclusive=False)
    await grown(stores)
    old, new = stores.client(), stores.client()
    await old.critical.open("s", "c", b"epoch 1")
    found = await new.critical.open("s", "c", b"epoch 2")
    assert found.token == b"epoch 1", "an open takes nothing that is another's"
    await new.critical.downgrade("s", "c", found.token, b"epoch 2", found.since)
    with pytest.raises(WriterFenced, match=b"epoch 2".hex()) as fenced:
        await old.critical.downgrade("s", "c", b"epoch 1", b"epoch 1", 7)
    assert fenced.value.determinate
    with pytest.raises(WriterFenced):
        await old.critical.close("s", "c", b"epoch 1")
    state = await new.state("s")
    assert (state.since, state.tokens) == (2, {"c": b"epoch 2"})
    await new.critical.downgrade("s", "c", b"epoch 2", b"epoch 2", 8)
    assert (await new.state("s")).since == 8
    # The owner may speak through another process, which knows nothing of that yet.
    third = stores.client()
    await third.state("s")
    await new.critical.downgrade("s", "c", b"epoch 2", b"epoch 3", 8)
    await third.critical.downgrade("s", "c", b"epoch 3", b"epoch 4", 8)


async def test_of_two_that_move_it_at_once_one_is_fenced() -> None:
    stores = Stores(INLINE, exclusive=False)
    await grown(stores)
    one, other = stores.client(), stores.client()
    await one.critical.open("s", "c", b"0")
    await other.state("s")  # so that both start from what they know
    await one.critical.downgrade("s", "c", b"0", b"1", 4)
    with pytest.raises(WriterFenced):
        await other.critical.downgrade("s", "c", b"0", b"2", 6)


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_a_downgrade_whose_answer_was_lost_is_done_once(fail: str) -> None:
    stores = Stores(INLINE)
    await grown(stores)
    client = stores.client()
    await client.critical.open("s", "c", b"1")
    stores.consensus.fail = fail
    assert await client.critical.downgrade("s", "c", b"1", b"2", 5) == CriticalReader("c", 5, b"2")
    assert (await stores.client().state("s")).tokens == {"c": b"2"}


async def test_names_and_tokens_are_checked() -> None:
    stores = Stores(INLINE)
    await grown(stores)
    client = stores.client()
    await client.set_hold("s", "plain", 3)
    await client.critical.open("s", "c", b"t")
    with pytest.raises(InvalidUsage, match="plain is a hold without a token"):
        await client.critical.open("s", "plain", b"t")
    for token in (b"", b"x" * 65):
        with pytest.raises(InvalidUsage, match="1 to 64 bytes"):
            await client.critical.open("s", "d", token)
    with pytest.raises(WriterFenced, match="by its token alone"):
        await client.set_hold("s", "c", 5)
    with pytest.raises(WriterFenced, match="by its token alone"):
        await client.drop_hold("s", "c")
    with pytest.raises(WriterFenced, match="no critical reader d"):
        await client.critical.downgrade("s", "d", b"t", b"t", 5)
    assert (await client.state("s")).holds == {"plain": 3, "c": 3}


async def test_a_reader_learns_by_name_that_its_lease_is_lost() -> None:
    stores = Stores(exclusive=False)
    await grown(stores, upper=4)
    slow, other = stores.client(), stores.client()
    reader = await slow.open_reader("s", "slow")
    quick = await slow.open_reader("s", "quick")
    (part,), _ = await reader.snapshot(3)
    assert await contents(reader, slow, 3) == [(1, 1)]
    await slow.heartbeat(reader)
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
        await slow.heartbeat(reader)
    with pytest.raises(LeaseLost, match="reader quick"):
        await quick.snapshot(9)
    await reader.close()
    with pytest.raises(ResourceClosed):
        await slow.heartbeat(reader)
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


async def test_an_older_document_is_read_and_written_as_the_newest() -> None:
    stores = Stores(INLINE)
    await grown(stores)

    head = await stores.consensus.head(shard_key("s"))
    assert head is not None
    old = msgspec.msgpack.decode(unsealed("shard/s", head.data)) | {"version": 1}
    assert old.pop("tokens") == {}
    state = decode_shard("shard/s", msgspec.msgpack.encode(old))
    assert (state.version, state.tokens) == (FORMAT, {})
    newest = unsealed("shard/s", encode(state))
    assert msgspec.msgpack.decode(newest)["version"] == FORMAT


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


async def test_an_owner_who_lost_answer_and_mark_is_not_surely_fenced() -> None:
    stores = Stores(INLINE, exclusive=False)
    await grown(stores)
    owner = stores.client()
    await owner.critical.open("s", "c", b"one")

    async def others(_: object) -> None:
        stores.consensus.meanwhile = None
        for upper in range(10, 10 + WRITERS_MAX):
            await add(stores.client(), "s", upper, (1, upper - 1, 1))

    stores.consensus.fail, stores.consensus.meanwhile = "after", others
    with pytest.raises(WriterFenced, match="an earlier attempt may have gone through") as fenced:
        await owner.critical.downgrade("s", "c", b"one", b"two", 5)
    assert not fenced.value.determinate
    assert (await owner.critical.open("s", "c", b"one")).token == b"two", "it was that attempt"
