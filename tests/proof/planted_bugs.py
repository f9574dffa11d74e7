"""Hunts planted bugs: each must be found by the simulation within 2,000 fresh seeds.

    python tests/proof/planted_bugs.py [--seed FIRST] [NAME …]

Seeds are fresh: without --seed they begin at a random number, which is printed. Exit status 1
when a bug was not found. A seed that fails without any bug planted is told and does not count.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`
from tests.simulators.service.cluster import simulate
from tests.simulators.service.planted import PLANTED
from tests.simulators.service.planted_storage import BUGS
from tests.simulators.service.schedule import draw, has_source

SEEDS_MAX = 2_000


def hunt(name: str, first: int) -> bool:
    """Whether the bug was found by a seed that finds nothing without it."""
    began = perf_counter()
    for seed in range(first, first + SEEDS_MAX):
        if name in BUGS and not has_source(seed):
            continue  # it changes nothing there
        with PLANTED[name]():
            report = simulate(draw(seed))
        if not report.violation:
            continue
        without = simulate(draw(seed))
        if without.violation:
            print(f"seed {seed} fails without any bug planted: {without.violation}", flush=True)
            continue
        print(
            f"{name}: found by seed {seed}, number {seed - first + 1}, in "
            f"{perf_counter() - began:.0f} s: {report.violation[:300]}",
            flush=True,
        )
        return True
    print(f"{name}: NOT found in {SEEDS_MAX} seeds from {first}", flush=True)
    return False


def main() -> int:
    """Hunts all of them, or those that are named."""
    parser = argparse.ArgumentParser(description="Hunts planted bugs.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("names", nargs="*", default=list(PLANTED))
    given = parser.parse_args()
    print(f"fresh seeds from {given.seed}", flush=True)
    found = [hunt(name, given.seed) for name in given.names]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
