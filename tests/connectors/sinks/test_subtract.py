"""Rows taken out of rows: exactly as many, bit by bit, NULL being NULL."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.connectors.sinks.delta_rewrite import subtract
from actors.model.plan.schema import DIFF, TableColumn, TableSchema

SCHEMA = TableSchema(
    (
        TableColumn("a", "int"),
        TableColumn("b", "string"),
        TableColumn("d", "double"),
        TableColumn("l", "array<int>"),
    )
)
NAN = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
ROWS = st.tuples(
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, "", "x"]),
    st.sampled_from([None, 0.0, -0.0, float("nan"), NAN]),
    st.sampled_from([None, (), (1,), (None,)]),
)


def exact(row: tuple[Any, ...]) -> tuple[Any, ...]:
    a, b, d, items = row
    bits = None if d is None else struct.pack("<d", d)
    return a, b, bits, None if items is None else tuple(items)


def table(rows: list[tuple[Any, ...]]) -> pa.Table:
    found = [dict(zip(SCHEMA.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(found, schema=SCHEMA.arrow())


def counted(found: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(exact(tuple(row[name] for name in SCHEMA.names)) for row in found.to_pylist())


@pytest.mark.parametrize("names", [SCHEMA.names, ("a", "d"), ("l",)], ids=str)
@given(st.lists(ROWS, max_size=12), st.lists(ROWS, max_size=6))
def test_as_a_bag_does(
    names: tuple[str, ...], rows: list[tuple[Any, ...]], going: list[tuple[Any, ...]]
) -> None:
    goes = Counter({exact(row): 0 for row in going})
    firsts: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in going:
        goes[exact(row)] += 1
        firsts.setdefault(exact(row), row)
    deletes = table(list(firsts.values())).append_column(
        pa.field(DIFF, pa.int64()), pa.array([-goes[row] for row in firsts], pa.int64())
    )
    found = subtract(table(rows), deletes, names)
    there = Counter(map(exact, rows))
    assert counted(found.kept) == there - goes
    assert found.taken == sum((there & goes).values())
    left = found.left.to_pylist()
    assert {
        exact(tuple(row[name] for name in SCHEMA.names)): -row[DIFF] for row in left
    } == goes - there
    assert found.kept.schema == SCHEMA.arrow()
