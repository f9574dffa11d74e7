"""Evaluate PostgreSQL expressions on a service on Spark and on a real PostgreSQL.

Every difference is on the page or refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from compatibility_page import PAGE, SQL_KEY
from sql_differences import ERROR, SqlDifference, are_alike, read_section, section_of

pytestmark = pytest.mark.spark

CORPUS: Final = (
    (Path(__file__).parents[2] / "corpora" / "postgres-expressions.txt").read_text().splitlines()
)
REFUSALS: Final = ("0A", "21", "22", "42")
"""Classes of the SQLSTATEs for errors in a user's statement."""


def shown(session: psycopg.Connection, text: str) -> tuple[str, str]:
    """Return a result as text, and the SQLSTATE of an error."""
    try:
        cursor: Any = session.execute(b"SELECT " + text.encode())
    except psycopg.Error as error:
        return ERROR, error.sqlstate or "none"
    rows = [
        ["NULL" if (value := cursor.pgresult.get_value(row, column)) is None else value.decode()
         for column in range(cursor.pgresult.nfields)]
        for row in range(cursor.pgresult.ntuples)
    ]  # fmt: skip
    return "; ".join(", ".join(row) for row in rows), ""


@pytest.mark.second
def test_what_differs_from_postgresql_is_on_the_page_or_refused(
    compared: tuple[psycopg.Connection, psycopg.Connection], pytestconfig: pytest.Config
) -> None:
    theirs, ours = compared
    found = []
    for text in CORPUS:
        (here, state), (there, _) = shown(ours, text), shown(theirs, text)
        if state:
            assert state.startswith(REFUSALS), f"{text}: {state} is no refusal"
        elif not are_alike(there, here):
            found.append(SqlDifference(text, there, here))
    if pytestconfig.cache is not None:
        pytestconfig.cache.set(SQL_KEY, found)
    said = read_section(PAGE.read_text())
    assert found == said, "`make compatibility` rewrites docs/reference/compatibility.md"


def test_the_table_is_read_as_it_is_written() -> None:
    told = [SqlDifference("'a' || '`'", ERROR, "a|"), SqlDifference("1", "", "NULL; {1,2}, x")]
    assert read_section(section_of(told)) == told
    assert not are_alike("1; 2", "1")
    assert not are_alike("0.333333333333", "0.333333")
