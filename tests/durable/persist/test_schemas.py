"""Schemas of a shard change in compatible ways only, and every part is read as any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from persist_world import INLINE, TINY, Stores  # type: ignore[import-not-found]

from actors.durable.persist import (
    BatchPart,
    NewShard,
    PartCondition,
    PartFilter,
    PersistClient,
    SchemaEvolved,
    SchemaMismatch,
    ShardAppend,
)
from actors.durable.persist.documents import decode_shard, encode, unsealed
from actors.durable.persist.schemas import SCHEMAS_MAX, check_compatible, evolved
from actors.durable.persist.shard import ShardState, created
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import (
    CorruptData,
    IncompatibleSchema,
    InvalidUsage,
    TypeMismatch,
    UnknownObject,
)
from actors.runtime.kernel import SystemClock


def schema(*columns: str, key: tuple[str, ...] = ()) -> TableSchema:
    """From "name type", with "!" behind for NOT NULL."""
    made = []
    for text in columns:
        name, kind = text.rstrip("!").split(" ", 1)
        made.append(TableColumn(name, kind, not text.endswith("!")))
    return TableSchema(tuple(made), key)


OLD = schema("id int!", "f float", "s string", key=("id",))
NEW = schema("id bigint!", "f double", "s string", "more int", "last string", key=("id",))


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (schema("id int!", "f float", key=("id",)), "column s would be dropped"),
        (schema("id int!", "f float", "t string", key=("id",)), "s would be renamed to t"),
        (schema("f float", "id int!", "s string", key=("id",)), "column id would be moved"),
        (schema("id int!", "n int", "f float", "s string", key=("id",)), "f would be moved"),
        (
            schema("id smallint!", "f float", "s string", key=("id",)),
            "id cannot be changed from int to smallint",
        ),
        (
            schema("id string!", "f float", "s string", key=("id",)),
            "id cannot be changed from int to string",
        ),
        (
            schema("id double!", "f float", "s string", key=("id",)),
            "id cannot be changed from int to double",
        ),
        (
            schema("id int!", "f int", "s string", key=("id",)),
            "f cannot be changed from float to int",
        ),
        (
            schema("id int!", "f float", "s varchar(3)", key=("id",)),
            "s cannot be changed from string to varchar",
        ),
        (schema("id int!", "f float!", "s string", key=("id",)), "f may contain NULLs and cannot"),
        (schema("id int!", "f float", "s string", "n int!", key=("id",)), "n must be nullable"),
        (
            schema("id int!", "f float", "s string", "s string", key=("id",)),
            "duplicate column names",
        ),
        (schema("id int!", "f float", "s string"), "the key .id. would become"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_would_change_the_meaning_is_refused_by_name(new: TableSchema, says: str) -> None:
    with pytest.raises(IncompatibleSchema, match=says):
        check_compatible("s", OLD, new)


@pytest.mark.parametrize(
    "new",
    [
        NEW,
        OLD,
        schema("id int", "f float", "s string", key=("id",)),
        schema("id integer!", "f real", "s string", "m map<string,int>", key=("id",)),
    ],
)
def test_compatible_schemas_are_accepted(new: TableSchema) -> None:
    state = evolved(created(NewShard("s", OLD), "w", 1), 0, new)
    assert isinstance(state, ShardState)
    assert (*state.older, state.schema) == ((OLD,) if new == OLD else (OLD, new))


def test_a_shard_has_so_many_schemas_at_most() -> None:
    state = created(NewShard("s", schema("a int")), "w", 1)
    for number in range(1, SCHEMAS_MAX):
        then = evolved(state, number - 1, schema("a int", *(f"b{n} int" for n in range(number))))
        assert isinstance(then, ShardState)
        state = then
    with pytest.raises(IncompatibleSchema, match="has already had 256 schemas"):
        evolved(
            state,
            SCHEMAS_MAX - 1,
            replace(state.schema, columns=(*state.schema.columns, TableColumn("x", "int"))),
        )


def rows(shape: TableSchema, *values: Sequence[Any], time: int) -> pa.Table:
    columns = [
        pa.array(list(column), field.type)
        for column, field in zip(zip(*values, strict=True), shape.arrow(), strict=True)
    ]
    count = len(values)
    return pa.table([*columns, [time] * count, [1] * count], names=[*shape.names, TIME, DIFF])


async def put(client: PersistClient, table: pa.Table) -> tuple[BatchPart, ...]:
    lower = (await client.state("s")).upper
    parts = await client.write_parts("s", table)
    await client.append([ShardAppend("s", lower, lower + 1, parts)])
    return parts


async def read(client: PersistClient, shape: TableSchema) -> list[tuple[Any, ...]]:
    reader = await client.open_reader("s", "r")
    parts, _ = await reader.snapshot((await client.upper("s")) - 1)
    found: list[tuple[Any, ...]] = []
    for part in parts:
        table = await client.fetch(part, shape)
        assert table.schema.equals(shape.arrow_updates())
        found += zip(*(table[name].to_pylist() for name in shape.names), strict=True)
    await reader.close()
    return sorted(found, key=repr)


@pytest.mark.parametrize(
    "settings",
    [TINY, INLINE, replace(TINY, decoded_parts_bytes_max=1 << 20)],
    ids=["blob", "inline", "kept"],
)
async def test_old_parts_are_read_as_the_newest_and_new_ones_as_older(settings: Any) -> None:
    stores = Stores(settings)
    client = stores.client()
    await client.create_shards([NewShard("s", OLD)])
    (old,) = await put(client, rows(OLD, (1, 0.1, "a"), (2, math.inf, None), time=0))
    assert await client.schemas.evolve("s", 0, NEW) == SchemaEvolved(1)
    with pytest.raises(InvalidUsage, match="updates lack columns more, last"):
        await client.write_parts("s", rows(OLD, (3, 0.5, "b"), time=1))
    (new,) = await put(client, rows(NEW, (3, 0.5, "b", 7, "z"), time=1))
    assert (old.schema_id, new.schema_id) == (0, 1)
    single = pa.scalar(0.1, pa.float32()).cast(pa.float64()).as_py()
    wanted = [(1, single, "a", None, None), (2, math.inf, None, None, None), (3, 0.5, "b", 7, "z")]
    narrow = [(1, single, "a"), (2, math.inf, None), (3, 0.5, "b")]
    for _ in range(2):  # as other orders of asking, and another process, see it
        assert await read(client, NEW) == wanted
        assert await read(client, OLD) == narrow
        client = stores.client()
    assert await client.schemas.schemas("s") == (OLD, NEW)
    # What an older schema has no room for is refused, not cut.
    (large,) = await put(client, rows(NEW, (1 << 40, 0.5, None, None, None), time=2))
    with pytest.raises(TypeMismatch, match="where id is int64, and a value does not fit int32"):
        await client.fetch(large, OLD)
    (fine,) = await put(client, rows(NEW, (5, 0.1, None, None, None), time=3))
    with pytest.raises(TypeMismatch, match="where f is double, and a value does not fit float"):
        await client.fetch(fine, OLD)


async def test_compaction_rewrites_to_the_newest() -> None:
    client = Stores(TINY).client()
    await client.create_shards([NewShard("s", OLD)])
    for number in range(3):
        await put(client, rows(OLD, (number, 0.5, "a"), time=number))
    await client.schemas.evolve("s", 0, NEW)
    for number in range(3, 6):
        await put(client, rows(NEW, (number, 0.5, "a", number, None), time=number))
    before = await read(client, NEW)
    await client.maintain("s")
    state = await client.state("s")
    merged = [part for batch in state.batches for part in batch.parts if part.rows > 1]
    assert merged
    assert {part.schema_id for part in merged} == {1}
    assert await read(client, NEW) == before
    # Statistics of either schema serve one filter.
    wanted = PartFilter(NEW, [PartCondition("id", ">", (pa.scalar(99, pa.int64()),))])
    reader = await client.open_reader("s", "f")
    assert await reader.snapshot(5, wanted) == ((), 6)


async def test_evolve_is_a_compare_and_set_on_the_number() -> None:
    stores = Stores(TINY, exclusive=False)
    one, two = stores.client(), stores.client()
    await one.create_shards([NewShard("s", OLD)])
    await two.state("s")
    assert await one.schemas.evolve("s", 0, NEW) == SchemaEvolved(1)
    assert await one.schemas.evolve("s", 0, NEW) == SchemaEvolved(1), "it is that one already"
    other = replace(OLD, columns=(*OLD.columns, TableColumn("b", "int")))
    assert await two.schemas.evolve("s", 0, other) == SchemaMismatch("s", 0, 1, NEW)
    with pytest.raises(IncompatibleSchema, match="id cannot be changed from bigint to int"):
        await two.schemas.evolve("s", 1, other)
    with pytest.raises(UnknownObject):
        await two.schemas.evolve("t", 0, NEW)
    wide = replace(NEW, columns=(*NEW.columns, TableColumn("b", "int")))
    assert await two.schemas.evolve("s", 1, wide) == SchemaEvolved(2)
    wider = replace(NEW, columns=(*wide.columns, TableColumn("c", "int")))
    assert await one.schemas.evolve("s", 2, wider) == SchemaEvolved(3), "2 is current, as two knows"
    state = await stores.client().state("s")
    assert (state.schema, state.older) == (wider, (OLD, NEW, wide))


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_evolution_whose_answer_was_lost_is_done_once(fail: str) -> None:
    stores = Stores(TINY)
    client = stores.client()
    await client.create_shards([NewShard("s", OLD)])
    stores.consensus.fail = fail
    assert await client.schemas.evolve("s", 0, NEW) == SchemaEvolved(1)
    assert (await stores.client().state("s")).older == (OLD,)


async def test_a_part_written_before_is_appended_after() -> None:
    client = Stores(TINY).client()
    await client.create_shards([NewShard("s", OLD)])
    parts = await client.write_parts("s", rows(OLD, (1, 0.5, "a"), time=0))
    await client.schemas.evolve("s", 0, NEW)
    await client.append([ShardAppend("s", 0, 1, parts)])
    assert await read(client, NEW) == [(1, 0.5, "a", None, None)]


async def test_an_adopted_file_has_one_of_the_shards_schemas(tmp_path: Path) -> None:
    client = await PersistClient.open(tmp_path / "state", TINY, SystemClock())
    await client.create_shards([NewShard("s", OLD)])
    await client.schemas.evolve("s", 0, NEW)
    files = {
        "old": rows(OLD, (1, 0.5, "a"), time=0),
        "new": rows(NEW, (2, 0.5, "a", 1, "b"), time=0),
        "other": rows(schema("id int", "x int"), (1, 2), time=0),
    }
    for name, table in files.items():
        pq.write_table(table, tmp_path / name)
    old = await client.adopt_file("s", tmp_path / "old", 1, 0, 0)
    new = await client.adopt_file("s", tmp_path / "new", 1, 0, 0)
    assert (old.schema_id, new.schema_id) == (0, 1)
    with pytest.raises(InvalidUsage, match="has columns id, x"):
        await client.adopt_file("s", tmp_path / "other", 1, 0, 0)
    (tmp_path / "junk").write_bytes(b"junk" * 9)
    with pytest.raises(InvalidUsage, match="is not a Parquet file"):
        await client.adopt_file("s", tmp_path / "junk", 1, 0, 0)
    await client.append([ShardAppend("s", 0, 1, (old, new))])
    assert await read(client, NEW) == [(1, 0.5, "a", None, None), (2, 0.5, "a", 1, "b")]
    await client.close()


async def test_a_part_of_another_kind_is_no_older_part() -> None:
    client = Stores(INLINE).client()
    await client.create_shards([NewShard("s", OLD)])
    (part,) = await put(client, rows(OLD, (1, 0.5, "a"), time=0))
    for wrong, says in (
        (schema("x int", "id int"), "has no x"),
        (schema("id int", "x int!"), "has no x"),
        (schema("id int", "x int", "s string"), "it has s but not x"),
        (schema("id string", "s string"), "id as int32, which cannot become string"),
    ):
        with pytest.raises(CorruptData, match=says):
            await client.fetch(part, wrong)


def test_schemas_survive_the_document_and_bind_its_parts() -> None:
    state = evolved(created(NewShard("s", OLD), "w", 1), 0, NEW)
    assert isinstance(state, ShardState)
    assert decode_shard("shard/s", encode(state)) == state
    newest = unsealed("shard/s", encode(created(NewShard("s", OLD), "w", 1)))
    old = msgspec.msgpack.decode(newest) | {"version": 1}
    del old["older"]
    assert decode_shard("shard/s", msgspec.msgpack.encode(old)).schema_id == 0
