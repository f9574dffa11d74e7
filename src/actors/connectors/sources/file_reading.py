"""Reads files as rows in bounded pieces: through Spark, or directly where the result is certainly
the same.

Spark defines what a file contains, so files are read by a job of the engine, which returns Arrow or
Parquet files. Parquet files whose columns have exactly the wanted types are read directly, at the
speed of Arrow (`reads_like_spark`). Rows are never processed one by one in Python.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sources.copied_files import UnreadableCopy, read_copied
from actors.connectors.sources.file_listing import FoundFile
from actors.connectors.sources.parquet_bounds import (
    DEFAULT_BOUND,
    DecodesTooLarge,
    DecodingBound,
    bounded_batches,
    check_parquet,
    open_bounded,
)
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.connectors.sources.text_bounds import check_text, longest_line, own_options
from actors.model.plan.jobs import InferFiles, Job, QueryAnalyzed, RowsDone, TakeFiles
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.text_limits import TextTooLong, fit_texts_of
from actors.model.plan.updates import from_ipc
from actors.runtime.errors import (
    ConnectionBroken,
    DefiniteError,
    EngineError,
    InvalidUsage,
    OperationCanceled,
    ResourceBusy,
    ResourceClosed,
)

PIECE_BYTES = 8 << 20

Format: TypeAlias = Literal["parquet", "csv", "json"]

INFER_FILES: Final = 10
"""Maximum number of files from which columns are inferred."""
_HINT: Final = "repair the file, remove it, or prefix its name with _"
_TEXT: Final = "timeZone locale mode columnNameOfCorruptRecord dateFormat timestampFormat"
_TEXT_TOO: Final = "timestampNTZFormat enableDateTimeParsingFallback multiLine encoding lineSep"
OPTIONS: Final[dict[str, frozenset[str]]] = {
    "parquet": frozenset(["datetimerebasemode", "int96rebasemode"]),
    "csv": frozenset(
        f"{_TEXT} {_TEXT_TOO} sep delimiter charset quote escape comment header enforceSchema "
        "preferDate inferSchema samplingRatio ignoreLeadingWhiteSpace ignoreTrailingWhiteSpace "
        "nullValue nanValue positiveInf negativeInf maxColumns maxCharsPerColumn emptyValue "
        "charToEscapeQuoteEscaping unescapedQuoteHandling".lower().split()
    ),
    "json": frozenset(
        f"{_TEXT} {_TEXT_TOO} primitivesAsString prefersDecimal allowComments samplingRatio "
        "allowUnquotedFieldNames allowSingleQuotes allowNumericLeadingZeros dropFieldIfAllNull "
        "allowBackslashEscapingAnyCharacter allowUnquotedControlChars "
        "allowNonNumericNumbers".lower().split()
    ),
}
"""Allowed options of Spark's readers, in lower case. None of them can name other files."""


class MalformedFile(SourceUnreachable):
    """A file cannot be read as it is. `path` names the file; None if unknown."""

    def __init__(self, message: str, path: str | None) -> None:
        super().__init__(message, _HINT)
        self.path = path


def check_options(kind: str, options: Mapping[str, str]) -> None:
    """Raise `InvalidUsage` for an unknown format or option."""
    if kind not in OPTIONS:
        raise InvalidUsage(f"invalid format {kind!r}: expected one of {', '.join(OPTIONS)}")
    for name in options:
        if name.lower() not in OPTIONS[kind]:
            raise InvalidUsage(
                f"unknown option {name!r} for {kind} (available: "
                f"{', '.join(sorted(OPTIONS[kind]))})"
            )


def check_columns(columns: Sequence[TableColumn]) -> TableSchema:
    """Return the columns as a schema. Raises `InvalidUsage` for a duplicate name or an unsupported
    type."""
    schema = TableSchema(tuple(columns))
    low = [name.lower() for name in schema.names]
    twice = sorted({name for name in schema.names if low.count(name.lower()) > 1})
    if twice:
        raise InvalidUsage(f"duplicate column names: {', '.join(twice)}")
    schema.arrow()
    return schema


class FileReader:
    """Reads files of one format into rows with the columns `keep`.

    `read` are all columns of the files, in order where the files do not name them.
    """

    def __init__(
        self,
        kind: Format,
        options: Mapping[str, str],
        read: TableSchema,
        keep: TableSchema,
        around: ConnectorContext,
        *,
        copied: bool = False,
    ) -> None:
        """Make a reader. With `copied`, the files belong to a copy and are read the way `copy-to`
        wrote them."""
        self._kind = kind
        self._copied = copied
        settings = around.settings
        self._bound = DecodingBound(settings.file_decoded_bytes_max)
        self._record_bytes_max = settings.file_record_bytes_max
        self._options = _options(kind, options)
        self._read = read
        self._keep = keep
        self._shape = keep.arrow()
        self._around = around

    async def pieces(self, files: Sequence[FoundFile]) -> AsyncGenerator[pa.Table, None]:
        """Yield the files' rows. Raises `MalformedFile` and `SourceUnreachable`."""
        made: Iterator[pa.Table] | None = None
        if self._copied and self._kind != "parquet":
            made = self._from_copy(files)
        elif self._kind == "parquet" and await self._blocking(lambda: self._all_ours(files)):
            made = _from_parquet([file.path for file in files], self._keep, self._bound)
        if made is not None:
            while (piece := await self._blocking(lambda: next(made, None))) is not None:
                yield piece
            return
        await self._blocking(
            lambda: _check_bounds(
                self._kind, dict(self._options), files, self._bound, self._record_bytes_max
            )
        )
        answer = await self._taken(files)
        try:
            path = files[0].path if len(files) == 1 else None
            made = _answered(answer, self._keep, self._bound, path)
            while (piece := await self._blocking(lambda: next(made, None))) is not None:
                yield piece
        finally:
            # The engine's answer may be in files that nobody else deletes.
            with anyio.CancelScope(shield=True):
                await self._around.clock.run_blocking(lambda: _remove(answer.paths()))

    def _all_ours(self, files: Sequence[FoundFile]) -> bool:
        if self._copied:
            return all(has_types(file.path, self._keep, self._bound) for file in files)
        return all(reads_like_spark(file.path, self._shape, self._bound) for file in files)

    def _from_copy(self, files: Sequence[FoundFile]) -> Iterator[pa.Table]:
        for file in files:
            try:
                record_max = self._record_bytes_max
                longest_line(file.path, record_max)
                for rows in read_copied(file.path, self._kind, self._read, record_max):
                    yield from _cut(rows.select(self._keep.names), self._keep, file.path)
            except (UnreadableCopy, DecodesTooLarge) as error:
                raise _Unreadable(file.path, error) from None

    async def _blocking(self, function: Any) -> Any:
        try:
            return await self._around.clock.run_blocking(function)
        except _Unreadable as error:
            raise MalformedFile(str(error), error.path) from None
        except OSError as error:
            raise SourceUnreachable(f"cannot read a file: {error}") from None

    async def _taken(self, files: Sequence[FoundFile]) -> RowsDone:
        paths = tuple(file.path for file in files)
        own = await self._blocking(
            lambda: own_options(self._kind, self._options, paths, self._record_bytes_max)
        )
        job = TakeFiles(
            f"files/{uuid.uuid4().hex}",
            paths,
            self._kind,
            self._read,
            self._keep.names,
            (*self._options, *own),
            sum(file.size for file in files),
        )
        answer = await run(self._around, job, paths)
        assert isinstance(answer, RowsDone)
        return answer


async def infer(
    kind: Format,
    options: Mapping[str, str],
    files: Sequence[FoundFile],
    around: ConnectorContext,
) -> TableSchema:
    """Return the columns that Spark infers from the first files. Raises `InvalidUsage` and
    `SourceUnreachable`."""
    given = dict(_options(kind, options))
    if kind == "csv" and "inferschema" not in {name.lower() for name in given}:
        given["inferSchema"] = "true"
    settings, first = around.settings, files[:INFER_FILES]
    paths = tuple(file.path for file in first)
    bound = DecodingBound(settings.file_decoded_bytes_max)
    try:
        await around.clock.run_blocking(
            lambda: _check_bounds(kind, given, first, bound, settings.file_record_bytes_max)
        )
    except (_Unreadable, OSError) as error:
        raise InvalidUsage(f"cannot infer columns, declare them: {error}") from None
    job = InferFiles(f"files/{uuid.uuid4().hex}", paths, kind, tuple(given.items()))
    try:
        answer = await run(around, job, paths)
    except MalformedFile as error:
        raise InvalidUsage(f"cannot infer columns, declare them: {error}") from None
    assert isinstance(answer, QueryAnalyzed)
    return check_columns(answer.schema.columns)


async def run(around: ConnectorContext, job: Job, paths: Sequence[str]) -> Any:
    """Run a job that reads these files, and return the engine's answer. Raises `MalformedFile` and
    `SourceUnreachable`."""
    try:
        return await around.run_job(job)
    except (DefiniteError, InvalidUsage) as error:
        path = next((path for path in paths if str(error).startswith(f"{path}: ")), None)
        path = paths[0] if path is None and len(paths) == 1 else path
        text = str(error) if path is None or path in str(error) else f"{path}: {error}"
        raise MalformedFile(text, path) from None
    except (
        EngineError,
        ResourceBusy,
        OperationCanceled,
        ResourceClosed,
        ConnectionBroken,
    ) as error:
        raise SourceUnreachable(f"the engine could not read the files: {error}") from None


def _options(kind: Format, given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the options with our own default: a malformed record is an error, not NULL."""
    if kind == "parquet" or "mode" in {name.lower() for name in given}:
        return tuple(given.items())
    return (("mode", "FAILFAST"), *given.items())


# -- Parquet, read directly -----------------------------------------------------------------------


class _Unreadable(Exception):
    def __init__(self, path: str | None, why: object) -> None:
        super().__init__(f"{path or 'a file'}: {why}")
        self.path = path


def _check_bounds(
    kind: Format,
    options: Mapping[str, str],
    files: Sequence[FoundFile],
    bound: DecodingBound,
    record_bytes_max: int,
) -> None:
    """Raise `_Unreadable` for a file that Spark must not read because it decodes to too much.
    Blocking."""
    for file in files:
        try:
            if kind == "parquet":
                check_parquet(file.path, bound)
            else:
                check_text(file.path, kind, options, bound, record_bytes_max)
        except DecodesTooLarge as error:
            raise _Unreadable(file.path, error) from None
        except (pa.ArrowException, OSError) as error:
            # Spark reports the error for a file that is not Parquet at all.
            if isinstance(error, OSError) and error.errno is not None:
                raise


def has_types(path: str, wanted: TableSchema, bound: DecodingBound = DEFAULT_BOUND) -> bool:
    """Return whether a Parquet file of a copy has exactly these types, including nested ones.

    Raises `_Unreadable` for a footer that is too large. Blocking.
    """
    try:
        with open_bounded(path, bound) as file:
            return bool(file.schema_arrow.types == wanted.arrow().types)
    except DecodesTooLarge as error:
        raise _Unreadable(path, error) from None
    except (OSError, pa.ArrowException):
        return False


def reads_like_spark(path: str, shape: pa.Schema, bound: DecodingBound = DEFAULT_BOUND) -> bool:
    """Return whether Arrow certainly reads a Parquet file as Spark does.

    It does if every column exists under exactly its name, is flat and has the wanted type, and no
    dates use the old calendar. Returns False for a file that cannot be read. Raises `_Unreadable`
    for a footer that is too large. Blocking.
    """
    try:
        with open_bounded(path, bound) as file:
            found, notes = file.schema_arrow, file.metadata.metadata or {}
    except DecodesTooLarge as error:
        raise _Unreadable(path, error) from None
    except (OSError, pa.ArrowException):
        return False
    # Spark marks files with Julian dates this way; Spark 1 and 2 wrote them without a mark.
    if any(b"legacy" in key.lower() for key in notes):
        return False
    spark = notes.get(b"org.apache.spark.version", b"4")
    if spark[:2] in (b"1.", b"2."):
        return False
    names = found.names
    # Spark's column names are case-insensitive.
    if len(set(map(str.lower, names))) < len(names):
        return False
    return all(
        "." not in field.name
        and field.name in names
        and _same(found.field(field.name).type, field.type)
        for field in shape
    )


def _same(there: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_nested(wanted):
        return False  # names and NULLs inside them would add too many cases
    if pa.types.is_string(wanted):
        return bool(
            pa.types.is_string(there)
            or pa.types.is_large_string(there)
            or pa.types.is_string_view(there)
        )
    if pa.types.is_binary(wanted):
        return bool(
            pa.types.is_binary(there)
            or pa.types.is_large_binary(there)
            or pa.types.is_binary_view(there)
        )
    if pa.types.is_timestamp(wanted) and pa.types.is_timestamp(there):
        return there.unit in ("ms", "us") and (there.tz is None) == (wanted.tz is None)
    return bool(there == wanted)


def _from_parquet(
    paths: Sequence[str],
    keep: TableSchema,
    bound: DecodingBound = DEFAULT_BOUND,
    *,
    engine: bool = False,
    named: str | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of Parquet files.

    With `engine`, the engine made these files from others; `named` is the path of the original, if
    there is only one. Blocking.
    """
    shape = keep.arrow()
    waiting: list[pa.Table] = []
    size = 0
    for path in paths:
        count = 0
        try:
            for batch in bounded_batches(path, shape.names, bound):
                read = pa.Table.from_batches([batch]).select(shape.names)
                rows = (
                    _as_stored(read, keep, named) if engine else _as_stored(read, keep, path, count)
                )
                count += rows.num_rows
                waiting.append(rows)
                size += rows.nbytes
                if size > PIECE_BYTES:
                    yield pa.concat_tables(waiting)
                    waiting, size = [], 0
        except DecodesTooLarge as error:
            where = f"after row {count}: {error}" if count else str(error)
            raise _Unreadable(named if engine else path, where) from None
        except (OSError, pa.ArrowException) as error:
            behind = f"after row {count}: {error}" if count else error
            raise _Unreadable(path, behind) from None
    if waiting:
        yield pa.concat_tables(waiting)


def _answered(
    answer: RowsDone, keep: TableSchema, bound: DecodingBound, path: str | None
) -> Iterator[pa.Table]:
    """Yield the rows in the engine's answer. `path` is the file that was read; None if there were
    several. Blocking."""
    if answer.arrow is not None:
        yield from _cut(from_ipc(answer.arrow), keep, path)
    if answer.arrow_file is not None:
        with pa.memory_map(answer.arrow_file) as source:
            yield from _cut(pa.ipc.open_file(source).read_all(), keep, path)
    made = [file.path for file in answer.files or ()]
    yield from _from_parquet(made, keep, bound, engine=True, named=path)


def _cut(rows: pa.Table, keep: TableSchema, path: str | None = None) -> Iterator[pa.Table]:
    # Small pieces, so that several fit into the staging buffer: one is read while another becomes a
    # part.
    rows = _as_stored(rows, keep, path)
    step = max(1, PIECE_BYTES * rows.num_rows // max(1, rows.nbytes))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(OSError):
            Path(path).unlink()


def _as_stored(
    rows: pa.Table, keep: TableSchema, path: str | None, rows_before: int | None = None
) -> pa.Table:
    """Convert rows to the types of `keep`, and pad CHAR(n).

    `rows_before` is the number of rows of the file before these, if known. Raises `_Unreadable` for
    a NULL in a NOT NULL column, and for a text that is too long.
    """
    shape = keep.arrow()
    if rows.schema != shape:
        rows = rows.cast(shape)
    for column in keep.columns:
        if not column.nullable and rows.column(column.name).null_count:
            where = ""
            # The engine may return rows in a different order than the file's.
            if rows_before is not None:
                first = pc.index(pc.is_null(rows.column(column.name)), True).as_py()
                where = f" in row {rows_before + first + 1}"
            raise _Unreadable(path, f"column {column.name} is NOT NULL, but contains NULL{where}")
    try:
        return fit_texts_of(rows, keep)
    except TextTooLong as error:
        raise _Unreadable(path, error) from None
