"""Work on statements, on the event loop where it is short and in a thread where it is long.

A statement of some megabytes, or of thousands of parameters, takes seconds of Python. On the loop
it would hold every other session up as long; a thread shares the processor with the loop instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

LOOP_CHARACTERS_MAX = 8_192

T = TypeVar("T")


async def run_or_offload(characters: int, function: Callable[[], T]) -> T:
    """Return what a pure function makes of a text of this length; raise what it raises."""
    if characters <= LOOP_CHARACTERS_MAX:
        # A thread costs more than the work itself.
        return function()
    return await anyio.to_thread.run_sync(function)
