"""One SQLite file, one thread at a time, whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from actors.durable.persist.consensus_sqlite import SqliteConsensus, use_write_ahead_log
from actors.durable.persist.location import CompareAndSet, VersionedData
from actors.runtime.errors import StorageError
from actors.runtime.kernel import SystemClock
from actors.testing.patience import PATIENCE_S


class Held(SqliteConsensus):
    """A thread that has changed documents waits before it commits, until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SystemClock())
        self.holding = False
        self._reached = threading.Event()
        self._go = threading.Event()

    def _apply(self, ops: Sequence[CompareAndSet]) -> bool:
        done = super()._apply(ops)
        if self.holding:
            self.holding = False
            self._reached.set()
            assert self._go.wait(PATIENCE_S)
        return done

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE_S)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    store = Held(tmp_path / "consensus.db")
    await store.open()
    yield store
    await store.close()


async def cancelled(held: Held, *ops: CompareAndSet) -> None:
    """A set whose task is cancelled within its transaction."""
    held.holding = True
    task = asyncio.create_task(held.compare_and_set(ops))
    await held.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_one_reads_within_the_transaction_of_a_cancelled_task(held: Held) -> None:
    await cancelled(held, CompareAndSet("a", None, b"1"), CompareAndSet("b", None, b"2"))
    reading = asyncio.create_task(held.head("b"))
    await asyncio.wait([reading], timeout=0.1)  # expires: it waits for the other one
    assert not reading.done()
    held.go()
    assert await reading == VersionedData(0, b"2")


async def test_no_one_rolls_back_what_a_cancelled_task_has_begun(held: Held) -> None:
    await cancelled(held, CompareAndSet("a", None, b"1"), CompareAndSet("b", None, b"2"))
    setting = asyncio.create_task(held.compare_and_set([CompareAndSet("a", None, b"3")]))
    await asyncio.wait([setting], timeout=0.1)  # expires: it waits, too
    held.go()
    assert not await setting
    assert await held.head("a") == VersionedData(0, b"1")
    assert await held.head("b") == VersionedData(0, b"2")


async def test_closing_waits_for_what_a_cancelled_task_has_begun(held: Held) -> None:
    await cancelled(held, CompareAndSet("a", None, b"1"), CompareAndSet("b", None, b"2"))
    closing = asyncio.create_task(held.close())
    await asyncio.wait([closing], timeout=0.1)  # expires: it waits, too
    assert not closing.done()
    held.go()
    await closing
    await held.open()
    assert await held.head("a") == VersionedData(0, b"1")


async def test_a_transaction_that_fails_is_rolled_back_and_the_next_goes_on(held: Held) -> None:
    """SQLite leaves one open when a document is too long for it."""
    assert await held.compare_and_set([CompareAndSet("a", None, b"1")])
    held._connection.limit(apsw.SQLITE_LIMIT_LENGTH, 1000)
    with pytest.raises(StorageError, match=r"could not write .*TooBig") as caught:
        await held.compare_and_set(
            [CompareAndSet("b", None, b"2"), CompareAndSet("a", 0, b"x" * 2000)]
        )
    assert caught.value.determinate
    assert await held.head("b") is None
    assert await held.compare_and_set([CompareAndSet("a", 0, b"3")])
    assert await held.head("a") == VersionedData(1, b"3")


class RefusingDatabase:
    """A connection to a new database that another process is switching, too."""

    def __init__(self, refusals: int) -> None:
        self._refusals = refusals

    def execute(self, statement: str) -> SimpleNamespace:
        assert statement == "PRAGMA journal_mode=WAL"
        if self._refusals:
            self._refusals -= 1
            raise apsw.BusyError("database is locked")
        return SimpleNamespace(get="wal")


def test_of_two_that_open_a_new_database_each_waits_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.durable.persist.consensus_sqlite._BUSY_MS", 80)
    refused: Any = RefusingDatabase(3)
    assert use_write_ahead_log(refused) == "wal"
    held: Any = RefusingDatabase(1 << 30)
    with pytest.raises(apsw.BusyError):
        use_write_ahead_log(held)
