"""Columns of every type, with the values at the edges, and strategies for others."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import strategies as st

from actors.model.pgwire.copy_options import CopyFormat, RowFormat
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type

UTC = dt.UTC
EDGES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 0, 127],
    "smallint": [-32768, 7, 32767],
    "int": [-(2**31), 0, 2**31 - 1],
    "bigint": [-(2**63), -1, 2**63 - 1],
    "float": [0.0, -0.0, 1.5, -1e-7, 1e6, 999999.0, 3.4028234663852886e38, math.inf, math.nan],
    "double": [0.0, -0.0, 0.1, 1e15, 1e14, 123456789.5, 5e-324, -math.inf, math.nan, 1e22, 1e-5],
    "decimal(12,2)": [
        Decimal("0.00"),
        Decimal("-0.50"),
        Decimal("9999999999.99"),
        Decimal("10.00"),
    ],
    "decimal(38,18)": [Decimal("0"), Decimal("-12345678901234567890.123456789012345678")],
    "decimal(38,0)": [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(10000)],
    "decimal(5,5)": [Decimal("0.00123"), Decimal("-0.99999"), Decimal(0)],
    "string": [
        "",
        "NULL",
        "null",
        "\\N",
        "a,b",
        'say "hi"',
        "a\tb\nc\rd\\e",
        "é😀",
        " x ",
        "{}",
        "\\.",
    ],
    "binary": [b"", b"\x00\xff\\", b"'hi'"],
    "date": [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2000, 2, 29), dt.date(9999, 12, 31)],
    "timestamp": [
        dt.datetime(1, 1, 2, tzinfo=UTC),
        dt.datetime(1883, 11, 18, 16, 59, 59, tzinfo=UTC),
        dt.datetime(2026, 3, 29, 1, 0, 0, 500, tzinfo=UTC),
        dt.datetime(2026, 7, 1, 12, 30, 15, 120000, tzinfo=UTC),
        dt.datetime(9998, 7, 1, 23, 59, 59, 999999, tzinfo=UTC),
    ],
    "timestamp_ntz": [
        dt.datetime.fromisoformat("0001-01-01"),
        dt.datetime.fromisoformat("1999-12-31T23:59:59.999999"),
    ],
    "array<bigint>": [[], [1, None, -3], [None]],
    "array<string>": [[""], ["a", None, "NULL", 'q"\\,{} '], ["plain"], []],
    "array<double>": [[1.5, math.inf], []],
    "array<timestamp>": [[dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)], []],
    "array<date>": [[dt.date(2026, 1, 2), None]],
    "array<boolean>": [[True, False, None]],
    "array<decimal(12,2)>": [[Decimal("1.50"), None]],
    "array<binary>": [[b"", b"\x00\\"]],
}
"""Values of each Spark type that PostgreSQL has a type for."""
NESTED: dict[str, list[Any]] = {
    "struct<a:int,b:string>": [{"a": 1, "b": "x"}, {"a": None, "b": None}],
    "map<string,int>": [[("k", 1), ("l", None)], []],
    "array<array<int>>": [[[1], [], None], []],
}

DATES = st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31))
TIMES = st.datetimes(
    dt.datetime.fromisoformat("0001-01-02"), dt.datetime.fromisoformat("9999-12-30")
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORDS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "decimal(12,2)": st.decimals(-9999999999, 9999999999, places=2),
    "decimal(18,18)": st.decimals(Decimal("-0.9"), Decimal("0.9"), places=18),
    "decimal(38,18)": st.integers(-(10**38) + 1, 10**38 - 1).map(
        lambda number: Decimal(f"{number}E-18")
    ),
    "decimal(30,3)": st.integers(-(10**30) + 1, 10**30 - 1).map(
        lambda number: Decimal(f"{number}E-3")
    ),
    "string": TEXTS,
    "binary": st.binary(max_size=12),
    "date": DATES,
    "timestamp": TIMES.map(lambda time: time.replace(tzinfo=UTC)),
    "timestamp_ntz": TIMES,
}
ARRAYS = {
    f"array<{kind}>": st.lists(st.none() | words, max_size=4) for kind, words in WORDS.items()
}
EVERY = WORDS | ARRAYS


def column(kind: str, values: list[Any]) -> pa.Array:
    """A column of a Spark type."""
    return pa.array(values, arrow_type(kind))


def same(left: Any, right: Any) -> bool:
    """Equality of values in which NaN equals NaN, and zeros have signs."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right) and (left is None) == (right is None)


def table(kinds: dict[str, list[Any]]) -> tuple[TableSchema, pa.RecordBatch]:
    """A table with a column of each type; shorter ones are filled up with NULLs, and every column
    has a NULL in its last row."""
    rows = max(map(len, kinds.values())) + 1
    columns = tuple(TableColumn(f"c{at}", kind) for at, kind in enumerate(kinds))
    arrays = [
        column(kind, [*values, *[None] * (rows - len(values))]) for kind, values in kinds.items()
    ]
    schema = TableSchema(columns)
    return schema, pa.RecordBatch.from_arrays(arrays, schema=schema.arrow())


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data in pieces, cut at these places (modulo its length)."""
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def copy_bodies(messages: bytes) -> list[bytes]:
    """The bodies of consecutive messages."""
    bodies = []
    while messages:
        length = int.from_bytes(messages[1:5], "big")
        bodies.append(messages[5 : 1 + length])
        messages = messages[1 + length :]
    return bodies


def row_format(kind: str = "text", *, header: bool = False, **texts: str) -> RowFormat:
    """The options that a COPY names, and PostgreSQL's defaults for others."""
    form = CopyFormat(kind)
    defaults = {"delimiter": "\t", "null": "\\N"}
    if form is CopyFormat.CSV:
        quote = texts.get("quote", '"')
        defaults = {"delimiter": ",", "null": "", "quote": quote, "escape": quote}
    marks = {name: text.encode() for name, text in (defaults | texts).items()}
    made = msgspec.structs.replace(RowFormat(form, header=header), **marks)
    made.check()
    return made
