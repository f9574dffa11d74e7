"""Queries and their times, SUBSCRIBE, EXPLAIN, DESCRIBE, SHOW, and splitting at semicolons."""

from __future__ import annotations

from typing import Any

import pytest
from sql_shown import POSTGRES, SPARK, parsed, shown  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_span, parse_statement, split_statements
from actors.engine.sql.statements import ChangeStatement, QueryStatement
from actors.engine.sql.tokens import SqlDialect


def query(text: str, **more: Any) -> dict[str, Any]:
    return {"is": "Query", "query": text, **more}


AS_OF: list[tuple[str, str, str | None]] = [
    ("SELECT 1", "SELECT 1", None),
    ("SELECT * FROM t AS OF 5", "SELECT * FROM t", "5"),
    ("SELECT * FROM t AS OF 5;", "SELECT * FROM t", "5"),
    ("select * from t as of -5 -- x", "select * from t", "-5"),
    ("SELECT * FROM t AS OF '2024-01-01'", "SELECT * FROM t", "'2024-01-01'"),
    ("SELECT * FROM t AS OF TIMESTAMP '2024-01-01'", "SELECT * FROM t", "TIMESTAMP '2024-01-01'"),
    ("SELECT * FROM t AS OF now() - INTERVAL 1 HOUR", "SELECT * FROM t", "now() - INTERVAL 1 HOUR"),
    ("SELECT * FROM t AS OF CURRENT_TIMESTAMP", "SELECT * FROM t", "CURRENT_TIMESTAMP"),
    ("SELECT * FROM t AS OF (1 + 2)", "SELECT * FROM t", "(1 + 2)"),
    ("SELECT * FROM t AS OF CAST('x' AS TIMESTAMP)", "SELECT * FROM t", "CAST('x' AS TIMESTAMP)"),
    ("(SELECT a AS of FROM t) AS OF 5", "(SELECT a AS of FROM t)", "5"),
    ("VALUES (1) AS OF 5", "VALUES (1)", "5"),
    ("FROM t SELECT * AS OF 5", "FROM t SELECT *", "5"),
    ("TABLE t AS OF 5", "TABLE t", "5"),
    ("SELECT * FROM timestamp AS OF 5", "SELECT * FROM timestamp", "5"),
    ("SELECT 1 WHERE (SELECT a FROM t AS OF 5)", "SELECT 1 WHERE (SELECT a FROM t AS OF 5)", None),
    # Aliases of that name, and what only Spark can say something about.
    ("SELECT a AS of", "SELECT a AS of", None),
    ("SELECT a AS of FROM t", "SELECT a AS of FROM t", None),
    ("SELECT a AS of, 5", "SELECT a AS of, 5", None),
    ("SELECT a AS of UNION (SELECT 1)", "SELECT a AS of UNION (SELECT 1)", None),
    ("SELECT * FROM t AS of JOIN u", "SELECT * FROM t AS of JOIN u", None),
    ("SELECT * FROM t AS OF yesterday", "SELECT * FROM t AS OF yesterday", None),
    ("SELECT * FROM t `AS` OF", "SELECT * FROM t `AS` OF", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted", "as_of"), AS_OF)
def test_the_time_of_a_query(text: str, wanted: str, as_of: str | None) -> None:
    found = parse_statement(text)
    assert isinstance(found, QueryStatement)
    assert found.query.text == wanted
    assert (found.as_of.text if found.as_of else None) == as_of
    assert found.pins == ()


PINS: list[tuple[SqlDialect, str, list[tuple[int, tuple[str, ...], bool, str, str]]]] = [
    (
        SPARK,
        "SELECT * FROM t TIMESTAMP AS OF '2024-01-01' WHERE a",
        [(14, ("t",), False, "'2024-01-01'", "TIMESTAMP AS OF '2024-01-01'")],
    ),
    (
        SPARK,
        "SELECT * FROM t TIMESTAMP AS OF 5",
        [(14, ("t",), False, "5", "TIMESTAMP AS OF 5")],
    ),
    (
        SPARK,
        "SELECT * FROM a.`b`.C FOR SYSTEM_TIME AS OF now() - INTERVAL '1' DAY AS x"
        " JOIN u VERSION AS OF 7 y ON x.k = y.k",
        [
            (14, ("a", "b", "C"), False, "now() - INTERVAL '1' DAY",
             "FOR SYSTEM_TIME AS OF now() - INTERVAL '1' DAY"),
            (79, ("u",), True, "7", "VERSION AS OF 7"),
        ],
    ),
    (
        SPARK,
        "SELECT (SELECT max(a) FROM t TIMESTAMP AS OF date_sub(current_date(), 1)) AS OF",
        [(27, ("t",), False, "date_sub(current_date(), 1)",
          "TIMESTAMP AS OF date_sub(current_date(), 1)")],
    ),
    (
        POSTGRES,
        'SELECT * FROM S."T" TIMESTAMP AS OF \'2024-01-01\'::timestamptz x, v',
        [(14, ("s", "T"), False, "'2024-01-01'::timestamptz",
          "TIMESTAMP AS OF '2024-01-01'::timestamptz")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), PINS)
def test_relations_with_a_time_of_their_own(
    dialect: SqlDialect, text: str, wanted: list[tuple[int, tuple[str, ...], bool, str, str]]
) -> None:
    found = parse_statement(text, dialect)
    assert isinstance(found, QueryStatement)
    assert found.query.text == text
    assert found.as_of is None
    assert [
        (each.position, each.name, each.is_version, each.expression.text, each.clause.text)
        for each in found.pins
    ] == wanted


def test_a_query_and_its_relations_may_have_times() -> None:
    found = parsed("SELECT * FROM t TIMESTAMP AS OF 1, u AS OF 5")
    assert found["as_of"] == "5"
    assert found["query"] == "SELECT * FROM t TIMESTAMP AS OF 1, u"
    assert [each["expression"] for each in found["pins"]] == ["1"]


MADE = {
    "is": "Change",
    "command": "CREATE MATERIALIZED VIEW",
    "requests": ({"is": "CreateView", "name": "v", "sql": "", "refresh_policy": ""},),
    "names": (("v",),),
    "query": "SELECT 1",
}
QUESTIONS: list[tuple[SqlDialect, str, dict[str, Any]]] = [
    (SPARK, "SUBSCRIBE v", {"is": "Subscribe", "name": ("v",)}),
    (SPARK, "SUBSCRIBE TO s.v", {"is": "Subscribe", "name": ("s", "v")}),
    (
        SPARK,
        "SUBSCRIBE (SELECT * FROM t) WITH (snapshot = false, PROGRESS) AS OF 5 UP TO 10",
        {"is": "Subscribe", "query": "SELECT * FROM t", "snapshot": False, "progress": True,
         "as_of": "5", "up_to": "10"},
    ),
    (
        POSTGRES,
        "SUBSCRIBE v WITH (SNAPSHOT off, PROGRESS = 'true') UP TO '2024-01-01'::timestamptz",
        {"is": "Subscribe", "name": ("v",), "snapshot": False, "progress": True,
         "up_to": "'2024-01-01'::timestamptz"},
    ),
    (SPARK, "DESCRIBE t", {"is": "Describe", "name": ("t",)}),
    (SPARK, "DESC TABLE EXTENDED s.t", {"is": "Describe", "name": ("s", "t"), "extended": True}),
    (SPARK, "DESCRIBE FORMATTED t", {"is": "Describe", "name": ("t",), "extended": True}),
    (SPARK, "DESCRIBE TABLE t", {"is": "Describe", "name": ("t",)}),
    (SPARK, "DESCRIBE extended", {"is": "Describe", "name": ("extended",)}),
    (SPARK, "DESCRIBE QUERY SELECT 1", {"is": "Describe", "query": query("SELECT 1")}),
    (SPARK, "DESCRIBE SELECT 1", {"is": "Describe", "query": query("SELECT 1")}),
    (
        SPARK,
        "EXPLAIN SELECT 1 AS OF 3",
        {"is": "Explain", "mode": "plain", "statement": query("SELECT 1", as_of="3")},
    ),
    (
        SPARK,
        "EXPLAIN ANALYZE (SELECT 1)",
        {"is": "Explain", "mode": "analyze", "statement": query("(SELECT 1)")},
    ),
    (
        SPARK,
        "EXPLAIN INCREMENTAL CREATE MATERIALIZED VIEW v AS SELECT 1",
        {"is": "Explain", "mode": "incremental", "statement": MADE},
    ),
    (SPARK, "EXPLAIN VIEW v", {"is": "Explain", "mode": "plain", "view": ("v",)}),
    (
        SPARK,
        "EXPLAIN INCREMENTAL MATERIALIZED VIEW s.v",
        {"is": "Explain", "mode": "incremental", "view": ("s", "v")},
    ),
    (SPARK, "SHOW TABLES", {"is": "ShowObjects", "kind": "tables"}),
    (
        SPARK,
        "SHOW MATERIALIZED VIEWS IN s LIKE 'a*'",
        {"is": "ShowObjects", "kind": "materialized views", "schema": ("s",), "pattern": "a*"},
    ),
    (SPARK, "SHOW VIEWS 'a*'", {"is": "ShowObjects", "kind": "views", "pattern": "a*"}),
    (SPARK, "SHOW SOURCES", {"is": "ShowObjects", "kind": "sources"}),
    (SPARK, "SHOW SINKS FROM s", {"is": "ShowObjects", "kind": "sinks", "schema": ("s",)}),
    (
        SPARK,
        "SHOW INDEXES ON s.v LIKE 'x'",
        {"is": "ShowObjects", "kind": "indexes", "object": ("s", "v"), "pattern": "x"},
    ),
    (SPARK, "SHOW DATABASES", {"is": "ShowObjects", "kind": "schemas"}),
    (
        SPARK,
        "show table extended in s like '*'",
        {"is": "ShowObjects", "kind": "tables", "schema": ("s",), "pattern": "*",
         "extended": True},
    ),
    (SPARK, "SHOW COLUMNS IN t", {"is": "ShowColumns", "object": ("t",)}),
    (SPARK, "SHOW COLUMNS FROM t IN s", {"is": "ShowColumns", "object": ("s", "t")}),
    (
        SPARK,
        "SHOW CREATE MATERIALIZED VIEW v",
        {"is": "ShowCreate", "kind": "materialized view", "name": ("v",)},
    ),
    (SPARK, "SHOW CREATE TABLE t", {"is": "ShowCreate", "kind": "table", "name": ("t",)}),
    (POSTGRES, "SHOW Server_Version", {"is": "ShowSetting", "name": "server_version"}),
    (POSTGRES, "SHOW TIME ZONE", {"is": "ShowSetting", "name": "timezone"}),
    (POSTGRES, "SHOW ALL", {"is": "ShowSetting", "name": "all"}),
    (
        POSTGRES,
        "SHOW TRANSACTION ISOLATION LEVEL",
        {"is": "ShowSetting", "name": "transaction_isolation"},
    ),
    (SPARK, "SHOW spark.sql.ansi.enabled", {"is": "ShowSetting", "name": "spark.sql.ansi.enabled"}),
    (SPARK, "USE s", {"is": "UseSchema", "name": ("s",)}),
    (SPARK, "USE SCHEMA a.b", {"is": "UseSchema", "name": ("a", "b")}),
    (SPARK, "USE database", {"is": "UseSchema", "name": ("database",)}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), QUESTIONS)
def test_questions(dialect: SqlDialect, text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text, dialect) == wanted


SPLITS: list[tuple[SqlDialect, str, list[tuple[int, str]]]] = [
    (SPARK, "", []),
    (SPARK, " ; -- x\n;; /* y */ ;", []),
    (SPARK, "SELECT 1", [(0, "SELECT 1")]),
    (SPARK, " SELECT 1 ; SELECT ';' ", [(1, "SELECT 1"), (12, "SELECT ';'")]),
    (SPARK, "SELECT `;`; -- a;b\nSELECT \";\"", [(0, "SELECT `;`"), (19, 'SELECT ";"')]),
    (SPARK, "SELECT (1;2); SELECT [;]", [(0, "SELECT (1;2)"), (14, "SELECT [;]")]),
    (SPARK, "a); b", [(0, "a)"), (4, "b")]),
    (SPARK, "SELECT 'a\\'; b'; c", [(0, "SELECT 'a\\'; b'"), (17, "c")]),
    (POSTGRES, "SELECT 'a\\'; b", [(0, "SELECT 'a\\'"), (13, "b")]),
    (POSTGRES, "SELECT $$;$$; SELECT E'\\';'", [(0, "SELECT $$;$$"), (14, "SELECT E'\\';'")]),
    (SPARK, "/*+ H */ SELECT 1; x", [(0, "/*+ H */ SELECT 1"), (19, "x")]),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), SPLITS)
def test_statements_are_split(
    dialect: SqlDialect, text: str, wanted: list[tuple[int, str]]
) -> None:
    assert [(each.start, each.text) for each in split_statements(text, dialect)] == wanted


def test_a_split_statement_keeps_its_place() -> None:
    text = "SELECT 1;\n\n CREATE VIEW v AS SELECT 2;"
    (_, second) = split_statements(text)
    found = parse_span(second.matched())
    assert found.position == text.index("CREATE")
    assert isinstance(found, ChangeStatement)
    assert shown(found.query) == "SELECT 2"
