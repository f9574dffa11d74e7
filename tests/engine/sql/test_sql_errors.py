"""What cannot be read: each error says what was expected, what was found, and where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sql_shown import POSTGRES, SPARK, check_position  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_statement, split_statements
from actors.engine.sql.statements import SqlStatement
from actors.engine.sql.tokens import SqlDialect, line_and_column
from actors.runtime.errors import SqlSyntaxError, from_wire, to_wire
from suite_lanes import examples  # type: ignore[import-not-found]

# The mark stands where the error is.
ERRORS: list[tuple[SqlDialect, str, str]] = [
    (SPARK, "¦", "expected a statement, found the end of the statement"),
    (SPARK, "¦; ;", "expected a statement, found the end of the statement"),
    (SPARK, "¦REINDEX t", "expected a statement, found 'REINDEX'"),
    (SPARK, "TRUNCATE TABLE t¦, u", "TRUNCATE supports one table only"),
    (SPARK, "¦'SELECT'", "expected a statement, found 'SELECT'"),
    (SPARK, "SELECT 1¦; SELECT 2",
     "expected a single statement, found another one after a semicolon"),
    (SPARK, "SELECT ¦(1", "'(' is not closed"),
    (SPARK, "SELECT 1¦)", "unmatched closing ')'"),
    (SPARK, "SELECT (1¦]", "expected ')', found ']'"),
    (SPARK, "SELECT ¦'a", "a string is not closed"),
    (SPARK, "WITH x AS (SELECT 1) ¦INSERT INTO t TABLE x", "INSERT cannot follow WITH"),
    # -- CREATE
    (SPARK, "CREATE ¦FUNCTION f", "expected TABLE, MATERIALIZED VIEW, VIEW, SOURCE, SINK, INDEX"),
    (SPARK, "CREATE ¦TEMPORARY VIEW v AS SELECT 1", "TEMPORARY objects are not supported"),
    (SPARK, "CREATE OR REPLACE ¦TEMP VIEW v AS SELECT 1", "TEMP objects are not supported"),
    (SPARK, "CREATE ¦UNIQUE INDEX ON t (a)", "UNIQUE indexes are not supported"),
    (SPARK, "CREATE ¦EXTERNAL TABLE t (a int)", "EXTERNAL tables are not supported"),
    (SPARK, "CREATE OR REPLACE TABLE ¦t (a int)", "OR REPLACE is not supported for a TABLE"),
    (SPARK, "CREATE OR REPLACE VIEW IF NOT EXISTS ¦v AS SELECT 1", "OR REPLACE and IF NOT EXISTS"),
    (SPARK, "CREATE TABLE ¦", "expected a table's name, found the end of the statement"),
    (SPARK, "CREATE TABLE ¦'t' (a int)", "expected a table's name, found 't'"),
    (SPARK, 'CREATE TABLE ¦"t" (a int)', "expected a table's name, found '\"t\"'"),
    (SPARK, "CREATE TABLE a. ¦(a int)", "expected a name after the dot, found '('"),
    (SPARK, "CREATE TABLE ¦`` (a int)", "a quoted name cannot be empty"),
    (SPARK, "CREATE TABLE t¦", "expected '(' and columns, or AS and a query, found the end"),
    (SPARK, "CREATE TABLE t ¦USING parquet", "expected '(' and columns, or AS and a query"),
    (SPARK, "CREATE TABLE t (a int) ¦USING parquet", "expected TBLPROPERTIES, COMMENT or the end"),
    (SPARK, "CREATE TABLE t (a int) ¦AS SELECT 1", "AS cannot follow a list of columns"),
    (SPARK, "CREATE TABLE t (¦)", "expected a column, found ')'"),
    (SPARK, "CREATE TABLE t (a¦)", "expected a type, found ')'"),
    (SPARK, "CREATE TABLE t (a ¦serial)", "column type 'serial' is not supported"),
    (SPARK, "CREATE TABLE t (a int,\n  b\n    ¦decimal(99))", "precision should be between"),
    (SPARK, "CREATE TABLE t (a decimal(¦x))", "expected a number, found 'x'"),
    (SPARK, "CREATE TABLE t (a ¦char(0))", "column type 'char(0)': a length must be at least 1"),
    (SPARK, "CREATE TABLE t (a array<int¦)", "expected '>', found ')'"),
    (SPARK, "CREATE TABLE t (a int ¦b)", "expected NOT NULL, DEFAULT, PRIMARY KEY, COMMENT, ','"),
    (SPARK, "CREATE TABLE t (a int DEFAULT¦)", "expected an expression, found ')'"),
    (SPARK, "CREATE TABLE t (a int DEFAULT ¦, b int)", "expected an expression, found ','"),
    (SPARK, "CREATE TABLE t (a int DEFAULT 1 ¦DEFAULT 2)", "a column can have only one DEFAULT"),
    (SPARK, "CREATE TABLE t (a int DEFAULT (¦SELECT 1))", "a DEFAULT cannot contain a query"),
    (SPARK, "CREATE TABLE t (a boolean DEFAULT exists(¦FROM u))",
     "a DEFAULT cannot contain a query"),
    (SPARK, "ALTER TABLE t ADD COLUMN a int ¦DEFAULT 1",
     "cannot add a column with a DEFAULT: existing rows are not rewritten and"),
    (SPARK, "ALTER TABLE t ALTER a ¦SET NOT NULL", "expected SET DEFAULT or DROP DEFAULT"),
    (SPARK, "ALTER TABLE t ALTER a SET DEFAULT¦", "expected an expression, found the end"),
    (SPARK, "ALTER TABLE t ALTER a SET DEFAULT (¦SELECT 1)", "a DEFAULT cannot contain a query"),
    (SPARK, "CREATE TABLE t (a int ¦REFERENCES u)", "foreign keys are not supported"),
    (SPARK, "CREATE TABLE t (a int, ¦CHECK (a > 1))", "CHECK is not supported"),
    (SPARK, "CREATE TABLE t (a int, ¦A int)", "column 'A' is defined twice"),
    (SPARK, "CREATE TABLE t (a int,¦)", "expected a column, found ')'"),
    (SPARK, "CREATE TABLE t (¦PRIMARY KEY (a))", "a table needs at least one column"),
    (SPARK, "CREATE TABLE t (a int, ¦PRIMARY KEY (b))", "the PRIMARY KEY names 'b', which is no"),
    (SPARK, "CREATE TABLE t (a int, ¦PRIMARY KEY (a, A))", "the PRIMARY KEY names a column twice"),
    (SPARK, "CREATE TABLE t (a int PRIMARY KEY, b int ¦PRIMARY KEY)",
     "a table can have only one PRIMARY KEY"),
    (SPARK, "CREATE TABLE t (a int COMMENT ¦x)", "expected a comment in single quotes, found 'x'"),
    (SPARK, "CREATE TABLE t (a int) COMMENT ¦`x`", "expected a comment in single quotes"),
    (SPARK, "CREATE TABLE t (a int) TBLPROPERTIES ¦a = 1", "expected '(' and options, found 'a'"),
    (SPARK, "CREATE TABLE t (a int) TBLPROPERTIES (a = ¦)", "expected a value of a, found ')'"),
    (SPARK, "CREATE TABLE t (a int) TBLPROPERTIES (a = 1 ¦b = 2)", "expected ',' or ')', found"),
    (SPARK, "CREATE TABLE t (a int) TBLPROPERTIES (a 1, ¦a 2)", "option a is given twice"),
    (SPARK, "CREATE TABLE t (a int) COMMENT 'x' ¦COMMENT 'y'", "COMMENT is given twice"),
    (SPARK, "CREATE TABLE t AS ¦DROP", "expected a query, found 'DROP'"),
    (SPARK, "CREATE MATERIALIZED ¦TABLE t", "expected VIEW, found 'TABLE'"),
    (SPARK, "CREATE MATERIALIZED VIEW ¦AS SELECT 1", "expected a view's name, found 'AS'"),
    (SPARK, "CREATE MATERIALIZED VIEW v ¦(a) AS SELECT 1",
     "a list of columns is not supported for views"),
    (SPARK, "CREATE MATERIALIZED VIEW v ¦REFRESH AUTO AS SELECT 1", "expected REFRESH POLICY,"),
    (SPARK, "CREATE MATERIALIZED VIEW v REFRESH POLICY ¦FAST AS SELECT 1", "expected AUTO,"),
    (SPARK, "CREATE MATERIALIZED VIEW v ¦SELECT 1", "expected REFRESH POLICY, COMMENT,"),
    (SPARK, "CREATE MATERIALIZED VIEW v AS SELECT * FROM t AS OF ¦5", "AS OF is not allowed here"),
    (SPARK, "CREATE VIEW v AS SELECT * FROM t ¦VERSION AS OF 5", "AS OF is not allowed here"),
    (SPARK, "CREATE VIEW v AS\n\t¦INSERT", "expected a query, found 'INSERT'"),
    (SPARK, "CREATE VIEW v ¦REFRESH POLICY FULL AS SELECT 1",
     "a plain view cannot have a REFRESH POLICY: its query runs at each read"),
    (SPARK, "CREATE INDEX i ON v USING ¦gin (a)", "expected BTREE or HASH, found 'gin'"),
    (SPARK, "CREATE INDEX ON v (a, ¦)", "expected a column, found ')'"),
    (SPARK, "CREATE INDEX ON v (a ¦desc)", "expected ',' or ')', found 'desc'"),
    (SPARK, "CREATE SOURCE s ¦FROM k", "expected USING, found 'FROM'"),
    (SPARK, "CREATE SOURCE s USING k OPTIONS (¦)", "expected an option's name, found ')'"),
    (SPARK, "CREATE SOURCE s USING k FOR ¦x", "expected TABLES, found 'x'"),
    (SPARK, "CREATE SOURCE s USING k FOR TABLES (a ¦b)", "expected AS, ',' or ')', found 'b'"),
    (SPARK, "CREATE SINK k ¦USING delta", "expected ON or FROM, found 'USING'"),
    # -- ALTER, DROP, COMMENT ON
    (SPARK, "ALTER ¦SYSTEM", "expected MATERIALIZED VIEW, TABLE, VIEW, SOURCE, SINK or INDEX"),
    (SPARK, "ALTER TABLE t ¦DROP COLUMN a", "expected SET TBLPROPERTIES, UNSET TBLPROPERTIES,"),
    (SPARK, "ALTER TABLE t ¦SET REFRESH POLICY FULL", "expected SET TBLPROPERTIES,"),
    (SPARK, "ALTER INDEX i ¦ADD COLUMN a int", "expected RENAME TO, found 'ADD'"),
    (SPARK, "ALTER TABLE t ADD COLUMN a int ¦PRIMARY KEY", "expected the end of the statement"),
    (SPARK, "ALTER TABLE t RENAME TO u ¦v", "expected the end of the statement, found 'v'"),
    (SPARK, "DROP ¦SCHEMA s", "expected MATERIALIZED VIEW, TABLE, VIEW, SOURCE, SINK or INDEX"),
    (SPARK, "DROP TABLE t ¦u", "expected ',', CASCADE, RESTRICT or the end of the statement"),
    (SPARK, "COMMENT ¦t IS 'x'", "expected ON, found 't'"),
    (SPARK, "COMMENT ON COLUMN ¦c IS 'x'", "a column must be qualified with its object"),
    (SPARK, "COMMENT ON TABLE t IS ¦5", "expected a comment in single quotes, found '5'"),
    # -- questions
    (SPARK, "EXPLAIN ¦FORMATTED SELECT 1", "expected INCREMENTAL, ANALYZE, a query, MATERIALIZED"),
    (SPARK, "EXPLAIN ¦CREATE VIEW v AS SELECT 1",
     "EXPLAIN takes a query or CREATE MATERIALIZED VIEW"),
    (SPARK, "SHOW¦", "expected MATERIALIZED VIEWS, TABLES, VIEWS,"),
    (SPARK, "SHOW TABLES ¦x", "expected FROM, LIKE or the end of the statement, found 'x'"),
    (SPARK, "SHOW INDEXES ON t LIKE ¦x", "expected a pattern in single quotes, found 'x'"),
    (SPARK, "SHOW CREATE ¦ROLE r", "expected MATERIALIZED VIEW, TABLE,"),
    (SPARK, "DESCRIBE t ¦c", "expected the end of the statement, found 'c'"),
    (SPARK, "SUBSCRIBE ¦SELECT 1", "expected a name or a query in brackets, found 'SELECT'"),
    (SPARK, "SUBSCRIBE v WITH (¦fast)", "expected SNAPSHOT or PROGRESS, found 'fast'"),
    (SPARK, "SUBSCRIBE v WITH (progress = ¦5)", "expected true or false, found '5'"),
    (SPARK, "SUBSCRIBE v AS OF ¦soon", "expected a time, found 'soon'"),
    (SPARK, "SUBSCRIBE v UP TO 5 ¦AS OF 3", "expected WITH (…), AS OF, UP TO or the end"),
    (SPARK, "SUBSCRIBE (SELECT 1 FROM t AS OF ¦5)", "AS OF is not allowed here"),
    # -- rows
    (SPARK, "INSERT ¦OVERWRITE t SELECT 1", "INSERT OVERWRITE is not supported"),
    (SPARK, "INSERT ¦t VALUES (1)", "expected INTO, found 't'"),
    (SPARK, "INSERT INTO t ¦BY NAME SELECT 1", "INSERT BY NAME is not supported"),
    (SPARK, "INSERT INTO t ¦", "expected VALUES or a query, found the end of the statement"),
    (SPARK, "INSERT INTO t (a) ¦DEFAULT VALUES", "DEFAULT VALUES cannot follow a list of columns"),
    (SPARK, "INSERT INTO t DEFAULT ¦(1)", "expected VALUES, found '('"),
    (SPARK, "INSERT INTO t VALUES (1, ¦)", "expected a value, found ')'"),
    (SPARK, "INSERT INTO t VALUES (1),¦", "expected '(' and values, found the end"),
    (SPARK, "INSERT INTO t VALUES (1) ¦RETURNING a", "RETURNING is not supported here"),
    (POSTGRES, "INSERT INTO t SELECT 1 RETURNING a, (¦SELECT 1)",
     "RETURNING cannot contain a query"),
    (POSTGRES, "DELETE FROM t RETURNING ¦",
     "expected a column or an expression, found the end of the statement"),
    (POSTGRES, "INSERT INTO t VALUES (1) RETURNING a ¦FROM u", "expected the end of the"),
    (POSTGRES, "UPDATE t SET a = 1 RETURNING a ¦WHERE b", "expected the end of the statement"),
    (POSTGRES, "DELETE FROM t RETURNING 1 IN (¦TABLE u)", "RETURNING cannot contain a query"),
    (POSTGRES, "MERGE INTO t USING u ON a WHEN MATCHED THEN DELETE ¦RETURNING a", "RETURNING is"),
    (POSTGRES, "INSERT INTO t VALUES (1) ON CONFLICT ¦ON CONSTRAINT c DO NOTHING", "constraints"),
    (POSTGRES, "INSERT INTO t VALUES (1) ON CONFLICT (a) DO ¦DELETE", "expected UPDATE"),
    (SPARK, "UPDATE t a ¦= 1", "expected SET, found '='"),
    (SPARK, "UPDATE t SET ¦(a, b) = (1, 2)", "assigning a row to several columns is not supported"),
    (SPARK, "UPDATE t SET a ¦1", "expected '=', found '1'"),
    (SPARK, "UPDATE t SET a = ¦WHERE b", "expected a value, found 'WHERE'"),
    (SPARK, "UPDATE t SET a = 1 ¦FROM u", "UPDATE … FROM is not supported"),
    (SPARK, "UPDATE t SET a = 1 WHERE b ¦RETURNING a", "RETURNING is not supported here"),
    (SPARK, "DELETE ¦t", "expected FROM, found 't'"),
    (SPARK, "DELETE FROM t ¦USING u", "DELETE … USING is not supported"),
    (SPARK, "DELETE FROM t WHERE ¦", "expected a condition, found the end of the statement"),
    (SPARK, "MERGE INTO t USING u ON a¦", "expected WHEN, found the end of the statement"),
    (SPARK, "MERGE INTO t USING u ON ¦WHEN MATCHED", "expected a condition, found 'WHEN'"),
    (SPARK, "MERGE INTO t USING u ON a WHEN MATCHED ¦DELETE", "expected AND or THEN, found"),
    (SPARK, "MERGE INTO t USING u ON a WHEN MATCHED THEN ¦INSERT *", "expected UPDATE SET or DELE"),
    (SPARK, "MERGE INTO t USING u ON a WHEN NOT MATCHED THEN ¦DELETE", "expected INSERT, found"),
    (SPARK, "MERGE INTO t USING u ON a WHEN NOT MATCHED THEN INSERT ¦(a) VALUES (1, 2)",
     "INSERT has 1 columns and 2 values"),
    # -- PostgreSQL's
    (POSTGRES, "¦REINDEX", "expected a statement, found 'REINDEX'"),
    (POSTGRES, "CREATE TABLE ¦1a (b int)", "expected a table's name, found '1a'"),
    (POSTGRES, "CREATE TABLE t (a int) COMMENT ¦\"x\"", "expected a comment in single quotes"),
    (POSTGRES, "COPY t FROM ¦'/etc/passwd'", "expected STDIN, found '/etc/passwd'"),
    (POSTGRES, "COPY t TO ¦PROGRAM 'x'", "expected STDOUT, found 'PROGRAM'"),
    (POSTGRES, "COPY (SELECT 1) ¦FROM STDIN", "a query can only be copied TO STDOUT"),
    (POSTGRES, "COPY (¦DELETE FROM t) TO STDOUT", "expected a query, found 'DELETE'"),
    (POSTGRES, "COPY t FROM STDIN (FORMAT ¦xml)", "unknown format 'xml'"),
    (POSTGRES, "COPY t FROM STDIN (¦FREEZE)", "expected FORMAT, DELIMITER,"),
    (POSTGRES, "COPY t FROM STDIN (FORMAT csv, ¦DELIMITER 'ab')",
     "option DELIMITER must be a single ASCII character"),
    (POSTGRES, "COPY t FROM STDIN (¦QUOTE 'a')", "option QUOTE is only for the format csv"),
    (POSTGRES, "COPY t FROM STDIN (FORMAT binary, ¦HEADER)",
     "option HEADER cannot be used with the format binary"),
    (POSTGRES, "COPY t FROM STDIN (¦NULL E'a\\n')", "option NULL cannot contain a line break"),
    (POSTGRES, "COPY t FROM STDIN (ENCODING ¦'latin1')", "unsupported encoding 'latin1'"),
    (POSTGRES, "COPY t FROM STDIN CSV ¦CSV", "option FORMAT is given twice"),
    (POSTGRES, "BEGIN ¦x", "expected ISOLATION LEVEL, READ ONLY or READ WRITE, found 'x'"),
    (POSTGRES, "BEGIN READ ONLY,¦", "expected ISOLATION LEVEL, READ ONLY or READ WRITE"),
    (POSTGRES, "BEGIN ISOLATION LEVEL ¦CHAOS", "expected SERIALIZABLE, REPEATABLE READ,"),
    (POSTGRES, "COMMIT ¦AND CHAIN", "AND CHAIN is not supported"),
    (POSTGRES, "COMMIT ¦x", "expected the end of the statement, found 'x'"),
    (POSTGRES, "SET x ¦5", "expected '=' or TO, found '5'"),
    (POSTGRES, "SET x = ¦", "expected a value, found the end of the statement"),
    (SPARK, "SET ¦VARIABLE x = 1", "the name of a setting cannot contain blanks"),
    (POSTGRES, "DECLARE c ¦SCROLL CURSOR FOR SELECT 1", "scrollable cursors are not supported"),
    (POSTGRES, "DECLARE c ¦x", "expected BINARY, INSENSITIVE, ASENSITIVE or CURSOR, found 'x'"),
    (POSTGRES, "DECLARE c CURSOR FOR ¦DELETE FROM t", "expected a query, found 'DELETE'"),
    (POSTGRES, "FETCH ¦PRIOR FROM c", "cursors only move forward: PRIOR is not supported"),
    (POSTGRES, "FETCH ¦-1 c", "expected a cursor, found '-'"),
    (POSTGRES, "PREPARE p (¦5) AS SELECT 1", "expected a type, found '5'"),
    (POSTGRES, "PREPARE p AS¦", "expected a statement, found the end of the statement"),
    (POSTGRES, "EXECUTE p (¦)", "expected a value, found ')'"),
    (POSTGRES, "SELECT ¦$$a", "a string in $$ is not closed"),
    # -- roles
    (SPARK, "CREATE ROLE r ¦SUPERUSER", "expected LOGIN, NOLOGIN or PASSWORD, found 'SUPERUSER'"),
    (SPARK, "CREATE ROLE r PASSWORD ¦x", "expected a password in single quotes, or NULL"),
    (SPARK, "CREATE ROLE r LOGIN ¦NOLOGIN", "option LOGIN is given twice"),
    (SPARK, "ALTER ROLE r ¦SET search_path = x", "settings of a role are not supported"),
    (POSTGRES, "ALTER ROLE r ¦IN DATABASE d RESET ALL", "settings of a role are not supported"),
    (SPARK, "ALTER ROLE r¦", "expected LOGIN, NOLOGIN or PASSWORD, found the end"),
    (SPARK, "GRANT ¦other_role TO r", "expected READ, WRITE, CREATE, ADMIN, CONNECT,"),
    (SPARK, "GRANT execute ¦ON t TO r", "expected CODE, found 'ON'"),
    (SPARK, "GRANT connect ON ¦DATABASE d TO r",
     "CONNECT is a right on the whole service, not on an object"),
    (SPARK, "REVOKE read, execute code ON ¦t FROM r",
     "EXECUTE CODE is a right on the whole service, not on an object"),
    (SPARK, "GRANT read ¦t TO r", "expected ',', ON or TO, found 't'"),
    (SPARK, "CREATE TOKEN ¦a", "expected FOR, found 'a'"),
    (SPARK, "CREATE TOKEN IF NOT EXISTS ¦FOR a",
     "IF NOT EXISTS is not supported for tokens: they have no names"),
    (SPARK, "DROP TOKENS FOR a ¦b", "expected the end of the statement, found 'b'"),
    (SPARK, "SHOW GRANTS ¦a", "expected ON an object, FOR a role, found 'a'"),
    (SPARK, "GRANT read ON t ¦FROM r", "expected TO, found 'FROM'"),
    (SPARK, "GRANT read ON t TO r ¦WITH GRANT OPTION", "WITH GRANT OPTION is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "marked", "problem"), ERRORS)
def test_errors_say_where(dialect: SqlDialect, marked: str, problem: str) -> None:
    text, position = marked.replace("¦", ""), marked.index("¦")
    with pytest.raises(SqlSyntaxError) as caught:
        parse_statement(text, dialect)
    line, column = line_and_column(text, caught.value.position or 0)
    where, _, said = caught.value.problem.partition(": ")
    assert (said[: len(problem)], where) == (problem, f"line {line}, column {column}")
    end = len(text.rstrip("; ")) if "the end of the statement" in problem else position
    assert caught.value.position in (position, end)


HINTS: list[tuple[SqlDialect, str, str]] = [
    (SPARK, "REINDEX t", "expected one of ALTER, COMMENT, CREATE, DELETE, DESC, DESCRIBE, DROP,"),
    (POSTGRES, "REINDEX", "expected one of ABORT, ALTER, ANALYZE, BEGIN, CLOSE, COMMENT, COMMIT,"),
    (SPARK, 'DROP TABLE "t"', "quote a name with backticks: `name`"),
    (SPARK, "DROP TABLE 't'", "write the name without quotes"),
    (SPARK, "DROP TABLE select", "to use this word as a name, quote it: `select`"),
    (POSTGRES, "DROP TABLE select", 'to use this word as a name, quote it: "select"'),
    (POSTGRES, 'COMMENT ON TABLE t IS "x"',
     "double quotes are for names; use single quotes for text"),
    (SPARK, "CREATE TABLE t USING delta",
     "a table cannot have a format, location or partitions; use CREATE SOURCE to"),
    (SPARK, "SUBSCRIBE SELECT 1", "put the query of a SUBSCRIBE in brackets"),
    (POSTGRES, "DELETE FROM t USING u WHERE t.a = u.a", "use MERGE INTO"),
    (POSTGRES, "COPY t FROM '/x'",
     "COPY cannot use files on the server: use CREATE SOURCE to read them,"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "hint"), HINTS)
def test_errors_say_what_to_do(dialect: SqlDialect, text: str, hint: str) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        parse_statement(text, dialect)
    assert caught.value.hint.startswith(hint)
    assert str(caught.value) == f"{caught.value.problem}; {caught.value.hint}"


def test_an_error_crosses_a_wire() -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        parse_statement("DROP TABLE select")
    found = from_wire(*to_wire(caught.value))
    assert isinstance(found, SqlSyntaxError)
    assert str(found) == str(caught.value)
    assert found.position is None


def test_a_long_token_is_shortened() -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        parse_statement(f"DROP {'x' * 5000}")
    assert len(str(caught.value)) < 200


DEEP = 5000


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * DEEP + "1" + ")" * DEEP,
        "INSERT INTO t VALUES (" + "(" * DEEP + "1" + ")" * DEEP + ")",
        "SELECT " + "CASE WHEN a THEN " * DEEP + "1" + " END" * DEEP,
        "UPDATE t SET a = " + "CASE WHEN a THEN " * DEEP + "1" + " END" * DEEP,
        "SELECT 1 " + "/*" * DEEP + "*/" * DEEP,
        "EXPLAIN " + "(" * DEEP + "SELECT 1" + ")" * DEEP,
        "DROP TABLE " + ".".join(["a"] * DEEP),
    ],
)
def test_depth_takes_no_stack(text: str) -> None:
    for dialect in SqlDialect:
        assert isinstance(parse_statement(text, dialect), SqlStatement)


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        (SPARK, "array<" * DEEP + "int" + ">" * DEEP),
        (SPARK, "struct<a:" * DEEP + "int" + ">" * DEEP),
        (SPARK, "struct<a :struct" + "<a :struct" * DEEP + ">" * DEEP),
        (POSTGRES, "int4" + "[]" * DEEP),
    ],
)
def test_deep_types_are_refused(dialect: SqlDialect, kind: str) -> None:
    with pytest.raises(SqlSyntaxError, match="nested more than 32 levels deep"):
        parse_statement(f"CREATE TABLE t (a {kind})", dialect)


WORDS = """
ADD ALL ALTER AND ANALYZE AS BEGIN BY CASE COLUMN COLUMNS COMMENT COMMIT COPY CREATE CURSOR DECLARE
DEFAULT DELETE DESCRIBE DROP END EXECUTE EXISTS EXPLAIN FETCH FOR FROM GRANT IF INDEX INSERT INTO IS
KEY LIKE MATCHED MATERIALIZED MERGE NOT NULL OF ON OPTIONS OR PASSWORD POLICY PREPARE PRIMARY
REFRESH RENAME REPLACE ROLE ROLLBACK SELECT SET SHOW SINK SOURCE STDIN SUBSCRIBE TABLE TABLES
TBLPROPERTIES THEN TIME TIMESTAMP TO UP UPDATE USING VALUES VERSION VIEW WHEN WHERE WITH ZONE
a b t int string ( ) ( ) , , . ; = - < > [ ] :: * 'x' "y" `z` 1 1.5 $1 ? :p csv /*+h*/
"""
sentences = st.lists(st.sampled_from(WORDS.split()), max_size=14).map(" ".join)
beginnings = st.sampled_from(
    [text.replace("¦", "") for _, text, _ in ERRORS if not text.startswith("¦")]
)
cuts = st.tuples(beginnings, st.integers(0, 80), sentences).map(
    lambda drawn: drawn[0][: drawn[1]] + " " + drawn[2]
)


@given(st.one_of(sentences, cuts, st.text()), st.sampled_from(SqlDialect))
@settings(max_examples=examples(500))
def test_no_text_does_anything_else(text: str, dialect: SqlDialect) -> None:
    try:
        found = parse_statement(text, dialect)
        assert 0 <= found.position <= len(text)
    except SqlSyntaxError as error:
        check_position(error, text)
    try:
        split = split_statements(text, dialect)
    except SqlSyntaxError:
        return
    for each in split:
        assert text[each.start : each.start + len(each.text)] == each.text
        assert each.text
        for token in each.tokens:
            assert text[token.start : token.end] == token.text


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("NOLOGN", "did you mean 'NOLOGIN'?"), ("passwrd", "did you mean 'PASSWORD'?"), ("ZZZ", "")],
)
def test_an_option_of_a_role_that_is_not_there_is_refused_with_the_nearest(
    wrong: str, hint: str
) -> None:
    for statement in ("CREATE", "ALTER"):
        with pytest.raises(SqlSyntaxError) as caught:
            parse_statement(f"{statement} ROLE r {wrong}", SqlDialect.POSTGRES)
        assert caught.value.hint == hint
