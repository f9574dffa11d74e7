"""Runs the processing of long statements in a thread instead of on the event loop.

Processing a statement of several megabytes, or with thousands of parameters, takes seconds. On the
event loop it would block every other session for that long; a thread shares the processor with the
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

LOOP_CHARACTERS_MAX = 8_192
"""Maximum length of a statement that is processed on the event loop."""

T = TypeVar("T")


async def run_or_offload(characters: int, function: Callable[[], T]) -> T:
    """Call a pure function that processes a text of this length, in a thread if it is long.

    Return what the function returns, and raise what it raises.
    """
    if characters <= LOOP_CHARACTERS_MAX:
        # For a short text, switching to a thread costs more than the work.
        return function()
    return await anyio.to_thread.run_sync(function)
