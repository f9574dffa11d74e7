"""Arrangement against a list: random inserts, merges, compaction and reads, all key types."""

from __future__ import annotations

import datetime
import math
import struct
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.durable.arrangement import Arrangement, ArrangementLimits, partition
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

DAY = datetime.date(2013, 1, 1)
NOON = datetime.datetime(2013, 1, 1, 12, 0, 0, 1, tzinfo=datetime.UTC)
QUIET_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]

POOLS: dict[str, list[Any]] = {
    "bigint": [None, 0, 1, -1, 2**62],
    "int": [None, 0, 1, -1],
    "double": [None, 0.0, -0.0, math.nan, QUIET_NAN, 1.5, math.inf],
    "float": [None, 0.0, -0.0, math.nan, 0.5],
    "string": [None, "", "a", "b", "aa", "größer", "a" * 50],
    "binary": [None, b"", b"\0", b"a"],
    "decimal(12,2)": [None, Decimal("0.00"), Decimal("1.50"), Decimal("-1.50")],
    "decimal(38,3)": [None, Decimal("0.000"), Decimal(10) ** 34, -(Decimal(10) ** 34)],
    "boolean": [None, True, False],
    "date": [None, DAY, DAY + datetime.timedelta(1)],
    "timestamp": [None, NOON, NOON + datetime.timedelta(microseconds=1)],
    "array<double>": [None, [], [0.0], [-0.0], [None], [1.0, 2.0], [2.0, 1.0]],
    "struct<a:int,b:string>": [None, {"a": 1, "b": None}, {"a": None, "b": None}],
}
TINY = ArrangementLimits(
    memory_run_bytes_max=600, memory_bytes_max=1200, memory_runs_max=2, block_bytes=400
)


def equal(one: Any, other: Any) -> bool:
    """Spark's ``<=>``."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) and (one is None) == (other is None)


def identity(value: Any) -> Any:
    """Bit by bit."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, list):
        return tuple(map(identity, value))
    if isinstance(value, dict):
        return tuple(sorted((name, identity(field)) for name, field in value.items()))
    return value


class Model:
    """Rows (key values, payload) with time and diff, in a list."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.updates: list[tuple[tuple[Any, ...], int, int]] = []
        names = [f"k{index}" for index in range(len(kinds))]
        self.schema = TableSchema(
            (
                TableColumn("payload", "int"),
                *(TableColumn(name, kind) for name, kind in zip(names, kinds, strict=True)),
            )
        )
        self.key = tuple(names)

    def table(self, updates: list[tuple[tuple[Any, ...], int, int]]) -> pa.Table:
        schema = self.schema.arrow_updates()
        columns = [
            *(list(values) for values in zip(*(row for row, _, _ in updates), strict=True)),
            [time for _, time, _ in updates],
            [diff for _, _, diff in updates],
        ]
        if not updates:
            return schema.empty_table()
        arrays = [
            pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)
        ]
        return pa.table(arrays, schema=schema)

    def contents(self, since: int, before: int, keys: list[tuple[Any, ...]] | None) -> Any:
        return summed(
            [
                (row, max(time, since), diff)
                for row, time, diff in self.updates
                if max(time, since) < before and wanted(row, keys)
            ]
        )

    def read(self, table: pa.Table, since: int, keys: list[tuple[Any, ...]] | None) -> Any:
        names = self.schema.names
        return summed(
            [
                (row, max(update[TIME], since), update[DIFF])
                for update in table.to_pylist()
                if wanted(row := tuple(update[name] for name in names), keys)
            ]
        )


def wanted(row: tuple[Any, ...], keys: list[tuple[Any, ...]] | None) -> bool:
    return keys is None or any(all(map(equal, row[1:], key)) for key in keys)


def summed(updates: list[tuple[tuple[Any, ...], int, int]]) -> Any:
    sums: Counter[Any] = Counter()
    for row, time, diff in updates:
        sums[(tuple(map(identity, row)), time)] += diff
    return {row: diff for row, diff in sums.items() if diff}


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[str, ...], list[Any]]:
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(POOLS)), min_size=1, max_size=2)))
    row = st.tuples(st.integers(0, 2), *(st.sampled_from(POOLS[kind]) for kind in kinds))
    key = st.tuples(*(st.sampled_from(POOLS[kind]) for kind in kinds))
    insert = st.tuples(
        st.just("insert"),
        st.lists(st.tuples(row, st.integers(0, 3), st.sampled_from([1, 1, -1, 2])), max_size=12),
    )
    lookup = st.tuples(st.just("lookup"), st.lists(key, max_size=4))
    other = st.sampled_from(["maintain", "compact", "scan"]).map(lambda word: (word, None))
    return kinds, draw(st.lists(st.one_of(insert, insert, lookup, other), max_size=25))


@given(histories(), st.data())
@settings(max_examples=examples(120), deadline=None)
def test_it_holds_what_a_list_holds(
    history: tuple[tuple[str, ...], list[Any]], data: st.DataObject
) -> None:
    kinds, actions = history
    model = Model(kinds)
    with tempfile.TemporaryDirectory() as directory:
        arrangement = Arrangement(Path(directory), model.schema, model.key, TINY)
        for word, argument in actions:
            upper = arrangement.upper
            if word == "insert":
                updates = [(row, upper + offset, diff) for row, offset, diff in argument]
                arrangement.insert(model.table(updates), upper + 4)
                model.updates += updates
            elif word == "maintain":
                arrangement.maintain()
            elif word == "compact" and upper:
                arrangement.allow_compaction(data.draw(st.integers(0, upper - 1)))
            elif upper:
                since = arrangement.since
                before = data.draw(st.integers(since + 1, upper))
                keys = argument
                if word == "scan":
                    found = arrangement.scan(before)
                else:
                    rows = [((0, *key), 0, 0) for key in keys]
                    found = arrangement.lookup(model.table(rows).select(model.key), before)
                    assert found.num_rows == 0 or found[TIME].to_numpy().max() < before
                assert model.read(found, since, keys) == model.contents(since, before, keys)
        check_end(arrangement, model)
        arrangement.close()
        assert list(Path(directory).iterdir()) == []


def check_end(arrangement: Arrangement, model: Model) -> None:
    """After the last merge: few runs, no file more than they need, all still there."""
    arrangement.maintain()
    statistics = arrangement.statistics()
    assert statistics.runs <= max(1, statistics.rows).bit_length() + 1
    assert statistics.rows <= len(model.updates)
    since = arrangement.since
    everything = arrangement.scan(max(arrangement.upper, 1)) if arrangement.upper else None
    if everything is not None:
        whole = model.contents(since, arrangement.upper, None)
        assert model.read(everything, since, None) == whole


@given(histories(), st.integers(1, 5))
@settings(max_examples=examples(50), deadline=None)
def test_partitions_hold_everything_once_and_keep_keys_together(
    history: tuple[tuple[str, ...], list[Any]], count: int
) -> None:
    kinds, actions = history
    model = Model(kinds)
    updates = [
        (row, offset, diff)
        for word, argument in actions
        if word == "insert"
        for row, offset, diff in argument
    ]
    parts = partition(model.table(updates), model.key, count)
    assert len(parts) == count
    rows = [
        (owner, tuple(update[name] for name in model.schema.names))
        for owner, part in enumerate(parts)
        for update in part.to_pylist()
    ]
    assert Counter(tuple(map(identity, row)) for _, row in rows) == Counter(
        tuple(map(identity, row)) for row, _, _ in updates
    )
    for owner, row in rows:
        for other, candidate in rows:
            if all(map(equal, row[1:], candidate[1:])):
                assert owner == other
