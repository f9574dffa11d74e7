"""COPY in: any cut of the stream gives the same rows; errors name line and column."""

from __future__ import annotations

import datetime as dt
import struct
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pg_columns import (  # type: ignore[import-not-found]
    EDGES,
    EVERY,
    NESTED,
    copy_bodies,
    row_format,
    same,
    split,
    table,
)
from psycopg._copy_base import format_row_binary, format_row_text
from psycopg.adapt import Transformer

from actors.model.pgwire.copy_options import BINARY_HEADER, BINARY_TRAILER, RowFormat
from actors.model.pgwire.row_decoding import copy_decoder
from actors.model.pgwire.row_encoding import CopyEncoder
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.plan.schema import TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

FORMS = {
    "text": row_format("text"),
    "csv": row_format("csv"),
    "binary": row_format("binary"),
    "header": row_format("csv", header=True),
    "strange": row_format("csv", delimiter=";", quote="'", escape="\\", null="~"),
    "bars": row_format("text", delimiter="|", null="?", header=True),
}


def stream(batch: pa.RecordBatch, form: RowFormat | None = None) -> bytes:
    """A batch as a client would send it."""
    encoder = CopyEncoder(batch.schema.names, form)
    parts = [encoder.begin(), bytes(encoder.encode(batch).data), encoder.finish()]
    return b"".join(copy_bodies(b"".join(parts)))


def read(
    schema: TableSchema,
    pieces: list[bytes],
    form: RowFormat | None = None,
    batch_bytes: int = 64,
    row_bytes_max: int = 100_000,
    zone: str = "UTC",
) -> pa.Table:
    """The rows of a stream."""
    decoder = copy_decoder(
        schema, form, batch_bytes=batch_bytes, row_bytes_max=row_bytes_max, time_zone=zone
    )
    batches = [batch for piece in pieces for batch in decoder.feed(piece)]
    batches += decoder.finish()
    return pa.Table.from_batches(batches, schema=schema.arrow())


def equal(found: pa.Table, batch: pa.RecordBatch) -> bool:
    """Equality with signs of zeros and NaN."""
    right = batch.to_pydict()
    return all(same(values, right[name]) for name, values in found.to_pydict().items())


def columns(*kinds: str, nullable: bool = True) -> TableSchema:
    """A schema of columns a, b, c…"""
    return TableSchema(
        tuple(TableColumn(chr(97 + at), kind, nullable) for at, kind in enumerate(kinds))
    )


@pytest.mark.parametrize("batch_bytes", [1, 7, 100_000])
@pytest.mark.parametrize("form", FORMS)
def test_every_type_comes_back(form: str, batch_bytes: int) -> None:
    schema, batch = table(EDGES | NESTED)
    data = stream(batch, FORMS[form])
    found = read(schema, [data], FORMS[form], batch_bytes)
    assert found.num_rows == batch.num_rows
    assert equal(found, batch)


@pytest.mark.parametrize("form", FORMS)
@given(draw=st.data())
def test_any_rows_in_any_pieces(form: str, draw: st.DataObject) -> None:
    kinds = draw.draw(st.lists(st.sampled_from(sorted(EVERY)), min_size=1, max_size=4))
    rows = draw.draw(st.integers(0, 6))
    schema = columns(*kinds)
    values = [
        draw.draw(st.lists(st.none() | EVERY[kind], min_size=rows, max_size=rows)) for kind in kinds
    ]
    arrays = [
        pa.array(each, field.type) for each, field in zip(values, schema.arrow(), strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow())
    data = stream(batch, FORMS[form])
    cuts = draw.draw(st.lists(st.integers(0, 10_000), max_size=5))
    batch_bytes = draw.draw(st.integers(1, 200))
    found = read(schema, split(data, cuts), FORMS[form], batch_bytes)
    assert found.num_rows == batch.num_rows
    assert equal(found, batch)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(50))
@given(draw=st.data())
def test_damaged_streams_are_rows_or_the_error(form: str, draw: st.DataObject) -> None:
    schema, batch = table(EDGES | NESTED)
    data = bytearray(stream(batch, FORMS[form]))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(
            st.sampled_from(b"\\\"',;|\n\r\t\0\xffxN09")
        )
    outcomes = []
    for batch_bytes in (100_000, 300):
        try:
            outcomes.append(read(schema, [bytes(data)], FORMS[form], batch_bytes).to_pydict())
        except InvalidClientData as error:
            outcomes.append({"error": [str(error)]})
    assert outcomes[0].keys() == outcomes[1].keys()
    assert all(same(values, outcomes[1][name]) for name, values in outcomes[0].items())


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_random_bytes_are_rows_or_the_error(form: str) -> None:
    seen: Counter[str] = Counter()

    # Few bytes that are drawn make a row, or one with a column too many: these do in each form.
    @example(b"1\n1\n")
    @example(b"1\n1\t2,3|4;5\n")
    @given(st.binary(max_size=60))
    def decode(data: bytes) -> None:
        for kinds in (("string",), ("bigint", "binary")):
            try:
                found = read(columns(*kinds), [data], FORMS[form])
                seen["rows" if found.num_rows else "none"] += 1
            except InvalidClientData as error:
                seen[error.sqlstate] += 1

    decode()
    # No random bytes are a stream of the binary format, which begins with eleven bytes of its own.
    assert seen.keys() >= ({"22P04"} if form == "binary" else {"22P04", "none", "rows"}), seen
    assert {state[:2] for state in seen.keys() - {"none", "rows"}} == {"22"}, seen


def test_rows_of_psycopg() -> None:
    schema = columns("bigint", "string", "double", "timestamp", "binary", "boolean")
    rows = [
        (1, "a\tb\\", 1.5, dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), b"hi", True),
        (None, None, None, None, None, None),
        (-5, "", float("nan"), dt.datetime(1, 1, 1, tzinfo=dt.UTC), b"", False),
    ]
    text = bytearray()
    binary = bytearray(BINARY_HEADER)
    made = Transformer()
    made.set_dumper_types([20, 25, 701, 1184, 17, 16], format=1)  # type: ignore[arg-type]
    for row in rows:
        format_row_text(row, Transformer(), text)
        format_row_binary(row, made, binary)
    for data, form in ((text, None), (binary + BINARY_TRAILER, row_format("binary"))):
        found = read(schema, [bytes(data)], form).to_pylist()
        assert all(same(list(a.values()), list(b)) for a, b in zip(found, rows, strict=True))


# -- text ------------------------------------------------------------------------------------------


def lines(data: bytes, *kinds: str, form: RowFormat | None = None) -> list[list[Any]]:
    """The rows of a stream."""
    return [list(row.values()) for row in read(columns(*kinds), [data], form).to_pylist()]


def test_escapes_of_text() -> None:
    data = rb"\b\f\n\r\t\v\\\x41\x4a1\101\1012\x\q".replace(b"\\x\\q", b"\\xg\\q") + b"\tx\n"
    assert lines(data, "string", "string") == [["\b\f\n\r\t\v\\AJ1AA2xgq", "x"]]
    assert lines(b"a\\\nb\n\\N\nN\n\\\\N\n\n", "string") == [
        ["a\nb"], [None], ["N"], ["\\N"], [""]
    ]  # fmt: skip
    assert lines(b"1\t2\r\n3\t4\r\n", "int", "int") == [[1, 2], [3, 4]]
    assert lines(b"1\t2\n3\t4", "int", "int") == [[1, 2], [3, 4]]


def test_the_end_mark_of_text() -> None:
    assert lines(b"1\n\\.\n2\n", "int") == [[1]]
    assert lines(b"1\n\\.", "int") == [[1]]
    assert lines(b"\\.\r\n2\n", "int") == []
    assert lines(b"a\\.\n\\.b\n", "string") == [["a"]]
    with pytest.raises(InvalidClientData, match="COPY line 2: end-of-copy marker corrupt"):
        lines(b"1\n\\.b\n", "int")


def test_lenient_values() -> None:
    """What PostgreSQL takes and Arrow's casts do not."""
    data = b" +5\tyes\t 1.005\t2026-1-2\t2026-01-02T03:04:05.1234567Z\n"
    assert lines(data, "int", "boolean", "decimal(5,2)", "date", "timestamp") == [
        [5, True, Decimal("1.01"), dt.date(2026, 1, 2),
         dt.datetime(2026, 1, 2, 3, 4, 5, 123457, tzinfo=dt.UTC)]
    ]  # fmt: skip
    assert lines(b"h\\\\151\t\\\\x 68 69\n", "binary", "binary") == [[b"hi", b"hi"]]
    assert lines(b"24:00\n".replace(b"24:00", b"2026-12-31 24:00:00"), "timestamp_ntz") == [
        [dt.datetime.fromisoformat("2027-01-01")]
    ]


def test_times_without_a_zone_are_of_the_session() -> None:
    data = b"2026-07-01 12:00:00\n2026-01-01 12:00:00.5\n\\N\n"
    found = read(columns("timestamp"), [data], batch_bytes=1000, zone="Europe/Rome")
    assert found["a"].to_pylist() == [
        dt.datetime(2026, 7, 1, 10, tzinfo=dt.UTC),
        dt.datetime(2026, 1, 1, 11, 0, 0, 500_000, tzinfo=dt.UTC),
        None,
    ]
    mixed = b"2026-07-01 12:00:00\n2026-07-01 12:00:00+05:30\n2026-07-01 12:00 America/New_York\n"
    assert read(columns("timestamp"), [mixed], zone="Europe/Rome")["a"].to_pylist() == [
        dt.datetime(2026, 7, 1, 10, tzinfo=dt.UTC),
        dt.datetime(2026, 7, 1, 6, 30, tzinfo=dt.UTC),
        dt.datetime(2026, 7, 1, 16, tzinfo=dt.UTC),
    ]


@pytest.mark.parametrize(
    ("data", "kinds", "message", "sqlstate"),
    [
        (b"1\t2\n3\n", ("int", "int"), 'line 2: missing data for column "b"', "22P04"),
        (b"1\n2\t3\n", ("int",), "line 2: extra data after last expected column", "22P04"),
        (b"1\nx\n", ("int",), 'line 2: column "a": invalid input syntax for type integer', "22P02"),
        (b"1\n0x10\n", ("int",), 'line 2: column "a"', "22P02"),
        (b"1\n3000000000\n", ("int",), "line 2: .*out of range", "22003"),
        (b"1\n200\n", ("tinyint",), "line 2: .*out of range", "22003"),
        (b"1\n1e999\n", ("double",), "line 2: .*out of range", "22003"),
        (b"1e39\n", ("float",), "line 1: .*out of range", "22003"),
        (b"1000\n", ("decimal(5,2)",), "line 1: .*does not fit", "22003"),
        (b"1e999999\n", ("decimal(5,2)",), "line 1: .*does not fit", "22003"),
        (b"NaN\n", ("decimal(5,2)",), "line 1: .*is not supported", "22003"),
        (b"a\\\nb\n\xff\n", ("string",), 'line 3: column "a": invalid byte sequence', "22021"),
        (b"2026-02-30\n", ("date",), "line 1: .*out of range", "22008"),
        (b"0044-03-15 BC\n", ("date",), "line 1: .*out of range", "22008"),
        (b"infinity\n", ("timestamp",), "line 1: .*out of range", "22008"),
        (b"noon\n", ("timestamp",), "line 1: .*invalid input", "22007"),
        (b"2026-01-01 00:00 Mars/Base\n", ("timestamp",), "time zone", "22023"),
        (b"maybe\n", ("boolean",), "line 1: .*boolean", "22P02"),
        (b"\\\\x6\n", ("binary",), "line 1: .*bytea", "22023"),
        (b"{1\n", ("array<int>",), "line 1: .*array", "22P02"),
        (b"{{1}}\n", ("array<int>",), "line 1: .*dimension", "0A000"),
        (b"{\n", ("struct<a:int>",), "line 1: .*json", "22P02"),
        (b"a\rb\n", ("string",), "line 1: a carriage return", "22P04"),
        (b"a\\", ("string",), "line 1: it ends with a backslash", "22P04"),
    ],
)
def test_errors_name_line_and_column(
    data: bytes, kinds: tuple[str, ...], message: str, sqlstate: str
) -> None:
    for batch_bytes in (1, 1000):
        with pytest.raises(InvalidClientData, match=message) as found:
            read(columns(*kinds), [data], batch_bytes=batch_bytes)
        assert found.value.sqlstate == sqlstate


def test_nulls_where_none_may_be() -> None:
    schema = columns("int", nullable=False)
    with pytest.raises(InvalidClientData, match=r"line 2: .*violates not-null") as found:
        read(schema, [b"1\n\\N\n"])
    assert found.value.sqlstate == "23502"
    rows = b"\0\1\0\0\0\4\0\0\0\1" + b"\0\1\xff\xff\xff\xff"
    with pytest.raises(InvalidClientData, match=r"row 2: .*violates not-null"):
        read(schema, [BINARY_HEADER + rows + BINARY_TRAILER], row_format("binary"))


def test_a_row_is_bounded() -> None:
    decoder = copy_decoder(columns("string"), batch_bytes=100, row_bytes_max=1000)
    with pytest.raises(InvalidClientData, match="more than 1000 bytes") as found:
        for _ in range(100):
            decoder.feed(b"x" * 50)
    assert found.value.sqlstate == "54000"


# -- CSV -------------------------------------------------------------------------------------------


def test_quotes_of_csv() -> None:
    csv = row_format("csv")
    data = b'"a,b","say ""hi"""\r\n"two\nlines",\n"",ab"cd"e\n'
    assert lines(data, "string", "string", form=csv) == [
        ["a,b", 'say "hi"'],
        ["two\nlines", None],
        ["", "abcde"],
    ]
    assert lines(b'""""\n', "string", form=csv) == [['"']]
    assert lines(b"x\n\\.\n\n", "string", form=csv) == [["x"]]
    assert lines(b'"\n\\.\n"\n"\\."\n', "string", form=csv) == [["\n\\.\n"], ["\\."]]
    data = b"x;'it\\'s \\\\ ''; \\~'\n~;'~'\n"
    assert lines(data, "string", "string", form=FORMS["strange"]) == [
        ["x", "it's \\ ; \\~"],
        [None, "~"],
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'1,"x\n', "line 1: unterminated CSV quoted field"),
        (b'1,"x\ny"\n2\n', 'line 3: missing data for column "b"'),
        (b'1,"x\ny"\nz,2\n', 'line 3: column "a": invalid input'),
        (b"1,a\rb\n", "line 1: a carriage return"),
    ],
)
def test_errors_of_csv(data: bytes, message: str) -> None:
    for batch_bytes in (1, 1000):
        with pytest.raises(InvalidClientData, match=message):
            read(columns("int", "string"), [data], row_format("csv"), batch_bytes)


# -- binary ----------------------------------------------------------------------------------------


def field(data: bytes | None) -> bytes:
    """A field of a row."""
    return struct.pack("!i", -1) if data is None else struct.pack("!i", len(data)) + data


@pytest.mark.parametrize(
    ("data", "message", "sqlstate"),
    [
        (b"", "ends within its header", "22P04"),
        (b"PGCOPY\n\xff\r\n", "ends within its header", "22P04"),
        (b"1\tx\n", "signature", "22P04"),
        (BINARY_HEADER[:11] + b"\0\1\0\0\0\0\0\0", "flags 0x10000", "22P04"),
        (BINARY_HEADER + b"\0\3", "row 1: row field count is 3, expected 2", "22P04"),
        (BINARY_HEADER + b"\0\2" + field(b"1"), "row 1: unexpected end", "22P04"),
        (
            BINARY_HEADER + b"\0\2" + struct.pack("!i", -2),
            'column "a": invalid field size',
            "22P04",
        ),
        (BINARY_HEADER + b"\0\2" + field(b"12") + field(b"x"), "row 1: .*2 bytes instead", "22P03"),
        (BINARY_HEADER + b"\0\2" + field(b"1234") + field(b"\xff"), 'column "b": .*UTF8', "22021"),
        (BINARY_HEADER + BINARY_TRAILER + b"x", "after the trailer", "22P04"),
    ],
)
def test_errors_of_binary(data: bytes, message: str, sqlstate: str) -> None:
    for batch_bytes in (1, 1000):
        with pytest.raises(InvalidClientData, match=message) as found:
            read(columns("int", "string"), [data], row_format("binary"), batch_bytes)
        assert found.value.sqlstate == sqlstate


def test_a_header_may_have_an_extension() -> None:
    data = BINARY_HEADER[:15] + b"\0\0\0\3abc" + b"\0\1" + field(b"\0\0\0\7")
    assert lines(data, "int", form=row_format("binary")) == [[7]]


def test_values_that_look_like_rows() -> None:
    """Bytes in which a row could begin anywhere take no longer than others, and mislead nobody."""
    schema = columns("binary", "int")
    rows = [(b"\0\2\0\0" * size, size) for size in range(300)]
    data = BINARY_HEADER + b"".join(
        b"\0\2" + field(text) + field(struct.pack("!i", number)) for text, number in rows
    )
    for batch_bytes in (100, 10_000_000):
        found = read(schema, [data], row_format("binary"), batch_bytes)
        assert [tuple(row.values()) for row in found.to_pylist()] == rows


def test_binary_dates_out_of_range() -> None:
    for kind, value in (
        ("date", struct.pack("!i", 2**31 - 1)),
        ("date", struct.pack("!i", -(2**31))),
        ("timestamp", struct.pack("!q", 2**63 - 1)),
        ("timestamp", struct.pack("!q", -(2**63))),
        ("timestamp_ntz", struct.pack("!q", 2**62)),
    ):
        with pytest.raises(InvalidClientData, match="out of range") as found:
            lines(BINARY_HEADER + b"\0\1" + field(value), kind, form=row_format("binary"))
        assert found.value.sqlstate == "22008"


def test_binary_decimals_are_rounded_to_the_scale() -> None:
    numbers = {"0001 0000 0000 0000 0005": Decimal("5.00")}
    numbers["0002 0000 0000 0004 0001 0032"] = Decimal("1.01")  # 1.0050
    numbers["0002 0000 4000 0004 0001 0031"] = Decimal("-1.00")
    for text, wanted in numbers.items():
        data = BINARY_HEADER + b"\0\1" + field(bytes.fromhex(text))
        assert lines(data, "decimal(5,2)", form=row_format("binary")) == [[wanted]]
    for text in ("0001 0001 0000 0000 0005", "0000 0000 c000 0000", "0001 0000 0000 0000 2710"):
        with pytest.raises(InvalidClientData, match='row 1: column "a"'):
            data = BINARY_HEADER + b"\0\1" + field(bytes.fromhex(text))
            lines(data, "decimal(5,2)", form=row_format("binary"))
