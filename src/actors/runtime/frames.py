"""Length-prefixed msgpack frames: converts bytes to messages and back, without I/O.

A frame is a big-endian u32 length followed by this many bytes of msgpack, which is a map. Length 0
is a keepalive. The trace context of a message is the frame's header: the first entry of the map,
with the key `traceparent`. A peer that does not know headers skips it like any unknown field.

`FrameCodec` encodes and decodes single frames. `FrameBuffer` finds frames in a stream of bytes:
`free_space` is the memory into which a socket reads, and `next` returns complete bodies. Small
frames share one block and are decoded in place. A body that does not fit there gets its own buffer.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from actors.runtime.errors import FrameTooLarge, LocalProtocolError, MalformedFrame, UnknownCommand
from actors.runtime.msgpack_bounds import GROWTH_MAX, check_frame
from actors.runtime.telemetry import TracedMessage, split_context

M = TypeVar("M")

HEADER: Final = struct.Struct(">I")
CONTEXT_BYTES: Final = 55
"""Length of a W3C trace context."""
CONTEXT: Final = b"\xabtraceparent"
"""The header's key in msgpack: a str of 11 bytes. The value follows."""
CONTEXT_VALUE: Final = bytes([0xD9, CONTEXT_BYTES])
"""Start of the header's value in msgpack: a str of `CONTEXT_BYTES` bytes."""
SMALL_MAP: Final = 0x80
"""First byte of a msgpack map with fewer than 16 entries, minus the number of entries."""
FORMERLY_TRACED: Final = frozenset(
    {
        "AlterObject",
        "AlterSource",
        "Changes",
        "CreateIndex",
        "CreateSink",
        "CreateSource",
        "CreateTable",
        "CreateView",
        "Drop",
        "DropSink",
        "DropSource",
        "Peek",
        "Query",
        "Read",
        "Schedule",
        "Subscribe",
        "Write",
    }
)
"""Messages in which a peer of the previous release sends the context as an ordinary field."""
KEEPALIVE: Final = HEADER.pack(0)
"""A keepalive frame."""
BLOCK_BYTES_MIN: Final = 4 * 1024
"""Initial size of the block for small frames."""
BLOCK_BYTES: Final = 64 * 1024
"""Size of the block once the initial one has been full. A larger body gets its own buffer."""
GROWTH_BYTES: Final = 256 * 1024
"""Initial size of the buffer for a larger body. It is doubled as needed."""


class _FrameHeader(msgspec.Struct):
    """The header of a frame; decoding a body as this skips all other fields."""

    traceparent: str | None = None


class FrameCodec(Generic[M]):
    """Encodes and decodes the messages of one direction of a protocol.

    `kind` is the union of message types. `frame_bytes_max` limits frames in both directions.
    """

    def __init__(self, kind: Any, frame_bytes_max: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._former = _formerly_traced(kind)
        self._header: msgspec.msgpack.Decoder[_FrameHeader] = msgspec.msgpack.Decoder(_FrameHeader)
        self.frame_bytes_max = frame_bytes_max

    def encode(self, message: Any) -> bytearray:
        """Encode a message as a frame. The context of a `TracedMessage` becomes the header.

        Raises `LocalProtocolError` if the frame is larger than the limit.
        """
        message, traceparent = split_context(message)
        # The header overwrites the map's first byte, which is written again before the header.
        begin = HEADER.size
        if traceparent is not None:
            begin += len(CONTEXT) + len(CONTEXT_VALUE) + CONTEXT_BYTES
        frame = bytearray(begin)
        self._encoder.encode_into(message, frame, begin)
        if traceparent is not None:
            entries, context = frame[begin] - SMALL_MAP, traceparent.encode()
            assert 0 <= entries < 15, f"{type(message).__name__} leaves no room for a header"
            assert len(context) == CONTEXT_BYTES, traceparent
            frame[HEADER.size] = SMALL_MAP + entries + 1
            frame[HEADER.size + 1 : begin + 1] = CONTEXT + CONTEXT_VALUE + context
        length = len(frame) - HEADER.size
        if length > self.frame_bytes_max:
            raise LocalProtocolError(
                f"{type(message).__name__} is too large for a frame: {length} bytes "
                f"(limit {self.frame_bytes_max})"
            )
        HEADER.pack_into(frame, 0, length)
        return frame

    def check_length(self, header: bytes | bytearray | memoryview) -> int:
        """Return the length of a frame's body. Raises `FrameTooLarge` if it is over the limit."""
        length: int = HEADER.unpack(header)[0]
        if length > self.frame_bytes_max:
            raise FrameTooLarge(
                f"frame from the peer too large: {length} bytes (limit {self.frame_bytes_max})"
            )
        return length

    def decode(self, body: bytes | bytearray | memoryview) -> M | TracedMessage[M]:
        """Decode the body of a frame, into a `TracedMessage` if it has a context.

        Raises `UnknownCommand` or `MalformedFrame`.
        """
        check_frame(body, GROWTH_MAX * self.frame_bytes_max)
        try:
            message = self._decoder.decode(body)
            # The decoder above skips the header as an unknown field.
            if body[1 : 1 + len(CONTEXT)] == CONTEXT or type(message) in self._former:
                traceparent = self._header.decode(body).traceparent
                if traceparent is not None and len(traceparent) == CONTEXT_BYTES:
                    return TracedMessage(message, traceparent)
            return message
        except msgspec.ValidationError as error:
            text = str(error)
            # msgspec has no separate error class for an unknown tag.
            if "Invalid value" in text and "`$.type`" in text:
                raise UnknownCommand(f"unknown message: {text}") from None
            raise MalformedFrame(f"invalid message: {text}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(f"not a msgpack message: {error}") from None


def _formerly_traced(kind: Any) -> frozenset[type[Any]]:
    """Return the types of a union whose context was an ordinary field in the previous release."""
    configs = {each: getattr(each, "__struct_config__", None) for each in get_args(kind)}
    return frozenset(
        each for each, config in configs.items() if config and config.tag in FORMERLY_TRACED
    )


class FrameBuffer:
    """Collects the bytes of one stream and splits them into frames.

    Until `widen` is called, `first_bytes_max` limits the size of frames, and the block stays
    small.
    """

    def __init__(self, codec: FrameCodec[Any], first_bytes_max: int | None = None) -> None:
        self._codec = codec
        self._first_bytes_max = first_bytes_max
        """Limit of frames; None once `widen` was called."""
        self._block = bytearray(BLOCK_BYTES_MIN)
        """Memory for small frames; replaced by a larger block once it has been full."""
        self._start = 0
        """Start of the bytes in the block that were not taken yet."""
        self._end = 0
        """End of the bytes received into the block."""
        self._body: bytearray | None = None
        """Buffer of a body that is too large for the block; None if there is none."""
        self._body_bytes = 0
        """Length of that body."""
        self._filled = 0
        """Number of bytes of that body received so far."""

    def widen(self) -> None:
        """Accept all frames that the codec allows, because the peer has proved itself."""
        self._first_bytes_max = None

    # -- bytes in --

    @property
    def room(self) -> int:
        """Return how many bytes can be written now. If 0, take frames first (`next`)."""
        if self._body is not None:
            return len(self._body) - self._filled
        return len(self._block) - (self._end - self._start)

    def free_space(self) -> memoryview:
        """Return `room` bytes of memory for the next bytes. Call `advance` after writing some."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        if self._start:
            # Move the incomplete frame to the front, to free the rest of the block.
            left = self._end - self._start
            self._block[:left] = self._block[self._start : self._end]
            self._start, self._end = 0, left
        return memoryview(self._block)[self._end :]

    def advance(self, count: int) -> bool:
        """Record that `count` bytes were written. Return True if `next` may now find a frame."""
        if self._body is None:
            self._end += count
            narrow = self._first_bytes_max is not None
            if self._end - self._start == len(self._block) < BLOCK_BYTES and not narrow:
                # A new block, because the last body may still be a view of the old one.
                block = bytearray(BLOCK_BYTES)
                block[: self._end - self._start] = self._block[self._start : self._end]
                self._end, self._start, self._block = self._end - self._start, 0, block
            return True
        self._filled += count
        return self._filled == len(self._body)

    # -- frames out --

    @property
    def partial_bytes(self) -> int:
        """Return how many bytes of an incomplete frame have been received."""
        if self._body is not None:
            return HEADER.size + self._filled
        return self._end - self._start

    def take(self, count: int) -> bytes | None:
        """Take the next `count` bytes outside of frames; None until all have been received."""
        if self._end - self._start < count:
            return None
        taken = bytes(self._block[self._start : self._start + count])
        self._start += count
        return taken

    def next(self) -> memoryview | None:
        """Take the next complete body; None if there is none yet.

        The body is valid until the next call of any method. Keepalives are skipped. Raises
        `FrameTooLarge`.
        """
        if self._body is not None:
            return self._next_large(self._body)
        while self._end - self._start >= HEADER.size:
            begin = self._start + HEADER.size
            length = self._codec.check_length(self._block[self._start : begin])
            if self._first_bytes_max is not None and length > self._first_bytes_max:
                raise FrameTooLarge(
                    f"first frame from the peer too large: {length} bytes (limit "
                    f"{self._first_bytes_max}, unproven_bytes_max)"
                )
            if length == 0:
                self._start = begin
                continue
            if begin + length <= self._end:
                self._start = begin + length
                return memoryview(self._block)[begin : begin + length]
            if HEADER.size + length > len(self._block):
                self._move_to_own_buffer(begin, length)
            return None
        return None

    def _move_to_own_buffer(self, begin: int, length: int) -> None:
        """Give a body its own buffer, and move the bytes received so far there."""
        self._filled = self._end - begin
        # The buffer grows as bytes arrive, so a peer that only sends the header of a large frame
        # costs one small allocation.
        self._body = bytearray(min(length, max(GROWTH_BYTES, 2 * self._filled)))
        self._body[: self._filled] = self._block[begin : self._end]
        self._body_bytes = length
        self._start = self._end = 0

    def _next_large(self, body: bytearray) -> memoryview | None:
        if self._filled < len(body):
            return None
        if len(body) < self._body_bytes:
            body.extend(bytes(min(len(body), self._body_bytes - len(body))))
            return None
        self._body = None
        return memoryview(body)
