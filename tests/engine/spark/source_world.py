"""A shard in a state directory, and the data source over it as Spark calls it, without a JVM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
from msgspec.structs import replace
from pyspark.serializers import CPickleSerializer
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from actors.durable.persist import (
    CompareAndSet,
    NewShard,
    PersistClient,
    ShardAppend,
    ShardState,
    shard_key,
)
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.durable.persist.documents import decode_shard, encode
from actors.durable.persist.guest_leases import guest_lease, is_guest
from actors.durable.persist.schemas import SchemaEvolved
from actors.engine.spark.source.data_source import FilteringReader, PenstockDataSource
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import error_update
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

S = "s1"
SCHEMA = TableSchema((TableColumn("id", "bigint"), TableColumn("name", "string")))
SETTINGS = Settings(
    inline_part_bytes_max=1,
    batches_per_shard_max=1000,
    part_list_parts_min=1,
    blob_orphan_grace_ms=1,
)
"""Every part is described by a list, outside the document."""
Update = tuple[int, str | None, int, int]
pickle = CPickleSerializer()
NAIVE = datetime(2020, 1, 1, tzinfo=UTC).replace(tzinfo=None)


class World:
    """A state directory with one shard, and a service's client of it between the reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, body: Any) -> Any:
        async def opened() -> Any:
            client = await PersistClient.open(self.folder, SETTINGS, SystemClock())
            try:
                return await body(client)
            finally:
                await client.close()

        return anyio.run(opened)

    def make(self, schema: TableSchema = SCHEMA) -> None:
        self.run(lambda client: client.create_shards([NewShard(S, schema, holds={"h": 0})]))

    def append(self, upper: int, updates: Sequence[Update], error: str | None = None) -> None:
        errors = [] if error is None else [error_update(SCHEMA, error, upper - 1, 1)]
        self.tables(upper, table(updates), *errors)

    def tables(self, upper: int, *tables: pa.Table) -> None:
        async def body(client: PersistClient) -> None:
            lower = (await client.state(S)).upper
            parts: list[Any] = []
            for one in tables:
                parts += await client.write_parts(S, one)
            await client.append([ShardAppend(S, lower, upper, tuple(parts))])

        self.run(body)

    def since(self, time: int) -> None:
        async def body(client: PersistClient) -> None:
            await client.set_hold(S, "h", time)
            await client.maintain(S)

        self.run(body)

    def compact(self) -> None:
        async def body(client: PersistClient) -> None:
            await client.upkeep.compact(S)
            await client.upkeep.collect(S)

        self.run(body)

    def state(self) -> ShardState:
        state: ShardState = self.run(lambda client: client.state(S))
        return state

    def guests(self) -> list[str]:
        async def body() -> ShardState:
            async with open_as_guest(
                StoreLocation(state_dir=str(self.folder)), SETTINGS, SystemClock()
            ) as found:
                return await found.client.state(S)

        return [name for name in anyio.run(body).leases if is_guest(name) and "tasks" in name]

    def evolve(self, schema: TableSchema) -> None:
        async def body(client: PersistClient) -> None:
            newest = len(await client.schemas.schemas(S)) - 1
            assert isinstance(await client.schemas.evolve(S, newest, schema), SchemaEvolved)

        self.run(body)

    def drop_guests(self) -> None:
        """All leases from outside end."""
        self._drop_leases("")

    def drop_loads(self) -> None:
        """Those of what was loaded end."""
        self._drop_leases(guest_lease("", "load"))

    def _drop_leases(self, prefix: str) -> None:
        async def body(client: PersistClient) -> None:
            key = shard_key(S)
            head = await client.head(key)
            assert head is not None
            state = decode_shard(key, head.data)
            kept = {n: lease for n, lease in state.leases.items() if not n.startswith(prefix)}
            state = replace(state, leases=kept)
            assert await client.compare_and_set([CompareAndSet(key, head.seqno, encode(state))])

        self.run(body)

    def source(self, **options: object) -> PenstockDataSource:
        given = {"stateDir": str(self.folder), "shard": S} | {k: str(v) for k, v in options.items()}
        return PenstockDataSource({name: value for name, value in given.items() if value != "None"})


def table(updates: Sequence[Update]) -> pa.Table:
    ids, names, times, diffs = zip(*updates, strict=True) if updates else ((), (), (), ())
    columns = [pa.array(ids, pa.int64()), pa.array(names, pa.string())]
    columns += [pa.array(times, pa.int64()), pa.array(diffs, pa.int64())]
    return pa.table(columns, names=["id", "name", TIME, DIFF])


def spark_schema(source: PenstockDataSource) -> StructType:
    """What Spark makes of the DDL."""
    source.schema()
    loaded = source._load()
    schema = from_arrow_schema(loaded.schema.arrow())
    if loaded.options.changes:
        for name in ("_time", "_diff"):
            schema.add(StructField(name, LongType(), nullable=False))
    return schema


def planned(source: PenstockDataSource, filters: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """The reader and its partitions, as they are after they went through Spark."""
    source = pickle.loads(pickle.dumps(source)) if source._loaded else source
    schema = spark_schema(source)
    reader = FilteringReader(source._load(), schema)
    assert list(reader.pushFilters(list(filters))) == list(filters)
    partitions = list(reader.partitions())
    again: tuple[Any, list[Any]] = pickle.loads(pickle.dumps((reader, partitions)))
    return again


def rows_of(reader: Any, partitions: Sequence[Any]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for partition in partitions:
        for batch in reader.read(partition):
            found.update(zip(*[column.to_pylist() for column in batch.columns], strict=True))
    return found


def rows(source: PenstockDataSource, filters: Sequence[Any] = ()) -> Counter[tuple[Any, ...]]:
    return rows_of(*planned(source, filters))


def changes(found: Counter[tuple[Any, ...]]) -> dict[tuple[Any, ...], int]:
    """Summed: rows with their time, and by how much."""
    total: Counter[tuple[Any, ...]] = Counter()
    for (*row, diff), count in found.items():
        total[tuple(row)] += diff * count
    return {row: diff for row, diff in total.items() if diff}
