"""Cursors of a session: queries and subscribes whose rows are fetched a few at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeAlias

import anyio
import pyarrow as pa

from actors.doors.sql_session.results import StatementResult, rows_of
from actors.model.pgwire.sqlstate import (
    LIMIT_EXCEEDED,
    NOT_SUPPORTED,
    RefusedStatement,
    cursor_exists,
    unknown_cursor,
)
from actors.runtime.errors import PenstockError

CURSORS_MAX: Final = 64
"""Maximum number of open cursors per session."""
FETCH_WAIT_SECONDS: Final = 1.0
"""How long a FETCH from a subscribe waits for a first row."""
BATCHES_AHEAD: Final = 4
"""Batches of a subscribe that are read ahead of FETCH."""
SpawnTask: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Starts an async function as a task that runs alongside the session."""


class FollowedRows:
    """The rows of a subscribe, read by a separate task.

    A FETCH may give up waiting. Canceling the subscribe's generator for that would end it and lose
    rows, so a task reads the generator and FETCH reads from the task.
    """

    def __init__(self, batches: AsyncGenerator[pa.RecordBatch, None], spawn: SpawnTask) -> None:
        self._batches = batches
        self._scope = anyio.CancelScope()
        self._error: PenstockError | None = None
        """The error that ended the subscribe, if any."""
        self._ended = anyio.Event()
        """Set when the task has ended and the generator is closed."""
        self._send, self._receive = anyio.create_memory_object_stream[pa.RecordBatch](BATCHES_AHEAD)
        spawn(self._read)

    async def _read(self) -> None:
        try:
            with self._scope, self._send:
                async for batch in self._batches:
                    await self._send.send(batch)
        except PenstockError as error:
            self._error = error
        except anyio.BrokenResourceError:
            pass  # the cursor was closed while a batch waited to be fetched
        finally:
            with anyio.CancelScope(shield=True):
                await self._batches.aclose()
            self._ended.set()

    async def next(self) -> pa.RecordBatch | None:
        """Return the next batch, or None after waiting `FETCH_WAIT_SECONDS` for one. Raises
        `StopAsyncIteration` at the end, and the subscribe's errors."""
        with anyio.move_on_after(FETCH_WAIT_SECONDS):
            try:
                return await self._receive.receive()
            except anyio.EndOfStream:
                if self._error is not None:
                    raise self._error from None
                raise StopAsyncIteration from None
        return None

    async def aclose(self) -> None:
        """End the subscribe, and wait until its generator is closed."""
        self._receive.close()
        self._scope.cancel()
        await self._ended.wait()


class OpenCursor:
    """An open cursor, with the rows of its result that were not fetched yet.

    `spawn` starts the reading task of a subscribe; None for a query.
    """

    def __init__(self, result: StatementResult, *, spawn: SpawnTask | None, hold: bool) -> None:
        assert result.schema is not None
        assert result.batches is not None
        self.hold = hold
        """True if the cursor outlives its transaction (WITH HOLD)."""
        self.schema = result.schema
        self._batches = result.batches
        self.rights = result.rights
        self._followed = None if spawn is None else FollowedRows(result.batches, spawn)
        self._rest: pa.RecordBatch | None = None
        """Rows of the last batch that did not fit into the previous FETCH."""
        self._ended = False
        """True once all rows were read or the cursor is closed."""

    async def fetch(self, count: int | None) -> pa.Table:
        """Return the next rows, at most `count` (None: all).

        From a subscribe, return the rows that are available, after waiting up to
        `FETCH_WAIT_SECONDS` for the first. Raises `AccessDenied` once the right to read them is
        revoked.
        """
        # Also rows that were read ahead must not be returned after a REVOKE.
        if self.rights is not None:
            self.rights.check()
        found: list[pa.RecordBatch] = []
        wanted = count
        while not self._ended and (wanted is None or wanted > 0):
            batch = await self._next()
            if batch is None:
                break
            if wanted is not None and batch.num_rows > wanted:
                self._rest = batch.slice(wanted)
                batch = batch.slice(0, wanted)
            if batch.num_rows:
                found.append(batch)
            if wanted is not None:
                wanted -= batch.num_rows
            if self._followed is not None and found and self._rest is None:
                break  # return what is available instead of waiting for `count` rows
        return pa.Table.from_batches(found, self.schema)

    async def _next(self) -> pa.RecordBatch | None:
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest
        try:
            if self._followed is None:
                return await anext(self._batches)
            return await self._followed.next()
        except StopAsyncIteration:
            self._ended = True
            return None

    async def close(self) -> None:
        """End the query or the subscribe."""
        self._ended = True
        await (self._batches.aclose() if self._followed is None else self._followed.aclose())


class SessionCursors:
    """The open cursors of a session, by name.

    `spawn` starts the tasks that read subscribes; None: cursors of subscribes are refused.
    """

    def __init__(self, spawn: SpawnTask | None = None) -> None:
        self._open: dict[str, OpenCursor] = {}
        self._spawn = spawn

    async def declare(self, name: str, result: StatementResult, *, hold: bool) -> None:
        """Open a cursor on a result.

        Raises `InvalidUsage` if the name is in use, too many cursors are open, or the result is a
        subscribe's and there is no `spawn`. The result is then closed.
        """
        follows = result.tag == "SUBSCRIBE"
        refused: RefusedStatement | None = None
        if name in self._open:
            refused = cursor_exists(name)
        elif len(self._open) >= CURSORS_MAX:
            problem = f"too many open cursors (limit {CURSORS_MAX}): close one first"
            refused = RefusedStatement(problem, LIMIT_EXCEEDED)
        elif follows and self._spawn is None:
            problem = "cursors of a SUBSCRIBE are only supported over PostgreSQL's protocol"
            refused = RefusedStatement(problem, NOT_SUPPORTED)
        if refused is not None:
            assert result.batches is not None
            await result.batches.aclose()
            raise refused
        spawn = self._spawn if follows else None
        self._open[name] = OpenCursor(result, spawn=spawn, hold=hold)

    async def fetch(self, name: str, count: int | None) -> StatementResult:
        """Return the next rows of a cursor. Raises `InvalidUsage` if it does not exist."""
        cursor = self._named(name)
        table = await cursor.fetch(count)
        return StatementResult("FETCH", table.schema, rows_of(table), rights=cursor.rights)

    def shape(self, name: str) -> pa.Schema:
        """Return the columns of a cursor. Raises `InvalidUsage` if it does not exist."""
        return self._named(name).schema

    def has(self, name: str) -> bool:
        """Return whether a cursor with this name is open."""
        return name in self._open

    def _named(self, name: str) -> OpenCursor:
        cursor = self._open.get(name)
        if cursor is None:
            raise unknown_cursor(name)
        return cursor

    async def close(self, name: str | None) -> None:
        """Close a cursor, or all if `name` is None. Raises `InvalidUsage` if it does not exist."""
        if name is not None:
            self._named(name)
        for each in [name] if name is not None else list(self._open):
            await self._open.pop(each).close()

    async def end_transaction(self) -> None:
        """Close the cursors that were declared without WITH HOLD."""
        for name, cursor in list(self._open.items()):
            if not cursor.hold:
                await self.close(name)
