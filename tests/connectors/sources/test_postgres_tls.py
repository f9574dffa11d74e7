"""The PostgreSQL source under TLS, with a password: libpq reads what is encrypted."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from postgres_house import House, house  # type: ignore[import-not-found]
from test_postgres_changes import (  # type: ignore[import-not-found]
    EXPORTS,
    TABLES,
    agree,
    change,
    finish,
)

from actors.connectors.sources.postgres_copy import LibpqCopy
from actors.connectors.sources.source import SourceIdle, SourceRows, SourceUnreachable
from actors.testing.postgres_server import postgres_server

PASSWORD = "it's \\secret"


@pytest_asyncio.fixture
async def tls(tmp_path: Path) -> AsyncIterator[tuple[House, dict[str, Any]]]:
    """A database of a server that lets others in by TLS and password alone, and the options."""
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    root = tmp_path / "root.pem"
    authority.cert_pem.write_to_path(root)
    with postgres_server(wal_level="logical", fsync="off") as server:
        key = server.put("key.pem", made.private_key_pem.bytes())
        chain = server.put("chain.pem", made.cert_chain_pems[0].bytes())
        access = server.put(
            "access", b"local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n"
        )
        server.stop()
        server.start(
            ssl="on", ssl_cert_file=str(chain), ssl_key_file=str(key), hba_file=str(access)
        )
        async with house(server, "secret") as db:
            escaped = PASSWORD.replace("'", "''")
            await db.run(f"CREATE ROLE remote SUPERUSER LOGIN PASSWORD '{escaped}'")
            options = {
                "host": "localhost",
                "user": "remote",
                "sslmode": "verify-full",
                "sslrootcert": str(root),
            }
            yield db, options


async def test_contents_and_changes_by_tls(
    tls: tuple[House, dict[str, Any]], tmp_path: Path
) -> None:
    db, options = tls
    draw = random.Random(5)
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    options["password_file"] = str(file)
    await db.run(TABLES)
    await db.run(
        "INSERT INTO plain SELECT i, 'v', i, repeat('x', 600) FROM generate_series(1, 9000) i"
    )
    source, driver = await db.opened(EXPORTS, **options)
    assert isinstance(await driver.step(source), SourceRows)
    assert source._snapshot is not None
    assert isinstance(source._snapshot._copy, LibpqCopy)
    while driver.position is None:
        await driver.step(source)
    for _ in range(3):
        for _ in range(8):
            await change(db, draw)
        for _ in range(draw.randrange(8)):
            if isinstance(await driver.step(source), SourceIdle):
                break
        await source.close()
        source = db.source(**options)
        await driver.open(source)
    await db.run("INSERT INTO whole VALUES (1, 'a', 1, repeat('y', 6000000))")
    await finish(db, driver, source)
    await agree(db, driver)
    await db.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'remote'")
    with pytest.raises(SourceUnreachable, match="PostgreSQL"):
        while True:
            await source.next()


async def test_what_is_wrong_with_a_connection(
    tls: tuple[House, dict[str, Any]], monkeypatch: Any
) -> None:
    db, options = tls
    monkeypatch.setenv("DB_PASSWORD", "wrong")
    refused: list[tuple[dict[str, Any], str, str]] = [
        (
            {"password_env": "DB_PASSWORD"},
            "password authentication failed",
            "check the options user",
        ),
        ({}, "no password supplied", "set password_env"),
        ({"sslmode": "disable", "sslrootcert": ""}, "no pg_hba.conf entry", "allow this host"),
        ({"port": 1}, "refused", "check host and port"),
    ]
    for more, words, hint in refused:
        with pytest.raises(SourceUnreachable, match=words) as caught:
            await db.source(**{**options, **more}).describe(None)
        assert hint in caught.value.hint
        assert "wrong" not in str(caught.value)
