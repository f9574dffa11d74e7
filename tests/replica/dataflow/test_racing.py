"""Several replicas maintain the same views over the same shards, and race for every step."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from raced_views import VIEWS, raced_views  # type: ignore[import-not-found]

from actors.replica.dataflow.machine import DataflowMachine, check_machine

STEPS = 14


async def raced(scratch: Path, seed: int, names: list[str]) -> None:
    """One run."""
    async with raced_views(scratch, seed, names) as views:
        dice, stage = views.dice, views.stage
        await views.write()
        for _ in range(dice.choice((2, 2, 3))):
            await views.join()
        for _ in range(STEPS):
            await views.write()
            chance = dice.random()
            if chance < 0.2 and len(views.names) > 1:
                await views.leave()
            elif chance < 0.4 and len(views.names) < 3:
                await views.join()
            elif chance < 0.7:
                await stage.wait_each(views.upper)
        await stage.wait_each(views.upper)
        # Whoever is left has to go on from what it read of the others.
        while len(views.names) > 1:
            await views.leave()
            await views.write()
            await stage.wait_each(views.upper)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(6))
async def test_racing_replicas_keep_every_view_right(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: Counter[str] = Counter()
    handle = DataflowMachine.handle

    def counted(self: DataflowMachine, event: Any) -> Any:
        handled[type(event).__name__] += 1
        effects = handle(self, event)
        check_machine(self)
        return effects

    monkeypatch.setattr(DataflowMachine, "handle", counted)
    names = random.Random(f"views {seed}").sample(sorted(VIEWS), 5)
    await raced(tmp_path, seed, names)
    assert handled["UpperMismatched"] > 0
    assert handled["ReplicaFollowed"] > 0
