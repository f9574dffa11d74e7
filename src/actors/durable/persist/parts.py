"""Encodes parts: updates to Parquet or inline Arrow and back, with a checksum over all bytes. Pure.

A Parquet part contains the user's columns, ``__time``, ``__diff`` and, only with error updates,
``__error``. It is compressed with zstd, and its metadata contains the format version. Files written
by Spark have none; their version is that of their `BatchPart`. Small updates stay inline, as an
Arrow IPC stream in the shard's document. All rows of a placed part (`shard.placed`) are read at its
time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.structs import replace

from actors.durable.persist.shard import PLACED, BatchPart
from actors.durable.persist.statistics import of_written
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import assemble_stream, encode_stream_header, from_ipc, set_column
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    MalformedFrame,
    StorageError,
    TypeMismatch,
)
from actors.runtime.threshold_probes import (
    INLINE_PART,
    PART_COUNT,
)

ROW_GROUP_ROWS = 128 * 1024
LOOP_BYTES_MAX = 64 * 1024
"""Size up to which a part or part list is encoded and decoded on the event loop; larger ones use a
thread. Always using threads makes a commit of one row 2.5 times as slow (November 2026)."""
VERSION: Final = 1
"""Version of parts as they are written."""
_VERSION_KEY: Final = b"penstock.part"
_OPENINGS_MAX: Final = 256
"""Maximum number of cached IPC headers of inline parts, one per schema."""


class EncodedPart(msgspec.Struct, frozen=True):
    """A part without its key, the bytes of its blob (None if it is inline), and its updates."""

    part: BatchPart
    blob: bytes | None
    updates: pa.Table


def part_schema(schema: TableSchema, *, errors: bool) -> pa.Schema:
    """Return the columns of a part."""
    shape = schema.arrow_updates()
    return shape.append(pa.field(ERROR, pa.string())) if errors else shape


def conform(updates: pa.Table, schema: TableSchema) -> pa.Table:
    """Return the updates with exactly a part's columns, sorted by time, without an error column
    that is all NULL. Raises `TypeMismatch` and `InvalidUsage`."""
    given = updates.schema
    errors = has_errors(updates) and updates[ERROR].null_count < updates.num_rows
    shape = part_schema(schema, errors=errors)
    if given.equals(shape):
        return _by_time(updates.replace_schema_metadata(None) if given.metadata else updates)
    names = given.names
    missing = [name for name in shape.names if name not in names]
    if missing:
        raise InvalidUsage(
            f"updates lack columns {', '.join(missing)}; they have {', '.join(names)}"
        )
    table = updates.select(shape.names)
    if not table.schema.equals(shape):
        try:
            table = table.cast(shape)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise TypeMismatch(f"updates do not fit the schema {schema.ddl()}: {error}") from None
    # Sorted by time, parts cover short time spans, and readers skip those outside theirs.
    return _by_time(table.replace_schema_metadata(None))


def has_errors(updates: pa.Table) -> bool:
    """Return whether the updates have the error column."""
    # Faster than searching the list of column names.
    return bool(updates.schema.get_field_index(ERROR) >= 0)


def takes_at_most(table: pa.Table, size: int) -> bool:
    """Return whether the table's values take at most `size` bytes."""
    # The buffer size is known immediately, but is too large for a slice: only then are values
    # counted.
    return bool(table.get_total_buffer_size() <= size or table.nbytes <= size)


def _by_time(table: pa.Table) -> pa.Table:
    times = table[TIME]
    if times.null_count:
        raise InvalidUsage(f"{times.null_count} updates have no {TIME}")
    if table.num_rows == 1:
        return table
    whole = times.combine_chunks()
    if pc.all(pc.less_equal(whole[:-1], whole[1:])).as_py():
        return table
    return table.take(pc.sort_indices(table, sort_keys=[(TIME, "ascending")]))


def encode(
    updates: pa.Table,
    schema: TableSchema,
    *,
    inline_bytes_max: int,
    bytes_target: int,
    statistics_bytes_max: int = 0,
) -> Iterator[EncodedPart]:
    """Yield parts that together contain the updates, one at a time. Parts in blobs have statistics.
    Raises the same errors as `conform`."""
    table = conform(updates, schema)
    rows = table.num_rows
    if rows == 0:
        return
    if takes_at_most(table, inline_bytes_max):
        data = assemble_stream(_opening(schema, has_errors(table)), table.to_batches())
        if not INLINE_PART.crossed(len(data) > inline_bytes_max):
            yield EncodedPart(_describe(table, data, inline=True), None, table)
            return
    else:
        INLINE_PART.crossed(True)
    # One part at a time in memory, each of about `bytes_target` decoded bytes.
    step = max(1, rows * bytes_target // max(1, table.nbytes))
    PART_COUNT.crossed(step < rows)
    for start in range(0, rows, step):
        piece = table.slice(start, step)
        data, footer = _to_parquet(piece)
        part = _describe(piece, data, inline=False)
        if not part.has_errors:
            known = of_written(footer, piece, schema, statistics_bytes_max)
            part = replace(part, statistics=known)
        yield EncodedPart(part, data, piece)


@lru_cache(maxsize=_OPENINGS_MAX)
def _opening(schema: TableSchema, errors: bool) -> bytes:
    return encode_stream_header(part_schema(schema, errors=errors))


def _describe(table: pa.Table, data: bytes, *, inline: bool) -> BatchPart:
    """Describe a table, which must be sorted by time, and its bytes as a part without a key."""
    times = table[TIME]
    return BatchPart(
        key="",
        rows=table.num_rows,
        bytes=len(data),
        checksum=zlib.crc32(data),
        inline=data if inline else None,
        has_errors=has_errors(table),
        time_min=times[0].as_py(),
        time_max=times[-1].as_py(),
        version=VERSION,
        retracts=pc.min(table[DIFF]).as_py() < 0,
    )


def _to_parquet(table: pa.Table) -> tuple[bytes, Any]:
    """Return a Parquet file and its footer."""
    footers: list[Any] = []
    sink = pa.BufferOutputStream()
    marked = table.replace_schema_metadata({_VERSION_KEY: str(VERSION).encode()})
    pq.write_table(
        marked,
        sink,
        compression="zstd",
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=_repeating(table.schema),
        metadata_collector=footers,
        write_page_checksum=True,  # Spark reads files without the part's checksum
    )
    return sink.getvalue().to_pybytes(), footers[0]


def _repeating(shape: pa.Schema) -> list[str]:
    """Return the columns that are worth a dictionary: texts, and those that mostly repeat one
    number."""
    # Probing the others takes longer than everything else, and zstd finds most of the repetition.
    return [
        field.name
        for field in shape
        if field.name in (TIME, DIFF)
        or pa.types.is_string(field.type)
        or pa.types.is_binary(field.type)
    ]


def decode(part: BatchPart, data: bytes, schema: TableSchema) -> pa.Table:
    """Return the updates in a part's bytes. Raises the same errors as `decode_written`."""
    return at_its_time(part, decode_written(part, data, schema))


def decode_written(part: BatchPart, data: bytes, schema: TableSchema | None) -> pa.Table:
    """Decode and verify a part, with its original times, in the columns of the schema with which it
    was written (None: in the file's columns).

    Raises `CorruptData` if a byte differs, and `StorageError` for a part of a newer version.
    """
    name = _name(part)
    check_bytes(part, data)
    try:
        table = from_ipc(data) if part.inline is not None else _from_parquet(name, data)
        if schema is not None:
            shape = part_schema(schema, errors=part.has_errors)
            table = table.select(shape.names)
            if not table.schema.equals(shape):
                table = table.cast(shape)
    except (pa.ArrowException, OSError, KeyError, ValueError, MalformedFrame) as error:
        raise CorruptData(
            f"{name} does not contain the columns {schema.ddl() if schema else 'of updates'}: "
            f"{error}",
            determinate=True,
        ) from error
    if table.num_rows != part.rows:
        raise CorruptData(
            f"{name} contains {table.num_rows} rows, expected {part.rows}", determinate=True
        )
    return table.replace_schema_metadata(None)


def check_bytes(part: BatchPart, data: bytes) -> None:
    """Raise `CorruptData` if a byte differs, and `StorageError` for a part of a newer version."""
    if len(data) != part.bytes or zlib.crc32(data) != part.checksum:
        raise CorruptData(
            f"{_name(part)}: {len(data)} bytes with crc32 {zlib.crc32(data):08x}, expected "
            f"{part.bytes} bytes with {part.checksum:08x}; restore the file from a backup",
            determinate=True,
        )
    _check_version(_name(part), part.version)


def _name(part: BatchPart) -> str:
    return f"part {part.key}" if part.key else "inline part"


def at_its_time(part: BatchPart, written: pa.Table) -> pa.Table:
    """Return the decoded updates, with all rows of a placed part at its time."""
    if part.at is None:
        return written
    return set_column(written, TIME, pa.repeat(pa.scalar(part.at, pa.int64()), part.rows))


def _from_parquet(name: str, data: bytes) -> pa.Table:
    # `pq.read_table` would make a dataset, which costs four times as much for a small part.
    with pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit="us") as file:
        table = file.read()
    marks = table.schema.metadata or {}
    if _VERSION_KEY in marks:
        _check_version(name, int(marks[_VERSION_KEY]))
    return table


def _check_version(name: str, version: int) -> None:
    if version > PLACED:
        raise StorageError(
            f"{name} has format {version}, this version supports up to {PLACED}: use a newer "
            "version of Penstock",
            determinate=True,
        )
