"""RETURNING by PostgreSQL's protocol: columns alone need no engine but the one in memory."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from pg_house import (  # type: ignore[import-not-found]
    as_role,
    connected,
    dsn_of,
    pg_service,
    pg_table,
)

from spark_house import SparkHouse  # type: ignore[import-not-found]

TABLE = "CREATE TABLE t (id BIGINT, name STRING, n INT NOT NULL, PRIMARY KEY (id))"


async def rows(db: Any, text: str, given: Any = None) -> Any:
    return await (await db.execute(text, given)).fetchall()


async def test_rows_that_were_written_come_back(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        done = await db.execute(
            "INSERT INTO t (n, id) VALUES (7, 1), (8, 2) RETURNING id, t.name AS called, n m, *"
        )
        assert done.statusmessage == "INSERT 0 2"
        assert [each.name for each in done.description or ()] == [
            "id", "called", "m", "id", "name", "n",
        ]  # fmt: skip
        assert await done.fetchall() == [(1, None, 7, 1, None, 7), (2, None, 8, 2, None, 8)]
        found = await rows(db, "INSERT INTO t SELECT 3 AS id, 'c' AS name, 9 AS n RETURNING *")
        assert found == [(3, "c", 9)]
        found = await rows(db, "UPDATE t AS u SET name = 'x' WHERE n > 7 RETURNING u.\"id\", u.*")
        assert sorted(found) == [(2, 2, "x", 8), (3, 3, "x", 9)]
        # By parameters the statement is described before it is carried out.
        found = await rows(db, "UPDATE t SET n = %s WHERE id = %s RETURNING public.t.n", (5, 1))
        assert found == [(5,)]
        done = await db.execute("DELETE FROM t WHERE id < %s RETURNING id, name", (3,))
        assert done.statusmessage == "DELETE 2"
        assert sorted(await done.fetchall()) == [(1, None), (2, "x")]
        done = await db.execute("DELETE FROM t WHERE id = 99 RETURNING *")
        assert (done.statusmessage, await done.fetchall()) == ("DELETE 0", [])
        assert await rows(db, "SELECT id FROM t") == [(3,)]


async def test_upserts_return_what_they_wrote(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("INSERT INTO t VALUES (1, 'a', 1)")
        found = await rows(
            db,
            "INSERT INTO t VALUES (1, 'b', 2), (2, 'c', 3) "
            "ON CONFLICT (id) DO UPDATE SET n = EXCLUDED.n RETURNING id, name, n",
        )
        assert sorted(found) == [(1, "a", 2), (2, "c", 3)]
        text = "INSERT INTO t VALUES (1, 'z', 9), (3, 'd', 4) ON CONFLICT DO NOTHING RETURNING id"
        done = await db.execute(text)
        assert (done.statusmessage, await done.fetchall()) == ("INSERT 0 1", [(3,)])
        assert await rows(db, text) == []


async def in_transactions(service: Any, db: psycopg.AsyncConnection[Any]) -> None:
    """What a transaction has written itself is read by Spark."""
    await db.execute(TABLE.replace("TABLE t", "TABLE own"))
    async with db.transaction():
        assert await rows(db, "INSERT INTO own VALUES (1, 'a', 1) RETURNING id") == [(1,)]
        found = await rows(db, "UPDATE own SET n = 2 WHERE id = %s RETURNING n, name", (1,))
        assert found == [(2, "a")]
        async with await connected(service) as other:
            assert await rows(other, "SELECT * FROM own") == []
    assert await rows(db, "SELECT * FROM own") == [(1, "a", 2)]
    with pytest.raises(RuntimeError):
        async with db.transaction():
            assert await rows(db, "DELETE FROM own RETURNING id + 1 AS i") == [(2,)]
            raise RuntimeError
    assert await rows(db, "SELECT id FROM own") == [(1,)]
    await db.execute("PREPARE p AS INSERT INTO own VALUES ($1, 'p', 1) RETURNING id")
    assert await rows(db, "EXECUTE p(5)") == [(5,)]


async def padded(db: psycopg.AsyncConnection[Any]) -> None:
    """A transaction sees its own CHAR(n) as they will be stored."""
    await db.execute("CREATE TABLE chars (id INT, c CHAR(4), PRIMARY KEY (c))")
    await db.execute("INSERT INTO chars VALUES (1, 'x')")
    async with db.transaction():
        await db.execute("INSERT INTO chars SELECT 2 AS i, 'y' AS c")
        await db.execute("UPDATE chars SET c = lower('W') WHERE c = 'x'")
        wanted = [(1, "w   "), (2, "y   ")]
        assert sorted(await rows(db, "SELECT * FROM chars")) == wanted
        assert await rows(db, "SELECT id FROM chars WHERE c = 'y'") == [(2,)]
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with db.transaction():
                await db.execute("INSERT INTO chars SELECT 3 AS i, 'y' AS c")
    assert sorted(await rows(db, "SELECT * FROM chars")) == wanted


async def test_many_at_once(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("CREATE TABLE u (n INT)")
        await db.execute("INSERT INTO u VALUES (3)")
        cursor = db.cursor()
        given = [(number, f"n{number}", number) for number in range(5)]
        await cursor.executemany(
            "INSERT INTO t VALUES (%s, %s, %s) RETURNING id", given, returning=True
        )
        found = [await cursor.fetchone()]
        while cursor.nextset():
            found.append(await cursor.fetchone())
        assert found == [(number,) for number in range(5)]
        async with db.pipeline():
            one = await db.execute("INSERT INTO t VALUES (10, 'x', 1) RETURNING id")
            two = await db.execute("DELETE FROM u RETURNING n", prepare=True)
        assert (await one.fetchall(), await two.fetchall()) == ([(10,)], [(3,)])


async def test_asyncpg_prepares_and_fetches(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        db = await asyncpg.connect(dsn_of(service))
        try:
            await db.execute(TABLE)
            statement = await db.prepare("INSERT INTO t VALUES ($1, $2, $3) RETURNING name, id")
            kinds = [(each.name, each.type.name) for each in statement.get_attributes()]
            assert kinds == [("name", "text"), ("id", "int8")]
            assert await db.fetchval("SELECT count(*) FROM t") == 0
            assert tuple(await statement.fetchrow(1, "a", 2)) == ("a", 1)
            assert await db.fetchval("DELETE FROM t WHERE id = $1 RETURNING name", 1) == "a"
        finally:
            await db.close()


async def test_what_is_prepared_is_described_and_not_run(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("PREPARE p AS INSERT INTO t VALUES ($1, 'a', 1) RETURNING id")
        await db.execute("PREPARE q AS INSERT INTO t VALUES ($1, 'a', 1)")
        described = []
        for name in ("p", "q"):
            statement = f"described_{name}".encode()
            db.pgconn.send_prepare(statement, f"EXECUTE {name}(5)".encode())
            await _finish(db)
            db.pgconn.send_describe_prepared(statement)
            described.append((await _finish(db)).nfields)
        assert described == [1, 0]
        assert await rows(db, "SELECT * FROM t") == []


async def _finish(db: psycopg.AsyncConnection[Any]) -> Any:
    from psycopg import generators

    (result,) = await db.wait(generators.execute(db.pgconn))
    assert result.status in (psycopg.pq.ExecStatus.COMMAND_OK, psycopg.pq.ExecStatus.TUPLES_OK)
    return result


async def test_reading_needs_the_right(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (service, db):
        await db.execute("CREATE ROLE boss LOGIN PASSWORD 'boss'")
        await db.execute("CREATE ROLE writer LOGIN PASSWORD 'writer'")
        await db.execute("GRANT WRITE ON t TO writer")
        async with await as_role(service, "writer", "writer") as other:
            await other.execute("INSERT INTO t VALUES (1, 'a', 1)")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await other.execute("INSERT INTO t VALUES (2, 'a', 1) RETURNING id")
        assert await rows(db, "SELECT id FROM t") == [(1,)]


@pytest.mark.spark
async def test_expressions_are_computed_before_the_write(spark_house: SparkHouse) -> None:
    service = spark_house.service
    async with await connected(service) as db:
        await db.execute("CREATE TABLE t (id BIGINT, name STRING, d DATE, c CHAR(4), f DOUBLE)")
        found = await rows(
            db,
            "INSERT INTO t VALUES (2, 'b', '2026-01-02', 'x', 0.5), (1, 'a', NULL, NULL, 'nan') "
            "RETURNING c, upper(t.name) AS big, id + %s, *, extract(YEAR FROM d), f / 2 half",
            (10,),
        )
        day = dt.date(2026, 1, 2)
        assert found[0] == ("x   ", "B", 12, 2, "b", day, "x   ", 0.5, 2026, 0.25)
        assert found[1][:7] == (None, "A", 11, 1, "a", None, None)
        done = await db.execute("UPDATE t SET id = id * 2 WHERE id = 1 RETURNING id IS NULL, -id")
        assert await done.fetchall() == [(False, -2)]
        done = await db.execute("DELETE FROM t WHERE id = 99 RETURNING id + 1 AS next")
        assert ([each.name for each in done.description or ()], await done.fetchall()) == (
            ["next"],
            [],
        )
        await refused(db)
        assert await rows(db, "SELECT count(*) FROM t") == [(2,)]
        await in_transactions(service, db)
        await padded(db)


async def refused(db: psycopg.AsyncConnection[Any]) -> None:
    begin = "INSERT INTO t (id) VALUES (7) RETURNING"
    for items, state, place in (
        ("count(*)", "42803", "count"),
        ("id, explode(array(1, 2))", "22023", ""),
        ("id, nope + 1", "42703", "nope"),
        ("id,\n  1 / (id - id)", "22012", "1 /"),
        ("id, (SELECT 1)", "42601", "SELECT"),
        ("id FROM t", "42601", "FROM"),
        ("upper(c)", "22023", ""),
        ("u.id", "42703", "u"),
        ("u.*", "22023", ""),
        ("* EXCEPT (id)", "22023", ""),
        ("inline(array(struct(1, 2)))", "22023", ""),
    ):
        text = f"{begin} {items}"
        with pytest.raises(psycopg.Error) as caught:
            await db.execute(text)
        assert (caught.value.sqlstate, items) == (state, items), str(caught.value)
        if place:
            position = caught.value.diag.statement_position
            assert position is not None, items
            assert text.index(place, len(begin)) + 1 == int(position), (items, position)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="limit 2000"):
        await db.execute("INSERT INTO t (id) SELECT id FROM range(3000) RETURNING id + 1")
    done = await db.execute("INSERT INTO t (id) SELECT id FROM range(3000) RETURNING id")
    assert len(await done.fetchall()) == 3000
    await db.execute("DELETE FROM t WHERE name IS NULL")
