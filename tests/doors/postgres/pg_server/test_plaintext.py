"""Where TLS is set PostgreSQL's door takes nothing in the clear; without it no token travels so."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pytest
from pg_house import pg_service  # type: ignore[import-not-found]
from test_role_logins import secured  # type: ignore[import-not-found]

from actors.service import Service
from actors.testing.patience import PATIENCE_S

OLD, NEW = "o" * 32, "n" * 32
U32 = struct.Struct("!I")
SSL_REQUEST = U32.pack(8) + U32.pack(80877103)


def startup(user: bytes = b"anyone") -> bytes:
    body = U32.pack(196608) + b"user\0" + user + b"\0database\0x\0\0"
    return U32.pack(len(body) + 4) + body


def with_tokens(folder: Path) -> dict[str, Any]:
    (folder / "tokens").write_text(f"{NEW}\n{OLD}\n")
    (folder / "tokens").chmod(0o600)
    return {"token_file": str(folder / "tokens")}


async def said(service: Service, *data: bytes) -> bytes:
    """What the door answers, each time up to its pause, and at last up to its end."""
    host, _, port = service.pg_address.rpartition(":")

    def speak() -> bytes:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
            for part in data[:-1]:
                sock.sendall(part)
                sock.recv(1000)
            sock.sendall(data[-1])
            return sock.recv(1000)

    return await anyio.to_thread.run_sync(speak)


def dsn(service: Service, user: str = "tester", more: str = "") -> str:
    return f"postgresql://{user}@{service.pg_address}/x?{more}"


async def asked(text: str, **given: Any) -> Any:
    async with await psycopg.AsyncConnection.connect(text, autocommit=True, **given) as db:
        return await (await db.execute("SELECT current_user")).fetchone()


async def test_where_tls_is_set_nobody_starts_in_the_clear(tmp_path: Path) -> None:
    async with pg_service(tmp_path, **secured(tmp_path), **with_tokens(tmp_path)) as service:
        for user in (b"anyone", b"boss"):
            told = await said(service, startup(user))
            assert told.startswith(b"E")
            assert b"SFATAL\0VFATAL\0C28000\0" in told
            assert b"sslmode=require" in told
        # A request for GSS is declined, and opens no way around TLS.
        told = await said(service, U32.pack(8) + U32.pack(80877104), startup())
        assert b"C28000\0" in told
        with pytest.raises(psycopg.OperationalError, match="not encrypted"):
            await asked(dsn(service, more="sslmode=disable"), password=NEW)
        found = await asked(dsn(service, more="sslmode=require"), password=NEW)
        assert found == ("tester",)


async def test_where_tls_is_set_nobody_cancels_in_the_clear(tmp_path: Path) -> None:
    async with (
        pg_service(tmp_path, **secured(tmp_path)) as service,
        await psycopg.AsyncConnection.connect(
            dsn(service, more="sslmode=require"), autocommit=True
        ) as db,
    ):
        number = db.info.backend_pid
        told = await said(service, U32.pack(16) + U32.pack(80877102) + U32.pack(number) + bytes(4))
        assert b"C28000\0" in told
        assert await (await db.execute("SELECT 1")).fetchone() == (1,)


async def test_bytes_stuffed_before_the_handshake_are_refused(tmp_path: Path) -> None:
    async with pg_service(tmp_path, **secured(tmp_path)) as service:
        told = await said(service, SSL_REQUEST + startup())
        assert b"arrived after a request for encryption" in told


async def test_this_machine_may_stay_in_the_clear_by_a_setting(tmp_path: Path) -> None:
    settings = {**secured(tmp_path), **with_tokens(tmp_path), "pg_plaintext_on_loopback": True}
    async with pg_service(tmp_path, **settings) as service:
        for mode in ("disable", "require"):
            found = await asked(dsn(service, more=f"sslmode={mode}"), password=OLD)
            assert found == ("tester",)


async def test_without_tls_a_token_is_proved_and_not_sent(tmp_path: Path) -> None:
    async with pg_service(tmp_path, **with_tokens(tmp_path)) as service:
        told = await said(service, startup())
        assert told.startswith(b"R" + U32.pack(23) + U32.pack(10) + b"SCRAM-SHA-256\0"), told
        # Each of the tokens, so that they can be changed one after the other.
        for token in (NEW, OLD):
            assert await asked(dsn(service), password=token) == ("tester",)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await asked(dsn(service), password="w" * 32)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
async def test_a_unix_socket_is_its_owners_alone_and_needs_no_tls(tmp_path: Path) -> None:
    sockets = [tmp_path / "pg", tmp_path / "api"]
    given = {"pg_listen": f"unix:{tmp_path}/pg", "listen": f"unix:{tmp_path}/api"}
    async with pg_service(tmp_path, **given, **secured(tmp_path)):
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600, 0o600]

        def speak() -> bytes:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(sockets[0]))
                sock.sendall(startup())
                return sock.recv(9)

        assert await anyio.to_thread.run_sync(speak) == b"R" + U32.pack(8) + U32.pack(0)
    assert not any(path.exists() for path in sockets)
