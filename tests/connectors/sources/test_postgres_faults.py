"""The PostgreSQL source where something is wrong: connections lost, servers killed, tables changed,
a server that was not set up. Every refusal says what to do.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from postgres_house import Driver, House, house, lsn  # type: ignore[import-not-found]
from test_postgres_changes import EXPORTS, TABLES, agree, change, finish  # type: ignore[import-not-found]

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.source import SourceIdle, SourceUnreachable
from actors.runtime.errors import InvalidUsage
from actors.testing.postgres_server import postgres_server

READERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock'"
)


@pytest_asyncio.fixture
async def own(tmp_path: Path) -> AsyncIterator[House]:
    """A database of a server of one's own, which may be killed."""
    with postgres_server(wal_level="logical", max_slot_wal_keep_size="1MB") as server:
        async with house(server, "own") as made:
            yield made


async def begun(db: House, **options: Any) -> tuple[PostgresSource, Driver]:
    """A source over `TABLES` that has given their first contents."""
    await db.run(TABLES)
    made: tuple[PostgresSource, Driver] = await db.filled(EXPORTS, **options)
    return made


async def lost(source: PostgresSource) -> SourceUnreachable:
    """What ends it."""
    with pytest.raises(SourceUnreachable) as caught:
        while True:
            await source.next()
    await source.close()
    return caught.value


async def test_every_connection_may_be_ended(db: House) -> None:
    draw = random.Random(3)
    source, driver = await begun(db)
    for _ in range(4):
        for _ in range(8):
            await change(db, draw)
        for _ in range(draw.randrange(4)):
            if isinstance(await driver.step(source), SourceIdle):
                break
        await db.run(READERS)
        error = await lost(source)
        assert "PostgreSQL" in str(error)
        assert error.hint
        source = db.source()
        await driver.open(source)
    await finish(db, driver, source)
    await agree(db, driver)


async def test_a_server_that_is_killed(own: House) -> None:
    draw = random.Random(4)
    source, driver = await begun(own)
    for turn in range(2):
        for _ in range(8):
            await change(own, draw)
        await finish(own, driver, source, turn)
        for _ in range(8):
            await change(own, draw)
        own.server.kill()
        error = await lost(source)
        assert "will retry" in error.hint
        with pytest.raises(SourceUnreachable, match="failed"):
            await own.source().open(list(driver.exports.values()), driver.position)
        own.server.start()
        await own.reconnect()
        source = own.source()
        await driver.open(source)
    await finish(own, driver, source, 9)
    await agree(own, driver)


async def test_a_stopping_server_does_not_wait_for_us(own: House) -> None:
    """A fast stop waits until readers have confirmed everything, or are gone: a source that cannot
    look at the catalog any more ends, and lets go of the stream."""
    # Only the stream: a look at the catalog, on a connection that ends first, would end it all.
    source, driver = await begun(own, poll_ms=3_600_000)
    await own.run("CREATE TABLE other AS SELECT i FROM generate_series(1, 1000) i")
    import anyio

    async with anyio.create_task_group() as both:

        async def read() -> None:
            with pytest.raises(SourceUnreachable):
                while True:
                    await driver.step(source)
            await source.close()

        both.start_soon(read)
        await anyio.to_thread.run_sync(own.server.stop)
    own.server.start()
    await own.reconnect()


async def test_a_quiet_source_lets_the_server_forget(db: House, monkeypatch: Any) -> None:
    """Log that is not for us moves the position too."""
    monkeypatch.setattr("actors.connectors.sources.postgres_stream.IDLE_MARK_MS", 50)
    source, driver = await begun(db, feedback_ms=100)
    before = len(driver.marks)
    await db.run("CREATE TABLE other AS SELECT i FROM generate_series(1, 1000) i")
    (here,) = await db.run("SELECT pg_current_wal_lsn()::text")
    while driver.position is None or int(lsn(driver.position).split("/")[1], 16) < int(
        str(here[0]).split("/")[1], 16
    ):
        await driver.step(source)
    assert {mark.messages for mark in driver.marks[before:]} == {0}


async def test_the_server_hears_from_a_source_that_nobody_asks(db: House) -> None:
    """Whoever drives it may be busy for longer than the server waits for a word."""
    # It asks for a word after half of this time, and waits for the other half.
    await db.run(f"ALTER DATABASE {db.database} SET wal_sender_timeout = '10s'")
    source, driver = await begun(db, poll_ms=3_600_000)
    await finish(db, driver, source)
    sql = "SELECT active_pid FROM pg_replication_slots WHERE database = %s"
    reader = await db.run(sql, db.database)
    asked = "SELECT reply_time FROM pg_stat_replication WHERE pid = %s"
    heard = await db.run(asked, reader[0][0])
    while await db.run(asked, reader[0][0]) == heard:
        await db.run("SELECT pg_sleep(0.1)")
    assert await db.run(sql, db.database) == reader
    assert reader[0][0] is not None
    await finish(db, driver, source, 2)


async def test_a_lost_slot(own: House) -> None:
    source, driver = await begun(own)
    await source.close()
    await own.run("CREATE TABLE much AS SELECT repeat('x', 500) FROM generate_series(1, 200000)")
    await own.run("SELECT pg_switch_wal(); CHECKPOINT")
    with pytest.raises(InvalidUsage, match=r"wal_status lost.*max_slot_wal_keep_size.*drop the"):
        await own.source().open(list(driver.exports.values()), driver.position)


async def freed(db: House) -> None:
    """Waits until the server has seen that the slot's reader went."""
    sql = "SELECT 1 FROM pg_replication_slots WHERE database = %s AND active_pid IS NOT NULL"
    while await db.run(sql, db.database):
        pass


async def test_a_slot_that_is_gone_or_was_used(db: House) -> None:
    source, driver = await begun(db)
    await finish(db, driver, source)
    first = driver.position
    await finish(db, driver, source, 2)
    exports = list(driver.exports.values())
    await source.close()
    await freed(db)
    with pytest.raises(InvalidUsage, match="another reader used the slot, or it was recreated"):
        await db.source().open(exports, first)
    await db.run(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
        db.database,
    )
    with pytest.raises(InvalidUsage, match=r"no longer exists on the server.*create it again"):
        await db.source().open(exports, driver.position)


async def test_another_server_or_database(db: House) -> None:
    source, driver = await begun(db)
    await source.close()
    assert driver.position is not None
    with pytest.raises(InvalidUsage, match="connect to that one, or drop the source"):
        await db.source().open(
            list(driver.exports.values()), driver.position.replace('"system":"7', '"system":"8')
        )


async def test_a_slot_is_read_by_one(db: House) -> None:
    source, driver = await begun(db)
    assert isinstance(await driver.step(source), SourceIdle)  # it reads by now
    with pytest.raises(SourceUnreachable, match="is in use by process") as caught:
        await db.source().open(list(driver.exports.values()), driver.position)
    assert "wal_sender_timeout" in caught.value.hint


DDL: list[tuple[str, str]] = [
    ("ALTER TABLE plain DROP COLUMN n", "column n was dropped or renamed"),
    ("ALTER TABLE plain RENAME COLUMN n TO m", "column n was dropped or renamed"),
    (
        "ALTER TABLE plain DROP COLUMN n; ALTER TABLE plain ADD COLUMN n bigint",
        "column n was dropped",
    ),
    (
        "ALTER TABLE plain ALTER n TYPE numeric(9,2)",
        "column n changed its type from bigint to decimal(9,2)",
    ),
    ("ALTER TABLE plain RENAME TO elsewhere", "was dropped, recreated or renamed"),
    ("DROP TABLE plain", "was dropped, recreated or renamed"),
    (
        "DROP TABLE plain; CREATE TABLE plain (id int PRIMARY KEY, v text, n bigint, doc text)",
        "recreated",
    ),
    ("ALTER PUBLICATION {publication} DROP TABLE plain", "no longer contains the table"),
]


@pytest.mark.parametrize(("statement", "words"), DDL)
async def test_changes_of_a_table_that_end_it(db: House, statement: str, words: str) -> None:
    source, driver = await begun(db)
    await db.run(statement.replace("{publication}", f"penstock_{db.database}"))
    failed = await driver.until_failed(source, "public.plain")
    assert words in failed.error
    assert "drop this table from the source" in failed.hint
    await db.run("INSERT INTO whole VALUES (1, 'on', 1, NULL)")
    await finish(db, driver, source)
    assert driver.contents["public.whole"][(1, "on", 1, None)] == 1


TOLD_BY_THE_STREAM: list[tuple[str, str]] = [
    ("ALTER TABLE plain DROP COLUMN n; INSERT INTO plain VALUES (9, 'a')", "column n was dropped"),
    ("ALTER TABLE plain ALTER n TYPE text; INSERT INTO plain VALUES (9)", "from bigint to string"),
    ("ALTER TABLE plain RENAME TO p; INSERT INTO p VALUES (9)", "renamed to public.p"),
    (
        "ALTER TABLE whole REPLICA IDENTITY NOTHING; INSERT INTO whole VALUES (9)",
        "replica identity is now nothing, but the ingested rows need full",
    ),
    (
        "ALTER TABLE plain DROP CONSTRAINT plain_pkey; ALTER TABLE plain ALTER n SET NOT NULL;"
        " ALTER TABLE plain ADD PRIMARY KEY (n); INSERT INTO plain VALUES (9, 'a', 2)",
        "replica identity is now (n), but the ingested rows need (id)",
    ),
]


@pytest.mark.parametrize(("statement", "words"), TOLD_BY_THE_STREAM)
async def test_changes_of_a_table_that_the_stream_tells(
    db: House, statement: str, words: str
) -> None:
    """Before anybody looks at the catalog; in the midst of other changes."""
    source, driver = await begun(db, poll_ms=3_600_000)
    name = "public.whole" if "TABLE whole" in statement else "public.plain"
    await db.run(f"INSERT INTO {name} VALUES (1, 'a', 1, NULL)")
    await db.run(statement)
    failed = await driver.until_failed(source, name)
    assert words in failed.error
    await finish(db, driver, source)


async def test_an_added_column_is_left_out_and_told(db: House) -> None:
    source, driver = await begun(db)
    await db.run("ALTER TABLE plain ADD COLUMN extra int DEFAULT 7")
    await db.run("INSERT INTO plain VALUES (1, 'a', 1, NULL, 8); UPDATE plain SET extra = 9")
    number = 0
    while not source.lag().notes:
        number += 1
        await finish(db, driver, source, number)
    assert "public.plain: new columns extra are not ingested" in source.lag().notes[0]
    await agree(db, driver)
    assert not driver.failed


async def test_a_replica_identity_that_becomes_full_or_its_key(db: House) -> None:
    source, driver = await begun(db)
    await db.run(
        "INSERT INTO plain SELECT i, 'v', i, repeat('x', 5000) FROM generate_series(1, 5) i"
    )
    for number, identity in enumerate(["FULL", "DEFAULT", "FULL"]):
        await db.run(f"ALTER TABLE plain REPLICA IDENTITY {identity}")
        await db.run(
            "UPDATE plain SET v = v || 'w'; DELETE FROM plain WHERE id = 5;"
            "INSERT INTO plain VALUES (5, 'v', 5, 'y')"
        )
        await finish(db, driver, source, number)
        await agree(db, driver)
    changed = {row[:2] for row in driver.contents["public.plain"]}
    assert changed == {*((id_, "vwww") for id_ in range(1, 5)), (5, "v")}
    assert not driver.failed


async def test_a_dropped_publication(db: House) -> None:
    source, driver = await begun(db, poll_ms=3_600_000)
    await driver.step(source)
    await db.run(f"DROP PUBLICATION penstock_{db.database}")
    await db.run("INSERT INTO plain VALUES (1)")
    error = await lost(source)
    assert "does not exist" in str(error)
    assert "was dropped" in error.hint


REFUSED: list[tuple[str, dict[str, tuple[str, ...]], str]] = [
    ("", {"absent": ()}, "no tables public.absent in database"),
    (
        "CREATE TABLE t (a int)",
        {"t": ()},
        'PRIMARY KEY, or run ALTER TABLE "public"."t" REPLICA IDENTITY FULL',
    ),
    (
        "CREATE TABLE t (a int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY NOTHING",
        {"t": ()},
        "public.t has no replica identity",
    ),
    (
        "CREATE TABLE t (a int PRIMARY KEY, b int)",
        {"t": ("a",)},
        r"key of public.t \(a\) is left out",
    ),
    ("CREATE TABLE t (a int PRIMARY KEY)", {"t": ("z",)}, "has no columns z to leave out"),
    ("CREATE UNLOGGED TABLE t (a int PRIMARY KEY)", {"t": ()}, "SET LOGGED"),
    ("CREATE VIEW t AS SELECT 1 AS a", {"t": ()}, "no tables public.t .*views"),
    (
        "CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t"
        " WITH (publish = 'insert')",
        {"t": ()},
        "publication p does not publish update, delete, truncate: run ALTER PUBLICATION",
    ),
    (
        "CREATE TABLE t (a int PRIMARY KEY, b int); CREATE PUBLICATION p FOR TABLE t (a)",
        {"t": ()},
        "publication p does not publish b of public.t",
    ),
    (
        "CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t WHERE (a > 1)",
        {"t": ()},
        "filters the rows of public.t",
    ),
]


@pytest.mark.parametrize(("setup", "wanted", "words"), REFUSED)
async def test_what_describe_refuses(
    db: House, setup: str, wanted: dict[str, tuple[str, ...]], words: str
) -> None:
    if setup:
        await db.run(setup)
    source = db.source(publication="p")
    with pytest.raises(InvalidUsage, match=words):
        await source.describe(wanted)
    assert not await db.run("SELECT 1 FROM pg_replication_slots WHERE database = %s", db.database)


async def test_a_user_without_rights(db: House) -> None:
    await db.run(TABLES)
    role = f"poor_{db.database}"
    await db.run(f"CREATE ROLE {role} LOGIN")
    try:
        source = db.source(user=role)
        with pytest.raises(
            SourceUnreachable, match="must be superuser or replication role"
        ) as caught:
            await source.describe({"plain": ()})
        assert "ALTER ROLE … REPLICATION" in caught.value.hint
        await db.run(f"ALTER ROLE {role} REPLICATION")
        with pytest.raises(
            InvalidUsage, match=r"no permission to read id, v, n, doc of public.plain: GRANT"
        ):
            await source.describe({"plain": ()})
        await db.run(f"GRANT SELECT ON plain TO {role}")
        with pytest.raises(
            InvalidUsage, match=r"does not own public.plain: have the owner run CREATE PUB"
        ):
            await source.describe({"plain": ()})
        with pytest.raises(InvalidUsage, match="create is off: run CREATE PUBLICATION"):
            await db.source(user=role, create=False).describe({"plain": ()})
        await db.run("ALTER TABLE plain ENABLE ROW LEVEL SECURITY")
        with pytest.raises(InvalidUsage, match="row security hides rows"):
            await source.describe({"plain": ()})
    finally:
        await db.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_server_without_logical_log() -> None:
    with postgres_server(fsync="off") as server:
        async with house(server, "small") as db:
            await db.run("CREATE TABLE t (a int PRIMARY KEY)")
            with pytest.raises(InvalidUsage, match="ALTER SYSTEM SET wal_level = logical"):
                await db.source().describe({"t": ()})
        server.stop()
        server.start(wal_level="logical", max_replication_slots="1")
        async with house(server, "filled") as db:
            await db.run("CREATE TABLE t (a int PRIMARY KEY)")
            await db.run("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
            with pytest.raises(InvalidUsage, match="max_replication_slots is 1, and 1 are in use"):
                await db.source().describe({"t": ()})


async def test_generated_columns_and_columns_left_out(db: House) -> None:
    await db.run(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, n int, twice int GENERATED ALWAYS AS"
        " (n * 2) STORED); INSERT INTO t VALUES (1, 's', 2)"
    )
    source = db.source()
    exports = await source.describe({"public.t": ("secret",)})
    assert exports[0].schema.names == ("id", "n")
    driver = Driver(exports)
    await driver.open(source)
    await driver.until(source, "public.t", (1, 2))
    await db.run("INSERT INTO t VALUES (2, 's', 3); UPDATE t SET secret = 'other'")
    await driver.until(source, "public.t", (2, 3))
    assert not source.lag().notes


async def test_partitions_are_one_table(db: House) -> None:
    await db.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE high PARTITION OF t FOR VALUES FROM (10) TO (20);"
        "INSERT INTO t VALUES (1, 'a'), (11, 'b')"
    )
    source, driver = await db.opened({"t": ()})
    await db.run("UPDATE t SET id = 12 WHERE id = 1; INSERT INTO t VALUES (5, 'end')")
    await driver.until(source, "public.t", (5, "end"))
    await agree(db, driver)
    assert driver.contents == {"public.t": {(5, "end"): 1, (11, "b"): 1, (12, "a"): 1}}


def test_passwords_come_from_where_they_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    from actors.connectors.sources.postgres_config import PostgresConfig

    file = tmp_path / "password"
    file.write_text("it's \\ secret\n")
    config = PostgresConfig(host="h", password_file=str(file))
    assert (
        config.connection(replication=False, libpq_version=180_000)["password"] == "it's \\ secret"
    )
    monkeypatch.setenv("DB_PASSWORD", "other")
    config = PostgresConfig(host="h", password_env="DB_PASSWORD")
    assert config.connection(replication=False, libpq_version=180_000)["password"] == "other"
    assert "other" not in repr(config)
    monkeypatch.delenv("DB_PASSWORD")
    with pytest.raises(InvalidUsage, match=r"environment variable DB_PASSWORD .*is not set"):
        config.connection(replication=False, libpq_version=180_000)
    with pytest.raises(InvalidUsage, match="one of password_env"):
        PostgresConfig(host="h", password_env="A", passfile="b").check()
