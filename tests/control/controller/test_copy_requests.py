"""The controller's copies: begun once, answered once, dropped when nobody wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest
from controller_world import World, with_row  # type: ignore[import-not-found]

from actors.control.controller.messages import BytesDelivered
from actors.control.controller.reads.copies import CopyTimedOut
from actors.model.protocol.api import (
    CopiedInto,
    CopyProgressed,
    CopyTo,
    CreateIndex,
    DropObject,
    EndRequest,
    RequestDone,
    RequestFailed,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    DataflowDescription,
    InitializationComplete,
    ScheduleDataflow,
    StatusResponse,
)
from actors.runtime.progress import EMPTY
from actors.testing.probe import MessageProbe, settle
from deadlines import Deadlines  # type: ignore[import-not-found]


async def begun(world: World, **changes: Any) -> tuple[int, DataflowDescription]:
    """A copy's request number and dataflow."""
    number = world.number()
    await world.submit(CopyTo(number, "t", "out", **changes))
    created = await world.replica.expect(CreateDataflow)
    assert (await world.replica.expect(ScheduleDataflow)).id == created.dataflow.id
    return number, created.dataflow


async def dropped(world: World, flow: DataflowDescription) -> None:
    """Waits until the copy's dataflow and its hold are gone."""
    while True:
        command = await world.replica.expect(AllowCompaction)
        if (command.id, command.frontier) == (flow.id, EMPTY):
            break
    while any(name.startswith("copy/") for name in await holds(world)):
        await settle()


async def holds(world: World) -> list[str]:
    shard = world.system.cells["/controller"].actor._state.catalog.find("t").shard
    return list((await world.persist.state(shard)).holds)


async def test_a_copy_is_a_dataflow_that_answers_once(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        number, flow = await begun(world, format="csv", file_bytes_max=9_999, overwrite=True)
        assert (flow.name, flow.as_of) == ("t", time)
        schema = flow.imports[0].schema
        assert flow.export == CopyToExport(schema, "out", "csv", 9_999, True)
        assert f"copy/{flow.id}" in await holds(world)
        world.replica.respond(CopyToResponse(flow.id, CopyDone(7, 2, "/x")))
        answer = await world.session.expect(CopiedInto)
        assert answer == CopiedInto(number, 7, 2, "/x", time)
        await dropped(world, flow)
        world.replica.respond(CopyToResponse(flow.id, CopyDone(7, 2, "/x")))
        await begun(world)
        await world.session.expect_nothing()


@pytest.mark.parametrize(
    ("result", "code"),
    [(CopyFailed("ViewInError", "x"), "ViewInError"), (CopyDropped(), "ConnectionBroken")],
)
async def test_a_failure_is_told(tmp_path: Path, result: Any, code: str) -> None:
    async with with_row(tmp_path) as (world, _):
        number, flow = await begun(world)
        world.replica.respond(CopyToResponse(flow.id, result))
        failed = await world.session.expect(RequestFailed)
        assert (failed.request, failed.code) == (number, code)
        await dropped(world, flow)


async def test_what_cannot_be_copied_is_refused_by_name(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        await world.ask(CreateIndex(world.number(), "i", "t", ("n",)), RequestDone)

        async def refused(name: str = "t", destination: str = "out", **changes: Any) -> str:
            return str(await world.refused(CopyTo(world.number(), name, destination, **changes)))

        assert await refused("x") == "UnknownObject"
        assert await refused("i") == "InvalidUsage"
        for elsewhere in ("ftp://bucket/x", "s3://bucket/a/../b"):
            assert await refused(destination=elsewhere) == "InvalidUsage"
        assert await refused(file_bytes_max=1) == "InvalidUsage"
        assert await refused(as_of=-1) == "InvalidUsage"
        assert await refused(as_of=time + 10_000_000) == "ReadTooFarAhead"
        assert await refused(deadline_ms=0) == "InvalidUsage"
        state = world.system.cells["/controller"].actor
        assert len(state._copies) == 0


async def test_a_time_that_is_forgotten_is_refused(tmp_path: Path) -> None:
    async with with_row(tmp_path, retain_history_ms=1) as (world, time):
        shard = world.system.cells["/controller"].actor._state.catalog.find("t").shard
        while (await world.persist.state(shard)).since <= time - 5:
            await settle()
        assert await world.refused(CopyTo(world.number(), "t", "x", as_of=1)) == "ReadBelowSince"
        assert not [name for name in await holds(world) if name.startswith("copy/")]
        await settle()
        ended = [each for each in world.replica.commands if isinstance(each, AllowCompaction)]
        assert EMPTY not in [each.frontier for each in ended], "it was never created"


@pytest.mark.parametrize("held", [True, False], ids=["running", "before it holds"])
@pytest.mark.parametrize("way", ["cancel", "gone", "drop", "deadline"])
async def test_what_nobody_wants_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, held: bool
) -> None:
    deadlines = Deadlines(monkeypatch, CopyTimedOut)
    async with with_row(tmp_path) as (world, _):
        number = world.number()
        deadline = 300 if way == "deadline" else None
        session = MessageProbe.start(world.system, "another") if way == "gone" else world.session
        world.session, before = session, world.session
        await world.submit(CopyTo(number, "t", "out", deadline_ms=deadline))
        world.session = before
        if held:
            flow = (await world.replica.expect(CreateDataflow)).dataflow
        match way:
            case "cancel":
                await world.submit(EndRequest(world.number(), number))
                assert (await before.expect(RequestFailed)).code == "OperationCanceled"
                await before.expect(RequestDone)
            case "gone":
                world.system.cells[session.address.path].request_stop()
            case "drop":
                await world.submit(DropObject(world.number(), "t"))
                answers = [await world.answer(), await world.answer()]
                codes = {getattr(answer, "code", "") for answer in answers}
                assert codes == {"", "UnknownObject"}
            case "deadline":
                while not len(world.system.cells["/controller"].actor._copies):
                    await anyio.lowlevel.checkpoint()  # a turn of the loop: it does not hold yet
                deadlines.end(300)
                assert (await before.expect(RequestFailed)).code == "DeadlineExceeded"
        controller = world.system.cells["/controller"].actor
        while len(controller._copies) or controller._copies._ended_early:
            await settle()
        if held and way != "drop":
            await dropped(world, flow)
        elif way != "drop":
            while any(name.startswith("copy/") for name in await holds(world)):
                await settle()


async def test_copies_are_bounded(tmp_path: Path) -> None:
    async with with_row(tmp_path, copies_max=2) as (world, _):
        _, flow = await begun(world)
        assert await world.refused(CopyTo(world.number(), "t", "other")) == "ResourceBusy"
        first = world.session
        world.session = MessageProbe.start(world.system, "second")
        await begun(world)
        world.session = MessageProbe.start(world.system, "third")
        assert await world.refused(CopyTo(world.number(), "t", "other")) == "ResourceBusy"
        world.replica.respond(CopyToResponse(flow.id, CopyDone(1, 1, "m")))
        await first.expect(CopiedInto)
        await begun(world)


async def test_progress_is_told_one_at_a_time(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, _):
        number, flow = await begun(world, progress=True)

        def say(read: int, state: str = "copying") -> None:
            status = StatusResponse(
                flow.id, state, rows_out=read * 10, parts_read=read, parts_total=9
            )
            world.replica.respond(status)

        say(1)
        first = await world.session.expect(CopyProgressed)
        assert first == CopyProgressed(number, "copying", 10, 1, 9)
        say(2)
        say(3)
        say(9, "copied")
        await world.session.expect_nothing()
        await world.controller.send(BytesDelivered(world.session.address.path, number, 256))
        assert (await world.session.expect(CopyProgressed)).parts_read == 3
        await world.controller.send(BytesDelivered(world.session.address.path, number, 256))
        await world.session.expect_nothing()


async def test_a_replica_that_comes_back_does_the_copy_over(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        number, flow = await begun(world)
        world.replica.break_connection()
        again = (await world.replica.expect(CreateDataflow)).dataflow
        assert again == flow
        await world.replica.expect(InitializationComplete)
        world.replica.respond(CopyToResponse(flow.id, CopyDone(1, 1, "m")))
        assert await world.session.expect(CopiedInto) == CopiedInto(number, 1, 1, "m", time)
