"""Expressions of the in-memory engine: Spark's types and ANSI's errors."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from actors.runtime.errors import DefiniteError, QueryRejected
from actors.testing.expressions import compile_text

ROW = (7, None, Decimal("1.50"), "ab", True, 2.5, 1 << 40)
COLUMNS = {
    "i": (0, "int"),
    "n": (1, "int"),
    "d": (2, "decimal(10,2)"),
    "s": (3, "string"),
    "b": (4, "boolean"),
    "f": (5, "double"),
    "l": (6, "bigint"),
}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("i + 1", "int", 8),
        ("i / 2", "double", 3.5),
        ("i div 2", "bigint", 3),
        ("-i % 4", "int", -3),
        ("i * l", "bigint", 7 << 40),
        ("d * 2", "decimal(12,2)", Decimal("3.00")),
        ("d + i", "decimal(13,2)", Decimal("8.50")),
        ("d / 3", "decimal(14,6)", Decimal("0.500000")),
        ("d / i", "decimal(21,13)", Decimal("0.2142857142857")),
        ("n + 1", "int", None),
        ("n > 1 or true", "boolean", True),
        ("n > 1 and true", "boolean", None),
        ("n > 1 and false", "boolean", False),
        ("not n > 1", "boolean", None),
        ("n <=> null", "boolean", True),
        ("n is null", "boolean", True),
        ("b is true", "boolean", True),
        ("i in (1, null)", "boolean", None),
        ("i in (7, null)", "boolean", True),
        ("i between 7 and 8", "boolean", True),
        ("s like 'a%'", "boolean", True),
        ("s || i", "string", "ab7"),
        ("upper(s)", "string", "AB"),
        ("substring(s, 2)", "string", "b"),
        ("case when n > 1 then 1 when b then 2.5 end", "decimal(11,1)", Decimal("2.5")),
        ("coalesce(n, i)", "int", 7),
        ("nullif(i, 7)", "int", None),
        ("if(b, i, l)", "bigint", 7),
        ("greatest(i, n, 9)", "int", 9),
        ("cast('12' as int)", "int", 12),
        ("try_cast(s as int)", "int", None),
        ("cast(f as int)", "int", 2),
        ("cast('2013-01-02' as date)", "date", date(2013, 1, 2)),
        ("round(d, 1)", "decimal(10,1)", Decimal("1.5")),
        ("abs(-f)", "double", 2.5),
        ("1e3", "double", 1000.0),
        ("3000000000", "bigint", 3000000000),
    ],
)
def test_values_and_types(text: str, kind: str, value: Any) -> None:
    found, function = compile_text(text, COLUMNS)
    assert (found, function(ROW)) == (kind, value)
    assert type(function(ROW)) is type(value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("i / 0", "DIVIDE_BY_ZERO"),
        ("i % 0", "DIVIDE_BY_ZERO"),
        ("2147483647 + i", "ARITHMETIC_OVERFLOW"),
        ("cast(s as int)", "CAST_INVALID_INPUT"),
        ("cast(d as decimal(2,2))", "NUMERIC_VALUE_OUT_OF_RANGE"),
    ],
)
def test_ansi_errors_are_definite(text: str, error: str) -> None:
    _, function = compile_text(text, COLUMNS)
    with pytest.raises(DefiniteError, match=error):
        function(ROW)


@pytest.mark.parametrize("text", ["missing + 1", "b + 1", "i and b", "some_udf(i)", "sum(i)"])
def test_what_does_not_type_is_rejected(text: str) -> None:
    with pytest.raises(QueryRejected):
        compile_text(text, COLUMNS)
