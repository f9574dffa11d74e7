"""FetchTask alone: a fake store on one side, a probe on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.fetch_task import FetchTask, cut
from actors.listen_task import ListenTask
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.protocol.compute import ShardImport
from actors.model.protocol.internal import (
    DescribedPart,
    FetchFailed,
    FetchPart,
    GrantDescriptions,
    PartFetched,
    PartsDescribed,
    ReleaseLeases,
    StartListen,
)
from actors.runtime.errors import CorruptData, LeaseLost, PenstockError, StorageError
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe, match

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


class FakePart(msgspec.Struct, frozen=True):
    key: str
    time_min: int
    time_max: int


def updates(*times: int) -> pa.Table:
    return pa.table(
        {"a": list(times), TIME: list(times), DIFF: [1] * len(times)},
        schema=SCHEMA.arrow_updates(),
    )


class FakeStore:
    """Parts by key; each fetch waits for its gate (open unless the test closes it)."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.failures: dict[str, list[PenstockError]] = {}
        self.gates: dict[str, anyio.Event] = {}
        self.running: list[str] = []
        self.attempts: dict[str, int] = {}

    def put(self, key: str, *times: int, bytes: int = 10, shut: bool = False) -> DescribedPart:
        self.tables[key] = updates(*times)
        if shut:
            self.gates[key] = anyio.Event()
        part = FakePart(key, min(times, default=0), max(times, default=0))
        return DescribedPart(key, "s1", part, 0, 100, bytes, len(times))

    async def fetch(self, part: FakePart, schema: TableSchema) -> pa.Table:
        assert schema == SCHEMA
        self.attempts[part.key] = self.attempts.get(part.key, 0) + 1
        self.running.append(part.key)
        try:
            if part.key in self.gates:
                await self.gates[part.key].wait()
        finally:
            self.running.remove(part.key)
        if self.failures.get(part.key):
            raise self.failures[part.key].pop(0)
        return self.tables[part.key]


def spawn(
    stage: ActorIsolation, store: FakeStore, settings: Settings | None = None
) -> tuple[SubjectActor[Any], PeerProbe]:
    """The task, and its consumer."""
    persist: Any = store
    probe = stage.probe()
    limits = settings or Settings(retry_delay_ms_min=1, retry_delay_ms_max=4)
    task = stage.start(
        lambda: FetchTask(persist, SCHEMA, "u7", 3, 1, probe.address, limits), "fetch"
    )
    return task, probe


async def test_a_result_carries_the_time_it_was_asked_for(stage: ActorIsolation) -> None:
    store = FakeStore()
    part = store.put("p", 3, 5)
    task, probe = spawn(stage, store)
    await task.send(FetchPart(42, part))
    fetched = await probe.expect(
        PartFetched, dataflow="u7", incarnation=3, input_index=1, time=42, key="p"
    )
    assert fetched.updates.equals(updates(3, 5))


async def test_results_come_in_any_order_each_with_its_own_time(stage: ActorIsolation) -> None:
    store = FakeStore()
    slow, fast = store.put("slow", 1, shut=True), store.put("fast", 2)
    task, probe = spawn(stage, store)
    await task.send(FetchPart(10, slow))
    await task.send(FetchPart(20, fast))
    first = await probe.expect(PartFetched, time=20, key="fast")
    store.gates["slow"].set()
    second = await probe.expect(PartFetched, time=10, key="slow")
    assert first.updates.equals(updates(2))
    assert second.updates.equals(updates(1))


async def test_so_many_fetches_at_once_and_no_more(stage: ActorIsolation) -> None:
    store = FakeStore()
    parts = [store.put(f"p{index}", index, shut=True) for index in range(5)]
    task, probe = spawn(stage, store, Settings(fetches_in_flight_max=2))
    for part in parts:
        await task.send(FetchPart(9, part))
    await stage.idle()
    assert sorted(store.running) == ["p0", "p1"]
    store.gates["p1"].set()
    await probe.expect(PartFetched, key="p1")
    await stage.idle()
    assert sorted(store.running) == ["p0", "p2"]
    for gate in store.gates.values():
        gate.set()
    assert {(await probe.expect(PartFetched)).key for _ in range(4)} == {"p0", "p2", "p3", "p4"}


async def test_so_many_bytes_at_once_unless_one_part_is_larger(stage: ActorIsolation) -> None:
    store = FakeStore()
    parts = [store.put(f"p{index}", index, bytes=60, shut=True) for index in range(2)]
    large = store.put("large", 7, bytes=1000, shut=True)
    task, probe = spawn(stage, store, Settings(inflight_bytes_per_dataflow_max=100))
    for part in (*parts, large):
        await task.send(FetchPart(9, part))
    for key in ("p0", "p1", "large"):
        await stage.idle()
        assert store.running == [key]
        store.gates[key].set()
        await probe.expect(PartFetched, key=key)
    # What was fetched, or could not be, has given its bytes back.
    store.failures["lost"] = [LeaseLost("part lost is gone", determinate=True)]
    await task.send(FetchPart(9, store.put("lost", 8, bytes=60)))
    await probe.expect(FetchFailed, key="lost")
    for key in ("p3", "p4"):
        await task.send(FetchPart(9, store.put(key, 8, bytes=50, shut=True)))
    await stage.idle()
    assert store.running == ["p3", "p4"]


@pytest.mark.parametrize(
    "error",
    [
        LeaseLost("part p is gone", determinate=True),
        CorruptData("part p: checksum 1, expected 2", determinate=False),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_no_retry_can_mend_is_reported_at_once(
    stage: ActorIsolation, error: PenstockError
) -> None:
    store = FakeStore()
    part = store.put("p", 1)
    store.failures["p"] = [error]
    task, probe = spawn(stage, store)
    await task.send(FetchPart(10, part))
    await probe.expect(
        FetchFailed, dataflow="u7", incarnation=3, input_index=1, time=10, key="p", error=error
    )
    assert store.attempts["p"] == 1


async def test_a_store_that_fails_is_tried_again(stage: ActorIsolation) -> None:
    """Stores say of every failed read that it is determinate."""
    store = FakeStore()
    part = store.put("p", 1)
    store.failures["p"] = [StorageError("timed out", determinate=True) for _ in range(3)]
    task, probe = spawn(stage, store)
    await task.send(FetchPart(10, part))
    await probe.expect_nothing()
    assert store.attempts["p"] == 1
    for attempts, delay_ms in ((2, 1), (3, 2), (4, 4)):  # doubled each time, less the jitter
        await stage.advance(delay_ms)
        assert store.attempts["p"] == attempts
    await probe.expect(PartFetched, time=10, key="p")


async def test_what_is_tried_again_keeps_its_place(stage: ActorIsolation) -> None:
    """A store that fails is not asked for more meanwhile."""
    store = FakeStore()
    store.failures["p"] = [StorageError("timed out", determinate=True)]
    task, probe = spawn(stage, store, Settings(fetches_in_flight_max=1, retry_delay_ms_min=1000))
    for key in ("p", "q"):
        await task.send(FetchPart(10, store.put(key, 1)))
    await stage.idle()
    assert store.attempts == {"p": 1}
    assert "1 between attempts), 1 waiting" in task.statistics().doing
    await stage.advance(1000)
    await probe.expect(PartFetched, key="p")
    await probe.expect(PartFetched, key="q")
    assert store.attempts == {"p": 2, "q": 1}


async def test_retries_end(stage: ActorIsolation) -> None:
    store = FakeStore()
    part = store.put("p", 1)
    store.failures["p"] = [StorageError("timed out", determinate=True) for _ in range(99)]
    settings = Settings(
        retry_delay_ms_min=1, retry_delay_ms_max=2, fetch_attempts_max=3, fetches_in_flight_max=1
    )
    task, probe = spawn(stage, store, settings)
    await task.send(FetchPart(10, part))
    await stage.advance(4)
    failed = await probe.expect(FetchFailed, time=10, key="p")
    assert str(failed.error) == "timed out"
    assert store.attempts["p"] == 3
    await task.send(FetchPart(11, store.put("q", 2)))  # its place is free again
    await probe.expect(PartFetched, key="q")


async def test_a_failure_keeps_its_time_from_completing_whatever_comes_after(
    stage: ActorIsolation,
) -> None:
    """The freeze: successes after a failed fetch, of the same and of later times, never add up
    to the failed time. (An early shard source matched results first in, first out: a later
    success stood in for the failed part, and its data was skipped.)"""
    store = FakeStore()
    asked = [
        (10, store.put("a", 1)),
        (10, store.put("broken", 2, shut=True)),
        (10, store.put("b", 3)),
        (20, store.put("c", 11)),
    ]
    store.failures["broken"] = [LeaseLost("gone", determinate=True)]
    outstanding = {10: 3, 20: 1}
    failed: set[int] = set()
    task, probe = spawn(stage, store)
    for time, part in asked:
        await task.send(FetchPart(time, part))
    for fetched in await probe.expect_all(*(match(PartFetched, key=key) for key in "abc")):
        outstanding[fetched.time] -= 1
    await probe.expect_nothing()
    store.gates["broken"].set()
    failed.add((await probe.expect(FetchFailed, time=10, key="broken")).time)
    await task.send(FetchPart(30, store.put("d", 21)))
    await probe.expect(PartFetched, time=30, key="d")
    await probe.expect_nothing()
    assert outstanding == {10: 1, 20: 0}
    assert failed == {10}


async def test_only_the_interval_is_returned(stage: ActorIsolation) -> None:
    store = FakeStore()
    part = msgspec.structs.replace(store.put("p", 3, 5, 7, 9), lower=5, upper=9)
    task, probe = spawn(stage, store)
    await task.send(FetchPart(9, part))
    fetched = await probe.expect(PartFetched)
    assert fetched.updates[TIME].to_pylist() == [5, 7]


async def test_a_large_part_is_cut_off_the_loop(stage: ActorIsolation) -> None:
    store = FakeStore()
    part = store.put("p", *range(50_000))
    task, probe = spawn(stage, store)
    await task.send(FetchPart(9, msgspec.structs.replace(part, lower=10, upper=20)))
    fetched = await probe.expect(PartFetched)
    assert fetched.updates[TIME].to_pylist() == list(range(10, 20))


def test_a_snapshot_part_is_taken_as_of_the_time_before_its_upper() -> None:
    store = FakeStore()
    part = msgspec.structs.replace(store.put("p", 3, 5, 7, 9), upper=8, snapshot=True)
    table = cut(updates(3, 5, 7, 9), part)
    assert table["a"].to_pylist() == [3, 5, 7]
    assert table[TIME].to_pylist() == [7, 7, 7]


async def test_it_stops_at_once_while_a_fetch_hangs(stage: ActorIsolation) -> None:
    store = FakeStore()
    part = store.put("p", 1, shut=True)
    task, probe = spawn(stage, store)
    await task.send(FetchPart(10, part))
    await stage.idle()
    assert store.running == ["p"]
    await task.stop()
    assert stage.now_ms() == 0
    assert store.running == []
    assert not probe.received


async def test_listening_and_fetching_over_the_real_store(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    """Both tasks on persist: what was appended comes out once, at its times, then as a lost
    blob's failure."""
    persist = await PersistClient.open(
        tmp_path, Settings(inline_part_bytes_max=1, decoded_parts_bytes_max=1), stage.clock
    )
    await persist.create_shards([NewShard("s1", SCHEMA, holds={"test": 0})])
    imported = ShardImport("s1", SCHEMA)

    async def append(lower: int, upper: int, *times: int) -> None:
        parts = await persist.write_parts("s1", updates(*times)) if times else ()
        assert isinstance(
            await persist.append([ShardAppend("s1", lower, upper, parts)]), AppendCommitted
        )

    await append(0, 5, 1, 3)
    await append(5, 9, 6, 8)
    heard, got = stage.probe("heard"), stage.probe("got")
    limits = Settings()
    listen = stage.start(
        lambda: ListenTask(persist, imported, "u7", 1, 0, heard.address, limits), "listen"
    )
    fetch = stage.start(
        lambda: FetchTask(persist, SCHEMA, "u7", 1, 0, got.address, limits), "fetch"
    )

    async def fetched(described: PartsDescribed) -> list[tuple[int, int]]:
        rows = []
        for part in described.parts:
            await fetch.send(FetchPart(described.upper, part))
            table = (await got.expect(PartFetched, time=described.upper, key=part.key)).updates
            rows += list(zip(table["a"].to_pylist(), table[TIME].to_pylist(), strict=True))
        await listen.send(ReleaseLeases(tuple(part.key for part in described.parts)))
        await listen.send(GrantDescriptions(sum(part.bytes for part in described.parts)))
        return sorted(rows)

    await listen.send(StartListen(6, True))
    snapshot = await heard.expect(PartsDescribed, snapshot=True, lower=0, upper=7)
    assert await fetched(snapshot) == [(1, 6), (3, 6), (6, 6)]
    assert await fetched(await heard.expect(PartsDescribed, lower=7, upper=9)) == [(8, 8)]
    await append(9, 12)
    assert (await heard.expect(PartsDescribed, lower=9, upper=12)).parts == ()
    await listen.send(GrantDescriptions(0))
    await append(12, 20, 12, 19)
    last = await heard.expect(PartsDescribed, lower=12, upper=20)
    (part,) = last.parts
    path = persist.path(part.part)
    assert path is not None
    await stage.clock.run_blocking(Path(path).unlink)
    await fetch.send(FetchPart(20, part))
    failed = await got.expect(FetchFailed, time=20, key=part.key)
    assert isinstance(failed.error, StorageError)
    await listen.stop()  # its reader gives its lease back to a store that is open
    await persist.close()
