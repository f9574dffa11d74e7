"""Defaults of columns on real Spark: the same expressions as Spark's own tables take, through both
doors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from two_doors import TwoDoors, two_doors  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROOT = Path(__file__).parents[3]
TAKEN = [
    ("INT", "1 + length('ab')"),
    ("INT", "nvl(NULL, 2)"),
    ("BIGINT", "CAST('12' AS INT)"),
    ("SMALLINT", "300"),
    ("STRING", "upper('a') || 'b'"),
    ("STRING", "12"),
    ("DOUBLE", "1.5e0 * 2"),
    ("DECIMAL(9,3)", "1.25BD"),
    ("BOOLEAN", "NOT true"),
    ("BINARY", "X'ff00'"),
    ("DATE", "to_date('2020-02-29')"),
    ("DATE", "make_date(2020, 1, 1)"),
    ("TIMESTAMP", "TIMESTAMP '2020-01-01 12:00:00'"),
    ("TIMESTAMP_NTZ", "TIMESTAMP_NTZ '2020-01-01 12:00:00'"),
    ("ARRAY<INT>", "array(1, 2)"),
    ("STRUCT<a:INT,b:STRING>", "named_struct('a', 1, 'b', 'x')"),
    ("MAP<STRING,INT>", "map('k', 1)"),
]
"""Expressions that Spark's own tables take, too."""
REFUSED = [
    ("DOUBLE", "rand()"),
    ("STRING", "uuid()"),
    ("INT", "nope + 1"),
    ("INT", "sum(1)"),
    ("INT", "explode(array(1))"),
    ("INT", "(SELECT 1)"),
    ("INT", "no_such_function(1)"),
    ("BOOLEAN", "EXISTS (SELECT 1)"),
]
"""Expressions that Spark's own tables refuse, too. They take a text for a number if it fits, which
INSERT refuses, and so a DEFAULT here."""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoDoors]:
    with two_doors(tmp_path_factory.mktemp("defaults")) as made:
        yield made


def value_of(doors: TwoDoors, number: int, kind: str, text: str, own: str) -> Any:
    """The value of a default in a new row, or the refusal's name; `own`: a format of Spark's."""
    sql, name = doors.spark.sql, f"{'own.own' if own else 'ours'}{number}"
    try:
        sql(f"CREATE TABLE {name} (id INT, c {kind} DEFAULT {text}) {own}")
        sql(f"INSERT INTO {name} (id) VALUES (1)")
        ((value,),) = sql(f"SELECT c FROM {name}").collect()
        sql(f"DROP TABLE {name}")
    except PySparkException:
        return "refused"
    return value


@pytest.mark.parametrize("pairs", [TAKEN, REFUSED], ids=["taken", "refused"])
def test_spark_thinks_the_same_of_expressions(
    doors: TwoDoors, pairs: list[tuple[str, str]]
) -> None:
    doors.spark.sql("CREATE DATABASE IF NOT EXISTS own")
    for number, (kind, text) in enumerate(pairs):
        # A format makes it a table of Spark's own.
        own = value_of(doors, number, kind, text, "USING parquet")
        ours = value_of(doors, number, kind, text, "")
        assert (own, own == "refused") == (ours, pairs is REFUSED), (kind, text)


def test_errors_have_their_place(doors: TwoDoors) -> None:
    for text in (
        "CREATE TABLE no (a INT DEFAULT 1 + ¦nope)",
        "CREATE TABLE no (a DOUBLE PRECISION DEFAULT ¦rand() NOT NULL)",
        "CREATE TABLE no (a INT DEFAULT ¦concat('1', '2'))",
        "CREATE TABLE no (a INT, b INT DEFAULT ¦1 / 0)",
    ):
        with pytest.raises(psycopg.Error) as caught:
            doors.run(text.replace("¦", ""))
        assert caught.value.diag.statement_position == str(text.index("¦") + 1)


def test_every_statement_takes_what_spark_computes(doors: TwoDoors) -> None:
    doors.run(
        "CREATE TABLE w (id INT PRIMARY KEY, due DATE DEFAULT date_add(current_date(), 7) NOT NULL,"
        " n INT DEFAULT 1 + 1, arr INT[] DEFAULT array(1, 2))"
    )
    doors.run("INSERT INTO w (id) VALUES (1)")
    doors.run("INSERT INTO w (id, n, arr) VALUES (2, 1 + length('a'), DEFAULT)")
    doors.run("INSERT INTO w (id, n) SELECT id + 10, 5 FROM w WHERE id = 1")
    doors.run("UPDATE w SET n = length('abc'), due = DEFAULT, arr = NULL WHERE id = 2")
    doors.run(
        "MERGE INTO w USING (SELECT id + 100 AS id FROM w UNION ALL SELECT 2) AS s ON w.id = s.id "
        "WHEN MATCHED THEN UPDATE SET n = DEFAULT, arr = DEFAULT "
        "WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, DEFAULT)"
    )
    doors.run("INSERT INTO w (id, n) VALUES (2, 9) ON CONFLICT (id) DO UPDATE SET due = DEFAULT")
    (today,) = doors.rows("SELECT date_add(current_date(), 7)")[0]
    ids = [1, 2, 11, 101, 102, 111]
    assert doors.rows("SELECT id, due, n, arr FROM w ORDER BY id") == [
        (id_, today, 5 if id_ == 11 else 2, [1, 2]) for id_ in ids
    ]


def test_the_page_is_right(doors: TwoDoors) -> None:
    page = (ROOT / "docs" / "reference" / "sql.md").read_text()
    _, _, section = page.partition("\n## Defaults\n")
    block = section.partition("```sql\n")[2].partition("```")[0]
    for statement in block.split(";\n")[:-1]:
        doors.spark.sql(statement)
    assert doors.rows(
        "SELECT id, state, tries, due - CAST(made AS DATE) FROM jobs ORDER BY id"
    ) == [(id_, "new", 2, timedelta(days=7)) for id_ in (1, 2, 3)]
    doors.run("INSERT INTO jobs (id) VALUES (4)")
    assert doors.rows("SELECT state, due FROM jobs WHERE id = 4") == [("open", None)]


def test_a_dataframe_that_leaves_columns_out(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE f (id INT PRIMARY KEY, s TEXT DEFAULT 'new' NOT NULL, n INT DEFAULT 4)")
    frame = doors.spark.sql("SELECT 1 AS id, 7 AS n")
    frame.write.mode("append").saveAsTable("f")
    doors.spark.sql("SELECT 2 AS id, 'x' AS s").writeTo("f").append()
    doors.spark.sql("SELECT 3 AS id, 'y' AS s, NULL AS n").write.insertInto("f")
    doors.spark.sql("INSERT INTO f (id) VALUES (4)")
    doors.spark.sql("INSERT INTO f VALUES (5, DEFAULT, DEFAULT)")
    assert doors.rows("SELECT * FROM f ORDER BY id") == [
        (1, "new", 7),
        (2, "x", 4),
        (3, "y", None),
        (4, "new", 4),
        (5, "new", 4),
    ]
