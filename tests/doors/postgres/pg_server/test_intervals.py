"""Intervals of Spark as clients of PostgreSQL's protocol get them."""

from __future__ import annotations

import datetime as dt
import struct
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from pg_house import connected, dsn_of, pg_service  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark
HOUR = 3_600_000_000
VALUES: list[tuple[str, str, tuple[int, int, int]]] = [
    ("INTERVAL '1 02:03:04.5' DAY TO SECOND", "1 day 02:03:04.5", (7_384_500_000, 1, 0)),
    ("INTERVAL '-1 02:03:04.5' DAY TO SECOND", "-1 days -02:03:04.5", (-7_384_500_000, -1, 0)),
    ("INTERVAL '3' DAY", "3 days", (0, 3, 0)),
    ("INTERVAL '1 05' DAY TO HOUR", "1 day 05:00:00", (5 * HOUR, 1, 0)),
    ("INTERVAL '1 05:06' DAY TO MINUTE", "1 day 05:06:00", (18_360_000_000, 1, 0)),
    ("INTERVAL '25' HOUR", "1 day 01:00:00", (HOUR, 1, 0)),
    ("INTERVAL '-01:30' HOUR TO MINUTE", "-01:30:00", (-5_400_000_000, 0, 0)),
    ("INTERVAL '01:30:00.25' HOUR TO SECOND", "01:30:00.25", (5_400_250_000, 0, 0)),
    ("INTERVAL '90' MINUTE", "01:30:00", (5_400_000_000, 0, 0)),
    ("INTERVAL '01:02.000003' MINUTE TO SECOND", "00:01:02.000003", (62_000_003, 0, 0)),
    ("INTERVAL '-0.000001' SECOND", "-00:00:00.000001", (-1, 0, 0)),
    ("INTERVAL '0' SECOND", "00:00:00", (0, 0, 0)),
    ("INTERVAL '1-2' YEAR TO MONTH", "1 year 2 mons", (0, 0, 14)),
    ("INTERVAL '-1-2' YEAR TO MONTH", "-1 years -2 mons", (0, 0, -14)),
    ("INTERVAL '2' YEAR", "2 years", (0, 0, 24)),
    ("INTERVAL '-11' MONTH", "-11 mons", (0, 0, -11)),
    ("CAST(NULL AS INTERVAL YEAR TO MONTH)", "", (0, 0, 0)),
    ("DATE '2026-03-01' - DATE '2026-02-01'", "28 days", (0, 28, 0)),
    ("TIMESTAMP '2026-03-01 12:00' - TIMESTAMP '2026-03-02'", "-12:00:00", (-12 * HOUR, 0, 0)),
]
QUERY = "SELECT " + ", ".join(f"{text} AS c{at}" for at, (text, _, _) in enumerate(VALUES))
SHOWN = [shown or None for _, shown, _ in VALUES]
PARTS = [parts if shown else None for _, shown, parts in VALUES]


async def raw(db: psycopg.AsyncConnection[Any], query: str, *, binary: bool) -> list[Any]:
    """The bytes of the first row's values."""
    cursor = db.cursor(binary=binary)
    await cursor.execute(query)
    result = cursor.pgresult
    assert result is not None
    assert {result.ftype(at) for at in range(result.nfields)} == {1186}
    return [result.get_value(0, at) for at in range(result.nfields)]


@pytest.mark.long
async def test_every_kind_of_interval(tmp_path: Path) -> None:
    async with pg_service(tmp_path, on_spark=True) as service, await connected(service) as db:
        found = await raw(db, QUERY, binary=False)
        assert [None if each is None else each.decode() for each in found] == SHOWN
        found = await raw(db, QUERY, binary=True)
        assert [None if each is None else struct.unpack("!qii", each) for each in found] == PARTS
        # psycopg reads both forms as it reads a PostgreSQL's.
        query = "SELECT INTERVAL '-1 02:03:04.5' DAY TO SECOND AS a, INTERVAL '90' MINUTE AS b"
        wanted = (-dt.timedelta(days=1, seconds=7384.5), dt.timedelta(minutes=90))
        for binary in (False, True):
            cursor = await db.cursor(binary=binary).execute(query)
            assert await cursor.fetchone() == wanted
        await by_asyncpg(dsn_of(service), query, wanted)
        await copied(db)
        await refused(db)
        await in_tables(db)


async def by_asyncpg(dsn: str, query: str, wanted: tuple[Any, ...]) -> None:
    db = await asyncpg.connect(dsn)
    try:
        assert tuple(await db.fetchrow(query)) == wanted
        # It is described before it is run.
        statement = await db.prepare("SELECT INTERVAL '1-2' YEAR TO MONTH AS m")
        assert [each.type.name for each in statement.get_attributes()] == ["interval"]
        assert await statement.fetchval() == dt.timedelta(days=365 + 60)
    finally:
        await db.close()


async def copied(db: psycopg.AsyncConnection[Any]) -> None:
    for form in ("text", "csv"):
        async with db.cursor().copy(f"COPY ({QUERY}) TO STDOUT (FORMAT {form}, NULL '~')") as copy:
            text = b"".join([bytes(piece) async for piece in copy]).decode()
        split = "\t" if form == "text" else ","
        assert text.rstrip("\n").split(split) == [each or "~" for each in SHOWN]
    async with db.cursor().copy(f"COPY ({QUERY}) TO STDOUT (FORMAT binary)") as copy:
        copy.set_types(["interval"] * len(VALUES))
        data = b"".join([bytes(piece) async for piece in copy])
    fields = b"".join(
        struct.pack("!i", -1) if parts is None else struct.pack("!iqii", 16, *parts)
        for parts in PARTS
    )
    assert fields in data


async def refused(db: psycopg.AsyncConnection[Any]) -> None:
    await db.execute("CREATE TABLE t (id INT, span STRING, n BIGINT)")
    await db.execute("INSERT INTO t VALUES (1, NULL, 0)")
    body = "SELECT id, CAST(id AS INTERVAL DAY) AS d FROM t"
    for statement in (
        f"CREATE MATERIALIZED VIEW v AS {body}",
        f"CREATE VIEW v AS {body}",
        f"CREATE TABLE u AS {body}",
        "CREATE TABLE u (d INTERVAL DAY)",
        f"SUBSCRIBE ({body})",
        "INSERT INTO t (n) SELECT INTERVAL '1' DAY AS d",
        "SELECT array(INTERVAL '1' DAY) AS a",
        "SELECT make_interval(1, 2, 0, 4) AS a",
    ):
        with pytest.raises(psycopg.Error, match=r"interval|month_day_nano"):
            await db.execute(statement)


async def in_tables(db: psycopg.AsyncConnection[Any]) -> None:
    """A column of texts takes an interval as Spark writes it, and a large answer goes by files."""
    await db.execute("INSERT INTO t (id, span) SELECT 2 AS i, INTERVAL '1-2' YEAR TO MONTH AS s")
    found = await (await db.execute("SELECT span FROM t WHERE id = 2")).fetchall()
    assert found == [("INTERVAL '1-2' YEAR TO MONTH",)]
    text = (
        "SELECT CAST(id AS INTERVAL MONTH) AS m, CAST(id AS INTERVAL SECOND) AS s, id "
        "FROM range(1000000) ORDER BY id"
    )
    cursor = db.cursor(binary=True)
    await cursor.execute(f"SELECT * FROM ({text}) AS q ORDER BY id DESC LIMIT 300000")
    result = cursor.pgresult
    assert result is not None
    assert result.ntuples == 300_000
    assert struct.unpack("!qii", result.get_value(0, 0) or b"") == (0, 0, 999_999)
    micros, days, _ = struct.unpack("!qii", result.get_value(1, 1) or b"")
    assert days * 86_400_000_000 + micros == 999_998_000_000
