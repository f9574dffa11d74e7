"""A source uses those secrets of the service that are for sources, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.connectors.sources.kinds import check_new, decode
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.source_secrets import (
    HOSTS_BYTES_MAX,
    SecretTarget,
    check_secrets,
    parse_hosts,
)
from actors.runtime.errors import AccessDenied, InvalidUsage
from actors.runtime.settings import Settings


def config(**more: Any) -> PostgresConfig:
    return PostgresConfig(host="db", **more)


def test_only_variables_with_the_prefix() -> None:
    check_secrets(config(), Settings())
    check_secrets(config(password_env="PENSTOCK_SECRET_DB"), Settings())
    check_secrets(config(password_env="DB_PASSWORD"), Settings(secret_env_prefix="DB_"))
    with pytest.raises(InvalidUsage, match="must start with PENSTOCK_SECRET_"):
        check_secrets(config(password_env="AWS_SECRET_ACCESS_KEY"), Settings())


@pytest.mark.parametrize("name", ["password_file", "passfile", "sslkey", "sslcert", "sslrootcert"])
def test_only_files_below_the_folder(name: str, tmp_path: Path) -> None:
    secrets, other = tmp_path / "secrets", tmp_path / "other"
    secrets.mkdir()
    other.write_text("not for sources")
    (secrets / "link").symlink_to(other)
    settings = Settings(secret_dir=str(secrets))
    check_secrets(config(**{name: str(secrets / "password")}), settings)
    for path in (str(other), str(secrets / "link"), str(secrets / ".." / "other"), "password"):
        with pytest.raises(InvalidUsage, match=r"expected an absolute path below .*secret_dir"):
            check_secrets(config(**{name: path}), settings)
    with pytest.raises(InvalidUsage, match="secret_dir is empty"):
        check_secrets(config(**{name: str(secrets / "password")}), Settings())


# -- Hosts that a secret may go to -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "host", "port", "allowed"),
    [
        ("db", "db", 1, True),
        ("DB.Example", "db.example", 1, True),
        ("db:5432", "db", 5432, True),
        ("db:5432", "db", 5433, False),
        ("db", "db2", 1, False),
        ("db", "db.evil", 1, False),
        ("db", "db.", 1, False),
        ("127.0.0.1", "127.1", 1, False),
        ("*.inside", "db.inside", 1, True),
        ("*.inside:7", "a.b.inside", 7, True),
        ("*.inside", ".inside", 1, False),
        ("*.inside", "inside", 1, False),
        ("*.inside", "xinside", 1, False),
        ("[::1]:5432", "::1", 5432, True),
        ("[::1]", "::2", 1, False),
        ("/run/db", "/run/db", 1, True),
        ("/run/db", "/run/DB", 1, False),
        ("*", "anything", 1, True),
        ("# db\n\n other , db:1 # ours", "db", 1, True),
        ("# db", "db", 1, False),
        ("", "db", 1, False),
        ("db", "", 1, False),
    ],
)
def test_hosts_are_compared_as_they_are_given(
    listed: str, host: str, port: int, allowed: bool
) -> None:
    assert parse_hosts(listed, "f").allows(SecretTarget(host, port)) is allowed


@pytest.mark.parametrize(
    "wrong", ["db:x", "a.*", "*.*.x", "**", "db:1:2", "[::1", "http://db", "d*"]
)
def test_a_list_that_is_not_understood_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidUsage, match=r"production\.hosts: invalid host"):
        parse_hosts(f"good\n{wrong}", "production.hosts")


SECRETS = ["password_env", "password_file", "passfile", "sslkey"]


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_goes_to_the_hosts_beside_it(name: str, tmp_path: Path) -> None:
    settings = Settings(secret_dir=str(tmp_path))
    (tmp_path / "production").write_text("hush")
    (tmp_path / "alias").symlink_to("production")
    environment: dict[str, str] = {}
    value = "PENSTOCK_SECRET_DB" if name == "password_env" else str(tmp_path / "production")

    def listed(text: str) -> None:
        environment["PENSTOCK_SECRET_DB_HOSTS"] = text
        (tmp_path / "production.hosts").write_text(text)

    def check(host: str, *, listed_only: bool, value: str = value) -> None:
        options: dict[str, Any] = {name: value}
        found = PostgresConfig(host=host, **options)
        check_secrets(found, settings, environment, listed_only=listed_only)

    # Without a list an administrator alone may name it.
    check("db", listed_only=False)
    with pytest.raises(AccessDenied, match=r"(_|\.)(HOSTS|hosts), and db:5432 is not listed"):
        check("db", listed_only=True)
    listed("db, standby:5432")
    for only in (False, True):
        check("db", listed_only=only)
        check("db,standby", listed_only=only)
        # Every host that libpq would try counts.
        for host in ("evil", "db,evil", "evil,db", "db,", "", "db, standby", "/db"):
            with pytest.raises(AccessDenied, match="is not listed"):
                check(host, listed_only=only)
    if name != "password_env":
        with pytest.raises(AccessDenied, match="evil:5432 is not listed"):
            check("evil", listed_only=False, value=str(tmp_path / "alias"))
    listed("db:")
    with pytest.raises(InvalidUsage, match="invalid host"):
        check("db", listed_only=False)


def test_a_list_that_cannot_be_read_allows_nothing(tmp_path: Path) -> None:
    settings = Settings(secret_dir=str(tmp_path))
    found = config(password_file=str(tmp_path / "production"))
    (tmp_path / "production.hosts").mkdir()
    with pytest.raises(InvalidUsage, match="cannot read"):
        check_secrets(found, settings)
    (tmp_path / "production.hosts").rmdir()
    (tmp_path / "production.hosts").write_text("db\n" * HOSTS_BYTES_MAX)
    with pytest.raises(InvalidUsage, match="at most 64 KiB"):
        check_secrets(found, settings)


def test_every_acceptor_of_a_wal_counts(tmp_path: Path) -> None:
    settings = Settings(secret_dir=str(tmp_path))
    text = """{"type": "wal", "acceptors": "a:1,b:2", "tenant": "", "timeline": "", "tables": {},
    "token_env": "PENSTOCK_SECRET_W"}"""
    for listed, allowed in (("a,b", True), ("a:1,b:2", True), ("a", False), ("a,b:1", False)):
        environment = {"PENSTOCK_SECRET_W_HOSTS": listed}
        found: Any = decode(text)
        if allowed:
            check_secrets(found, settings, environment)
            continue
        with pytest.raises(AccessDenied, match="b:2 is not listed"):
            check_secrets(found, settings, environment)


def test_sources_without_secrets_are_everybodys() -> None:
    for text in ('{"type": "postgres", "host": "any"}', '{"type": "counter"}'):
        check_new(decode(text), Settings())
    with pytest.raises(AccessDenied, match="not an administrator"):
        check_new(config(password_env="PENSTOCK_SECRET_DB"), Settings())


# -- What a server learns --------------------------------------------------------------------------


@pytest.mark.parametrize("sslmode", ["disable", "allow", "prefer", "require"])
@pytest.mark.parametrize("name", ["password_env", "passfile"])
def test_a_server_that_is_not_verified_learns_no_password(
    name: str, sslmode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET_DB", "hush")
    found = config(sslmode=sslmode, **{name: "PENSTOCK_SECRET_DB"})
    assert found.connection(replication=False, libpq_version=160_000)["require_auth"] == (
        "!password,!md5"
    )
    with pytest.raises(InvalidUsage, match="libpq 15 cannot protect the password"):
        found.connection(replication=False, libpq_version=150_009)
    weak = found.connection(replication=False, libpq_version=150_009, weak_passwords=True)
    assert "require_auth" not in weak


@pytest.mark.parametrize("sslmode", ["verify-ca", "verify-full"])
def test_a_verified_server_may_ask_as_it_likes(
    sslmode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET_DB", "hush")
    found = config(sslmode=sslmode, password_env="PENSTOCK_SECRET_DB")
    assert "require_auth" not in found.connection(replication=False, libpq_version=150_000)


def test_the_services_own_password_is_never_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("psycopg.pq")
    monkeypatch.setenv("PGPASSWORD", "canary")
    monkeypatch.setenv("PGHOSTADDR", "192.0.2.1")
    parameters = config().connection(replication=False, libpq_version=pq.version())
    text = " ".join(f"{name}='{value}'" for name, value in parameters.items()).encode()
    # Defaults of the environment fill in what a connection's text does not name.
    named = {each.keyword for each in pq.Conninfo.parse(text) if each.val is not None}
    assert {b"password", b"passfile", b"hostaddr", b"sslcert"} <= named
