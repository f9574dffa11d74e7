"""Every outcome of an append, by name: what it says, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    Stores,
    add,
    contents,
    one_shard,
    updates,
)

from actors.durable.persist import (
    TABLES_UPPER,
    AppendCommitted,
    BatchPart,
    NewShard,
    PersistClient,
    ShardAppend,
    UpperMismatch,
)
from actors.durable.persist.shard import shard_key
from actors.runtime.errors import (
    InvalidUsage,
    ReadBelowSince,
    ShardClosed,
    StorageError,
    UnknownObject,
)
from actors.runtime.progress import EMPTY
from actors.testing.patience import PATIENCE_S

Make = Callable[[BatchPart, BatchPart, BatchPart], ShardAppend]
"""From a fresh part of "s" at time 6, one of it that was appended, and one of "t"."""


def parts(*given: BatchPart, lower: int = 5, upper: int = 9) -> ShardAppend:
    return ShardAppend("s", lower, upper, given)


OUTCOMES: dict[str, tuple[Make, Any]] = {
    "appended": (lambda p, _, __: parts(p), AppendCommitted((("s", 9),))),
    "nothing moves the upper": (lambda *_: parts(), AppendCommitted((("s", 9),))),
    "to the empty upper": (
        lambda p, _, __: parts(p, upper=EMPTY),
        AppendCommitted((("s", EMPTY),)),
    ),
    "below the upper": (lambda p, _, __: parts(p, lower=4), UpperMismatch("s", 4, 5)),
    "beyond the upper": (lambda p, _, __: parts(p, lower=6), UpperMismatch("s", 6, 5)),
    "backwards": (lambda p, _, __: parts(p, upper=4), r"5, 4\) is not an interval"),
    "below all times": (lambda p, _, __: parts(p, lower=-1), r"-1, 9\) is not an interval"),
    "beyond all times": (lambda p, _, __: parts(p, upper=EMPTY + 1), "is not an interval"),
    "from the empty frontier": (lambda *_: parts(lower=EMPTY, upper=EMPTY), "holds no time"),
    "updates in no time": (lambda p, _, __: parts(p, upper=5), "updates in .5, 5., which"),
    "nothing in no time": (lambda *_: parts(upper=5), "nothing moves by .5, 5., which"),
    "a time below": (
        lambda p, _, __: parts(replace(p, time_min=4)),
        r"times 4 to 6, outside the interval \[5, 9\)",
    ),
    "a time beyond": (
        lambda p, _, __: parts(p, upper=6),
        r"times 6 to 6, outside the interval \[5, 6\)",
    ),
    "no rows": (lambda p, _, __: parts(replace(p, rows=0)), "has 0 rows: leave it out"),
    "another shard's part": (lambda _, __, other: parts(other), "was written for another shard"),
    "a part again": (
        lambda _, old, __: parts(replace(old, time_min=6, time_max=6)),
        "was already appended, or is listed twice",
    ),
    "a part twice": (lambda p, _, __: parts(p, p), "was already appended, or is listed twice"),
    "an unknown schema": (
        lambda p, _, __: parts(replace(p, schema_id=1)),
        "has schema 1, but the shard's newest is 0",
    ),
    "an unknown shard": (lambda *_: ShardAppend("x", 0, 9, ()), UnknownObject),
    "a hold below the since": (
        lambda p, _, __: replace(parts(p), holds=(("s", "h", 1),)),
        ReadBelowSince,
    ),
}


async def world(stores: Stores) -> tuple[PersistClient, tuple[BatchPart, BatchPart, BatchPart]]:
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, since=2), NewShard("t", SCHEMA)])
    await add(client, "s", 5, (1, 3, 1))
    (old,) = (await client.state("s")).batches[0].parts
    (fresh,) = await client.write_parts("s", updates((2, 6, 1)))
    (other,) = await client.write_parts("t", updates((2, 6, 1)))
    return client, (fresh, old, other)


@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_append_has_one_outcome(name: str) -> None:
    make, outcome = OUTCOMES[name]
    stores = Stores()
    client, given = await world(stores)
    append = make(*given)
    if isinstance(outcome, AppendCommitted | UpperMismatch):
        assert await client.append([append]) == outcome
    elif isinstance(outcome, str):
        with pytest.raises(InvalidUsage, match=outcome) as told:
            await client.append([append])
        assert told.value.determinate
    else:
        with pytest.raises(outcome):
            await client.append([append])
    done = isinstance(outcome, AppendCommitted)
    state = await stores.client().state("s")
    assert state.upper == (append.upper if done else 5)
    assert [part.key for batch in state.batches for part in batch.parts] == [
        given[1].key,
        *(part.key for part in append.parts if done),
    ]


@pytest.mark.parametrize("fail", ["before", "after"])
@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_answer_that_was_lost_changes_no_outcome(name: str, fail: str) -> None:
    make, outcome = OUTCOMES[name]
    stores = Stores()
    client, given = await world(stores)
    stores.consensus.fail = fail
    try:
        found: Any = await client.append([make(*given)])
    except InvalidUsage as error:
        found = error
    if isinstance(outcome, AppendCommitted | UpperMismatch):
        assert found == outcome
    else:
        assert isinstance(found, InvalidUsage if isinstance(outcome, str) else outcome)
    upper = (await stores.client().state("s")).upper
    assert upper == (make(*given).upper if isinstance(outcome, AppendCommitted) else 5)


async def test_a_mismatch_of_what_is_known_is_looked_at_again() -> None:
    stores = Stores(exclusive=False)
    one, _ = await world(stores)
    two = stores.client()
    await two.state("s")
    await add(one, "s", 7, (3, 6, 1))
    later = await two.write_parts("s", updates((4, 8, 1)))
    assert await two.append([ShardAppend("s", 7, 9, later)]) == AppendCommitted((("s", 9),)), (
        "7 is current"
    )
    early = await one.write_parts("s", updates((4, 8, 1)))
    assert await one.append([ShardAppend("s", 7, 9, early)]) == UpperMismatch("s", 7, 9)


def heads_of(stores: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Documents that are read from now on, in order."""
    read: list[str] = []
    head = stores.consensus.head

    async def counted(key: str) -> Any:
        read.append(key)
        return await head(key)

    monkeypatch.setattr(stores.consensus, "head", counted)
    return read


@pytest.mark.parametrize("tables", [False, True])
async def test_a_mismatch_reads_what_it_is_told_of_and_the_tables_upper_for_tables_only(
    tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = Stores(exclusive=False)
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, tables=tables)])
    await client.upper("s")
    read = heads_of(stores, monkeypatch)
    assert await client.append([parts()]) == UpperMismatch("s", 5, 0)
    assert read == ([TABLES_UPPER] if tables else []) + [shard_key("s")]


async def test_a_shard_that_became_a_table_is_answered_for_after_the_tables_upper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = Stores(exclusive=False)
    one, _ = await world(stores)
    two = stores.client()
    assert await two.upper("s") == 5
    await one.drop_shards(["s"])
    await one.create_shards([NewShard("s", SCHEMA, tables=True)])
    await one.append([], tables_upper=(0, 12))
    read = heads_of(stores, monkeypatch)
    assert await two.append([parts(lower=4)]) == UpperMismatch("s", 4, 0)
    assert read == [shard_key("s"), TABLES_UPPER, shard_key("s")]
    assert await two.upper("s") == 12


async def test_what_cannot_be_decided_is_raised_and_never_guessed() -> None:
    stores = Stores()
    client, (fresh, _, _) = await world(stores)
    stores.consensus.fail, stores.consensus.reads_fail = "after", 1000
    with pytest.raises(StorageError) as told:
        await client.append([parts(fresh)])
    assert not told.value.determinate
    stores.consensus.reads_fail = 0
    assert await client.upper("s") == 9, "it had happened"
    again = replace(fresh, time_min=9, time_max=9)
    with pytest.raises(InvalidUsage, match="already appended"):
        await client.append([parts(again, lower=9, upper=12)])


async def test_the_shared_upper_mismatches_by_its_own_name() -> None:
    stores = Stores()
    client = stores.client()
    await client.create_shards([NewShard("s", SCHEMA, tables=True)])
    assert await client.append([], tables_upper=(3, 5)) == UpperMismatch(TABLES_UPPER, 3, 0)
    for wrong in ((5, 5), (5, 3), (-1, 3), (0, EMPTY + 1)):
        with pytest.raises(InvalidUsage, match="cannot go from"):
            await client.append([], tables_upper=wrong)


async def test_the_empty_upper_closes_the_shard_and_its_readers_end() -> None:
    stores = Stores()
    client, (fresh, _, _) = await world(stores)
    reader = await client.open_reader("s", "r")
    seen: list[int] = []

    async def listen() -> None:
        frontier = 2
        while frontier < EMPTY:
            _, frontier = await reader.next(frontier)
            seen.append(frontier)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            await client.append([parts(fresh)])
            await client.append([parts(lower=9, upper=EMPTY)])
    assert seen[-1] == EMPTY
    assert await contents(reader, client, EMPTY - 1) == [(1, 1), (2, 1)]
    with pytest.raises(ShardClosed, match="append to s: it is closed"):
        await client.append([parts(lower=EMPTY, upper=EMPTY)])
    assert await client.append([parts(lower=9, upper=12)]) == UpperMismatch("s", 9, EMPTY)
    with pytest.raises(InvalidUsage, match="cannot wait for an upper beyond"):
        await reader.next(EMPTY)


async def test_what_another_process_may_have_collected_is_not_appended() -> None:
    stores, client = await one_shard(exclusive=False)
    old = await client.write_parts("s", updates((1, 0, 1)))
    stores.clock.later_ms = stores.settings.blob_orphan_grace_ms // 2 + 1
    young = await client.write_parts("s", updates((2, 0, 1)))
    with pytest.raises(StorageError, match="half of blob_orphan_grace_ms") as raised:
        await client.append([ShardAppend("s", 0, 1, (*young, *old))])
    assert raised.value.determinate
    assert await client.recent_upper("s") == 0
    assert isinstance(await client.append([ShardAppend("s", 0, 1, young)]), AppendCommitted)

    alone = Stores()
    client = alone.client()
    await client.create_shards([NewShard("s", SCHEMA)])
    old = await client.write_parts("s", updates((1, 0, 1)))
    alone.clock.later_ms = 10**9
    assert isinstance(await client.append([ShardAppend("s", 0, 1, old)]), AppendCommitted)


@pytest.mark.parametrize(("earlier", "determinate"), [("before", False), (None, True)])
async def test_a_failure_says_what_an_earlier_attempt_may_have_done(
    earlier: str | None, determinate: bool
) -> None:
    stores, client = await one_shard()
    written = await client.write_parts("s", updates((1, 0, 1)))
    stores.consensus.fail, stores.consensus.then = earlier, "determinate"
    if earlier is None:
        stores.consensus.fail = "determinate"
    with pytest.raises(StorageError, match="made up") as raised:
        await client.append([ShardAppend("s", 0, 1, written)])
    assert raised.value.determinate is determinate
