"""Columns and their types, in Spark's names and in Arrow.

A type is Spark's DDL text in lower case (``bigint``, ``decimal(12,2)``, ``array<string>``,
``struct<a:int,b:string>``, ``map<string,int>``). Parts, arrangements and messages contain Arrow;
`arrow_type` maps one to the other. Three columns belong to the system: `TIME`, `DIFF` and, only in
parts with error updates, `ERROR`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.runtime.errors import InvalidUsage

TIME: Final = "__time"
DIFF: Final = "__diff"
ERROR: Final = "__error"
_SHAPES_MAX: Final = 256
"""Number of schemas whose Arrow form is cached."""
CHAR_LENGTH_MAX: Final = 65_536
"""Maximum n, because every value of a CHAR(n) takes n characters."""
VARCHAR_LENGTH_MAX: Final = 2**31 - 1
_LIMITED: Final = re.compile(r"(char|varchar)\((.*)\)")
UNBOUNDED_NUMERIC: Final = "decimal(38,18)"
"""The type for PostgreSQL's ``numeric`` without precision, which has any number of digits."""
SYSTEM_COLUMNS: Final = frozenset({TIME, DIFF, ERROR})


def quote(name: str) -> str:
    """Return a name in backticks, as Spark SQL quotes it.

    >>> quote("net price"), quote("a`b")
    ('`net price`', '`a``b`')
    """
    return f"`{name.replace('`', '``')}`"


class TableColumn(msgspec.Struct, frozen=True):
    """One column: its name, its Spark type, and whether it may be NULL."""

    name: str
    type: str
    nullable: bool = True


class TableSchema(msgspec.Struct, frozen=True):
    """Columns in order, and the names of the PRIMARY KEY columns (empty for a bag)."""

    columns: tuple[TableColumn, ...]
    key: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the column names in order."""
        return tuple(column.name for column in self.columns)

    def extends(self, other: TableSchema) -> bool:
        """Return whether this schema equals another one followed by zero or more nullable
        columns."""
        own, further = self.columns[: len(other.columns)], self.columns[len(other.columns) :]
        same = own == other.columns and self.key == other.key
        return same and all(column.nullable for column in further)

    def renamed(self, names: Mapping[str, str]) -> TableSchema:
        """Return the columns in `names`, in that order and with the new names given there, without
        a key."""
        own = {column.name: column for column in self.columns}
        columns = (TableColumn(new, own[old].type, own[old].nullable) for old, new in names.items())
        return TableSchema(tuple(columns))

    def ddl(self) -> str:
        """Return the columns as Spark DDL with quoted names, such as ``a bigint, b string``."""
        return ", ".join(
            f"{quote(column.name)} {column.type}" + ("" if column.nullable else " not null")
            for column in self.columns
        )

    def arrow(self) -> pa.Schema:
        """Return the user columns in Arrow. All are nullable, because error updates have NULLs."""
        return pa.schema([pa.field(c.name, arrow_type(c.type)) for c in self.columns])

    def result_arrow(self) -> pa.Schema:
        """Return the user columns in Arrow if they are those of a query's result, which may have
        types that no table has (`result_type`)."""
        return pa.schema([pa.field(c.name, result_type(c.type)) for c in self.columns])

    def engine_arrow(self) -> pa.Schema:
        """Return the columns of a query's result in Arrow, as the engine returns them."""
        return pa.schema([pa.field(c.name, engine_type(c.type)) for c in self.columns])

    def arrow_updates(self) -> pa.Schema:
        """Return the user columns, then `TIME` and `DIFF`, as parts contain them."""
        return _arrow_updates(self)

    @property
    def digest(self) -> str:
        """Return a text that is equal only for the same columns, in the same order, with the same
        key.

        >>> a, b = TableColumn("a", "int"), TableColumn("b", "int")
        >>> TableSchema((a, b)).digest == TableSchema((b, a)).digest
        False
        """
        return _digest(self)


@lru_cache(maxsize=_SHAPES_MAX)
def _arrow_updates(schema: TableSchema) -> pa.Schema:
    """Return the Arrow form of a schema's updates. Cached, because every append needs it."""
    return pa.schema([*schema.arrow(), pa.field(TIME, pa.int64()), pa.field(DIFF, pa.int64())])


@lru_cache(maxsize=_SHAPES_MAX)
def _digest(schema: TableSchema) -> str:
    """Return the digest of a schema. Cached, because every write needs it."""
    return hashlib.blake2b(msgspec.msgpack.encode(schema), digest_size=16).hexdigest()


_SIMPLE: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}


@lru_cache(maxsize=1024)
def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type for a Spark type. Raises `InvalidUsage` for a type that cannot be
    stored."""
    text = text.strip()
    low = text.lower()
    if low in _SIMPLE:
        return _SIMPLE[low]
    if low in ("decimal", "dec", "numeric"):
        return pa.decimal128(10, 0)
    if low.startswith(("decimal(", "dec(", "numeric(")) and low.endswith(")"):
        digits = [int(part) for part in low[low.index("(") + 1 : -1].split(",")]
        return pa.decimal128(digits[0], digits[1] if len(digits) > 1 else 0)
    if text_limit(low) is not None:
        return pa.string()
    # Not from the text in lower case, because names of struct fields keep their case.
    inner = [arrow_type(each) for each in inner_types(text)]
    if inner and low.startswith("array<"):
        return pa.list_(pa.field("element", *inner))
    if inner and low.startswith("map<"):
        return pa.map_(*inner)
    if inner:
        names = (field.partition(":")[0] for field in _split(text[7:-1]))
        fields = zip(names, inner, strict=True)
        return pa.struct([pa.field(name.strip().strip("`"), kind) for name, kind in fields])
    raise InvalidUsage(f"column type {text!r} is not supported")


_YEAR_MONTH: Final = ("year", "month")
_DAY_TIME: Final = ("day", "hour", "minute", "second")


@lru_cache(maxsize=1024)
def result_type(text: str) -> pa.DataType:
    """Return the Arrow type for a Spark type in a query's result. Besides the types of `arrow_type`
    it supports intervals, which are computed but never stored. Raises `InvalidUsage`.

    >>> result_type("interval day to second"), result_type("interval year")
    (DurationType(duration[us]), DataType(month_day_nano_interval))
    """
    head, *units = [word for word in text.lower().split() if word != "to"]
    if head == "interval" and units:
        if set(units) <= set(_YEAR_MONTH):
            return pa.month_day_nano_interval()
        if set(units) <= set(_DAY_TIME):
            return pa.duration("us")
    return arrow_type(text)


def engine_type(text: str) -> pa.DataType:
    """Return the Arrow type in which the engine returns a column of a result. It is that of
    `result_type`, except that intervals of years and months are numbers of months
    (`intervals_of_months`)."""
    # Arrow has a type for months, and Spark uses it, but pyarrow cannot read its values.
    kind = result_type(text)
    return pa.int32() if pa.types.is_interval(kind) else kind


def intervals_of_months(months: pa.Array) -> pa.Array:
    """Convert numbers of months (int32) to intervals.

    >>> intervals_of_months(pa.array([-14, None], pa.int32())).to_pylist()
    [MonthDayNano(months=-14, days=0, nanoseconds=0), None]
    """
    # A value consists of 4 bytes of months, 4 of days and 8 of nanoseconds.
    words = np.zeros((len(months), 4), np.int32)
    words[:, 0] = months.fill_null(0).to_numpy(zero_copy_only=False)
    valid = pc.is_valid(months).buffers()[1] if months.null_count else None
    kind = pa.month_day_nano_interval()
    return pa.Array.from_buffers(kind, len(months), [valid, pa.py_buffer(words)])


# Needed for each value of an INSERT.
@lru_cache(maxsize=1024)
def text_limit(kind: str) -> tuple[int, bool] | None:
    """Return n of CHAR(n) and VARCHAR(n), and whether shorter texts are padded with blanks.

    Returns None for another type. Raises `InvalidUsage` for an invalid length.
    """
    found = _LIMITED.fullmatch(kind.strip().lower())
    if found is None:
        return None
    limit = int(found[2]) if found[2].isdecimal() else 0
    padded = found[1] == "char"
    if not 1 <= limit <= (CHAR_LENGTH_MAX if padded else VARCHAR_LENGTH_MAX):
        most = f" and at most {CHAR_LENGTH_MAX}" if padded else ""
        raise InvalidUsage(f"column type {kind!r}: a length must be at least 1{most}")
    return limit, padded


def inner_types(text: str) -> tuple[str, ...]:
    """Return the types inside a nested type: an array's element, a map's key and value, or a
    struct's fields in order; none for any other type."""
    text = text.strip()
    head, _, inside = text.removesuffix(">").partition("<")
    if not text.endswith(">") or not inside:
        return ()
    match head.lower(), _split(inside):
        case "array", [_]:
            return (inside,)
        case "map", [key, value]:
            return key, value
        case "struct", fields:
            return tuple(field.partition(":")[2] for field in fields)
    return ()


def _split(text: str) -> list[str]:
    """Split at the top-level commas."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def spark_type(kind: pa.DataType) -> str:
    """Return Spark's name for an Arrow type. Raises `InvalidUsage` if there is none."""
    for test, text in _SPARK_NAMES:
        if test(kind):
            return text
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{spark_type(kind.key_type)},{spark_type(kind.item_type)}>"
    if pa.types.is_struct(kind):
        inner = ",".join(f"{field.name}:{spark_type(field.type)}" for field in kind)
        return f"struct<{inner}>"
    raise InvalidUsage(f"no Spark type for a column of Arrow type {kind}")


_SPARK_NAMES: Final = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "tinyint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "int"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_large_binary, "binary"),
    (pa.types.is_date, "date"),
    (pa.types.is_null, "void"),
)
