"""An event loop on real sockets whose time stops while the loop itself is late.

Theory of operation. A deadline distinguishes a slow peer from a dead one, so its test needs a short
one. On a busy machine a short deadline also passes while this process gets no CPU: the peer's bytes
are in the kernel, or the peer is a task of the same loop that had no turn either. `PatientLoop`
counts, for each of its turns, the time that it asked the selector to wait, and at most `TURN_S` for
its callbacks. A pause of the process, a slow callback or a late wake-up takes no longer than that
in the loop's time, and everything ready is handled before time advances. If both sides of a
conversation run on this loop, both have their turns before a deadline of either passes.

Time spent by other processes and threads counts in full. `time.monotonic` is not changed: compare
times of this loop only with ``loop.time()`` or ``anyio.current_time()``.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Final

TURN_S: Final = 0.005
"""Most seconds that the callbacks of one turn count for."""


class _Selector(selectors.DefaultSelector):
    """Measures how much of the real time counts."""

    def __init__(self) -> None:
        super().__init__()
        self._returned = self.now = time.monotonic()
        """When `select` last returned (real time), and the loop's own time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready events, and advance the loop's time."""
        called = time.monotonic()
        ready = super().select(timeout)
        returned = time.monotonic()
        waited = returned - called
        if timeout is not None:
            waited = min(waited, max(timeout, 0.0))
        self.now += waited + min(called - self._returned, TURN_S)
        self._returned = returned
        return ready


class PatientLoop(asyncio.SelectorEventLoop):
    """A loop whose time stops while the loop is late; see the module."""

    def __init__(self) -> None:
        self._patient = _Selector()
        super().__init__(self._patient)

    def time(self) -> float:
        """Return seconds that never go back, as of the start of this turn."""
        return self._patient.now
