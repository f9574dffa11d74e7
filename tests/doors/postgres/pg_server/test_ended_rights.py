"""At PostgreSQL's door: what REVOKE and DROP ROLE end, who ends whose session, and SET ROLE."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from pg_house import as_role, connected, dsn_of  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.runtime.errors import AccessDenied
from actors.runtime.settings import Settings
from actors.service import DoorConnector, Service
from actors.testing.engine import EngineControls, in_memory_engine
from actors.testing.patience import PATIENCE_S

Connection = psycopg.AsyncConnection[Any]
Denied = psycopg.errors.InsufficientPrivilege
MANY = 3_000
"""Rows that no client takes at once."""


class EndingWorld:
    """A service with an administrator and an application that may read one of two tables."""

    def __init__(self, service: Service, controls: EngineControls, boss: Connection) -> None:
        self.service = service
        self.controls = controls
        self.boss = boss

    async def app(self) -> Connection:
        made: Connection = await as_role(self.service, "app", "a")
        return made

    async def revoke(self) -> None:
        await self.boss.execute("REVOKE READ ON t FROM app")


@asynccontextmanager
async def ending_world(tmp_path: Path) -> AsyncIterator[EndingWorld]:
    """The service, for one test."""
    controls = EngineControls()
    settings = Settings(
        state_dir=str(tmp_path / "state"), listen="127.0.0.1:0", pg_listen="127.0.0.1:0"
    )
    with anyio.fail_after(PATIENCE_S):
        async with Service(settings, engine=in_memory_engine(controls)) as service:
            async with await connected(service) as db:
                await db.execute("CREATE ROLE boss LOGIN PASSWORD 'b'")
            async with await as_role(service, "boss", "b") as boss:
                for name in ("t", "u"):
                    await boss.execute(f"CREATE TABLE {name} (id BIGINT PRIMARY KEY, s STRING)")
                    async with boss.cursor().copy(f"COPY {name} FROM STDIN") as copy:
                        for number in range(MANY):
                            await copy.write_row((number, "x" * 50))
                await boss.execute("CREATE ROLE app LOGIN PASSWORD 'a'")
                await boss.execute("GRANT READ ON t, u TO app")
                yield EndingWorld(service, controls, boss)


async def rows(db: Connection, text: str) -> Any:
    return await (await db.execute(text)).fetchall()


async def failed(db: Connection, text: str, kind: type[psycopg.Error] = Denied) -> str:
    with pytest.raises(kind) as error:
        await rows(db, text)
    return str(error.value)


async def ended(db: Connection) -> None:
    """Check that a session is over. One that was idle may lose the error, if it sends a statement
    before it has read that."""
    with pytest.raises(psycopg.OperationalError):
        await rows(db, "SELECT 1")
    assert db.closed


# -- REVOKE ----------------------------------------------------------------------------------------


SUBSCRIBES = ["SUBSCRIBE t", "SUBSCRIBE (SELECT count(*) AS n FROM t)"]


async def follow(db: Connection, source: str, begun: anyio.Event, found: list[bytes]) -> str:
    """Follow by COPY until that ends with an error, which is returned."""
    try:
        async with db.cursor().copy(f"COPY ({source}) TO STDOUT") as copy:
            async for row in copy:
                found.append(bytes(row))
                begun.set()
    except psycopg.Error as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize("source", SUBSCRIBES)
async def test_a_copied_subscribe_ends(tmp_path: Path, source: str) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as app,
        await world.app() as other,
    ):
        lost: list[bytes] = []
        kept: list[bytes] = []
        told: list[str] = []
        begun, goes_on = anyio.Event(), anyio.Event()

        async def lose() -> None:
            told.append(await follow(app, source, begun, lost))

        async def keep() -> None:
            told.append(await follow(other, "SUBSCRIBE u", goes_on, kept))

        async with anyio.create_task_group() as group:
            group.start_soon(lose)
            group.start_soon(keep)
            await begun.wait()
            await goes_on.wait()
            await world.revoke()
            for name in ("t", "u"):
                await world.boss.execute(f"INSERT INTO {name} VALUES (-1, 'canary')")
            while not told or b"canary" not in b"".join(kept):
                await anyio.sleep(0.01)
            assert len(told) == 1
            assert told[0].startswith("InsufficientPrivilege: role app may not read t")
            assert b"canary" not in b"".join(lost)
            # The session goes on, and nothing of what ended is left.
            assert await rows(app, "SELECT s FROM u WHERE id = 1")
            left = await rows(world.boss, "SELECT object FROM penstock.subscribes")
            assert left == [("u",)]
            group.cancel_scope.cancel()


async def test_cursors_end_also_with_rows_that_are_here_already(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world, await world.app() as app:
        for name, text in (
            ("plain", "SELECT * FROM t"),
            ("run", "SELECT t.id FROM t JOIN u ON t.id = u.id"),
            ("followed", "SUBSCRIBE t"),
            ("other", "SELECT * FROM u"),
        ):
            await app.execute(f"DECLARE {name} CURSOR WITH HOLD FOR {text}")
            assert len(await rows(app, f"FETCH 2 FROM {name}")) == 2
        await world.revoke()
        for name in ("plain", "run", "followed"):
            for _ in range(2):
                assert "may not read t" in await failed(app, f"FETCH 2 FROM {name}")
        assert len(await rows(app, "FETCH 2 FROM other")) == 2


async def test_a_portal_gives_no_rest(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        db = await asyncpg.connect(dsn_of(world.service, "app"), password="a")
        try:
            async with db.transaction():
                rest = await db.cursor("SELECT * FROM t")
                other = await db.cursor("SELECT * FROM u")
                assert len(await rest.fetch(10)) == 10
                await world.revoke()
                assert len(await other.fetch(10)) == 10
                with pytest.raises(asyncpg.InsufficientPrivilegeError, match="may not read t"):
                    await rest.fetch(10)
                raise LookupError
        except LookupError:
            pass
        finally:
            await db.close()


async def test_a_query_that_waits_ends(tmp_path: Path) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as app,
        anyio.create_task_group() as group,
    ):
        world.controls.hold("Select")
        told: list[str] = []

        async def ask() -> None:
            told.append(await failed(app, "SELECT count(*) FROM t"))

        group.start_soon(ask)
        await world.controls.wait_started("Select")
        await world.revoke()
        while not told:
            await anyio.sleep(0.01)
        assert "may not read t" in told[0]
        world.controls.release("Select")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT count(*) FROM t",
        "CREATE MATERIALIZED VIEW v AS SELECT s, count(*) n FROM t GROUP BY s",
    ],
)
async def test_what_is_analysed_meanwhile_is_checked_again(tmp_path: Path, text: str) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as app,
        anyio.create_task_group() as group,
    ):
        await world.boss.execute("GRANT CREATE TO app")
        begun = world.controls.counts["Analyze"]
        world.controls.hold("Analyze")

        async def ask() -> None:
            assert "may not read t" in await failed(app, text)

        group.start_soon(ask)
        await world.controls.wait_started("Analyze", begun + 1)
        await world.revoke()
        world.controls.release("Analyze")
    # Nothing was run for it.
    assert world.controls.counts["Select"] == 0


async def test_changes_that_wait_for_a_client_are_not_taken_any_more(tmp_path: Path) -> None:
    async with (
        ending_world(tmp_path) as world,
        await Client.in_process(DoorConnector(world.service, "app")) as client,
    ):
        changes = client.subscribe("t")
        await anext(changes)
        await world.boss.execute("INSERT INTO t VALUES (-1, 'canary')")
        ((told,),) = await rows(world.boss, "SELECT told FROM penstock.subscribes")
        while told < int((await rows(world.boss, "SHOW penstock.written_at"))[0][0]):
            ((told,),) = await rows(world.boss, "SELECT told FROM penstock.subscribes")
        await world.revoke()
        with pytest.raises(AccessDenied, match="may not read t"):
            await anext(changes)


async def test_a_client_of_a_role_ends_too(tmp_path: Path) -> None:
    async with (
        ending_world(tmp_path) as world,
        await Client.in_process(DoorConnector(world.service, "app")) as client,
    ):
        async with anyio.create_task_group() as group:
            errors: list[str] = []
            begun = anyio.Event()

            async def follow() -> None:
                with pytest.raises(Exception, match="may not read t") as error:
                    async for _ in client.subscribe("t"):
                        begun.set()
                errors.append(type(error.value).__name__)

            group.start_soon(follow)
            await begun.wait()
            await world.revoke()
        assert errors == ["AccessDenied"]
        await world.boss.execute("DROP ROLE app")
        with pytest.raises(Exception, match="role app was dropped") as error:
            await client.status()
        assert type(error.value).__name__ == "SessionEnded"


# -- roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("DROP ROLE app", "role app was dropped"),
        ("ALTER ROLE app NOLOGIN", "role app may no longer log in"),
    ],
)
async def test_sessions_end_with_their_role(tmp_path: Path, change: str, reason: str) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as idle,
        await world.app() as busy,
    ):
        async with anyio.create_task_group() as group:
            told: list[str] = []
            begun = anyio.Event()

            async def watch() -> None:
                told.append(await follow(busy, "SUBSCRIBE u", begun, []))

            group.start_soon(watch)
            await begun.wait()
            await world.boss.execute(change)
            await ended(idle)
        (error,) = told
        assert error.startswith("AdminShutdown")
        assert reason in error
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await world.app()
        assert await rows(world.boss, "SELECT role FROM penstock.sessions") == [("boss",)]


@pytest.mark.parametrize("text", ["DROP ROLE boss", "ALTER ROLE boss NOLOGIN"])
async def test_who_ends_its_own_role_gets_the_answer_first(tmp_path: Path, text: str) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as app,
        await as_role(world.service, "boss", "b") as other,
    ):
        done = await world.boss.execute(text)
        assert done.statusmessage is not None
        assert done.statusmessage.endswith("ROLE")
        for each in (world.boss, other):
            await ended(each)
        assert await rows(app, "SELECT s FROM u WHERE id = 1")


async def test_a_new_password_and_new_rights_end_nothing(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world, await world.app() as app:
        await world.boss.execute("ALTER ROLE app PASSWORD 'other'")
        await world.boss.execute("DROP TOKENS FOR app")
        await world.boss.execute("GRANT WRITE ON t TO app")
        assert await rows(app, "SELECT s FROM t WHERE id = 1")


# -- ending others ---------------------------------------------------------------------------------


async def number_of(db: Connection) -> int:
    return int((await rows(db, "SELECT pg_backend_pid()"))[0][0])


async def test_administrators_end_every_session_and_others_their_own(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        boss = world.boss
        async with await world.app() as app, await world.app() as twin:
            mine, theirs = await number_of(app), await number_of(boss)
            assert "another role's session" in await failed(
                app, f"SELECT pg_terminate_backend({theirs})"
            )
            # A condition that is false ends nothing.
            assert await rows(boss, f"SELECT pg_terminate_backend({mine}) WHERE 1 = 0") == []
            assert await rows(app, "SELECT s FROM u WHERE id = 1")
            told: list[str] = []
            boss.add_notice_handler(
                lambda each: told.append(f"{each.severity}: {each.message_primary}")
            )
            assert await rows(boss, "SELECT pg_terminate_backend(99999)") == [(False,)]
            assert await rows(boss, "SELECT pg_cancel_backend(99999)") == [(False,)]
            assert told == ["WARNING: PID 99999 is not a session of this service"] * 2
            assert await rows(twin, f"SELECT pg_terminate_backend({mine})") == [(True,)]
            await ended(app)
            left = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"
            assert await rows(boss, left) == [(True,)]
            await ended(twin)
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="timeout"):
                await boss.execute(f"SELECT pg_terminate_backend({theirs}, 1000)")


async def test_a_statement_is_canceled_and_its_session_goes_on(tmp_path: Path) -> None:
    async with (
        ending_world(tmp_path) as world,
        await world.app() as app,
        anyio.create_task_group() as group,
    ):
        number = await number_of(app)
        world.controls.hold("Select")
        told: list[str] = []

        async def ask() -> None:
            told.append(await failed(app, "SELECT count(*) FROM t", psycopg.errors.QueryCanceled))

        group.start_soon(ask)
        await world.controls.wait_started("Select")
        assert await rows(world.boss, f"SELECT pg_cancel_backend({number})") == [(True,)]
        while not told:
            await anyio.sleep(0.01)
        world.controls.release("Select")
        assert await rows(app, "SELECT count(*) FROM t") == [(MANY,)]


async def send_and_leave(world: EndingWorld, *texts: str) -> int:
    """Send statements as they are, wait until the first one is in the engine, and go; return the
    session's number."""
    gone = await as_role(world.service, "boss", "b")
    number = await number_of(gone)
    before = world.controls.counts["Select"]
    world.controls.hold("Select")
    for text in texts:
        data = text.encode() + b"\0"
        await anyio.to_thread.run_sync(
            os.write, gone.pgconn.socket, b"Q" + (len(data) + 4).to_bytes(4, "big") + data
        )
    await world.controls.wait_started("Select", before + 1)
    gone.pgconn.finish()
    return number


async def test_what_runs_for_a_client_that_is_gone_ends(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        number = await send_and_leave(world, "SELECT count(*) FROM t")
        listed = f"SELECT number FROM penstock.sessions WHERE number = {number}"
        while await rows(world.boss, listed):  # it would last as long as the engine's job
            await anyio.sleep(0.01)
        world.controls.release("Select")
        assert await rows(world.boss, "SELECT count(*) FROM t") == [(MANY,)]


async def test_all_is_carried_out_that_a_client_has_sent_before_it_went(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        number = await send_and_leave(
            world,
            "INSERT INTO u SELECT 1000000 + count(*), 'a' FROM t",
            "INSERT INTO u VALUES (2000000, 'b')",
        )
        world.controls.release("Select")
        listed = f"SELECT number FROM penstock.sessions WHERE number = {number}"
        while await rows(world.boss, listed):
            await anyio.sleep(0.01)
        found = await rows(world.boss, "SELECT s FROM u WHERE id >= 1000000")
        assert sorted(found) == [("a",), ("b",)]


async def test_sessions_of_other_doors_are_ended_as_well(tmp_path: Path) -> None:
    async with (
        ending_world(tmp_path) as world,
        await Client.connect(world.service.address) as client,
    ):
        listed = "SELECT number FROM penstock.sessions WHERE door = 'client'"
        ((number,),) = await rows(world.boss, listed)
        assert await rows(world.boss, f"SELECT pg_terminate_backend({number})") == [(True,)]
        with pytest.raises(Exception, match="on request") as error:
            await client.status()
        assert type(error.value).__name__ == "SessionEnded"
        async with await Client.connect(world.service.address) as client, await world.app() as app:
            await client.end_session(await number_of(app))
            await ended(app)
            with pytest.raises(Exception, match="there is no session 99999"):
                await client.end_session(99999)


async def test_statements_are_shown_to_their_role_and_administrators(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        shown = "SELECT number, role, door, state, statement, address FROM penstock.sessions"
        async with await world.app() as app, await world.app() as twin:
            numbers = [await number_of(each) for each in (world.boss, app, twin)]
            found = {row[0]: row[1:] for row in await rows(app, f"{shown} ORDER BY number")}
            assert found.keys() == set(numbers)
            assert found[numbers[0]] == ("boss", "postgresql", None, None, None)
            assert found[numbers[1]][:3] == ("app", "postgresql", "active")
            assert found[numbers[1]][3].startswith("SELECT number, role")
            assert found[numbers[2]][:4] == ("app", "postgresql", "idle", None)
            assert found[numbers[2]][4].startswith("127.0.0.1:")
            everything = await rows(world.boss, shown)
            assert None not in {row[5] for row in everything}
            activity = "SELECT pid, usename, state, query FROM pg_stat_activity"
            seen = {row[0]: row[1:] for row in await rows(app, activity)}
            assert seen.keys() == set(numbers)
            assert seen[numbers[0]] == ("boss", None, "<insufficient privilege>")
            assert seen[numbers[1]] == ("app", "active", activity)
            assert seen[numbers[2]] == ("app", "idle", "")


async def test_secrets_of_statements_are_not_shown(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world, await world.app():
        session = next(each for each in world.service._sessions if each.role == "app")
        with session.running("ALTER ROLE app PASSWORD 'secret'"):
            ((shown,),) = await rows(
                world.boss, "SELECT statement FROM penstock.sessions WHERE role = 'app'"
            )
        assert shown == "ALTER ROLE app PASSWORD ***"


# -- SET ROLE --------------------------------------------------------------------------------------


async def who(db: Connection) -> tuple[str, str, str]:
    found = (await rows(db, "SELECT current_user, session_user, current_setting('role')"))[0]
    return str(found[0]), str(found[1]), str(found[2])


async def test_set_role_is_obeyed(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        boss = world.boss
        await boss.execute("SET ROLE app")
        assert await who(boss) == ("app", "boss", "app")
        assert "role app may not write t" in await failed(boss, "INSERT INTO t VALUES (-1, '')")
        assert "neither owns nor" in await failed(boss, "REVOKE READ ON t FROM app")
        assert await rows(boss, "SHOW role") == [("app",)]
        assert await rows(boss, "SELECT role FROM penstock.sessions") == [("app",)]
        await boss.execute("RESET ROLE")
        assert await who(boss) == ("boss", "boss", "none")
        await boss.execute("INSERT INTO t VALUES (-1, '')")
        await boss.execute("SET SESSION AUTHORIZATION app")
        assert await who(boss) == ("app", "app", "none")
        await failed(boss, "SET ROLE boss")
        await boss.execute("DISCARD ALL")
        assert await who(boss) == ("boss", "boss", "none")
        await boss.execute("SELECT set_config('role', 'app', false)")
        assert await who(boss) == ("app", "boss", "app")
        await boss.execute("SET ROLE NONE")
        assert await rows(boss, "SHOW SESSION AUTHORIZATION") == [("boss",)]


async def test_set_role_is_refused_as_postgresql_refuses_it(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world, await world.app() as app:
        assert 'set role "boss"' in await failed(app, "SET ROLE boss")
        await app.execute("SET ROLE app")
        kind = psycopg.errors.InvalidParameterValue
        assert 'role "nobody" does not exist' in await failed(app, "SET ROLE nobody", kind)
        assert await who(app) == ("app", "app", "none")
        with pytest.raises(psycopg.OperationalError, match="permission denied to set role"):
            await psycopg.AsyncConnection.connect(
                dsn_of(world.service, "app"), password="a", options="-c role=boss"
            )
        made = await psycopg.AsyncConnection.connect(
            dsn_of(world.service, "boss"), password="b", options="-c role=app", autocommit=True
        )
        async with made:
            assert (await who(made))[0] == "app"


async def test_a_transaction_takes_its_role_with_it(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        boss = world.boss

        async def after(*texts: str) -> str:
            for text in texts:
                await boss.execute(text)
            found = (await who(boss))[0]
            await boss.execute("RESET ROLE")
            return found

        assert await after("BEGIN", "SET ROLE app", "ROLLBACK") == "boss"
        assert await after("BEGIN", "SET ROLE app", "COMMIT") == "app"
        assert await after("BEGIN", "SET LOCAL ROLE app", "COMMIT") == "boss"
        assert await after("BEGIN", "SET LOCAL ROLE app", "ROLLBACK") == "boss"
        local = "SELECT set_config('role', 'app', true)"
        assert await after("BEGIN", local, "SAVEPOINT s", "RELEASE s") == "app"
        assert await after("COMMIT") == "boss"
        assert await after("SET ROLE app", "BEGIN", "RESET ROLE", "ROLLBACK") == "app"
        assert (
            await after("BEGIN", "SAVEPOINT s", "SET ROLE app", "ROLLBACK TO s", "COMMIT") == "boss"
        )
        assert (
            await after(
                "BEGIN", "SET ROLE app", "SAVEPOINT s", "RESET ROLE", "ROLLBACK TO s", "COMMIT"
            )
            == "app"
        )
        # Outside of a transaction there is nothing that it could be local to.
        assert await after("SET LOCAL ROLE app") == "boss"
        # A statement that fails takes all of its text with it.
        with pytest.raises(psycopg.Error):
            await boss.execute("SET ROLE app; SELECT nothing FROM nowhere")
        assert (await who(boss))[0] == "boss"


async def test_a_cursor_is_of_the_role_that_opened_it(tmp_path: Path) -> None:
    async with ending_world(tmp_path) as world:
        boss = world.boss
        await boss.execute("CREATE TABLE secret (id BIGINT PRIMARY KEY)")
        await boss.execute("INSERT INTO secret VALUES (1), (2)")
        await boss.execute("DECLARE c CURSOR WITH HOLD FOR SELECT * FROM secret")
        await boss.execute("SET ROLE app")
        assert len(await rows(boss, "FETCH 1 FROM c")) == 1
        await failed(boss, "SELECT * FROM secret")
        await failed(boss, "SELECT id FROM secret WHERE id = 1")
