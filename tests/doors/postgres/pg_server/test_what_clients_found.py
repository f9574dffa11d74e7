"""What real clients have found: each was refused, or answered wrongly, once."""

from __future__ import annotations

from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from pg_house import connected, dsn_of, pg_service  # type: ignore[import-not-found]


async def test_a_cursor_is_described_by_its_name(tmp_path: Path) -> None:
    """psycopg asks for the columns of a cursor that it has declared as of a portal."""
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY)")
        await db.execute("INSERT INTO orders VALUES (1), (2), (3)")
        async with db.transaction(), db.cursor("some") as cursor:
            await cursor.execute("SELECT id FROM orders ORDER BY id")
            assert [column.name for column in cursor.description or ()] == ["id"]
            assert await cursor.fetchmany(2) == [(1,), (2,)]


async def test_a_present_key_is_told_before_the_savepoint_is_left(tmp_path: Path) -> None:
    """Whoever inserts, and goes back to a savepoint when the key is there, must hear of it."""
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY, word STRING)")
        await db.execute("INSERT INTO orders VALUES (1, 'old'), (2, 'old')")
        async with db.transaction():
            for number in (1, 3, 3):
                with pytest.raises(psycopg.errors.UniqueViolation):
                    async with db.transaction():
                        await db.execute("INSERT INTO orders VALUES (%s, 'new')", (number,))
                        if number == 3:
                            await db.execute("INSERT INTO orders VALUES (3, 'again')")
            async with db.transaction():
                await db.execute("DELETE FROM orders WHERE id = 2")
                await db.execute("INSERT INTO orders VALUES (2, 'new')")
        found = await (await db.execute("SELECT * FROM orders ORDER BY id")).fetchall()
        assert found == [(1, "old"), (2, "new")]


async def test_what_the_protocol_has_prepared_is_deallocated(tmp_path: Path) -> None:
    """psqlODBC prepares by the protocol, and forgets by SQL; then it uses the name again."""
    async with pg_service(tmp_path) as service:
        db = await asyncpg.connect(dsn_of(service))
        held = []  # asyncpg closes those that nobody holds, by their name
        try:
            for text, statement in (("SELECT 1", "DEALLOCATE one"), ("SELECT 2", "DISCARD ALL")):
                held.append(await db.prepare(text, name="one"))
                await db.execute(statement)
            kept = await db.prepare("SELECT 3", name="one")
            assert await kept.fetchval() == 3
        finally:
            await db.close()


async def test_a_cursor_reads_the_catalog(tmp_path: Path) -> None:
    """pandas looks for a table by the same cursor that is to read it."""
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY)")
        async with db.transaction(), db.cursor("some") as cursor:
            text = "SELECT relname FROM pg_catalog.pg_class WHERE relname = %s"
            await cursor.execute(text, ("orders",))
            assert await cursor.fetchall() == [("orders",)]


async def test_vectors_of_numbers_have_blanks_between(tmp_path: Path) -> None:
    """SQLAlchemy reads a column's options in an index so."""
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY, word STRING)")
        await db.execute("CREATE INDEX by_both ON orders (id, word)")
        text = "SELECT indkey, indoption FROM pg_index WHERE indexrelid = 'by_both'::regclass"
        found = await (await db.execute(text)).fetchall()
        assert found == [("1 2", "0 0")]
