"""One-shot commands that load rows into a running service, from files or from JSON lines."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import msgspec
import typer

from actors.doors.commands.console import ServiceTarget, service_command, with_client
from actors.runtime.errors import BadSettings, InvalidUsage, PenstockError, UnknownObject
from actors.runtime.kernel import SystemClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from typing import Any, BinaryIO

    import pyarrow as pa

    from actors.doors.client.answers import CopiedRows, CopyFormat
    from actors.doors.client.client import Client
    from actors.model.plan.schema import TableSchema
    from actors.model.protocol.api import CopyFromProgress

FORMATS: Final = ("parquet", "csv", "json")
LINE_MS: Final = 2_000
"""Minimum interval between progress lines when stderr is not a terminal."""
MIB: Final = 1 << 20
STDIN: Final = Path("-")
ROWS_AT_ONCE: Final = 10_000
LINE_BYTES_MAX: Final = 16 * 1024 * 1024


@service_command
def copy_from(
    target: ServiceTarget,
    table: Annotated[str, typer.Argument(help="The table's name.")],
    path: Annotated[
        str, typer.Argument(help="A file or folder below one of the service's source_dirs.")
    ],
    kind: Annotated[
        str, typer.Option("--format", help="parquet, csv or json (one object per line).")
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", "-c", help="A column of the files, in their order. May be repeated."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="KEY=VALUE for Spark's reader. May be repeated."),
    ] = None,
    pattern: Annotated[str, typer.Option(help="Pattern for file names in a folder.")] = "*",
    recursive: Annotated[
        bool, typer.Option("--recursive", help="Also read the folders within the folder.")
    ] = False,
    uuid: Annotated[
        str | None,
        typer.Option(help="Id of the copy: a completed copy of this id is not repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Copy files into a table, atomically.

    Either all rows are added, at a single timestamp, or none. The service reads the files from its
    source_dirs, as Spark does. Columns missing from the files are NULL. Progress goes to stderr. An
    interrupt while files are being read cancels the copy. The exit status is 2 if nothing was
    copied, or if the outcome is unknown: then run the command again with the same --uuid.
    """
    if kind not in FORMATS:
        raise BadSettings(f"invalid --format {kind!r}: expected one of {', '.join(FORMATS)}")
    chosen: CopyFormat = kind  # type: ignore[assignment]
    options = dict(_pair(text) for text in option or ())
    shown = None if quiet else CopyProgressLine(sys.stderr)

    async def copy(client: Client) -> CopiedRows:
        return await client.copy_from(
            table,
            path,
            chosen,
            columns=column or (),
            options=options,
            pattern=pattern,
            recursive=recursive,
            uuid=uuid,
            progress=None if shown is None else shown.show,
        )

    try:
        done = with_client(target, copy)
    # End the progress line before an error is printed.
    finally:
        if shown is not None:
            shown.end()
    if as_json:
        print(json.dumps({"rows": done.rows, "time": done.time, "repeated": done.repeated}))
    else:
        before = " (already copied earlier: nothing was repeated)" if done.repeated else ""
        print(f"{done.rows} rows into {table} at {done.time}{before}")


class CopyProgressLine:
    """Prints the progress of a copy on a stream.

    On a terminal one line is overwritten; elsewhere a changed line is printed at most every
    `LINE_MS`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._over = stream.isatty()
        self._clock = SystemClock()
        self._last = ""
        self._printed_ms = float("-inf")
        self._waiting = ""

    def show(self, progress: CopyFromProgress) -> None:
        """Print the progress if it has changed and the interval has passed."""
        line = copy_progress_text(progress)
        if line == self._last:
            return
        now = self._clock.monotonic_ms()
        # One line per report would flood a log file.
        if not self._over and now - self._printed_ms < LINE_MS:
            self._waiting = line
            return
        self._printed_ms, self._last, self._waiting = now, line, ""
        start, end = ("\r\x1b[K", "") if self._over else ("", "\n")
        print(f"{start}{line}", end=end, file=self._stream, flush=True)

    def end(self) -> None:
        """Print the last line if it was held back, or end the terminal's line."""
        if self._over and self._last:
            print(file=self._stream)
        elif self._waiting and self._waiting != self._last:
            print(self._waiting, file=self._stream, flush=True)


def copy_progress_text(progress: CopyFromProgress) -> str:
    """Format a copy's progress as readable text."""
    return (
        f"{progress.files_done} of {progress.files} files, {progress.bytes_done / MIB:.1f} of "
        f"{progress.bytes / MIB:.1f} MiB read; {progress.rows} rows staged"
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadSettings(f"invalid --option {text!r}: expected KEY=VALUE")
    return key, value


@service_command
def insert(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The table's name.")],
    file: Annotated[
        Path, typer.Argument(help="File of JSON objects, one per line; -: standard input.")
    ] = STDIN,
) -> None:
    """Insert rows from JSON lines into a table.

    The format is the one that `peek --json` and JSON copies write. Dates and times are written in
    ISO 8601, binary values in base64, a float that is not a number as "NaN", and maps as objects.
    Rows are written atomically in batches of 10,000 lines. If a batch fails, the earlier ones stay.
    """
    if file == STDIN:
        rows, time = with_client(target, lambda client: _insert(client, name, sys.stdin.buffer))
    else:
        try:
            opened = file.open("rb")
        except OSError as error:
            raise BadSettings(f"cannot read {file}: {error.strerror}") from None
        with opened:
            rows, time = with_client(target, lambda client: _insert(client, name, opened))
    print(f"{rows} rows inserted into {name}" + (f" at {time}" if rows else ""))


async def _insert(client: Client, name: str, lines: BinaryIO) -> tuple[int, int]:
    done = time = 0
    objects = {found.name.lower(): found for found in (await client.status()).objects}
    table = objects.get(name.lower())
    if table is None or table.schema is None:
        raise UnknownObject(f"table {name} does not exist")
    try:
        for rows in read_rows(lines, table.schema, table.column_defaults.keys()):
            time = await client.insert(name, rows)
            done += len(rows)
    except PenstockError as error:
        if done:
            print(f"penstock: the first {done} rows were inserted into {name}", file=sys.stderr)
        raise error
    return done, time


def read_rows(
    lines: BinaryIO, schema: TableSchema, defaults: Collection[str] = ()
) -> Iterator[pa.Table | list[dict[str, Any]]]:
    """Yield the rows of JSON lines, `ROWS_AT_ONCE` at a time.

    `defaults`: columns that have a default; a row omits those that its line leaves out. Raises
    `InvalidUsage`, with the line's number, for a line that is not a row of the table.
    """
    from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
    from actors.model.plan.schema import DIFF

    columns = (
        msgspec.structs.replace(each, nullable=True) if each.name in defaults else each
        for each in schema.columns
    )
    schema = msgspec.structs.replace(schema, columns=tuple(columns))
    rows = RowsOfTable(schema, schema, skips=False, naive=True)
    numbers: list[int] = []
    left_out: list[frozenset[str]] = []
    for number in count(1):
        # Bounded, so that a file without line ends is not read into memory in full.
        line = lines.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise InvalidUsage(f"line {number} is too long (limit {LINE_BYTES_MAX} bytes)")
        if line.strip():
            try:
                rows.add(line, 1)
            except RowMisfit as error:
                raise _no_row(number, error) from None
            numbers.append(number)
            # Decode the line again only if there are defaults: the parsed rows have every column.
            if defaults:
                left_out.append(frozenset(defaults).difference(msgspec.json.decode(line)))
        if numbers and (not line or len(rows) == ROWS_AT_ONCE):
            try:
                made = rows.updates().drop_columns([DIFF])
                yield _without(made, left_out) if any(left_out) else made
            except RowMisfit as error:
                raise _no_row(numbers[error.row or 0], error) from None
            rows.clear()
            numbers.clear()
            left_out.clear()
        if not line:
            return


def _without(rows: pa.Table, left_out: Sequence[frozenset[str]]) -> list[dict[str, Any]]:
    """Return the rows as dictionaries, each without the columns that its line left out."""
    return [
        {name: value for name, value in row.items() if name not in names}
        for row, names in zip(rows.to_pylist(), left_out, strict=True)
    ]


def _no_row(number: int, error: Exception) -> InvalidUsage:
    return InvalidUsage(f"line {number} is not a row of the table: {error}")
