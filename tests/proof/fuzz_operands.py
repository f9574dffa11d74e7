"""Every function of Spark over bad operands: each view has contents or a definite error at once.

    .venv/bin/python tests/proof/fuzz_operands.py [--functions 500] [--rows 3] [--seed 1]

The functions and their examples are those of Spark's own registry; `tests.kit.bad_operands`
says what is drawn and judged. Exit status 1 if a step failed in another way than as an error of the
data, or a view differs from plain Spark's answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio
from fuzz_functions import documented_examples

from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives, place_on_spark
from actors.testing.maintain import EngineCaller
from tests.kit.bad_operands import OperandCheck


async def run(arguments: argparse.Namespace) -> int:
    """Judge the functions; the exit status."""
    examples = await anyio.to_thread.run_sync(documented_examples, sys.executable)
    random = Random(arguments.seed)
    names = sorted(examples)
    random.shuffle(names)
    made = 0
    with tempfile.TemporaryDirectory(prefix="penstock-operands-") as folder:
        async with ActorSystem(seed=arguments.seed) as system:
            place = place_on_spark(system, for_short_lives(Settings()), Path(folder))
            check = OperandCheck(EngineCaller(place.executor, "operands"), random)
            for name in names[: arguments.functions]:
                seen = len(check.wrong)
                judged = [await check.judge(text, arguments.rows) for text in examples[name][:2]]
                made += any(judged)
                for text in check.wrong[seen:]:
                    print(f"WRONG {name}: {text[:600]}", flush=True)
    tried = min(arguments.functions, len(names))
    print(
        f"{tried} functions, {made} in {check.views} views, {check.in_error} bad rows were errors: "
        f"{len(check.wrong)} wrong"
    )
    return 1 if check.wrong or not check.in_error else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--functions", type=int, default=500)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    return anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
