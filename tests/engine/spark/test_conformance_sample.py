"""A sample of the public corpora's queries, judged.

`make proof` has all of them analysed here, and judges all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import pytest

from actors.model.plan.schema import TableSchema
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import place_on_spark
from tests.kit.corpora import make_tables, read_queries
from tests.kit.plan_trees import difference, kept_trees
from tests.kit.query_conformance import (
    ConformanceCheck,
    QueryJudgement,
    compile_queries,
    for_few_steps,
    judged_wrong,
    output_schemas,
)

FOLDER = Path(__file__).parents[2] / "corpora"
SAMPLE = {
    # projections and filters; joins of two and three, on windows of time; groups by windows, with
    # distinct counts and filters; the first rows of a partition; sessions, a made side input and a
    # maximum of everything, which are computed whole
    "nexmark": (
        "q00", "q01", "q02", "q03", "q07", "q08", "q09", "q10", "q11", "q12", "q13", "q14", "q15",
        "q17", "q18", "q19", "q20", "q21", "q22", "q23",
    ),
    # sums and averages; EXISTS; one sum; conditional sums
    "tpch": ("q01", "q04", "q06", "q12"),
    # one count of a join of four
    "tpcds": ("q96",),
}  # fmt: skip
"""Those that take least, of each operator one; `tests/proof/conformance.py` judges all."""
SCALES = {"tpch": 0.0005, "nexmark": 0.0002, "tpcds": 0.0005}
CHANGES = 60
QUERIES = 149
TOGETHER = 5
"""Queries that share their tables' shards."""


async def judge_sample(
    whole: bool,
) -> tuple[list[QueryJudgement], dict[str, TableSchema], dict[str, str]]:
    """The sample judged, and of its texts, or of all, the schemas of the answers and the trees; on
    one engine."""
    found: list[QueryJudgement] = []
    schemas: dict[str, TableSchema] = {}
    trees: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        async with ActorSystem(seed=1) as system:
            place = place_on_spark(system, for_few_steps(Settings()), scratch)
            for corpus, names in SAMPLE.items():
                every = read_queries(FOLDER, corpus)
                queries = [query for query in every if query.name in names]
                assert len(queries) == len(names)
                texts = every if whole else queries
                made = await output_schemas(corpus, texts, place)
                schemas.update(
                    {f"{q.corpus}/{q.name}": s for q, s in zip(texts, made, strict=True)}
                )
                compiled = await compile_queries(texts, place)
                trees.update({f"{each.corpus}/{each.query}": each.tree for each in compiled})
                tables = make_tables(corpus, SCALES[corpus], 1, scratch, queries)
                over = ConformanceCheck(corpus, tables, place, CHANGES, 1)
                for start in range(0, len(queries), TOGETHER):
                    found += await over.judge(queries[start : start + TOGETHER], brief=True)
    return found, schemas, trees


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.sampled
def test_a_sample_of_the_public_corpora_is_exact(whole: bool) -> None:
    found, schemas, trees = anyio.run(judge_sample, whole)
    assert len(schemas) == (QUERIES if whole else len(found))
    for name, schema in schemas.items():
        assert len({column.lower() for column in schema.names}) == len(schema.columns), name
    assert len(found) == sum(len(names) for names in SAMPLE.values())
    assert difference(kept_trees(FOLDER), trees) == ""
    assert not judged_wrong(found), [each.line() for each in judged_wrong(found)]
    assert not [each.line() for each in found if each.verdict == "refused"]
