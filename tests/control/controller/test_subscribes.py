"""Several subscribes at once: one dataflow, and each with its own end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from controller_world import World, with_row  # type: ignore[import-not-found]

from actors.control.controller.messages import BytesDelivered, changes_bytes
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import (
    EndRequest,
    RequestDone,
    RequestFailed,
    SubscribeChanges,
    SubscribeObject,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    CreateDataflow,
    DataflowDescription,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
)
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import EMPTY
from actors.testing.probe import settle


def batch(lower: int, upper: int, *times: int) -> SubscribeBatch:
    """A row at each of these times."""
    rows = {
        "id": pa.array(times, pa.int64()),
        "n": pa.array([0 for _ in times], pa.int32()),
        TIME: pa.array(times, pa.int64()),
        DIFF: pa.array([1 for _ in times], pa.int64()),
    }
    return SubscribeBatch(lower, upper, to_ipc(pa.table(rows)) if times else None)


async def subscribed(world: World, request: SubscribeObject) -> DataflowDescription:
    """The dataflow that a subscribe starts."""
    await world.submit(request)
    flow: DataflowDescription = (await world.created()).dataflow
    return flow


async def joined(world: World, flow: DataflowDescription, count: int) -> None:
    """Waits until so many hear the dataflow."""
    controller = world.system.cells["/controller"].actor
    while len(controller._subscribes._fanout.members(flow.id)) < count:
        await settle()


def created(world: World) -> list[CreateDataflow]:
    """Dataflows made and not looked at yet."""
    return [c for c in world.replica.commands if isinstance(c, CreateDataflow)]


async def test_subscribers_share_a_dataflow_and_its_bytes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with with_row(tmp_path) as (world, time):
        first = world.number()
        flow = await subscribed(world, SubscribeObject(first, "t"))
        others = [world.number() for _ in range(3)]
        for number in others:
            await world.submit(SubscribeObject(number, "t"))
        await joined(world, flow, 4)
        world.replica.respond(SubscribeResponse(flow.id, batch(0, time + 1, time)))
        told = [await world.session.expect(SubscribeChanges) for _ in range(4)]
        assert sorted(changes.request for changes in told) == sorted([first, *others])
        made = 4 if request.config.getoption("messages_encoded") else 1  # each message its own
        assert len({id(changes.arrow) for changes in told}) == made
        assert created(world) == []
        # The one that started it leaves: the dataflow goes on for the others.
        await world.submit(EndRequest(world.number(), first))
        assert (await world.session.expect(RequestFailed)).request == first
        await world.session.expect(RequestDone)
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 1, time + 4, time + 2)))
        told = [await world.session.expect(SubscribeChanges) for _ in range(3)]
        assert {changes.request for changes in told} == set(others)
        for number in others:
            await world.submit(EndRequest(world.number(), number))
        dropped = await world.replica.expect(AllowCompaction)
        while dropped.frontier != EMPTY:
            dropped = await world.replica.expect(AllowCompaction)
        assert dropped.id == flow.id


async def test_a_slow_one_leaves_the_others_alone(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        slow, fast = world.number(), world.number()
        flow = await subscribed(world, SubscribeObject(slow, "t", from_=time + 1))
        await world.submit(SubscribeObject(fast, "t", from_=time + 1))
        await joined(world, flow, 2)
        heard = {slow: 0, fast: 0}
        for n in range(1, 8):
            world.replica.respond(
                SubscribeResponse(flow.id, batch(time + n, time + n + 1, time + n))
            )
            while heard[fast] < n:
                changes = await world.session.expect(SubscribeChanges)
                heard[changes.request] += 1
                if changes.request == fast:
                    size = len(changes.arrow or b"")
                    taken = BytesDelivered(world.session.address.path, fast, size)
                    await world.controller.send(taken)
        assert 0 < heard[slow] < heard[fast]
        taken = BytesDelivered(world.session.address.path, slow, 1_000_000)
        await world.controller.send(taken)
        again = (await world.created()).dataflow
        assert again.as_of == time + heard[slow]
        # It catches up, and hears the others' dataflow again.
        world.replica.respond(SubscribeResponse(again.id, batch(again.as_of + 1, time + 8)))
        assert (await world.session.expect(SubscribeChanges)).request == slow
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 8, time + 9, time + 8)))
        told = [await world.session.expect(SubscribeChanges) for _ in range(2)]
        assert {changes.request for changes in told} == {slow, fast}


async def test_one_that_takes_nothing_is_cut_off_and_its_hold_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_ms, monotonic_ms = 0, SystemClock.monotonic_ms
    monkeypatch.setattr(SystemClock, "monotonic_ms", lambda self: monotonic_ms(self) + later_ms)
    async with with_row(tmp_path, subscribe_idle_ms=600_000) as (world, time):
        stuck, lively = world.number(), world.number()
        flow = await subscribed(world, SubscribeObject(stuck, "t", from_=time + 1))
        await world.submit(SubscribeObject(lively, "t", from_=time + 1))
        await joined(world, flow, 2)
        holder = f"subscribe/{flow.id}"
        assert holder in (await world.persist.state("u1")).holds
        answers: list[Any] = []
        upper = time + 1
        while not any(isinstance(answer, RequestFailed) for answer in answers):
            upper += 1
            world.replica.respond(SubscribeResponse(flow.id, batch(upper - 1, upper)))
            answer = await world.answer()
            answers.append(answer)
            if isinstance(answer, SubscribeChanges) and answer.request == lively:
                taken = BytesDelivered(world.session.address.path, lively, changes_bytes(answer))
                await world.controller.send(taken)
                later_ms += 60_000
            await anyio.sleep(0.01)  # not a batch a turn of the loop
        cut = answers[-1]
        assert isinstance(cut, RequestFailed)
        assert (cut.request, cut.code) == (stuck, "SlowSubscriber")
        assert "subscribe_idle_ms" in cut.text
        # Progress did not pile up behind what it did not take.
        of_stuck = [a for a in answers[:-1] if a.request == stuck]
        assert len(of_stuck) == 1 < len(answers) - 2
        while holder in (await world.persist.state("u1")).holds:
            await settle()
        # The other one goes on by the same dataflow.
        world.replica.respond(SubscribeResponse(flow.id, batch(upper, upper + 5, upper)))
        while (answer := await world.answer()).upper != upper + 5:
            assert answer.request == lively
        assert created(world) == []


async def test_what_was_held_back_is_told_when_the_rest_is_taken(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        number = world.number()
        flow = await subscribed(world, SubscribeObject(number, "t", from_=time + 1))
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 1, time + 2, time + 1)))
        first = await world.session.expect(SubscribeChanges)
        for n in range(2, 6):
            world.replica.respond(SubscribeResponse(flow.id, batch(time + n, time + n + 1)))
        await world.session.expect_nothing()
        taken = BytesDelivered(world.session.address.path, number, changes_bytes(first))
        await world.controller.send(taken)
        second = await world.session.expect(SubscribeChanges)
        assert (second.lower, second.arrow) == (first.upper, None)
        assert second.upper > time + 2


async def test_up_to_ends_one_of_those_that_share(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        n = world.number
        short, long = n(), n()
        flow = await subscribed(world, SubscribeObject(short, "t", from_=time + 1, up_to=time + 4))
        await world.submit(SubscribeObject(long, "t", from_=time + 1, progress=False))
        await joined(world, flow, 2)
        respond = world.replica.respond
        respond(SubscribeResponse(flow.id, batch(time + 1, time + 2)))
        respond(SubscribeResponse(flow.id, batch(time + 2, time + 9, time + 3, time + 4)))
        answers = [await world.answer() for _ in range(5)]
        of_short = [a for a in answers if a.request == short]
        of_long = [a for a in answers if a.request == long]
        assert [(a.lower, a.upper) for a in of_short[:-1]] == [
            (time + 1, time + 2),
            (time + 2, time + 4),
            (time + 4, EMPTY),
        ]
        assert of_short[-1] == RequestDone(short)
        assert from_ipc(of_short[1].arrow)["id"].to_pylist() == [time + 3]
        # Without progress an answer reaches back to the last one.
        (change,) = of_long
        assert (change.lower, change.upper) == (time + 1, time + 9)
        assert from_ipc(change.arrow)["id"].to_pylist() == [time + 3, time + 4]
        again = SubscribeObject(n(), "t", from_=time + 4, up_to=time + 4)
        assert (await world.ask(again, SubscribeChanges)).upper == EMPTY
        await world.session.expect(RequestDone)
        assert await world.refused(SubscribeObject(n(), "t", from_=9, up_to=8)) == "InvalidUsage"
        assert await world.refused(SubscribeObject(n(), "t", up_to=time)) == "InvalidUsage"
        assert await world.refused(SubscribeObject(n(), "t", up_to=-1)) == "InvalidUsage"


async def test_without_a_snapshot_only_changes_come(tmp_path: Path) -> None:
    async with with_row(tmp_path) as (world, time):
        flow = await subscribed(world, SubscribeObject(world.number(), "t", snapshot=False))
        assert (flow.as_of, flow.export) == (time, SubscribeExport(flow.imports[0].schema, False))
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 1, time + 3, time + 2)))
        assert (await world.session.expect(SubscribeChanges)).lower == time + 1
