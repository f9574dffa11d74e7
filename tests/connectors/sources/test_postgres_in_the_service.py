"""PostgreSQL's tables kept here, and views on them, by the whole service (in-memory engine)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from postgres_house import House  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.runtime.errors import InvalidUsage, PenstockError, UnknownObject
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from service_house import running_service  # type: ignore[import-not-found]

BY_BRANCH = (
    "SELECT b.name, count(*) AS n, sum(a.balance) AS total "
    "FROM accounts a JOIN branches b ON a.branch = b.id GROUP BY b.name"
)


@asynccontextmanager
async def running(tmp_path: Path, **more: Any) -> AsyncIterator[Client]:
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_tick_ms=50,
        retry_delay_ms_min=20,
        retry_delay_ms_max=200,
        **more,
    )
    settings = draw_for_test(settings, many_rows=True)
    async with running_service(settings) as (_, client):
        yield client


async def prepare(db: House) -> None:
    await db.run("CREATE TABLE branches (id bigint PRIMARY KEY, name text NOT NULL)")
    await db.run(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, branch bigint, balance bigint, note text)"
    )
    await db.run("CREATE TABLE marks (n bigint)")
    await db.run("ALTER TABLE marks REPLICA IDENTITY FULL")
    await db.run("INSERT INTO branches SELECT i, 'b' || i FROM generate_series(1, 3) i")
    await db.run("INSERT INTO accounts SELECT i, i % 3 + 1, 0, repeat('x', 3000) "
        "FROM generate_series(1, 300) i")  # fmt: skip


def options_of(db: House) -> dict[str, Any]:
    """A source's configuration, as a user writes it."""
    options: dict[str, Any] = msgspec.to_builtins(db.config()) | {"kind": "postgres"}
    for name in ("type", "token"):
        options.pop(name, None)
    return options


async def change(db: House, dice: random.Random) -> None:
    """Moves money, and more."""
    match dice.randrange(8):
        case 0:
            await db.run(f"DELETE FROM accounts WHERE id = {dice.randrange(400)} AND balance = 0")
        case 1:
            await db.run(
                f"INSERT INTO accounts VALUES ({dice.randrange(400)}, {dice.randrange(1, 4)}, 0)"
                " ON CONFLICT (id) DO UPDATE SET branch = excluded.branch"
            )
        case _:
            one, other, sum_ = dice.randrange(300), dice.randrange(300), dice.randrange(100)
            async with db.sql.transaction():
                for id_, diff in ((one, -sum_), (other, sum_)):
                    await db.run(f"UPDATE accounts SET balance = balance + {diff} WHERE id = {id_}")


async def caught_up(db: House, client: Client, number: int) -> int:
    """A time at which all that was committed is here."""
    await db.run(f"INSERT INTO marks VALUES ({number})")
    return await told(client, "marks", number)


async def told(client: Client, marks: str, number: int) -> int:
    """A time at which that number stands in a table of marks."""
    async for found in client.subscribe(marks):
        rows = [] if found.table is None else found.table["n"].to_pylist()
        if number in rows:
            return int(found.upper) - 1
    raise AssertionError("the subscription has ended")


async def rows(client: Client, name: str, time: int) -> Counter[tuple[Any, ...]]:
    table = await client.peek(name, as_of=time)
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


async def test_views_on_its_tables_equal_its_own_answers(db: House, tmp_path: Path) -> None:
    await prepare(db)
    dice = random.Random(7)
    options = options_of(db)
    for life in range(3):
        async with running(tmp_path) as client:
            if life == 0:
                tables = {f"public.{name}": name for name in ("branches", "accounts", "marks")}
                await client.create_source("pg", options, tables)
                await client.create_materialized_view("by_branch", BY_BRANCH)
            for round_ in range(4):
                for _ in range(25):
                    await change(db, dice)
                time = await caught_up(db, client, life * 10 + round_)
                await client.wait_for("by_branch", time)
                wanted = Counter(await db.run(BY_BRANCH))
                assert await rows(client, "by_branch", time) == wanted
                found = await db.run("SELECT id, branch, balance, note FROM accounts")
                assert await rows(client, "accounts", time) == Counter(found)
        for _ in range(25):
            await change(db, dice)  # while nobody is there
    async with running(tmp_path) as client:
        with pytest.raises(InvalidUsage, match=r"already ingests public\.accounts into accounts"):
            await client.alter_source("pg", ["public.accounts"])
        await db.run("CREATE TABLE late (id bigint PRIMARY KEY, text text)")
        await db.run("INSERT INTO late SELECT i, 'l' || i FROM generate_series(1, 50) i")
        await client.alter_source("pg", ["public.late"])
        await db.run("TRUNCATE accounts")
        time = await caught_up(db, client, 99)
        assert await rows(client, "accounts", time) == Counter()
        await client.wait_for("late", time)
        assert (await rows(client, "late", time)).total() == 50
        await client.drop("late")
        await client.alter_source("pg", ["public.late"])  # before anything moves the position
        time = await caught_up(db, client, 100)
        await client.wait_for("late", time)
        assert (await rows(client, "late", time)).total() == 50
        (status,) = await client.sources()
        assert status.health.status == "running"
        assert {table.health.status for table in status.tables} == {"running"}
        assert len(await db.run("SELECT 1 FROM pg_replication_slots WHERE database = "
            "current_database()")) == 1  # fmt: skip
        await client.drop("by_branch")
        await client.drop_source("pg")
        while await db.run(
            "SELECT 1 FROM pg_replication_slots WHERE database = current_database()"
        ) or await db.run("SELECT 1 FROM pg_publication"):
            await anyio.sleep(0.05)


KINDS: dict[str, tuple[str, str]] = {
    "tags": ("text[]", r"""'{a,"b c",NULL}'"""),
    "numbers": ("int[]", "'{1,NULL,3}'"),
    "days": ("date[]", "'{2024-02-29}'"),
    "doc": ("json", """'{"a" : 1}'"""),
    "docb": ("jsonb", """'{"a": [1]}'"""),
    "store": ("tree", """'(1,"{x,y}")'"""),
    "amount": ("numeric", "12.3400"),
    "span": ("int4range", "'[1,5)'"),
    "spans": ("int4multirange", "'{[1,5),[7,9)}'"),
    "feeling": ("mood", "'so so'"),
    "feelings": ("mood[]", """'{sad,"so so"}'"""),
    "price": ("cents", "1.5"),
    "prices": ("cents[]", "'{1.5,2}'"),
    "f": ("double precision", "- 'NaN'::float8"),
    "fs": ("real[]", "'{NaN,-0,1.5}'"),
    "raw": ("bytea", r"'\x00ff'"),
    "at": ("timestamptz", "'2024-03-31 03:30+02'"),
    "ats": ("timestamp[]", "'{2024-03-31 03:30:00.25}'"),
    "took": ("interval", "'1 day 2 hours'"),
    "who": ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
    "fixed": ("char(5)", "'ab'"),
}
KEYS: dict[str, tuple[str, list[str]]] = {
    "by_int": ("int", ["1", "2", "3", "4"]),
    "by_text": ("text", ["'a'", "'a '", "'A'", "''"]),
    "by_numeric": ("numeric", ["1", "2.50", "1e-20", "-1"]),
    "by_day": ("date", ["'2024-01-01'", "'2024-01-02'", "'0001-01-01'", "'9999-12-31'"]),
    "by_time": ("timestamptz", ["'2024-01-01'", "'2024-01-02'", "'2024-01-03'", "'1901-01-01'"]),
    "by_bytes": ("bytea", [r"'\x'", r"'\x00'", r"'\x0000'", r"'\xff'"]),
    "by_mood": ("mood", ["'sad'", "'so so'", "'happy'", "'numb'"]),
    "by_price": ("cents", ["1", "2", "3.5", "-4"]),
    "by_char": ("char(3)", ["'a'", "'ab'", "'abc'", "''"]),
    "by_span": ("int4range", ["'[1,2)'", "'[1,3)'", "'empty'", "'(,5)'"]),
    "by_doc": ("jsonb", ["'1'", "'{}'", "'[1, 2]'", "'null'"]),
}


async def test_every_type_and_key_through_inserts_updates_and_deletes(
    db: House, tmp_path: Path
) -> None:
    """Beside a copy of the same rows that is filled at the end: what changes bring is what COPY
    brings. Long values stay out of line, so an update of others tells them not."""
    await db.run(
        "CREATE TYPE mood AS ENUM ('sad', 'so so', 'happy', 'numb');"
        "CREATE DOMAIN cents AS numeric(10,2); CREATE TYPE tree AS (a int, b text[]);"
        "CREATE TABLE marks (n bigint PRIMARY KEY)"
    )
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in KINDS.items())
    values = ", ".join(value for _, value in KINDS.values())
    long = "(SELECT array_agg(md5(i::text)) FROM generate_series(1, 200) i)"
    names = [*KEYS, "by_int_full", "by_char_full"]
    for name in names:
        kind, keys = KEYS[name.removesuffix("_full")]
        await db.run(f"CREATE TABLE {name} (id {kind} PRIMARY KEY, long text[], v int, {columns})")
        await db.run(f"ALTER TABLE {name} ALTER long SET STORAGE EXTERNAL")
        if name.endswith("_full"):
            await db.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
        for key in keys[:3]:
            await db.run(f"INSERT INTO {name} VALUES ({key}, {long}, 0, {values})")
    options = options_of(db)
    async with running(tmp_path) as client:
        await client.create_source("pg", options)
        await caught_up(db, client, 0)
        for number in range(1, 4):
            for name in names:
                _, keys = KEYS[name.removesuffix("_full")]
                match number:
                    case 1:
                        await db.run(f"UPDATE {name} SET v = v + 1")
                    case 2:
                        await db.run(f"INSERT INTO {name} (id, v) VALUES ({keys[3]}, 9)")
                        await db.run(f"UPDATE {name} SET numbers = '{{7}}', f = -0.0 WHERE v = 1")
                        await db.run(f"DELETE FROM {name} WHERE id = {keys[0]}")
                    case 3:
                        await db.run(f"UPDATE {name} SET id = {keys[0]} WHERE id = {keys[1]}")
                        await db.run(f"UPDATE {name} SET tags = NULL WHERE id = {keys[3]}")
            await caught_up(db, client, number)
        for name in names:
            await db.run(f"CREATE TABLE {name}_too AS TABLE {name}")
            await db.run(f"ALTER TABLE {name}_too REPLICA IDENTITY FULL")
        await client.alter_source("pg", [f"{name}_too" for name in names])
        time = await caught_up(db, client, 4)
        for name in names:
            await client.wait_for(f"{name}_too", time)
            streamed = await client.peek(name, as_of=time)
            copied = await client.peek(f"{name}_too", as_of=time)
            assert streamed.num_rows == 3
            assert sorted(map(repr, streamed.to_pylist())) == sorted(
                map(repr, copied.to_pylist())
            ), name
        (status,) = await client.sources()
        assert {table.health.status for table in status.tables} == {"running"}


async def test_names_of_any_kind_and_tables_that_cannot_be_taken(db: House, tmp_path: Path) -> None:
    await db.run("CREATE TABLE marks (n bigint PRIMARY KEY)")
    await db.run(
        'CREATE TABLE "Order items" ("unit price" numeric(9,2), v int, "V" int, "a`b" int,'
        ' "end " int, "select" int PRIMARY KEY, "say ""hi""" text,'
        ' "__time" int, "größe, x=1" int, "x.y" int)'
    )
    await db.run("""INSERT INTO "Order items" VALUES (1.5, 2, 3, 4, 44, 5, 'six', 7, 8, 9)""")
    await db.run('CREATE SCHEMA "My.Shop"; CREATE TABLE "My.Shop"."a=b.""c" (id int PRIMARY KEY)')
    await db.run('INSERT INTO "My.Shop"."a=b.""c" VALUES (1)')
    await db.run('CREATE TABLE "select" (id int PRIMARY KEY); INSERT INTO "select" VALUES (1)')
    await db.run("CREATE SCHEMA other; CREATE TABLE other.marks (n int PRIMARY KEY)")
    await db.run("CREATE TABLE no_key (id int); CREATE TABLE nothing ()")
    await db.run("CREATE TABLE by_float (f float8 PRIMARY KEY)")
    options = options_of(db)
    async with running(tmp_path) as client:
        notices = (await client.create_source("pg", options)).splitlines()
        assert [line.removeprefix("skipped ").partition(": ")[0] for line in notices] == [
            "other.marks",
            "public.by_float",
            "public.no_key",
            "public.nothing",
        ]
        assert "'marks' already exists" in notices[0]
        assert "whose type has no exact equality" in notices[1]
        assert "public.no_key has no replica identity: add a PRIMARY KEY" in notices[2]
        assert "has no columns to ingest" in notices[3]
        await db.run('UPDATE "Order items" SET "V" = 33, "say ""hi""" = NULL')
        await db.run('UPDATE "My.Shop"."a=b.""c" SET id = 2; UPDATE "select" SET id = 2')
        time = await caught_up(db, client, 1)
        (row,) = (await client.peek("Order items", as_of=time)).to_pylist()
        assert row == {
            "unit price": Decimal("1.50"),
            "v": 2,
            "V_3": 33,
            "a`b": 4,
            "end_5": 44,
            "select": 5,
            'say "hi"': None,
            "_time_8": 7,
            "größe, x=1": 8,
            "x.y": 9,
        }
        assert (await client.peek('a=b."c', as_of=time)).to_pylist() == [{"id": 2}]
        assert (await client.peek("select", as_of=time)).to_pylist() == [{"id": 2}]
        (status,) = await client.sources()
        outside = {table.name: table.outside for table in status.tables}
        assert outside == {
            "marks": "public.marks",
            "Order items": "public.Order items",
            'a=b."c': '"My.Shop"."a=b.""c"',
            "select": "public.select",
        }
        await client.create_materialized_view(
            "priced", "SELECT `unit price` * v AS sum FROM `Order items`"
        )
        await client.drop("marks")
        await client.alter_source("pg", {"other.marks": "other_marks", "marks": "marks_again"})
        assert await told(client, "marks_again", 1)


async def test_a_bare_name_gets_the_name_that_is_wanted(db: House, tmp_path: Path) -> None:
    await db.run("CREATE TABLE marks (n int PRIMARY KEY)")
    await db.run('CREATE TABLE "Big" (id int PRIMARY KEY)')
    options = options_of(db)
    async with running(tmp_path) as client:
        for tables, words in (
            ({"makrs": "a"}, r"no tables public\.makrs in .*; did you mean public\.marks"),
            ({"big": "a"}, r"no tables public\.big in .*; did you mean public\.Big"),
            ({"marks": "a", "public.marks": "b"}, "are the same table: name it once"),
            ({"public.a.b": "a"}, "invalid table name 'public.a.b': .*public.\"a.b\""),
        ):
            with pytest.raises(InvalidUsage, match=words):
                await client.create_source("pg", options, tables)
        await client.create_source("pg", options, {"marks": "taken", "Big": ""})
        await db.run("INSERT INTO marks VALUES (7)")
        assert await told(client, "taken", 7)
        with pytest.raises(UnknownObject):
            await client.peek("marks")
        for name in ("marks", "public.marks"):
            with pytest.raises(InvalidUsage, match=r"already ingests public\.marks into taken"):
                await client.alter_source("pg", [name])
        (status,) = await client.sources()
        assert [table.name for table in status.tables] == ["Big", "taken"]


async def test_a_table_that_ended_is_added_again_as_its_error_says(
    db: House, tmp_path: Path
) -> None:
    await db.run("CREATE TABLE marks (n bigint PRIMARY KEY)")
    await db.run("CREATE TABLE items (id int PRIMARY KEY, v text); INSERT INTO items VALUES (1)")
    async with running(tmp_path) as client:
        await client.create_source("pg", options_of(db))
        await caught_up(db, client, 0)
        await db.run("ALTER TABLE items RENAME v TO w; INSERT INTO items VALUES (2, 'b')")
        await caught_up(db, client, 1)
        with pytest.raises(PenstockError, match="column v was dropped or renamed"):
            await client.peek("items")
        await client.drop("items")
        await client.alter_source("pg", {"items": "items"})
        for number in (2, 3):
            time = await caught_up(db, client, number)
            await client.wait_for("items", time)
            found = (await client.peek("items", as_of=time)).to_pylist()
            assert found == [{"id": 1, "w": None}, {"id": 2, "w": "b"}]
            await db.run("UPDATE items SET w = w WHERE id = 2")
        (status,) = await client.sources()
        assert {table.health.status for table in status.tables} == {"running"}
    async with running(tmp_path) as client:  # nor does the error come back
        time = await caught_up(db, client, 4)
        assert (await client.peek("items", as_of=time)).num_rows == 2
