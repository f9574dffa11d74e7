"""The acceptor's side of PostgreSQL's protocol, version 3, as bytes: no socket, no clock.

A connection starts with packets without a type: requests for encryption, then one startup packet.
From then on each message consists of a type byte, a length of 4 bytes that includes itself, and a
body. `body_bytes` checks a length before any byte of the body is kept (`packet_bytes` that of a
packet), `StartupHandshake` authenticates a peer, and `parse_command` parses its commands.
`replication` and the codecs handle what is inside CopyData.

Bytes that are not a valid message raise `MalformedFrame`, a peer that is not authenticated
`AuthenticationFailed`, and an unknown command `WalRefused`.

Source: PostgreSQL's documentation, "Message Formats" and "Streaming Replication Protocol"; the
parameters that a proposer sends are Neon's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from actors.model.pgwire.decoder import parse_packet, parse_text, split_options
from actors.model.pgwire.messages import (
    AUTHENTICATION_OK,
    CLEARTEXT_PASSWORD_REQUEST,
    ENCRYPTION_ACCEPTED,
    ENCRYPTION_DECLINED,
    CancelRequest,
    EncryptionRequest,
    ErrorReport,
    FieldDescription,
    StartupPacket,
    encode_command_complete,
    encode_error,
    encode_message,
    encode_parameter_status,
    encode_ready,
    encode_row_description,
)
from actors.model.pgwire.type_oids import INT4, TEXT, sized
from actors.runtime.errors import (
    AuthenticationFailed,
    FrameTooLarge,
    InvalidUsage,
    MalformedFrame,
    PeerRejected,
    WalRefused,
)
from actors.wal.lsn import parse_lsn
from actors.wal.messages import WAL_BYTES_MAX

QUERY_BYTES_MAX: Final = 8_192
PASSWORD_BYTES_MAX: Final = 16_384
"""Room for a long token."""
COPY_BYTES_MAX: Final = WAL_BYTES_MAX + 64 * 1024
"""Maximum size of one CopyData: a piece of log, or a greeting or history of some thousand
entries."""


_LIMITS: Final = {
    b"Q": QUERY_BYTES_MAX,
    b"p": PASSWORD_BYTES_MAX,
    b"d": COPY_BYTES_MAX,
    b"c": 0,
    b"f": QUERY_BYTES_MAX,
    b"X": 0,
}
_U32: Final = struct.Struct("!I")
_HEX: Final = frozenset("0123456789abcdef")

# -- what peers send: sizes ------------------------------------------------------------------------


def body_bytes(header: bytes, bytes_max: int = COPY_BYTES_MAX) -> tuple[bytes, int]:
    """Return (type, number of bytes that follow) for the first 5 bytes of a message.

    Raise `MalformedFrame` for a type that is not allowed here, and `FrameTooLarge`, also if it is
    above `bytes_max`.
    """
    kind = header[:1]
    (length,) = _U32.unpack_from(header, 1)
    limit = _LIMITS.get(kind)
    if limit is None:
        raise MalformedFrame(
            f"unsupported message type {kind!r}: only simple queries, a password and CopyData are "
            "accepted here"
        )
    if length < 4:
        raise MalformedFrame(
            f"invalid length {length} of a message of type {kind!r}: must be at least 4"
        )
    limit = min(limit, bytes_max)
    if length - 4 > limit:
        raise FrameTooLarge(
            f"message of type {kind!r} too large: {length - 4} bytes (limit {limit})"
        )
    return kind, int(length) - 4


# -- what peers send: contents ---------------------------------------------------------------------


class ConnectionTarget(msgspec.Struct, frozen=True):
    """The tenant and timeline of a connection; "" if the peer did not name them."""

    tenant: str = ""
    timeline: str = ""


_KEYS: Final = {
    "tenant_id": "tenant",
    "ztenantid": "tenant",
    "timeline_id": "timeline",
    "ztimelineid": "timeline",
}


def parse_target(options: str) -> ConnectionTarget:
    """Parse tenant and timeline from `options`. Unknown keys are ignored. Raise `WalRefused` for a
    malformed id."""
    found: dict[str, str] = {}
    for word in split_options(options):
        key, sign, value = word.partition("=")
        if sign and key in _KEYS:
            found[_KEYS[key]] = checked_id(_KEYS[key], value.lower())
    return ConnectionTarget(**found)


def checked_id(name: str, value: str) -> str:
    """Return the id if it is valid, because it names a folder. Raise `PeerRejected`."""
    if len(value) != 32 or not _HEX.issuperset(value):
        raise PeerRejected(f"invalid {name} id {value[:64]!r}: expected 32 hexadecimal digits")
    return value


class StartupAnswer(msgspec.Struct, frozen=True):
    """The reply to a packet or password: send `data`, then start TLS, end, or continue."""

    data: bytes = b""
    begin_tls: bool = False
    ends: bool = False


class TenantGrant(msgspec.Struct, frozen=True):
    """The tenants that a password allows: one, or all if empty."""

    tenant: str = ""


class StartupHandshake:
    """Authenticates a peer, from its first packet until `target` is set.

    With `has_tls`, TLS is offered and required. `knows` returns whether a password is one of our
    tokens; `check` returns what a signed token allows (it raises `AuthenticationFailed`). Without
    both, no password is requested. Pass each packet to `packet`, then the password to `password` if
    `asks_password`. A tenant's token makes that tenant the target's.
    """

    def __init__(
        self,
        *,
        has_tls: bool,
        knows: Callable[[bytes], bool] | None,
        check: Callable[[bytes], TenantGrant] | None = None,
    ) -> None:
        self._has_tls = has_tls
        self._knows = knows
        self._check = check
        self._encrypted = False
        """True once TLS has been accepted."""
        self._requested: set[bool] = set()
        """Requests for encryption so far: True for GSS, False for TLS."""
        self._awaiting_password: ConnectionTarget | None = None
        """Target of a peer whose password is awaited."""
        self.target: ConnectionTarget | None = None
        """Target of the peer, once it is authenticated."""

    @property
    def asks_password(self) -> bool:
        """Return whether a password must come next."""
        return self._awaiting_password is not None

    def packet(self, body: bytes) -> StartupAnswer:
        """Handle a packet without its length.

        Raise `MalformedFrame`, `AuthenticationFailed` or `WalRefused`; then the caller sends an
        `error_response`, and the connection ends.
        """
        match parse_packet(body):
            case CancelRequest():
                return StartupAnswer(ends=True)
            case EncryptionRequest(gss):
                # Accept each request at most once, so that a handshake ends.
                if gss in self._requested or self._encrypted:
                    raise MalformedFrame("encryption was requested twice")
                self._requested.add(gss)
                # GSS encryption is never offered.
                if gss or not self._has_tls:
                    return StartupAnswer(ENCRYPTION_DECLINED)
                self._encrypted = True
                return StartupAnswer(ENCRYPTION_ACCEPTED, begin_tls=True)
            case StartupPacket(parameters):
                return self._started(parameters)

    def _started(self, parameters: Mapping[str, str]) -> StartupAnswer:
        if self._has_tls and not self._encrypted:
            raise AuthenticationFailed(
                "this port requires TLS: connect with sslmode=require or better"
            )
        target = parse_target(parameters.get("options", ""))
        if self._knows is None and self._check is None:
            self.target = target
            return StartupAnswer(_LET_IN)
        self._awaiting_password = target
        return StartupAnswer(CLEARTEXT_PASSWORD_REQUEST)

    def password(self, body: bytes) -> StartupAnswer:
        """Handle the body of a password message. Raise `AuthenticationFailed` or
        `MalformedFrame`."""
        if self._awaiting_password is None:
            raise MalformedFrame("got a password that was not requested")
        tenant = self._granted(parse_text(body).encode()).tenant
        target, self._awaiting_password = self._awaiting_password, None
        # A tenant's token is valid only for that tenant, even if the connection names none.
        if tenant and target.tenant not in ("", tenant):
            raise AuthenticationFailed(f"the token is for tenant {tenant}, not for {target.tenant}")
        self.target = ConnectionTarget(tenant, target.timeline) if tenant else target
        return StartupAnswer(_LET_IN)

    def _granted(self, password: bytes) -> TenantGrant:
        if self._knows is not None and self._knows(password):
            return TenantGrant()
        if self._check is not None:
            return self._check(password)
        raise AuthenticationFailed("invalid password: it is not one of this acceptor's tokens")


# -- commands --------------------------------------------------------------------------------------


class IdentifySystem(msgspec.Struct, frozen=True):
    """Asks for the log's system id and its end."""


class TimelineStatus(msgspec.Struct, frozen=True):
    """Asks for the flushed and the committed LSN."""


class AskPeerStatus(msgspec.Struct, frozen=True):
    """Asks for all positions that acceptors exchange (our own command: Neon uses a broker)."""


class AskReceivers(msgspec.Struct, frozen=True):
    """Asks which proposers are connected (our own command: Neon's acceptors answer this over
    HTTP)."""


class StartWalPush(msgspec.Struct, frozen=True):
    """Starts the stream of a proposer."""

    version: int = 2
    allow_creation: bool = True


class StartReplication(msgspec.Struct, frozen=True):
    """Starts to read the log from `start_lsn` on.

    Without a `term`, what is committed is read; with one, everything that is flushed, for as long
    as the acceptor is in that term.
    """

    start_lsn: int
    term: int | None = None


class ShowParameter(msgspec.Struct, frozen=True):
    """Asks for a parameter, as PostgreSQL's own receivers do."""

    name: str


Command: TypeAlias = (
    IdentifySystem
    | TimelineStatus
    | AskPeerStatus
    | AskReceivers
    | StartWalPush
    | StartReplication
    | ShowParameter
)

_OPTION: Final = re.compile(r"\s*([a-z_]+)\s+'([^']*)'\s*")
_REPLICATION: Final = re.compile(
    r"START_REPLICATION(?:\s+SLOT\s+\S+)?(?:\s+PHYSICAL)?\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)"
    r"(?:\s+TIMELINE\s+\d+)?\s*(?:\(\s*term\s*=?\s*'(\d{1,20})'\s*\))?",
    re.IGNORECASE,
)
_PUSH: Final = re.compile(r"START_WAL_PUSH\s*(?:\((.*)\))?", re.IGNORECASE)
_SHOW: Final = re.compile(r'SHOW\s+"?([a-z_]+)"?', re.IGNORECASE)
_COMMANDS: Final = (
    "IDENTIFY_SYSTEM, TIMELINE_STATUS, PEER_STATUS, RECEIVER_STATUS, START_WAL_PUSH, "
    "START_REPLICATION PHYSICAL X/X, SHOW"
)


def parse_command(query: str) -> Command:
    """Parse a simple query. Raise `WalRefused` for an unknown command."""
    text = query.strip().rstrip(";").strip()
    word = text.upper()
    if word == "IDENTIFY_SYSTEM":
        return IdentifySystem()
    if word == "TIMELINE_STATUS":
        return TimelineStatus()
    if word == "PEER_STATUS":
        return AskPeerStatus()
    if word == "RECEIVER_STATUS":
        return AskReceivers()
    if (found := _PUSH.fullmatch(text)) is not None:
        return _parse_push(found.group(1) or "")
    if (found := _REPLICATION.fullmatch(text)) is not None:
        term = None if found.group(2) is None else int(found.group(2))
        # Twenty digits may exceed the 64 bits of a term.
        if term is None or term < 1 << 64:
            try:
                return StartReplication(parse_lsn(found.group(1)), term)
            except InvalidUsage as error:
                raise WalRefused(str(error)) from None
    if (found := _SHOW.fullmatch(text)) is not None:
        return ShowParameter(found.group(1).lower())
    raise WalRefused(f"unknown command {text[:100]!r}: expected one of {_COMMANDS}")


def _parse_push(options: str) -> StartWalPush:
    given: dict[str, str] = {}
    for part in options.split(",") if options.strip() else ():
        found = _OPTION.fullmatch(part)
        if found is None:
            raise WalRefused(
                f"invalid option of START_WAL_PUSH {part[:60]!r}: expected name 'value'"
            )
        # Unknown options are ignored.
        given[found.group(1)] = found.group(2)
    version = given.get("proto_version", "2")
    if version not in ("2", "3"):
        raise WalRefused(
            f"unsupported proto_version {version[:20]!r} of START_WAL_PUSH: expected 2 or 3"
        )
    creation = given.get("allow_timeline_creation", "true")
    if creation not in ("true", "false"):
        raise WalRefused(
            f"invalid allow_timeline_creation {creation[:20]!r}: expected 'true' or 'false'"
        )
    return StartWalPush(int(version), creation == "true")


# -- what is sent ----------------------------------------------------------------------------------


COPY_BOTH: Final = encode_message(b"W", bytes(3))
"""Both sides send CopyData from here on; text format, no columns."""
READY: Final = encode_ready(b"I")
"""ReadyForQuery: the next query may be sent."""

_LET_IN: Final = (
    AUTHENTICATION_OK
    + encode_parameter_status("client_encoding", "UTF8")
    + encode_parameter_status("integer_datetimes", "on")
    + encode_parameter_status("server_version", "14.1")
    + READY
)
"""Accepts a peer. Proposers ignore the parameters; PostgreSQL's own receivers need the last two."""

INTERNAL_ERROR: Final = "XX000"
NO_PASSWORD: Final = "28P01"
SYNTAX_ERROR: Final = "42601"
COPY_FAILED: Final = "00000"
REJECTED: Final = "08004"
"""SQLSTATE with which PostgreSQL refuses a connection."""
TOO_MANY: Final = "53300"
"""SQLSTATE with which PostgreSQL reports that there are too many clients."""
REMOVED: Final = "58P01"
"""SQLSTATE with which PostgreSQL reports that a segment was already removed."""


def error_response(text: str, code: str = INTERNAL_ERROR) -> bytes:
    """Return an ErrorResponse that says why the connection ends, or why the query failed."""
    return encode_error(ErrorReport(code, text))


def rows(columns: Mapping[str, type], found: list[tuple[str | int | None, ...]]) -> bytes:
    """Return a complete answer to a query, including ReadyForQuery. Columns are `str` or `int`."""
    fields = [
        FieldDescription(name, sized(INT4 if kind is int else TEXT))
        for name, kind in columns.items()
    ]
    out = [encode_row_description(fields)]
    for row in found:
        cells = [struct.pack("!H", len(row))]
        for value in row:
            text = b"" if value is None else str(value).encode()
            cells.append(struct.pack("!i", -1 if value is None else len(text)) + text)
        out.append(encode_message(b"D", b"".join(cells)))
    out.append(encode_command_complete(f"SELECT {len(found)}"))
    return b"".join(out) + READY
