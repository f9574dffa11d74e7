"""Positions of errors by PostgreSQL's protocol: they count in the text that the user has sent.

The sign ``¦`` in a text of these tests is where an error is to point, and is not sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from pg_house import connected, pg_service, pg_table  # type: ignore[import-not-found]

TABLE = "CREATE TABLE t (id BIGINT, name STRING, n INT, PRIMARY KEY (id))"
MERGE = "MERGE INTO t USING (SELECT id + 0 AS id, n FROM t) AS s"
MATCHED = "t.id = s.id WHEN MATCHED"
NO_COLUMN, NO_TYPE, NO_OPERATOR, BY_ZERO, NO_NUMBER = "42703", "42K09", "42K09", "22012", "22018"
SYNTAX = "42601"
PLACES = [
    # UPDATE: an unknown column, a type, a value of a row
    ("UPDATE t SET n = n + ¦nope", NO_COLUMN),
    ("\n\n  UPDATE t -- why\n SET name = 'ü😀', n = /* ü */ ¦nope", NO_COLUMN),
    ("UPDATE t SET n = 1 WHERE ¦nope > 1", NO_COLUMN),
    ("UPDATE t AS u SET n = u.n + 1, name = ¦upper(array(n))", NO_TYPE),
    ("UPDATE t SET n = 1 WHERE 'é' = '' OR ¦name = 'é' AND n", NO_TYPE),
    ("UPDATE t SET n = 1 WHERE n", NO_TYPE),
    ("UPDATE t SET name = E'\\u00e9' || \"name\", n = ¦n / (id - id)", BY_ZERO),
    ("UPDATE t SET n = ¦name", NO_NUMBER),
    ("UPDATE t SET n = 1 WHERE id::int8 > 0 AND ¦1 / (id - id) > 0", BY_ZERO),
    ("UPDATE t SET name = '😀', n = ¦n / (id - id)", BY_ZERO),
    ("UPDATE t SET name = '😀 and more than Spark shows before it', n = ¦n / (id - id)", BY_ZERO),
    ("UPDATE t SET n = 1 +¦ WHERE id = 1", SYNTAX),
    ("UPDATE t SET n = 1 ¦2", SYNTAX),
    ("UPDATE t SET n = 1 WHERE n =¦", SYNTAX),
    # DELETE
    ("/* ü */ DELETE FROM t WHERE id = 1 OR\n ¦nope", NO_COLUMN),
    ("DELETE FROM t WHERE ¦upper(array(n)) = ''", NO_TYPE),
    ("DELETE FROM t WHERE ¦n / (n - n) > 0", BY_ZERO),
    # INSERT
    ("INSERT INTO t VALUES (5, 'é', ¦nope)", NO_COLUMN),
    ("INSERT INTO t (id, n) VALUES (5, 1 + 1), (6, ¦upper(array(1)))", NO_TYPE),
    ("INSERT INTO t (id, n) VALUES (5, 1 + 1), (6, 'x' || 'y')", "42000"),
    ("  INSERT INTO t SELECT id + 10, 'é😀', ¦nope FROM t", NO_COLUMN),
    ('INSERT INTO t SELECT id + 10, upper("name"), ¦upper(array(1)) FROM t', NO_TYPE),
    ("INSERT INTO t SELECT id + 10, name, ¦n / (id - id) FROM t", BY_ZERO),
    ("INSERT INTO t (n, id) SELECT ¦1 / (id - id), id + 10 FROM t", BY_ZERO),
    # ON CONFLICT
    ("INSERT INTO t VALUES (1, 'é', ¦nope) ON CONFLICT (id) DO NOTHING", NO_COLUMN),
    (
        "INSERT INTO t VALUES (1, E'é\\n', 2) ON CONFLICT (id)\n DO UPDATE SET n = ¦nope + 1",
        NO_COLUMN,
    ),
    ("INSERT INTO t (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET n = t.n WHERE ¦nope", NO_COLUMN),
    (
        "INSERT INTO t (id) SELECT ¦nope FROM t ON CONFLICT (id) DO UPDATE SET n = 1 WHERE t.n > 0",
        NO_COLUMN,
    ),
    (
        "INSERT INTO t (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET name = ¦upper(array(t.n))",
        NO_TYPE,
    ),
    ("INSERT INTO t (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET n = ¦1 / (t.n - t.n)", BY_ZERO),
    # MERGE
    (f"{MERGE} ON t.id = ¦s.nope WHEN MATCHED THEN DELETE", NO_COLUMN),
    (f"MERGE INTO t USING (SELECT ¦nope AS id) AS s ON {MATCHED} THEN DELETE", NO_COLUMN),
    (f"{MERGE} ON {MATCHED} AND 'é' = '' AND ¦nope THEN DELETE", NO_COLUMN),
    (f"{MERGE} ON {MATCHED} THEN UPDATE SET\n name = 'é', n = ¦nope", NO_COLUMN),
    (f"{MERGE} ON {MATCHED} THEN UPDATE SET n = ¦upper(array(s.n))", NO_TYPE),
    (f"{MERGE} ON {MATCHED} AND ¦s.n THEN DELETE", NO_TYPE),
    (f"{MERGE} ON {MATCHED} THEN UPDATE SET n = ¦s.n / (s.n - t.n)", BY_ZERO),
    (
        f"{MERGE} ON t.id = s.id + 9 WHEN NOT MATCHED THEN INSERT (id, n) VALUES (9, ¦nope)",
        NO_COLUMN,
    ),
    # queries, alone and within other statements
    ("\n SELECT E'\\t', ¦nope FROM t", NO_COLUMN),
    ("SELECT name FROM v WHERE 'é' = '' OR ¦nope", NO_COLUMN),
    ("UPDATE t SET n = 1 WHERE id IN (SELECT ¦nope FROM v)", NO_COLUMN),
    ("CREATE VIEW w AS SELECT 'é', ¦nope FROM t", NO_COLUMN),
    ("CREATE MATERIALIZED VIEW w AS SELECT 'é', ¦nope FROM t", NO_COLUMN),
    ("CREATE TABLE w AS SELECT 'é', ¦nope FROM v", NO_COLUMN),
    ("COPY (SELECT ¦nope FROM t) TO STDOUT", NO_COLUMN),
    ("DECLARE c CURSOR WITH HOLD FOR SELECT ¦nope FROM t", NO_COLUMN),
    ("EXPLAIN INCREMENTAL SELECT ¦nope FROM t", NO_COLUMN),
    # of a view, whose text came earlier
    ("SELECT id, count(*) FROM zero GROUP BY id", BY_ZERO),
    ("DESCRIBE SELECT ¦nope FROM t", NO_COLUMN),
    # several statements
    ("SELECT 'é😀'; \n UPDATE t SET n = ¦nope", NO_COLUMN),
    ("SELECT 1;; SELECT ¦nope FROM t; SELECT 2", NO_COLUMN),
    ("UPDATE t SET n = n + 1; DELETE FROM t WHERE ¦nope", NO_COLUMN),
    (f"SELECT 1;\n{MERGE} ON {MATCHED} THEN UPDATE SET n = ¦s.n / (s.n - t.n)", BY_ZERO),
]
PARAMETERS = [
    ("UPDATE t SET name = %s, n = ¦nope", ("a long text",), NO_COLUMN),
    ("UPDATE t SET n = ¦nope WHERE id = %s", (1,), NO_COLUMN),
    (" /* é */ UPDATE t SET n = n + 1 WHERE name > %s AND ¦nope", ("é'",), NO_COLUMN),
    ("UPDATE t SET name = name || %s, n = ¦n / (id - id)", ("longer than it was",), BY_ZERO),
    ("DELETE FROM t WHERE n > %s AND ¦nope", (-1,), NO_COLUMN),
    ("INSERT INTO t VALUES (%s, %s, ¦nope)", (8, "é"), NO_COLUMN),
    ("INSERT INTO t SELECT id + %s, 'é', ¦nope FROM t", (1000,), NO_COLUMN),
    (
        "INSERT INTO t (id, name) VALUES (%s, 'é') ON CONFLICT (id) DO UPDATE SET n = %s + ¦nope",
        (1, 1000),
        NO_COLUMN,
    ),
    (f"{MERGE} ON {MATCHED} AND s.n > %s THEN UPDATE SET n = ¦nope", (1000,), NO_COLUMN),
    ("INSERT INTO t VALUES (%s) RETURNING id, ¦nope", (9,), NO_COLUMN),
    ("\n SELECT %s, ¦nope FROM t", ("x",), NO_COLUMN),
]


def marked(text: str) -> tuple[str, str | None]:
    """The text to send, and the place as PostgreSQL counts it; None for a text without the sign:
    Spark names a place in what nobody wrote."""
    return text.replace("¦", ""), str(text.index("¦") + 1) if "¦" in text else None


async def refused(db: Any, text: str, given: Any = None) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        await db.execute(text, given)
    return caught.value


async def test_positions_count_in_the_whole_text(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        for text, line in (
            ("CREATE TABLE x (a int,¦)", "line 1, column 23"),
            ("\n -- é😀\n CREATE TABLE x (a int,¦)", "line 3, column 24"),
            ("SELECT 'é😀' AS a; /* ; */\n CREATE TABLE x (a int,¦)", "line 2, column 24"),
            # At the end of a statement it is behind the last word.
            ("SELECT id FROM t;; UPDATE t SET n =¦ ; DELETE FROM t", "line 1, column 36"),
            ("DELETE FROM t;\nPREPARE p AS UPDATE t SET n = 1,¦ ", "line 2, column 33"),
            ("SELECT 1;\n SELECT ¦'", "line 2, column 9"),
        ):
            sent, place = marked(text)
            found = await refused(db, sent)
            told = (found.sqlstate, found.diag.statement_position)
            assert told == ("42601", place), (text, str(found))
            assert line in str(found), text
        assert await (await db.execute("SELECT count(*) FROM t")).fetchall() == [(0,)]


async def test_positions_of_a_prepared_statement_count_in_what_was_sent(tmp_path: Path) -> None:
    async with pg_table(tmp_path, TABLE) as (_, db):
        for text, given in (
            ("\n /* é😀 */ CREATE TABLE x (a int,¦) ;", ()),
            ("\n /* é😀 */ UPDATE t SET n = %s, name ¦+ 1", (1,)),
        ):
            sent, _ = marked(text)
            with pytest.raises(psycopg.errors.SyntaxError) as caught:
                await db.execute(sent, given, prepare=True)
            place = text.replace("%s", "$1").index("¦") + 1
            assert caught.value.diag.statement_position == str(place), text
            assert "line 2, column" in str(caught.value)


@pytest.mark.spark
@pytest.mark.long
async def test_errors_of_spark_point_at_what_the_user_wrote(tmp_path: Path) -> None:
    async with pg_service(tmp_path, on_spark=True) as service, await connected(service) as db:
        await db.execute(TABLE)
        await db.execute("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)")
        await db.execute("CREATE VIEW v AS SELECT id,\n name FROM t WHERE n > 0")
        await db.execute("CREATE VIEW zero AS SELECT id FROM t WHERE 1 / (n - n) > 0")
        wrong = []
        cases: list[tuple[str, Any, str]] = [(text, None, state) for text, state in PLACES]
        for text, given, state in cases + PARAMETERS:
            sent, place = marked(text)
            if given is not None:
                # Parameters are $1, $2, … where they are sent.
                place = marked(text.replace("%s", "$1"))[1]
            found = await refused(db, sent, given)
            told = (found.sqlstate, found.diag.statement_position)
            if told != (state, place):
                wrong.append((text, told, place, str(found)))
        assert not wrong, "\n\n".join(map(str, wrong))
        # Rows of the transaction, whose values have line breaks, are before the query.
        await db.execute("BEGIN")
        await db.execute("UPDATE t SET name = E'x\\ny' WHERE id = 1")
        await db.execute("SAVEPOINT s")
        for text in (
            "UPDATE t SET n = ¦nope",
            "DELETE FROM t WHERE 1 = ¦n / (id - id)",
            "SELECT id, ¦n / (id - id) FROM t",
            "SELECT id, ¦nope FROM v",
        ):
            sent, place = marked(text)
            assert (await refused(db, sent)).diag.statement_position == place, text
            await db.execute("ROLLBACK TO s")
