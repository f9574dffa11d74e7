"""Judge the queries of TPC-H, NEXMark and TPC-DS, as views, by plain Spark.

    python tests/proof/conformance.py [--corpus tpch] [--only q01,q14a] [--scale 0.001]
        [--changes 100] [--seed 0] [--growth] [--modes] [--trees] [--prepared]
        [--json F] [--write docs/reference/conformance.md]

Prints one line per query and a summary. The exit status is 1 if a query is wrong. With ``--growth``
each query is also judged at ten times the data, and ``--write`` shows the rows read at both scales.
``--modes`` fails if a query's tree or mode differs from the stored one. ``--trees`` stores them,
once for each new release of Spark: see `tests.kit.plan_trees`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio
import msgspec

from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import for_plans_run_once, place_on_spark
from tests.kit.corpora import CORPORA, CorpusQuery, read_queries
from tests.kit.plan_trees import difference, keep_trees, kept_trees
from tests.kit.query_conformance import (
    QueryJudgement,
    compile_queries,
    for_few_steps,
    judge_corpus,
    judged_wrong,
    summary,
    write_page,
)

FOLDER = Path(__file__).resolve().parent.parent / "corpora"
GROWTH = 10
SCALE = 0.001
QUERIES_FEW = 3
"""With more queries, the JVM's second compiler pays off."""


def chosen(corpora: list[str], only: str) -> list[list[CorpusQuery]]:
    """Return the selected queries, one list per corpus."""
    names = set(filter(None, only.split(",")))
    found = []
    for corpus in corpora or CORPORA:
        queries = [q for q in read_queries(FOLDER, corpus) if not names or q.name in names]
        if queries:
            found.append(queries)
    return found


def settings_for(given: argparse.Namespace, queries: int) -> Settings:
    """Return the engine's settings for this many queries."""
    if queries > QUERIES_FEW:
        return for_plans_run_once(Settings(), 0 if given.prepared else 1)
    return Settings() if given.prepared else for_few_steps(Settings())


async def run(given: argparse.Namespace) -> list[QueryJudgement]:
    """Judge the queries on one engine."""
    corpora = chosen(given.corpus, given.only)
    total = sum(len(queries) for queries in corpora)
    started, done = time.monotonic(), 0

    def show(judged: QueryJudgement) -> None:
        nonlocal done
        done += 1
        seconds = time.monotonic() - started
        print(f"[{done}/{total} {seconds:.0f} s] {judged.line()}"[:2_000], flush=True)

    found: list[QueryJudgement] = []
    scales = [given.scale, given.scale * GROWTH] if given.growth else [given.scale]
    with tempfile.TemporaryDirectory(prefix="penstock-conformance-") as folder:
        async with ActorSystem(seed=given.seed) as system:
            place = place_on_spark(system, settings_for(given, total), Path(folder))
            for queries in corpora:
                if given.modes or given.trees:
                    for judged in await compile_queries(queries, place):
                        found.append(judged)
                        show(judged)
                    continue
                found += await judge_corpus(queries, place, scales, given.changes, given.seed, show)
    return found


def main() -> int:
    """Run the campaign, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--corpus", action="append", default=[], choices=sorted(CORPORA))
    parser.add_argument("--only", default="", help="comma-separated names of queries")
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument(
        "--modes",
        action="store_true",
        help="only compile, and fail if a tree or mode differs from the stored one",
    )
    parser.add_argument(
        "--trees",
        action="store_true",
        help="like --modes, and store the trees of this Spark",
    )
    parser.add_argument(
        "--prepared", action="store_true", help="keep the plans of steps, as a service does"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    found = anyio.run(run, given)
    print(summary(found))
    made = {f"{each.corpus}/{each.query}": each.tree for each in found if each.tree}
    changed = difference(kept_trees(FOLDER), made)
    if given.trees:
        keep_trees(FOLDER, made)
    elif changed:
        print(f"different from tests/corpora/trees-*.txt:\n{changed}")
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    if given.write is not None:
        how = (
            f"Scale {given.scale:g}, about {given.changes} changes per timestamp over the tables "
            f"of a query, seed {given.seed}. Last run: {summary(found)}."
        )
        given.write.write_text(write_page(found, how))
    return 1 if judged_wrong(found) or (changed and not given.trees) else 0


if __name__ == "__main__":
    sys.exit(main())
