"""Each class of error has a SQLSTATE, and Spark's own are passed on."""

from __future__ import annotations

import pytest

from actors.model.pgwire.messages import ErrorReport
from actors.model.pgwire.sqlstate import (
    SQLSTATES,
    InvalidClientData,
    error_report,
    spark_position,
    sqlstate_of,
)
from actors.runtime import errors
from actors.runtime.errors import PenstockError, QueryRejected, StorageError, UnknownObject


def test_every_class_is_in_the_table() -> None:
    classes = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PenstockError)
    }
    assert classes - set(SQLSTATES) == set()
    assert all(len(code) == 5 for code in SQLSTATES.values())


def test_states_of_errors() -> None:
    assert sqlstate_of(UnknownObject("t")) == "42P01"
    assert sqlstate_of(InvalidClientData("x", "22008")) == "22008"
    assert sqlstate_of(ValueError("x")) == "XX000"
    assert sqlstate_of(MemoryError()) == "53200"
    assert sqlstate_of(StorageError("x", determinate=True)) == "58030"
    # It may have happened: a client must not simply do it again.
    assert sqlstate_of(StorageError("x", determinate=False)) == "40003"

    assert sqlstate_of(errors.NullNotAllowed("x")) == "23502"
    assert sqlstate_of(errors.ValueOutOfRange("x")) == "22003"
    assert sqlstate_of(errors.ValueTooLong("x")) == "22001"

    class OwnKind(UnknownObject):
        """An error of another room."""

    assert sqlstate_of(OwnKind("x")) == "42P01"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("[AMBIGUOUS_REFERENCE] Reference `id` is ambiguous. SQLSTATE: 42704", "42702"),
        ('[CAST_INVALID_INPUT] cannot be cast to "INT" because. SQLSTATE: 22018', "22P02"),
        ('[CAST_INVALID_INPUT] cannot be cast to "DATE" because. SQLSTATE: 22018', "22007"),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012", "22012"),
        ("[UNRESOLVED_COLUMN.WITHOUT_SUGGESTION] x. SQLSTATE: 42703", "42703"),
    ],
)
def test_states_that_postgresql_does_not_know_are_its_own(text: str, state: str) -> None:
    assert sqlstate_of(QueryRejected(text)) == state
    assert sqlstate_of(errors.DefiniteError(text)) == state


def test_states_and_places_of_spark() -> None:
    text = (
        "[PARSE_SYNTAX_ERROR] Syntax error at or near 'FORM'. SQLSTATE: 42601 (line 1, pos 9)\n"
        "\n== SQL ==\nSELECT 1 FORM t\n---------^^^\n"
    )
    error = QueryRejected(text)
    assert sqlstate_of(error) == "42601"
    assert sqlstate_of(QueryRejected("no")) == "42000"
    # A place that Spark names counts in Spark's text: only whoever sent that knows the user's.
    assert error_report(error) == ErrorReport("42601", text)
    error.position = 9
    assert error_report(error) == ErrorReport("42601", text, position=10)
    assert error_report(ValueError(), severity="FATAL") == ErrorReport(
        "XX000", "ValueError", "FATAL"
    )


@pytest.mark.parametrize(
    ("message", "query", "position"),
    [
        ("; line 2 pos 3", "é\r\nabcdef", 7),
        ("line 3, pos 0", "a\nb", 0),
        ("line 1, pos 9", "abc", 0),
        ("line 0, pos 0", "abc", 0),
        ("no place", "abc", 0),
        ("== SQL (line 1, position 3) ==\nab1/0\n  ^^^", "ab1/0 ", 3),
        ("== SQL (line 1, position 5) ==\n...b 1/0 ...\n     ^^^", "aab 1/0 - 1", 5),
        ("== SQL (line 1, position 5) ==\n...b 1/0\n     ^^^", "😀b 1/0 - 1", 5),
        ("== SQL (line 1, position 3) ==\nab2/0\n  ^^^", "ab1/0", 0),
        ("== SQL (line 1, position 3) ==\nab1", "ab1/0", 0),
        ("== SQL (line 1, position 3) ==", "ab1/0", 0),
    ],
)
def test_places_in_the_query(message: str, query: str, position: int) -> None:
    assert spark_position(message, query) == position
