"""The acceptor's side of PostgreSQL's protocol, version 3, as bytes: no socket, no clock.

A connection begins with packets without a type: requests for encryption, then one startup packet.
From then on each message is a type byte, a length of 4 bytes that counts itself, and a body.
`packet_bytes` and `body_bytes` check a length before any byte of the body is kept,
`StartupHandshake` lets a peer in, and `parse_command` reads its commands. `send` and the codecs
handle what is inside CopyData.

Bytes that are no message raise `MalformedFrame`, a peer that is not let in `AuthenticationFailed`,
an unknown command `WalRefused`.

Source: PostgreSQL's documentation, "Message Formats" and "Streaming Replication Protocol"; the
parameters that a proposer sends are Neon's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from actors.errors import (
    AuthenticationFailed,
    FrameTooLarge,
    MalformedFrame,
    PeerRejected,
    WalRefused,
)
from actors.wal.lsn import parse_lsn
from actors.wal.messages import WAL_BYTES_MAX

STARTUP_BYTES_MAX: Final = 10_000
QUERY_BYTES_MAX: Final = 8_192
PASSWORD_BYTES_MAX: Final = 16_384
"""Room for a long token."""
COPY_BYTES_MAX: Final = WAL_BYTES_MAX + 64 * 1024
"""Most bytes in one CopyData: a piece of log, or a greeting or history of some thousand entries."""

_SSL_REQUEST: Final = 80877103
_GSS_REQUEST: Final = 80877104
_CANCEL_REQUEST: Final = 80877102
_VERSION_3: Final = 3 << 16

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


def packet_bytes(header: bytes) -> int:
    """Return how many bytes follow a startup packet's length of 4 bytes. Raises `MalformedFrame`
    and `FrameTooLarge`."""
    (length,) = _U32.unpack(header)
    if length > STARTUP_BYTES_MAX:
        raise FrameTooLarge(
            f"a startup packet announces {length} bytes (limit {STARTUP_BYTES_MAX}): this port "
            "speaks PostgreSQL's protocol"
        )
    if length < 8:
        raise MalformedFrame(f"a startup packet of {length} bytes: it has at least 8")
    return int(length) - 4


def body_bytes(header: bytes) -> tuple[bytes, int]:
    """Return (type, bytes that follow) of a message's first 5 bytes. Raises `MalformedFrame` for a
    type that has no place here, `FrameTooLarge`."""
    kind = header[:1]
    (length,) = _U32.unpack_from(header, 1)
    limit = _LIMITS.get(kind)
    if limit is None:
        raise MalformedFrame(
            f"a message of type {kind!r}: only simple queries, a password and CopyData are "
            "understood here"
        )
    if length < 4:
        raise MalformedFrame(f"a message of type {kind!r} announces {length} bytes: at least 4")
    if length - 4 > limit:
        raise FrameTooLarge(
            f"a message of type {kind!r} announces {length - 4} bytes (limit {limit})"
        )
    return kind, int(length) - 4


# -- what peers send: contents ---------------------------------------------------------------------


class EncryptionRequest(msgspec.Struct, frozen=True):
    """SSLRequest, or (`gss`) GSSENCRequest."""

    gss: bool


class CancelRequest(msgspec.Struct, frozen=True):
    """A request to cancel a query of another connection; no query here can be cancelled."""


class StartupPacket(msgspec.Struct, frozen=True):
    """The parameters of a startup packet, as sent."""

    parameters: Mapping[str, str]


def parse_packet(body: bytes) -> EncryptionRequest | CancelRequest | StartupPacket:
    """Parse a packet without its length. Raises `MalformedFrame`."""
    if len(body) < 4:
        raise MalformedFrame(f"a startup packet of {len(body)} bytes after its length: at least 4")
    (code,) = _U32.unpack_from(body)
    if code in (_SSL_REQUEST, _GSS_REQUEST):
        if len(body) != 4:
            raise MalformedFrame(f"a request for encryption of {len(body)} bytes: it has 4")
        return EncryptionRequest(code == _GSS_REQUEST)
    if code == _CANCEL_REQUEST:
        return CancelRequest()
    if code >> 16 != 3:
        raise MalformedFrame(f"version {code >> 16}.{code & 0xFFFF} of the protocol: only 3 is")
    if not body.endswith(b"\0", 4):
        raise MalformedFrame("the parameters of a startup packet do not end with a NUL")
    texts = _texts(body[4:-1].split(b"\0"))
    if texts and texts[-1] == "":
        texts.pop()  # the terminator after the last value
    if len(texts) % 2:
        raise MalformedFrame(f"the parameter {texts[-1]!r} of a startup packet has no value")
    return StartupPacket(dict(zip(texts[::2], texts[1::2], strict=True)))


def _texts(parts: list[bytes]) -> list[str]:
    try:
        return [part.decode() for part in parts]
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"a text of a peer is no UTF-8: {error}") from None


def parse_text(body: bytes) -> str:
    """Parse the one text of a query, password or CopyFail. Raises `MalformedFrame`."""
    if body[-1:] != b"\0" or b"\0" in body[:-1]:
        raise MalformedFrame("a text of a peer does not end with one NUL")
    return _texts([body[:-1]])[0]


class ConnectionTarget(msgspec.Struct, frozen=True):
    """The tenant and timeline of a connection; empty where the peer did not name them."""

    tenant: str = ""
    timeline: str = ""


_KEYS: Final = {
    "tenant_id": "tenant",
    "ztenantid": "tenant",
    "timeline_id": "timeline",
    "ztimelineid": "timeline",
}


def split_options(options: str) -> list[str]:
    """Split `options` into words: whitespace separates, a backslash takes the next character as is.

    >>> split_options(r"-c  a=b\\ c")
    ['-c', 'a=b c']
    """
    words: list[str] = []
    word: list[str] | None = None
    escaped = False
    for character in options:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
            word = [] if word is None else word
            continue
        elif character.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        word.append(character)
    if word is not None:
        words.append("".join(word))
    return words


def parse_target(options: str) -> ConnectionTarget:
    """Parse tenant and timeline out of `options`; unknown keys are ignored. Raises `WalRefused` for
    a malformed id."""
    found: dict[str, str] = {}
    for word in split_options(options):
        key, sign, value = word.partition("=")
        if sign and key in _KEYS:
            found[_KEYS[key]] = checked_id(_KEYS[key], value.lower())
    return ConnectionTarget(**found)


def checked_id(name: str, value: str) -> str:
    """Return the id if it is one: it names a folder. Raises `PeerRejected`."""
    if len(value) != 32 or not _HEX.issuperset(value):
        raise PeerRejected(f"the {name} id {value[:64]!r} is none: give 32 hexadecimal digits")
    return value


class StartupAnswer(msgspec.Struct, frozen=True):
    """The reply to a packet or password: send `data`, then begin TLS, end, or go on."""

    data: bytes = b""
    begin_tls: bool = False
    ends: bool = False


class TenantGrant(msgspec.Struct, frozen=True):
    """The tenants that a password allows: one, or, if empty, all."""

    tenant: str = ""


class StartupHandshake:
    """Authenticates a peer, from its first packet until it is let in (`target` is set then).

    `has_tls`: TLS is offered and required. `knows` returns whether a password is one of our tokens,
    `check` what a signed token allows (it raises `AuthenticationFailed`); without both no password
    is asked for. Pass each packet to `packet`, then the password to `password` if `asks_password`.
    A tenant's token makes that tenant the target's.
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
        self._asked: set[bool] = set()
        self._waiting: ConnectionTarget | None = None
        self.target: ConnectionTarget | None = None

    @property
    def asks_password(self) -> bool:
        """Return whether a password must come next."""
        return self._waiting is not None

    def packet(self, body: bytes) -> StartupAnswer:
        """Handle a packet without its length. Raises `MalformedFrame`, `AuthenticationFailed`,
        `WalRefused`; then the caller sends an `error_response`, and the connection ends."""
        match parse_packet(body):
            case CancelRequest():
                return StartupAnswer(ends=True)
            case EncryptionRequest(gss):
                # Each request at most once, so that a handshake has an end.
                if gss in self._asked or self._encrypted:
                    raise MalformedFrame("encryption was asked for twice")
                self._asked.add(gss)
                # GSS encryption is never offered.
                if gss or not self._has_tls:
                    return StartupAnswer(b"N")
                self._encrypted = True
                return StartupAnswer(b"S", begin_tls=True)
            case StartupPacket(parameters):
                return self._started(parameters)

    def _started(self, parameters: Mapping[str, str]) -> StartupAnswer:
        if self._has_tls and not self._encrypted:
            raise AuthenticationFailed(
                "this port needs TLS: connect with sslmode=require or better"
            )
        target = parse_target(parameters.get("options", ""))
        if self._knows is None and self._check is None:
            self.target = target
            return StartupAnswer(_LET_IN)
        self._waiting = target
        return StartupAnswer(message(b"R", _U32.pack(3)))

    def password(self, body: bytes) -> StartupAnswer:
        """Handle a password message's body. Raises `AuthenticationFailed`, `MalformedFrame`."""
        if self._waiting is None:
            raise MalformedFrame("a password that nobody asked for")
        tenant = self._granted(parse_text(body).encode()).tenant
        target, self._waiting = self._waiting, None
        # A tenant's token opens that tenant alone, also where the connection names none.
        if tenant and target.tenant not in ("", tenant):
            raise AuthenticationFailed(f"the token is of tenant {tenant}, not of {target.tenant}")
        self.target = ConnectionTarget(tenant, target.timeline) if tenant else target
        return StartupAnswer(_LET_IN)

    def _granted(self, password: bytes) -> TenantGrant:
        if self._knows is not None and self._knows(password):
            return TenantGrant()
        if self._check is not None:
            return self._check(password)
        raise AuthenticationFailed("the password is none of this acceptor's tokens")


# -- commands --------------------------------------------------------------------------------------


class IdentifySystem(msgspec.Struct, frozen=True):
    """Asks for the log's system id and its end."""


class TimelineStatus(msgspec.Struct, frozen=True):
    """Asks for the flushed and the committed LSN."""


class AskPeerStatus(msgspec.Struct, frozen=True):
    """Asks for all positions that acceptors tell one another (ours: Neon's have a broker)."""


class AskReceivers(msgspec.Struct, frozen=True):
    """Asks which proposers are connected (ours: Neon's acceptors answer that over HTTP)."""


class StartWalPush(msgspec.Struct, frozen=True):
    """Begins the stream of a proposer."""

    version: int = 2
    allow_creation: bool = True


class StartReplication(msgspec.Struct, frozen=True):
    """Begins to read the log from `start_lsn` on: what is committed, or, with a `term`, all that is
    flushed for as long as the acceptor is in that term."""

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
    """Parse a simple query. Raises `WalRefused` for an unknown command."""
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
            return StartReplication(parse_lsn_of(found.group(1)), term)
    if (found := _SHOW.fullmatch(text)) is not None:
        return ShowParameter(found.group(1).lower())
    raise WalRefused(f"{text[:100]!r} is no command of this port; it knows {_COMMANDS}")


def parse_lsn_of(text: str) -> int:
    """Parse an LSN in a command. Raises `WalRefused`."""
    # `parse_lsn` would raise `InvalidUsage`: a peer's mistake is a `WalRefused`.
    if any(len(half) > 8 for half in text.split("/")):
        raise WalRefused(f"{text[:40]!r} is no LSN: it should look like 16/B374D848")
    return parse_lsn(text)


def _parse_push(options: str) -> StartWalPush:
    given: dict[str, str] = {}
    for part in options.split(",") if options.strip() else ():
        found = _OPTION.fullmatch(part)
        if found is None:
            raise WalRefused(f"START_WAL_PUSH: {part[:60]!r} is no option: write name 'value'")
        # Options that are not known are ignored.
        given[found.group(1)] = found.group(2)
    version = given.get("proto_version", "2")
    if version not in ("2", "3"):
        raise WalRefused(f"START_WAL_PUSH: proto_version {version[:20]!r}: only 2 and 3 are known")
    creation = given.get("allow_timeline_creation", "true")
    if creation not in ("true", "false"):
        raise WalRefused(f"allow_timeline_creation {creation[:20]!r}: give 'true' or 'false'")
    return StartWalPush(int(version), creation == "true")


# -- what is sent ----------------------------------------------------------------------------------


def message(kind: bytes, body: bytes = b"") -> bytes:
    """Return a message: type, length, body."""
    return kind + _U32.pack(len(body) + 4) + body


def copy_data(body: bytes) -> bytes:
    """Return a CopyData message with this body."""
    return message(b"d", body)


COPY_BOTH: Final = message(b"W", bytes(3))
"""Both sides send CopyData from here on; text format, no columns."""
COPY_DONE: Final = message(b"c")
READY: Final = message(b"Z", b"I")
"""ReadyForQuery: the next query may come."""


def _parameter(name: str, value: str) -> bytes:
    return message(b"S", f"{name}\0{value}\0".encode())


_LET_IN: Final = (
    message(b"R", _U32.pack(0))
    + _parameter("client_encoding", "UTF8")
    + _parameter("integer_datetimes", "on")
    + _parameter("server_version", "14.1")
    + READY
)
"""Lets a peer in. Proposers ignore the parameters; PostgreSQL's own receivers need the last two."""

INTERNAL_ERROR: Final = "XX000"
NO_PASSWORD: Final = "28P01"
SYNTAX_ERROR: Final = "42601"
COPY_FAILED: Final = "00000"
REJECTED: Final = "08004"
"""SQLSTATE with which PostgreSQL refuses a connection."""
REMOVED: Final = "58P01"
"""SQLSTATE with which PostgreSQL reports that a segment was removed already."""


def error_response(text: str, code: str = INTERNAL_ERROR) -> bytes:
    """Return an ErrorResponse: why the connection ends, or the query failed."""
    # A NUL would end the field.
    clean = text.replace("\0", " ")
    return message(b"E", f"SERROR\0VERROR\0C{code}\0M{clean}\0\0".encode(errors="replace"))


_TEXT_OID: Final = 25
_INT4_OID: Final = 23


def rows(columns: Mapping[str, type], found: list[tuple[str | int | None, ...]]) -> bytes:
    """Return a whole answer to a query, with its ReadyForQuery. Columns are `str` or `int`."""
    parts = [struct.pack("!H", len(columns))]
    for name, kind in columns.items():
        size, oid = (4, _INT4_OID) if kind is int else (-1, _TEXT_OID)
        parts.append(name.encode() + b"\0" + struct.pack("!IHIhih", 0, 0, oid, size, -1, 0))
    out = [message(b"T", b"".join(parts))]
    for row in found:
        cells = [struct.pack("!H", len(row))]
        for value in row:
            text = b"" if value is None else str(value).encode()
            cells.append(struct.pack("!i", -1 if value is None else len(text)) + text)
        out.append(message(b"D", b"".join(cells)))
    out.append(message(b"C", f"SELECT {len(found)}\0".encode()))
    return b"".join(out) + READY
