"""An event loop whose time is a counter: it goes forward only when nothing else is left to do.

Theory of operation. The loop is asyncio's own, on a selector that never waits: where the real
one would sleep until the next timer, this one moves the clock there. With a seed, what is ready
is shuffled before each turn, so that one seed is one order of events, always the same, and
another seed is another. Nothing outside the loop can be seen by it: threads and sockets have no
place here (blocking calls run inline, `VirtualClock`; links are in memory).

Invariants: ``time()`` never goes back; the same program with the same seed runs the same
callbacks in the same order at the same times. A loop with nothing ready and no timer can never
go on: that is `Deadlock`, at once, instead of a test that hangs.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable
from typing import Any, Final, TypeVar

R = TypeVar("R")

EPOCH_MS: Final = 1_700_000_000_000
"""The wall clock when a loop starts."""


class Deadlock(Exception):
    """Everything waits, and nothing will ever happen."""


class _Selector(selectors.SelectSelector):
    """Polls; what the loop would have slept is added to its clock."""

    def __init__(self, due: Callable[[], float]) -> None:
        super().__init__()
        self.now = 0.0
        self._due = due

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready (the loop's own wake-ups only); else time passes."""
        if timeout == 0:
            return []  # there is enough to do: nobody needs to be asked
        ready = super().select(0)
        if not ready:
            due = self._due()
            if due == math.inf:
                raise Deadlock("every task waits and no timer is set")
            self.now = max(self.now, due)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop of virtual time. `seed` shuffles what is ready; None keeps asyncio's order."""

    def __init__(self, seed: int | str | None = None) -> None:
        self._virtual = _Selector(self._due)
        self._order = None if seed is None else random.Random(seed)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._virtual.now

    def _due(self) -> float:
        """When the first timer is due; infinite without one (a sleep for ever is none)."""
        timers: Any = self._scheduled  # type: ignore[attr-defined] # asyncio's own heap
        return timers[0].when() if timers else math.inf

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined] # asyncio's own queue
        if self._order is not None and len(ready) > 1:
            shuffled = list(ready)
            self._order.shuffle(shuffled)
            ready.clear()
            ready.extend(shuffled)
        super()._run_once()  # type: ignore[misc]


class VirtualClock:
    """The clock of actors on a `VirtualTimeLoop`; blocking calls run inline.

    `skew_ms` is added to the wall clock, which a test may move as it likes.
    """

    def __init__(self, skew_ms: int = 0) -> None:
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        return EPOCH_MS + self.skew_ms + int(self.monotonic_ms())

    def monotonic_ms(self) -> float:
        """Virtual milliseconds since the loop's start."""
        return asyncio.get_running_loop().time() * 1000

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Runs `function` here and now."""
        return function()
