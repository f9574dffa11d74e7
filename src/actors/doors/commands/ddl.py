"""Commands that change a running service's tables, views, indexes, and rows."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from actors.doors.commands.console import (
    ServiceTarget,
    run_loop,
    service_command,
    set_up_logging,
    with_client,
)
from actors.runtime.errors import BadSettings, InvalidUsage, PenstockError, UnknownObject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from typing import Any, BinaryIO

    import pyarrow as pa

    from actors.model.plan.schema import TableSchema

table = typer.Typer(help="Tables: what clients write.", no_args_is_help=True)
view = typer.Typer(help="Views: what is kept fresh.", no_args_is_help=True)
index = typer.Typer(help="Indexes: what is kept ready to be read.", no_args_is_help=True)

STDIN: Final = Path("-")
ROWS_AT_ONCE: Final = 10_000
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
Retain = Annotated[
    int | None, typer.Option("--retain-history-ms", help="Of history; else as the service says.")
]


@table.command("create")
@service_command
def create_table(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The table's name.")],
    columns: Annotated[
        list[str], typer.Argument(help="NAME=TYPE, of Spark's types: id=bigint 'at=timestamp'.")
    ],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="A column of the key; may be repeated.")
    ] = None,
    retain_history_ms: Retain = None,
) -> None:
    """Makes a table; with a key it has at most one row of each, else it is a bag."""
    set_up_logging("warning")
    types = dict(_pair(text, "a column", "NAME=TYPE") for text in columns)
    if len(types) < len(columns):
        raise BadSettings("a column is named twice")
    with_client(
        target,
        lambda client: client.create_table(
            name, types, key or (), retain_history_ms=retain_history_ms
        ),
    )
    print(f"table {name} is made")


@view.command("create")
@service_command
def create_view(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The view's name.")],
    sql: Annotated[str, typer.Argument(help="SELECT …, in Spark SQL; - reads it from stdin.")],
    policy: Annotated[
        str, typer.Option(help="auto, incremental, 'incremental strict' or full.")
    ] = "auto",
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", help="KEY=VALUE, a setting of Spark SQL; may be repeated."),
    ] = None,
    target_lag_ms: Annotated[
        int, typer.Option(help="How old it may be; 0: as fresh as can be.")
    ] = 0,
    retain_history_ms: Retain = None,
) -> None:
    """Makes a view that is kept fresh from then on; `penstock explain` says how."""
    set_up_logging("warning")
    text = sys.stdin.read() if sql == "-" else sql
    given = dict(_pair(each, "--conf", "KEY=VALUE") for each in conf or ())
    with_client(
        target,
        lambda client: client.create_materialized_view(
            name,
            text,
            retain_history_ms=retain_history_ms,
            spark_conf=given,
            refresh_policy=policy,
            target_lag_ms=target_lag_ms,
        ),
    )
    print(f"view {name} is made; it can be read when its first contents are there")


@index.command("create")
@service_command
def create_index(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The index's name.")],
    on: Annotated[str, typer.Argument(help="A table or view.")],
    key: Annotated[list[str], typer.Argument(help="Columns that reads will name.")],
) -> None:
    """Keeps a table or view ready for reads by some columns."""
    set_up_logging("warning")
    with_client(target, lambda client: client.create_index(name, on, key))
    print(f"index {name} is made")


@service_command
def drop(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="A table, view or index.")]
) -> None:
    """Drops a table, view or index that nothing else needs."""
    set_up_logging("warning")
    with_client(target, lambda client: client.drop(name))
    print(f"{name} is dropped")


@service_command
def insert(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The table's name.")],
    file: Annotated[
        Path, typer.Argument(help="Of JSON objects, a line each; - or nothing: stdin.")
    ] = STDIN,
) -> None:
    """Inserts rows, given as JSON objects, a line each, as `peek --json` and copies write them.

    Dates and times are ISO 8601, binary is base64, "NaN" a float, a map an object. Every 10,000
    lines are one write, all or none. When one fails, those before it stay.
    """
    set_up_logging("warning")
    if file == STDIN:
        rows, time = run_loop(lambda: _insert(target, name, sys.stdin.buffer))
    else:
        try:
            opened = file.open("rb")
        except OSError as error:
            raise BadSettings(f"{file} cannot be read: {error.strerror}") from None
        with opened:
            rows, time = run_loop(lambda: _insert(target, name, opened))
    print(f"{rows} rows are in {name}" + (f" at {time}" if rows else ""))


async def _insert(target: ServiceTarget, name: str, lines: BinaryIO) -> tuple[int, int]:
    from actors.doors.client.client import Client

    done = time = 0
    async with await Client.connect(target.address, settings=target.settings) as client:
        objects = {found.name.lower(): found for found in (await client.status()).objects}
        table = objects.get(name.lower())
        if table is None or table.schema is None:
            raise UnknownObject(f"there is no table {name}")
        try:
            for rows in tables(lines, table.schema, table.column_defaults.keys()):
                time = await client.insert(name, rows)
                done += len(rows)
        except PenstockError as error:
            if done:
                print(f"penstock: the first {done} rows are in {name}", file=sys.stderr)
            raise error
    return done, time


def tables(
    lines: BinaryIO, schema: TableSchema, defaults: Collection[str] = ()
) -> Iterator[pa.Table | list[dict[str, Any]]]:
    """Yield the rows of the lines, `ROWS_AT_ONCE` at a time; without the columns of `defaults` that
    a line leaves out. Raises `InvalidUsage` with the number of a line that is no row of the
    table."""
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
        # Bounded: a file without line ends must not be read into memory whole.
        line = lines.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise InvalidUsage(f"line {number} is longer than {LINE_BYTES_MAX} bytes")
        if line.strip():
            try:
                rows.add(line, 1)
            except RowMisfit as error:
                raise _no_row(number, error) from None
            numbers.append(number)
            # Only then the names are read a second time.
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
    """Return rows without the columns that each leaves out."""
    return [
        {name: value for name, value in row.items() if name not in names}
        for row, names in zip(rows.to_pylist(), left_out, strict=True)
    ]


def _no_row(number: int, error: Exception) -> InvalidUsage:
    return InvalidUsage(f"line {number} is no row of the table: {error}")


def _pair(text: str, what: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise BadSettings(f"{what} {text!r}: must be {form}")
    return key, value
