"""Literals that are read without Spark give what Spark's cast would; others are left to it."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.row_values import (
    NotLocal,
    SqlParameter,
    column_array,
    literal_value,
    spark_literal,
)
from actors.doors.sql_session.time_literals import TimeLiterals
from actors.engine.sql.statements import generated_span
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.plan.schema import TableColumn
from actors.runtime.errors import ValueTooLong

SPARK, POSTGRES = SqlDialect.SPARK, SqlDialect.POSTGRES
UTC = TimeLiterals("UTC", "UTC")
LONG = "-1234567890123456789012345678901234567.8"
MOMENT = dt.datetime.fromisoformat("2026-02-28 01:02:03.5")


def value_of(
    text: str, kind: str, dialect: SqlDialect = POSTGRES, *, times: TimeLiterals = UTC
) -> Any:
    value = literal_value(generated_span(dialect, text), ())
    return column_array([value], TableColumn("c", kind), times=times)[0].as_py()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("7", "bigint", 7),
        ("-7", "tinyint", -7),
        ("7", "double", 7.0),
        ("1.5", "double", 1.5),
        ("1", "float", 1.0),
        ("1.5", "decimal(5,2)", Decimal("1.50")),
        ("'it''s'", "string", "it's"),
        ("'x'", "string", "x"),
        ("NULL", "int", None),
        ("true", "boolean", True),
        ("'2026-02-28'", "date", dt.date(2026, 2, 28)),
        ("'12'", "int", 12),
        ("'f'", "boolean", False),
        ("'2026-02-28 01:02'", "string", "2026-02-28 01:02"),
        ("DATE '2026-02-28'", "date", dt.date(2026, 2, 28)),
        ("timestamp'2026-02-28 01:02:03.5'", "timestamp_ntz", MOMENT),
        ("TIMESTAMP '2026-02-28'", "timestamp", dt.datetime(2026, 2, 28, tzinfo=dt.UTC)),
        ("TIMESTAMP '2026-02-28T01:02:03.5'", "timestamp", MOMENT.replace(tzinfo=dt.UTC)),
        ("'x'", "varchar(5)", "x"),
        ("'x'", "char(3)", "x  "),
    ],
)
def test_plain_literals_are_read(text: str, kind: str, value: Any) -> None:
    assert value_of(text, kind) == value


def test_default_is_a_value_where_there_are_defaults() -> None:
    column = TableColumn("a", "date")
    marks = [literal_value(generated_span(SqlDialect.SPARK, "DEFAULT"), ()), None]
    day = pa.scalar(dt.date(2026, 2, 28))
    assert column_array(marks, column, times=UTC, defaults={"a": day}).to_pylist() == [
        day.as_py(),
        None,
    ]
    assert column_array(marks, column, times=UTC, defaults={}).to_pylist() == [None, None]
    with pytest.raises(NotLocal):
        column_array(marks, column, times=UTC)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1 + 1", "int"),
        ("1.5", "int"),
        ("1e3", "double"),
        ("1", "string"),
        ("5", "varchar(5)"),
        ("'noon'", "date"),
        ("'2026-02-30'", "date"),
        ("DATE '2026-02-30'", "date"),
        ("DATE '2026-02-28'", "timestamp"),
        ("TIMESTAMP '2026-02-28 01:02:03'", "date"),
        ("TIMESTAMP '2026-02-28 01:02:03Z'", "timestamp"),
        ("now()", "timestamp"),
        ("16777217", "float"),
    ],
)
def test_what_is_not_surely_the_same_is_left_to_spark(text: str, kind: str) -> None:
    with pytest.raises(NotLocal):
        value_of(text, kind)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        (r"'\xdead'", "binary", b"\xde\xad"),
        (r"'a\134\001'", "binary", b"a\\\x01"),
        ("'é'", "binary", "é".encode()),
        (r"""'{"\\xde",b,NULL}'""", "array<binary>", [b"\xde", b"b", None]),
        ("'{\u00a0a\u00a0, \x1cb }'", "array<string>", ["\u00a0a\u00a0", "\x1cb"]),
        ("'{1, 2}'", "array<int>", [1, 2]),
    ],
)
def test_texts_of_bytes_and_arrays_are_read_as_postgresql_does(
    text: str, kind: str, value: Any
) -> None:
    column = TableColumn("c", kind)
    given = literal_value(generated_span(SqlDialect.POSTGRES, text), ())
    assert column_array([given], column, times=UTC).to_pylist() == [value]
    # To Spark a text is no array, and its bytes are its letters.
    with pytest.raises(NotLocal):
        column_array(
            [literal_value(generated_span(SqlDialect.SPARK, text.replace("\\", "")), ())],
            column,
            times=UTC,
        )


@pytest.mark.parametrize(
    ("text", "kind", "state"),
    [
        ("300", "tinyint", "22003"),
        ("-2147483649", "int", "22003"),
        ("12345", "decimal(4,2)", "22003"),
        ("99.995", "decimal(4,2)", "22003"),
        ("'12345'", "decimal(4,2)", "22003"),
        ("0.0000000000000000005", "decimal(38,18)", "22003"),
        ("'{1,1e-19}'", "array<decimal(38,18)>", "22003"),
        ("'3000000000'", "int", "22003"),
        ("'x'", "int", "22P02"),
        ("'1.5'", "bigint", "22P02"),
        ("'maybe'", "boolean", "22P02"),
        ("'\u00a05'", "int", "22P02"),
    ],
)
def test_what_fits_no_column_has_the_state_that_postgresql_gives(
    text: str, kind: str, state: str
) -> None:
    given = literal_value(generated_span(SqlDialect.POSTGRES, text), ())
    with pytest.raises(InvalidClientData) as caught:
        column_array([given], TableColumn("c", kind), times=UTC)
    assert caught.value.sqlstate == state


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1.555", "decimal(5,2)", Decimal("1.56")),
        ("-99.994", "decimal(4,2)", Decimal("-99.99")),
        ("-1234567890123456789012345678901234567.8", "decimal(38,1)", Decimal(LONG)),
        ("' 1e-17 '", "decimal(38,18)", Decimal("1e-17")),
        ("' 7 '", "int", 7),
        ("'1e2'", "double", 100.0),
        ("'yes'", "boolean", True),
    ],
)
def test_numbers_are_rounded_and_read_as_postgresql_does(text: str, kind: str, value: Any) -> None:
    given = literal_value(generated_span(SqlDialect.POSTGRES, text), ())
    assert column_array([given], TableColumn("c", kind), times=UTC).to_pylist() == [value]


def test_spark_rounds_what_postgresql_s_numeric_without_a_precision_refuses() -> None:
    given = literal_value(generated_span(SqlDialect.SPARK, "0.0000000000000000005"), ())
    times = TimeLiterals("UTC", "UTC", as_spark=True)
    column = TableColumn("c", "decimal(38,18)")
    assert column_array([given], column, times=times).to_pylist() == [Decimal("1e-18")]


@pytest.mark.parametrize("kind", ["varchar(3)", "char(3)"])
def test_only_blanks_are_cut_off_a_text(kind: str) -> None:
    column = TableColumn("c", kind)
    for dialect in SqlDialect:
        given = literal_value(generated_span(dialect, "'ab   '"), ())
        assert column_array([given], column, times=UTC).to_pylist() == ["ab "]
        for text in ("'ab  c'", "'abc\u00a0'"):
            with pytest.raises(ValueTooLong, match="longer than"):
                column_array([literal_value(generated_span(dialect, text), ())], column, times=UTC)


def test_bytes_in_no_form_are_refused_and_not_left_to_spark() -> None:
    given = literal_value(generated_span(SqlDialect.POSTGRES, r"'\xabc'"), ())
    with pytest.raises(InvalidClientData, match="invalid input syntax for type bytea"):
        column_array([given], TableColumn("c", "binary"), times=UTC)


def test_dialects_differ_in_strings() -> None:
    assert value_of(r"'a\b'", "string") == r"a\b"
    with pytest.raises(NotLocal):
        value_of(r"'a\b'", "string", SPARK)
    with pytest.raises(NotLocal):
        # A string of Spark's has a type, and no cast to a number is implied.
        value_of("'12'", "int", SPARK)


def test_a_moment_without_a_zone_is_of_the_zone_that_its_text_was_written_in() -> None:
    text = "'2026-10-25 02:30'"
    assert value_of(text, "timestamp") == dt.datetime(2026, 10, 25, 2, 30, tzinfo=dt.UTC)
    # Of two, PostgreSQL means the later, and Spark the earlier.
    rome = TimeLiterals("Europe/Rome", "UTC")
    assert value_of(text, "timestamp", times=rome).hour == 1
    typed = "TIMESTAMP '2026-10-25 02:30:00'"
    assert value_of(typed, "timestamp", times=TimeLiterals("UTC", "Europe/Rome")).hour == 1
    as_spark = TimeLiterals("UTC", "Europe/Rome", as_spark=True)
    assert value_of(typed, "timestamp", SPARK, times=as_spark).hour == 0


def test_a_timestamp_column_shows_an_instant_as_the_clocks_of_the_session_do() -> None:
    moment = SqlParameter(dt.datetime(2026, 7, 1, tzinfo=dt.UTC), "")
    times = TimeLiterals("UTC", "Asia/Kathmandu")
    found = column_array([moment], TableColumn("c", "timestamp_ntz"), times=times)
    assert found.to_pylist() == [dt.datetime.fromisoformat("2026-07-01 05:45")]


def test_parameters_come_by_their_number() -> None:
    given = (SqlParameter(1, "1"), SqlParameter("5", "'5'", untyped=True))
    assert literal_value(generated_span(POSTGRES, "$2"), given) == given[1]
    with pytest.raises(NotLocal):
        literal_value(generated_span(POSTGRES, "$3"), given)
    array = column_array([given[1]], TableColumn("c", "bigint"), times=UTC)
    assert array.to_pylist() == [5]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("$1::bigint", "bigint", 7),
        ("$1::int8", "bigint", 7),
        ("$2::text", "string", "a"),
        ("$2::VARCHAR", "varchar(5)", "a"),
    ],
)
def test_a_cast_that_only_says_the_type_is_passed_over(text: str, kind: str, value: Any) -> None:
    given = (SqlParameter(7, "7S"), SqlParameter("a", "'a'"))
    found = literal_value(generated_span(POSTGRES, text), given)
    assert column_array([found], TableColumn("c", kind), times=UTC).to_pylist() == [value]


@pytest.mark.parametrize(("text", "kind"), [("$1::int2", "bigint"), ("$1::text", "bigint")])
def test_other_casts_are_left_to_spark(text: str, kind: str) -> None:
    with pytest.raises(NotLocal):
        found = literal_value(generated_span(POSTGRES, text), (SqlParameter(7, "7S"),))
        column_array([found], TableColumn("c", kind), times=UTC)


def test_rows_are_written_as_literals_of_their_types() -> None:
    moment = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    assert spark_literal(moment, "timestamp") == "timestamp_micros(-1)"
    assert spark_literal("a\\'b", "string") == "'a\\\\\\'b'"
    assert spark_literal(float("nan"), "double") == "CAST('nan' AS double)"
    assert spark_literal({"a": 1}, "struct<a:int>") == "named_struct('a', CAST(1 AS int))"
    assert spark_literal([("k", None)], "map<string,int>") == "map('k', CAST(NULL AS int))"
    assert spark_literal([], "array<int>") == "CAST(array() AS array<int>)"


@pytest.mark.parametrize(("zone", "hours"), [("UTC", 0), ("Asia/Tokyo", 9)])
async def test_a_literal_without_a_zone_is_of_the_sessions(zone: str, hours: int) -> None:
    context: Any = SimpleNamespace(dialect=SPARK, times=TimeLiterals(zone, zone))
    text = "TIMESTAMP '2026-02-28 01:02:03.5'"
    found = await SessionContext.time_of(context, generated_span(SPARK, text), ())
    wanted = MOMENT.replace(tzinfo=dt.UTC) - dt.timedelta(hours=hours)
    assert found == int(wanted.timestamp() * 1000)
