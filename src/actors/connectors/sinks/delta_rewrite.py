"""Deletes rows from a Delta table of current contents by rewriting the files that contain them.

A file is read twice: first only the columns that identify rows (the primary key, or all columns),
and then completely if one of the rows may be in it. Files whose bounds exclude the rows are not
read. Rows are compared bit by bit, and NULL equals NULL. If two of five copies of a row are
deleted, three remain (`subtract`). MERGE of a Delta engine, which compares with ``=``, guarantees
neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.connectors.sinks.formats import FILE_BYTES_TARGET, OutputFiles
from actors.connectors.sinks.sink_threads import SinkThreads
from actors.connectors.sinks.staging import SinkStaging, as_storage_errors
from actors.model.plan.copy_manifest import WrittenFile
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.updates import comparable, consolidate
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import Frontier

# -- subtraction of rows ---------------------------------------------------------------------------


class SubtractedRows(msgspec.Struct, frozen=True, gc=False):
    """The remaining rows (without diffs), and the deletes that were not found (diffs < 0)."""

    kept: pa.Table
    left: pa.Table
    taken: int
    """Number of rows deleted."""


def match_candidates(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    """Return a mask of the rows that could be among `deletes`, judging by each of these columns
    separately. Columns whose values cannot be compared are ignored."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)], pa.bool_())
    for name in names:
        kind = rows.schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            continue
        wanted = pc.unique(comparable(deletes[name]))
        mask = pc.and_(mask, pc.is_in(comparable(rows[name]), value_set=wanted))
    return mask


def subtract(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> SubtractedRows:
    """Subtract `deletes` (the columns and `DIFF` < 0, distinct rows) from `rows` (the same
    columns).

    `names` are columns that distinguish most rows; they are used to find candidates.
    """
    # Only candidates are consolidated; most rows are not candidates.
    mask = match_candidates(rows, deletes, names)
    found = rows.filter(mask)
    if not found.num_rows:
        return SubtractedRows(rows, deletes, 0)
    ones = pa.repeat(pa.scalar(1, pa.int64()), found.num_rows)
    there = found.append_column(pa.field(DIFF, pa.int64()), ones)
    sums = consolidate(pa.concat_tables([there, deletes.select(there.column_names)]))
    less = pc.less(sums[DIFF], pa.scalar(0, pa.int64()))
    left = sums.filter(less)
    before = -(pc.sum(deletes[DIFF]).as_py() or 0)
    taken = before + (pc.sum(left[DIFF]).as_py() or 0)
    if not taken:
        return SubtractedRows(rows, deletes, 0)
    stay = sums.filter(pc.invert(less))
    times = stay[DIFF].combine_chunks()
    index = pa.array([n for n, times_ in enumerate(times.to_pylist()) for _ in range(times_)])
    again = stay.drop_columns([DIFF]).take(index.cast(pa.int64()))
    kept = pa.concat_tables([rows.filter(pc.invert(mask)), again])
    return SubtractedRows(kept, left, taken)


# -- rewritten files -------------------------------------------------------------------------------

_ROWS_AT_ONCE: Final = 65_536
HELD_BYTES_MAX = 32 << 20
"""Maximum size of deleted rows in memory; more are written to files."""
SMALL_FILES_MAX = 16
"""Number of small files above which they are merged."""
_SMALL_BYTES: Final = FILE_BYTES_TARGET // 4
_WHOLE: Final = frozenset({"INT32", "INT64"})
_PLAIN: Final = frozenset({"NONE", "INT"})


class TableFile(msgspec.Struct, frozen=True):
    """A file that the table names. `bounds` maps integer columns to (minimum, maximum)."""

    path: str
    bytes: int
    bounds: Mapping[str, tuple[int, int]] = {}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TableFile:
        """Return the file in one of the library's add actions."""
        bounds = {}
        for name, low in row.items():
            if name.startswith("min.") and isinstance(low, int):
                high = row.get("max." + name[4:])
                if isinstance(high, int):
                    bounds[name[4:]] = (low, high)
        return cls(row["path"], row["size_bytes"], bounds)


class RewrittenFiles(msgspec.Struct, frozen=True):
    """Changes of the table's files. `moved` are the paths, old and new, of files whose rows only
    change their place."""

    removed: tuple[TableFile, ...] = ()
    added: tuple[WrittenFile, ...] = ()
    moved: frozenset[str] = frozenset()


class FileRewrites:
    """Rewrites files without the rows that one batch deletes."""

    def __init__(self, staging: SinkStaging, schema: TableSchema) -> None:
        self._staging = staging
        self._shape = schema.arrow()
        self._names = schema.key or schema.names
        # Rows to delete in memory, and their size.
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: list[str] = []
        """Files with further rows to delete."""
        self._made: list[str] = []
        """Files made by the last attempt, which are removed if it is repeated."""

    def remove(self, updates: pa.Table, upper: Frontier | None) -> None:
        """Add rows to delete, with `DIFF` < 0. Blocking."""
        if not updates.num_rows:
            return
        self._held.append(updates.select([*self._shape.names, DIFF]))
        self._held_bytes += updates.nbytes
        # Kept until the commit, because another attempt needs them if others moved rows between
        # files.
        if self._held_bytes > HELD_BYTES_MAX:
            place = self._staging.place(upper, "_")
            with as_storage_errors("write deleted rows"):
                file = place.create("rows.parquet")
                pq.write_table(pa.concat_tables(self._held), file)
                place.seal(file)
            self._spilled.append(place.path("rows.parquet"))
            self._held, self._held_bytes = [], 0

    def forget(self) -> None:
        """Drop the rows to delete, after the commit. Blocking."""
        for name in self._spilled:
            self._staging.remove(name)
        self._held, self._held_bytes, self._spilled, self._made = [], 0, [], []

    def _chunk(self, index: int) -> pa.Table:
        if index < len(self._spilled):
            with self._staging.reading(self._spilled[index]) as source:
                return pq.read_table(source).cast(self._deletes_shape())
        if self._held:
            return pa.concat_tables(self._held).cast(self._deletes_shape())
        return self._deletes_shape().empty_table()

    def _deletes_shape(self) -> pa.Schema:
        return self._shape.append(pa.field(DIFF, pa.int64()))

    async def run(
        self, files: list[TableFile], threads: SinkThreads, upper: Frontier | None
    ) -> RewrittenFiles:
        """Rewrite the table's current `files`, and remove the files of an earlier attempt.

        Raises `InvalidUsage` if rows to delete are missing from the table, and `SourceUnreachable`.
        """
        for name in self._made:
            await threads.run(partial(self._staging.remove, name), "remove files")
        self._made = []
        there = {file.path: file for file in files}
        made: dict[str, WrittenFile] = {}
        for index in range(len(self._spilled) + 1):
            left = await threads.run(partial(self._chunk, index), "read deleted rows")
            # Files written for earlier chunks may contain rows of this chunk, too.
            for file in [*files, *(_table_file(each) for each in made.values())]:
                if not left.num_rows:
                    break
                if (file.path not in there and file.path not in made) or _apart(file, left):
                    continue
                found = await threads.run(
                    partial(self._without, file, left, upper),
                    f"rewrite {file.path}",
                )
                if found is None:
                    continue
                written, left = found
                there.pop(file.path, None)
                if made.pop(file.path, None) is not None:
                    await threads.run(
                        partial(self._staging.remove, file.path),
                        "remove a file",
                    )
                made |= {each.path: each for each in written}
            if left.num_rows:
                raise InvalidUsage(
                    f"the table lacks {-(pc.sum(left[DIFF]).as_py())} rows that should be deleted, "
                    f"such as {left.slice(0, 1).drop_columns([DIFF]).to_pylist()[0]}: it does not "
                    "equal the object's contents. Drop the sink, remove the table, and create the "
                    "sink again"
                )
        removed = [file for file in files if file.path not in there]
        moved, gathered = await self._gather(list(there.values()), threads, upper)
        self._made = [*made, *(file.path for file in gathered)]
        return RewrittenFiles(
            (*removed, *moved),
            (*made.values(), *gathered),
            frozenset([*(old.path for old in moved), *(new.path for new in gathered)]),
        )

    def _without(
        self, file: TableFile, deletes: pa.Table, upper: Frontier | None
    ) -> tuple[list[WrittenFile], pa.Table] | None:
        """Rewrite a file without the rows. Return the new files and the deletes that were not in
        it; None if it contains none of the rows. Blocking."""
        with self._staging.reading(file.path) as there, pq.ParquetFile(there) as source:
            # The first pass reads few columns, because most files contain none of the rows.
            if not any(
                pc.any(
                    match_candidates(self._read(batch, self._names), deletes, self._names)
                ).as_py()
                for batch in source.iter_batches(_ROWS_AT_ONCE, columns=list(self._names))
            ):
                return None
            left, taken = deletes, 0
            files = self._output(upper)
            for batch in source.iter_batches(_ROWS_AT_ONCE):
                found = subtract(self._read(batch, self._shape.names), left, self._names)
                left, taken = found.left, taken + found.taken
                files.append(found.kept)
        written = files.finish()
        if taken:
            return written, left
        # The candidates matched only in single columns, so the file stays.
        for each in written:
            self._staging.remove(each.path)
        return None

    def _output(self, upper: Frontier | None) -> OutputFiles:
        place = self._staging.place(upper)
        return OutputFiles(place, self._shape, "parquet", FILE_BYTES_TARGET)

    def _read(self, batch: pa.RecordBatch, names: tuple[str, ...] | list[str]) -> pa.Table:
        shape = pa.schema([self._shape.field(name) for name in names])
        return pa.Table.from_batches([batch]).select(list(names)).cast(shape)

    async def _gather(
        self, files: list[TableFile], threads: SinkThreads, upper: Frontier | None
    ) -> tuple[list[TableFile], list[WrittenFile]]:
        """Merge small files if there are many. Return the old files and the new ones."""
        small = [file for file in files if file.bytes < _SMALL_BYTES]
        if len(small) <= SMALL_FILES_MAX:
            return [], []
        into = self._output(upper)

        def copy(file: TableFile) -> None:
            with self._staging.reading(file.path) as there, pq.ParquetFile(there) as source:
                for batch in source.iter_batches(_ROWS_AT_ONCE):
                    into.append(self._read(batch, self._shape.names))

        for file in small:
            await threads.run(partial(copy, file), f"read {file.path}")
        return small, await threads.run(into.finish, "write files")


def _table_file(file: WrittenFile) -> TableFile:
    return TableFile(file.path, file.bytes)


def _apart(file: TableFile, deletes: pa.Table) -> bool:
    """Return whether the file's bounds exclude all of these rows."""
    for name, (low, high) in file.bounds.items():
        if name in deletes.column_names and pa.types.is_integer(deletes.schema.field(name).type):
            column = deletes[name]
            ends = pc.min_max(column).as_py()
            # Bounds do not cover NULL.
            if not column.null_count and (ends["max"] < low or ends["min"] > high):
                return True
    return False


def stats_of(file: Any, rows: int) -> str:
    """Return Delta's statistics of a Parquet file, by which readers skip files: the number of rows,
    and the bounds of integer columns (times of changes, most keys)."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    footer = pq.read_metadata(file)
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            column = footer.row_group(group).column(index)
            name, found = column.path_in_schema, column.statistics
            plain = found is not None and found.logical_type.type in _PLAIN
            if found is None or "." in name or column.physical_type not in _WHOLE or not plain:
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max and isinstance(found.min, int):
                low[name] = min(low.get(name, found.min), found.min)
                high[name] = max(high.get(name, found.max), found.max)
    stats = {"numRecords": rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    return msgspec.json.encode(stats).decode()
