"""Random numbers with random access: computes the n-th draw of a stream without the earlier ones.

A sequential random generator can only be resumed by drawing all earlier numbers again. Here a draw
is a hash (SplitMix64's finalizer) of the seed, the stream's name and the draw's number. It is the
same on every machine and with every version of numpy. Not for cryptography.
"""

from __future__ import annotations

import zlib
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers: TypeAlias = npt.NDArray[np.int64]
_Bits: TypeAlias = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz"
TEXT: Final = b"abcdefghijklm nopqrstuvwxyz "


def _mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


class DrawStream:
    """One stream of draws, for example the values of one column."""

    def __init__(self, seed: int, stream: str) -> None:
        self._key = np.uint64(_mixed((seed & _MASK) ^ _mixed(zlib.crc32(stream.encode()) + 1)))

    def bits(self, numbers: Numbers) -> _Bits:
        """Return 64 random bits for each draw number."""
        made: _Bits = numbers.astype(np.uint64)
        made *= np.uint64(_STEP)
        made += self._key
        made ^= made >> np.uint64(30)
        made *= np.uint64(_FIRST)
        made ^= made >> np.uint64(27)
        made *= np.uint64(_SECOND)
        made ^= made >> np.uint64(31)
        return made

    def below(self, numbers: Numbers, bound: int | Numbers) -> Numbers:
        """Return integers from 0 to ``bound - 1``. `bound` is at most 2**32, and may be an array
        with one bound per draw."""
        # 32 bits times a bound of at most 2**32 stay within 64 bits, so no division is needed.
        limit = np.asarray(bound, np.uint64)
        made = ((self.bits(numbers) >> np.uint64(32)) * limit) >> np.uint64(32)
        return made.astype(np.int64)

    def unit(self, numbers: Numbers) -> npt.NDArray[np.float64]:
        """Return floats from 0 (inclusive) to 1 (exclusive)."""
        # The mantissa of a float has 53 bits.
        return (self.bits(numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def texts(
        self, numbers: Numbers, length_min: int, length_max: int, letters: bytes = LETTERS
    ) -> pa.Array:
        """Return texts of random letters with lengths from `length_min` to `length_max`."""
        if not len(numbers):
            return pa.array([], pa.string())
        lengths = length_min + self.below(numbers, length_max - length_min + 1)
        ends = np.cumsum(lengths)
        firsts = np.repeat(ends - lengths, lengths)
        places = np.arange(ends[-1], dtype=np.int64) - firsts
        # Letters are draws of their own, numbered by the text and the position in it.
        of = np.repeat(numbers * length_max, lengths) + places
        chosen = DrawStream(int(self._key), "letters").below(of, len(letters))
        data = np.frombuffer(letters, np.uint8)[chosen]
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.string(), len(numbers), buffers)


def numbered(start: int, stop: int) -> Numbers:
    """Return the integers from `start` to ``stop - 1``."""
    return np.arange(start, stop, dtype=np.int64)


def decimals(cents: Numbers, kind: pa.DataType) -> pa.Array:
    """Return decimals of up to 18 digits from their unscaled values."""
    words = np.empty((len(cents), 2), np.int64)
    words[:, 0] = cents
    # Arrow's decimals have 128 bits; the upper 64 repeat the sign.
    words[:, 1] = cents >> 63
    return pa.Array.from_buffers(kind, len(cents), [None, pa.py_buffer(words)])


def padded(numbers: Numbers, digits: int) -> pa.Array:
    """Return the numbers as text with leading zeros."""
    return pa.compute.utf8_lpad(pa.array(numbers).cast(pa.string()), digits, "0")


def joined(*parts: pa.Array | str) -> pa.Array:
    """Return the texts concatenated row by row."""
    return pa.compute.binary_join_element_wise(*parts, "")
