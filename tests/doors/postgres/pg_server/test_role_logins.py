"""Logins at the door for PostgreSQL's clients: who must prove what, and what a refusal says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
import trustme
from pg_house import as_role, connected, dsn_of, pg_service  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.doors.postgres.pg_server.server import listener_security
from actors.model.pgwire.scram import make_verifier
from actors.model.protocol.role_messages import CreateRole
from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings
from actors.service import Service

PASSWORD = "it's 12 pencils"
QUOTED = PASSWORD.replace("'", "''")
BOSS = f"CREATE ROLE boss LOGIN PASSWORD '{QUOTED}'"


async def refusal(service: Service, user: str, password: str | None = None) -> str:
    """The error of a login, without the user's name."""
    with pytest.raises(psycopg.OperationalError) as failed:
        await as_role(service, user, password)
    return str(failed.value).replace(user, "USER").partition("FATAL")[2]


async def test_roles_prove_their_passwords_by_scram(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        async with await connected(service) as db:
            await db.execute(BOSS)
            # The session that made the first role goes on as that role.
            await db.execute("CREATE USER app PASSWORD 'x'")
        async with await as_role(service, "boss", PASSWORD) as db:
            found = await (await db.execute("SELECT current_user")).fetchone()
            assert found == ("boss",)
        plain = await asyncpg.connect(dsn_of(service, "app"), password="x")
        try:
            assert await plain.fetchval("SELECT 1") == 1
        finally:
            await plain.close()
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(dsn_of(service, "app"), password="y")


async def test_an_unknown_role_is_refused_as_a_wrong_password_is(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        async with await connected(service) as db:
            await db.execute(BOSS)
            await db.execute("CREATE ROLE group_of_readers PASSWORD 'x'")
            await db.execute("CREATE USER without_password")
        wrong = await refusal(service, "boss", "another")
        assert 'password authentication failed for user "USER"' in wrong
        for user in ("nobody", "group_of_readers", "without_password"):
            assert await refusal(service, user, "x") == wrong


async def test_a_service_that_starts_again_knows_its_roles(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute(BOSS)
        await db.execute("CREATE TABLE t (a int)")
        await db.execute("CREATE USER app PASSWORD 'x'")
        await db.execute("GRANT SELECT ON t TO app")
    async with pg_service(tmp_path) as service:
        await refusal(service, "tester")
        async with await as_role(service, "app", "x") as db:
            assert await (await db.execute("SELECT * FROM t")).fetchall() == []
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await db.execute("INSERT INTO t VALUES (1)")


async def test_passwords_change_and_may_be_sent_as_verifiers(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service:
        async with await connected(service) as db:
            await db.execute(BOSS)
            # As psql's \password sends it.
            text = make_verifier("pencil", bytes(range(16))).text()
            await db.execute(f"CREATE USER app PASSWORD '{text}'")
            with pytest.raises(psycopg.Error, match="invalid SCRAM verifier"):
                await db.execute("CREATE USER other PASSWORD 'SCRAM-SHA-256$1:x'")
            with pytest.raises(psycopg.Error, match="must not be empty"):
                await db.execute("CREATE USER other PASSWORD ''")
        async with await as_role(service, "app", "pencil") as db:
            await db.execute("ALTER ROLE app PASSWORD 'pen'")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await db.execute("ALTER ROLE boss PASSWORD 'pen'")
        await refusal(service, "app", "pencil")
        async with (
            await as_role(service, "app", "pen"),
            await as_role(service, "boss", PASSWORD) as db,
        ):
            await db.execute("ALTER ROLE app PASSWORD NULL")
        await refusal(service, "app", "pen")


async def test_roles_may_be_required_before_there_are_any(tmp_path: Path) -> None:
    async with pg_service(tmp_path, roles_required=True) as service:
        assert "password authentication failed" in await refusal(service, "tester", "x")
        # The administrators' own door stays as it is.
        async with await Client.connect(service.address) as client:
            verifier = make_verifier("pencil", bytes(16)).text()
            await client.submit(CreateRole(0, "boss", login=True, verifier=verifier))
        async with await as_role(service, "boss", "pencil") as db:
            await db.execute("CREATE TABLE t (a int)")
            found = await (await db.execute("SELECT current_user")).fetchone()
            assert found == ("boss",)


async def test_without_roles_that_log_in_the_door_is_open(tmp_path: Path) -> None:
    async with pg_service(tmp_path) as service, await connected(service) as db:
        await db.execute("CREATE ROLE readers")
        async with await connected(service) as other:
            await other.execute("CREATE TABLE t (a int)")
            await other.execute("GRANT read ON t TO readers")
        await db.execute(BOSS)
        await refusal(service, "tester")
        await db.execute("ALTER ROLE boss NOLOGIN")
        async with await connected(service) as other:
            found = await (await other.execute("SELECT current_user")).fetchone()
            assert found == ("tester",)


def secured(folder: Path) -> dict[str, Any]:
    """Settings of a service with TLS, and certificates of an app and of a stranger."""
    authority = trustme.CA()
    service = authority.issue_cert("127.0.0.1")
    app = authority.issue_cert("app.example", common_name="app")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, made in (("service", service), ("app", app)):
        made.private_key_pem.write_to_path(folder / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        (folder / f"{name}.key").chmod(0o600)
    return {
        "tls_certificate": str(folder / "service.pem"),
        "tls_key": str(folder / "service.key"),
        "tls_authority": str(folder / "ca.pem"),
    }


async def over_tls(
    service: Service, folder: Path, user: str, password: str = "", certificate: str = ""
) -> psycopg.AsyncConnection[Any]:
    """A connection inside TLS."""
    shown: dict[str, Any] = {}
    if certificate:
        shown = {
            "sslcert": str(folder / f"{certificate}.pem"),
            "sslkey": str(folder / f"{certificate}.key"),
        }
    return await psycopg.AsyncConnection.connect(
        dsn_of(service, user),
        password=password,
        sslmode="verify-full",
        sslrootcert=str(folder / "ca.pem"),
        autocommit=True,
        **shown,
    )


@pytest.mark.parametrize("cleartext", [False, True])
async def test_a_certificate_proves_the_role_of_its_name(tmp_path: Path, cleartext: bool) -> None:
    more: dict[str, Any] = {"pg_cleartext_passwords": cleartext, **secured(tmp_path)}
    async with pg_service(tmp_path, **more) as service:
        async with await over_tls(service, tmp_path, "tester") as db:
            await db.execute(BOSS)
            await db.execute("CREATE USER app")
        async with await over_tls(service, tmp_path, "app", certificate="app") as db:
            found = await (await db.execute("SELECT current_user")).fetchone()
            assert found == ("app",)
        # It proves no other role, which must show its password.
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await over_tls(service, tmp_path, "boss", "x", certificate="app")
        for certificate in ("", "app"):
            db = await over_tls(service, tmp_path, "boss", PASSWORD, certificate)
            await db.close()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            await over_tls(service, tmp_path, "app", "x")
        # Outside of TLS a password is never sent as it is.
        async with await as_role(service, "boss", PASSWORD) as db:
            await db.execute("SELECT 1")


def test_other_machines_need_tls_and_tokens_or_roles(tmp_path: Path) -> None:
    tls = secured(tmp_path)
    listen: dict[str, Any] = {"pg_listen": "0.0.0.0:0"}
    for settings in (
        Settings(**listen),
        Settings(**listen, **tls),
        Settings(**listen, roles_required=True),
    ):
        with pytest.raises(BadSettings, match="needs TLS and tokens"):
            listener_security(settings)
    found = listener_security(Settings(**listen, **tls, roles_required=True))
    assert found is not None
    assert found.has_tls


async def test_no_log_holds_a_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "opensesame"
    async with pg_service(tmp_path, audit_statements=True) as service:
        async with await connected(service) as db:
            await db.execute(f"CREATE ROLE boss LOGIN PASSWORD '{secret}'")
            for wrong in (
                f"ALTER ROLE nobody PASSWORD '{secret}'",
                f"ALTER ROLE boss PASSWORD '{secret}' nonsense",
                f"CREATE ROLE boss PASSWORD '{secret}'",
                f"CREATE SOURCE s USING nothing OPTIONS (password '{secret}')",
            ):
                with pytest.raises(psycopg.Error):
                    await db.execute(wrong)
            await db.execute("PREPARE p AS SELECT 'PASSWORD', 1")
            (token,) = (await (await db.execute("CREATE TOKEN FOR boss")).fetchall())[0][1:]
        async with await as_role(service, "boss", secret):
            pass
        await refusal(service, "boss", f"{secret}2")
    told = caplog.text + "".join(capfd.readouterr())
    for hidden in (secret, token, "SCRAM-SHA-256$"):
        assert hidden not in told
    audited = [r.getMessage() for r in caplog.records if r.name == "penstock.audit"]
    assert any("CREATE ROLE boss LOGIN PASSWORD ***" in line for line in audited)
    assert any('"kind": "Login", "objects": [], "outcome": "refused"' in line for line in audited)
    # Nor is a secret on disk.
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data
            assert token.encode() not in data


@pytest.mark.parametrize(
    "text",
    [
        "CREATE USER app",
        "CREATE ROLE app LOGIN PASSWORD NULL",
        "CREATE ROLE app; ALTER ROLE app LOGIN",
    ],
)
async def test_nobody_is_locked_out(tmp_path: Path, text: str) -> None:
    async with pg_service(tmp_path) as service:
        async with await as_role(service, "tester") as db:
            with pytest.raises(psycopg.errors.InvalidParameterValue, match="nobody could log in"):
                await db.execute(text.encode())
        async with await as_role(service, "tester") as db:
            await db.execute(BOSS)
            await db.execute("CREATE USER second")
            for lock in ("ALTER ROLE boss PASSWORD NULL", "DROP ROLE boss"):
                with pytest.raises(psycopg.errors.InvalidParameterValue, match="nobody could"):
                    await db.execute(lock.encode())
        async with await as_role(service, "boss", PASSWORD) as db:
            await db.execute("DROP ROLE second")
