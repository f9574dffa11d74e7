"""The door for PostgreSQL's clients, as asyncpg finds it: all values are in binary."""

from __future__ import annotations

import asyncio
import datetime as dt
from decimal import Decimal
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest
from pg_house import dsn_of, pg_service  # type: ignore[import-not-found]

TABLE = "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer TEXT, amount NUMERIC(12,2))"


async def test_statements_are_prepared_with_the_types_of_columns(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        db = await asyncpg.connect(dsn_of(service))
        try:
            assert await db.execute(TABLE) == "CREATE TABLE"
            text = "INSERT INTO orders VALUES ($1, $2, $3)"
            assert await db.execute(text, 1, "ann", Decimal("5.50")) == "INSERT 0 1"
            await db.executemany(text, [(n, f"c{n}", None) for n in range(2, 30)])
            kept = await db.prepare("SELECT customer, amount FROM orders WHERE id = $1")
            assert [each.name for each in kept.get_parameters()] == ["int8"]
            assert [each.name for each in kept.get_attributes()] == ["customer", "amount"]
            assert await kept.fetchrow(1) == ("ann", Decimal("5.50"))
            assert await kept.fetchval(7) == "c7"
            assert await db.fetchval("SELECT count(*) FROM orders") == 29
        finally:
            await db.close()


async def test_rows_come_a_few_at_a_time(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        db = await asyncpg.connect(dsn_of(service))
        try:
            await db.execute(TABLE)
            records = [(n, f"c{n}", Decimal(n)) for n in range(500)]
            await db.copy_records_to_table("orders", records=records)
            async with db.transaction():
                found = [row["id"] async for row in db.cursor("SELECT * FROM orders", prefetch=64)]
            assert sorted(found) == list(range(500))
        finally:
            await db.close()


@pytest.mark.spark
@pytest.mark.long
async def test_transactions_of_two_accounts_keep_their_sum(tmp_path: Path) -> None:
    """Money moves between accounts by sessions that meet; the view has one total at every time."""
    accounts, each, rounds = 4, 100, 3
    async with pg_service(tmp_path, on_spark=True, spark_master="local[2]") as service:
        pool = await asyncpg.create_pool(dsn_of(service), min_size=5, max_size=5)
        try:
            await pool.execute("CREATE TABLE accounts (id int PRIMARY KEY, balance bigint)")
            await pool.execute(
                "CREATE MATERIALIZED VIEW total AS SELECT sum(balance) AS s FROM accounts"
            )
            await pool.executemany(
                "INSERT INTO accounts VALUES ($1, $2)", [(n, each) for n in range(accounts)]
            )
            done = asyncio.Event()
            conflicts = 0

            async def transfer(start: int) -> None:
                nonlocal conflicts
                for number in range(rounds):
                    giver, taker = (start + number) % accounts, (start * 3 + 1) % accounts
                    if giver == taker:
                        continue
                    while True:
                        try:
                            async with pool.acquire() as db, db.transaction():
                                text = "SELECT balance FROM accounts WHERE id = $1"
                                has, gets = (
                                    await db.fetchval(text, giver),
                                    await db.fetchval(text, taker),
                                )
                                change = "UPDATE accounts SET balance = $2 WHERE id = $1"
                                await db.execute(change, giver, has - 1)
                                await db.execute(change, taker, gets + 1)
                            break
                        except asyncpg.SerializationError:
                            conflicts += 1

            async def watch() -> int:
                looked = 0
                while not done.is_set():
                    found = await pool.fetchval("SELECT s FROM total")
                    assert found == accounts * each
                    looked += 1
                return looked

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(transfer(number) for number in range(4)))
            done.set()
            assert await watching > 0
            assert conflicts > 0, "the sessions never met: the test shows nothing"
            assert await pool.fetchval("SELECT sum(balance) FROM accounts") == accounts * each
        finally:
            await pool.close()


async def test_values_of_every_type_come_back(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 27, 12, 0, 1, 42, tzinfo=dt.UTC)
    values = (True, 3, 2.5, "ü", b"\x01", dt.date(1999, 12, 31), moment, [1, None, 3])
    async with pg_service(tmp_path) as service:
        db = await asyncpg.connect(dsn_of(service))
        try:
            await db.execute(
                "CREATE TABLE kinds (a boolean, b smallint, c float8, d text, e bytea, f date, "
                "g timestamptz, h int[])"
            )
            text = "INSERT INTO kinds VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
            await db.execute(text, *values)
            assert tuple(await db.fetchrow("SELECT * FROM kinds")) == values
            with pytest.raises(asyncpg.DataError):
                await db.execute(text, *("x", *values[1:]))
        finally:
            await db.close()
