"""What plans say of objects beside their names: obeyed, or refused by name, and never dropped."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_world import filled_world  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql.connect.expressions import LiteralExpression
from pyspark.sql.connect.proto import commands_pb2, relations_pb2

from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.plan_options import OBEYED_FIELDS, REFUSED_FIELDS, check_write
from actors.doors.connect_gateway.statement_arguments import text_with_arguments
from actors.engine.sql.grammar import parse_statement

MESSAGES = {
    each.DESCRIPTOR.full_name: each
    for each in (
        relations_pb2.Read.NamedTable,
        commands_pb2.WriteOperation,
        commands_pb2.WriteOperation.SaveTable,
        commands_pb2.WriteOperationV2,
    )
}


def test_each_field_of_this_release_is_obeyed_or_refused() -> None:
    assert OBEYED_FIELDS.keys() == REFUSED_FIELDS.keys() == MESSAGES.keys()
    for name, kind in MESSAGES.items():
        fields = sorted(field.name for field in kind.DESCRIPTOR.fields)
        assert sorted([*OBEYED_FIELDS[name], *REFUSED_FIELDS[name]]) == fields, name


@pytest.mark.parametrize("kind", [commands_pb2.WriteOperation, commands_pb2.WriteOperationV2])
def test_each_refused_field_of_a_write_is_refused_by_name(kind: Any) -> None:
    for field in kind.DESCRIPTOR.fields:
        if field.name not in REFUSED_FIELDS[kind.DESCRIPTOR.full_name]:
            continue
        write = kind()
        if field.name in ("options", "table_properties"):
            getattr(write, field.name)["some"] = "x"
        elif field.is_repeated:
            value = getattr(write, field.name)
            value.add() if field.message_type else value.append("x")
        elif field.message_type:
            getattr(write, field.name).SetInParent()
        else:
            setattr(write, field.name, True if field.name.startswith("with_") else "x")
        said = "some" if field.name == "options" else field.name
        with pytest.raises(SparkCondition, match=said):
            check_write(write, "t")


LOST: list[Callable[[Any], object]] = [
    lambda spark: spark.sql("CREATE TABLE x USING parquet AS SELECT 1 AS a"),
    lambda spark: spark.sql("CREATE OR REPLACE TABLE default.x (a INT) USING csv"),
    lambda spark: spark.sql("CREATE FUNCTION f AS 'a.B'"),
    lambda spark: spark.sql("CREATE VIEW x (a) TBLPROPERTIES ('b' = 'c') AS SELECT 1 SORT"),
    lambda spark: spark.catalog.createTable("x", source="parquet"),
    lambda spark: spark.range(1).write.format("parquet").saveAsTable("x"),
    lambda spark: spark.range(1).write.partitionBy("id").mode("append").saveAsTable("orders"),
    lambda spark: spark.range(1).writeTo("orders").option("a", "b").append(),
    lambda spark: spark.range(1).writeTo("spark_catalog.default.x").using("delta").create(),
    lambda spark: spark.range(1).writeTo("orders").createOrReplace(),
    lambda spark: spark.range(1).writeTo("orders").overwritePartitions(),
    lambda spark: spark.range(1).writeTo("x").append(),
    lambda spark: spark.range(1).write.insertInto("x"),
    lambda spark: spark.range(1).write.saveAsTable("orders"),
    lambda spark: spark.readStream.format("rate").load().writeStream.toTable("x"),
    lambda spark: spark.read.option("timestampAsOf", "2024-01-01").table("orders").toArrow(),
    lambda spark: spark.read.option("versionAsOf", "1").table("orders").schema,
    lambda spark: spark.read.option("a", "b").table("sums").createTempView("v"),
    lambda spark: spark.sql("INSERT INTO orders SELECT * FROM {x}", x=spark.range(1)),
    lambda spark: spark.sql("DELETE FROM orders WHERE id = :b", args={"a": 1}),
]


async def test_what_nothing_obeys_is_refused(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def tried(call: Callable[[Any], object]) -> str:
            try:
                call(spark)
            except PySparkException as error:
                return str(error)
            return "taken"

        for number, call in enumerate(LOST):
            count = len(world.spark.of_kind("ExecutePlanRequest"))
            said = await world.run(lambda: tried(call))  # noqa: B023
            assert "taken" not in said, number
            assert len(world.spark.of_kind("ExecutePlanRequest")) == count, (number, said)


async def test_frames_make_tables_and_statements_have_arguments(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def write() -> None:
            frame = spark.createDataFrame([(1, "a"), (2, "b")], "id bigint, s string")
            frame.write.mode("append").saveAsTable("saved")
            frame.write.mode("ignore").saveAsTable("saved")
            frame.writeTo("default.made").createOrReplace()
            spark.sql("INSERT INTO saved VALUES (:a, :b)", args={"a": 3, "b": "b :a ?"})
            spark.sql("INSERT INTO saved VALUES (?, 'c')", args=[4])

        await world.run(write)
        rows = await world.client.peek("saved")
        assert sorted(rows.column(1).to_pylist()) == ["a", "b", "b :a ?", "c"]
        assert (await world.client.peek("made")).num_rows == 2


@given(st.lists(st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary(),
    st.floats(), st.dates(), st.datetimes(), st.decimals(allow_nan=False, allow_infinity=False),
), max_size=5))  # fmt: skip
def test_arguments_stand_for_their_parameters_alone(values: list[Any]) -> None:
    sql = relations_pb2.SQL(query=f"VALUES ({', '.join('?' * len(values))}) -- ? '")
    for value in values:
        if isinstance(value, decimal.Decimal):
            sql.pos_arguments.add().literal.decimal.value = f"{value:f}"
        elif isinstance(value, datetime.datetime):
            sql.pos_arguments.add().literal.timestamp_ntz = 1
        else:
            made = LiteralExpression._from_value(value).to_plan(None)
            sql.pos_arguments.add().CopyFrom(made)
    text = text_with_arguments(sql)
    assert text.endswith(" -- ? '")
    parse_statement(text)
    if not any(isinstance(each, str) for each in values):
        assert text.count("?") == 1


def test_an_argument_that_is_no_literal_is_refused() -> None:
    sql = relations_pb2.SQL(query="DELETE FROM t WHERE a = :a")
    sql.named_arguments["a"].unresolved_function.function_name = "map"
    with pytest.raises(SparkCondition, match="expression"):
        text_with_arguments(sql)
    sql.named_arguments["a"].literal.array.SetInParent()
    with pytest.raises(SparkCondition, match="array"):
        text_with_arguments(sql)
    with pytest.raises(SparkCondition, match="unbound parameter: :a"):
        text_with_arguments(relations_pb2.SQL(query="DELETE FROM t WHERE a = :a"))
