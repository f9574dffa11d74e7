"""Maps PostgreSQL's types to Spark's, and decodes columns of values into Arrow. Pure.

Theory of operation. Changes carry values as text: the output of the type's output function, with
ISO dates, UTC and hexadecimal bytea. `from_text` converts a whole column with Arrow's casts.
Snapshots arrive in COPY's binary format: numbers, times and text are read directly (`from_binary`),
and every other type as the same text as in changes (`copy_expression`). So a row that is deleted
later equals the copied row, value by value.

Rules. A value that the column's type cannot hold raises `UnrepresentableValue`; it is never rounded
or truncated. Examples: NaN in a decimal, dates before year 1 or after year 9999, infinite dates,
multidimensional arrays. The type for ``numeric`` without a precision is chosen when a table is
added (`postgres_numerics`), and stays the type of the local column (`numeric_held_by`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import pyarrow as pa

from actors.connectors.sources.pgoutput import TupleValues, column
from actors.connectors.sources.postgres_copy import MESSAGE_BYTES_MAX
from actors.model.pgwire import sqlstate, type_map
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.column_parsing import (
    ColumnError,
    Rounding,
    parse_binary_column,
    parse_text_column,
)
from actors.model.pgwire.encoded_values import ByteValues
from actors.model.plan.schema import arrow_type, spark_type

UNBOUNDED: Final = "numeric"
"""Placeholder for the type of ``numeric`` without a precision, until one is chosen."""
_COPIED: Final = frozenset(
    {
        *(pg.BOOL, pg.BYTEA, pg.INT2, pg.INT4, pg.INT8, pg.FLOAT4, pg.FLOAT8),
        *(pg.DATE, pg.TIMESTAMP, pg.TIMESTAMPTZ, pg.TEXT, pg.VARCHAR, pg.BPCHAR, pg.NAME, pg.JSON),
    }
)
"""Types whose binary form can be read directly."""


class UnrepresentableValue(Exception):
    """A value that its column's type cannot hold. `value` is its text, truncated."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(f"{value!r}: {why}")
        self.value = value
        self.why = why


class TypeFacts(msgspec.Struct, frozen=True):
    """A type as the server's catalog describes it."""

    oid: int
    name: str
    output: str
    """Name of the output function, as SQL writes it."""
    base: int = 0
    """Base type of a domain; 0 for other types."""
    base_modifier: int = -1
    element: int = 0
    """Element type of a true array; 0 for other types."""
    delimiter: str = ","
    labels: tuple[tuple[int, str], ...] = ()
    """Oid and label of each value of an enum. Newer labels have higher oids."""
    attributes: tuple[tuple[int, int, int], ...] = ()
    """Number, type and modifier of each attribute of a composite."""
    range_of: int = 0
    """Type of the bounds of a range; 0 for other types."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the oids of its component types."""
        return (self.base, self.element, self.range_of, *(kind for _, kind, _ in self.attributes))


class ColumnType(msgspec.Struct, frozen=True):
    """A column's type in PostgreSQL (domains resolved) and in Spark."""

    oid: int
    spark: str
    output: str = "textout"


def column_type(
    oid: int, modifier: int, types: Mapping[int, TypeFacts], numeric: str
) -> ColumnType:
    """Return the type of a column. Unknown types become text.

    `numeric` is the type for ``numeric`` without a precision, or with one that exceeds a decimal's.
    """
    facts = types.get(oid)
    for _ in range(16):  # a domain may be based on another domain
        if facts is None or not facts.base:
            break
        modifier = facts.base_modifier if modifier == -1 else modifier
        oid = facts.base
        facts = types.get(oid)
    if facts is not None and facts.element and facts.delimiter == ",":
        element = column_type(facts.element, modifier, types, numeric)
        if not element.spark.startswith("array<"):
            return ColumnType(oid, f"array<{element.spark}>", facts.output)
    if oid == pg.NUMERIC:
        spark = type_map.decimal_type(modifier) or numeric
    else:
        spark = type_map.SPARK_OF.get(oid, "string")
    return ColumnType(oid, spark) if facts is None else ColumnType(oid, spark, facts.output)


# -- numeric without a precision -------------------------------------------------------------


def numeric_held_by(spark: str) -> str:
    """Return the type in which a local column holds ``numeric`` without a precision, itself or as
    an array's element.

    >>> numeric_held_by("ARRAY<DECIMAL(9, 2)>"), numeric_held_by("string"), numeric_held_by("int")
    ('decimal(9,2)', 'string', 'numeric')
    """
    kind = arrow_type(spark)
    if pa.types.is_list(kind):
        kind = kind.value_type
    named = pa.types.is_decimal(kind) or pa.types.is_string(kind)
    return spark_type(kind) if named else UNBOUNDED


# -- values ------------------------------------------------------------------------------------


def from_text(texts: pa.Array, kind: ColumnType) -> pa.Array:
    """Convert a column of texts from output functions (large_binary). Raises
    `UnrepresentableValue`."""
    held = arrow_type(kind.spark)
    try:
        # The size of the server's messages limits the size of arrays.
        return parse_text_column(texts, held, "UTC", Rounding.NONE, MESSAGE_BYTES_MAX)
    except ColumnError as error:
        raise _unrepresentable(error, held) from None


def _unrepresentable(error: ColumnError, held: pa.DataType) -> UnrepresentableValue:
    while pa.types.is_list(held):
        held = held.value_type
    match error.error.sqlstate:
        case sqlstate.TIME_OUT_OF_RANGE:
            why = "only finite values in years 1 to 9999 can be represented"
        case sqlstate.NUMBER_OUT_OF_RANGE if pa.types.is_decimal(held):
            why = f"it does not fit decimal({held.precision},{held.scale}) exactly"
        case sqlstate.NOT_IN_ENCODING:
            why = "it is not UTF-8"
        case _:
            why = str(error.error)
    return UnrepresentableValue(error.shown, why)


def copy_expression(name: str, kind: ColumnType) -> str:
    """Return the expression that COPY selects for the column with this quoted name: its value or
    its text."""
    if kind.oid in _COPIED:
        return name
    # Use the output function, as changes do: a cast to text gives another text for some types
    # (inet, char).
    return f"pg_catalog.textin({kind.output}({name}))"


def from_binary(data: ByteValues, values: TupleValues, kind: ColumnType) -> pa.Array:
    """Convert a column that was selected with `copy_expression`. Raises `UnrepresentableValue`."""
    # `copy_expression` selected its text.
    if kind.oid not in _COPIED:
        return from_text(column(data, values), kind)
    held = arrow_type(kind.spark)
    try:
        return parse_binary_column(data, values.starts, values.lengths, held)
    except ColumnError as error:
        raise _unrepresentable(error, held) from None
