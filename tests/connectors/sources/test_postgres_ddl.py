"""Tables that change while they are read: whatever becomes of their columns, partitions and
publication, what is held is what PostgreSQL holds, or the table says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

import pytest
from postgres_fuzz import Fuzz  # type: ignore[import-not-found]
from postgres_house import Driver, House  # type: ignore[import-not-found]
from test_postgres_changes import finish  # type: ignore[import-not-found]

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.postgres_names import (
    local_column_names,
    numbers_of,
    qualified_name,
    split_name,
)
from actors.connectors.sources.source import SourceUnreachable
from actors.runtime.errors import InvalidUsage

PARTS = """
CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (20);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (20) TO (40);
INSERT INTO parts SELECT i, 'v' || i FROM generate_series(0, 39) i;
CREATE TABLE plain (id int PRIMARY KEY, a text, b text, n int, m mood);
INSERT INTO plain SELECT i, 'a', 'b', i, 'glad' FROM generate_series(0, 9) i;
CREATE TABLE finish (n int PRIMARY KEY);
"""
EXPORTS: dict[str, tuple[str, ...]] = {"parts": (), "plain": (), "finish": ()}


async def begun(db: House, poll_ms: int = 3_600_000, **more: Any) -> tuple[PostgresSource, Driver]:
    """A source that has given its first contents, and does not look by itself."""
    await db.run(f"CREATE TYPE mood AS ENUM ('sad', 'glad'); {PARTS}")
    made: tuple[PostgresSource, Driver] = await db.filled(EXPORTS, poll_ms=poll_ms, **more)
    return made


async def agree(db: House, driver: Driver) -> None:
    for name, export in driver.exports.items():
        if name not in driver.failed:
            assert driver.contents[name] == await db.contents(export), name


RECREATE_HINT: list[tuple[str, str]] = [
    ("TRUNCATE parts_0", "a partition was detached, dropped, emptied or rewritten"),
    ("ALTER TABLE parts DETACH PARTITION parts_0", "a partition was detached"),
    ("DROP TABLE parts_1", "a partition was detached, dropped"),
    ("VACUUM FULL parts_1", "or rewritten"),
    ("TRUNCATE parts", "emptied"),
    (
        "CREATE TABLE parts_2 (LIKE parts INCLUDING ALL); INSERT INTO parts_2 VALUES (50, 'in');"
        " ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (40) TO (60)",
        'partition "public"."parts_2" was attached with rows',
    ),
    (
        "BEGIN; CREATE TABLE parts_2 (LIKE parts INCLUDING ALL); INSERT INTO parts_2 VALUES (50);"
        " ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (40) TO (60); COMMIT",
        "was attached with rows",
    ),
    (
        "ALTER TABLE plain ALTER a TYPE text USING upper(a)",
        "rewritten and its columns were altered",
    ),
    ("ALTER TYPE mood RENAME VALUE 'glad' TO 'happy'", "one of its columns' types was altered"),
    (
        "ALTER PUBLICATION {publication} DROP TABLE plain; DELETE FROM plain WHERE id < 3;"
        " ALTER PUBLICATION {publication} ADD TABLE plain",
        "the publication was altered, or the table was removed from it and added back",
    ),
    (
        "ALTER PUBLICATION {publication} SET (publish = 'insert'); DELETE FROM plain;"
        " ALTER PUBLICATION {publication}"
        " SET (publish = 'insert, update, delete, truncate')",
        "the publication was altered",
    ),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("statement", "words"), RECREATE_HINT)
@pytest.mark.parametrize("stopped", [False, True])
async def test_what_the_stream_does_not_tell_fills_the_table_anew(
    db: House, statement: str, words: str, stopped: bool
) -> None:
    """At the very next mark, and also when it happened while nobody was reading."""
    source, driver = await begun(db)
    if stopped:
        await source.close()
    await db.run(statement.replace("{publication}", f"penstock_{db.database}"))
    if not stopped:
        await db.run("INSERT INTO finish VALUES (1)")
        with pytest.raises(SourceUnreachable, match=words) as caught:
            await driver.until(source, "public.finish", (1,))
        assert caught.value.hint == "the table is refilled"
        await source.close()
    again = db.source(poll_ms=3_600_000)
    await driver.open(again)
    await finish(db, driver, again, 2)
    await agree(db, driver)
    assert not driver.failed


async def test_a_slot_that_the_attempt_before_has_left_does_not_stop_a_fill(db: House) -> None:
    """The server drops a temporary slot only when it notices that its client is gone."""
    source, driver = await begun(db)
    await source.close()
    slot = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', temporary => true)"
    await db.run(slot, f"penstock_{db.database}_fill")
    await db.run("VACUUM FULL parts_1")
    again = db.source(poll_ms=3_600_000)
    await driver.open(again)
    await finish(db, driver, again)
    await agree(db, driver)
    assert not driver.failed


async def test_a_publication_for_all_tables_that_was_altered_fills_anew(db: House) -> None:
    await db.run("CREATE PUBLICATION everything FOR ALL TABLES WITH (publish_via_partition_root)")
    source, driver = await begun(db, publication="everything")
    await source.close()
    await db.run(
        "ALTER PUBLICATION everything SET (publish = 'insert'); DELETE FROM plain WHERE id < 3;"
        " ALTER PUBLICATION everything SET (publish = 'insert, update, delete, truncate')"
    )
    again = db.source(poll_ms=3_600_000, publication="everything")
    await driver.open(again)
    await finish(db, driver, again)
    await agree(db, driver)
    assert not driver.failed


ENDS: list[tuple[str, str]] = [
    (
        "ALTER TABLE plain DROP COLUMN b; ALTER TABLE plain ADD COLUMN b text DEFAULT 'new'",
        "column b was dropped or renamed",
    ),
    (
        "ALTER TABLE plain RENAME a TO c; ALTER TABLE plain RENAME b TO a;"
        " ALTER TABLE plain RENAME c TO b",
        "column a was dropped or renamed",
    ),
    ("DROP TABLE plain; CREATE TABLE plain (id int PRIMARY KEY, a text, b text, n int, m mood)",
     "recreated"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "words"), ENDS)
async def test_no_row_that_was_never_there_is_marked(db: House, statement: str, words: str) -> None:
    source, driver = await begun(db)
    await db.run(f"{statement}; INSERT INTO plain (id, a, b) VALUES (99, 'A', 'B')")
    await finish(db, driver, source)
    assert words in driver.failed["public.plain"].error
    assert not any(row[0] == 99 for row in driver.contents["public.plain"])
    assert "public.parts" not in driver.failed
    await agree(db, driver)


async def test_names_that_are_given_away_and_taken_back(db: House) -> None:
    """Between two looks, with rows meanwhile: the catalog alone would not show it."""
    source, driver = await begun(db)
    swap = (
        "ALTER TABLE plain RENAME a TO c; ALTER TABLE plain RENAME b TO a;"
        " ALTER TABLE plain RENAME c TO b;"
    )
    await db.run(f"{swap} INSERT INTO plain (id, a, b) VALUES (99, 'A', 'B'); {swap}")
    await finish(db, driver, source)
    assert "its columns were renamed" in driver.failed["public.plain"].error
    assert not any(row[0] == 99 for row in driver.contents["public.plain"])
    await agree(db, driver)


HARMLESS = [
    "ALTER TABLE plain ALTER a SET DEFAULT 'x'",
    "ALTER TABLE plain ALTER a SET NOT NULL",
    "ALTER TABLE plain ALTER a TYPE varchar; ALTER TABLE plain ALTER a SET STATISTICS 5",
    "ALTER TABLE plain ADD COLUMN x float DEFAULT random()",
    "ALTER TABLE plain ADD COLUMN x int; ALTER TABLE plain DROP COLUMN x",
    "VACUUM FULL plain",
    "TRUNCATE plain",
    "ALTER TYPE mood ADD VALUE 'numb'",
    "CREATE INDEX ON plain (n); ANALYZE plain; CREATE INDEX ON parts (v)",
    "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (40) TO (60)",
    "CREATE TABLE parts_2 (LIKE parts INCLUDING ALL);"
    " ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (40) TO (60)",
    "ALTER TABLE parts_0 RENAME TO older; ALTER TABLE parts_1 REPLICA IDENTITY FULL",
]


@pytest.mark.parametrize("statement", HARMLESS)
async def test_changes_that_rows_here_follow(db: House, statement: str) -> None:
    source, driver = await begun(db)
    for part in statement.split(";"):
        await db.run(part)
    await db.run("INSERT INTO plain (id, a, b, n) VALUES (99, 'A', 'B', 1); DELETE FROM parts"
        " WHERE id > 35; UPDATE plain SET b = 'C' WHERE id < 3")  # fmt: skip
    if "parts_2" in statement:
        await db.run("INSERT INTO parts VALUES (50, 'in')")
    await finish(db, driver, source)
    assert not driver.failed
    await agree(db, driver)
    await source.close()
    again = db.source()
    await driver.open(again)  # nor is anything filled anew
    assert again.lag().snapshot_rows_known is None
    await finish(db, driver, again, 2)
    await agree(db, driver)


async def test_a_publication_that_is_dropped_is_made_again(db: House) -> None:
    source, driver = await begun(db)
    await db.run("INSERT INTO plain (id) VALUES (100)")
    await db.run(f"DROP PUBLICATION penstock_{db.database}")
    await db.run("DELETE FROM plain WHERE id = 4")
    with pytest.raises(SourceUnreachable, match="publication"):
        while True:
            await driver.step(source)
    await source.close()
    again = db.source()
    await driver.open(again)
    await finish(db, driver, again)
    await agree(db, driver)


async def test_a_partition_whose_old_rows_are_not_told(db: House) -> None:
    await db.run(
        "CREATE TABLE parts (id int, v text) PARTITION BY RANGE (id);"
        "ALTER TABLE parts REPLICA IDENTITY FULL; CREATE TABLE finish (n int PRIMARY KEY);"
        "CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (20)"
    )
    source = db.source(poll_ms=3_600_000)
    with pytest.raises(InvalidUsage, match=r'"parts_0" is nothing.*REPLICA IDENTITY FULL'):
        await source.describe({"parts": ()})
    await db.run("ALTER TABLE parts_0 REPLICA IDENTITY FULL; INSERT INTO parts VALUES (1, 'a')")
    driver = Driver(await source.describe({"parts": (), "finish": ()}))
    await driver.open(source)
    await db.run("CREATE TABLE parts_1 (id int PRIMARY KEY, v text)")
    await db.run("ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES FROM (20) TO (40)")
    await db.run("INSERT INTO parts VALUES (21, 'b'); UPDATE parts SET v = 'c' WHERE id = 1")
    await finish(db, driver, source)
    assert not driver.failed
    assert any('"parts_1" is (id)' in note for note in source.lag().notes)
    await agree(db, driver)
    await db.run("UPDATE parts SET v = 'd' WHERE id = 21")
    await finish(db, driver, source, 2)
    assert "identity of a partition is not FULL" in driver.failed["public.parts"].error


def test_names_here_and_there() -> None:
    for pair in [("public", "a"), ("My.Shop", 'a."b'), ('"', "."), ("a b", "日本"), ("x", 'y"')]:
        assert split_name(qualified_name(*pair)) == pair
    assert split_name("a") == ("public", "a")
    assert len({qualified_name("a.b", "c"), qualified_name("a", "b.c")}) == 2
    for wrong in ("", ".a", "a.", "a.b.c", '"a', 'a."b"c'):
        with pytest.raises(InvalidUsage, match="invalid table name"):
            split_name(wrong)
    columns = [(1, "V"), (3, "v"), (4, "v_3"), (5, "__x"), (7, "_x_5"), (8, " v ")]
    here = local_column_names(columns)
    assert list(here.values()) == ["V", "v_3_", "v_3", "_x_5_", "_x_5", "v_8"]
    assert numbers_of(tuple(here.values()), columns) == (1, 3, 4, 5, 7, 8)
    assert numbers_of(("V", "gone"), columns) == (1, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_random_changes_of_tables_and_rows(db: House, seed: int) -> None:
    fuzz = Fuzz(db, seed)
    await fuzz.run(4)
    assert fuzz.counts["quiet"]
