"""The virtual-time loop: one seed, one order; hours in no time; a deadlock is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from actors.testing.virtual_time import EPOCH_MS, Deadlock, VirtualClock, VirtualTimeLoop


def run(body: Callable[[], Coroutine[Any, Any, Any]], seed: int | None = None) -> Any:
    return anyio.run(body, backend_options={"loop_factory": lambda: VirtualTimeLoop(seed)})


async def order_of_ten() -> list[int]:
    """In which order ten tasks that all wait the same time get through it thrice."""
    seen: list[int] = []

    async def one(number: int) -> None:
        for _ in range(3):
            await anyio.sleep(1)
            seen.append(number)

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(one, number)
    return seen


def test_a_seed_is_an_order() -> None:
    orders = [run(order_of_ten, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    plain = run(order_of_ten)
    assert plain == run(order_of_ten)
    assert [sorted(plain[at : at + 10]) for at in (0, 10, 20)] == [[*range(10)]] * 3


def test_an_hour_takes_no_time_and_clocks_agree() -> None:
    async def body() -> tuple[int, float]:
        clock = VirtualClock(skew_ms=7)
        await anyio.sleep(3600)
        return clock.now_ms(), clock.monotonic_ms()

    began = time.monotonic()
    wall, monotonic = run(body, 3)
    assert time.monotonic() - began < 1
    assert monotonic == pytest.approx(3_600_000)
    assert wall == EPOCH_MS + 7 + int(monotonic)


def test_who_waits_for_ever_is_told() -> None:
    with pytest.raises(Deadlock, match="no timer"):
        run(anyio.sleep_forever, 1)


def test_blocking_calls_run_here() -> None:
    async def body() -> int:
        return await VirtualClock().run_blocking(lambda: 42)

    assert run(body) == 42
