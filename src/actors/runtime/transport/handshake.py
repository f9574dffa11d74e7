"""The handshake of a connection: protocol, version, service and token.

1. Both sides write their opening without waiting for the other's: 8 bytes of magic, a u16 version,
   and an identity (u8 length, UTF-8). The identity is the name of the service: the listener sends
   its own, the connecting side the one that it expects; empty means unknown. Magic and version must
   be equal, and so must the identities if both are known.
2. The connecting side sends its token (u16 length, bytes; empty: none).
3. The listener answers with a u8 length. 0 accepts the token; otherwise this many bytes of text
   give the reason for the refusal.

With TLS all of this follows the TLS handshake. Callers limit the time of the whole handshake.
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
"""Magic of a listener that refuses the connection because it has too many."""
BEARER_BYTES_MAX: Final = 4096
"""Maximum length of a token."""
TEXT_BYTES_MAX: Final = 255
"""Maximum length of an identity."""


class HandshakeStream(Protocol):
    """The byte stream operations that the handshake needs."""

    async def read_exactly(self, count: int, /) -> bytes:
        """Return the next `count` bytes. Raises `ConnectionBroken`."""
        ...

    def write(self, data: bytes, /) -> None:
        """Write bytes."""
        ...


class HandshakeOpening(msgspec.Struct, frozen=True):
    """The opening of one side. `identity` is the name of the service, "" if unknown."""

    magic: bytes
    version: int = 1
    identity: str = ""

    def encode(self) -> bytes:
        """Encode the opening. Raises `LocalProtocolError` if the identity is too long."""
        assert len(self.magic) == 8, f"a magic has 8 bytes, {self.magic!r} has {len(self.magic)}"
        name = self.identity.encode()
        if len(name) > TEXT_BYTES_MAX:
            raise LocalProtocolError(
                f"identity {self.identity!r} is too long: at most {TEXT_BYTES_MAX} bytes"
            )
        return OPENING.pack(self.magic, self.version) + bytes([len(name)]) + name


async def exchange(stream: HandshakeStream, mine: HandshakeOpening) -> str:
    """Exchange openings and return the peer's identity.

    Raises `ResourceBusy`, `MalformedFrame`, `IncompatibleVersion`, `WrongService` or
    `ConnectionBroken`.
    """
    stream.write(mine.encode())
    magic = mine.magic
    theirs = await _magic(stream, magic)
    (version,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if theirs == BUSY_MAGIC:
        raise ResourceBusy(
            "the service has too many connections (connections_max): try again later"
        )
    # Messages are decoded by their shape, so those of another version could be decoded wrongly.
    if version != mine.version and magic != BUSY_MAGIC:
        raise IncompatibleVersion(
            f"the peer speaks version {version} of {magic!r}, this side version {mine.version}"
        )
    length = (await stream.read_exactly(1))[0]
    identity = _text(await stream.read_exactly(length), "identity")
    if identity and mine.identity and identity != mine.identity and magic != BUSY_MAGIC:
        raise WrongService(
            f"the peer belongs to service {identity!r}, expected {mine.identity!r} (identity): "
            "check the address"
        )
    return identity


async def _magic(stream: HandshakeStream, magic: bytes) -> bytes:
    """Read the peer's magic. Raises `MalformedFrame` if the peer speaks another protocol."""
    theirs = b""
    while len(theirs) < len(magic):
        try:
            # Byte by byte, because a peer of another protocol may send fewer than 8 and wait.
            theirs += await stream.read_exactly(1)
        except ConnectionBroken as error:
            if theirs:
                break
            raise ConnectionBroken(
                f"the peer closed the connection before its opening ({error}): check that both "
                "sides use TLS, or neither"
            ) from None
        if magic != BUSY_MAGIC and not (magic.startswith(theirs) or BUSY_MAGIC.startswith(theirs)):
            break
    if theirs not in (magic, BUSY_MAGIC) and magic != BUSY_MAGIC:
        raise MalformedFrame(f"the peer speaks another protocol: got {theirs!r}, not {magic!r}")
    return theirs


async def send_token(stream: HandshakeStream, token: bytes) -> None:
    """Send a token (empty: none) to the listener. Raises `AuthenticationFailed` if refused."""
    if len(token) > BEARER_BYTES_MAX:
        raise LocalProtocolError(f"token too long: {len(token)} bytes (limit {BEARER_BYTES_MAX})")
    stream.write(LENGTH.pack(len(token)) + token)
    length = (await stream.read_exactly(1))[0]
    if length:
        raise AuthenticationFailed(_text(await stream.read_exactly(length), "refusal"))


async def check_token(stream: HandshakeStream, known: Callable[[bytes], bool] | None) -> None:
    """Read the peer's token and answer it. `known` decides about a token; None accepts any.

    Raises `AuthenticationFailed` after sending the refusal to the peer.
    """
    (length,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if length > BEARER_BYTES_MAX:
        raise MalformedFrame(f"token too long: {length} bytes (limit {BEARER_BYTES_MAX})")
    token = await stream.read_exactly(length)
    if known is None or known(token):
        stream.write(b"\x00")
        return
    text = "the token is not valid here" if token else "the service requires a token (token_file)"
    stream.write(bytes([len(text)]) + text.encode())
    raise AuthenticationFailed(text)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedFrame(f"the peer's {what} is not valid UTF-8: {data!r}") from None
