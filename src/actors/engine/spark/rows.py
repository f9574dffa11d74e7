"""Rows in and out of Spark: Arrow and Parquet to temporary views, and results to Arrow.

Small inputs (inline Arrow, IPC files, and Parquet parts that are small once decoded) are read here
and become one local relation, which Spark plans without a scan. Spark scans large parts. Either way
the rows are those that `JobRows` describes: from files only ``lower <= time < upper``, with times
below `advance_to` raised to it, and columns in the types of the schema.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from actors.engine.spark.bucket_parts import BucketParts, BucketPartScan, wanted_rows
from actors.engine.spark.bucket_reading import TimeWindow
from actors.engine.spark.fragments import spark_struct
from actors.model.plan.jobs import JobRows, RowsDone
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema, arrow_type
from actors.model.plan.updates import advance, between, from_ipc, to_ipc
from actors.runtime.errors import InvalidUsage, StorageError
from actors.runtime.threshold_probes import ENGINE_ANSWER

if TYPE_CHECKING:
    from actors.engine.spark.bridge import SessionBridge

T = TypeVar("T")
_BATCH_ROWS: Final = 8_192
"""Number of rows decoded at a time until it is known whether a file is small."""
_UNKNOWN_BYTES: Final = 1 << 62


class LoadedRows(msgspec.Struct, frozen=True):
    """Rows: those that were read here, and the files left for Spark, or a frame that Spark already
    has."""

    rows: JobRows
    table: pa.Table
    files: tuple[str, ...]
    bytes: int
    frame: DataFrame | None = None
    """All rows, if they are already in Spark."""
    scan: BucketPartScan | None = None
    """Parts of a bucket that are left for Spark."""

    @property
    def is_left_to_spark(self) -> bool:
        """Return whether Spark has to read rows."""
        return bool(self.files) or self.scan is not None

    @property
    def empty(self) -> bool:
        """Return whether it is certain that there are no rows."""
        return not self.is_left_to_spark and self.frame is None and self.table.num_rows == 0


def load(rows: JobRows, parts: BucketParts, bytes_max: int) -> LoadedRows:
    """Read small inputs, and leave files of more than `bytes_max` and all `parts` of a bucket to
    Spark. Raises `StorageError` if a file or a footer cannot be read."""
    wanted = rows.schema.arrow_updates()
    tables: list[pa.Table] = []
    if rows.arrow is not None:
        tables.append(from_ipc(rows.arrow))
    if rows.arrow_file is not None:
        tables.append(_read(rows.arrow_file, _read_ipc_file))
    decoded, bytes_left = _read_small(rows.files, bytes_max)
    tables += [between(table, rows.lower, rows.upper) for table in decoded]
    kept = [_plain(table, wanted) for table in tables]
    table = pa.concat_tables(kept) if kept else wanted.empty_table()
    if rows.advance_to is not None and table.num_rows:
        table = advance(table, rows.advance_to)
    left = rows.files if bytes_left else ()
    scan = parts.scan(rows.objects) if rows.objects else None
    bytes_left += 0 if scan is None else scan.bytes
    return LoadedRows(rows, table, left, table.nbytes + bytes_left, scan=scan)


def _read_small(files: tuple[str, ...], bytes_max: int) -> tuple[list[pa.Table], int]:
    """Return the rows of the files and 0, or no rows and the approximate decoded size of the files.

    A file that only Spark can reach counts as infinitely large.
    """
    if not files:
        return [], 0
    sizes = [_local_size(path) for path in files]
    if None in sizes:
        return [], _UNKNOWN_BYTES
    paths = [path.removeprefix("file://") for path in files]
    tables: list[pa.Table] = []
    total = 0
    if sum(size or 0 for size in sizes) <= bytes_max:
        for path in paths:
            # Decoded sizes count, since a file of a few MiB may contain a million rows.
            found = _read(path, partial(_read_parquet, bytes_max=bytes_max - total))
            if found is None:
                break
            tables.append(found)
            total += found.nbytes
        else:
            return tables, 0
    return [], sum(_read(path, decoded_bytes) for path in paths)


class DiffBounds(NamedTuple):
    """The minimum and maximum diff of some updates."""

    low: int
    high: int


ONES: Final = DiffBounds(1, 1)
"""Also the bounds of no updates."""


def all_ones(loaded: LoadedRows) -> bool:
    """Return whether every diff is 1, according to the statistics in the files."""
    if table_bounds(loaded.table) != ONES:
        return False
    if loaded.scan is not None and loaded.scan.bounds != ONES:
        return False
    return all(diff_bounds(path) == ONES for path in loaded.files)


def table_bounds(table: pa.Table) -> DiffBounds:
    """Return the bounds of the diffs of these updates."""
    found = pc.min_max(table[DIFF])
    return DiffBounds(found["min"].as_py(), found["max"].as_py()) if table.num_rows else ONES


def diff_bounds(path: str) -> DiffBounds | None:
    """Return the bounds of the diffs in a file; None if only Spark can reach it, or it does not
    contain them."""
    if _local_size(path) is None:
        return None
    return _read(path.removeprefix("file://"), _bounds_in_file)


def _bounds_in_file(path: str) -> DiffBounds | None:
    found = pq.read_metadata(path)
    bounds = []
    for number in range(found.num_row_groups):
        group = found.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema == DIFF:
                told = column.statistics
                if told is None or not told.has_min_max:
                    return None
                bounds.append((told.min, told.max))
    lows, highs = zip(*bounds, strict=True) if bounds else ((1,), (1,))
    return DiffBounds(min(lows), max(highs))


def _local_size(path: str) -> int | None:
    """Return the size of a file on this machine; None for one that only Spark can reach."""
    plain = path.removeprefix("file://")
    if "://" in plain:
        return None
    try:
        return os.path.getsize(plain)
    except OSError as error:
        raise StorageError(f"cannot read part {plain}: {error}", determinate=True) from None


def _read(path: str, read: Callable[[str], T]) -> T:
    try:
        return read(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read {path}: {error}", determinate=True) from None


def _read_ipc_file(path: str) -> pa.Table:
    with pa.memory_map(path) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


def _read_parquet(path: str, bytes_max: int) -> pa.Table | None:
    """Return the rows of a file, or None as soon as they take more than `bytes_max` bytes."""
    # A damaged byte is an error here as well as in Spark (`session.VERIFY_PAGES`).
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        batches, total = [], 0
        for batch in file.iter_batches(_BATCH_ROWS):
            batches.append(batch)
            total += batch.nbytes
            if total > bytes_max:
                return None
        return pa.Table.from_batches(batches, file.schema_arrow)


def decoded_bytes(path: str) -> int:
    """Estimate the decoded size of a file's rows (at least 1) from its first rows."""
    with pq.ParquetFile(path) as file:
        # The footer does not contain it, since it counts a repeated value only once.
        sample = next(file.iter_batches(_BATCH_ROWS), None)
        if sample is None or not sample.num_rows:
            return 1
        rows: int = file.metadata.num_rows
        return int(max(1, sample.nbytes * rows // sample.num_rows))


def _plain(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Return the table without error updates, with the wanted columns and types."""
    if ERROR in table.column_names:
        table = table.filter(pc.is_null(table[ERROR]))
    for field in wanted:
        if field.name in table.column_names:
            continue
        if not field.nullable:
            raise InvalidUsage(f"rows lack column {field.name!r}; they have {table.column_names}")
        # A part from before the column was added.
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(wanted.names).cast(wanted)


def schema_of(struct: StructType) -> TableSchema:
    """Return Spark's schema as a `TableSchema`, whatever its types are."""
    return TableSchema(
        tuple(
            TableColumn(field.name, field.dataType.simpleString(), field.nullable)
            for field in struct.fields
        )
    )


def check_columns(schema: TableSchema, arrow_of: Callable[[str], pa.DataType] = arrow_type) -> None:
    """Raise `InvalidUsage` that names a column whose type `arrow_of` does not support; by default,
    a type that cannot be stored."""
    for column in schema.columns:
        try:
            arrow_of(column.type)
        except (InvalidUsage, ValueError, KeyError):
            doomed = "stored" if arrow_of is arrow_type else "answered"
            raise InvalidUsage(
                f"column {column.name!r} has the type {column.type}, which cannot be {doomed}; "
                "cast it"
            ) from None


def frame(bridge: SessionBridge, loaded: LoadedRows, uses: int = 1) -> DataFrame:
    """Return the rows as a frame with the user's columns, time and diff. `uses`: how often a plan
    reads it."""
    if loaded.frame is not None:
        return loaded.frame
    rows = loaded.rows
    struct = StructType(list(spark_struct(rows.schema.arrow_updates()).fields))
    window = TimeWindow(TIME, rows.lower, rows.upper, rows.advance_to)
    made = []
    if loaded.files:
        scanned = bridge.session.read.schema(struct).parquet(*loaded.files)
        made.append(wanted_rows(scanned, window, struct.names))
    if loaded.scan is not None:
        made.append(loaded.scan.frame(bridge, struct, window))
    if loaded.table.num_rows or not made:
        made.append(bridge.table(loaded.table, uses))
    # Not `DataFrame.unionByName`: that of the parent class does not dispatch to the one for
    # Connect.
    return reduce(lambda one, other: one.unionByName(other), made)


def rows_done(
    job_id: str,
    table: pa.Table,
    out: Path,
    inline_bytes_max: int,
    ms: float,
    *,
    prepared: bool = False,
) -> RowsDone:
    """Return the answer: inline if it is small, else as an IPC file below `out`."""
    rows = table.num_rows
    if table.nbytes <= inline_bytes_max:
        # A stream has headers and padding in addition to its data, so it may still exceed the
        # limit.
        data = to_ipc(table)
        if not ENGINE_ANSWER.crossed(len(data) > inline_bytes_max):
            return RowsDone(job_id, rows, arrow=data, spark_ms=ms, prepared=prepared)
    else:
        ENGINE_ANSWER.crossed(True)
    path = out / f"{uuid.uuid4().hex}.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return RowsDone(job_id, rows, arrow_file=str(path), spark_ms=ms, prepared=prepared)
