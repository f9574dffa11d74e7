"""Views of one input share its arrangements: when they start, restart, lag and fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    JOINED,
    PAIRS,
    SETTINGS,
    House,
    contents,
    join_plan,
    joined,
    shard,
    surroundings,
    table,
    view_description,
    write,
)
from msgspec.structs import replace

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import BatchPart, PersistClient
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import DataflowDescription
from actors.model.protocol.internal import DataflowScheduled
from actors.replica.dataflow.dataflow import StageDone
from actors.replica.dataflow.events import DataflowPhase, StageFailed
from actors.runtime.errors import StorageError
from actors.runtime.kernel import ActorSystem, SystemClock

SOURCES = (("l", PAIRS), ("r", PAIRS))


def _described(number: int) -> DataflowDescription:
    described: DataflowDescription = view_description(join_plan(), list(SOURCES), 4)
    export = replace(described.export, shard=f"out{number}")
    return replace(described, id=f"u{number}", export=export)


class Fetches:
    """Counts how often each part is fetched; may fail, or wait."""

    def __init__(self, persist: PersistClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        """By checksum: each part of these tests has its own."""
        self.failures = 0
        self.gate: anyio.Event | None = None
        self.held = anyio.Event()
        self._fetch = persist.fetch
        monkeypatch.setattr(persist, "fetch", self.fetch)

    async def fetch(self, part: BatchPart, schema: TableSchema) -> Any:
        self.counts[part.checksum] += 1
        if self.failures:
            self.failures -= 1
            raise StorageError("the disk is tired", determinate=True)
        if self.gate is not None:
            self.held.set()
            await self.gate.wait()
        return await self._fetch(part, schema)


class Place:
    """Two tables, and any number of views that join them."""

    def __init__(self, system: ActorSystem, persist: PersistClient, scratch: Path) -> None:
        self.system, self.persist, self.scratch = system, persist, scratch
        self.shared = SharedArrangements(scratch / "shared", slack=1)
        self.lives = 0

    async def open(self, views: int) -> None:
        for name, schema in SOURCES:
            await shard(self.persist, name, schema)
        for number in range(views):
            await shard(self.persist, f"out{number}", JOINED)
        await self.write("l", 5, (1, 10, 2, 1), (2, 20, 2, 1))
        await self.write("r", 5, (1, 100, 3, 1), (9, 900, 3, 1))

    async def write(self, name: str, upper: int, *rows: Any) -> None:
        await write(self.persist, name, upper, table(PAIRS, *rows))

    async def start(self, number: int, description: DataflowDescription | None = None) -> House:
        self.lives += 1
        house = House(
            self.system,
            self.persist,
            self.scratch,
            description or _described(number),
            view=joined,
            name=f"view{number}-{self.lives}",
            arrangements=self.shared,
        )
        await house.start()
        return house

    async def contents(self, number: int, time: int) -> Any:
        return await contents(self.persist, f"out{number}", JOINED, time)

    def users(self) -> list[tuple[str, int]]:
        return sorted((held.shard, held.users) for held in self.shared.statistics())

    async def filled(self, house: House) -> None:
        """Until a house's view may read all of its imports."""
        view = house.actor._view
        while view is None or view._touched is None or not view._touched.imports.ready:
            await anyio.lowlevel.checkpoint()


async def test_two_views_of_an_input_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(2)
        fetches = Fetches(persist, monkeypatch)
        one = await place.start(0)
        await one.reported(5)
        await place.filled(one)
        other = await place.start(1)
        await other.reported(5)
        await place.filled(other)
        assert place.users() == [("l", 2), ("r", 2)]
        # Each hydrates from both tables; the arrangements were filled once.
        assert sorted(fetches.counts.values()) == [3, 3]
        await place.write("r", 8, (2, 200, 6, 1), (1, 100, 7, -1))
        await place.write("l", 8, (9, 90, 7, 1))
        for house in (one, other):
            await house.reported(8)
        held = {held.shard: held.arrangement.rows for held in place.shared.statistics()}
        assert held == {"l": 3, "r": 4}
        for number in range(2):
            assert await place.contents(number, 6) == [(1, 10, 100, 1), (2, 20, 200, 1)]
            assert await place.contents(number, 7) == [(2, 20, 200, 1), (9, 90, 900, 1)]
        await one.stop()
        assert place.users() == [("l", 1), ("r", 1)]
        await place.write("l", 9, (9, 91, 8, 1))
        await place.write("r", 9)
        await other.reported(9)
        assert (9, 91, 900, 1) in await place.contents(1, 8)
        await other.stop()
        assert place.users() == []
        assert not list((tmp_path / "shared").iterdir())


async def test_after_a_restart_all_share_again_however_far_each_was(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(3)
        for number in range(3):
            # They stop one after the other: each got further than the one before.
            house = await place.start(number)
            await house.reported(5 + number)
            await house.stop()
            await place.write("l", 6 + number, (2, 21 + number, 5 + number, 1))
            await place.write("r", 6 + number, (2, 210 + number, 5 + number, 1))
        assert place.users() == []
        uppers = [await persist.upper(f"out{number}") for number in range(3)]
        assert uppers == [5, 6, 7]
        houses = [await place.start(number) for number in (2, 0, 1)]
        for house in houses:
            await house.reported(8)
            await place.filled(house)
        assert place.users() == [("l", 3), ("r", 3)]
        await place.write("l", 10, (1, 11, 9, 1))
        await place.write("r", 10, (9, 900, 9, -1))
        for house in houses:
            await house.reported(10)
        answers = [await place.contents(number, 9) for number in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert (1, 11, 100, 1) in answers[0]
        assert len(answers[0]) == 2 + 4 * 3
        assert place.users() == [("l", 3), ("r", 3)]


async def test_a_laggard_goes_on_alone(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        place.shared.lag_bytes_max = 100
        await place.open(2)
        fast, slow = await place.start(0), await place.start(1)
        for house in (fast, slow):
            await house.reported(5)
            await place.filled(house)
        slow.executor.keep = True
        await place.write("l", 6, (1, 12, 5, 1))
        await place.write("r", 6)
        await slow.executor.kept.wait()
        for time in range(6, 16):
            await place.write("l", time + 1, (1, time, time, 1))
            await place.write("r", time + 1, (1, time, time, 1))
            await fast.reported(time + 1)
        assert place.users() == [("l", 1), ("r", 1)]
        assert all(held.since >= 13 for held in place.shared.statistics())
        # Its engine comes back: what it made is good; then it begins anew, by itself.
        slow.executor.keep = False
        await slow.address.send(_lost(slow))
        await slow.reported(16)
        assert place.users() == [("l", 1), ("l", 1), ("r", 1), ("r", 1)]
        assert slow.actor._machine.incarnation == 2
        assert await place.contents(1, 15) == await place.contents(0, 15)


def _lost(house: House) -> Any:
    """What the dataflow hears of a job whose engine was lost: it runs the step again."""
    machine = house.actor._machine
    return StageDone(StageFailed(machine.incarnation, machine.number, "EngineLost: gone"))


async def test_who_waits_fills_when_the_first_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(2)
        for number in range(2):
            house = await place.start(number)
            await house.reported(5)
            await place.filled(house)
            await house.stop()
        fetches = Fetches(persist, monkeypatch)
        fetches.gate = anyio.Event()
        one = await place.start(0)
        await one.reported(5)
        with anyio.fail_after(200):
            await fetches.held.wait()
        other = await place.start(1)
        await other.reported(5)
        assert place.users() == [("l", 2), ("r", 2)]
        assert sum(fetches.counts.values()) == 1
        await one.stop()
        fetches.gate.set()
        await place.filled(other)
        assert place.users() == [("l", 1), ("r", 1)]
        await place.write("l", 6, (9, 1, 5, 1))
        await place.write("r", 6)
        await other.reported(6)
        assert (9, 1, 900, 1) in await place.contents(1, 5)


async def test_a_filling_that_fails_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(1)
        house = await place.start(0)
        await house.reported(5)
        await house.stop()
        fetches = Fetches(persist, monkeypatch)
        fetches.failures = 3
        again = await place.start(0)
        await place.write("l", 6, (9, 1, 5, 1))
        await place.write("r", 6)
        await again.reported(6)
        assert await place.contents(0, 5) == [(1, 10, 100, 1), (9, 1, 900, 1)]
        assert again.rests_in(DataflowPhase.GATHERING)


async def test_a_new_incarnation_keeps_the_arrangement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with surroundings(settings=SETTINGS) as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(1)
        house = await place.start(0)
        await house.reported(5)
        await place.filled(house)
        fetches = Fetches(persist, monkeypatch)
        machine = house.actor._machine
        await house.address.send(
            StageDone(StageFailed(machine.incarnation, 0, "lost", restart=True))
        )
        await house.until(
            lambda: machine.incarnation == 2 and house.rests_in(DataflowPhase.GATHERING)
        )
        await place.write("r", 7, (2, 200, 6, 1))
        await place.write("l", 7)
        await house.reported(7)
        # The step's own delta alone: what was arranged is still there.
        assert sum(fetches.counts.values()) == 1
        assert await place.contents(0, 6) == [(1, 10, 100, 1), (2, 20, 200, 1)]
        assert place.users() == [("l", 1), ("r", 1)]


async def test_a_view_that_crashes_gives_its_places_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with surroundings() as (system, persist):
        place = Place(system, persist, tmp_path)
        await place.open(2)
        one, other = await place.start(0), await place.start(1)
        for house in (one, other):
            await house.reported(5)
            await place.filled(house)

        def broken(_: Any) -> Any:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(one.actor._machine, "handle", broken)
            with pytest.raises(RuntimeError, match="a bug"):
                await one.actor.receive(DataflowScheduled())
        assert place.users() == [("l", 1), ("r", 1)]


async def test_many_views_in_threads_agree_at_every_time(tmp_path: Path) -> None:
    """As in the service: lookups, inserts and merges of all views in threads, side by side."""
    clock = SystemClock()
    async with ActorSystem(clock=clock, seed=3) as system:
        persist = await PersistClient.in_memory(SETTINGS, clock)
        place, random, upper = Place(system, persist, tmp_path), Random(7), 5
        await place.open(4)
        houses = {number: await place.start(number) for number in range(4)}
        for turn in range(25):
            for name in ("l", "r"):
                rows = [
                    (random.randrange(4), random.randrange(9), upper + random.randrange(2), 1)
                    for _ in range(random.randrange(4))
                ]
                await place.write(name, upper + 2, *rows)
            upper += 2
            if turn % 6 == 5:
                number = random.randrange(4)
                await houses[number].stop()
                houses[number] = await place.start(number)
            if turn % 3 == 0:
                for house in houses.values():
                    await house.reported(upper)
                for name, _ in SOURCES:
                    await persist.maintain(name)
        for house in houses.values():
            await house.reported(upper)
            await place.filled(house)
        for time in range(4, upper):
            first, *others = [await place.contents(number, time) for number in houses]
            assert all(other == first for other in others), f"at {time}"
        assert await place.contents(0, upper - 1) == await _joined(persist, upper - 1)
        for house in houses.values():
            await house.stop()
        assert place.users() == []
        await system.stop()
        await persist.close()


async def _joined(persist: PersistClient, time: int) -> list[Any]:
    """The view from the tables' contents."""
    left = await contents(persist, "l", PAIRS, time)
    right = await contents(persist, "r", PAIRS, time)
    rows = [(k, v, w, n * m) for k, v, n in left for other, w, m in right if k == other]
    return sorted(rows, key=repr)
