"""Sets that share a commit: each in one group and in order, whoever is cancelled meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import anyio
import anyio.lowlevel
import pytest

from actors.durable.persist.group_commit import SETS_MAX, ConsensusGroupCommit, PendingSet
from actors.durable.persist.location import CompareAndSet
from actors.runtime.errors import ResourceClosed, StorageError


def op(name: str) -> list[CompareAndSet]:
    return [CompareAndSet(name, None, b"x")]


class Store:
    """Takes groups; a commit lasts until it is let go, if it is held."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.held = False
        self.go = anyio.Event()
        self.closed = False
        self.under_way = 0
        self.sets = ConsensusGroupCommit(anyio.Lock(fast_acquire=True), self.check, self.commit)

    def check(self) -> None:
        if self.closed:
            raise ResourceClosed("the store is closed")

    async def commit(self, group: Sequence[PendingSet]) -> None:
        self.under_way += 1
        assert self.under_way == 1, "two commits at once"
        self.groups.append([pending.ops[0].key for pending in group])
        await anyio.lowlevel.checkpoint()
        if self.held:
            await self.go.wait()
        for pending in group:
            pending.answer = not pending.ops[0].key.startswith("no")
        self.under_way -= 1

    async def put(self, name: str) -> bool:
        return await self.sets.set(op(name))


async def test_who_comes_during_a_commit_shares_the_next_one_in_order() -> None:
    store = Store()
    store.held, answers = True, {}

    async def put(name: str) -> None:
        answers[name] = await store.put(name)

    async with anyio.create_task_group() as group:
        for name in ("a", "no", "b", "c"):
            group.start_soon(put, name)
        await anyio.wait_all_tasks_blocked()
        assert (store.groups, answers) == ([["a"]], {})
        store.go.set()
    assert store.groups == [["a"], ["no", "b", "c"]]
    assert answers == {"a": True, "no": False, "b": True, "c": True}


async def test_writers_that_keep_step_share_each_commit() -> None:
    store = Store()

    async def write(name: str) -> None:
        for number in range(10):
            await store.put(f"{name}{number}")

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(write, f"w{number}-")
    assert len(store.groups) <= 12, [len(group) for group in store.groups]


async def test_a_group_has_so_many_sets_and_the_rest_follow() -> None:
    store = Store()
    async with anyio.create_task_group() as group:
        for number in range(2 * SETS_MAX + 2):
            group.start_soon(store.put, f"s{number}")
    assert [len(group) for group in store.groups] == [1, SETS_MAX, SETS_MAX, 1]


async def test_all_who_wait_learn_that_the_store_was_closed() -> None:
    store = Store()
    store.held = True
    told: list[bool | str] = []

    async def put(name: str) -> None:
        try:
            told.append(await store.put(name))
        except ResourceClosed as error:
            told.append(str(error))

    async with anyio.create_task_group() as group:
        for name in ("a", "b", "c"):
            group.start_soon(put, name)
        await anyio.wait_all_tasks_blocked()
        store.closed = True
        store.go.set()
    assert told == [True, "the store is closed", "the store is closed"]
    assert store.groups == [["a"]]


async def test_a_commit_that_answers_nothing_leaves_the_outcome_open() -> None:
    async def commit(group: Sequence[PendingSet]) -> None:
        raise RuntimeError("a bug")

    sets = ConsensusGroupCommit(anyio.Lock(), lambda: None, commit)
    with pytest.raises(RuntimeError, match="a bug"):
        await sets.set(op("a"))
    with pytest.raises(RuntimeError, match="a bug"):
        await sets.set(op("b"))  # nobody is left to wait for


async def test_a_cancelled_leader_finishes_its_commit_and_the_next_one_leads() -> None:
    """The commit goes on, for the others' sake; the lost outcome is the cancelled caller's."""
    store, answers = Store(), []
    store.held = True

    async def put(name: str) -> None:
        answers.append((name, await store.put(name)))

    async with anyio.create_task_group() as group:
        leading = anyio.CancelScope()

        async def lead() -> None:
            with leading:
                await put("a")

        group.start_soon(lead)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(put, "b")
        await anyio.wait_all_tasks_blocked()
        leading.cancel()
        await anyio.wait_all_tasks_blocked()
        assert store.groups == [["a"]]
        store.go.set()
    assert store.groups == [["a"], ["b"]]
    assert ("b", True) in answers


@pytest.mark.parametrize("seed", range(60))
async def test_whoever_is_cancelled_nobody_waits_for_ever_and_nothing_is_done_twice(
    seed: int,
) -> None:
    dice, store, ended = Random(seed), Store(), {}
    scopes: dict[str, anyio.CancelScope] = {}

    async def put(name: str) -> None:
        for _ in range(dice.randrange(4)):
            await anyio.lowlevel.checkpoint()
        with scopes[name]:
            try:
                ended[name] = await store.put(name)
            except StorageError as error:
                ended[name] = error.determinate

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            names = [f"s{number}" for number in range(40)]
            for name in names:
                scopes[name] = anyio.CancelScope()
                group.start_soon(put, name)
            while len(ended) + sum(scope.cancel_called for scope in scopes.values()) < len(names):
                await anyio.lowlevel.checkpoint()
                if dice.random() < 0.4:
                    scopes[dice.choice(names)].cancel()
    done = [name for group in store.groups for name in group]
    assert len(done) == len(set(done))
    for name in names:
        if ended.get(name):
            assert name in done
        assert name in ended or scopes[name].cancel_called
    assert await store.put("last")
