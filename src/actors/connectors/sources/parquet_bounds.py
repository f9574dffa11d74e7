"""Limits how much of a Parquet file is decoded at a time, and rejects files that decode to too
much.

Theory of operation. The page headers (`parquet_pages`) show how much memory any run of rows takes:
with a dictionary, a row takes at most the longest entry; otherwise, at most its page. So batches
are sized so that none takes more than `BATCH_BYTES`, unless single rows are larger than that. A
whole file decodes to at most `DecodingBound.allowed` bytes. Columns that consist only of dictionary
pages are measured before any row is decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.connectors.sources.parquet_pages import (
    DELTA_TEXTS,
    DICTIONARY_ENCODINGS,
    BrokenPages,
    ColumnPages,
    kind_of_column,
    read_pages,
)
from actors.runtime.settings import Settings

BATCH_ROWS: Final = 64 * 1024
BATCH_BYTES: Final = 64 << 20
FOOTER_GROWTH: Final = 256
"""A footer takes at most this many times its size when it is decoded."""
RATIO_MAX: Final = 100
SETTING: Final = "file_decoded_bytes_max"
_TAIL_BYTES: Final = 8


class DecodesTooLarge(Exception):
    """A file decodes to more than it may. The text names the part of the file and the setting."""


class DecodingBound(NamedTuple):
    """Limits of what files may decode to."""

    bytes_max: int
    """The setting `file_decoded_bytes_max`. It also limits what is in memory at a time."""

    def allowed(self, file_bytes: int) -> int:
        """Return how many bytes a file of this size may decode to in total.

        >>> [DecodingBound(1000).allowed(size) for size in (1, 50)]
        [1000, 5000]
        """
        return max(self.bytes_max, RATIO_MAX * file_bytes)

    def check(self, what: str, decoded: int, file_bytes: int) -> None:
        """Raise `DecodesTooLarge` if `decoded` exceeds what a file of this size may decode to."""
        allowed = self.allowed(file_bytes)
        if decoded > allowed:
            raise DecodesTooLarge(
                f"{what} decodes to more than {allowed} bytes ({SETTING} = {self.bytes_max}, or "
                f"{RATIO_MAX} times the size of the file if that is larger)"
            )

    def check_at_once(self, what: str, size: int) -> None:
        """Raise `DecodesTooLarge` if `size` bytes in memory at a time are too many."""
        if size > self.bytes_max:
            raise DecodesTooLarge(
                f"{what} decodes to more than {self.bytes_max} bytes at a time ({SETTING})"
            )


DEFAULT_BOUND: Final = DecodingBound(Settings().file_decoded_bytes_max)


def open_bounded(path: str, bound: DecodingBound, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file unless its footer is too large. Raises `DecodesTooLarge`, OSError and
    Arrow's errors."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        footer = int.from_bytes(file.read(4), "little")
    # In a file that is not Parquet this is an arbitrary number; Arrow reports the error.
    if footer <= size:
        bound.check_at_once(f"its footer of {footer} bytes", footer * FOOTER_GROWTH)
    return pq.ParquetFile(path, **options)


def check_parquet(path: str, bound: DecodingBound) -> None:
    """Raise `DecodesTooLarge` for a file that must not be given to another reader.

    Files that cannot be read at all pass; that reader reports the error.
    """
    with open_bounded(path, bound) as parquet, open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        columns = range(len(parquet.schema))
        decoded = 0
        for group in range(parquet.metadata.num_row_groups):
            shape = _group_shape(parquet, file, group, columns, bound)
            decoded += shape.dictionary_bytes(path, bound.allowed(size) - decoded)
            bound.check(f"row group {group}", decoded, size)


def bounded_batches(
    path: str, names: Sequence[str], bound: DecodingBound
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of bounded size. Raises `DecodesTooLarge`, OSError and
    Arrow's errors."""
    # Prefetched bytes would stay in memory until the end of the file.
    with open_bounded(path, bound, pre_buffer=False) as parquet, open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        wanted = set(names)
        schema = parquet.schema
        columns = [
            number
            for number in range(len(schema))
            if schema.column(number).path.partition(".")[0] in wanted
        ]
        decoded = 0
        for group in range(parquet.metadata.num_row_groups):
            shape = _group_shape(parquet, file, group, columns, bound)
            left = bound.allowed(size) - decoded
            bound.check(f"row group {group}", decoded + shape.dictionary_bytes(path, left), size)
            # Chosen for each row group, because dictionaries differ.
            rows = shape.batch_rows(bound)
            resident = shape.resident + shape.window_bytes(rows)
            bound.check_at_once(f"row group {group}", resident)
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(names)):
                decoded += batch.nbytes
                bound.check(f"row group {group}", decoded, size)
                yield batch


def _group_shape(
    parquet: pq.ParquetFile,
    file: BinaryIO,
    group: int,
    columns: Sequence[int],
    bound: DecodingBound,
) -> GroupShape:
    """Return the memory needs of the columns of a row group. Raises `DecodesTooLarge`."""
    size = file.seek(0, os.SEEK_END)
    metadata = parquet.metadata.row_group(group)
    # Columns that share their bytes in the file would be read once for each.
    lengths = [metadata.column(number).total_compressed_size for number in columns]
    if sum(max(0, length) for length in lengths) > size:
        raise DecodesTooLarge(f"row group {group} is longer than its file")
    shapes = []
    for number in columns:
        schema, chunk = parquet.schema.column(number), metadata.column(number)
        try:
            pages = read_pages(file, chunk, kind_of_column(schema), bound.bytes_max)
        except BrokenPages as error:
            raise DecodesTooLarge(
                f"row group {group}, column {schema.path}: {error} ({SETTING} = {bound.bytes_max})"
            ) from None
        shapes.append(_ColumnShape.of(schema, pages))
    return GroupShape(group, metadata.num_rows, tuple(shapes))


class _ColumnShape(NamedTuple):
    name: str
    starts: Any
    """First row of each page, followed by the number of rows."""
    plain: Any
    """Cumulative bytes of the pages before each page, followed by the total."""
    row_bytes: int
    """Maximum bytes of a row in addition to those in its page."""
    resident: int
    """Bytes of the largest page and the dictionary; for a nested column, of all values, too."""
    dictionary_values: int
    """Number of values if all of them are dictionary-encoded texts; 0 otherwise."""
    longest: int
    least: int
    """Minimum number of bytes to which the column decodes."""

    @classmethod
    def of(cls, schema: Any, pages: ColumnPages) -> _ColumnShape:
        values = np.array([page.values for page in pages.pages], np.int64)
        kind = kind_of_column(schema)
        row_bytes = 16 if kind.width > 8 else max(1, kind.width) + 1
        if schema.physical_type == "FIXED_LEN_BYTE_ARRAY":
            row_bytes = max(16, kind.width) + 1
        plain = np.zeros(len(values) + 1, np.int64)
        by_dictionary = [page.encoding in DICTIONARY_ENCODINGS for page in pages.pages]
        if kind.is_text:
            # The offset of each text.
            row_bytes = 8
            sizes = [
                0 if by else page.bytes for page, by in zip(pages.pages, by_dictionary, strict=True)
            ]
            plain[1:] = np.cumsum(sizes)
            if any(by_dictionary):
                row_bytes += pages.longest
            # Each text may repeat the previous one, which is no longer than its page.
            deltas = [page.bytes for page in pages.pages if page.encoding == DELTA_TEXTS]
            row_bytes += max(deltas, default=0)
        largest = max((page.bytes for page in pages.pages), default=0)
        resident = largest + pages.dictionary_bytes
        if schema.max_repetition_level:
            # A row may contain all values of the group.
            resident += int(values.sum()) * row_bytes + int(plain[-1])
            row_bytes, plain = 0, np.zeros(len(values) + 1, np.int64)
        starts = np.concatenate([[0], np.cumsum(values)])
        # The rows of other columns are counted as they are decoded.
        only = kind.is_text and bool(by_dictionary) and all(by_dictionary)
        count = int(values.sum())
        counted = count if only else 0
        least = 4 * count if kind.is_text else count // 8
        return cls(schema.path, starts, plain, row_bytes, resident, counted, pages.longest, least)

    def window_plain(self, rows: int) -> int:
        """Return the maximum total size of the pages that a batch of this many rows overlaps."""
        end = int(self.starts[-1])
        if not end or not self.plain[-1]:
            return 0
        begins = np.arange(0, end, rows)
        first = np.searchsorted(self.starts, begins, side="right") - 1
        last = np.searchsorted(self.starts, np.minimum(begins + rows, end), side="left")
        return int((self.plain[last] - self.plain[first]).max())


class GroupShape(NamedTuple):
    """Memory that decoding some columns of a row group takes."""

    number: int
    rows: int
    columns: tuple[_ColumnShape, ...]

    @property
    def resident(self) -> int:
        """Return the bytes of one page and the dictionary of every column."""
        return sum(column.resident for column in self.columns)

    def window_bytes(self, rows: int) -> int:
        """Return the maximum number of bytes to which this many rows decode."""
        linear = sum(column.row_bytes for column in self.columns) * min(rows, max(1, self.rows))
        return linear + sum(column.window_plain(rows) for column in self.columns)

    def batch_rows(self, bound: DecodingBound) -> int:
        """Return how many rows to decode at a time."""
        # Fewer rows do not help against a page that is large on its own.
        target = max(min(BATCH_BYTES, bound.bytes_max // 4), 4 * self.resident)
        target = min(target, bound.bytes_max - self.resident)
        rows = BATCH_ROWS
        while rows > 1 and self.window_bytes(rows) > target:
            rows //= 2
        return rows

    def dictionary_bytes(self, path: str, left: int) -> int:
        """Return a lower bound of what the columns decode to.

        It counts one bit per value, four bytes per text, and the exact bytes of dictionary columns
        that may decode to more than `left`.
        """
        found = sum(column.least for column in self.columns)
        for column in self.columns:
            if column.dictionary_values * column.longest > left:
                found += _count_texts(path, self.number, column.name, left - found)
                if found > left:
                    break
        return found


def _count_texts(path: str, group: int, name: str, bytes_max: int) -> int:
    """Return the size of a column's texts without decoding them. Stops once it exceeds
    `bytes_max`."""
    found = 0
    with pq.ParquetFile(path, read_dictionary=[name]) as parquet:
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[name]):
            for texts in map(_texts_within, batch.columns):
                lengths = pc.cast(pc.binary_length(texts.dictionary), pa.int64())
                found += (pc.sum(lengths.take(texts.indices)).as_py() or 0) + 4 * len(texts)
            # Otherwise, rows of a few bits each could take hours to count.
            if found > bytes_max:
                break
    return found


def _texts_within(values: pa.Array) -> pa.Array:
    """Return the texts within a nested column that has a single leaf."""
    while pa.types.is_nested(values.type):
        if pa.types.is_struct(values.type):
            values = values.field(0)
        elif pa.types.is_map(values.type):
            values = values.keys if pa.types.is_dictionary(values.keys.type) else values.items
        else:
            values = values.values
    return values
