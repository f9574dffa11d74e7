"""SHOW CREATE: what is made from the statement that it shows is the same object."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_column_defaults import opened, run  # type: ignore[import-not-found]

from actors.client.client import Client

COMMENTS = ["", "of a day", "it's \\ a", "ä\n"]
CONF = {
    "spark.sql.session.timeZone": ["Europe/Prague", "UTC"],
    "spark.sql.ansi.enabled": ["false", "true"],
    "spark.sql.shuffle.partitions": ["3"],
}


def spark_literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def drawn_clauses(rng: random.Random, *, of_view: bool) -> str:
    properties: dict[str, str] = {}
    if rng.random() < 0.6:
        properties["retain_history_ms"] = str(rng.randrange(1, 10**9))
    if of_view:
        properties |= {k: rng.choice(each) for k, each in CONF.items() if rng.random() < 0.5}
        if rng.random() < 0.3:
            properties["target_lag_ms"] = str(rng.randrange(1, 10**6))
    comment = rng.choice(COMMENTS)
    text = f" COMMENT {spark_literal(comment)}" if comment else ""
    pairs = [f"'{key}' = '{value}'" for key, value in properties.items()]
    return text + (f" TBLPROPERTIES ({', '.join(pairs)})" if pairs else "")


async def kept(client: Client, name: str) -> Any:
    (found,) = [each for each in (await client.status()).objects if each.name == name]
    return (found.spark_conf, found.retain_history_ms, found.target_lag_ms, found.comment,
            found.column_comments, found.schema, found.sql)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_shown_makes_the_same_object(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with opened(tmp_path) as (client, spark, _):
        column = rng.choice(COMMENTS)
        comment = f" COMMENT {spark_literal(column)}" if column else ""
        await run(spark, f"CREATE TABLE t (a INT DEFAULT 3{comment}, b STRING)"
                  + drawn_clauses(rng, of_view=False))  # fmt: skip
        policy = rng.choice(["", " REFRESH POLICY FULL"])
        clauses = drawn_clauses(rng, of_view=True)
        await run(spark, f"CREATE MATERIALIZED VIEW v{policy}{clauses} AS SELECT a FROM t")
        for kind, name in (("MATERIALIZED VIEW", "v"), ("TABLE", "t")):
            (row,) = await run(spark, f"SHOW CREATE {kind} {name}")
            shown, before = row["createtab_stmt"], await kept(client, name)
            if name == "t":
                await run(spark, "DROP MATERIALIZED VIEW v")
            await run(spark, f"DROP {kind} {name}")
            await run(spark, shown)
            assert await kept(client, name) == before, shown
            (again,) = await run(spark, f"SHOW CREATE {kind} {name}")
            assert again["createtab_stmt"] == shown
