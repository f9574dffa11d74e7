"""Handshake of a connection: protocol, version, service and token.

Each side at once writes its opening: 8 bytes of magic, a u16 version, and its identity (u8 length,
UTF-8). The identity is the service's name: the listener's own, the dialler's expectation; empty:
unknown. Magic and version must be equal, and the identities if both are known. Then the dialler
sends its token (u16 length, bytes; empty: none), and the listener answers with a u8 length: 0
accepts, else so many bytes of text give the reason. Over TLS all of this follows the TLS handshake.
Callers set a time limit for the whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    IncompatibleVersion,
    LocalProtocolError,
    MalformedFrame,
    ResourceBusy,
    WrongService,
)

OPENING: Final = struct.Struct(">8sH")
LENGTH: Final = struct.Struct(">H")
BUSY_MAGIC: Final = b"PENSBUSY"
BEARER_BYTES_MAX: Final = 4096
TEXT_BYTES_MAX: Final = 255


class HandshakeStream(Protocol):
    """The byte stream of a connection, as the handshake needs it."""

    async def read_exactly(self, count: int, /) -> bytes:
        """Return the next `count` bytes. Raises `ConnectionBroken`."""
        ...

    def write(self, data: bytes, /) -> None:
        """Write bytes."""
        ...


class HandshakeOpening(msgspec.Struct, frozen=True):
    """The opening of one side. `identity`: the name of the service, if it is known."""

    magic: bytes
    version: int = 1
    identity: str = ""

    def encode(self) -> bytes:
        """Return the encoded opening. Raises `LocalProtocolError` for an identity that is too
        long."""
        assert len(self.magic) == 8, f"a magic has 8 bytes, {self.magic!r} has {len(self.magic)}"
        name = self.identity.encode()
        if len(name) > TEXT_BYTES_MAX:
            raise LocalProtocolError(f"an identity has at most {TEXT_BYTES_MAX} bytes: {name!r}")
        return OPENING.pack(self.magic, self.version) + bytes([len(name)]) + name


async def exchange(stream: HandshakeStream, mine: HandshakeOpening) -> str:
    """Exchange openings and return the peer's identity. Raises `ResourceBusy`, `MalformedFrame`,
    `IncompatibleVersion`, `WrongService`, `ConnectionBroken`."""
    stream.write(mine.encode())
    magic = mine.magic
    theirs = await _magic(stream, magic)
    (version,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if theirs == BUSY_MAGIC:
        raise ResourceBusy(
            "the service has as many connections as it takes (connections_max); try later"
        )
    # Messages are decoded by shape: another version could be decoded wrongly.
    if version != mine.version and magic != BUSY_MAGIC:
        raise IncompatibleVersion(
            f"the peer speaks version {version} of {magic!r}, this side {mine.version}"
        )
    length = (await stream.read_exactly(1))[0]
    identity = _text(await stream.read_exactly(length), "identity")
    if identity and mine.identity and identity != mine.identity and magic != BUSY_MAGIC:
        raise WrongService(
            f"the peer's service is {identity!r}, this side's is {mine.identity!r} (identity): "
            "check the address"
        )
    return identity


async def _magic(stream: HandshakeStream, magic: bytes) -> bytes:
    """Return the peer's magic. Raises `MalformedFrame` for a foreign protocol."""
    theirs = b""
    while len(theirs) < len(magic):
        try:
            # Byte by byte: a foreign peer may send fewer than 8 and wait.
            theirs += await stream.read_exactly(1)
        except ConnectionBroken as error:
            if theirs:
                break
            raise ConnectionBroken(
                f"the peer closed the connection before its opening ({error}); does one of both "
                "speak TLS and the other not?"
            ) from None
        if magic != BUSY_MAGIC and not (magic.startswith(theirs) or BUSY_MAGIC.startswith(theirs)):
            break
    if theirs not in (magic, BUSY_MAGIC) and magic != BUSY_MAGIC:
        raise MalformedFrame(f"the peer opened with {theirs!r}, not with {magic!r}")
    return theirs


async def send_token(stream: HandshakeStream, token: bytes) -> None:
    """Send the dialler's token (empty: none). Raises `AuthenticationFailed` when refused."""
    if len(token) > BEARER_BYTES_MAX:
        raise LocalProtocolError(f"a token has at most {BEARER_BYTES_MAX} bytes, not {len(token)}")
    stream.write(LENGTH.pack(len(token)) + token)
    length = (await stream.read_exactly(1))[0]
    if length:
        raise AuthenticationFailed(_text(await stream.read_exactly(length), "refusal"))


async def check_token(stream: HandshakeStream, known: Callable[[bytes], bool] | None) -> None:
    """Check the dialler's token; `known` None: any is accepted. Raises `AuthenticationFailed`,
    after having told the peer."""
    (length,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if length > BEARER_BYTES_MAX:
        raise MalformedFrame(f"a token has at most {BEARER_BYTES_MAX} bytes, not {length}")
    token = await stream.read_exactly(length)
    if known is None or known(token):
        stream.write(b"\x00")
        return
    text = "the token is unknown here" if token else "this service asks for a token (token_file)"
    stream.write(bytes([len(text)]) + text.encode())
    raise AuthenticationFailed(text)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedFrame(f"the peer's {what} is no UTF-8: {data!r}") from None
