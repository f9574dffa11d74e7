"""Simulated runs of the whole service find nothing; `make proof` has `python -m tests.simulators`
go on to twenty thousand."""

from __future__ import annotations

import pytest

from tests.simulators.service.cluster import simulate
from tests.simulators.service.schedule import draw

SEEDS = 80
BATCHES = 4


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_seeds_find_nothing(batch: int) -> None:
    seeds = range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES)
    wrong = [report for seed in seeds if (report := simulate(draw(seed))).violation]
    assert wrong == []
