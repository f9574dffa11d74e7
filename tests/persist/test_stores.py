"""What every Blob and every Consensus must do, and how the durable ones fail."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.errors import Closed, Corrupt, InvalidUsage, StorageError, StoreFull
from actors.kernel import SystemClock
from actors.persist.blob_file import FileBlob
from actors.persist.blob_memory import MemoryBlob
from actors.persist.consensus_memory import MemoryConsensus
from actors.persist.consensus_sqlite import SqliteConsensus
from actors.persist.location import Blob, Cas, Consensus, VersionedData

CLOCK = SystemClock()


@pytest.fixture(params=["file", "memory"])
async def blob(request: pytest.FixtureRequest, tmp_path: Path) -> Blob:
    if request.param == "memory":
        return MemoryBlob(CLOCK)
    made = FileBlob(tmp_path / "blob", CLOCK)
    await made.prepare()
    return made


@pytest.fixture(params=["sqlite", "memory"])
async def consensus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Consensus]:
    made: Consensus
    if request.param == "memory":
        made = MemoryConsensus()
    else:
        made = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
        await made.open()
    yield made
    await made.close()


async def test_blob_is_written_read_listed_and_deleted(blob: Blob) -> None:
    before = CLOCK.now_ms()
    await blob.set("s1/b", b"two")
    await blob.set("s1/a", b"")
    await blob.set("s2/a", b"three")
    assert await blob.get("s1/b") == b"two"
    assert await blob.get("s1/a") == b""
    assert await blob.get("s1/c") is None
    listed = await blob.list_keys()
    assert [(info.key, info.bytes) for info in listed] == [("s1/a", 0), ("s1/b", 3), ("s2/a", 5)]
    assert all(abs(info.modified_ms - before) < 60_000 for info in listed)
    assert [info.key for info in await blob.list_keys("s1/")] == ["s1/a", "s1/b"]
    assert await blob.delete("s1/b")
    assert not await blob.delete("s1/b")
    assert await blob.get("s1/b") is None
    assert await blob.delete("s1/a")
    await blob.set("s1/c", b"again")
    assert await blob.get("s1/c") == b"again"


async def test_blob_takes_over_a_file(blob: Blob, tmp_path: Path) -> None:
    file = tmp_path / "made-by-spark"
    file.write_bytes(b"x" * 3_000_000)
    assert await blob.adopt("s1/a", file) == (3_000_000, zlib.crc32(b"x" * 3_000_000))
    assert not file.exists()
    assert await blob.get("s1/a") == b"x" * 3_000_000
    with pytest.raises(StorageError, match="made-by-spark") as caught:
        await blob.adopt("s1/b", file)
    assert caught.value.determinate


@pytest.mark.parametrize("key", ["../a", "s/..", "s/.hidden", "s", "s/a/b", "/a", "s/"])
async def test_blob_keys_cannot_leave_their_folder(blob: Blob, key: str) -> None:
    with pytest.raises(InvalidUsage):
        await blob.set(key, b"")


async def test_a_full_disk_leaves_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = FileBlob(tmp_path / "blob", CLOCK)
    await blob.prepare()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFull, match="s1/a") as caught:
            await blob.set("s1/a", b"data")
    assert caught.value.determinate
    assert await blob.list_keys() == []
    assert list((tmp_path / "blob" / ".tmp").iterdir()) == []
    await blob.set("s1/a", b"data")


async def test_temporary_files_of_a_killed_process_go(tmp_path: Path) -> None:
    blob = FileBlob(tmp_path / "blob", CLOCK)
    await blob.prepare()
    (tmp_path / "blob" / ".tmp" / "s1@a").write_bytes(b"half")
    await FileBlob(tmp_path / "blob", CLOCK).prepare()
    assert list((tmp_path / "blob" / ".tmp").iterdir()) == []
    assert blob.path("s1/a") == str(tmp_path / "blob" / "s1" / "a")


async def test_compare_and_set_is_all_or_none(consensus: Consensus) -> None:
    assert await consensus.head("a") is None
    assert await consensus.compare_and_set([Cas("a", None, b"0"), Cas("b", None, b"0")])
    assert await consensus.head("a") == VersionedData(0, b"0")
    assert not await consensus.compare_and_set([Cas("a", 0, b"1"), Cas("b", None, b"1")])
    assert not await consensus.compare_and_set([Cas("a", 0, b"1"), Cas("b", 1, b"1")])
    assert not await consensus.compare_and_set([Cas("a", 0, b"1"), Cas("c", 0, b"1")])
    assert await consensus.head("a") == VersionedData(0, b"0")
    assert await consensus.compare_and_set(
        [Cas("a", 0, b"1"), Cas("b", 0, None), Cas("c", None, b"0")]
    )
    assert await consensus.head("a") == VersionedData(1, b"1")
    assert await consensus.head("b") is None
    assert await consensus.list_keys() == ["a", "c"]
    assert await consensus.list_keys("c") == ["c"]
    assert not await consensus.compare_and_set([Cas("b", 0, b"")])
    with pytest.raises(InvalidUsage):
        await consensus.compare_and_set([])
    with pytest.raises(InvalidUsage, match="twice"):
        await consensus.compare_and_set([Cas("a", 1, b""), Cas("a", 2, b"")])


async def test_one_of_many_racers_wins(consensus: Consensus) -> None:
    wins: list[int] = []

    async def race(number: int) -> None:
        own = Cas(f"own{number}", None, b"")
        assert await consensus.compare_and_set([own])
        if await consensus.compare_and_set([Cas("prize", None, str(number).encode())]):
            wins.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(race, number)
    assert len(wins) == 1
    assert await consensus.head("prize") == VersionedData(0, str(wins[0]).encode())
    assert len(await consensus.list_keys("own")) == 20


async def test_a_cancelled_caller_disturbs_nobody(consensus: Consensus) -> None:
    async with anyio.create_task_group() as group:
        for number in range(8):

            async def give_up(number: int) -> None:
                with anyio.CancelScope() as scope:
                    group.start_soon(_cancel, scope)
                    await consensus.compare_and_set([Cas(f"k{number}", None, b"")])

            group.start_soon(give_up, number)
    assert await consensus.compare_and_set([Cas("after", None, b"")])


async def _cancel(scope: anyio.CancelScope) -> None:
    scope.cancel()


async def test_documents_survive_reopening(tmp_path: Path) -> None:
    first = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
    await first.open()
    await first.compare_and_set([Cas("a", None, b"\0\xff")])
    await first.close()
    with pytest.raises(Closed):
        await first.head("a")
    second = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
    await second.open()
    assert await second.head("a") == VersionedData(0, b"\0\xff")
    await second.close()


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "consensus.db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(Corrupt, match=r"consensus\.db is damaged"):
        await SqliteConsensus(path, CLOCK).open()


class _Failing:
    """A connection that fails at one statement."""

    def __init__(self, connection: Any, word: str, error: Exception) -> None:
        self._connection = connection
        self._word = word
        self._error = error

    def execute(self, text: str, *bindings: Any) -> Any:
        if text.startswith(self._word):
            raise self._error
        return self._connection.execute(text, *bindings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize(
    ("word", "kind", "expected", "determinate"),
    [
        ("INSERT", "FullError", StoreFull, True),
        ("COMMIT", "FullError", StoreFull, True),
        ("INSERT", "IOError", StorageError, True),
        ("COMMIT", "IOError", StorageError, False),
        ("BEGIN", "BusyError", StorageError, True),
    ],
)
async def test_failures_of_sqlite_say_whether_they_may_have_happened(
    tmp_path: Path, word: str, kind: str, expected: type[StorageError], determinate: bool
) -> None:
    import apsw

    store = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
    await store.open()
    real = store._connection
    store._connection = _Failing(real, word, getattr(apsw, kind)("made up"))
    with pytest.raises(expected, match=r"consensus\.db") as caught:
        await store.compare_and_set([Cas("a", None, b"")])
    assert type(caught.value) is expected
    assert caught.value.determinate is determinate
    store._connection = real
    assert await store.head("a") is None
    assert await store.compare_and_set([Cas("a", None, b"")])
    await store.close()
