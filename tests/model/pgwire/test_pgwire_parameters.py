"""Bound parameters: what psycopg sends becomes the value that was meant, and a literal of it."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pg_columns import EDGES, EVERY, same  # type: ignore[import-not-found]
from psycopg.adapt import PyFormat, Transformer

from actors.model.pgwire.encoded_values import as_variable
from actors.model.pgwire.messages import BindPortal
from actors.model.pgwire.parameters import parse_parameter, parse_parameters, spark_literal
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.pgwire.type_map import pg_type_of_spark
from actors.model.pgwire.value_encoding import encode_binary, encode_text
from actors.model.pgwire.value_parsing import parse_array, parse_nested_array
from actors.model.plan.schema import arrow_type
from actors.runtime.errors import RemoteProtocolError

UTC = dt.UTC
NAIVE = dt.datetime.fromisoformat("2026-01-02T03:04:05.000600")


def dumped(value: Any, form: PyFormat) -> tuple[bytes, int, int]:
    """(data, type, format) as psycopg sends a value."""
    made = Transformer()
    dumper = made.get_dumper(value, form)
    data = dumper.dump(value)
    assert data is not None
    return bytes(data), dumper.oid, dumper.format


@pytest.mark.parametrize("form", [PyFormat.TEXT, PyFormat.BINARY])
@pytest.mark.parametrize(
    "value",
    [
        True, False, 7, -7, 2**40, 1.5, math.inf, Decimal("-1.50"), Decimal("1E+5"), "it's",
        b"\0\xff", dt.date(2026, 1, 2), NAIVE, dt.datetime(2026, 1, 2, tzinfo=UTC),
        dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
        [1, None, 3], ["a", 'b"', None, "NULL"], [],
    ],
)  # fmt: skip
def test_what_psycopg_sends(value: Any, form: PyFormat) -> None:
    data, oid, code = dumped(value, form)
    if isinstance(value, bytes) and form is PyFormat.TEXT:
        # Without a connection libpq escapes as its process's last server wanted it.
        data = b"\\x" + value.hex().encode()
    if value == []:
        oid, code = 1007, 0
    # psycopg leaves the type of a text open where it does not matter.
    found = parse_parameter(data, oid or (1009 if isinstance(value, list) else 25), code)
    assert same(found, value), (found, value)


@given(kind=st.sampled_from(sorted(EVERY)), draw=st.data())
def test_both_formats_mean_the_same(kind: str, draw: st.DataObject) -> None:
    value = draw.draw(EVERY[kind])
    array = pa.array([value], arrow_type(kind))
    oid = pg_type_of_spark(kind).oid
    for encode, code in ((encode_text, 0), (encode_binary, 1)):
        (data,) = as_variable(encode(array)).to_pylist()
        assert same(parse_parameter(data, oid, code), array[0].as_py())


@pytest.mark.parametrize(
    ("data", "oid", "message", "sqlstate"),
    [
        (b"x", 23, "integer", "22P02"),
        (b"1_0", 23, "integer", "22P02"),
        ("١".encode(), 23, "integer", "22P02"),
        (b"2147483648", 23, "out of range", "22003"),
        (b"\xff", 25, "UTF8", "22021"),
        (b"1.5.5", 1700, "numeric", "22P02"),
        (b"nan", 1700, "is not supported", "22003"),
        (b"2026-13-01", 1082, "out of range", "22008"),
        (b"99999-01-01", 1082, "out of range", "22008"),
        (b"2026-01-01 25:00", 1114, "out of range", "22008"),
        (b"9999-12-31 24:00", 1114, "out of range", "22008"),
        (b"9999-12-31 23:00-05", 1184, "out of range", "22008"),
        (b"{a,", 1009, "array", "22P02"),
        (b'{"a}', 1009, "array", "22P02"),
        (b"{a\\}", 1009, "array", "22P02"),
        (b"{,}", 1009, "array", "22P02"),
        (b"a", 1009, "array", "22P02"),
        (b"zz", 2950, "uuid", "22P02"),
    ],
)
def test_texts_that_are_no_values(data: bytes, oid: int, message: str, sqlstate: str) -> None:
    with pytest.raises(InvalidClientData, match=message) as found:
        parse_parameter(data, oid, 0)
    assert found.value.sqlstate == sqlstate


@pytest.mark.parametrize(
    ("data", "oid", "sqlstate"),
    [
        (b"\0", 23, "22P03"),
        (b"", 16, "22P03"),
        (b"\0", 1700, "22P03"),
        (struct.pack("!q", 2**63 - 1), 1184, "22008"),
        (struct.pack("!i", -(2**31)), 1082, "22008"),
        (b"x{}", 3802, "22P03"),
        (b"\0" * 15, 2950, "22P03"),
        (b"", 600, "0A000"),
        (b"", 1007, "22P03"),
        (struct.pack("!iiI", 1, 0, 23), 1007, "22P03"),
        (struct.pack("!iiIii", 1, 0, 23, 2**31 - 1, 1), 1007, "22P03"),
        (struct.pack("!iiIiii", 1, 0, 23, 1, 1, 5), 1007, "22P03"),
        (struct.pack("!iiIiii", 1, 0, 25, 1, 1, -1), 1007, "22P03"),
        (struct.pack("!iiIiiii", 1, 0, 23, 1, 1, -1, 0), 1007, "22P03"),
        (struct.pack("!iiIiiii", 2, 0, 23, 1, 1, 1, 1), 1007, "0A000"),
    ],
)
def test_binary_that_is_no_value(data: bytes, oid: int, sqlstate: str) -> None:
    with pytest.raises(InvalidClientData) as found:
        parse_parameter(data, oid, 1)
    assert found.value.sqlstate == sqlstate


@pytest.mark.sampled
def test_random_bytes_are_values_or_the_error() -> None:
    seen = set()

    @given(
        st.binary(max_size=40),
        st.sampled_from([16, 17, 20, 23, 25, 700, 1082, 1114, 1184, 1700, 1007, 1009, 2950]),
    )
    def parse(data: bytes, oid: int) -> None:
        for code in (0, 1):
            try:
                value = parse_parameter(data, oid, code)
                assert spark_literal(value, oid)
                seen.add((code, "value"))
            except InvalidClientData as error:
                seen.add((code, error.sqlstate))

    parse()
    assert seen >= {(0, "value"), (0, "22P02"), (0, "22021"), (1, "value"), (1, "22P03")}
    assert {state[:2] for _, state in seen - {(0, "value"), (1, "value")}} <= {"22", "0A"}, seen


def test_other_forms_of_texts() -> None:
    def parse(text: str, oid: int, zone: str = "UTC") -> Any:
        return parse_parameter(text.encode(), oid, 0, zone)

    assert parse(" on ", 16) is True
    assert parse("off", 16) is False
    assert parse("2026-01-02 +02", 1082) == dt.date(2026, 1, 2)
    assert parse("2026-01-02 00:00:00+02 AD", 1184) == dt.datetime(2026, 1, 1, 22, tzinfo=UTC)
    assert parse("2026-01-02 00:00", 1184, "Asia/Tokyo") == dt.datetime(2026, 1, 1, 15, tzinfo=UTC)
    assert parse("1890-01-02 00:49:56+00:49:56", 1184) == dt.datetime(1890, 1, 2, tzinfo=UTC)
    assert parse("2026-01-02 03:04:05+02", 1114) == NAIVE.replace(microsecond=0)
    assert parse("[0:1]={1,2}", 1007) == [1, 2]
    assert parse('{ "a" , b c , NULL, "" }', 1009) == ["a", "b c", None, ""]
    assert parse("{\\\\,a\\,b}", 1009) == ["\\", "a,b"]
    assert (
        parse("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", 2950)
        == "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    )
    assert parse("anything", 0) == "anything"
    assert parse("anything", 600) == "anything"
    assert parse_parameter(b'\x01{"a":1}', 3802, 1) == '{"a":1}'
    assert parse_parameter(bytes(16), 2950, 1) == "00000000-0000-0000-0000-000000000000"


def test_a_whole_bind() -> None:
    bind = BindPortal("", "", (0, 1), (b"7", struct.pack("!i", 8)), ())
    assert parse_parameters(bind, [20, 23]) == [7, 8]
    assert parse_parameters(BindPortal("", "", (), (None, b"x"), ()), [20, 25]) == [None, "x"]
    with pytest.raises(RemoteProtocolError, match="2 parameters, its statement needs 1"):
        parse_parameters(bind, [20])
    with pytest.raises(InvalidClientData, match=r"parameter \$1: .*integer"):
        parse_parameters(BindPortal("", "", (), (b"x",), ()), [23])


# -- literals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "oid", "wanted"),
    [
        (None, 0, "NULL"),
        (None, 20, "CAST(NULL AS bigint)"),
        (None, 1007, "CAST(NULL AS array<int>)"),
        (None, 1700, "CAST(NULL AS decimal(38,18))"),
        (True, 16, "TRUE"),
        (5, 21, "5S"),
        (5, 23, "5"),
        (-5, 20, "(-5L)"),
        (0.1, 701, "0.1D"),
        (-0.0, 701, "(-0.0D)"),
        (1e22, 701, "1e+22D"),
        (3.4028234663852886e38, 700, "3.4028234663852886e+38F"),
        (math.nan, 701, "CAST('NaN' AS DOUBLE)"),
        (-math.inf, 700, "CAST('-Infinity' AS FLOAT)"),
        (Decimal("1.50"), 1700, "1.50BD"),
        (Decimal("-1E+3"), 1700, "(-1000BD)"),
        ("it's \\ ${x} $", 25, "'it\\'s \\\\ \\u0024{x} $'"),
        ("a\0b", 25, "'a\\u0000b'"),
        (b"\0\xff", 17, "X'00FF'"),
        (dt.date(1, 1, 2), 1082, "DATE '0001-01-02'"),
        (NAIVE, 1114, "TIMESTAMP_NTZ '2026-01-02 03:04:05.000600'"),
        (dt.datetime(2026, 1, 2, tzinfo=UTC), 1184, "TIMESTAMP '2026-01-02 00:00:00+00:00'"),
        ([1, None], 1016, "array(1L, CAST(NULL AS bigint))"),
        ([], 1009, "CAST(array() AS array<string>)"),
    ],
)
def test_literals(value: Any, oid: int, wanted: str) -> None:
    assert spark_literal(value, oid) == wanted


def test_values_without_a_literal() -> None:
    for value, oid in (
        (Decimal("1E+38"), 1700),
        (Decimal("1E-39"), 1700),
        (Decimal("1E+999999"), 1700),
    ):
        with pytest.raises(InvalidClientData, match="38 digits"):
            spark_literal(value, oid)
    with pytest.raises(InvalidClientData, match="no counterpart"):
        spark_literal(None, 600)
    with pytest.raises(InvalidClientData, match="is not an array type"):
        spark_literal([1], 600)


def test_the_edges_have_literals() -> None:
    for kind, values in EDGES.items():
        literals = [spark_literal(value, pg_type_of_spark(kind).oid) for value in values]
        assert len(set(literals)) == len(values), literals
        assert not any(literal.startswith("CAST(NULL") for literal in literals)


@pytest.mark.parametrize(
    "arrays",
    [
        [(b"{" + b"1," * 50 + b"1}", 0)],
        [(struct.pack("!iiIii", 1, 1, 23, 51, 1) + b"\xff" * 204, 1)],
        [(b"{" + b"1," * 30 + b"1}", 0)] * 2,
    ],
    ids=["text", "binary", "together"],
)
def test_elements_of_arrays_are_bounded(
    arrays: list[tuple[bytes, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, formats = zip(*arrays, strict=True)
    bind = BindPortal("", "", formats, bodies, ())
    oids = [1007] * len(bodies)
    assert len(parse_parameters(bind, oids)) == len(bodies)
    monkeypatch.setattr("actors.model.pgwire.value_parsing.ARRAY_ELEMENTS_MAX", 50)
    with pytest.raises(InvalidClientData, match="at most 50 elements") as caught:
        parse_parameters(bind, oids)
    assert caught.value.sqlstate == "54000"


ELEMENTS = st.lists(
    st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
)


@given(ELEMENTS)
def test_arrays_of_any_texts(elements: list[str | None]) -> None:
    def told(element: str | None) -> str:
        if element is None:
            return "NULL"
        escaped = element.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    text = "{" + ",".join(map(told, elements)) + "}"
    assert parse_array(text) == elements
    assert parse_array(f"[0:9]={text}") == elements
    assert parse_nested_array("{" + f"{text},{text}" + "}") == [elements, elements]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{",
        "{1",
        "{1,}",
        "{,1}",
        "{1,,2}",
        "{1}}",
        "{1}x",
        '{"a"b}',
        '{a"b}',
        '{"a',
        "{{1}",
        "{1 {2}}",
    ],
)
def test_texts_that_are_no_arrays(text: str) -> None:
    with pytest.raises(InvalidClientData, match="invalid input syntax for type array"):
        parse_nested_array(text)


def test_arrays_as_postgresql_reads_them() -> None:
    """Blanks around elements go, escaped ones stay; bounds within an element are its text."""
    assert parse_array(r"{ a b ,\  ,c\ ,N\ULL, null }") == ["a b", " ", "c ", "NULL", None]
    assert parse_array('{"[1:2]={}",[1:2]=x}') == ["[1:2]={}", "[1:2]=x"]
    with pytest.raises(InvalidClientData, match="one-dimensional"):
        parse_array("{{1},{2}}")
