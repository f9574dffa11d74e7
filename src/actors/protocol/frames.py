"""Length-prefixed msgpack frames: bytes to messages and back, without any I/O.

A frame is a big-endian u32 length and that many bytes of msgpack. Length 0 is a keepalive.
A length above the limit is refused before a byte of the body is allocated.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from actors.errors import FrameTooLarge, LocalProtocolError, MalformedFrame, UnknownCommand

M = TypeVar("M")

HEADER: Final = struct.Struct(">I")
KEEPALIVE: Final = HEADER.pack(0)


class FrameCodec(Generic[M]):
    """Encodes and decodes the messages of one direction of one protocol."""

    def __init__(self, kind: Any, frame_bytes_max: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self.frame_bytes_max = frame_bytes_max

    def encode(self, message: Any) -> bytes:
        """The frame of a message. Raises `LocalProtocolError` when it is over the limit."""
        body = self._encoder.encode(message)
        if len(body) > self.frame_bytes_max:
            raise LocalProtocolError(
                f"{type(message).__name__} takes {len(body)} bytes; a frame holds at most "
                f"{self.frame_bytes_max}"
            )
        return HEADER.pack(len(body)) + body

    def check_length(self, header: bytes) -> int:
        """The body's length. Raises `FrameTooLarge` before anything is allocated."""
        length: int = HEADER.unpack(header)[0]
        if length > self.frame_bytes_max:
            raise FrameTooLarge(
                f"a frame of {length} bytes was announced; the limit is {self.frame_bytes_max}"
            )
        return length

    def decode(self, body: bytes) -> M:
        """The message in a frame. Raises `UnknownCommand` or `MalformedFrame`."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            text = str(error)
            if "Invalid value" in text and "`$.type`" in text:
                raise UnknownCommand(f"unknown message: {text}") from None
            raise MalformedFrame(f"message does not fit: {text}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(f"not a msgpack message: {error}") from None
