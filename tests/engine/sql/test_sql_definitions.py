"""CREATE, ALTER, DROP, COMMENT ON: what is read of each form."""

from __future__ import annotations

from typing import Any

import pytest
from sql_shown import POSTGRES, SPARK, changed, parsed  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import ChangeStatement
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.api import (
    AlterObject,
    AlterSource,
    CatalogStatement,
    CreateIndex,
    CreateSink,
    CreateSource,
    CreateTable,
    CreateView,
    DropObject,
    DropSource,
    SourceTable,
)
from actors.runtime.errors import ObjectExists, SqlSyntaxError, UnknownObject

IF_NOT_EXISTS = {"skipped": (ObjectExists,)}
IF_EXISTS = {"skipped": (UnknownObject,)}


def table(*columns: str, key: tuple[str, ...] = ()) -> TableSchema:
    """A schema of columns as "name type", with a bang behind one that is NOT NULL."""
    found = []
    for text in columns:
        name, kind = text.rstrip("!").split(" ", 1)
        found.append(TableColumn(name, kind, not (text.endswith("!") or name in key)))
    return TableSchema(tuple(found), key)


TABLES: list[tuple[str, CreateTable, dict[str, Any]]] = [
    (
        "create table t (a int, b string not null comment 'x')",
        CreateTable(0, "t", table("a int", "b string!"), column_comments={"b": "x"}),
        {},
    ),
    (
        "CREATE TABLE IF NOT EXISTS public.t (A LONG PRIMARY KEY)",
        CreateTable(0, "t", table("A bigint", key=("A",))),
        IF_NOT_EXISTS,
    ),
    (
        "CREATE TABLE t (a int DEFAULT 1 NOT NULL, b int NULL DEFAULT f(1, 2) NULL COMMENT 'x',"
        " c boolean DEFAULT NOT a IS NOT NULL, d int DEFAULT NULL PRIMARY KEY)",
        CreateTable(
            0,
            "t",
            table("a int!", "b int", "c boolean", "d int", key=("d",)),
            column_comments={"b": "x"},
        ),
        {"defaults": {"a": "1", "b": "f(1, 2)", "c": "NOT a IS NOT NULL", "d": "NULL"}},
    ),
    (
        "CREATE TABLE t (a int, B int, PRIMARY KEY (b, A))",
        CreateTable(0, "t", table("a int", "B int", key=("B", "a"))),
        {},
    ),
    (
        "CREATE TABLE t (a int, CONSTRAINT pk PRIMARY KEY (a))",
        CreateTable(0, "t", table("a int", key=("a",))),
        {},
    ),
    (
        "CREATE TABLE t (primary int, key int, `from` int, constraint int)",
        CreateTable(0, "t", table("primary int", "key int", "from int", "constraint int")),
        {},
    ),
    (
        "CREATE TABLE t (a int) COMMENT 'it''s' TBLPROPERTIES ('retain_history_ms' = '5')",
        CreateTable(0, "t", table("a int"), 5, "it's"),
        {},
    ),
    (
        "CREATE TABLE t (a map<string, array<struct<x: int, Y :decimal(5)>>>, b dec)",
        CreateTable(
            0,
            "t",
            table("a map<string,array<struct<x:int,Y:decimal(5)>>>", "b decimal(10,0)"),
        ),
        {},
    ),
    (
        "CREATE TABLE t (a int NULL, b char(3), c timestamp_ntz)",
        CreateTable(0, "t", table("a int", "b char(3)", "c timestamp_ntz")),
        {},
    ),
]


@pytest.mark.parametrize(("text", "request_", "more"), TABLES)
def test_tables(text: str, request_: CreateTable, more: dict[str, Any]) -> None:
    _, names, requests, found = changed(text)
    assert ([each[-1] for each in names], requests, found) == (["t"], (request_,), more)
    # And the same in PostgreSQL's dialect, but for names in lower case.
    if text.islower() and "`" not in text:
        assert changed(text, POSTGRES) == changed(text)


POSTGRES_TYPES = [
    ("int2", "smallint"),
    ("int4", "int"),
    ("INT8", "bigint"),
    ("integer", "int"),
    ("bigint", "bigint"),
    ("text", "string"),
    ("string", "string"),
    ("varchar", "string"),
    ("varchar(3)", "varchar(3)"),
    ("character varying (3)", "varchar(3)"),
    ("char(3)", "char(3)"),
    ("character", "char(1)"),
    ("bpchar", "string"),
    ("float", "double"),
    ("float(20)", "float"),
    ("float(30)", "double"),
    ("float4", "float"),
    ("real", "float"),
    ("float8", "double"),
    ("double precision", "double"),
    ("double", "double"),
    ("bool", "boolean"),
    ("timestamptz", "timestamp"),
    ("timestamp", "timestamp_ntz"),
    ("timestamp(6)", "timestamp_ntz"),
    ("timestamp with time zone", "timestamp"),
    ("timestamp (6) without time zone", "timestamp_ntz"),
    ("date", "date"),
    ("numeric", "decimal(38,18)"),
    ("numeric(5,2)", "decimal(5,2)"),
    ("decimal(5)", "decimal(5)"),
    ("bytea", "binary"),
    ("int4[]", "array<int>"),
    ("text[3][]", "array<array<string>>"),
    ("int4 array", "array<int>"),
    ("pg_catalog.int4", "int"),
    ("map<text,int8>", "map<string,bigint>"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "wanted"), POSTGRES_TYPES)
def test_types_of_postgres(written: str, wanted: str) -> None:
    _, _, (request,), _ = changed(f"CREATE TABLE t (a {written} NOT NULL, b int)", POSTGRES)
    assert request.schema.columns[0] == TableColumn("a", wanted, nullable=False)


@pytest.mark.parametrize("kind", ["uuid", "json", "jsonb", "uuid[]", "pg_catalog.json", '"uuid"'])
def test_types_whose_texts_nobody_would_check_are_refused(kind: str) -> None:
    with pytest.raises(SqlSyntaxError, match=r"a column of type (uuid|jsonb?) is not supported"):
        parse_statement(f"CREATE TABLE t (a {kind})", POSTGRES)
    with pytest.raises(SqlSyntaxError, match="arguments of type"):
        parse_statement(f"PREPARE p (int, {kind}) AS SELECT $2", POSTGRES)


def test_names_of_postgres_are_in_lower_case_unless_quoted() -> None:
    text = 'CREATE TABLE PUBLIC.T (A int, "B" int, PRIMARY KEY ("B"))'
    _, names, requests, _ = changed(text, POSTGRES)
    assert names == (("public", "t"),)
    assert requests == (CreateTable(0, "t", table("a int", "B int", key=("B",))),)


QUERIES: list[tuple[str, dict[str, Any], bool]] = [
    ("CREATE TABLE t COMMENT 'c' AS SELECT 1 AS a;", {"query": "SELECT 1 AS a"}, False),
    (
        "CREATE TABLE IF NOT EXISTS t COMMENT 'c' AS (VALUES (1)) AS OF 5",
        {"query": "(VALUES (1))", "as_of": "5"},
        True,
    ),
]


@pytest.mark.parametrize(("text", "query", "skipped"), QUERIES)
def test_tables_of_queries(text: str, query: dict[str, Any], skipped: bool) -> None:
    found = parsed(text)
    assert (found["is"], found["query"]) == ("CreateTableAs", {"is": "Query", **query})
    assert ("skipped" in found["created"]) == skipped
    assert found["created"]["requests"] == (
        {"is": "CreateTable", "name": "t", "schema": {"is": "TableSchema"}, "comment": "c"},
    )


DEFINITIONS: list[tuple[SqlDialect, str, CatalogStatement, dict[str, Any]]] = [
    (
        SPARK,
        "create materialized view v as select * from t",
        CreateView(0, "v", "", refresh_policy=""),
        {"query": "select * from t"},
    ),
    (
        SPARK,
        "CREATE OR REPLACE MATERIALIZED VIEW public.v COMMENT 'x' REFRESH POLICY INCREMENTAL STRICT"
        " TBLPROPERTIES ('retain_history_ms' = 5, target_lag_ms 1000, 'spark.sql.x' = true)"
        " AS WITH x AS (SELECT 1) SELECT /*+ BROADCAST(x) */ * FROM x -- end",
        CreateView(
            0,
            "v",
            "",
            5,
            {"spark.sql.x": "true"},
            "incremental strict",
            1000,
            replace=True,
            comment="x",
        ),
        {"query": "WITH x AS (SELECT 1) SELECT /*+ BROADCAST(x) */ * FROM x"},
    ),
    (
        SPARK,
        "CREATE MATERIALIZED VIEW IF NOT EXISTS values REFRESH POLICY AUTO AS TABLE t",
        CreateView(0, "values", ""),
        {"query": "TABLE t", **IF_NOT_EXISTS},
    ),
    (
        POSTGRES,
        'CREATE MATERIALIZED VIEW "V" REFRESH POLICY INCREMENTAL AS SELECT "A"::int8 FROM t',
        CreateView(0, "V", "", refresh_policy="incremental"),
        {"query": 'SELECT "A"::int8 FROM t'},
    ),
    (
        SPARK,
        "CREATE OR REPLACE VIEW v TBLPROPERTIES (a = b) AS SELECT 1",
        CreateView(0, "v", "", replace=True, plain=True),
        {"query": "SELECT 1"},
    ),
    (
        SPARK,
        "CREATE VIEW IF NOT EXISTS v COMMENT r'\\d' AS FROM t SELECT a",
        CreateView(0, "v", "", comment="\\d", plain=True),
        {"query": "FROM t SELECT a", **IF_NOT_EXISTS},
    ),
    (
        SPARK,
        "CREATE INDEX ON public.v (a, `b c`)",
        CreateIndex(0, "v_a_b c_idx", "v", ("a", "b c")),
        {},
    ),
    (
        SPARK,
        "CREATE INDEX IF NOT EXISTS i ON v(a)",
        CreateIndex(0, "i", "v", ("a",)),
        IF_NOT_EXISTS,
    ),
    (
        SPARK,
        "CREATE SOURCE pg USING Postgres OPTIONS (host 'h', port = 5432, lag -1, tls.mode require)"
        " FOR TABLES (public.a AS b, c, `D`.e)",
        CreateSource(
            0,
            "pg",
            "postgres",
            b'{"type":"postgres","host":"h","port":5432,"lag":-1,"tls.mode":"require"}',
            (SourceTable("public.a", "b"), SourceTable("c"), SourceTable("D.e")),
        ),
        {},
    ),
    (
        SPARK,
        "CREATE SOURCE IF NOT EXISTS c USING counter FOR ALL TABLES",
        CreateSource(0, "c", "counter", b'{"type":"counter"}'),
        IF_NOT_EXISTS,
    ),
    (
        POSTGRES,
        "CREATE SOURCE c USING counter OPTIONS (\"Rate\" = '5', note $$it's$$)",
        CreateSource(0, "c", "counter", b'{"type":"counter","Rate":5,"note":"it\'s"}'),
        {},
    ),
    (
        SPARK,
        "CREATE SINK k FROM public.v USING delta OPTIONS ('path' '/data')",
        CreateSink(0, "k", "v", "delta", b'{"path": "/data"}'),
        {},
    ),
    (
        SPARK,
        "CREATE SINK IF NOT EXISTS k ON v USING parquet",
        CreateSink(0, "k", "v", "parquet", b"{}"),
        IF_NOT_EXISTS,
    ),
]


@pytest.mark.parametrize(("dialect", "text", "request_", "more"), DEFINITIONS)
def test_definitions(
    dialect: SqlDialect, text: str, request_: CatalogStatement, more: dict[str, Any]
) -> None:
    _, _, requests, found = changed(text, dialect)
    assert (requests, found) == ((request_,), more)


CHANGES: list[tuple[str, tuple[CatalogStatement, ...], dict[str, Any]]] = [
    (
        "ALTER MATERIALIZED VIEW v SET REFRESH POLICY FULL",
        (AlterObject(0, "v", refresh_policy="full"),),
        {"kind": "materialized view"},
    ),
    (
        "ALTER VIEW IF EXISTS v SET TBLPROPERTIES (target_lag_ms = 1)",
        (AlterObject(0, "v", target_lag_ms=1),),
        {"kind": "view", **IF_EXISTS},
    ),
    (
        "ALTER TABLE t UNSET TBLPROPERTIES IF EXISTS (target_lag_ms, 'retain_history_ms')",
        (AlterObject(0, "t", target_lag_ms=0, retain_history_ms=0),),
        {"kind": "table"},
    ),
    (
        "ALTER SINK k RENAME TO public.l",
        (AlterObject(0, "k", rename="l"),),
        {"kind": "sink"},
    ),
    ("ALTER INDEX i RENAME TO j", (AlterObject(0, "i", rename="j"),), {"kind": "index"}),
    (
        "ALTER TABLE t ADD COLUMNS (a int COMMENT 'x', b string)",
        (
            AlterObject(
                0,
                "t",
                add_columns=table("a int", "b string").columns,
                column_comments={"a": "x"},
            ),
        ),
        {"kind": "table"},
    ),
    (
        "ALTER TABLE t ADD COLUMN IF NOT EXISTS a int, ADD COLUMN b int",
        (AlterObject(0, "t", add_columns=table("a int", "b int").columns),),
        {"kind": "table", "only_new_columns": True},
    ),
    (
        "ALTER TABLE t ALTER COLUMN a SET DEFAULT 1 + 1",
        (AlterObject(0, "t"),),
        {"kind": "table", "defaults": {"a": "1 + 1"}},
    ),
    (
        "ALTER TABLE t ALTER a DROP DEFAULT",
        (AlterObject(0, "t"),),
        {"kind": "table", "defaults": {"a": None}},
    ),
    (
        "ALTER SOURCE s ADD TABLE public.x AS y, z",
        (AlterSource(0, "s", (SourceTable("public.x", "y"), SourceTable("z"))),),
        {"kind": "source"},
    ),
    (
        "ALTER SOURCE s ADD TABLES (x)",
        (AlterSource(0, "s", (SourceTable("x"),)),),
        {"kind": "source"},
    ),
    ("DROP VIEW v", (DropObject(0, "v"),), {"kind": "view"}),
    (
        "DROP MATERIALIZED VIEW IF EXISTS public.v, w CASCADE",
        (DropObject(0, "v", True), DropObject(0, "w", True)),
        {"kind": "materialized view", **IF_EXISTS},
    ),
    ("DROP SOURCE s RESTRICT", (DropSource(0, "s"),), {"kind": "source"}),
    ("DROP INDEX i", (DropObject(0, "i"),), {"kind": "index"}),
    ("COMMENT ON MATERIALIZED VIEW v IS 'x'", (AlterObject(0, "v", comment="x"),), {}),
    ("COMMENT ON TABLE t IS NULL", (AlterObject(0, "t", comment=""),), {}),
    (
        "COMMENT ON COLUMN public.t.c IS ''",
        (AlterObject(0, "t", comment="", column="c"),),
        {},
    ),
]


@pytest.mark.parametrize(("text", "requests", "more"), CHANGES)
def test_changes_of_objects(
    text: str, requests: tuple[CatalogStatement, ...], more: dict[str, Any]
) -> None:
    _, _, found, besides = changed(text)
    assert (found, besides) == (requests, more)
    assert changed(text, POSTGRES) == changed(text)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("DROP TABLE t, other.u", "other.u: all objects are in the schema public; write u"),
        ("CREATE INDEX ON other.v (a)", "other.v: all objects are in the schema public; write v"),
        (
            "ALTER TABLE t SET TBLPROPERTIES (a = 1)",
            "unknown property 'a': expected retain_history_ms, target_lag_ms",
        ),
        (
            "CREATE TABLE t (a int) TBLPROPERTIES (retain_history_ms = long)",
            "invalid property 'retain_history_ms' = 'long': expected a whole number",
        ),
        (
            "CREATE VIEW v TBLPROPERTIES (target_lag_ms = 1) AS SELECT 1",
            "property 'target_lag_ms' is only for materialized views",
        ),
    ],
)
def test_what_the_service_cannot_do_is_told_when_it_is_to_be_done(text: str, refused: str) -> None:
    """Not by the grammar: the text may be one of Spark's."""
    _, names, requests, more = changed(text)
    assert names
    assert (requests, more["refused"]) == ((), refused)


def test_positions_lead_into_the_text() -> None:
    text = "  CREATE MATERIALIZED VIEW v -- a view\n AS\n  SELECT a\n  FROM t ; "
    found = parse_statement(text)
    assert isinstance(found, ChangeStatement)
    assert found.position == 2
    assert found.query is not None
    assert text[found.query.start : found.query.end] == found.query.text == "SELECT a\n  FROM t"
    with pytest.raises(SqlSyntaxError, match="defined twice") as caught:
        parse_statement("CREATE TABLE t (a int, PRIMARY KEY (a), A int)")
    assert caught.value.position == 40


def test_the_one_schema_has_no_comment() -> None:
    with pytest.raises(SqlSyntaxError, match="the schema public cannot have a comment"):
        parse_statement("COMMENT ON DATABASE d IS 'x'")
