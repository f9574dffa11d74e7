"""INSERT, UPDATE, DELETE, MERGE, COPY, roles: what is read of each form."""

from __future__ import annotations

from typing import Any

import pytest
from sql_shown import POSTGRES, SPARK, changed, parsed  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import (
    ChangeStatement,
    CopyOptions,
    CopyStatement,
    InsertStatement,
    MergeStatement,
)
from actors.engine.sql.tokens import SqlDialect
from actors.model.protocol.role_messages import (
    AlterRole,
    ChangeRights,
    CreateRole,
    DropRoles,
    RoleStatement,
)
from actors.runtime.errors import ObjectExists


def assigned(*pairs: tuple[str, str]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"is": "ColumnAssignment", "column": tuple(column.split(".")), "value": value}
        for column, value in pairs
    )


CHANGES: list[tuple[str, dict[str, Any]]] = [
    (
        "INSERT INTO t VALUES (1, 'a;b', f(x, y)), (DEFAULT, NULL, (SELECT 1))",
        {"is": "Insert", "table": ("t",),
         "rows": (("1", "'a;b'", "f(x, y)"), ("DEFAULT", "NULL", "(SELECT 1)"))},
    ),
    (
        "INSERT INTO t DEFAULT VALUES",
        {"is": "Insert", "table": ("t",), "default_values": True},
    ),
    (
        "INSERT INTO TABLE s.t (a, from) VALUES (1, -2)",
        {"is": "Insert", "table": ("s", "t"), "columns": ("a", "from"), "rows": (("1", "-2"),)},
    ),
    (
        "INSERT INTO t SELECT * FROM u",
        {"is": "Insert", "table": ("t",), "query": {"is": "Query", "query": "SELECT * FROM u"}},
    ),
    (
        "INSERT INTO t (select, b) (SELECT 1, 2)",
        {"is": "Insert", "table": ("t",), "columns": ("select", "b"),
         "query": {"is": "Query", "query": "(SELECT 1, 2)"}},
    ),
    (
        "INSERT INTO t ((SELECT 1) UNION (SELECT 2))",
        {"is": "Insert", "table": ("t",),
         "query": {"is": "Query", "query": "((SELECT 1) UNION (SELECT 2))"}},
    ),
    (
        "INSERT INTO t VALUES (1) UNION ALL SELECT 2",
        {"is": "Insert", "table": ("t",),
         "query": {"is": "Query", "query": "VALUES (1) UNION ALL SELECT 2"}},
    ),
    (
        "INSERT INTO t VALUES 1, 2",
        {"is": "Insert", "table": ("t",), "query": {"is": "Query", "query": "VALUES 1, 2"}},
    ),
    (
        "INSERT INTO t WITH x AS (SELECT 1) SELECT * FROM x AS OF 5",
        {"is": "Insert", "table": ("t",),
         "query": {"is": "Query", "query": "WITH x AS (SELECT 1) SELECT * FROM x",
                   "as_of": "5"}},
    ),
    (
        "UPDATE t SET a = 1",
        {"is": "Update", "table": ("t",), "assignments": assigned(("a", "1"))},
    ),
    (
        "UPDATE s.t AS x SET x.a = a + 1, b = CASE WHEN a IS DISTINCT FROM b THEN 1 END,"
        " c = f(SELECT where FROM u WHERE v) WHERE x.where = 1 AND y",
        {"is": "Update", "table": ("s", "t"), "alias": "x", "where": "x.where = 1 AND y",
         "assignments": assigned(
             ("x.a", "a + 1"),
             ("b", "CASE WHEN a IS DISTINCT FROM b THEN 1 END"),
             ("c", "f(SELECT where FROM u WHERE v)"))},
    ),
    ("DELETE FROM t", {"is": "Delete", "table": ("t",)}),
    (
        "DELETE FROM t x WHERE x.a IN (SELECT b FROM u)",
        {"is": "Delete", "table": ("t",), "alias": "x", "where": "x.a IN (SELECT b FROM u)"},
    ),
    (
        "MERGE INTO t USING u ON t.k = u.k WHEN MATCHED THEN UPDATE SET *"
        " WHEN NOT MATCHED THEN INSERT *",
        {"is": "Merge", "table": ("t",), "source_name": ("u",), "on": "t.k = u.k",
         "clauses": (
             {"is": "MergeClause", "match": "matched", "action": "update all"},
             {"is": "MergeClause", "match": "not matched", "action": "insert all"})},
    ),
    (
        "MERGE INTO s.t AS a USING (SELECT * FROM u) b ON a.k = CASE WHEN b.x THEN 1 END"
        " WHEN MATCHED AND CASE WHEN b.d THEN true END THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET v = CASE WHEN 1 THEN 2 END, a.w = b.w"
        " WHEN NOT MATCHED BY TARGET AND b.k > 0 THEN INSERT (k, v) VALUES (b.k, f(1, 2))"
        " WHEN NOT MATCHED BY SOURCE THEN DELETE",
        {"is": "Merge", "table": ("s", "t"), "alias": "a", "source_alias": "b",
         "source_query": {"is": "Query", "query": "SELECT * FROM u"},
         "on": "a.k = CASE WHEN b.x THEN 1 END",
         "clauses": (
             {"is": "MergeClause", "match": "matched", "action": "delete",
              "condition": "CASE WHEN b.d THEN true END"},
             {"is": "MergeClause", "match": "matched", "action": "update",
              "assignments": assigned(("v", "CASE WHEN 1 THEN 2 END"), ("a.w", "b.w"))},
             {"is": "MergeClause", "match": "not matched", "action": "insert",
              "condition": "b.k > 0", "columns": ("k", "v"), "values": ("b.k", "f(1, 2)")},
             {"is": "MergeClause", "match": "not matched by source", "action": "delete"})},
    ),
    (
        "MERGE INTO t USING u ON x WHEN MATCHED THEN DO NOTHING WHEN NOT MATCHED THEN"
        " INSERT VALUES (1)",
        {"is": "Merge", "table": ("t",), "source_name": ("u",), "on": "x",
         "clauses": (
             {"is": "MergeClause", "match": "matched", "action": "nothing"},
             {"is": "MergeClause", "match": "not matched", "action": "insert",
              "values": ("1",)})},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), CHANGES)
def test_changes_of_rows(text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text) == wanted
    assert parsed(text, POSTGRES) == wanted


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INSERT INTO t VALUES (1), (2) RETURNING *, a AS b", "Insert"),
        ("INSERT INTO t SELECT 1 ORDER BY 1 RETURNING *, a AS b", "Insert"),
        ("INSERT INTO t VALUES (1) ON CONFLICT (a) DO UPDATE SET a = 2 WHERE c RETURNING *, a AS b",
         "Insert"),
        ("UPDATE t SET a = 1 RETURNING *, a AS b", "Update"),
        ("DELETE FROM t WHERE x IS DISTINCT FROM 1 RETURNING *, a AS b", "Delete"),
        ("DELETE FROM t RETURNING *, a AS b", "Delete"),
    ],
)  # fmt: skip
def test_rows_that_are_returned(text: str, kind: str) -> None:
    found = parsed(text, POSTGRES)
    assert (found["is"], found["returning"]) == (kind, ("*", "a AS b"))
    # `FROM` belongs to the expression here.
    assert parsed("DELETE FROM t RETURNING a IS DISTINCT FROM b, extract(YEAR FROM d)", POSTGRES)[
        "returning"
    ] == ("a IS DISTINCT FROM b", "extract(YEAR FROM d)")


def test_spans_of_rows_lead_into_the_text() -> None:
    text = "INSERT INTO t\nVALUES ( 'a' || b , 2 )"
    found = parse_statement(text)
    assert isinstance(found, InsertStatement)
    assert found.rows is not None
    ((first, second),) = found.rows
    assert text[first.start : first.end] == first.text == "'a' || b"
    assert (second.start, second.text) == (text.index("2"), "2")
    merged = parse_statement("MERGE INTO t USING u ON a WHEN MATCHED THEN DELETE")
    assert isinstance(merged, MergeStatement)
    assert merged.clauses[0].position == 26


TEXT = CopyOptions()
CSV = CopyOptions(format="csv", delimiter=",", null="")
COPIES: list[tuple[str, dict[str, Any], CopyOptions]] = [
    ("COPY t FROM STDIN", {"direction": "from", "table": ("t",)}, TEXT),
    ("COPY s.T (a, \"B\") FROM STDIN", {"direction": "from", "table": ("s", "t"),
                                        "columns": ("a", "B")}, TEXT),
    ("COPY t TO STDOUT (FORMAT csv)", {"direction": "to", "table": ("t",)}, CSV),
    (
        "COPY (SELECT 1 FROM a AS OF 3) TO STDOUT WITH (FORMAT 'binary')",
        {"direction": "to", "source": {"is": "Query", "query": "SELECT 1 FROM a", "as_of": "3"}},
        CopyOptions(format="binary"),
    ),
    (
        "COPY (SUBSCRIBE v WITH (progress)) TO STDOUT",
        {"direction": "to", "source": {"is": "Subscribe", "name": ("v",), "progress": True}},
        TEXT,
    ),
    (
        "COPY t FROM STDIN WITH (FORMAT csv, HEADER, DELIMITER ';', NULL 'x', QUOTE '|',"
        " ESCAPE '\\', ENCODING 'utf-8')",
        {"direction": "from", "table": ("t",)},
        CopyOptions(format="csv", delimiter=";", null="x", header=True, quote="|", escape="\\"),
    ),
    (
        "COPY t FROM STDIN WITH (FORMAT csv, HEADER match)",
        {"direction": "from", "table": ("t",)},
        CopyOptions(format="csv", delimiter=",", null="", header=True, header_match=True),
    ),
    (
        "COPY t FROM STDIN WITH (FORMAT csv, HEADER false, QUOTE '$')",
        {"direction": "from", "table": ("t",)},
        CopyOptions(format="csv", delimiter=",", null="", quote="$", escape="$"),
    ),
    ("COPY t TO STDOUT CSV HEADER", {"direction": "to", "table": ("t",)},
     CopyOptions(format="csv", delimiter=",", null="", header=True)),
    (
        "COPY t FROM STDIN WITH CSV DELIMITER AS ';' NULL AS 'NULL' QUOTE 'q'",
        {"direction": "from", "table": ("t",)},
        CopyOptions(format="csv", delimiter=";", null="NULL", quote="q", escape="q"),
    ),
    ("COPY t FROM STDIN DELIMITERS E'\\b' NULL ''", {"direction": "from", "table": ("t",)},
     CopyOptions(delimiter="\b", null="")),
    ("COPY BINARY t FROM STDIN", {"direction": "from", "table": ("t",)},
     CopyOptions(format="binary")),
    ("COPY t FROM STDIN WITH BINARY", {"direction": "from", "table": ("t",)},
     CopyOptions(format="binary")),
    ("COPY binary FROM STDIN", {"direction": "from", "table": ("binary",)}, TEXT),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted", "options"), COPIES)
def test_copies(text: str, wanted: dict[str, Any], options: CopyOptions) -> None:
    found = parse_statement(text, POSTGRES)
    assert isinstance(found, CopyStatement)
    assert found.options == options
    shown = parsed(text, POSTGRES)
    shown.pop("options", None)
    assert shown == {"is": "Copy", **wanted}


ROLES: list[tuple[str, RoleStatement, dict[str, Any]]] = [
    ("CREATE ROLE r", CreateRole(0, "r"), {}),
    (
        "CREATE USER IF NOT EXISTS u WITH PASSWORD 'it''s'",
        CreateRole(0, "u", login=True),
        {"skipped": (ObjectExists,), "password": "secret it's"},
    ),
    ("CREATE USER u NOLOGIN", CreateRole(0, "u"), {}),
    (
        "CREATE ROLE r LOGIN ENCRYPTED PASSWORD 'x'",
        CreateRole(0, "r", login=True),
        {"password": "secret x"},
    ),
    ("ALTER USER r NOLOGIN PASSWORD NULL", AlterRole(0, "r", login=False, verifier=""), {}),
    ("ALTER ROLE r PASSWORD 'x'", AlterRole(0, "r"), {"password": "secret x"}),
    ("DROP ROLE IF EXISTS a, b", DropRoles(0, ("a", "b"), if_exists=True), {}),
    (
        "GRANT read, write ON t, public.v TO a, b",
        ChangeRights(0, ("a", "b"), ("read", "write"), "objects", ("t", "v")),
        {},
    ),
    (
        "GRANT SELECT, INSERT, UPDATE ON TABLE t TO a",
        ChangeRights(0, ("a",), ("read", "write"), "objects", ("t",)),
        {},
    ),
    (
        "GRANT ALL PRIVILEGES ON ALL TABLES TO a",
        ChangeRights(0, ("a",), ("read", "write"), "tables"),
        {},
    ),
    (
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO a",
        ChangeRights(0, ("a",), ("read", "write"), "tables"),
        {},
    ),
    ("GRANT create ON SCHEMA public TO a", ChangeRights(0, ("a",), ("create",)), {}),
    ("GRANT admin TO a", ChangeRights(0, ("a",), ("admin",)), {}),
    (
        "GRANT connect, EXECUTE CODE TO a",
        ChangeRights(0, ("a",), ("connect", "execute code")),
        {},
    ),
    ("REVOKE Execute Code FROM a", ChangeRights(0, ("a",), ("execute code",), revoke=True), {}),
    (
        "REVOKE read ON MATERIALIZED VIEW v FROM a CASCADE",
        ChangeRights(0, ("a",), ("read",), "objects", ("v",), revoke=True),
        {},
    ),
    ("REVOKE create FROM a", ChangeRights(0, ("a",), ("create",), revoke=True), {}),
    ("DROP TOKENS FOR USER a", AlterRole(0, "a", drop_tokens=True), {}),
]


@pytest.mark.parametrize("dialect", [SPARK, POSTGRES])
@pytest.mark.parametrize(("text", "request_", "more"), ROLES)
def test_roles(
    text: str, request_: RoleStatement, more: dict[str, Any], dialect: SqlDialect
) -> None:
    _, _, requests, found = changed(text, dialect)
    assert (requests, found) == ((request_,), more)


@pytest.mark.parametrize("scope", ["SCHEMA s", "ALL TABLES IN SCHEMA public, s"])
def test_rights_are_in_the_one_schema(scope: str) -> None:
    _, _, requests, more = changed(f"GRANT read ON {scope} TO a")
    assert requests == ()
    assert more == {"refused": "schema s does not exist (available: public)"}


@pytest.mark.parametrize("dialect", [SPARK, POSTGRES])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("CREATE TOKEN FOR ROLE a", {"is": "CreateToken", "role": "a"}),
        ("CREATE TOKEN FOR a", {"is": "CreateToken", "role": "a"}),
        ("SHOW ROLES", {"is": "ShowRoles"}),
        ("SHOW GRANTS", {"is": "ShowGrants"}),
        ("SHOW GRANTS ON s.t", {"is": "ShowGrants", "object": ("s", "t")}),
        ("SHOW GRANTS FOR ROLE a", {"is": "ShowGrants", "role": "a"}),
        ("SHOW GRANTS ON t FOR a", {"is": "ShowGrants", "object": ("t",), "role": "a"}),
    ],
)
def test_tokens_and_questions_about_roles(
    text: str, wanted: dict[str, Any], dialect: SqlDialect
) -> None:
    assert parsed(text, dialect) == wanted


def test_a_password_is_not_shown() -> None:
    text = "CREATE ROLE r PASSWORD 'opensesame'"
    found = parse_statement(text)
    assert "opensesame" not in repr(found)
    assert isinstance(found, ChangeStatement)
    secret = found.password
    assert secret is not None
    assert text[secret.start : secret.end] == "'opensesame'"
