"""Configuration of a PostgreSQL source: the connection, and the names of its slot and
publication."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Self

import msgspec

from actors.connectors.sources.source import SourceConfig
from actors.connectors.sources.source_secrets import SecretTarget
from actors.runtime.errors import InvalidUsage

CONNECT_TIMEOUT_S: Final = 10
FITTING: Final = "fitting"
"""Value of `numeric`: choose a decimal type that fits the values present when the table is added.
"""
_NAME_MAX: Final = 63
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_PUBLICATION: Final = re.compile(r"[A-Za-z0-9_.\- ]{1,63}")
_SSLMODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFIED: Final = ("verify-ca", "verify-full")
_REQUIRE_AUTH_SINCE: Final = 160_000
_NO_WEAK_PASSWORDS: Final = "!password,!md5"
"""Value of libpq's `require_auth`. It excludes the methods that reveal the password, or a hash that
can be used in its place, to the server."""
_NO_FILE: Final = "/dev/null/none"
"""A path where no file can exist."""
_SESSION: Final = {
    "search_path": "",
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "jit": "off",
    "row_security": "off",  # an error, instead of rows that a policy hides
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""Settings of each session. They make the text of values independent of the server's settings,
disable timeouts, and turn off JIT compilation, because the cost of catalog queries is
overestimated."""


class PostgresConfig(
    SourceConfig, frozen=True, kw_only=True, forbid_unknown_fields=False, tag="postgres"
):
    """A database of a PostgreSQL server (version 13 or newer). It contains no password; it names
    where the service reads the password when it connects."""

    host: str
    """Name or address of the server, or the directory of its Unix socket."""
    port: int = 5432
    database: str = "postgres"
    user: str = "postgres"
    password_env: str = ""
    """Environment variable of the service that holds the password."""
    password_file: str = ""
    """File of the service that contains only the password."""
    passfile: str = ""
    """Password file of the service in libpq's format (``host:port:database:user:password``)."""
    sslmode: str = "prefer"
    sslrootcert: str = ""
    sslcert: str = ""
    sslkey: str = ""
    publication: str = ""
    """Name of the publication. Empty: ``penstock_`` and the source's token."""
    slot: str = ""
    """Name of the replication slot. Empty: ``penstock_`` and the source's token."""
    create: bool = True
    """True to create a missing publication and slot, to add missing tables to the publication, and
    to remove both with the source."""
    numeric: str = FITTING
    """Type of ``numeric`` columns without a precision: ``string``, ``decimal(p,s)``, or `FITTING`.
    It applies to tables that are added from now on."""
    feedback_ms: int = 10_000
    """Interval of feedback to the server, in ms; at most a third of its wal_sender_timeout."""
    poll_ms: int = 10_000
    """Interval in ms between checks of the slot, the tables' columns and the end of the log."""

    token: str = ""
    """Makes the names of this source's resources unique on the server. Set when the source is
    created."""

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is invalid."""
        if self.sslmode not in _SSLMODES:
            raise InvalidUsage(
                f"invalid sslmode {self.sslmode!r}: expected one of {', '.join(_SSLMODES)}"
            )
        if self.slot and not _NAME.fullmatch(self.slot):
            raise InvalidUsage(
                f"invalid slot {self.slot!r}: use only a-z, 0-9 and _, at most 63 characters"
            )
        if self.publication and not _PUBLICATION.fullmatch(self.publication):
            raise InvalidUsage(
                f"invalid publication {self.publication!r}: use only letters, digits, spaces and . "
                "- _, at most 63 characters"
            )
        if self.numeric not in (FITTING, "string"):
            found = re.fullmatch(r"decimal\((\d{1,2}),(\d{1,2})\)", self.numeric)
            if found is None:
                raise InvalidUsage(
                    f"invalid numeric {self.numeric!r}: expected {FITTING}, string or decimal(p,s)"
                )
            if not 1 <= int(found[1]) <= 38 or int(found[2]) > int(found[1]):
                raise InvalidUsage(
                    f"invalid numeric {self.numeric!r}: expected 1 <= p <= 38 and s <= p"
                )
        given = [self.password_env, self.password_file, self.passfile]
        if sum(map(bool, given)) > 1:
            raise InvalidUsage("give only one of password_env, password_file and passfile")
        for name, value in (("feedback_ms", self.feedback_ms), ("poll_ms", self.poll_ms)):
            if not 100 <= value <= 3_600_000:
                raise InvalidUsage(f"invalid {name} {value}: expected 100 to 3600000")

    def with_token(self, token: str) -> Self:
        """Return the same options with the token that names this source's slot and publication."""
        return msgspec.structs.replace(self, token=token)

    def external_resource(self, id: str) -> str:
        """Return the slot as the resource to remove, unless the user manages it (`create` is
        off)."""
        return f"slot {self.slot_name(id)}" if self.create else ""

    def slot_name(self, id: str) -> str:
        """Return the name of the replication slot of the source with this id."""
        return self.slot or _derived(self.token or id)

    def publication_name(self, id: str) -> str:
        """Return the name of the publication of the source with this id."""
        return self.publication or _derived(self.token or id)

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """Return all hosts of the `host` option: libpq tries several one after another."""
        return tuple(SecretTarget(host, self.port) for host in self.host.split(","))

    def connection(
        self, *, replication: bool, libpq_version: int, weak_passwords: bool = False
    ) -> dict[str, str]:
        """Return libpq's connection parameters, including the password.

        Args:
            replication: True for a replication connection.
            libpq_version: As libpq reports it (160003 for 16.3).
            weak_passwords: True if the password may be revealed to an unverified server.

        Raises `InvalidUsage` if the password is missing, or if this version of libpq cannot protect
        it from an unverified server.
        """
        options = " ".join(f"-c {name}={value}" for name, value in _SESSION.items())
        parameters = {
            "host": self.host,
            "port": str(self.port),
            "dbname": self.database,
            "user": self.user,
            "password": self._password(),
            "passfile": self.passfile,
            "sslmode": self.sslmode,
            "sslrootcert": self.sslrootcert,
            "sslcert": self.sslcert,
            "sslkey": self.sslkey,
            "gssencmode": "disable",
            "connect_timeout": str(CONNECT_TIMEOUT_S),
            "application_name": "penstock",
            "options": options,
            "replication": "database" if replication else "",
        }
        password = {name: parameters.pop(name) for name in ("password", "passfile")}
        found = {name: value for name, value in parameters.items() if value}
        # Always set: otherwise libpq uses the service's own files, from its environment or home.
        found |= {"password": password["password"], "passfile": password["passfile"] or _NO_FILE}
        found |= {"hostaddr": "", "sslcert": self.sslcert or _NO_FILE}
        verified = self.sslmode in _VERIFIED
        if any(password.values()) and not verified and not weak_passwords:
            if libpq_version < _REQUIRE_AUTH_SINCE:
                raise InvalidUsage(
                    f"sslmode {self.sslmode!r}: libpq {libpq_version // 10_000} cannot protect the "
                    "password from an unverified server: set sslmode to verify-full, install a "
                    "psycopg with libpq 16 or newer, or set source_weak_passwords"
                )
            found["require_auth"] = _NO_WEAK_PASSWORDS
        return found

    def _password(self) -> str:
        if self.password_env:
            value = os.environ.get(self.password_env)
            if value is None:
                raise InvalidUsage(
                    f"environment variable {self.password_env} of the service is not set "
                    "(password_env)"
                )
            return value
        if self.password_file:
            try:
                return Path(self.password_file).read_text().rstrip("\r\n")
            except OSError as error:
                raise InvalidUsage(
                    f"password_file {self.password_file}: {error.strerror}"
                ) from None
        return ""


def _derived(id: str) -> str:
    plain = re.sub(r"[^a-z0-9_]", "_", id.lower())
    return f"penstock_{plain}"[:_NAME_MAX]
