"""Encodes whole Arrow columns as PostgreSQL's text and binary values.

`encode_text` and `encode_binary` accept any array; `actors.model.pgwire.type_map.pg_type`
determines the type that a client sees. Only nested values, which become JSON, and texts of
intervals take Python code per value.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.pgwire.decimal_digits import decimal_binary, decimal_text
from actors.model.pgwire.encoded_values import (
    EncodedValues,
    FieldJoiner,
    FixedValues,
    Lengths,
    Numbers,
    RowMask,
    VariableValues,
    as_variable,
    booleans,
    byte_array,
    compress,
    fixed_numbers,
    offsets_of,
    valid_mask,
    value_data,
    value_offsets,
)
from actors.model.pgwire.time_text import DAY_US, date_text, time_text, timestamp_text
from actors.model.pgwire.type_map import pg_type
from actors.model.pgwire.type_oids import DAYS_TO_2000, JSON, US_TO_2000
from actors.runtime.errors import InvalidUsage

_LARGE_BINARY: Final = pa.large_binary()
_LARGE_STRING: Final = pa.large_string()
_HEX: Final = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)
"""The two hexadecimal digits of each byte, as they are in memory."""
_WHOLE_MAX: Final = {4: 1e6, 8: 1e15}
"""Absolute value from which PostgreSQL writes a float of this size in bytes with an exponent."""
_FRACTION_MIN: Final = 1e-4
"""Absolute value below which it does so."""
_NO_NUMBERS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_MUST_QUOTE: Final = r'^$|^[nN][uU][lL][lL]$|["\\{},\s\x0b]'
"""Matches elements that must be quoted in the text of an array."""
_INT64_MIN: Final = -(2**63)
_INT32_MIN: Final = -(2**31)


def plain_array(array: pa.Array) -> pa.Array:
    """Return a column without Arrow's encodings: dictionaries, extensions, views and chunks."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        return array.cast(_LARGE_STRING)
    if pa.types.is_binary_view(array.type) or pa.types.is_fixed_size_binary(array.type):
        return array.cast(_LARGE_BINARY)
    if pa.types.is_fixed_size_list(array.type):
        return array.cast(pa.large_list(array.type.value_field))
    return array


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _times_us(array: pa.Array) -> Any:
    """Return times in microseconds; 0 for NULL."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        if kind.unit != "us":
            # Truncate nanoseconds, because PostgreSQL has microseconds.
            array = array.cast(pa.timestamp("us", kind.tz), safe=False)
    else:
        array = array.cast(pa.time64("us"), safe=False)
    return fixed_numbers(array, "i8")


# -- text ------------------------------------------------------------------------------------------


def encode_text(array: pa.Array, time_zone: str = "UTC") -> EncodedValues:
    """Encode a column in text format; `time_zone` is that of the session.

    Raises `InvalidUsage` for an unknown zone.
    """
    array = plain_array(array)
    kind = array.type
    valid = valid_mask(array)
    if pa.types.is_boolean(kind):
        return FixedValues(np.where(booleans(array), ord("t"), ord("f")), "u1", valid)
    if pa.types.is_integer(kind):
        return VariableValues(array.cast(_LARGE_STRING).cast(_LARGE_BINARY))
    if pa.types.is_floating(kind):
        return VariableValues(_float_text(array))
    if pa.types.is_decimal(kind):
        return decimal_text(array)
    if _is_text(kind):
        return VariableValues(array.cast(_LARGE_BINARY))
    if _is_bytes(kind):
        return VariableValues(_bytea_text(array))
    if pa.types.is_date32(kind):
        return date_text(fixed_numbers(array, "i4"), valid)
    if pa.types.is_timestamp(kind):
        zone = None if kind.tz is None else time_zone
        return timestamp_text(_times_us(array), zone, valid)
    if pa.types.is_time(kind):
        return time_text(_times_us(array), valid)
    if _is_interval(kind):
        return _interval_text(array)
    if pa.types.is_null(kind):
        return VariableValues(pa.nulls(len(array), _LARGE_BINARY))
    if pa.types.is_nested(kind) and pg_type(kind).oid != JSON:
        return VariableValues(_array_text(array, time_zone))
    return VariableValues(_foreign_text(array))


def _float_text(array: pa.Array) -> pa.Array:
    """Format floats with the shortest texts that read back as the same floats."""
    width = array.type.bit_width // 8
    if width == 2:
        array, width = array.cast(pa.float32()), 4
    values = fixed_numbers(array, f"f{width}")
    finite = np.isfinite(values)
    # Arrow writes 1.0 and PostgreSQL 1, so write whole numbers as such. Minus zero keeps its sign.
    whole = finite & (np.abs(values) < _WHOLE_MAX[width]) & (values == np.trunc(values))
    whole &= (values != 0) | ~np.signbit(values)
    # Casting a number that does not fit into an integer is undefined, so cast only whole numbers.
    integers = pa.array(np.where(whole, values, 0).astype(np.int64)).cast(_LARGE_STRING)
    if whole.all():
        texts = integers
    else:
        texts = array.cast(_LARGE_STRING)
        if whole.any():
            texts = pc.if_else(pa.array(whole), integers, texts)
        texts = _replace(texts, (values == 0) & ~whole, lambda odd: ["-0"] * len(odd), values)
        size = np.abs(values)
        exponent = (size < _FRACTION_MIN) & (values != 0)
        if width == 4:
            exponent |= finite & (size >= _WHOLE_MAX[width])
        texts = _replace(texts, exponent, _scientific, values)
        texts = _replace(
            texts, ~finite, lambda odd: [_NO_NUMBERS[str(each)] for each in odd], values
        )
    if array.null_count:
        texts = pc.if_else(array.is_valid(), texts, None)
    return texts.cast(_LARGE_BINARY)


def _replace(
    texts: pa.Array, mask: RowMask, write: Callable[[Numbers], list[str]], values: Numbers
) -> pa.Array:
    """Replace the texts that Arrow writes differently from PostgreSQL."""
    if not mask.any():
        return texts
    return pc.replace_with_mask(texts, pa.array(mask), pa.array(write(values[mask]), _LARGE_STRING))


def _scientific(values: Numbers) -> list[str]:
    """Format floats with an exponent."""
    # Python's format is several times as fast, but has no 4-byte floats.
    if values.dtype.itemsize == 8:
        return [repr(value) for value in values.tolist()]
    return [np.format_float_scientific(value, trim="-") for value in values]


def _bytea_text(array: pa.Array) -> pa.Array:
    array = array.cast(_LARGE_BINARY)
    offsets = value_offsets(array)
    digits = _HEX[value_data(array)]
    hexed = byte_array(digits, 2 * (offsets - offsets[0]), valid_mask(array))
    return pc.binary_join_element_wise(
        pa.scalar(b"\\x", _LARGE_BINARY), hexed, pa.scalar(b"", _LARGE_BINARY)
    )


def _array_text(array: pa.Array, time_zone: str) -> pa.Array:
    """Format arrays of scalars, such as ``{1,NULL,"a b"}``."""
    flat, offsets = _elements(array)
    words = as_variable(encode_text(flat, time_zone))
    kind = flat.type
    # Digits and letters need no quotes. A time contains a blank, and so does an era.
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        words = _quoted_elements(words)
    words = words.fill_null(b"NULL")
    comma = pa.scalar(b",", _LARGE_BINARY)
    joined = pc.binary_join(pa.LargeListArray.from_arrays(pa.array(offsets), words), comma)
    brace, close, empty = (pa.scalar(text, _LARGE_BINARY) for text in (b"{", b"}", b""))
    texts = pc.binary_join_element_wise(brace, joined, close, empty)
    return pc.if_else(array.is_valid(), texts, None) if array.null_count else texts


def _elements(array: pa.Array) -> tuple[pa.Array, Lengths]:
    """Return all elements of a column of arrays, and the offset at which each array starts."""
    # `flatten` drops the elements of NULL arrays, so compute the lengths again.
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return plain_array(array.flatten()), offsets_of(lengths)


def _quoted_elements(words: pa.Array) -> pa.Array:
    must = pc.match_substring_regex(words, _MUST_QUOTE)
    if not pc.any(must).as_py():
        return words
    escaped = pc.replace_substring(pc.replace_substring(words, "\\", "\\\\"), '"', '\\"')
    quote, empty = pa.scalar(b'"', _LARGE_BINARY), pa.scalar(b"", _LARGE_BINARY)
    return pc.if_else(must, pc.binary_join_element_wise(quote, escaped, quote, empty), words)


# -- binary ----------------------------------------------------------------------------------------

_BINARY_NUMBERS: Final[dict[pa.DataType, tuple[str, str]]] = {
    pa.int8(): ("i1", ">i2"),
    pa.uint8(): ("u1", ">i2"),
    pa.int16(): ("i2", ">i2"),
    pa.uint16(): ("u2", ">i4"),
    pa.int32(): ("i4", ">i4"),
    pa.uint32(): ("u4", ">i8"),
    pa.int64(): ("i8", ">i8"),
    pa.float32(): ("f4", ">f4"),
    pa.float64(): ("f8", ">f8"),
}
"""Layouts of numbers in memory and on the wire."""


def encode_binary(array: pa.Array) -> EncodedValues:
    """Encode a column in binary format.

    Raises `InvalidUsage` for a date or time that the format cannot represent.
    """
    array = plain_array(array)
    kind = array.type
    valid = valid_mask(array)
    if (layouts := _BINARY_NUMBERS.get(kind)) is not None:
        return FixedValues(fixed_numbers(array, layouts[0]), layouts[1], valid)
    if pa.types.is_boolean(kind):
        return FixedValues(booleans(array), "u1", valid)
    if pa.types.is_decimal(kind):
        return decimal_binary(array)
    if _is_text(kind) or _is_bytes(kind):
        return VariableValues(array.cast(_LARGE_BINARY))
    if pa.types.is_date32(kind):
        days = _since_2000(fixed_numbers(array, "i4"), DAYS_TO_2000, _INT32_MIN)
        return FixedValues(days, ">i4", valid)
    if pa.types.is_timestamp(kind):
        return FixedValues(_since_2000(_times_us(array), US_TO_2000, _INT64_MIN), ">i8", valid)
    if pa.types.is_time(kind):
        return FixedValues(_times_us(array), ">i8", valid)
    if _is_interval(kind):
        return _interval_binary(array)
    if pa.types.is_nested(kind) and pg_type(kind).oid != JSON:
        return VariableValues(_array_binary(array))
    # What is sent as text looks the same in both formats.
    return encode_text(array)


def _since_2000(values: Any, epoch: int, least: int) -> Any:
    # The smallest number means -infinity, so it is not available for values.
    if len(values) and int(values.min()) <= least + epoch:
        raise InvalidUsage(
            "cannot send a date or time before PostgreSQL's range in binary format: "
            "select it as text"
        )
    return values - values.dtype.type(epoch)


def _array_binary(array: pa.Array) -> pa.Array:
    """Encode arrays of scalars.

    An array consists of the number of dimensions (1, or 0 if empty), whether it has NULLs, the
    element type, the length and lower bound of the dimension, and the elements as fields.
    """
    flat, offsets = _elements(array)
    count = len(array)
    joiner = FieldJoiner(len(flat))
    joiner.add_field(encode_binary(flat))
    elements = joiner.finish()
    # Elements of an array are adjacent, so its bytes reach from its first element to its last.
    bodies = byte_array(value_data(elements), value_offsets(elements)[offsets])
    lengths = np.diff(offsets)
    nulls = np.zeros(len(flat) + 1, np.int64)
    absent = valid_mask(flat)
    if absent is not None:
        np.cumsum(~absent, out=nulls[1:])

    header = np.empty((count, 5), ">i4")
    header[:, 0] = lengths > 0
    header[:, 1] = np.diff(nulls[offsets]) > 0
    header[:, 2] = pg_type(flat.type).oid
    header[:, 3] = lengths
    header[:, 4] = 1
    keep = np.ones((count, 20), np.bool_)
    keep[:, 12:] = (lengths > 0)[:, None]
    heads = compress(header.view(np.uint8), keep, None)
    joined = pc.binary_join_element_wise(heads, bodies, pa.scalar(b"", _LARGE_BINARY))
    return pc.if_else(array.is_valid(), joined, None) if array.null_count else joined


# -- intervals -------------------------------------------------------------------------------------

_INTERVAL: Final = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanos", "<i8")])
"""A value of Arrow's `month_day_nano_interval` in memory."""
_WIRE_INTERVAL: Final = np.dtype([("micros", ">i8"), ("days", ">i4"), ("months", ">i4")])
"""A value in PostgreSQL's binary format."""


def _is_interval(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are sent as intervals."""
    return bool(pa.types.is_duration(kind) or pa.types.is_interval(kind))


def _interval_binary(array: pa.Array) -> EncodedValues:
    """Encode intervals in binary format: 8 bytes of microseconds, 4 of days, 4 of months."""
    months, days, micros = _interval_parts(array)
    values = np.empty(len(array), _WIRE_INTERVAL)
    values["micros"], values["days"], values["months"] = micros, days, months
    layout = f"V{_WIRE_INTERVAL.itemsize}"
    return FixedValues(values.view(layout), layout, valid_mask(array))


def _interval_text(array: pa.Array) -> EncodedValues:
    """Format intervals in PostgreSQL's style ``postgres``, such as ``1 day 04:05:06.7``."""
    parts = (part.tolist() for part in _interval_parts(array))
    texts = [_one_interval(*each).encode() for each in zip(*parts, strict=True)]
    made = pa.array(texts, pa.large_binary())
    return VariableValues(pc.if_else(array.is_valid(), made, None) if array.null_count else made)


def _interval_parts(array: pa.Array) -> tuple[Numbers, Numbers, Lengths]:
    """Return the months, days and microseconds of each value; 0 for NULL.

    Day-time intervals are durations in Arrow; year-month intervals are Arrow's months, days and
    nanoseconds.
    """
    if pa.types.is_duration(array.type):
        if array.type.unit != "us":
            array = array.cast(pa.duration("us"), safe=False)
        micros = fixed_numbers(array, "i8")
        # Days are the complete days in all microseconds, as when PostgreSQL subtracts timestamps.
        rest = np.fmod(micros, DAY_US)
        return np.zeros(len(array), np.int32), (micros - rest) // DAY_US, rest
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64)
    values = np.frombuffer(data, _INTERVAL, len(array), array.offset * _INTERVAL.itemsize)
    valid = valid_mask(array)
    if valid is not None:
        values = np.where(valid, values, np.zeros((), _INTERVAL))
    nanos = values["nanos"]
    return values["months"], values["days"], (nanos - np.fmod(nanos, 1000)) // 1000


def _one_interval(months: int, days: int, micros: int) -> str:
    """Format one interval.

    >>> _one_interval(-14, 3, -1_500_000)
    '-1 years -2 mons +3 days -00:00:01.5'
    >>> _one_interval(0, 0, 0), _one_interval(1, 0, 0), _one_interval(-1, 0, 3_600_000_000)
    ('00:00:00', '1 mon', '-1 mons +01:00:00')
    """
    # Like PostgreSQL's EncodeInterval: a part after a negative one shows its sign.
    sign = -1 if months < 0 else 1
    years, months = divmod(abs(months), 12)
    words: list[str] = []
    negative = False
    for value, unit in ((sign * years, "year"), (sign * months, "mon"), (days, "day")):
        if not value:
            continue
        plus = "+" if negative and value > 0 else ""
        words.append(f"{plus}{value} {unit}{'' if value == 1 else 's'}")
        negative = value < 0
    if micros or not words:
        seconds, micros_left = divmod(abs(micros), 1_000_000)
        fraction = f".{micros_left:06d}".rstrip("0") if micros_left else ""
        mark = "-" if micros < 0 else "+" if negative else ""
        hours, seconds = divmod(seconds, 3600)
        words.append(f"{mark}{hours:02d}:{seconds // 60:02d}:{seconds % 60:02d}{fraction}")
    return " ".join(words)


# -- types that PostgreSQL does not have -----------------------------------------------------------


def _foreign_text(array: pa.Array) -> pa.Array:
    """Format nested values as JSON, and others as Spark writes them."""
    nested = pa.types.is_nested(array.type)
    convert = json_form(array.type)
    # Write the digits of a decimal unchanged, because a float would lose some.
    encode = msgspec.json.Encoder(decimal_format="number").encode
    texts: list[bytes | None] = []
    for value in array:
        plain = _python_value(value)
        if plain is None:
            texts.append(None)
        else:
            form = convert(plain)
            texts.append(encode(form) if nested else str(form).encode())
    return pa.array(texts, _LARGE_BINARY)


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:
        # Python's dates end with year 9999. Only nested columns are converted this way.
        raise InvalidUsage(f"cannot write a nested value as JSON: {error}") from None


def json_form(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts the `as_py` values of a type into values that JSON can
    represent.

    Names and forms are those of Spark's ``to_json``, except that NULL fields of a struct are kept.
    """
    if pa.types.is_map(kind):
        key, item = _key_form(kind.key_type), _optional(json_form(kind.item_type))
        return lambda pairs: {key(name): item(value) for name, value in pairs}
    if pa.types.is_struct(kind):
        fields = [(field.name, _optional(json_form(field.type))) for field in kind]
        return lambda row: {name: form(row[name]) for name, form in fields}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        element = _optional(json_form(kind.value_type))
        return lambda values: [element(value) for value in values]
    if _is_bytes(kind):
        return lambda value: base64.b64encode(value).decode()
    if pa.types.is_floating(kind):
        return _float_form
    if pa.types.is_timestamp(kind):
        return lambda value: value.isoformat().replace("+00:00", "Z")
    if pa.types.is_duration(kind):
        return _interval_form
    if pa.types.is_decimal(kind):
        return lambda value: value
    if pa.types.is_temporal(kind) or pa.types.is_interval(kind):
        return str
    return lambda value: value


def _optional(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else form(value)


def _key_form(kind: pa.DataType) -> Callable[[Any], str]:
    form = json_form(kind)
    return lambda value: value if isinstance(value, str) else str(form(value))


def _float_form(value: float) -> float | str:
    # JSON has no such numbers; Spark writes them as strings.
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _interval_form(value: dt.timedelta) -> str:
    """Format an interval as Spark does: ``INTERVAL '1 02:03:04.5' DAY TO SECOND``."""
    micros = round(value / dt.timedelta(microseconds=1))
    sign = "-" if micros < 0 else ""
    seconds, micros = divmod(abs(micros), 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    fraction = f".{micros:06d}".rstrip("0") if micros else ""
    return f"INTERVAL '{sign}{days} {clock}{fraction}' DAY TO SECOND"
