"""Print what a remote PySpark can do: ``pyspark_program.py HOST:PORT`` (see `client_probe`)."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pyspark
from client_probe import ClientProbe, check
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from sample_rows import KINDS, KINDS_ROWS, MANY_ROWS, is_null_row, kinds_row, spent_rows

FOREVER = "SELECT sum(hash(a.id * b.id + o.id)) FROM range(10000000) a, range(10000000) b, orders o"


def main(address: str) -> None:
    probe = ClientProbe("PySpark", pyspark.__version__)
    probe.lacks("transaction", "Spark has no transactions")
    spark: Any = SparkSession.builder.remote(f"sc://{address}").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    for tried in TRIED:
        with probe.tries(tried.__name__):
            tried(spark)
    spark.stop()


def connect(spark: Any) -> None:
    check(spark.version.split(".")[:2], ["4", "3"])
    check(spark.table("orders").count(), 1_000)


def reflection(spark: Any) -> None:
    kinds = {table.name: table.tableType for table in spark.catalog.listTables()}
    wanted = {"kinds": "MANAGED", "orders": "MANAGED", "many": "MANAGED", "spent": "VIEW"}
    check({name: kinds.get(name) for name in wanted}, wanted)
    check([column.name for column in spark.catalog.listColumns("kinds")], list(KINDS))
    shown = {row.tableName for row in spark.sql("SHOW TABLES IN default LIKE 'o*|s*'").collect()}
    check(shown, {"orders", "spent"})
    told = spark.sql("DESCRIBE TABLE orders").collect()
    check([row.col_name for row in told], ["id", "customer", "amount"])


def binary(spark: Any) -> None:
    found = spark.table("kinds").toArrow().sort_by("id").to_pylist()
    for row in found:
        row["pairs"] = None if row["pairs"] is None else dict(row["pairs"])
    check(found, [kinds_row(number) for number in range(KINDS_ROWS)])
    row = spark.sql("SELECT * FROM kinds WHERE id + 0 = 17").collect()[0].asDict(recursive=True)
    wanted = kinds_row(17)
    for name in KINDS:
        # Python's own times are those of the machine's zone.
        if name != "moment":
            check(row[name], wanted[name])


def nulls(spark: Any) -> None:
    found = spark.sql("SELECT * FROM kinds WHERE flag IS NULL").toArrow()
    check(found.num_rows, sum(map(is_null_row, range(KINDS_ROWS))))
    check({found[name].null_count for name in found.column_names[1:]}, {found.num_rows})


def parameters(spark: Any) -> None:
    text = "SELECT id FROM orders WHERE customer = :customer AND id < :id ORDER BY id"
    found = spark.sql(text, args={"customer": "customer 3", "id": 20}).collect()
    check([row.id for row in found], [3, 13])
    found = spark.sql("SELECT id FROM orders WHERE id IN (?, ?) ORDER BY id", args=[5, 6]).collect()
    check([row.id for row in found], [5, 6])


def batch(spark: Any) -> None:
    spark.sql("CREATE TABLE written (id BIGINT, word STRING, PRIMARY KEY (id))")
    frame = spark.createDataFrame([(n, f"w{n}") for n in range(500)], "id bigint, word string")
    frame.write.insertInto("written")
    frame.selectExpr("id + 500 AS id", "word").writeTo("written").append()
    frame.createOrReplaceTempView("made")
    spark.sql("INSERT INTO written SELECT id + 1000, word FROM made")
    check(spark.sql("SELECT count(*) AS c FROM written").collect()[0].c, 1_500)


def temporary(spark: Any) -> None:
    spark.table("orders").filter("id < 7").createOrReplaceTempView("few")
    check(spark.sql("SELECT count(*) AS c FROM few JOIN spent USING (customer)").collect()[0].c, 7)


def fetching(spark: Any) -> None:
    found = []
    for row in spark.table("many").orderBy("id").toLocalIterator():
        found.append(row.id)
        if len(found) == 5_000:
            break
    check(found, list(range(5_000)))


def cancel(spark: Any) -> None:
    caught: list[PySparkException] = []

    def run() -> None:
        try:
            spark.sql(FOREVER).collect()
        except PySparkException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        spark.interruptAll()
        thread.join(0.5)
    check("CANCEL" in str(caught[0]).upper(), True)
    check(spark.table("orders").count(), 1_000)


def error(spark: Any) -> None:
    for text, state in {
        "SELECT nope FROM orders": "42703",
        "SELEC 1": "42601",
        "SELECT * FROM nowhere": "42P01",
        "SELECT 1 / (id - id) FROM orders": "22012",
        "CREATE MATERIALIZED VIEW x REFRESH POLICY SOMETIMES AS SELECT 1": "42601",
        "INSERT INTO orders VALUES (1, 'again', 0)": "23505",
    }.items():
        try:
            spark.sql(text).collect()
        except PySparkException as caught:
            check((text, caught.getSqlState()), (text, state))
        else:
            raise AssertionError(f"a wrong statement was taken: {text}")


def view(spark: Any) -> None:
    spark.sql("CREATE TABLE words (word STRING)")
    spark.sql(
        "CREATE MATERIALIZED VIEW lengths AS SELECT word, count(*) AS n FROM words GROUP BY word"
    )
    found = spark.table("spent").orderBy("customer").collect()
    check([tuple(row) for row in found], spent_rows())


def fresh(spark: Any) -> None:
    for number in range(1, 4):
        spark.sql("INSERT INTO words VALUES ('one')")
        check([row.n for row in spark.table("lengths").collect()], [number])


def subscribe(spark: Any) -> None:
    stream = spark.readStream.table("lengths")
    query = stream.writeStream.format("memory").queryName("told").trigger(availableNow=True).start()
    query.awaitTermination()
    found: Counter[tuple[str, int]] = Counter()
    for row in spark.table("told").collect():
        found[row.word, row.n] += row["_diff"]
    check(+found, {("one", 3): 1})


def large(spark: Any) -> None:
    found = spark.table("many").toArrow()
    check(sum(found["id"].to_pylist()), MANY_ROWS * (MANY_ROWS - 1) // 2)
    check(len(spark.table("many").toPandas()), MANY_ROWS)


TRIED = (
    *(connect, reflection, binary, nulls, parameters, batch, temporary, fetching, cancel, error),
    *(view, fresh, subscribe, large),
)

if __name__ == "__main__":
    main(sys.argv[1])
