"""Batches in blobs, on their way to subscribers: each piece once, to each, and then removed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from controller_world import KEYED, World, change, started  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from actors.control.controller.messages import BytesDelivered, changes_bytes
from actors.control.controller.reads.fanout import BatchBlobs, BatchReader
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import (
    CreateTable,
    EndRequest,
    RequestDone,
    RequestFailed,
    SubscribeChanges,
    SubscribeObject,
    WriteCommitted,
    WriteTables,
)
from actors.model.protocol.compute import (
    CreateDataflow,
    DataflowDescription,
    StashPart,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
)
from actors.runtime.errors import StorageError
from actors.runtime.progress import EMPTY
from actors.testing.probe import settle


def updates(ids: Sequence[int], time: int | Sequence[int]) -> bytes:
    times = [time] * len(ids) if isinstance(time, int) else list(time)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "n": pa.array([0] * len(ids), pa.int32()),
        TIME: pa.array(times, pa.int64()),
        DIFF: pa.array([1] * len(ids), pa.int64()),
    }
    return to_ipc(pa.table(columns))


# -- the pure part ---------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_blob_is_removed_when_its_last_reader_is_done(
    readers: int, count: int, data: st.DataObject
) -> None:
    keys = [f"k{n}" for n in range(count)]
    shelf = BatchBlobs(keys, readers)
    ways = [BatchReader(shelf, 0, 9) for _ in range(readers)]
    live, removed = list(ways), []
    had = {id(way): 0 for way in ways}
    while live:
        way = data.draw(st.sampled_from(live))
        if data.draw(st.integers(0, 4)) == 0:
            gone = way.abandon()
            had[id(way)] = count
            live.remove(way)
        else:
            assert way.present == keys[had[id(way)]]
            last = way.last
            gone = way.advance()
            had[id(way)] += 1
            assert last == (had[id(way)] == count)
            if last:
                live.remove(way)
        removed += gone
        free = [key for n, key in enumerate(keys) if all(had[id(w)] > n for w in ways)]
        assert sorted(removed) == free
    assert sorted(removed) == keys


def test_a_piece_is_cut_to_what_its_reader_wants() -> None:
    way = BatchReader(BatchBlobs(["k"], 1), 5, 8)
    inside = updates([1, 2], [5, 7])
    assert way.cut(inside) is inside
    cut = way.cut(updates([1, 2, 3], [4, 6, 8]))
    assert cut is not None
    assert from_ipc(cut)["id"].to_pylist() == [2]
    assert way.cut(updates([1, 3], [4, 8])) is None
    assert way.cut(updates([], [])) is None


# -- the controller --------------------------------------------------------------------------------


class Room:
    """A world with a table, and what its subscribers hear."""

    def __init__(self, world: World, time: int) -> None:
        self.world = world
        self.time = time

    @classmethod
    async def of(cls, world: World) -> Room:
        await world.ask(CreateTable(world.number(), "t", KEYED), RequestDone)
        row = change("t", {"id": 1, "n": 2})
        written = await world.ask(WriteTables(world.number(), (row,)), WriteCommitted)
        return cls(world, int(written.time))

    async def subscribed(self, **changes: Any) -> tuple[int, DataflowDescription]:
        number = self.world.number()
        await self.world.submit(SubscribeObject(number, "t", **changes))
        flow: DataflowDescription = (await self.world.created()).dataflow
        return number, flow

    async def stashed(self, *pieces: bytes) -> tuple[StashPart, ...]:
        parts = []
        for piece in pieces:
            key = self.world.persist.stashed.fresh()
            await self.world.persist.stashed.set(key, piece)
            parts.append(StashPart(key, from_ipc(piece).num_rows, len(piece)))
        return tuple(parts)

    async def left(self) -> int:
        return len(await self.world.persist.stashed._blob.list_keys("_stash/"))

    async def none_left(self) -> None:
        while await self.left():
            await settle()

    def respond(self, flow: DataflowDescription, batch: SubscribeBatch) -> None:
        self.world.replica.respond(SubscribeResponse(flow.id, batch))

    async def heard(self) -> SubscribeChanges:
        found: SubscribeChanges = await self.world.session.expect(SubscribeChanges)
        return found

    async def take(self, changes: SubscribeChanges) -> None:
        path = self.world.session.address.path
        size = changes_bytes(changes)
        await self.world.controller.send(BytesDelivered(path, changes.request, size))


def ids(changes: SubscribeChanges) -> list[int]:
    return [] if changes.arrow is None else from_ipc(changes.arrow)["id"].to_pylist()


MANY = range(60)  # takes more than half of what may be in flight


async def test_pieces_come_one_by_one_and_the_last_has_the_upper(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        room = await Room.of(world)
        time = room.time
        number, flow = await room.subscribed()
        assert len(updates(MANY, time)) > world.settings.subscribe_inflight_bytes_max // 2
        pieces = [updates([100 * n + m for m in MANY], time) for n in range(4)]
        parts = await room.stashed(*pieces)
        room.respond(flow, SubscribeBatch(0, time + 1, updates([7], time), parts=parts))
        told = [await room.heard(), await room.heard()]
        assert ids(told[0]) == [7]
        await world.session.expect_nothing()  # there is no room for more
        for _ in range(3):
            await room.take(told[-1])
            told.append(await room.heard())
        assert [c.partial for c in told] == [True] * 4 + [False]
        assert [(c.request, c.lower, c.upper) for c in told[:-1]] == [(number, time, time)] * 4
        assert (told[-1].lower, told[-1].upper) == (time, time + 1)
        assert [c.arrow for c in told[1:]] == pieces
        await room.none_left()
        # It left its dataflow and goes on behind the batch.
        assert not [c for c in world.replica.commands if isinstance(c, CreateDataflow)]
        await room.take(told[-1])
        await room.take(told[0])
        again = (await world.created()).dataflow
        assert isinstance(again.export, SubscribeExport)
        assert (again.as_of, again.export.snapshot) == (time, False)
        room.respond(again, SubscribeBatch(time + 1, time + 3, updates([9], time + 2)))
        last = await room.heard()
        assert (last.lower, last.upper, ids(last), last.partial) == (time + 1, time + 3, [9], False)


async def test_a_replica_that_goes_away_in_the_midst_changes_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        room = await Room.of(world)
        time = room.time
        _, flow = await room.subscribed()
        parts = await room.stashed(*(updates([100 * n + m for m in MANY], time) for n in range(3)))
        room.respond(flow, SubscribeBatch(0, time + 1, parts=parts))
        told = [await room.heard()]
        world.replica.break_connection()
        while world.replica.connections < 2:
            await settle()
        for _ in range(2):
            await room.take(told[-1])
            told.append(await room.heard())
        assert [row for c in told for row in ids(c)] == [
            100 * n + m for n in range(3) for m in MANY
        ]
        assert [c.partial for c in told] == [True, True, False]
        await room.none_left()


async def test_each_subscriber_gets_what_it_wants_of_a_batch(tmp_path: Path) -> None:
    async with started(tmp_path, subscribe_inflight_bytes_max=1 << 20) as world:
        room = await Room.of(world)
        time = room.time
        first, flow = await room.subscribed()
        short = world.number()
        await world.submit(SubscribeObject(short, "t", up_to=time + 3))
        controller = world.system.cells["/controller"].actor
        while len(controller._subscribes._fanout.members(flow.id)) < 2:
            await settle()
        times = [time, time + 2, time + 4]
        parts = await room.stashed(updates([1, 2, 3], times), updates([4, 5, 6], times[::-1]))
        room.respond(flow, SubscribeBatch(0, time + 6, parts=parts))
        heard: dict[int, list[Any]] = {first: [], short: []}
        while not any(isinstance(answer, RequestDone) for answer in heard[short]):
            answer: Any = await world.answer()
            heard[answer.request].append(answer)
        while len(heard[first]) < 2:
            heard[first].append(await room.heard())
        assert [ids(c) for c in heard[first]] == [[1, 2, 3], [4, 5, 6]]
        assert heard[first][-1].upper == time + 6
        *pieces, end, done = heard[short]
        assert [ids(c) for c in pieces] == [[1, 2], [5, 6]]
        assert [c.partial for c in pieces] == [True, False]
        assert (pieces[-1].upper, end.upper, done) == (time + 3, EMPTY, RequestDone(short))
        await room.none_left()


@pytest.mark.parametrize("way", ["unsubscribe", "gone already", "nothing new", "error"])
async def test_blobs_that_nobody_reads_are_removed(tmp_path: Path, way: str) -> None:
    async with started(tmp_path) as world:
        room = await Room.of(world)
        time = room.time
        number, flow = await room.subscribed()
        parts = await room.stashed(*(updates(MANY, time) for _ in range(3)))
        batch = SubscribeBatch(0, time + 1, parts=parts)
        match way:
            case "unsubscribe":
                room.respond(flow, batch)
                await room.heard()
            case "nothing new":
                room.respond(flow, SubscribeBatch(0, time + 1))
                await room.heard()
                room.respond(flow, batch)
            case "error":
                room.respond(
                    flow, SubscribeBatch(0, time + 1, None, ("ViewInError", "x"), None, parts)
                )
        if way in ("unsubscribe", "gone already"):
            await world.submit(EndRequest(world.number(), number))
            assert (await world.session.expect(RequestFailed)).code == "OperationCanceled"
        if way == "gone already":
            room.respond(flow, batch)
        await room.none_left()


async def test_a_piece_that_is_gone_cuts_the_subscribe_off(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        room = await Room.of(world)
        number, flow = await room.subscribed()
        parts = await room.stashed(updates([1], room.time), updates([2], room.time))
        await world.persist.stashed.delete([parts[1].key])
        room.respond(flow, SubscribeBatch(0, room.time + 1, parts=parts))
        assert (await room.heard()).partial
        failed = await world.session.expect(RequestFailed)
        assert (failed.request, failed.code) == (number, "SlowSubscriber")
        assert f"again from {room.time}" in failed.text


async def test_a_piece_is_read_again_when_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, fetch_attempts_max=3) as world:
        room = await Room.of(world)
        right, fails = world.persist.stashed.get, [2]

        async def get(key: str) -> bytes | None:
            if fails[0]:
                fails[0] -= 1
                raise StorageError("not now", determinate=False)
            found: bytes | None = await right(key)
            return found

        monkeypatch.setattr(world.persist.stashed, "get", get)
        number, flow = await room.subscribed()
        parts = await room.stashed(updates([1], room.time))
        room.respond(flow, SubscribeBatch(0, room.time + 1, parts=parts))
        changes = await room.heard()
        assert (ids(changes), changes.partial, changes.upper) == ([1], False, room.time + 1)
        await room.take(changes)
        again = (await world.created()).dataflow
        fails[0] = 3
        parts = await room.stashed(updates([2], room.time + 1))
        room.respond(again, SubscribeBatch(room.time + 1, room.time + 2, parts=parts))
        failed = await world.session.expect(RequestFailed)
        assert (failed.request, failed.code) == (number, "StorageError")
        await room.none_left()


async def test_one_that_takes_no_piece_is_cut_off_and_holds_nothing(tmp_path: Path) -> None:
    async with started(tmp_path, subscribe_idle_ms=1) as world:  # expires: no piece is taken
        room = await Room.of(world)
        number, flow = await room.subscribed()
        parts = await room.stashed(*(updates(MANY, room.time) for _ in range(3)))
        room.respond(flow, SubscribeBatch(0, room.time + 1, parts=parts))
        assert (await room.heard()).partial
        failed = await world.session.expect(RequestFailed)
        assert (failed.request, failed.code) == (number, "SlowSubscriber")
        await room.none_left()
