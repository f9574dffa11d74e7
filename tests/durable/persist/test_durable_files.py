"""What is acknowledged was synced, in an order in which a power cut leaves all of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.durable.persist.blob_file import TEMPORARY, FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.stashed_blobs import StashedBlobs
from actors.runtime.errors import StorageError
from actors.runtime.kernel import SystemClock

DATA = b"x" * 1000


class Disk:
    """What was synced and renamed, in order: paths below the root."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self.done: list[tuple[str, ...]] = []
        sync: Callable[[int], None] = os.fsync
        rename: Callable[..., None] = os.rename

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            whole = place.is_dir() or place.stat().st_size == len(DATA)
            self.done.append(("synced" if whole else "synced too early", self._name(place)))

        def renamed(old: Any, new: Any) -> None:
            rename(old, new)
            self.done.append(("renamed", self._name(Path(old)), self._name(Path(new))))

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", renamed)

    def _name(self, place: Path) -> str:
        name = str(place.relative_to(self._root)) if place.is_relative_to(self._root) else "given"
        return "growing" if name.startswith(TEMPORARY) else name


@pytest.fixture
async def blob(tmp_path: Path) -> FileBlob:
    made = FileBlob(tmp_path / "blobs", SystemClock())
    await made.prepare()
    return made


async def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("in the way")
    with pytest.raises(StorageError, match=f"could not prepare the blob folder {tmp_path}/blobs"):
        await FileBlob(tmp_path / "blobs", SystemClock()).prepare()


async def test_a_blob_is_synced_then_named_and_then_its_name_is(
    blob: FileBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "blobs", monkeypatch)
    await blob.set("s1/a", DATA)
    assert disk.done == [
        ("synced", "growing"),
        ("renamed", "growing", "s1/a"),
        ("synced", "s1"),
        ("synced", "."),  # the folder is new
    ]
    disk.done.clear()
    await blob.set("s1/b", DATA)
    assert disk.done == [("synced", "growing"), ("renamed", "growing", "s1/b"), ("synced", "s1")]


async def test_what_is_stashed_for_one_reader_does_not_wait_for_the_disk(
    blob: FileBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "blobs", monkeypatch)
    stashed = StashedBlobs(blob, "p1")
    key = stashed.fresh()
    await stashed.set(key, DATA)
    assert disk.done == [("renamed", "growing", key)]
    assert await stashed.get(key) == DATA


async def test_a_file_that_is_taken_over_is_synced_too(
    blob: FileBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given.parquet"
    given.write_bytes(DATA)
    disk = Disk(tmp_path / "blobs", monkeypatch)
    await blob.adopt("s1/a", given)
    assert disk.done == [
        ("renamed", "given", "growing"),
        ("synced", "growing"),
        ("renamed", "growing", "s1/a"),
        ("synced", "s1"),
        ("synced", "."),
    ]


async def test_a_folder_that_another_made_is_synced_by_all_who_need_it(
    blob: FileBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs" / "s1").mkdir()  # by who has not synced it yet, or is dead
    disk = Disk(tmp_path / "blobs", monkeypatch)
    await blob.set("s1/a", DATA)
    assert disk.done[-1] == ("synced", ".")
    await blob.delete("s1/a")  # and the folder, which was the last of it
    disk.done.clear()
    await blob.set("s1/b", DATA)
    assert disk.done[-2:] == [("synced", "s1"), ("synced", ".")]
    assert (await blob.list_keys())[0].key == "s1/b"


async def test_a_folder_that_is_removed_again_and_again_is_made_again(
    blob: FileBlob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = [2]
    mkdir = Path.mkdir

    def made(self: Path, *args: Any, **options: Any) -> None:
        if removed[0]:
            removed[0] -= 1  # a collector found it empty
            return
        mkdir(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", made)
    await blob.set("s1/a", DATA)
    assert await blob.get("s1/a") == DATA
    removed[0] = 99
    with pytest.raises(StorageError) as caught:
        await blob.set("s2/a", DATA)
    assert caught.value.determinate
    assert await blob.list_keys() == await blob.list_keys("s1/")
    assert not list((tmp_path / "blobs" / TEMPORARY).iterdir())


async def test_sqlite_syncs_each_commit(tmp_path: Path) -> None:
    store = SqliteConsensus(tmp_path / "documents.db", SystemClock())
    await store.open()
    try:
        full = store._connection.execute("PRAGMA synchronous").get
        assert full == 2, "the log is synced before a commit returns"
        assert store._connection.execute("PRAGMA journal_mode").get == "wal"
    finally:
        await store.close()
