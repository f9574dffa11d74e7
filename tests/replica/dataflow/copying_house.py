"""Copies as tests make them, and what they find in the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    InlineClock,
    shard,
    table,
    write,
)

from actors.connectors.sinks.copy_output import LOCK, CopyOutput, OpenOutput, output_opener
from actors.connectors.sinks.sink_storage import SinkStorage
from actors.durable.persist import PersistClient
from actors.model.plan.copy_manifest import MANIFEST, CopyManifest
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import (
    CopyDone,
    CopyToExport,
    DataflowDescription,
    ShardImport,
)
from actors.replica.dataflow.copying import CopyPosition, copy
from actors.runtime.settings import Settings

Row = tuple[Any, ...]
CLOCK = InlineClock()


def settings_of(place: Path, **changes: Any) -> Settings:
    made: Settings = msgspec.structs.replace(SETTINGS, copy_dir=str(place / "copies"), **changes)
    return made


def described(
    schema: TableSchema,
    name: str = "numbers",
    *,
    format: Any = "parquet",
    as_of: int = 4,
    size: int = 1 << 20,
    destination: str = "out",
    overwrite: bool = False,
    id: str = "t1",
) -> DataflowDescription:
    export = CopyToExport(schema, destination, format, size, overwrite)
    return DataflowDescription(id, name, (ShardImport(name, schema),), export, as_of)


async def copied(
    persist: PersistClient,
    place: Path,
    description: DataflowDescription,
    *,
    storage: SinkStorage | None = None,
    far: Callable[[CopyPosition], Any] = lambda _: None,
) -> CopyDone:
    """The copy, run to its end; `storage`: into this one."""
    make: OpenOutput = output_opener(settings_of(place), CLOCK, place / "scratch" / "upload", "1")
    if storage is not None:
        make = lambda export, id_: output_in(storage, id_, overwrite=export.overwrite)  # noqa: E731
    with anyio.fail_after(200):
        return await copy(persist, CLOCK, description, make, place / "scratch", far)


def output_in(storage: SinkStorage, copy: str, *, overwrite: bool = False) -> CopyOutput:
    return CopyOutput(storage, copy, "1", overwrite=overwrite, clock=CLOCK, settings=SETTINGS)


def manifest_of(place: Path, destination: str = "out") -> CopyManifest:
    path = place / "copies" / destination / MANIFEST
    return msgspec.json.decode(path.read_bytes(), type=CopyManifest)


def left_behind(place: Path, destination: str = "out") -> list[str]:
    """All that lies in the folder, but for the lock."""
    folder = place / "copies" / destination
    found = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
    return [name for name in found if name != LOCK]


def read(place: Path, schema: TableSchema, destination: str = "out") -> list[Row]:
    """The rows that the manifest's files hold, as any reader of the format sees them."""
    manifest = manifest_of(place, destination)
    rows: list[Row] = []
    for file in manifest.files:
        path = place / "copies" / destination / file.path
        assert path.stat().st_size == file.bytes
        found = read_file(path, manifest.format, schema)
        assert len(found) == file.rows
        rows += found
    assert sum(file.rows for file in manifest.files) == manifest.rows == len(rows)
    return rows


def read_file(path: Path, format: str, schema: TableSchema) -> list[Row]:
    """The rows of one file, as any reader of the format sees them."""
    match format:
        case "parquet":
            found = pa.parquet.read_table(path)
            assert found.schema.equals(schema.arrow())
        case "csv":
            types = {f.name: f.type for f in schema.arrow()}
            types |= {n: pa.string() for n, t in types.items() if pa.types.is_binary(t)}
            options = pa.csv.ConvertOptions(
                column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False
            )
            parsing = pa.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
            found = pa.csv.read_csv(path, convert_options=options, parse_options=parsing)
        case _:
            lines = [json.loads(t, parse_float=Decimal) for t in path.read_text().splitlines()]
            return [tuple(line.values()) for line in lines]
    return [tuple(row.values()) for row in found.to_pylist()]


async def three_files(persist: PersistClient) -> DataflowDescription:
    await shard(persist, "numbers", NUMBERS)
    rows = [((n * 7_919) ** 3 % 1_000_000_007, 1, 1) for n in range(3_000)]
    await write(persist, "numbers", 5, table(NUMBERS, *rows))
    return described(NUMBERS, format="csv", size=12_000)
