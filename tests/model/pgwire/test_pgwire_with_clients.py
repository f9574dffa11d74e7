"""psycopg (libpq) and asyncpg against a server of a few lines: they are let in by SCRAM, send
parameters, and get rows and copies of every type."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pg_columns import EDGES, row_format, same, table  # type: ignore[import-not-found]

from actors.model.pgwire import messages as pg
from actors.model.pgwire.decoder import FrontendDecoder
from actors.model.pgwire.parameters import parse_parameters, spark_literal
from actors.model.pgwire.row_decoding import copy_decoder
from actors.model.pgwire.row_encoding import CopyEncoder, RowEncoder
from actors.model.pgwire.scram import MECHANISM, ScramExchange, make_verifier, parse_sasl_initial
from actors.model.pgwire.sqlstate import error_report
from actors.model.pgwire.type_map import pg_type
from actors.runtime.errors import AuthenticationFailed, PenstockError
from actors.testing.patience import PATIENCE_S

VERIFIER = make_verifier("pencil", bytes(16))
SCHEMA, BATCH = table(EDGES)
SCALARS = {kind: values for kind, values in EDGES.items() if "<" not in kind}


class ToyServer:
    """Answers each query with the table of all types, and keeps what it was sent."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.schema, self.batch = SCHEMA, BATCH
        self.parameters: list[str] = []
        self.copied: list[pa.RecordBatch] = []
        self.startups: list[pg.StartupPacket] = []
        self._oids: tuple[int, ...] = ()
        self._bind = pg.BindPortal("", "", (), (), ())
        self._copy: Any = None

    def run(self) -> None:
        """Serve one connection after the other until the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.socket.accept()
                with peer, contextlib.suppress(OSError):
                    self._serve(peer)

    def _serve(self, peer: socket.socket) -> None:
        decoder = FrontendDecoder(1_000_000)
        self._exchange: ScramExchange | None = None
        while data := peer.recv(65_536):
            try:
                again = True
                while again:
                    again = False
                    for message in decoder.feed(data):
                        if isinstance(message, pg.TerminateSession):
                            return
                        again |= isinstance(message, pg.EncryptionRequest)
                        peer.sendall(self._answer(message, decoder))
                    data = b""
            except PenstockError as error:
                peer.sendall(pg.encode_error(error_report(error, severity="FATAL")))
                return

    def _answer(self, message: pg.FrontendMessage, decoder: FrontendDecoder) -> bytes:
        match message:
            case pg.EncryptionRequest():
                decoder.decline_encryption()
                return pg.ENCRYPTION_DECLINED
            case pg.StartupPacket():
                self.startups.append(message)
                return pg.negotiate_protocol(message)[1] + pg.encode_sasl_request([MECHANISM])
            case pg.AuthenticationReply(body):
                return self._authenticate(body, decoder)
            case pg.SimpleQuery(text):
                if "FROM STDIN" in text:
                    return self._begin_copy(text)
                if "TO STDOUT" in text:
                    return self._copy_out(text)
                return self._description([0]) + self._rows([0]) + self._complete()
            case pg.ParseStatement(_, query, oids):
                self._oids = oids or ((23, 25) if "$" in query else ())
                return pg.PARSE_COMPLETE
            case pg.BindPortal():
                self._bind = message
                values = parse_parameters(message, self._oids)
                self.parameters += [
                    spark_literal(value, oid) for value, oid in zip(values, self._oids, strict=True)
                ]
                return pg.BIND_COMPLETE
            case pg.DescribePrepared():
                return pg.encode_parameter_description(self._oids) + self._description([0])
            case pg.DescribePortal():
                return self._description(self._bind.result_formats)
            case pg.ExecutePortal():
                count = pg.encode_command_complete(f"SELECT {self.batch.num_rows}")
                return self._rows(self._bind.result_formats) + count
            case pg.CopyInData(data):
                self.copied += self._copy.feed(data)
            case pg.CopyInDone():
                self.copied += self._copy.finish()
                return self._complete()
            case pg.SyncPipeline():
                return pg.encode_ready(b"I")
            case pg.CloseStatement():
                return pg.CLOSE_COMPLETE
        return b""

    def _authenticate(self, body: bytes, decoder: FrontendDecoder) -> bytes:
        if self._exchange is None:
            initial = parse_sasl_initial(body)
            if initial.mechanism != MECHANISM:
                raise AuthenticationFailed(initial.mechanism)
            self._exchange = ScramExchange([VERIFIER], bytes(18))
            return pg.encode_sasl_continue(self._exchange.first(initial.data))
        final = pg.encode_sasl_final(self._exchange.final(body))
        decoder.admit()
        settings = {
            "server_version": "16.0",
            "client_encoding": "UTF8",
            "DateStyle": "ISO, MDY",
            "TimeZone": "UTC",
            "integer_datetimes": "on",
            "standard_conforming_strings": "on",
        }
        statuses = [pg.encode_parameter_status(*item) for item in settings.items()]
        key = pg.encode_backend_key(7, bytes(pg.CANCEL_KEY_BYTES[min(self.startups[-1].minor, 2)]))
        ready = pg.encode_ready(b"I")
        return final + pg.AUTHENTICATION_OK + b"".join(statuses) + key + ready

    def _description(self, formats: Any) -> bytes:
        codes = pg.expand_formats(formats, self.batch.num_columns, "columns")
        return pg.encode_row_description(
            [
                pg.FieldDescription(field.name, kind, code)
                for field, code in zip(self.batch.schema, codes, strict=True)
                for kind in [pg_type(field.type)]
            ]
        )

    def _rows(self, formats: Any) -> bytes:
        codes = pg.expand_formats(formats, self.batch.num_columns, "columns")
        return bytes(RowEncoder(codes).encode(self.batch).data)

    def _complete(self) -> bytes:
        return pg.encode_command_complete(f"SELECT {self.batch.num_rows}") + pg.encode_ready(b"I")

    def _begin_copy(self, text: str) -> bytes:
        form = row_format("binary" if "binary" in text.lower() else "text")
        self._copy = copy_decoder(self.schema, form, batch_bytes=1000, row_bytes_max=100_000)
        return pg.encode_copy_in(binary="binary" in text.lower(), columns=self.batch.num_columns)

    def _copy_out(self, text: str) -> bytes:
        binary = "binary" in text.lower()
        encoder = CopyEncoder(self.batch.schema.names, row_format("binary" if binary else "text"))
        rows = bytes(encoder.encode(self.batch).data)
        head = pg.encode_copy_out(binary=binary, columns=self.batch.num_columns)
        return head + rows + encoder.finish() + pg.COPY_DONE + self._complete()


@pytest.fixture
def server() -> Iterator[ToyServer]:
    made = ToyServer()
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made
    finally:
        made.socket.shutdown(socket.SHUT_RDWR)
        made.socket.close()
        thread.join()


def connect(server: ToyServer, **more: Any) -> psycopg.Connection:
    given = {"host": "127.0.0.1", "port": server.port, "user": "alice", "password": "pencil"}
    return psycopg.connect(**(given | more), autocommit=True)


def expected(at: int) -> list[Any]:
    values: list[Any] = BATCH.columns[at].to_pylist()
    return values


@pytest.mark.parametrize("binary", [False, True])
def test_psycopg_reads_every_type(server: ToyServer, binary: bool) -> None:
    with connect(server) as wire:
        found = wire.execute("SELECT %s, %s", [-7, "it's"], binary=binary).fetchall()
        for at, array in enumerate(BATCH.columns):
            if binary or not pa.types.is_float32(array.type):
                assert same([row[at] for row in found], expected(at))
        simple = psycopg.ClientCursor(wire).execute("SELECT 1").fetchall()
        assert len(simple) == BATCH.num_rows
    assert server.parameters == ["(-7S)", "'it\\'s'"]


def test_psycopg_speaks_newer_versions(server: ToyServer) -> None:
    if psycopg.pq.version() < 180_000:
        return
    with connect(server, max_protocol_version="3.2") as wire:
        assert wire.execute("SELECT 1").rowcount == BATCH.num_rows
    assert server.startups[0].minor == 2


def test_a_wrong_password_is_told(server: ToyServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(server, password="pen")


@pytest.mark.parametrize("form", ["text", "binary"])
def test_psycopg_copies_every_type(server: ToyServer, form: str) -> None:
    kinds = [pg_type(field.type).oid for field in BATCH.schema]
    with connect(server) as wire:
        cursor = wire.cursor()
        with cursor.copy(f"COPY t TO STDOUT (FORMAT {form})") as copy:
            copy.set_types(kinds)
            rows = list(copy.rows())
        assert len(rows) == BATCH.num_rows
        with cursor.copy(f"COPY t FROM STDIN (FORMAT {form})") as copy:
            copy.set_types(kinds)
            for row in rows:
                copy.write_row(row)
    found = pa.Table.from_batches(server.copied)
    for at, array in enumerate(BATCH.columns):
        assert same([row[at] for row in rows], expected(at)) or pa.types.is_float32(array.type)
        assert same(found.column(at).to_pylist(), expected(at)), array.type


async def test_asyncpg_reads_and_copies_scalars(server: ToyServer) -> None:
    # It is no dependency of the tests' own.
    asyncpg = pytest.importorskip("asyncpg")
    # It would ask pg_catalog for what an array is.
    server.schema, server.batch = table(SCALARS)
    wire = await asyncpg.connect(
        host="127.0.0.1", port=server.port, user="alice", password="pencil", ssl=False
    )
    wanted = [array.to_pylist() for array in server.batch.columns]
    try:
        found = await wire.fetch("SELECT $1, $2", 7, "x")
        assert server.parameters == ["7", "'x'"]
        assert all(same([row[at] for row in found], each) for at, each in enumerate(wanted))
        data = io.BytesIO()
        await wire.copy_from_query("SELECT 1", output=data, format="binary")
        source = io.BytesIO(data.getvalue())
        await wire.copy_to_table("t", source=source, format="binary")
    finally:
        await wire.close(timeout=PATIENCE_S)
    copied = pa.Table.from_batches(server.copied)
    assert all(same(copied.column(at).to_pylist(), each) for at, each in enumerate(wanted))
