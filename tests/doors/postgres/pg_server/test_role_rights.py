"""What roles may do at the door for PostgreSQL's clients."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from pg_house import as_role, connected, dsn_of, pg_service  # type: ignore[import-not-found]

from actors.doors.sql_session.cursors import BATCHES_AHEAD
from actors.service import Service

Connection = psycopg.AsyncConnection[Any]
Denied = psycopg.errors.InsufficientPrivilege


async def rows(db: Connection, text: str) -> Any:
    return await (await db.execute(text)).fetchall()


async def denied(db: Connection, text: str) -> str:
    """What a refusal says."""
    with pytest.raises(Denied) as failed:
        await db.execute(text)
    return str(failed.value)


@asynccontextmanager
async def roles_world(
    tmp_path: Path, **changed: Any
) -> AsyncIterator[tuple[Service, Connection, Connection]]:
    """A service with an administrator and an application, and a connection of each."""
    async with pg_service(tmp_path, **changed) as service:
        async with await connected(service) as db:
            await db.execute("CREATE ROLE boss LOGIN PASSWORD 'b'")
        async with await as_role(service, "boss", "b") as boss:
            await boss.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY, customer STRING)")
            await boss.execute("INSERT INTO orders VALUES (1, 'ann'), (2, 'bob')")
            await boss.execute("CREATE TABLE customer (name STRING)")
            await boss.execute("CREATE USER app PASSWORD 'a'")
            async with await as_role(service, "app", "a") as app:
                yield service, boss, app


async def test_an_error_that_may_quote_rows_is_for_those_who_may_read_them(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        await boss.execute(
            "CREATE MATERIALIZED VIEW numbers AS SELECT CAST(customer AS INT) AS n FROM orders"
        )
        listed = "SELECT * FROM penstock.errors"
        while not (found := await rows(boss, listed)):
            await anyio.sleep(0.02)
        assert "ann" in str(found) or "bob" in str(found)
        asked = (listed, "DESCRIBE EXTENDED numbers", "SELECT * FROM penstock.dataflows")
        seen = [str(await rows(app, each)) for each in asked]
        assert [each for each in seen if "ann" in each or "bob" in each] == []
        assert all("GRANT READ ON numbers" in each for each in seen[:2])
        await boss.execute("GRANT READ ON numbers TO app")
        assert await rows(app, listed) == found


async def test_to_write_after_a_savepoint_needs_no_right_to_read(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        await boss.execute("GRANT WRITE ON orders TO app")
        await app.execute("BEGIN")
        await app.execute("SAVEPOINT s")
        await app.execute("INSERT INTO orders VALUES (3, 'cyd')")
        await app.execute("COMMIT")
        assert await rows(boss, "SELECT customer FROM orders WHERE id = 3") == [("cyd",)]


async def test_a_cursor_that_is_closed_while_a_row_waits_ends_nothing_else(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (service, boss, _):
        async with await as_role(service, "boss", "b") as other:
            await other.execute("DECLARE c CURSOR WITH HOLD FOR SUBSCRIBE orders WITH (PROGRESS)")
            # More than are read ahead: one waits until it is fetched.
            for number in range(10, 10 + 4 * BATCHES_AHEAD):
                await boss.execute(f"INSERT INTO orders VALUES ({number}, 'x')")
            await other.execute("CLOSE c")
            assert await rows(other, "SELECT 1") == [(1,)]
        assert await rows(boss, "SELECT customer FROM orders WHERE id = 1") == [("ann",)]


async def test_reading_needs_read_on_each_object(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        for text in (
            "SELECT * FROM orders",
            "SELECT count(*) FROM orders",
            "SELECT * FROM orders o JOIN customer c ON o.customer = c.name",
            "SUBSCRIBE orders",
            "COPY orders TO STDOUT",
            "DECLARE c CURSOR WITH HOLD FOR SELECT * FROM orders",
        ):
            assert "GRANT READ ON orders TO app" in await denied(app, text)
        await boss.execute("GRANT SELECT ON orders TO app")
        # A column may have the name of a table that the role may not read.
        assert await rows(app, "SELECT customer FROM orders WHERE id = 1") == [("ann",)]
        assert await rows(app, "SELECT count(customer) AS n FROM orders") == [(2,)]
        assert "GRANT READ ON customer TO app" in await denied(
            app, "SELECT o.id FROM orders o JOIN customer c ON o.customer = c.name"
        )
        await boss.execute("REVOKE read ON orders FROM app")
        assert "may not read orders" in await denied(app, "SELECT * FROM orders")
        # The catalog stays readable.
        assert ("orders",) in await rows(app, "SELECT relname FROM pg_class WHERE relkind = 'r'")
        assert await rows(app, "SELECT name FROM penstock.objects WHERE name = 'orders'")


async def test_writing_needs_write(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (service, boss, app):
        assert "GRANT WRITE ON orders TO app" in await denied(
            app, "INSERT INTO orders VALUES (3, 'x')"
        )
        with pytest.raises(Denied):
            async with app.cursor().copy("COPY orders FROM STDIN") as copy:
                await copy.write_row((3, "x"))
        # In a transaction the statement fails, and not only COMMIT.
        with pytest.raises(Denied):
            async with app.transaction():
                await app.execute("INSERT INTO orders VALUES (3, 'x')")
        await boss.execute("GRANT INSERT ON orders TO app")
        await app.execute("INSERT INTO orders VALUES (3, 'x')")
        # Rows that are changed are read before.
        assert "GRANT READ ON orders" in await denied(app, "DELETE FROM orders WHERE id = 3")
        await boss.execute("GRANT SELECT ON orders TO app")
        await app.execute("UPDATE orders SET customer = 'y' WHERE id = 3")
        async with app.transaction():
            await app.execute("DELETE FROM orders WHERE id = 3")
        assert len(await rows(app, "SELECT * FROM orders")) == 2
        db = await asyncpg.connect(dsn_of(service, "app"), password="a")
        try:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await db.execute("INSERT INTO customer VALUES ($1)", "x")
            assert await db.fetchval("SELECT customer FROM orders WHERE id = $1", 2) == "bob"
        finally:
            await db.close()


async def test_objects_are_made_changed_and_dropped_by_those_who_may(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        view = "CREATE MATERIALIZED VIEW n AS SELECT customer, count(*) AS n FROM orders GROUP BY 1"
        for text in ("CREATE TABLE t (a int)", view, "CREATE INDEX i ON orders (customer)"):
            assert "GRANT CREATE TO app" in await denied(app, text)
        await boss.execute("GRANT create TO app")
        await app.execute("CREATE TABLE own (a int)")
        assert "GRANT READ ON orders" in await denied(app, view)
        assert "GRANT READ ON orders" in await denied(app, "CREATE INDEX i ON orders (customer)")
        assert "neither owns nor administers orders" in await denied(app, "DROP TABLE orders")
        await boss.execute("GRANT read ON orders TO app")
        await app.execute(view)
        # The owner of an object may do everything with it, and share it.
        await app.execute("INSERT INTO own VALUES (1)")
        await boss.execute("CREATE USER guest PASSWORD 'g'")
        await app.execute("GRANT read ON n TO guest")
        assert "is not an administrator" in await denied(app, "GRANT read TO guest")
        await app.execute("DROP MATERIALIZED VIEW n")
        await app.execute("DROP TABLE own")


async def test_the_right_on_a_view_is_enough(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        await boss.execute(
            "CREATE MATERIALIZED VIEW n AS "
            "SELECT customer, count(*) AS n FROM orders GROUP BY customer"
        )
        await boss.execute("GRANT read ON MATERIALIZED VIEW n TO app")
        assert await rows(app, "SELECT n FROM n WHERE customer = 'ann'") == [(1,)]
        assert "may not read orders" in await denied(app, "SELECT * FROM orders")


async def test_rights_go_with_their_object(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        await boss.execute("GRANT ALL ON customer TO app")
        await app.execute("INSERT INTO customer VALUES ('x')")
        await boss.execute("DROP TABLE customer")
        await boss.execute("CREATE TABLE customer (name STRING)")
        assert "may not read customer" in await denied(app, "SELECT * FROM customer")
        assert await rows(boss, "SHOW GRANTS FOR app") == []


async def test_roles_are_for_administrators(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (service, boss, app):
        for text in (
            "CREATE ROLE r",
            "DROP ROLE boss",
            "ALTER ROLE boss NOLOGIN",
            "GRANT ADMIN TO app",
            "REVOKE ADMIN FROM boss",
            "CREATE TOKEN FOR boss",
        ):
            assert "is not an administrator" in await denied(app, text)
        assert "proved" not in await denied(app, "GRANT read ON orders TO app")
        await boss.execute("GRANT ADMIN TO app")
        await app.execute("CREATE ROLE r")
        await app.execute("REVOKE ADMIN FROM boss")
        await denied(boss, "DROP ROLE r")
        # A session of a role that is dropped is over.
        await app.execute("DROP ROLE boss, r")
        with pytest.raises(psycopg.OperationalError):
            await boss.execute("SELECT name FROM penstock.objects")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await as_role(service, "boss", "b")


async def test_roles_and_grants_are_shown(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        await boss.execute("CREATE ROLE readers")
        await boss.execute("GRANT read, write ON orders TO app, readers")
        await boss.execute("GRANT create TO app")
        await boss.execute("GRANT read ON ALL TABLES TO readers")
        assert "GRANT CONNECT TO app" in await denied(app, "CREATE TOKEN FOR app")
        notices: list[str | None] = []
        boss.add_notice_handler(lambda told: notices.append(told.message_primary))
        await boss.execute("CREATE TOKEN FOR app")
        assert notices == ["role app now has CONNECT, which it needs to use its token"]
        await boss.execute("GRANT EXECUTE CODE TO app, readers")
        made = await rows(app, "CREATE TOKEN FOR app")
        assert made[0][0] == "app"
        assert len(made[0][1]) == 64
        assert await rows(app, "SHOW ROLES") == [
            ("app", True, True, 2, "connect, create, execute code"),
            ("boss", True, True, 0, "admin"),
            ("readers", False, False, 0, "execute code"),
        ]
        assert await rows(app, "SHOW GRANTS ON orders FOR app") == [
            ("app", "connect", "*", ""),
            ("app", "create", "*", ""),
            ("app", "execute code", "*", ""),
            ("app", "read", "orders", "table"),
            ("app", "write", "orders", "table"),
        ]
        assert ("readers", "read", "customer", "table") in await rows(app, "SHOW GRANTS")
        assert ("boss", "own", "orders", "table") in await rows(app, "SHOW GRANTS ON orders")
        with pytest.raises(psycopg.errors.UndefinedTable, match="role 'x' does not exist"):
            await app.execute("SHOW GRANTS FOR x")
        await app.execute("DROP TOKENS FOR app")
        found = await rows(app, "SELECT rolname, rolsuper, rolcanlogin FROM pg_roles")
        assert {("app", False, True), ("boss", True, True), ("readers", False, False)} <= set(found)


async def test_statements_that_are_there_or_not(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, _app):
        done = await boss.execute("CREATE ROLE IF NOT EXISTS app")
        assert done.statusmessage == "CREATE ROLE"
        with pytest.raises(psycopg.errors.DuplicateTable):
            await boss.execute("CREATE ROLE app")
        await boss.execute("DROP ROLE IF EXISTS nobody, app")
        with pytest.raises(psycopg.errors.UndefinedTable):
            await boss.execute("DROP ROLE app")
        with pytest.raises(psycopg.Error, match="CREATE is a right on the whole service"):
            await boss.execute("GRANT create ON orders TO boss")
        with pytest.raises(psycopg.Error, match="schema x does not exist"):
            await boss.execute("GRANT read ON SCHEMA x TO boss")
        await boss.execute("GRANT read ON SCHEMA public TO boss")


async def test_who_is_asking_cannot_be_set(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, _boss, app):
        with pytest.raises(psycopg.Error, match="cannot be changed"):
            await app.execute("SET is_superuser = on")
        for text in ("SET session_authorization = 'boss'", "SET ROLE boss"):
            assert "permission denied to set" in await denied(app, text)
        await app.execute("RESET ALL")
        assert await rows(app, "SELECT current_user") == [("app",)]


async def test_each_statement_is_a_line_of_the_audit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with roles_world(tmp_path, audit_statements=True) as (service, _, app):
        await denied(app, "SELECT * FROM orders\n-- a new line")
        db = await asyncpg.connect(dsn_of(service, "app"), password="a")
        try:
            await db.fetchval("SELECT relname FROM pg_class LIMIT 1")
            # Refused when its columns are asked for, before it is executed.
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await db.fetch("SELECT id FROM orders")
            assert await db.fetchval("SELECT 1 AS one") == 1
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await db.execute("INSERT INTO orders VALUES ($1, $2)", 7, "private")
        finally:
            await db.close()
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "penstock.audit"]
    of_app = [line for line in lines if line["role"] == "app"]
    first = next(line for line in of_app if line["kind"] == "Query")
    assert first["objects"] == ["orders"]
    assert first["outcome"] == "AccessDenied"
    assert first["text"] == "SELECT * FROM orders\n-- a new line"
    assert first["peer"].startswith("127.0.0.1:")
    assert first["ms"] >= 0
    texts = [line["text"] for line in of_app]
    assert texts.count("SELECT id FROM orders") == 1
    assert texts.count("SELECT 1 AS one") == 1
    kinds = [line["kind"] for line in of_app]
    assert kinds.count("Login") == 2
    assert "Catalog" in kinds
    insert = next(line for line in of_app if line["kind"] == "Insert")
    assert (insert["objects"], insert["outcome"]) == (["orders"], "AccessDenied")
    assert "private" not in caplog.text


async def test_without_the_setting_nothing_is_audited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with roles_world(tmp_path):
        pass
    assert [r for r in caplog.records if r.name == "penstock.audit"] == []


@pytest.mark.long
@pytest.mark.spark
async def test_spark_reads_no_more_than_the_role_may(tmp_path: Path) -> None:
    """Names that a text computes, hides or quotes; a view's inputs; code of the JVM."""
    given = {"on_spark": True, "spark_master": "local[2]"}
    async with roles_world(tmp_path, **given) as (_, boss, app):
        await boss.execute("GRANT read ON customer TO app")
        await boss.execute("GRANT create TO app")
        for text in (
            "SELECT count(*) + 1 FROM orders",
            'SELECT name FROM customer WHERE name IN (SELECT customer FROM "orders")',
            "WITH o AS (SELECT * FROM orders) SELECT max(id) FROM o",
            "CREATE MATERIALIZED VIEW v AS SELECT max(id) AS m FROM orders",
            "CREATE TABLE made AS SELECT * FROM orders ORDER BY id + 1",
            "INSERT INTO customer SELECT customer FROM orders",
            "SELECT * FROM IDENTIFIER('or' || 'ders')",
            "CREATE MATERIALIZED VIEW v AS SELECT max(id) AS m FROM IDENTIFIER('or' || 'ders')",
        ):
            assert "may not read orders" in await denied(app, text), text
        call = "('java.lang.System', 'getProperty', 'user.dir')"
        for text in (
            f"SELECT reflect{call}",
            f"SELECT IDENTIFIER('ref' || 'lect'){call}",
            f"EXPLAIN CREATE MATERIALIZED VIEW v AS SELECT reflect{call} AS m",
            f"CREATE MATERIALIZED VIEW v AS SELECT reflect{call} AS m",
            f"CREATE VIEW v AS SELECT reflect{call} AS m",
            f"SUBSCRIBE (SELECT reflect{call} AS m)",
        ):
            assert "only administrators" in await denied(app, text), text
        # A table expression of that name is another thing than the table.
        text = (
            "WITH orders AS (SELECT name AS orders FROM customer) SELECT count(orders) FROM orders"
        )
        assert await rows(app, text) == [(0,)]
        await app.execute("CREATE MATERIALIZED VIEW v AS SELECT count(*) AS orders FROM customer")
        assert await rows(app, "SELECT orders + 0 FROM v") == [(0,)]


async def test_rights_stay_with_a_view_that_is_replaced(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        view = "MATERIALIZED VIEW named AS SELECT customer, count(*) AS n FROM orders GROUP BY"
        await boss.execute(f"CREATE {view} customer")
        await boss.execute("GRANT READ ON named TO app")
        assert sorted(await rows(app, "SELECT * FROM named")) == [("ann", 1), ("bob", 1)]
        # With other columns it gets another shard, and is the same object.
        other = "CREATE OR REPLACE MATERIALIZED VIEW named AS SELECT id FROM orders"
        assert "neither owns nor administers named" in await denied(app, other)
        await boss.execute(other)
        assert sorted(await rows(app, "SELECT * FROM named")) == [(1,), (2,)]
        assert "named" in await denied(app, "DROP MATERIALIZED VIEW named")


async def test_who_may_read_may_follow_a_query(tmp_path: Path) -> None:
    async with roles_world(tmp_path) as (_, boss, app):
        count = "COPY (SUBSCRIBE (SELECT customer, count(*) AS n FROM orders GROUP BY customer) {}"
        assert "GRANT READ ON orders TO app" in await denied(app, f"{count.format('')}) TO STDOUT")
        await boss.execute("GRANT READ ON orders TO app")
        async with app.transaction():
            await app.execute(
                "DECLARE c CURSOR FOR SUBSCRIBE "
                "(SELECT customer, count(*) AS n FROM orders GROUP BY customer)"
            )
            found: list[Any] = []
            while len(found) < 2:
                found += await rows(app, "FETCH 10 c")
        assert sorted(row[2:] for row in found) == [("ann", 1), ("bob", 1)]
        # It is the subscribe's own, and no object that the role has made.
        assert "may not create objects" in await denied(app, "CREATE TABLE mine (a INT)")
