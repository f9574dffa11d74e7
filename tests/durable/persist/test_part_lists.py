"""Lists of parts: the document of a large batch names one blob, and says the same.

A document must not grow with the data; whoever reads it gets all parts, or one named error; and a
list has an end, as a part has.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Stores,
    add,
    contents,
    updates,
)
from test_damaged import damaged  # type: ignore[import-not-found]

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
)
from actors.durable.persist.documents import decode_shard, encode
from actors.durable.persist.memory_stores import MemoryBlob
from actors.durable.persist.part_lists import decode_list, encode_list
from actors.durable.persist.shard import FORMAT, PartList, ShardBatch, ShardState, shard_key
from actors.durable.persist.split_leases import SplitLeases
from actors.durable.persist.verify import verify
from actors.runtime.errors import CorruptData, LeaseLost, StorageError

pytestmark = pytest.mark.anyio

LISTED = replace(TINY, part_list_parts_min=2, part_bytes_target=1)
"""Parts of one row, and a list of any two."""


class CountingBlob(MemoryBlob):
    """Counts reads of lists; `before` is called before one."""

    def __init__(self, stores: Stores) -> None:
        super().__init__(stores.clock)
        self.lists_read = 0
        self.before: Callable[[str], Awaitable[object]] | None = None
        self.fails = False

    async def get(self, key: str) -> bytes | None:
        if key.endswith(".parts"):
            self.lists_read += 1
            if self.fails:
                raise StorageError("made up", determinate=True)
            before, self.before = self.before, None
            if before is not None:
                await before(key)
        return await super().get(key)

    async def set(self, key: str, data: bytes) -> None:
        if self.fails and key.endswith(".parts"):
            raise StorageError("made up", determinate=False)
        await super().set(key, data)


def stores_of(*, exclusive: bool = True) -> tuple[Stores, CountingBlob]:
    stores = Stores(LISTED, exclusive=exclusive)
    blob = stores.blob = CountingBlob(stores)
    return stores, blob


async def shard_of(client: PersistClient, batches: int = 1) -> None:
    """So many batches of three rows."""
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    for time in range(batches):
        rows = [(3 * time + i, time, 1) for i in range(3)]
        assert isinstance(await add(client, "s", time + 1, *rows), AppendCommitted)


async def listed_shard(batches: int) -> tuple[Stores, CountingBlob, PersistClient]:
    """The stores of `stores_of`, and a client that has made the shard of `shard_of`."""
    stores, blob = stores_of()
    client = stores.client()
    await shard_of(client, batches)
    return stores, blob, client


async def stored(stores: Stores) -> ShardState:
    """The document as it is, its lists not read."""
    head = await stores.consensus.head(shard_key("s"))
    assert head is not None
    return decode_shard(shard_key("s"), head.data)


async def read(client: PersistClient, as_of: int) -> list[tuple[int, int]]:
    reader = await client.open_reader("s", "r")
    try:
        return await contents(reader, client, as_of)  # type: ignore[no-any-return]
    finally:
        await reader.close()


def many(count: int) -> tuple[BatchPart, ...]:
    return tuple(
        BatchPart(f"s/{n:08x}.parquet", 1_000, 1 << 26, n, None, False, 0, 0, 1)
        for n in range(count)
    )


async def test_a_large_batch_is_one_name_in_the_document_and_all_its_parts_to_a_reader() -> None:
    stores, _, client = await listed_shard(2)
    state = await stored(stores)
    assert [(batch.parts, batch.listed is None) for batch in state.batches] == [((), False)] * 2
    for one in (client, stores.client()):
        assert await read(one, 1) == [(value, 1) for value in range(6)]
        whole = await one.state("s")
        assert [len(batch.parts) for batch in whole.batches] == [3, 3]
        assert await stores.keys() == whole.blob_keys()
        assert encode(replace(whole, seqno=state.seqno)) == encode(state), "stored alike"


async def test_a_batch_of_few_parts_has_no_list() -> None:
    stores, blob, client = await listed_shard(0)
    await add(client, "s", 1, (1, 0, 1))
    state = await stored(stores)
    assert state.is_whole
    assert len(state.batches[0].parts) == 1
    assert blob.lists_read == 0


async def test_the_document_does_not_grow_with_the_data() -> None:
    stores, _, client = await listed_shard(0)
    sizes = []
    for time in range(3):
        parts = tuple(
            replace(part, key=f"s/{time}-{part.checksum}", time_min=time, time_max=time)
            for part in many(1000)
        )
        assert isinstance(
            await client.append([ShardAppend("s", time, time + 1, parts)]), AppendCommitted
        )
        head = await stores.consensus.head(shard_key("s"))
        assert head is not None
        sizes.append(len(head.data))
    assert sizes[-1] < 2_000, "three thousand parts"
    assert sizes[2] - sizes[1] < 200


async def test_a_list_goes_with_its_batch_and_nothing_else_does() -> None:
    stores, _, client = await listed_shard(3)
    before = await client.state("s")
    lists = {batch.listed.key for batch in before.batches if batch.listed is not None}
    assert len(lists) == 3
    await client.upkeep.compact("s")
    after = await client.state("s")
    assert len(after.batches) == 1
    assert after.batches[0].listed is not None
    assert await stores.keys() == after.blob_keys()
    assert not lists & await stores.keys()
    assert await read(client, 2) == [(value, 1) for value in range(9)]


async def test_a_list_is_read_once() -> None:
    stores, blob = stores_of(exclusive=False)
    writer, client = stores.client(), stores.client()
    await shard_of(writer, 1)
    await client.state("s")
    assert blob.lists_read == 1
    for time in range(1, 4):
        await writer.append([ShardAppend("s", time, time + 1, ())])
        await client.upkeep.state_now("s")
    assert (await client.state("s")).upper == 4
    assert blob.lists_read == 1


async def test_what_is_compacted_away_while_its_list_is_read_is_read_again() -> None:
    stores, blob = stores_of(exclusive=False)
    writer, client = stores.client(), stores.client()
    await shard_of(writer, 3)

    async def compacted(_: str) -> None:
        await writer.upkeep.compact("s")

    blob.before = compacted
    assert await read(client, 2) == [(value, 1) for value in range(9)]
    assert len((await client.state("s")).batches) == 1


async def test_a_list_that_is_lost_is_told_by_its_name() -> None:
    stores, _, client = await listed_shard(1)
    (listed,) = [batch.listed for batch in (await client.state("s")).batches]
    assert listed is not None
    await stores.blob.delete(listed.key)
    with pytest.raises(CorruptData, match=rf"{listed.key} is missing although shard s names it"):
        await stores.client().state("s")
    leases = SplitLeases(stores.consensus, stores.blob, stores.settings, stores.clock)
    with pytest.raises(CorruptData, match=listed.key):
        await leases.look("s", 0)
    with pytest.raises(CorruptData, match=listed.key):
        await leases.take("s", "me", 0)
    assert not (await stored(stores)).leases, "given back"
    (fault,) = (await verify(client, "s")).faults
    assert fault.part == listed.key


async def test_a_list_that_cannot_be_read_now_can_be_later() -> None:
    stores, blob = stores_of()
    await shard_of(stores.client(), 1)
    client = stores.client()
    blob.fails = True
    with pytest.raises(StorageError, match="made up"):
        await client.state("s")
    blob.fails = False
    assert await read(client, 0) == [(0, 1), (1, 1), (2, 1)]


def test_every_damaged_byte_of_a_list_is_found() -> None:
    parts = many(2)
    data = encode_list(parts)
    listed = PartList("s/x.parts", len(data), zlib.crc32(data))
    assert decode_list(listed, data) == parts
    for wrong in damaged(data):
        with pytest.raises(CorruptData, match=r"s/x\.parts"):
            decode_list(listed, wrong)


@pytest.mark.parametrize("content", [(), "another", b"\xc1"])
def test_a_list_of_nothing_or_of_another_shard_is_damage(content: object) -> None:
    parts = tuple(replace(part, key=f"t/{part.key}") for part in many(2))
    data = content if isinstance(content, bytes) else encode_list(parts if content else ())
    listed = PartList("s/x.parts", len(data), zlib.crc32(data))
    with pytest.raises(CorruptData, match=r"s/x\.parts"):
        decode_list(listed, data)


async def test_parts_of_a_list_that_do_not_fit_the_state_are_damage() -> None:
    stores, _ = stores_of()
    await shard_of(stores.client(), 1)
    state = await stored(stores)
    (listed,) = [batch.listed for batch in state.batches]
    assert listed is not None
    data = encode_list(tuple(replace(part, time_min=7, time_max=7) for part in many(2)))
    await stores.blob.set(listed.key, data)
    wrong = replace(listed, bytes=len(data), checksum=zlib.crc32(data))
    batch = replace(state.batches[0], listed=wrong)
    op = CompareAndSet(shard_key("s"), state.seqno + 1, encode(replace(state, batches=(batch,))))
    head = await stores.consensus.head(shard_key("s"))
    assert head is not None
    await stores.consensus.compare_and_set([replace(op, expected=head.seqno)])
    with pytest.raises(CorruptData, match="time_max < upper"):
        await stores.client().state("s")


async def test_the_list_of_what_was_not_appended_is_deleted() -> None:
    stores, blob, client = await listed_shard(1)
    before = await stores.keys()
    parts = await client.write_parts("s", updates((7, 1, 1), (8, 1, 1)))
    assert isinstance(await client.append([ShardAppend("s", 0, 2, parts)]), UpperMismatch)
    assert await stores.keys() == before | {part.key for part in parts}
    stores.consensus.fail = "determinate"
    with pytest.raises(StorageError):
        await client.append([ShardAppend("s", 1, 2, parts)])
    blob.fails = True
    with pytest.raises(StorageError, match="made up") as caught:
        await client.append([ShardAppend("s", 1, 2, parts)])
    assert caught.value.determinate, "nothing names the list, wherever it is"
    assert await stores.keys() == before | {part.key for part in parts}
    blob.fails = False
    assert isinstance(await client.append([ShardAppend("s", 1, 2, parts)]), AppendCommitted)
    assert await stores.keys() == (await client.state("s")).blob_keys()


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_list_of_open_outcome_stays_or_goes_with_the_append(lost: str) -> None:
    stores, _, client = await listed_shard(1)
    stores.consensus.fail = lost
    assert isinstance(await add(client, "s", 2, (7, 1, 1), (8, 1, 1)), AppendCommitted)
    assert await stores.keys() == (await client.state("s")).blob_keys()
    assert await read(stores.client(), 1) == [(0, 1), (1, 1), (2, 1), (7, 1), (8, 1)]


async def test_a_merge_whose_list_cannot_be_written_leaves_nothing() -> None:
    stores, blob, client = await listed_shard(3)
    before = await stores.keys()
    blob.fails = True
    with pytest.raises(StorageError, match="made up"):
        await client.upkeep.compact("s")
    assert await stores.keys() == before
    blob.fails = False
    await client.upkeep.compact("s")
    assert len((await client.state("s")).batches) == 1


async def test_a_list_that_a_killed_process_left_is_an_orphan() -> None:
    stores, _, _ = await listed_shard(1)
    await stores.blob.set("s/dead-00000001.parts", b"x")
    other = stores.client()
    assert await other.collect_orphans() == 0
    stores.clock.later_ms += 10
    assert await other.collect_orphans() == 1
    assert await stores.keys() == (await other.state("s")).blob_keys()


async def test_what_lists_name_is_no_orphan_to_another_process() -> None:
    stores, _ = stores_of(exclusive=False)
    client, other = stores.client(), stores.client()
    await shard_of(client, 2)
    assert await other.collect_orphans() == 0
    stores.clock.later_ms += stores.settings.blob_orphan_grace_ms + 1
    assert await other.collect_orphans() == 0
    assert await stores.keys() == (await client.state("s")).blob_keys()


async def test_a_state_read_beside_a_newer_tables_upper_is_read_again() -> None:
    """The upper of all tables seals what is in any state that is read later: not in one whose
    document was read before, and whose lists were waited for."""
    stores, blob = stores_of(exclusive=False)
    writer, client = stores.client(), stores.client()
    await writer.create_shards([NewShard("s", SCHEMA, tables=True)])
    assert isinstance(await add(writer, "s", 1, (1, 0, 1), (2, 0, 1)), AppendCommitted)

    async def moved(_: str) -> None:
        parts = await writer.write_parts("s", updates((3, 1, 1)))
        append = ShardAppend("s", 1, 2, parts)
        done = await writer.append([append], tables_upper=(0, 2))
        assert isinstance(done, AppendCommitted)
        assert await client.tables_upper() == 0
        await client._machine.refresh_tables()

    blob.before = moved
    state = await client.state("s")
    assert await client.tables_upper() == 2
    assert state.upper == 2


async def test_a_lease_in_other_hands_reads_lists_when_it_needs_them() -> None:
    stores, blob = stores_of(exclusive=False)
    client, other = stores.client(), stores.client()
    await shard_of(client, 3)
    leases = SplitLeases(stores.consensus, stores.blob, stores.settings, stores.clock)
    await leases.hold("s", "me", 0)
    state, _ = await leases.look("s")
    assert not state.is_whole
    assert blob.lists_read == 0
    state, handed = await leases.take("s", "read", 0)
    keys = [part.key for batch in state.batches for part in batch.parts]
    assert len(keys) == 9
    blob.lists_read = 0
    await leases.keep(handed, keys)
    assert blob.lists_read == 0, "the lease stands"
    await leases.drop(handed)
    await leases.keep(handed, keys)
    assert blob.lists_read == 3
    await leases.drop(handed)
    await other.upkeep.compact("s")
    with pytest.raises(LeaseLost, match="9 parts were compacted away"):
        await leases.keep(handed, keys)


async def test_a_list_stays_while_a_lease_from_outside_does() -> None:
    stores, _ = stores_of(exclusive=False)
    client = stores.client()
    await shard_of(client, 3)
    before = await stores.keys()
    leases = SplitLeases(stores.consensus, stores.blob, stores.settings, stores.clock)
    _, handed = await leases.take("s", "read", 0)
    await client.upkeep.compact("s")
    assert before <= await stores.keys()
    await leases.drop(handed)
    await client.maintain("s")
    assert await stores.keys() == (await client.state("s")).blob_keys()


async def test_a_document_from_before_there_were_lists_is_read_and_compacted_into_one() -> None:
    stores, _, client = await listed_shard(2)
    state = await client.state("s")
    old = replace(
        state, version=2, batches=tuple(replace(batch, listed=None) for batch in state.batches)
    )
    head = await stores.consensus.head(shard_key("s"))
    assert head is not None
    assert await stores.consensus.compare_and_set(
        [CompareAndSet(shard_key("s"), head.seqno, encode(old))]
    )
    later = stores.client()
    assert (await later.state("s")).version == FORMAT
    assert await read(later, 1) == [(value, 1) for value in range(6)]
    await later.upkeep.compact("s")
    (batch,) = (await stored(stores)).batches
    assert isinstance(batch, ShardBatch)
    assert batch.listed is not None
    assert await read(stores.client(), 1) == [(value, 1) for value in range(6)]
