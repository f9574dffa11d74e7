"""Indexes and subscribes: the import's updates, passed on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    House,
    emitted,
    listed,
    pass_through,
    shard,
    surroundings,
    table,
    write,
)

from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.model.protocol.compute import (
    DataflowDescription,
    IndexExport,
    ShardImport,
    SubscribeExport,
)
from actors.model.protocol.internal import DataflowScheduled
from actors.replica.dataflow.events import DataflowPhase
from actors.runtime.progress import EMPTY

# -- indexes and subscribes ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
async def test_an_index_is_installed_on_every_worker(tmp_path: Path, workers: int) -> None:
    async with surroundings() as (system, persist):
        export = IndexExport(("a",), NUMBERS)
        house = await pass_through(system, persist, tmp_path, export, workers=workers)
        await house.reported(5)
        await write(persist, "numbers", 8, table(NUMBERS, (3, 6, 1), (1, 7, -1)))
        await house.reported(8)
        for worker in house.workers:
            first, *later = worker.installs
            assert (first.lower, first.upper, first.snapshot) == (0, 5, True)
            uppers = [5]
            for install in later:
                assert install.lower == uppers[-1]
                assert not install.snapshot
                uppers.append(install.upper)
            assert uppers[-1] == 8
        everything = [w.installs for w in house.workers]
        snapshot = [row for installs in everything for row in listed(installs[0].updates)]
        assert sorted(snapshot) == [(1, 4, 1), (2, 4, 1)]
        later_rows = [r for i in everything for install in i[1:] for r in listed(install.updates)]
        assert sorted(later_rows) == [(1, 7, -1), (3, 6, 1)]


async def test_an_index_tells_how_far_it_has_read_its_first_contents(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        for upper in range(2, 6):
            await write(persist, "numbers", upper, table(NUMBERS, (upper, upper - 1, 1)))
        sizes = [p.bytes for b in (await persist.state("numbers")).batches for p in b.parts]
        assert len(sizes) == 4
        imports = (ShardImport("numbers", NUMBERS),)
        description = DataflowDescription("t1", "i", imports, IndexExport(("a",), NUMBERS), 4)
        house = House(system, persist, tmp_path, description)
        await house.address.send(DataflowScheduled())
        await house.reported(5)
        statuses = house.workers[0].statuses
        read = [(s.parts_read, s.bytes_read) for s in statuses if s.parts_total]
        assert {(s.parts_total, s.bytes_total) for s in statuses if s.parts_total} == {
            (4, sum(sizes))
        }
        assert read == sorted(read)
        assert (read[0][0], read[-1]) == (0, (4, sum(sizes)))
        assert all(s.state == "hydrating" for s in statuses if s.parts_total)
        assert (statuses[-1].state, statuses[-1].parts_total) == ("gathering", 0)


async def test_a_subscribe_is_contiguous_from_its_snapshot_to_until(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await pass_through(system, persist, tmp_path, SubscribeExport(NUMBERS), until=8)
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches))
        await write(persist, "numbers", 12, table(NUMBERS, (3, 6, 1), (9, 9, 1)))
        await house.until(lambda: batches[-1].upper == EMPTY)
        assert [b.lower for b in batches] == [0, *(b.upper for b in batches[:-1])]
        assert batches[0].upper == 5
        assert batches[-1].lower == 8
        assert emitted(batches) == [(1, 4, 1), (2, 4, 1), (3, 6, 1)]
        # Past its `until` it reads nothing more, and holds nothing back.
        await house.until(lambda: not house.workers[0].tasks)
        assert not persist._book.own("numbers")


async def test_a_subscribe_without_snapshot_starts_after_its_as_of(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        export = SubscribeExport(NUMBERS, snapshot=False)
        house = await pass_through(system, persist, tmp_path, export)
        await write(persist, "numbers", 7, table(NUMBERS, (3, 6, 1), (4, 6, 1), (4, 6, -1)))
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches) and batches[-1].upper == 7)
        assert batches[0].lower == 5
        assert emitted(batches) == [(3, 6, 1)]


async def test_a_subscribe_ends_with_the_error_of_its_input(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await pass_through(system, persist, tmp_path, SubscribeExport(NUMBERS))
        shape = NUMBERS.arrow_updates().append(pa.field(ERROR, pa.string()))
        row = {"a": None, TIME: 6, DIFF: 1, ERROR: "upstream"}
        await write(persist, "numbers", 7, pa.Table.from_pylist([row], schema=shape))
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches) and batches[-1].error is not None)
        assert batches[-1].error == ("ViewInError", "upstream")
        assert house.rests_in(DataflowPhase.DROPPED)


async def test_a_subscribe_that_comes_too_late_is_told(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 20, table(NUMBERS, (1, 2, 1)))
        await persist.set_holds([("numbers", "retain", 15)])
        imports = (ShardImport("numbers", NUMBERS),)
        description = DataflowDescription("t1", "late", imports, SubscribeExport(NUMBERS), 4)
        house = House(system, persist, tmp_path, description)
        await house.address.send(DataflowScheduled())
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches))
        error = batches[-1].error
        assert error is not None
        assert error[0] == "ReadBelowSince"
