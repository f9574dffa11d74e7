"""Checks which secrets of the service a source may use.

Whoever creates a source chooses the server to which a password is sent. So a source may not name
any variable or file of the service, only those that were put there for sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.wal_config import WalConfig
from actors.errors import InvalidUsage
from actors.settings import Settings

_VARIABLES: Final = ("password_env", "token_env")
_FILES: Final = ("password_file", "passfile", "sslkey", "sslcert", "sslrootcert", "token_file")


def check_secrets(config: PostgresConfig | WalConfig, settings: Settings) -> None:
    """Raise `InvalidUsage` for a variable or a file that is not for sources."""
    prefix = settings.secret_env_prefix
    for name in _VARIABLES:
        variable = getattr(config, name, "")
        if variable and not variable.startswith(prefix):
            raise InvalidUsage(
                f"{name} {variable!r}: the name must begin with {prefix} (secret_env_prefix)"
            )
    for name in _FILES:
        path = getattr(config, name, "")
        # libpq takes ``system`` for the authorities that the system trusts.
        if path and path != "system":
            _check_file(name, path, settings.secret_dir)


def _check_file(name: str, path: str, allowed: str) -> None:
    if not allowed:
        raise InvalidUsage(
            f"{name} {path!r}: sources may use no files, as long as the setting secret_dir names "
            "no folder with theirs"
        )
    # Links resolved: one below the folder must not lead out of it.
    root = Path(allowed).resolve()
    if not Path(path).is_absolute() or root not in Path(path).resolve().parents:
        raise InvalidUsage(f"{name} {path!r}: must lie below {root} (secret_dir)")
