"""How the stores on a local disk fail; what all stores do: test_…_conformance.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.location import CompareAndSet, VersionedData
from actors.runtime.errors import CorruptData, ResourceClosed, StorageError, StoreFull
from actors.runtime.kernel import SystemClock

CLOCK = SystemClock()


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


async def test_documents_survive_reopening(tmp_path: Path) -> None:
    first = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
    await first.open()
    await first.compare_and_set([CompareAndSet("a", None, b"\0\xff")])
    await first.close()
    with pytest.raises(ResourceClosed):
        await first.head("a")
    second = SqliteConsensus(tmp_path / "consensus.db", CLOCK)
    await second.open()
    assert await second.head("a") == VersionedData(0, b"\0\xff")
    await second.close()


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "consensus.db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(CorruptData, match=r"consensus\.db is damaged"):
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
        await store.compare_and_set([CompareAndSet("a", None, b"")])
    assert type(caught.value) is expected
    assert caught.value.determinate is determinate
    store._connection = real
    assert await store.head("a") is None
    assert await store.compare_and_set([CompareAndSet("a", None, b"")])
    await store.close()
