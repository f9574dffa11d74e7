"""Reads the page headers of a Parquet file's columns, to determine what decoding them would take.

Theory of operation. A reader allocates what a page header declares, and decodes each row to the
contents of its dictionary entry. The footer of the file need not be truthful about either. So the
headers are read first, in the way a reader reads them, without the pages. They show for each column
how many values each page has, its decompressed size, and the encoding of its values. Only
dictionaries are decompressed, to find their longest text, and pages of texts in a delta encoding,
which declare the number of lengths themselves.

Source: parquet.thrift and Encodings.md of apache/parquet-format; Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import pyarrow as pa

HEADER_BYTES_MAX: Final = 1 << 20
"""Maximum length of a page header; its statistics may contain two texts."""
_HEADER_BYTES: Final = 512
PAGES_MAX: Final = 200_000
"""Maximum number of pages in one column of one row group."""
_DEPTH_MAX: Final = 8

# -- numbers from parquet.thrift
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
PLAIN: Final = 0
DICTIONARY_ENCODINGS: Final = (2, 8)
_RLE: Final = 3
_DELTA_LENGTHS, DELTA_TEXTS = 6, 7
_DETAILS: Final = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""Field ids of the details in a page header, by kind of page."""
_CODECS: Final = {
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
    "LZ4": "lz4_raw",
    "LZ4_RAW": "lz4_raw",
}


class BrokenPages(Exception):
    """The pages of a column are not valid. The text says why."""


class DataPage(NamedTuple):
    """A page of values."""

    values: int
    """Number of values, including NULLs."""
    bytes: int
    """Decompressed size."""
    encoding: int


class ColumnPages(NamedTuple):
    """The pages of one column of a row group."""

    pages: tuple[DataPage, ...]
    dictionary_bytes: int = 0
    """Size of the decompressed dictionary with pointers to its entries; 0 if there is none."""
    longest: int = 0
    """Length of the dictionary's longest entry; 0 for values of fixed width."""


class _Header(NamedTuple):
    kind: int
    bytes: int
    compressed: int
    details: Mapping[int, Any]
    length: int


class ColumnKind(NamedTuple):
    """Properties of a column, from the schema in the footer."""

    width: int
    """Size of a value in a dictionary; for a text, the size of its length."""
    levels: int = 0
    """Number of runs of levels before a page's values."""
    is_text: bool = False
    """True if its values have variable length."""


def kind_of_column(column: Any) -> ColumnKind:
    """Return the kind of a column (`pyarrow.parquet.ColumnSchema`)."""
    widths = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}
    width = widths.get(column.physical_type, 1)
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        width = max(1, column.length)
    levels = (column.max_definition_level > 0) + (column.max_repetition_level > 0)
    return ColumnKind(width, levels, column.physical_type == "BYTE_ARRAY")


def read_pages(file: BinaryIO, column: Any, kind: ColumnKind, page_bytes_max: int) -> ColumnPages:
    """Return the pages of a column chunk (`pyarrow.parquet.ColumnChunkMetaData`).

    Raises `BrokenPages`, in particular for a page whose decompressed size exceeds `page_bytes_max`,
    and OSError.
    """
    start, dictionary = column.data_page_offset, column.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < start:
        start = dictionary
    end, wanted = start + column.total_compressed_size, column.num_values
    if start < 0 or column.total_compressed_size < 0:
        raise BrokenPages("its position in the file is negative")
    pages: list[DataPage] = []
    dictionary_bytes = longest = seen = 0
    at, count = start, 0
    # A reader stops at the last value; some writers include what follows it in the column's size.
    while seen < wanted and at < end:
        count += 1
        if count > PAGES_MAX:
            # Otherwise, headers of a few bytes each could take hours to read.
            raise BrokenPages(f"it has more than {PAGES_MAX} pages")
        header = _read_header(file, at)
        at += header.length
        if not (0 <= header.compressed <= end - at and header.bytes >= 0):
            raise BrokenPages("a page is longer than its column")
        # The reader allocates this size before it decompresses the page.
        if header.bytes > page_bytes_max:
            raise BrokenPages(f"a page decompresses to {header.bytes} bytes")
        values = header.details.get(1, 0)
        if values < 0:
            raise BrokenPages("a page declares a negative number of values")
        if header.kind == _DICTIONARY:
            dictionary_bytes, longest = _dictionary(file, at, header, column, kind)
        elif header.kind in (_DATA, _DATA_V2):
            encoding = header.details.get(2 if header.kind == _DATA else 4, PLAIN)
            # These pages have a count of their own, for which the reader allocates memory.
            if encoding in (_DELTA_LENGTHS, DELTA_TEXTS):
                _check_delta(file, at, header, column, kind)
            pages.append(DataPage(values, header.bytes, encoding))
            seen += values
        at += header.compressed
    return ColumnPages(tuple(pages), dictionary_bytes, longest)


# -- Thrift's compact protocol


def _read_header(file: BinaryIO, at: int) -> _Header:
    size = _HEADER_BYTES
    while True:
        file.seek(at)
        data = file.read(size)
        try:
            fields, length = _struct(data, 0, 0)
            break
        except IndexError:
            if len(data) < size or size >= HEADER_BYTES_MAX:
                raise BrokenPages("a page has an incomplete header") from None
            size *= 8
    kind, uncompressed, compressed = (fields.get(id_) for id_ in (1, 2, 3))
    if not (isinstance(kind, int) and isinstance(uncompressed, int)):
        raise BrokenPages("a page header has no size")
    if not isinstance(compressed, int):
        raise BrokenPages("a page header has no size")
    # Like the reader: the kind of page decides which details apply.
    details = fields.get(_DETAILS.get(kind, 0))
    return _Header(
        kind, uncompressed, compressed, details if isinstance(details, dict) else {}, length
    )


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the integers and structs in a struct by field id, and the end of the struct. Raises
    IndexError at the end of the data."""
    if depth > _DEPTH_MAX:
        raise BrokenPages("a page header is nested too deeply")
    found: dict[int, Any] = {}
    id_ = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return found, at
        kind, step = head & 15, head >> 4
        if step:
            id_ += step
        else:
            id_, at = _integer(data, at)
        value, at = _value(data, at, kind, depth, inside=False)
        # Like the reader: if a field occurs twice, the last one counts.
        if value is not None:
            found[id_] = value


def _value(data: bytes, at: int, kind: int, depth: int, *, inside: bool) -> tuple[Any, int]:
    """Return an I32 or a struct (None for other kinds), and its end.

    `inside` means that the value is in a collection, where a Boolean takes a byte.
    """
    match kind:
        case 1 | 2:
            # In a field, the kind itself is the value of a Boolean.
            return (None if inside else kind == 1), at + inside
        case 3:
            return None, at + 1
        case 5:
            return _integer(data, at)
        case 4 | 6:
            return None, _varint(data, at)[1]
        case 7:
            return None, at + 8
        case 8:
            size, at = _varint(data, at)
            _ = data[at + size - 1] if size else None
            return None, at + size
        case 9 | 10:
            head = data[at]
            size, at = (head >> 4, at + 1) if head >> 4 != 15 else _varint(data, at + 1)
            for _ in range(size):
                _, at = _value(data, at, head & 15, depth + 1, inside=True)
            return None, at
        case 12:
            return _struct(data, at, depth + 1)
    raise BrokenPages(f"a page header has a field of unknown kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise BrokenPages("a page header has an integer of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    # Like the reader: the rest of a longer number is dropped.
    value &= 0xFFFF_FFFF
    return (value >> 1) ^ -(value & 1), at


# -- Dictionaries and delta encodings


def _decompressed(data: bytes, size: int, column: Any) -> bytes | None:
    """Return the decompressed bytes of a page; None if only its reader knows the codec."""
    if column.compression == "UNCOMPRESSED":
        return data
    codec = _CODECS.get(column.compression)
    if codec is None:
        return None
    try:
        return bytes(pa.Codec(codec).decompress(data, size)) if size else b""
    except (pa.ArrowException, OSError, ValueError) as error:
        if column.compression == "LZ4":  # two formats share this name
            return None
        raise BrokenPages(f"a page cannot be decompressed: {error}") from None


def _dictionary(
    file: BinaryIO, at: int, header: _Header, column: Any, kind: ColumnKind
) -> tuple[int, int]:
    """Return the size of a dictionary in memory, and the length of its longest text."""
    values = header.details.get(1, 0)
    if values > header.bytes // kind.width:
        raise BrokenPages(f"a dictionary of {header.bytes} bytes declares {values} values")
    # Entries of fixed width are copied once.
    if not kind.is_text:
        return header.bytes * 2, 0
    file.seek(at)
    data = _decompressed(file.read(header.compressed), header.bytes, column)
    # The reader keeps a pointer and a length for each text.
    size = header.bytes + 16 * values
    if data is None:
        return size, header.bytes
    longest = place = 0
    unpack, end = struct.Struct("<I").unpack_from, len(data) - 4
    for _ in range(values):
        if place > end:
            raise BrokenPages("a dictionary is truncated")
        (length,) = unpack(data, place)
        place += 4 + length
        if length > longest:
            longest = length
    if place > len(data):
        raise BrokenPages("a dictionary is truncated")
    return size, longest


def _check_delta(file: BinaryIO, at: int, header: _Header, column: Any, kind: ColumnKind) -> None:
    """Raise `BrokenPages` for a page of texts that declares more lengths than values, because its
    reader allocates memory for them."""
    file.seek(at)
    data = file.read(header.compressed)
    v2, details = header.kind == _DATA_V2, header.details
    encoding = details.get(4 if v2 else 2)
    if not v2 and kind.levels and details.get(3) != _RLE:
        raise BrokenPages("a delta-encoded page has levels in an obsolete format")
    levels = details.get(5, 0) + details.get(6, 0) if v2 else 0
    if not 0 <= levels <= len(data):
        raise BrokenPages("a page is shorter than its levels")
    body: bytes | None = data[levels:]
    # A page of version 2 may be uncompressed even in a compressed column.
    if not (v2 and details.get(7) is False):
        body = _decompressed(data[levels:], header.bytes - levels, column)
    if body is None:
        raise BrokenPages(f"a delta-encoded page with codec {column.compression} cannot be checked")
    values = details.get(1, 0)
    try:
        place = 0 if v2 else _after_levels(body, kind.levels)
        # A page that contains only NULLs has no lengths.
        if place >= len(body):
            return
        for _ in range(2 if encoding == DELTA_TEXTS else 1):
            count, place = _skip_deltas(body, place)
            if count > values:
                raise BrokenPages(f"a page of {values} values declares {count} lengths")
    except IndexError:
        raise BrokenPages("a page ends within its lengths") from None


def _after_levels(body: bytes, levels: int) -> int:
    place = 0
    for _ in range(levels):
        (size,) = struct.unpack_from("<I", body, place) if place + 4 <= len(body) else (len(body),)
        place += 4 + size
    return place


def _skip_deltas(body: bytes, at: int) -> tuple[int, int]:
    """Return the number of integers in a delta-encoded run, and its end."""
    block, at = _varint(body, at)
    minis, at = _varint(body, at)
    count, at = _varint(body, at)
    _, at = _varint(body, at)
    if not minis or block % minis or not 0 < block <= 1 << 20 or count > 1 << 31:
        raise BrokenPages("a delta-encoded page has an invalid header")
    left = count - 1
    while left > 0:
        _, at = _varint(body, at)
        widths = body[at : at + minis]
        _ = body[at + minis - 1]
        at += minis
        for width in widths:
            if left <= 0:
                break
            at += block // minis * width // 8
            left -= block // minis
        if at > len(body):
            raise IndexError
    return count, at
