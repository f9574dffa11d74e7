"""Rows of a subscribe that end with the client's connection.

A subscribe may wait for a change for ever, and nothing is read from the client meanwhile: so its
end would not be noticed, and neither the subscribe nor its view would end.
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
    """The batches of a subscribe, as long as its client is there. No generator of its own: closing
    one that has not begun would close nothing."""

    def __init__(self, wire: PgWire, batches: AsyncGenerator[pa.RecordBatch, None]) -> None:
        self._wire = wire
        self._batches = batches

    async def asend(self, value: None) -> pa.RecordBatch:
        """Return the next batch. Raises `ConnectionBroken` when the client leaves before it
        comes."""
        found: pa.RecordBatch | None = None
        ended: PenstockError | StopAsyncIteration | None = None
        async with anyio.create_task_group() as group:
            # Cancelled between two reads, the watcher loses nothing of what the client sent.
            group.start_soon(self._watch, group.cancel_scope)
            try:
                found = await anext(self._batches)
            # Raised behind the group, which would wrap it.
            except (PenstockError, StopAsyncIteration) as error:
                ended = error
            group.cancel_scope.cancel()
        if found is not None:
            return found
        if ended is not None:
            raise ended
        raise ConnectionBroken(f"{self._wire.peer} has left during a subscribe")

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
        """End the subscribe by an error."""
        return await self._batches.athrow(kind if isinstance(kind, BaseException) else kind())

    async def aclose(self) -> None:
        """End the subscribe."""
        await self._batches.aclose()


def end_on_disconnect(wire: PgWire, result: StatementResult) -> StatementResult:
    """Return a result whose rows end with the connection, if they are a subscribe's."""
    if result.tag == "SUBSCRIBE" and result.batches is not None:
        result.batches = DisconnectWatch(wire, result.batches)
    return result
