"""What runs for ever in Spark for a view or a query ends with it, and keeps no other from its rows.

The service runs two jobs at a time, on two cores: each of these tests would wait for ever if one of
them did not end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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
