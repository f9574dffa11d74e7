"""One connection to PostgreSQL: its answers, its copies, its errors."""

from __future__ import annotations

import asyncio
import struct
import sys
from pathlib import Path

import anyio
import pytest

from actors.connectors.sources.kinds import make_source
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.postgres_copy import CopyStream, LibpqCopy, RawCopy
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.postgres_server import PostgresServer


async def connect(postgres: PostgresServer, **more: str) -> PostgresConnection:
    parameters = {"host": str(postgres.folder), "port": str(postgres.port), "user": postgres.user}
    return await PostgresConnection.connect(parameters | {"dbname": "postgres"} | more)


async def test_other_work_goes_on_while_a_server_says_nothing() -> None:
    """The server is on this event loop, too: it could not answer one that waits in a call."""
    words = b"Mnobody gets in here\0\0"
    closing = b"E" + struct.pack("!I", 4 + len(words)) + words

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(closing)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(SourceUnreachable, match="nobody gets in"):
            await PostgresConnection.connect(
                {"host": "127.0.0.1", "port": str(port), "user": "u", "sslmode": "disable"}
            )


async def test_rows_nulls_and_refusals(postgres: PostgresServer) -> None:
    wire = await connect(postgres)
    try:
        rows = await wire.query("SELECT n, NULL, 'ü' || n FROM generate_series(1, 3) AS n")
        assert rows == [("1", None, "ü1"), ("2", None, "ü2"), ("3", None, "ü3")]
        with pytest.raises(ServerRefused, match="nowhere") as refused:
            await wire.query("SELECT * FROM nowhere")
        assert refused.value.sqlstate == "42P01"
        assert await wire.query("DO $$ BEGIN RAISE NOTICE 'heard by nobody'; END $$") == []
        assert wire.server_version >= 130_000
    finally:
        wire.close()
        wire.close()


async def all_of(copy: CopyStream) -> list[bytes]:
    found = []
    while not copy.ended:
        await copy.fill()
        frames = copy.frames()
        found += [
            frames.data[start:end].tobytes()
            for start, end in zip(frames.starts, frames.ends, strict=True)
        ]
        copy.take(len(frames))
    return found


async def test_a_copy_read_by_us_and_by_libpq_is_the_same(postgres: PostgresServer) -> None:
    sql = "COPY (SELECT n, repeat('x', n) FROM generate_series(1, 2000) AS n) TO STDOUT"
    wire = await connect(postgres)
    try:
        with anyio.fail_after(200):
            raw = await RawCopy.begin(wire._connection, sql, 1 << 20)
            one = await all_of(raw)
            raw.end()
            other = await all_of(await LibpqCopy.begin(wire._connection, sql, 1 << 20))
    finally:
        wire.close()
    assert one == other
    assert one[2] == b"3\txxx\n"
    assert len(one) == 2000


async def test_who_is_not_let_in_and_who_is_thrown_out(postgres: PostgresServer) -> None:
    with pytest.raises(SourceUnreachable, match="no_such_database"):
        await connect(postgres, dbname="no_such_database")
    wire, other = await connect(postgres), await connect(postgres)
    try:
        ((pid,),) = await wire.query("SELECT pg_backend_pid()")
        await other.query(f"SELECT pg_terminate_backend({pid}, 5000)")
        with pytest.raises(SourceUnreachable):
            await wire.query("SELECT 1")
    finally:
        wire.close()
        other.close()
    with pytest.raises(SourceUnreachable, match="closed"):
        await wire.query("SELECT 1")


def test_without_psycopg_a_source_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("psycopg", "actors.connectors.sources.postgres"):
        monkeypatch.setitem(sys.modules, name, None)
    around = ConnectorContext(SystemClock(), Settings(), tmp_path, id="u1")
    with pytest.raises(InvalidUsage, match=r"penstock-views\[postgres\]"):
        make_source(PostgresConfig(host="nowhere"), around)
