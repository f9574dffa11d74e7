"""Errors of PostgreSQL and libpq, with hints."""

from __future__ import annotations

from psycopg.pq import DiagnosticField as Field
from psycopg.pq.abc import PGresult

from actors.connectors.sources.source import SourceUnreachable
from actors.runtime.errors import PenstockError


class ServerRefused(PenstockError):
    """The server answered with an error, with its SQLSTATE and the server's own hint."""

    def __init__(self, message: str, sqlstate: str, server_hint: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.server_hint = server_hint


def connection_lost(reason: str) -> SourceUnreachable:
    """Return the error for a lost connection."""
    text = " ".join(reason.split())
    return SourceUnreachable(f"PostgreSQL: {text}", hint_for(text))


def hint_for(text: str) -> str:
    """Return a hint for an error of a connection."""
    hints = (
        ("password authentication failed", "check user and password_env, password_file, passfile"),
        ("no password supplied", "name the password: password_env, password_file or passfile"),
        (
            "authentication method requirement",
            "without verified TLS a password is proved by SCRAM alone: set sslmode to verify-full, "
            "or the server's password_encryption and pg_hba.conf to scram-sha-256 (else "
            "source_weak_passwords, for the whole service)",
        ),
        ("no pg_hba.conf entry", "let this host and user in, in the server's pg_hba.conf"),
        ("does not exist", "check database and user"),
        ("permission denied to start WAL sender", "ALTER ROLE … REPLICATION for the user"),
        ("must be superuser or replication role", "ALTER ROLE … REPLICATION for the user"),
        ("max_wal_senders", "raise max_wal_senders in postgresql.conf, and restart the server"),
        ("too many clients", "raise max_connections, or end other connections"),
        ("remaining connection slots", "raise max_connections, or end other connections"),
        ("starting up", "the server is starting: it is tried again"),
        ("shutting down", "the server is stopping: it is tried again"),
        ("SSL", "check sslmode, sslrootcert, and whether the server has ssl on"),
        ("administrator command", "somebody ended the connection there: it is made again"),
        ("unexpectedly", "the server was stopped or crashed, or the network: it is tried again"),
        ("refused", "check host and port, and that the server runs"),
        ("translate host name", "check host"),
    )
    return next((hint for sign, hint in hints if sign in text), "it is tried again")


def refusal(result: PGresult) -> ServerRefused:
    """Return the error of a failed result."""

    def part(field: Field) -> str:
        return (result.error_field(field) or b"").decode(errors="replace")

    message = part(Field.MESSAGE_PRIMARY) or text_of(result.error_message)
    return ServerRefused(message, part(Field.SQLSTATE), part(Field.MESSAGE_HINT))


def refused_raw(payload: bytes) -> PenstockError:
    """Return the error of an ErrorResponse message."""
    fields = {part[:1]: part[1:].decode(errors="replace") for part in payload.split(b"\0") if part}
    state = fields.get(b"C", "")
    # 57P: the server is stopping or ends connections; 08: the connection failed.
    if state.startswith(("57P", "08")):
        return connection_lost(fields.get(b"M", ""))
    return ServerRefused(fields.get(b"M", ""), state, fields.get(b"H", ""))


def text_of(raw: bytes | None) -> str:
    """Return libpq's text in one line."""
    return " ".join((raw or b"").decode(errors="replace").split())
