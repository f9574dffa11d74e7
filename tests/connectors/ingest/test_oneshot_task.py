"""The oneshot task between a reading made up and a store that fails, hangs, or is slow."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest

from actors.connectors.oneshot_task import OneshotEnded, OneshotProgress, OneshotTask
from actors.connectors.sources.file_reading import MalformedFile
from actors.connectors.sources.oneshot import FilesProgress
from actors.connectors.sources.source import SourceUnreachable
from actors.durable.persist import BatchPart, NewShard, PersistClient
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.model.protocol.storage import FilesStaged, StagingFailed
from actors.runtime.errors import StorageError, StoreFull
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


def piece(start: int, count: int) -> pa.Table:
    return pa.table({"a": pa.array(range(start, start + count)), DIFF: pa.array([1] * count)})


class MadeUp:
    """Pieces as they are told; an error in their place, when it is one."""

    def __init__(self, given: list[int | Exception], prepare: Exception | None = None) -> None:
        self.given = given
        self.refusal = prepare
        self.rows = self.done = 0
        self.closed = False

    async def prepare(self) -> None:
        await anyio.sleep(0.01)
        if self.refusal is not None:
            raise self.refusal

    async def pieces(self) -> AsyncGenerator[pa.Table, None]:
        try:
            for count in self.given:
                await anyio.sleep(0.01)
                if isinstance(count, Exception):
                    raise count
                self.done += 1
                self.rows += count
                yield piece(self.rows - count, count)
        finally:
            self.closed = True

    def progress(self) -> FilesProgress:
        return FilesProgress(self.done, len(self.given), self.done, len(self.given), self.rows)


class Blob(MemoryBlob):
    """Fails or hangs at one write."""

    def __init__(self, clock: ActorClock) -> None:
        super().__init__(clock)
        self.writes = 0
        self.trouble_at = 0
        self.how: Exception | None = None

    async def set(self, key: str, data: bytes) -> None:
        self.writes += 1
        await anyio.sleep(0.02)
        if self.writes == self.trouble_at:
            if self.how is None:
                await anyio.sleep_forever()
            else:
                raise self.how
        await super().set(key, data)


class House:
    def __init__(self, stage: ActorIsolation, settings: Settings) -> None:
        self.stage, self.settings = stage, settings
        self.blob = Blob(stage.clock)
        self.persist = PersistClient(
            self.blob, MemoryConsensus(), settings, stage.clock, random=random.Random(1)
        )
        self.owner: PeerProbe = stage.probe("owner")

    @classmethod
    async def open(cls, stage: ActorIsolation, **options: int) -> House:
        given = {"source_inflight_bytes_max": 1, "blob_orphan_grace_ms": 1, **options}
        house = cls(stage, Settings(**given))  # type: ignore[arg-type]
        assert await house.persist.create_shards([NewShard("s", SCHEMA)])
        return house

    def start(self, reading: MadeUp) -> SubjectActor[Any]:
        return self.stage.start(
            lambda: OneshotTask(
                7, "s", lambda: reading, self.persist, self.owner.address, self.settings
            ),
            "oneshot",
        )

    async def keys(self) -> set[str]:
        return {info.key for info in await self.blob.list_keys()}

    def ended(self) -> list[OneshotEnded]:
        found = [each for each in self.owner.received if isinstance(each, OneshotEnded)]
        self.owner.received.clear()
        return found


async def test_all_rows_are_staged_at_no_time_and_told_once(stage: ActorIsolation) -> None:
    house = await House.open(stage)
    reading = MadeUp([3, 0, 2, 4])
    subject = house.start(reading)
    await stage.advance(1_000)
    told = [each for each in house.owner.received if isinstance(each, OneshotProgress)]
    rows = [each.rows_staged for each in told]
    assert rows == sorted(rows)
    assert (rows[0], rows[-1], told[-1].number) == (0, 9, 7)
    (ended,) = house.ended()
    assert isinstance(ended.result, FilesStaged)
    assert (ended.result.files, ended.result.bytes) == (4, 4)
    parts = [msgspec.msgpack.decode(batch.part, type=BatchPart) for batch in ended.result.batches]
    assert await house.keys() == {part.key for part in parts}
    assert [batch.rows for batch in ended.result.batches] == [part.rows for part in parts]
    assert all((part.at, part.time_min, part.inline) == (None, 0, None) for part in parts)
    assert reading.closed
    assert not subject.running
    # Nobody claims them: they are given up, and go.
    assert await house.persist.collect_orphans() == 0
    await stage.advance(house.settings.stash_orphan_ms)
    assert await house.persist.collect_orphans() == 0
    await stage.advance(house.settings.blob_orphan_grace_ms)
    assert await house.persist.collect_orphans() == len(parts)
    assert await house.keys() == set()


async def test_small_pieces_share_a_part_and_no_rows_make_none(stage: ActorIsolation) -> None:
    house = await House.open(stage, source_inflight_bytes_max=1 << 20)
    house.start(MadeUp([1] * 30))
    await stage.advance(1_000)
    (ended,) = house.ended()
    assert isinstance(ended.result, FilesStaged)
    assert [batch.rows for batch in ended.result.batches] == [30]
    house.start(MadeUp([0, 0]))
    await stage.advance(1_000)
    assert house.ended() == [OneshotEnded(7, FilesStaged((), 2, 2))]


@pytest.mark.parametrize(
    ("reading", "code", "text"),
    [
        (MadeUp([2, MalformedFile("a.csv: torn", "a.csv")]), "InvalidUsage", "a.csv: torn (repair"),
        (
            MadeUp([2, SourceUnreachable("it is gone", "look")]),
            "SourceUnreachable",
            "it is gone (look)",
        ),
        (MadeUp([2, ValueError("ours")]), "PenstockError", "ValueError: ours"),
        (MadeUp([], SourceUnreachable("no such folder")), "SourceUnreachable", "no such folder"),
    ],
    ids=["malformed", "unreachable", "fault", "prepare"],
)
async def test_it_fails_whole_and_says_why(
    stage: ActorIsolation, reading: MadeUp, code: str, text: str
) -> None:
    house = await House.open(stage)
    subject = house.start(reading)
    await stage.advance(1_000)
    (ended,) = house.ended()
    assert isinstance(ended.result, StagingFailed)
    assert ended.result.code == code
    assert ended.result.text.startswith(text)
    assert not subject.running
    assert await house.keys() == set()


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [StorageError("no", determinate=False), StoreFull("full", determinate=True)],
    ids=["open", "full"],
)
async def test_a_store_that_fails_leaves_nothing(
    stage: ActorIsolation, at: int, error: StorageError
) -> None:
    house = await House.open(stage)
    house.blob.trouble_at, house.blob.how = at, error
    house.start(MadeUp([2, 2, 2]))
    await stage.advance(1_000)
    (ended,) = house.ended()
    assert isinstance(ended.result, StagingFailed)
    assert ended.result.code == type(error).__name__
    assert await house.keys() == set()


async def stopped(stage: ActorIsolation, subject: SubjectActor[Any]) -> None:
    """It stops, when what is being written has been, or has been given up."""
    async with anyio.create_task_group() as group:
        group.start_soon(subject.stop)
        await stage.advance(60_000)


@pytest.mark.parametrize("after_ms", range(0, 140, 5))
@pytest.mark.parametrize("hangs", [0, 1, 2])
async def test_it_can_be_stopped_at_any_moment(
    stage: ActorIsolation, after_ms: int, hangs: int
) -> None:
    """While it looks, reads, writes, or waits for a store that never answers."""
    house = await House.open(stage)
    house.blob.trouble_at = hangs
    reading = MadeUp([2, 2, 2])
    subject = house.start(reading)
    await stage.advance(after_ms)
    if subject.running:
        await stopped(stage, subject)
        assert house.ended() == []
        assert await house.keys() == set()
        assert reading.closed or not reading.done
    else:
        (ended,) = house.ended()
        assert isinstance(ended.result, FilesStaged)
        assert len(await house.keys()) == len(ended.result.batches)


async def test_parts_are_bounded(stage: ActorIsolation) -> None:
    house = await House.open(stage, copy_parts_max=3)
    house.start(MadeUp([1] * 100))
    await stage.advance(10_000)
    (ended,) = house.ended()
    assert isinstance(ended.result, StagingFailed)
    assert "(limit 3, copy_parts_max)" in ended.result.text
    assert await house.keys() == set()
    assert house.blob.writes <= 5


async def test_what_gathers_is_bounded_while_a_write_hangs(stage: ActorIsolation) -> None:
    house = await House.open(stage, source_inflight_bytes_max=100)
    house.blob.trouble_at = 1
    reading = MadeUp([5] * 100)
    subject = house.start(reading)
    await stage.advance(10_000)
    assert reading.done <= 5, "it reads no further"
    await stage.advance(60_000)
    (ended,) = house.ended()
    assert isinstance(ended.result, StagingFailed)
    assert ended.result.text.startswith("the store did not accept a part within 60000 ms")
    assert not subject.running
    assert await house.keys() == set()
