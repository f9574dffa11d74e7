"""The PostgreSQL source against a real server: under random changes, stopped at random places,
what is held at the end is what the tables hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import psycopg
import pytest
from postgres_house import Driver, House, connection  # type: ignore[import-not-found]

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.source import PositionMark, SourceIdle, SourceRows, SourceUpserts

TABLES = """
CREATE TABLE plain (id int PRIMARY KEY, v text, n bigint, doc text);
ALTER TABLE plain ALTER doc SET STORAGE EXTERNAL;
CREATE TABLE whole (id int, v text, n bigint, doc text);
ALTER TABLE whole ALTER doc SET STORAGE EXTERNAL;
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (a text NOT NULL, b int NOT NULL, v text, doc text);
ALTER TABLE indexed ALTER doc SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX by_ab ON indexed (b, a);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX by_ab;
CREATE TABLE finish (n int PRIMARY KEY);
"""
EXPORTS = {"plain": (), "whole": (), "indexed": (), "finish": ()}


def statements(draw: random.Random) -> str:
    """One change, or several of one kind."""
    table = draw.choice(["plain", "plain", "whole", "indexed"])
    key = draw.randrange(40)
    doc = f"repeat(md5('{draw.random()}'), {draw.choice([1, 100, 200])})"
    value = draw.choice(["NULL", f"'v{draw.randrange(9)}'", "''", "E'a\\nb\\t\\'\\\\'"])
    changes: dict[str, list[str]] = {
        "plain": [
            f"INSERT INTO plain VALUES ({key}, {value}, {key}, {doc}) ON CONFLICT DO NOTHING",
            f"INSERT INTO plain SELECT i, {value}, i, {doc} FROM generate_series({key}, {key + 20})"
            " i ON CONFLICT (id) DO UPDATE SET n = plain.n + 1",
            f"UPDATE plain SET v = {value} WHERE id = {key}",
            f"UPDATE plain SET id = id + 100 WHERE id BETWEEN {key} AND {key + 3}",
            "UPDATE plain SET id = id - 100 WHERE id > 100 AND id - 100 NOT IN"
            " (SELECT id FROM plain)",
            f"UPDATE plain SET doc = {doc} WHERE id % 5 = {key % 5}",
            f"DELETE FROM plain WHERE id % 7 = {key % 7}",
        ],
        "whole": [
            f"INSERT INTO whole VALUES ({key}, {value}, NULL, {doc})",
            f"INSERT INTO whole SELECT i % 3, {value}, 1, NULL FROM generate_series(1, {key}) i",
            f"UPDATE whole SET v = {value} WHERE id = {key}",
            f"UPDATE whole SET n = {key}, doc = {doc} WHERE id % 5 = {key % 5}",
            f"DELETE FROM whole WHERE id % 7 = {key % 7}",
        ],
        "indexed": [
            f"INSERT INTO indexed VALUES ('k{key}', {key % 3}, {value}, {doc})"
            " ON CONFLICT DO NOTHING",
            f"UPDATE indexed SET v = {value} WHERE b = {key % 3}",
            f"UPDATE indexed SET a = a || 'x' WHERE a = 'k{key}' AND length(a) < 9",
            f"DELETE FROM indexed WHERE a LIKE 'k{key}%'",
        ],
    }
    if draw.random() < 0.02:
        return f"TRUNCATE {draw.choice(['plain', 'whole', 'plain, indexed'])}"
    return draw.choice(changes[table])


async def change(db: House, draw: random.Random) -> None:
    """A transaction: with savepoints at times, rolled back at times. A truncate of a table that is
    being copied would wait for that: it is given up."""
    await db.run("BEGIN; SET LOCAL lock_timeout = '200ms'")
    for _ in range(draw.choice([1, 1, 2, 8])):
        inner = draw.random()
        if inner < 0.3:
            await db.run("SAVEPOINT one")
        await db.run("SAVEPOINT two")
        try:
            await db.run(statements(draw))
        except (psycopg.errors.UniqueViolation, psycopg.errors.LockNotAvailable):
            await db.run("ROLLBACK TO two")
        if inner < 0.15:
            await db.run("ROLLBACK TO one")
    await db.run("ROLLBACK" if draw.random() < 0.15 else "COMMIT")


async def agree(db: House, driver: Driver) -> None:
    """What is held is what the tables hold."""
    for name, export in driver.exports.items():
        assert driver.contents[name] == await db.contents(export), name


async def finish(db: House, driver: Driver, source: PostgresSource, number: int = 1) -> None:
    """Lets the driver take everything that was committed so far."""
    await db.run(f"INSERT INTO finish VALUES ({number})")
    await driver.until(source, "public.finish", (number,))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(6))
async def test_random_changes_and_stops(db: House, seed: int) -> None:
    draw = random.Random(seed)
    await db.run(TABLES)
    for _ in range(20):
        await change(db, draw)
    source, driver = await db.opened(EXPORTS)
    for _ in range(12):
        for _ in range(draw.randrange(12)):
            await change(db, draw)
        for _ in range(draw.randrange(12)):
            if isinstance(await driver.step(source), SourceIdle):
                break  # the next one would wait for a change
        if draw.random() < 0.6:  # ended anywhere, also between two marks
            await source.close()
            source = db.source()
            await driver.open(source)
    await finish(db, driver, source)
    await agree(db, driver)
    assert not driver.failed


async def test_what_is_committed_while_tables_are_copied(db: House) -> None:
    await db.run(TABLES)
    await db.run("INSERT INTO plain SELECT i, 'v', i, NULL FROM generate_series(1, 50000) i")
    source, driver = await db.opened(EXPORTS)
    await db.run("UPDATE plain SET v = 'later' WHERE id <= 3; INSERT INTO whole VALUES (1)")
    kinds = []
    while driver.position is None:
        kinds.append(await driver.step(source))
    snapshot = [each for each in kinds if isinstance(each, SourceRows)]
    assert sum(each.updates.num_rows for each in snapshot) == 50_000
    assert all(each.snapshot for each in snapshot)
    assert not driver.contents["public.whole"]
    assert driver.contents["public.plain"][(1, "v", 1, None)] == 1
    await finish(db, driver, source)
    await agree(db, driver)


async def test_a_copy_that_is_cut_short_begins_again(db: House) -> None:
    await db.run(TABLES)
    await db.run(
        "INSERT INTO plain SELECT i, 'v', i, repeat('x', 200) FROM generate_series(1, 60000) i"
    )
    source, driver = await db.opened(EXPORTS)
    assert isinstance(await driver.step(source), SourceRows)
    await source.close()
    await db.run("DELETE FROM plain WHERE id > 1000")
    again = db.source()
    await driver.open(again)
    await finish(db, driver, again)
    await agree(db, driver)


async def test_a_transaction_larger_than_the_buffer_is_one_instant(db: House) -> None:
    await db.run(TABLES)
    source, driver = await db.opened(EXPORTS)
    await driver.step(source)
    await db.run(
        "INSERT INTO plain SELECT i, 'v', i, repeat('x', 300) FROM generate_series(1, 40000) i;"
        " UPDATE plain SET id = -id WHERE id <= 5000; DELETE FROM plain WHERE id > 39000"
    )
    marks = len(driver.marks)
    pieces = 0
    while not driver.contents["public.plain"]:
        given = await driver.step(source)
        pieces += isinstance(given, SourceRows | SourceUpserts)
        size = given.updates.nbytes if isinstance(given, SourceRows) else 0
        assert size < 16 * 1024 * 1024
    assert pieces > 3
    *idle, whole = [mark.messages for mark in driver.marks[marks:]]
    assert not any(idle)  # such may come before
    assert whole == 40_000 + 5_000 + 1_000
    await agree(db, driver)


async def test_a_row_larger_than_the_buffer(db: House) -> None:
    await db.run(TABLES)
    await db.run("INSERT INTO plain VALUES (1, 'a', 1, repeat('x', 9000000))")
    source, driver = await db.opened(EXPORTS)
    await db.run("INSERT INTO plain VALUES (2, 'a', 1, repeat('y', 9000000))")
    await finish(db, driver, source)
    await agree(db, driver)
    large = {row[0]: (len(row[3]), set(row[3])) for row in driver.contents["public.plain"]}
    assert large == {1: (9_000_000, {"x"}), 2: (9_000_000, {"y"})}


async def test_one_instant_is_never_split(db: House) -> None:
    """Two tables that every transaction changes by the same amount agree at every mark."""
    await db.run(
        "CREATE TABLE a (id int PRIMARY KEY, n int); INSERT INTO a VALUES (1, 0);"
        "CREATE TABLE b (id int, n int); INSERT INTO b VALUES (1, 0);"
        "ALTER TABLE b REPLICA IDENTITY FULL"
    )
    source, driver = await db.opened({"a": (), "b": ()})
    for number in range(60):
        await db.run("UPDATE a SET n = n + 1; UPDATE b SET n = n + 1")
        while not isinstance(await driver.step(source), SourceIdle | PositionMark):
            assert driver.contents["public.a"] == driver.contents["public.b"]
        if number % 20 == 7:
            await source.close()
            source = db.source()
            await driver.open(source)
    await driver.until(source, "public.a", (1, 60))
    await agree(db, driver)


async def test_a_table_added_later_is_filled_without_gap_or_repeat(db: House) -> None:
    draw = random.Random(1)
    await db.run(TABLES)
    source, driver = await db.opened({"finish": (), "whole": ()})
    await finish(db, driver, source)
    for _ in range(10):
        await change(db, draw)
    await source.close()
    for _ in range(10):  # what the stream has not given yet
        await change(db, draw)
    again = db.source()
    for export in await again.describe(EXPORTS):
        if export.name not in driver.exports:
            driver.add(export)
    await driver.open(again)
    for _ in range(10):
        await change(db, draw)
    named: set[str] = set()
    marks = len(driver.marks)
    while not named:
        await driver.step(again)
        for mark in driver.marks[marks:]:
            named |= set(mark.filled)
    assert named == {"public.plain", "public.indexed"}
    await finish(db, driver, again, 2)
    await agree(db, driver)


async def test_marks_tell_positions_times_and_counts(db: House) -> None:
    await db.run(TABLES)
    source, driver = await db.opened(
        EXPORTS, poll_ms=3_600_000
    )  # it looks at the log once, when it is opened
    await driver.step(source)
    (before,) = await db.run("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    await db.run("INSERT INTO plain VALUES (1), (2); INSERT INTO finish VALUES (1)")
    await driver.until(source, "public.finish", (1,))
    (after,) = await db.run("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    mark = driver.marks[-1]
    assert mark.messages == 3
    assert mark.outside_ms is not None
    assert before[0] - 1 <= mark.outside_ms <= after[0] + 1
    assert source.lag().ms_behind == 0


async def test_the_slot_keeps_only_what_was_not_taken(db: House) -> None:
    await db.run(TABLES)
    source, driver = await db.opened(EXPORTS, feedback_ms=100)
    await driver.step(source)

    async def confirmed() -> str:
        rows = await db.run(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = %s",
            db.database,
        )
        return str(rows[0][0])

    begun = await confirmed()
    await db.run("INSERT INTO finish VALUES (1)")
    given = None
    while not isinstance(given, PositionMark):  # given, not taken
        given = await source.next()
    assert isinstance(await source.next(), SourceIdle)
    assert await confirmed() == begun
    await source.taken(given.position)
    while await confirmed() == begun:
        pass
    assert await confirmed() in given.position


async def test_lag_in_bytes_goes_up_and_down(db: House) -> None:
    await db.run(TABLES)
    source, driver = await db.opened(EXPORTS, poll_ms=100)
    await finish(db, driver, source)
    await source.close()
    await db.run("INSERT INTO plain SELECT i, 'v', i, '' FROM generate_series(1, 10000) i")
    again = db.source(poll_ms=100)
    await driver.open(again)
    assert (again.lag().bytes_behind or 0) > 500_000
    number = 2
    await finish(db, driver, again, number)
    while (again.lag().bytes_behind or 0) > 10_000:
        number += 1
        await finish(db, driver, again, number)


async def test_a_user_who_owns_nothing_reads_what_was_set_up(db: House) -> None:
    await db.run(TABLES)
    role = f"reader_{db.database}"
    await db.run(
        f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON ALL TABLES IN SCHEMA public TO"
        f" {role}; CREATE PUBLICATION given FOR TABLE plain, finish"
    )
    try:
        source = db.source(user=role, publication="given")
        driver = Driver(await source.describe(None))
        assert set(driver.exports) == {"public.plain", "public.finish"}
        await driver.open(source)
        await db.run("INSERT INTO plain VALUES (1, 'a', 1, NULL)")
        await finish(db, driver, source)
        await agree(db, driver)
        await source.forget()
        assert await db.run("SELECT 1 FROM pg_publication WHERE pubname = 'given'")
    finally:
        await db.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_forgetting_removes_slot_and_publication(db: House) -> None:
    await db.run(TABLES)
    source, driver = await db.opened(EXPORTS)
    await finish(db, driver, source)
    await source.forget()
    assert await db.run("SELECT 1 FROM pg_publication") == []
    assert await db.run("SELECT 1 FROM pg_replication_slots WHERE database = %s", db.database) == []
    await source.forget()  # there is nothing: that is fine


async def test_it_runs_on_uvloop(db: House, uvloop_run: Callable[..., None]) -> None:
    """Production's loop: everything again, from a copy to a stop."""
    await db.run(TABLES)
    await db.run(
        "INSERT INTO plain SELECT i, 'v', i, repeat('x', 300) FROM generate_series(1, 9000) i"
    )

    async def scenario() -> None:
        source = db.source()
        driver = Driver(await source.describe(EXPORTS))
        async with await connection(db.server, db.database) as changes:
            await driver.open(source)
            while driver.position is None:
                await driver.step(source)
            await source.close()
            await changes.execute("DELETE FROM plain WHERE id > 10")
            await changes.execute("INSERT INTO finish VALUES (1)")
            again = db.source()
            await driver.open(again)
            await driver.until(again, "public.finish", (1,))
            await again.close()
        assert sum(driver.contents["public.plain"].values()) == 10

    uvloop_run(scenario)
    assert isinstance(db.sql, psycopg.AsyncConnection)
