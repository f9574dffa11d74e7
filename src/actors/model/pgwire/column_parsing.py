"""Converts a column of PostgreSQL values, from a client's COPY or from a source, to Arrow.

Arrow's casts convert a whole column at a time. They are stricter than PostgreSQL (which also
accepts ``+5``, ``yes``, or a date after a blank), and never looser where it matters. A column that
they refuse is parsed value by value, which also finds the value to blame.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.pgwire.decimal_digits import cast_decimals, parse_binary_decimals
from actors.model.pgwire.encoded_values import (
    ByteValues,
    Lengths,
    Places,
    RowMask,
    byte_array,
    offsets_of,
    take_values,
    valid_mask,
    value_data,
    value_lengths,
    value_offsets,
    window,
)
from actors.model.pgwire.sqlstate import (
    INEXACT,
    INVALID_BINARY,
    NUMBER_OUT_OF_RANGE,
    TIME_OUT_OF_RANGE,
    InvalidClientData,
)
from actors.model.pgwire.time_text import DAY_US, SECOND_US, local_to_utc
from actors.model.pgwire.type_map import pg_type
from actors.model.pgwire.type_oids import DAYS_TO_2000, JSON, US_TO_2000, PgType
from actors.model.pgwire.value_parsing import (
    ARRAY_ELEMENTS_MAX,
    SHOWN_MAX,
    decode_text,
    invalid,
    parse_array,
    parse_binary_value,
    parse_boolean,
    parse_bytea,
    parse_text_value,
)
from actors.model.plan.schema import UNBOUNDED_NUMERIC, arrow_type

_EXACT: Final = Context(prec=2_100, rounding=ROUND_HALF_UP)
_DAYS_MIN, _DAYS_MAX = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31 as days since 1970."""
_PLAIN_ARRAY: Final = r'^\{([^{}",\\\s\x0b]+(,[^{}",\\\s\x0b]+)*)?\}$'
"""Matches an array of one dimension without quotes, escapes and blanks."""


class ColumnError(Exception):
    """A value cannot be converted. Has its row in the column, the error without the row, and the
    beginning of the value."""

    def __init__(self, row: int, error: InvalidClientData, shown: str = "") -> None:
        super().__init__(str(error))
        self.row = row
        self.error = error
        self.shown = shown


class Rounding(Enum):
    """Decides which decimals are rounded to the scale of their column; others are refused."""

    NONE = "none: every value must fit exactly"
    DECLARED = "as in PostgreSQL: those in a column with a precision (not `UNBOUNDED_NUMERIC`)"
    ALL = "as in Spark"


# -- from text -------------------------------------------------------------------------------------


def parse_text_column(
    texts: pa.Array,
    kind: pa.DataType,
    time_zone: str = "UTC",
    rounding: Rounding = Rounding.DECLARED,
    elements_max: int | None = None,
) -> pa.Array:
    """Convert texts (large_binary, with NULLs) to a type that a table's column can have.

    Args:
        texts: The values.
        kind: The column's type.
        time_zone: The zone of times without one.
        rounding: The decimals to round.
        elements_max: Most elements of an array; None for `ARRAY_ELEMENTS_MAX`.

    Raises:
        ColumnError: A value is not valid for the type.
    """
    if pa.types.is_string(kind):
        return _strings(texts)
    if pa.types.is_boolean(kind):
        return _booleans(texts)
    if pa.types.is_binary(kind):
        return _byteas(texts)
    if pa.types.is_list(kind) and pg_type(kind).oid != JSON:
        lists = _lists(_strings(texts), elements_max)
        words = lists.values.cast(pa.large_binary())
        try:
            flat = parse_text_column(words, kind.value_type, time_zone, rounding)
        except ColumnError as wrong:
            # If several lists start at the same offset, only the last one has elements.
            offsets = lists.offsets.to_numpy()
            row = int(np.searchsorted(offsets, wrong.row, side="right")) - 1
            raise ColumnError(row, wrong.error, wrong.shown) from None
        return pa.ListArray.from_arrays(lists.offsets, flat, type=kind, mask=_null_array(lists))
    try:
        if pa.types.is_timestamp(kind):
            return _timestamps(_strings(texts), kind, time_zone)
        if pa.types.is_decimal(kind):
            return cast_decimals(_strings(texts), kind)
        if not pa.types.is_nested(kind):
            found = _strings(texts).cast(kind)
            if _is_exact(texts, found):
                return found
    except pa.ArrowInvalid:
        pass  # parsing value by value reports the error, if there is one

    def convert(data: bytes) -> Any:
        text = decode_text(data)
        if (oid := pg_type(kind).oid) == JSON:
            return parse_json(text, kind)
        return fit_value(parse_text_value(text, oid, time_zone), kind, rounding)

    return _one_by_one(texts.to_pylist(), kind, convert)


def _strings(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return _one_by_one(texts.to_pylist(), pa.string(), decode_text)


def _booleans(texts: pa.Array) -> pa.Array:
    # Booleans have few spellings, so parse each spelling once.
    coded = texts.dictionary_encode()
    words = coded.dictionary.to_pylist()
    try:
        values = [parse_boolean(decode_text(word)) for word in words]
    except InvalidClientData:
        return _one_by_one(
            texts.to_pylist(), pa.bool_(), lambda data: parse_boolean(decode_text(data))
        )
    return pa.array(values, pa.bool_()).take(coded.indices)


def _byteas(texts: pa.Array) -> pa.Array:
    """Decode values such as ``\\x6869`` (here to two bytes), all digits of the column at a time."""
    valid = valid_mask(texts)
    hexed = pc.starts_with(texts, "\\x")
    lengths = value_lengths(texts) - 2
    if not pc.all(hexed, min_count=0).as_py() or (lengths % 2).any():
        return _one_by_one(texts.to_pylist(), pa.binary(), _bytea)
    found = texts.drop_null()
    data, begins = value_data(found), value_offsets(found)[:-1]
    keep = np.ones(len(data), np.bool_)
    for place in (0, 1):
        keep[begins - begins[:1] + place] = False
    try:
        raw = bytes.fromhex(data[keep].tobytes().decode())
    except ValueError:
        raw = b""
    sizes = np.maximum(lengths, 0) // 2
    # `fromhex` skips blanks, so a blank would invalidate the lengths.
    if len(raw) != int(sizes.sum()):
        return _one_by_one(texts.to_pylist(), pa.binary(), _bytea)
    return byte_array(np.frombuffer(raw, np.uint8), offsets_of(sizes), valid).cast(pa.binary())


def _bytea(data: bytes) -> bytes:
    return parse_bytea(decode_text(data))


def _timestamps(texts: pa.Array, kind: pa.DataType, time_zone: str) -> pa.Array:
    if kind.tz is None:
        return texts.cast(kind)
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        # Arrow requires a zone in every text, or in none.
        local = texts.cast(pa.timestamp("us")).cast(pa.int64())
    times = local.fill_null(0).to_numpy(zero_copy_only=False)
    seconds, micros = np.divmod(times, SECOND_US)
    utc = local_to_utc(seconds, time_zone) * SECOND_US + micros
    valid = valid_mask(texts)
    return pa.array(utc, pa.int64(), mask=None if valid is None else ~valid).cast(kind)


def _lists(texts: pa.Array, elements_max: int | None) -> pa.Array:
    """Parse arrays of one dimension into lists of strings."""
    plain = pc.all(pc.match_substring_regex(texts, _PLAIN_ARRAY), min_count=0).as_py()
    if plain:
        inner = pc.utf8_slice_codeunits(texts, 1, -1)
        # Splitting an array without elements would give a single text.
        lists = pc.split_pattern(pc.if_else(pc.equal(inner, ""), None, inner), ",")
        words = pc.if_else(pc.equal(pc.utf8_upper(lists.values), "NULL"), None, lists.values)
        most = ARRAY_ELEMENTS_MAX if elements_max is None else elements_max
        # Parsing value by value finds the row with too many elements.
        if (pc.max(pc.list_value_length(lists)).as_py() or 0) <= most:
            return pa.ListArray.from_arrays(lists.offsets, words, mask=_null_array(texts))
    return _one_by_one(
        texts.to_pylist(), pa.list_(pa.string()), lambda text: parse_array(text, elements_max)
    )


def _null_array(array: pa.Array) -> pa.Array | None:
    """Return a mask of the NULL values; None if there are none."""
    return array.is_null() if array.null_count else None


def _is_exact(texts: pa.Array, found: pa.Array) -> bool:
    """Return whether Arrow read the texts as PostgreSQL would."""
    if pa.types.is_integer(found.type):
        # Arrow reads 0xFF as -1.
        return not bool(np.isin(value_data(texts), (ord("x"), ord("X"))).any())
    if not pa.types.is_floating(found.type):
        return True
    # An infinity must be spelled out: 1e999 is out of range.
    infinite = pc.is_inf(found)
    if not pc.any(infinite).as_py():
        return True
    words = texts.filter(infinite.fill_null(False))
    return bool(pc.all(pc.match_substring_regex(words, "(?i)inf")).as_py())


def _one_by_one(values: list[Any], kind: pa.DataType, convert: Callable[[Any], Any]) -> pa.Array:
    """Convert values one by one, to find or accept what Arrow refuses."""
    # All values before the wrong one are valid, so its row is the first wrong one.
    made: list[Any] = []
    for row, value in enumerate(values):
        try:
            made.append(None if value is None else convert(value))
        except InvalidClientData as error:
            shown = value[:SHOWN_MAX]
            if isinstance(shown, bytes):
                shown = shown.decode(errors="replace")
            raise ColumnError(row, error, shown) from None
    return pa.array(made, kind)


def fit_value(value: Any, kind: pa.DataType, rounding: Rounding = Rounding.DECLARED) -> Any:
    """Convert a parsed value to the form that Arrow accepts for a type.

    Raises `InvalidClientData` if it is out of range or would have to be rounded where rounding is
    not allowed.
    """
    if isinstance(value, list):
        return [
            None if each is None else fit_value(each, kind.value_type, rounding) for each in value
        ]
    if pa.types.is_int8(kind) and not -128 <= value <= 127:
        raise InvalidClientData(f"value {value} is out of range for tinyint", NUMBER_OUT_OF_RANGE)
    if pa.types.is_decimal(kind):
        rounded = _rounded(value, kind)
        if rounded == value or rounding is Rounding.ALL:
            return rounded
        if kind == arrow_type(UNBOUNDED_NUMERIC):
            raise InvalidClientData(f"numeric value {value!s:.64}{INEXACT}", NUMBER_OUT_OF_RANGE)
        if rounding is Rounding.NONE:
            raise _unfit(value, kind)
        return rounded
    return value


def _rounded(value: Decimal, kind: pa.DataType) -> Decimal:
    precision, scale = kind.precision, kind.scale
    whole = value.adjusted() + 1 if value else 0
    # Check before writing the number out, because 1e999999 has many digits.
    if whole <= precision - scale:
        try:
            rounded = value.quantize(Decimal(1).scaleb(-scale), context=_EXACT)
        except InvalidOperation:
            rounded = Decimal(0)
        if not rounded or rounded.adjusted() + 1 <= precision - scale:
            return rounded
    raise _unfit(value, kind)


def _unfit(value: Decimal, kind: pa.DataType) -> InvalidClientData:
    return InvalidClientData(
        f"numeric value {value!s:.64} does not fit decimal({kind.precision},{kind.scale})",
        NUMBER_OUT_OF_RANGE,
    )


# -- nested values as JSON -------------------------------------------------------------------------


def parse_json(text: str, kind: pa.DataType) -> Any:
    """Parse a nested value that was sent as JSON. Raises `InvalidClientData`."""
    try:
        return _from_json(json.loads(text, parse_float=Decimal), kind)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise invalid("json", text) from None


def _from_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _from_json(value.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind):
        return [
            (_from_json(key, kind.key_type), _from_json(item, kind.item_type))
            for key, item in value.items()
        ]
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise TypeError
        return [_from_json(each, kind.value_type) for each in value]
    if pa.types.is_binary(kind):
        return parse_json_bytes(value)
    if isinstance(value, bool):
        value = "true" if value else "false"
    if pa.types.is_string(kind) and not isinstance(value, str):
        raise TypeError
    return fit_value(parse_text_value(str(value), pg_type(kind).oid), kind)


def parse_json_bytes(value: str) -> bytes:
    """Decode the base64 text in which Spark's ``to_json`` writes binary values."""
    return base64.b64decode(value, validate=True)


# -- from binary -----------------------------------------------------------------------------------


_LAYOUTS: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "u1",
    pa.int8(): ">i2",
    pa.int16(): ">i2",
    pa.int32(): ">i4",
    pa.int64(): ">i8",
    pa.float32(): ">f4",
    pa.float64(): ">f8",
    pa.date32(): ">i4",
    pa.timestamp("us"): ">i8",
    pa.timestamp("us", "UTC"): ">i8",
}


def parse_binary_column(
    data: ByteValues, starts: Places, lengths: Lengths, kind: pa.DataType
) -> pa.Array:
    """Convert values in binary format to a type that a column of a table can have.

    The values are at `starts` (ascending) and have these lengths; length -1 means NULL. `data` must
    end with `PAD_BYTES` of padding. Raises `ColumnError`.
    """
    null = lengths < 0
    mask = null if null.any() else None
    if (layout := _LAYOUTS.get(kind)) is not None:
        width = np.dtype(layout).itemsize
        wrong = np.flatnonzero((lengths != width) & ~null)
        if len(wrong):
            raise _wrong_size(int(wrong[0]), int(lengths[wrong[0]]), width)
        numbers = window(data, layout)[starts]
        native = numbers.astype(numbers.dtype.newbyteorder("="))
        return _numbers_array(np.where(null, native.dtype.type(0), native), kind, mask)
    texts = take_values(data, starts, np.maximum(lengths, 0), mask)
    if pa.types.is_string(kind):
        return _strings(texts)
    if pa.types.is_binary(kind):
        return texts.cast(pa.binary())
    if pa.types.is_decimal(kind):
        found = parse_binary_decimals(data, starts, lengths, null, kind)
        if found is not None:
            return found
    wire = pg_type(kind)
    return _one_by_one(texts.to_pylist(), kind, lambda value: _from_binary(value, wire, kind))


def _from_binary(data: bytes, wire: PgType, kind: pa.DataType) -> Any:
    if wire.oid == JSON:
        return parse_json(decode_text(data), kind)
    return fit_value(parse_binary_value(data, wire.oid), kind)


def _wrong_size(row: int, size: int, width: int) -> ColumnError:
    return ColumnError(
        row,
        InvalidClientData(
            f"incorrect binary data format: {size} bytes instead of {width}", INVALID_BINARY
        ),
    )


def _numbers_array(numbers: Any, kind: pa.DataType, mask: RowMask | None) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pa.array(numbers != 0, kind, mask=mask)
    if pa.types.is_int8(kind):
        outside = np.flatnonzero((numbers < -128) | (numbers > 127))
        if len(outside):
            row = int(outside[0])
            why = f"value {numbers[row]} is out of range for tinyint"
            raise ColumnError(row, InvalidClientData(why, NUMBER_OUT_OF_RANGE))
        return pa.array(numbers.astype(np.int8), kind, mask=mask)
    if pa.types.is_date32(kind):
        days = numbers.astype(np.int64) + DAYS_TO_2000
        _check_days(days, "date")
        return pa.array(days.astype(np.int32), pa.int32(), mask=mask).cast(kind)
    if pa.types.is_timestamp(kind):
        # Infinity is the largest number. Clip it, so that the sum fits into 64 bits.
        times = np.minimum(numbers, 2**62) + US_TO_2000
        _check_days(times // DAY_US, "timestamp")
        return pa.array(times, pa.int64(), mask=mask).cast(kind)
    if pa.types.is_floating(kind):
        # NaN has many binary forms and one text. Use one form, so that equal values are equal.
        numbers = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)
    return pa.array(numbers, kind, mask=mask)


def _check_days(days: Lengths, name: str) -> None:
    outside = np.flatnonzero((days < _DAYS_MIN) | (days > _DAYS_MAX))
    if len(outside):
        row = int(outside[0])
        shown = f"a {name} {'before year 1' if days[row] < 0 else 'after year 9999'}"
        error = InvalidClientData(f"{shown} is out of range", TIME_OUT_OF_RANGE)
        raise ColumnError(row, error, shown)
