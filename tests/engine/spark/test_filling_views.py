"""What runs for ever in Spark for a view or a query ends with it, and keeps no other from its rows.

The service runs two jobs at a time, on two cores: each of these tests would wait for ever if one of
them did not end.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import psycopg
import pytest

from actors.testing.patience import PATIENCE_S
from spark_house import SparkHouse  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.second]

ROWS: Final = 400
ENDLESS: Final = "SELECT max(a.v + b.v + c.v + d.v + e.v) AS m FROM many a " + " ".join(
    f"JOIN many {name} ON a.k = {name}.k" for name in "bcde"
)
"""It makes 400 ** 5 rows of 400."""
SMALL: Final = "SELECT k, max(v * v) AS m FROM many GROUP BY k"
WANTED: Final = [(0, (ROWS - 1) ** 2)]


@asynccontextmanager
async def door(house: SparkHouse) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A session over a table whose rows all have one key, and which is empty of views."""
    async with await psycopg.AsyncConnection.connect(house.dsn, autocommit=True) as db:
        await db.execute("CREATE TABLE IF NOT EXISTS many (k INT, v BIGINT)")
        if await rows(db, "SELECT count(*) FROM many") == [(0,)]:
            await db.execute(f"INSERT INTO many SELECT 0, id FROM range({ROWS})")
        yield db


async def rows(db: psycopg.AsyncConnection[Any], text: str) -> Any:
    return await (await db.execute(text.encode())).fetchall()


async def wait_running(db: psycopg.AsyncConnection[Any], count: int) -> None:
    """Wait until so many jobs have a task that Spark runs."""
    text = "SELECT tasks FROM penstock.spark_jobs WHERE state = 'running'"  # no job itself
    with anyio.fail_after(PATIENCE_S):
        while sum(bool(tasks) for (tasks,) in await rows(db, text)) < count:
            await anyio.sleep(0.05)


async def fill_small_view(db: psycopg.AsyncConnection[Any], name: str) -> None:
    await db.execute(f"CREATE MATERIALIZED VIEW {name} AS {SMALL}".encode())
    assert await rows(db, f"SELECT k, m FROM {name}") == WANTED


async def test_a_view_that_is_dropped_or_replaced_while_it_fills_frees_the_engine(
    spark_house: SparkHouse,
) -> None:
    async with door(spark_house) as db:
        await db.execute(f"CREATE MATERIALIZED VIEW one AS {ENDLESS}".encode())
        await fill_small_view(db, "beside")
        await db.execute(f"CREATE MATERIALIZED VIEW two AS {ENDLESS}".encode())
        await wait_running(db, 2)
        await db.execute("DROP MATERIALIZED VIEW one")
        await db.execute(f"CREATE OR REPLACE MATERIALIZED VIEW two AS {SMALL}".encode())
        assert await rows(db, "SELECT k, m FROM two") == WANTED
        await fill_small_view(db, "behind")


async def cancel(db: psycopg.AsyncConnection[Any], one: psycopg.AsyncConnection[Any]) -> None:
    await one.cancel_safe()


async def cancel_backend(
    db: psycopg.AsyncConnection[Any], one: psycopg.AsyncConnection[Any]
) -> None:
    await rows(db, f"SELECT pg_cancel_backend({one.info.backend_pid})")


async def leave(db: psycopg.AsyncConnection[Any], one: psycopg.AsyncConnection[Any]) -> None:
    one.pgconn.finish()


async def test_a_query_that_is_canceled_or_left_frees_the_engine(spark_house: SparkHouse) -> None:
    async with door(spark_house) as db:
        for end in (cancel, cancel_backend, leave):
            asking = []
            for _ in range(2):
                one = await psycopg.AsyncConnection.connect(spark_house.dsn, autocommit=True)
                one.pgconn.send_query(ENDLESS.encode())
                one.pgconn.flush()
                asking.append(one)
            await wait_running(db, 2)
            for one in asking:
                await end(db, one)
            assert await rows(db, SMALL) == WANTED, end
            for one in asking:
                one.pgconn.finish()


MANY: Final = "(SELECT id, id % 1 AS k FROM range(100000))"
ONE_TASK: Final = (
    "SELECT /*+ BROADCAST(b, c, d) */ max(hash(b.id, c.id, d.id)) FROM range(0, 1, 1, 1) a "
    + " ".join(f"JOIN {MANY} {name} ON {name}.k = a.id" for name in "bcd")
)


def test_an_operation_of_a_spark_client_that_is_interrupted_frees_the_engine(
    spark_house: SparkHouse,
) -> None:
    sessions = [spark_house.session() for _ in range(2)]
    running = [threading.Event() for _ in sessions]

    def ask(number: int) -> None:
        with pytest.raises(Exception, match=r"OPERATION_CANCELED|cancel"):
            sessions[number].sql(ONE_TASK).collect()

    for session, begun in zip(sessions, running, strict=True):

        def told(begun: threading.Event = begun, **progress: Any) -> None:
            if progress["inflight_tasks"]:
                begun.set()

        session.registerProgressHandler(told)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, number) for number in range(2)]
        for session, begun in zip(sessions, running, strict=True):
            assert begun.wait(PATIENCE_S)
            session.interruptAll()
        for each in asked:
            each.result(PATIENCE_S)
    quick = sessions[0].sql("SELECT count(hash(id)) AS n FROM range(0, 10, 1, 4)")
    assert [row.n for row in quick.collect()] == [10]
    for session in sessions:
        session.stop()
