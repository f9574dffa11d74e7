"""Tables that are given further columns while they are ingested, without being filled anew.

What is right: at every mark a table has either NULL in its further column in all rows, as before,
or what PostgreSQL has in them at that position; once it has the values it keeps them, over any
restart. Nothing but the rows with a value is copied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from postgres_house import Driver, House  # type: ignore[import-not-found]

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.source import (
    ExportTruncated,
    PositionMark,
    SourceExport,
    SourceRows,
    SourceUnreachable,
)
from actors.model.plan.schema import TableColumn
from actors.runtime.errors import InvalidUsage

TABLES = """
CREATE TABLE plain (id int PRIMARY KEY, v text, doc text);
ALTER TABLE plain ALTER doc SET STORAGE EXTERNAL;
CREATE TABLE whole (id int, v text, doc text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE parts (id int PRIMARY KEY, v text, doc text) PARTITION BY RANGE (id);
CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (50);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (50) TO (1000);
CREATE TABLE finish (n int PRIMARY KEY);
"""
NAMES = ("plain", "whole", "parts")
ROWS = "INSERT INTO {t} SELECT i, 'v' || i, repeat(md5(i::text), 100) FROM generate_series(1, 99) i"


async def begun(db: House) -> tuple[PostgresSource, Driver]:
    """A source that has given its first contents."""
    await db.run(TABLES)
    for name in NAMES:
        await db.run(ROWS.replace("{t}", name))
    made: tuple[PostgresSource, Driver] = await db.filled(
        {**dict.fromkeys(NAMES, ()), "finish": ()}
    )
    return made


async def widened(
    db: House, driver: Driver, name: str, *columns: tuple[str, str]
) -> tuple[TableColumn, ...]:
    """As ALTER TABLE here: rows that are there have NULL."""
    export = driver.exports[name]
    wanted = [TableColumn(column, kind) for column, kind in columns]
    found: tuple[TableColumn, ...] = await db.source().describe_added(export, wanted)
    driver.widen(name, found)
    return found


async def settle(db: House, driver: Driver, source: PostgresSource, number: int) -> PostgresSource:
    """Goes on until all that was committed is here, and compares."""
    await db.run(f"INSERT INTO finish VALUES ({number})")
    while not driver.contents["public.finish"][(number,)]:
        try:
            await driver.step(source)
        except SourceUnreachable as error:
            if error.hint != "the table is refilled":
                raise
            await source.close()
            source = db.source()
            await driver.open(source)
    assert not driver.failed
    for name, export in driver.exports.items():
        assert driver.contents[name] == await db.contents(export), name
    return source


ADDED: list[tuple[str, str, str, int]] = [
    ("note text", "string", "'n' || {i}", 0),
    ("note text DEFAULT 'none'", "string", "'n' || {i}", 99),
    ("note bigint DEFAULT 7 NOT NULL", "bigint", "{i}", 99),
    ("note text DEFAULT clock_timestamp()::text", "string", "'n' || {i}", 99),
    ("note point", "string", "point({i}, 1)", 0),
    ("note pair", "string", "ROW({i}, NULL)::pair", 0),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("column", "kind", "value", "old"), ADDED)
async def test_rows_of_before_and_since(
    db: House, column: str, kind: str, value: str, old: int
) -> None:
    """Some were written before the column came, some between that and ours, some while nobody
    read, some since."""
    source, driver = await begun(db)
    await db.run("CREATE TYPE pair AS (a int, b int)")

    async def change(low: int) -> None:
        for name in NAMES:
            await db.run(f"UPDATE {name} SET note = {value.format(i='id')} WHERE id = {low}")
            await db.run(f"UPDATE {name} SET v = v || '+' WHERE id IN ({low}, {low + 1})")
            await db.run(f"DELETE FROM {name} WHERE id = {low + 2}")
            number = 200 + low
            new = f"{number}, 'new', NULL, {value.format(i=number)}"
            await db.run(f"INSERT INTO {name} (id, v, doc, note) VALUES ({new})")

    for name in NAMES:
        await db.run(f"ALTER TABLE {name} ADD COLUMN {column}")
    await change(10)
    source = await settle(db, driver, source, 1)  # it goes on without the column, and says so
    assert any("new columns note are not ingested" in each for each in source.lag().notes)
    await change(20)
    for name in NAMES:
        await widened(db, driver, f"public.{name}", ("note", kind))
    await change(30)
    await source.close()
    await change(40)
    again = db.source()
    await driver.open(again)
    await change(50)
    given: list[Any] = []
    while not driver.contents["public.finish"][(2,)]:
        if not given:
            await db.run("INSERT INTO finish VALUES (2)")
        given.append(await driver.step(again))
    assert not any(isinstance(each, ExportTruncated) for each in given)
    copied = [
        each.updates.num_rows
        for each in given
        if isinstance(each, SourceRows) and not each.snapshot and each.export == "public.parts"
    ]
    # Rows with a value come as two changes each; without a default they are few.
    assert sum(copied) <= 2 * (old + 20)
    await settle(db, driver, again, 3)
    await change(60)
    await settle(db, driver, again, 4)
    assert not any("note" in each for each in again.lag().notes)
    # Nothing is copied again, and later changes of the table are followed as ever.
    await again.close()
    last = db.source()
    await driver.open(last)
    await change(70)
    for name in NAMES:
        await db.run(f"ALTER TABLE {name} ALTER v SET DEFAULT 'x'")
    await change(80)
    await settle(db, driver, last, 5)


async def test_a_column_that_was_left_out_is_taken(db: House) -> None:
    await db.run('CREATE TABLE t (id int PRIMARY KEY, a text, "B" int, b int, finish int)')
    await db.run("INSERT INTO t SELECT i, 'a' || i, i, -i FROM generate_series(1, 20) i")
    source, driver = await db.filled({"t": ("a", "b")})
    await source.close()
    found = await widened(db, driver, "public.t", ("a", "string"), ("b_4", "int"))
    assert [column.name for column in found] == ["a", "b_4"]
    again = db.source()
    await driver.open(again)
    await db.run("UPDATE t SET b = 100 WHERE id = 3")
    await db.run("INSERT INTO t VALUES (99, 'end', 1, 2, 3)")
    await driver.until(again, "public.t", (99, 1, 3, "end", 2))
    assert driver.contents["public.t"][(3, 3, None, "a3", 100)] == 1
    assert driver.contents["public.t"].total() == 21


async def test_at_every_mark_all_rows_have_the_values_or_none(db: House) -> None:
    """Writers go on, in transactions of several rows; the source is stopped anywhere."""
    source, driver = await begun(db)
    await db.run("ALTER TABLE plain ADD COLUMN twice int; ALTER TABLE whole ADD COLUMN twice int")
    for name in ("plain", "whole"):
        await db.run(f"UPDATE {name} SET twice = 2 * id WHERE id % 3 > 0")
    dice = random.Random(3)

    async def write() -> None:
        for number in range(400):
            name = dice.choice(("plain", "whole"))
            id_ = dice.randrange(200)
            change = dice.choice(
                (
                    f"UPDATE {name} SET id = id + 200, twice = 2 * (id + 200) WHERE id = {id_}",
                    f"UPDATE {name} SET v = 'w{number}', twice = 2 * id WHERE id = {id_}",
                    f"DELETE FROM {name} WHERE id = {id_}",
                    f"INSERT INTO {name} (id, v, twice) VALUES ({number + 1000}, 'in', "
                    f"{2 * (number + 1000)})",
                )
            )
            async with db.sql.transaction():
                await db.run(change)
                await db.run(change.replace(name, {"plain": "whole"}.get(name, "plain")))

    async def read() -> None:
        nonlocal source
        for name in ("public.plain", "public.whole"):
            await widened(db, driver, name, ("twice", "int"))
        filled = False
        for number in range(1_000_000):
            if number % 7 == 0 and not filled:
                await source.close()
                source = db.source()
                await driver.open(source)
            given = await driver.step(source)
            if isinstance(given, PositionMark):
                values = [
                    (row[0], row[3])
                    for name in ("public.plain", "public.whole")
                    for row in driver.contents[name]
                ]
                some = any(value is not None for _, value in values)
                assert some or not filled
                filled = some
                wrong = [(i, v) for i, v in values if v not in (None, 2 * i)]
                assert not wrong
                if filled:
                    held = sum(value is None for _, value in values)
                    assert held <= 66, "only those that never had one"
            if driver.contents["public.finish"][(1,)]:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await write()
        await db.run("INSERT INTO finish VALUES (1)")
    await settle(db, driver, source, 2)


REFUSED: list[tuple[str, str, str]] = [
    ("gone", "string", "no upstream column gone that is not yet ingested .available: x, y, Z."),
    ("x", "string", "column x of public.t has type int, not string: use ADD COLUMN x int"),
    ("y", "varchar(5)", "has type string"),
    ("made", "int", "no upstream column made"),
    ("v", "string", "no upstream column v that is not yet ingested"),
    ("z", "int", "available: x, y, Z"),
]


async def test_what_cannot_be_added_is_said(db: House) -> None:
    await db.run(
        'CREATE TABLE t (id int PRIMARY KEY, v text, x int, y varchar(5), "Z" int,'
        " made int GENERATED ALWAYS AS (id + 1) STORED)"
    )
    source = db.source()
    (export,) = await source.describe({"t": ("x", "y", "Z")})

    async def added(*columns: TableColumn) -> Sequence[TableColumn]:
        found: Sequence[TableColumn] = await source.describe_added(export, columns)
        return found

    for name, kind, words in REFUSED:
        with pytest.raises(InvalidUsage, match=words):
            await added(TableColumn(name, kind))
    with pytest.raises(InvalidUsage, match="no upstream column x that is not yet ingested"):
        await added(TableColumn("x", "int"), TableColumn("x", "int"))
    assert await added(TableColumn("x", "integer"), TableColumn("y", "string")) == (
        TableColumn("x", "int"),
        TableColumn("y", "string"),
    )
    await db.run("CREATE PUBLICATION listed FOR TABLE t (id, v, x)")
    listed = db.source(publication="listed")
    with pytest.raises(InvalidUsage, match="publication listed does not publish y"):
        await listed.describe_added(export, [TableColumn("y", "string")])
    await db.run("CREATE ROLE reader LOGIN REPLICATION; GRANT SELECT (id, v, x) ON t TO reader")
    reader = db.source(user="reader")
    with pytest.raises(InvalidUsage, match=r"no permission to read y of public\.t: GRANT SELECT"):
        await reader.describe_added(export, [TableColumn("y", "string")])
    await db.run("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    with pytest.raises(InvalidUsage, match=r"row security hides rows of public\.t from the user"):
        await reader.describe_added(export, [TableColumn("x", "int")])
    await db.run("DROP OWNED BY reader; DROP ROLE reader; DROP TABLE t")
    with pytest.raises(InvalidUsage, match=r"table public\.t no longer exists"):
        await added(TableColumn("x", "int"))


GONE: list[tuple[str, str]] = [
    ("ALTER TABLE plain DROP COLUMN note", "column note was dropped or renamed"),
    ("ALTER TABLE plain RENAME note TO other", "column note was dropped or renamed"),
    (
        "ALTER TABLE plain ALTER note DROP DEFAULT, ALTER note TYPE int USING 1",
        "column note changed its type from string to int",
    ),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("statement", "words"), GONE)
@pytest.mark.parametrize("early", [True, False])
async def test_a_further_column_that_is_altered_ends_the_table(
    db: House, statement: str, words: str, early: bool
) -> None:
    """Before its values were copied, and since."""
    source, driver = await begun(db)
    await db.run("ALTER TABLE plain ADD COLUMN note text DEFAULT 'n'")
    await widened(db, driver, "public.plain", ("note", "string"))
    await source.close()
    if early:
        await db.run(statement)
    again = db.source()
    await driver.open(again)
    if not early:
        await db.run("INSERT INTO finish VALUES (1)")
        await driver.until(again, "public.finish", (1,))
        assert driver.contents["public.plain"][(5, "v5", *row_of(driver, 5), "n")]
        await db.run(f"{statement}; INSERT INTO plain VALUES (999, 'after')")
    failed = await driver.until_failed(again, "public.plain")
    assert words in failed.error
    await db.run("INSERT INTO finish VALUES (2)")
    await driver.until(again, "public.finish", (2,))
    assert not any(row[0] == 999 for row in driver.contents["public.plain"])


def row_of(driver: Driver, id_: int) -> tuple[Any, ...]:
    (doc,) = {row[2] for row in driver.contents["public.plain"] if row[0] == id_}
    return (doc,)


async def test_older_and_younger_readers(db: House) -> None:
    """One that does not know of the columns that another one reads must not go on."""
    source, driver = await begun(db)
    narrow: SourceExport = driver.exports["public.plain"]
    await db.run("ALTER TABLE plain ADD COLUMN note text DEFAULT 'n'")
    await widened(db, driver, "public.plain", ("note", "string"))
    await source.close()
    again = db.source()
    await driver.open(again)
    await settle(db, driver, again, 1)
    await again.close()
    driver.exports["public.plain"] = narrow
    with pytest.raises(
        SourceUnreachable, match="4 are read at this position, but only 3 are known"
    ):
        await driver.open(db.source())


async def test_a_table_that_is_filled_anew_meanwhile_has_all(db: House) -> None:
    source, driver = await begun(db)
    await db.run("ALTER TABLE parts ADD COLUMN note text")
    await db.run("UPDATE parts SET note = 'n' WHERE id < 7")
    await widened(db, driver, "public.parts", ("note", "string"))
    await source.close()
    await db.run("TRUNCATE parts_1")
    again = db.source()
    await driver.open(again)
    await settle(db, driver, again, 1)
    notes = {row[0]: row[3] for row in driver.contents["public.parts"]}
    assert notes == {id_: "n" if id_ < 7 else None for id_ in range(1, 50)}
