"""CREATE, ALTER, DROP, COMMENT ON: what is read of each form."""

from __future__ import annotations

from typing import Any

import pytest
from sql_shown import POSTGRES, SPARK, parsed  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import (
    CreateMaterializedViewStatement,
    CreateSourceStatement,
    CreateTableStatement,
)
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import SqlSyntaxError


def column(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"is": "ColumnDefinition", "name": name, "type": kind, **more}


def table(outside: tuple[str, ...], name: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"is": "SourceTableName", "outside": outside}
    return found | ({"name": name} if name else {})


TABLES: list[tuple[str, dict[str, Any]]] = [
    (
        "create table t (a int, b string not null comment 'x')",
        {"name": ("t",), "columns": (column("a", "int"),
         column("b", "string", not_null=True, comment="x"))},
    ),
    (
        "CREATE TABLE IF NOT EXISTS s.t (A LONG PRIMARY KEY)",
        {"name": ("s", "t"), "columns": (column("A", "bigint"),), "key": ("A",),
         "if_not_exists": True},
    ),
    (
        "CREATE TABLE t (a int DEFAULT 1 NOT NULL, b int NULL DEFAULT f(1, 2) NULL COMMENT 'x',"
        " c boolean DEFAULT NOT a IS NOT NULL, d int DEFAULT NULL PRIMARY KEY)",
        {"name": ("t",), "key": ("d",), "columns": (
            column("a", "int", not_null=True, default="1"),
            column("b", "int", comment="x", default="f(1, 2)"),
            column("c", "boolean", default="NOT a IS NOT NULL"),
            column("d", "int", default="NULL"))},
    ),
    (
        "CREATE TABLE t (a int, B int, PRIMARY KEY (b, A))",
        {"name": ("t",), "columns": (column("a", "int"), column("B", "int")), "key": ("B", "a")},
    ),
    (
        "CREATE TABLE t (a int, CONSTRAINT pk PRIMARY KEY (a))",
        {"name": ("t",), "columns": (column("a", "int"),), "key": ("a",)},
    ),
    (
        "CREATE TABLE t (primary int, key int, `from` int, constraint int)",
        {"name": ("t",), "columns": (column("primary", "int"), column("key", "int"),
         column("from", "int"), column("constraint", "int"))},
    ),
    (
        "CREATE TABLE t (a int) COMMENT 'it''s' TBLPROPERTIES (k = 'v', 'x.y' 1, z = true)",
        {"name": ("t",), "columns": (column("a", "int"),), "comment": "it's",
         "properties": {"k": "v", "x.y": "1", "z": "true"}},
    ),
    (
        "CREATE TABLE t (a map<string, array<struct<x: int, Y :decimal(5)>>>, b dec)",
        {"name": ("t",), "columns": (
         column("a", "map<string,array<struct<x:int,Y:decimal(5)>>>"),
         column("b", "decimal(10,0)"))},
    ),
    (
        "CREATE TABLE t (a int NULL, b char(3), c timestamp_ntz)",
        {"name": ("t",), "columns": (column("a", "int"), column("b", "char(3)"),
         column("c", "timestamp_ntz"))},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), TABLES)
def test_tables(text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text) == {"is": "CreateTable", **wanted}
    # And the same in PostgreSQL's dialect, but for names in lower case.
    if text.islower() and "`" not in text:
        assert parsed(text, POSTGRES) == {"is": "CreateTable", **wanted}


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
    found = parse_statement(f"CREATE TABLE t (a {written} NOT NULL, b int)", POSTGRES)
    assert isinstance(found, CreateTableStatement)
    assert found.columns[0].type == wanted
    assert found.columns[0].not_null


@pytest.mark.parametrize("kind", ["uuid", "json", "jsonb", "uuid[]", "pg_catalog.json", '"uuid"'])
def test_types_whose_texts_nobody_would_check_are_refused(kind: str) -> None:
    with pytest.raises(SqlSyntaxError, match=r"a column of type (uuid|jsonb?) is not supported"):
        parse_statement(f"CREATE TABLE t (a {kind})", POSTGRES)
    with pytest.raises(SqlSyntaxError, match="an argument of type"):
        parse_statement(f"PREPARE p (int, {kind}) AS SELECT $2", POSTGRES)


def test_names_of_postgres_are_in_lower_case_unless_quoted() -> None:
    found = parse_statement('CREATE TABLE S.T (A int, "B" int, PRIMARY KEY ("B"))', POSTGRES)
    assert isinstance(found, CreateTableStatement)
    assert found.name == ("s", "t")
    assert [each.name for each in found.columns] == ["a", "B"]
    assert found.key == ("B",)


def test_a_table_has_a_schema() -> None:
    found = parse_statement("CREATE TABLE t (a int, b int NOT NULL, c int, PRIMARY KEY (c))")
    assert isinstance(found, CreateTableStatement)
    assert found.schema() == TableSchema(
        (TableColumn("a", "int"), TableColumn("b", "int", False), TableColumn("c", "int", False)),
        ("c",),
    )


DEFINITIONS: list[tuple[SqlDialect, str, dict[str, Any]]] = [
    (
        SPARK,
        "CREATE TABLE t COMMENT 'c' AS SELECT 1 AS a;",
        {"is": "CreateTableAs", "name": ("t",), "comment": "c",
         "query": {"is": "Query", "query": "SELECT 1 AS a"}},
    ),
    (
        SPARK,
        "CREATE TABLE IF NOT EXISTS t AS (VALUES (1)) AS OF 5",
        {"is": "CreateTableAs", "name": ("t",), "if_not_exists": True,
         "query": {"is": "Query", "query": "(VALUES (1))", "as_of": "5"}},
    ),
    (
        SPARK,
        "create materialized view v as select * from t",
        {"is": "CreateMaterializedView", "name": ("v",), "query": "select * from t"},
    ),
    (
        SPARK,
        "CREATE OR REPLACE MATERIALIZED VIEW a.v COMMENT 'x' REFRESH POLICY INCREMENTAL STRICT"
        " TBLPROPERTIES ('retain_history_ms' = 5, target_lag_ms 1000) AS WITH x AS (SELECT 1)"
        " SELECT /*+ BROADCAST(x) */ * FROM x -- end",
        {"is": "CreateMaterializedView", "name": ("a", "v"), "or_replace": True, "comment": "x",
         "policy": "incremental strict",
         "properties": {"retain_history_ms": "5", "target_lag_ms": "1000"},
         "query": "WITH x AS (SELECT 1) SELECT /*+ BROADCAST(x) */ * FROM x"},
    ),
    (
        SPARK,
        "CREATE MATERIALIZED VIEW IF NOT EXISTS values REFRESH POLICY AUTO AS TABLE t",
        {"is": "CreateMaterializedView", "name": ("values",), "if_not_exists": True,
         "policy": "auto", "query": "TABLE t"},
    ),
    (
        POSTGRES,
        'CREATE MATERIALIZED VIEW "V" REFRESH POLICY INCREMENTAL AS SELECT "A"::int8 FROM t',
        {"is": "CreateMaterializedView", "name": ("V",), "policy": "incremental",
         "query": 'SELECT "A"::int8 FROM t'},
    ),
    (
        SPARK,
        "CREATE OR REPLACE VIEW v TBLPROPERTIES (a = b) AS SELECT 1",
        {"is": "CreateView", "name": ("v",), "or_replace": True, "properties": {"a": "b"},
         "query": "SELECT 1"},
    ),
    (
        SPARK,
        "CREATE VIEW IF NOT EXISTS v COMMENT r'\\d' AS FROM t SELECT a",
        {"is": "CreateView", "name": ("v",), "if_not_exists": True, "comment": "\\d",
         "query": "FROM t SELECT a"},
    ),
    (
        SPARK,
        "CREATE INDEX ON s.v (a, `b c`)",
        {"is": "CreateIndex", "object": ("s", "v"), "columns": ("a", "b c")},
    ),
    (
        SPARK,
        "CREATE INDEX IF NOT EXISTS i ON v(a)",
        {"is": "CreateIndex", "name": ("i",), "object": ("v",), "columns": ("a",),
         "if_not_exists": True},
    ),
    (
        SPARK,
        "CREATE SOURCE pg USING Postgres OPTIONS (host 'h', port = 5432, lag -1, tls.mode require)"
        " FOR TABLES (public.a AS b, c, `D`.e)",
        {"is": "CreateSource", "name": ("pg",), "kind": "postgres",
         "options": {"host": "h", "port": "5432", "lag": "-1", "tls.mode": "require"},
         "tables": (table(("public", "a"), ("b",)), table(("c",)), table(("D", "e")))},
    ),
    (
        SPARK,
        "CREATE SOURCE IF NOT EXISTS c USING counter FOR ALL TABLES",
        {"is": "CreateSource", "name": ("c",), "kind": "counter", "if_not_exists": True},
    ),
    (
        POSTGRES,
        "CREATE SOURCE c USING counter OPTIONS (\"Rate\" = '5', note $$it's$$)",
        {"is": "CreateSource", "name": ("c",), "kind": "counter",
         "options": {"Rate": "5", "note": "it's"}},
    ),
    (
        SPARK,
        "CREATE SINK k FROM s.v USING delta OPTIONS ('path' '/data')",
        {"is": "CreateSink", "name": ("k",), "object": ("s", "v"), "kind": "delta",
         "options": {"path": "/data"}},
    ),
    (
        SPARK,
        "CREATE SINK IF NOT EXISTS k ON v USING parquet",
        {"is": "CreateSink", "name": ("k",), "object": ("v",), "kind": "parquet",
         "if_not_exists": True},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), DEFINITIONS)
def test_definitions(dialect: SqlDialect, text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text, dialect) == wanted


CHANGES: list[tuple[str, dict[str, Any]]] = [
    (
        "ALTER MATERIALIZED VIEW v SET REFRESH POLICY FULL",
        {"is": "AlterObject", "kind": "materialized view", "name": ("v",),
         "action": {"is": "SetPolicyAction", "policy": "full"}},
    ),
    (
        "ALTER VIEW IF EXISTS v SET TBLPROPERTIES (a = 1)",
        {"is": "AlterObject", "kind": "view", "name": ("v",), "if_exists": True,
         "action": {"is": "SetPropertiesAction", "properties": {"a": "1"}}},
    ),
    (
        "ALTER TABLE t UNSET TBLPROPERTIES IF EXISTS (a, 'b.c')",
        {"is": "AlterObject", "kind": "table", "name": ("t",),
         "action": {"is": "UnsetPropertiesAction", "keys": ("a", "b.c"), "if_exists": True}},
    ),
    (
        "ALTER SINK k RENAME TO s.l",
        {"is": "AlterObject", "kind": "sink", "name": ("k",),
         "action": {"is": "RenameAction", "name": ("s", "l")}},
    ),
    (
        "ALTER INDEX i RENAME TO j",
        {"is": "AlterObject", "kind": "index", "name": ("i",),
         "action": {"is": "RenameAction", "name": ("j",)}},
    ),
    (
        "ALTER TABLE t ADD COLUMNS (a int COMMENT 'x', b string)",
        {"is": "AlterObject", "kind": "table", "name": ("t",),
         "action": {"is": "AddColumnsAction",
                    "columns": (column("a", "int", comment="x"), column("b", "string"))}},
    ),
    (
        "ALTER TABLE t ADD COLUMN IF NOT EXISTS a int, ADD COLUMN b int",
        {"is": "AlterObject", "kind": "table", "name": ("t",),
         "action": {"is": "AddColumnsAction", "if_not_exists": True,
                    "columns": (column("a", "int"), column("b", "int"))}},
    ),
    (
        "ALTER SOURCE s ADD TABLE public.x AS y, z",
        {"is": "AlterObject", "kind": "source", "name": ("s",),
         "action": {"is": "AddTablesAction",
                    "tables": (table(("public", "x"), ("y",)), table(("z",)))}},
    ),
    (
        "ALTER SOURCE s ADD TABLES (x)",
        {"is": "AlterObject", "kind": "source", "name": ("s",),
         "action": {"is": "AddTablesAction", "tables": (table(("x",)),)}},
    ),
    ("DROP VIEW v", {"is": "DropObjects", "kind": "view", "names": (("v",),)}),
    (
        "DROP MATERIALIZED VIEW IF EXISTS a.v, w CASCADE",
        {"is": "DropObjects", "kind": "materialized view", "names": (("a", "v"), ("w",)),
         "if_exists": True, "cascade": True},
    ),
    ("DROP SOURCE s RESTRICT", {"is": "DropObjects", "kind": "source", "names": (("s",),)}),
    ("DROP INDEX i", {"is": "DropObjects", "kind": "index", "names": (("i",),)}),
    (
        "COMMENT ON MATERIALIZED VIEW v IS 'x'",
        {"is": "CommentOn", "kind": "materialized view", "name": ("v",), "comment": "x"},
    ),
    ("COMMENT ON TABLE t IS NULL", {"is": "CommentOn", "kind": "table", "name": ("t",)}),
    (
        "COMMENT ON COLUMN s.t.c IS ''",
        {"is": "CommentOn", "kind": "column", "name": ("s", "t", "c"), "comment": ""},
    ),
    ("COMMENT ON DATABASE d IS 'x'", {"is": "CommentOn", "kind": "schema", "name": ("d",),
                                      "comment": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), CHANGES)
def test_changes_of_objects(text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text) == wanted
    assert parsed(text, POSTGRES) == wanted


def test_positions_lead_into_the_text() -> None:
    text = "  CREATE MATERIALIZED VIEW v -- a view\n AS\n  SELECT a\n  FROM t ; "
    found = parse_statement(text)
    assert isinstance(found, CreateMaterializedViewStatement)
    assert found.position == 2
    assert text[found.query.start : found.query.end] == found.query.text == "SELECT a\n  FROM t"
    source = parse_statement("CREATE SOURCE s USING k FOR TABLES (a, b.c AS d)")
    assert isinstance(source, CreateSourceStatement)
    assert [each.position for each in source.tables or ()] == [36, 39]
    made = parse_statement("CREATE TABLE t (a int, PRIMARY KEY (a), b int)")
    assert isinstance(made, CreateTableStatement)
    assert [each.position for each in made.columns] == [16, 40]
