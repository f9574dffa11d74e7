"""Hostile first bytes, silent sockets and large bodies at the listeners of frames and pages, and at
PostgreSQL's door: right clients are answered beside them, and nothing of them stays."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import psycopg
import pytest

from actors.doors.client.client import Client
from actors.model.pgwire.scram import make_verifier
from actors.model.protocol.role_messages import CreateRole
from actors.replica.cluster import connect
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import TransportListener, dial
from actors.runtime.transport.handshake import OPENING, HandshakeOpening
from actors.runtime.transport.http_pages import HttpPages, liveness_page
from actors.service import Service
from actors.testing.engine import in_memory_engine
from actors.testing.patience import PATIENCE_S
from tests.kit.hostile_peers import HostileCrowd

PEERS, LOTS = 200, 4
TOKEN = "t" * 32
MAGIC = b"TESTPROT"
NARROW: dict[str, Any] = {"unproven_connections_max": 8, "http_connections_max": 8}
"""Fewer places than a crowd has silent sockets."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


async def attacked(
    address: str, answered: Callable[[], Awaitable[None]], peers: int = PEERS, seed: int = 1
) -> None:
    """A crowd at a listener, beside which a right client is answered again and again."""
    crowd = HostileCrowd(address, Random(seed), kept_max=60)
    with anyio.fail_after(PATIENCE_S):
        try:
            for _ in range(LOTS):
                await crowd.attack(peers // LOTS)
                await answered()
        finally:
            await crowd.aclose()


def a_token(folder: Path) -> str:
    path = folder / "tokens"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return str(path)


# -- frames ----------------------------------------------------------------------------------------


@asynccontextmanager
async def frames(settings: Settings) -> AsyncIterator[TransportListener]:
    async def echo(connection: Any) -> None:
        while True:
            await connection.send(await connection.receive())

    listener = await TransportListener.bind("127.0.0.1:0", Ping, Ping, settings, MAGIC)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo)
        yield listener
        await listener.aclose()


async def test_a_listener_of_frames_answers_beside_a_crowd() -> None:
    settings = Settings(**NARROW, connections_max=2)
    async with frames(settings) as listener:

        async def answered() -> None:
            connection = await dial(listener.address, Ping, Ping, settings, MAGIC)
            await connection.send(Ping(1))
            assert await connection.receive() == Ping(1)
            # What was let in may send more than before.
            large = Ping(2, bytes(1 << 20))
            await connection.send(large)
            assert await connection.receive() == large
            await connection.aclose()

        await attacked(str(listener.address), answered)
        with anyio.fail_after(PATIENCE_S):
            while listener.connections:
                await anyio.sleep(0.01)


async def test_a_first_frame_is_small() -> None:
    settings = Settings(unproven_bytes_max=8 * 1024)
    async with frames(settings) as listener:
        for size, fits in ((7 * 1024, True), (9 * 1024, False), (1 << 30, False)):
            with socket.create_connection(("127.0.0.1", listener.port)) as sock:
                sock.sendall(HandshakeOpening(MAGIC).encode() + b"\0\0")
                sock.sendall(struct.pack(">I", size))
                body = msgspec.msgpack.encode(Ping(1, bytes(size)))
                data = body if fits else bytes(100)
                if fits:
                    data = msgspec.msgpack.encode(Ping(1, bytes(size - len(body) + size)))
                    assert len(data) == size
                sock.sendall(data)
                told = await anyio.to_thread.run_sync(_all_of, sock, len(data) if fits else 0)
                opening = OPENING.size + 2
                assert (len(told) > opening) == fits, (size, told[:50])


def _all_of(sock: socket.socket, wanted: int) -> bytes:
    """What comes until the end, or until so many bytes and the opening have come."""
    sock.settimeout(PATIENCE_S)
    told = b""
    while not wanted or len(told) < wanted:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            break
        if not data:
            break
        told += data
    return told


# -- pages -----------------------------------------------------------------------------------------


async def test_pages_are_answered_beside_a_crowd() -> None:
    pages = HttpPages({"/healthz": liveness_page()}, Settings(**NARROW))
    async with pages.serve("127.0.0.1:0", "metrics_listen") as url:
        address = url.removeprefix("http://")
        host, _, port = address.rpartition(":")

        async def answered() -> None:
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")

        await attacked(address, answered)


# -- a whole service -------------------------------------------------------------------------------


@asynccontextmanager
async def service(folder: Path, **fields: Any) -> AsyncIterator[Service]:
    """A service with one role, tokens, and few places before login."""
    settings = Settings(
        state_dir=str(folder / "state"),
        listen="127.0.0.1:0",
        pg_listen="127.0.0.1:0",
        cluster_listen="127.0.0.1:0",
        token_file=a_token(folder),
        cluster_token_file=a_token(folder),
        **NARROW,
        **fields,
    )
    async with Service(settings, engine=in_memory_engine()) as made:
        async with await Client.connect(made.address, settings=settings) as client:
            verifier = make_verifier("pencil", bytes(16)).text()
            await client.submit(CreateRole(0, "boss", login=True, verifier=verifier))
        yield made


async def log_in(service: Service) -> None:
    async with await psycopg.AsyncConnection.connect(
        f"postgresql://boss@{service.pg_address}/x", password="pencil"
    ) as db:
        assert await (await db.execute("SELECT 1")).fetchone() == (1,)


async def test_each_door_of_a_service_answers_beside_a_crowd(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(tmp_path, pg_connections_max=2, connections_max=2) as made:

        async def as_client() -> None:
            async with await Client.connect(made.address, settings=made.settings) as client:
                assert (await client.status()).objects == ()

        async def as_controller() -> None:
            controller = await connect(made.cluster_address, made.settings)
            await controller.close()

        async def as_pg() -> None:
            await log_in(made)

        assert made.cluster_address
        for address, answered in (
            (made.pg_address, as_pg),
            (made.address, as_client),
            (made.cluster_address, as_controller),
        ):
            await attacked(address, answered)
        await as_pg()
    assert "fault of this program" not in caplog.text
    assert "internal error" not in caplog.text


async def test_silent_sockets_keep_no_login_out(tmp_path: Path) -> None:
    async with service(tmp_path, pg_connections_max=1) as made:
        host, _, port = made.pg_address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(30)]
        with anyio.fail_after(PATIENCE_S):
            for _ in range(3):
                await log_in(made)
            # Those that are there last are the ones that are left.
            closed = 0
            for sock in silent[:20]:
                sock.settimeout(PATIENCE_S)
                closed += await anyio.to_thread.run_sync(sock.recv, 1) == b""
            assert closed == 20
        for sock in silent:
            sock.close()


async def test_clients_that_are_let_in_have_a_limit_of_their_own(tmp_path: Path) -> None:
    async with service(tmp_path, pg_connections_max=1) as made:
        dsn = f"postgresql://boss@{made.pg_address}/x"
        first = await psycopg.AsyncConnection.connect(dsn, password="pencil")
        with pytest.raises(psycopg.OperationalError, match="pg_connections_max"):
            await psycopg.AsyncConnection.connect(dsn, password="pencil")
        # A wrong password is not told that the service is full.
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await psycopg.AsyncConnection.connect(dsn, password="pen")
        await first.close()
