"""The clock of an actor, and its threads for blocking calls: a simulation replaces both."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import anyio

from actors.runtime.errors import ResourceClosed

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


# -- threads for blocking calls --------------------------------------------------------------------


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Run the call, in a thread."""
        error: BaseException | None = None
        result = None
        try:
            result = self.context.run(self.function)
        except BaseException as raised:  # noqa: BLE001 - whoever waits gets it
            error = raised
        # A cancelled caller may have ended the loop before its call.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._end, result, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # cancelled, or overdue
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    def give_up(self) -> None:
        """Fail the waiter: the call has not ended in time."""
        if not self.future.done():
            self.future.set_exception(CallOverdue())


class ThreadedClock(SystemClock):
    """The machine's clock, with threads of its own for short blocking calls.

    A disk call of 0.2 ms should not wait 0.1 ms for its thread. An executor's call has a future
    with locks of its own, chained to the loop's; here a call goes into the queue of an idle thread,
    and its result straight into the loop's future: a third of the latency.

    At most `threads_max` threads run; further calls wait, first come, first served. A thread is
    made on demand and kept until `close`, which waits for all calls and accepts no more. A waiter
    may be cancelled; its call goes on.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Call | None]] = []
        self._threads: list[threading.Thread] = []
        self._waiting: deque[_Call] = deque()
        self._closed = False

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run `function` in one of the threads. Raises `ResourceClosed` after `close`."""
        result: R = await self._submit(function).future
        return result

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run `function` in one of the threads for at most `within_ms`. Raises `CallOverdue`,
        `ResourceClosed`."""
        call = self._submit(function)
        # A timer, as a cancel scope costs five times as much.
        timer = call.loop.call_later(within_ms / 1000, call.give_up)
        try:
            result: R = await call.future
        finally:
            timer.cancel()
        return result

    def _submit(self, function: Callable[[], Any]) -> _Call:
        """Hand a call to an idle thread, a new one, or the queue."""
        call = _Call(function)
        with self._lock:
            if self._closed:
                raise ResourceClosed("the threads for blocking calls have ended")
            if self._idle:
                self._idle.pop().put(call)
            elif len(self._threads) < self._threads_max:
                # A daemon: a call that hangs must not keep the process alive.
                thread = threading.Thread(target=self._work, args=(call,), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._waiting.append(call)
        return call

    def _work(self, first: _Call) -> None:
        calls: SimpleQueue[_Call | None] = SimpleQueue()
        call: _Call | None = first
        while call is not None:
            call.run()
            del call  # an idle thread must not keep the call's objects alive
            with self._lock:
                # Waiting calls before the end: `close` lets them run.
                if self._waiting:
                    calls.put(self._waiting.popleft())
                elif self._closed:
                    return
                else:
                    self._idle.append(calls)
            call = calls.get()

    def close(self) -> None:
        """Block until the calls under way, and those that wait for a thread, have ended."""
        with self._lock:
            self._closed = True
            for calls in self._idle:
                calls.put(None)
            self._idle.clear()
        for thread in self._threads:
            thread.join()
