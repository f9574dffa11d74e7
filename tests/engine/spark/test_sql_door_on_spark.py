"""SQL through the door for PostgreSQL's clients, with expressions that only Spark computes."""

from __future__ import annotations

import shutil
import subprocess
from decimal import Decimal
from typing import Any

import anyio
import psycopg
import pytest

from spark_house import SparkHouse  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

PSQL = shutil.which("psql")


def test_the_engine_reports_its_jobs_and_the_memory_of_both_processes(
    spark_house: SparkHouse,
) -> None:
    async def measured() -> dict[tuple[str, ...], Any]:
        async for _ in spark_house.client.query("SELECT count(*) AS n FROM range(5)"):
            pass
        return {
            (each.metric.name, *each.labels): each.value
            for each in spark_house.service.measures()
            if each.metric.group == "Engine"
        }

    found = spark_house.call(measured)
    engines = {name for metric, name, *_ in found if metric == "penstock.engine.up"}
    # Queries may have an engine of their own, which starts with the first of them.
    engine = "queries" if "queries" in engines else "spark"
    assert found["penstock.engine.up", engine] == 1
    assert found["penstock.engine.jobs_ended", engine, "done"] >= 1
    for process in ("child", "jvm"):
        assert found["penstock.engine.memory", engine, process] > 10_000_000


async def rows(db: psycopg.AsyncConnection[Any], text: str, given: Any = None) -> Any:
    return await (await db.execute(text, given)).fetchall()


async def changed_rows(db: psycopg.AsyncConnection[Any]) -> None:
    await db.execute(
        "CREATE TABLE stock (item TEXT PRIMARY KEY, shelf INT, pieces BIGINT, price NUMERIC(8,2))"
    )
    made = await db.execute(
        "INSERT INTO stock SELECT concat('i', id), id % 4, id * 10, id + 0.5 FROM range(20)"
    )
    assert made.statusmessage == "INSERT 0 20"
    await db.execute(
        "CREATE MATERIALIZED VIEW worth REFRESH POLICY INCREMENTAL AS "
        "SELECT shelf, count(*) AS n, sum(pieces) AS pieces FROM stock GROUP BY shelf"
    )
    done = await db.execute(
        "UPDATE stock SET pieces = pieces + shelf, price = price * 2 WHERE shelf = %s", (3,)
    )
    assert done.statusmessage == "UPDATE 5"
    assert await rows(db, "SELECT n, pieces FROM worth WHERE shelf = 3") == [(5, 565)]
    found = await rows(db, "SELECT price FROM stock WHERE item = 'i3'")
    assert found == [(Decimal("7.00"),)]
    done = await db.execute("DELETE FROM stock WHERE item LIKE 'i1%' AND pieces % 20 = 0")
    assert done.statusmessage == "DELETE 5"


async def merged(db: psycopg.AsyncConnection[Any]) -> None:
    await db.execute("CREATE TABLE arrivals (item TEXT, pieces BIGINT)")
    await db.execute("INSERT INTO arrivals VALUES ('i3', 5), ('new', 1), ('i5', NULL)")
    text = """
        MERGE INTO stock AS s USING arrivals a ON s.item = a.item
        WHEN MATCHED AND a.pieces IS NULL THEN DELETE
        WHEN MATCHED THEN UPDATE SET pieces = s.pieces + a.pieces
        WHEN NOT MATCHED THEN INSERT (item, pieces) VALUES (a.item, a.pieces)
        WHEN NOT MATCHED BY SOURCE AND s.shelf = 2 THEN UPDATE SET shelf = 9
    """
    done = await db.execute(text)
    found = dict(await rows(db, "SELECT item, pieces FROM stock WHERE item IN ('i3', 'new', 'i5')"))
    assert found == {"i3": 38, "new": 1}
    moved = await rows(db, "SELECT count(*) FROM stock WHERE shelf = 9")
    assert done.statusmessage == f"MERGE {3 + moved[0][0]}"
    assert moved[0][0] > 0
    await db.execute("INSERT INTO arrivals VALUES ('i3', 1)")
    with pytest.raises(psycopg.Error, match="two source rows match"):
        await db.execute(text)


async def read_in_a_transaction(db: psycopg.AsyncConnection[Any]) -> None:
    before = (await rows(db, "SELECT count(*), sum(pieces) FROM stock"))[0]
    async with db.transaction(force_rollback=True):
        await db.execute("UPDATE stock SET pieces = pieces + 1 WHERE shelf = 0")
        await db.execute("INSERT INTO stock VALUES ('t1', 0, 100, NULL)")
        await db.execute("UPDATE stock SET pieces = pieces * 2 WHERE item = 't1'")
        await db.execute("DELETE FROM stock WHERE item = 'i0'")
        found = dict(await rows(db, "SELECT item, pieces FROM stock WHERE shelf = 0"))
        assert found["t1"] == 200
        assert "i0" not in found
        assert found["i4"] == 41
        (count,) = (await rows(db, "SELECT count(*) FROM stock"))[0]
        assert count == before[0]
    assert (await rows(db, "SELECT count(*), sum(pieces) FROM stock"))[0] == before


async def read_at_earlier_times(db: psycopg.AsyncConnection[Any]) -> None:
    found = await rows(db, "SELECT upper FROM penstock.objects WHERE name = 'stock'")
    then = found[0][0] - 1
    (before,) = (await rows(db, "SELECT count(*) FROM stock"))[0]
    await db.execute("DELETE FROM stock")
    assert await rows(db, "SELECT count(*) FROM stock") == [(0,)]
    assert await rows(db, f"SELECT count(*) FROM stock AS OF {then}") == [(before,)]
    found = await rows(db, f"SELECT count(*) AS n FROM stock TIMESTAMP AS OF {then}")
    assert found == [(before,)]


async def told_of_faults(db: psycopg.AsyncConnection[Any]) -> None:
    with pytest.raises(psycopg.errors.UndefinedColumn):
        await db.execute("SELECT nothing FROM stock")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await db.execute("SELECT 1 / 0")
    plan = await rows(
        db, "EXPLAIN CREATE MATERIALIZED VIEW x AS SELECT shelf, max(price) FROM stock GROUP BY 1"
    )
    assert plan[0][0].startswith("mode: incremental")
    assert not await rows(db, "SHOW TABLES LIKE 'x'")


async def values_and_names(db: psycopg.AsyncConnection[Any]) -> None:
    await db.execute("CREATE TABLE pg_values (id INT, b BYTEA, t TEXT[])")
    await db.execute(
        "INSERT INTO pg_values VALUES (1, '\\xdead', '{a, \u00a0b}'), (1 + 1, 'a\\134', NULL)"
    )
    await db.execute("UPDATE pg_values SET b = '\\xbeef', id = id * 3 % 4 WHERE id = 2")
    asked = "SELECT * FROM penstock.public.pg_values ORDER BY id"
    assert await rows(db, asked) == [(1, b"\xde\xad", ["a", "\u00a0b"]), (2, b"\xbe\xef", None)]
    given = await rows(db, "SELECT id FROM pg_values WHERE b = %s", (b"\xde\xad",))
    assert given == await rows(db, "SELECT id FROM pg_values WHERE b = '\\xdead'::bytea") == [(1,)]
    one = "0a0eebc9-9c0b-4ef8-bb6d-6bb9bd380a11"
    for text, name, wanted in (
        ("'abcdef'::varchar(3)", "varchar", "abc"),
        ("octet_length(CAST(id AS char(3)))", "octet_length", 3),
        (f"'{one.upper()}'::uuid = '{{{one}}}'", "?column?", False),
        (f"'{one.upper()}'::uuid", "uuid", one),
        ("'1e-20'::numeric", "numeric", Decimal("1e-20")),
        ("ARRAY[id, 7]", "array", [1, 7]),
        ("1 = ANY ('{1,2}'::int[])", "?column?", True),
        ("id <> ALL ('{2,NULL}'::int[])", "?column?", None),
        ("(id = ANY ('{}'::int[])) IS NULL", "?column?", False),
        ("count(*) OVER ()", "count", 1),
        ('id AS "__count"', "__count", 1),
    ):
        found = await db.execute(f"SELECT {text} FROM pg_values WHERE id = 1".encode())
        assert found.description is not None
        assert (await found.fetchall(), found.description[0].name) == ([(wanted,)], name), text
    await db.execute("CREATE MATERIALIZED VIEW named AS SELECT max(id), count(*) FROM pg_values")
    assert await rows(db, "SELECT count, max FROM named") == [(2, 2)]


async def test_rows_are_changed_by_what_spark_computes(spark_house: SparkHouse) -> None:
    dsn = spark_house.dsn
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as db:
        await changed_rows(db)
        await merged(db)
        await read_in_a_transaction(db)
        await read_at_earlier_times(db)
        await values_and_names(db)
        await told_of_faults(db)
    if PSQL is not None:
        command = [PSQL, "-X", "-A", "-t", dsn, "-c", "SHOW TABLES", "-c", "\\d stock"]
        done = await anyio.run_process(command, stderr=subprocess.STDOUT)
        assert b"stock" in done.stdout
        assert b"item|text||not null|" in done.stdout
