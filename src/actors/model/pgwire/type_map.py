"""Maps Spark's and Arrow's types to PostgreSQL's, and back.

A type consists of an OID, a size and a modifier, as in RowDescription. Types that PostgreSQL does
not have are sent as text. Structs, maps, variants, and arrays of these or of arrays are sent as
``json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import pyarrow as pa

from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.type_oids import PgType, sized
from actors.model.plan.schema import UNBOUNDED_NUMERIC, inner_types, result_type, text_limit
from actors.runtime.errors import InvalidUsage

DECIMAL_DIGITS_MAX: Final = 38
_HEADER_BYTES: Final = 4
"""Number that PostgreSQL adds in a modifier to a length, or to precision and scale."""

_SCALARS: Final[dict[pa.DataType, int]] = {
    pa.bool_(): pg.BOOL,
    # There is no 1-byte type; unsigned types become the next larger signed one.
    pa.int8(): pg.INT2,
    pa.uint8(): pg.INT2,
    pa.int16(): pg.INT2,
    pa.uint16(): pg.INT4,
    pa.int32(): pg.INT4,
    pa.uint32(): pg.INT8,
    pa.int64(): pg.INT8,
    pa.float32(): pg.FLOAT4,
    pa.float64(): pg.FLOAT8,
    pa.string(): pg.TEXT,
    pa.large_string(): pg.TEXT,
    pa.binary(): pg.BYTEA,
    pa.large_binary(): pg.BYTEA,
    pa.date32(): pg.DATE,
    pa.null(): pg.TEXT,
}


def numeric_modifier(precision: int, scale: int) -> int:
    """Return the modifier of ``numeric(precision, scale)``.

    >>> numeric_modifier(12, 2)
    786438
    """
    return (precision << 16 | scale & 0x7FF) + _HEADER_BYTES


def decimal_type(modifier: int) -> str | None:
    """Return the decimal type that holds all values of a ``numeric`` with this modifier.

    Returns None if there is none, or if the modifier has no precision.

    >>> decimal_type(numeric_modifier(12, 2)), decimal_type(numeric_modifier(2, -3))
    ('decimal(12,2)', 'decimal(5,0)')
    """
    if modifier < _HEADER_BYTES:
        return None
    digits, scale = (modifier - _HEADER_BYTES) >> 16, (modifier - _HEADER_BYTES) & 0x7FF
    # A signed number of 11 bits: numeric(2,-3) holds 99000.
    scale = (scale ^ 0x400) - 0x400
    if scale < 0:
        digits, scale = digits - scale, 0
    # numeric(3,5) holds 0.00123, but a decimal counts the zeros after its point as well.
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
        return sized(pg.NUMERIC, numeric_modifier(kind.precision, kind.scale))
    if pa.types.is_timestamp(kind):
        return sized(pg.TIMESTAMP if kind.tz is None else pg.TIMESTAMPTZ)
    if pa.types.is_time(kind):
        return sized(pg.TIME)
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return sized(pg.INTERVAL)
    # An encoding of Arrow, not a type of its own.
    if pa.types.is_dictionary(kind):
        return pg_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _array_type([pg_type(kind.value_type)])
    return sized(pg.JSON if pa.types.is_nested(kind) else pg.TEXT)


def _array_type(inner: Sequence[PgType]) -> PgType:
    """Return the array type of an element type; JSON if PostgreSQL has none."""
    # Arrays of arrays may be ragged, which PostgreSQL does not allow.
    if len(inner) != 1 or inner[0].oid not in pg.ARRAY_OF or inner[0].oid == pg.JSON:
        return sized(pg.JSON)
    return sized(pg.ARRAY_OF[inner[0].oid], inner[0].modifier)


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
        return sized(pg.BPCHAR if padded else pg.VARCHAR, length + _HEADER_BYTES)
    # From its text, because only that has the length of a VARCHAR.
    if text.strip().lower().startswith("array<"):
        return _array_type([pg_type_of_spark(inner) for inner in inner_types(text)])
    try:
        return pg_type(result_type(text))
    except (InvalidUsage, ValueError):
        # The text may name a type that no result has: a variant, or Spark's `interval` of all
        # parts.
        nested = text.strip().lower().startswith(("variant", "struct<", "map<"))
        return sized(pg.JSON if nested else pg.TEXT)


SPARK_OF: Final = {
    pg.BOOL: "boolean",
    pg.BYTEA: "binary",
    pg.INT2: "smallint",
    pg.INT4: "int",
    pg.INT8: "bigint",
    pg.OID: "bigint",
    pg.FLOAT4: "float",
    pg.FLOAT8: "double",
    pg.DATE: "date",
    pg.TIMESTAMP: "timestamp_ntz",
    pg.TIMESTAMPTZ: "timestamp",
    **dict.fromkeys((pg.NAME, pg.TEXT, pg.UNKNOWN, pg.BPCHAR, pg.VARCHAR), "string"),
    **dict.fromkeys((pg.JSON, pg.JSONB, pg.UUID, pg.TIME), "string"),
}
"""Spark type for the values of each type; `spark_type` also handles ``numeric`` and arrays."""
ELEMENT_OF: Final = {
    array: element
    for element, array in pg.ARRAY_OF.items()
    if element in SPARK_OF or element in (pg.NUMERIC, pg.INTERVAL)
}
"""Element type of the arrays that are parsed as arrays; others stay text."""


def spark_type(oid: int, modifier: int = -1) -> str | None:
    """Return the Spark type for the values of a type; None if there is none.

    >>> spark_type(pg.NUMERIC, numeric_modifier(12, 2)), spark_type(1016)
    ('decimal(12,2)', 'array<bigint>')
    """
    if oid == pg.NUMERIC:
        return UNBOUNDED_NUMERIC if modifier < _HEADER_BYTES else decimal_type(modifier)
    if oid in ELEMENT_OF:
        element = spark_type(ELEMENT_OF[oid], modifier)
        return None if element is None else f"array<{element}>"
    if oid in (pg.BPCHAR, pg.VARCHAR) and modifier > _HEADER_BYTES:
        return f"{'char' if oid == pg.BPCHAR else 'varchar'}({modifier - _HEADER_BYTES})"
    return SPARK_OF.get(oid)
