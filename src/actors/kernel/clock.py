"""The clock of an actor, and its threads for blocking calls: a simulation replaces both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio

R = TypeVar("R")


class CallOverdue(Exception):
    """A blocking call did not end in time. It goes on, and its result is dropped."""


class ActorClock(Protocol):
    """Time and blocking calls, as an actor may use them."""

    def now_ms(self) -> int:
        """Return the wall clock, milliseconds since the epoch; may jump."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back; for durations only."""
        ...

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run a blocking call off the loop (a thread in production, inline in simulation)."""
        ...

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run a blocking call for at most `within_ms`. Raises `CallOverdue`."""
        ...


class SystemClock:
    """The machine's clock and its threads."""

    def now_ms(self) -> int:
        """Return the wall clock, milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back."""
        return time.monotonic() * 1000

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run `function` in a worker thread."""
        return await asyncio.to_thread(function)

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run `function` in a worker thread for at most `within_ms`. Raises `CallOverdue`."""
        with anyio.move_on_after(within_ms / 1000):
            return await self.run_blocking(function)
        raise CallOverdue
