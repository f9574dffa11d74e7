"""Rows of results and of COPY out: whole batches, as clients take them apart."""

from __future__ import annotations

import csv
import datetime as dt
import io
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pg_columns import (  # type: ignore[import-not-found]
    EDGES,
    NESTED,
    WORDS,
    column,
    copy_bodies,
    row_format,
    same,
    table,
)
from psycopg._copy_base import _parse_row_binary as parse_row_binary
from psycopg._copy_base import _parse_row_text as parse_row_text
from psycopg.adapt import Transformer
from psycopg.pq import Format

from actors.model.pgwire.copy_options import BINARY_HEADER
from actors.model.pgwire.row_encoding import CopyEncoder, RowEncoder, cut_batches
from actors.model.pgwire.type_map import pg_type
from actors.runtime.errors import InvalidUsage


def fields(body: bytes) -> list[bytes | None]:
    """The values of a DataRow or of a row of a binary COPY."""
    (count,) = struct.unpack_from("!h", body)
    at = 2
    found: list[bytes | None] = []
    for _ in range(count):
        (length,) = struct.unpack_from("!i", body, at)
        found.append(None if length < 0 else body[at + 4 : at + 4 + length])
        at += 4 + max(length, 0)
    assert at == len(body)
    return found


def test_rows_of_every_type() -> None:
    _, batch = table(EDGES | NESTED)
    names = batch.schema.names
    formats = [at % 2 for at in range(batch.num_columns)]
    for codes in (formats, [1 - code for code in formats], [0] * len(formats), [1] * len(formats)):
        rows = RowEncoder(codes).encode(batch)
        assert len(rows) == batch.num_rows
        assert bytes(rows.data[:1]) == b"D"
        found = [fields(body) for body in copy_bodies(bytes(rows.data))]
        for at, name in enumerate(names):
            alone = RowEncoder([codes[at]]).encode(batch.select([name]))
            values = [fields(body)[0] for body in copy_bodies(bytes(alone.data))]
            assert [row[at] for row in found] == values


@given(st.data())
def test_rows_are_read_back(draw: st.DataObject) -> None:
    kinds = draw.draw(st.lists(st.sampled_from(sorted(WORDS)), max_size=5))
    rows = draw.draw(st.integers(0, 5))
    codes = draw.draw(st.lists(st.integers(0, 1), min_size=len(kinds), max_size=len(kinds)))
    values = [
        draw.draw(st.lists(st.none() | WORDS[kind], min_size=rows, max_size=rows)) for kind in kinds
    ]
    arrays = [column(kind, each) for kind, each in zip(kinds, values, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, [str(at) for at in range(len(kinds))])
    found = RowEncoder(codes).encode(batch)
    assert len(found) == batch.num_rows
    bodies = copy_bodies(bytes(found.data))
    loaders = [
        Transformer().get_loader(pg_type(array.type).oid, Format(code))
        for array, code in zip(arrays, codes, strict=True)
    ]
    for at, body in enumerate(bodies):
        for loader, data, each in zip(loaders, fields(body), values, strict=True):
            assert same(None if data is None else loader.load(data), each[at])


def test_a_batch_can_be_sent_in_pieces() -> None:
    batch = pa.RecordBatch.from_pydict({"a": ["x" * size for size in range(50)]})
    rows = RowEncoder([0]).encode(batch)
    pieces = list(rows.pieces(100))
    assert b"".join(map(bytes, pieces)) == bytes(rows.data)
    assert max(map(len, pieces)) <= 100
    assert len(list(rows.pieces(1))) == 50
    assert sum(len(copy_bodies(bytes(piece))) for piece in pieces) == 50
    assert [each.num_rows for each in cut_batches(batch, batch.nbytes)] == [50]
    assert sum(each.num_rows for each in cut_batches(batch, batch.nbytes // 2)) == 50
    assert [each.num_rows for each in cut_batches(batch, 1)] == [1] * 50


def test_rows_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.RecordBatch.from_pydict({"a": ["x" * 100]})
    with pytest.raises(InvalidUsage, match="2 formats for 1 columns"):
        RowEncoder([0, 0]).encode(batch)
    monkeypatch.setattr("actors.model.pgwire.row_encoding.ROW_BYTES_MAX", 100)
    with pytest.raises(InvalidUsage, match="limit 100"):
        RowEncoder([0]).encode(batch)


# -- COPY out --------------------------------------------------------------------------------------


def copied(
    batch: pa.RecordBatch, form: Any = None, cut: int = 3
) -> tuple[bytes, list[bytes], bytes]:
    """(what begins, the bodies of the rows' messages, what ends) a COPY of a batch in two."""
    encoder = CopyEncoder(batch.schema.names, form)
    begin = encoder.begin()
    rows = [encoder.encode(batch.slice(0, cut)), encoder.encode(batch.slice(cut))]
    bodies = [body for each in rows for body in copy_bodies(bytes(each.data))]
    assert sum(map(len, rows)) == batch.num_rows == len(bodies)
    return begin, bodies, encoder.finish()


def transformer(batch: pa.RecordBatch, form: Format) -> Any:
    """psycopg's loaders of the columns."""
    made = Transformer()
    made.set_loader_types([pg_type(field.type).oid for field in batch.schema], form)
    return made


def test_copy_in_text_is_read_by_psycopg() -> None:
    _, batch = table(EDGES)
    begin, bodies, end = copied(batch)
    assert (begin, end) == (b"", b"")
    loaders = transformer(batch, Format.TEXT)
    found = [parse_row_text(body, loaders) for body in bodies]
    for at, array in enumerate(batch.columns):
        values: list[Any] = [row[at] for row in found]
        if pa.types.is_float32(array.type):
            # psycopg reads a text of a float of four bytes as one of eight.
            values = pa.array(values, array.type).to_pylist()
        assert same(values, array.to_pylist())


def test_copy_in_binary_is_read_by_psycopg() -> None:
    _, batch = table(EDGES)
    begin, bodies, end = copied(batch, row_format("binary"))
    assert begin == b""
    # ADBC finds the header only within the first row's message.
    assert bodies[0].startswith(BINARY_HEADER)
    assert not bodies[1].startswith(BINARY_HEADER)
    assert end == b"d\0\0\0\x06\xff\xff"
    bodies[0] = bodies[0][len(BINARY_HEADER) :]
    loaders = transformer(batch, Format.BINARY)
    found = [parse_row_binary(body, loaders) for body in bodies]
    for at, values in enumerate(batch.to_pydict().values()):
        assert all(same(row[at], value) for row, value in zip(found, values, strict=True))


def test_a_binary_copy_without_rows_has_its_header() -> None:
    encoder = CopyEncoder(["a"], row_format("binary"))
    batch = pa.RecordBatch.from_pydict({"a": pa.array([], pa.int64())})
    assert len(encoder.encode(batch)) == 0
    assert encoder.finish() == b"d" + struct.pack("!I", 4 + 21) + BINARY_HEADER + b"\xff\xff"


def test_copy_in_csv_is_read_by_python() -> None:
    words = EDGES["string"]
    batch = pa.RecordBatch.from_pydict({'a "b"': words, "n": list(range(len(words)))})
    begin, bodies, _ = copied(batch, row_format("csv", header=True))
    text = (begin[5:] + b"".join(bodies)).decode()
    found = list(csv.reader(io.StringIO(text, newline="")))
    assert found == [['a "b"', "n"], *([word, str(at)] for at, word in enumerate(words))]


def test_csv_marks_what_is_null() -> None:
    batch = pa.RecordBatch.from_pydict({"a": ["", None, "x", "\\."]})
    assert copied(batch, row_format("csv"))[1] == [b'""\n', b"\n", b"x\n", b'"\\."\n']
    assert copied(batch, row_format("csv", null="x"))[1] == [b"\n", b"x\n", b'"x"\n', b'"\\."\n']
    quoted = row_format("csv", delimiter=";", quote="'", escape="\\")
    batch = pa.RecordBatch.from_pydict({"a": ["it's", "a;b", "a\\b", "'\\"], "b": [1, 2, 3, 4]})
    assert copied(batch, quoted)[1] == [
        b"'it\\'s';1\n", b"'a;b';2\n", b"a\\b;3\n", b"'\\'\\\\';4\n"
    ]  # fmt: skip


def test_text_with_other_options() -> None:
    batch = pa.RecordBatch.from_pydict({"a|": ["a|b", None, "c\td"], "b": [1, None, 3]})
    begin, bodies, _ = copied(batch, row_format("text", delimiter="|", null="?", header=True))
    assert begin[5:] == b"a\\||b\n"
    assert bodies == [b"a\\|b|1\n", b"?|?\n", b"c\\td|3\n"]


@pytest.mark.parametrize(
    "options",
    [
        {"delimiter": "ab"},
        {"delimiter": "é"},
        {"delimiter": "\n"},
        {"delimiter": "a"},
        {"delimiter": "\\"},
        {"null": "\n"},
        {"null": "\t"},
        {"kind": "csv", "quote": ","},
        {"kind": "csv", "null": 'a"b'},
        {"kind": "csv", "escape": "xx"},
    ],
)
def test_options_that_contradict(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage, match="COPY"):
        row_format(**options)


def test_options_that_concern_numbers_too() -> None:
    moment = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    batch = pa.RecordBatch.from_pydict({"n": [0, 1, None], "t": [moment, None, moment]})
    assert copied(batch, row_format("csv", delimiter=":", null="0"))[1] == [
        b'"0":"2026-01-02 00:00:00+00"\n',
        b"1:0\n",
        b'0:"2026-01-02 00:00:00+00"\n',
    ]
    assert copied(batch, row_format("text", delimiter=":"))[1][0] == (
        b"0:2026-01-02 00\\:00\\:00+00\n"
    )
