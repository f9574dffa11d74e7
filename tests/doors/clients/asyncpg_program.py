"""Print what asyncpg can do: ``asyncpg_program.py HOST:PORT`` (see `client_probe`)."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from client_probe import ClientProbe, check
from sample_rows import KINDS_ROWS, MANY_ROWS, PREPARED, is_null_row, kinds_row, spent_rows


async def main(address: str) -> None:
    probe = ClientProbe("asyncpg", asyncpg.__version__)
    dsn = f"postgresql://tester@{address}/penstock"
    probe.lacks("text", "it requests only binary")
    with probe.tries("connect"):
        db = await asyncpg.connect(dsn)
        check(db.get_server_version()[:2], (15, 0))
        await db.close()
    for tried in TRIED:
        with probe.tries(tried.__name__):
            db = await asyncpg.connect(dsn)
            try:
                await tried(db)
            finally:
                await db.close()


def row_of(number: int) -> tuple[Any, ...]:
    """Return a row as asyncpg does, with JSON as a string."""
    row = kinds_row(number)
    return tuple(
        json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else value
        for value in row.values()
    )


async def reflection(db: Any) -> None:
    found = await db.fetch(
        "SELECT table_name, table_type FROM information_schema.tables "
        "WHERE table_schema = $1 AND table_name = ANY($2::text[]) ORDER BY 1",
        "public",
        ["kinds", "orders"],
    )
    check([tuple(row) for row in found], [("kinds", "BASE TABLE"), ("orders", "BASE TABLE")])
    columns = await db.fetch(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = $1::text::regclass AND attnum > 0 ORDER BY attnum",
        "spent",
    )
    check([row[0] for row in columns], ["customer", "n", "total"])
    indexes = await db.fetch("SELECT indexname FROM pg_indexes WHERE tablename = $1", "orders")
    check("by_customer" in {row[0] for row in indexes}, True)


async def binary(db: Any) -> None:
    found = await db.fetch("SELECT * FROM kinds ORDER BY id")
    plain = [
        tuple(v.replace(" ", "") if str(v).startswith("{") else v for v in row) for row in found
    ]
    check(plain, [row_of(number) for number in range(KINDS_ROWS)])


async def nulls(db: Any) -> None:
    found = await db.fetch("SELECT * FROM kinds WHERE flag IS NULL")
    check(len(found), sum(map(is_null_row, range(KINDS_ROWS))))
    check({value for row in found for value in tuple(row)[1:]}, {None})
    await db.execute("CREATE TABLE blanks (a int, b text, c timestamptz)")
    await db.execute("INSERT INTO blanks VALUES ($1, $2, $3)", None, None, None)
    check(tuple(await db.fetchrow("SELECT * FROM blanks")), (None, None, None))


async def parameters(db: Any) -> None:
    row = kinds_row(17)
    for name in ("flag", "small", "large", "twice", "amount", "word", "day"):
        text = f"SELECT id FROM kinds WHERE {name} = $1 AND id = $2"
        check(await db.fetchval(text, row[name], 17), 17)
    found = await db.fetch("SELECT id FROM orders WHERE id IN ($1, $2) ORDER BY id", 3, 5)
    check([each["id"] for each in found], [3, 5])
    await db.execute(
        "CREATE TABLE given (raw bytea, moment timestamptz, clock timestamp, list int[])"
    )
    wanted = (row["raw"], row["moment"], row["clock"], row["list"])
    await db.execute("INSERT INTO given VALUES ($1, $2, $3, $4)", *wanted)
    check(tuple(await db.fetchrow("SELECT * FROM given")), wanted)


async def prepared(db: Any) -> None:
    kept = await db.prepare("SELECT id, customer FROM orders WHERE id = $1")
    check([each.name for each in kept.get_attributes()], ["id", "customer"])
    for number in range(PREPARED):
        check(await kept.fetchval(number), number)


async def batch(db: Any) -> None:
    await db.execute("CREATE TABLE batches (id bigint PRIMARY KEY, word text)")
    rows = [(number, f"w{number}") for number in range(500)]
    await db.executemany("INSERT INTO batches VALUES ($1, $2)", rows)
    check(await db.fetchval("SELECT count(*) FROM batches"), 500)


async def transaction(db: Any) -> None:
    await db.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint)")
    async with db.transaction():
        await db.execute("INSERT INTO accounts VALUES (1, 1)")
    begun = db.transaction()
    await begun.start()
    await db.execute("UPDATE accounts SET n = 10 WHERE id = 1")
    await begun.rollback()
    check(await db.fetchval("SELECT n FROM accounts WHERE id = 1"), 1)


async def savepoint(db: Any) -> None:
    await db.execute("CREATE TABLE saved (id bigint PRIMARY KEY)")
    async with db.transaction():
        await db.execute("INSERT INTO saved VALUES (1)")
        try:
            async with db.transaction():
                await db.execute("INSERT INTO saved VALUES (2)")
                await db.execute("INSERT INTO saved VALUES (1)")
        except asyncpg.UniqueViolationError:
            await db.execute("INSERT INTO saved VALUES (3)")
    check([row["id"] for row in await db.fetch("SELECT id FROM saved ORDER BY id")], [1, 3])


async def fetching(db: Any) -> None:
    async with db.transaction():
        found = []
        async for row in db.cursor("SELECT id FROM many ORDER BY id", prefetch=500):
            found.append(row["id"])
            if len(found) == 5_000:
                break
        check(found, list(range(5_000)))


async def copy_in(db: Any) -> None:
    await db.execute("CREATE TABLE copied (id bigint, word text, at timestamptz)")
    moment = kinds_row(5)["moment"]
    records = [(number, f"w{number}", moment) for number in range(2_000)]
    check(await db.copy_records_to_table("copied", records=records), "COPY 2000")
    rows = io.BytesIO(b'id,word,at\n2000,"a,b",\n')
    await db.copy_to_table("copied", source=rows, format="csv", header=True)
    check(tuple(await db.fetchrow("SELECT count(*), count(at) FROM copied")), (2_001, 2_000))


async def copy_out(db: Any) -> None:
    out = io.BytesIO()
    await db.copy_from_table("orders", output=out, format="csv")
    check(len(out.getvalue().splitlines()), 1_000)
    out = io.BytesIO()
    text = "SELECT id FROM orders WHERE id < 10"
    check(await db.copy_from_query(text, output=out), "COPY 10")


async def cancel(db: Any) -> None:
    begun = asyncio.Event()

    async def take(_: bytes) -> None:
        begun.set()

    following = asyncio.ensure_future(db.copy_from_query("SUBSCRIBE orders", output=take))
    await begun.wait()
    following.cancel()
    try:
        await following
    except asyncio.CancelledError:
        check(await db.fetchval("SELECT id FROM orders WHERE id = 1"), 1)
        return
    raise AssertionError("it was not cancelled")


async def error(db: Any) -> None:
    try:
        await db.execute("CREATE TABLE x (a int,)")
    except asyncpg.PostgresSyntaxError as caught:
        check((caught.sqlstate, caught.position), ("42601", "23"))
    try:
        await db.execute("INSERT INTO orders VALUES (1, 'again', 0)")
    except asyncpg.UniqueViolationError as caught:
        check(caught.sqlstate, "23505")
        return
    raise AssertionError("a present key was inserted")


async def view(db: Any) -> None:
    await db.execute("CREATE TABLE words (word text)")
    await db.execute(
        "CREATE MATERIALIZED VIEW lengths AS SELECT word, count(*) AS n FROM words GROUP BY word"
    )
    check(await db.fetch("SELECT * FROM lengths"), [])
    found = await db.fetch("SELECT * FROM spent ORDER BY customer")
    check([tuple(row) for row in found], spent_rows())


async def fresh(db: Any) -> None:
    for number in range(1, 6):
        await db.execute("INSERT INTO words VALUES ($1)", "one")
        check(await db.fetchval("SELECT n FROM lengths WHERE word = $1", "one"), number)


async def subscribe(db: Any) -> None:
    async with db.transaction():
        await db.execute("DECLARE changes CURSOR FOR SUBSCRIBE lengths")
        first = await db.fetch("FETCH 10 changes")
        check([tuple(row)[1:] for row in first], [(1, "one", 5)])


async def large(db: Any) -> None:
    found = await db.fetch("SELECT * FROM many")
    check(sum(row["id"] for row in found), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(reflection, binary, nulls, parameters, prepared, batch, transaction, savepoint, fetching),
    *(copy_in, copy_out, cancel, error, view, fresh, subscribe, large),
)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
