"""Which secrets of the service a source may use, and to which hosts they may go.

Theory of operation. Whoever creates a source chooses the server that a password is shown to. So a
source names no variable or file of the service but those that were put there for sources; and
beside a secret stands the list of the hosts that it is for: for the file ``production`` the file
``production.hosts``, for the variable ``PENSTOCK_SECRET_X`` the variable
``PENSTOCK_SECRET_X_HOSTS``. A secret with a list goes to these hosts alone, whoever names it. One
without a list is named by administrators alone (`check_secret_hosts` with `listed_only`).

Names are compared as they are given: nothing is resolved.
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
"""Options that name a variable with a secret."""
SECRET_FILES: Final = ("password_file", "passfile", "sslkey", "token_file")
"""Options that name a file with a secret."""
PUBLIC_FILES: Final = ("sslcert", "sslrootcert")
"""Options that name a file without one."""
HOSTS_BYTES_MAX: Final = 64 * 1024
_HOST: Final = r"\*|(?:\*\.)?[^\s,:*\[\]/]+|\[[0-9A-Fa-f:.%]+\]|/[^\s,]*"
_PATTERN: Final = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?")


class SecretTarget(NamedTuple):
    """A host that a source connects to: a name, an address, or the folder of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@runtime_checkable
class SecretUser(Protocol):
    """The configuration of a source that may use secrets."""

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """Return all hosts that it may connect to."""
        ...


class SecretHosts(NamedTuple):
    """The list of one secret.

    >>> hosts = parse_hosts("db.example:5432, *.inside  # ours", "f")
    >>> [hosts.allows(SecretTarget(*each)) for each in (("DB.example", 5432), ("db.example", 1))]
    [True, False]
    >>> [hosts.allows(SecretTarget(host, 1)) for host in ("a.b.inside", "inside", "x.inside.")]
    [True, False, False]
    """

    patterns: tuple[tuple[str, int | None], ...]

    def allows(self, target: SecretTarget) -> bool:
        """Return whether the secret may go to a host."""
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
    """Return the list of a text: hosts (``name``, ``*.name``, an address, ``[IPv6]``, a folder, or
    ``*``), each perhaps with ``:port``, between commas or blanks; comments begin with ``#``. Raises
    `InvalidUsage`, naming the list."""
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
    """Raise `InvalidUsage` for a variable or a file that is not for sources, and `AccessDenied` for
    a host that is not for a secret. `listed_only`: also for a secret without a list. Reads the
    lists."""
    prefix = settings.secret_env_prefix
    for name in VARIABLES:
        variable = getattr(config, name, "")
        if variable and not variable.startswith(prefix):
            raise InvalidUsage(
                f"{name} {variable!r}: the name must begin with {prefix} (secret_env_prefix)"
            )
    for name in (*SECRET_FILES, *PUBLIC_FILES):
        path = getattr(config, name, "")
        # libpq takes ``system`` for the authorities that the system trusts.
        if path and not (name == "sslrootcert" and path == "system"):
            _check_file(name, path, settings.secret_dir)
    given = os.environ if environment is None else environment
    for what, named, hosts in _secret_lists(config, given):
        _check_hosts(config, what, named, hosts, listed_only=listed_only)


def _secret_lists(
    config: SecretUser, environment: Mapping[str, str]
) -> Iterator[tuple[str, str, SecretHosts | None]]:
    """Yield each secret that a configuration names, the name of its list, and the list; None:
    there is none. Raises `InvalidUsage` for one that cannot be read."""
    for name in VARIABLES:
        variable = getattr(config, name, "")
        if variable:
            named = f"{variable}_HOSTS"
            # An empty list is a list: of no hosts.
            text = environment.get(named)
            yield f"{name} {variable!r}", named, None if text is None else parse_hosts(text, named)
    for name in SECRET_FILES:
        path = getattr(config, name, "")
        if path:
            # Links resolved: a list belongs to the file that holds the secret, by whatever name.
            listed = Path(f"{Path(path).resolve()}.hosts")
            yield f"{name} {path!r}", str(listed), _read_hosts(listed)


def _folded(host: str) -> str:
    return host if host.startswith("/") else host.lower()  # paths differ by case


def _check_hosts(
    config: SecretUser, what: str, named: str, hosts: SecretHosts | None, *, listed_only: bool
) -> None:
    if hosts is None and not listed_only:
        return
    # All of them: a driver tries one after another.
    for target in config.secret_targets():
        if hosts is None or not hosts.allows(target):
            who = "a role that is no administrator may send it" if hosts is None else "it may go"
            raise AccessDenied(
                f"{what}: {who} only to hosts that {named} lists, and {target} is not listed: ask"
                " who runs the service"
            )


def _read_hosts(path: Path) -> SecretHosts | None:
    try:
        with path.open("rb") as file:
            data = file.read(HOSTS_BYTES_MAX + 1)
        if len(data) > HOSTS_BYTES_MAX:
            raise InvalidUsage(f"{path} is too large: a list of hosts has at most 64 KiB")
        return parse_hosts(data.decode(), str(path))
    except FileNotFoundError:
        # Any other error is no list, and not the absence of one.
        return None
    except (OSError, UnicodeDecodeError) as error:
        # Not known is not allowed: the list may leave the host out.
        raise InvalidUsage(f"the list of hosts {path} cannot be read: {error}") from None


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
