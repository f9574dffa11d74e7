"""The virtual-time loop: one seed, one order; hours in no time; a deadlock is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from actors.testing import virtual_time
from actors.testing.patience import PATIENCE_S
from actors.testing.virtual_time import (
    EPOCH_MS,
    VirtualClock,
    VirtualDeadlock,
    VirtualLivelock,
    VirtualTimeLoop,
)


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
    assert time.monotonic() - began < PATIENCE_S < 3600
    assert monotonic == pytest.approx(3_600_000)
    assert wall == EPOCH_MS + 7 + int(monotonic)


def test_who_waits_for_ever_is_told() -> None:
    with pytest.raises(VirtualDeadlock, match="no timer"):
        run(anyio.sleep_forever, 1)


def test_blocking_calls_run_here() -> None:
    async def body() -> int:
        return await VirtualClock().run_blocking(lambda: 42)

    assert run(body) == 42


def loop() -> VirtualTimeLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_held_time_goes_on_only_as_far_as_it_is_let(seed: int | None) -> None:
    async def body() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, delays: list[float]) -> None:
            for delay in delays:
                await anyio.sleep(delay)
                seen.append((name, round(loop().time(), 9)))

        loop().hold_time()
        async with anyio.create_task_group() as group:
            group.start_soon(sleeper, "a", [0.1, 0.1, 0.1])
            group.start_soon(sleeper, "b", [0.25])
            await loop().idle()
            assert seen == []
            await loop().advance(300)  # what is due at the very end of it fires too
            assert loop().time() == pytest.approx(0.3)
            assert loop().next_timer_ms() is None
            await loop().advance(50)
            assert loop().time() == pytest.approx(0.35)
            loop().release_time()
        return seen

    assert run(body, seed) == [("a", 0.1), ("a", 0.2), ("b", 0.25), ("a", 0.3)]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_idle_is_when_nothing_is_ready_however_long_the_chain(seed: int | None) -> None:
    async def body() -> None:
        left = 5000

        async def chain() -> None:
            nonlocal left
            while left:
                left -= 1
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(1)

        async with anyio.create_task_group() as group:
            group.start_soon(chain)
            await loop().idle()
            assert (left, loop().time()) == (0, 0)

    run(body, seed)


def test_a_deadlock_names_what_its_witnesses_say_and_the_timer_that_is_held_back() -> None:
    async def body() -> None:
        loop().hold_time()
        loop().on_deadlock(lambda: "the cat has it")
        await anyio.sleep(5)

    with pytest.raises(VirtualDeadlock, match=r"due in 5000 ms, but time is held.*the cat has it"):
        run(body)


def test_a_task_that_never_waits_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "TURNS_MAX", 1000)

    async def body() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(VirtualLivelock, match="1000 turns"):
        run(body)
