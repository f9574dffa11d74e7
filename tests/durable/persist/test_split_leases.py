"""Leases that go from hand to hand, over a store whose answers are lost."""

from __future__ import annotations

import pytest
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    FlakyConsensus,
    Stores,
    add,
    one_shard,
)

from actors.durable.persist import NewShard
from actors.durable.persist.split_leases import SplitLeases, consumer_hold
from actors.runtime.errors import LeaseLost, StorageError, UnknownObject

pytestmark = pytest.mark.anyio


async def world() -> tuple[FlakyConsensus, SplitLeases]:
    stores = Stores()
    stores.consensus = consensus = FlakyConsensus()
    await stores.client().create_shards([NewShard("s", SCHEMA)])
    return consensus, SplitLeases(consensus, stores.blob, stores.settings, stores.clock)


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_change_whose_answer_was_lost_is_made_once(lost: str) -> None:
    consensus, leases = await world()
    before, _ = await leases.look("s")
    consensus.fail = lost
    await leases.hold("s", "me", 0)
    state, _ = await leases.look("s")
    assert state.holds == {consumer_hold("me"): 0}
    assert state.seqno == before.seqno + 1


async def test_a_failure_behind_one_of_open_outcome_is_open_too() -> None:
    consensus, leases = await world()

    async def reads_fail(_: object) -> None:
        consensus.reads_fail = 1

    consensus.fail, consensus.meanwhile = "after", reads_fail
    with pytest.raises(StorageError, match="an earlier attempt may have succeeded") as caught:
        await leases.hold("s", "me", 0)
    assert not caught.value.determinate
    assert consumer_hold("me") in (await leases.look("s"))[0].holds, "it has"
    consensus.fail = "determinate"
    with pytest.raises(StorageError) as caught:
        await leases.hold("s", "other", 0)
    assert caught.value.determinate


async def test_a_lease_is_not_taken_anew_on_what_may_be_deleted_any_time() -> None:
    stores = Stores(exclusive=False)
    client, other = stores.client(), stores.client()
    await client.create_shards([NewShard("s", SCHEMA)])
    for time in range(4):
        await add(client, "s", time + 1, (time, time, 1))
    leases = SplitLeases(stores.consensus, stores.blob, stores.settings, stores.clock)
    state, handed = await leases.take("s", "r", 0)
    reader = await other.open_reader("s", "r")
    await reader.snapshot(3)  # so that what is compacted stays for a while
    await leases.drop(handed)
    await leases.keep(handed, state.live_keys())  # all is there
    await leases.drop(handed)
    await client.upkeep.compact("s")
    assert state.live_keys() <= (await leases.look("s"))[0].blob_keys()
    with pytest.raises(LeaseLost, match=r"load\(\) it again"):
        await leases.keep(handed, state.live_keys())


async def test_a_shard_that_was_dropped_is_told_of_by_name() -> None:
    stores, client = await one_shard()
    leases = SplitLeases(stores.consensus, stores.blob, stores.settings, stores.clock)
    state, handed = await leases.take("s", "r", 0)
    await client.drop_shards(["s"])
    for asked in (
        leases.look("s"),
        leases.hold("s", "me", 0),
        leases.take("s", "other", 0),
        leases.keep(handed, state.live_keys()),
        leases.done(handed, 0),
    ):
        with pytest.raises(UnknownObject, match="no shard s"):
            await asked
