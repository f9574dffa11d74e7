"""A disk that hangs holds nobody longer than its deadline, and may do late what it was told."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from msgspec.structs import replace
from persist_world import SCHEMA, TINY, add, contents  # type: ignore[import-not-found]

from actors.durable.persist import AppendCommitted, CompareAndSet, NewShard, PersistClient
from actors.durable.persist import blob_file as files
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.location import VersionedData
from actors.runtime.errors import StorageError
from actors.runtime.kernel.clock import CallOverdue, ThreadedClock
from actors.testing.patience import PATIENCE_MS, PATIENCE_S

pytestmark = pytest.mark.anyio
R = TypeVar("R")

SOON_MS = 100  # expires: of calls that hang or wait for one that does
SETTINGS = replace(TINY, disk_timeout_ms=SOON_MS)


class Gate:
    """Where a call of a disk stands still, until it is let go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = threading.Event()
        self._loop = asyncio.get_running_loop()

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.opened.wait(PATIENCE_S)


class DeadlineClock(ThreadedClock):
    """The deadline of a blocking call passes when the call hangs, and no other one does, however
    slow the disk is."""

    gate: Gate | None = None

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        call = asyncio.ensure_future(self.run_blocking(function))
        if self.gate is not None and not self.gate.reached.is_set():
            hangs = asyncio.ensure_future(self.gate.reached.wait())
            await asyncio.wait((call, hangs), return_when=asyncio.FIRST_COMPLETED)
            hangs.cancel()
            if not call.done():
                call.cancel()
                raise CallOverdue
        return await call


@contextmanager
def hanging(
    clock: DeadlineClock, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gate]:
    """Its calls hang until the gate opens, and then do what they do."""
    gate, right = Gate(), getattr(owner, name)

    def hung(*args: Any) -> Any:
        gate.wait()
        return right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, hung)
        clock.gate = gate
        try:
            yield gate
        finally:
            clock.gate = None
            gate.opened.set()


async def eventually(wanted: Any, found: Any) -> None:
    """Until both are the same."""
    with anyio.fail_after(PATIENCE_S):
        while await found() != wanted:
            await anyio.sleep(0.01)


async def test_a_read_that_hangs_surely_did_nothing(tmp_path: Path) -> None:
    """A FIFO nobody writes to: a file that really hangs."""
    clock = ThreadedClock(2)
    blob, patient = (FileBlob(tmp_path, clock, each) for each in (SOON_MS, PATIENCE_MS))
    await patient.prepare()
    await patient.set("s/other", b"x")
    path = tmp_path / "s" / "a"
    os.mkfifo(path)
    try:
        with pytest.raises(StorageError, match=rf"read .*s/a: .* within {SOON_MS} ms") as caught:
            await blob.get("s/a")
        assert caught.value.determinate
        assert await patient.get("s/other") == b"x", "others go on"
    finally:
        written = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(written)  # who reads comes to the end


@pytest.mark.parametrize("what", ["set", "adopt", "delete"])
async def test_a_write_that_hangs_may_happen_later(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DeadlineClock(4)
    blob = FileBlob(tmp_path / "blobs", clock, SOON_MS)
    await blob.prepare()
    (tmp_path / "made").write_bytes(b"x")
    if what == "delete":
        await blob.set("s/a", b"x")
    late = None if what == "delete" else b"x"
    with hanging(clock, files, "sync_folder" if late else "suppress", monkeypatch) as gate:
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
    clock.close()


async def test_a_transaction_that_hangs_is_open_and_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DeadlineClock(4)
    store = SqliteConsensus(tmp_path / "c.db", clock, timeout_ms=SOON_MS)
    await store.open()
    await store.compare_and_set([CompareAndSet("a", None, b"0")])
    found: list[StorageError] = []

    async def call(use: Any) -> None:
        with pytest.raises(StorageError, match=f"within {SOON_MS} ms") as caught:
            await use()
        found.append(caught.value)

    with hanging(clock, store, "_apply", monkeypatch) as gate:
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
    clock.close()


async def test_an_append_on_a_disk_that_hung_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DeadlineClock(4)
    client = await PersistClient.open(tmp_path, SETTINGS, clock)
    await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await add(client, "s", 1, (1, 0, 1))
    with hanging(clock, client.consensus, "_apply", monkeypatch) as gate:
        with anyio.fail_after(PATIENCE_S), pytest.raises(StorageError, match="the disk") as caught:
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
