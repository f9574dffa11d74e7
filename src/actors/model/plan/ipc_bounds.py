"""Bounds on what a foreign Arrow IPC stream decodes to. Pure.

The bytes of a stream are used in place, so the limit of frames bounds them, with three exceptions:
a compressed buffer states its decompressed length, which is allocated; rows of some types take no
bytes; and values that stand for many rows (dictionaries, runs, views) are multiplied when they are
stored. `check_stream` checks the first two, `check_values` the last.

Source: Message.fbs of Apache Arrow; the layout of FlatBuffers tables.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Final

import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.runtime.errors import MalformedFrame

DECODED_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum decoded size of a stream, unless its own size is larger."""
ROWS_FREE: Final = 16 * 1024 * 1024
"""Number of rows that may take no bytes. Beyond it, every row must have at least a bit."""
_U16, _U32 = struct.Struct("<H"), struct.Struct("<I")
_I32, _I64 = struct.Struct("<i"), struct.Struct("<q")
_HEADER_TYPE, _HEADER = 1, 2
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3
_BATCH_OF_DICTIONARY: Final = 1
_NOT_COMPRESSED: Final = -1


def check_stream(data: Any) -> None:
    """Check a stream before it is decoded.

    Raises `MalformedFrame` if it would allocate too much or has more rows than bytes for them, and
    Arrow's errors if it is truncated.
    """
    rows = allocated = 0
    for message in pa.ipc.MessageReader.open_stream(data):
        more_rows, more = message_bounds(message)
        rows, allocated = rows + more_rows, allocated + more
    check_bounds(rows, allocated, len(data))


def check_bounds(rows: int, allocated: int, stream_bytes: int) -> None:
    """Raise `MalformedFrame` if a stream has too many rows or decompresses to too many bytes."""
    if not 0 <= rows <= max(ROWS_FREE, 8 * stream_bytes):
        raise MalformedFrame(f"an Arrow stream of {stream_bytes} bytes cannot contain {rows} rows")
    if allocated > DECODED_BYTES_MAX:
        raise MalformedFrame(
            f"an Arrow stream decompresses to {allocated} bytes (limit {DECODED_BYTES_MAX})"
        )


def message_bounds(message: Any) -> tuple[int, int]:
    """Return the number of rows of a message (`pyarrow.ipc.Message`), and the bytes that it
    allocates in addition to its own. Raises `MalformedFrame` if the message is invalid."""
    metadata, body = memoryview(message.metadata), message.body
    try:
        root = _U32.unpack_from(metadata, 0)[0]
        kind_at = _field(metadata, root, _HEADER_TYPE)
        kind = metadata[kind_at] if kind_at else 0
        if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
            return 0, 0
        batch = _table(metadata, root, _HEADER)
        if kind == _DICTIONARY_BATCH:
            batch = _table(metadata, batch, _BATCH_OF_DICTIONARY)
        at = _field(metadata, batch, _LENGTH)
        rows = _I64.unpack_from(metadata, at)[0] if at else 0
        if rows < 0:
            raise MalformedFrame("invalid Arrow batch: negative number of rows")
        if not _field(metadata, batch, _COMPRESSION):
            return rows, 0
        return rows, _announced(metadata, batch, memoryview(b"" if body is None else body))
    except (struct.error, IndexError):
        raise MalformedFrame("an Arrow message is truncated") from None


def _announced(metadata: memoryview, batch: int, body: memoryview) -> int:
    """Return the sum of the lengths to which compressed buffers claim to decompress."""
    at = _field(metadata, batch, _BUFFERS)
    if not at:
        return 0
    vector = at + _U32.unpack_from(metadata, at)[0]
    total = 0
    for number in range(_U32.unpack_from(metadata, vector)[0]):
        place = vector + 4 + 16 * number
        offset, length = (_I64.unpack_from(metadata, place + step)[0] for step in (0, 8))
        # Shorter buffers are empty.
        if length < 8:
            continue
        announced = _I64.unpack_from(body, offset)[0]
        if announced < _NOT_COMPRESSED:
            raise MalformedFrame("invalid Arrow buffer: its length is negative")
        total += max(0, announced)
    return total


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a table; 0 if it is missing."""
    vtable = table - _I32.unpack_from(data, table)[0]
    # A negative position would count from the end.
    if vtable < 0:
        raise IndexError
    entry = 4 + 2 * number
    if entry + 2 > _U16.unpack_from(data, vtable)[0]:
        return 0
    offset = _U16.unpack_from(data, vtable + entry)[0]
    return table + offset if offset else 0


def _table(data: memoryview, table: int, number: int) -> int:
    at = _field(data, table, number)
    if not at:
        raise IndexError
    return at + int(_U32.unpack_from(data, at)[0])


# -- values that stand for many rows
# ----------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def repeats(kind: pa.DataType) -> bool:
    """Return whether a value of a type may stand for many rows, at any depth."""
    types = pa.types
    if (
        types.is_dictionary(kind)
        or types.is_run_end_encoded(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
        or isinstance(kind, pa.BaseExtensionType)
    ):
        return True
    return any(repeats(kind.field(number).type) for number in range(kind.num_fields))


def check_values(table: pa.Table) -> pa.Table:
    """Return a table. Raises `MalformedFrame` if its values would be too large when expanded."""
    total = 0
    for column in table.columns:
        if repeats(column.type):
            total += sum(_bytes_apart(chunk) for chunk in column.chunks)
    if total > DECODED_BYTES_MAX:
        raise MalformedFrame(
            f"Arrow columns of {table.nbytes} bytes decode to {total} bytes (limit "
            f"{DECODED_BYTES_MAX})"
        )
    return table


def _bytes_apart(values: pa.Array) -> int:
    """Return a lower bound of the bytes that values take when expanded."""
    kind, types = values.type, pa.types
    # Casting an extension type gives its storage.
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_apart(values.storage)
    if types.is_dictionary(kind):
        return _repeated(values.dictionary, values.indices)
    if types.is_run_end_encoded(kind):
        # Assume the longest value for each row, so that runs need not be counted.
        return len(values) * max(16, _longest(values.values))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        lengths = pc.cast(values.sizes, pa.int64())
        return (pc.sum(lengths).as_py() or 0) * max(16, _longest(values.values))
    if types.is_struct(kind):
        return sum(_bytes_apart(values.field(number)) for number in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _bytes_apart(values.values)
    if types.is_map(kind):
        return _bytes_apart(values.keys) + _bytes_apart(values.items)
    if _is_text(kind):
        return int(_lengths(values).sum()) + len(values)
    return int(values.nbytes)


def _repeated(entries: pa.Array, indices: pa.Array) -> int:
    if not _is_text(entries.type):
        return len(indices) * max(16, _longest(entries))
    found = pa.array(_lengths(entries)).take(indices)
    return (pc.sum(found).as_py() or 0) + 4 * len(indices)


def _longest(entries: pa.Array) -> int:
    """Return a lower bound of the bytes of the longest entry."""
    if not len(entries):
        return 0
    if _is_text(entries.type):
        return int(_lengths(entries).max())
    flat = entries.type.num_fields == 0 and not repeats(entries.type)
    return 16 if flat else _bytes_apart(entries)


def _lengths(texts: pa.Array) -> Any:
    """Return the length of each text in bytes, as a NumPy array."""
    import numpy as np  # imported here, so that a client without such columns starts without it

    kind = texts.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # Arrow has no length function for views. Each view takes 16 bytes and starts with the
        # length.
        views = np.frombuffer(texts.buffers()[1], np.int32)[::4]
        return np.maximum(views[texts.offset : texts.offset + len(texts)], 0).astype(np.int64)
    return pc.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_binary(kind)
        or types.is_large_string(kind) or types.is_large_binary(kind)
        or types.is_string_view(kind) or types.is_binary_view(kind)
    )  # fmt: skip
