"""Guests: who reads and compacts beside the owner of the stores, and harms nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    Clock,
    Stores,
    add,
    contents,
    rows_of,
)

from actors.durable.persist import NewShard, PersistClient, guest_leases
from actors.durable.persist.attach import (
    StoreLocation,
    find_shard,
    open_as_guest,
    open_as_owner,
    store_location,
)
from actors.durable.persist.guest_leases import is_guest
from actors.runtime.errors import (
    InvalidUsage,
    LeaseLost,
    ReadBelowSince,
    ResourceBusy,
    StateDirectoryError,
    StorageError,
    UnknownObject,
)
from actors.runtime.settings import Settings

pytestmark = pytest.mark.anyio
S = "s1"
GRACE_MS = 60_000
SETTINGS = replace(TINY, blob_orphan_grace_ms=GRACE_MS)
MANY = replace(SETTINGS, batches_per_shard_max=100)
"""The owner compacts nothing by itself."""


class World(Stores):  # type: ignore[misc]
    """One owner that is alone but for guests, and the guests."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        super().__init__(settings)

    def guest(self, name: str = "g") -> PersistClient:
        return PersistClient(
            self.blob, self.consensus, self.settings, self.clock, process=name, guest=True
        )


async def filled(world: World) -> PersistClient:
    owner: PersistClient = world.client()
    await owner.create_shards([NewShard(S, SCHEMA, holds={"view": 0})])
    for time in range(6):
        await add(owner, S, time + 1, (time, time, 1))
    return owner


async def test_what_a_guest_was_told_of_outlives_the_owners_compaction() -> None:
    world = World()
    owner = await filled(world)
    guest = world.guest()
    reader = await guest.open_reader(S, "r")
    parts, _ = await reader.snapshot(5)
    before = {part.key for part in parts}

    await owner.set_hold(S, "view", 6)
    await owner.maintain(S)
    state = await owner.state(S)
    assert {r.key for r in state.retired} >= before - {
        part.key for batch in state.batches for part in batch.parts
    }
    assert before <= await world.keys()
    assert len(await rows_of(guest, parts)) == 6

    await reader.close()
    await guest.upkeep.heartbeat(S)
    await owner.maintain(S)
    assert await world.keys() == (await owner.state(S)).blob_keys()


async def test_an_owner_started_afresh_keeps_a_guests_lease_and_no_other() -> None:
    world = World()
    owner = await filled(world)
    await owner.open_reader(S, "mine")
    await add(owner, S, 7, (6, 6, 1))
    guest = world.guest()
    reader = await guest.open_reader(S, "r")
    parts, _ = await reader.snapshot(5)

    again = world.client()
    await again.set_hold(S, "view", 7)
    await again.maintain(S)
    state = await again.state(S)
    assert [name for name in state.leases if not is_guest(name)] == []
    assert state.since == 0
    assert {part.key for part in parts} <= await world.keys()


async def test_a_guest_that_died_is_forgotten_when_its_lease_runs_out() -> None:
    world = World()
    owner = await filled(world)
    reader = await world.guest().open_reader(S, "r")
    parts, _ = await reader.snapshot(5)
    await owner.set_hold(S, "view", 6)
    await owner.maintain(S)
    assert (await owner.state(S)).since == 0

    world.clock.later_ms = world.settings.reader_lease_ms + 1
    await add(owner, S, 7, (6, 6, 1))
    await owner.maintain(S)
    assert (await owner.state(S)).since == 6
    await owner.maintain(S)
    assert not {part.key for part in parts} & await world.keys()
    late = world.guest("late")
    with pytest.raises(ReadBelowSince):
        await (await late.open_reader(S, "r")).snapshot(5)
    with pytest.raises(LeaseLost):
        await late.fetch(parts[0], SCHEMA)


async def test_a_guest_moves_no_since_that_the_owners_readers_need() -> None:
    """The owner, alone, need not renew a lease in the document: to others it has expired."""
    world = World()
    owner = await filled(world)
    reader = await owner.open_reader(S, "r")
    await owner.set_hold(S, "view", 6)
    world.clock.ahead_ms = world.settings.reader_lease_ms + 1

    guest = world.guest()
    assert await guest.upkeep.compact(S) is not None
    written = await guest.state(S)
    assert (written.since, list(written.leases)) == (0, ["r"])

    await add(owner, S, 7, (6, 6, 1))  # reads again what the guest wrote
    assert not reader.lost
    assert await contents(reader, owner, 2) == [(0, 1), (1, 1), (2, 1)]


async def test_a_guest_compacts_and_leaves_deleting_to_the_owner() -> None:
    world = World(MANY)
    owner = await filled(world)
    reader = await owner.open_reader(S, "r")
    told, _ = await reader.snapshot(5)
    await owner.set_hold(S, "view", 6)
    old = await world.keys()

    guest = world.guest()
    seen: list[tuple[int, int]] = []
    assert await guest.upkeep.compact(S, lambda done, total: seen.append((done, total))) == (6, 1)
    assert seen == [(n, 6) for n in range(1, 7)]
    await guest.maintain(S)
    assert old < await world.keys()
    assert await guest.upkeep.compact(S) is None

    assert len(await rows_of(owner, told)) == 6
    await add(owner, S, 7, (6, 6, 1))
    assert len((await owner.state(S)).batches) == 2
    await owner.maintain(S)
    assert {part.key for part in told} <= await world.keys()
    await reader.close()
    await owner.maintain(S)
    assert await world.keys() == (await owner.state(S)).blob_keys()
    late = await owner.open_reader(S, "late")
    assert await contents(late, owner, 6) == [(n, 1) for n in range(7)]


async def test_an_append_of_the_owner_meets_a_guests_compaction_halfway() -> None:
    """Each loses one compare-and-set at most, and nothing else."""
    world = World(MANY)
    owner = await filled(world)
    await owner.set_hold(S, "view", 6)
    guest = world.guest()
    gets, get = 0, world.blob.get

    async def with_an_append(key: str) -> bytes | None:
        nonlocal gets
        gets += 1
        if gets == 3:
            await add(owner, S, 7, (6, 6, 1))
        data: bytes | None = await get(key)
        return data

    world.blob.get = with_an_append
    assert await guest.upkeep.compact(S) == (6, 2)
    reader = await owner.open_reader(S, "r")
    assert await contents(reader, owner, 6) == [(n, 1) for n in range(7)]


async def test_what_a_guest_linked_is_no_orphan_to_an_owner_with_an_old_view() -> None:
    world = World(MANY)
    owner = await filled(world)
    await owner.set_hold(S, "view", 5)
    guest = world.guest()
    assert await guest.upkeep.compact(S) == (6, 1)
    assert await owner.collect_orphans() == 0
    world.clock.later_ms = GRACE_MS + 1
    assert await owner.collect_orphans() == 0
    reader = await guest.open_reader(S, "r")
    assert await contents(reader, guest, 5) == [(n, 1) for n in range(6)]


async def test_a_compaction_that_took_too_long_is_not_linked() -> None:
    """Its parts may be orphans to the owner by then."""
    world = World(MANY)
    owner = await filled(world)
    await owner.set_hold(S, "view", 6)
    late = SlowClock()
    guest = PersistClient(
        world.blob, world.consensus, world.settings, late, process="g", guest=True
    )
    put = world.blob.set

    async def slowly(key: str, data: bytes) -> None:
        await put(key, data)
        late.passed_ms += GRACE_MS // 2 + 1

    world.blob.set = slowly
    before = await world.keys()
    with pytest.raises(StorageError, match="half of blob_orphan_grace_ms"):
        await guest.upkeep.compact(S)
    assert await world.keys() == before
    assert len((await guest.state(S)).batches) == 6


class SlowClock(Clock):  # type: ignore[misc]
    passed_ms = 0

    def monotonic_ms(self) -> float:
        return self.passed_ms


async def test_leases_of_guests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_leases, "GUEST_LEASES_MAX", 8)
    world = World()
    await filled(world)
    guest = world.guest()
    readers = [await guest.open_reader(S, "r") for _ in range(8)]
    with pytest.raises(ResourceBusy, match="limit 8"):
        await guest.open_reader(S, "one more")
    await readers[0].close()
    await guest.open_reader(S, "instead")


def test_places_are_named_in_one_way() -> None:
    assert store_location("x", None, None).state_dir == str(Path("x").absolute())
    both = StoreLocation(blob_url="mem:a", consensus_url="mem:b")
    assert store_location(None, "mem:a", "mem:b") == store_location("x", "mem:a", "mem:b") == both
    mixed = store_location("/x", "s3://bucket/path", None)
    assert mixed == StoreLocation(state_dir="/x", blob_url="s3://bucket/path")
    assert mixed.shown() == "/x with s3://bucket/path"
    for given in [(None, "mem:a", None), (None, None, "mem:a"), (None, None, None)]:
        with pytest.raises(InvalidUsage, match="name the stores"):
            store_location(*given)


async def test_what_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(StateDirectoryError, match="is not a state directory"):
        async with open_as_guest(StoreLocation(state_dir=str(tmp_path)), TINY, clock):
            pass
    place = StoreLocation(blob_url=f"file:{tmp_path}/b", consensus_url=f"sqlite:{tmp_path}/c.db")
    with pytest.raises(StorageError, match="does not exist"):
        async with open_as_guest(place, TINY, clock):
            pass
    assert not await anyio.to_thread.run_sync(lambda: list(tmp_path.iterdir()))


async def state_directory(folder: Path) -> PersistClient:
    client = await PersistClient.open(folder, TINY, Clock())
    await client.create_shards([NewShard(S, SCHEMA, holds={"view": 0})])
    for time in range(6):
        await add(client, S, time + 1, (time, time, 1))
    return client


GUEST = """
import sys, anyio
from actors.runtime.kernel import SystemClock
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.runtime.settings import Settings

async def main():
    settings = Settings(reader_lease_ms=int(sys.argv[2]))
    place = StoreLocation(state_dir=sys.argv[1])
    async with open_as_guest(place, settings, SystemClock()) as attached:
        reader = await attached.client.open_reader("s1", "r")
        parts, _ = await reader.snapshot(5)
        schema = (await attached.client.state("s1")).schema
        print("told", flush=True)
        for line in sys.stdin:
            rows = [(await attached.client.fetch(part, schema)).num_rows for part in parts]
            print(sum(rows), flush=True)
anyio.run(main)
"""


async def test_a_guest_in_another_process(tmp_path: Path) -> None:
    """It reads what it was told of while the owner compacts and collects; killed, it holds back
    nothing beyond its lease."""
    folder = tmp_path / "state"
    owner = await state_directory(folder)
    command = [sys.executable, "-c", GUEST, str(folder), "3600000"]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = BufferedByteReceiveStream(process.stdout)
        try:
            assert await told.receive_until(b"\n", 80) == b"told"
            await owner.set_hold(S, "view", 6)
            await owner.maintain(S)
            await add(owner, S, 7, (6, 6, 1))
            await owner.maintain(S)
            state = await owner.state(S)
            assert state.retired
            assert state.since == 0
            await process.stdin.send(b"read\n")
            assert await told.receive_until(b"\n", 80) == b"6"
        finally:
            process.kill()
    await owner.close()

    later = Clock()
    again = await PersistClient.open(folder, TINY, later)
    await again.set_hold(S, "view", 7)
    assert (await again.state(S)).since == 0  # it may live: nobody's clock says
    later.later_ms = TINY.reader_lease_ms + 1
    await add(again, S, 8, (7, 7, 1))
    await again.maintain(S)
    state = await again.state(S)
    assert (state.since, state.leases, state.retired) == (7, {}, ())
    await again.close()


async def test_an_owner_and_guests_of_a_state_directory(tmp_path: Path) -> None:
    place = StoreLocation(state_dir=str(tmp_path / "state"))
    service = await state_directory(tmp_path / "state")
    with pytest.raises(StateDirectoryError, match="in use by process"):
        async with open_as_owner(place, TINY, Clock()):
            pass
    async with open_as_guest(place, TINY, Clock()) as attached:
        assert await find_shard(attached.client, "s1") == "s1"
        with pytest.raises(UnknownObject, match="similar shards: s1"):
            await find_shard(attached.client, "s11")
    await service.close()
    async with open_as_owner(place, TINY, Clock()) as owner:
        assert owner.name == ""
        await owner.client.set_hold(S, "view", 6)
        await owner.client.maintain(S)
        assert (await owner.client.state(S)).retired == ()
