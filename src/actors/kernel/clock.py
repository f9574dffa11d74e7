"""The clock an actor sees, and the threads it may use: replaced whole in simulation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio

R = TypeVar("R")


class CallOverdue(Exception):
    """A blocking call did not end in time. It goes on, and its result is dropped."""


class Clock(Protocol):
    """Time and blocking calls, as an actor may use them."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch; may jump."""
        ...

    def monotonic_ms(self) -> float:
        """Never goes back; for durations only."""
        ...

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Runs a blocking call off the loop (a thread in production, inline in simulation)."""
        ...

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """The same, for as long at most. Raises `CallOverdue`."""
        ...


class SystemClock:
    """The machine's clock and its threads."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Milliseconds that never go back."""
        return time.monotonic() * 1000

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Runs `function` in a worker thread."""
        return await asyncio.to_thread(function)

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """The same, for as long at most. Raises `CallOverdue`."""
        with anyio.move_on_after(within_ms / 1000):
            return await self.run_blocking(function)
        raise CallOverdue
