"""Encodes a few rows of plain types value by value: columns at once do not repay their cost there.

What is encoded here is the same, byte by byte, as `row_encoding` makes; for a type or a value that
needs more care there is no answer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from actors.model.pgwire.messages import BINARY_FORMAT

FEW_ROWS_MAX: Final = 16
_U32: Final = struct.Struct("!I")
_U16: Final = struct.Struct("!H")
_NULL: Final = b"\xff\xff\xff\xff"
_WHOLE: Final = {
    pa.int16(): struct.Struct("!h"),
    pa.int32(): struct.Struct("!i"),
    pa.int64(): struct.Struct("!q"),
}
_DOUBLE: Final = struct.Struct("!d")
_DOUBLES: Final = 1e-4, 1e15
"""Absolute values between which the shortest text of a double has no exponent."""


def encode_few(rows: pa.RecordBatch, formats: Sequence[int]) -> bytes | None:
    """Return rows as DataRow messages; None for many rows, or where `RowEncoder` has to.

    >>> batch = pa.RecordBatch.from_pydict({"a": [1, None]})
    >>> encode_few(batch, (0,))
    b'D\\x00\\x00\\x00\\x0b\\x00\\x01\\x00\\x00\\x00\\x011D\\x00\\x00\\x00\\n\\x00\\x01\\xff\\xff\\xff\\xff'
    """
    if rows.num_rows > FEW_ROWS_MAX:
        return None
    columns = []
    for column, code in zip(rows.columns, formats, strict=True):
        fields = _fields(column, column.type, binary=code == BINARY_FORMAT)
        if fields is None:
            return None
        columns.append(fields)
    made = bytearray()
    count = _U16.pack(len(columns))
    for row in zip(*columns, strict=True):
        body = b"".join(row)
        made += b"D" + _U32.pack(len(body) + 6) + count + body
    return bytes(made)


def _fields(column: pa.Array, kind: pa.DataType, *, binary: bool) -> list[bytes] | None:
    """Return each value with its length before it; None where this is not the place for it."""
    # Python's values: a few of them cost less than one call of a kernel.
    values: list[Any] = column.to_pylist()
    found = []
    for value in values:
        data = b"" if value is None else _encoded(value, kind, binary=binary)
        if data is None:
            return None
        found.append(_NULL if value is None else _U32.pack(len(data)) + data)
    return found


def _encoded(value: Any, kind: pa.DataType, *, binary: bool) -> bytes | None:
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
        # With an exponent, and for NaN and infinities, PostgreSQL has rules of its own.
        if low <= abs(value) < high:
            return repr(value).removesuffix(".0").encode()
    return None
