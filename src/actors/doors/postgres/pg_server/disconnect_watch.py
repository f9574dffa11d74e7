"""Ends a subscribe when its client disconnects.

A subscribe may wait forever for a change, and meanwhile nothing is read from the client. Without
this watch a disconnect would go unnoticed, and the subscribe and its view would never end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import anyio
import pyarrow as pa

from actors.doors.postgres.pg_server.wire import PgWire
from actors.doors.sql_session.results import StatementResult
from actors.runtime.errors import ConnectionBroken, PenstockError


class DisconnectWatch(AsyncGenerator[pa.RecordBatch, None]):
    """Yields the batches of a subscribe until its client disconnects.

    This is a class rather than a generator function, because closing a generator that was never
    started would not close the batches.
    """

    def __init__(self, wire: PgWire, batches: AsyncGenerator[pa.RecordBatch, None]) -> None:
        self._wire = wire
        self._batches = batches

    async def asend(self, value: None) -> pa.RecordBatch:
        """Return the next batch. Raises `ConnectionBroken` if the client disconnects first."""
        found: pa.RecordBatch | None = None
        ended: PenstockError | StopAsyncIteration | None = None
        async with anyio.create_task_group() as group:
            # The watcher is canceled between two reads, so it loses nothing that the client sent.
            group.start_soon(self._watch, group.cancel_scope)
            try:
                found = await anext(self._batches)
            # Raise this after the task group, which would wrap it.
            except (PenstockError, StopAsyncIteration) as error:
                ended = error
            group.cancel_scope.cancel()
        if found is not None:
            return found
        if ended is not None:
            raise ended
        raise ConnectionBroken(f"{self._wire.peer} disconnected during a subscribe")

    async def _watch(self, scope: anyio.CancelScope) -> None:
        await self._wire.watch()
        scope.cancel()

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Any:
        """End the subscribe with an error."""
        return await self._batches.athrow(kind if isinstance(kind, BaseException) else kind())

    async def aclose(self) -> None:
        """End the subscribe."""
        await self._batches.aclose()


def end_on_disconnect(wire: PgWire, result: StatementResult) -> StatementResult:
    """Make the rows of a subscribe end with the connection; return any other result unchanged."""
    if result.tag == "SUBSCRIBE" and result.batches is not None:
        result.batches = DisconnectWatch(wire, result.batches)
    return result
