"""At the door for Spark Connect: what REVOKE, DROP TOKENS and DROP ROLE end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from gateway_world import GatewayWorld, gateway_world  # type: ignore[import-not-found]
from pyspark.errors import PySparkException
from test_gateway_roles import session_of, with_roles  # type: ignore[import-not-found]

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import OpenSessions
from actors.control.access.role_registry import READ, RoleRegistry, token_digest
from actors.doors.client.client import Client
from actors.doors.connect_gateway.callers import CallerIdentity, use_caller
from actors.doors.connect_gateway.gateway_sessions import GatewaySession, OpenOperation, SessionKey
from actors.model.protocol.role_messages import AlterRole, ChangeRights, DropRoles
from actors.runtime.errors import AccessDenied, OperationCanceled
from actors.testing.patience import PATIENCE_S


async def reader(world: GatewayWorld) -> Any:
    """A session of a role that may read orders."""
    await with_roles(world)
    await world.client.submit(
        ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders",))
    )
    return await session_of(world, "app")


async def revoke(world: GatewayWorld) -> None:
    await world.client.submit(
        ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders",), revoke=True)
    )


async def sessions(world: GatewayWorld) -> list[dict[str, Any]]:
    """The sessions of this door."""
    found = await world.client.peek("penstock.sessions", where=[("door", "=", "connect")])
    shown: list[dict[str, Any]] = found.to_pylist()
    return shown


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await anyio.sleep(0.01)


async def ended_by(
    world: GatewayWorld, call: Callable[[], Any], change: Callable[[], Any], *, at_spark: bool
) -> str:
    """Return the error of a call that runs while something changes."""
    told: list[str] = []

    async def run() -> None:
        with pytest.raises(PySparkException) as failed:
            await world.run(call)
        told.append(str(failed.value))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        if at_spark:
            await until(lambda: bool(world.spark.hanging))
        else:
            await world.controls.wait_started("Select")
        await change()
    return told[0]


async def test_an_operation_of_spark_ends_with_the_right_to_what_it_reads(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        # The server that stands for Spark sends its columns, and then nothing.
        frame = app.table("orders").groupBy("name").count().withColumnRenamed("count", "hang")
        told = await ended_by(world, lambda: frame.toArrow(), lambda: revoke(world), at_spark=True)
        assert "role app may not read orders" in told
        # Spark is told, too, and the session goes on.
        await until(lambda: bool(world.spark.interrupted))
        (stopped,) = world.spark.interrupted
        assert stopped in world.spark.hanging
        # Spark may have responses of it still: it is not taken up again.
        calls = world.service._system.cells["/connect"].actor._calls
        with use_caller(CallerIdentity("app")), pytest.raises(AccessDenied):
            session = calls._found(SessionKey(app.client._user_id or "", app.session_id))
            calls._operation(session, stopped)
        assert (await world.run(lambda: app.range(1).toArrow())).num_rows == 1


async def test_an_operation_of_a_role_without_code_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 20)
    # expires: Spark hangs
    async with gateway_world(tmp_path, query_deadline_ms=200) as world:
        app = await reader(world)
        frame = app.table("orders").groupBy("name").count().withColumnRenamed("count", "hang")
        with pytest.raises(PySparkException, match="query_deadline_ms"):
            await world.run(lambda: frame.toArrow())
        await until(lambda: bool(world.spark.interrupted))
        assert (await world.run(lambda: app.range(1).toArrow())).num_rows == 1


async def test_operations_of_other_objects_go_on(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        await world.client.submit(
            ChangeRights(0, ("app",), ("read",), scope="objects", names=("other",))
        )
        frame = app.table("other").groupBy("id").count().withColumnRenamed("count", "hang")

        async def change() -> None:
            await revoke(world)
            assert [each["state"] for each in await sessions(world)] == ["active"]
            await world.client.submit(AlterRole(0, "app", drop_tokens=True))

        told = await ended_by(world, lambda: frame.toArrow(), change, at_spark=True)
        assert "the token of role app" in told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda client: client.submit(AlterRole(0, "app", drop_tokens=True)),
            "the token of role app",
        ),
        (lambda client: client.submit(AlterRole(0, "app", login=False)), "may no longer log in"),
        (lambda client: client.submit(DropRoles(0, ("app",))), "role app was dropped"),
    ],
    ids=["tokens", "login", "role"],
)
async def test_a_session_ends_with_its_token_and_its_role(
    tmp_path: Path, change: Callable[[Client], Any], reason: str
) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        frame = app.range(3).withColumnRenamed("id", "hang")
        told = await ended_by(
            world, lambda: frame.toArrow(), lambda: change(world.client), at_spark=True
        )
        assert f"terminating session: {reason}" in told or reason in told
        await until(lambda: app.session_id in world.spark.released)
        assert await sessions(world) == []
        with pytest.raises(PySparkException, match="a role's token is required"):
            await world.run(lambda: app.range(1).toArrow())


async def test_another_token_and_a_password_end_nothing(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        await world.run(lambda: app.range(1).toArrow())
        await world.client.submit(AlterRole(0, "app", add_token=token_digest("c" * 64)))
        await world.client.submit(AlterRole(0, "app", verifier=""))
        assert (await world.run(lambda: app.table("orders").toArrow())).num_rows == 6


async def test_an_administrator_ends_and_cancels_sessions_here_as_well(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        hanging = app.range(3).withColumnRenamed("id", "hang")
        await world.run(lambda: app.range(1).toArrow())
        ((number, role),) = [(each["number"], each["role"]) for each in await sessions(world)]
        assert role == "app"

        async def cancel() -> None:
            await world.client.end_session(number, cancel=True)

        told = await ended_by(world, lambda: hanging.toArrow(), cancel, at_spark=True)
        assert "cancel" in told.lower()
        assert (await world.run(lambda: app.range(1).toArrow())).num_rows == 1
        await world.client.end_session(number)
        assert await sessions(world) == []
        await until(lambda: app.session_id in world.spark.released)


class NotingContext:
    """Takes the responses of a call."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_no_response_leaves_without_its_right_or_after_the_end() -> None:
    sessions = OpenSessions(lambda: 0)
    roles = RoleRegistry().create("boss", login=True).create("app", login=True)
    sessions.apply(AccessRules(roles.grant(("app",), (READ,), ("u1",))))
    opened = sessions.open("connect", "app")
    session = GatewaySession(SessionKey("me", "s"), "server", opened=opened)
    context, reads, other = (
        NotingContext(),
        OpenOperation(session, "1"),
        OpenOperation(session, "2"),
    )
    reads.rights.note((("u1", "t"),))
    for operation in (reads, other):
        await operation.hand_on(context, b"first")
    sessions.apply(AccessRules(roles))
    with pytest.raises(AccessDenied, match="may not read t"):
        await reads.hand_on(context, b"second")
    await other.hand_on(context, b"second")
    other.stop(OperationCanceled("over"))
    with pytest.raises(OperationCanceled):
        await other.hand_on(context, b"third")
    assert context.written == [b"first", b"first", b"second"]
    # Spark may have responses of it still: it is not taken up again.
    session.check_operation("1")
    with pytest.raises(OperationCanceled):
        session.check_operation("2")


class SlowContext:
    """Takes a response only once it is told to."""

    def __init__(self) -> None:
        self.begun, self.taken, self.left = anyio.Event(), anyio.Event(), False

    async def write(self, data: bytes) -> None:
        self.begun.set()
        try:
            await self.taken.wait()
        except BaseException:
            self.left = True
            raise


@pytest.mark.parametrize("takes", [True, False], ids=["takes", "takes nothing"])
async def test_a_response_on_its_way_is_not_left_halfway(takes: bool) -> None:
    session = GatewaySession(SessionKey("me", "s"), "server")
    operation = OpenOperation(session, "1", 10 * PATIENCE_S * 1000 if takes else 50)
    context, ended = SlowContext(), anyio.Event()

    async def call() -> None:
        with pytest.raises(OperationCanceled), operation.worked_on():
            await operation.hand_on(context, b"first")
            await anyio.sleep_forever()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await context.begun.wait()
        operation.stop(OperationCanceled("over"))
        await anyio.wait_all_tasks_blocked()
        if takes:
            assert not ended.is_set()
            context.taken.set()
    assert context.left is not takes


async def test_a_stream_ends_with_the_right_to_what_it_follows(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app = await reader(world)
        await world.run(lambda: app.range(1).toArrow())
        calls = next(
            cell.actor._calls
            for path, cell in world.service._system.cells.items()
            if path == "/connect"
        )
        (session,) = calls._sessions
        # As a started stream leaves them: Spark runs it without an operation of ours.
        session.starts_streams = True
        session.stream_rights.note(calls._router._directory.reads_of(["orders"]))
        await revoke(world)
        await until(lambda: app.session_id in world.spark.released)
        assert await sessions(world) == []


async def test_what_others_run_is_not_told_here_either(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        app, boss = await reader(world), await session_of(world, "boss")
        await world.run(lambda: boss.range(1).toArrow())
        text = "SELECT role, state FROM penstock.sessions WHERE door = 'connect' ORDER BY role"
        for read in (lambda: app.sql(text).toArrow(), lambda: boss.sql(text).toArrow()):
            await world.run(read)
        mine = (await world.run(lambda: app.table("penstock.sessions").toArrow())).to_pylist()
        seen = {each["role"]: each["state"] for each in mine if each["door"] == "connect"}
        assert seen == {"app": "active", "boss": None}
        everything = await world.run(lambda: boss.table("penstock.sessions").toArrow())
        assert None not in everything["state"].to_pylist()
