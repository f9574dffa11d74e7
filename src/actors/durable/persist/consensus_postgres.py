"""Consensus on PostgreSQL: one table, with one transaction for all waiting sets.

    documents (key text COLLATE "C" PRIMARY KEY, seqno bigint, data bytea)

A group of sets (`group_commit`) is sent to the server in one pipeline and one round trip: BEGIN;
lock all its keys; for each set, one statement that compares, changes the documents if all
comparisons hold, and notifies; COMMIT.

*Linearizability.* A key's lock is an advisory lock on a 64-bit hash of schema and key. It covers
absent keys, which row locks cannot. (1) Every transaction takes all its locks in one statement
before it reads anything. (2) PostgreSQL releases them after the commit is visible to all. So two
transactions with a common key never overlap between (1) and their ends. (3) Under READ COMMITTED,
each statement sees what was committed when the *statement* started. The comparisons start after the
locks are held, so they see everything that earlier holders have committed. Therefore transactions
that share a key take effect in the order of their locks, each at its commit; others commute. (4) A
read is one statement: it sees all commits that were acknowledged before it started. Two keys with
the same hash merely wait for each other. The primary key guards against writers without locks.

Determinate, transient failures (a lock or connection timeout, a restart) are retried after growing
random pauses. Reads are always retried.

**Changes.** Each set notifies about its keys in its own transaction. `changes` listens on a
connection of its own, so that what it reports can already be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeVar

import anyio
import psycopg
from psycopg import sql

from actors.durable.persist.group_commit import ConsensusGroupCommit, PendingSet, fail
from actors.durable.persist.location import CompareAndSet, VersionedData, check_key
from actors.durable.persist.postgres_link import (
    FAILURES,
    PostgresAddress,
    PostgresLink,
    as_storage_error,
    sqlstate,
    worth_another_try,
)
from actors.runtime.errors import ResourceClosed
from actors.runtime.kernel import RetryLoop
from actors.runtime.settings import Settings

R = TypeVar("R")

_MAKE: Final = """
CREATE TABLE {table} (
  key text COLLATE "C" PRIMARY KEY,
  seqno bigint NOT NULL,
  data bytea NOT NULL
)"""
_PACK: Final = "ALTER TABLE {table} ALTER COLUMN data SET COMPRESSION lz4"
"""A document is rewritten in full by each change. PostgreSQL's default compression takes as long as
a commit for 32 KiB; lz4 is faster."""
_HEAD: Final = "SELECT seqno, data FROM {table} WHERE key = %s"
_LOCK: Final = "SELECT pg_advisory_xact_lock(l) FROM unnest(%s::bigint[]) l"
_SET: Final = """
WITH op AS MATERIALIZED (
  SELECT * FROM unnest(%(keys)s::text[], %(expected)s::bigint[], %(data)b::bytea[],
    %(gone)s::boolean[], %(first)s::bigint[], %(kept)s::boolean[])
    AS op (key, expected, data, gone, first, kept)
), good AS MATERIALIZED (
  SELECT count(*) = cardinality(%(keys)s::text[]) AS yes
  FROM op LEFT JOIN {table} d USING (key) WHERE d.seqno IS NOT DISTINCT FROM op.expected
), todo AS MATERIALIZED (
  SELECT op.* FROM op, good WHERE good.yes AND NOT op.kept
), gone AS (
  DELETE FROM {table} d USING todo WHERE d.key = todo.key AND todo.gone
), changed AS (
  UPDATE {table} d SET seqno = d.seqno + 1, data = todo.data FROM todo
  WHERE d.key = todo.key AND NOT todo.gone AND todo.expected IS NOT NULL
), made AS (
  INSERT INTO {table} SELECT key, first, data FROM todo
  WHERE NOT gone AND expected IS NULL
), notified AS MATERIALIZED (
  SELECT pg_notify(%(channel)s, %(client)s || key) FROM todo
)
SELECT good.yes, (SELECT count(*) FROM notified) FROM good"""
_NO_LZ4: Final = (psycopg.errors.SyntaxError, psycopg.errors.FeatureNotSupported)
"""PostgreSQL 13 does not support lz4, and other builds may lack it."""
_CLIENT_LETTERS: Final = 16
"""Length of a notification's prefix, which names the client that made the change."""


class PostgresConsensus:
    """A `ConsensusStore` in one schema of a database."""

    def __init__(self, place: PostgresAddress, settings: Settings, random: Random) -> None:
        self._place = place
        self._settings = settings
        self._random = random
        self._client = f"{random.getrandbits(4 * _CLIENT_LETTERS):0{_CLIENT_LETTERS}x}"
        """Random name of this client in notifications."""
        self._channel = f"penstock_{place.schema}"
        self._table = sql.Identifier(place.schema, "documents")
        self._set_sql = sql.SQL(_SET).format(table=self._table).as_bytes()
        """Formatted once, because it is sent often; so is the next one."""
        self._head_sql = sql.SQL(_HEAD).format(table=self._table).as_bytes()
        self._writer = PostgresLink(place, settings)
        self._reader = PostgresLink(place, settings)
        self._writing = anyio.Lock(fast_acquire=True)
        self._reading = anyio.Lock(fast_acquire=True)
        self._sets = ConsensusGroupCommit(self._writing, self._check_open, self._commit)
        self._listeners: set[anyio.CancelScope] = set()
        """Scopes to cancel on `close`, one per running `changes`."""
        self._closed = False

    async def open(self) -> None:
        """Connect, and create the schema and table if they are missing. Raises `StorageError`."""

        async def prepare() -> None:
            connection = await self._writer.connected()
            name = f"{self._place.schema}.documents"
            found = await connection.execute("SELECT to_regclass(%s)", (name,))
            if (await found.fetchone() or (None,))[0] is not None:
                return
            schema = sql.Identifier(self._place.schema)
            async with connection.transaction():
                # Two processes that start at the same time must not both create them: IF NOT EXISTS
                # alone can still fail.
                await connection.execute(_LOCK, ([self._lock_of("")],))
                await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema))
                found = await connection.execute("SELECT to_regclass(%s)", (name,))
                if (await found.fetchone() or (None,))[0] is None:
                    await connection.execute(sql.SQL(_MAKE).format(table=self._table))
                    with suppress(*_NO_LZ4):
                        async with connection.transaction():
                            await connection.execute(sql.SQL(_PACK).format(table=self._table))

        async with self._writing:
            await self._tried(self._writer, "prepare", prepare)

    # -- reading ----------------------------------------------------------------------------------

    async def head(self, key: str) -> VersionedData | None:
        """Return the document; None if it does not exist. Raises `StorageError`."""
        check_key(key)
        rows = await self._read(self._head_sql, (key,))
        return VersionedData(rows[0][0], bytes(rows[0][1])) if rows else None

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, sorted. Raises `StorageError`."""
        query = sql.SQL(
            "SELECT key FROM {} WHERE key >= %s AND starts_with(key, %s) ORDER BY key"
        ).format(self._table)
        return [row[0] for row in await self._read(query.as_bytes(), (prefix, prefix))]

    async def snapshot(self) -> list[tuple[str, VersionedData]]:
        """Return all documents as of one instant, sorted by key. Raises `StorageError`."""
        # One statement sees one snapshot at any isolation level.
        query = sql.SQL("SELECT key, seqno, data FROM {} ORDER BY key").format(self._table)
        rows = await self._read(query.as_bytes(), ())
        return [(key, VersionedData(seqno, bytes(data))) for key, seqno, data in rows]

    async def _read(self, query: bytes, values: Sequence[Any]) -> list[Any]:
        async def read() -> list[Any]:
            connection = await self._reader.connected()
            cursor = await connection.execute(query, values, binary=True)
            return await cursor.fetchall()

        limits = self._settings
        most_ms = limits.store_request_timeout_ms + limits.retry_delay_ms_max
        try:
            # Also limits the wait for the lock, whose holder may be waiting for a server that
            # hangs.
            with anyio.fail_after(most_ms * (limits.store_request_retries_max + 1) / 1000):
                async with self._reading:
                    self._check_open()
                    return await self._tried(self._reader, "read", read)
        except TimeoutError as error:
            raise as_storage_error("read", self._place, error, determinate=True) from None

    async def _tried(self, link: PostgresLink, what: str, call: Callable[[], Awaitable[R]]) -> R:
        """Run an idempotent call until it succeeds or has failed too often."""
        retry = self._retries()
        while True:
            try:
                with anyio.fail_after(self._settings.store_request_timeout_ms / 1000):
                    return await call()
            except FAILURES as error:
                await link.drop()
                if not worth_another_try(error) or not await retry.pause():
                    raise as_storage_error(what, self._place, error, determinate=True) from None
            except BaseException:  # cancelled: the next call must not receive its late answer
                await link.drop()
                raise

    def _retries(self) -> RetryLoop:
        limits = self._settings
        return RetryLoop(limits, failures_max=limits.store_request_retries_max, random=self._random)

    # -- changing ---------------------------------------------------------------------------------

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none, in a transaction shared with waiting sets. Raises
        `StorageError`."""
        return await self._sets.set(ops)

    async def _commit(self, group: Sequence[PendingSet]) -> None:
        """Set the answer of every pending set. Never raises `StorageError`."""
        retry = self._retries()
        while True:
            under_way = _UnderWay()
            try:
                with anyio.fail_after(self._settings.store_request_timeout_ms / 1000):
                    answers = await self._transaction(group, under_way)
            except FAILURES as error:
                await self._writer.drop()
                # The connection was dropped, so its late answers cannot reach the next group.
                determinate = under_way.nothing_stays(error)
                if determinate and worth_another_try(error) and await retry.pause():
                    continue
                fail(group, as_storage_error("write", self._place, error, determinate=determinate))
                return
            except BaseException:  # cancelled: the next group must not receive these answers
                await self._writer.drop()
                raise
            for pending, answer in zip(group, answers, strict=True):
                pending.answer = answer
            return

    async def _transaction(self, group: Sequence[PendingSet], under_way: _UnderWay) -> list[bool]:
        connection = await self._writer.connected()
        # Ascending, and in one statement, so that transactions cannot deadlock.
        locks = sorted({self._lock_of(op.key) for pending in group for op in pending.ops})
        async with connection.pipeline():
            before = under_way.before
            before.append(await connection.execute("BEGIN"))
            before.append(await connection.execute(_LOCK, (locks,)))
            sets = [await self._send(connection, pending.ops, before) for pending in group]
            # Set before sending: once COMMIT is passed on, a failure may be indeterminate.
            under_way.committing = True
            commit = await connection.execute("COMMIT")
        if commit.statusmessage != "COMMIT":
            raise psycopg.OperationalError(f"unexpected answer to COMMIT: {commit.statusmessage}")
        rows = [await cursor.fetchone() for cursor in sets]
        return [row is not None and bool(row[0]) for row in rows]

    async def _send(
        self,
        connection: psycopg.AsyncConnection[Any],
        ops: Sequence[CompareAndSet],
        before: list[psycopg.AsyncCursor[Any]],
    ) -> psycopg.AsyncCursor[Any]:
        values = {
            "keys": [op.key for op in ops],
            "expected": [op.expected for op in ops],
            "data": [op.data or b"" for op in ops],  # sent as binary, because text is twice as long
            "gone": [op.data is None for op in ops],
            "first": [op.first for op in ops],
            "kept": [op.kept for op in ops],
            "channel": self._channel,
            "client": self._client,
        }
        cursor = await connection.execute(self._set_sql, values)
        before.append(cursor)
        return cursor

    def _lock_of(self, key: str) -> int:
        text = f"{self._place.schema}\0{key}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)

    # -- notifications ----------------------------------------------------------------------------

    async def changes(self) -> AsyncGenerator[str | None, None]:
        """Yield the keys that other clients change, until the store is closed. None means that any
        key may have changed."""
        link = PostgresLink(self._place, self._settings)
        try:
            retry = RetryLoop(self._settings, random=self._random)
            while not self._closed:
                heard: list[str] = []
                try:
                    connection = await self._listening(link, heard)
                    # Notifications are lost with a connection, so any key may have changed after
                    # each connect.
                    yield None
                    retry.reset()
                    while True:
                        await self._until_heard(connection, heard)
                        if self._closed:
                            return
                        payloads, heard[:] = heard[:], []
                        for payload in payloads:
                            if not payload.startswith(self._client):
                                yield payload[_CLIENT_LETTERS:]
                except FAILURES:
                    await link.drop()
                    await retry.pause()
        finally:
            await link.drop()

    async def _listening(
        self, link: PostgresLink, heard: list[str]
    ) -> psycopg.AsyncConnection[Any]:
        with anyio.fail_after(self._settings.store_request_timeout_ms / 1000):
            connection = await link.connected()
            connection.add_notify_handler(lambda notify: heard.append(notify.payload))
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        return connection

    async def _until_heard(
        self, connection: psycopg.AsyncConnection[Any], heard: list[str]
    ) -> None:
        """Wait until a notification arrives or the store is closed, without polling."""
        low = connection.pgconn
        with anyio.CancelScope() as scope:
            self._listeners.add(scope)
            try:
                while not heard and not self._closed:
                    await anyio.wait_readable(low.socket)
                    low.consume_input()
                    while (notify := low.notifies()) is not None:
                        heard.append(notify.extra.decode())
            finally:
                self._listeners.discard(scope)

    # -- the end ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosed(f"{self._place.shown} is closed")

    async def close(self) -> None:
        """Wait for requests in progress, and end `changes`."""
        async with self._writing, self._reading:
            self._closed = True
            for scope in list(self._listeners):
                scope.cancel()
            await self._writer.drop()
            await self._reader.drop()


class _UnderWay:
    """Progress of a transaction."""

    def __init__(self) -> None:
        self.before: list[psycopg.AsyncCursor[Any]] = []
        """Statements before COMMIT, in order."""
        self.committing = False
        """True once COMMIT was passed on, or may have been."""

    def nothing_stays(self, error: BaseException) -> bool:
        """Return whether the transaction certainly did not and will not commit."""
        if not self.committing:
            return True
        # An ERROR of a statement before COMMIT makes the server skip the COMMIT. Answers arrive in
        # order, so a missing one means that the error is from such a statement and not from COMMIT
        # itself.
        return sqlstate(error) is not None and any(
            cursor.pgresult is None for cursor in self.before
        )
