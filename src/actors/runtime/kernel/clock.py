"""The clock of actors and the threads for their blocking calls. A simulation replaces both."""

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
    """A blocking call did not finish in time. It keeps running, and its result is dropped."""


class ActorClock(Protocol):
    """The time and the blocking calls that an actor may use."""

    def now_ms(self) -> int:
        """Return the wall clock time, in milliseconds since the epoch. It may jump."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back, for measuring durations."""
        ...

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run a blocking call outside the event loop (a simulation runs it inline)."""
        ...

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run a blocking call and wait at most `within_ms` for it. Raises `CallOverdue`."""
        ...


class SystemClock:
    """The machine's clock and its threads."""

    def now_ms(self) -> int:
        """Return the wall clock time, in milliseconds since the epoch. It may jump."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back, for measuring durations."""
        return time.monotonic() * 1000

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run `function` in a worker thread."""
        return await asyncio.to_thread(function)

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run `function` in a worker thread and wait at most `within_ms` for it.

        Raises `CallOverdue`.
        """
        with anyio.move_on_after(within_ms / 1000):
            return await self.run_blocking(function)
        raise CallOverdue


# -- threads for blocking calls --------------------------------------------------------------------


class _Call:
    """One blocking call: runs in a thread, and its result goes to the event loop."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Run the call in the current thread and pass its result to the loop."""
        error: BaseException | None = None
        result = None
        try:
            result = self.context.run(self.function)
        except BaseException as raised:  # noqa: BLE001 - the waiter gets it
            error = raised
        # If the caller was cancelled, the loop may have ended before the call.
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
        """Fail the waiter with `CallOverdue`, because the call did not finish in time."""
        if not self.future.done():
            self.future.set_exception(CallOverdue())


class ThreadedClock(SystemClock):
    """The machine's clock, with its own threads for short blocking calls.

    A disk call of 0.2 ms should not wait 0.1 ms for its thread. An executor creates a future with
    locks of its own for each call and chains it to the loop's future. Here a call goes into the
    queue of an idle thread and its result directly into the loop's future, at a third of the
    latency.

    At most `threads_max` threads run, and more calls wait, first come, first served. Threads are
    started on demand and kept until `close`, which waits for all calls and accepts no new ones. If
    a waiter is cancelled, its call keeps running.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Call | None]] = []
        """Queues of the idle threads; None in a queue ends its thread."""
        self._threads: list[threading.Thread] = []
        """All threads started so far."""
        self._waiting: deque[_Call] = deque()
        """Calls that wait for a thread."""
        self._closed = False
        """True once `close` was called."""

    async def run_blocking(self, function: Callable[[], R]) -> R:
        """Run `function` in one of the threads. Raises `ResourceClosed` after `close`."""
        result: R = await self._submit(function).future
        return result

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        """Run `function` in one of the threads and wait at most `within_ms` for it.

        Raises `CallOverdue`, or `ResourceClosed` after `close`.
        """
        call = self._submit(function)
        # A timer, because a cancel scope costs five times as much.
        timer = call.loop.call_later(within_ms / 1000, call.give_up)
        try:
            result: R = await call.future
        finally:
            timer.cancel()
        return result

    def _submit(self, function: Callable[[], Any]) -> _Call:
        """Pass a call to an idle thread or a new one, or queue it."""
        call = _Call(function)
        with self._lock:
            if self._closed:
                raise ResourceClosed("the clock is closed: it runs no more blocking calls")
            if self._idle:
                self._idle.pop().put(call)
            elif len(self._threads) < self._threads_max:
                # A daemon thread, because a call that hangs must not keep the process alive.
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
            del call  # do not keep the call's objects alive while idle
            with self._lock:
                # Waiting calls first: `close` lets them run.
                if self._waiting:
                    calls.put(self._waiting.popleft())
                elif self._closed:
                    return
                else:
                    self._idle.append(calls)
            call = calls.get()

    def close(self) -> None:
        """Accept no more calls, and block until all running and waiting calls have finished."""
        with self._lock:
            self._closed = True
            for calls in self._idle:
                calls.put(None)
            self._idle.clear()
        for thread in self._threads:
            thread.join()
