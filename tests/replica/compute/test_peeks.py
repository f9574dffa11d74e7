"""Rows of a peek: from an arrangement and from a shard, by key and whole, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from actors.durable.arrangement import Arrangement, partition
from actors.durable.persist import NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import ResultPiece, from_ipc, to_ipc
from actors.model.protocol.compute import (
    IndexTarget,
    Peek,
    PeekRows,
    PeekStashed,
    ShardImport,
    ShardTarget,
)
from actors.model.protocol.message_parts import ColumnComparison, OrderBy, RowSetFinishing
from actors.model.protocol.row_finishing import finish_rows
from actors.replica.compute.peek_runner import shard_answer
from actors.replica.compute.peeks import (
    PeekStash,
    error_of,
    index_answer,
    one_key_answer,
    select_keys,
    wanted_keys,
)
from actors.runtime.errors import CorruptData, PenstockError, ReadBelowSince, ViewInError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_S

SCHEMA = TableSchema((TableColumn("k", "int"), TableColumn("v", "string")))
LIMIT = 1 << 20


def updates(*found: tuple[int | None, str | None, int, int], errors: tuple[Any, ...] = ()) -> Any:
    """(k, v, time, diff) each; `errors` are (text, time, diff)."""
    table = pa.table(
        [
            pa.array([u[0] for u in found] + [None] * len(errors), pa.int32()),
            pa.array([u[1] for u in found] + [None] * len(errors), pa.string()),
            pa.array([u[2] for u in found] + [x[1] for x in errors], pa.int64()),
            pa.array([u[3] for u in found] + [x[2] for x in errors], pa.int64()),
        ],
        names=["k", "v", TIME, DIFF],
    )
    if errors:
        texts = [None] * len(found) + [x[0] for x in errors]
        table = table.append_column(ERROR, pa.array(texts, pa.string()))
    return table


def peek(time: int, **keys: list[Any]) -> Peek:
    if not keys:
        return Peek("p", IndexTarget("i1"), time)
    return Peek("p", IndexTarget("i1"), time, tuple(keys), to_ipc(pa.table(keys)))


def one_key(time: int, key: int | None) -> Peek:
    """One key of the column's own type."""
    return peek(time, k=pa.array([key], pa.int32()))


def index_rows(arrangement: Arrangement, asked: Peek, bytes_max: int) -> PeekRows:
    """The one piece of an answer that fits it."""
    (piece,) = index_answer(arrangement, asked, bytes_max)
    assert piece.last
    return PeekRows(piece.arrow, piece.rows)


def contents(answer: PeekRows) -> list[tuple[Any, ...]]:
    table = from_ipc(answer.arrow)
    assert table.column_names == ["k", "v", DIFF]
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=str)


@pytest.fixture
def arrangement(tmp_path: Path) -> Arrangement:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    made.insert(updates((1, "a", 5, 1), (2, "b", 5, 2), (None, "n", 5, 1)), 6)
    made.insert(updates((1, "a", 7, -1), (1, "c", 7, 1)), 8)
    return made


def test_rows_at_a_time(arrangement: Arrangement) -> None:
    before = index_rows(arrangement, peek(6), LIMIT)
    assert contents(before) == [(1, "a", 1), (2, "b", 2), (None, "n", 1)]
    after = index_rows(arrangement, peek(7), LIMIT)
    assert contents(after) == [(1, "c", 1), (2, "b", 2), (None, "n", 1)]


def test_rows_by_key(arrangement: Arrangement) -> None:
    assert contents(index_rows(arrangement, peek(7, k=[1, 9]), LIMIT)) == [(1, "c", 1)]
    null = peek(7, k=pa.array([None], pa.int32()))
    assert contents(index_rows(arrangement, null, LIMIT)) == [(None, "n", 1)]
    # not the index's key: by scan
    assert contents(index_rows(arrangement, peek(7, v=["b"]), LIMIT)) == [(2, "b", 2)]
    assert contents(index_rows(arrangement, peek(7, k=[1, 2], v=["b", "c"]), LIMIT)) == []
    both = peek(7, k=[1, 2], v=["c", "x"])
    assert contents(index_rows(arrangement, both, LIMIT)) == [(1, "c", 1)]


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (peek(7, nothere=[1]), "expected one of k, v"),
        (peek(7, k=["abc"]), "does not fit"),
        (peek(7, k=[1 << 40]), "does not fit"),
        (Peek("p", IndexTarget("i"), 7, ("k", "v"), to_ipc(pa.table({"k": [1]}))), "1 key col"),
        (Peek("p", IndexTarget("i"), 7, (), to_ipc(pa.table({}))), "at least one column"),
        (Peek("p", IndexTarget("i"), 7, ("k",), b"junk"), "not an Arrow IPC stream"),
    ],
)
def test_keys_that_do_not_fit(arrangement: Arrangement, asked: Peek, rule: str) -> None:
    with pytest.raises(PenstockError, match=rule):
        index_rows(arrangement, asked, LIMIT)


def test_keys_compare_null_safe_with_one_nan_and_one_zero() -> None:
    nan = float("nan")
    rows = pa.table({"f": [0.0, -0.0, nan, None, 1.5], "n": [1, 2, 3, 4, 5]})
    for wanted, found in [(-0.0, [1, 2]), (nan, [3]), (None, [4]), (1.5, [5])]:
        keys = pa.table({"f": pa.array([wanted], pa.float64())})
        assert select_keys(rows, keys)["n"].to_pylist() == found
    keys = pa.table({"f": [nan, 1.5], "n": [3, 4]})
    assert select_keys(rows, keys)["n"].to_pylist() == [3]


def test_nested_keys() -> None:
    rows = pa.table({"l": [[1], [2], None], "n": [1, 2, 3]})
    keys = pa.table({"l": pa.array([[2], None], pa.list_(pa.int64()))})
    assert select_keys(rows, keys)["n"].to_pylist() == [2, 3]


def test_below_since(arrangement: Arrangement) -> None:
    arrangement.allow_compaction(7)
    with pytest.raises(ReadBelowSince):
        index_rows(arrangement, peek(6), LIMIT)


def test_an_error_present_at_the_time_is_the_answer(tmp_path: Path) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    made.insert(updates((1, "a", 5, 1)), 6)
    made.insert(updates(errors=(("division by zero", 6, 1),)), 7)
    made.insert(updates((2, "b", 8, 1), errors=(("division by zero", 8, -1),)), 9)
    assert contents(index_rows(made, peek(5), LIMIT)) == [(1, "a", 1)]
    for asked in (peek(6), peek(7, k=[9])):
        with pytest.raises(ViewInError, match="division by zero"):
            index_rows(made, asked, LIMIT)
    assert contents(index_rows(made, peek(8), LIMIT)) == [(1, "a", 1), (2, "b", 1)]


@pytest.mark.parametrize(
    "wrong", [updates((1, "a", 5, -1)), updates((1, "a", 5, 1), errors=(("x", 5, -1),))]
)
def test_a_negative_sum_is_invalid_data(tmp_path: Path, wrong: Any) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    made.insert(wrong, 6)
    with pytest.raises(CorruptData, match="invalid data"):
        index_rows(made, peek(5), LIMIT)
    assert one_key_answer(made, [made.view(6)], one_key(5, 1), LIMIT) is None
    assert error_of(ViewInError("x")).code == "ViewInError"
    assert wanted_keys(SCHEMA, peek(5)) is None


@pytest.mark.parametrize("seed", range(10))
def test_one_key_is_answered_at_once_as_in_a_thread(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    count = 1 + seed % 3
    parts = [Arrangement(tmp_path / str(number), SCHEMA, ("k",)) for number in range(count)]
    held: Counter[tuple[int, str]] = Counter()
    answers = 0
    for time in range(1, 40):
        rows = []
        for _ in range(random.randrange(4)):
            row = (random.randrange(5), random.choice("ab"))
            diff = -1 if held[row] and random.random() < 0.4 else 1
            held[row] += diff
            rows.append((*row, time, diff))
        for part, own in zip(parts, partition(updates(*rows), ("k",), count), strict=True):
            part.insert(own, time + 1)
            if random.random() < 0.2:
                part.maintain()
        asked = one_key(random.randint(0, time), random.randrange(6))
        views = [part.view(asked.time + 1) for part in parts]
        found = one_key_answer(parts[0], views, asked, LIMIT)
        pieces = [index_rows(part, asked, LIMIT) for part in parts]
        if found is not None:
            answers += 1
            assert contents(found) == sorted(row for each in pieces for row in contents(each))
            assert found.rows == len(contents(found))
    assert answers > 30


async def test_rows_of_a_shard(tmp_path: Path) -> None:
    clock = SystemClock()
    persist = await PersistClient.in_memory(Settings(), clock)
    imported = ShardImport("s1", SCHEMA)
    stash = PeekStash(persist.stashed, clock, "0", 1000)
    await persist.create_shards([NewShard("s1", SCHEMA)])

    async def append(lower: int, upper: int, rows: Any) -> None:
        parts = await persist.write_parts("s1", rows)
        await persist.append([ShardAppend("s1", lower, upper, parts)])

    async def read(time: int, **keys: list[Any]) -> list[tuple[Any, ...]]:
        asked = peek(time, **keys)
        asked = Peek(f"p{time}{list(keys)}", ShardTarget("u1", imported), time, *_keys(asked))
        limits, name = (LIMIT, LIMIT), asked.uuid
        answer = await shard_answer(
            persist, clock, stash, imported, asked, limits, name, tmp_path / "spilled"
        )
        assert isinstance(answer, PeekRows)
        return contents(answer)

    try:
        with anyio.fail_after(PATIENCE_S):
            await append(0, 6, updates((1, "a", 5, 1), (2, "b", 5, 1)))
            await append(6, 9, updates((1, "a", 7, -1), errors=(("boom", 8, 1),)))
            assert await read(5) == [(1, "a", 1), (2, "b", 1)]
            assert await read(7) == [(2, "b", 1)]
            assert await read(5, k=[2]) == [(2, "b", 1)]
            with pytest.raises(ViewInError):
                await read(8)
            with pytest.raises(ViewInError):
                await read(8, k=[77])
            found: list[Any] = []

            async def later() -> None:
                found.append(await read(9))

            async with anyio.create_task_group() as group:
                group.start_soon(later)  # waits until its time is sealed
                await append(9, 10, updates(errors=(("boom", 9, -1),)))
            assert found == [[(2, "b", 1)]]
            async with anyio.create_task_group() as group:
                group.start_soon(read, 99)
                await anyio.wait_all_tasks_blocked()
                await persist.set_hold("s1", "h", 9)
                state = await persist.state("s1")
                # While it waits it holds nothing below its time.
                assert (len(state.leases), state.since) == (1, 9)
                group.cancel_scope.cancel()  # while it waits
        await persist.set_hold("s1", "h", 10)  # a write, with the leases of now
        state = await persist.state("s1")
        assert not state.leases, "a read left its lease behind"
    finally:
        await persist.close()


async def test_parts_without_a_row_that_passes_are_not_read(tmp_path: Path) -> None:
    clock = SystemClock()
    persist = await PersistClient.in_memory(Settings(inline_part_bytes_max=1), clock)
    imported = ShardImport("s1", SCHEMA)
    stash = PeekStash(persist.stashed, clock, "0", 1000)
    await persist.create_shards([NewShard("s1", SCHEMA)])
    fetched: list[str] = []
    fetch = persist.fetch

    async def counted(part: Any, schema: TableSchema) -> Any:
        fetched.append(part.key)
        return await fetch(part, schema)

    with anyio.fail_after(PATIENCE_S), pytest.MonkeyPatch.context() as patch:
        patch.setattr(persist, "fetch", counted)
        for number in range(6):
            rows = updates((number, "a", number, 1), (number + 1, "b", number, 2))
            parts = await persist.write_parts("s1", rows)
            await persist.append([ShardAppend("s1", number, number + 1, parts)])
        only = ColumnComparison("k", "=", to_ipc(pa.table({"k": pa.array([3], pa.int32())})))
        asked = Peek("p", ShardTarget("u1", imported), 5, filter=(only,))
        answer = await shard_answer(
            persist, clock, stash, imported, asked, (LIMIT, LIMIT), "p", tmp_path / "x"
        )
        assert isinstance(answer, PeekRows)
        assert contents(answer) == [(3, "a", 1), (3, "b", 2)]
        assert len(fetched) == 2
        fetched.clear()
        keys = to_ipc(pa.table({"k": pa.array([0, 6], pa.int32())}))
        asked = Peek("q", ShardTarget("u1", imported), 5, ("k",), keys)
        answer = await shard_answer(
            persist, clock, stash, imported, asked, (LIMIT, LIMIT), "q", tmp_path / "x"
        )
        assert isinstance(answer, PeekRows)
        assert contents(answer) == [(0, "a", 1), (6, "b", 2)]
        assert len(fetched) == 2


async def test_a_piece_is_collected_when_it_is_there_and_not_before() -> None:
    """Else one that was written slowly would stay for ever."""
    clock = SystemClock()
    persist = await PersistClient.in_memory(Settings(), clock)
    blobs = persist.stashed
    stash = PeekStash(blobs, clock, "0", 0)
    write = blobs.set

    async def slowly(key: str, data: bytes) -> None:
        await stash.collect()
        await write(key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs, "set", slowly)
        found = [ResultPiece(b"1", 1, False), ResultPiece(b"2", 1, True)]
        answer = await stash.answer(iter(found), LIMIT)
    assert isinstance(answer, PeekStashed)
    await stash.collect()
    assert [await blobs.get(part.key) for part in answer.parts] == [None, None]
    await persist.close()


async def test_a_limit_ends_the_reading_of_parts_that_retract_nothing(tmp_path: Path) -> None:
    clock = SystemClock()
    persist = await PersistClient.in_memory(Settings(inline_part_bytes_max=1), clock)
    imported = ShardImport("s1", SCHEMA)
    stash = PeekStash(persist.stashed, clock, "0", 1000)
    await persist.create_shards([NewShard("s1", SCHEMA)])
    fetched: list[str] = []
    fetch = persist.fetch

    async def counted(part: Any, schema: TableSchema) -> Any:
        fetched.append(part.key)
        return await fetch(part, schema)

    async def read(time: int, finishing: RowSetFinishing) -> tuple[int, int]:
        """Rows that the reader finishes with, and how many parts were fetched."""
        fetched.clear()
        asked = Peek(f"p{time}", ShardTarget("u1", imported), time, finishing=finishing)
        answer = await shard_answer(
            persist, clock, stash, imported, asked, (LIMIT, LIMIT), asked.uuid, tmp_path / "x"
        )
        assert isinstance(answer, PeekRows)
        rows = finish_rows(from_ipc(answer.arrow), finishing, None)
        return int(pc.sum(rows[DIFF]).as_py() or 0), len(fetched)

    with anyio.fail_after(PATIENCE_S), pytest.MonkeyPatch.context() as patch:
        patch.setattr(persist, "fetch", counted)
        for number in range(6):
            rows = updates((number, "a", number, 1), (number, "b", number, 2))
            parts = await persist.write_parts("s1", rows)
            await persist.append([ShardAppend("s1", number, number + 1, parts)])
        assert await read(5, RowSetFinishing(limit=4)) == (4, 2)
        assert await read(5, RowSetFinishing(limit=4, offset=3)) == (4, 3)
        assert await read(5, RowSetFinishing(limit=0)) == (0, 0)
        assert await read(5, RowSetFinishing((OrderBy("k"),), 4)) == (4, 6)
        gone = await persist.write_parts("s1", updates((0, "a", 6, -1)))
        await persist.append([ShardAppend("s1", 6, 7, gone)])
        assert await read(6, RowSetFinishing(limit=4)) == (4, 7)
    await persist.close()


def _keys(asked: Peek) -> tuple[Any, ...]:
    return asked.key_columns, asked.keys
