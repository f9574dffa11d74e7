"""A listen task with a filter, over a shard in memory: what it leaves out, holds, and proves."""

from __future__ import annotations

from typing import Any

import anyio
import pyarrow as pa
import pytest
from msgspec.structs import replace

from actors.durable.persist import (
    BatchPart,
    NewShard,
    PartCondition,
    PartFilter,
    PersistClient,
    ShardAppend,
)
from actors.durable.persist.statistics import ColumnStatistics
from actors.listen_task import ListenTask
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.protocol.compute import ShardImport
from actors.model.protocol.internal import (
    FilteredParts,
    GrantDescriptions,
    ListenFailed,
    PartsDescribed,
    StartListen,
)
from actors.runtime.errors import CorruptData, StorageError, UnsoundFilter
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
WANTED = PartFilter(SCHEMA, [PartCondition("a", ">", (pa.scalar(99, pa.int64()),))])
ALL, NONE = 1, 1 << 40
"""One in so many parts is audited."""


class World:
    """A shard, a listen task that reads it, and its consumer."""

    def __init__(self, stage: ActorIsolation, persist: PersistClient, settings: Settings) -> None:
        self.persist = persist
        self.upper = 0
        self.fetched: list[str] = []
        self.fail: StorageError | None = None
        self.probe: PeerProbe = stage.probe()
        self._fetch = persist.fetch
        persist.fetch = self.fetch  # type: ignore[method-assign]
        imported = ShardImport("s1", SCHEMA)
        self.task: SubjectActor[Any] = stage.start(
            lambda: ListenTask(
                persist, imported, "u7", 3, 1, self.probe.address, settings, wanted=WANTED
            ),
            "listen",
        )

    async def fetch(self, part: BatchPart, schema: TableSchema) -> pa.Table:
        self.fetched.append(part.key)
        if self.fail is not None:
            raise self.fail
        return await self._fetch(part, schema)

    async def append(self, *values: int, says: tuple[int, int] | None = None) -> str:
        """One part; `says`: bounds that are told of it."""
        times = [self.upper] * len(values)
        rows = pa.table({"a": values, TIME: times, DIFF: [1] * len(values)})
        (part,) = await self.persist.write_parts("s1", rows)
        if says is not None:
            part = replace(part, statistics=(ColumnStatistics("a", 0, *says),))
        await self.persist.append([ShardAppend("s1", self.upper, self.upper + 1, (part,))])
        self.upper += 1
        return part.key

    async def described(self) -> PartsDescribed:
        """The next one, granted."""
        found = await self.probe.expect(PartsDescribed)
        await self.task.send(GrantDescriptions(sum(part.bytes for part in found.parts)))
        assert isinstance(found, PartsDescribed)
        return found


async def world(stage: ActorIsolation, one_in: int) -> World:
    settings = Settings(inline_part_bytes_max=1, filter_audit_one_in=one_in)
    persist = await PersistClient.in_memory(settings, SystemClock())
    await persist.create_shards([NewShard("s1", SCHEMA)])
    return World(stage, persist, settings)


async def test_parts_without_a_row_that_passes_are_not_described(stage: ActorIsolation) -> None:
    with anyio.fail_after(20):
        made = await world(stage, NONE)
        first = await made.append(1, 2)
        second = await made.append(100, 2)
        await made.task.send(StartListen(0, True))
        snapshot = await made.described()
        assert (snapshot.parts, snapshot.upper, snapshot.snapshot) == ((), 1, True)
        found = await made.described()
        assert [part.part.key for part in found.parts] == [second]
        assert found.upper == 2
        await made.append(7)
        last = await made.described()
        assert (last.parts, last.upper) == ((), 3)
        assert last.filtered is not None
        assert (last.filtered.parts, last.filtered.audited) == (2, 0)
        assert made.fetched == []
        assert made.persist._book.used([first, second]) == {second}


async def test_an_audit_reads_what_was_left_out_and_lets_it_go(stage: ActorIsolation) -> None:
    with anyio.fail_after(20):
        made = await world(stage, ALL)
        key = await made.append(1, 2)
        await made.task.send(StartListen(0, True))
        found = await made.described()
        assert found.parts == ()
        assert found.filtered == FilteredParts(
            1, (await made.persist.state("s1")).batches[0].bytes, 1
        )
        assert made.fetched == [key]
        assert made.persist._book.used([key]) == set()


@pytest.mark.parametrize("snapshot", [True, False])
async def test_a_filter_that_is_wrong_freezes_the_source_before_it_is_believed(
    stage: ActorIsolation, snapshot: bool
) -> None:
    with anyio.fail_after(20):
        made = await world(stage, ALL)
        await made.append(1)
        if not snapshot:
            await made.task.send(StartListen(0, False))
        await made.append(5, 100, says=(5, 6))
        if snapshot:
            await made.task.send(StartListen(1, True))
        failed = await made.probe.expect(ListenFailed)
        assert isinstance(failed.error, UnsoundFilter)
        assert "contains 1 rows that pass a > 99" in str(failed.error)
        assert not [each for each in made.probe.received if isinstance(each, PartsDescribed)]
        await made.append(500)
        await made.probe.expect_nothing()


async def test_a_store_that_fails_an_audit_says_nothing_about_the_filter(
    stage: ActorIsolation,
) -> None:
    with anyio.fail_after(20):
        made = await world(stage, ALL)
        key = await made.append(1)
        made.fail = StorageError("made up", determinate=False)
        await made.task.send(StartListen(0, True))
        found = await made.described()
        assert found.filtered is not None
        assert (found.filtered.parts, found.filtered.audited) == (1, 0)
        assert made.fetched == [key]


async def test_an_audit_that_meets_a_damaged_part_freezes_the_source(stage: ActorIsolation) -> None:
    """As it would be for one who reads the part."""
    with anyio.fail_after(20):
        made = await world(stage, ALL)
        await made.append(1)
        made.fail = CorruptData("made up", determinate=True)
        await made.task.send(StartListen(0, True))
        failed = await made.probe.expect(ListenFailed)
        assert isinstance(failed.error, CorruptData)
