"""Stored bytes that are not what was written: every damaged byte is found, by name.

Each byte of a small part (a file, and an inline one) and of a document is changed, one at a time;
and each is cut off at every length. What is read then is one named error, or what was written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    INLINE,
    SCHEMA,
    TINY,
    Stores,
    add,
    contents,
    one_shard,
    updates,
)

from actors.durable.persist import BatchPart, CompareAndSet, NewShard, PersistClient, ShardAppend
from actors.durable.persist.documents import (
    PACKED,
    SEALED,
    decode_shard,
    decode_tables,
    encode,
    encode_sized,
    size_of,
)
from actors.durable.persist.location import VersionedData
from actors.durable.persist.parts import decode
from actors.durable.persist.shard import FORMAT, ShardBatch, ShardState, TablesUpper, shard_key
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.replica.dataflow.hydration_journal import HydrationJournal, HydrationNote, note_key
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError
from actors.runtime.kernel import SystemClock

ROWS = ((1, 0, 1), (2, 1, 1), (3, 1, -1))


def damaged(data: bytes) -> Iterator[bytes]:
    """Every byte changed, in one bit and in all; and everything that is cut off."""
    for at in range(len(data)):
        for mask in (1 << at % 8, 0xFF):
            yield data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
        yield data[:at]
    yield data + b"\0"


async def written(inline: bool) -> tuple[PersistClient, Stores, BatchPart]:
    """A shard of one part."""
    stores = Stores(INLINE if inline else TINY)
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 2, *ROWS)
    ((part,),) = [batch.parts for batch in (await client.state("s")).batches]
    return client, stores, part


@pytest.mark.parametrize("inline", [True, False])
async def test_every_damaged_byte_of_a_part_is_found(inline: bool) -> None:
    _, stores, part = await written(inline)
    data = part.inline if part.inline is not None else stores.blob.peek(part.key)
    assert data is not None
    assert decode(part, data, SCHEMA).num_rows == len(ROWS)
    for wrong in damaged(data):
        with pytest.raises(CorruptData, match="crc32"):
            decode(part, wrong, SCHEMA)


async def test_a_damaged_part_is_told_to_its_reader_and_only_of_it() -> None:
    client, stores, part = await written(inline=False)
    await add(client, "s", 3, (7, 2, 1))
    data = stores.blob.peek(part.key)
    assert data is not None
    await stores.blob.set(part.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptData, match=part.key):
        await client.fetch(part, SCHEMA)
    last = (await client.state("s")).batches[-1].parts[0]
    assert (await client.fetch(last, SCHEMA)).num_rows == 1
    with pytest.raises(CorruptData, match=part.key):
        await replaced_settings(stores).maintain("s")
    await stores.blob.set(part.key, data)  # restored from a copy: nothing else is to be done
    assert (await client.fetch(part, SCHEMA)).num_rows == len(ROWS)


def replaced_settings(stores: Stores) -> PersistClient:
    """A client that compacts whatever there is."""
    stores.settings = replace(TINY, batches_per_shard_max=1)
    client: PersistClient = stores.client()
    return client


async def test_the_part_of_another_shard_is_found() -> None:
    client, stores, part = await written(inline=False)
    await client.create_shards([NewShard("t", SCHEMA, holds={"h": 0})])
    await add(client, "t", 2, (5, 1, 1))
    other = (await client.state("t")).batches[0].parts[0]
    with pytest.raises(InvalidUsage, match="another shard"):
        await client.append([ShardAppend("s", 2, 3, (replace(other, time_min=2, time_max=2),))])
    data = stores.blob.peek(other.key)
    assert data is not None
    await stores.blob.set(part.key, data)  # a file that was put in another's place
    with pytest.raises(CorruptData, match="crc32"):
        await client.fetch(part, SCHEMA)


def file_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


WRONG = {
    "no Parquet file": b"PAR1 is not all that it takes PAR1",
    "nothing": b"",
    "other columns": file_of(pa.table({"b": [1], TIME: [0], DIFF: [1]})),
    "other types": file_of(pa.table({"a": ["x"], TIME: [0], DIFF: [1]})),
    "no time": file_of(pa.table({"a": [1], DIFF: [1]})),
    "other rows": file_of(pa.table({"a": [1, 2], TIME: [0, 0], DIFF: [1, 1]})),
    "an unknown codec": file_of(pa.table({"a": [1], TIME: [0], DIFF: [1]}))[:-40] + b"\0" * 40,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_was_written_wrong_is_found_behind_a_right_checksum(what: str) -> None:
    data = WRONG[what]
    part = BatchPart("s/a", 1, len(data), zlib.crc32(data), None, False, 0, 0, 1)
    with pytest.raises(CorruptData, match="part s/a"):
        decode(part, data, SCHEMA)


async def test_pages_of_files_have_checksums_for_who_reads_them_without_us() -> None:
    """As Spark does, which knows nothing of our crc32. (The footer has none: what is in it tells
    where pages are, and is found where it does not fit.)"""
    _, stores, part = await written(inline=False)
    data = stores.blob.peek(part.key)
    assert data is not None
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rows = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    found = 0
    for at in range(4, footer):
        wrong = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        try:
            read = pq.read_table(pa.BufferReader(wrong), page_checksum_verification=True)
        except (pa.ArrowException, OSError):
            found += 1
        else:
            assert read.equals(rows), at
    assert found > (footer - 4) // 2


# -- documents ------------------------------------------------------------------------------------


def state() -> ShardState:
    parts = (
        BatchPart("", 1, 3, 7, b"abc", False, 0, 0, 1),
        BatchPart("s/a", 1, 9, 7, None, False, 1, 1, 1),
    )
    batches = (ShardBatch(0, 2, parts),)
    return ShardState(FORMAT, "s", SCHEMA, 3, 0, 2, batches, {"h": 0})


def long_state() -> ShardState:
    """One that is packed."""
    part = BatchPart("", 1, 64, 7, bytes(range(64)), False, 0, 0, 1)
    batches = (ShardBatch(n, n + 1, (replace(part, time_min=n, time_max=n),)) for n in range(8))
    return ShardState(FORMAT, "s", SCHEMA, 3, 0, 8, tuple(batches), {"h": 0})


@pytest.mark.parametrize("whole", [state(), long_state()], ids=["as it is", "packed"])
def test_every_damaged_byte_of_a_document_is_found(whole: ShardState) -> None:
    data = encode(whole)
    assert decode_shard("shard/s", data) == whole
    newer = 0
    for wrong in damaged(data):
        with pytest.raises(StorageError) as caught:
            decode_shard("shard/s", wrong)
        if not isinstance(caught.value, CorruptData):
            newer += 1
            assert "use a newer version" in str(caught.value)
    assert newer <= 2  # the one byte that holds the version of the form


def test_every_damaged_byte_of_the_tables_upper_is_found() -> None:
    tables = TablesUpper(FORMAT, 17)
    data = encode(tables)
    assert decode_tables(data) == tables
    for wrong in damaged(data):
        with pytest.raises(StorageError):
            decode_tables(wrong)


def test_documents_of_before_there_were_checksums_are_read() -> None:
    assert decode_shard("shard/s", msgspec.msgpack.encode(state())) == state()
    older = msgspec.msgpack.decode(encode(state()))
    # By the version a program of then sees that it is too old.
    assert older["version"] == PACKED > SEALED > 1


def test_documents_are_packed_and_one_that_is_not_is_read() -> None:
    data, size = encode_sized(long_state())
    raw = msgspec.msgpack.encode(long_state())
    assert (size, size_of(data)) == (len(raw), len(raw))
    assert len(data) < len(raw) / 3
    form = msgspec.msgpack.decode(data)
    assert form["version"] == PACKED
    before = form | {"version": SEALED, "checksum": zlib.crc32(raw), "document": raw}
    old = msgspec.msgpack.encode(before)
    assert decode_shard("shard/s", old) == long_state()
    assert size_of(old) == size_of(raw) == len(raw)
    short = encode(TablesUpper(FORMAT, 17))
    assert msgspec.msgpack.decode(short)["version"] == PACKED
    assert size_of(short) == len(msgspec.msgpack.encode(TablesUpper(FORMAT, 17)))


@pytest.mark.parametrize("length", [0, 1, 2000, 2**32 - 1])
def test_a_packed_document_of_another_length_is_found(length: int) -> None:
    """Nothing is made room for that the packed bytes cannot be."""
    form = msgspec.msgpack.decode(encode(long_state()))
    wrong = length.to_bytes(4, "little") + form["document"][4:]
    form |= {"document": wrong, "checksum": zlib.crc32(wrong)}
    with pytest.raises(CorruptData, match="document shard/s"):
        decode_shard("shard/s", msgspec.msgpack.encode(form))


def test_a_document_in_the_place_of_another_is_found() -> None:
    with pytest.raises(CorruptData, match="shard/t names shard s"):
        decode_shard("shard/t", encode(state()))
    strange = replace(
        state(), batches=(ShardBatch(0, 2, (replace(state().batches[0].parts[1], key="t/a"),)),)
    )
    with pytest.raises(CorruptData, match="names the parts t/a"):
        decode_shard("shard/s", encode(strange))


async def test_a_damaged_document_is_told_to_all_who_ask_and_nobody_writes_over_it() -> None:
    _, stores, _ = await written(inline=True)
    key = shard_key("s")
    held = await stores.consensus.head(key)
    assert held is not None
    wrong = held.data[:40] + bytes([held.data[40] ^ 4]) + held.data[41:]
    stores.consensus._documents[key] = VersionedData(held.seqno, wrong)
    client = stores.client()
    for call in (
        lambda: client.state("s"),
        lambda: client.upper("s"),
        lambda: client.open_reader("s", "r"),
        lambda: client.append([ShardAppend("s", 2, 3, ())]),
        lambda: client.set_hold("s", "h", 1),
        lambda: client.maintain("s"),
    ):
        with pytest.raises(CorruptData, match="crc32"):
            await call()  # type: ignore[no-untyped-call]
    assert await stores.consensus.head(key) == VersionedData(held.seqno, wrong)
    stores.consensus._documents[key] = held
    reader = await client.open_reader("s", "r")
    assert await contents(reader, client, 1) == [(1, 1), (2, 1), (3, -1)]


# -- a database that is damaged -------------------------------------------------------------------


async def test_a_damaged_database_is_one_named_error(tmp_path: Path) -> None:
    """Pages of SQLite's file overwritten, one at a time: a named error, or the document."""
    place = tmp_path / "state"
    client = await PersistClient.open(place, TINY, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 2, *ROWS)
    before = await client.state("s")
    await client.close()
    file = place / "consensus.db"
    whole = file.read_bytes()
    found = 0
    for start in range(0, len(whole), 512):
        file.write_bytes(whole[:start] + b"\xa5" * 64 + whole[start + 64 :])
        try:
            again = await PersistClient.open(place, TINY, SystemClock())
        except StorageError:
            found += 1
            continue
        try:
            assert (await again.state("s")) == before
        except StorageError:
            found += 1
        finally:
            await again.close()
    assert found
    file.write_bytes(whole)


async def test_a_schema_that_a_part_does_not_have() -> None:
    client, _, part = await written(inline=False)
    other = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string", False)))
    with pytest.raises(CorruptData, match="has no b"):
        await client.fetch(part, other)


async def test_every_damaged_byte_of_a_stashed_blob_is_found() -> None:
    stores = Stores()
    stashed = stores.client().stashed
    key = stashed.fresh()
    await stashed.set(key, b"an answer on its way")
    whole = await stores.blob.get(key)
    assert whole is not None
    assert await stashed.get(key) == b"an answer on its way"
    for bad in damaged(whole):
        await stores.blob.set(key, bad)
        with pytest.raises(CorruptData, match=key):
            await stashed.get(key)


async def test_a_damaged_note_of_a_hydration_is_none() -> None:
    _, client = await one_shard(INLINE)
    parts = await client.write_parts("s", updates((1, 0, 1)))
    note = HydrationNote(5, ("one", "two"), (parts,))
    assert await HydrationJournal(client, "s").save(note)
    assert await HydrationJournal(client, "s").load(5, note.chunks) == note
    head = await client.head(note_key("s"))
    assert head is not None
    seqno = head.seqno
    for bad in damaged(head.data):
        assert await client.compare_and_set([CompareAndSet(note_key("s"), seqno, bad)])
        seqno += 1
        assert await HydrationJournal(client, "s").load(5, note.chunks) == HydrationNote(
            5, note.chunks
        )
