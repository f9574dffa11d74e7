"""Three hundred simulated runs of the whole service find nothing (`penstock simulate` goes on)."""

from __future__ import annotations

import pytest

from actors.testing.cluster import simulate
from actors.testing.simulation.schedule import draw

SEEDS = 300
BATCHES = 10


@pytest.mark.parametrize("batch", range(BATCHES))
def test_seeds_find_nothing(batch: int) -> None:
    seeds = range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES)
    wrong = [report for seed in seeds if (report := simulate(draw(seed))).violation]
    assert wrong == []
