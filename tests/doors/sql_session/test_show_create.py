"""SHOW CREATE: what is made from the statement that it shows is the same object."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_column_defaults import opened, run  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.doors.sql_session import SqlSession
from actors.engine.sql.tokens import SqlDialect
from actors.model.protocol.role_messages import ChangeRights, CreateRole
from actors.runtime.errors import AccessDenied
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine

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


SOURCES = {
    "counter": {"rate": ["7.5"], "seed": ["11"], "max_cardinality": ["3", "40"]},
    "churn": {"rate": ["3"], "keys": ["12"], "updates": ["1.5"]},
    "nexmark": {"rate": ["0.5"], "seed": ["4"], "hot_bidders": ["'7'"]},
}
"""Kinds of sources that need nothing outside, and options of them."""


async def source_of(client: Client, name: str) -> Any:
    (found,) = [each for each in await client.sources() if each.name == name]
    tables = sorted((each.name, each.outside) for each in found.tables)
    return found.kind, found.options, tables


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_shown_makes_the_same_source(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with opened(tmp_path) as (client, *sessions):
        for kind, options in SOURCES.items():
            name = rng.choice(["s", "select", "a b", 'q"x', "t`y"]) + kind
            given = {key: rng.choice(values) for key, values in options.items()}
            chosen = [f"{key} {value}" for key, value in given.items() if rng.random() < 0.7]
            text = f"CREATE SOURCE `{name.replace('`', '``')}` USING {kind}"
            if chosen:
                text += f" OPTIONS ({', '.join(chosen)})"
            if kind == "nexmark":
                text += " FOR TABLES (bid AS `my bids`, person)"
            await run(sessions[0], text)
            before = await source_of(client, name)
            assert set(json.loads(before[1])) <= {each.split()[0] for each in chosen}
            for session in sessions:
                quoted = postgres_name(name) if session is sessions[1] else spark_name(name)
                (row,) = await run(session, f"SHOW CREATE SOURCE {quoted}")
                await client.drop_source(name)
                await run(session, row["createtab_stmt"])
                assert await source_of(client, name) == before, row
            await client.drop_source(name)


async def test_what_is_shown_makes_the_same_sink(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", sink_dir=str(tmp_path / "sinks")) as (client, *sessions):
        await client.create_table("t x", {"a": "int"})
        for number, session in enumerate(sessions):
            folder = str(tmp_path / "sinks" / f"it's \\ here {number}")
            await client.create_sink("out", "t x", "parquet", {"folder": folder})
            (row,) = await run(session, "SHOW CREATE SINK out")
            await client.drop_sink("out")
            # Elsewhere: what another sink writes, until it has ended, is not written over.
            await run(session, row["createtab_stmt"].replace("here", "there"))
            (found,) = await client.sinks()
            moved = folder.replace("here", "there")
            assert (found.on, json.loads(found.options)) == ("t x", {"folder": moved})
            await client.drop_sink("out")


def spark_name(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def postgres_name(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


async def test_options_of_a_source_are_its_owners_to_see(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), listen="127.0.0.1:0")
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.in_process(service) as client,
    ):
        await client.create_source("s", {"kind": "counter", "seed": 7})
        # The first one that may log in is an administrator.
        await client.submit(CreateRole(0, "first", login=True))
        await client.submit(CreateRole(0, "other", login=True))
        await client.submit(ChangeRights(0, ("other",), ("connect",), scope="service"))
        link = await service.connect_in_process("other")
        async with await Client._welcome(link, settings) as other:
            (found,) = await other.sources()
            assert (found.name, found.options) == ("s", b"")
            session = SqlSession(other, settings, SqlDialect.SPARK, "other")
            with pytest.raises(AccessDenied, match="only the owner of source s may see"):
                await run(session, "SHOW CREATE SOURCE s")
            await session.close()
        (mine,) = await client.sources()
        assert json.loads(mine.options) == {"seed": 7}
