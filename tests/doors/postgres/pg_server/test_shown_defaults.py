"""Defaults of columns as PostgreSQL's clients meet them: COPY, the catalog, two sessions."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from pg_house import connected, pg_service  # type: ignore[import-not-found]


async def test_copy_and_the_catalog_know_defaults(tmp_path: Path) -> None:
    async with (
        pg_service(tmp_path) as service,
        await connected(service) as first,
        await connected(service) as second,
    ):
        await first.execute(
            b"CREATE TABLE t (id BIGINT PRIMARY KEY, state VARCHAR(9) NOT NULL DEFAULT 'it''s',"
            b" n INT DEFAULT 1 + 1, plain TEXT)"
        )
        async with (
            first.cursor() as cursor,
            cursor.copy("COPY t (plain, id) FROM STDIN") as copy,
        ):
            await copy.write(b"a\t1\nb\t2\n")
        rows = await (await first.execute("SELECT * FROM t ORDER BY id")).fetchall()
        assert rows == [(1, "it's", 2, "a"), (2, "it's", 2, "b")]
        # As psql's \d asks.
        shown = await first.execute(
            "SELECT a.attname, (SELECT pg_catalog.pg_get_expr(d.adbin, d.adrelid, true) FROM "
            "pg_catalog.pg_attrdef d WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum AND "
            "a.atthasdef) FROM pg_catalog.pg_attribute a WHERE a.attrelid = 't'::regclass AND "
            "a.attnum > 0 ORDER BY a.attnum"
        )
        told = [("id", None), ("state", "'it\\'s'"), ("n", "1 + 1"), ("plain", None)]
        assert await shown.fetchall() == told
        shown = await second.execute(
            "SELECT column_name, column_default FROM information_schema.columns "
            "WHERE table_name = 't' ORDER BY ordinal_position"
        )
        assert await shown.fetchall() == told
        await second.execute("ALTER TABLE t ALTER COLUMN n SET DEFAULT 7")
        # The first session has not looked since.
        found = await first.execute("INSERT INTO t (id) VALUES (3) RETURNING n, state")
        assert await found.fetchall() == [(7, "it's")]
        async with first.cursor() as cursor, cursor.copy("COPY t (id) FROM STDIN") as copy:
            await second.execute("ALTER TABLE t ALTER COLUMN n DROP DEFAULT")
            await copy.write(b"4\n")
        found = await second.execute("SELECT n FROM t WHERE id = 4")
        assert await found.fetchall() == [(None,)]


async def test_an_error_in_a_default_is_at_its_place(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as client:
        text = "CREATE TABLE t (id INT, s VARCHAR(2) DEFAULT ¦'abc' NOT NULL)"
        with pytest.raises(psycopg.Error, match="longer than varchar") as caught:
            await client.execute(text.replace("¦", "").encode())
        assert caught.value.diag.statement_position == str(text.index("¦") + 1)
