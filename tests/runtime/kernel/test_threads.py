"""Blocking calls in threads of one's own: results, errors, order, bounds, and the end."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from functools import partial

import pytest

from actors.runtime.errors import ResourceClosed
from actors.runtime.kernel.clock import CallOverdue, SystemClock, ThreadedClock

NAME: ContextVar[str] = ContextVar("name", default="nobody")


async def test_results_errors_and_the_callers_context_come_through() -> None:
    clock = ThreadedClock(2)
    NAME.set("a caller")
    assert await clock.run_blocking(NAME.get) == "a caller"
    assert await clock.run_blocking(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await clock.run_blocking(lambda: 1 // 0)
    assert await clock.run_blocking(lambda: 7) == 7
    clock.close()


async def test_no_more_threads_than_allowed_and_calls_wait_their_turn() -> None:
    clock = ThreadedClock(2)
    gate = threading.Event()
    both = threading.Barrier(3)
    order: list[int] = []

    def hold() -> None:
        both.wait()
        gate.wait()

    held = [asyncio.ensure_future(clock.run_blocking(hold)) for _ in range(2)]
    await asyncio.to_thread(both.wait)
    later = [
        asyncio.ensure_future(clock.run_blocking(partial(order.append, number)))
        for number in range(20)
    ]
    assert await asyncio.to_thread(lambda: order) == []
    gate.set()
    await asyncio.gather(*held, *later)
    assert sorted(order) == list(range(20))
    assert len(clock._threads) == 2
    clock.close()


async def test_one_thread_takes_calls_in_their_order() -> None:
    clock = ThreadedClock(1)
    order: list[int] = []
    await asyncio.gather(
        *(clock.run_blocking(partial(order.append, number)) for number in range(100))
    )
    assert order == list(range(100))
    clock.close()


async def test_a_call_goes_on_when_who_waits_is_cancelled() -> None:
    clock = ThreadedClock(1)
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()
        ended.set()

    waits = asyncio.ensure_future(clock.run_blocking(work))
    await asyncio.to_thread(begun.wait)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    gate.set()
    assert await clock.run_blocking(ended.is_set)
    clock.close()


async def test_closing_lets_calls_end_and_takes_no_more() -> None:
    clock = ThreadedClock(1)
    begun, gate = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        gate.wait()
        done.append("first")

    first = asyncio.ensure_future(clock.run_blocking(work))
    second = asyncio.ensure_future(clock.run_blocking(lambda: done.append("second")))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.ensure_future(asyncio.to_thread(clock.close))
    gate.set()
    await asyncio.gather(first, second, closing)
    assert done == ["first", "second"]
    assert not any(thread.is_alive() for thread in clock._threads)
    with pytest.raises(ResourceClosed):
        await clock.run_blocking(lambda: None)


async def test_a_call_is_given_up_in_time_and_goes_on() -> None:
    clock = ThreadedClock(1)
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait()
        ended.set()

    with pytest.raises(CallOverdue):
        await clock.run_blocking_within(20, work)
    gate.set()
    assert await clock.run_blocking_within(60_000, ended.is_set)
    with pytest.raises(TimeoutError):  # of the call itself: another matter
        await clock.run_blocking_within(60_000, _times_out)
    clock.close()


async def test_the_machines_own_threads_keep_to_the_time_too() -> None:
    gate = threading.Event()
    with pytest.raises(CallOverdue):
        await SystemClock().run_blocking_within(20, gate.wait)
    gate.set()
    with pytest.raises(TimeoutError):
        await SystemClock().run_blocking_within(60_000, _times_out)


def _times_out() -> None:
    raise TimeoutError("by itself")
