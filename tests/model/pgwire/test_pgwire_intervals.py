"""Intervals as PostgreSQL's type, beside a real server, which reads and writes the same bytes."""

from __future__ import annotations

import datetime as dt
import struct

import psycopg
import pyarrow as pa
import pytest
from pg_columns import row_format  # type: ignore[import-not-found]

from actors.model.pgwire.encoded_values import as_variable
from actors.model.pgwire.row_encoding import CopyEncoder
from actors.model.pgwire.value_encoding import encode_binary, encode_text
from actors.model.plan.schema import engine_type, intervals_of_months, result_type
from actors.testing.postgres_server import PostgresServer

DAY = 86_400_000_000
MICROS: list[int | None] = [
    0,
    1,
    -1,
    1_500_000,
    DAY,
    -DAY,
    DAY - 1,
    1 - DAY,
    -3 * DAY - 3_600_000_000,
    10**9 * 3600,
]
MICROS += [2**63 - 1, -(2**63), 86_399_999_999, 100 * 3_600_000_000, None]
MONTHS: list[int | None] = [0, 1, -1, 11, 12, -12, 13, -13, 2**31 - 1, -(2**31), 24, None]


def durations() -> pa.Array:
    return pa.array(MICROS, pa.int64()).cast(pa.duration("us"))


def texts(array: pa.Array) -> list[str | None]:
    found = as_variable(encode_text(array)).to_pylist()
    return [None if each is None else each.decode() for each in found]


def test_durations_as_text() -> None:
    assert texts(durations())[:10] == [
        "00:00:00",
        "00:00:00.000001",
        "-00:00:00.000001",
        "00:00:01.5",
        "1 day",
        "-1 days",
        "23:59:59.999999",
        "-23:59:59.999999",
        "-3 days -01:00:00",
        "41 days 16:00:00",
    ]
    assert texts(durations())[-1] is None


def test_months_as_text() -> None:
    assert texts(intervals_of_months(pa.array(MONTHS, pa.int32()))) == [
        "00:00:00",
        "1 mon",
        "-1 mons",
        "11 mons",
        "1 year",
        "-1 years",
        "1 year 1 mon",
        "-1 years -1 mons",
        "178956970 years 7 mons",
        "-178956970 years -8 mons",
        "2 years",
        None,
    ]


def test_values_as_binary() -> None:
    found = as_variable(encode_binary(durations())).to_pylist()
    assert found[8] == struct.pack("!qii", -3_600_000_000, -3, 0)
    assert found[-1] is None
    months = intervals_of_months(pa.array(MONTHS, pa.int32()))
    # A slice, so that places count from its own start.
    found = as_variable(encode_binary(months.slice(6, 2))).to_pylist()
    assert found == [struct.pack("!qii", 0, 0, 13), struct.pack("!qii", 0, 0, -13)]
    mixed = pa.array([(14, -3, 4_005_006_789), (-14, 3, -1_000)], pa.month_day_nano_interval())
    assert texts(mixed) == [
        "1 year 2 mons -3 days +00:00:04.005006",
        "-1 years -2 mons +3 days -00:00:00.000001",
    ]
    assert as_variable(encode_binary(mixed)).to_pylist()[0] == struct.pack(
        "!qii", 4_005_006, -3, 14
    )
    assert as_variable(encode_text(durations().slice(0, 0))).to_pylist() == []


def test_arrays_of_intervals() -> None:
    array = pa.array([[dt.timedelta(days=1, hours=2), None]], pa.list_(pa.duration("us")))
    assert texts(array) == ['{"1 day 02:00:00",NULL}']


@pytest.mark.parametrize("form", ["text", "binary", "csv"])
def test_postgres_writes_the_same(postgres: PostgresServer, form: str) -> None:
    mixed = pa.array(
        [(14, -3, 4_005_006_000), (-14, 3, -1_000), (-1, 0, 5_000), (0, -1, 5_000), None],
        pa.month_day_nano_interval(),
    )
    months = intervals_of_months(pa.array(MONTHS, pa.int32()))
    for array in (durations(), months, mixed):
        batch = pa.record_batch([array], names=["v"])
        encoder = CopyEncoder(["v"], row_format(form))
        data = bytes(encoder.encode(batch).data) + encoder.finish()
        bodies = []
        while data:
            size = int.from_bytes(data[1:5], "big")
            bodies.append(data[5 : size + 1])
            data = data[size + 1 :]
        with psycopg.connect(postgres.conninfo(), autocommit=True) as db:
            db.execute("DROP TABLE IF EXISTS spans")
            db.execute("CREATE TABLE spans (v interval)")
            with db.cursor().copy(f"COPY spans FROM STDIN (FORMAT {form})") as copy:
                for body in bodies:
                    copy.write(body)
            with db.cursor().copy(f"COPY spans TO STDOUT (FORMAT {form})") as copy:
                assert b"".join(bytes(piece) for piece in copy) == b"".join(bodies)


@pytest.mark.parametrize(
    "spark",
    ["day", "hour", "minute", "second", "day to hour", "day to second", "hour to second"],
)
def test_types_of_day_time(spark: str) -> None:
    assert result_type(f"interval {spark}") == engine_type(f"interval {spark}") == pa.duration("us")


@pytest.mark.parametrize("spark", ["year", "month", "year to month"])
def test_types_of_year_month(spark: str) -> None:
    assert result_type(f"interval {spark}") == pa.month_day_nano_interval()
    assert engine_type(f"interval {spark}") == pa.int32()
