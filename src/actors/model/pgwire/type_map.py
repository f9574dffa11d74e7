"""Maps Spark's and Arrow's types to PostgreSQL's, and back.

A type is an OID, a size and a modifier, as RowDescription has them. What PostgreSQL has no type for
is sent as text: a struct, a map, a variant, or an array of such or of arrays as ``json``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec
import pyarrow as pa

from actors.model.plan.schema import UNBOUNDED_NUMERIC, result_type, text_limit
from actors.runtime.errors import InvalidUsage

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 19, 20, 21, 23, 25, 26
JSON, FLOAT4, FLOAT8, UNKNOWN, BPCHAR, VARCHAR = 114, 700, 701, 705, 1042, 1043
DATE, TIME, TIMESTAMP, TIMESTAMPTZ, NUMERIC = 1082, 1083, 1114, 1184, 1700
INTERVAL: Final = 1186
UUID, JSONB = 2950, 3802

DAYS_TO_2000: Final = 10_957
US_TO_2000: Final = 946_684_800_000_000
"""PostgreSQL's binary dates and times count from 2000 on, Arrow's from 1970."""
DECIMAL_DIGITS_MAX: Final = 38
_HEADER_BYTES: Final = 4
"""Number that PostgreSQL adds to a length, or to precision and scale, in a modifier."""


class PgType(msgspec.Struct, frozen=True):
    """A type as RowDescription has it."""

    oid: int
    size: int
    """Bytes of a value in PostgreSQL's memory; -1: they vary."""
    modifier: int = -1


_SIZES: Final = {
    BOOL: 1,
    INT8: 8,
    INT2: 2,
    INT4: 4,
    OID: 4,
    FLOAT4: 4,
    FLOAT8: 8,
    DATE: 4,
    TIME: 8,
    TIMESTAMP: 8,
    TIMESTAMPTZ: 8,
    INTERVAL: 16,
    UUID: 16,
    NAME: 64,
    UNKNOWN: -2,
}
ARRAY_OF: Final = {
    BOOL: 1000,
    BYTEA: 1001,
    NAME: 1003,
    INT2: 1005,
    INT4: 1007,
    TEXT: 1009,
    BPCHAR: 1014,
    VARCHAR: 1015,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    OID: 1028,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    JSON: 199,
    UUID: 2951,
    JSONB: 3807,
}
"""Type of the arrays of a type."""
ELEMENT_OF: Final = {array: element for element, array in ARRAY_OF.items()}
"""Type of an array's elements."""

_SCALARS: Final[dict[pa.DataType, int]] = {
    pa.bool_(): BOOL,
    # There is no type of one byte; unsigned ones take the next larger.
    pa.int8(): INT2,
    pa.uint8(): INT2,
    pa.int16(): INT2,
    pa.uint16(): INT4,
    pa.int32(): INT4,
    pa.uint32(): INT8,
    pa.int64(): INT8,
    pa.float32(): FLOAT4,
    pa.float64(): FLOAT8,
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): BYTEA,
    pa.large_binary(): BYTEA,
    pa.date32(): DATE,
    pa.null(): TEXT,
}


def sized(oid: int, modifier: int = -1) -> PgType:
    """Return a type with its size."""
    return PgType(oid, _SIZES.get(oid, -1), modifier)


def numeric_modifier(precision: int, scale: int) -> int:
    """Return the modifier of ``numeric(precision, scale)``.

    >>> numeric_modifier(12, 2)
    786438
    """
    return (precision << 16 | scale) + _HEADER_BYTES


@lru_cache(maxsize=1024)
def pg_type(kind: pa.DataType) -> PgType:
    """Return the type in which values of an Arrow type are sent.

    >>> pg_type(pa.list_(pa.int32()))
    PgType(oid=1007, size=-1, modifier=-1)
    """
    if (oid := _SCALARS.get(kind)) is not None:
        return sized(oid)
    if pa.types.is_decimal(kind):
        return sized(NUMERIC, numeric_modifier(kind.precision, kind.scale))
    if pa.types.is_timestamp(kind):
        return sized(TIMESTAMP if kind.tz is None else TIMESTAMPTZ)
    if pa.types.is_time(kind):
        return sized(TIME)
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return sized(INTERVAL)
    # An encoding of Arrow's, no type of its own.
    if pa.types.is_dictionary(kind):
        return pg_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = pg_type(kind.value_type)
        # Arrays of arrays may be ragged, which PostgreSQL's cannot be.
        if element.oid in ARRAY_OF and element.oid != JSON:
            return sized(ARRAY_OF[element.oid], element.modifier)
        return sized(JSON)
    return sized(JSON if pa.types.is_nested(kind) else TEXT)


@lru_cache(maxsize=1024)
def pg_type_of_spark(text: str) -> PgType:
    """Return the type in which a column of a Spark type is sent.

    >>> pg_type_of_spark("varchar(5)")
    PgType(oid=1043, size=-1, modifier=9)
    >>> pg_type_of_spark("interval day to second").oid
    1186
    """
    limit = text_limit(text)
    if limit is not None:
        length, padded = limit
        return sized(BPCHAR if padded else VARCHAR, length + _HEADER_BYTES)
    try:
        return pg_type(result_type(text))
    except (InvalidUsage, ValueError):
        # Texts may name types that no result has: a variant, or Spark's `interval` of all parts.
        nested = text.strip().lower().startswith(("variant", "struct<", "map<", "array<"))
        return sized(JSON if nested else TEXT)


_SPARK: Final = {
    BOOL: "boolean",
    BYTEA: "binary",
    INT2: "smallint",
    INT4: "int",
    INT8: "bigint",
    OID: "bigint",
    FLOAT4: "float",
    FLOAT8: "double",
    DATE: "date",
    TIMESTAMP: "timestamp_ntz",
    TIMESTAMPTZ: "timestamp",
    **dict.fromkeys((NAME, TEXT, JSON, UNKNOWN, BPCHAR, VARCHAR, UUID, JSONB, TIME), "string"),
}


def spark_type(oid: int, modifier: int = -1) -> str | None:
    """Return the Spark type that holds values of a type; None: there is none.

    >>> spark_type(NUMERIC, numeric_modifier(12, 2)), spark_type(1016)
    ('decimal(12,2)', 'array<bigint>')
    """
    if oid == NUMERIC:
        if modifier < _HEADER_BYTES:
            return UNBOUNDED_NUMERIC
        precision, scale = divmod(modifier - _HEADER_BYTES, 1 << 16)
        return f"decimal({precision},{scale})" if precision <= DECIMAL_DIGITS_MAX else None
    if oid in ELEMENT_OF:
        element = spark_type(ELEMENT_OF[oid], modifier)
        return None if element is None else f"array<{element}>"
    if oid in (BPCHAR, VARCHAR) and modifier > _HEADER_BYTES:
        return f"{'char' if oid == BPCHAR else 'varchar'}({modifier - _HEADER_BYTES})"
    return _SPARK.get(oid)
