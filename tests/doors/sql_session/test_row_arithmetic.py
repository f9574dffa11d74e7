"""Arithmetic of assignments that is computed without Spark is what Spark computes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from actors.doors.sql_session.row_arithmetic import arithmetic_of, computed_array
from actors.doors.sql_session.row_values import NotLocal
from actors.engine.sql.statements import generated_span
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.schema import TableColumn, TableSchema

SCHEMA = TableSchema(
    (
        TableColumn("t", "tinyint"),
        TableColumn("s", "smallint"),
        TableColumn("i", "int"),
        TableColumn("l", "bigint"),
        TableColumn("d", "decimal(10,2)"),
        TableColumn("w", "decimal(38,6)"),
        TableColumn("f", "double"),
    )
)
LONG = "12345678901234567890123456.789012"
BY_NAME = {column.name: column for column in SCHEMA.columns}


def rows_of(**values: Any) -> pa.Table:
    """One row; columns that are not given are NULL."""
    return pa.Table.from_pylist([{name: values.get(name) for name in SCHEMA.names}], SCHEMA.arrow())


def computed(text: str, column: str, **values: Any) -> Any:
    rows = rows_of(**values)
    node = arithmetic_of(generated_span(SqlDialect.SPARK, text), ())
    return computed_array(node, rows, SCHEMA, "x", BY_NAME[column]).to_pylist()[0]


@pytest.mark.parametrize(
    ("text", "column", "values", "wanted"),
    [
        ("l - 5S", "l", {"l": 7}, 2),
        ("x.`l` * (i - 1) + 2", "l", {"l": 7, "i": 4}, 23),
        ("l + 1", "l", {}, None),
        ("5 - i", "i", {"i": -4}, 9),
        ("d - 1.25", "d", {"d": Decimal("1.00")}, Decimal("-0.25")),
        ("d + i", "d", {"d": Decimal("1.00"), "i": 2}, Decimal("3.00")),
        ("i + (-3)", "t", {"i": 2}, -1),
        (f"d + {LONG}", "w", {"d": Decimal(0)}, Decimal(LONG)),
        (f"d - -{LONG}", "w", {"d": Decimal(0)}, Decimal(LONG)),
        ("f * 2 - 0.1", "f", {"f": 0.25}, 0.4),
        ("1 + x.f", "f", {}, None),
    ],
)
def test_what_is_computed_here(text: str, column: str, values: dict[str, Any], wanted: Any) -> None:
    assert computed(text, column, **values) == wanted


@pytest.mark.parametrize(
    ("text", "column", "values"),
    [
        ("i + 1", "i", {"i": 2**31 - 1}),  # overflows its own type
        ("i + 1 - 1", "l", {"i": 2**31 - 1}),  # on the way
        ("i + 1", "t", {"i": 127}),  # or that of the column
        ("d + 1.255", "d", {"d": Decimal("1.00")}),  # would be rounded
        ("d + 99999999.00", "d", {"d": Decimal("1.00")}),
        ("d + 1", "i", {"d": Decimal("1.00")}),  # would be cut off
        ("w + d", "w", {"w": Decimal(1), "d": Decimal(1)}),  # more than 38 digits
        ("d * 2", "d", {"d": Decimal("1.00")}),
        ("f + d", "f", {"f": 1.0, "d": Decimal("1.00")}),  # Arrow's double of a decimal may differ
        ("f + l", "f", {"f": 1.0, "l": 2**53 + 1}),  # no double is that number
        ("f + 1", "l", {"f": 1.0}),  # would be cut off
        ("l + 1", "f", {"l": 1}),
        ("f / 2", "f", {"f": 1.0}),
        ("l / 2", "l", {"l": 4}),
        ("l + '1'", "l", {"l": 4}),
        ("y.l + 1", "l", {"l": 4}),
        ("absent + 1", "l", {"l": 4}),
        ("abs(l)", "l", {"l": 4}),
        ("l + NULL", "l", {"l": 4}),
        ("l + 1e2", "l", {"l": 4}),
        ("-2147483648 + l", "l", {"l": 4}),
        ("l +", "l", {"l": 4}),
        ("l + 1 l", "l", {"l": 4}),
    ],
)
def test_what_is_left_to_spark(text: str, column: str, values: dict[str, Any]) -> None:
    with pytest.raises(NotLocal):
        computed(text, column, **values)
