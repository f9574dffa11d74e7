"""Fuzzing of what the gateway for Spark Connect does to plans: decoding and rewriting.

    .venv/bin/python tests/proof/fuzz_connect_plans.py [--minutes 10] [--seed 1] [--replay SEED]

Plans are made up and changed by `tests.kit.connect_fuzz`. Each is rewritten, passed on, or
refused by a named error, within a time and a memory that are bounded by its size. Exit status 1,
with the seed of the request, when anything else happens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
from tests.kit.connect_fuzz import fuzzed_request, read_plan

SECONDS_MAX = 10.0
"""Of one request of at most two megabytes."""
WARM_REQUESTS = 2_000
GROWTH_BYTES_MAX = 128 << 20


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read(seed: int) -> tuple[str, float]:
    """The outcome of one request, and the seconds that it took."""
    data = fuzzed_request(Random(seed))
    began = time.perf_counter()
    outcome = read_plan(data)
    return outcome, time.perf_counter() - began


def main() -> int:
    """Run for the given time; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=int)
    arguments = parser.parse_args()
    if arguments.replay is not None:
        print(read(arguments.replay))
        return 0
    outcomes: Counter[str] = Counter()
    slowest, before = (0.0, 0), 0
    ends = time.monotonic() + arguments.minutes * 60
    number = 0
    while time.monotonic() < ends:
        seed = arguments.seed * 10_000_000 + number
        try:
            outcome, seconds = read(seed)
        except Exception as error:
            print(f"FOUND: --replay {seed}: {type(error).__name__}: {error}")
            raise
        outcomes[outcome] += 1
        slowest = max(slowest, (seconds, seed))
        number += 1
        if number == WARM_REQUESTS:
            before = resident_bytes()
    growth = resident_bytes() - before if before else 0
    print(f"{number} requests: {dict(outcomes)}")
    print(f"slowest {slowest[0]:.2f} s (--replay {slowest[1]}), memory +{growth >> 20} MiB")
    return 1 if slowest[0] > SECONDS_MAX or growth > GROWTH_BYTES_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
