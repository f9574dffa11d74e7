"""Converts whole columns of decimals to text and to PostgreSQL's binary format, and back.

A decimal in Arrow is a number of 128 bits. Long division splits a column into a matrix of decimal
digits, with one row per value, from which both formats are made. The binary format consists of the
number of digits, the weight of the first digit, the sign and the display scale (int16 each),
followed by digits of base 10,000, aligned to the decimal point, without zeros at either end.

Source: PostgreSQL's numeric.c (`numeric_send`, `numeric_recv`).
"""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.pgwire.encoded_values import (
    ByteValues,
    Lengths,
    Places,
    RowMask,
    VariableValues,
    be16,
    byte_array,
    compress,
    valid_mask,
    validity_buffer,
)
from actors.model.pgwire.type_map import DECIMAL_DIGITS_MAX

POSITIVE, NEGATIVE, NAN, INFINITY, MINUS_INFINITY = 0x0000, 0x4000, 0xC000, 0xD000, 0xF000
_LIMB: Final = 1_000_000_000
_LIMB_DIGITS: Final = 9
_WORD_DIGITS_MAX: Final = 18
"""Number of digits that always fit into 64 bits."""
_LOW_32: Final = np.uint64(0xFFFF_FFFF)
_TRIPLES: Final = np.array(
    [[number // 100, number // 10 % 10, number % 10] for number in range(1000)], np.uint8
)
_GROUP: Final = 4
"""Number of decimal digits in one digit of base 10,000."""
_GROUPS_MAX: Final = 256
_FEW_GROUPS_MAX: Final = 64
_WORD_LIMIT: Final = 1e18
_HEADER: Final = struct.Struct("!hhHh")


def _words(array: pa.Array) -> tuple[RowMask, Any, Any]:
    """Return (negative, high half, low half) of the absolute values; 0 for NULL."""
    data = array.buffers()[1]
    count = len(array)
    if data is None or not count:
        zeros = np.zeros(count, np.uint64)
        return np.zeros(count, np.bool_), zeros, zeros
    words = np.frombuffer(data, np.uint64, 2 * count, array.offset * 16).reshape(count, 2)
    low, high = words[:, 0], words[:, 1]
    valid = valid_mask(array)
    if valid is not None:
        low, high = np.where(valid, low, np.uint64(0)), np.where(valid, high, np.uint64(0))
    negative: RowMask = (high >> np.uint64(63)) != 0
    if negative.any():
        # In the complement of 128 bits, a carry comes only from a low half of 0.
        flipped = ~low + np.uint64(1)
        carry = (flipped == 0).astype(np.uint64)
        low = np.where(negative, flipped, low)
        high = np.where(negative, ~high + carry, high)
    return negative, high, low


def _limbs(high: Any, low: Any, digits: int) -> list[Any]:
    """Return the digits of the values in base 10^9, least significant first."""
    found = []
    if digits <= _WORD_DIGITS_MAX:
        for _ in range(0, digits, _LIMB_DIGITS):
            low, limb = np.divmod(low, np.uint64(_LIMB))
            found.append(limb)
        return found
    shift = np.uint64(32)
    parts = [high >> shift, high & _LOW_32, low >> shift, low & _LOW_32]
    for _ in range(0, digits, _LIMB_DIGITS):
        rest = np.zeros(len(low), np.uint64)
        # Schoolbook division. The remainder is below 2^30, so no step exceeds 62 bits.
        for at, part in enumerate(parts):
            parts[at], rest = np.divmod((rest << shift) | part, np.uint64(_LIMB))
        found.append(rest)
    return found


def digit_matrix(array: pa.Array) -> tuple[RowMask, ByteValues]:
    """Return (negative, digits) of a column of decimals.

    Every value has at least one digit before the point, and as many digits after it as the type's
    scale.
    """
    kind = array.type
    if kind.bit_width != 128:
        array = array.cast(pa.decimal128(kind.precision, kind.scale))
    wanted = max(kind.precision, kind.scale + 1)
    negative, high, low = _words(array)
    limbs = _limbs(high, low, wanted)
    block = np.empty((len(array), _LIMB_DIGITS * len(limbs)), np.uint8)
    for at, limb in enumerate(reversed(limbs)):
        start = at * _LIMB_DIGITS
        thousands, ones = np.divmod(limb.astype(np.int64), 1000)
        block[:, start : start + 3] = _TRIPLES[thousands // 1000]
        block[:, start + 3 : start + 6] = _TRIPLES[thousands % 1000]
        block[:, start + 6 : start + 9] = _TRIPLES[ones]
    return negative, block[:, block.shape[1] - wanted :]


def decimal_text(array: pa.Array) -> VariableValues:
    """Format a column of decimals as text, with all digits of its scale, such as ``-0.50``."""
    scale = array.type.scale
    negative, digits = digit_matrix(array)
    count, wanted = digits.shape
    whole = wanted - scale
    point = 1 if scale else 0
    block = np.empty((count, 1 + wanted + point), np.uint8)
    block[:, 0] = ord("-")
    block[:, 1 : 1 + whole] = digits[:, :whole] + 48
    if scale:
        block[:, 1 + whole] = ord(".")
        block[:, 2 + whole :] = digits[:, whole:] + 48
    keep = np.ones(block.shape, np.bool_)
    keep[:, 0] = negative
    # Leave out leading zeros, except the one before the point.
    keep[:, 1:whole] = np.logical_or.accumulate(digits[:, : whole - 1] != 0, axis=1)
    return VariableValues(compress(block, keep, valid_mask(array)))


def decimal_binary(array: pa.Array) -> VariableValues:
    """Encode a column of decimals in binary format."""
    scale = array.type.scale
    negative, digits = digit_matrix(array)
    count, wanted = digits.shape
    front, back = -(wanted - scale) % _GROUP, -scale % _GROUP
    padded = np.pad(digits, ((0, 0), (front, back)))
    groups = padded.reshape(count, padded.shape[1] // _GROUP, _GROUP) @ np.array(
        [1000, 100, 10, 1], np.int16
    )
    size = groups.shape[1]
    some = groups != 0
    any_digit = some.any(axis=1)
    first = np.where(any_digit, some.argmax(axis=1), 0)
    last = np.where(any_digit, size - 1 - some[:, ::-1].argmax(axis=1), -1)
    before_point = (wanted - scale + front) // _GROUP

    block = np.empty((count, 4 + size), ">i2")
    block[:, 0] = last - first + 1
    block[:, 1] = np.where(any_digit, before_point - 1 - first, 0)
    block[:, 2] = np.where(negative, NEGATIVE, POSITIVE)
    block[:, 3] = scale
    block[:, 4:] = groups
    places = np.arange(size)
    keep = np.ones(block.shape, np.bool_)
    keep[:, 4:] = (places >= first[:, None]) & (places <= last[:, None])
    lengths = 2 * np.count_nonzero(keep, axis=1)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = block[keep].view(np.uint8)
    return VariableValues(byte_array(data, offsets, valid_mask(array)))


# -- from text and binary --------------------------------------------------------------------------


def cast_decimals(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast texts of numbers to decimals, exactly.

    Raises `pa.ArrowInvalid` for a text that is not a number, does not fit or would be rounded, and
    also for one with an exponent or more than 38 characters.

    >>> cast_decimals(pa.array(["1.50", None]), pa.decimal128(9, 3)).to_pylist()
    [Decimal('1.500'), None]
    """
    # Arrow silently truncates numbers of more than 128 bits, and those with a large exponent.
    long = pc.greater(pc.utf8_length(texts), DECIMAL_DIGITS_MAX)
    sizes = pc.abs(texts.cast(pa.float64()))
    beyond = pc.invert(pc.less(sizes, 10.0 ** (kind.precision - kind.scale)))
    exponents = pc.match_substring_regex(texts, "[eE]")
    if pc.any(pc.or_(pc.or_(long, beyond), exponents)).as_py():
        raise pa.ArrowInvalid(f"decimal({kind.precision},{kind.scale}) may not be exact")
    return texts.cast(kind)


def parse_binary_decimal(data: bytes) -> Decimal:
    """Parse a number in binary format exactly, including NaN and infinities.

    Raises `ValueError` if it is malformed or has more than about a thousand digits.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes")
    count, weight, sign, scale = _HEADER.unpack_from(data)
    if sign in (NAN, INFINITY, MINUS_INFINITY):
        return Decimal({NAN: "NaN", INFINITY: "Infinity"}.get(sign, "-Infinity"))
    if count < 0 or len(data) != _HEADER.size + 2 * count or sign not in (POSITIVE, NEGATIVE):
        raise ValueError(f"{count} digits in {len(data)} bytes, sign {sign:#06x}")
    groups = struct.unpack_from(f"!{count}h", data, _HEADER.size)
    if any(not 0 <= group < 10_000 for group in groups):
        raise ValueError("a digit is out of range")
    # A few bytes can stand for a number of 100,000 digits, which no type here can hold.
    if max(count, abs(weight)) > _GROUPS_MAX or not 0 <= scale <= _GROUP * _GROUPS_MAX:
        raise ValueError(f"{count} digits of weight {weight} and scale {scale} are too many")
    number = int("".join(f"{group:04d}" for group in groups) or "0")
    shift = _GROUP * (weight + 1 - count) + scale
    # Cut digits beyond the scale, as PostgreSQL does.
    number = number * 10**shift if shift >= 0 else number // 10**-shift
    return Decimal(f"{'-' if sign == NEGATIVE else ''}{number}E-{scale}")


def decimal_array(numbers: Lengths, precision: int, scale: int, valid: RowMask | None) -> pa.Array:
    """Return decimals for 64-bit numbers that count units of the last digit."""
    words = np.empty((len(numbers), 2), np.int64)
    words[:, 0] = numbers
    words[:, 1] = numbers >> 63
    return pa.Array.from_buffers(
        pa.decimal128(precision, scale),
        len(numbers),
        [validity_buffer(valid), pa.py_buffer(words)],
    )


def parse_binary_decimals(
    data: ByteValues, starts: Places, lengths: Lengths, null: RowMask, kind: pa.DataType
) -> pa.Array | None:
    """Parse decimals in binary format, all at a time.

    Returns None if a value needs individual parsing: it is long, must be rounded, or is not a
    finite number of the type.
    """
    if kind.precision > _WORD_DIGITS_MAX or (lengths[~null] < 8).any():
        return None
    at = np.where(null, 0, starts)
    count, weight, sign = (np.where(null, 0, be16(data, at + place)) for place in (0, 2, 4))
    most = int(count.max(initial=0))
    fits = (lengths == 8 + 2 * count) | null
    if not fits.all() or most > _FEW_GROUPS_MAX or ((sign & ~NEGATIVE) != 0).any():
        return None
    total = np.zeros(len(starts), np.int64)
    for place in range(most):
        some = place < count
        group = np.where(some, be16(data, np.where(some, at + 8 + 2 * place, 0)), 0)
        power = 4 * (weight - place) + kind.scale
        # Digits below the scale would have to be rounded. The sum of terms below 10^18 fits.
        beyond = (power < 0) | (group * 10.0 ** np.minimum(power, 99) >= _WORD_LIMIT)
        if ((group < 0) | (group > 9999) | ((group != 0) & beyond)).any():
            return None
        total += group * 10 ** np.clip(power, 0, _WORD_DIGITS_MAX)
    if (total >= 10**kind.precision).any():
        return None
    signed = np.where(sign == NEGATIVE, -total, total)
    return decimal_array(signed, kind.precision, kind.scale, ~null if null.any() else None)
