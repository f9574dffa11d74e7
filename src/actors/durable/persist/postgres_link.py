"""A connection to PostgreSQL, opened on demand and dropped after every failure, and its URL.

    postgresql://user@host:port/database?schema=penstock&password_env=NAME&sslmode=verify-full

The parameters are libpq's, and three of our own: `schema`, the schema of the table; `password_env`,
an environment variable with the password; `password_file`, a file that contains only the password.
libpq's own mechanisms `passfile`, ``PGPASSWORD`` and ``~/.pgpass`` work, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import anyio
import msgspec
import psycopg
from psycopg import conninfo

from actors.runtime.errors import InvalidUsage, StorageError, StoreFull
from actors.runtime.settings import Settings

SCHEMES: Final = ("postgresql", "postgres")
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_DEFAULTS: Final = {
    "application_name": "penstock",
    "target_session_attrs": "read-write",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "client_encoding": "UTF8",
}
"""Connection defaults, which the URL may override. Keepalives detect a dead peer within half a
minute."""
_FULL: Final = frozenset({"53100", "53200"})
"""Disk full and out of memory. The transaction has no effect."""
AGAIN: Final = frozenset({"40001", "40P01", "55P03", "53300", "57P03", "25006", "55006", "57014"})
"""Errors worth retrying: serialization failure, deadlock, lock timeout, too many connections,
server starting up, read-only (the server became a standby), object in use, statement timeout."""


class PostgresAddress(msgspec.Struct, frozen=True):
    """The database and schema that contain the documents."""

    conninfo: str
    """Connection string for libpq, without the password."""
    schema: str
    password_env: str
    password_file: str
    shown: str
    """The URL to show in messages."""

    def password(self) -> str | None:
        """Return the password if the URL names one; else None. Raises `StorageError`."""
        if self.password_env:
            found = os.environ.get(self.password_env)
            if found is None:
                raise StorageError(
                    f"{self.shown}: environment variable {self.password_env} is not set "
                    "(password_env)",
                    determinate=True,
                )
            return found
        if self.password_file:
            try:
                return Path(self.password_file).read_text().rstrip("\r\n")
            except OSError as error:
                raise StorageError(
                    f"{self.shown}: cannot read {self.password_file} (password_file):"
                    f" {error.strerror}",
                    determinate=True,
                ) from None
        return None


def postgres_address(url: str) -> PostgresAddress:
    """Parse a URL. Raises `InvalidUsage` without revealing a password."""
    try:
        parts = urlsplit(url)
        secret, port = parts.password is not None, parts.port
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        secret, port, options = False, None, []
        parts = urlsplit("")
    del port
    if parts.scheme not in SCHEMES or parts.fragment:
        raise InvalidUsage(
            "invalid URL of PostgreSQL: expected postgresql://user@host:port/database?…"
        )
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # URLs are visible in process lists and logs.
    if secret or any(name in ("password", "sslpassword") for name, _ in options):
        raise InvalidUsage(
            f"{shown}: a password must not be in the URL: use password_env=VARIABLE, "
            "password_file=PATH or passfile=PATH"
        )
    own = {name: value for name, value in options if name in _OWN}
    rest = [(name, value) for name, value in options if name not in _OWN]
    schema = own.get("schema", "penstock")
    if _SCHEMA.fullmatch(schema) is None:
        raise InvalidUsage(
            f"{shown}: invalid schema {schema!r}: use only a-z, 0-9 and _, at most 40 characters"
        )
    given = [name for name in ("password_env", "password_file") if own.get(name)]
    given += [name for name, _ in rest if name == "passfile"]
    if len(given) > 1:
        raise InvalidUsage(f"{shown}: give only one of {', '.join(given)}")
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(rest), ""))
    try:
        known = conninfo.conninfo_to_dict(plain)
        # The URL's own parameters override the defaults.
        whole = conninfo.make_conninfo(**{**_DEFAULTS, **known})  # type: ignore[arg-type]
    except psycopg.ProgrammingError as error:
        raise InvalidUsage(f"{shown}: {_one_line(error)}") from None
    return PostgresAddress(
        whole, schema, own.get("password_env", ""), own.get("password_file", ""), shown
    )


_OWN: Final = ("schema", "password_env", "password_file")


class PostgresLink:
    """A connection on which each statement is a separate transaction unless it starts one."""

    def __init__(self, place: PostgresAddress, settings: Settings) -> None:
        self.place = place
        self._timeout_ms = settings.store_request_timeout_ms
        self._connection: psycopg.AsyncConnection[Any] | None = None
        """The open connection; None before the first use and after a failure."""

    async def connected(self) -> psycopg.AsyncConnection[Any]:
        """Return the open connection, or open one. Raises psycopg's errors, `StorageError` and
        TimeoutError."""
        if self._connection is not None and self._is_alive(self._connection):
            return self._connection
        await self.drop()
        given: dict[str, Any] = {}
        if (password := self.place.password()) is not None:
            given["password"] = password
        with anyio.fail_after(self._timeout_ms / 1000):
            made = await psycopg.AsyncConnection.connect(
                self.place.conninfo, autocommit=True, **given
            )
            self._connection = made
            # Limits on the server, too: a statement must not outlive a client that has given up.
            await made.execute(_SESSION, self._session())
        return made

    def _is_alive(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """Return whether the server has not closed the idle connection."""
        try:
            # Detected before a transaction starts, because the outcome of one that meets a closed
            # connection would be unknown.
            connection.pgconn.consume_input()
        except psycopg.OperationalError:
            return False
        return connection.pgconn.status == psycopg.pq.ConnStatus.OK

    def _session(self) -> Mapping[str, str]:
        return {"timeout": f"{self._timeout_ms}ms", "lock": f"{max(1, self._timeout_ms // 2)}ms"}

    async def drop(self) -> None:
        """Close the connection without waiting for the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()


_SESSION: Final = """
SELECT set_config('statement_timeout', %(timeout)s, false),
       set_config('lock_timeout', %(lock)s, false),
       set_config('idle_in_transaction_session_timeout', %(timeout)s, false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_deferrable', 'off', false),
       set_config('synchronous_commit',
                  CASE current_setting('synchronous_commit')
                       WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)
"""
"""Sets the session's limits, and enables synchronous commit if the server's default is off, because
an acknowledged commit must be durable."""

Failure = psycopg.Error | TimeoutError | OSError | StorageError
"""Errors that a call to the server may raise."""
FAILURES: Final = (psycopg.Error, TimeoutError, OSError, StorageError)


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a statement's ERROR, after which the transaction has no effect.

    Return None for everything else: a lost connection, a session ended by the server (FATAL), a
    timeout of the client.
    """
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return None
    return error.sqlstate if error.diag.severity_nonlocalized == "ERROR" else None


def worth_another_try(error: BaseException) -> bool:
    """Return whether a retry may succeed soon."""
    if isinstance(error, StorageError):
        return False
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    if code is None or code in AGAIN or code.startswith(("08", "57P")):
        # A failed connection has no SQLSTATE. Retrying does not help if the password was refused.
        text = str(error)
        return "password authentication" not in text and "no password" not in text
    return False


def as_storage_error(
    what: str, place: PostgresAddress, error: Failure, *, determinate: bool
) -> StorageError:
    """Convert a failure to a `StorageError` that contains no secrets."""
    if isinstance(error, StorageError):
        return error
    where = f"{place.shown} (schema {place.schema})"
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    if code in _FULL:
        text = f"no space left to {what} {where}: {_one_line(error)}; free space, then try again"
        return StoreFull(text, determinate=determinate)
    if isinstance(error, TimeoutError):
        return StorageError(
            f"could not {what} {where}: the server did not respond", determinate=determinate
        )
    said = f" ({code})" if code else ""
    return StorageError(
        f"could not {what} {where}{said}: {_one_line(error)}", determinate=determinate
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
