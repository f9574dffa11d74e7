"""What a dropped source leaves in PostgreSQL when that cannot be reached: shown, removed later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psycopg
import pytest
from postgres_house import House, connection  # type: ignore[import-not-found]
from test_postgres_in_the_service import running  # type: ignore[import-not-found]

from actors.control.controller.connectors import external_cleanup as leftovers
from actors.doors.client.client import Client
from actors.model.protocol.api import SourceStatus
from actors.runtime.errors import InvalidUsage, UnknownObject


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "DELAY_MS_MIN", 50)
    monkeypatch.setattr(leftovers, "DELAY_MS_MAX", 50)


@asynccontextmanager
async def outside(db: House) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A connection to another database of the server."""
    async with await connection(db.server, "postgres") as admin:
        yield admin


async def close_door(db: House, admin: psycopg.AsyncConnection[Any]) -> None:
    """Nobody gets in any more, and who is in goes."""
    await admin.execute(f"ALTER DATABASE {db.database} ALLOW_CONNECTIONS false".encode())
    await admin.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s",
        (db.database,),
    )


async def open_door(db: House, admin: psycopg.AsyncConnection[Any]) -> None:
    await admin.execute(f"ALTER DATABASE {db.database} ALLOW_CONNECTIONS true".encode())
    await db.reconnect()


async def slots(db: House, admin: psycopg.AsyncConnection[Any]) -> list[str]:
    cursor = await admin.execute(
        "SELECT slot_name FROM pg_replication_slots WHERE database = %s", (db.database,)
    )
    return [row[0] for row in await cursor.fetchall()]


async def make(db: House, client: Client, name: str = "pg", **options: str) -> None:
    given = msgspec.to_builtins(db.config()) | {"kind": "postgres"} | options
    for each in ("type", "token"):
        given.pop(each, None)
    await client.create_source(name, given, {"public.things": f"things_{name}"})
    await client.peek(f"things_{name}")


async def listed(client: Client, error: str) -> SourceStatus:
    """The one source that there is, when its error says that."""
    while True:
        (found,) = await client.sources()
        if error in found.health.error:
            return found
        await anyio.sleep(0.02)


async def gone(client: Client) -> None:
    while await client.sources():
        await anyio.sleep(0.02)


async def test_a_slot_that_could_not_be_reached_goes_after_a_restart(
    db: House, tmp_path: Path
) -> None:
    await db.run("CREATE TABLE things (id bigint PRIMARY KEY)")
    async with outside(db) as admin:
        async with running(tmp_path) as client:
            await make(db, client)
            (slot,) = await slots(db, admin)
            await close_door(db, admin)
            await client.drop_source("pg")
            told = await listed(client, "SourceUnreachable")
            assert (told.name, told.kind, told.health.status) == ("pg", "postgres", "dropped")
            assert f"slot {slot} still exists" in told.health.error
            assert "penstock source forget" in told.health.hint
            table = await client.peek("penstock.sources")
            assert table["name"].to_pylist() == ["pg"]
            assert table["status"].to_pylist() == ["dropped"]
            assert await slots(db, admin) == [slot]
        async with running(tmp_path) as client:
            await listed(client, "SourceUnreachable")
            await open_door(db, admin)
            await gone(client)
            assert await slots(db, admin) == []
            assert await db.run("SELECT 1 FROM pg_publication") == []
        async with running(tmp_path) as client:
            assert await client.sources() == ()


async def test_a_person_may_give_it_up(db: House, tmp_path: Path) -> None:
    await db.run("CREATE TABLE things (id bigint PRIMARY KEY)")
    async with outside(db) as admin:
        async with running(tmp_path) as client:
            await make(db, client)
            with pytest.raises(UnknownObject, match="sources that have: none"):
                await client.forget_source("pg")
            (slot,) = await slots(db, admin)
            await close_door(db, admin)
            await client.drop_source("pg")
            await listed(client, "SourceUnreachable")
            with pytest.raises(UnknownObject, match="sources that have: pg"):
                await client.forget_source("other")
            assert await client.forget_source("pg") == f"slot {slot}"
            assert await client.sources() == ()
        await open_door(db, admin)
        async with running(tmp_path) as client:
            assert await client.sources() == ()
        assert await slots(db, admin) == [slot]


async def test_what_a_new_source_uses_is_not_removed(
    db: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "DELAY_MS_MAX", 2_000)
    monkeypatch.setattr(leftovers, "DELAY_MS_MIN", 2_000)
    await db.run("CREATE TABLE things (id bigint PRIMARY KEY)")
    await db.run("CREATE PUBLICATION of_my_own FOR TABLE things")
    own = {"slot": "of_my_own", "publication": "of_my_own"}
    async with outside(db) as admin, running(tmp_path) as client:
        await make(db, client, "one", **own)
        await close_door(db, admin)
        await client.drop_source("one")
        await listed(client, "SourceUnreachable")
        await admin.execute("SELECT pg_drop_replication_slot('of_my_own')")
        await open_door(db, admin)
        # Mostly the new source comes before the next try; else that finds nothing to remove.
        await make(db, client, "two", **own)
        while True:
            left = [each for each in await client.sources() if each.health.status == "dropped"]
            if not left or "source two now uses slot of_my_own" in left[0].health.error:
                break
            await anyio.sleep(0.02)
        await db.run("INSERT INTO things VALUES (1)")
        async for change in client.subscribe("things_two"):
            if change.table is not None and change.table.num_rows:
                break
        assert await slots(db, admin) == ["of_my_own"]
        await client.drop_source("two")
        await gone(client)
        assert await slots(db, admin) == []


async def test_what_a_refusal_tells_to_do_lets_the_source_in(db: House, tmp_path: Path) -> None:
    await db.run("CREATE TABLE things (id bigint PRIMARY KEY)")
    role = f"poor_{db.database}"
    await db.run(f"CREATE ROLE {role} LOGIN REPLICATION")
    await db.run(f"GRANT SELECT ON things TO {role}")
    try:
        async with outside(db) as admin, running(tmp_path) as client:
            told = []
            for _ in range(2):
                with pytest.raises(InvalidUsage, match="have the owner run ") as caught:
                    await make(db, client, user=role)
                told.append(str(caught.value))
            assert told[0] == told[1]
            await db.run(told[0].partition("have the owner run ")[2])
            await make(db, client, user=role)
            await client.drop_source("pg")
            await gone(client)
            # The owner's publication is the owner's to drop.
            assert len(await db.run("SELECT 1 FROM pg_publication")) == 1
            assert await slots(db, admin) == []
    finally:
        await db.run(f"DROP OWNED BY {role}; DROP ROLE {role}")
