"""The door for PostgreSQL's clients, as psycopg finds it."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from pg_house import connected, pg_service, pg_table  # type: ignore[import-not-found]
from psycopg import sql as composed

TABLE = "CREATE TABLE orders (id BIGINT, customer STRING, amount DECIMAL(12,2), PRIMARY KEY (id))"


async def rows(connection: psycopg.AsyncConnection[Any], text: Any, given: Any = None) -> Any:
    return await (await connection.execute(text, given)).fetchall()


async def test_a_table_is_made_written_and_read(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        made = await db.execute(TABLE)
        assert made.statusmessage == "CREATE TABLE"
        done = await db.execute("INSERT INTO orders VALUES (1, 'ann', 5.50), (2, 'it''s', NULL)")
        assert done.statusmessage == "INSERT 0 2"
        found = await rows(db, "SELECT * FROM orders ORDER BY id")
        assert found == [(1, "ann", Decimal("5.50")), (2, "it's", None)]
        found = await rows(db, "SELECT customer FROM orders WHERE id = %s", (2,))
        assert found == [("it's",)]


async def test_parameters_take_the_types_of_their_columns(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 27, 12, 30, 1, 500, tzinfo=dt.UTC)
    values = (7, True, 1.5, "x", b"\x00\xff", dt.date(2026, 1, 2), moment, Decimal("1.25"))
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute(
            "CREATE TABLE kinds (a int, b boolean, c double, d string, e binary, f date, "
            "g timestamptz, h decimal(10,2))"
        )
        marks = ", ".join(["%s"] * 8)
        await db.execute(f"INSERT INTO kinds VALUES ({marks})", values)
        await db.execute(
            f"INSERT INTO kinds VALUES ({marks})",
            ("8", "f", "2.5", "y", None, "2026-01-03", "2026-11-27 12:30:01+00", "2"),
        )
        found = await rows(db, "SELECT * FROM kinds ORDER BY a")
        assert found[0] == values
        assert found[1][:4] == (8, False, 2.5, "y")
        assert found[1][5] == dt.date(2026, 1, 3)
        binary = await db.cursor(binary=True).execute("SELECT * FROM kinds ORDER BY a")
        assert (await binary.fetchall())[0] == values


async def test_a_view_is_fresh_for_whoever_has_written(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute(
            "CREATE MATERIALIZED VIEW spent REFRESH POLICY INCREMENTAL AS "
            "SELECT customer, count(*) AS n FROM orders GROUP BY customer"
        )
        for number in range(5):
            await db.execute("INSERT INTO orders VALUES (%s, 'ann', 1)", (number,))
            assert await rows(db, "SELECT n FROM spent WHERE customer = 'ann'") == [(number + 1,)]


async def test_rows_are_changed(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 2), (3, 'c', 3)")
        done = await db.execute("UPDATE orders SET customer = 'z' WHERE id >= 2")
        assert done.statusmessage == "UPDATE 2"
        done = await db.execute("DELETE FROM orders WHERE id = 1")
        assert done.statusmessage == "DELETE 1"
        found = await rows(db, "SELECT id, customer FROM orders ORDER BY id")
        assert found == [(2, "z"), (3, "z")]
        done = await db.execute("UPDATE orders SET customer = 'q' WHERE id = 9")
        assert done.statusmessage == "UPDATE 0"


async def test_a_transaction_is_written_at_one_time_or_not_at_all(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (service, db):
        async with db.transaction():
            await db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
            await db.execute("INSERT INTO orders VALUES (2, 'b', 1)")
            async with await connected(service) as other:
                assert await rows(other, "SELECT * FROM orders") == []
        assert len(await rows(db, "SELECT * FROM orders")) == 2
        with pytest.raises(RuntimeError):
            async with db.transaction():
                await db.execute("DELETE FROM orders WHERE id = 1")
                raise RuntimeError
        assert len(await rows(db, "SELECT * FROM orders")) == 2


async def test_the_slower_of_two_transactions_fails(tmp_path: Path) -> None:
    async with (
        pg_service(tmp_path) as service,
        await connected(service) as one,
        await connected(service) as two,
    ):
        await one.execute(TABLE)
        await one.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        await two.execute("BEGIN")
        await two.execute("UPDATE orders SET customer = 'two' WHERE id = 1")
        await one.execute("UPDATE orders SET customer = 'one' WHERE id = 1")
        with pytest.raises(psycopg.errors.SerializationFailure):
            await two.execute("COMMIT")
        assert await rows(one, "SELECT customer FROM orders") == [("one",)]


async def test_errors_have_their_sqlstate_and_leave_the_session(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        with pytest.raises(psycopg.errors.UniqueViolation):
            await db.execute("INSERT INTO orders VALUES (1, 'b', 2)")
        with pytest.raises(psycopg.errors.UndefinedTable):
            await db.execute("SELECT * FROM nowhere")
        with pytest.raises(psycopg.errors.SyntaxError) as caught:
            await db.execute("CREATE TABLE x (a int,)")
        assert caught.value.diag.statement_position == "23"
        with pytest.raises(psycopg.errors.DuplicateTable):
            await db.execute(TABLE)
        assert (await db.execute(TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))).statusmessage
        assert await rows(db, "SELECT id FROM orders") == [(1,)]


async def test_a_failed_transaction_takes_nothing_but_its_end(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("BEGIN")
        with pytest.raises(psycopg.errors.UndefinedTable):
            await db.execute("SELECT * FROM nowhere")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            await db.execute("SELECT * FROM orders")
        await db.execute("ROLLBACK")
        assert await rows(db, "SELECT * FROM orders") == []


async def test_rows_are_copied_in_and_out(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        async with db.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
            for number in range(1_000):
                await copy.write_row((number, f"c\t{number}", None))
        assert (await rows(db, "SELECT customer FROM orders WHERE id = 7")) == [("c\t7",)]
        async with db.cursor() as cursor, cursor.copy("COPY orders TO STDOUT") as copy:
            found = [row async for row in copy.rows()]
        assert len(found) == 1_000
        with pytest.raises(psycopg.errors.InvalidTextRepresentation):
            async with db.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
                await copy.write("x\ty\t1\n")
        assert len(await rows(db, "SELECT id FROM orders")) == 1_000


async def test_a_pipeline_is_one_transaction(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        async with db.cursor() as cursor:
            await cursor.executemany(
                "INSERT INTO orders VALUES (%s, %s, 1)", [(n, f"c{n}") for n in range(50)]
            )
        assert len(await rows(db, "SELECT id FROM orders")) == 50
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with db.cursor() as cursor:
                await cursor.executemany(
                    "INSERT INTO orders VALUES (%s, 'x', 1)", [(100,), (101,), (1,)]
                )
        assert await rows(db, "SELECT id FROM orders WHERE id >= 100") == []


async def test_a_statement_is_canceled(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (service, db):
        caught: list[BaseException] = []

        async def follow() -> None:
            try:
                async with (
                    db.cursor() as cursor,
                    cursor.copy("COPY (SUBSCRIBE orders) TO STDOUT") as copy,
                ):
                    async for _ in copy:
                        began.set()
            except psycopg.errors.QueryCanceled as error:
                caught.append(error)

        began = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            async with await connected(service) as other:
                await other.execute("INSERT INTO orders VALUES (1, 'a', 1)")
            await began.wait()
            await db.cancel_safe()
        assert caught
        assert await rows(db, "SELECT id FROM orders") == [(1,)]


async def test_changes_are_followed_by_a_cursor(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (service, db):
        await db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        async with db.transaction():
            await db.execute("DECLARE changes CURSOR FOR SUBSCRIBE orders")
            first = await rows(db, "FETCH 10 changes")
            assert [row[1:3] for row in first] == [(1, 1)]
            async with await connected(service) as other:
                await other.execute("UPDATE orders SET customer = 'b' WHERE id = 1")
            second = await rows(db, "FETCH 10 changes")
            assert sorted(row[1:4] for row in second) == [(-1, 1, "a"), (1, 1, "b")]


async def test_names_are_quoted_as_postgresql_does(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute('CREATE TABLE "My Table" ("a b" int)')
        await db.execute('INSERT INTO "public"."My Table" VALUES (1)')
        name = composed.Identifier("public", "My Table")
        found = await rows(db, composed.SQL('SELECT "a b" FROM {}').format(name))
        assert found == [(1,)]


async def test_several_statements_of_one_text_are_one_transaction(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        with pytest.raises(psycopg.errors.UniqueViolation):
            await db.execute(
                "INSERT INTO orders VALUES (1, 'a', 1); INSERT INTO orders VALUES (1, 'b', 1)"
            )
        assert await rows(db, "SELECT * FROM orders") == []


async def test_the_session_has_variables(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        assert db.info.server_version == 150000  # version: our own
        assert db.info.parameter_status("standard_conforming_strings") == "on"
        await db.execute("SET application_name = 'mine'")
        assert db.info.parameter_status("application_name") == "mine"
        assert await rows(db, "SHOW application_name") == [("mine",)]
        with pytest.raises(psycopg.Error):
            await db.execute("SET client_encoding = 'latin1'")


async def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    async with (
        pg_service(tmp_path, pg_connections_max=1) as service,
        await connected(service),
    ):
        with pytest.raises(psycopg.OperationalError, match="pg_connections_max"):
            await connected(service)


async def test_rows_are_merged_by_their_key_without_spark(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        await db.execute("INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 2)")
        merge = """
            MERGE INTO orders AS o
            USING (SELECT * FROM (VALUES (2, 'z'), (3, 'new')) AS v(id, customer)) AS s
            ON o.id = s.id
            WHEN MATCHED THEN UPDATE SET customer = s.customer
            WHEN NOT MATCHED THEN INSERT (id, customer) VALUES (s.id, s.customer)"""
        assert (await db.execute(merge)).statusmessage == "MERGE 2"
        async with db.transaction():
            await db.execute(merge.replace("'z'", "'y'").replace("3, 'new'", "4, 'new'"))
        found = await rows(db, "SELECT id, customer, amount FROM orders ORDER BY id")
        two = (2, "y", Decimal("2.00"))
        assert found == [(1, "a", Decimal("1.00")), two, (3, "new", None), (4, "new", None)]


async def test_a_session_is_told_when_it_has_written(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        assert await rows(db, "SHOW penstock.written_at") == [("",)]
        times = []
        for number in range(2):
            async with db.transaction():
                await db.execute("INSERT INTO orders VALUES (%s, 'a', 1)", (number,))
            ((time,),) = await rows(db, "SHOW penstock.written_at")
            times.append(int(time))
        assert await rows(db, f"SELECT id FROM orders AS OF {times[0]}") == [(0,)]
        with pytest.raises(psycopg.Error, match="cannot be changed"):
            await db.execute("SET penstock.written_at = '5'")
        await db.execute("RESET ALL")
        assert await rows(db, "SHOW penstock.written_at") == [(str(times[1]),)]


async def test_a_drop_lists_what_it_takes_along(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        told: list[str] = []
        db.add_notice_handler(lambda each: told.append(each.message_primary or ""))
        await db.execute("CREATE VIEW plain AS SELECT id FROM orders")
        await db.execute("CREATE MATERIALIZED VIEW kept AS SELECT id FROM orders")
        await db.execute("DROP TABLE orders CASCADE")
        assert sorted(told) == [
            "drop cascades to materialized view kept",
            "drop cascades to view plain",
        ]
