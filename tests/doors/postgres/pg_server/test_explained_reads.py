"""EXPLAIN of a SELECT: by which way its rows are read, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from pg_house import connected, pg_service  # type: ignore[import-not-found]

from actors import Client
from actors.engine.views.read_choice import NOT_PLAIN


async def explained(db: Any, query: str) -> list[str]:
    rows = await (await db.execute(f"EXPLAIN {query}")).fetchall()
    return [line for (line,) in rows]


async def test_explain_shows_the_way_of_a_read(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE goods (id BIGINT, kind INT, name STRING, PRIMARY KEY (id))")
        await db.execute("INSERT INTO goods VALUES (1, 7, 'one'), (2, 7, 'two')")
        assert await explained(db, "SELECT name FROM goods WHERE id = 1") == [
            "Read of goods, without Spark",
            "  from memory: by PRIMARY KEY (id)",
            "  columns: name",
            "  filter: id = 1",
            "  time: the latest written",
        ]
        by_kind = "SELECT id FROM goods WHERE kind = 7"
        shard = "  from shard: no index on these columns is ready"
        assert (await explained(db, by_kind))[1] == shard
        await db.execute("CREATE INDEX by_kind ON goods (kind)")
        async with await Client.in_process(service) as client:
            time = await client.write({})
            await client.wait_for("by_kind", time)
            direct = await client.explain_query(by_kind, refresh_policy="none")
        assert (await explained(db, by_kind))[1] == "  from index: by_kind (kind)"
        assert direct.splitlines()[1] == "  from index: by_kind (kind)"
        whole = await explained(db, "SELECT id FROM goods ORDER BY id LIMIT 1")
        assert whole[1:4] == [
            "  from index: by_kind, full scan: its rows are already consolidated",
            "  columns: id",
            "  order: id; limit: 1",
        ]
        relation = await explained(db, "SELECT name FROM penstock.objects")
        assert relation[1] == "  from memory: the service's own state"
        assert await explained(db, "SELECT count(*) FROM goods") == [
            "Run by Spark, over goods",
            f"  reason: {NOT_PLAIN}",
            "  time: the latest written",
        ]
        assert (await explained(db, f"{by_kind} AS OF {time}"))[-1] == f"  time: {time}"


async def test_explain_shows_the_changes_of_a_transaction(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE goods (id BIGINT, name STRING, PRIMARY KEY (id))")
        await db.execute("CREATE TABLE others (id BIGINT, PRIMARY KEY (id))")
        async with db.transaction():
            await db.execute("INSERT INTO goods VALUES (1, 'one')")
            own = await explained(db, "SELECT name FROM goods WHERE id = 1")
            assert own[:2] == [
                "Read of goods, without Spark",
                "  from memory: by PRIMARY KEY, with the changes of the open transaction applied",
            ]
            rows = await (await db.execute("SELECT name FROM goods WHERE id = 1")).fetchall()
            assert rows == [("one",)]
            assert (await explained(db, "SELECT name FROM goods"))[:2] == [
                "Run by Spark, over goods",
                "  reason: the open transaction has changed goods",
            ]
            other = await explained(db, "SELECT id FROM others WHERE id = 1")
            assert other[1] == "  from memory: by PRIMARY KEY (id)"


async def test_explain_shows_how_an_existing_view_is_maintained(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE goods (id BIGINT, kind INT, PRIMARY KEY (id))")
        query = "SELECT kind, count(*) AS n FROM goods GROUP BY kind"
        await db.execute(f'CREATE MATERIALIZED VIEW "of Kinds" AS {query}')
        async with await Client.in_process(service) as client:
            plan = await client.explain("of Kinds")
        shown = await explained(db, 'MATERIALIZED VIEW "of Kinds"')
        assert shown[0] == "mode: incremental"
        assert shown == plan.splitlines()
        assert (await explained(db, 'INCREMENTAL VIEW "of Kinds"'))[0] == "mode: incremental"
        with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
            await explained(db, "VIEW nowhere")
        with pytest.raises(psycopg.Error, match="goods is a table: only views have a plan"):
            await explained(db, "VIEW goods")
