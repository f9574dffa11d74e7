"""Consensus on SQLite: one file, one connection, one thread at a time.

Sets that arrive while a commit is in progress wait, and then share the next transaction (and its
fsync). They are still evaluated individually and in order. Errors before COMMIT are rolled back and
determinate. An I/O error of COMMIT itself is indeterminate, because the log may contain the whole
transaction anyway.

A transaction that hangs is given up after `timeout_ms` (`blob_file.py`), which makes its sets
indeterminate. Until its thread has returned, each later call waits for as long, and fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import apsw

from actors.durable.object_store.file_modes import PRIVATE_FILE
from actors.durable.object_store.folder_calls import sync_folder
from actors.durable.persist.blob_file import DISK_TIMEOUT_MS, run_with_timeout, timeout_error
from actors.durable.persist.group_commit import ConsensusGroupCommit, PendingSet, fail
from actors.durable.persist.location import CompareAndSet, VersionedData, check_key
from actors.runtime.errors import (
    CorruptData,
    ResourceClosed,
    StorageError,
    StoreFull,
    storage_error,
)
from actors.runtime.kernel import ActorClock

R = TypeVar("R")

_BUSY_MS: Final = 5_000
_SWITCH_AGAIN_MS: Final = 20
_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS document"
    " (key TEXT PRIMARY KEY NOT NULL, seqno INTEGER NOT NULL, data BLOB NOT NULL)"
)
_CHANGE: Final = "UPDATE document SET seqno = seqno + 1, data = ? WHERE key = ?"


def use_write_ahead_log(connection: apsw.Connection) -> str:
    """Switch a database to write-ahead logging and return its mode. Raises `apsw.Error`.

    SQLite ignores its busy timeout here: if two processes open a new database at the same time, one
    is refused immediately.
    """
    for _ in range(_BUSY_MS // _SWITCH_AGAIN_MS):
        with suppress(apsw.BusyError):
            return str(connection.execute("PRAGMA journal_mode=WAL").get)
        threading.Event().wait(_SWITCH_AGAIN_MS / 1000)
    return str(connection.execute("PRAGMA journal_mode=WAL").get)


class SqliteConsensus:
    """A `ConsensusStore` in one SQLite file."""

    def __init__(
        self,
        path: Path,
        clock: ActorClock,
        poll_ms: int = 500,
        timeout_ms: int = DISK_TIMEOUT_MS,
    ) -> None:
        """Make a store. `poll_ms` is the period of `changes`. `timeout_ms` limits a transaction,
        which then continues without its callers."""
        self._timeout_ms = timeout_ms
        self._path = path
        self._poll_ms = poll_ms
        self._clock = clock
        self._connection: Any = None
        """The open connection; None before `open` and after `close`."""
        self._lock = anyio.Lock(fast_acquire=True)
        # A cancelled task (`Task.cancel` ignores shields) releases `_lock` while its thread is
        # still running. No cancellation releases this lock, so it keeps the next thread out of the
        # transaction.
        self._in_use = threading.Lock()

        async def commit(group: Sequence[PendingSet]) -> None:
            try:
                await self._in_thread("write", lambda: self._commit(group), determinate=False)
            except StorageError as error:
                fail(group, error)

        self._sets = ConsensusGroupCommit(self._lock, self._check_open, commit)

    async def open(self) -> None:
        """Open or create the file. Raises `StorageError` and `CorruptData`."""
        async with self._lock:
            with anyio.CancelScope(shield=True):
                await self._in_thread("open", self._open)

    async def _in_thread(self, what: str, use: Callable[[], R], *, determinate: bool = True) -> R:
        """Run a blocking call in a thread. Its wait for the connection has the same limit as the
        call."""

        def alone() -> R:
            if not self._in_use.acquire(timeout=self._timeout_ms / 1000):
                raise timeout_error(f"{what} {self._path}", self._timeout_ms, determinate=True)
            try:
                return use()
            finally:
                self._in_use.release()

        where = f"{what} {self._path}"
        return await run_with_timeout(
            self._clock, alone, self._timeout_ms, where, determinate=determinate
        )

    def _open(self) -> None:
        try:
            # SQLite gives its two companion files the file's mode. An existing file is not opened
            # here, because closing it would release the locks that this process has on it.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
            connection = apsw.Connection(str(self._path))
            connection.set_busy_timeout(_BUSY_MS)
            mode = use_write_ahead_log(connection)
            if mode != "wal":
                raise StorageError(
                    f"SQLite cannot use write-ahead logging for {self._path} (mode {mode!r}); put "
                    "the state directory on a local file system",
                    determinate=True,
                )
            # A commit that returned survives a power failure, at the price of one fsync.
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(_TABLE)
            sync_folder(self._path.parent)
        except apsw.Error as error:
            raise self._failed("open", error) from error
        except OSError as error:
            raise storage_error(f"sync the folder of {self._path}", error) from error
        self._connection = connection

    async def head(self, key: str) -> VersionedData | None:
        """Return the document; None if it does not exist. Raises `StorageError`."""
        check_key(key)
        return await self._locked(lambda: self._head(key))

    def _head(self, key: str) -> VersionedData | None:
        row = self._connection.execute(
            "SELECT seqno, data FROM document WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else VersionedData(row[0], row[1])

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, sorted. Raises `StorageError`."""
        return await self._locked(
            lambda: [
                row[0]
                for row in self._connection.execute(
                    "SELECT key FROM document WHERE substr(key, 1, ?) = ? ORDER BY key",
                    (len(prefix), prefix),
                )
            ]
        )

    async def snapshot(self) -> list[tuple[str, VersionedData]]:
        """Return all documents as of one instant, sorted by key. Raises `StorageError`."""
        # One statement is one transaction, so it sees the database at one instant.
        return await self._locked(
            lambda: [
                (row[0], VersionedData(row[1], row[2]))
                for row in self._connection.execute(
                    "SELECT key, seqno, data FROM document ORDER BY key"
                )
            ]
        )

    async def _locked(self, read: Callable[[], R]) -> R:
        def guarded() -> R:
            try:
                return read()
            except apsw.Error as error:
                raise self._failed("read", error) from error

        async with self._lock:
            self._check_open()
            with anyio.CancelScope(shield=True):
                result = await self._in_thread("read", guarded)
        return result

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none, in a transaction shared with waiting sets. Raises
        `StorageError`."""
        return await self._sets.set(ops)

    def _commit(self, group: Sequence[PendingSet]) -> None:
        """Set the answer of every pending set. Never raises `StorageError`."""
        answers: list[bool] = []
        started = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            answers = [self._apply(pending.ops) for pending in group]
            started = True
            self._connection.execute("COMMIT")
        except apsw.Error as error:
            full = isinstance(error, apsw.FullError)
            # Of COMMIT's own errors, only a full disk is determinate.
            fail(group, self._failed("write", error, determinate=full or not started))
            return
        finally:
            self._roll_back()
        for pending, answer in zip(group, answers, strict=True):
            pending.answer = answer

    def _apply(self, ops: Sequence[CompareAndSet]) -> bool:
        run = self._connection.execute
        if len(ops) == 1 and ops[0].expected is not None and ops[0].data is not None:
            only = ops[0]  # the common case: compare and change in one statement
            run(_CHANGE + " AND seqno = ?", (only.data, only.key, only.expected))
            return bool(self._connection.changes())
        for op in ops:
            row = run("SELECT seqno FROM document WHERE key = ?", (op.key,)).fetchone()
            if (None if row is None else row[0]) != op.expected:
                return False
        for op in ops:
            if op.kept:
                continue
            if op.data is None:
                run("DELETE FROM document WHERE key = ?", (op.key,))
            elif op.expected is None:
                run("INSERT INTO document VALUES (?, ?, ?)", (op.key, op.first, op.data))
            else:
                run(_CHANGE, (op.data, op.key))
        return True

    def _roll_back(self) -> None:
        if not self._connection.in_transaction:
            return
        try:
            self._connection.execute("ROLLBACK")
        except apsw.Error:
            # The connection is broken; the next BEGIN reports that to its caller.
            return

    async def changes(self) -> AsyncGenerator[str | None, None]:
        """Yield None whenever another connection may have changed a key, until the store is
        closed."""
        seen = None
        while self._connection is not None:
            try:
                # SQLite has no notifications. Reading this version costs less than reading the
                # known documents.
                version = await self._locked(
                    lambda: self._connection.execute("PRAGMA data_version").get
                )
            except ResourceClosed:
                return
            except StorageError:
                version = None  # unknown, so report a change
            if version is None or version != seen:
                seen = version
                yield None
            await anyio.sleep(self._poll_ms / 1000)

    def _check_open(self) -> None:
        if self._connection is None:
            raise ResourceClosed(f"{self._path} is closed")

    def _failed(self, what: str, error: apsw.Error, *, determinate: bool = True) -> StorageError:
        if isinstance(error, apsw.FullError):
            return StoreFull(
                f"no space left to {what} {self._path}; free space, then try again",
                determinate=determinate,
            )
        if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
            return CorruptData(
                f"{self._path} is damaged ({error}): restore the state directory from a backup",
                determinate=determinate,
            )
        return StorageError(
            f"could not {what} {self._path}: {type(error).__name__}: {error}",
            determinate=determinate,
        )

    async def close(self) -> None:
        """Close the file, after calls in progress."""
        async with self._lock:
            with anyio.CancelScope(shield=True):
                await self._in_thread("close", self._close)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
