"""Converts key values of one type so that they can be looked up in a column of another type.

Spark widens both sides of ``=`` to a common type. If equality after that widening is equality of
exact values, the given values are converted to the held type here, and those that no held value can
equal are dropped. If the widening rounds (bigint = double), parses text (string = int), needs a
time zone (date = timestamp) or overflows (decimals beyond 38 digits), many held values may equal
one given value. Then `conform` returns None, and the caller must not narrow by this column.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

_INTEGER_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 20}
"""Digits of the decimal to which Spark widens an integer with this many bits."""
_DECIMAL_DIGITS_MAX: Final = 38
_EXACT: Final = decimal.Context(prec=80)


def conform(
    values: pa.ChunkedArray, held: pa.DataType
) -> tuple[pa.ChunkedArray, list[bool]] | None:
    """Return values that hash like equal values of type `held`, and a mask of those that can match
    at all.

    Return None if matches cannot be found by hash. An empty mask keeps every row.
    """
    given = values.type
    if given.equals(held) or pa.types.is_null(given):
        return values, []
    for alike in (pa.types.is_integer, pa.types.is_floating):
        if alike(given) and alike(held):
            return values, []
    for alike in (_is_text, _is_bytes, pa.types.is_date, _is_instant, _is_local):
        if alike(given) and alike(held):
            return values.cast(held, safe=False), []
    if (pa.types.is_decimal(given) or pa.types.is_decimal(held)) and _widens(given, held):
        return _rescale(values, held)
    return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _is_local(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def _digits(kind: pa.DataType) -> tuple[int, int] | None:
    """Return the number of digits before and after the decimal point; None for other types."""
    if pa.types.is_decimal(kind):
        return kind.precision - kind.scale, kind.scale
    if pa.types.is_integer(kind):
        return _INTEGER_DIGITS[kind.bit_width], 0
    return None


def _widens(given: pa.DataType, held: pa.DataType) -> bool:
    one, other = _digits(given), _digits(held)
    if one is None or other is None:
        return False
    # Beyond 38 digits Spark's common type overflows, so there is no exact equality.
    return max(one[0], other[0]) + max(one[1], other[1]) <= _DECIMAL_DIGITS_MAX


def _rescale(values: pa.ChunkedArray, held: pa.DataType) -> tuple[pa.ChunkedArray, list[bool]]:
    scale = held.scale if pa.types.is_decimal(held) else 0
    limit = 10**held.precision if pa.types.is_decimal(held) else 1 << (held.bit_width - 1)
    make: Callable[[int], Any] = (
        (lambda unscaled: decimal.Decimal(unscaled).scaleb(-scale, _EXACT))
        if pa.types.is_decimal(held)
        else int
    )
    kept: list[bool] = []
    fitting: list[Any] = []
    for value in values.to_pylist():
        if value is None:
            kept.append(True)
            fitting.append(None)
            continue
        # Exact, because a rounded key would match a row that it does not equal.
        shifted = decimal.Decimal(value).scaleb(scale, _EXACT)
        unscaled = int(shifted)
        fits = shifted == unscaled and -limit <= unscaled < limit
        # A decimal's range is symmetric, an integer's is not.
        fits = fits and (unscaled != -limit or not pa.types.is_decimal(held))
        kept.append(fits)
        fitting.append(make(unscaled) if fits else None)
    return pa.chunked_array([pa.array(fitting, held)]), kept
