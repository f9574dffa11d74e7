"""Shards through their client: appending, reading, waiting, and stores that fail."""

from __future__ import annotations

from pathlib import Path

import anyio
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Stores,
    add,
    contents,
    one_shard,
    rows_of,
    updates,
)

from actors.durable.persist import (
    TABLES_UPPER,
    AppendCommitted,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
    VersionedData,
)
from actors.durable.persist.shard import WRITERS_MAX
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    LeaseLost,
    ReadBelowSince,
    ResourceClosed,
    StorageError,
    UnknownObject,
    WriterFenced,
)
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import EMPTY


def exists(path: str) -> bool:
    return Path(path).exists()


def remove(path: str) -> None:
    Path(path).unlink()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_append_then_snapshot_then_listen(client: PersistClient) -> None:
    assert await client.create_shards([NewShard("s", SCHEMA)])
    assert await add(client, "s", 5, (1, 2, 1), (2, 3, 1)) == AppendCommitted((("s", 5),))
    assert await add(client, "s", 9, (1, 7, -1)) == AppendCommitted((("s", 9),))
    assert await client.upper("s") == 9
    reader = await client.open_reader("s", "r")
    assert await contents(reader, client, 2) == [(1, 1)]
    assert await contents(reader, client, 6) == [(1, 1), (2, 1)]
    assert await contents(reader, client, 8) == [(2, 1)]
    batches, upper = await reader.next(5)
    assert (upper, len(batches)) == (9, 1)
    assert await rows_of(client, batches[0].parts, low=5) == [(1, 7, -1)]
    await reader.close()
    await reader.close()
    with pytest.raises(ResourceClosed):
        await reader.next(5)


async def test_a_mismatch_changes_nothing(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA), NewShard("t", SCHEMA, upper=5)])
    both = [ShardAppend("s", 0, 9, ()), ShardAppend("t", 4, 9, ())]
    assert await client.append(both) == UpperMismatch("t", 4, 5)
    assert (await client.upper("s"), await client.upper("t")) == (0, 5)
    parts = await client.write_parts("s", updates((1, 3, 1)))
    with pytest.raises(InvalidUsage, match=r"the interval \[5, 9\)"):
        await client.append([ShardAppend("s", 0, 9, parts), ShardAppend("t", 5, 9, parts)])
    assert await client.upper("s") == 0
    with pytest.raises(UnknownObject, match="no shard x"):
        await client.append([ShardAppend("s", 0, 9, ()), ShardAppend("x", 0, 9, ())])
    with pytest.raises(InvalidUsage, match="twice"):
        await client.append([ShardAppend("s", 0, 9, ()), ShardAppend("s", 0, 9, ())])
    with pytest.raises(InvalidUsage, match="at least one"):
        await client.append([])
    both = [ShardAppend("s", 0, 9, parts), ShardAppend("t", 5, 9, ())]
    assert await client.append(both) == AppendCommitted((("s", 9), ("t", 9)))


async def test_shards_are_created_and_dropped_with_other_documents(client: PersistClient) -> None:
    assert await client.create_shards(
        [NewShard("s", SCHEMA)], [CompareAndSet("catalog", None, b"1")]
    )
    assert not await client.create_shards(
        [NewShard("s", SCHEMA)], [CompareAndSet("catalog", 0, b"2")]
    )
    assert not await client.create_shards(
        [NewShard("t", SCHEMA)], [CompareAndSet("catalog", 5, b"2")]
    )
    assert await client.head("catalog") == VersionedData(0, b"1")
    assert await client.list_shards() == ["s"]
    with pytest.raises(UnknownObject):
        await client.state("t")
    assert not await client.drop_shards(["s"], [CompareAndSet("catalog", 5, b"2")])
    assert not await client.drop_shards(["s", "t"], [CompareAndSet("catalog", 0, b"2")])
    assert await client.drop_shards(["s"], [CompareAndSet("catalog", 0, b"2")])
    assert await client.head("catalog") == VersionedData(1, b"2")
    assert not await client.drop_shards(["s"])
    with pytest.raises(UnknownObject):
        await client.upper("s")
    assert await client.create_shards([], [CompareAndSet("oracle", None, b"")])
    with pytest.raises(InvalidUsage, match="invalid name of a shard"):
        await client.create_shards([NewShard("../s", SCHEMA)])


async def test_tables_share_one_upper(client: PersistClient) -> None:
    await client.create_shards([NewShard(t, SCHEMA, tables=True) for t in ("t1", "t2")])
    assert await client.tables_upper() == 0
    parts = await client.write_parts("t1", updates((1, 7, 1)))
    append = ShardAppend("t1", 0, 8, parts)
    assert await client.append([append], tables_upper=(3, 8)) == UpperMismatch(TABLES_UPPER, 3, 0)
    assert await client.append([append], tables_upper=(0, 8)) == AppendCommitted((("t1", 8),))
    assert await client.append([], tables_upper=(8, 20)) == AppendCommitted(())
    assert [await client.upper(t) for t in ("t1", "t2")] == [20, 20]
    assert (await client.state("t1")).upper == 8
    late = await client.write_parts("t2", updates((1, 19, 1)))
    with pytest.raises(InvalidUsage, match=r"the interval \[20, 31\)"):
        await client.append([ShardAppend("t2", 0, 31, late)], tables_upper=(20, 31))
    with pytest.raises(InvalidUsage, match="cannot go from 20 to 20"):
        await client.append([], tables_upper=(20, 20))
    on_time = await client.write_parts("t2", updates((1, 25, 1)))
    await client.append([ShardAppend("t2", 0, 31, on_time)], tables_upper=(20, 31))
    reader = await client.open_reader("t1", "r")
    assert await contents(reader, client, 30) == [(1, 1)]
    assert await reader.next(8) == ((), 31)
    reader = await client.open_reader("t2", "r")
    assert await contents(reader, client, 30) == [(1, 1)]


async def test_an_extra_key_that_changed_fences(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA)])
    with pytest.raises(WriterFenced, match="catalog") as caught:
        await client.append([ShardAppend("s", 0, 5, ())], extra=[CompareAndSet("catalog", 3, b"")])
    assert caught.value.determinate
    assert await client.upper("s") == 0
    await client.append([ShardAppend("s", 0, 5, ())], extra=[CompareAndSet("catalog", None, b"x")])
    assert await client.head("catalog") == VersionedData(0, b"x")


async def test_waiters_are_woken(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA), NewShard("t", SCHEMA, tables=True)])
    found: list[tuple[str, int]] = []

    async def wait(shard: str, beyond: int) -> None:
        found.append((shard, await client.wait_upper(shard, beyond)))

    async def wait_for_drop() -> None:
        with pytest.raises(UnknownObject):
            await client.wait_upper("s", 100)
        found.append(("s", -1))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "s", 3)
            group.start_soon(wait, "t", 3)
            group.start_soon(wait_for_drop)
            await anyio.wait_all_tasks_blocked()
            await client.append([ShardAppend("s", 0, 3, ())])
            await anyio.wait_all_tasks_blocked()
            assert found == []
            await client.append([ShardAppend("s", 3, 5, ())])
            await client.append([], tables_upper=(0, 4))
            await client.drop_shards(["s"])
    assert sorted(found) == [("s", -1), ("s", 5), ("t", 4)]
    with pytest.raises(InvalidUsage, match="beyond"):
        await client.wait_upper("t", EMPTY)


async def test_closing_wakes_waiters() -> None:
    client = Stores().client()
    await client.create_shards([NewShard("s", SCHEMA)])

    async def wait() -> None:
        with pytest.raises(ResourceClosed):
            await client.wait_upper("s", 3)

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await client.close()


async def test_a_snapshot_waits_and_a_listener_too(client: PersistClient) -> None:
    await client.create_shards([NewShard("s", SCHEMA)])
    reader = await client.open_reader("s", "r")
    found: list[object] = []

    async def read() -> None:
        found.append(await contents(reader, client, 4))

    async def listen() -> None:
        found.append((await reader.next(3))[1])

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await add(client, "s", 3, (1, 1, 1))
            group.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            assert found == []
            await add(client, "s", 5, (2, 4, 1))
    assert sorted(found, key=str) == [5, [(1, 1), (2, 1)]]


async def test_a_file_of_spark_is_taken_over(client: PersistClient, tmp_path: Path) -> None:
    await client.create_shards([NewShard("s", SCHEMA)])
    file = tmp_path / "part-0.parquet"
    pq.write_table(updates((1, 2, 1), (2, 3, 1)), file)
    part = await client.adopt_file("s", file, 2, 2, 3)
    await client.append([ShardAppend("s", 0, 5, (part,))])
    assert await rows_of(client, [part]) == [(1, 2, 1), (2, 3, 1)]
    path = client.path(part)
    assert path is None or exists(path)
    with pytest.raises(InvalidUsage, match="0 rows"):
        await client.adopt_file("s", tmp_path / "x", 0, 2, 3)


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_open_failure_appends_exactly_once(fail: str) -> None:
    stores = Stores()
    client = stores.client()
    stores.consensus.fail = fail
    assert await client.create_shards([NewShard("s", SCHEMA), NewShard("t", SCHEMA)])
    for shard in ("s", "t"):
        await add(client, shard, 5, (1, 2, 1))
    parts = await client.write_parts("s", updates((1, 6, 1)))
    stores.consensus.fail = fail
    stores.consensus.reads_fail = 2
    appends = [ShardAppend("s", 5, 9, parts), ShardAppend("t", 5, 9, ())]
    found = await client.append(appends, tables_upper=(0, 4), extra=[CompareAndSet("x", None, b"")])
    assert found == AppendCommitted((("s", 9), ("t", 9)))
    stores.consensus.fail = fail
    assert await client.append([], tables_upper=(4, 6)) == AppendCommitted(())
    stores.consensus.fail = fail
    await client.set_hold("s", "h", 4)
    stores.consensus.fail = fail
    assert await client.drop_shards(["t"], [CompareAndSet("x", 0, None)])
    assert await client.head("x") is None
    fresh = stores.client()
    reader = await fresh.open_reader("s", "r")
    assert await contents(reader, fresh, 8) == [(1, 2)]
    assert await fresh.tables_upper() == 6
    assert (await fresh.state("s")).holds == {"h": 4}
    with pytest.raises(UnknownObject):
        await fresh.state("t")


async def test_a_determinate_failure_is_the_callers() -> None:
    stores, client = await one_shard()
    parts = await client.write_parts("s", updates((1, 2, 1)))
    stores.consensus.fail = "determinate"
    with pytest.raises(StorageError, match="made up"):
        await client.append([ShardAppend("s", 0, 5, parts)])
    assert await client.upper("s") == 0
    assert await client.append([ShardAppend("s", 0, 5, parts)]) == AppendCommitted((("s", 5),))


async def test_a_store_that_never_answers_leaves_it_open() -> None:
    stores, client = await one_shard()
    parts = await client.write_parts("s", updates((1, 2, 1)))
    stores.consensus.fail = "after"
    stores.consensus.reads_fail = 1000
    with pytest.raises(StorageError) as caught:
        await client.append([ShardAppend("s", 0, 5, parts)])
    assert not caught.value.determinate
    stores.consensus.reads_fail = 0
    await client.discard_parts(parts)
    assert await client.upper("s") == 5
    assert await rows_of(client, parts) == [(1, 2, 1)], "not discarded: it may be named"


async def test_two_clients_racing_on_a_shard_do_not_both_win() -> None:
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA), NewShard("t", SCHEMA, tables=True)])
    assert await two.upper("s") == 0
    assert await two.upper("t") == 0
    await add(one, "s", 5, (1, 2, 1))
    assert await two.append([ShardAppend("s", 0, 9, ())]) == UpperMismatch("s", 0, 5)
    assert isinstance(await two.append([ShardAppend("s", 5, 9, ())]), AppendCommitted)
    assert await one.append([ShardAppend("s", 5, 7, ())]) == UpperMismatch("s", 5, 9)
    parts = await one.write_parts("t", updates((1, 2, 1)))
    await one.append([ShardAppend("t", 0, 5, parts)], tables_upper=(0, 5))
    moved = await two.append([], tables_upper=(0, 7))
    assert moved == UpperMismatch(TABLES_UPPER, 0, 5)
    reader = await two.open_reader("t", "r")
    assert await contents(reader, two, 4) == [(1, 1)], "the upper never outruns the contents"


async def test_an_answer_without_a_change_is_as_of_the_store() -> None:
    """What another process has done meanwhile is not overlooked by who remembers less."""
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    new = NewShard("s", SCHEMA, holds={"h": 0})
    await one.create_shards([new])
    assert (await two.state("s")).upper == 0
    await add(one, "s", 5, (1, 2, 1))
    stale = ShardAppend("s", 4, 6, ())
    assert await two.append([stale]) == UpperMismatch("s", 4, 5)
    await add(one, "s", 6)
    assert await two.append([ShardAppend("s", 6, 7, ())]) == AppendCommitted((("s", 7),))
    await one.drop_hold("s", "h")
    await two.set_hold("s", "h", 3)
    assert (await stores.client().state("s")).holds == {"h": 3}
    await two.drop_shards(["s"])
    assert not await one.drop_shards(["s"])
    assert await two.create_shards([new])
    assert not await one.create_shards([new])
    with pytest.raises(ReadBelowSince):
        await one.set_hold("s", "below", -1)
    await two.drop_shards(["s"])
    assert await one.create_shards([new])


async def test_nothing_is_appended_to_a_table_below_an_upper_that_another_moved() -> None:
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA, tables=True)])
    parts = await two.write_parts("s", updates((1, 3, 1)))
    assert await one.append([], tables_upper=(0, 9)) == AppendCommitted(())
    with pytest.raises(InvalidUsage, match="outside the interval"):
        await two.append([ShardAppend("s", 0, 4, parts)])
    parts = await two.write_parts("s", updates((1, 9, 1)))
    assert isinstance(await two.append([ShardAppend("s", 0, 10, parts)]), AppendCommitted)


async def test_writers_that_always_meet_get_on() -> None:
    stores = Stores(exclusive=False)
    clients = [stores.client() for _ in range(5)]
    await clients[0].create_shards([NewShard("s", SCHEMA)])

    async def write(client: PersistClient, number: int) -> None:
        for turn in range(20):
            await client.set_hold("s", f"{number}-{turn}", turn)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number, client in enumerate(clients):
                group.start_soon(write, client, number)
    assert len((await stores.client().state("s")).holds) == 100


async def test_an_outcome_that_cannot_be_told_is_not_guessed() -> None:
    """The answer is lost, and so many others write that our mark falls out."""
    stores, client = await one_shard(exclusive=False)
    original, others = stores.consensus.head, [stores.client() for _ in range(WRITERS_MAX)]

    async def meanwhile(key: str) -> VersionedData | None:
        stores.consensus.head = original
        for number, other in enumerate(others):
            done = await other.append([ShardAppend("s", 1 + number, 2 + number, ())])
            assert isinstance(done, AppendCommitted)
        found: VersionedData | None = await original(key)
        return found

    stores.consensus.fail = "after"
    stores.consensus.head = meanwhile
    with pytest.raises(StorageError, match="cannot determine whether") as caught:
        await client.append([ShardAppend("s", 0, 1, ())])
    assert not caught.value.determinate
    assert await others[0].append([ShardAppend("s", 17, 18, ())]) == AppendCommitted((("s", 18),))


async def test_a_creation_that_cannot_be_told_is_not_guessed() -> None:
    stores = Stores(exclusive=False)
    client = stores.client()

    async def meanwhile(_: object) -> None:
        stores.consensus.meanwhile = None
        for upper in range(1, WRITERS_MAX + 1):
            await add(stores.client(), "s", upper, (1, upper - 1, 1))

    stores.consensus.fail, stores.consensus.meanwhile = "after", meanwhile
    with pytest.raises(StorageError, match="cannot determine whether") as caught:
        await client.create_shards([NewShard("s", SCHEMA)])
    assert not caught.value.determinate
    assert not await client.create_shards([NewShard("s", SCHEMA)]), "it is there"


async def test_a_shard_that_was_dropped_is_not_taken_for_another_of_its_name() -> None:
    """As many changes as the old one had: what remembers the old one must not fit the new one."""
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA)])
    reader = await two.open_reader("s", "r")
    await add(one, "s", 5, (1, 2, 1))
    assert (await two.upper("s")) == 0
    await one.drop_shards(["s"])
    await one.create_shards([NewShard("s", SCHEMA)])
    while (await one.upper("s")) < 3:
        await add(one, "s", (await one.upper("s")) + 1, (7, (await one.upper("s")), 1))
        assert await two.append([ShardAppend("s", 0, 9, ())]) != AppendCommitted((("s", 9),))
    fresh = stores.client()
    assert (await fresh.state("s")).upper == 3
    again = await fresh.open_reader("s", "r")
    assert await contents(again, fresh, 2) == [(7, 3)]
    with pytest.raises(LeaseLost):
        await reader.snapshot(0)


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_a_drop_that_is_tried_again_leaves_a_new_shard_of_that_name(fail: str) -> None:
    stores = Stores(exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", SCHEMA)])
    original = stores.consensus.head

    async def meanwhile(key: str) -> VersionedData | None:
        stores.consensus.head = original
        await two.drop_shards(["s"])
        assert await two.create_shards([NewShard("s", SCHEMA, upper=4)])
        found: VersionedData | None = await original(key)
        return found

    stores.consensus.fail = fail
    stores.consensus.head = meanwhile
    assert await one.drop_shards(["s"])
    assert await stores.client().upper("s") == 4


async def test_a_missing_or_damaged_blob_is_named(tmp_path: Path) -> None:
    client = await PersistClient.open(tmp_path, TINY, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA)])
    await add(client, "s", 5, (1, 2, 1))
    (part,) = (await client.state("s")).batches[0].parts
    path = client.path(part)
    assert path is not None
    flip(Path(path))
    with pytest.raises(CorruptData, match=part.key):
        await client.fetch(part, SCHEMA)
    remove(path)
    with pytest.raises(CorruptData, match="missing although shard s names it"):
        await client.fetch(part, SCHEMA)
    with pytest.raises(LeaseLost, match="compacted away"):
        await client.fetch(replace(part, key="s/another"), SCHEMA)
    await client.close()
