"""Plans of Spark's own analysis mean on Spark what the views' own texts mean.

One engine and few jobs: rows of many queries travel in one text as JSON, each with its query's name
and whether it is the original's or the written-out plan's. The suite takes every fourth query;
`make proof` takes all.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import view_corpus  # type: ignore[import-not-found]

from actors.engine.spark_executor import SparkExecutor
from actors.engine.views.compile import compile_view
from actors.engine.views.query_analysis import analyzed_query
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.relational import AggregationNode, DistinctNode, ViewPlan
from actors.model.plan.relational_text import render
from actors.model.plan.relational_walk import nodes
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives
from actors.testing.maintain import EngineCaller

pytestmark = [pytest.mark.spark, pytest.mark.long]

TABLES: dict[str, TableSchema] = view_corpus.TABLES
BATCH = 12
PORTABLE = (
    "using_full_chain",
    "using_right",
    "natural",
    "left_of_constant",
    "left_comma",
    "full_where",
    "union_widened",
    "group_having_alias",
    "group_distinct",
    "group_constant",
    "group_below_left",
    "not_in",
    "exists_nested",
    "in_pair",
)
QUERIES: dict[str, str] = {
    **view_corpus.SPARK_ONLY,
    **{name: view_corpus.PORTABLE[name] for name in PORTABLE if name in view_corpus.PORTABLE},
}
SHOWN_ONLY = {
    "except": "select k from a except select k from b",
    "intersect": "select k from a intersect select k from b",
    "rollup": "select g, k, count(*) as n, grouping_id() as i from a group by rollup (g, k)",
    "sets": "select g, k, sum(v) as s from a group by grouping sets ((g), (k), ())",
    "explode": "select k, x from a lateral view explode(array(k, v)) t as x",
    "explode_outer": "select g, x from a lateral view outer explode(filter(array(v), y -> y > 0)) t"
    " as x",
    "ranks": "select g, v, rank() over (partition by g order by v desc) as r from a",
    "running": "select g, k, sum(v) over (partition by g order by k) as s from a",
    "of_partition": "select g, count(v) over (partition by g) as n, v from a",
    "top": "select g, max(v) as m from a group by g order by m desc, g limit 2",
    "behind": "select distinct k from a order by k offset 1",
    "scalar": "select k, (select max(w) from b where b.k = a.k) as m from a",
    "nested": "select k from a where exists (select 1 from b where b.k = a.k and exists "
    "(select 1 from c where c.c = b.c))",
    "lateral": "select a.k, s from a, lateral (select a.k + a.v as s) q",
}
"""What the parser does not know, and Spark's own plans give."""
TEXTS = QUERIES | SHOWN_ONLY
ASKED = ("count_pair", "spread", "decimals", "union_types")
"""Whose plans `check_spark_types` looks at."""
REPORT = TableSchema(
    (TableColumn("query", "string"), TableColumn("side", "int"), TableColumn("row", "string"))
)
NON_ANSI = (("spark.sql.ansi.enabled", "false"),)


def contents(schema: TableSchema, seed: int) -> Counter[tuple[Any, ...]]:
    """Random rows, rich in NULLs and duplicates."""
    draw = random.Random(seed)
    values: dict[str, Any] = {"int": (-1, 0, 1, 2), "bigint": (-1, 0, 1, 2), "string": "xpz"}
    if any(column.type not in values for column in schema.columns):
        return Counter()  # structs do not hash

    def cell(column: TableColumn) -> Any:
        missing = column.nullable and draw.random() < 0.25
        return None if missing else draw.choice(values[column.type])

    return Counter(tuple(cell(column) for column in schema.columns) for _ in range(20))


async def translated(
    engine: EngineCaller, sql: str, conf: tuple[tuple[str, str], ...] = ()
) -> ViewPlan:
    """The plan that Spark's own analysis gives."""
    told = await analyzed_query(sql, TABLES, engine.analyze(), conf, translate=True)
    assert told.translation is not None
    assert told.translation.root is not None, (sql, told.translation.reason)
    return ViewPlan(told.inputs, told.translation.root, told.schema)


async def check_meaning(engine: EngineCaller, plans: dict[str, ViewPlan]) -> set[str]:
    """The rows of each query's text and of its plans', compared. Returns the queries that have
    rows."""
    texts = [
        f"SELECT '{name}' AS query, {side} AS side, to_json(struct(*)) AS row FROM ({text})"
        for name, made in plans.items()
        for side, text in enumerate([TEXTS[name], render(made.root, made.inputs)])
    ]
    names = tuple(TABLES)
    whole = DeltaPlan(
        inputs=names,
        input_schemas=tuple(TABLES.values()),
        output=REPORT,
        sql=" UNION ALL ".join(texts),
        mode="opaque",
        reason="",
    )
    bags = [contents(TABLES[name], seed) for seed, name in enumerate(names)]
    found: dict[tuple[str, int], Counter[str]] = {}
    for (name, side, row), _, weight in await engine.query(whole, bags, 0):
        found.setdefault((name, side), Counter())[rounded(row)] += weight
    for name in plans:
        assert found.get((name, 0)) == found.get((name, 1)), name
    return {name for name, _ in found}


def rounded(row: str) -> str:
    """The row with floats to ten digits: sums of floats depend on the order of rows."""
    cells = json.loads(row)
    return str({k: float(f"{v:.10g}") if isinstance(v, float) else v for k, v in cells.items()})


@pytest.mark.sampled
async def test_plans_mean_their_queries(tmp_path: Path, whole: bool) -> None:
    settings = for_short_lives(Settings(spark_master="local[2]", spark_driver_memory="512m"))
    names = list(TEXTS) if whole else list(TEXTS)[::4]
    async with ActorSystem() as system:
        address = system.spawn(lambda: SparkExecutor(settings, tmp_path), "engine")
        engine = EngineCaller(address, "t")
        shown = {name: await translated(engine, TEXTS[name]) for name in names}
        filled: set[str] = set()
        for start in range(0, len(names), BATCH):
            filled |= await check_meaning(engine, {n: shown[n] for n in names[start:][:BATCH]})
        assert len(filled) >= len(shown) - 3, set(shown) - filled
        await check_settings(engine)


async def check_settings(engine: EngineCaller) -> None:
    """Overflow is an error or NULL; names follow the session."""
    sql = "select g, sum(v) as s from a group by g"
    for conf, ansi in (((), True), (NON_ANSI, False)):
        plan = await translated(engine, sql, conf)
        assert [n.ansi for n in nodes(plan.root) if isinstance(n, AggregationNode)] == [ansi]
    conf = (("spark.sql.caseSensitive", "true"),)
    view = await compile_view(sql, TABLES, engine.analyze(), conf)
    assert view.reason == "the setting spark.sql.caseSensitive"
    kept = await translated(engine, "select distinct t, x from d")
    (node,) = [node for node in nodes(kept.root) if isinstance(node, DistinctNode)]
    assert [(c.type, c.nullable) for c in node.columns] == [("string", True), ("int", False)]
