"""Transactions, settings, cursors, prepared texts: what is read of each form."""

from __future__ import annotations

from typing import Any

import pytest
from sql_shown import POSTGRES, SPARK, parsed  # type: ignore[import-not-found]

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import FetchCursorStatement
from actors.runtime.errors import SqlSyntaxError


def modes(**given: Any) -> dict[str, Any]:
    return {"is": "TransactionModes", **given}


def variable(name: str, *values: str, **more: Any) -> dict[str, Any]:
    return {"is": "SetVariable", "name": name, "values": values, **more}


POSTGRES_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("BEGIN", {"is": "Begin"}),
    ("BEGIN TRANSACTION", {"is": "Begin"}),
    (
        "START TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
        {"is": "Begin", "modes": modes(isolation="repeatable read", read_only=True)},
    ),
    (
        "BEGIN WORK READ WRITE ISOLATION LEVEL SERIALIZABLE NOT DEFERRABLE;",
        {"is": "Begin", "modes": modes(isolation="serializable", read_only=False)},
    ),
    (
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        {"is": "Begin", "modes": modes(isolation="read committed")},
    ),
    ("COMMIT", {"is": "Commit"}),
    ("END WORK", {"is": "Commit"}),
    ("COMMIT AND NO CHAIN", {"is": "Commit"}),
    ("ROLLBACK", {"is": "Rollback"}),
    ("ABORT TRANSACTION", {"is": "Rollback"}),
    ("SAVEPOINT A", {"is": "Savepoint", "name": "a"}),
    ("RELEASE SAVEPOINT a", {"is": "ReleaseSavepoint", "name": "a"}),
    ("RELEASE a", {"is": "ReleaseSavepoint", "name": "a"}),
    ("ROLLBACK TO a", {"is": "RollbackTo", "name": "a"}),
    ("ROLLBACK WORK TO SAVEPOINT \"A\"", {"is": "RollbackTo", "name": "A"}),
    (
        "SET TRANSACTION READ ONLY",
        {"is": "SetTransaction", "modes": modes(read_only=True)},
    ),
    (
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
        {"is": "SetTransaction", "session": True, "modes": modes(isolation="read uncommitted")},
    ),
    ("SET Statement_Timeout = 500", variable("statement_timeout", "500")),
    ("SET a.b TO 'x'", variable("a.b", "x")),
    ("SET LOCAL x = off", variable("x", "off", local=True)),
    ("SET SESSION x TO -1.5", variable("x", "-1.5")),
    ("SET session = 1", variable("session", "1")),
    ("SET local TO 1", variable("local", "1")),
    ("SET search_path TO a, \"B\", 'c'", variable("search_path", "a", "B", "c")),
    ("SET x TO DEFAULT", {"is": "SetVariable", "name": "x"}),
    ("SET TIME ZONE 'UTC'", variable("timezone", "UTC")),
    ("SET TIME ZONE LOCAL", {"is": "SetVariable", "name": "timezone"}),
    (
        "SET TIME ZONE INTERVAL '-08:00' HOUR TO MINUTE",
        variable("timezone", "INTERVAL '-08:00' HOUR TO MINUTE"),
    ),
    ("SET NAMES 'UTF8'", variable("client_encoding", "UTF8")),
    ("SET SCHEMA 's'", variable("search_path", "s")),
    ("SET ROLE r", variable("role", "r")),
    ("SET role = r", variable("role", "r")),
    ("RESET ALL", {"is": "ResetVariable"}),
    ("RESET a.b", {"is": "ResetVariable", "name": "a.b"}),
    ("RESET TIME ZONE", {"is": "ResetVariable", "name": "timezone"}),
    (
        "DECLARE c CURSOR FOR SELECT 1",
        {"is": "DeclareCursor", "name": "c", "source": {"is": "Query", "query": "SELECT 1"}},
    ),
    (
        "DECLARE c BINARY INSENSITIVE NO SCROLL CURSOR WITH HOLD FOR SUBSCRIBE v AS OF 5",
        {"is": "DeclareCursor", "name": "c", "binary": True, "hold": True,
         "source": {"is": "Subscribe", "name": ("v",), "as_of": "5"}},
    ),
    (
        "DECLARE c CURSOR WITHOUT HOLD FOR VALUES (1)",
        {"is": "DeclareCursor", "name": "c", "source": {"is": "Query", "query": "VALUES (1)"}},
    ),
    ("FETCH c", {"is": "FetchCursor", "name": "c"}),
    ("FETCH NEXT FROM c", {"is": "FetchCursor", "name": "c"}),
    ("FETCH 10 IN c", {"is": "FetchCursor", "name": "c", "count": 10}),
    ("FETCH FORWARD 10 c", {"is": "FetchCursor", "name": "c", "count": 10}),
    ("FETCH FORWARD FROM c", {"is": "FetchCursor", "name": "c"}),
    ("FETCH FROM c", {"is": "FetchCursor", "name": "c"}),
    ("FETCH first", {"is": "FetchCursor", "name": "first"}),
    ("MOVE 5 FROM c", {"is": "FetchCursor", "name": "c", "count": 5, "move": True}),
    ("CLOSE c", {"is": "CloseCursor", "name": "c"}),
    ("CLOSE ALL", {"is": "CloseCursor"}),
    (
        "PREPARE p (int8, text) AS SELECT $1, $2",
        {"is": "PrepareText", "name": "p", "types": ("bigint", "string"),
         "statement": "SELECT $1, $2"},
    ),
    (
        "PREPARE p AS INSERT INTO t VALUES ($1)",
        {"is": "PrepareText", "name": "p", "statement": "INSERT INTO t VALUES ($1)"},
    ),
    (
        "EXECUTE p (1, f(2, 3))",
        {"is": "ExecutePrepared", "name": "p", "arguments": ("1", "f(2, 3)")},
    ),
    ("EXECUTE p", {"is": "ExecutePrepared", "name": "p"}),
    ("DEALLOCATE PREPARE p", {"is": "Deallocate", "name": "p"}),
    ("DEALLOCATE prepare", {"is": "Deallocate", "name": "prepare"}),
    ("DEALLOCATE ALL", {"is": "Deallocate"}),
    ("DISCARD ALL", {"is": "DiscardAll"}),
    ("DISCARD TEMP", {"is": "NoOperation", "tag": "DISCARD TEMP"}),
    ("LISTEN x", {"is": "NoOperation", "tag": "LISTEN"}),
    ("UNLISTEN *", {"is": "NoOperation", "tag": "UNLISTEN"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), POSTGRES_FORMS)
def test_sessions_of_postgres(text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text, POSTGRES) == wanted


@pytest.mark.parametrize("text", ["FETCH ALL FROM c", "FETCH FORWARD ALL c"])
def test_all_rows_of_a_cursor(text: str) -> None:
    found = parse_statement(text, POSTGRES)
    assert found == FetchCursorStatement(position=0, name="c", count=None)


SPARK_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("SET spark.sql.x=a b c ", variable("spark.sql.x", "a b c")),
    ("SET spark.sql.session.timeZone = America/New_York;",
     variable("spark.sql.session.timeZone", "America/New_York")),
    ("SET spark.my-key = 'it\\'s'", variable("spark.my-key", "it's")),
    ("SET `a b` = 1", variable("a b", "1")),
    ("SET TIME ZONE 'UTC'", variable("timezone", "UTC")),
    ("SET TIME ZONE LOCAL", {"is": "SetVariable", "name": "timezone"}),
    ("SET", {"is": "ShowSetting", "name": "all"}),
    ("SET -v", {"is": "ShowSetting", "name": "all"}),
    ("SET spark.sql.x", {"is": "ShowSetting", "name": "spark.sql.x"}),
    ("RESET", {"is": "ResetVariable"}),
    ("RESET spark.sql.x", {"is": "ResetVariable", "name": "spark.sql.x"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), SPARK_FORMS)
def test_settings_of_spark(text: str, wanted: dict[str, Any]) -> None:
    assert parsed(text) == wanted


@pytest.mark.parametrize("word", ["BEGIN", "COPY", "DECLARE", "COMMIT", "PREPARE", "LISTEN"])
def test_connections_of_postgres_alone_have_these(word: str) -> None:
    with pytest.raises(SqlSyntaxError, match=f"{word} is available only over PostgreSQL"):
        parse_statement(f"{word} x", SPARK)
