"""Of the services on the same stores the newest writes, and all others learn of it by name."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from persist_world import SCHEMA, TINY, Clock, FlakyConsensus  # type: ignore[import-not-found]

from actors.durable.persist import (
    AppendCommitted,
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
)
from actors.durable.persist.fence import (
    EPOCH_KEY,
    VERSION,
    FencedConsensus,
    FenceEpoch,
    acquire_epoch,
    read_epoch,
)
from actors.durable.persist.location import ConsensusStore, VersionedData
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.durable.persist.standby import wait_for_stores
from actors.durable.persist.store_urls import take_stores
from actors.runtime.errors import CorruptData, StorageError, WriterFenced
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SOON = {"standby": True, "heartbeat_ms": 1, "takeover_ms": 5}  # expires: no owner lives


async def taken(documents: FlakyConsensus, process: str) -> FencedConsensus:
    return await acquire_epoch(documents, process, Clock(), TINY)


async def test_no_set_of_the_older_one_happens_after_the_newer_took_over() -> None:
    documents = FlakyConsensus()
    older = await taken(documents, "a")
    assert await older.compare_and_set([CompareAndSet("k", None, b"1")])
    assert not await older.compare_and_set([CompareAndSet("k", None, b"1")])
    newer = await taken(documents, "b")
    assert (older.own.epoch, newer.own.epoch, newer.former) == (1, 2, "a")
    for _ in range(2):
        with pytest.raises(
            WriterFenced, match=r"took over the stores \(epoch 2, process"
        ) as caught:
            await older.compare_and_set([CompareAndSet("k", 0, b"2")])
        assert caught.value.determinate
    assert older.fenced.is_set()
    assert await newer.compare_and_set([CompareAndSet("k", 0, b"3")])
    assert (await older.head("k")) == await newer.head("k")
    await newer.look()


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_who_takes_over_does_so_once_whatever_is_lost(fail: str) -> None:
    documents = FlakyConsensus()
    await taken(documents, "a")
    documents.fail = fail
    newer = await taken(documents, "b")
    assert (newer.own.epoch, newer.former) == (2, "a")
    assert await newer.compare_and_set([CompareAndSet("k", None, b"1")])


async def test_of_many_that_start_at_once_one_writes() -> None:
    documents = FlakyConsensus()
    made: list[FencedConsensus] = []

    async def start(name: str) -> None:
        made.append(await taken(documents, name))

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(start, f"p{number}")
    assert sorted(each.own.epoch for each in made) == [1, 2, 3, 4, 5]
    wrote = []
    for each in made:
        try:
            await each.compare_and_set([CompareAndSet(each.own.process, None, b"")])
            wrote.append(each.own.epoch)
        except WriterFenced:
            continue
    assert wrote == [5]


async def test_one_that_stands_by_tries_again_what_it_cannot_take_over() -> None:
    documents, settings = FlakyConsensus(), replace(TINY, **SOON)
    await taken(documents, "a")
    documents.fail, documents.then = "determinate", "determinate"
    newer = await take_stores(documents, settings, Clock(), "b")
    assert isinstance(newer, FencedConsensus)
    assert (newer.own.epoch, newer.former, newer.took_over, documents.sets) == (2, "a", True, 4)


async def test_of_two_that_saw_an_owner_die_the_second_waits_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    documents, settings = FlakyConsensus(), replace(TINY, **SOON)
    await taken(documents, "a")
    rivals: list[FencedConsensus] = []

    async def read_late(consensus: ConsensusStore) -> tuple[FenceEpoch, int] | None:
        if not rivals:  # ours has seen that "a" is gone
            rivals.append(await taken(documents, "b"))
        return await read_epoch(consensus)

    monkeypatch.setattr("actors.durable.persist.store_urls.read_epoch", read_late)
    newer = await take_stores(documents, settings, Clock(), "c")
    assert (
        "could not take over the stores: another service has taken over the stores: epoch 2"
        in caplog.text
    )
    # Its rival never tells that it lives.
    assert isinstance(newer, FencedConsensus)
    assert (newer.own.epoch, newer.former) == (3, "b")


async def test_while_the_stores_do_not_answer_an_owner_is_not_silent() -> None:
    looks = [(0, True), (2_000, True), (9_000, False), (9_100, True), (11_000, True)]
    looks += [(12_200, True)]
    # expires: by the clock of the test
    clock, settings = Clock(), replace(TINY, heartbeat_ms=1, takeover_ms=3_000)

    class FarConsensus(MemoryConsensus):
        async def head(self, key: str) -> VersionedData | None:
            if key == EPOCH_KEY and looks:
                clock.later_ms, answers = looks.pop(0)
                if not answers:
                    raise StorageError("away", determinate=True)
            return await super().head(key)

    documents = FarConsensus()
    await documents.compare_and_set([CompareAndSet(EPOCH_KEY, None, b"an owner's")])
    await wait_for_stores(documents, settings, clock)
    assert not looks


async def test_one_that_stands_by_takes_over_nothing_of_a_newer_release() -> None:
    documents, settings = FlakyConsensus(), replace(TINY, **SOON)
    newer = msgspec.msgpack.encode(FenceEpoch(VERSION + 1, 7, "p", "host", 1, 0))
    await documents.compare_and_set([CompareAndSet(EPOCH_KEY, None, newer)])
    with pytest.raises(StorageError, match="use a newer version"):
        await take_stores(documents, settings, Clock(), "b")


async def test_stores_of_a_newer_version_are_refused() -> None:
    documents = FlakyConsensus()
    newer = msgspec.msgpack.encode(FenceEpoch(VERSION + 1, 7, "p", "host", 1, 0))
    await documents.compare_and_set([CompareAndSet(EPOCH_KEY, None, newer)])
    with pytest.raises(StorageError, match=rf"format {VERSION + 1} \(epoch 7.*use a newer version"):
        await taken(documents, "a")
    await documents.compare_and_set([CompareAndSet(EPOCH_KEY, 0, b"junk")])
    with pytest.raises(CorruptData, match="cannot decode document epoch"):
        await taken(documents, "a")


async def client_of(documents: FlakyConsensus, blob: MemoryBlob, process: str) -> PersistClient:
    consensus = await taken(documents, process)
    return PersistClient(blob, consensus, TINY, Clock(), exclusive=False, process=process)


async def test_a_fenced_client_is_told_while_it_waits_and_its_leases_go_at_once() -> None:
    documents, blob = FlakyConsensus(), MemoryBlob(Clock())
    older = await client_of(documents, blob, "a")
    await older.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    await older.open_reader("s", "r")
    newer = await client_of(documents, blob, "b")
    with anyio.fail_after(60), pytest.raises(WriterFenced):
        await older.append([ShardAppend("s", 0, 5, ())])
    with anyio.fail_after(60), pytest.raises(WriterFenced):
        await older.follow()
    assert await newer.append([ShardAppend("s", 0, 5, ())]) == AppendCommitted((("s", 5),))
    assert (await newer.state("s")).leases == {}
    await newer.set_hold("s", "h", 4)
    assert (await newer.state("s")).since == 4
    await older.close()


async def test_who_stood_by_knows_whether_the_owner_died(tmp_path: Path) -> None:
    urls = {"consensus_url": f"sqlite:{tmp_path}/d.db", "blob_url": f"file:{tmp_path}/b"}
    settings = Settings(**urls, **SOON)  # type: ignore[arg-type]
    opened = [await PersistClient.open(tmp_path / "a", settings, SystemClock())]
    assert not opened[0].took_over, "there was nobody"
    opened.append(await PersistClient.open(tmp_path / "b", settings, SystemClock()))
    assert opened[1].took_over
    await opened[1].close()
    opened.append(await PersistClient.open(tmp_path / "c", settings, SystemClock()))
    assert not opened[2].took_over, "its owner has stopped in order"
    for each in opened:
        await each.close()
