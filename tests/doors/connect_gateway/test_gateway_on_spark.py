"""The gateway before real Spark, with an unmodified PySpark session."""

from __future__ import annotations

import datetime
import decimal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.connect import functions as sf
from pyspark.sql.types import LongType

from actors.doors.connect_gateway.object_rows import VIEW_PREFIX
from spark_house import SparkHouse  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

LARGE = 40_000
FOREVER = "SELECT sum(hash(a.id * b.id + o.id)) FROM range(10000000) a, range(10000000) b, orders o"


@pytest.fixture(scope="module")
def house(spark_house: SparkHouse) -> SparkHouse:
    fill(spark_house)
    return spark_house


def fill(house: SparkHouse) -> None:
    client = house.client
    house.call(
        client.create_table, "orders", {"id": "bigint", "name": "string", "n": "int"}, ["id"]
    )
    rows = [{"id": number, "name": "abc"[number % 3], "n": number} for number in range(6)]
    house.call(client.insert, "orders", rows)
    house.call(
        client.create_materialized_view,
        "sums",
        "SELECT name, count(*) AS c FROM orders GROUP BY name",
    )
    house.call(client.create_table, "big", {"id": "bigint", "x": "double", "s": "string"})
    values = pa.table(
        {
            "id": pa.array(range(LARGE), pa.int64()),
            "x": pa.array([-0.0 if i % 2 else float(i) for i in range(LARGE)]),
            "s": ["text"] * LARGE,
        }
    )
    house.call(client.insert, "big", values)
    # Of each row with an even number one is left, of the odd ones two, or none.
    house.call(client.insert, "big", values.filter(pa.array([i % 2 == 1 for i in range(LARGE)])))
    gone = values.filter(pa.array([i % 4 == 3 for i in range(LARGE)]))
    house.call(client.delete, "big", gone)
    house.call(client.delete, "big", gone)


@pytest.fixture
def spark(house: SparkHouse) -> Iterator[Any]:
    made = house.session()
    yield made
    made.stop()


def test_sql_over_a_view(house: SparkHouse, spark: Any) -> None:
    rows = spark.sql("SELECT name, c, sum(c) OVER () AS all FROM sums ORDER BY name").collect()
    assert [tuple(row) for row in rows] == [("a", 2, 6), ("b", 2, 6), ("c", 2, 6)]
    house.call(house.client.insert, "orders", [{"id": 60, "name": "a", "n": 60}])
    (row,) = spark.sql("SELECT max(c) AS m FROM sums WHERE name = 'a' AND c + 0 > 0").collect()
    assert row.m == 3
    house.call(house.client.delete, "orders", [{"id": 60}])


def test_a_frame_joined_with_the_users_own(spark: Any) -> None:
    mine = spark.createDataFrame([(1, "one"), (5, "five"), (9, "nine")], "id bigint, word string")
    orders = spark.table("orders")
    joined = orders.join(mine, orders["id"] == mine["id"]).select(orders.name, "word")
    assert sorted(map(tuple, joined.collect())) == [("b", "one"), ("c", "five")]
    text = "SELECT word FROM {mine} m JOIN default.orders USING (id) ORDER BY word"
    assert [row.word for row in spark.sql(text, mine=mine).collect()] == ["five", "one"]
    inside = orders.where("id IN (SELECT max(id) FROM orders)")
    assert [row.id for row in inside.collect()] == [5]
    scalar = orders.where(sf.col("id") > orders.select(sf.avg("id")).scalar())
    assert scalar.count() == 3


def test_a_plain_read_goes_by_without_spark(house: SparkHouse, spark: Any) -> None:
    frame = spark.table("orders").filter(sf.col("n") >= 4).select("id", "name")
    assert sorted(frame.toArrow().to_pylist(), key=str) == [
        {"id": 4, "name": "b"},
        {"id": 5, "name": "c"},
    ]
    assert spark.sql("SELECT count(*) FROM orders").collect()[0][0] == 6
    assert spark.table("orders").schema.simpleString() == "struct<id:bigint,name:string,n:int>"


def test_the_catalog(spark: Any) -> None:
    spark.range(1).createOrReplaceTempView("temporary")
    found = {table.name: table.isTemporary for table in spark.catalog.listTables()}
    assert found == {"orders": False, "sums": False, "big": False, "temporary": True}
    assert spark.catalog.tableExists("sums")
    assert not spark.catalog.tableExists("absent")
    assert "penstock" in [each.name for each in spark.catalog.listDatabases()]
    assert [column.name for column in spark.catalog.listColumns("sums")] == ["name", "c"]
    assert spark.catalog.currentDatabase() == "default"


def test_errors(spark: Any) -> None:
    with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN"):
        spark.sql("SELECT nope FROM orders").collect()
    with pytest.raises(PySparkException, match="PARSE_SYNTAX_ERROR"):
        spark.sql("SELEC 1")
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.table("absent").collect()
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        spark.sql("SELECT 1 / n FROM orders").collect()
    assert spark.sql("SELECT 1 AS a").collect()[0].a == 1


def test_an_interrupt_ends_a_query(spark: Any) -> None:
    failed: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            spark.sql(FOREVER).collect()
        except PySparkException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    while thread.is_alive():
        spark.interruptAll()
        thread.join(0.5)
    assert "CANCEL" in str(failed[0]).upper()
    assert spark.table("orders").count() == 6


def test_large_contents_are_read_from_their_files(house: SparkHouse, spark: Any) -> None:
    text = """
        SELECT count(*) AS rows, count(DISTINCT id) AS ids, sum(id) AS total,
               count_if(x = 0) AS zeros
        FROM big"""
    (row,) = spark.sql(text).collect()
    odd = [i for i in range(LARGE) if i % 4 == 1]
    even = range(0, LARGE, 2)
    assert (row.rows, row.ids) == (2 * len(odd) + len(even), len(odd) + len(even))
    assert row.total == 2 * sum(odd) + sum(even)
    assert row.zeros == 2 * len(odd) + 1
    big = spark.table("big")
    twice = big.join(big.select("id").distinct(), "id")
    assert twice.count() == row.rows
    # NaN and zeros: a filter must not go by the bounds in a footer.
    assert big.filter("x <= 0").count() == 2 * len(odd) + 1
    # They are returned when the client has released its operation, which it does not wait for.
    deadline = time.monotonic() + 60
    while lent_views(spark) and time.monotonic() < deadline:
        pass  # each look is a call of Spark's
    assert lent_views(spark) == []


def lent_views(spark: Any) -> list[str]:
    found = (table.name for table in spark.catalog.listTables("global_temp"))
    return [name for name in found if name.startswith(VIEW_PREFIX)]


def test_what_a_deleted_row_would_fail_does_not(house: SparkHouse, spark: Any) -> None:
    house.call(house.client.create_table, "casts", {"s": "string", "pad": "string"})
    rows = pa.table({"s": ["1"] * 2_000 + ["bad"], "pad": ["x" * 100] * 2_001})
    house.call(house.client.insert, "casts", rows)
    house.call(house.client.delete, "casts", rows.slice(2_000))
    found = spark.sql("SELECT count(*) FROM casts WHERE CAST(s AS int) > 0").collect()
    assert found[0][0] == 2_000


def test_texts_in_many_threads_of_one_session(house: SparkHouse, spark: Any) -> None:
    def run(number: int) -> int:
        text = f"SELECT count(*) + {number} - {number} AS c FROM orders JOIN sums USING (name)"
        found: int = spark.sql(text).collect()[0].c
        return found

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(run, range(24))) == {6}


def test_users_functions_and_views(spark: Any) -> None:
    spark.udf.register("twice", lambda value: None if value is None else value * 2, LongType())
    assert spark.sql("SELECT sum(twice(id)) AS s FROM orders").collect()[0].s == 30
    spark.table("orders").filter("n > 2").createOrReplaceTempView("late")
    assert spark.sql("SELECT count(*) AS c FROM late JOIN orders USING (id)").collect()[0].c == 3
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW late AS SELECT * FROM orders WHERE n > 4")
    assert spark.table("late").count() == 1
    assert spark.conf.get("spark.scheduler.pool") == "clients"
    assert spark.conf.get("spark.sql.variable.substitute") == "false"
    assert spark.sql("SELECT concat('${env:PATH}', '') AS v").collect()[0].v == "${env:PATH}"


def test_frames_are_written_into_tables(house: SparkHouse, spark: Any) -> None:
    house.call(house.client.create_table, "written", {"at": "timestamp", "amount": "decimal(12,2)"})
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    frame = spark.sql(
        "SELECT TIMESTAMP'2024-01-02 09:00:00' AS t, CAST(n AS decimal(12,2)) AS d FROM orders"
    )
    frame.write.insertInto("written")
    rows = house.call(house.client.peek, "written").to_pylist()
    assert {row["at"] for row in rows} == {datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)}
    assert sum(row["amount"] for row in rows) == decimal.Decimal(15)


def test_a_table_of_sparks_own_from_objects(spark: Any) -> None:
    # In the database of the service's objects Spark would keep it in its process alone.
    with pytest.raises(PySparkException, match="table would be lost"):
        spark.sql("CREATE TABLE copied USING parquet AS SELECT * FROM orders")
    spark.sql("CREATE DATABASE IF NOT EXISTS own")
    spark.sql("DROP TABLE IF EXISTS own.copied")
    spark.sql("CREATE TABLE own.copied USING parquet AS SELECT * FROM orders")
    try:
        assert spark.table("own.copied").count() == 6
        spark.sql("INSERT INTO own.copied SELECT * FROM orders WHERE id < 2")
        assert spark.sql("SELECT count(*) AS c FROM own.copied").collect()[0].c == 8
    finally:
        spark.sql("DROP TABLE own.copied")


def test_frames_make_tables(house: SparkHouse, spark: Any) -> None:
    frame = spark.sql(
        "SELECT id, CAST(n AS decimal(5,1)) AS d, TIMESTAMP'2024-01-02' AS at FROM orders"
    )
    frame.write.saveAsTable("saved")
    frame.filter("id < 0").writeTo("default.made").create()
    spark.sql("CREATE TABLE selected AS SELECT * FROM saved")
    spark.sql(
        "INSERT INTO saved SELECT :id + 1, ?, at FROM saved LIMIT 1".replace("?", ":d"),
        args={"id": 100, "d": decimal.Decimal("2.5")},
    )
    for name, count in (("saved", 7), ("made", 0), ("selected", 6)):
        rows = house.call(house.client.peek, name)
        assert rows.num_rows == count
        assert [str(each) for each in rows.schema.types] == [
            "int64", "decimal128(5, 1)", "timestamp[us, tz=UTC]"]  # fmt: skip
    with pytest.raises(PySparkException, match="already"):
        frame.write.saveAsTable("saved")
    with pytest.raises(PySparkException, match="versionAsOf"):
        spark.read.option("versionAsOf", 1).table("saved").collect()


def test_a_temporary_function_is_no_part_of_a_view(spark: Any) -> None:
    spark.sql("CREATE TEMPORARY FUNCTION of_session(n BIGINT) RETURNS BIGINT RETURN n + 1")
    try:
        assert spark.sql("SELECT of_session(id) AS a FROM orders").count() == 6
        for kind in ("MATERIALIZED VIEW", "VIEW"):
            with pytest.raises(PySparkException, match="of_session"):
                spark.sql(f"CREATE {kind} made_of AS SELECT of_session(id) AS a FROM orders")
    finally:
        spark.sql("DROP TEMPORARY FUNCTION of_session")


def test_a_view_is_explained_before_it_is_made(spark: Any) -> None:
    told = spark.sql("EXPLAIN CREATE MATERIALIZED VIEW made_of AS SELECT id FROM orders").collect()
    assert told[0][0] == "mode: incremental"
    assert not spark.catalog.tableExists("made_of")


def test_an_existing_view_is_explained_by_its_name(spark: Any) -> None:
    spark.sql("CREATE MATERIALIZED VIEW explained_ids AS SELECT id FROM orders")
    assert spark.sql("EXPLAIN VIEW explained_ids").collect()[0][0] == "mode: incremental"
    spark.sql("DROP MATERIALIZED VIEW explained_ids")


def test_values_of_every_type_pass_through_spark(house: SparkHouse, spark: Any) -> None:
    columns = {
        "b": "boolean",
        "i8": "tinyint",
        "i16": "smallint",
        "i32": "int",
        "i64": "bigint",
        "f32": "float",
        "f64": "double",
        "s": "string",
        "raw": "binary",
        "day": "date",
        "at": "timestamp",
        "local": "timestamp_ntz",
        "d": "decimal(20,3)",
        "list": "array<string>",
        "pairs": "map<string,int>",
        "both": "struct<A:int,b:double>",
    }
    house.call(house.client.create_table, "types", columns)
    row = {
        "b": True,
        "i8": 1,
        "i16": -2,
        "i32": 3,
        "i64": 1 << 60,
        "f32": 1.5,
        "f64": -0.0,
        "s": "ä\n",
        "raw": b"\0x",
        "day": datetime.date(1600, 1, 2),
        "at": datetime.datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC),
        "local": datetime.datetime(2024, 1, 2, 3, 4, 5),  # noqa: DTZ001
        "d": decimal.Decimal("12345678901234567.125"),
        "list": ["a", None],
        "pairs": [("k", 1)],
        "both": {"A": 1, "b": 2.5},
    }
    shape = house.call(house.client.peek, "types", limit=0).schema
    table = pa.Table.from_pylist([row, dict.fromkeys(columns)], schema=shape)
    house.call(house.client.insert, "types", table)
    through = spark.table("types").union(spark.table("types").limit(0)).toArrow()
    direct = spark.table("types").toArrow()
    key = [("i64", "descending")]
    assert through.cast(direct.schema).sort_by(key).to_pylist() == direct.sort_by(key).to_pylist()
    assert spark.table("types").schema == spark.table("types").union(spark.table("types")).schema


def test_statements_of_the_service_are_carried_out_by_it(house: SparkHouse) -> None:
    spark = house.session()
    try:
        spark.sql("CREATE TABLE stock (item STRING, pieces BIGINT, PRIMARY KEY (item))")
        spark.sql("/* as dbt has it */ INSERT INTO stock VALUES ('a', 1), ('b', 2)")
        spark.sql(
            "CREATE MATERIALIZED VIEW all_pieces REFRESH POLICY INCREMENTAL AS "
            "SELECT sum(pieces) AS n FROM stock"
        )
        assert spark.sql("SELECT n FROM all_pieces").collect()[0]["n"] == 3
        spark.sql("UPDATE stock SET pieces = pieces * 10 WHERE item = 'b'")
        assert spark.table("all_pieces").collect()[0]["n"] == 21
        shown = spark.sql("SHOW MATERIALIZED VIEWS LIKE 'all*'").collect()
        assert [row["viewName"] for row in shown] == ["all_pieces"]
        with pytest.raises(PySparkException, match="line 1, column"):
            spark.sql("CREATE MATERIALIZED VIEW x REFRESH POLICY SOMETIMES AS SELECT 1")
        assert "stock" in {row["tableName"] for row in spark.sql("SHOW TABLES").collect()}
        (told,) = spark.sql("SHOW TABLE EXTENDED IN default LIKE 'all_p*'").collect()
        assert " |-- n: bigint (nullable = true)" in told["information"].splitlines()
        spark.sql("DROP MATERIALIZED VIEW IF EXISTS never_made")
        spark.sql("DROP TABLE stock CASCADE")
        assert not spark.catalog.tableExists("all_pieces")
    finally:
        spark.stop()


# -- settings of a session -------------------------------------------------------------------------

MEANT = (
    ("try_add(n, 2147483647) + n", "bigint"),
    ("CAST(name AS int)", "int"),
    ("n + 2147483647", "int"),
    ("element_at(array(7), n)", "int"),
    ("size(map_from_entries(array(struct(n, 1), struct(n, 2))))", "int"),
    ("CAST(concat('2024-0', n, '-31') AS date)", "date"),
    ("CAST(n / 0 AS double)", "double"),
    ("CAST(1234567.891 * n AS decimal(8,2))", "decimal(8,2)"),
)
"""Expressions that fail in ANSI mode, or have other values, and their types."""


def outcome(spark: Any, text: str) -> Any:
    """Rows, or the SQLSTATE of the error."""
    try:
        return sorted((tuple(row) for row in spark.sql(text).collect()), key=repr)
    except PySparkException as error:
        return error.getSqlState()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("text", "kind"), MEANT)
@pytest.mark.parametrize("ansi", ["false", "true"])
def test_statements_obey_the_ansi_mode_as_queries_do(
    house: SparkHouse, spark: Any, ansi: str, text: str, kind: str
) -> None:
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    spark.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
    expected = outcome(spark, f"SELECT 1 AS k, {text} AS v FROM (SELECT 3 AS n, 'x' AS name)")
    name = f"meant_{ansi}_{MEANT.index((text, kind))}"
    spark.sql(f"CREATE TABLE {name} (k INT, v {kind}, PRIMARY KEY (k))")
    spark.sql(f"CREATE TABLE read_{name} AS SELECT 3 AS n, 'x' AS name")
    for made in (
        f"INSERT INTO {name} SELECT 1, {text} FROM read_{name}",
        f"MERGE INTO {name} t USING (SELECT 1 AS k, * FROM read_{name}) s ON t.k = s.k "
        f"WHEN NOT MATCHED THEN INSERT (k, v) VALUES (s.k, {text})",
    ):
        spark.sql(f"DELETE FROM {name}")
        done = outcome(spark, made)
        found = outcome(spark, f"SELECT k, v FROM {name}")
        assert (found if isinstance(done, list) else done) == expected, made
    assert outcome(spark, f"SELECT * FROM read_{name} WHERE ({text}) IS NULL") == _deleted(
        spark, name, text
    )


def _deleted(spark: Any, name: str, text: str) -> Any:
    """The rows that a DELETE by an expression takes, or its error."""
    before = outcome(spark, f"SELECT * FROM read_{name}")
    done = outcome(spark, f"DELETE FROM read_{name} WHERE ({text}) IS NULL")
    after = outcome(spark, f"SELECT * FROM read_{name}")
    return [row for row in before if row not in after] if isinstance(done, list) else done


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["int", "tinyint", "date", "decimal(4,2)"])
def test_what_is_assigned_fits_its_column_without_ansi_too(
    house: SparkHouse, spark: Any, kind: str
) -> None:
    spark.conf.set("spark.sql.ansi.enabled", "false")
    name = f"fits_{kind[:4]}"
    spark.sql(f"CREATE TABLE {name} (k INT, v {kind}, PRIMARY KEY (k))")
    spark.sql(f"INSERT INTO {name} VALUES (1, NULL)")
    value = "concat('no ', 'date')" if kind == "date" else "pow(10D, 12)"
    source = f"(SELECT 2 AS k, {value} AS v)"
    for text in (
        f"INSERT INTO {name} SELECT k, v FROM {source}",
        f"INSERT INTO {name} VALUES (3, {value})",
        f"UPDATE {name} SET v = {value}",
        f"MERGE INTO {name} t USING {source} s ON t.k = s.k WHEN NOT MATCHED THEN INSERT *",
    ):
        with pytest.raises(PySparkException, match=r"does not fit|out of range|cannot assign"):
            spark.sql(text)
    assert outcome(spark, f"SELECT * FROM {name}") == [(1, None)]
    fits = "date_add(DATE '2024-01-01', 1)" if kind == "date" else "CAST('6' AS int) + 1"
    spark.sql(f"INSERT INTO {name} VALUES (2, {fits}), (3, DEFAULT)")
    seven = outcome(spark, f"SELECT CAST({fits} AS {kind})")[0][0]
    assert outcome(spark, f"SELECT * FROM {name}") == [(1, None), (2, seven), (3, None)]
    spark.sql(f"CREATE TABLE nested_{name} (v ARRAY<INT>)")
    for text in (
        f"UPDATE {name} SET v = (SELECT v FROM {source})",
        f"INSERT INTO nested_{name} VALUES (array(rand()))",
    ):
        with pytest.raises(PySparkException, match=r"cannot check a value .* while"):
            spark.sql(text)
