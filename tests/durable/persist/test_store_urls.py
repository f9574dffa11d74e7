"""Stores by URL."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from store_houses import CLOCK, SETTINGS  # type: ignore[import-not-found]

from actors.durable.persist import NewShard, PersistClient
from actors.durable.persist.blob_bucket import BucketBlob
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.location import CompareAndSet, ConsensusStore, VersionedData
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, StorageError


async def documents(url: str) -> ConsensusStore:
    return await open_consensus(url, SETTINGS, CLOCK, Random(0))


async def test_memory_is_shared_by_name() -> None:
    one, same = await documents("mem:shared"), await documents("mem:shared")
    assert one is same
    assert isinstance(one, MemoryConsensus)
    assert await documents("mem:") is not await documents("mem:")
    blob, again = [await open_blob("mem:shared", SETTINGS, CLOCK) for _ in range(2)]
    assert blob is again
    assert isinstance(blob, MemoryBlob)


async def test_files_are_named_by_path_or_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"file:{tmp_path}/b%20c", f"file://{tmp_path}/b%20c", "file:b%20c"):
        blob = await open_blob(url, SETTINGS, CLOCK)
        assert isinstance(blob, FileBlob)
        await blob.set("s/a", url.encode())
        assert (tmp_path / "b c" / "s" / "a").read_bytes() == url.encode()
    for seqno, url in enumerate(
        [f"sqlite:{tmp_path}/d/c.db", f"SQLITE://{tmp_path}/d/c.db", "sqlite:d/c.db"]
    ):
        consensus = await documents(url)
        assert isinstance(consensus, SqliteConsensus)
        assert await consensus.compare_and_set(
            [CompareAndSet("a", seqno - 1 if seqno else None, b"")]
        )
        assert await consensus.head("a") == VersionedData(seqno, b"")
        await consensus.close()


async def test_files_of_others_that_write_now_stay(tmp_path: Path) -> None:
    await open_blob(f"file:{tmp_path}", SETTINGS, CLOCK)
    (tmp_path / ".tmp" / "s@a").write_bytes(b"half")
    await open_blob(f"file:{tmp_path}", SETTINGS, CLOCK, exclusive=False)
    assert (tmp_path / ".tmp" / "s@a").exists()
    await open_blob(f"file:{tmp_path}", SETTINGS, CLOCK)
    assert not (tmp_path / ".tmp" / "s@a").exists()


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
async def test_buckets_are_asked_nothing_yet(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "GOOGLE_SKIP_SIGNATURE": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "a",
        "AZURE_STORAGE_ACCOUNT_KEY": "Yg==",
    }.items():
        monkeypatch.setenv(name, value)
    assert isinstance(await open_blob(f"{kind}://bucket", SETTINGS, CLOCK), BucketBlob)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("state", "invalid URL 'state': expected file:PATH"),
        ("ftp://u:secret@host/x", "unknown kind of store ftp: expected file:PATH"),
        ("sqlite:/a", "sqlite: stores documents"),
        ("postgresql://host/db", "postgresql: stores documents"),
        ("file:", "it has no path"),
        ("file://host/a", "expected a local path"),
        ("file:/a?b", "expected a local path"),
        ("mem:a/b", "expected mem: or mem:NAME"),
        ("s3://Bucket/x", "expected s3://bucket/path"),
        ("s3://key:secret@bucket/x", "expected s3://bucket/path"),
        ("s3://bucket/x?secret=1", "invalid bucket URL"),
    ],
)
async def test_wrong_urls_of_blobs_say_what_is_understood(url: str, text: str) -> None:
    with pytest.raises(InvalidUsage) as caught:
        await open_blob(url, SETTINGS, CLOCK)
    assert text in str(caught.value)
    assert ":secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "invalid URL '': expected sqlite:PATH, postgresql://"),
        ("mysql://u:secret@host/x", "unknown kind of store mysql: expected sqlite:PATH"),
        ("file:/a", "file: stores blobs (expected"),
        ("s3://b/x", "s3: stores blobs (expected sqlite:PATH, postgresql://"),
        ("gs://b/x", "gs: stores blobs (expected"),
        ("az://b/x", "az: stores blobs (expected"),
        ("sqlite://host/a", "expected a local path"),
        ("postgresql://host/db?schema=A%20b", "invalid schema 'A b': use only a-z"),
        ("postgresql://host/db?sslmoode=off", "sslmoode"),
        ("postgresql://u:secret@host/db", "a password must not be in the URL"),
        (
            "postgresql://host/db?password_env=A&passfile=b",
            "give only one of password_env, passfile",
        ),
        ("postgresql://host:no/db", "expected postgresql://"),
    ],
)
async def test_wrong_urls_of_documents_say_what_is_understood(url: str, text: str) -> None:
    with pytest.raises(InvalidUsage) as caught:
        await documents(url)
    assert text in str(caught.value)
    assert ":secret" not in str(caught.value)


async def test_without_psycopg_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "psycopg",
        "actors.durable.persist.consensus_postgres",
        "actors.durable.persist.postgres_link",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StorageError, match=r"pip install 'penstock-views\[postgres\]'"):
        await documents("postgresql://host/db")


async def test_shards_live_in_stores_by_url(tmp_path: Path) -> None:
    schema = TableSchema((TableColumn("a", "bigint"),))
    for round_ in range(2):
        client = PersistClient(
            await open_blob(f"file:{tmp_path}/b", SETTINGS, CLOCK),
            await documents(f"sqlite:{tmp_path}/c.db"),
            SETTINGS,
            CLOCK,
        )
        if round_ == 0:
            assert await client.create_shards([NewShard("s", schema)])
        assert (await client.state("s")).schema == schema
        await client.close()
