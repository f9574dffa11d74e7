"""Work on statements, on the event loop where it is short and in a thread where it is long.

A statement of some megabytes, or of thousands of parameters, takes seconds of Python. On the loop
it would hold every other session up as long; a thread shares the processor with the loop instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

from actors.runtime.threshold_probes import STATEMENT_ON_LOOP

T = TypeVar("T")


async def work_on(characters: int, function: Callable[[], T]) -> T:
    """Return what a pure function makes of a text of this length; raise what it raises."""
    if not STATEMENT_ON_LOOP.exceeded_by(characters):
        # A thread costs more than the work itself.
        return function()
    return await anyio.to_thread.run_sync(function)
