"""A role that may not run code, before real Spark, with an unmodified PySpark session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect import functions as sf
from pyspark.sql.connect.session import SparkSession
from pyspark.sql.types import LongType

from actors.control.access.role_registry import token_digest
from actors.model.protocol.role_messages import AlterRole, ChangeRights, CreateRole, DropRoles
from spark_house import SparkHouse  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

TOKENS = {"boss": "b" * 64, "app": "a" * 64}
LARGE = 40_000


@pytest.fixture(scope="module")
def house(spark_house: SparkHouse) -> Iterator[SparkHouse]:
    client = spark_house.client
    spark_house.call(client.create_table, "orders", {"id": "bigint", "name": "string"}, ["id"])
    rows = [{"id": number, "name": "abc"[number % 3]} for number in range(6)]
    spark_house.call(client.insert, "orders", rows)
    spark_house.call(client.create_table, "secrets", {"id": "bigint"})
    for name, token in TOKENS.items():
        spark_house.call(client.submit, CreateRole(0, name, login=True))
        spark_house.call(client.submit, AlterRole(0, name, add_token=token_digest(token)))
    spark_house.call(
        client.submit, ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders",))
    )
    yield spark_house
    # From then on sessions prove nothing again.
    spark_house.call(client.submit, DropRoles(0, tuple(TOKENS)))


def session_of(house: SparkHouse, role: str) -> Any:
    port = house.remote.rpartition(":")[2]
    return SparkSession(f"sc://localhost:{port}/;token={TOKENS[role]}")


@pytest.fixture(scope="module")
def app(house: SparkHouse) -> Iterator[Any]:
    made = session_of(house, "app")
    yield made
    made.stop()


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(PySparkException) as failed:
        call()
    assert failed.value.getSqlState() == "42501", failed.value
    return str(failed.value)


def test_what_needs_no_code_works(app: Any) -> None:
    counted = app.table("orders").groupBy("name").count().orderBy("name")
    assert [tuple(row) for row in counted.collect()] == [("a", 2), ("b", 2), ("c", 2)]
    text = "WITH c AS (SELECT upper(name) AS n FROM default.orders) SELECT max(n) AS m FROM c"
    assert app.sql(text).collect()[0].m == "C"
    # Larger rows than those that clients send in the plan by default.
    wide = app.createDataFrame([(n, "x" * 40) for n in range(LARGE)], "id bigint, x string")
    assert wide.join(app.table("orders"), "id").count() == 6
    app.createDataFrame([(1,)], "id bigint").createOrReplaceTempView("mine")
    app.sql("CREATE OR REPLACE TEMP VIEW both AS SELECT o.name FROM orders o JOIN mine USING (id)")
    assert app.table("both").collect()[0].name == "b"
    filtered = app.table("orders").filter("id IN (SELECT id FROM mine)").selectExpr("concat(name)")
    with pytest.raises(PySparkException, match=r"views over Penstock objects|does not exist"):
        app.table("orders").filter("id IN (SELECT id FROM nothing)").collect()
    assert filtered.count() == 1
    app.sql("DROP VIEW mine")
    app.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    assert app.sql("SELECT current_timezone() AS z").collect()[0].z == "Asia/Tokyo"
    assert "orders" in [table.name for table in app.catalog.listTables()]


@pytest.mark.second
def test_a_stream_of_an_object_needs_no_code(app: Any) -> None:
    stream = app.readStream.table("orders").writeStream.format("memory").queryName("seen")
    query = stream.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert app.table("seen").count() == 6


def test_what_needs_it_is_refused(app: Any, tmp_path: Path) -> None:
    one = app.range(1)
    calls: list[Callable[[], Any]] = [
        lambda: app.read.text("/etc/passwd").collect(),
        lambda: one.select(sf.udf(lambda x: x, LongType())("id")).collect(),
        lambda: one.write.parquet(str(tmp_path / "written")),
        lambda: one.selectExpr("reflect('java.lang.System', 'getenv', 'HOME')").collect(),
        lambda: one.filter("IDENTIFIER('ref' || 'lect')('a', 'b') = ''").collect(),
        lambda: app.sql("SELECT `java_method`('java.lang.System', 'getenv', 'HOME')").collect(),
        lambda: app.sql("SELECT * FROM text.`/etc/passwd`").collect(),
        lambda: app.sql("SELECT /*+ COALESCE(1) */ * FROM global_temp.x").collect(),
        lambda: app.sql("SET spark.sql.variable.substitute = true"),
        lambda: app.sql("EXECUTE IMMEDIATE 'SELECT 1'").collect(),
        lambda: app.sql("BEGIN SELECT 1; END").collect(),
        lambda: app.sql("SELECT TRANSFORM (id) USING 'cat' FROM orders").collect(),
        lambda: app.sql("DECLARE VARIABLE x INT"),
        lambda: app.sql("CREATE TEMPORARY FUNCTION f AS 'a.B'"),
        lambda: app.sql("FROM (SELECT reflect('a', 'b'))").collect(),
        lambda: app.sql("SELECT transform(array(1), x -> java_method('a', 'b', x))").collect(),
        lambda: app.sql("SELECT * FROM orders VERSION AS OF 1").collect(),
        lambda: app.table("secrets").collect(),
        lambda: app.sql("SELECT count(*) FROM secrets").collect(),
    ]
    for call in calls:
        refused(call)
    assert not list(tmp_path.iterdir())
    # Nothing in a text is replaced before it is parsed.
    assert app.sql("SELECT '${env:HOME}' AS home").collect()[0].home == "${env:HOME}"
    with pytest.raises(PySparkException, match=r"PARSE_SYNTAX_ERROR|UNRESOLVED|syntax"):
        app.sql("SELECT ref${x}lect('java.lang.System', 'getenv', 'HOME')").collect()


def test_an_administrator_runs_code(house: SparkHouse) -> None:
    boss = session_of(house, "boss")
    assert boss.read.text("/etc/passwd").count() > 0
    assert boss.sql("SELECT reflect('java.lang.Math', 'abs', -1) AS a").collect()[0].a == "1"
    boss.stop()
