"""SQLSTATEs of what a client does wrong, beside a real PostgreSQL's."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
from pg_house import connected, dsn_of, pg_service  # type: ignore[import-not-found]

from actors.testing.postgres_server import PostgresServer

TABLE = (
    "CREATE TABLE r (id int PRIMARY KEY, s text NOT NULL, n numeric(4,2), b bytea, v varchar(2))"
)
INSERT = "INSERT INTO r"
STATEMENTS = (
    *(f"{INSERT} (id, s) VALUES (1, NULL)", f"{INSERT} (id, s) VALUES ('x', 'a')"),
    *(f"{INSERT} (id, s, n) VALUES (1, 'a', 12345)", f"{INSERT} (id, s) VALUES (3000000000, 'a')"),
    *(f"{INSERT} (id, s, b) VALUES (1, 'a', '\\xabc')", f"{INSERT} (id) VALUES (1)"),
    *(f"{INSERT} (id, s, v) VALUES (1, 'a', 'abc')", f"{INSERT} (id, s) VALUES (1, 'a')"),
    *(f"{INSERT} (id, s) VALUES (1, 'b')", "UPDATE r SET s = NULL", "UPDATE r SET v = 'abc'"),
    *("EXECUTE none", "DEALLOCATE none", "PREPARE p AS SELECT * FROM r", "PREPARE p AS TABLE r"),
    *("FETCH 1 FROM none", "SAVEPOINT a", "COMMIT", "ROLLBACK", "BEGIN", "BEGIN"),
    *("FETCH 1 FROM none", "ROLLBACK", "BEGIN", "ROLLBACK TO none", "ROLLBACK", "BEGIN"),
    *("DECLARE c CURSOR FOR SELECT * FROM r", "DECLARE c CURSOR FOR SELECT id FROM r", "COMMIT"),
    *("BEGIN READ ONLY", f"{INSERT} (id, s) VALUES (5, 'a')", "ROLLBACK", "SHOW none"),
    *("SELECT 'x'::uuid", "SELECT '{'::json", "SELECT '\\xa'::bytea", "SELECT '{1,x}'::int[]"),
)


async def states_of(dsn: str) -> list[tuple[str, Any]]:
    """The state of each statement's error, or of its warning."""
    found: list[tuple[str, Any]] = []
    warned: list[tuple[str | None, str | None]] = []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as db:
        db.add_notice_handler(lambda notice: warned.append((notice.severity, notice.sqlstate)))
        for text in (TABLE, *STATEMENTS):
            warned.clear()
            try:
                await db.execute(text.encode())
                found.append((text, list(warned)))
            except psycopg.Error as error:
                found.append((text, error.sqlstate))
        # The server is for other tests, too.
        await db.execute("DROP TABLE r")
    return found


async def test_errors_have_postgresqls_states(tmp_path: Path, postgres: PostgresServer) -> None:
    wanted = await states_of(postgres.conninfo())
    async with pg_service(tmp_path) as service:
        found = await states_of(dsn_of(service))
    assert len(found) == len(wanted) == len(STATEMENTS) + 1
    assert [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]] == []


async def test_parameters_beside_the_catalog_are_of_any_type(tmp_path: Path) -> None:
    """A moment, a day, a decimal and bytes beside a function of the catalog are values, and no
    fault."""

    moment = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    moments = (moment, moment.replace(tzinfo=None), dt.date(2020, 1, 1))
    values = (*moments, Decimal("1.50"), "x", 5, True, None)
    async with pg_service(tmp_path) as service, await connected(service) as db:
        for value in values:
            text = "SELECT pg_typeof(%s) IS NULL, pg_backend_pid() > 0"
            assert await (await db.execute(text, (value,))).fetchone() == (False, True)
