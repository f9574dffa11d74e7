"""What a part is compared with: its description."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from actors.durable.persist.parts import encode
from actors.durable.persist.shard import BatchPart
from actors.durable.persist.statistics import ColumnStatistics
from actors.durable.persist.verify import compare_with_description
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema

SCHEMA = TableSchema((TableColumn("a", "bigint"), TableColumn("x", "double")))


def stored(**changes: Any) -> tuple[BatchPart, pa.Table]:
    """A part of three rows, and its updates with these columns in place of its own."""
    columns: dict[str, Any] = {"a": [1, None, 5], "x": [0.5, None, 2.5], TIME: [3, 4, 7]}
    rows = pa.table({**columns, DIFF: [1, 1, 1]}, schema=SCHEMA.arrow_updates())
    (made,) = encode(
        rows, SCHEMA, inline_bytes_max=0, bytes_target=1 << 20, statistics_bytes_max=1 << 10
    )
    for name, values in changes.items():
        place = rows.column_names.index(name) if name in rows.column_names else None
        array = pa.array(values, pa.string() if place is None else rows.schema.field(place).type)
        kept = rows if place is None else rows.remove_column(place)
        rows = kept.append_column(name, array)
    return made.part, rows


def test_a_part_is_as_it_is_described() -> None:
    part, rows = stored()
    assert [known.column for known in part.statistics] == ["a", "x"]
    assert compare_with_description(part, rows) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({TIME: [2, 4, 7]}, "contains times 2 to 7, expected 3 to 7"),
        ({TIME: [3, 4, 8]}, "contains times 3 to 8, expected 3 to 7"),
        ({TIME: [3, None, 7]}, "1 rows have no time"),
        ({DIFF: [1, None, 1]}, "1 rows have no diff"),
        ({DIFF: [1, -1, 1]}, "contains negative diffs, expected none"),
        ({ERROR: [None, None, "x"]}, "contains errors, expected none"),
        ({"a": [1, 2, 5]}, "column a: 0 NULLs, described 1"),
        ({"a": [0, None, 5]}, "column a: 0 is below the bound 1"),
        ({"a": [1, None, 6]}, "column a: 6 is above the bound 5"),
        ({"x": [math.nan, None, 1.0]}, "column x: NaN is above the bound 2.5"),
        ({"x": [math.nan, None, -1.0]}, "column x: -1.0 is below the bound 0.5"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_difference_is_told(changes: dict[str, Any], told: str) -> None:
    part, rows = stored(**changes)
    assert told in compare_with_description(part, rows)


def test_what_is_described_as_wider_is_right() -> None:
    part, rows = stored()
    wide = (ColumnStatistics("a", None, 0, 9), ColumnStatistics("x", 1, None, None))
    part = replace(part, time_min=0, time_max=9, retracts=True, statistics=wide)
    assert compare_with_description(part, rows) == []
    _, rows = stored(x=[math.nan, None, -1.0], **{DIFF: [-1, -1, -1]})
    assert compare_with_description(part, rows) == []
