"""COPY beside a real PostgreSQL: it reads what we write, and writes the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from pg_columns import EDGES, copy_bodies, same, table  # type: ignore[import-not-found]

from actors.pgwire.copy_options import row_format
from actors.pgwire.row_decoding import copy_decoder
from actors.pgwire.row_encoding import CopyEncoder
from actors.plan.schema import TableColumn, TableSchema
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
