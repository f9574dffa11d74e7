"""Checks which of the service's secrets a source may use, and which hosts may receive them.

Theory of operation. Whoever creates a source chooses the server that receives the password. So a
source may only name variables and files that were set up for sources. Each secret can have a list
of the hosts that it is meant for: the file ``production`` has the list ``production.hosts``, the
variable ``PENSTOCK_SECRET_X`` has ``PENSTOCK_SECRET_X_HOSTS``. A secret with a list is sent only to
the listed hosts, whoever creates the source. A secret without a list may only be used by
administrators (`check_secrets` with `listed_only`).

Host names are compared as text, without resolving them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from actors.runtime.errors import AccessDenied, InvalidUsage
from actors.runtime.settings import Settings

VARIABLES: Final = ("password_env", "token_env")
"""Options that name an environment variable with a secret."""
SECRET_FILES: Final = ("password_file", "passfile", "sslkey", "token_file")
"""Options that name a file with a secret."""
PUBLIC_FILES: Final = ("sslcert", "sslrootcert")
"""Options that name a file that is not secret."""
HOSTS_BYTES_MAX: Final = 64 * 1024
_HOST: Final = r"\*|(?:\*\.)?[^\s,:*\[\]/]+|\[[0-9A-Fa-f:.%]+\]|/[^\s,]*"
_PATTERN: Final = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?")


class SecretTarget(NamedTuple):
    """A host that a source connects to: a name, an address, or the directory of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@runtime_checkable
class SecretUser(Protocol):
    """Configuration of a source that may use secrets."""

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """Return every host that the source may connect to."""
        ...


class SecretHosts(NamedTuple):
    """The list of hosts that may receive one secret.

    >>> hosts = parse_hosts("db.example:5432, *.inside  # ours", "f")
    >>> [hosts.allows(SecretTarget(*each)) for each in (("DB.example", 5432), ("db.example", 1))]
    [True, False]
    >>> [hosts.allows(SecretTarget(host, 1)) for host in ("a.b.inside", "inside", "x.inside.")]
    [True, False, False]
    """

    patterns: tuple[tuple[str, int | None], ...]
    """Pairs of (host pattern, port); a port of None matches every port."""

    def allows(self, target: SecretTarget) -> bool:
        """Return whether the secret may be sent to this host."""
        host = _folded(target.host)
        return any(
            port in (None, target.port)
            and (
                host == pattern or pattern == "*" or (
                    pattern.startswith("*.") and host.endswith(pattern[1:])
                    and host != pattern[1:]
                )
            )
            for pattern, port in self.patterns
        )  # fmt: skip


def parse_hosts(text: str, named: str) -> SecretHosts:
    """Parse a list of hosts, separated by commas or whitespace; comments start with ``#``.

    A host is ``name``, ``*.name``, an address, ``[IPv6]``, a socket directory or ``*``, optionally
    followed by ``:port``. Raises `InvalidUsage`, which names the list.
    """
    found: list[tuple[str, int | None]] = []
    for line in text.splitlines():
        for word in re.split(r"[\s,]+", line.partition("#")[0].strip()):
            if not word:
                continue
            pattern = _PATTERN.fullmatch(word)
            if pattern is None:
                raise InvalidUsage(
                    f"{named}: invalid host {word!r}: expected a form like db.example:5432, "
                    "*.example, [::1]:5432 or *"
                )
            host = _folded(pattern["host"]).removeprefix("[").removesuffix("]")
            found.append((host, int(pattern["port"]) if pattern["port"] else None))
    return SecretHosts(tuple(found))


def check_secrets(
    config: SecretUser,
    settings: Settings,
    environment: Mapping[str, str] | None = None,
    *,
    listed_only: bool = False,
) -> None:
    """Check the secrets that a configuration names. Reads the lists of hosts.

    Raises `InvalidUsage` for a variable or file that sources may not use, and `AccessDenied` for a
    host that may not receive a secret. With `listed_only`, a secret without a list raises
    `AccessDenied`, too.
    """
    prefix = settings.secret_env_prefix
    for name in VARIABLES:
        variable = getattr(config, name, "")
        if variable and not variable.startswith(prefix):
            raise InvalidUsage(
                f"invalid {name} {variable!r}: the name must start with {prefix} "
                "(secret_env_prefix)"
            )
    for name in (*SECRET_FILES, *PUBLIC_FILES):
        path = getattr(config, name, "")
        # For libpq, the value ``system`` means the system's trusted certificate authorities.
        if path and not (name == "sslrootcert" and path == "system"):
            _check_file(name, path, settings.secret_dir)
    given = os.environ if environment is None else environment
    for what, named, hosts in _secret_lists(config, given):
        _check_hosts(config, what, named, hosts, listed_only=listed_only)


def _secret_lists(
    config: SecretUser, environment: Mapping[str, str]
) -> Iterator[tuple[str, str, SecretHosts | None]]:
    """Yield each secret that a configuration names, the name of its list, and the list (None if it
    has no list). Raises `InvalidUsage` for a list that cannot be read."""
    for name in VARIABLES:
        variable = getattr(config, name, "")
        if variable:
            named = f"{variable}_HOSTS"
            # A variable that is set but empty is a list that allows no host.
            text = environment.get(named)
            yield f"{name} {variable!r}", named, None if text is None else parse_hosts(text, named)
    for name in SECRET_FILES:
        path = getattr(config, name, "")
        if path:
            # Links are resolved: the list belongs to the file with the secret, whatever path leads
            # to it.
            listed = Path(f"{Path(path).resolve()}.hosts")
            yield f"{name} {path!r}", str(listed), _read_hosts(listed)


def _folded(host: str) -> str:
    return host if host.startswith("/") else host.lower()  # paths differ by case


def _check_hosts(
    config: SecretUser, what: str, named: str, hosts: SecretHosts | None, *, listed_only: bool
) -> None:
    if hosts is None and not listed_only:
        return
    # Check every host: a driver tries one after another.
    for target in config.secret_targets():
        if hosts is None or not hosts.allows(target):
            who = (
                "a role that is not an administrator may send it" if hosts is None else "it may go"
            )
            raise AccessDenied(
                f"{what}: {who} only to hosts listed in {named}, and {target} is not listed: ask "
                "the administrator of the service to list it"
            )


def _read_hosts(path: Path) -> SecretHosts | None:
    try:
        with path.open("rb") as file:
            data = file.read(HOSTS_BYTES_MAX + 1)
        if len(data) > HOSTS_BYTES_MAX:
            raise InvalidUsage(f"{path} is too large: a list of hosts may have at most 64 KiB")
        return parse_hosts(data.decode(), str(path))
    except FileNotFoundError:
        # Only a missing file means that there is no list; any other error must not.
        return None
    except (OSError, UnicodeDecodeError) as error:
        # Fail closed: a list that cannot be read might not allow the host.
        raise InvalidUsage(f"cannot read the list of hosts {path}: {error}") from None


def _check_file(name: str, path: str, allowed: str) -> None:
    if not allowed:
        raise InvalidUsage(
            f"invalid {name} {path!r}: sources may not use files, because the setting secret_dir "
            "is empty"
        )
    # Links are resolved: a link below secret_dir must not lead out of it.
    root = Path(allowed).resolve()
    if not Path(path).is_absolute() or root not in Path(path).resolve().parents:
        raise InvalidUsage(
            f"invalid {name} {path!r}: expected an absolute path below {root} (secret_dir)"
        )
