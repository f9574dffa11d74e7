"""What a line of the audit says, and what it never holds."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.sql_session.audit import StatementAudit, objects_of_statement
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.redaction import redact_text
from actors.engine.sql.tokens import SqlDialect
from actors.runtime.errors import UnknownObject
from actors.runtime.settings import Settings

POSTGRES, SPARK = SqlDialect.POSTGRES, SqlDialect.SPARK


@pytest.mark.parametrize(
    ("text", "dialect", "shown"),
    [
        ("CREATE ROLE r PASSWORD 'x' LOGIN", POSTGRES, "CREATE ROLE r PASSWORD *** LOGIN"),
        (
            "ALTER ROLE r ENCRYPTED PASSWORD E'x\\'y'",
            POSTGRES,
            "ALTER ROLE r ENCRYPTED PASSWORD ***",
        ),
        ("ALTER USER r PASSWORD $a$x'y$a$", POSTGRES, "ALTER USER r PASSWORD ***"),
        ('ALTER USER r PASSWORD "x"', SPARK, "ALTER USER r PASSWORD ***"),
        ("ALTER USER r PASSWORD NULL", SPARK, "ALTER USER r PASSWORD NULL"),
        (
            "CREATE SINK s FROM t USING delta OPTIONS (key 'x', n 1)",
            SPARK,
            "CREATE SINK s FROM t USING delta OPTIONS (key ***, n 1)",
        ),
        ("INSERT INTO t VALUES ('x')", SPARK, "INSERT INTO t VALUES ('x')"),
    ],
)
def test_secrets_are_blanked(text: str, dialect: SqlDialect, shown: str) -> None:
    assert redact_text(text, dialect, parse_statement(text, dialect)) == shown


def test_a_text_that_cannot_be_read_is_left_out() -> None:
    assert redact_text("ALTER ROLE r PASSWORD 'open", POSTGRES) == ""
    # One that is only no statement is read word by word.
    assert redact_text("ALTER ROLE r PASSWORD 'x' 'y", POSTGRES) == ""
    assert redact_text("ALTER NOTHING password 'x'", POSTGRES) == "ALTER NOTHING password ***"


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_no_password_is_shown(password: str) -> None:
    quoted = password.replace("'", "''")
    text = f"CREATE ROLE abcdefg LOGIN PASSWORD '{quoted}'"
    shown = redact_text(text, POSTGRES, parse_statement(text, POSTGRES))
    assert shown == "CREATE ROLE abcdefg LOGIN PASSWORD ***"


def test_objects_are_those_named_and_those_in_queries() -> None:
    known = dict.fromkeys(["orders", "people", "a b"])

    def named(text: str) -> tuple[str, ...]:
        return objects_of_statement(parse_statement(text, SPARK), text, known)

    assert named("DROP TABLE a.t, u") == ("a.t", "u")
    assert named("SELECT * FROM orders JOIN `a b`") == ("orders", "a b")
    assert named("INSERT INTO t SELECT * FROM people") == ("t", "people")
    assert named("GRANT read ON orders TO r") == ("orders", "r")
    assert named("CREATE TABLE people (orders int)") == ("people",)


async def test_a_line_is_whole_whatever_the_client_sends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    settings = Settings(audit_statements=True, audit_text_characters_max=20)
    audit = StatementAudit(settings, "r", "peer", SPARK, 'a"\nb')
    text = "SELECT 1\n, 'long enough to be cut'"
    with pytest.raises(UnknownObject), audit.statement(parse_statement(text), text):
        raise UnknownObject("private")
    with audit.statement(None, "SELECT 1", kind="Catalog"):
        pass
    audit.event("Login", "refused")
    lines = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in lines)
    assert "private" not in "".join(lines)
    found = [json.loads(line) for line in lines]
    assert [(each["kind"], each["outcome"]) for each in found] == [
        ("Query", "UnknownObject"),
        ("Catalog", "done"),
        ("Login", "refused"),
    ]
    assert (found[0]["role"], found[0]["user"]) == ("r", 'a"\nb')
    assert found[0]["text"] == text[:20]
