"""Random changes of tables and rows against a real PostgreSQL
(`tests/connectors/sources/postgres_fuzz.py`), for as many seeds as asked:

    python tests/proof/fuzz_postgres.py --first 0 --seeds 40 --rounds 12
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "connectors" / "sources"))

from postgres_fuzz import Fuzz  # type: ignore[import-not-found]
from postgres_house import house  # type: ignore[import-not-found]

from actors.testing.postgres_server import postgres_server


async def _run(first: int, seeds: int, rounds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    with postgres_server(wal_level="logical", fsync="off", max_replication_slots="20") as server:
        for seed in range(first, first + seeds):
            async with house(server, f"fuzz{seed}") as db:
                fuzz = Fuzz(db, seed)
                try:
                    await fuzz.run(rounds)
                except BaseException:
                    print(f"seed {seed}: WRONG", flush=True)
                    raise
            counts += fuzz.counts
            print(f"seed {seed}: right, {dict(fuzz.counts)}", flush=True)
    return counts


def main() -> None:
    """Run, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    for name, count in asyncio.run(_run(given.first, given.seeds, given.rounds)).most_common():
        print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
