"""A replica in a process of its own writes for the owner that commands it, and for no other."""

from __future__ import annotations

import random

import anyio
import pytest
from persist_world import TINY, Clock, FlakyConsensus  # type: ignore[import-not-found]

from actors.durable.persist import CompareAndSet
from actors.durable.persist.fence import FencedConsensus, acquire_epoch
from actors.durable.persist.registrations import (
    REGISTRATIONS_MAX,
    describe_replica,
    is_registered,
    list_registrations,
    register_replica,
    remove_registrations,
    watch_registration,
)
from actors.durable.persist.replica_fence import ReplicaFence
from actors.runtime.errors import InvalidUsage, ResourceClosed, StorageError, WriterFenced

LONG_MS = 60_000


async def taken(documents: FlakyConsensus, process: str) -> FencedConsensus:
    return await acquire_epoch(documents, process, Clock(), TINY)


def a_set(key: str = "k", expected: int | None = None) -> list[CompareAndSet]:
    return [CompareAndSet(key, expected, b"x")]


async def test_no_set_happens_between_a_takeover_and_the_successors_connection() -> None:
    documents = FlakyConsensus()
    fence = ReplicaFence(documents, LONG_MS)
    await taken(documents, "a")
    await fence.follow_owner("a")
    assert await fence.compare_and_set(a_set())
    assert not await fence.compare_and_set(a_set()), "the caller's own mismatch is an answer"
    successor = await taken(documents, "b")
    done = anyio.Event()

    async def write() -> None:
        assert await fence.compare_and_set(a_set("late"))
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        assert fence.owner is None
        # What the successor reads stands still, and its own sets succeed.
        assert await documents.head("late") is None
        assert await successor.compare_and_set(a_set("own"))
        # A former owner gets nothing more.
        with pytest.raises(WriterFenced, match=r"process a does not own .*epoch 2, process"):
            await fence.follow_owner("a")
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        await fence.follow_owner("b")
    assert done.is_set()
    assert fence.owner == successor.own


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(20))
async def test_each_set_happens_under_the_owner_that_was_followed_last(seed: int) -> None:
    """Owners come, connect late or never, and come back; writers go on all the time."""
    dice, documents = random.Random(seed), FlakyConsensus()
    fence = ReplicaFence(documents, LONG_MS)
    owners: list[FencedConsensus] = []
    followed = -1
    written: dict[str, tuple[int, int]] = {}
    """Of each set: the number of owners, and the one followed, when it was seen to have
    happened."""
    numbers = iter(range(10_000))

    async def write() -> None:
        key = f"k{next(numbers)}"
        assert await fence.compare_and_set(a_set(key))
        written[key] = (len(owners), followed)

    async with anyio.create_task_group() as group:
        for _ in range(60):
            match dice.randrange(4):
                case 0:
                    owners.append(await taken(documents, f"p{len(owners)}"))
                case 1 if owners:
                    number = dice.randrange(len(owners))
                    if number == len(owners) - 1:
                        await fence.follow_owner(f"p{number}")
                        followed = number
                    else:
                        with pytest.raises(WriterFenced):
                            await fence.follow_owner(f"p{number}")
                case _:
                    group.start_soon(write)
            if dice.random() < 0.7:
                await anyio.wait_all_tasks_blocked()
                # No set has happened under an owner that was not followed yet.
                assert all(count - 1 == last for count, last in written.values())
        owners.append(await taken(documents, "last"))
        await fence.follow_owner("last")
        followed = len(owners) - 1
    assert written


async def test_a_set_waits_for_an_owner_for_a_while_and_then_surely_did_not_happen() -> None:
    documents = FlakyConsensus()
    fence = ReplicaFence(documents, wait_ms=1)
    with pytest.raises(StorageError, match="no controller commands this replica") as caught:
        await fence.compare_and_set(a_set())
    assert caught.value.determinate
    assert not isinstance(caught.value, WriterFenced), "it is tried again"
    fence = ReplicaFence(documents, LONG_MS)
    fence.leave()
    with pytest.raises(StorageError):
        await fence.compare_and_set(a_set())
    with pytest.raises(InvalidUsage, match="names no owner"):
        await fence.follow_owner("")
    with pytest.raises(WriterFenced, match="nobody does"):
        await fence.follow_owner("a")


async def test_an_owner_of_a_copy_of_the_stores_commands_nobody() -> None:
    """Its epoch may have the same number, as after a restore."""
    stores, copy = FlakyConsensus(), FlakyConsensus()
    await taken(stores, "a")
    await taken(copy, "b")
    fence = ReplicaFence(stores, LONG_MS)
    with pytest.raises(WriterFenced, match="uses other stores"):
        await fence.follow_owner("b")


async def test_a_registration_stands_until_it_is_removed_or_another_lives_there() -> None:
    documents = FlakyConsensus()
    own = describe_replica("b:1", "b:2", "p", Clock())
    await register_replica(documents, own, TINY)
    assert await list_registrations(documents) == {"b:1": own}
    documents.fail = "after"
    again = describe_replica("b:1", "b:3", "q", Clock())
    await register_replica(documents, again, TINY)
    assert not await is_registered(documents, own)
    with pytest.raises(ResourceClosed, match="the registration of replica b:1 was removed"):
        await watch_registration(documents, own, TINY)
    # An earlier life that stops late removes nothing.
    await remove_registrations(documents, ["b:1", "none"], "p")
    assert await list_registrations(documents) == {"b:1": again}
    await remove_registrations(documents, ["b:1"])
    assert await list_registrations(documents) == {}
    for number in range(REGISTRATIONS_MAX):
        each = describe_replica(f"b:{number}", "b:0", "p", Clock())
        await register_replica(documents, each, TINY)
    await register_replica(documents, describe_replica("b:0", "b:9", "r", Clock()), TINY)
    with pytest.raises(InvalidUsage, match="penstock replicas --drop"):
        await register_replica(documents, describe_replica("c:1", "c:2", "p", Clock()), TINY)
