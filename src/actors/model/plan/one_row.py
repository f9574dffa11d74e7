"""Writes and reads Arrow IPC streams of one row of integers without Arrow's cost per call.

Two streams by the same writer, with the same schema and a single row without NULLs, differ only in
the bytes of the values. So Arrow parses one stream, which gives the positions of the values
(`form_of`). A stream that equals it everywhere else *is* that stream with other values:
`RowForm.read` compares it and returns the values, and `RowForm.write` replaces them. There is no
form for NULLs, other types or several rows.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pyarrow as pa

_CODES = {
    (True, 1): "<b",
    (True, 2): "<h",
    (True, 4): "<i",
    (True, 8): "<q",
    (False, 1): "<B",
    (False, 2): "<H",
    (False, 4): "<I",
    (False, 8): "<Q",
}
"""Codes of `struct` by (signed, bytes)."""


class RowForm(msgspec.Struct, frozen=True):
    """Streams of one row that differ only in their values."""

    types: tuple[pa.DataType, ...]
    stream: bytes
    """The stream from which it was made."""
    fixed: tuple[tuple[int, int, bytes], ...]
    """(start, end, bytes) of everything except the values."""
    values: tuple[tuple[int, struct.Struct], ...]
    """Offset and code of each column's value, in the order of the columns."""

    def read(self, stream: bytes) -> tuple[int, ...] | None:
        """Return the values in a stream; None if it does not have this form."""
        if len(stream) != len(self.stream):
            return None
        for start, end, wanted in self.fixed:
            if stream[start:end] != wanted:
                return None
        return tuple(code.unpack_from(stream, at)[0] for at, code in self.values)

    def write(self, values: tuple[int, ...]) -> bytes | None:
        """Return the stream with these values; None if one is out of range for its type."""
        made = bytearray(self.stream)
        try:
            for (at, code), value in zip(self.values, values, strict=True):
                code.pack_into(made, at, value)
        except struct.error:
            return None
        return bytes(made)


def form_of(stream: bytes) -> RowForm | None:
    """Return the form of a stream with a single row of integers; None for any other bytes."""
    buffer = pa.py_buffer(stream)
    try:
        with pa.ipc.open_stream(buffer) as reader:
            batch = reader.read_next_batch()
            if batch.num_rows != 1 or next(iter(reader), None) is not None:
                return None
    except (pa.ArrowException, EOFError, StopIteration, OSError, ValueError):
        return None
    places: list[tuple[int, struct.Struct]] = []
    for column in batch.columns:
        found = _place(column, buffer)
        if found is None:
            return None
        places.append(found)
    fixed: list[tuple[int, int, bytes]] = []
    last = 0
    for at, code in sorted(places, key=lambda place: place[0]):
        if at < last:
            return None  # columns that share their bytes
        fixed.append((last, at, stream[last:at]))
        last = at + code.size
    fixed.append((last, len(stream), stream[last:]))
    return RowForm(tuple(batch.schema.types), stream, tuple(fixed), tuple(places))


def _place(column: Any, buffer: pa.Buffer) -> tuple[int, struct.Struct] | None:
    """Return the offset in the buffer and the code of a column's only value; None if there is
    none."""
    kind = column.type
    if not pa.types.is_integer(kind) or column.null_count or column.offset:
        return None
    code = struct.Struct(_CODES[pa.types.is_signed_integer(kind), kind.bit_width // 8])
    held = column.buffers()[1]
    if held is None:
        return None
    at = held.address - buffer.address
    if not 0 <= at <= buffer.size - code.size:
        return None  # a copy, because the stream is compressed
    return at, code
