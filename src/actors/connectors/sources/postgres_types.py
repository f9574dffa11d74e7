"""Maps PostgreSQL's types to Spark's, and decodes values of many rows into Arrow. Pure.

Theory of operation. Changes bring values as text (the type's output function under ISO dates, UTC
and hexadecimal bytea); `from_text` converts a whole column by Arrow's casts. Snapshots come in
COPY's binary format: a number, a time or a text is read as it is (`from_binary`), every other type
as the text that changes bring (`copy_expression`). So a row deleted later equals, value by value,
the row that was copied.

Rules. A value that the column's type cannot hold is `UnrepresentableValue`, never rounded or cut:
NaN in a decimal, dates before year 1, after year 9999 or infinite, arrays of more than one
dimension. What holds ``numeric`` without a precision is chosen when a table is taken
(`postgres_numerics`), and is the type of its column here from then on (`numeric_held_by`).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sources.pgoutput import NULL, TupleValues, column
from actors.connectors.sources.postgres_copy import (
    Bytes,
    Places,
    be32,
    be64,
)
from actors.model.pgwire.decimal_digits import cast_decimals
from actors.model.pgwire.type_map import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    DAYS_TO_2000,
    DECIMAL_DIGITS_MAX,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    JSON,
    NAME,
    NUMERIC,
    OID,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    US_TO_2000,
    VARCHAR,
)
from actors.model.plan.schema import arrow_type, spark_type

UNBOUNDED: Final = "numeric"
"""Stands for the type of ``numeric`` without a precision where none is chosen yet."""
_DIGITS: Final = Context(prec=DECIMAL_DIGITS_MAX + 1)
_SPARK: Final[dict[int, str]] = {
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
}
_TEXTS: Final = frozenset({TEXT, VARCHAR, BPCHAR, NAME, JSON})
"""Types whose binary form is their text."""
_NUMBERS: Final[dict[int, str]] = {
    BOOL: "?",
    INT2: ">i2",
    INT4: ">i4",
    INT8: ">i8",
    OID: ">u4",
    FLOAT4: ">f4",
    FLOAT8: ">f8",
}
_DAY_US: Final = 86_400_000_000
_DAYS_MIN, _DAYS_MAX = -719_162, 2_932_896
"""Days since 1970 of 0001-01-01 and 9999-12-31."""
_ELEMENT_TEXT_MAX: Final = 64
_PLAIN_ARRAY: Final = r"^\{[^{}\"\\]*\}$"


class UnrepresentableValue(Exception):
    """A value that its column's type cannot hold. `value` is its text, cut."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(f"{value!r}: {why}")
        self.value = value
        self.why = why


class TypeFacts(msgspec.Struct, frozen=True):
    """A type in the server's catalog."""

    oid: int
    name: str
    output: str
    """Output function, as SQL writes it."""
    base: int = 0
    """Base type of a domain; else 0."""
    base_modifier: int = -1
    element: int = 0
    """Element type of a real array; else 0."""
    delimiter: str = ","
    labels: tuple[tuple[int, str], ...] = ()
    """Oid and label of each value of an enum; newer labels have higher oids."""
    attributes: tuple[tuple[int, int, int], ...] = ()
    """Number, type and modifier of each attribute of a composite."""
    range_of: int = 0
    """Type of the bounds of a range; else 0."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the types that its values are made of."""
        return (self.base, self.element, self.range_of, *(kind for _, kind, _ in self.attributes))


class ColumnType(msgspec.Struct, frozen=True):
    """A column's type: PostgreSQL's (no domain) and Spark's."""

    oid: int
    spark: str
    element: int = 0
    """Element type of an array (no domain); else 0."""
    output: str = "textout"


def column_type(
    oid: int, modifier: int, types: Mapping[int, TypeFacts], numeric: str
) -> ColumnType:
    """Return the type that holds a column. `numeric`: the type for ``numeric`` without a precision,
    or with one that no decimal has. An unknown type is held as text."""
    facts = types.get(oid)
    for _ in range(16):  # a domain may be based on another
        if facts is None or not facts.base:
            break
        modifier = facts.base_modifier if modifier == -1 else modifier
        oid = facts.base
        facts = types.get(oid)
    if facts is None:
        return ColumnType(oid, _scalar(oid, modifier, numeric))
    if facts.element and facts.delimiter == ",":
        element = column_type(facts.element, modifier, types, numeric)
        if not element.element:
            spark = f"array<{element.spark}>"
            return ColumnType(facts.oid, spark, element.oid, facts.output)
    return ColumnType(facts.oid, _scalar(facts.oid, modifier, numeric), output=facts.output)


def _scalar(oid: int, modifier: int, numeric: str) -> str:
    if oid != NUMERIC:
        return _SPARK.get(oid, "string")
    if modifier < 4:
        return numeric
    digits, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    scale = (scale ^ 1024) - 1024  # eleven bits with a sign
    if scale < 0:  # numeric(2,-3) holds 99000
        digits, scale = digits - scale, 0
    digits = max(digits, scale)
    return f"decimal({digits},{scale})" if digits <= DECIMAL_DIGITS_MAX else numeric


# -- numeric without a precision -------------------------------------------------------------


def numeric_held_by(spark: str) -> str:
    """Return the type in which a column of that type here holds ``numeric`` without a precision, by
    itself or as an array's element.

    >>> numeric_held_by("ARRAY<DECIMAL(9, 2)>"), numeric_held_by("string"), numeric_held_by("int")
    ('decimal(9,2)', 'string', 'numeric')
    """
    kind = arrow_type(spark)
    if pa.types.is_list(kind):
        kind = kind.value_type
    named = pa.types.is_decimal(kind) or pa.types.is_string(kind)
    return spark_type(kind) if named else UNBOUNDED


# -- from text --------------------------------------------------------------------------------


def from_text(texts: pa.Array, kind: ColumnType) -> pa.Array:
    """Convert a column of output functions' texts (binary). Raises `UnrepresentableValue`."""
    if kind.element:
        return _arrays(texts, kind)
    return _scalars(texts, kind.oid, kind.spark)


def _scalars(texts: pa.Array, oid: int, spark: str) -> pa.Array:
    if spark == "string":
        return _cast(texts, pa.string())
    if oid == BOOL:
        return pc.equal(texts, pa.scalar(b"t", pa.binary()))
    if oid == BYTEA:
        return _bytea(texts)
    if oid == NUMERIC:
        return _decimals(texts.view(pa.string()), arrow_type(spark))
    return _cast(texts.view(pa.string()), arrow_type(spark))


def _decimals(texts: pa.Array, target: pa.DataType) -> pa.Array:
    try:
        return cast_decimals(texts, target)
    except pa.ArrowInvalid:
        pass  # long texts may fit all the same, and else the first one that does not is named
    return pa.array(
        [None if text is None else _decimal(text, target) for text in texts.to_pylist()], target
    )


def _decimal(text: str, target: pa.DataType) -> Decimal:
    number, unit = Decimal(text), Decimal(1).scaleb(-target.scale)
    whole = target.precision - target.scale
    # Looked at before it is written out: it may have 131072 digits.
    if number.is_finite() and (not number or number.adjusted() < whole):
        held = number.quantize(unit, context=_DIGITS)
        if held == number:
            return held
    raise UnrepresentableValue(
        text[:_ELEMENT_TEXT_MAX],
        f"it does not fit decimal({target.precision},{target.scale}) exactly",
    )


def _cast(values: pa.Array, target: pa.DataType) -> pa.Array:
    try:
        return values.cast(target)
    except pa.ArrowInvalid as error:
        raise _culprit(values, target, str(error)) from None


def _culprit(values: pa.Array, target: pa.DataType, error: str) -> UnrepresentableValue:
    """Return the error for the first value that does not fit, found by halving the column."""
    while len(values) > 1:
        half = values.slice(0, len(values) // 2)
        try:
            half.cast(target)
            values = values.slice(len(values) // 2)
        except pa.ArrowInvalid:
            values = half
    text = values.cast(pa.binary())[0].as_py() or b""
    shown = text[:_ELEMENT_TEXT_MAX].decode(errors="replace")
    if pa.types.is_string(target):
        return UnrepresentableValue(shown, "it is not UTF-8")
    if pa.types.is_temporal(target):
        return UnrepresentableValue(shown, "only years 1 to 9999 can be held, no infinite ones")
    return UnrepresentableValue(shown, error)


def _bytea(texts: pa.Array) -> pa.Array:
    """Decode ``\\x6869`` to its two bytes: the whole column's digits at once."""
    valid = texts.drop_null() if texts.null_count else texts
    lengths = pc.binary_length(texts).fill_null(2).to_numpy(zero_copy_only=False)
    digits = b"".join(valid.to_pylist())
    if not digits.startswith(b"\\x") and digits:
        raise UnrepresentableValue(digits[:16].decode(errors="replace"), "bytea_output is not hex")
    raw = bytes.fromhex(digits.replace(b"\\x", b"").decode())
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum((lengths - 2) // 2, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.binary(),
        len(texts),
        [_validity(texts), pa.py_buffer(offsets), pa.py_buffer(raw)],
    )


def _validity(values: pa.Array) -> pa.Buffer | None:
    if not values.null_count:
        return None
    bits = np.packbits(values.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
    return pa.py_buffer(bits)


def _arrays(texts: pa.Array, kind: ColumnType) -> pa.Array:
    target = arrow_type(kind.spark)
    strings = _cast(texts, pa.string())
    plain = pc.all(pc.match_substring_regex(strings, _PLAIN_ARRAY), min_count=0).as_py()
    if plain is not False:
        lists = _split(strings)
    else:
        lists = [None if text is None else parse_array(text) for text in strings.to_pylist()]
        lists = pa.array(lists, pa.list_(pa.string()))
    flat = _scalars(lists.values.cast(pa.binary()), kind.element, kind.spark[len("array<") : -1])
    return _listed(lists, flat, target)


def _split(strings: pa.Array) -> pa.Array:
    """Split arrays without quotes and nesting: all rows at once."""
    inner = pc.utf8_slice_codeunits(strings, 1, -1)
    empty = pc.equal(inner, "")
    lists = pc.split_pattern(pc.if_else(empty, None, inner), ",")
    words = lists.values
    words = pc.if_else(pc.equal(pc.utf8_upper(words), "NULL"), None, words)
    none = strings.is_null().to_numpy(zero_copy_only=False)
    return pa.ListArray.from_arrays(
        lists.offsets, words, mask=pa.array(none) if none.any() else None
    )


def _listed(lists: pa.Array, flat: pa.Array, target: pa.DataType) -> pa.Array:
    none = lists.is_null().to_numpy(zero_copy_only=False)
    return pa.ListArray.from_arrays(
        lists.offsets, flat, type=target, mask=pa.array(none) if none.any() else None
    )


def parse_array(text: str) -> list[str | None]:
    """Return the elements of an array's text, of one dimension: ``{1,NULL,"a,\\"b"}``. Raises
    `UnrepresentableValue`."""
    place = text.index("{") + 1  # after bounds, if any: [0:2]={…}
    elements: list[str | None] = []
    if text[place] == "}":
        return elements
    while True:
        if text[place] == "{":
            raise UnrepresentableValue(
                text[:_ELEMENT_TEXT_MAX], "only arrays of one dimension can be held"
            )
        if text[place] == '"':
            part, place = _quoted_element(text, place + 1)
            elements.append(part)
        else:
            end = place
            while text[end] not in ",}":
                end += 1
            word = text[place:end]
            elements.append(None if word.upper() == "NULL" else word)
            place = end
        if text[place] == "}":
            return elements
        place += 1


def _quoted_element(text: str, place: int) -> tuple[str, int]:
    """Return (the text up to the closing quote, the place after it)."""
    parts: list[str] = []
    while text[place] != '"':
        if text[place] == "\\":
            place += 1
        parts.append(text[place])
        place += 1
    return "".join(parts), place + 1


# -- from COPY's binary format -------------------------------------------------------------------


def copy_expression(name: str, kind: ColumnType) -> str:
    """Return the expression that COPY selects for a column of that quoted name: its value, or its
    text."""
    if kind.oid in _NUMBERS or kind.oid in _TEXTS or kind.oid in (BYTEA, DATE, *_TIMES):
        return name
    # Changes bring the output function's text, which a cast to text is not always (inet, char).
    return f"pg_catalog.textin({kind.output}({name}))"


_TIMES: Final = (TIMESTAMP, TIMESTAMPTZ)


def from_binary(data: Bytes, values: TupleValues, kind: ColumnType) -> pa.Array:
    """Convert a column selected by `copy_expression`. Raises `UnrepresentableValue`."""
    oid = kind.oid
    none = values.kinds == NULL
    mask = none if bool(none.any()) else None
    # A NULL has no bytes, but reading at its place is safe: the buffer is padded.
    if (number := _NUMBERS.get(oid)) is not None:
        width = np.dtype(number).itemsize
        view = np.ndarray((len(data) - width + 1,), number, data, strides=(1,))
        made = view[values.starts]
        if made.dtype.kind == "f":
            # COPY keeps a NaN's bits, changes bring the text NaN: normalised, so that both cancel.
            made = np.where(np.isnan(made), made.dtype.type(np.nan), made)
        return pa.array(
            made.astype(made.dtype.newbyteorder("=")), mask=mask, type=_number_type(oid)
        )
    if oid == DATE:
        days = be32(data, values.starts) + DAYS_TO_2000
        _check_days(np.where(none, 0, days), values, "date")
        return pa.array(days.astype(np.int32), pa.int32(), mask=mask).cast(pa.date32())
    if oid in _TIMES:
        raw = be64(data, values.starts)
        # infinity is the largest and the smallest number
        times = np.clip(raw, -(2**62), 2**62) + US_TO_2000
        _check_days(np.where(none, 0, times // _DAY_US), values, "timestamp")
        return pa.array(times, pa.int64(), mask=mask).cast(arrow_type(kind.spark))
    texts = column(data, values)
    if oid == BYTEA:
        return texts
    if oid in _TEXTS:
        return _cast(texts, pa.string())
    return from_text(texts, kind)


def _number_type(oid: int) -> pa.DataType:
    return arrow_type(_SPARK[oid])


def _check_days(days: Places, values: TupleValues, name: str) -> None:
    out = (days < _DAYS_MIN) | (days > _DAYS_MAX)
    if out.any():
        day = int(days[out][0])
        where = "before year 1" if day < 0 else "after year 9999"
        raise UnrepresentableValue(
            f"a {name} {where}", "only years 1 to 9999 can be held, no infinite ones"
        )
