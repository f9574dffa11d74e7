"""A sample of the public corpora's queries, judged; all of them analysed.

`make proof` judges all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import pytest

from actors.kernel import System
from actors.plan.schema import Schema
from actors.settings import Settings
from actors.testing.check_views import place_on_spark
from actors.testing.conformance import (
    Conformance,
    Judgement,
    for_few_steps,
    judged_wrong,
    output_schemas,
)
from actors.testing.corpora import make_tables, read_queries

FOLDER = Path(__file__).parent.parent / "corpora"
SAMPLE = {
    # NOT IN over a join
    "tpch": ("q16",),
    # the first ten of a partition
    "nexmark": ("q19",),
    # INTERSECT; a full join
    "tpcds": ("q38", "q97"),
}
"""Few, as each takes seconds; `tests/proof/conformance.py` judges all."""
SCALES = {"tpch": 0.0005, "nexmark": 0.0002, "tpcds": 0.0005}
CHANGES = 60
QUERIES = 149


async def judge_sample() -> tuple[list[Judgement], dict[str, Schema]]:
    """The sample judged, and of every text the schema of its answer, all on one engine."""
    found: list[Judgement] = []
    schemas: dict[str, Schema] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        async with System(seed=1) as system:
            place = place_on_spark(system, for_few_steps(Settings()), scratch)
            for corpus, names in SAMPLE.items():
                every = read_queries(FOLDER, corpus)
                made = await output_schemas(corpus, every, place)
                schemas.update(
                    {f"{q.corpus}/{q.name}": s for q, s in zip(every, made, strict=True)}
                )
                queries = [query for query in every if query.name in names]
                assert len(queries) == len(names)
                tables = make_tables(corpus, SCALES[corpus], 1, scratch, queries)
                over = Conformance(corpus, tables, place, CHANGES, 1)
                found += await over.judge(queries, brief=True)
    return found, schemas


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_sample_of_the_public_corpora_is_exact() -> None:
    found, schemas = anyio.run(judge_sample)
    assert len(schemas) == QUERIES
    for name, schema in schemas.items():
        assert len({column.lower() for column in schema.names}) == len(schema.columns), name
    assert len(found) == sum(len(names) for names in SAMPLE.values())
    assert not judged_wrong(found), [each.line() for each in judged_wrong(found)]
    assert not [each.line() for each in found if each.verdict == "refused"]
