"""Writes rows as Parquet, CSV or JSON Lines files. Blocking.

`OutputFiles` takes rows piece by piece and writes them to files of at most about `file_bytes_max`,
one at a time. It keeps one row group (Parquet) or one piece (CSV, JSON) in memory. Without rows it
writes no file.

Values. *Parquet*: the column's own type. *CSV*: a header line; text in quotes (doubled inside);
NULL as an empty field (so a NULL in a table with one column is an empty line) and empty text as two
quotes. *JSON*: one object per line; decimals are numbers with all their digits, and a map is an
object with its keys as text. In both, dates and times are ISO 8601, binary is base64, and
non-finite floats are "NaN", "Infinity" or "-Infinity". `sources.copied_files` reads all of it back
exactly.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator
from typing import IO, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from actors.connectors.sources.json_rows import RowsOfTable
from actors.model.plan.copy_manifest import WrittenFile
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.updates import SLICE_ROWS, iter_slices
from actors.model.protocol.compute import CopyToExport
from actors.runtime.errors import InvalidUsage

FILE_BYTES_TARGET = 64 << 20
"""Size at which a sink starts a new file."""

# -- external columns ------------------------------------------------------------------------------


SINK_TIME_COLUMN: Final = "_time"
"""bigint: the timestamp of the change, in ms since 1970."""
SINK_DIFF_COLUMN: Final = "_diff"
"""bigint, not 0: number of copies of the row that were inserted (> 0) or deleted (< 0)."""
_NOT_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")
"""Characters that are not allowed in column names of Delta tables without column mapping, and that
some readers of Parquet files do not support."""


def of_changes(schema: TableSchema) -> pa.Schema:
    """Return the columns of changes: the object's own, followed by `SINK_TIME_COLUMN` and
    `SINK_DIFF_COLUMN`."""
    return pa.schema(
        [
            *schema.arrow(),
            pa.field(SINK_TIME_COLUMN, pa.int64()),
            pa.field(SINK_DIFF_COLUMN, pa.int64()),
        ]
    )


def check_columns(schema: TableSchema, what: str, *, changes: bool) -> None:
    """Raise `InvalidUsage` for columns that `what` (such as ``a Delta table``) cannot contain."""
    wrong: list[str] = []
    seen: dict[str, str] = {}
    for column, field in zip(schema.columns, schema.arrow(), strict=True):
        wrong += _wrong_field(field, column.type)
        # Column names are case-insensitive for readers of Delta and Parquet.
        folded = column.name.lower()
        if folded in seen:
            wrong.append(f"{column.name} and {seen[folded]} differ only in case")
        seen[folded] = column.name
        if changes and folded in (SINK_TIME_COLUMN, SINK_DIFF_COLUMN):
            wrong.append(f"{column.name}: the sink adds a column with this name")
    if not schema.columns:
        wrong.append("there are no columns")
    if wrong:
        raise InvalidUsage(
            f"{what} cannot contain these columns: {'; '.join(wrong)}. Create a view that renames "
            "or casts them, and sink that"
        )


def _wrong_field(field: pa.Field, type_text: str) -> Iterator[str]:
    name = field.name
    if not name or set(name) & _NOT_IN_NAMES:
        yield f"{name!r}: a name must not be empty or contain any of ' ,;{{}}()=' or line breaks"
    yield from _wrong_type(field.type, f"{name} {type_text}")


def _wrong_type(kind: pa.DataType, place: str) -> Iterator[str]:
    if pa.types.is_null(kind):
        yield f"{place}: a column that is always NULL (void) has no external type"
    elif pa.types.is_struct(kind):
        if not kind.num_fields:
            yield f"{place}: a struct has no fields"
        names = [kind.field(index).name.lower() for index in range(kind.num_fields)]
        if len(set(names)) < len(names):
            yield f"{place}: fields differ only in case"
        for index in range(kind.num_fields):
            # To such readers, fields of a struct are columns, and the same rules apply to their
            # names.
            inner = kind.field(index)
            yield from _wrong_field(inner, f"of {place}")
    elif pa.types.is_list(kind):
        yield from _wrong_type(kind.value_type, place)
    elif pa.types.is_map(kind):
        yield from _wrong_type(kind.key_type, place)
        yield from _wrong_type(kind.item_type, place)


PIECE_BYTES: Final = 8 << 20
"""Size of the pieces in which rows are written; in Parquet, of a row group."""
YEAR_MAX: Final = 9999
FILE_BYTES_MIN: Final = 4_096
"""Minimum value of `file_bytes_max`."""


class OutputLocation(Protocol):
    """Creates files. Blocking; raises `StorageError`.

    Names are unique. A file is an orphan until a manifest or a commit names it.
    """

    def create(self, name: str) -> IO[bytes]:
        """Open a new file. It is valid once it is sealed."""
        ...

    def seal(self, file: IO[bytes]) -> None:
        """Make a complete file durable."""
        ...

    def path(self, name: str) -> str:
        """Return the path under which the manifest names the file."""
        ...


def check_format(schema: TableSchema, export: CopyToExport) -> None:
    """Raise `InvalidUsage` for columns that the format cannot represent, and for a `file_bytes_max`
    that is too small."""
    if export.file_bytes_max < FILE_BYTES_MIN:
        raise InvalidUsage(
            f"invalid file_bytes_max {export.file_bytes_max}: expected at least {FILE_BYTES_MIN}"
        )
    if export.format == "csv":
        nested = [f"{c.name} {c.type}" for c in schema.columns if "<" in c.type]
        if nested:
            raise InvalidUsage(
                f"CSV does not support nested columns ({', '.join(nested)}): copy to parquet or "
                "json"
            )
    if export.format == "json":
        try:
            RowsOfTable(schema, schema, skips=False)
        except InvalidUsage as error:
            raise InvalidUsage(f"{error}: copy to parquet") from None


def repeated(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield each row as many times as its `DIFF` says, without `DIFF`, in slices."""
    diffs = rows[DIFF].to_numpy()
    plain = rows.drop_columns([DIFF])
    if not len(diffs) or diffs.max() == 1:
        yield from iter_slices(plain)
        return
    ends = diffs.cumsum()
    total = int(ends[-1])
    for start in range(0, total, SLICE_ROWS):
        wanted = np.arange(start, min(total, start + SLICE_ROWS))
        yield plain.take(pa.array(np.searchsorted(ends, wanted, "right")))


class OutputFiles:
    """Output files of one copy, or of one batch of a sink."""

    def __init__(
        self, place: OutputLocation, schema: pa.Schema, format: str, file_bytes_max: int
    ) -> None:
        self._place = place
        self._schema = schema
        self._format = format
        self._bytes_max = file_bytes_max
        # A quarter of the limit, so that files end close to it.
        self._piece_bytes = max(1, min(PIECE_BYTES, file_bytes_max // 4))
        self._open: _Open | None = None
        """The file being written; None between files."""
        # Rows that are not written yet, and their size.
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self.written: list[WrittenFile] = []
        """Complete files."""

    @property
    def rows(self) -> int:
        """Return the number of rows added, whether written or not."""
        taken: int = sum(table.num_rows for table in self._waiting)
        held = 0 if self._open is None else self._open.rows
        return taken + held + sum(file.rows for file in self.written)

    def add(self, rows: pa.Table) -> None:
        """Write rows with their positive `DIFF`.

        Raises `InvalidUsage` for a value that the format cannot represent, `StoreFull` and
        `StorageError`.
        """
        for table in repeated(rows.select([*self._schema.names, DIFF])):
            self.append(table)

    def append(self, rows: pa.Table) -> None:
        """Write each row once. Raises the same errors as `add`."""
        step = max(1, self._piece_bytes * rows.num_rows // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, step):
            piece = rows.slice(start, step)
            self._waiting.append(piece)
            self._waiting_bytes += piece.nbytes
            if self._waiting_bytes >= self._piece_bytes:
                self._write()

    def finish(self) -> list[WrittenFile]:
        """Close the last file and return all files."""
        if self._waiting:
            self._write()
        self._close()
        return self.written

    def abandon(self) -> None:
        """Abandon the incomplete file."""
        opened, self._open = self._open, None
        self._waiting = []
        if opened is not None:
            # Closing a writer writes the end of the file; redirect that to memory.
            opened.file.file = io.BytesIO()
            opened.writer.close()

    def _write(self) -> None:
        rows = pa.concat_tables(self._waiting)
        if rows.schema != self._schema:
            rows = rows.cast(self._schema)
        self._waiting, self._waiting_bytes = [], 0
        if self._open is None:
            name = f"{len(self.written) + 1:05d}.{self._format}"
            file = CountedFile(self._place.create(name))
            self._open = _Open(name, file, _WRITERS[self._format](file, self._schema))
        opened = self._open
        before = opened.file.size
        try:
            opened.writer.write(rows)
        except (pa.ArrowInvalid, ValueError, OverflowError) as error:
            raise InvalidUsage(
                f"cannot write a value as {self._format} ({error}): copy to parquet"
            ) from None
        opened.rows += rows.num_rows
        # The next piece will be about as large as this one.
        if 2 * opened.file.size - before > self._bytes_max:
            self._close()

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.writer.close()
        self._place.seal(opened.file.file)
        path = self._place.path(opened.name)
        self.written.append(WrittenFile(path, opened.rows, opened.file.size))


class CountedFile:
    """A writable file that counts the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Write all of the data."""
        view = memoryview(data)
        self.size += view.nbytes
        while view:
            view = view[self.file.write(view) :]
        return len(data)

    def flush(self) -> None:
        """Do nothing: sealing makes the file durable."""

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.size

    def readable(self) -> bool:
        """Return False."""
        return False

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return False."""
        return False


class FormatWriter(Protocol):
    """Writes one file in one format."""

    def write(self, rows: pa.Table) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """Write the end of the file."""
        ...


class _Open(msgspec.Struct):
    """A file being written."""

    name: str
    file: CountedFile
    writer: FormatWriter
    rows: int = 0


class _Parquet:
    def __init__(self, file: CountedFile, schema: pa.Schema) -> None:
        self._writer = pa.parquet.ParquetWriter(file, schema, compression="zstd")

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, file: CountedFile, schema: pa.Schema) -> None:
        self._file = file
        self._headed = False

    def write(self, rows: pa.Table) -> None:
        for index, field in enumerate(rows.schema):
            column = rows.column(index)
            if pa.types.is_binary(field.type):
                texts = pa.array([_base64(value) for value in column.to_pylist()], pa.string())
            elif pa.types.is_floating(field.type) and not _all_finite(column):
                texts = _number_texts(column)
            else:
                _check_years(column)
                continue
            rows = rows.set_column(index, field.name, texts)
        options = pa.csv.WriteOptions(include_header=not self._headed)
        pa.csv.write_csv(rows, self._file, options)
        self._headed = True

    def close(self) -> None:
        """Do nothing: every line is complete."""


def _number_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return floats as text, with the names that JSON and Spark use for non-finite values."""
    signed = pc.if_else(pc.greater(column, 0), "Infinity", "-Infinity")
    names = pc.if_else(pc.is_nan(column), "NaN", signed)
    return pc.if_else(pc.is_finite(column), column.cast(pa.string()), names)


def _check_years(column: pa.ChunkedArray) -> None:
    """Raise `ValueError` for a year that ISO 8601 cannot represent."""
    if not pa.types.is_temporal(column.type):
        return
    ends = pc.min_max(column.cast(pa.timestamp("s"), safe=False))
    for end in (ends["min"], ends["max"]):
        if end.is_valid and not 1 <= pc.year(end).as_py() <= YEAR_MAX:
            raise ValueError(f"a {column.type} with year {pc.year(end).as_py()}")


class JsonLines:
    """Encodes rows of one schema as JSON Lines. `sources.json_rows` reads them back."""

    def __init__(self, schema: pa.Schema) -> None:
        self._encoder = msgspec.json.Encoder(decimal_format="number")
        self._changes = [(f.name, change) for f in schema if (change := _plain(f.type))]

    def encode(self, rows: pa.Table | pa.RecordBatch) -> bytes:
        """Return the rows as lines. Raises `ValueError` and `OverflowError` for a value that JSON
        cannot represent, such as a date after year 9999."""
        lines = rows.to_pylist()
        for name, change in self._changes:
            # Converting value by value is slow, so skip columns that need no conversion.
            if pa.types.is_floating(rows.schema.field(name).type) and _all_finite(rows[name]):
                continue
            for line in lines:
                if line[name] is not None:
                    line[name] = change(line[name])
        return self._encoder.encode_lines(lines)


class _Json:
    def __init__(self, file: CountedFile, schema: pa.Schema) -> None:
        self._file = file
        self._lines = JsonLines(schema)

    def write(self, rows: pa.Table) -> None:
        self._file.write(self._lines.encode(rows))

    def close(self) -> None:
        """Do nothing: every line is complete."""


_WRITERS: Final[dict[str, Callable[[CountedFile, pa.Schema], FormatWriter]]] = {
    "parquet": _Parquet,
    "csv": _Csv,
    "json": _Json,
}
_Change: TypeAlias = Callable[[Any], Any]


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _all_finite(column: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.is_finite(column)).as_py() is not False)


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(kind: pa.DataType) -> _Change | None:
    """Return the function that converts a value (never NULL) of this type to JSON's; None if none
    is needed."""
    if pa.types.is_floating(kind):
        return _finite
    if pa.types.is_map(kind):
        key, item = _plain(kind.key_type), _plain(kind.item_type)
        return lambda pairs: {_text(_changed(k, key)): _changed(v, item) for k, v in pairs}
    if pa.types.is_list(kind):
        element = _plain(kind.value_type)
        return element and (lambda values: [_changed(value, element) for value in values])
    if pa.types.is_struct(kind):
        fields = {field.name: _plain(field.type) for field in kind}
        if not any(fields.values()):
            return None
        return lambda found: {name: _changed(found[name], how) for name, how in fields.items()}
    return None


def _changed(value: Any, change: _Change | None) -> Any:
    return value if value is None or change is None else change(value)


def _text(key: Any) -> str:
    """Return a map's key as text."""
    return key if isinstance(key, str) else msgspec.json.encode(key).decode().strip('"')
