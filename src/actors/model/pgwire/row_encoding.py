"""Encodes Arrow batches as DataRow messages, and as the CopyData messages of a COPY.

A batch is encoded as a whole: all its rows are in one buffer, one message per row, with the
positions where they end. So the caller should cut a large result into batches of a size that may
stay in memory for a slow reader. A few rows of plain types are encoded value by value into the same
bytes, because Arrow kernels do not pay for so few.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.pgwire.copy_options import BINARY_HEADER, BINARY_TRAILER, CopyFormat, RowFormat
from actors.model.pgwire.encoded_values import (
    EncodedValues,
    FieldJoiner,
    Lengths,
    as_variable,
    field_lengths,
    value_data,
    value_lengths,
    value_offsets,
)
from actors.model.pgwire.messages import BINARY_FORMAT, encode_copy_data
from actors.model.pgwire.value_encoding import encode_binary, encode_text
from actors.runtime.errors import InvalidUsage

ROW_BYTES_MAX: Final = 2**30 - 1
"""Maximum size of a row in bytes, which is PostgreSQL's limit."""
_LARGE_BINARY: Final = pa.large_binary()
_TEXT_ESCAPES: Final = {
    b"\\": b"\\\\",
    b"\b": b"\\b",
    b"\f": b"\\f",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
    b"\v": b"\\v",
}
"""Escapes of COPY's text format. The backslash comes first, because the others contain it."""


_PLAIN: Final = frozenset(b"0123456789+-.: eftnIiyNaBC")
"""Characters that occur in numbers, Booleans, dates and times as text."""


class EncodedRows(msgspec.Struct):
    """The messages of consecutive rows. Row i is ``data[offsets[i]:offsets[i + 1]]``."""

    data: memoryview
    offsets: Lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self, start: int, stop: int) -> memoryview:
        """Return the messages of rows `start` to `stop`."""
        return self.data[int(self.offsets[start]) : int(self.offsets[stop])]

    def pieces(self, bytes_max: int) -> Iterator[memoryview]:
        """Yield all messages in pieces of complete rows, each of at most `bytes_max` bytes unless a
        single row is larger."""
        start, count = 0, len(self)
        while start < count:
            limit = int(self.offsets[start]) + bytes_max
            stop = int(np.searchsorted(self.offsets, limit, side="right")) - 1
            # A row that is larger than a piece is sent alone.
            stop = max(stop, start + 1)
            yield self.rows(start, stop)
            start = stop


def _encoded(rows: pa.Array) -> EncodedRows:
    return EncodedRows(value_data(rows).data, value_offsets(rows))


def _message_lengths(sizes: Any, count: int) -> Any:
    """Return the length field of each message, given the sizes of the bodies.

    Raises `InvalidUsage` if a row is too large.
    """
    lengths = np.broadcast_to(np.asarray(sizes), (count,)) + 4
    if count and int(lengths.max()) > ROW_BYTES_MAX:
        raise InvalidUsage(f"row too large: {int(lengths.max())} bytes (limit {ROW_BYTES_MAX})")
    return lengths


def _join_fields(kind: bytes, columns: Sequence[EncodedValues], count: int) -> pa.Array:
    """Build messages from the number of fields and the fields."""
    sizes: Any = 2 + 4 * len(columns)
    for values in columns:
        sizes = sizes + field_lengths(values)
    joiner = FieldJoiner(count)
    joiner.add_bytes(kind)
    joiner.add_numbers(_message_lengths(sizes, count), ">i4")
    joiner.add_numbers(len(columns), ">i2")
    for values in columns:
        joiner.add_field(values)
    return joiner.finish()


class RowEncoder:
    """Encodes the rows of one result. `formats` has one format for each column."""

    def __init__(self, formats: Sequence[int], time_zone: str = "UTC") -> None:
        self._formats = tuple(formats)
        self._time_zone = time_zone

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """Encode a batch as DataRow messages. Raises `InvalidUsage` for a value that cannot be
        sent."""
        if len(self._formats) != batch.num_columns:
            raise InvalidUsage(f"{len(self._formats)} formats for {batch.num_columns} columns")
        few = encode_few(batch, self._formats)
        if few is not None:
            return few
        columns = [
            encode_binary(column) if code == BINARY_FORMAT else encode_text(column, self._time_zone)
            for column, code in zip(batch.columns, self._formats, strict=True)
        ]
        return _encoded(_join_fields(b"D", columns, batch.num_rows))


# -- a few rows --------------------------------------------------------------------------------

FEW_ROWS_MAX: Final = 16
"""Up to this many rows are encoded value by value. One row takes 6 µs that way and 380 µs by
columns; 16 rows take 74 and 670 µs (four plain columns, November 2026)."""
_U32: Final = struct.Struct("!I")
_NULL: Final = b"\xff\xff\xff\xff"
_WHOLE: Final = {
    pa.int16(): struct.Struct("!h"),
    pa.int32(): struct.Struct("!i"),
    pa.int64(): struct.Struct("!q"),
}
_DOUBLE: Final = struct.Struct("!d")
_DOUBLES: Final = 1e-4, 1e15
"""Range of absolute values in which the shortest text of a double has no exponent."""


def encode_few(batch: pa.RecordBatch, formats: Sequence[int]) -> EncodedRows | None:
    """Encode a batch of a few rows as DataRow messages.

    Returns None if there are too many rows, or if a type or value needs more care.

    >>> found = encode_few(pa.RecordBatch.from_pydict({"a": [1, None]}), (0,))
    >>> found.offsets.tolist(), bytes(found.rows(0, 1))[5:]
    ([0, 12, 23], b'\\x00\\x01\\x00\\x00\\x00\\x011')
    """
    if not 0 < batch.num_rows <= FEW_ROWS_MAX:
        return None
    columns = []
    for column, code in zip(batch.columns, formats, strict=True):
        fields = _few_fields(column, column.type, binary=code == BINARY_FORMAT)
        if fields is None:
            return None
        columns.append(fields)
    count = len(columns).to_bytes(2, "big")
    rows = []
    for cells in zip(*columns, strict=True):
        body = count + b"".join(cells)
        # The encoding by columns refuses it and reports its size.
        if len(body) + 4 > ROW_BYTES_MAX:
            return None
        rows.append(b"D" + _U32.pack(len(body) + 4) + body)
    offsets = np.array([0, *accumulate(map(len, rows))], np.int64)
    return EncodedRows(memoryview(b"".join(rows)), offsets)


def _few_fields(column: pa.Array, kind: pa.DataType, *, binary: bool) -> list[bytes] | None:
    """Return each value with its length in front; None if the column must be encoded otherwise."""
    # Python values: for a few of them that costs less than a single kernel call.
    found = []
    for value in column.to_pylist():
        data = b"" if value is None else _few_value(value, kind, binary=binary)
        if data is None:
            return None
        found.append(_NULL if value is None else _U32.pack(len(data)) + data)
    return found


def _few_value(value: Any, kind: pa.DataType, *, binary: bool) -> bytes | None:
    if isinstance(value, str):
        return value.encode() if pa.types.is_string(kind) else None
    if isinstance(value, bool):
        return (b"\x01" if value else b"\x00") if binary else (b"t" if value else b"f")
    if isinstance(value, int):
        if not pa.types.is_integer(kind):
            return None
        if not binary:
            return str(value).encode()
        form = _WHOLE.get(kind)
        return None if form is None else form.pack(value)
    if isinstance(value, float) and pa.types.is_float64(kind):
        if binary:
            return _DOUBLE.pack(value)
        low, high = _DOUBLES
        # For exponents, NaN and infinities PostgreSQL has its own rules.
        if low <= abs(value) < high:
            return repr(value).removesuffix(".0").encode()
    return None


# -- COPY to the client ------------------------------------------------------------------------


class CopyEncoder:
    """Encodes one COPY to a client: send the results of `begin`, of `encode` for each batch, and of
    `finish`."""

    def __init__(
        self, names: Sequence[str], form: RowFormat | None = None, time_zone: str = "UTC"
    ) -> None:
        self._names = tuple(names)
        self._form = form or RowFormat()
        self._time_zone = time_zone
        self._headed = False
        """True once the header of the binary format was sent."""
        special = self._form.delimiter + self._form.quote + self._form.escape
        null = self._form.null
        # A NULL that consists only of such characters could be the text of a number.
        self._is_plain = not _PLAIN & set(special) and (not null or not set(null) <= _PLAIN)

    def begin(self) -> bytes:
        """Return the line with the column names, if the format has one."""
        if not self._form.header or self._form.kind is CopyFormat.BINARY:
            return b""
        cells = (pa.array([name.encode()], _LARGE_BINARY) for name in self._names)
        words = [self._escaped(cell) for cell in cells]
        return encode_copy_data(self._form.delimiter.join(w[0].as_py() for w in words) + b"\n")

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """Encode a batch, one CopyData message per row. Raises `InvalidUsage` for a value that
        cannot be sent."""
        if self._form.kind is not CopyFormat.BINARY:
            return self._encode_lines(batch)
        columns = [encode_binary(column) for column in batch.columns]
        rows = _encoded(_join_fields(b"d", columns, batch.num_rows))
        if self._headed or not len(rows):
            return rows
        self._headed = True
        # ADBC finds the header only within the message of the first row.
        first = encode_copy_data(BINARY_HEADER + bytes(rows.rows(0, 1)[5:]))
        offsets = rows.offsets + len(BINARY_HEADER)
        offsets[0] = 0
        return EncodedRows(memoryview(first + bytes(rows.rows(1, len(rows)))), offsets)

    def finish(self) -> bytes:
        """Return what follows the last row, before CopyDone."""
        if self._form.kind is not CopyFormat.BINARY:
            return b""
        head = b"" if self._headed else BINARY_HEADER
        return encode_copy_data(head + BINARY_TRAILER)

    def _encode_lines(self, batch: pa.RecordBatch) -> EncodedRows:
        cells = [self._cells(column) for column in batch.columns]
        null = self._form.null
        filled = [cell.fill_null(null) if cell.null_count else cell for cell in cells]
        # Each delimiter and the line end take one byte: as many as cells, at least one.
        sizes: Any = max(len(filled), 1)
        for cell in filled:
            sizes = sizes + value_lengths(cell)
        joiner = FieldJoiner(batch.num_rows)
        joiner.add_bytes(b"d")
        joiner.add_numbers(_message_lengths(sizes, batch.num_rows), ">i4")
        for at, cell in enumerate(filled):
            if at:
                joiner.add_bytes(self._form.delimiter)
            joiner.add_values(cell)
        joiner.add_bytes(b"\n")
        return _encoded(joiner.finish())

    def _cells(self, column: pa.Array) -> pa.Array:
        """Return the cells of a column as lines contain them."""
        cells = as_variable(encode_text(column, self._time_zone))
        return cells if self._is_plain and _is_plain(column.type) else self._escaped(cells)

    def _escaped(self, cells: pa.Array) -> pa.Array:
        """Escape texts; NULLs stay NULLs."""
        if self._form.kind is CopyFormat.CSV:
            return self._quoted(cells)
        delimiter = self._form.delimiter
        escapes = {**_TEXT_ESCAPES, delimiter: _TEXT_ESCAPES.get(delimiter, b"\\" + delimiter)}
        # Few texts contain such a character, so checking first pays.
        found = _bytes_among(cells, b"".join(escapes))
        for character, text in escapes.items():
            if character in found:
                cells = pc.replace_substring(cells, character, text)
        return cells

    def _quoted(self, cells: pa.Array) -> pa.Array:
        form = self._form
        found = _bytes_among(cells, form.delimiter + form.quote + form.escape + b"\n\r")
        # A text that looks like NULL or like the end marker must be quoted.
        must = pc.equal(cells, pa.scalar(form.null, _LARGE_BINARY))
        if len(self._names) == 1:
            must = pc.or_(must, pc.equal(cells, pa.scalar(b"\\.", _LARGE_BINARY)))
        for character in found & {form.delimiter, form.quote, b"\n", b"\r"}:
            must = pc.or_(must, pc.match_substring(cells, character))
        if not pc.any(must).as_py():
            return cells
        quoted = cells
        for character in dict.fromkeys((form.escape, form.quote)):
            if character in found:
                quoted = pc.replace_substring(quoted, character, form.escape + character)
        quote, empty = pa.scalar(form.quote, _LARGE_BINARY), pa.scalar(b"", _LARGE_BINARY)
        return pc.if_else(must, pc.binary_join_element_wise(quote, quoted, quote, empty), cells)


def _bytes_among(cells: pa.Array, characters: bytes) -> frozenset[bytes]:
    """Return which of these characters occur in any of the texts."""
    data = value_data(cells).tobytes()
    return frozenset(each for code in characters if (each := bytes([code])) in data)


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether texts of a type consist only of `_PLAIN` characters, at least one of them."""
    return bool(
        pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)
    ) and not pa.types.is_duration(kind)


def cut_batches(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Yield a batch in slices of about `bytes_max` bytes, each with at least one row."""
    rows = batch.num_rows
    # By the average size, because the sizes of rows in a batch rarely differ much.
    step = max(1, rows if batch.nbytes <= bytes_max else rows * bytes_max // batch.nbytes)
    for start in range(0, rows, step):
        yield batch.slice(start, step)
