"""Maps Spark's and Arrow's types to PostgreSQL's, and back.

A type is an OID, a size and a modifier, as RowDescription has them. What PostgreSQL has no type for
is sent as text: a struct, a map, a variant, or an array of such or of arrays as ``json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import pyarrow as pa

from actors.model.plan.schema import UNBOUNDED_NUMERIC, inner_types, result_type, text_limit
from actors.runtime.errors import InvalidUsage

BOOL, BYTEA, CHAR, NAME, INT8, INT2, INT2VECTOR, INT4 = 16, 17, 18, 19, 20, 21, 22, 23
REGPROC, TEXT, OID, TID, XID, CID, OIDVECTOR, JSON = 24, 25, 26, 27, 28, 29, 30, 114
PG_NODE_TREE, FLOAT4, FLOAT8, UNKNOWN, INET, ACLITEM = 194, 700, 701, 705, 869, 1033
BPCHAR, VARCHAR, DATE, TIME, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1083, 1114, 1184
INTERVAL, TIMETZ, BIT, VARBIT, NUMERIC = 1186, 1266, 1560, 1562, 1700
REGPROCEDURE, REGOPER, REGOPERATOR, REGCLASS, REGTYPE = 2202, 2203, 2204, 2205, 2206
RECORD, CSTRING, ANYARRAY, VOID, ANYELEMENT = 2249, 2275, 2277, 2278, 2283
UUID, PG_LSN, REGCONFIG, REGDICTIONARY, JSONB = 2950, 3220, 3734, 3769, 3802
REGNAMESPACE, REGROLE, REGCOLLATION, XID8 = 4089, 4096, 4191, 5069

DAYS_TO_2000: Final = 10_957
MS_TO_2000: Final = 946_684_800_000
US_TO_2000: Final = 1000 * MS_TO_2000
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
    CHAR: 1002,
    NAME: 1003,
    INT2: 1005,
    INT2VECTOR: 1006,
    INT4: 1007,
    REGPROC: 1008,
    TEXT: 1009,
    TID: 1010,
    XID: 1011,
    CID: 1012,
    OIDVECTOR: 1013,
    BPCHAR: 1014,
    VARCHAR: 1015,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    OID: 1028,
    ACLITEM: 1034,
    INET: 1041,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    CSTRING: 1263,
    JSON: 199,
    REGPROCEDURE: 2207,
    REGOPER: 2208,
    REGOPERATOR: 2209,
    REGCLASS: 2210,
    REGTYPE: 2211,
    RECORD: 2287,
    UUID: 2951,
    PG_LSN: 3221,
    REGCONFIG: 3735,
    REGDICTIONARY: 3770,
    JSONB: 3807,
    REGNAMESPACE: 4090,
    REGROLE: 4097,
    REGCOLLATION: 4192,
    XID8: 271,
}
"""Type of the arrays of a type."""

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
    return (precision << 16 | scale & 0x7FF) + _HEADER_BYTES


def decimal_type(modifier: int) -> str | None:
    """Return the decimal that holds all values of a ``numeric`` of that modifier; None: none does,
    or the modifier names no precision.

    >>> decimal_type(numeric_modifier(12, 2)), decimal_type(numeric_modifier(2, -3))
    ('decimal(12,2)', 'decimal(5,0)')
    """
    if modifier < _HEADER_BYTES:
        return None
    digits, scale = (modifier - _HEADER_BYTES) >> 16, (modifier - _HEADER_BYTES) & 0x7FF
    # Eleven bits with a sign: numeric(2,-3) holds 99000.
    scale = (scale ^ 0x400) - 0x400
    if scale < 0:
        digits, scale = digits - scale, 0
    # numeric(3,5) holds 0.00123: a decimal counts the zeros after its point, too.
    digits = max(digits, scale)
    return f"decimal({digits},{scale})" if digits <= DECIMAL_DIGITS_MAX else None


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
        return _array_type([pg_type(kind.value_type)])
    return sized(JSON if pa.types.is_nested(kind) else TEXT)


def _array_type(inner: Sequence[PgType]) -> PgType:
    """Return the type of arrays of one type; JSON for what PostgreSQL has no arrays of."""
    # Arrays of arrays may be ragged, which PostgreSQL's cannot be.
    if len(inner) != 1 or inner[0].oid not in ARRAY_OF or inner[0].oid == JSON:
        return sized(JSON)
    return sized(ARRAY_OF[inner[0].oid], inner[0].modifier)


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
    # By its text, which alone has the length of a VARCHAR.
    if text.strip().lower().startswith("array<"):
        return _array_type([pg_type_of_spark(inner) for inner in inner_types(text)])
    try:
        return pg_type(result_type(text))
    except (InvalidUsage, ValueError):
        # Texts may name types that no result has: a variant, or Spark's `interval` of all parts.
        nested = text.strip().lower().startswith(("variant", "struct<", "map<"))
        return sized(JSON if nested else TEXT)


SPARK_OF: Final = {
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
"""Spark's type that holds values of a type; `spark_type` knows ``numeric`` and arrays, too."""
ELEMENT_OF: Final = {
    array: element
    for element, array in ARRAY_OF.items()
    if element in SPARK_OF or element in (NUMERIC, INTERVAL)
}
"""Type of an array's elements, of the arrays that are read as such: others stay text."""


def spark_type(oid: int, modifier: int = -1) -> str | None:
    """Return the Spark type that holds values of a type; None: there is none.

    >>> spark_type(NUMERIC, numeric_modifier(12, 2)), spark_type(1016)
    ('decimal(12,2)', 'array<bigint>')
    """
    if oid == NUMERIC:
        return UNBOUNDED_NUMERIC if modifier < _HEADER_BYTES else decimal_type(modifier)
    if oid in ELEMENT_OF:
        element = spark_type(ELEMENT_OF[oid], modifier)
        return None if element is None else f"array<{element}>"
    if oid in (BPCHAR, VARCHAR) and modifier > _HEADER_BYTES:
        return f"{'char' if oid == BPCHAR else 'varchar'}({modifier - _HEADER_BYTES})"
    return SPARK_OF.get(oid)
