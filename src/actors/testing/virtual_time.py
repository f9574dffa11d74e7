"""An event loop whose time is a counter: it advances only when no callback is ready.

Theory of operation. The loop is asyncio's own, on a selector that never waits: where the real one
would sleep until the next timer, this one moves the clock there. With a seed, ready callbacks are
shuffled before each turn, so that one seed always gives the same order of events, and another seed
another order. The loop sees no external events, so threads and sockets cannot be used (blocking
calls run inline, `VirtualClock`; links are in memory).

Invariants: ``time()`` never goes back; the same program with the same seed runs the same callbacks
in the same order at the same times. A loop with no ready callback and no timer can never continue:
that raises `VirtualDeadlock` immediately, instead of letting the test hang.

Manual time. After `hold_time` the clock stands still: it advances only as far as `advance` lets it.
*Idle* is exact: the loop asks for timers only when no callback is ready, and then wakes the waiters
of `idle`. A task that never waits keeps a loop from ever being idle: after `TURNS_MAX` turns at one
time that raises `VirtualLivelock`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import random
import selectors
from collections.abc import Callable
from typing import Any, Final, TypeVar

R = TypeVar("R")

EPOCH_MS: Final = 1_700_000_000_000
"""Wall clock at a loop's start."""


TURNS_MAX: Final = 1_000_000
"""Most turns of the loop without an advance of time; no test needs that many."""
_RESOLUTION: Final = 1e-9
"""Seconds by which a timer may be early: floating-point sums are not more exact."""


class VirtualDeadlock(Exception):
    """Raised if every task waits and no event is left to wake one."""


class VirtualLivelock(Exception):
    """Raised if callbacks are ready turn after turn, so that time never advances."""


class _Selector(selectors.SelectSelector):
    """Polls, and adds the time that the loop would have slept to its clock."""

    def __init__(self, due: Callable[[], float]) -> None:
        super().__init__()
        self.now = 0.0
        """The loop's time in seconds."""
        self.limit = math.inf
        """Time beyond which the clock does not advance."""
        self.idle: list[asyncio.Future[None]] = []
        """Futures of tasks that wait until no callback is ready."""
        self.arrived: list[asyncio.Future[None]] = []
        """Futures of tasks that wait until time has reached its limit and no callback is ready
        there."""
        self.witnesses: list[Callable[[], str]] = []
        """Functions whose text is added to a deadlock or livelock."""
        self.polls = True
        """True if threads may wake the loop; otherwise it polls for that only before a
        `VirtualDeadlock`."""
        self._due = due
        self._turns = 0
        """Turns since time last advanced."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready events (only the loop's own wake-ups). If there are none, wake the waiters
        for idleness; if there are none either, advance the time."""
        self._turns += 1
        if self._turns > TURNS_MAX:
            self._turns = 0
            raise VirtualLivelock(
                f"{TURNS_MAX} turns of the loop at one moment. {self._witnessed()}"
            )
        if timeout == 0:
            return []  # callbacks are ready: no need to poll
        ready = super().select(0) if self.polls else []
        if ready:
            return ready
        due = self._due()
        if due > self.now + _RESOLUTION and _woken(self.idle):
            return ready
        if due <= self.limit + _RESOLUTION and due < math.inf:
            self._move(due)
        elif self.arrived:
            self._move(self.limit)
            _woken(self.arrived)
        elif self.polls or not (ready := super().select(0)):
            raise VirtualDeadlock(
                f"every task waits and {self._no_timer(due)}. {self._witnessed()}"
            )
        return ready

    def _move(self, to: float) -> None:
        if to > self.now:
            self.now = to
            self._turns = 0

    def _no_timer(self, due: float) -> str:
        if due == math.inf:
            return "no timer is set"
        wait_ms = (due - self.now) * 1000
        return f"the next timer is due in {wait_ms:g} ms, but time is held: advance it"

    def _witnessed(self) -> str:
        return "; ".join(witness() for witness in self.witnesses)


def _woken(waiters: list[asyncio.Future[None]]) -> bool:
    """Wake all waiters. Return whether there were any."""
    found = [waiter for waiter in waiters if not waiter.done()]
    waiters.clear()
    for waiter in found:
        waiter.set_result(None)
    return bool(found)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop of virtual time. `seed` shuffles the ready callbacks; None keeps asyncio's order."""

    def __init__(self, seed: int | str | None = None) -> None:
        self._virtual = _Selector(self._due)
        """The selector, which keeps the time."""
        self._order = None if seed is None else random.Random(seed)
        """Random order of ready callbacks; None for asyncio's."""
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._virtual.now

    def hold_time(self) -> None:
        """Stop the clock, which then moves only by `advance`."""
        self._virtual.limit = self._virtual.now

    def release_time(self) -> None:
        """Let time advance on its own again."""
        self._virtual.limit = math.inf

    async def idle(self) -> None:
        """Return when all ready callbacks have run, and all that they made ready. No time
        passes."""
        waiter: asyncio.Future[None] = self.create_future()
        self._virtual.idle.append(waiter)
        await waiter

    async def advance(self, delay_ms: float) -> None:
        """Let time advance: timers due by then fire in order, each at its time, with everything
        that follows from them. Return at the end, when no callback is ready. Needs `hold_time`."""
        virtual = self._virtual
        assert virtual.limit < math.inf, "time advances on its own: call hold_time first"
        virtual.limit = virtual.limit + delay_ms / 1000
        waiter: asyncio.Future[None] = self.create_future()
        virtual.arrived.append(waiter)
        await waiter

    def next_timer_ms(self) -> float | None:
        """Return the milliseconds until the next timer fires; None without a timer."""
        due = self._due()
        return None if due == math.inf else (due - self._virtual.now) * 1000

    def on_deadlock(self, witness: Callable[[], str]) -> None:
        """Add the text that `witness` returns to that of a `VirtualDeadlock` or
        `VirtualLivelock`."""
        self._virtual.witnesses.append(witness)

    def _due(self) -> float:
        """Return the time of the first timer; infinite without one (sleeping forever sets none)."""
        timers: Any = self._scheduled  # type: ignore[attr-defined] # asyncio's own heap
        return timers[0].when() if timers else math.inf

    def call_soon(  # type: ignore[override] # of any callback: asyncio's is generic
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Queue a callback as asyncio does, without its checks."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _run_once(self) -> None:
        """Run one turn as asyncio does, without its checks and with fewer polls of the selector."""
        loop: Any = self
        ready, timers = loop._ready, loop._scheduled  # asyncio's own queue and heap
        while timers and timers[0]._cancelled:
            loop._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        events = self._virtual.select(0 if ready or loop._stopping else None)
        if events:
            loop._process_events(events)
        end = self._virtual.now + _RESOLUTION
        while timers and timers[0]._when < end:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        if self._order is not None and len(ready) > 1:
            self._shuffle(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _shuffle(self, ready: Any) -> None:
        assert self._order is not None, "there is a seed"
        draw, shuffled = self._order.random, list(ready)
        for last in range(len(shuffled) - 1, 0, -1):
            other = int(draw() * (last + 1))
            shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
        ready.clear()
        ready.extend(shuffled)


class VirtualClock:
    """The clock of actors on a `VirtualTimeLoop`. Blocking calls run inline.

    `skew_ms` is added to the wall clock; a test may change it.
    """

    def __init__(self, skew_ms: int = 0) -> None:
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        """Return the wall clock, in milliseconds since the epoch."""
        return EPOCH_MS + self.skew_ms + int(self.monotonic_ms())

    def monotonic_ms(self) -> float:
        """Return the virtual milliseconds since the loop's start."""
        return asyncio.get_running_loop().time() * 1000

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run `function` inline."""
        return function()

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run `function` inline. No time passes meanwhile."""
        return function()
