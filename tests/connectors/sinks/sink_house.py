"""Updates as the tests of the sinks write them, and what they find outside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from actors.connectors.sinks.delta import DeltaConfig, DeltaSink
from actors.connectors.sinks.parquet import MANIFESTS, BatchManifest
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sinks.sink_storage import FolderSinkStorage
from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string")))
KEYED = TableSchema(
    (TableColumn("a", "bigint", nullable=False), TableColumn("b", "string")), ("a",)
)
Update = tuple[Any, ...]
"""The columns, a time, a diff."""
FIRST: list[Update] = [(1, "x", 5, 2), (2, None, 5, 1)]


class InlineClock(SystemClock):
    """Calls run inline; the monotonic clock may be ahead."""

    ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.ahead_ms

    async def run_blocking(self, function: Any) -> Any:
        return function()


def settings_of(place: Path, **changes: Any) -> Settings:
    made = Settings(
        sink_dir=str(place),
        inline_part_bytes_max=1,
        inline_bytes_per_shard_max=1,
        decoded_parts_bytes_max=1,
        batches_per_shard_max=4,
    )
    return msgspec.structs.replace(made, **changes)


def updates(rows: Iterable[Update], schema: TableSchema = SCHEMA) -> pa.Table:
    shape = schema.arrow_updates()
    found = [dict(zip(shape.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(found, schema=shape)


def errors(rows: Iterable[tuple[str, int, int]], schema: TableSchema = SCHEMA) -> pa.Table:
    """Error updates: (text, time, diff)."""
    shape = schema.arrow_updates().append(pa.field(ERROR, pa.string()))
    empty = dict.fromkeys(schema.names)
    found = [empty | {ERROR: text, TIME: time, DIFF: diff} for text, time, diff in rows]
    return pa.Table.from_pylist(found, schema=shape)


async def shard(
    persist: PersistClient, schema: TableSchema = SCHEMA, name: str = "s", tables: bool = False
) -> None:
    await persist.create_shards([NewShard(name, schema, holds={"us": 0}, tables=tables)])


async def append(
    persist: PersistClient,
    upper: int,
    rows: Sequence[Update] = (),
    failed: Sequence[tuple[str, int, int]] = (),
    schema: TableSchema = SCHEMA,
    name: str = "s",
) -> None:
    """Rows, and errors (text, time, diff), up to an upper."""
    lower = (await persist.state(name)).upper
    parts = await persist.write_parts(name, updates(rows, schema))
    if failed:
        parts += await persist.write_parts(name, errors(failed, schema))
    done = await persist.append([ShardAppend(name, lower, upper, parts)])
    assert isinstance(done, AppendCommitted)


def delta(folder: Path, mode: Any, settings: Settings, clock: Any, token: str) -> DeltaSink:
    config = DeltaConfig(folder.name, mode, creation="c")
    return DeltaSink(config, FolderSinkStorage(folder), "u1", token, settings, clock)


async def batch(
    made: SinkConnector, lower: int, upper: int, *rows: Update, schema: TableSchema = SCHEMA
) -> None:
    """Write rows, if there are any, and commit."""
    if rows:
        await made.write(updates(rows, schema))
    await made.commit(lower, upper)


def tuples(table: pa.Table) -> list[Update]:
    return [tuple(row.values()) for row in table.to_pylist()]


def bag(rows: Iterable[Update]) -> Counter[str]:
    """Rows as often as they are there; as text, so that any value counts."""
    return Counter(repr(row) for row in rows)


def in_table(folder: Path) -> list[Update]:
    return tuples(DeltaTable(folder).to_pyarrow_table())


def upper_of_table(folder: Path) -> int | None:
    return DeltaTable(folder).transaction_version("penstock/u1/c")


def manifests(folder: Path) -> list[BatchManifest]:
    """In order; each file is checked to be what its manifest says."""
    found = []
    for path in sorted((folder / MANIFESTS).glob("*.json")):
        manifest = msgspec.json.decode(path.read_bytes(), type=BatchManifest)
        assert json.loads(path.read_bytes())["number"] == int(path.stem)
        assert manifest.rows == sum(file.rows for file in manifest.files)
        for file in manifest.files:
            assert pq.read_metadata(folder / file.path).num_rows == file.rows
            assert (folder / file.path).stat().st_size == file.bytes
        found.append(manifest)
    return found


def in_files(folder: Path) -> list[Update]:
    """All rows that the manifests name."""
    rows: list[Update] = []
    for manifest in manifests(folder):
        for file in manifest.files:
            rows += tuples(pq.read_table(folder / file.path))
    return rows


def contents(changes: Iterable[Update], until: int | None = None) -> Counter[str]:
    """What changes (columns, time, diff) sum up to."""
    sums: Counter[str] = Counter()
    for *row, time, diff in changes:
        if until is None or time < until:
            sums[repr(tuple(row))] += diff
    assert all(count >= 0 for count in sums.values()), sums
    return +sums


def expanded(counts: Counter[str]) -> list[str]:
    return sorted(counts.elements())
