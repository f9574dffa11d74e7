"""Decodes what a client sends, from its first packet on. Pure.

A connection starts with packets that have no type: requests for encryption, then one startup packet
or one cancel request. From then on every message consists of a type byte, a length of 4 bytes that
includes itself, and a body. The length is checked before any byte of the body is kept.

Invalid bytes raise `MalformedFrame`, and too long messages raise `FrameTooLarge`. Both are
`RemoteProtocolError`s, after which the connection must end. The result does not depend on how the
bytes are split into pieces.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Final

from actors.model.pgwire.messages import (
    AuthenticationReply,
    BindPortal,
    CancelRequest,
    ClosePortal,
    CloseStatement,
    CopyInData,
    CopyInDone,
    CopyInFailure,
    DescribePortal,
    DescribePrepared,
    EncryptionRequest,
    ExecutePortal,
    FastpathCall,
    FlushOutput,
    FrontendMessage,
    ParseStatement,
    SimpleQuery,
    StartupPacket,
    SyncPipeline,
    TerminateSession,
)
from actors.runtime.errors import FrameTooLarge, InvalidUsage, MalformedFrame, RemoteProtocolError

STARTUP_BYTES_MAX: Final = 10_000
CANCEL_KEY_BYTES_MAX: Final = 256
PASSWORD_BYTES_MAX: Final = 16_384
"""Maximum size of a message before a client has logged in, with room for a long token."""

_SSL_REQUEST: Final = 80877103
_GSS_REQUEST: Final = 80877104
_CANCEL_REQUEST: Final = 80877102
_HEADER_BYTES: Final = 5
_WORD: Final = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_U16: Final = struct.Struct("!H")
_I32: Final = struct.Struct("!i")
_U32: Final = struct.Struct("!I")

# -- packets without a type ------------------------------------------------------------------------


def packet_bytes(header: bytes) -> int:
    """Return the number of bytes that follow the 4-byte length of a startup packet.

    Raises `MalformedFrame` or `FrameTooLarge`.
    """
    (length,) = _U32.unpack(header)
    if length > STARTUP_BYTES_MAX:
        raise FrameTooLarge(
            f"startup packet too large: {length} bytes (limit {STARTUP_BYTES_MAX}): this port "
            "speaks PostgreSQL's protocol"
        )
    if length < 8:
        raise MalformedFrame(f"startup packet too short: {length} bytes (at least 8)")
    return int(length) - 4


def parse_packet(body: bytes) -> EncryptionRequest | CancelRequest | StartupPacket:
    """Parse the body of a packet without a type. Raises `MalformedFrame`."""
    if len(body) < 4:
        raise MalformedFrame(f"startup packet too short: {len(body)} bytes after its length")
    (code,) = _U32.unpack_from(body)
    if code in (_SSL_REQUEST, _GSS_REQUEST):
        if len(body) != 4:
            raise MalformedFrame(f"invalid encryption request: {len(body)} bytes instead of 4")
        return EncryptionRequest(code == _GSS_REQUEST)
    if code == _CANCEL_REQUEST:
        if not 0 < len(body) - 8 <= CANCEL_KEY_BYTES_MAX:
            raise MalformedFrame(f"invalid cancel request: its key has {len(body) - 8} bytes")
        return CancelRequest(_U32.unpack_from(body, 4)[0], body[8:])
    if code >> 16 != 3:
        raise MalformedFrame(f"unsupported protocol version {code >> 16}.{code & 0xFFFF}")
    if not body.endswith(b"\0", 4):
        raise MalformedFrame("invalid startup packet: its parameters do not end with a NUL")
    texts = [_decoded(part) for part in body[4:-1].split(b"\0")]
    if texts and texts[-1] == "":
        texts.pop()  # the terminator after the last value
    if len(texts) % 2:
        raise MalformedFrame(f"invalid startup packet: parameter {texts[-1]!r} has no value")
    return StartupPacket(dict(zip(texts[::2], texts[1::2], strict=True)), code & 0xFFFF)


def split_options(options: str) -> list[str]:
    """Split the `options` of a startup packet into words. Whitespace separates words, and a
    backslash escapes the next character.

    >>> split_options(r"-c  a=b\\ c")
    ['-c', 'a=b c']
    """
    return [_ESCAPED.sub(r"\1", word) for word in _WORD.findall(options)]


def startup_variables(parameters: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings in a startup packet, including those in its `options`.

    >>> startup_variables({"user": "me", "application_name": "psql", "options": "-c a=1 --b-c=2"})
    [('application_name', 'psql'), ('a', '1'), ('b_c', '2')]

    Raises:
        InvalidUsage: The packet contains an unsupported option.
    """
    if parameters.get("replication", "off").lower() not in ("off", "false", "no", "0"):
        raise InvalidUsage("replication connections are not supported: leave replication out")
    found = [
        (name, value)
        for name, value in parameters.items()
        if name not in ("user", "database", "options", "replication")
        and not name.startswith("_pq_.")
    ]
    words = split_options(parameters.get("options", ""))
    while words:
        word = words.pop(0)
        if word == "-c" and words:
            word = "--" + words.pop(0)
        name, equals, value = word.removeprefix("--").removeprefix("-c").partition("=")
        if not word.startswith(("--", "-c")) or not equals or not name:
            raise InvalidUsage(f"invalid startup option {word[:64]!r}: expected -c name=value")
        found.append((name.replace("-", "_"), value))
    return found


# -- bodies of messages ----------------------------------------------------------------------------


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"invalid message: a string is not valid UTF-8: {error}") from None


def _take_text(body: bytes, at: int) -> tuple[str, int]:
    """Parse the text at `at`. Return it with the position after its NUL."""
    end = body.find(b"\0", at)
    if end < 0:
        raise MalformedFrame("invalid message: a string does not end with a NUL")
    return _decoded(body[at:end]), end + 1


def parse_text(body: bytes) -> str:
    """Parse a body that is a single text: a query, a password, or a CopyFail. Raises
    `MalformedFrame`."""
    text, end = _take_text(body, 0)
    if end != len(body):
        raise MalformedFrame("invalid message: its string does not end with a single NUL")
    return text


def _take_formats(body: bytes, at: int) -> tuple[tuple[int, ...], int]:
    (count,) = _U16.unpack_from(body, at)
    # A count from the wire is bounded by the remaining bytes, because `unpack_from` checks them
    # first.
    codes = struct.unpack_from(f"!{count}h", body, at + 2)
    if any(code not in (0, 1) for code in codes):
        raise MalformedFrame(f"invalid formats {sorted(set(codes))}: must be 0 or 1")
    return codes, at + 2 + 2 * count


def _check_end(body: bytes, at: int, message: str) -> None:
    if at != len(body):
        raise MalformedFrame(f"invalid {message} message: {len(body) - at} bytes too long")


def _parse_parse(body: bytes) -> ParseStatement:
    name, at = _take_text(body, 0)
    query, at = _take_text(body, at)
    (count,) = _U16.unpack_from(body, at)
    oids = struct.unpack_from(f"!{count}I", body, at + 2)
    _check_end(body, at + 2 + 4 * count, "Parse")
    return ParseStatement(name, query, oids)


def _parse_bind(body: bytes) -> BindPortal:
    portal, at = _take_text(body, 0)
    statement, at = _take_text(body, at)
    formats, at = _take_formats(body, at)
    (count,) = _U16.unpack_from(body, at)
    at += 2
    if len(formats) > 1 and len(formats) != count:
        raise MalformedFrame(f"invalid Bind: {len(formats)} formats for {count} parameters")
    values: list[bytes | None] = []
    for _ in range(count):
        (length,) = _I32.unpack_from(body, at)
        at += 4
        if length == -1:
            values.append(None)
            continue
        if not 0 <= length <= len(body) - at:
            raise MalformedFrame(
                f"invalid Bind: a parameter of {length} bytes, but {len(body) - at} are left"
            )
        values.append(body[at : at + length])
        at += length
    results, at = _take_formats(body, at)
    _check_end(body, at, "Bind")
    return BindPortal(portal, statement, formats, tuple(values), results)


def _named(
    verb: str,
    body: bytes,
    statement: Callable[[str], FrontendMessage],
    portal: Callable[[str], FrontendMessage],
) -> FrontendMessage:
    """Parse a body that names a prepared statement or a portal."""
    name = parse_text(body[1:])
    match body[:1]:
        case b"S":
            return statement(name)
        case b"P":
            return portal(name)
        case other:
            raise MalformedFrame(f"invalid {verb} of {other!r}: must be S or P")


def _parse_execute(body: bytes) -> ExecutePortal:
    portal, at = _take_text(body, 0)
    (rows_max,) = _I32.unpack_from(body, at)
    _check_end(body, at + 4, "Execute")
    # PostgreSQL treats a negative limit as none.
    return ExecutePortal(portal, max(rows_max, 0))


_PARSERS: Final[dict[int, Callable[[bytes], FrontendMessage]]] = {
    ord("Q"): lambda body: SimpleQuery(parse_text(body)),
    ord("P"): _parse_parse,
    ord("B"): _parse_bind,
    ord("D"): lambda body: _named("Describe", body, DescribePrepared, DescribePortal),
    ord("E"): _parse_execute,
    ord("C"): lambda body: _named("Close", body, CloseStatement, ClosePortal),
    ord("F"): FastpathCall,
    ord("d"): CopyInData,
    ord("f"): lambda body: CopyInFailure(parse_text(body)),
    ord("p"): AuthenticationReply,
}
_EMPTY: Final[dict[int, FrontendMessage]] = {
    ord("H"): FlushOutput(),
    ord("S"): SyncPipeline(),
    ord("c"): CopyInDone(),
    ord("X"): TerminateSession(),
}
_PASSWORD: Final = ord("p")
_TERMINATE: Final = ord("X")


class _Phase(Enum):
    STARTUP = "a packet without a type comes next"
    ENCRYPTION = "the answer to a request for encryption is awaited"
    AUTHENTICATION = "replies to an authentication request come next"
    QUERIES = "messages of the session come next"
    CANCEL = "nothing comes: the connection was for a cancel request"


class FrontendDecoder:
    """Decodes the bytes of one connection, which `feed` receives in pieces of any size.

    The decoder keeps one incomplete message, of at most `message_bytes_max` bytes
    (`password_bytes_max` before `admit`), and the last piece. After an `EncryptionRequest` it
    decodes nothing until `decline_encryption` or `begin_encryption` is called. After a
    `StartupPacket` it decodes only replies to authentication requests, until `admit` is called.
    """

    def __init__(
        self, message_bytes_max: int, password_bytes_max: int = PASSWORD_BYTES_MAX
    ) -> None:
        self._message_bytes_max = message_bytes_max
        self._password_bytes_max = password_bytes_max
        self._buffer = bytearray()
        """Bytes fed and not dropped yet."""
        self._at = 0
        """Position of the next message in the buffer."""
        self._phase = _Phase.STARTUP
        """The kind of bytes that may come next."""
        self._asked: set[bool] = set()
        """Kinds of encryption requested so far (`EncryptionRequest.gss`)."""
        self._encrypted = False
        """True once encryption was accepted."""
        self._failure: RemoteProtocolError | None = None
        """The error that ended decoding; None until then."""

    @property
    def buffered_bytes(self) -> int:
        """Return the number of bytes that were fed and not decoded yet."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[FrontendMessage]:
        """Add the next bytes and yield every complete message.

        Messages not taken from the iterator come from the iterator of the next call. Raises
        `MalformedFrame` or `FrameTooLarge` after the messages before the error.
        """
        # Once per piece and not per message, because dropping bytes moves the rest.
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        # Nothing is expected after a cancel request, so keep nothing.
        if self._phase is not _Phase.CANCEL:
            self._buffer += data
        return self._messages()

    def decline_encryption(self) -> None:
        """Continue after the answer `ENCRYPTION_DECLINED` to an `EncryptionRequest`."""
        assert self._phase is _Phase.ENCRYPTION, self._phase
        self._phase = _Phase.STARTUP

    def begin_encryption(self) -> None:
        """Continue with decrypted bytes after an `EncryptionRequest` was accepted.

        Raises `MalformedFrame` if unencrypted bytes follow the request.
        """
        assert self._phase is _Phase.ENCRYPTION, self._phase
        # Unencrypted bytes would be mistaken for decrypted ones (CVE-2021-23214).
        if self.buffered_bytes:
            raise MalformedFrame(
                f"{self.buffered_bytes} unencrypted bytes arrived after a request for encryption"
            )
        # From now on the caller passes decrypted bytes.
        self._encrypted = True
        self._phase = _Phase.STARTUP

    def admit(self) -> None:
        """Continue with the messages of the session, because the client has logged in."""
        assert self._phase is _Phase.AUTHENTICATION, self._phase
        self._phase = _Phase.QUERIES

    def _messages(self) -> Iterator[FrontendMessage]:
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                message = self._next()
            except struct.error:
                self._failure = MalformedFrame("invalid message: it ends within a field")
                raise self._failure from None
            except RemoteProtocolError as error:
                self._failure = error
                raise
            if message is None:
                return
            yield message

    def _next(self) -> FrontendMessage | None:
        """Return the next message; None if more bytes are needed."""
        match self._phase:
            case _Phase.STARTUP:
                return self._next_packet()
            case _Phase.ENCRYPTION:
                # A caller that keeps feeding must not fill the memory.
                if self.buffered_bytes > STARTUP_BYTES_MAX:
                    raise FrameTooLarge(
                        f"{self.buffered_bytes} bytes followed a request for encryption"
                    )
                return None
            case _Phase.CANCEL:
                return None
            case _:
                return self._next_message()

    def _next_packet(self) -> FrontendMessage | None:
        if self.buffered_bytes < 4:
            return None
        size = packet_bytes(bytes(self._buffer[self._at : self._at + 4]))
        if self.buffered_bytes < 4 + size:
            return None
        packet = parse_packet(self._take(4, size))
        match packet:
            case EncryptionRequest(gss):
                # Each kind at most once, so that the handshake ends.
                if self._encrypted or gss in self._asked:
                    raise MalformedFrame("encryption was requested twice")
                self._asked.add(gss)
                self._phase = _Phase.ENCRYPTION
            case CancelRequest():
                self._phase = _Phase.CANCEL
                self._buffer.clear()
                self._at = 0
            case StartupPacket():
                self._phase = _Phase.AUTHENTICATION
        return packet

    def _next_message(self) -> FrontendMessage | None:
        if self.buffered_bytes < _HEADER_BYTES:
            return None
        kind = self._buffer[self._at]
        (length,) = _U32.unpack_from(self._buffer, self._at + 1)
        self._check_length(kind, length - 4)
        if self.buffered_bytes < 1 + length:
            return None
        body = self._take(_HEADER_BYTES, length - 4)
        if (empty := _EMPTY.get(kind)) is not None:
            return empty
        return _PARSERS[kind](body)

    def _check_length(self, kind: int, size: int) -> None:
        shown = bytes([kind])
        if kind not in _PARSERS and kind not in _EMPTY:
            raise MalformedFrame(f"unknown message type {shown!r}")
        limit = self._message_bytes_max
        if self._phase is _Phase.AUTHENTICATION:
            if kind not in (_PASSWORD, _TERMINATE):
                raise MalformedFrame(f"message of type {shown!r} before the login")
            # A client that has not logged in must not make the server keep much.
            limit = min(limit, self._password_bytes_max)
        if size < 0:
            raise MalformedFrame(f"invalid length of a message of type {shown!r}: {size + 4}")
        if size > limit:
            raise FrameTooLarge(
                f"message of type {shown!r} too large: {size} bytes (limit {limit})"
            )
        if size and kind in _EMPTY:
            raise MalformedFrame(f"message of type {shown!r} must be empty: {size} bytes")

    def _take(self, head: int, size: int) -> bytes:
        """Take the body of `size` bytes that follows a header."""
        start = self._at + head
        self._at = start + size
        # Use a view, because a slice of the buffer would be another copy.
        with memoryview(self._buffer) as view, view[start : self._at] as body:
            return bytes(body)
