"""What steps read on ten times the state, for the views of scripts, on Spark.

    python tests/proof/view_scaling.py [--seed 0] tests/scripts

Ends with exit status 1 when a view reads the more the larger its state is, or reads columns that
its text does not name: see `tests.kit.scaling`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio

from actors.runtime.settings import Settings
from actors.testing.check_views import (
    CheckReport,
    Show,
    check_scripts,
    read_for_release,
    report_on_spark,
    with_drawn_engine,
)
from actors.testing.checking import CheckOptions, CheckPlace
from tests.kit.scaling import measure_reads


async def run(paths: list[Path], seed: int) -> int:
    """Measure the views of all scripts; 0 when all is well."""
    scripts = read_for_release(paths)
    chosen = with_drawn_engine(Settings(), seed, plans_once=False)

    async def measure(place: CheckPlace, show: Show) -> CheckReport:
        options = CheckOptions(seed=seed)
        return await check_scripts(scripts, place, options, show=show, judge=measure_reads)

    return await report_on_spark(measure, Settings(), chosen, seed)


def main() -> int:
    """Run the campaign; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", type=Path, nargs="+", help="view scripts, or folders of them")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return anyio.run(run, given.paths, given.seed)


if __name__ == "__main__":
    sys.exit(main())
