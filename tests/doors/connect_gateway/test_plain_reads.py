"""Plans that are answered without Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from plan_makers import read, sql  # type: ignore[import-not-found]
from pyspark.sql.connect import functions as sf
from pyspark.sql.connect import plan as plans
from pyspark.sql.connect.dataframe import DataFrame

from actors.doors.connect_gateway.plain_reads import direct_read
from actors.model.plan.schema import TableColumn, TableSchema

SCHEMAS = {
    "t": TableSchema(
        (
            TableColumn("k", "bigint", False),
            TableColumn("s", "string"),
            TableColumn("d", "date"),
            TableColumn("x", "double"),
            TableColumn("b", "boolean"),
        ),
        ("k",),
    ),
    "penstock.objects": TableSchema((TableColumn("name", "string"),)),
}


class FakeClient:
    session_id = "s"

    def __init__(self) -> None:
        self._client = self


def resolve(parts: tuple[str, ...]) -> str | None:
    folded = tuple(part.lower() for part in parts)
    if folded in (("t",), ("default", "t")):
        return "t"
    return "penstock.objects" if folded == ("penstock", "objects") else None


def found(relation: Any) -> Any:
    return direct_read(relation, resolve, SCHEMAS)


def of_frame(make: Any) -> Any:
    frame = make(DataFrame(plans.Read("t"), FakeClient()))
    return found(frame._plan.plan(None))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("SELECT * FROM t", ("k", "s", "d", "x", "b")),
        ("SELECT k AS a, s FROM t WHERE k > 5 ORDER BY k LIMIT 3", ("a", "s")),
        ("SELECT t.k FROM default.t AS t", ("k",)),
        ("SELECT k FROM default.t;", ("k",)),
        ("SELECT name FROM penstock.objects", ("name",)),
    ],
)
def test_texts(text: str, names: tuple[str, ...]) -> None:
    plain = found(sql(text))
    assert plain is not None
    assert tuple(plain.columns().names) == names


@pytest.mark.parametrize(
    "text",
    [
        "SELECT k + 1 FROM t",
        "SELECT * FROM t JOIN t u ON t.k = u.k",
        "SELECT count(*) FROM t",
        "SELECT k FROM t; SELECT 1",
        "SELECT * FROM other",
        "SELECT * FROM IDENTIFIER('t')",
        "SELECT 1",
        "'",
    ],
)
def test_other_texts_are_sparks(text: str) -> None:
    assert found(sql(text)) is None


def test_a_text_with_arguments_is_sparks() -> None:
    made = sql("SELECT * FROM t")
    made.sql.pos_arguments.add()
    assert found(made) is None


def test_frames() -> None:
    assert found(read("default.t")).sql == "SELECT * FROM `t`"
    assert of_frame(lambda t: t.select("k", sf.col("s").alias("a b"))).read.names == ("k", "a b")
    made = of_frame(lambda t: t.filter(sf.col("k") > 5).filter(sf.col("s") == "x").limit(2))
    assert made.sql == "SELECT * FROM `t` WHERE `s` = 'x' AND `k` > 5 LIMIT 2"
    assert len(made.read.filter) == 2
    both = of_frame(lambda t: t.where((sf.col("b") == True) & sf.col("d").isNull()).select("*"))  # noqa: E712
    assert both.sql == "SELECT * FROM `t` WHERE `b` = TRUE AND `d` IS NULL"
    day = datetime.date(2024, 2, 29)
    assert of_frame(lambda t: t.where(sf.col("d") >= day)).sql.endswith("`d` >= DATE'2024-02-29'")
    assert of_frame(lambda t: t.where(sf.col("x") < 1.5)).sql.endswith("`x` < 1.5D")


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.select(sf.col("k") + 1),
        lambda t: t.filter(sf.col("s") == "it's"),
        lambda t: t.filter(sf.col("k") > sf.col("x")),
        lambda t: t.filter((sf.col("k") > 1) | (sf.col("k") < 0)),
        lambda t: t.select("k").filter("s = 'x'"),
        lambda t: t.limit(1).filter(sf.col("k") > 1),
        lambda t: t.limit(3).limit(2),
        lambda t: t.distinct(),
        lambda t: t.where(sf.col("x") < float("nan")),
        lambda t: t.select("k", "k"),
        lambda t: t.select("absent"),
    ],
)
def test_other_frames_are_sparks(make: Any) -> None:
    assert of_frame(make) is None


def test_columns_keep_their_nullability() -> None:
    plain = found(sql("SELECT s, k FROM t"))
    assert plain.columns() == pa.schema(
        [pa.field("s", pa.string()), pa.field("k", pa.int64(), nullable=False)]
    )
