"""Who waits for a shard wakes for what another process appends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pyarrow as pa
import pytest
from msgspec.structs import replace
from store_houses import CLOCK, SETTINGS, StoreHouse  # type: ignore[import-not-found]

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.durable.persist.location import WatchedConsensus
from actors.durable.persist.memory_stores import MemoryBlob
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import CorruptData, StorageError, UnknownObject
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
POLLING = replace(SETTINGS, store_poll_ms=20)


@asynccontextmanager
async def two(
    house: StoreHouse, settings: Settings = POLLING
) -> AsyncIterator[tuple[PersistClient, PersistClient]]:
    """Of two processes, as far as they know."""
    blob = MemoryBlob(CLOCK)
    made = [
        PersistClient(
            blob,
            await house.client(number, store_poll_ms=settings.store_poll_ms),
            settings,
            CLOCK,
            exclusive=False,
            random=Random(number),
        )
        for number in range(2)
    ]
    async with anyio.create_task_group() as group:
        for client in made:
            group.start_soon(client.follow)
        yield made[0], made[1]
        group.cancel_scope.cancel()
    for client in made:
        await client.close()


def row(time: int) -> pa.Table:
    return pa.table({"a": [time], TIME: [time], DIFF: [1]})


async def append(client: PersistClient, upper: int) -> None:
    parts = await client.write_parts("s", row(upper - 1))
    done = await client.append([ShardAppend("s", upper - 1, upper, parts)])
    assert isinstance(done, AppendCommitted)


@pytest.fixture
def house(documents: StoreHouse) -> StoreHouse:
    return documents


async def test_a_wait_ends_when_another_process_appends(house: StoreHouse) -> None:
    async with two(house) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        for upper in range(1, 4):
            uppers: list[int] = []

            async def wait(upper: int = upper, uppers: list[int] = uppers) -> None:
                uppers.append(await reader.wait_upper("s", upper - 1))

            with anyio.fail_after(200):
                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    for _ in range(upper):
                        await anyio.lowlevel.checkpoint()
                    await append(writer, upper)
            assert uppers == [upper]


@pytest.mark.parametrize("documents", ["postgres"], indirect=True)
async def test_a_server_that_tells_is_not_polled(house: StoreHouse) -> None:
    async with two(house, replace(SETTINGS, store_poll_ms=3_600_000)) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        with anyio.fail_after(200):
            for upper in range(1, 4):
                await append(writer, upper)
                assert await reader.wait_upper("s", upper - 1) == upper


async def test_a_wait_for_a_table_ends_when_another_process_seals_all_tables(
    house: StoreHouse,
) -> None:
    async with two(house) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA, tables=True)])
        assert await reader.upper("s") == 0
        uppers: list[int] = []

        async def wait() -> None:
            uppers.append(await reader.wait_upper("s", 4))

        with anyio.fail_after(200):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                assert isinstance(await writer.append([], tables_upper=(0, 5)), AppendCommitted)
        assert uppers == [5]


async def test_leases_of_who_only_reads_are_renewed(house: StoreHouse) -> None:
    # expires: perhaps late, and only a write drops a lease that was not renewed
    async with two(house, replace(POLLING, reader_lease_ms=400)) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        opened = await reader.open_reader("s", "r")

        async def expires_ms() -> int:
            return (await writer.upkeep.state_now("s")).leases[opened.lease_id].expires_ms

        with anyio.fail_after(200):
            first = await expires_ms()
            while await expires_ms() <= first + 400:  # twice, and nobody else wrote
                await anyio.sleep(0.01)
        await opened.close()


async def test_a_wait_ends_when_another_process_drops_the_shard(house: StoreHouse) -> None:
    async with two(house) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        assert await reader.upper("s") == 0

        async def wait() -> None:
            with pytest.raises(UnknownObject):
                await reader.wait_upper("s", 0)

        with anyio.fail_after(200):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                assert await writer.drop_shards(["s"])


async def test_a_store_that_fails_meanwhile_delays_and_loses_nothing(
    house: StoreHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(house) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        assert await reader.upper("s") == 0
        left = [3]
        head = reader.consensus.head

        async def failing(key: str) -> Any:
            if left[0]:
                left[0] -= 1
                raise StorageError("not now", determinate=True)
            return await head(key)

        monkeypatch.setattr(reader.consensus, "head", failing)
        with anyio.fail_after(200):
            await append(writer, 1)
            assert await reader.wait_upper("s", 0) == 1
        assert left == [0]


async def test_one_damaged_document_keeps_nobody_from_hearing_of_others(
    house: StoreHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(house) as (writer, reader):
        for name in ("a", "s"):
            assert await writer.create_shards([NewShard(name, SCHEMA)])
        assert await reader.upper("a") == await reader.upper("s") == 0
        head, damaged = reader.consensus.head, [True]

        async def reading(key: str) -> Any:
            if key == "shard/a" and damaged[0]:
                raise CorruptData("it is damaged", determinate=True)
            return await head(key)

        monkeypatch.setattr(reader.consensus, "head", reading)
        with anyio.fail_after(200):
            assert await writer.append([ShardAppend("a", 0, 3, ())])
            for upper in range(1, 4):
                await append(writer, upper)
                assert await reader.wait_upper("s", upper - 1) == upper
            damaged[0] = False  # it was restored, and nobody tells of that
            assert await reader.wait_upper("a", 0) == 3


async def test_who_waits_for_what_is_in_doubt_hears_of_it(
    house: StoreHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set whose outcome is open and that never happened: its document is not kept meanwhile."""
    async with two(house) as (writer, reader):
        assert await writer.create_shards([NewShard("s", SCHEMA)])
        assert await reader.upper("s") == 0
        right = reader.consensus.compare_and_set

        async def lost(ops: Any) -> bool:
            raise StorageError("no answer", determinate=False)

        monkeypatch.setattr(reader.consensus, "compare_and_set", lost)
        with pytest.raises(StorageError):
            await append(reader, 1)
        monkeypatch.setattr(reader.consensus, "compare_and_set", right)
        uppers: list[int] = []

        async def wait() -> None:
            uppers.append(await reader.wait_upper("s", 0))

        with anyio.fail_after(200):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await append(writer, 1)
        assert uppers == [1]


async def test_only_some_stores_tell(house: StoreHouse) -> None:
    client = await house.client()
    assert isinstance(client, WatchedConsensus) is (house.kind in ("postgres", "sqlite"))
    await client.close()
