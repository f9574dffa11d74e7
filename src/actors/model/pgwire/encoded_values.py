"""Values of a column as they come and go: in one buffer, with their places, and joined to rows.

Theory of operation. A column is encoded whole. Values of one width are an array of numbers
(`FixedValues`), others an Arrow array of bytes (`VariableValues`). `FieldJoiner` interleaves
columns to rows: neighbouring parts of fixed width become one array of records, so that a row has as
many pieces as it has columns of varying width, and Arrow joins the pieces of all rows in one call.
What came is read where it lies, all values of a column at once (`window`, `take_values`). No value
costs any Python of its own.
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
"""Indexes in a buffer at which values begin."""
ByteValues: TypeAlias = npt.NDArray[np.uint8]
RowMask: TypeAlias = npt.NDArray[np.bool_]

_NULL_LENGTH: Final = -1
_EMPTY: Final = pa.scalar(b"", pa.large_binary())
PAIRS: Final = np.array([b"%02d" % number for number in range(100)]).view(np.uint16)
"""The two digits of each number below 100, as they stand in memory."""


class FixedValues(msgspec.Struct):
    """Values of one width: numbers, and the layout in which they are sent (``>i8``)."""

    values: Numbers
    layout: str
    valid: RowMask | None = None
    """False where the value is NULL; None: no value is."""

    @property
    def width(self) -> int:
        """Return the bytes of a value."""
        return np.dtype(self.layout).itemsize


class VariableValues(msgspec.Struct):
    """Values of any length: an Arrow array of large_binary, with its own NULLs."""

    values: Any


EncodedValues: TypeAlias = FixedValues | VariableValues


def valid_mask(array: pa.Array) -> RowMask | None:
    """Return which values are no NULLs; None: all."""
    if not array.null_count:
        return None
    mask: RowMask = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def fixed_numbers(array: pa.Array, layout: str) -> Numbers:
    """Return the numbers of an Arrow array of fixed width; 0 where the value is NULL."""
    data = array.buffers()[1]
    kind = np.dtype(layout)
    if data is None or not len(array):
        return np.zeros(len(array), kind)
    values = np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)
    valid = valid_mask(array)
    # Arrow leaves any bytes at a NULL; the arithmetic to come must not trip over them.
    return values if valid is None else np.where(valid, values, kind.type(0))


def booleans(array: pa.Array) -> RowMask:
    """Return the values of an Arrow array of booleans; False where the value is NULL."""
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), np.bool_)
    first, end = array.offset, array.offset + len(array)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")[first:]
    mask: RowMask = bits.astype(np.bool_)
    valid = valid_mask(array)
    return mask if valid is None else mask & valid


def validity_buffer(valid: RowMask | None) -> pa.Buffer | None:
    """Return a mask as Arrow keeps it."""
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def byte_array(data: Any, offsets: Lengths, valid: RowMask | None = None) -> pa.Array:
    """Return values that lie in a buffer, one after the other, as an Arrow array."""
    # No copy: the buffer keeps the numpy array alive. Offsets of 64 bits, as the texts of a batch
    # can exceed 2 GiB where its values do not.
    return pa.Array.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [validity_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(data)],
    )


def offsets_of(lengths: Numbers) -> Lengths:
    """Return where values of these lengths begin, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def value_offsets(array: pa.Array) -> Lengths:
    """Return the offsets of an array of large_binary, one more than values."""
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
    """Return the length of each value; 0 where it is NULL."""
    lengths: Lengths = np.diff(value_offsets(array))
    valid = valid_mask(array)
    # A NULL may have bytes, which no reader may see.
    return lengths if valid is None else np.where(valid, lengths, 0)


def as_variable(values: EncodedValues) -> pa.Array:
    """Return encoded values as an array of large_binary."""
    if isinstance(values, VariableValues):
        return values.values
    width, valid = values.width, values.valid
    # A NULL takes no bytes here, though it has a place among the numbers.
    kept = values.values if valid is None else values.values[valid]
    packed = np.ascontiguousarray(kept.astype(values.layout, copy=False))
    lengths = np.full(len(values.values), width) if valid is None else valid * width
    return byte_array(packed.view(np.uint8).reshape(-1), offsets_of(lengths), valid)


def compress(block: ByteValues, keep: RowMask, valid: RowMask | None) -> pa.Array:
    """Return one value a row of `block`: its bytes where `keep` is true."""
    # A selection by a mask goes row by row, so that each value's bytes stay together.
    lengths = np.count_nonzero(keep, axis=1)
    return byte_array(block[keep], offsets_of(lengths), valid)


# -- values in a buffer --------------------------------------------------------------------------

PAD_BYTES: Final = 16
"""Bytes after the data, so that wide reads at its end stay within the buffer."""


def window(data: ByteValues, layout: str) -> Any:
    """Return a view of the numbers that begin at each byte."""
    width = np.dtype(layout).itemsize
    return np.ndarray((len(data) - width + 1,), layout, data, strides=(1,))


def be32(data: ByteValues, places: Places) -> Places:
    """Return the signed numbers of four bytes that begin at these places."""
    numbers: Places = window(data, ">i4")[places].astype(np.int64)
    return numbers


def be16(data: ByteValues, places: Places) -> Places:
    """Return the signed numbers of two bytes that begin at these places."""
    numbers: Places = window(data, ">i2")[places].astype(np.int64)
    return numbers


def be64(data: ByteValues, places: Places) -> Places:
    """Return the signed numbers of eight bytes that begin at these places."""
    numbers: Places = window(data, ">i8")[places].astype(np.int64)
    return numbers


def take_values(
    data: ByteValues, starts: Places, lengths: Lengths, mask: RowMask | None
) -> pa.Array:
    """Return the values at these places (ascending) as large_binary; NULL where `mask` is true."""
    count = len(starts)
    if not count:
        return pa.array([], pa.large_binary())
    # One array over the buffer: its even elements are the values, its odd ones the gaps.
    offsets = np.empty(2 * count, np.int64)
    offsets[0::2] = starts
    offsets[1::2] = starts + lengths
    whole = pa.Array.from_buffers(
        pa.large_binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return whole.take(pa.array(np.arange(0, 2 * count, 2), mask=mask))


# -- texts and rows --------------------------------------------------------------------------------


class TextBlock:
    """Texts of a column, built character by character for all rows at once.

    A part can be left out row by row: `keep` is the mask of the rows that have it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[tuple[str, Any, RowMask | None]] = []

    def put(self, text: bytes, keep: RowMask | None = None) -> None:
        """Add the same text to each row."""
        self._parts += [("u1", character, keep) for character in text]

    def put_characters(self, characters: Numbers, keep: RowMask | None = None) -> None:
        """Add one character to each row, given by its code."""
        self._parts.append(("u1", characters, keep))

    def put_pair(self, numbers: Numbers, keep: RowMask | None = None) -> None:
        """Add two digits to each row."""
        self._parts.append(("u2", PAIRS[numbers], keep))

    def finish(self, valid: RowMask | None) -> EncodedValues:
        """Return the texts; `valid` is false where the value is NULL."""
        layout = np.dtype([(f"f{at}", part[0]) for at, part in enumerate(self._parts)])
        records = np.empty(self._count, layout)
        lengths = np.zeros(self._count, np.int64)
        for name, (kind, values, keep) in zip(layout.names or (), self._parts, strict=True):
            records[name] = values
            lengths += np.dtype(kind).itemsize * (1 if keep is None else keep)
        # Most columns have all parts in every row: then nothing has to be selected.
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
    """Joins parts to rows, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._run: list[tuple[str, Any]] = []
        """Parts of fixed width since the last one of varying width."""
        self._pieces: list[pa.Array | pa.Scalar] = []

    def add_numbers(self, values: Any, layout: str) -> None:
        """Add a number to each row: one for all, or an array."""
        self._run.append((layout, values))

    def add_bytes(self, text: bytes) -> None:
        """Add the same bytes to each row."""
        # A constant within a run costs a store; as a piece of its own it would cost a join.
        self._run += [("u1", byte) for byte in text]

    def add_values(self, array: pa.Array) -> None:
        """Add the bytes of each value; none where it is NULL."""
        self._flush()
        self._pieces.append(array)

    def add_field(self, values: EncodedValues) -> None:
        """Add a field as DataRow and binary COPY have it: its length, or -1 for NULL, and its
        bytes."""
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
        """Return the rows, as an array of large_binary without NULLs."""
        self._flush()
        # Rows of fixed width alone are the records: there is nothing to join.
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
        # The assignment swaps the bytes, too: layouts are big-endian.
        for name, (_, values) in zip(layout.names or (), self._run, strict=True):
            records[name] = values
        self._run = []
        offsets = np.arange(self._count + 1, dtype=np.int64) * layout.itemsize
        self._pieces.append(byte_array(records.view(np.uint8).reshape(-1), offsets))


def field_lengths(values: EncodedValues) -> Any:
    """Return the bytes that each value takes, without its length; one number if all are alike."""
    if isinstance(values, VariableValues):
        return value_lengths(values.values)
    return values.width if values.valid is None else values.valid * values.width
