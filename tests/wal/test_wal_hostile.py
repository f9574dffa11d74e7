"""Hostile first bytes and silent sockets at an acceptor's port."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread
import psycopg
import pytest
import wal_nodes  # type: ignore[import-not-found]

from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_S
from tests.kit.hostile_peers import HostileCrowd

TOKEN = "opensesame"
NARROW = Settings(unproven_connections_max=8, connections_max=2)


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wal_nodes.Node:
    monkeypatch.setattr(wal_nodes, "SETTINGS", NARROW)
    made = wal_nodes.Node(tmp_path, 1, token=TOKEN)
    await made.up()
    yield made
    await made.down()


def connected(node: wal_nodes.Node) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(
        host="127.0.0.1",
        port=node.port,
        user="x",
        password=TOKEN,
        options=f"-c timeline_id={wal_nodes.TIMELINE} tenant_id={wal_nodes.TENANT}",
        autocommit=True,
    )


def status(node: wal_nodes.Node) -> list[tuple[object, ...]]:
    with connected(node) as connection:
        return list(connection.execute(b"TIMELINE_STATUS").fetchall())


async def test_an_acceptor_answers_beside_a_crowd(node: wal_nodes.Node) -> None:
    crowd = HostileCrowd(f"127.0.0.1:{node.port}", Random(1), kept_max=60)
    with anyio.fail_after(PATIENCE_S):
        for _ in range(4):
            await crowd.attack(50)
            assert await asyncio.to_thread(status, node) == []
        await crowd.aclose()


async def test_silent_sockets_stop_no_acceptor(node: wal_nodes.Node) -> None:
    silent = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(30)]
    with anyio.fail_after(PATIENCE_S):
        assert await asyncio.to_thread(status, node) == []
        for sock in silent[:20]:
            sock.settimeout(PATIENCE_S)
            assert await anyio.to_thread.run_sync(sock.recv, 1) == b""
    for sock in silent:
        sock.close()


async def test_who_is_let_in_beyond_the_limit_is_told(node: wal_nodes.Node) -> None:
    opened = [await asyncio.to_thread(connected, node) for _ in range(2)]
    with pytest.raises(psycopg.OperationalError, match="connections_max"):
        await asyncio.to_thread(connected, node)
    for connection in opened:
        connection.close()


async def test_a_message_before_the_password_is_small(node: wal_nodes.Node) -> None:
    """CopyData of a megabyte, which a proposer may send later."""

    def speak() -> bytes:
        with socket.create_connection(("127.0.0.1", node.port), timeout=PATIENCE_S) as sock:
            body = (196608).to_bytes(4) + b"user\0x\0\0"
            sock.sendall((len(body) + 4).to_bytes(4) + body)
            assert sock.recv(9)[:1] == b"R"
            sock.sendall(b"d" + (1 << 20).to_bytes(4))
            return sock.recv(1000)

    assert b"limit 16384" in await anyio.to_thread.run_sync(speak)
