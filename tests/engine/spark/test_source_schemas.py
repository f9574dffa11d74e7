"""The data source over shards whose schema has changed, without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType
from source_world import (  # type: ignore[import-not-found]
    World,
    changes,
    planned,
    rows,
    rows_of,
    spark_schema,
)

from actors.engine.spark.source.data_source import FilteringReader, PenstockDataSource
from actors.engine.spark.spark_releases import pushed_filter
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import TypeMismatch

NARROW = TableSchema((TableColumn("id", "int", False), TableColumn("x", "float")))
WIDE = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("x", "double"), TableColumn("more", "string"))
)


def narrow(*rows_: tuple[int, float, int, int]) -> pa.Table:
    return pa.Table.from_pylist(
        [{"id": i, "x": x, TIME: at, DIFF: diff} for i, x, at, diff in rows_],
        NARROW.arrow_updates(),
    )


def wide(*rows_: tuple[int | None, float, str | None, int, int]) -> pa.Table:
    return pa.Table.from_pylist(
        [{"id": i, "x": x, "more": m, TIME: at, DIFF: diff} for i, x, m, at, diff in rows_],
        WIDE.arrow_updates(),
    )


@pytest.fixture
def evolved_world(tmp_path: Path) -> World:
    """A part of either schema, the second of which retracts a row of the first."""
    made = World(tmp_path / "state")
    made.make(NARROW)
    made.tables(10, narrow((1, 0.5, 3, 1), (2, 1.5, 3, 1)))
    made.evolve(WIDE)
    made.tables(20, wide((1, 0.5, None, 13, -1), (7, 0.1, "m", 15, 1)))
    return made


@pytest.mark.parametrize("sum_rows_max", [1, 1000])
def test_parts_of_older_schemas_are_read_as_the_newest(
    evolved_world: World, sum_rows_max: int
) -> None:
    source = evolved_world.source(sumRowsMax=sum_rows_max)
    assert source.schema() == "`id` bigint, `x` double, `more` string"
    assert rows(source) == {(2, 1.5, None): 1, (7, 0.1, "m"): 1}
    history = evolved_world.source(changes="true", startingTime=0)
    assert changes(rows(history)) == {
        (1, 0.5, None, 3): 1,
        (2, 1.5, None, 3): 1,
        (1, 0.5, None, 13): -1,
        (7, 0.1, "m", 15): 1,
    }
    evolved_world.since(19)
    evolved_world.compact()
    assert rows(source) == {(2, 1.5, None): 1, (7, 0.1, "m"): 1}


def test_parts_of_older_schemas_are_left_out_by_what_is_known_of_them(evolved_world: World) -> None:
    _, partitions = planned(evolved_world.source(), [pushed_filter("GreaterThan")(("id",), 5)])
    assert [len(partition.task.parts) for partition in partitions] == [1]
    assert rows(evolved_world.source(), [pushed_filter("GreaterThan")(("id",), 5)]) == {
        (7, 0.1, "m"): 1
    }
    found = rows(evolved_world.source(), [pushed_filter("IsNull")(("more",))])
    assert found == {(2, 1.5, None): 1}


def test_a_frame_keeps_the_schema_that_it_was_loaded_with(tmp_path: Path) -> None:
    world = World(tmp_path / "state")
    world.make(TableSchema((TableColumn("id", "bigint", False), TableColumn("name", "string"))))
    world.append(10, [(1, "a", 3, 1)])
    source = world.source(asOf=9)
    stream = world.source(changes="true", startingTime=0)
    shape = spark_schema(source)
    with_changes = spark_schema(stream)
    new = TableSchema(
        (TableColumn("id", "bigint"), TableColumn("name", "string"), TableColumn("more", "int"))
    )
    world.evolve(new)
    newer = {"id": 2, "name": "b", "more": 5, TIME: 13, DIFF: 1}
    world.tables(20, pa.Table.from_pylist([newer], new.arrow_updates()))
    assert rows_of(*planned_by(source, shape)) == {(1, "a"): 1}
    reader = stream.streamReader(with_changes)
    ends = [{"time": time} for time in (0, 20, 30)]
    found = rows_of(reader, reader.partitions(ends[0], ends[1]))
    assert changes(found) == {(1, "a", 3): 1, (2, "b", 13): 1}
    nothing = {"id": None, "name": "c", "more": 5, TIME: 23, DIFF: 1}
    world.tables(30, pa.Table.from_pylist([nothing], new.arrow_updates()))
    with pytest.raises(TypeMismatch, match=r"has NULL in id, .* call load\(\) again"):
        rows_of(reader, reader.partitions(ends[1], ends[2]))


def planned_by(source: PenstockDataSource, shape: StructType) -> tuple[Any, list[Any]]:
    reader = FilteringReader(source._load(), shape)
    return reader, list(reader.partitions())
