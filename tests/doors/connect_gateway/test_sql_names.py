"""Words and names of SQL texts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.connect_gateway.sql_names import (
    TemporaryViewText,
    dropped_view_of,
    find_chains,
    find_text_reads,
    is_query,
    needs_no_rows,
    parse_identifier,
    rename_chains,
    setting_of,
    split_words,
    temporary_view_of,
)


def resolve(parts: tuple[str, ...]) -> str | None:
    return "t" if tuple(part.lower() for part in parts) in (("t",), ("default", "t")) else None


FOUND = (
    "SELECT * FROM t",
    "SELECT * FROM T",
    "select*from`t`",
    "SELECT * FROM default . t",
    "SELECT * FROM default/* a */./* b */t",
    "SELECT * FROM a, t",
    "TABLE t",
    "FROM t SELECT a",
    "SELECT (SELECT max(a) FROM t)",
    "SELECT * FROM a JOIN t USING (b)",
    "SELECT /*+ BROADCAST(t) */ * FROM t",
    "WITH a AS (SELECT * FROM t) SELECT * FROM a",
    "SELECT 'a''b' FROM t",
    "SELECT 'a\\'b' FROM t",
    "SELECT r'\\' FROM t",
    'SELECT "a" FROM t -- x',
    "-- a comment\nSELECT * FROM t",
    "SELECT * FROM t TABLESAMPLE (10 ROWS)",
    "CREATE TABLE x AS SELECT * FROM t",
    "SELECT * FROM t VERSION AS OF 3",
    'SELECT * FROM "t"',
)
NOT_FOUND = (
    "SELECT 't'",
    "SELECT 1 -- FROM t",
    "SELECT 1 /* FROM t /* and */ t */",
    "SELECT x.t FROM x",
    "SELECT * FROM other.t",
    "SELECT * FROM t.x",
    "SELECT * FROM tt",
)


@pytest.mark.parametrize("text", FOUND)
def test_a_table_is_found(text: str) -> None:
    assert {each.key for each in find_text_reads(text, resolve)} == {"t"}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_is_no_table_is_not_found(text: str) -> None:
    assert find_text_reads(text, resolve) == []


@given(st.text(alphabet="tT`'\"./*-\n\\ ar,()", max_size=60))
def test_words_are_where_they_are_said_to_be(text: str) -> None:
    words = split_words(text)
    assert all(text[word.start : word.end] == word.text for word in words)
    starts = [word.start for word in words]
    assert starts == sorted(starts)
    for chain in find_chains(words):
        assert len(chain.parts) == len(chain.spans)
    assert rename_chains(text, {}) == text


@given(st.sampled_from("'\"`"), st.sampled_from(["\\'", "''", "``", "/*", "x"]))
def test_a_text_of_quotes_takes_linear_time(quote: str, filling: str) -> None:
    text = quote + filling * 200_000
    before = time.process_time()
    split_words(text)
    assert time.process_time() - before < 5


def test_only_names_are_renamed() -> None:
    text = "SELECT default.t.a, 'default.t', \"t\" FROM default.t AS t -- default.t"
    made = rename_chains(text, {("default", "t"): "x"})
    assert made == "SELECT x.a, 'default.t', \"t\" FROM x AS t -- default.t"


def test_identifiers() -> None:
    assert parse_identifier("`a``b`.c") == ("a`b", "c")
    assert parse_identifier("") is None
    assert parse_identifier("a.") is None
    assert parse_identifier("a..b") is None
    assert parse_identifier("a, b") is None


@pytest.mark.parametrize(
    ("text", "query", "no_rows"),
    [
        ("SELECT 1", True, True),
        ("/* a */ ((SELECT 1))", True, True),
        ("VALUES (1)", True, True),
        ("WITH a AS (SELECT 1) SELECT * FROM a", True, True),
        ("WITH a AS (SELECT 1) INSERT INTO t SELECT * FROM a", False, False),
        ("FROM t INSERT INTO x SELECT *", False, False),
        ("INSERT INTO t SELECT 1", False, False),
        ("EXPLAIN SELECT 1", False, True),
        ("BEGIN SELECT 1; END", False, False),
        ("", False, False),
    ],
)
def test_queries_are_told_from_commands(text: str, query: bool, no_rows: bool) -> None:
    assert (is_query(text), needs_no_rows(text)) == (query, no_rows)


def test_temporary_views() -> None:
    text = "create temporary view IF NOT EXISTS v AS\nSELECT 1"
    assert temporary_view_of(text) == TemporaryViewText("v", "SELECT 1", False, True, False, False)
    found = temporary_view_of("CREATE OR REPLACE GLOBAL TEMP VIEW v (a COMMENT 'AS') AS SELECT 1")
    assert found == TemporaryViewText("v", "SELECT 1", True, False, True, True)
    assert temporary_view_of("CREATE VIEW v AS SELECT 1") is None
    assert temporary_view_of("CREATE TEMP VIEW a.b AS SELECT 1") is None
    assert dropped_view_of("DROP VIEW IF EXISTS `v`;") == "v"
    assert dropped_view_of("DROP VIEW a.v") is None
    assert dropped_view_of("DROP TABLE v") is None


def test_settings() -> None:
    assert setting_of("SET spark.sql.legacy.x=1") == ("spark.sql.legacy.x", True, False)
    ansi = "spark.sql.ansi.enabled"
    assert setting_of("set `spark.sql.ansi.enabled` = true") == (ansi, True, False)
    assert setting_of("SET spark.sql.ansi.enabled") == (ansi, False, False)
    assert setting_of("SET TIME ZONE 'UTC'") == ("spark.sql.session.timeZone", True, False)
    assert setting_of("RESET") == ("", False, True)
    assert setting_of("reset spark.sql.ansi.enabled") == (ansi, False, True)
    assert setting_of("SELECT 1") is None
