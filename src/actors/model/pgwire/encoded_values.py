"""Values of a column in encoded form: in one buffer with their positions, and joined into rows.

Theory of operation. A column is encoded as a whole. Values of fixed width are an array of numbers
(`FixedValues`), others an Arrow array of bytes (`VariableValues`). `FieldJoiner` interleaves
columns into rows: adjacent parts of fixed width become one array of records, so a row has only as
many pieces as it has columns of variable width, and Arrow joins the pieces of all rows in a single
call. Received values are read in place, all values of a column at a time (`window`, `take_values`).
There is no Python code per value.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers: TypeAlias = npt.NDArray[Any]
Lengths: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = npt.NDArray[np.int64]
"""Positions in a buffer at which values start."""
ByteValues: TypeAlias = npt.NDArray[np.uint8]
RowMask: TypeAlias = npt.NDArray[np.bool_]

_NULL_LENGTH: Final = -1
_EMPTY: Final = pa.scalar(b"", pa.large_binary())
PAIRS: Final = np.array([b"%02d" % number for number in range(100)]).view(np.uint16)
"""The two digits of each number below 100, as they are in memory."""


class FixedValues(msgspec.Struct):
    """Values of fixed width: numbers, and the layout in which they are sent (such as ``>i8``)."""

    values: Numbers
    layout: str
    valid: RowMask | None = None
    """False where the value is NULL; None if no value is."""

    @property
    def width(self) -> int:
        """Return the width of a value in bytes."""
        return np.dtype(self.layout).itemsize


class VariableValues(msgspec.Struct):
    """Values of variable width: an Arrow array of large_binary, with its own NULLs."""

    values: Any


EncodedValues: TypeAlias = FixedValues | VariableValues


def valid_mask(array: pa.Array) -> RowMask | None:
    """Return a mask that is False for NULL; None if there are no NULLs."""
    if not array.null_count:
        return None
    mask: RowMask = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def fixed_numbers(array: pa.Array, layout: str) -> Numbers:
    """Return the numbers of an Arrow array of fixed width; 0 for NULL."""
    data = array.buffers()[1]
    kind = np.dtype(layout)
    if data is None or not len(array):
        return np.zeros(len(array), kind)
    values = np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)
    valid = valid_mask(array)
    # Arrow leaves arbitrary bytes at a NULL, which must not disturb later arithmetic.
    return values if valid is None else np.where(valid, values, kind.type(0))


def booleans(array: pa.Array) -> RowMask:
    """Return the values of an Arrow array of Booleans; False for NULL."""
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), np.bool_)
    first, end = array.offset, array.offset + len(array)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")[first:]
    mask: RowMask = bits.astype(np.bool_)
    valid = valid_mask(array)
    return mask if valid is None else mask & valid


def validity_buffer(valid: RowMask | None) -> pa.Buffer | None:
    """Convert a mask to Arrow's validity bitmap."""
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def byte_array(data: Any, offsets: Lengths, valid: RowMask | None = None) -> pa.Array:
    """Return values that follow each other in a buffer as an Arrow array."""
    # No copy: the buffer keeps the numpy array alive. The offsets have 64 bits, because the texts
    # of a batch can exceed 2 GiB even if its values do not.
    return pa.Array.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [validity_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(data)],
    )


def offsets_of(lengths: Numbers) -> Lengths:
    """Return the offsets at which values of these lengths start, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def value_offsets(array: pa.Array) -> Lengths:
    """Return the offsets of an array of large_binary, one more than it has values."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    return np.frombuffer(buffer, np.int64, len(array) + 1, array.offset * 8)


def value_data(array: pa.Array) -> ByteValues:
    """Return the bytes of all values of an array of large_binary."""
    offsets = value_offsets(array)
    buffer = array.buffers()[2]
    if buffer is None:
        return np.zeros(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)[int(offsets[0]) : int(offsets[-1])]


def value_lengths(array: pa.Array) -> Lengths:
    """Return the length of each value; 0 for NULL."""
    lengths: Lengths = np.diff(value_offsets(array))
    valid = valid_mask(array)
    # A NULL may have bytes, which must not be read.
    return lengths if valid is None else np.where(valid, lengths, 0)


def as_variable(values: EncodedValues) -> pa.Array:
    """Convert encoded values to an array of large_binary."""
    if isinstance(values, VariableValues):
        return values.values
    width, valid = values.width, values.valid
    # A NULL takes no bytes here, although it has a place among the numbers.
    kept = values.values if valid is None else values.values[valid]
    packed = np.ascontiguousarray(kept.astype(values.layout, copy=False))
    lengths = np.full(len(values.values), width) if valid is None else valid * width
    return byte_array(packed.view(np.uint8).reshape(-1), offsets_of(lengths), valid)


def compress(block: ByteValues, keep: RowMask, valid: RowMask | None) -> pa.Array:
    """Return one value per row of `block`, with its bytes where `keep` is true."""
    # Selecting by a mask goes row by row, so the bytes of a value stay together.
    lengths = np.count_nonzero(keep, axis=1)
    return byte_array(block[keep], offsets_of(lengths), valid)


# -- values in a buffer --------------------------------------------------------------------------

PAD_BYTES: Final = 16
"""Padding after the data, so that wide reads at its end stay within the buffer."""


def window(data: ByteValues, layout: str) -> Any:
    """Return a view of the numbers that start at each byte."""
    width = np.dtype(layout).itemsize
    return np.ndarray((len(data) - width + 1,), layout, data, strides=(1,))


def be32(data: ByteValues, places: Places) -> Places:
    """Return the signed 4-byte numbers at these positions."""
    numbers: Places = window(data, ">i4")[places].astype(np.int64)
    return numbers


def be16(data: ByteValues, places: Places) -> Places:
    """Return the signed 2-byte numbers at these positions."""
    numbers: Places = window(data, ">i2")[places].astype(np.int64)
    return numbers


def be64(data: ByteValues, places: Places) -> Places:
    """Return the signed 8-byte numbers at these positions."""
    numbers: Places = window(data, ">i8")[places].astype(np.int64)
    return numbers


def take_values(
    data: ByteValues, starts: Places, lengths: Lengths, mask: RowMask | None
) -> pa.Array:
    """Return the values at these positions (ascending) as large_binary; NULL where `mask` is
    true."""
    count = len(starts)
    if not count:
        return pa.array([], pa.large_binary())
    # A single array over the buffer: its even elements are the values, its odd ones the gaps.
    offsets = np.empty(2 * count, np.int64)
    offsets[0::2] = starts
    offsets[1::2] = starts + lengths
    whole = pa.Array.from_buffers(
        pa.large_binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return whole.take(pa.array(np.arange(0, 2 * count, 2), mask=mask))


# -- texts and rows --------------------------------------------------------------------------------


class TextBlock:
    """Texts of a column, built character by character for all rows at a time.

    A part can be left out of some rows: `keep` is the mask of the rows that have it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[tuple[str, Any, RowMask | None]] = []
        """Parts added so far, each with the mask of its rows."""

    def put(self, text: bytes, keep: RowMask | None = None) -> None:
        """Append the same text to every row."""
        self._parts += [("u1", character, keep) for character in text]

    def put_characters(self, characters: Numbers, keep: RowMask | None = None) -> None:
        """Append one character to every row, given by its code."""
        self._parts.append(("u1", characters, keep))

    def put_pair(self, numbers: Numbers, keep: RowMask | None = None) -> None:
        """Append two digits to every row."""
        self._parts.append(("u2", PAIRS[numbers], keep))

    def finish(self, valid: RowMask | None) -> EncodedValues:
        """Return the texts; `valid` is false for NULL."""
        layout = np.dtype([(f"f{at}", part[0]) for at, part in enumerate(self._parts)])
        records = np.empty(self._count, layout)
        lengths = np.zeros(self._count, np.int64)
        for name, (kind, values, keep) in zip(layout.names or (), self._parts, strict=True):
            records[name] = values
            lengths += np.dtype(kind).itemsize * (1 if keep is None else keep)
        # In most columns all rows have all parts, so nothing must be selected.
        if all(keep is None for _, _, keep in self._parts):
            return FixedValues(records.view(f"V{layout.itemsize}"), f"V{layout.itemsize}", valid)
        block = records.view(np.uint8).reshape(self._count, layout.itemsize)
        kept = np.ones(block.shape, np.bool_)
        at = 0
        for kind, _, keep in self._parts:
            for _ in range(np.dtype(kind).itemsize):
                if keep is not None:
                    kept[:, at] = keep
                at += 1
        return VariableValues(byte_array(block[kept], offsets_of(lengths), valid))


class FieldJoiner:
    """Joins parts into rows, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._run: list[tuple[str, Any]] = []
        """Parts of fixed width since the last part of variable width."""
        self._pieces: list[pa.Array | pa.Scalar] = []
        """Pieces of all rows so far, in order."""

    def add_numbers(self, values: Any, layout: str) -> None:
        """Append a number to every row: the same one, or one from an array."""
        self._run.append((layout, values))

    def add_bytes(self, text: bytes) -> None:
        """Append the same bytes to every row."""
        # Within a run of fixed width a constant costs a store; as a separate piece it would cost a
        # join.
        self._run += [("u1", byte) for byte in text]

    def add_values(self, array: pa.Array) -> None:
        """Append the bytes of each value; none for NULL."""
        self._flush()
        self._pieces.append(array)

    def add_field(self, values: EncodedValues) -> None:
        """Append a field as in DataRow and binary COPY: its length (-1 for NULL) and its bytes."""
        if isinstance(values, FixedValues) and values.valid is None:
            self.add_numbers(values.width, ">i4")
            self.add_numbers(values.values, values.layout)
            return
        array = as_variable(values)
        lengths = value_lengths(array)
        valid = valid_mask(array)
        self.add_numbers(
            lengths if valid is None else np.where(valid, lengths, _NULL_LENGTH), ">i4"
        )
        self.add_values(array)

    def finish(self) -> pa.Array:
        """Return the rows as an array of large_binary without NULLs."""
        self._flush()
        # If all parts have fixed width, the records are the rows and nothing must be joined.
        if len(self._pieces) == 1 and not self._pieces[0].null_count:
            return self._pieces[0]
        return pc.binary_join_element_wise(
            *self._pieces, _EMPTY, null_handling="replace", null_replacement=b""
        )

    def _flush(self) -> None:
        if not self._run:
            return
        layout = np.dtype([(f"f{at}", kind) for at, (kind, _) in enumerate(self._run)])
        records = np.empty(self._count, layout)
        # The assignment also swaps the bytes, because layouts are big-endian.
        for name, (_, values) in zip(layout.names or (), self._run, strict=True):
            records[name] = values
        self._run = []
        offsets = np.arange(self._count + 1, dtype=np.int64) * layout.itemsize
        self._pieces.append(byte_array(records.view(np.uint8).reshape(-1), offsets))


def field_lengths(values: EncodedValues) -> Any:
    """Return the length in bytes of each value; a single number if all have the same."""
    if isinstance(values, VariableValues):
        return value_lengths(values.values)
    return values.width if values.valid is None else values.valid * values.width
