"""Blobs that Spark's executors wrote under a reservation: adopted at once, and else orphans."""

from __future__ import annotations

import io
import zlib

import pyarrow.parquet as pq
import pytest
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Clock,
    Stores,
    rows_of,
    updates,
)

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.durable.persist.memory_stores import MemoryConsensus
from actors.durable.persist.store_urls import open_blob
from actors.model.plan.jobs import ObjectDone
from actors.runtime.errors import InvalidUsage, StorageError
from s3_server import S3  # type: ignore[import-not-found]

GRACE_MS = TINY.blob_orphan_grace_ms


def written(s3: S3, bucket: str, prefix: str, name: str, *rows: tuple[int, int, int]) -> ObjectDone:
    """As an executor writes it."""
    data, footer = io.BytesIO(), io.BytesIO()
    pq.write_table(updates(*rows), data)
    pq.read_metadata(data).write_metadata_file(footer)
    s3.ask("PUT", f"/{bucket}/{prefix}{name}", data.getvalue())
    checksum = zlib.crc32(data.getvalue())
    times = [time for _, time, _ in rows]
    size = len(data.getvalue())
    return ObjectDone(name, len(rows), size, checksum, footer.getvalue(), 0, min(times), max(times))


async def in_bucket(s3: S3, bucket: str, clock: Clock) -> PersistClient:
    blob = await open_blob(f"s3://{bucket}/x", TINY, clock)
    client = PersistClient(blob, MemoryConsensus(), TINY, clock)
    await client.create_shards([NewShard("s", SCHEMA)])
    return client


async def test_what_one_attempt_wrote_is_adopted_and_what_others_wrote_is_collected(s3: S3) -> None:
    bucket, clock = s3.new_bucket(), Clock()
    client = await in_bucket(s3, bucket, clock)
    reserved = client.reserve_folder("s")
    assert reserved is not None
    name, url, prefix = reserved
    assert (url, prefix) == (f"s3://{bucket}", f"x/blobs/{name}")
    good = written(s3, bucket, prefix, "a.parquet", (1, 4, 1), (2, 4, 1))
    written(s3, bucket, prefix, "lost.parquet", (1, 4, 1))
    # Nothing of it goes while the job runs, however long it does.
    await client.collect_orphans()
    clock.later_ms += 2 * GRACE_MS
    assert await client.collect_orphans() == 0
    parts = await client.adopt_written("s", name, [good])
    client.release_folder(name)
    assert isinstance(await client.append([ShardAppend("s", 0, 5, tuple(parts))]), AppendCommitted)
    assert await rows_of(client, parts) == [(1, 4, 1), (2, 4, 1)]
    assert parts[0].statistics
    await client.collect_orphans()
    clock.later_ms += 2 * GRACE_MS
    assert await client.collect_orphans() == 1
    assert [key.rpartition("-")[2] for key in s3.keys(bucket)] == ["a.parquet"]


async def test_what_is_not_there_whole_or_has_other_columns_is_refused(s3: S3) -> None:
    bucket, clock = s3.new_bucket(), Clock()
    client = await in_bucket(s3, bucket, clock)
    reserved = client.reserve_folder("s")
    assert reserved is not None
    name, _, prefix = reserved
    torn = written(s3, bucket, prefix, "a.parquet", (1, 4, 1))
    s3.ask("PUT", f"/{bucket}/{prefix}a.parquet", b"torn")
    with pytest.raises(StorageError, match="but has 4"):
        await client.adopt_written("s", name, [torn])
    s3.ask("DELETE", f"/{bucket}/{prefix}a.parquet")
    with pytest.raises(StorageError, match="but has none"):
        await client.adopt_written("s", name, [torn])
    other, footer = updates((1, 4, 1)).rename_columns(["b", "__time", "__diff"]), io.BytesIO()
    data = io.BytesIO()
    pq.write_table(other, data)
    pq.read_metadata(data).write_metadata_file(footer)
    s3.ask("PUT", f"/{bucket}/{prefix}b.parquet", data.getvalue())
    size = len(data.getvalue())
    wrong = ObjectDone("b.parquet", 1, size, zlib.crc32(data.getvalue()), footer.getvalue())
    with pytest.raises(InvalidUsage, match=r"b\.parquet has columns b"):
        await client.adopt_written("s", name, [wrong])
    assert client.pending_blobs() == []


async def test_where_blobs_are_in_no_bucket_nothing_is_reserved() -> None:
    client = Stores().client()
    await client.create_shards([NewShard("s", SCHEMA)])
    assert client.reserve_folder("s") is None
