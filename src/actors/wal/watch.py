"""A value that tasks wait for: they see the newest, and may miss those in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ValueWatch(Generic[T]):
    """Holds one value, with one writer and any number of waiting tasks, all in one loop."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def value(self) -> T:
        """Return the newest value."""
        return self._value

    def set(self, value: T) -> None:
        """Set the value, and wake all waiting tasks unless it is the same."""
        if value == self._value:
            return
        self._value = value
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, holds: Callable[[T], bool]) -> T:
        """Wait for a value for which `holds` returns True, and return that value."""
        while not holds(self._value):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                # Cancelled before `set` took the future out of the list.
                if not future.done() or future.cancelled():
                    self._waiting = [each for each in self._waiting if each is not future]
        return self._value
