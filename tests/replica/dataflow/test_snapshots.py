"""A subscribe's contents and large steps: one batch each, in memory or in blobs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    House,
    shard,
    surroundings,
    table,
    write,
)

from actors.durable.arrangement.gathered_updates import GatheredUpdates
from actors.durable.persist import PersistClient
from actors.model.plan.schema import ERROR, TIME
from actors.model.plan.updates import from_ipc
from actors.model.protocol.compute import (
    DataflowDescription,
    ShardImport,
    SubscribeBatch,
    SubscribeExport,
)
from actors.model.protocol.internal import DataflowScheduled
from actors.runtime.errors import StorageError
from actors.runtime.kernel import ActorSystem

PIECE = 4_096
SMALL = msgspec.structs.replace(SETTINGS, inline_bytes_max=PIECE, result_bytes_max=2 * PIECE)


async def rows_of(persist: PersistClient, batch: SubscribeBatch) -> list[tuple[Any, ...]]:
    """All of a batch; its blobs are looked at for their size."""
    tables = [] if batch.arrow is None else [from_ipc(batch.arrow)]
    for part in batch.parts:
        data = await persist.stashed.get(part.key)
        assert data is not None
        assert len(data) == part.size_bytes <= PIECE
        tables.append(from_ipc(data))
        assert tables[-1].num_rows == part.rows > 0
    for found in tables:
        assert found.schema.equals(NUMBERS.arrow_updates())
    return [tuple(row.values()) for found in tables for row in found.to_pylist()]


async def blobs(persist: PersistClient) -> int:
    return len(await persist.stashed._blob.list_keys("_stash/"))


def subscribe(
    system: ActorSystem, persist: PersistClient, place: Path, as_of: int, **export: Any
) -> House:
    imports = (ShardImport("numbers", NUMBERS),)
    made = DataflowDescription("t1", "s", imports, SubscribeExport(NUMBERS, **export), as_of)
    return House(system, persist, place, made, settings=SMALL)


@pytest.mark.parametrize("spills", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("count", [0, 50, 5_000], ids=["nothing", "one piece", "many"])
async def test_the_contents_are_one_batch_however_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, spills: bool
) -> None:
    if spills:
        monkeypatch.setattr("actors.durable.arrangement.gathered_updates.HELD_BYTES_MAX", 1_000)
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, *[(n, 1, 2) for n in range(count)]))
        gone = [(n, 6, -1 - n % 2) for n in range(count)]
        await write(persist, "numbers", 9, table(NUMBERS, *gone, (-1, 8, 1)))
        house = subscribe(system, persist, tmp_path, 7)
        await house.address.send(DataflowScheduled())
        batches = house.workers[0].batches
        await house.until(lambda: len(batches) > 1)
        first, second = batches[:2]
        assert (first.lower, first.upper, second.lower) == (0, 8, 8)
        expected = Counter({(n, 7, 1): 1 for n in range(0, count, 2)})
        assert Counter(await rows_of(persist, first)) == expected
        assert bool(first.parts) == (count > 50)
        assert (first.arrow is None) == (count != 50)
        assert await rows_of(persist, second) == [(-1, 8, 1)]
        assert await blobs(persist) == len(first.parts)
        assert not any("snapshot-" in name for _, names, _ in os.walk(tmp_path) for name in names)


async def test_large_contents_without_retractions_go_out_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.replica.dataflow.passthrough.SUMMED_BYTES_MAX", 1_000)
    monkeypatch.setattr(GatheredUpdates, "add", None)  # nothing is summed up
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, *[(n, n % 5, 1) for n in range(3_000)]))
        await write(persist, "numbers", 7, table(NUMBERS, *[(n, 6, 2) for n in range(10)]))
        await write(persist, "numbers", 9, table(NUMBERS, (-1, 8, 1)))
        house = subscribe(system, persist, tmp_path, 7)
        await house.address.send(DataflowScheduled())
        batches = house.workers[0].batches
        await house.until(lambda: len(batches) > 1)
        sums: Counter[tuple[Any, ...]] = Counter()
        for id_, time, diff in await rows_of(persist, batches[0]):
            sums[id_, time] += diff
        assert sums == {(n, 7): 1 + 2 * (n < 10) for n in range(3_000)}
        assert await rows_of(persist, batches[1]) == [(-1, 8, 1)]
        assert await blobs(persist) == len(batches[0].parts) > 10


async def test_a_step_that_is_too_large_is_one_batch(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        house = subscribe(system, persist, tmp_path, 4, snapshot=False)
        await house.address.send(DataflowScheduled())
        many = [(n, 6 + n % 2, 1) for n in range(3_000)]
        await write(persist, "numbers", 8, table(NUMBERS, *many))
        await write(persist, "numbers", 9, table(NUMBERS, (7, 8, 1)))
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches) and batches[-1].upper == 9)
        assert [b.lower for b in batches[1:]] == [b.upper for b in batches[:-1]]
        (large,) = [b for b in batches if b.parts]
        found = [row for b in batches for row in await rows_of(persist, b)]
        assert Counter(found) == Counter([*many, (7, 8, 1)])
        times = {row[1] for row in await rows_of(persist, large)}
        assert all(large.lower <= time < large.upper for time in times)


@pytest.mark.parametrize("summed", [True, False])
async def test_a_store_that_fails_in_the_midst_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summed: bool
) -> None:
    """The batch is told when all of it is there; what a failed try wrote is removed."""
    if not summed:
        monkeypatch.setattr("actors.replica.dataflow.passthrough.SUMMED_BYTES_MAX", 1_000)
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, *[(n, 1, 1) for n in range(3_000)]))
        right, calls = persist.stashed.set, Counter[str]()

        async def failing(key: str, data: bytes) -> None:
            calls["set"] += 1
            if calls["set"] in (1, 5, 11):
                raise StorageError("not now", determinate=False)
            await right(key, data)

        monkeypatch.setattr(persist.stashed, "set", failing)
        house = subscribe(system, persist, tmp_path, 4)
        await house.address.send(DataflowScheduled())
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches))
        assert calls["set"] > 11
        assert Counter(await rows_of(persist, batches[0])) == Counter(
            (n, 4, 1) for n in range(3_000)
        )
        assert await blobs(persist) == len(batches[0].parts)


async def test_a_view_in_error_is_told_before_a_row(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        shape = NUMBERS.arrow_updates().append(pa.field(ERROR, pa.string()))
        good = table(NUMBERS, *[(n, 1, 1) for n in range(3_000)])
        bad = pa.Table.from_pylist(
            [{"a": None, TIME: 2, "__diff": 1, ERROR: "bad cast"}], schema=shape
        )
        await write(persist, "numbers", 5, pa.concat_tables([good, bad], promote_options="default"))
        house = subscribe(system, persist, tmp_path, 4)
        await house.address.send(DataflowScheduled())
        batches = house.workers[0].batches
        await house.until(lambda: bool(batches))
        assert batches == [SubscribeBatch(0, 5, None, ("ViewInError", "bad cast"))]
        assert await blobs(persist) == 0
