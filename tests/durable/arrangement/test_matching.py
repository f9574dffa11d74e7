"""Keys of one type against a column of another: never less than Spark's equality."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from actors.durable.arrangement.hashing import hash_columns
from actors.durable.arrangement.key_conversion import conform
from actors.model.plan.schema import arrow_type

NOON = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.UTC)

# (type of the keys, key, type of the column, value that Spark calls equal)
EQUAL: list[tuple[str, Any, str, Any]] = [
    ("int", 5, "bigint", 5),
    ("bigint", -5, "tinyint", -5),
    ("float", 0.5, "double", 0.5),
    ("double", 0.5, "float", 0.5),
    ("decimal(10,2)", Decimal("5.25"), "decimal(12,4)", Decimal("5.2500")),
    ("decimal(12,4)", Decimal("5.2500"), "decimal(10,2)", Decimal("5.25")),
    ("decimal(38,0)", Decimal(10) ** 30, "decimal(38,0)", Decimal(10) ** 30),
    ("int", -5, "decimal(10,2)", Decimal("-5.00")),
    ("decimal(10,2)", Decimal("5.00"), "int", 5),
    ("decimal(20,0)", Decimal(-(2**63)), "bigint", -(2**63)),
    ("string", "a", "string", "a"),
    ("timestamp", NOON, "timestamp", NOON),
    ("void", None, "string", None),
    ("int", None, "decimal(10,2)", None),
]

# keys that nothing in the column can equal are dropped, not raised
NEVER: list[tuple[str, Any, str]] = [
    ("decimal(10,2)", Decimal("5.25"), "int"),
    ("decimal(12,4)", Decimal("0.0001"), "decimal(10,2)"),
    ("bigint", 2**40, "decimal(10,2)"),
    ("decimal(20,0)", Decimal(2**63), "bigint"),
    ("decimal(10,0)", Decimal(-1000), "decimal(3,0)"),
]

# equality after a conversion that rounds, reads text, needs a zone or overflows
NOT_BY_HASH: list[tuple[str, str]] = [
    ("double", "bigint"),
    ("bigint", "float"),
    ("decimal(10,2)", "double"),
    ("string", "int"),
    ("int", "string"),
    ("date", "timestamp"),
    ("timestamp", "timestamp_ntz"),
    ("string", "binary"),
    ("boolean", "int"),
    ("decimal(38,0)", "decimal(38,20)"),
    ("decimal(38,19)", "bigint"),
    ("array<int>", "array<bigint>"),
]


def column(value: Any, kind: str) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array([value], arrow_type(kind))])


@pytest.mark.parametrize(("given", "key", "held", "value"), EQUAL)
def test_equal_values_meet(given: str, key: Any, held: str, value: Any) -> None:
    conformed = conform(column(key, given), arrow_type(held))
    assert conformed is not None
    keys, kept = conformed
    assert all(kept)
    assert hash_columns([keys], 1) == hash_columns([column(value, held)], 1)


@pytest.mark.parametrize(("given", "key", "held"), NEVER)
def test_keys_that_cannot_match_are_dropped(given: str, key: Any, held: str) -> None:
    conformed = conform(column(key, given), arrow_type(held))
    assert conformed is not None
    assert conformed[1] == [False]


@pytest.mark.parametrize(("given", "held"), NOT_BY_HASH)
def test_what_cannot_be_found_by_hash_says_so(given: str, held: str) -> None:
    empty = pa.chunked_array([], arrow_type(given))
    assert conform(empty, arrow_type(held)) is None


def test_units_and_layouts_of_one_type_meet() -> None:
    stamps = pa.chunked_array([pa.array([NOON], pa.timestamp("ms", "Europe/Paris"))])
    texts = pa.chunked_array([pa.array(["a"], pa.large_string())])
    for given, held, value in ((stamps, "timestamp", NOON), (texts, "string", "a")):
        conformed = conform(given, arrow_type(held))
        assert conformed is not None
        assert hash_columns([conformed[0]], 1) == hash_columns([column(value, held)], 1)
