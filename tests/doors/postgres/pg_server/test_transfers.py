"""Transactions that read and change rows by their keys, again and again."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import psycopg
import pytest
from pg_house import connected, pg_service, pg_table  # type: ignore[import-not-found]


async def test_a_transfer_needs_no_engine(tmp_path: Path) -> None:
    """Each account is read by its key, also again in the transaction that has changed it."""
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE TABLE accounts (id INT PRIMARY KEY, balance DECIMAL(10,2), n INT)")
        await db.execute("INSERT INTO accounts VALUES (1, 10.00, 0), (2, 20.00, 0)")
        before = [each.doing for each in service.actors() if each.path == "/engine"]
        change = "UPDATE accounts AS a SET balance = a.balance + %s, n = n + 1 WHERE id = %s"
        read = "SELECT n, balance FROM accounts WHERE id = %s"
        for _ in range(2):
            async with db.transaction():
                for amount, account in ((Decimal("-1.50"), 1), (Decimal("1.50"), 2)):
                    await db.execute(change, (amount, account))
                    await db.execute("UPDATE accounts SET n = n + 1 WHERE id = %s", (account,))
                seen = [await (await db.execute(read, (n,))).fetchone() for n in (1, 2, 3)]
                await db.execute("INSERT INTO accounts VALUES (3, 0, 0)")
                assert await (await db.execute(read, (3,))).fetchone() == (0, Decimal("0.00"))
                await db.execute("DELETE FROM accounts WHERE id = 3")
                assert await (await db.execute(read, (3,))).fetchone() is None
        assert seen == [(4, Decimal("7.00")), (4, Decimal("23.00")), None]
        # A condition beside the key is asked of the row as it is now.
        async with db.transaction():
            await db.execute("UPDATE accounts SET n = n + 10 WHERE id = 1 AND n = 4")
            await db.execute("UPDATE accounts SET n = n + 10 WHERE id = 1 AND n = 4")
        assert await (await db.execute(read, (1,))).fetchone() == (14, Decimal("7.00"))
        after = [each.doing for each in service.actors() if each.path == "/engine"]
        assert before == after
        with pytest.raises(psycopg.errors.Error):
            await db.execute("UPDATE accounts SET n = n + 2147483647 WHERE id = 1")
        assert await (await db.execute(read, (1,))).fetchone() == (14, Decimal("7.00"))


async def test_a_header_that_must_match_is_checked(tmp_path: Path) -> None:
    async with pg_table(tmp_path, "CREATE TABLE named (a BIGINT, b STRING)") as (_, db):
        into = "COPY named FROM STDIN (FORMAT csv, HEADER MATCH)"
        with pytest.raises(psycopg.errors.BadCopyFileFormat, match='got "b", expected "a"'):
            async with db.cursor().copy(into) as copy:
                await copy.write(b"b,a\n1,x\n")
        async with db.cursor().copy(into) as copy:
            await copy.write(b"a,b\n1,x\n\\.\n")
        cursor = await db.execute("SELECT * FROM named")
        assert await cursor.fetchall() == [(1, "x")]
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="HEADER MATCH"):
            async with db.cursor().copy("COPY named TO STDOUT (FORMAT csv, HEADER MATCH)") as copy:
                await copy.read()
        for options in ("DELIMITER 'a'", "DELIMITER '\\'", "FORMAT csv, QUOTE 'x', NULL 'xy'"):
            with pytest.raises(psycopg.errors.InvalidParameterValue, match="COPY"):
                async with db.cursor().copy(f"COPY named FROM STDIN ({options})") as copy:
                    await copy.write(b"1\tx\n")
