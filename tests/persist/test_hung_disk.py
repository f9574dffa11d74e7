"""A disk that hangs holds nobody longer than its deadline, and may do late what it was told."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from persist_world import SCHEMA, TINY, add, contents  # type: ignore[import-not-found]

from actors.errors import StorageError
from actors.kernel import SystemClock
from actors.kernel.clock import ThreadedClock
from actors.persist import AppendCommitted, CompareAndSet, NewShard, PersistClient
from actors.persist import blob_file as files
from actors.persist.blob_file import FileBlob
from actors.persist.consensus_sqlite import SqliteConsensus
from actors.persist.location import VersionedData
from actors.testing.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

SOON_MS = 100
SETTINGS = replace(TINY, disk_timeout_ms=SOON_MS)


class Gate:
    """Where a call of a disk stands still, until it is let go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(30)


@contextmanager
def hanging(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Its calls hang until the gate opens, and then do what they do."""
    gate, right = Gate(), getattr(owner, name)

    def hung(*args: Any) -> Any:
        gate.wait()
        return right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, hung)
        try:
            yield gate
        finally:
            gate.opened.set()


async def eventually(wanted: Any, found: Any) -> None:
    """Until both are the same."""
    with anyio.fail_after(PATIENCE_S):
        while await found() != wanted:
            await anyio.sleep(0.01)


async def test_a_read_that_hangs_surely_did_nothing(tmp_path: Path) -> None:
    """A FIFO nobody writes to: a file that really hangs."""
    blob = FileBlob(tmp_path, ThreadedClock(2), SOON_MS)
    await blob.prepare()
    await blob.set("s/other", b"x")
    path = tmp_path / "s" / "a"
    os.mkfifo(path)
    try:
        with pytest.raises(StorageError, match=rf"read .*s/a: .* within {SOON_MS} ms") as caught:
            await blob.get("s/a")
        assert caught.value.determinate
        assert await blob.get("s/other") == b"x", "others go on"
    finally:
        written = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(written)  # who reads comes to the end


@pytest.mark.parametrize("what", ["set", "adopt", "delete"])
async def test_a_write_that_hangs_may_happen_later(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = FileBlob(tmp_path / "blobs", SystemClock(), SOON_MS)
    await blob.prepare()
    (tmp_path / "made").write_bytes(b"x")
    if what == "delete":
        await blob.set("s/a", b"x")
    late = None if what == "delete" else b"x"
    with hanging(files, "sync_folder" if late else "suppress", monkeypatch) as gate:
        with pytest.raises(StorageError, match=f"within {SOON_MS} ms") as caught:
            match what:
                case "set":
                    await blob.set("s/a", b"x")
                case "adopt":
                    await blob.adopt("s/a", tmp_path / "made")
                case _:
                    await blob.delete("s/a")
        assert not caught.value.determinate
        assert gate.reached.is_set()
    await eventually(late, lambda: blob.get("s/a"))


async def test_a_transaction_that_hangs_is_open_and_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteConsensus(tmp_path / "c.db", SystemClock(), timeout_ms=SOON_MS)
    await store.open()
    await store.compare_and_set([CompareAndSet("a", None, b"0")])
    found: list[StorageError] = []

    async def call(use: Any) -> None:
        with pytest.raises(StorageError, match=f"within {SOON_MS} ms") as caught:
            await use()
        found.append(caught.value)

    with hanging(store, "_apply", monkeypatch) as gate:
        async with anyio.create_task_group() as group:
            for value in (b"1", b"2"):
                op = CompareAndSet("a", 0, value)
                group.start_soon(call, lambda op=op: store.compare_and_set([op]))
            group.start_soon(call, lambda: store.head("a"))
        assert gate.reached.is_set()
        assert not found[0].determinate, "it began; the others, which did not, may know"
        assert len(found) == 3
        with anyio.fail_after(PATIENCE_S):
            await call(store.close)
            await call(lambda: store.list_keys())
    await eventually(VersionedData(1, b"1"), lambda: store.head("a"))
    assert await store.compare_and_set([CompareAndSet("a", 1, b"3")])
    await store.close()


async def test_an_append_on_a_disk_that_hung_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ThreadedClock(4)
    client = await PersistClient.open(tmp_path, SETTINGS, clock)
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 1, (1, 0, 1))
    with hanging(client.consensus, "_apply", monkeypatch) as gate:
        with anyio.fail_after(30), pytest.raises(StorageError, match="the disk") as caught:
            await add(client, "s", 2, (2, 1, 1))
        assert not caught.value.determinate
        assert gate.reached.is_set()
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                done = await add(client, "s", await client.recent_upper("s") + 1)
                break
            except StorageError:  # its thread may not be back yet
                await anyio.sleep(0.01)
    assert isinstance(done, AppendCommitted)
    reader = await client.open_reader("s", "r")
    found = await contents(reader, client, (await client.upper("s")) - 1)
    assert found in ([(1, 1)], [(1, 1), (2, 1)])
    await reader.close()
    await client.close()
    clock.close()
