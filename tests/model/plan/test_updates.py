"""Updates as Arrow: consolidation against a plain count, and the IPC form."""

from __future__ import annotations

import math
import struct
from collections import Counter
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema, arrow_type
from actors.model.plan.updates import (
    advance,
    between,
    consolidate,
    consolidate_if_smaller,
    consolidate_keyed,
    from_ipc,
    negate,
    to_ipc,
    with_time,
)
from actors.runtime.errors import InvalidUsage, MalformedFrame

SCHEMA = TableSchema(
    (TableColumn("a", "int"), TableColumn("f", "double"), TableColumn("s", "string"))
)
rows = st.tuples(
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 0.0, -0.0, 1.5, math.nan]),
    st.sampled_from([None, "", "x"]),
    st.integers(0, 3),
    st.integers(-2, 2),
)


def table_of(values: list[tuple[Any, ...]]) -> pa.Table:
    names = [*SCHEMA.names, TIME, DIFF]
    columns = [[value[index] for value in values] for index in range(len(names))]
    return pa.table(dict(zip(names, columns, strict=True)), schema=SCHEMA.arrow_updates())


def counted(values: list[tuple[Any, ...]]) -> Counter[tuple[str, ...]]:
    sums: Counter[tuple[str, ...]] = Counter()
    for *row, diff in values:
        sums[tuple(map(repr, row))] += diff
    return Counter({row: diff for row, diff in sums.items() if diff})


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


@given(st.lists(rows, max_size=30))
def test_consolidate_equals_counting_bit_by_bit(values: list[tuple[Any, ...]]) -> None:
    result = consolidate(table_of(values))
    assert result.schema == SCHEMA.arrow_updates()
    assert len(rows_of(result)) == len(counted(values))
    assert counted(rows_of(result)) == counted(values)


FEW: dict[str, list[Any]] = {
    "boolean": [None, True, False],
    "tinyint": [None, 0, -1, 127],
    "bigint": [None, 0, 1, -(1 << 63)],
    "float": [None, 0.0, -0.0, math.nan, 0.5],
    "double": [None, 0.0, -0.0, math.nan, -math.inf],
    "string": [None, "", "None", "1"],
    "date": [None, date(1970, 1, 1), date(1, 1, 1)],
}


@given(st.data())
def test_few_rows_are_summed_as_many_are(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(FEW)), min_size=1, max_size=4))
    shape = TableSchema(
        tuple(TableColumn(f"c{n}", kind) for n, kind in enumerate(kinds))
    ).arrow_updates()
    rows = data.draw(
        st.lists(
            st.tuples(
                *(st.sampled_from(FEW[kind]) for kind in kinds),
                st.integers(0, 1),
                st.integers(-1, 2),
            ),
            max_size=30,
        )
    )
    columns = [
        pa.array([row[n] for row in rows], field.type, from_pandas=False)
        for n, field in enumerate(shape)
    ]
    table = pa.table(columns, schema=shape)
    cut = data.draw(st.integers(0, len(rows)))  # chunks that begin anywhere
    table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    few = consolidate(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.model.plan.updates.FEW_ROWS", 0)
        many = consolidate(table)
    assert few.schema == many.schema == shape
    assert sorted(map(repr, rows_of(few))) == sorted(map(repr, rows_of(many)))


@given(st.data())
def test_consolidate_keyed_equals_consolidate_where_a_key_has_one_row(data: st.DataObject) -> None:
    """A table with a primary key, changed row by row; each change as it came, all at one time."""
    history: list[tuple[Any, ...]] = []
    present: dict[int, tuple[Any, ...]] = {}
    changes = st.tuples(st.integers(0, 9), st.none() | st.sampled_from([None, 0.5, -0.0]))
    for key, value in data.draw(st.lists(changes, max_size=40)):
        if key in present:
            history.append((*present.pop(key), 0, -1))
        if data.draw(st.booleans()):
            present[key] = (key, value, data.draw(st.sampled_from([None, "x"])))
            history.append((*present[key], 0, 1))
    table = table_of(data.draw(st.permutations(history)))
    cut = data.draw(st.integers(0, len(history)))  # chunks that begin anywhere
    table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.model.plan.updates.FEW_ROWS", 0)
        found = [rows_of(consolidate_keyed(table, key)) for key in (("a",), ("a", "s"), ())]
    expected = sorted((*row, 0, 1) for row in map(_shown, present.values()))
    for each in found:
        assert sorted((*_shown(row[:3]), *row[3:]) for row in each) == expected


def _shown(row: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(repr, row))


@given(st.lists(rows, max_size=20))
def test_consolidate_of_nested_columns(values: list[tuple[Any, ...]]) -> None:
    flat = table_of(values)
    nested = flat.append_column("l", pa.array([[v[0], v[0]] for v in values], pa.list_(pa.int32())))
    result = consolidate(nested)
    assert counted(rows_of(result.drop(["l"]).select(flat.column_names))) == counted(values)


@pytest.mark.parametrize("inside", [False, True])
def test_every_nan_keeps_apart_beside_nested_columns_and_in_them(inside: bool) -> None:
    other = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
    values = [math.nan, other, math.nan, 0.0, -0.0]
    columns = {
        "f": pa.array([None] * 5 if inside else values, pa.float64()),
        "l": pa.array([[value] if inside else [1.0] for value in values], pa.list_(pa.float64())),
        TIME: pa.array([3] * 5, pa.int64()),
        DIFF: pa.array([1] * 5, pa.int64()),
    }
    found = consolidate(pa.table(columns))
    assert found[DIFF].to_pylist() == [2, 1, 1, 1]
    floats = [each[0] for each in found["l"].to_pylist()] if inside else found["f"].to_pylist()
    assert [struct.pack("<d", each) for each in floats] == [
        struct.pack("<d", each) for each in (math.nan, other, 0.0, -0.0)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.timestamp("us")),
        pa.struct([("a", pa.list_(pa.timestamp("us", "UTC"))), ("b", pa.float64())]),
        pa.map_(pa.timestamp("us"), pa.struct([("c", pa.timestamp("us"))])),
    ],
)
def test_times_after_9999_are_summed_up_in_whatever_they_are_nested(kind: pa.DataType) -> None:
    late = 253_402_300_800_000_000
    value: Any = {
        "list": [late, None],
        "struct": {"a": [late], "b": -0.0},
        "map": [(late, {"c": late})],
    }[str(kind).partition("<")[0]]
    rows = pa.array([value, None, value], kind)
    times = {TIME: pa.array([3] * 3, pa.int64()), DIFF: pa.array([1] * 3, pa.int64())}
    found = consolidate(pa.table({"r": rows, **times}))
    assert found[DIFF].to_pylist() == [2, 1]
    assert found["r"].combine_chunks().equals(rows.slice(0, 2))


@pytest.mark.parametrize("distinct", [7, 1_000_000])
def test_condensed_updates_are_the_same_and_far_fewer_or_as_they_were(distinct: int) -> None:
    rows = [(index % distinct, 1.0, "x", index // 1000, 1) for index in range(20_000)]
    table = pa.concat_tables([table_of(rows[:12_000]), table_of(rows[12_000:])])
    made = consolidate_if_smaller(table)
    assert made.num_rows == (7 * 20 if distinct == 7 else 20_000)
    assert (
        consolidate(made)
        .sort_by([("__time", "ascending"), ("a", "ascending")])
        .equals(consolidate(table).sort_by([("__time", "ascending"), ("a", "ascending")]))
    )


def test_times_can_be_cut_and_advanced() -> None:
    table = table_of([(1, 1.0, "x", t, 1) for t in range(5)])
    assert between(table, 1, 3)[TIME].to_pylist() == [1, 2]
    assert advance(table, 3)[TIME].to_pylist() == [3, 3, 3, 3, 4]
    assert consolidate(pa.concat_tables([table, negate(table)])).num_rows == 0


def test_ipc_round_trip_and_garbage() -> None:
    table = with_time(pa.table({"a": [1, None]}), 7, 2)
    assert from_ipc(to_ipc(table)).equals(table)
    with pytest.raises(MalformedFrame):
        from_ipc(b"not arrow at all")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("BIGINT", pa.int64()),
        ("decimal(12, 2)", pa.decimal128(12, 2)),
        ("array<struct<a:int,b:map<string,decimal(3,1)>>>", None),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ],
)
def test_spark_types_as_arrow(text: str, kind: pa.DataType | None) -> None:
    made = arrow_type(text)
    assert kind is None or made == kind


def test_nested_type_text() -> None:
    made = arrow_type("struct<a:int,b:array<decimal(3,1)>>")
    value = pa.array([{"a": 1, "b": [Decimal("1.5")]}], made)
    assert value.to_pylist() == [{"a": 1, "b": [Decimal("1.5")]}]


def test_unknown_type_is_named() -> None:
    with pytest.raises(InvalidUsage, match="interval"):
        arrow_type("interval day")
