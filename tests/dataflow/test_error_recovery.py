"""Views whose data make them fail for a while: exact again, without being computed whole."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from raced_views import SETTINGS, TABLES, VIEWS, RacedViews  # type: ignore[import-not-found]

from actors.dataflow.events import DataflowStep
from actors.dataflow.step import StepDeltas
from actors.dataflow.view import ViewStages
from actors.kernel import ActorSystem, SystemClock
from actors.persist import PersistClient
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.maintain import EngineCaller
from actors.testing.stage import ScriptStage
from actors.threshold_probes import HELD_BYTES, use_kernel_limits
from actors.views.compile import compile_view

FAILING = [name for name in VIEWS if name.endswith("fails")]
STEPS = 36


async def failed_and_recovered(scratch: Path, seed: int, *, restarts: bool) -> Counter[str]:
    """One run; return how often views came out of an error."""
    dice = random.Random(seed)
    with anyio.fail_after(200):
        async with ActorSystem(seed=seed) as system:
            persist = await PersistClient.in_memory(SETTINGS, SystemClock())
            executor: Any = system.spawn(lambda: InMemoryExecutor(EngineControls()), "engine")
            analyze = EngineCaller(executor, "t").analyze()
            plans = {name: await compile_view(VIEWS[name], TABLES, analyze) for name in FAILING}
            stage = ScriptStage(system, executor, persist, scratch, SETTINGS, "errors")
            await stage.open(TABLES, plans)
            views = RacedViews(stage, {name: plan.output for name, plan in plans.items()}, dice)
            views.zeros = 0.0
            await views.write()
            await views.join()
            await stage.wait_each(views.upper)
            views.zeros, views.mended = 0.1, 0.3
            recovered: Counter[str] = Counter()
            failed = dict.fromkeys(FAILING, False)
            for number in range(STEPS):
                await stage.wait_each(views.upper)
                for name, output in views.outputs.items():
                    now = views.wanted(name, output, views.upper - 1) is None
                    recovered[name] += failed[name] and not now
                    failed[name] = now
                if restarts and number % 7 == 6:
                    await views.join()
                    await views.leave()
                await views.write()
            await stage.wait_each(views.upper)
            await views.check()
            await stage.stop()
        await persist.close()
    return recovered


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Views that were computed whole to end an error."""
    found: list[str] = []
    whole = ViewStages._whole

    async def counted(self: ViewStages, step: DataflowStep, time: int) -> StepDeltas:
        made = await whole(self, step, time)
        if step.in_error:
            found.append(self._export.plan.sql)
        return made

    monkeypatch.setattr(ViewStages, "_whole", counted)
    return found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(4))
async def test_a_step_over_the_changes_since_ends_an_error(
    tmp_path: Path, seed: int, wholes: list[str]
) -> None:
    recovered = await failed_and_recovered(tmp_path, seed, restarts=False)
    assert sum(recovered[name] > 0 for name in FAILING) > 2, recovered
    # Of a join, rows that never were together may be the ones that fail.
    assert set(wholes) <= {VIEWS["joined_fails"]}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("seed", "few"), [(8, False), (9, True)])
async def test_it_is_exact_where_they_are_not_known_any_more(
    tmp_path: Path, seed: int, *, few: bool, wholes: list[str]
) -> None:
    """After a restart, or where they are too many."""
    if few:
        use_kernel_limits({HELD_BYTES.name: 200})
    recovered = await failed_and_recovered(tmp_path, seed, restarts=not few)
    assert any(recovered.values()), recovered
    assert wholes
