"""What every store of documents must do. A store that is added gets a URL in conftest, no test of
its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizable import Call, is_linearizable  # type: ignore[import-not-found]
from store_houses import StoreHouse  # type: ignore[import-not-found]

from actors.durable.persist.location import (
    FIRST_BITS,
    KEY_BYTES_MAX,
    CompareAndSet,
    ConsensusStore,
    VersionedData,
)
from actors.runtime.errors import InvalidUsage, ResourceClosed, StorageError


async def test_seqnos_count_changes_from_nought(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        assert await one.head("a") is None
        assert not await one.compare_and_set([CompareAndSet("a", 0, b"x")])
        for seqno in range(4):
            expected = None if seqno == 0 else seqno - 1
            for wrong in {None, 0, seqno, seqno + 1} - {expected}:
                assert not await other.compare_and_set([CompareAndSet("a", wrong, b"wrong")])
            assert await other.compare_and_set([CompareAndSet("a", expected, b"%d" % seqno)])
            assert await one.head("a") == VersionedData(seqno, b"%d" % seqno)
        assert not await one.compare_and_set([CompareAndSet("a", 2, None)])
        assert await one.compare_and_set([CompareAndSet("a", 3, None)])


async def test_a_deleted_document_may_come_again(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        assert await one.compare_and_set([CompareAndSet("a", None, b"first")])
        assert await one.compare_and_set([CompareAndSet("a", 0, b"second")])
        assert await other.compare_and_set([CompareAndSet("a", 1, None)])
        assert await one.head("a") is None
        assert await one.list_keys() == []
        assert not await one.compare_and_set([CompareAndSet("a", 1, b"stale")])
        assert not await one.compare_and_set([CompareAndSet("a", 1, None)])
        assert await one.compare_and_set([CompareAndSet("a", None, None)])
        assert await one.head("a") is None
        assert await other.compare_and_set([CompareAndSet("a", None, b"again")])
        assert await one.head("a") == VersionedData(0, b"again")
        assert await one.list_keys() == ["a"]


async def test_a_document_may_begin_at_any_seqno(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        assert await one.compare_and_set([CompareAndSet("a", None, b"first", 0)])
        assert await one.compare_and_set([CompareAndSet("a", 0, None)])
        assert await other.compare_and_set([CompareAndSet("a", None, b"again", 1 << FIRST_BITS)])
        assert await one.head("a") == VersionedData(1 << FIRST_BITS, b"again")
        for remembered in (0, 1):
            assert not await one.compare_and_set([CompareAndSet("a", remembered, b"stale")])
        assert await one.compare_and_set([CompareAndSet("a", 1 << FIRST_BITS, b"more", 5)])
        assert await other.head("a") == VersionedData((1 << FIRST_BITS) + 1, b"more")


async def test_what_is_only_compared_stays(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        assert await one.compare_and_set([CompareAndSet("a", None, b"0")])
        assert await other.compare_and_set([CompareAndSet("a", 0, None, kept=True)])
        assert await other.compare_and_set([CompareAndSet("b", None, b"0", kept=True)])
        assert not await other.compare_and_set([CompareAndSet("a", 1, b"1", kept=True)])
        assert not await other.compare_and_set([CompareAndSet("a", None, b"1", kept=True)])
        assert await one.list_keys() == ["a"]
        assert await one.head("a") == VersionedData(0, b"0")
        fence = CompareAndSet("a", 0, b"x", kept=True)
        assert await other.compare_and_set([fence, CompareAndSet("b", None, b"1")])
        assert await one.compare_and_set([CompareAndSet("a", 0, b"2")])
        assert not await other.compare_and_set([fence, CompareAndSet("b", 0, b"2")])
        assert await other.head("b") == VersionedData(0, b"1")
        assert await other.head("a") == VersionedData(1, b"2")


async def test_a_document_may_have_any_size(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        for size in (0, 1, 1_000_000):
            key, data = f"a{size}", bytes(range(250)) * (size // 250) + b"x" * (size % 250)
            assert await one.compare_and_set([CompareAndSet(key, None, data)])
            assert await other.head(key) == VersionedData(0, data)
            assert await other.list_keys(key) == [key]
            assert await other.compare_and_set([CompareAndSet(key, 0, data)])
            assert await one.head(key) == VersionedData(1, data)


async def test_several_keys_change_together_or_not_at_all(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        both = [CompareAndSet("a", None, b"0"), CompareAndSet("b", None, b"0")]
        assert await one.compare_and_set(both)
        refused = [
            [CompareAndSet("a", 0, b"1"), CompareAndSet("b", None, b"1")],
            [CompareAndSet("a", 0, b"1"), CompareAndSet("b", 1, b"1")],
            [CompareAndSet("a", 0, b"1"), CompareAndSet("c", 0, b"1")],
            [CompareAndSet("c", None, b"1"), CompareAndSet("a", None, b"1")],
            [CompareAndSet("a", 0, None), CompareAndSet("b", 1, None)],
        ]
        for ops in refused:
            assert not await other.compare_and_set(ops)
            assert await one.head("a") == VersionedData(0, b"0")
            assert await one.head("b") == VersionedData(0, b"0")
            assert await one.list_keys() == ["a", "b"]
        ops = [
            CompareAndSet("a", 0, b"1"),
            CompareAndSet("b", 0, None),
            CompareAndSet("c", None, b""),
            CompareAndSet("d", None, None),
        ]
        assert await other.compare_and_set(ops)
        assert await one.head("a") == VersionedData(1, b"1")
        assert await one.head("b") is None
        assert await one.head("c") == VersionedData(0, b"")
        assert await one.list_keys() == ["a", "c"]


async def test_sets_that_mean_nothing_are_refused(documents: StoreHouse) -> None:
    async with documents.documents() as (one, _):
        with pytest.raises(InvalidUsage, match="at least one"):
            await one.compare_and_set([])
        with pytest.raises(InvalidUsage, match="twice"):
            await one.compare_and_set([CompareAndSet("a", 1, b""), CompareAndSet("a", 2, b"")])


ODD = [
    "shard/a b",
    "ü/漢字/🙂",
    "%",
    "a%2Fb",
    "../..",
    ".",
    "/",
    "//",
    "a\\b'\"c",
    "line\nline\r\t",
    "=41",
    "A",
    "a",
    "é",
    "e\u0301",
    "x" * KEY_BYTES_MAX,
    "*?_%",
]


async def test_odd_keys_are_keys(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        for number, key in enumerate(ODD):
            assert await one.compare_and_set([CompareAndSet(key, None, b"%d" % number)]), key
        for number, key in enumerate(ODD):
            assert await other.head(key) == VersionedData(0, b"%d" % number), key
        assert await other.list_keys() == sorted(ODD)
        for prefix in ("a", "a%", "%", "_", "/", "ü/", "x" * 7, "é", "e", "line\n", "."):
            wanted = sorted(key for key in ODD if key.startswith(prefix))
            assert await other.list_keys(prefix) == wanted, prefix


async def test_what_cannot_be_a_key_changes_nothing(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        for key in ("", "a\0b", "\ud800", "é" * (KEY_BYTES_MAX // 2 + 1)):
            with pytest.raises(InvalidUsage, match="invalid document key"):
                await one.head(key)
            with pytest.raises(InvalidUsage, match="invalid document key"):
                await one.compare_and_set([CompareAndSet(key, None, b"")])
        assert await other.compare_and_set([CompareAndSet("fine", None, b"")])
        assert await one.list_keys() == ["fine"]


async def test_listings_are_in_order_and_whole(documents: StoreHouse) -> None:
    keys = [f"shard/{number}" for number in range(40)] + ["shard", "shards/1", "tables"]
    async with documents.documents() as (one, other):
        async with anyio.create_task_group() as group:
            for number, key in enumerate(keys):
                group.start_soon(
                    (one, other)[number % 2].compare_and_set, [CompareAndSet(key, None, b"")]
                )
        assert await one.list_keys() == sorted(keys)
        assert await other.list_keys("shard/") == sorted(keys[:40])
        assert await other.list_keys("shard/3") == sorted(k for k in keys if k[:7] == "shard/3")


async def test_one_of_many_racers_wins(documents: StoreHouse) -> None:
    wins: list[int] = []
    async with documents.documents() as clients:

        async def race(number: int) -> None:
            client = clients[number % 2]
            assert await client.compare_and_set([CompareAndSet(f"own{number}", None, b"")])
            if await client.compare_and_set([CompareAndSet("prize", None, b"%d" % number)]):
                wins.append(number)

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(race, number)
        assert len(wins) == 1
        assert await clients[0].head("prize") == VersionedData(0, b"%d" % wins[0])
        assert len(await clients[1].list_keys("own")) == 16


async def test_no_increment_is_lost(documents: StoreHouse) -> None:
    async with documents.documents() as clients:
        assert await clients[0].compare_and_set([CompareAndSet("n", None, b"0")])

        async def add(client: ConsensusStore) -> None:
            for _ in range(5):
                while True:
                    held = await client.head("n")
                    assert held is not None
                    then = b"%d" % (int(held.data) + 1)
                    if await client.compare_and_set([CompareAndSet("n", held.seqno, then)]):
                        break

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(add, clients[number % 2])
        assert await clients[0].head("n") == VersionedData(20, b"20")


async def test_what_is_seen_can_have_happened_in_some_order(documents: StoreHouse) -> None:
    async def live(
        client: ConsensusStore, who: str, instants: Iterator[int], calls: list[Call], tag: str
    ) -> None:
        draw = Random(who)
        known: dict[str, int | None] = {}
        for turn in range(6):
            keys = draw.sample([f"{tag}x", f"{tag}y"], draw.choice([1, 2]))
            began = next(instants)
            asked: Any = keys[0]
            if draw.random() < 0.4:
                answer: Any = await client.head(asked)
                known[asked] = None if answer is None else answer.seqno
            else:
                data = None if draw.random() < 0.2 else f"{who}.{turn}".encode()
                asked = tuple(CompareAndSet(key, known.get(key), data) for key in keys)
                answer = await client.compare_and_set(asked)
                if answer:
                    for op in asked:
                        seqno = 0 if op.expected is None else op.expected + 1
                        known[op.key] = None if data is None else seqno
            calls.append(Call(began, next(instants), asked, answer))

    async with documents.documents() as clients:
        for seed in range(3):
            instants, calls = count(), list[Call]()
            async with anyio.create_task_group() as group:
                for number in range(4):
                    who = f"{seed}-{number}"
                    group.start_soon(live, clients[number % 2], who, instants, calls, f"{seed}")
            assert len(calls) == 24
            assert any(call.answer is True for call in calls)
            assert is_linearizable(calls), calls


async def test_a_cancelled_caller_disturbs_nobody(documents: StoreHouse) -> None:
    async with documents.documents() as (one, other):
        for turns in range(0, 12, 3):
            async with anyio.create_task_group() as group:
                for number in range(4):
                    ops = [CompareAndSet(f"k{turns}-{number}", None, b"data")]
                    group.start_soon(one.compare_and_set, ops)
                    group.start_soon(one.head, f"k{turns}-{number}")
                group.start_soon(one.list_keys)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        assert await one.compare_and_set([CompareAndSet("after", None, b"")])
        for key in await other.list_keys("k"):
            assert await other.head(key) == VersionedData(0, b"data")
        assert await other.head("after") == VersionedData(0, b"")


async def test_what_was_acknowledged_survives_a_close_while_under_way(
    documents: StoreHouse,
) -> None:
    done: list[str] = []
    async with documents.documents() as (_, watcher):
        one = await documents.client()

        async def write(number: int) -> None:
            key = f"k{number}"
            try:
                if await one.compare_and_set([CompareAndSet(key, None, b"data")]):
                    done.append(key)
            except (ResourceClosed, StorageError):
                return

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(write, number)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            await one.close()
        await one.close()
        found = await watcher.list_keys("k")
        assert set(done) <= set(found)
        if documents.kind != "memory":
            with pytest.raises(ResourceClosed):
                await one.head("a")
            with pytest.raises(ResourceClosed):
                await one.list_keys()
            with pytest.raises(ResourceClosed):
                await one.compare_and_set([CompareAndSet("a", None, b"")])


NAMES = st.sampled_from(["a", "b", "ab"])
DATA = st.sampled_from([None, b"", b"1", b"22"])
KEPT = st.integers(0, 4).map(lambda drawn: drawn == 0)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("set"),
            st.lists(
                st.tuples(NAMES, st.sampled_from([None, 0, 1, 2, "right"]), DATA, KEPT),
                min_size=1,
                max_size=3,
                unique_by=lambda op: op[0],
            ),
        ),
        st.tuples(st.just("head"), NAMES),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "b", "c"])),
    ),
    max_size=15,
)


@pytest.mark.sampled
def test_two_clients_do_what_one_dictionary_does(documents: StoreHouse) -> None:
    numbers = count()

    async def run(steps: Sequence[tuple[str, Any]]) -> None:
        example = f"e{next(numbers)}/"
        model: dict[str, VersionedData] = {}
        async with documents.documents() as clients:
            for turn, (what, about) in enumerate(steps):
                client = clients[turn % 2]
                if what == "list":
                    found = await client.list_keys(example + about)
                    assert found == sorted(key for key in model if key.startswith(example + about))
                elif what == "head":
                    assert await client.head(example + about) == model.get(example + about)
                else:
                    await one_set(client, model, example, about)

    async def one_set(
        client: ConsensusStore,
        model: dict[str, VersionedData],
        example: str,
        drawn: Sequence[tuple[str, Any, bytes | None, bool]],
    ) -> None:
        ops = []
        for name, expected, data, kept in drawn[:3]:
            held = model.get(example + name)
            seqno = None if held is None else held.seqno
            right = seqno if expected == "right" else expected
            ops.append(CompareAndSet(example + name, right, data, kept=kept))
        holds = all(
            (None if (held := model.get(op.key)) is None else held.seqno) == op.expected
            for op in ops
        )
        assert await client.compare_and_set(ops) is holds
        for op in ops if holds else ():
            if op.kept:
                continue
            if op.data is None:
                model.pop(op.key, None)
            else:
                seqno = 0 if op.expected is None else op.expected + 1
                model[op.key] = VersionedData(seqno, op.data)

    with asyncio.Runner() as runner:

        @settings(max_examples=documents.examples)
        @given(STEPS)
        def whole(steps: Sequence[tuple[str, Any]]) -> None:
            runner.run(run(steps))

        whole()
