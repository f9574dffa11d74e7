"""The messages of PostgreSQL's protocol, versions 3.0 and 3.2, as a server sees them.

The structs are what clients send; `actors.model.pgwire.decoder` makes them. The functions and
constants return the bytes of what a server sends. Rows are encoded in
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
"""Minor version that this server speaks at most: 3.2, with cancel keys of up to 256 bytes."""
CANCEL_KEY_BYTES: Final = {0: 4, 2: 32}
"""Length of the cancel key that is given to a client of a minor version."""
_MAJOR: Final = 3 << 16
_OPTION_PREFIX: Final = "_pq_."

_U32: Final = struct.Struct("!I")
_U16: Final = struct.Struct("!H")
_FIELD: Final = struct.Struct("!IhIhih")

# -- from clients ----------------------------------------------------------------------------------


class EncryptionRequest(msgspec.Struct, frozen=True):
    """SSLRequest, or (`gss`) GSSENCRequest: answered by one byte, ``S`` (``G``) or ``N``."""

    gss: bool


class CancelRequest(msgspec.Struct, frozen=True):
    """A request to cancel a query of another connection, on a connection of its own."""

    process_id: int
    secret_key: bytes


class StartupPacket(msgspec.Struct, frozen=True):
    """The parameters of a startup packet, as sent, and the minor version that the client speaks."""

    parameters: Mapping[str, str]
    minor: int = 0


class AuthenticationReply(msgspec.Struct, frozen=True):
    """A password, SASLInitialResponse or SASLResponse: their type byte is the same, so that the
    body can be parsed only by who knows what was asked for."""

    body: bytes


class SimpleQuery(msgspec.Struct, frozen=True):
    """A text of one or several statements."""

    text: str


class ParseStatement(msgspec.Struct, frozen=True):
    """Makes a prepared statement; an empty name is the unnamed one. Parameters beyond
    `parameter_oids`, and those of OID 0, have no type yet."""

    name: str
    query: str
    parameter_oids: tuple[int, ...] = ()


class BindPortal(msgspec.Struct, frozen=True):
    """Makes a portal of a prepared statement and values; `expand_formats` completes formats."""

    portal: str
    statement: str
    parameter_formats: tuple[int, ...]
    parameters: tuple[bytes | None, ...]
    result_formats: tuple[int, ...]


class DescribePrepared(msgspec.Struct, frozen=True):
    """Asks for a statement's ParameterDescription, then its RowDescription or NoData."""

    name: str


class DescribePortal(msgspec.Struct, frozen=True):
    """Asks for a portal's RowDescription or NoData."""

    name: str


class ExecutePortal(msgspec.Struct, frozen=True):
    """Runs a portal for at most `rows_max` rows (0: all)."""

    portal: str
    rows_max: int


class CloseStatement(msgspec.Struct, frozen=True):
    """Frees a prepared statement; no error if there is none."""

    name: str


class ClosePortal(msgspec.Struct, frozen=True):
    """Frees a portal; no error if there is none."""

    name: str


class FlushOutput(msgspec.Struct, frozen=True):
    """Asks that pending answers be sent now."""


class SyncPipeline(msgspec.Struct, frozen=True):
    """Ends a pipeline: commits what no transaction holds, and asks for ReadyForQuery."""


class FastpathCall(msgspec.Struct, frozen=True):
    """A call of a function by its OID (large objects); kept raw, as a server may refuse it."""

    body: bytes


class CopyInData(msgspec.Struct, frozen=True):
    """A piece of a COPY's stream; pieces end anywhere."""

    data: bytes


class CopyInDone(msgspec.Struct, frozen=True):
    """Ends a COPY's stream."""


class CopyInFailure(msgspec.Struct, frozen=True):
    """Gives a COPY up: the statement must fail."""

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
    """Return one format for each of `count` values: none given means text, one is for all. Raises
    `RemoteProtocolError`.

    >>> expand_formats((1,), 3, "columns")
    (1, 1, 1)
    """
    if len(formats) == count:
        return tuple(formats)
    if len(formats) > 1:
        raise RemoteProtocolError(f"{len(formats)} formats were given for {count} {what}")
    # One format is for all, also where there is nothing to have it.
    return (formats[0] if formats else TEXT_FORMAT,) * count


# -- to clients ------------------------------------------------------------------------------------


def encode_message(kind: bytes, body: bytes = b"") -> bytes:
    """Return a message: type, length, body."""
    return kind + _U32.pack(len(body) + 4) + body


def _text(value: str) -> bytes:
    # A NUL would end the text early. A lone surrogate has no UTF-8.
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
    """Return AuthenticationSASL, which offers these mechanisms, the preferred one first."""
    names = b"".join(_text(name) for name in mechanisms)
    return encode_message(b"R", _U32.pack(10) + names + b"\0")


def encode_sasl_continue(data: bytes) -> bytes:
    """Return AuthenticationSASLContinue with a mechanism's challenge."""
    return encode_message(b"R", _U32.pack(11) + data)


def encode_sasl_final(data: bytes) -> bytes:
    """Return AuthenticationSASLFinal with a mechanism's outcome; AuthenticationOk must follow."""
    return encode_message(b"R", _U32.pack(12) + data)


def encode_parameter_status(name: str, value: str) -> bytes:
    """Return ParameterStatus: the value that a setting of the session has now."""
    return encode_message(b"S", _text(name) + _text(value))


def encode_backend_key(process_id: int, secret_key: bytes) -> bytes:
    """Return BackendKeyData. A client of 3.0 must get a key of 4 bytes (`CANCEL_KEY_BYTES`)."""
    return encode_message(b"K", _U32.pack(process_id) + secret_key)


def encode_ready(status: bytes) -> bytes:
    """Return ReadyForQuery: ``I`` idle, ``T`` in a transaction, ``E`` in a failed one."""
    return encode_message(b"Z", status)


def negotiate_protocol(packet: StartupPacket) -> tuple[int, bytes]:
    """Return (minor version to speak, NegotiateProtocolVersion or nothing to be sent first)."""
    unknown = [name for name in packet.parameters if name.startswith(_OPTION_PREFIX)]
    # 3.1 was never published: who asks for it is spoken to as 3.0.
    minor = MINOR_LATEST if packet.minor >= MINOR_LATEST else 0
    if minor == packet.minor and not unknown:
        return minor, b""
    # PostgreSQL says the whole number here, and libpq reads it so, though the documentation calls
    # it the minor version.
    head = _U32.pack(_MAJOR | minor) + _U32.pack(len(unknown))
    return minor, encode_message(b"v", head + b"".join(_text(name) for name in unknown))


class FieldDescription(msgspec.Struct, frozen=True):
    """One column of a result: its name and type, and how its values are sent."""

    name: str
    type: PgType
    format: int = TEXT_FORMAT


def encode_row_description(fields: Sequence[FieldDescription]) -> bytes:
    """Return RowDescription."""
    parts = [_U16.pack(len(fields))]
    for field in fields:
        kind = field.type
        # The zeros: which column of which table it is, is not told.
        sent = _FIELD.pack(0, 0, kind.oid, kind.size, kind.modifier, field.format)
        parts.append(_text(field.name) + sent)
    return encode_message(b"T", b"".join(parts))


def encode_parameter_description(oids: Sequence[int]) -> bytes:
    """Return ParameterDescription; the count must be that of the statement's parameters."""
    return encode_message(b"t", struct.pack(f"!H{len(oids)}I", len(oids), *oids))


def encode_command_complete(tag: str) -> bytes:
    """Return CommandComplete: ``SELECT 5``, ``INSERT 0 1``, ``CREATE TABLE``."""
    return encode_message(b"C", _text(tag))


def encode_copy_in(*, binary: bool, columns: int) -> bytes:
    """Return CopyInResponse: the client sends CopyData from here on."""
    return encode_message(b"G", _copy_head(binary, columns))


def encode_copy_out(*, binary: bool, columns: int) -> bytes:
    """Return CopyOutResponse: CopyData and CopyDone follow."""
    return encode_message(b"H", _copy_head(binary, columns))


def _copy_head(binary: bool, columns: int) -> bytes:
    # Columns have formats of their own here, but PostgreSQL never mixes them.
    code = BINARY_FORMAT if binary else TEXT_FORMAT
    return struct.pack(f"!bH{columns}h", code, columns, *[code] * columns)


def encode_copy_data(data: bytes) -> bytes:
    """Return a CopyData message with this body."""
    return encode_message(b"d", data)


class ErrorReport(msgspec.Struct, frozen=True):
    """The fields of an ErrorResponse or a NoticeResponse; empty ones are not sent."""

    sqlstate: str
    message: str
    severity: str = "ERROR"
    """``ERROR``, ``FATAL``, ``PANIC``; in notices ``WARNING``, ``NOTICE``, ``DEBUG``, ``INFO``,
    ``LOG``."""
    hint: str = ""
    position: int = 0
    """Place in the query's text, in characters, from 1 on; 0: unknown."""


_REPORT_FIELDS: Final = (
    ("severity", b"S"),
    ("severity", b"V"),  # the same again, but never translated
    ("sqlstate", b"C"),
    ("message", b"M"),
    ("hint", b"H"),
    ("position", b"P"),
)


def encode_error(report: ErrorReport) -> bytes:
    """Return ErrorResponse."""
    return encode_message(b"E", _report(report))


def encode_notice(report: ErrorReport) -> bytes:
    """Return NoticeResponse."""
    return encode_message(b"N", _report(report))


def _report(report: ErrorReport) -> bytes:
    # Clients rely on severity, SQLSTATE and message: an empty message is sent as well.
    parts = [
        code + _text(str(value))
        for name, code in _REPORT_FIELDS
        if (value := getattr(report, name)) or name == "message"
    ]
    return b"".join(parts) + b"\0"
