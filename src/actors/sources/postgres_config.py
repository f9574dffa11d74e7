"""How a PostgreSQL source reaches its server, and what its things are called there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from actors.errors import InvalidUsage
from actors.plan.schema import arrow_type

CONNECT_TIMEOUT_S: Final = 10
_NAME_MAX: Final = 63
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_PUBLICATION: Final = re.compile(r"[A-Za-z0-9_.\- ]{1,63}")
_SSLMODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
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
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""How values are written out must not depend on the server's settings; nothing times out; and no
query of the catalog, which is guessed to be large and is not, is compiled."""


class PostgresConfig(msgspec.Struct, frozen=True, kw_only=True, tag="postgres"):
    """A database of a PostgreSQL server (13 or newer). No password stands here: it is read when
    the service connects, from where this names."""

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
    """Empty: ``penstock_`` and a token of the source's own."""
    slot: str = ""
    """Empty: ``penstock_`` and a token of the source's own."""
    create: bool = True
    """Whether publication and slot are made when they are missing, tables added to a publication
    that lacks them, and both removed when the source is dropped."""
    numeric: str = "string"
    """What holds ``numeric`` without a precision: ``string``, or ``decimal(p,s)``."""
    feedback_ms: int = 10_000
    """The server hears from us at least so often, and thrice within its wal_sender_timeout."""
    poll_ms: int = 10_000
    """Between two looks at the slot, the tables' columns and the end of the log."""

    token: str = ""
    """Tells this source from all others on the server; given when it is made."""

    def check(self) -> None:
        """Raises `InvalidUsage`."""
        if self.sslmode not in _SSLMODES:
            raise InvalidUsage(f"sslmode {self.sslmode!r} is none of {', '.join(_SSLMODES)}")
        if self.slot and not _NAME.fullmatch(self.slot):
            raise InvalidUsage(f"slot {self.slot!r}: use a-z, 0-9 and _ only, at most 63")
        if self.publication and not _PUBLICATION.fullmatch(self.publication):
            raise InvalidUsage(
                f"publication {self.publication!r}: use letters, digits, blanks, . - _ only"
            )
        if self.numeric != "string" and not re.fullmatch(r"decimal\(\d+,\d+\)", self.numeric):
            raise InvalidUsage(f"numeric {self.numeric!r}: give string, or decimal(p,s)")
        if self.numeric != "string":
            digits, scale = map(int, self.numeric[len("decimal(") : -1].split(","))
            if not 1 <= digits <= 38 or scale > digits:
                raise InvalidUsage(f"numeric {self.numeric!r}: 1 <= p <= 38, s <= p")
            arrow_type(self.numeric)
        given = [self.password_env, self.password_file, self.passfile]
        if sum(map(bool, given)) > 1:
            raise InvalidUsage("give one of password_env, password_file and passfile")
        for name, value in (("feedback_ms", self.feedback_ms), ("poll_ms", self.poll_ms)):
            if not 100 <= value <= 3_600_000:
                raise InvalidUsage(f"{name}={value}: give 100 to 3600000")

    def slot_name(self, id: str) -> str:
        """Of the source with that id."""
        return self.slot or _derived(self.token or id)

    def publication_name(self, id: str) -> str:
        """Of the source with that id."""
        return self.publication or _derived(self.token or id)

    def connection(self, *, replication: bool) -> dict[str, str]:
        """libpq's parameters, with the password. Raises `InvalidUsage` when it is not there."""
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
        return {name: value for name, value in parameters.items() if value}

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
