"""Cursors of a session: a query or a subscribe whose rows are fetched a few at a time."""

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
"""Number of cursors that one session may have open."""
FETCH_WAIT_SECONDS: Final = 1.0
"""Time for which FETCH from a subscribe waits for a first row."""
BATCHES_AHEAD: Final = 4
"""Batches of a subscribe that are read before they are fetched."""
SpawnTask: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Runs a function beside the session, until it ends."""


class FollowedRows:
    """Rows of a subscribe, read by a task of their own.

    A FETCH that waits in vain gives up; cancelling the subscribe's own generator would end it, and
    lose its rows.
    """

    def __init__(self, batches: AsyncGenerator[pa.RecordBatch, None], spawn: SpawnTask) -> None:
        self._batches = batches
        self._scope = anyio.CancelScope()
        self._error: PenstockError | None = None
        self._ended = anyio.Event()
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
            pass  # the cursor was closed while a batch waited for its FETCH
        finally:
            with anyio.CancelScope(shield=True):
                await self._batches.aclose()
            self._ended.set()

    async def next(self) -> pa.RecordBatch | None:
        """Return the next batch; None if none comes soon. Raises `StopAsyncIteration` at the end,
        and the subscribe's errors."""
        with anyio.move_on_after(FETCH_WAIT_SECONDS):
            try:
                return await self._receive.receive()
            except anyio.EndOfStream:
                if self._error is not None:
                    raise self._error from None
                raise StopAsyncIteration from None
        return None

    async def aclose(self) -> None:
        """End the subscribe."""
        self._receive.close()
        self._scope.cancel()
        await self._ended.wait()


class OpenCursor:
    """Rows of one result that were not fetched yet. `spawn`: the rows are a subscribe's."""

    def __init__(self, result: StatementResult, *, spawn: SpawnTask | None, hold: bool) -> None:
        assert result.schema is not None
        assert result.batches is not None
        self.hold = hold
        """True if the cursor outlives its transaction."""
        self.schema = result.schema
        self._batches = result.batches
        self.rights = result.rights
        self._followed = None if spawn is None else FollowedRows(result.batches, spawn)
        self._rest: pa.RecordBatch | None = None
        self._ended = False

    async def fetch(self, count: int | None) -> pa.Table:
        """Return the next rows, at most `count`; of a subscribe those that are there, after waiting
        for a first one for `FETCH_WAIT_SECONDS`. Raises `AccessDenied` once the right to them is
        gone."""
        # Rows that were read ahead are not to be had any more without the right to them.
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
                break  # what is there is told at once, and not when `count` rows have come
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
    """All open cursors of a session, by name. `spawn` runs what reads subscribes; None: there are
    no cursors of these."""

    def __init__(self, spawn: SpawnTask | None = None) -> None:
        self._open: dict[str, OpenCursor] = {}
        self._spawn = spawn

    async def declare(self, name: str, result: StatementResult, *, hold: bool) -> None:
        """Open a cursor. Raises `InvalidUsage` if the name is in use, or too many are open."""
        follows = result.tag == "SUBSCRIBE"
        refused: RefusedStatement | None = None
        if name in self._open:
            refused = cursor_exists(name)
        elif len(self._open) >= CURSORS_MAX:
            problem = f"{CURSORS_MAX} cursors are open: close one first"
            refused = RefusedStatement(problem, LIMIT_EXCEEDED)
        elif follows and self._spawn is None:
            problem = "a cursor of a subscribe is not possible through this door"
            refused = RefusedStatement(problem, NOT_SUPPORTED)
        if refused is not None:
            assert result.batches is not None
            await result.batches.aclose()
            raise refused
        spawn = self._spawn if follows else None
        self._open[name] = OpenCursor(result, spawn=spawn, hold=hold)

    async def fetch(self, name: str, count: int | None) -> StatementResult:
        """Return the next rows of a cursor. Raises `InvalidUsage` if there is none."""
        cursor = self._named(name)
        table = await cursor.fetch(count)
        return StatementResult("FETCH", table.schema, rows_of(table), rights=cursor.rights)

    def shape(self, name: str) -> pa.Schema:
        """Return the columns of a cursor. Raises `InvalidUsage` if there is none."""
        return self._named(name).schema

    def has(self, name: str) -> bool:
        """Return whether a cursor of that name is open."""
        return name in self._open

    def _named(self, name: str) -> OpenCursor:
        cursor = self._open.get(name)
        if cursor is None:
            raise unknown_cursor(name)
        return cursor

    async def close(self, name: str | None) -> None:
        """Close a cursor, or all. Raises `InvalidUsage` if there is none of that name."""
        if name is not None:
            self._named(name)
        for each in [name] if name is not None else list(self._open):
            await self._open.pop(each).close()

    async def end_transaction(self) -> None:
        """Close the cursors that do not outlive their transaction."""
        for name, cursor in list(self._open.items()):
            if not cursor.hold:
                await self.close(name)
