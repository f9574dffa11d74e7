"""Which queries are plain reads, and of what; everything else is left to Spark."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.views.plain_read import PlainRead, parse_plain_read
from actors.engine.views.plain_sql import LiteralValue, query_text, value_of
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.message_parts import OrderBy, RowSetFinishing
from actors.runtime.errors import QueryRejected

TABLES = {
    "Flights": TableSchema(
        (
            TableColumn("id", "bigint"),
            TableColumn("Carrier", "string"),
            TableColumn("delay", "int"),
            TableColumn("late", "boolean"),
            TableColumn("day", "date"),
            TableColumn("ratio", "double"),
            TableColumn("small", "float"),
            TableColumn("code", "char(3)"),
            TableColumn("tags", "array<string>"),
            TableColumn("at", "timestamp"),
            TableColumn("price", "decimal(10,2)"),
        )
    ),
    "words": TableSchema(
        (TableColumn("distinct", "int"), TableColumn("all", "int"), TableColumn("id", "int"))
    ),
    "penstock.steps": TableSchema((TableColumn("ms", "double"),)),
}


def read(sql: str) -> PlainRead | None:
    return parse_plain_read(sql, TABLES)


def comparisons_of(sql: str) -> list[tuple[str, str, Any]]:
    found = read(f"SELECT id FROM flights WHERE {sql}")
    assert found is not None, sql
    return [
        (each.column, each.op, from_ipc(each.value)[0][0].as_py() if each.value else None)
        for each in found.filter
    ]


def test_columns_keep_the_names_that_were_written() -> None:
    found = read("select f.ID, carrier AS c, `delay` from FLIGHTS as f")
    assert found == PlainRead("Flights", ("id", "Carrier", "delay"), ("ID", "c", "delay"))
    whole = read("SELECT * FROM flights")
    assert whole is not None
    assert whole.project == whole.names == TABLES["Flights"].names
    relation = read("SELECT ms FROM penstock.steps")
    assert relation is not None
    assert relation.name == "penstock.steps"


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("id = 5", [("id", "=", 5)]),
        ("5 < id", [("id", ">", 5)]),
        ("5 >= id", [("id", "<=", 5)]),
        ("id <> -5", [("id", "<>", -5)]),
        ("(id > 1 AND (delay <= 2)) AND carrier = 'UA'",
         [("id", ">", 1), ("delay", "<=", 2), ("Carrier", "=", "UA")]),
        ("carrier IS NULL AND NOT delay IS NULL AND late IS NOT NULL",
         [("Carrier", "is null", None), ("delay", "is not null", None),
          ("late", "is not null", None)]),
        ("late = true", [("late", "=", True)]),
        ("day >= DATE '2013-02-01'", [("day", ">=", datetime.date(2013, 2, 1))]),
        ("ratio > 2", [("ratio", ">", 2.0)]),
        ("ratio > 0.1 and 2.5D >= ratio", [("ratio", ">", 0.1), ("ratio", "<=", 2.5)]),
        ("price = 5.25", [("price", "=", Decimal("5.25"))]),
        ("id BETWEEN -1 AND 2L", [("id", ">=", -1), ("id", "<=", 2)]),
        ("id > (5) -- of them", [("id", ">", 5)]),
        ("id /* a /* b */ c */ == 5 AND `carrier` != \"it's\"",
         [("id", "=", 5), ("Carrier", "<>", "it's")]),
    ],
)  # fmt: skip
def test_comparisons_with_literals_of_the_column_s_type(
    sql: str, wanted: list[tuple[str, str, Any]]
) -> None:
    assert comparisons_of(sql) == wanted


def test_order_limit_and_offset() -> None:
    sql = "SELECT id FROM flights ORDER BY delay DESC, carrier NULLS LAST, id LIMIT 5 OFFSET 2"
    found = read(sql)
    assert found is not None
    assert found.finishing == RowSetFinishing(
        (
            OrderBy("delay", descending=True, nulls_first=False),
            OrderBy("Carrier", nulls_first=False),
            OrderBy("id", nulls_first=True),
        ),
        5,
        2,
    )
    alone = read("SELECT id FROM flights LIMIT 3")
    assert alone is not None
    assert alone.finishing == RowSetFinishing((), 3, 0)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 AS a",
        "SELECT id + 1 AS a FROM flights",
        "SELECT DISTINCT id FROM flights",
        "SELECT all id FROM words",
        "SELECT distinct AS d FROM words",
        "SELECT id FROM flights WHERE id > 1 x",
        "SELECT count(*) FROM flights",
        "SELECT id FROM flights GROUP BY id",
        "SELECT id, id AS other FROM flights",
        "SELECT id AS a, delay AS A FROM flights",
        "SELECT id FROM flights, flights AS g",
        "SELECT id FROM flights AS f (a, b)",
        "SELECT id FROM (SELECT id FROM flights)",
        "SELECT nothing FROM flights",
        "SELECT g.id FROM flights AS f",
        "SELECT flights.id FROM flights AS f",
        "SELECT id FROM unknown",
        "SELECT id FROM other.flights",
        "SELECT id FROM flights UNION ALL SELECT id FROM flights",
        "WITH f AS (SELECT 1) SELECT id FROM flights",
        "SELECT id FROM flights TABLESAMPLE (10 ROWS)",
        "SELECT id FROM flights LIMIT 1 + 1",
        "SELECT id FROM flights ORDER BY id + 1",
        "SELECT id FROM flights ORDER BY 1",
        "SELECT id FROM flights ORDER BY tags",
        "SELECT delay AS id FROM flights ORDER BY id",
        "SELECT id FROM flights SORT BY id",
        "SELECT /*+ BROADCAST(flights) */ id FROM flights",
        "SELECT id FROM flights; SELECT id FROM flights",
        "SELEC id",
    ],
)
def test_everything_else_is_for_spark(sql: str) -> None:
    assert read(sql) is None


@pytest.mark.parametrize(
    "sql",
    [
        "id = 1 OR id = 2",
        "NOT id = 1",
        "id IN (1, 2)",
        "id <=> 1",
        "id = delay",
        "id = 5 = true",
        "id = 5 + 1",
        "id = 5 OR carrier = 'a' AND id = 2",
        "id > 5 AND",
        "carrier = 'a' 'b'",
        "carrier = 'a\\'b'",
        "carrier = r'a'",
        "carrier = 'a''b'",
        "NOT (id IS NULL AND delay IS NULL)",
        "price = 5.255",
        "id = 5 /* open",
        "carrier = 'open",
        "id = 5ABC",
        "id = '5'",
        "id = 5.5",
        "id = NULL",
        "delay = 3000000000",
        "ratio > 9007199254740993",
        "small > 1",
        "code = 'abc'",
        "carrier = 5",
        "late = 1",
        "day = '2013-02-01'",
        "at > TIMESTAMP '2013-02-01 00:00:00'",
        "carrier LIKE 'U%'",
        "carrier = CAST('2013-02-01' AS DATE)",
        "day = TRY_CAST('2013-02-01' AS DATE)",
    ],
)
def test_a_comparison_that_spark_might_read_otherwise_is_for_spark(sql: str) -> None:
    assert read(f"SELECT id FROM flights WHERE {sql}") is None


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT 1;", "SELECT 1"),
        ("SELECT ';' AS a -- b;\n ; -- c", "SELECT ';' AS a"),
        (" SELECT 1 /* ; /* x */ */ ;; ", "SELECT 1"),
        ("SELECT '; -- no' ;\n", "SELECT '; -- no'"),
        ("SELECT 'open ;", "SELECT 'open"),
        ("-- nothing", ""),
        ("SELECT `a;b` FROM t;", "SELECT `a;b` FROM t"),
    ],
)
def test_a_query_ends_with_its_last_word(sql: str, wanted: str) -> None:
    assert query_text(sql) == wanted


def test_two_statements_are_no_query() -> None:
    with pytest.raises(QueryRejected, match="line 2 has another statement after a semicolon"):
        query_text("SELECT ';'\n; -- and\nSELECT 2;")


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_a_decimal_beside_a_column_has_all_of_its_digits(number: Decimal) -> None:
    text = f"{number:f}"
    assert value_of(LiteralValue("number", text), "decimal(38,18)") == number
