"""Whole-service runs of the simulator on one core, against the time that twenty a second allow.

A run is one of the simulator's schedules: the service, clients, faults and checkers, from the start
until nothing is left. It is measured in process time, which excludes other load on the machine.

    python bench/simulation.py [--json FILE] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.simulators`
from measure import Measure, Report, median
from tests.simulators.service.cluster import simulate
from tests.simulators.service.schedule import draw

TURNS = 5
RUNS = 100
WANTED_MS = 1000 / 20


def run_ms(first: int, count: int) -> float:
    """Return the average milliseconds of one run over these seeds. Raises `SystemExit` if one
    fails."""
    began = process_time()
    for seed in range(first, first + count):
        report = simulate(draw(seed))
        if report.violation:
            raise SystemExit(f"seed {seed} fails: {report.violation}")
    return (process_time() - began) * 1000 / count


def run(report: Report) -> None:
    """Measure rounds with different seeds, after a warm-up."""
    count = 10 if report.quick else RUNS
    run_ms(0, 5)
    found = median([run_ms(turn * count, count) for turn in range(TURNS)])
    report.add(Measure("simulated_run", found, WANTED_MS, target=1.0))


if __name__ == "__main__":
    made = Report("Simulated whole-service runs.")
    run(made)
    made.close()
