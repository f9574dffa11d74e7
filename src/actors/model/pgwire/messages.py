"""The messages of PostgreSQL's protocol, versions 3.0 and 3.2, from the server's point of view.

The structs are what clients send; `actors.model.pgwire.decoder` creates them. The functions and
constants return the bytes that a server sends. Rows are encoded in
`actors.model.pgwire.row_encoding`.

Source: PostgreSQL 18's documentation, "Message Formats" and "Error and Notice Message Fields".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from actors.model.pgwire.type_oids import PgType
from actors.runtime.errors import RemoteProtocolError

TEXT_FORMAT: Final = 0
BINARY_FORMAT: Final = 1
MINOR_LATEST: Final = 2
"""Highest minor version that this server supports: 3.2, with cancel keys of up to 256 bytes."""
CANCEL_KEY_BYTES: Final = {0: 4, 2: 32}
"""Length of the cancel key for each minor version."""
_MAJOR: Final = 3 << 16
_OPTION_PREFIX: Final = "_pq_."

_U32: Final = struct.Struct("!I")
_U16: Final = struct.Struct("!H")
_FIELD: Final = struct.Struct("!IhIhih")

# -- from clients ----------------------------------------------------------------------------------


class EncryptionRequest(msgspec.Struct, frozen=True):
    """SSLRequest, or with `gss` GSSENCRequest. Answered by one byte: ``S`` (or ``G``) to accept,
    ``N`` to decline."""

    gss: bool


class CancelRequest(msgspec.Struct, frozen=True):
    """A request, on a connection of its own, to cancel a query of another connection."""

    process_id: int
    secret_key: bytes


class StartupPacket(msgspec.Struct, frozen=True):
    """The parameters of a startup packet as sent, and the minor version that the client
    supports."""

    parameters: Mapping[str, str]
    minor: int = 0


class AuthenticationReply(msgspec.Struct, frozen=True):
    """A password, SASLInitialResponse or SASLResponse. They share a type byte, so only the receiver
    of the reply knows how to parse the body."""

    body: bytes


class SimpleQuery(msgspec.Struct, frozen=True):
    """A text with one or more statements."""

    text: str


class ParseStatement(msgspec.Struct, frozen=True):
    """Creates a prepared statement. The empty name is the unnamed statement.

    Parameters beyond `parameter_oids`, and those with OID 0, have no type yet.
    """

    name: str
    query: str
    parameter_oids: tuple[int, ...] = ()


class BindPortal(msgspec.Struct, frozen=True):
    """Creates a portal from a prepared statement and values. `expand_formats` expands the
    formats."""

    portal: str
    statement: str
    parameter_formats: tuple[int, ...]
    parameters: tuple[bytes | None, ...]
    result_formats: tuple[int, ...]


class DescribePrepared(msgspec.Struct, frozen=True):
    """Asks for the ParameterDescription of a statement, then its RowDescription or NoData."""

    name: str


class DescribePortal(msgspec.Struct, frozen=True):
    """Asks for the RowDescription or NoData of a portal."""

    name: str


class ExecutePortal(msgspec.Struct, frozen=True):
    """Runs a portal for at most `rows_max` rows; 0 means all."""

    portal: str
    rows_max: int


class CloseStatement(msgspec.Struct, frozen=True):
    """Closes a prepared statement. An unknown name is not an error."""

    name: str


class ClosePortal(msgspec.Struct, frozen=True):
    """Closes a portal. An unknown name is not an error."""

    name: str


class FlushOutput(msgspec.Struct, frozen=True):
    """Asks the server to send pending answers now."""


class SyncPipeline(msgspec.Struct, frozen=True):
    """Ends a pipeline: commits changes outside an explicit transaction and asks for
    ReadyForQuery."""


class FastpathCall(msgspec.Struct, frozen=True):
    """Calls a function by its OID (large objects). The body is not parsed, because a server may
    refuse it."""

    body: bytes


class CopyInData(msgspec.Struct, frozen=True):
    """A piece of a COPY's stream. Pieces may end anywhere."""

    data: bytes


class CopyInDone(msgspec.Struct, frozen=True):
    """Ends the stream of a COPY."""


class CopyInFailure(msgspec.Struct, frozen=True):
    """Aborts a COPY; the statement must fail."""

    reason: str


class TerminateSession(msgspec.Struct, frozen=True):
    """Ends the connection."""


FrontendMessage: TypeAlias = (
    EncryptionRequest
    | CancelRequest
    | StartupPacket
    | AuthenticationReply
    | SimpleQuery
    | ParseStatement
    | BindPortal
    | DescribePrepared
    | DescribePortal
    | ExecutePortal
    | CloseStatement
    | ClosePortal
    | FlushOutput
    | SyncPipeline
    | FastpathCall
    | CopyInData
    | CopyInDone
    | CopyInFailure
    | TerminateSession
)


def expand_formats(formats: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Return one format for each of `count` values. Without formats all are text; a single format
    applies to all. Raises `RemoteProtocolError` for another number of formats.

    >>> expand_formats((1,), 3, "columns")
    (1, 1, 1)
    """
    if len(formats) == count:
        return tuple(formats)
    if len(formats) > 1:
        raise RemoteProtocolError(f"{len(formats)} formats given for {count} {what}")
    # A single format applies to all, even if there are none.
    return (formats[0] if formats else TEXT_FORMAT,) * count


# -- to clients ------------------------------------------------------------------------------------


def encode_message(kind: bytes, body: bytes = b"") -> bytes:
    """Encode a message: type, length, body."""
    return kind + _U32.pack(len(body) + 4) + body


def _text(value: str) -> bytes:
    # A NUL would end the text early, and a lone surrogate has no UTF-8 encoding.
    return value.replace("\0", " ").encode(errors="replace") + b"\0"


ENCRYPTION_ACCEPTED: Final = b"S"
ENCRYPTION_DECLINED: Final = b"N"
AUTHENTICATION_OK: Final = encode_message(b"R", _U32.pack(0))
CLEARTEXT_PASSWORD_REQUEST: Final = encode_message(b"R", _U32.pack(3))
PARSE_COMPLETE: Final = encode_message(b"1")
BIND_COMPLETE: Final = encode_message(b"2")
CLOSE_COMPLETE: Final = encode_message(b"3")
NO_DATA: Final = encode_message(b"n")
EMPTY_QUERY_RESPONSE: Final = encode_message(b"I")
PORTAL_SUSPENDED: Final = encode_message(b"s")
COPY_DONE: Final = encode_message(b"c")


def encode_sasl_request(mechanisms: Sequence[str]) -> bytes:
    """Encode AuthenticationSASL, which offers these mechanisms, the preferred one first."""
    names = b"".join(_text(name) for name in mechanisms)
    return encode_message(b"R", _U32.pack(10) + names + b"\0")


def encode_sasl_continue(data: bytes) -> bytes:
    """Encode AuthenticationSASLContinue with the challenge of a mechanism."""
    return encode_message(b"R", _U32.pack(11) + data)


def encode_sasl_final(data: bytes) -> bytes:
    """Encode AuthenticationSASLFinal with the result of a mechanism. AuthenticationOk must
    follow."""
    return encode_message(b"R", _U32.pack(12) + data)


def encode_parameter_status(name: str, value: str) -> bytes:
    """Encode ParameterStatus: the current value of a setting of the session."""
    return encode_message(b"S", _text(name) + _text(value))


def encode_backend_key(process_id: int, secret_key: bytes) -> bytes:
    """Encode BackendKeyData. A client of 3.0 needs a key of 4 bytes (`CANCEL_KEY_BYTES`)."""
    return encode_message(b"K", _U32.pack(process_id) + secret_key)


def encode_ready(status: bytes) -> bytes:
    """Encode ReadyForQuery: ``I`` idle, ``T`` in a transaction, ``E`` in a failed transaction."""
    return encode_message(b"Z", status)


def negotiate_protocol(packet: StartupPacket) -> tuple[int, bytes]:
    """Return the minor version to speak, and a NegotiateProtocolVersion to send first (or b"")."""
    unknown = [name for name in packet.parameters if name.startswith(_OPTION_PREFIX)]
    # 3.1 was never published, so a client that requests it gets 3.0.
    minor = MINOR_LATEST if packet.minor >= MINOR_LATEST else 0
    if minor == packet.minor and not unknown:
        return minor, b""
    # PostgreSQL sends the complete version number here, and libpq expects it, although the
    # documentation calls it the minor version.
    head = _U32.pack(_MAJOR | minor) + _U32.pack(len(unknown))
    return minor, encode_message(b"v", head + b"".join(_text(name) for name in unknown))


class FieldDescription(msgspec.Struct, frozen=True):
    """One column of a result: its name, its type, and the format of its values."""

    name: str
    type: PgType
    format: int = TEXT_FORMAT


def encode_row_description(fields: Sequence[FieldDescription]) -> bytes:
    """Encode RowDescription."""
    parts = [_U16.pack(len(fields))]
    for field in fields:
        kind = field.type
        # The zeros mean that the table and the column of origin are unknown.
        sent = _FIELD.pack(0, 0, kind.oid, kind.size, kind.modifier, field.format)
        parts.append(_text(field.name) + sent)
    return encode_message(b"T", b"".join(parts))


def encode_parameter_description(oids: Sequence[int]) -> bytes:
    """Encode ParameterDescription. It must have all parameters of the statement."""
    return encode_message(b"t", struct.pack(f"!H{len(oids)}I", len(oids), *oids))


def encode_command_complete(tag: str) -> bytes:
    """Encode CommandComplete with a tag such as ``SELECT 5``, ``INSERT 0 1``, ``CREATE TABLE``."""
    return encode_message(b"C", _text(tag))


def encode_copy_in(*, binary: bool, columns: int) -> bytes:
    """Encode CopyInResponse. The client sends CopyData from now on."""
    return encode_message(b"G", _copy_head(binary, columns))


def encode_copy_out(*, binary: bool, columns: int) -> bytes:
    """Encode CopyOutResponse. CopyData and CopyDone follow."""
    return encode_message(b"H", _copy_head(binary, columns))


def _copy_head(binary: bool, columns: int) -> bytes:
    # The protocol has a format for each column, but PostgreSQL never mixes them.
    code = BINARY_FORMAT if binary else TEXT_FORMAT
    return struct.pack(f"!bH{columns}h", code, columns, *[code] * columns)


def encode_copy_data(data: bytes) -> bytes:
    """Encode a CopyData message with this body."""
    return encode_message(b"d", data)


class ErrorReport(msgspec.Struct, frozen=True):
    """The fields of an ErrorResponse or a NoticeResponse. Empty fields are not sent."""

    sqlstate: str
    message: str
    severity: str = "ERROR"
    """``ERROR``, ``FATAL`` or ``PANIC``; in notices ``WARNING``, ``NOTICE``, ``DEBUG``, ``INFO`` or
    ``LOG``."""
    hint: str = ""
    position: int = 0
    """Position in the query text, in characters from 1; 0 if unknown."""


_REPORT_FIELDS: Final = (
    ("severity", b"S"),
    ("severity", b"V"),  # the severity again, which is never translated
    ("sqlstate", b"C"),
    ("message", b"M"),
    ("hint", b"H"),
    ("position", b"P"),
)


def encode_error(report: ErrorReport) -> bytes:
    """Encode ErrorResponse."""
    return encode_message(b"E", _report(report))


def encode_notice(report: ErrorReport) -> bytes:
    """Encode NoticeResponse."""
    return encode_message(b"N", _report(report))


def _report(report: ErrorReport) -> bytes:
    # Clients rely on severity, SQLSTATE and message, so send even an empty message.
    parts = [
        code + _text(str(value))
        for name, code in _REPORT_FIELDS
        if (value := getattr(report, name)) or name == "message"
    ]
    return b"".join(parts) + b"\0"
