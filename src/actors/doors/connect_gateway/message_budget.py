"""Limits the bytes of clients' messages that the gateway holds in memory.

The size of a message is known only after it is read. So a call reserves the size of the largest
possible message before reading, and then returns the difference. The rest stays reserved until the
call ends, because the message is held until then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc.aio

from actors.runtime.errors import ResourceBusy


class MessageBudget:
    """Counts reserved bytes, at most `bytes_max`. Pure."""

    def __init__(self, bytes_max: int, message_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._message_bytes_max = message_bytes_max
        self.held_bytes = 0
        """Bytes reserved now."""

    def reserve(self) -> bool:
        """Reserve the size of the largest message. Return False if there is no room."""
        if self.held_bytes + self._message_bytes_max > self._bytes_max:
            return False
        self.held_bytes += self._message_bytes_max
        return True

    def shrink(self, size: int) -> None:
        """Reduce a reservation to the actual `size` of its message."""
        self.held_bytes -= self._message_bytes_max - size

    def release(self, size: int) -> None:
        """Return a reservation of `size` bytes."""
        self.held_bytes -= size


class MessageReader:
    """Reads the messages of calls within a budget. Calls wait for room for up to `wait_ms`."""

    def __init__(self, bytes_max: int, message_bytes_max: int, wait_ms: int) -> None:
        self._budget = MessageBudget(bytes_max, message_bytes_max)
        self._wait_ms = wait_ms
        self._freed = anyio.Event()

    @asynccontextmanager
    async def reading(self, read: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
        """Yield what `read` returns: a message, or another object at the end. Its bytes count
        against the budget within the block. Raises `ResourceBusy`."""
        await self._reserve()
        size = 0
        try:
            message = await read()
            size = len(message) if isinstance(message, bytes) else 0
        finally:
            self._budget.shrink(size)
            self._wake()
        try:
            yield message
        finally:
            self._budget.release(size)
            self._wake()

    async def _reserve(self) -> None:
        with anyio.move_on_after(self._wait_ms / 1000):
            while not self._budget.reserve():
                await self._freed.wait()
            return
        raise ResourceBusy(
            "messages of other clients use all memory (connect_bodies_bytes_max): try again later"
        )

    def _wake(self) -> None:
        freed, self._freed = self._freed, anyio.Event()
        freed.set()


async def read_messages(reader: MessageReader, context: Any) -> AsyncGenerator[bytes, None]:
    """Yield the messages of a call. Each counts against the budget until the next is requested."""
    while True:
        async with reader.reading(context.read) as message:
            if message is grpc.aio.EOF:
                return
            yield message
