"""Several subscribes at once: one dataflow, and each with its own end."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from controller_world import (  # type: ignore[import-not-found]
    KEYED,
    World,
    change,
    started,
)

from actors.controller.messages import Delivered
from actors.plan.schema import DIFF, TIME
from actors.plan.updates import to_ipc
from actors.progress import EMPTY
from actors.protocol.api import (
    Changes,
    CreateTable,
    Done,
    Failed,
    Subscribe,
    Unsubscribe,
    Write,
    Written,
)
from actors.protocol.compute import (
    AllowCompaction,
    CreateDataflow,
    DataflowDescription,
    SubscribeBatch,
    SubscribeResponse,
)


async def table(world: World) -> int:
    """Makes table t, with one row; the time of that."""
    await world.ask(CreateTable(world.number(), "t", KEYED), Done)
    written = await world.ask(Write(world.number(), (change("t", {"id": 1, "n": 2}),)), Written)
    return int(written.time)


def batch(lower: int, upper: int, *times: int) -> SubscribeBatch:
    """A row at each of these times."""
    rows = {
        "id": pa.array(times, pa.int64()),
        "n": pa.array([0 for _ in times], pa.int32()),
        TIME: pa.array(times, pa.int64()),
        DIFF: pa.array([1 for _ in times], pa.int64()),
    }
    return SubscribeBatch(lower, upper, to_ipc(pa.table(rows)) if times else None)


async def subscribed(world: World, request: Subscribe) -> DataflowDescription:
    """The dataflow that a subscribe starts."""
    await world.submit(request)
    description: DataflowDescription = (await world.created()).dataflow
    return description


async def joined(world: World, flow: DataflowDescription, count: int) -> None:
    """Waits until so many hear the dataflow."""
    controller = world.system.cells["/controller"].actor
    while len(controller._subscribes._fanout.members(flow.id)) < count:
        await world.session.expect_nothing()


def created(world: World) -> list[CreateDataflow]:
    """Dataflows made and not looked at yet."""
    return [c for c in world.replica.commands if isinstance(c, CreateDataflow)]


async def test_subscribers_share_a_dataflow_and_its_bytes(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        time = await table(world)
        first = world.number()
        flow = await subscribed(world, Subscribe(first, "t"))
        others = [world.number() for _ in range(3)]
        for number in others:
            await world.submit(Subscribe(number, "t"))
        await joined(world, flow, 4)
        world.replica.respond(SubscribeResponse(flow.id, batch(0, time + 1, time)))
        told = [await world.session.expect(Changes) for _ in range(4)]
        assert sorted(changes.request for changes in told) == sorted([first, *others])
        assert len({id(changes.arrow) for changes in told}) == 1
        assert created(world) == []
        # The one that started it leaves: the dataflow goes on for the others.
        await world.submit(Unsubscribe(world.number(), first))
        assert (await world.session.expect(Failed)).request == first
        await world.session.expect(Done)
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 1, time + 4, time + 2)))
        told = [await world.session.expect(Changes) for _ in range(3)]
        assert {changes.request for changes in told} == set(others)
        for number in others:
            await world.submit(Unsubscribe(world.number(), number))
        dropped = await world.replica.expect(AllowCompaction)
        while dropped.frontier != EMPTY:
            dropped = await world.replica.expect(AllowCompaction)
        assert dropped.id == flow.id


async def test_a_slow_one_leaves_the_others_alone(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        time = await table(world)
        slow, fast = world.number(), world.number()
        flow = await subscribed(world, Subscribe(slow, "t", from_=time + 1))
        await world.submit(Subscribe(fast, "t", from_=time + 1))
        await joined(world, flow, 2)
        heard = {slow: 0, fast: 0}
        for n in range(1, 8):
            world.replica.respond(
                SubscribeResponse(flow.id, batch(time + n, time + n + 1, time + n))
            )
            while heard[fast] < n:
                changes = await world.session.expect(Changes)
                heard[changes.request] += 1
                if changes.request == fast:
                    size = len(changes.arrow or b"")
                    taken = Delivered(world.session.address.path, fast, size)
                    await world.controller.send(taken)
        assert 0 < heard[slow] < heard[fast]
        taken = Delivered(world.session.address.path, slow, 1_000_000)
        await world.controller.send(taken)
        again = (await world.created()).dataflow
        assert again.as_of == time + heard[slow]
        # It catches up, and hears the others' dataflow again.
        world.replica.respond(SubscribeResponse(again.id, batch(again.as_of + 1, time + 8)))
        assert (await world.session.expect(Changes)).request == slow
        world.replica.respond(SubscribeResponse(flow.id, batch(time + 8, time + 9, time + 8)))
        told = [await world.session.expect(Changes) for _ in range(2)]
        assert {changes.request for changes in told} == {slow, fast}
