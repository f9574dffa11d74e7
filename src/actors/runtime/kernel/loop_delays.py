"""Measures delays of the event loop. A long turn of the loop delays every session."""

from __future__ import annotations

from collections.abc import Callable

import anyio

TICK_MS = 10
"""Interval between two measurements."""


async def watch_loop(tell: Callable[[float], None]) -> None:
    """Call `tell` again and again, until cancelled, with the delay of the loop in seconds."""
    while True:
        due = anyio.current_time() + TICK_MS / 1000
        await anyio.sleep_until(due)
        # Every task that was ready ran before this one, so this delay affects all of them.
        tell(anyio.current_time() - due)
