"""Every answer equals a list's: filter × columns × order × limit × offset, over 1 to 5 workers,
from an index and from a shard, in responses and through the stash."""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.durable.arrangement import Arrangement, partition
from actors.durable.persist import PersistClient
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.compute import IndexTarget, Peek, PeekError, PeekRows, PeekStashed
from actors.model.protocol.message_parts import ColumnComparison, OrderBy, RowSetFinishing
from actors.model.protocol.row_finishing import RowFinisher, finish_rows, limit_batches
from actors.replica.cluster.partitioned import merge_results
from actors.replica.compute.peek_runner import ShardPeekRead
from actors.replica.compute.peeks import PeekSpec, PeekStash, index_answer
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("s", "string"), TableColumn("v", "double"))
)
NAN = math.nan
POOLS: dict[str, list[Any]] = {
    "k": [None, 0, 1, 2, 3, -(2**62)],
    "s": [None, "", "a", "a ", "b", "ü"],
    "v": [None, 0.0, -0.0, 1.5, -math.inf, NAN],
}
KINDS = {"k": pa.int64(), "s": pa.string(), "v": pa.float64()}
Row = tuple[Any, ...]


def position(value: Any) -> tuple[Any, ...]:
    """Where a value that is no NULL stands in Spark's order."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return (0, value.encode() if isinstance(value, str) else value)


def passes(row: dict[str, Any], test: ColumnComparison, value: Any) -> bool:
    held = row[test.column]
    if test.op in ("is null", "is not null"):
        return (held is None) == (test.op == "is null")
    if held is None or value is None:
        return False
    one, other = position(held), position(value)
    return {
        "=": one == other,
        "<>": one != other,
        "<": one < other,
        "<=": one <= other,
        ">": one > other,
        ">=": one >= other,
    }[test.op]


def ordered(rows: list[dict[str, Any]], order_by: tuple[OrderBy, ...]) -> list[dict[str, Any]]:
    def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
        for by in order_by:
            a, b = one[by.column], other[by.column]
            if (a is None) != (b is None):
                return -1 if (a is None) == by.nulls_first else 1
            if a is not None and position(a) != position(b):
                return -1 if (position(a) < position(b)) != by.descending else 1
        return 0

    return sorted(rows, key=functools.cmp_to_key(compare))


def bits(row: dict[str, Any], names: Any) -> Row:
    return tuple(repr(row[name]) for name in names)


comparisons = st.sampled_from(sorted(POOLS)).flatmap(
    lambda column: st.tuples(
        st.just(column),
        st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "is null", "is not null"]),
        st.sampled_from(POOLS[column]),
    )
)
orders = st.lists(
    st.builds(OrderBy, st.sampled_from(sorted(POOLS)), st.booleans(), st.booleans()),
    max_size=3,
    unique_by=lambda by: by.column,
)
rows_drawn = st.lists(
    st.tuples(*(st.sampled_from(POOLS[name]) for name in ("k", "s", "v")), st.integers(1, 3)),
    max_size=40,
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    limit = draw(st.none() | st.integers(0, 30))
    finishing = None
    if draw(st.booleans()):
        finishing = RowSetFinishing(tuple(draw(orders)), limit, draw(st.integers(0, 20)))
    columns = draw(st.none() | st.lists(st.sampled_from(sorted(POOLS)), min_size=1, unique=True))
    return {
        "rows": draw(rows_drawn),
        "tests": draw(st.lists(comparisons, max_size=2)),
        "project": None if columns is None else tuple(columns),
        "finishing": finishing,
        "workers": draw(st.integers(1, 5)),
        "piece": draw(st.sampled_from([1, 2_000, 1 << 20])),
        "keys": draw(st.none() | st.lists(st.sampled_from(POOLS["k"]), min_size=1, max_size=3)),
        "shard": draw(st.booleans()),
        "installs": draw(st.integers(1, 3)),
    }


def made_peek(case: dict[str, Any]) -> Peek:
    tests = tuple(
        ColumnComparison(column, op, to_ipc(pa.table({"x": pa.array([value], KINDS[column])})))
        for column, op, value in case["tests"]
    )
    keys = case["keys"]
    return Peek(
        "p",
        IndexTarget("i1"),
        9,
        () if keys is None else ("k",),
        None if keys is None else to_ipc(pa.table({"k": pa.array(keys, pa.int64())})),
        filter=tests,
        project=case["project"],
        finishing=case["finishing"],
    )


def updates_of(rows: list[Row], time: int) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    arrays = [pa.array(columns[i], KINDS[name]) for i, name in enumerate(("k", "s", "v"))]
    times = pa.array([time] * len(rows), pa.int64())
    names = ["k", "s", "v", TIME, DIFF]
    return pa.table([*arrays, times, pa.array(columns[3], pa.int64())], names=names)


async def ask(case: dict[str, Any], peek: Peek, place: Path) -> pa.Table:
    """As a replica and its client do it."""
    clock = SystemClock()
    persist = await PersistClient.in_memory(Settings(), clock)
    stash = PeekStash(persist.stashed, clock, "0", 1000)
    rows, step = case["rows"], case["installs"]
    results: list[Any] = []
    if case["shard"]:
        spec = PeekSpec(SCHEMA, peek)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "actors.durable.arrangement.gathered_updates.HELD_BYTES_MAX", case["piece"] // 2
            )
            gathered = ShardPeekRead(SCHEMA, 9, spec, place / "spilled")
            for number in range(step):
                gathered.add(updates_of(rows[number::step], number))
            # Of another time, and taken back: both are no part of the answer.
            gathered.add(updates_of([(1, "late", 0.5, 1)], 10))
            gathered.add(updates_of([(1, "gone", 0.5, 1)], 2))
            gathered.add(updates_of([(1, "gone", 0.5, -1)], 4))
            walk = spec.answer(gathered.contents(), None, case["piece"])
            results.append(await stash.answer(walk, 1 << 20))
            gathered.close()
        assert not (place / "spilled").exists()
    else:
        for index in range(case["workers"]):
            arrangement = Arrangement(place / str(index), SCHEMA, ("k",))
            for number in range(step):
                parts = partition(updates_of(rows[number::step], number), ("k",), case["workers"])
                arrangement.insert(parts[index], number + 1)
            arrangement.insert(updates_of([], 9), 10)
            walk = index_answer(arrangement, peek, case["piece"])
            results.append(await stash.answer(walk, 1 << 20))
    answer = merge_results(results, 1 << 20)
    assert not isinstance(answer, PeekError)
    streams: list[bytes] = []
    if isinstance(answer, PeekStashed):
        assert answer.parts
        streams = [await _get(persist, part.key) for part in answer.parts]
        assert [len(data) for data in streams] == [part.size_bytes for part in answer.parts]
        if answer.inline is not None:
            streams.append(answer.inline)
    else:
        assert isinstance(answer, PeekRows)
        streams = [answer.arrow]
    tables = [from_ipc(data) for data in streams]
    assert answer.rows == sum(table.num_rows for table in tables)
    whole = finish_rows(pa.concat_tables(tables), peek.finishing, peek.project)
    finisher = RowFinisher(peek.finishing, peek.project)
    pieces = [piece for table in tables if (piece := finisher.add(table)) is not None]
    pieces += [last for last in [finisher.end()] if last is not None]
    joined = pa.concat_tables([whole.slice(0, 0), *pieces])
    assert repr(joined.to_pylist()) == repr(whole.to_pylist())
    await persist.close()
    return whole


async def _get(persist: PersistClient, key: str) -> bytes:
    data = await persist.stashed.get(key)
    assert data is not None
    return data


@given(cases())
@settings(max_examples=examples(250), deadline=None)
def test_answers_equal_a_list(case: dict[str, Any]) -> None:
    peek = made_peek(case)
    with tempfile.TemporaryDirectory() as place:
        table = anyio.run(ask, case, peek, Path(place))
    names = SCHEMA.names if peek.project is None else peek.project
    assert table.column_names == [*names, DIFF]
    found = [row for row in table.to_pylist() for _ in range(row[DIFF])]
    keys = case["keys"]
    expected = [
        row
        for *values, weight in case["rows"]
        for row in [dict(zip(("k", "s", "v"), values, strict=True))] * weight
        if (keys is None or row["k"] in keys)
        and all(
            passes(row, test, value)
            for test, (_, _, value) in zip(peek.filter, case["tests"], strict=True)
        )
    ]
    finishing = peek.finishing or RowSetFinishing()
    expected = ordered(expected, finishing.order_by)
    begin = finishing.offset
    end = len(expected) if finishing.limit is None else begin + finishing.limit
    cut = expected[begin:end]
    assert len(found) == len(cut)
    # Rows that the order does not tell apart may stand in for one another.
    if finishing.limit is None and begin == 0:
        assert Counter(bits(r, names) for r in found) == Counter(bits(r, names) for r in cut)
    assert not Counter(bits(r, names) for r in found) - Counter(bits(r, names) for r in expected)
    shown = [by.column for by in finishing.order_by if by.column in names]
    if len(shown) == len(finishing.order_by):
        assert [sort_values(r, shown) for r in found] == [sort_values(r, shown) for r in cut]


def sort_values(row: dict[str, Any], names: list[str]) -> list[Any]:
    return [None if row[name] is None else position(row[name]) for name in names]


def test_thinning_holds_no_more_than_it_must() -> None:
    seen = 0

    def endless() -> Any:
        nonlocal seen
        while True:
            seen += 1
            table = updates_of([(seen, "x", 0.5, 1)] * 100, 0).drop_columns([TIME])
            yield table.to_batches()[0]

    found = list(limit_batches(endless(), RowSetFinishing(limit=150, offset=20)))
    assert sum(batch.num_rows for batch in found) == 170
    assert seen == 2, "a limit without an order ends the walk"
    assert list(limit_batches(endless(), RowSetFinishing(limit=0))) == []
    one = iter([updates_of([(1, "x", 0.5, 10**9)], 0).drop_columns([TIME]).to_batches()[0]])
    assert finish_rows(
        pa.Table.from_batches(list(limit_batches(one, RowSetFinishing(limit=2)))),
        RowSetFinishing(limit=2),
        None,
    )[DIFF].to_pylist() == [2]


@pytest.mark.parametrize(
    ("peek", "rule"),
    [
        (
            Peek("p", IndexTarget("i"), 0, filter=(ColumnComparison("x", "="),)),
            "unknown column x",
        ),
        (Peek("p", IndexTarget("i"), 0, filter=(ColumnComparison("k", "=", b"x"),)), "IPC stream"),
        (
            Peek(
                "p", IndexTarget("i"), 0, filter=(ColumnComparison("k", "=", to_ipc(pa.table({}))),)
            ),
            "needs a single value",
        ),
        (
            Peek(
                "p",
                IndexTarget("i"),
                0,
                filter=(ColumnComparison("k", "=", to_ipc(pa.table({"x": ["no"]}))),),
            ),
            "does not fit",
        ),
        (Peek("p", IndexTarget("i"), 0, project=("k", "k")), "duplicate column"),
        (Peek("p", IndexTarget("i"), 0, project=("z",)), "projection"),
        (
            Peek("p", IndexTarget("i"), 0, finishing=RowSetFinishing((OrderBy("z"),))),
            "order by",
        ),
    ],
)
def test_wishes_that_make_no_sense(peek: Peek, rule: str) -> None:
    with pytest.raises(InvalidUsage, match=rule):
        PeekSpec(SCHEMA, peek)


def test_nested_columns_have_no_order() -> None:
    schema = TableSchema((TableColumn("a", "array<int>"),))
    asked = RowSetFinishing((OrderBy("a"),))
    with pytest.raises(InvalidUsage, match="cannot be compared"):
        PeekSpec(schema, Peek("p", IndexTarget("i"), 0, finishing=asked))
    PeekSpec(schema, Peek("p", IndexTarget("i"), 0, filter=(ColumnComparison("a", "is null"),)))
