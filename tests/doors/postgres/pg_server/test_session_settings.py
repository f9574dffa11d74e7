"""Settings of a session beside a real PostgreSQL's: what is taken is obeyed, and taken back."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pg_house import dsn_of, pg_service  # type: ignore[import-not-found]

from actors.doors.sql_session.session_settings import SETTINGS, settings_table
from actors.testing.patience import PATIENCE_S
from actors.testing.postgres_server import PostgresServer

Connection = psycopg.AsyncConnection[Any]
ISOLATION = "-c default_transaction_isolation=repeatable\\ read"
BOOLEANS = ("on", "off", "true", "F", "yes", "'n'", "0", "1", "o", "maybe", "'of '", "of")
DURATIONS = ("0", "1", "250", "'30s'", "'1.5 min'", "'2h'", "'1d'", "'1500us'", "'90000'", "-1")
WRONG_DURATIONS = ("'5 parsecs'", "'S'", "9999999999", "'30 S'", "x", "''")
VALUES = {
    "application_name": ("mine", "Mine", "'Mine'", "''", '"Mine"'),
    "client_min_messages": ("debug", "error", "WARNING", "notice", "info", "loud"),
    "client_encoding": ("utf8", "'UTF-8'", "unicode", "nonsense"),
    "DateStyle": ("iso", "'ISO, DMY'", "ISO, YMD", "iso, dmy, ymd", "mdy", "strange"),
    "extra_float_digits": ("1", "3", "'2'", "4", "x"),
    "search_path": ("public", '"$user", public', "pg_catalog, public", "'public'"),
    "default_transaction_read_only": BOOLEANS,
    "transaction_read_only": ("on", "off", "maybe"),
    "transaction_isolation": ("'read committed'", "'repeatable read'", "'READ UNCOMMITTED'", "'x'"),
    "default_transaction_isolation": ("'read committed'", "'repeatable read'", "'x'"),
    "row_security": BOOLEANS,
    "check_function_bodies": BOOLEANS,
    "default_transaction_deferrable": BOOLEANS,
    "jit": BOOLEANS,
    "xmloption": ("content", "DOCUMENT", "x"),
    "default_table_access_method": ("heap", "'none such'"),
    "synchronous_commit": ("on", "off", "local", "sometimes"),
    "lock_timeout": (*DURATIONS, *WRONG_DURATIONS),
    "idle_session_timeout": ("0", "'10min'", "'1h'", *WRONG_DURATIONS),
    "idle_in_transaction_session_timeout": ("0", "'10min'", "'1h'", *WRONG_DURATIONS),
    "statement_timeout": ("0", "'10min'", "'1h'", "60000", *WRONG_DURATIONS),
    "mine.value": ("1", "'a b'", "on", "1, 2"),
    "other.part.value": ("''", "x"),
    "no_such_setting": ("1",),
    "mine.1x": ("1",),
    "server_version": ("'9'",),
}
SHOWN = [name for name in VALUES if name not in ("no_such_setting", "mine.1x", "server_version")]
TRANSACTIONS = (
    *("BEGIN", "BEGIN READ ONLY", "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE", "BEGIN"),
    *("COMMIT", "ROLLBACK", "COMMIT", "ROLLBACK"),
    *("SAVEPOINT a", "SAVEPOINT b", "ROLLBACK TO a", "ROLLBACK TO b", "RELEASE a"),
    *("SET TRANSACTION READ ONLY", "SET TRANSACTION READ WRITE"),
    *("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",),
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE, ISOLATION LEVEL READ COMMITTED",
    *("RESET ALL", "DISCARD ALL", "SELECT v FROM t WHERE k = 1", "SELECT v FROM t WHERE k = 1"),
    *(
        "INSERT INTO t VALUES ({0}, 0)",
        "UPDATE t SET v = 1 WHERE k = 1",
        "DELETE FROM t WHERE k = {0}",
    ),
)
DEFINITIONS = (
    *("DROP TABLE t", "CREATE TABLE u (k bigint)", "CREATE ROLE r", "COMMENT ON TABLE t IS 'x'"),
    *("CREATE VIEW w AS SELECT k FROM t", "ALTER TABLE t ADD COLUMN c bigint", "DROP ROLE r"),
    *("GRANT SELECT ON t TO r", "ALTER ROLE r NOLOGIN", "CREATE INDEX i ON t (v)"),
    *("TRUNCATE t", "CREATE TABLE u AS SELECT k FROM t", "COPY t FROM STDIN"),
    *("PREPARE p AS DELETE FROM t", "EXECUTE p"),
)
"""Drawn where PostgreSQL refuses them: else they would not be taken back here."""
READ_ONLY = (
    "BEGIN READ ONLY",
    "SET default_transaction_read_only = on",
    "BEGIN; SET TRANSACTION READ ONLY",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SELECT set_config('default_transaction_read_only', 'on', false)",
    "BEGIN; SET LOCAL transaction_read_only TO on; SAVEPOINT s",
)
FAILED = psycopg.pq.TransactionStatus.INERROR
CODES = {"25006", "25001", "25P02", "42704", "55P02", "42602"}
"""SQLSTATEs that are the same here and there."""


async def connect(dsn: str, **given: Any) -> Connection:
    return await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, prepare_threshold=None, **given
    )


async def rows(db: Connection, text: str) -> list[tuple[Any, ...]]:
    return await (await db.execute(text.encode())).fetchall()


async def outcome(db: Connection, text: str) -> str:
    """The SQLSTATE of a statement's error; "": it succeeded."""
    try:
        await db.execute(text.encode())
    except psycopg.Error as error:
        return error.sqlstate or str(error)
    return ""


async def shown(db: Connection) -> dict[str, str]:
    """The settings as SHOW has them."""
    return {name: str((await rows(db, f"SHOW {name}"))[0][0]) for name in SHOWN}


def draw_text(draw: random.Random, number: int) -> str:
    """A statement that changes settings, a transaction or rows, or several as one text."""
    if draw.random() < 0.08:
        return "; ".join(draw_text(draw, 1000 * number + at) for at in (1, 2, 3))
    name = draw.choice(list(VALUES))
    value = draw.choice(VALUES[name])
    # PostgreSQL's own default of these is another one.
    own = name.startswith("transaction")
    match draw.randrange(10) if not own else 9:
        case 0:
            return f"SET LOCAL {name} = {value}"
        case 1:
            return f"RESET {name}"
        case 2 if "," not in value and '"' not in value:
            text = value.strip("'")
            return f"SELECT set_config('{name}', '{text}', {draw.choice(['true', 'false'])})"
        case 3:
            return f"SET {name} TO DEFAULT"
        case 4 | 5 | 6 | 7:
            return draw.choice(TRANSACTIONS).format(number)
    return f"SET {draw.choice(['', 'SESSION'])} {name} TO {value}"


async def compare(ours: Connection, theirs: Connection, text: str, told: list[str]) -> bool:
    """Carry a text out here and there, and compare how it ended and what the settings are then.
    Return whether statements only read."""
    told.append(text)
    last = "\n".join(told[-9:])
    here, there = await outcome(ours, text), await outcome(theirs, text)
    assert bool(here) == bool(there), f"{here!r} {there!r}: {last}"
    assert here == there or there not in CODES, f"{here!r} {there!r}: {last}"
    if theirs.info.transaction_status == FAILED:
        assert ours.info.transaction_status == FAILED, last
        return False
    settings = await shown(theirs)
    assert await shown(ours) == settings, last
    for name in ("application_name", "DateStyle", "default_transaction_read_only"):
        told_here, told_there = (db.info.parameter_status(name) for db in (ours, theirs))
        assert told_here == told_there, f"{name}: {last}"
    return settings["transaction_read_only"] == "on"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("seed", range(6))
async def test_settings_are_those_of_postgresql(
    tmp_path: Path, postgres: PostgresServer, seed: int
) -> None:
    draw = random.Random(seed)
    database = f"seed{seed}"
    async with await connect(postgres.conninfo()) as made:
        await made.execute(f"CREATE DATABASE {database}")
    start = f"{ISOLATION} -c lock_timeout=7s -cmine.value=a\\ b --other.part.value="
    async with (
        pg_service(tmp_path) as service,
        await connect(dsn_of(service), options=start) as ours,
        await connect(postgres.conninfo(), dbname=database, options=start) as theirs,
    ):
        for db in (ours, theirs):
            await db.execute("CREATE TABLE t (k bigint PRIMARY KEY, v bigint)")
            await db.execute("INSERT INTO t VALUES (1, 0)")
        told: list[str] = []
        read_only = False
        for number in range(120):
            text = draw_text(draw, number + 2)
            if read_only and draw.random() < 0.3:
                text = draw.choice(DEFINITIONS)
            read_only = await compare(ours, theirs, text, told)
        for text in READ_ONLY:
            for setting in ("ROLLBACK", "DISCARD ALL", text, *DEFINITIONS):
                await compare(ours, theirs, setting, told)
                in_transaction = theirs.info.transaction_status == FAILED
                for again in ("ROLLBACK", text) if in_transaction else ():
                    await compare(ours, theirs, again, told)
        assert await shown(ours) == await shown(theirs)


# -- what PostgreSQL would take, and what is of this service alone ---------------------------------

REFUSED = {
    "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE": "0A000",
    "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY": "0A000",
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE": "0A000",
    "SET default_transaction_isolation = serializable": "0A000",
    "SELECT set_config('default_transaction_isolation', 'serializable', false)": "0A000",
    "SET spark.sql.ansi.enabled = false": "0A000",
    "SET LOCAL spark.sql.session.timeZone = 'UTC'": "0A000",
    "SET work_mem = '4MB'": "42704",
    "SET penstock.refresh_polcy = full": "42704",
    "SHOW penstock.nothing": "42704",
    "SHOW never.set": "42704",
    "SET client_encoding = 'latin1'": "22023",
    "SET bytea_output = escape": "22023",
    "SET IntervalStyle = iso_8601": "22023",
    "SET DateStyle = German": "22023",
    "SET extra_float_digits = 0": "22023",
    "SET standard_conforming_strings = off": "22023",
    "SET search_path = elsewhere, public": "22023",
    "SET default_tablespace = fast": "22023",
    "SET penstock.as_of = '2026-01-01'": "22023",
    "SET penstock.refresh_policy = sometimes": "22023",
    "SET penstock.written_at = 5": "55P02",
    "SET is_superuser = on": "55P02",
}


ASKED = {
    "SHOW server_version_num": "150000",
    "SHOW search_path": '"$user", public',
    "SHOW TRANSACTION ISOLATION LEVEL": "repeatable read",
    "show transaction isolation level": "repeatable read",
    "show max_identifier_length": "255",
    "show standard_conforming_strings": "on",
}
"""What drivers ask when they connect: ADBC, DBeaver, pgjdbc, psqlODBC and SQLAlchemy."""


async def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connect(dsn_of(service)) as db:
        before = await rows(db, "SHOW ALL")
        assert {text: await rows(db, text) for text in ASKED} == {
            text: [(value,)] for text, value in ASKED.items()
        }
        for text, code in REFUSED.items():
            assert await outcome(db, text) == code, text
        with pytest.raises(psycopg.Error, match="did you mean 'statement_timeout'"):
            await db.execute("SET statement_timeot = 5")
        with pytest.raises(psycopg.Error, match=r'"spark\.sql\.x" is a Spark setting'):
            await db.execute("SET spark.sql.x = 1")
        assert await rows(db, "SHOW ALL") == before
        for options in (
            *("-c work_mem=4MB", "-c default_transaction_isolation=serializable", "-d 5", "-c x"),
            *("-c client_encoding=latin1", "-c transaction_read_only=on", "-c role=nobody"),
        ):
            with pytest.raises(psycopg.OperationalError, match="FATAL"):
                await connect(dsn_of(service), options=options)
        with pytest.raises(psycopg.OperationalError, match="replication"):
            await connect(dsn_of(service), replication="database")


async def test_each_statement_of_read_committed_reads_the_latest(tmp_path: Path) -> None:
    async with (
        pg_service(tmp_path) as service,
        await connect(dsn_of(service)) as db,
        await connect(dsn_of(service)) as other,
    ):
        await db.execute("CREATE TABLE t (k bigint PRIMARY KEY, v bigint)")
        seen = {}
        for begin in ("BEGIN", "BEGIN ISOLATION LEVEL READ COMMITTED"):
            await other.execute("DELETE FROM t WHERE k = 1")
            await db.execute(begin.encode())
            found = [await rows(db, "SELECT v FROM t WHERE k = 1")]
            await other.execute("INSERT INTO t VALUES (1, 5)")
            found.append(await rows(db, "SELECT v FROM t WHERE k = 1"))
            await db.execute("INSERT INTO t VALUES (2, 2)")
            found.append(await rows(db, "SELECT v FROM t WHERE k = 2"))
            await db.execute("ROLLBACK")
            seen[begin] = found
        assert seen["BEGIN"] == [[], [], [(2,)]]
        assert seen["BEGIN ISOLATION LEVEL READ COMMITTED"] == [[], [(5,)], [(2,)]]


def _note_sqlstate(told: list[str | None], each: psycopg.errors.Diagnostic) -> None:
    told.append(each.sqlstate)


async def test_timeouts_end_what_takes_too_long(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connect(dsn_of(service)) as db:
        await db.execute("CREATE TABLE t (k bigint PRIMARY KEY, v bigint)")
        await db.execute("SET statement_timeout = '50ms'")
        # A subscribe has no end of its own.
        with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
            await rows(db, "SUBSCRIBE t")
        with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
            async with db.cursor().copy("COPY (SUBSCRIBE t) TO STDOUT") as copy:
                [each async for each in copy]
        await db.execute("SET statement_timeout = 0; INSERT INTO t VALUES (1, 1)")
        assert await rows(db, "SELECT v FROM t") == [(1,)]
        for setting, code in (
            ("idle_session_timeout", "57P05"),
            ("idle_in_transaction_session_timeout", "25P03"),
        ):
            async with await connect(dsn_of(service), options=f"-c {setting}=20") as idle:
                await idle.execute("BEGIN" if code == "25P03" else "SELECT 1")
                # libpq hands on as a notice what comes while it has asked for nothing.
                told: list[str | None] = []
                idle.add_notice_handler(partial(_note_sqlstate, told))
                with pytest.raises(psycopg.OperationalError):
                    async for _ in idle.notifies(timeout=PATIENCE_S):
                        pass
            assert told == [code]


async def test_notices_are_sent_from_a_level_on(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connect(dsn_of(service)) as db:
        told: list[str] = []
        db.add_notice_handler(lambda each: told.append(each.message_primary or ""))
        await db.execute("ROLLBACK")
        assert len(told) == 1
        await db.execute("SET client_min_messages = error")
        await db.execute("ROLLBACK")
        assert len(told) == 1


async def test_reset_goes_back_to_what_the_client_connected_with(tmp_path: Path) -> None:
    options = "-c statement_timeout=20s -c mine.x=a"
    async with (
        pg_service(tmp_path) as service,
        await connect(dsn_of(service), options=options, application_name="me") as db,
    ):
        for reset in ("RESET ALL", "DISCARD ALL"):
            await db.execute("SET statement_timeout = 0; SET mine.x = b; SET application_name = z")
            await db.execute(reset.encode())
            found = [await rows(db, f"SHOW {n}") for n in ("statement_timeout", "mine.x")]
            assert found == [[("20s",)], [("a",)]]
            assert db.info.parameter_status("application_name") == "me"


async def test_a_write_that_is_committed_is_not_canceled(tmp_path: Path) -> None:
    """The time is over while the write is on its way: it is done, and the client is told so."""
    async with pg_service(tmp_path) as service, await connect(dsn_of(service)) as db:
        await db.execute("CREATE TABLE t (k bigint PRIMARY KEY)")
        await db.execute("SET statement_timeout = 1")
        done = 0
        for number in range(100):
            try:
                await db.execute("INSERT INTO t VALUES (%s)", (number,))
                done += 1
            except psycopg.errors.QueryCanceled:
                pass
        await db.execute("SET statement_timeout = 0")
        assert await rows(db, "SELECT count(*) FROM t") == [(done,)]


def test_the_documentation_lists_the_settings(root: Path) -> None:
    assert settings_table() in (root / "docs" / "reference" / "sql.md").read_text()
    tested = {*VALUES, *(name for text in REFUSED for name in text.replace("(", " ").split())}
    tested |= {name.strip("',") for name in tested}
    for each in SETTINGS:
        assert each.name in tested or each.parse is None or each.name in ELSEWHERE, each.name


ELSEWHERE = {
    "role": "test_ended_rights",
    "session_authorization": "test_ended_rights",
    "TimeZone": "test_intervals",
    "password_encryption": "test_role_logins",
}
"""Settings that other files test."""
