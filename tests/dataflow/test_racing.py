"""Several replicas maintain the same views over the same shards, and race for every step."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from raced_views import SETTINGS, TABLES, VIEWS, RacedViews  # type: ignore[import-not-found]

from actors.dataflow.machine import DataflowMachine, check_machine
from actors.kernel import ActorSystem, SystemClock
from actors.persist import PersistClient
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.maintain import EngineCaller
from actors.testing.stage import ScriptStage
from actors.views.compile import compile_view

STEPS = 14


async def raced(scratch: Path, seed: int, names: list[str]) -> None:
    """One run."""
    dice = random.Random(seed)
    with anyio.fail_after(200):
        async with ActorSystem(seed=seed) as system:
            persist = await PersistClient.in_memory(SETTINGS, SystemClock())
            executor: Any = system.spawn(lambda: InMemoryExecutor(EngineControls()), "engine")
            analyze = EngineCaller(executor, "t").analyze()
            plans = {name: await compile_view(VIEWS[name], TABLES, analyze) for name in names}
            stage = ScriptStage(system, executor, persist, scratch, SETTINGS, "race")
            await stage.open(TABLES, plans)
            place = RacedViews(stage, {name: plan.output for name, plan in plans.items()}, dice)
            await place.write()
            for _ in range(dice.choice((2, 2, 3))):
                await place.join()
            for _ in range(STEPS):
                await place.write()
                chance = dice.random()
                if chance < 0.2 and len(place.names) > 1:
                    await place.leave()
                elif chance < 0.4 and len(place.names) < 3:
                    await place.join()
                elif chance < 0.7:
                    await stage.wait_each(place.upper)
            await stage.wait_each(place.upper)
            # Whoever is left has to go on from what it read of the others.
            while len(place.names) > 1:
                await place.leave()
                await place.write()
                await stage.wait_each(place.upper)
            await place.check()
            await stage.stop()
        await persist.close()


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
