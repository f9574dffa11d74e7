"""How many bytes of clients' messages the gateway holds at a time.

How large a message is shows only when it is there. So a call sets aside the size of the largest
message before it reads its own, and gives back the difference when it knows. What is left stays set
aside until the call ends, since the message is held that long.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc.aio

from actors.runtime.errors import ResourceBusy


class MessageBudget:
    """Bytes that are set aside, of `bytes_max`. Pure."""

    def __init__(self, bytes_max: int, message_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._message_bytes_max = message_bytes_max
        self.held_bytes = 0

    def reserve(self) -> bool:
        """Set aside the size of the largest message; return False if there is no room for it."""
        if self.held_bytes + self._message_bytes_max > self._bytes_max:
            return False
        self.held_bytes += self._message_bytes_max
        return True

    def shrink(self, size: int) -> None:
        """Give back what a message of `size` bytes does not take of its reservation."""
        self.held_bytes -= self._message_bytes_max - size

    def release(self, size: int) -> None:
        """Give back what a message takes."""
        self.held_bytes -= size


class MessageReader:
    """Reads messages of calls within a budget. Calls that find no room wait, for at most
    `wait_ms`."""

    def __init__(self, bytes_max: int, message_bytes_max: int, wait_ms: int) -> None:
        self._budget = MessageBudget(bytes_max, message_bytes_max)
        self._wait_ms = wait_ms
        self._freed = anyio.Event()

    @asynccontextmanager
    async def reading(self, read: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
        """Yield what `read` returns: a message, or another object for the end. Its bytes are held
        in the block. Raises `ResourceBusy`."""
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
            "messages of other clients take all room (connect_bodies_bytes_max): try again later"
        )

    def _wake(self) -> None:
        freed, self._freed = self._freed, anyio.Event()
        freed.set()


async def read_messages(reader: MessageReader, context: Any) -> AsyncGenerator[bytes, None]:
    """Yield the messages of a call. The bytes of each are held until the next is asked for."""
    while True:
        async with reader.reading(context.read) as message:
            if message is grpc.aio.EOF:
                return
            yield message
