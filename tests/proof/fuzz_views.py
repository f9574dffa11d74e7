"""Made-up views, with odd names, wide tables, many changes and bases.

    python tests/proof/fuzz_views.py --views 5000 [--spark] [--seed 0] [--keep .fuzz]

They live on the in-memory engine, or with ``--spark`` on Spark, whose queries have window
functions, GROUPING SETS, INTERSECT and EXCEPT, generators, first rows, windows of time, and
subqueries inside expressions, too. Ends with exit status 1 when one of them is wrong or stalls;
failing scripts are kept, made small. What the in-memory engine or SQLite cannot run is refused, and
counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio

from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import (
    SCRIPTS_FEW,
    CheckReport,
    Show,
    for_short_lives,
    report_on_spark,
    with_drawn_engine,
)
from actors.testing.checking import CheckOptions, CheckPlace, ViewResult
from actors.testing.engine import InMemoryExecutor
from tests.kit.fuzz_spark import SparkWriter
from tests.kit.fuzzing import fuzz


def show(result: ViewResult, done: int, total: int) -> None:
    """Print what is wrong, and how far it is now and then."""
    if result.verdict == "WRONG" or done % 500 == 0:
        print(f"{done}/{total} {result.line()}"[:400], flush=True)


async def run(views: int, seed: int, keep: Path) -> CheckReport:
    """Make up and check so many views."""
    with tempfile.TemporaryDirectory() as folder:
        async with ActorSystem(seed=seed) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), Path(folder))
            options = CheckOptions(1, seed, exact_decimals=False, batched=False)
            return await fuzz(views, place, options, keep, show)


async def run_on_spark(views: int, seed: int, keep: Path) -> int:
    """Make up and check so many views on Spark; 0 when all is well."""
    settings = Settings() if views > SCRIPTS_FEW else for_short_lives(Settings())
    chosen = with_drawn_engine(settings, seed, plans_once=True)

    async def check(place: CheckPlace, show: Show) -> CheckReport:
        return await fuzz(views, place, CheckOptions(seed=seed), keep, show, SparkWriter)

    return await report_on_spark(check, settings, chosen, seed)


def main() -> int:
    """Run the campaign; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--views", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(".fuzz"))
    parser.add_argument("--spark", action="store_true", help="on Spark, not in memory")
    given = parser.parse_args()
    if given.spark:
        return anyio.run(run_on_spark, given.views, given.seed, given.keep)
    report = anyio.run(run, given.views, given.seed, given.keep)
    print(report.summary())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
