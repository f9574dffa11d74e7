"""Errors of PostgreSQL and libpq, with hints on what to do."""

from __future__ import annotations

from psycopg.pq import DiagnosticField as Field
from psycopg.pq.abc import PGresult

from actors.connectors.sources.source import SourceUnreachable
from actors.runtime.errors import PenstockError


class ServerRefused(PenstockError):
    """The server answered with an error. Keeps its SQLSTATE and its hint."""

    def __init__(self, message: str, sqlstate: str, server_hint: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.server_hint = server_hint


def connection_lost(reason: str) -> SourceUnreachable:
    """Return the error for a lost connection."""
    text = " ".join(reason.split())
    return SourceUnreachable(f"PostgreSQL: {text}", hint_for(text))


def hint_for(text: str) -> str:
    """Return what to do about a connection error, by its text."""
    hints = (
        (
            "password authentication failed",
            "check the options user, password_env, password_file and passfile",
        ),
        ("no password supplied", "set password_env, password_file or passfile"),
        (
            "authentication method requirement",
            "without verified TLS, only SCRAM authentication is allowed: set sslmode to "
            "verify-full, or set password_encryption and pg_hba.conf on the server to "
            "scram-sha-256 (or set source_weak_passwords, which applies to the whole service)",
        ),
        ("no pg_hba.conf entry", "allow this host and user in the server's pg_hba.conf"),
        ("does not exist", "check the options database and user"),
        ("permission denied to start WAL sender", "ALTER ROLE … REPLICATION for the user"),
        ("must be superuser or replication role", "ALTER ROLE … REPLICATION for the user"),
        ("max_wal_senders", "raise max_wal_senders in postgresql.conf and restart the server"),
        ("too many clients", "raise max_connections, or close other connections"),
        ("remaining connection slots", "raise max_connections, or close other connections"),
        ("starting up", "the server is starting: the service will retry"),
        ("shutting down", "the server is shutting down: the service will retry"),
        ("SSL", "check sslmode and sslrootcert, and whether the server has ssl on"),
        (
            "administrator command",
            "the connection was terminated on the server: the service will retry",
        ),
        (
            "unexpectedly",
            "the server stopped or crashed, or the network failed: the service will retry",
        ),
        ("refused", "check host and port, and that the server is running"),
        ("check the option host", "check host"),
    )
    return next((hint for sign, hint in hints if sign in text), "the service will retry")


def refusal(result: PGresult) -> ServerRefused:
    """Return the error of a failed libpq result."""

    def part(field: Field) -> str:
        return (result.error_field(field) or b"").decode(errors="replace")

    message = part(Field.MESSAGE_PRIMARY) or text_of(result.error_message)
    return ServerRefused(message, part(Field.SQLSTATE), part(Field.MESSAGE_HINT))


def refused_raw(payload: bytes) -> PenstockError:
    """Convert an ErrorResponse message, received on a raw connection, to an exception."""
    fields = {part[:1]: part[1:].decode(errors="replace") for part in payload.split(b"\0") if part}
    state = fields.get(b"C", "")
    # 57P: the server is shutting down or terminates connections; 08: the connection failed.
    if state.startswith(("57P", "08")):
        return connection_lost(fields.get(b"M", ""))
    return ServerRefused(fields.get(b"M", ""), state, fields.get(b"H", ""))


def text_of(raw: bytes | None) -> str:
    """Return a text from libpq on one line."""
    return " ".join((raw or b"").decode(errors="replace").split())
