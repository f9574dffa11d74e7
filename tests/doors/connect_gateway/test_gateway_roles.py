"""Roles at the door for Spark Connect's clients: tokens, rights on rows, sessions of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway_world import GatewayWorld, fill, gateway_world  # type: ignore[import-not-found]
from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession

from actors.control.access.role_registry import token_digest
from actors.model.protocol.role_messages import AlterRole, ChangeRights, CreateRole

TOKENS = {"boss": "b" * 64, "app": "a" * 64}


async def with_roles(world: GatewayWorld) -> None:
    """An administrator and an application, each with a token."""
    await fill(world.client)
    for name, token in TOKENS.items():
        await world.client.submit(CreateRole(0, name, login=True))
        await world.client.submit(AlterRole(0, name, add_token=token_digest(token)))


async def session_of(world: GatewayWorld, role: str, more: str = "") -> Any:
    """A session with a role's token; `localhost` is the one host that needs no TLS for it."""
    port = world.service.connect_address.rpartition(":")[2]
    token = TOKENS.get(role, role)
    address = f"sc://localhost:{port}/;token={token}{more}"
    made = await world.run(lambda: SparkSession(address))
    world._sessions.append(made)
    return made


async def denied(world: GatewayWorld, call: Any) -> str:
    with pytest.raises(PySparkException) as failed:
        await world.run(call)
    return str(failed.value)


async def test_a_token_decides_who_the_session_is(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        # As ever, while no role may log in.
        before = await world.session()
        assert (await world.run(lambda: before.range(1).toArrow())).num_rows == 1
        await with_roles(world)
        boss, app = [await session_of(world, name) for name in ("boss", "app")]
        assert (await world.run(lambda: boss.table("orders").toArrow())).num_rows == 6
        assert "GRANT READ ON orders TO app" in await denied(
            world, lambda: app.table("orders").toArrow()
        )
        # Also rows that would be lent to Spark, and those of views over them.
        assert "may not read orders" in await denied(
            world, lambda: app.table("orders").groupBy("name").count().toArrow()
        )
        await world.client.submit(
            ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders",))
        )
        assert (await world.run(lambda: app.table("orders").toArrow())).num_rows == 6
        await world.run(lambda: app.table("orders").groupBy("name").count().toArrow())
        await world.client.submit(
            ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders",), revoke=True)
        )
        assert "may not read orders" in await denied(world, lambda: app.table("orders").toArrow())
        # A session that was opened before there were roles shows no token.
        for other in (before, await session_of(world, "c" * 64)):
            assert "a role's token is required" in await denied(
                world, lambda other=other: other.range(1).toArrow()
            )


async def test_frames_and_statements_need_the_same_rights(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await with_roles(world)
        app = await session_of(world, "app")

        def insert() -> None:
            app.createDataFrame([(50, 2.5)], "id bigint, x double").write.insertInto("other")

        assert "GRANT WRITE ON other TO app" in await denied(world, insert)
        assert "GRANT WRITE ON other TO app" in await denied(
            world, lambda: app.sql("INSERT INTO other VALUES (50, 2.5)")
        )
        assert "GRANT CREATE TO app" in await denied(
            world, lambda: app.sql("CREATE TABLE made (a INT)")
        )
        assert "is not an administrator" in await denied(
            world, lambda: app.sql("CREATE ROLE other")
        )
        boss = await session_of(world, "boss")
        await world.run(lambda: boss.sql("GRANT write ON other TO app"))
        await world.run(insert)
        await world.run(lambda: app.sql("INSERT INTO other VALUES (51, 2.5)"))
        rows = await world.run(lambda: boss.sql("SHOW GRANTS FOR app").toArrow())
        assert [(each["right"], each["on"]) for each in rows.to_pylist()] == [
            ("connect", "*"),
            ("write", "other"),
        ]
        assert len(await world.client.peek("other")) == 6


async def test_a_session_answers_to_its_role_alone(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await with_roles(world)
        same = ";user_id=one;session_id=00112233-4455-6677-8899-aabbccddeeff"
        boss = await session_of(world, "boss", same)
        await world.run(lambda: boss.table("orders").toArrow())
        app = await session_of(world, "app", same)
        for call in (
            lambda: app.range(1).toArrow(),
            lambda: app.conf.set("spark.sql.ansi.enabled", "false"),
            app.interruptAll,
        ):
            assert "belongs to a different role" in await denied(world, call)
        assert (await world.run(lambda: boss.table("orders").toArrow())).num_rows == 6
