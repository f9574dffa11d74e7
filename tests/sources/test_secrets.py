"""A source uses those secrets of the service that are for sources, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.connectors.sources.kinds import check_secrets
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.errors import InvalidUsage
from actors.settings import Settings


def config(**more: Any) -> PostgresConfig:
    return PostgresConfig(host="db", **more)


def test_only_variables_with_the_prefix() -> None:
    check_secrets(config(), Settings())
    check_secrets(config(password_env="PENSTOCK_SECRET_DB"), Settings())
    check_secrets(config(password_env="DB_PASSWORD"), Settings(secret_env_prefix="DB_"))
    with pytest.raises(InvalidUsage, match="must begin with PENSTOCK_SECRET_"):
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
        with pytest.raises(InvalidUsage, match=r"must lie below .*secret_dir"):
            check_secrets(config(**{name: path}), settings)
    with pytest.raises(InvalidUsage, match="secret_dir names no folder"):
        check_secrets(config(**{name: str(secrets / "password")}), Settings())
