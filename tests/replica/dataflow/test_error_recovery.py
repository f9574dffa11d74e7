"""Views whose data make them fail for a while: exact again, without being computed whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from raced_views import VIEWS, raced_views  # type: ignore[import-not-found]

from actors.replica.dataflow.events import DataflowStep
from actors.replica.dataflow.step import StepDeltas
from actors.replica.dataflow.view import ViewStages

FAILING = [name for name in VIEWS if name.endswith("fails")]
STEPS = 36


async def failed_and_recovered(scratch: Path, seed: int, *, restarts: bool) -> Counter[str]:
    """One run; return how often views came out of an error."""
    recovered: Counter[str] = Counter()
    failed = dict.fromkeys(FAILING, False)
    async with raced_views(scratch, seed, FAILING) as views:
        views.zeros = 0.0
        await views.write()
        await views.join()
        await views.stage.wait_each(views.upper)
        views.zeros, views.mended = 0.1, 0.3
        for number in range(STEPS):
            for name, output in views.outputs.items():
                now = views.wanted(name, output, views.upper - 1) is None
                recovered[name] += failed[name] and not now
                failed[name] = now
            if restarts and number % 7 == 6:
                await views.join()
                await views.leave()
            await views.write()
            await views.stage.wait_each(views.upper)
    return recovered


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Views that were computed whole to end an error."""
    found: list[str] = []
    whole = ViewStages._recompute

    async def counted(self: ViewStages, step: DataflowStep, time: int) -> StepDeltas:
        made = await whole(self, step, time)
        if step.in_error:
            found.append(self._export.plan.sql)
        return made

    monkeypatch.setattr(ViewStages, "_recompute", counted)
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
    tmp_path: Path, seed: int, *, few: bool, wholes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, or where they are too many."""
    if few:
        monkeypatch.setattr("actors.replica.dataflow.held_changes.HELD_BYTES_MAX", 200)
    recovered = await failed_and_recovered(tmp_path, seed, restarts=not few)
    assert any(recovered.values()), recovered
    assert wholes
