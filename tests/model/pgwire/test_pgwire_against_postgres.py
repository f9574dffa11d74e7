"""COPY beside a real PostgreSQL: it reads what we write, and writes the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from pg_columns import EDGES, copy_bodies, row_format, same, table  # type: ignore[import-not-found]

from actors.model.pgwire.copy_options import RowFormat
from actors.model.pgwire.row_decoding import copy_decoder
from actors.model.pgwire.row_encoding import CopyEncoder
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.plan.schema import TableColumn, TableSchema
from actors.testing.postgres_server import PostgresServer

TYPES = {
    "tinyint": "smallint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}
OPTIONS = {
    "text": "text",
    "csv": "csv",
    "binary": "binary",
    "strange": "csv, DELIMITER ';', QUOTE '''', ESCAPE E'\\\\', NULL '~'",
}
FORMS = {
    "text": row_format("text"),
    "csv": row_format("csv"),
    "binary": row_format("binary"),
    "strange": row_format("csv", delimiter=";", quote="'", escape="\\", null="~"),
}
ZONES = ["UTC", "America/New_York", "Asia/Kolkata"]


def postgres_type(spark: str) -> str:
    """A Spark type as PostgreSQL names it."""
    if spark.startswith("array<"):
        return f"{postgres_type(spark[6:-1])}[]"
    return str(TYPES.get(spark, spark))


@pytest.fixture(scope="module")
def wire(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    """A connection, and a table with a column of each type."""
    with psycopg.connect(postgres.conninfo(), autocommit=True) as made:
        columns = ", ".join(f"c{at} {postgres_type(kind)}" for at, kind in enumerate(EDGES))
        made.execute(f"CREATE TABLE edges ({columns})")
        yield made


def messages(batch: pa.RecordBatch, form: str, zone: str) -> list[bytes]:
    """The bodies of a COPY's messages."""
    encoder = CopyEncoder(batch.schema.names, FORMS[form], zone)
    bodies: list[bytes] = copy_bodies(bytes(encoder.encode(batch).data) + encoder.finish())
    return bodies


def load(wire: psycopg.Connection, bodies: list[bytes], form: str) -> None:
    """Have PostgreSQL read a COPY."""
    wire.execute("TRUNCATE edges")
    with wire.cursor().copy(f"COPY edges FROM STDIN (FORMAT {OPTIONS[form]})") as copy:
        for body in bodies:
            copy.write(body)


def unload(wire: psycopg.Connection, form: str) -> list[bytes]:
    """Have PostgreSQL write a COPY."""
    with wire.cursor().copy(f"COPY edges TO STDOUT (FORMAT {OPTIONS[form]})") as copy:
        return [bytes(piece) for piece in copy]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bytes(wire: psycopg.Connection, form: str, zone: str) -> None:
    schema, batch = table(EDGES)
    wire.execute("SELECT set_config('TimeZone', %s, false)", [zone])
    load(wire, messages(batch, "binary", zone), "binary")
    ours, theirs = messages(batch, form, zone), unload(wire, form)
    if form == "binary":
        # PostgreSQL has its header in a message of its own.
        assert b"".join(ours) == b"".join(theirs)
    else:
        assert ours == theirs
    decoder = copy_decoder(
        schema, FORMS[form], batch_bytes=500, row_bytes_max=10_000, time_zone=zone
    )
    batches = [each for piece in theirs for each in decoder.feed(piece)] + decoder.finish()
    found = pa.Table.from_batches(batches, schema.arrow()).to_pydict()
    assert all(same(found[name], values) for name, values in batch.to_pydict().items())


@pytest.mark.parametrize("form", FORMS)
def test_postgresql_reads_what_we_write(wire: psycopg.Connection, form: str) -> None:
    _, batch = table(EDGES)
    wire.execute("SET TimeZone = 'Asia/Kolkata'")
    load(wire, messages(batch, form, "Asia/Kolkata"), form)
    assert b"".join(unload(wire, "binary")) == b"".join(messages(batch, "binary", "UTC"))


ODD_ROWS = [
    b"+5\tyes\t1.005\t2026-1-2\t\\\\x6869\ta\\\nb\\x41\\101\n",
    b" 7 \toff\t 1e1\t2026-01-02 AD\th\\\\151\\\\\\\\\t\\N\n",
]


def test_odd_texts_mean_the_same(wire: psycopg.Connection) -> None:
    """Forms that no server writes, but that PostgreSQL reads."""
    kinds = ["int", "boolean", "decimal(5,2)", "date", "binary", "string"]
    names = ", ".join(f"{chr(97 + at)} {postgres_type(kind)}" for at, kind in enumerate(kinds))
    wire.execute(f"CREATE TEMP TABLE odd ({names})")
    with wire.cursor().copy("COPY odd FROM STDIN") as copy:
        for row in ODD_ROWS:
            copy.write(row)
    schema = TableSchema(tuple(TableColumn(chr(97 + at), kind) for at, kind in enumerate(kinds)))
    decoder = copy_decoder(schema, batch_bytes=1000, row_bytes_max=1000)
    (batch,) = [*decoder.feed(b"".join(ODD_ROWS)), *decoder.finish()]
    theirs = wire.execute("SELECT * FROM odd").fetchall()
    assert [tuple(row.values()) for row in batch.to_pylist()] == theirs


PIECES = ["\\.", "\\.", "\n", "\n", "\n", ",", ",", "a", '"', "\\", "\t", "\\N", "'", ";", '"\\."']
FORMATS = {
    "text": row_format("text"),
    "csv": row_format("csv"),
    "csv, HEADER": row_format("csv", header=True),
    "csv, HEADER MATCH": msgspec.structs.replace(row_format("csv", header=True), header_match=True),
    "text, HEADER MATCH": msgspec.structs.replace(row_format(header=True), header_match=True),
    "csv, DELIMITER ';', QUOTE '''', ESCAPE E'\\\\'": row_format(
        "csv", delimiter=";", quote="'", escape="\\"
    ),
}


def draw_body(draw: random.Random, header: str) -> bytes:
    """A stream of one or two columns, among whose characters are marks of its end."""
    head = draw.choice(["", "", "x\n", "x,y\n", "x\ty\n", '"x","y"\n', "y,x\n"])
    body = header + head + "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 9)))
    # As scripts have it: PostgreSQL wants an end of line behind the mark.
    body = body + "\n" if draw.random() < 0.8 or body.endswith(("\\.", "\\")) else body
    return body.replace("\n", draw.choice(["\n", "\n", "\r\n"])).encode()


def theirs(wire: psycopg.Connection, body: bytes, form: str) -> list[tuple[Any, ...]] | str:
    """The rows that PostgreSQL reads, or the SQLSTATE of its error."""
    try:
        wire.execute("TRUNCATE marks")
        with wire.cursor().copy(f"COPY marks FROM STDIN (FORMAT {form})") as copy:
            copy.write(body)
    except psycopg.Error as error:
        return str(error.sqlstate)
    return wire.execute("SELECT * FROM marks").fetchall()


def ours(schema: TableSchema, body: bytes, form: RowFormat, size: int) -> Any:
    """The rows that we read, or the SQLSTATE of our error."""
    decoder = copy_decoder(schema, form, batch_bytes=size, row_bytes_max=1000)
    try:
        batches = [*decoder.feed(body), *decoder.finish()]
    except InvalidClientData as error:
        return error.sqlstate
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("columns", [1, 2])
def test_streams_end_where_postgresql_ends_them(wire: psycopg.Connection, columns: int) -> None:
    names = ["x", "y"][:columns]
    wire.execute("DROP TABLE IF EXISTS marks")
    wire.execute(f"CREATE TABLE marks ({', '.join(f'{name} text' for name in names)})")
    schema = TableSchema(tuple(TableColumn(name, "string") for name in names))
    draw = random.Random(columns)
    ended = 0
    for _ in range(800):
        text, form = draw.choice(list(FORMATS.items()))
        # A header that is no line of names is passed over by PostgreSQL, and refused here.
        body = draw_body(draw, "x\n" if text.endswith("HEADER") else "")
        # Not the same: a carriage return that is escaped at the end of a line, and a stream that
        # ends before the header that must match.
        if b"\\\r" in body or ("MATCH" in text and body.startswith(b"\\.")):
            continue
        wanted = theirs(wire, body, text)
        for size in (1, 1000):
            assert ours(schema, body, form, size) == wanted, (text, body, size)
        ended += isinstance(wanted, list) and b"\\." in body
    assert ended > 15
