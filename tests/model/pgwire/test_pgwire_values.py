"""Types and values: psycopg reads what was encoded, and finds what was meant."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pg_columns import EDGES, EVERY, NESTED, column, same  # type: ignore[import-not-found]
from psycopg.adapt import Transformer
from psycopg.pq import Format

from actors.model.pgwire.decimal_digits import parse_binary_decimal
from actors.model.pgwire.encoded_values import as_variable
from actors.model.pgwire.time_text import local_to_utc, time_zone, utc_offsets
from actors.model.pgwire.type_map import numeric_modifier, pg_type, pg_type_of_spark, spark_type
from actors.model.pgwire.type_oids import ARRAY_OF, NUMERIC
from actors.model.pgwire.value_encoding import encode_binary, encode_text
from actors.model.plan.schema import arrow_type
from actors.runtime.errors import InvalidUsage


def texts(array: pa.Array, zone: str = "UTC") -> list[Any]:
    """A column's texts."""
    found = as_variable(encode_text(array, zone)).to_pylist()
    return [None if each is None else each.decode() for each in found]


def loaded(array: pa.Array, form: Format) -> list[Any]:
    """A column as psycopg finds it."""
    encoded = encode_binary(array) if form is Format.BINARY else encode_text(array)
    loader = Transformer().get_loader(pg_type(array.type).oid, form)
    found = as_variable(encoded).to_pylist()
    values = [None if data is None else loader.load(data) for data in found]
    # A text of a float of four bytes is read as one of eight.
    return pa.array(values, array.type).to_pylist() if "float" in str(array.type) else values


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spark", "oid", "size"),
    [
        ("boolean", 16, 1),
        ("tinyint", 21, 2),
        ("smallint", 21, 2),
        ("int", 23, 4),
        ("bigint", 20, 8),
        ("float", 700, 4),
        ("double", 701, 8),
        ("string", 25, -1),
        ("binary", 17, -1),
        ("date", 1082, 4),
        ("timestamp", 1184, 8),
        ("timestamp_ntz", 1114, 8),
        ("array<string>", 1009, -1),
        ("array<timestamp>", 1185, -1),
        ("array<array<int>>", 114, -1),
        ("array<struct<a:int>>", 114, -1),
        ("struct<a:int>", 114, -1),
        ("map<string,int>", 114, -1),
        ("variant", 114, -1),
        ("array<variant>", 114, -1),
        ("interval year to month", 1186, 16),
        ("interval day to second", 1186, 16),
        ("interval hour", 1186, 16),
        ("interval", 25, -1),
        ("void", 25, -1),
        ("char(3)", 1042, -1),
    ],
)
def test_types(spark: str, oid: int, size: int) -> None:
    found = pg_type_of_spark(spark)
    assert (found.oid, found.size) == (oid, size)


def test_modifiers() -> None:
    assert pg_type_of_spark("decimal(12,2)").modifier == numeric_modifier(12, 2) == 786438
    assert pg_type_of_spark("array<decimal(12,2)>").modifier == 786438
    assert pg_type_of_spark("varchar(5)").modifier == 9
    assert spark_type(NUMERIC, 786438) == "decimal(12,2)"
    assert spark_type(1043, 9) == "varchar(5)"
    assert spark_type(NUMERIC) == "decimal(38,18)"
    assert spark_type(NUMERIC, numeric_modifier(40, 2)) is None
    assert spark_type(600) is None


@pytest.mark.parametrize("spark", EDGES)
def test_types_come_back(spark: str) -> None:
    found = pg_type_of_spark(spark)
    wanted = {"tinyint": "smallint"}.get(spark, spark)
    assert spark_type(found.oid, found.modifier) == wanted


def test_every_array_type_has_an_element() -> None:
    assert len(set(ARRAY_OF.values())) == len(ARRAY_OF)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("kind", EDGES)
def test_values_at_the_edges(kind: str, form: Format) -> None:
    values = column(kind, [*EDGES[kind], None]).to_pylist()
    found = loaded(column(kind, values), form)
    assert all(map(same, found, values)), (found, values)
    # Slices and batches without a NULL take other ways.
    assert all(map(same, loaded(column(kind, values).slice(1), form), values[1:]))
    assert all(map(same, loaded(column(kind, values[:-1]), form), values[:-1]))
    assert loaded(column(kind, []), form) == []
    assert loaded(column(kind, [None, None]), form) == [None, None]


@pytest.mark.parametrize("form", list(Format))
@given(kind=st.sampled_from(sorted(EVERY)), draw=st.data())
def test_any_values(kind: str, form: Format, draw: st.DataObject) -> None:
    values = draw.draw(st.lists(st.none() | EVERY[kind], max_size=8))
    array = column(kind, values)
    values = array.to_pylist()
    start = draw.draw(st.integers(0, len(values)))
    found = loaded(array.slice(start), form)
    assert all(map(same, found, values[start:])), (found, values[start:])


def test_floats_are_written_as_postgresql_writes_them() -> None:
    values = [
        1.0,
        -0.0,
        0.1,
        1e15,
        123456789012345.0,
        1e-5,
        0.0001,
        float("inf"),
        float("nan"),
        1e22,
    ]
    assert texts(pa.array(values)) == [
        "1", "-0", "0.1", "1e+15", "123456789012345", "1e-05", "0.0001", "Infinity", "NaN", "1e+22"
    ]  # fmt: skip
    assert texts(pa.array([1e6, 999999.0, 0.1], pa.float32())) == ["1e+06", "999999", "0.1"]


def test_times_beyond_the_years_of_four_digits() -> None:
    days = pa.array([2_932_897, -719_163, -720_000, 2_147_483_647, -2_147_483_648], pa.int32())
    assert texts(days.cast(pa.date32())) == [
        "10000-01-01", "0001-12-31 BC", "0003-09-16 BC", "5881580-07-11", "5877642-06-23 BC"
    ]  # fmt: skip
    times = pa.array([253_402_300_800_000_000, -62_135_596_800_000_001, 2**63 - 1], pa.int64())
    assert texts(times.cast(pa.timestamp("us", "UTC")))[:2] == [
        "10000-01-01 00:00:00+00", "0001-12-31 23:59:59.999999+00 BC"
    ]  # fmt: skip
    assert texts(times.cast(pa.timestamp("us")))[2] == "294247-01-10 04:00:54.775807"


def test_binary_times_that_cannot_be_sent() -> None:
    least = pa.array([-(2**63)], pa.int64()).cast(pa.timestamp("us"))
    with pytest.raises(InvalidUsage, match="select it as text"):
        encode_binary(least)
    with pytest.raises(InvalidUsage, match="select it as text"):
        encode_binary(pa.array([-(2**31)], pa.int32()).cast(pa.date32()))


@pytest.mark.parametrize(
    ("zone", "wanted"),
    [
        ("UTC", "2026-07-01 12:00:00+00"),
        ("Europe/Rome", "2026-07-01 14:00:00+02"),
        ("Asia/Kolkata", "2026-07-01 17:30:00+05:30"),
        ("America/St_Johns", "2026-07-01 09:30:00-02:30"),
        ("+05:30", "2026-07-01 17:30:00+05:30"),
        ("-03:00", "2026-07-01 09:00:00-03"),
    ],
)
def test_times_in_a_zone(zone: str, wanted: str) -> None:
    moment = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
    array = pa.array([moment, None], pa.timestamp("us", "UTC"))
    assert texts(array, zone) == [wanted, None]


def test_an_old_time_has_an_offset_of_seconds() -> None:
    array = pa.array([dt.datetime(1800, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))
    assert texts(array, "Europe/Rome") == ["1800-01-01 00:49:56+00:49:56"]


@pytest.mark.parametrize(
    "zone", ["Europe/Rome", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca"]
)
@given(seconds=st.lists(st.integers(-62_135_596_800, 253_402_300_799 - 86_400 * 2), max_size=5))
def test_offsets_are_those_of_zoneinfo(zone: str, seconds: list[int]) -> None:
    found = utc_offsets(np.array(seconds, np.int64), zone).tolist()
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for second, offset in zip(seconds, found, strict=True):
        local = (epoch + dt.timedelta(seconds=max(second, -62_135_500_000))).astimezone(
            time_zone(zone)
        )
        assert local.utcoffset() == dt.timedelta(seconds=offset), second


@given(st.lists(st.integers(1_600_000_000, 1_800_000_000), min_size=1, max_size=8))
def test_local_times_come_back(seconds: list[int]) -> None:
    utc = np.array(seconds, np.int64)
    local = utc + utc_offsets(utc, "Europe/Rome")
    found = local_to_utc(local, "Europe/Rome")
    # A time that comes twice is the later one.
    assert (((found - utc) == 0) | ((found - utc) == 3600)).all()
    assert (found + utc_offsets(found, "Europe/Rome") == local).all()


def test_local_times_at_a_change() -> None:
    def utc(*parts: int) -> int:
        return int(dt.datetime(*parts, tzinfo=dt.UTC).timestamp())  # type: ignore[arg-type,misc]

    local = np.array([utc(2026, 3, 29, 2, 30), utc(2026, 10, 25, 2, 30)], np.int64)
    # As PostgreSQL: skipped times by the offset before, repeated ones by the offset after.
    assert local_to_utc(local, "Europe/Rome").tolist() == [
        utc(2026, 3, 29, 1, 30),
        utc(2026, 10, 25, 1, 30),
    ]


@pytest.mark.parametrize("zone", ["", "Nowhere", "../../etc/passwd", "+99:99", "Europe"])
def test_unknown_zones(zone: str) -> None:
    with pytest.raises(InvalidUsage, match="time zone"):
        time_zone(zone)


@pytest.mark.parametrize(
    "number", ["0", "1", "-1", "10000", "0.0001", "12345.6789", "1E+20", "0.00", "1.50"]
)
def test_numerics_round_trip(number: str) -> None:
    value = Decimal(number)
    array = pa.array([value], pa.decimal128(38, 10))
    (data,) = as_variable(encode_binary(array)).to_pylist()
    found = parse_binary_decimal(data)
    assert (found, found.as_tuple().exponent) == (value, -10)


def test_binary_numerics_have_no_zeros_at_their_ends() -> None:
    array = pa.array([Decimal("10000.00"), Decimal("0.00"), Decimal("-0.01")], pa.decimal128(12, 2))
    assert [each.hex(" ", 2) for each in as_variable(encode_binary(array)).to_pylist()] == [
        "0001 0001 0000 0002 0001",
        "0000 0000 0000 0002",
        "0001 ffff 4000 0002 0064",
    ]


@pytest.mark.parametrize(
    "data",
    ["", "0001000000000000", "0000000000010000", "ffff000000000000", "00010000000000002710",
     "0001700000000000 0001", "0001000000004fff0001"],
)  # fmt: skip
def test_what_is_no_binary_numeric(data: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_binary_decimal(bytes.fromhex(data))


def test_nested_values_are_json() -> None:
    for kind, values in NESTED.items():
        array = column(kind, [*values, None])
        assert pg_type(array.type).oid == 114
        assert as_variable(encode_binary(array)).equals(as_variable(encode_text(array)))
    assert texts(column("struct<a:int,b:string>", NESTED["struct<a:int,b:string>"])) == [
        '{"a":1,"b":"x"}', '{"a":null,"b":null}'
    ]  # fmt: skip
    assert texts(column("map<string,int>", NESTED["map<string,int>"])) == ['{"k":1,"l":null}', "{}"]
    mixed = pa.array(
        [{"t": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "d": Decimal("1.50"), "f": float("nan"),
          "b": b"hi", "m": [(dt.date(2026, 1, 2), True)]}],
        arrow_type("struct<t:timestamp,d:decimal(5,2),f:double,b:binary,m:map<date,boolean>>"),
    )  # fmt: skip
    assert texts(mixed) == [
        '{"t":"2026-01-02T00:00:00Z","d":1.50,"f":"NaN","b":"aGk=","m":{"2026-01-02":true}}'
    ]


def test_values_of_other_types() -> None:
    assert texts(pa.array([dt.time(1, 2, 3, 40_000)])) == ["01:02:03.04"]
    assert texts(pa.array(["a", None, "a"]).dictionary_encode()) == ["a", None, "a"]
    assert texts(pa.nulls(2)) == [None, None]
    assert loaded(pa.array([1, 255], pa.uint8()), Format.BINARY) == [1, 255]
    assert loaded(pa.array([2**32 - 1], pa.uint32()), Format.BINARY) == [2**32 - 1]
    assert loaded(pa.array([dt.time(1, 2, 3)]), Format.BINARY) == [dt.time(1, 2, 3)]
    chunked = pa.chunked_array([["a"], ["b"]])
    assert texts(chunked) == ["a", "b"]
    assert texts(pa.array(["a", None], pa.string_view())) == ["a", None]
    nanos = pa.array([1_000], pa.timestamp("ns"))
    assert texts(nanos) == ["1970-01-01 00:00:00.000001"]
