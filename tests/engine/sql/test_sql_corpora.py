"""The statements of all view scripts, and public queries, are read as they are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engine.sql.dialects import to_spark
from actors.engine.sql.grammar import parse_span, parse_statement, split_statements
from actors.engine.sql.statements import (
    ChangeStatement,
    QueryStatement,
)
from actors.engine.sql.tokens import SqlDialect, lex_sql, lex_text
from actors.model.protocol.api import CreateTable
from actors.testing.view_scripts import parse_script

TESTS = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((TESTS / "scripts").glob("*.view"))
QUERIES = sorted((TESTS / "corpora").rglob("*.sql"))


def words_of(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> list[tuple[str, str]]:
    return [(token.kind, token.text) for token in lex_sql(text, dialect)]


def test_tables_and_views_of_scripts() -> None:
    """They are what the scripts' own reader finds; it takes one line after the other."""
    count = 0
    for path in SCRIPTS:
        script = parse_script(path.read_text(), path.name)
        for view in script.views:
            kind = "MATERIALIZED VIEW" if view.materialized else "VIEW"
            # A script of refusals has a view of two statements.
            sql, *_ = (part.text for part in split_statements(view.sql))
            found = parse_statement(f"CREATE {kind} `{view.name}` AS {sql}")
            assert isinstance(found, ChangeStatement)
            assert found.query is not None
            assert words_of(found.query.text) == words_of(sql), path.name
            assert found.names == ((view.name,),)
            count += 1
        for name, schema in script.tables.items():
            keyed = f", PRIMARY KEY ({', '.join(schema.key)})" if schema.key else ""
            table = parse_statement(f"CREATE TABLE `{name}` ({schema.ddl()}{keyed})")
            assert isinstance(table, ChangeStatement)
            (created,) = table.requests
            assert isinstance(created, CreateTable)
            assert created.schema.names == schema.names
            assert created.schema.key == schema.key
            count += 1
    assert count > 1000


def test_scripts_are_split() -> None:
    for path in SCRIPTS:
        lines = path.read_text().splitlines()
        text = "\n".join(line for line in lines if not line.strip().startswith(("@", "+", "-")))
        script = parse_script(path.read_text(), path.name)
        found = [parse_span(part.matched()) for part in split_statements(text)]
        changes = [each for each in found if isinstance(each, ChangeStatement)]
        tables = [each.names[0][-1] for each in changes if each.command == "CREATE TABLE"]
        assert [each.lower() for each in tables] == list(script.tables), path.name


@pytest.mark.parametrize("dialect", SqlDialect)
def test_public_queries(dialect: SqlDialect) -> None:
    assert QUERIES
    for path in QUERIES:
        for split in split_statements(path.read_text(), dialect):
            part, found = split.text, parse_span(split.matched())
            assert isinstance(found, QueryStatement), path.name
            assert found.as_of is None
            assert found.pins == ()
            assert words_of(found.query.text, dialect) == words_of(part, dialect)


def test_public_queries_are_the_same_to_spark() -> None:
    """But for names in double quotes, which were strings in its dialect."""
    for path in QUERIES:
        text = path.read_text()
        rewritten = to_spark(lex_text(text, SqlDialect.POSTGRES))
        assert [token.text for token in lex_sql(rewritten.text) if token.kind == "word"] == [
            token.text for token in lex_sql(text, SqlDialect.POSTGRES) if token.kind == "word"
        ], path.name
