"""Watches how long the event loop is held up: all sessions wait as long as its longest turn."""

from __future__ import annotations

from collections.abc import Callable

import anyio

TICK_MS = 10
"""Time between two looks."""


async def watch_loop(tell: Callable[[float], None]) -> None:
    """Tell again and again, until canceled, by how many seconds the loop was late."""
    while True:
        due = anyio.current_time() + TICK_MS / 1000
        await anyio.sleep_until(due)
        # All that was ready had its turn before this: so late is everybody.
        tell(anyio.current_time() - due)
