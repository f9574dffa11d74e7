"""Configuration of a PostgreSQL source: the connection, and the names of its resources there."""

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
"""The type is a decimal that holds what the table has when it is taken."""
_NAME_MAX: Final = 63
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_PUBLICATION: Final = re.compile(r"[A-Za-z0-9_.\- ]{1,63}")
_SSLMODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFIED: Final = ("verify-ca", "verify-full")
_REQUIRE_AUTH_SINCE: Final = 160_000
_NO_WEAK_PASSWORDS: Final = "!password,!md5"
"""Value of libpq's `require_auth`: methods by which a server would learn the password, or what
stands for it."""
_NO_FILE: Final = "/dev/null/none"
"""Path at which no file can be."""
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
"""Settings of each session: values' texts must not depend on the server's; nothing times out; and
queries of the catalog, whose cost is overestimated, are not compiled."""


class PostgresConfig(
    SourceConfig, frozen=True, kw_only=True, forbid_unknown_fields=False, tag="postgres"
):
    """A database of a PostgreSQL server (13 or newer). It holds no password, but names the place
    from which the service reads it when it connects."""

    host: str
    """Name or address; or the folder of a Unix socket."""
    port: int = 5432
    database: str = "postgres"
    user: str = "postgres"
    password_env: str = ""
    """An environment variable of the service that holds the password."""
    password_file: str = ""
    """A file of the service that holds the password alone."""
    passfile: str = ""
    """A password file as libpq's (``host:port:database:user:password``)."""
    sslmode: str = "prefer"
    sslrootcert: str = ""
    sslcert: str = ""
    sslkey: str = ""
    publication: str = ""
    """Empty: ``penstock_`` and the source's token."""
    slot: str = ""
    """Empty: ``penstock_`` and the source's token."""
    create: bool = True
    """True to create a missing publication and slot, to add missing tables to the publication, and
    to remove both with the source."""
    numeric: str = FITTING
    """Type for ``numeric`` without a precision, of tables that are taken: ``string``,
    ``decimal(p,s)``, or `FITTING`."""
    feedback_ms: int = 10_000
    """Interval of feedback to the server; at most a third of its wal_sender_timeout."""
    poll_ms: int = 10_000
    """Interval of checks of the slot, the tables' columns and the end of the log."""

    token: str = ""
    """Tells this source from all others on the server; set when the source is created."""

    def check(self) -> None:
        """Raise `InvalidUsage` for options that do not fit."""
        if self.sslmode not in _SSLMODES:
            raise InvalidUsage(f"sslmode {self.sslmode!r} is none of {', '.join(_SSLMODES)}")
        if self.slot and not _NAME.fullmatch(self.slot):
            raise InvalidUsage(f"slot {self.slot!r}: use a-z, 0-9 and _ only, at most 63")
        if self.publication and not _PUBLICATION.fullmatch(self.publication):
            raise InvalidUsage(
                f"publication {self.publication!r}: use letters, digits, blanks, . - _ only"
            )
        if self.numeric not in (FITTING, "string"):
            found = re.fullmatch(r"decimal\((\d{1,2}),(\d{1,2})\)", self.numeric)
            if found is None:
                raise InvalidUsage(
                    f"invalid numeric {self.numeric!r}: expected {FITTING}, string or decimal(p,s)"
                )
            if not 1 <= int(found[1]) <= 38 or int(found[2]) > int(found[1]):
                raise InvalidUsage(f"numeric {self.numeric!r}: 1 <= p <= 38, s <= p")
        given = [self.password_env, self.password_file, self.passfile]
        if sum(map(bool, given)) > 1:
            raise InvalidUsage("give one of password_env, password_file and passfile")
        for name, value in (("feedback_ms", self.feedback_ms), ("poll_ms", self.poll_ms)):
            if not 100 <= value <= 3_600_000:
                raise InvalidUsage(f"{name}={value}: give 100 to 3600000")

    def with_token(self, token: str) -> Self:
        """See `SourceConfig`."""
        return msgspec.structs.replace(self, token=token)

    def external_resource(self, id: str) -> str:
        """See `SourceConfig`."""
        return f"slot {self.slot_name(id)}" if self.create else ""

    def slot_name(self, id: str) -> str:
        """Return the slot's name, for the source with that id."""
        return self.slot or _derived(self.token or id)

    def publication_name(self, id: str) -> str:
        """Return the publication's name, for the source with that id."""
        return self.publication or _derived(self.token or id)

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """See `SecretUser`: libpq tries several hosts one after another."""
        return tuple(SecretTarget(host, self.port) for host in self.host.split(","))

    def connection(
        self, *, replication: bool, libpq_version: int, weak_passwords: bool = False
    ) -> dict[str, str]:
        """Return libpq's parameters, with the password. `libpq_version`: as libpq tells it (160003
        for 16.3). `weak_passwords`: the password may be shown to a server that is not verified.

        Raises `InvalidUsage` when the password is missing, or this libpq cannot keep it from such a
        server.
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
        # Given always: else libpq takes the service's own, from its environment or home.
        found |= {"password": password["password"], "passfile": password["passfile"] or _NO_FILE}
        found |= {"hostaddr": "", "sslcert": self.sslcert or _NO_FILE}
        verified = self.sslmode in _VERIFIED
        if any(password.values()) and not verified and not weak_passwords:
            if libpq_version < _REQUIRE_AUTH_SINCE:
                raise InvalidUsage(
                    f"sslmode {self.sslmode!r}: libpq {libpq_version // 10_000} cannot keep the "
                    "password from a server that is not verified: set sslmode to verify-full, "
                    "install a psycopg with libpq 16 or newer, or set source_weak_passwords"
                )
            found["require_auth"] = _NO_WEAK_PASSWORDS
        return found

    def _password(self) -> str:
        if self.password_env:
            value = os.environ.get(self.password_env)
            if value is None:
                raise InvalidUsage(
                    f"the service has no environment variable {self.password_env} (password_env)"
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
