"""What goes out comes back, value by value: of every type, in every format, and from a shell."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.connectors.sinks.formats import FILE_BYTES_MIN, JsonLines, OutputFiles, check_format
from actors.connectors.sources.copied_files import read_copied
from actors.connectors.sources.file_reading import _from_parquet, has_types
from actors.control.controller.tables.rows import fit
from actors.doors.client.answers import CopyFormat
from actors.doors.commands import cli
from actors.doors.commands.copy_from import read_rows
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type, inner_types, text_limit
from actors.model.protocol.compute import CopyToExport
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from service_house import running_service  # type: ignore[import-not-found]

FLAT = (
    *("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary"),
    *("date", "timestamp", "timestamp_ntz", "void", "decimal(1,1)", "decimal(12,2)"),
    *("decimal(38,0)", "char(3)", "varchar(4)"),
)
KEYS = [kind for kind in FLAT if kind != "void"]
NESTED = st.recursive(
    st.sampled_from(FLAT),
    lambda inner: st.one_of(
        inner.map(lambda kind: f"array<{kind}>"),
        st.tuples(st.sampled_from(KEYS), inner).map(lambda pair: f"map<{pair[0]},{pair[1]}>"),
        st.tuples(inner, inner).map(lambda pair: f"struct<a:{pair[0]},b c:{pair[1]}>"),
    ),
    max_leaves=4,
)


def values_of(kind: str) -> st.SearchStrategy[Any]:
    """Values of a type, never NULL, as Arrow takes them."""
    limit = text_limit(kind)
    if limit is not None:
        return st.text(max_size=limit[0])
    inner = inner_types(kind)
    if kind.startswith("array<"):
        return st.lists(st.none() | values_of(inner[0]), max_size=3)
    if kind.startswith("map<"):
        keys = st.lists(values_of(inner[0]), max_size=3, unique_by=repr)
        return keys.flatmap(
            lambda names: st.tuples(
                *(st.tuples(st.just(name), st.none() | values_of(inner[1])) for name in names)
            ).map(list)
        )
    if kind.startswith("struct<"):
        return st.fixed_dictionaries(
            {"a": st.none() | values_of(inner[0]), "b c": st.none() | values_of(inner[1])}
        )
    type_ = arrow_type(kind)
    if pa.types.is_integer(type_):
        half = 1 << (type_.bit_width - 1)
        return st.integers(-half, half - 1)
    if pa.types.is_decimal(type_):
        most = 10**type_.precision - 1
        return st.integers(-most, most).map(lambda n: Decimal(f"{n}e{-type_.scale}"))
    if pa.types.is_floating(type_):
        return st.floats(width=32 if type_.bit_width == 32 else 64)
    flat: dict[str, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "string": st.text() | st.sampled_from(["", "NULL", "NaN", '"', "\r\n", ",", "\\", "\0"]),
        "binary": st.binary(),
        "date": st.dates(),
        "timestamp": st.datetimes(timezones=st.just(UTC)),
        "timestamp_ntz": st.datetimes(),
        "void": st.none(),
    }
    return flat[kind]


def tables_of(
    kinds: st.SearchStrategy[list[str]], name: str
) -> st.SearchStrategy[tuple[TableSchema, pa.Table]]:
    """A table of some columns, its rows as they would be stored."""

    def made(chosen: list[str]) -> st.SearchStrategy[tuple[TableSchema, pa.Table]]:
        schema = TableSchema(
            tuple(TableColumn(f"{name}{n}", kind) for n, kind in enumerate(chosen))
        )

        def stored(rows: list[tuple[Any, ...]]) -> tuple[TableSchema, pa.Table]:
            shape = schema.arrow()
            columns = [
                pa.array(values, field.type)
                for values, field in zip(zip(*rows, strict=True), shape, strict=True)
            ]
            return schema, fit("t", schema, pa.table(columns, schema=shape))

        row = st.tuples(*(st.none() | values_of(kind) for kind in chosen))
        return st.lists(row, min_size=1, max_size=6).map(stored)

    return kinds.flatmap(made)


class Place:
    """Takes the files of a copy into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str) -> IO[bytes]:
        return (self._folder / name).open("wb")

    def seal(self, file: IO[bytes]) -> None:
        file.close()

    def path(self, name: str) -> str:
        return str(self._folder / name)


def as_told(table: pa.Table) -> list[str]:
    """The rows, by which NaN equals NaN and -0.0 is not 0.0."""
    return [repr(row) for row in table.to_pylist()]


def gone_out_and_come_back(
    folder: Path, kind: CopyFormat, schema: TableSchema, table: pa.Table
) -> pa.Table:
    check_format(schema, CopyToExport(schema, "", kind, FILE_BYTES_MIN))
    files = OutputFiles(Place(folder), schema.arrow(), kind, FILE_BYTES_MIN)
    for row in range(table.num_rows):
        files.append(table.slice(row, 1))
    paths = [file.path for file in files.finish()]
    if kind == "parquet":
        assert all(has_types(path, schema) for path in paths)
        return pa.concat_tables(_from_parquet(paths, schema))
    return pa.concat_tables(rows for path in paths for rows in read_copied(path, kind, schema))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


FLAT_TABLES = tables_of(st.lists(st.sampled_from(FLAT), min_size=1, max_size=4), 'c "\n,')
ALL_TABLES = tables_of(st.lists(NESTED, min_size=1, max_size=3), "c {'é")


@given(made=FLAT_TABLES)
def test_csv_comes_back(made: tuple[TableSchema, pa.Table], folder: Path) -> None:
    schema, table = made
    found = gone_out_and_come_back(folder, "csv", schema, table)
    assert found.schema == table.schema
    assert as_told(found) == as_told(table)


@pytest.mark.parametrize("kind", ["json", "parquet"])
@given(made=ALL_TABLES)
def test_json_and_parquet_come_back(
    kind: CopyFormat, made: tuple[TableSchema, pa.Table], folder: Path
) -> None:
    schema, table = made
    found = gone_out_and_come_back(folder, kind, schema, table)
    assert found.schema == table.schema
    assert as_told(found) == as_told(table)


@given(made=ALL_TABLES)
def test_what_peek_prints_insert_reads(made: tuple[TableSchema, pa.Table]) -> None:
    schema, table = made
    lines = JsonLines(table.schema).encode(table)
    assert lines.count(b"\n") == table.num_rows
    found = pa.concat_tables(read_rows(io.BytesIO(lines), schema))
    assert as_told(found) == as_told(table)


# -- through a service ----------------------------------------------------------------------------

AT, DAY = datetime(2026, 1, 2, 3, 4, 5, 678, UTC), date(1, 12, 31)
NAIVE = AT.replace(tzinfo=None)
COLUMNS = {f"k{n}": kind for n, kind in enumerate(FLAT) if kind != "void"}
DEEP = {
    "m": "map<int,array<decimal(9,2)>>",
    "s": "struct<at:timestamp,b:binary,f:map<string,double>>",
    "c": "array<char(3)>",
    "d": "map<date,map<boolean,float>>",
}
ROWS: list[dict[str, Any]] = [
    {
        **dict(zip(COLUMNS, values, strict=True)),
        "m": {1: [Decimal("1.50"), None], -7: []},
        "s": {"at": AT, "b": b"\xff\x00", "f": {"": float("nan"), "x": None}},
        "c": ["ab", None],
        "d": {date(2026, 1, 2): {True: 0.5, False: float("-inf")}},
    }
    for values in (
        (
            *(True, -128, 7, -1, 2**62, 0.1, float("nan"), 'a "b"\r\n\\,', b"\x00\xff", DAY, AT),
            *(NAIVE, Decimal("0.1"), Decimal("-1.50"), Decimal(10**38 - 1), "ab", "abcd"),
        ),
        (
            *(False, 0, 0, 0, 0, float("inf"), -0.0, "", b"", DAY, AT),
            *(NAIVE, Decimal("0.0"), Decimal("0.00"), Decimal(-1), "", ""),
        ),
    )
]
ROWS += [{}, {"m": {}, "s": {}, "c": [], "d": {date(1, 1, 1): None}}]


async def penstock(*given: str, stdin: bytes = b"") -> bytes:
    """What a command printed."""
    done = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(cli.app, given, input=stdin))
    assert done.exception is None, done.output
    return bytes(done.stdout_bytes)


async def test_what_goes_out_of_a_service_comes_back_into_one(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        copy_dir=str(copies),
        source_dirs=str(copies),
        statistics_ms=10,
    )
    async with running_service(settings) as (service, client):
        await client.create_table("t", COLUMNS | DEEP)
        await client.create_table("flat", COLUMNS)
        await client.insert("t", ROWS)
        await client.insert("flat", [{name: row.get(name) for name in COLUMNS} for row in ROWS])
        for name in ("t", "flat"):
            wanted = sorted(as_told(await client.peek(name)))
            connect = ("--connect", service.address)
            printed = await penstock("peek", name, "--json", *connect)
            for kind in ("csv", "json", "parquet", "peek"):
                again = f"{name}_{kind}"
                if (name, kind) == ("t", "csv"):
                    with pytest.raises(InvalidUsage, match="CSV does not support nested columns"):
                        await client.copy_to(name, again, format="csv")
                    continue
                await client.create_table(again, COLUMNS | (DEEP if name == "t" else {}))
                if kind == "peek":
                    await penstock("insert", again, "-", *connect, stdin=printed)
                else:
                    await client.copy_to(name, again, format=kind)
                    given = ("copy-from", again, str(copies / again), "--format", kind)
                    await penstock(*given, "--quiet", *connect)
                assert sorted(as_told(await client.peek(again))) == wanted, again
        exported = b"".join(file.read_bytes() for file in copies.glob("t_json/*/*.json"))
        await client.create_table("last", COLUMNS | DEEP)
        await penstock("insert", "last", *connect, stdin=exported)
        assert sorted(as_told(await client.peek("last"))) == sorted(as_told(await client.peek("t")))
