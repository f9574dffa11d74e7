"""Locks by key: one at a time, first come first served, and none is lost with who waited for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import anyio
import pytest

from actors.durable.persist.document_locks import Held, KeyLocks
from actors.testing.patience import PATIENCE_S


async def test_several_keys_are_locked_together_and_forgotten_afterwards() -> None:
    held: Held = {}
    async with KeyLocks(held, ["b", "a"]):
        assert held.keys() == {"a", "b"}
    assert held == {}


async def test_who_waits_comes_in_the_order_of_asking() -> None:
    held: Held = {}
    order: list[int] = []

    async def enter(number: int) -> None:
        async with KeyLocks(held, ["a"]):
            order.append(number)
            await anyio.lowlevel.checkpoint()

    await asyncio.gather(*(enter(number) for number in range(20)))
    assert order == list(range(20))
    assert held == {}


async def test_a_turn_that_comes_as_its_owner_is_cancelled_is_the_next_ones() -> None:
    held: Held = {}
    entered: list[str] = []
    first = KeyLocks(held, ["a"])
    await first.__aenter__()

    async def enter(name: str) -> None:
        async with KeyLocks(held, ["a"]):
            entered.append(name)

    second, third = (asyncio.ensure_future(enter(name)) for name in ("second", "third"))
    await anyio.lowlevel.checkpoint()
    await first.__aexit__()  # the lock is the second's, which has not run yet
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.wait_for(third, PATIENCE_S)
    assert entered == ["third"]
    assert held == {}


@pytest.mark.parametrize("seed", range(20))
async def test_any_mix_of_waits_and_cancels_leaves_no_lock_behind(seed: int) -> None:
    random, held, inside = Random(seed), Held(), dict.fromkeys("abc", 0)

    async def enter(keys: Sequence[str]) -> None:
        async with KeyLocks(held, keys):
            for key in keys:
                inside[key] += 1
                assert inside[key] == 1, f"two hold {key}"
            try:
                for _ in range(random.randrange(4)):
                    await anyio.lowlevel.checkpoint()
            finally:
                for key in keys:
                    inside[key] -= 1

    tasks = []
    for _ in range(200):
        keys = random.sample("abc", random.randint(1, 3))
        tasks.append(asyncio.ensure_future(enter(keys)))
        if random.random() < 0.3:
            random.choice(tasks).cancel()
        if random.random() < 0.5:
            await anyio.lowlevel.checkpoint()
    async with asyncio.timeout(PATIENCE_S):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
    assert held == {}
