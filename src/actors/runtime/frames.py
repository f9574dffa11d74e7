"""Length-prefixed msgpack frames: bytes to messages and back, without any I/O.

A frame is a big-endian u32 length and that many bytes of msgpack, a map. Length 0 is a keepalive.
The trace context of a message is the frame's header: the first entry of its map, `traceparent`.
A peer that knows no header skips it as an unknown field.

`FrameCodec` makes and reads single frames. `FrameBuffer` finds them in a stream of bytes:
`free_space` is the memory into which a socket reads, and `next` returns whole bodies. Small frames
lie in one block and are decoded where they lie. A body that does not fit there gets a buffer of its
own.
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
"""Begin of the header's value in msgpack: a str of so many bytes."""
SMALL_MAP: Final = 0x80
"""First byte of a map in msgpack, plus its number of entries, which is below 16."""
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
"""Messages in which a peer of the release before has the context as a field of its own."""
KEEPALIVE: Final = HEADER.pack(0)
BLOCK_BYTES_MIN: Final = 4 * 1024
BLOCK_BYTES: Final = 64 * 1024
"""Size of the block of small frames, once the smaller block has been full; a larger body gets a
buffer of its own."""
GROWTH_BYTES: Final = 256 * 1024
"""First size of such a buffer, which is then doubled."""


class _FrameHeader(msgspec.Struct):
    traceparent: str | None = None


class FrameCodec(Generic[M]):
    """Encodes and decodes the messages of one direction of one protocol."""

    def __init__(self, kind: Any, frame_bytes_max: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._former = _formerly_traced(kind)
        self._header: msgspec.msgpack.Decoder[_FrameHeader] = msgspec.msgpack.Decoder(_FrameHeader)
        self.frame_bytes_max = frame_bytes_max

    def encode(self, message: Any) -> bytearray:
        """Return the frame of a message, or of a `TracedMessage` with its context as the header.
        Raises `LocalProtocolError` when it is over the limit."""
        message, traceparent = split_context(message)
        # The header takes the place of the map's first byte, which then comes before it.
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
                f"{type(message).__name__} takes {length} bytes; a frame holds at most "
                f"{self.frame_bytes_max}"
            )
        HEADER.pack_into(frame, 0, length)
        return frame

    def check_length(self, header: bytes | bytearray | memoryview) -> int:
        """Return the body's length. Raises `FrameTooLarge` before anything is allocated."""
        length: int = HEADER.unpack(header)[0]
        if length > self.frame_bytes_max:
            raise FrameTooLarge(
                f"a frame of {length} bytes was announced; the limit is {self.frame_bytes_max}"
            )
        return length

    def decode(self, body: bytes | bytearray | memoryview) -> M | TracedMessage[M]:
        """Return the message in a frame, in a `TracedMessage` if it has a context. Raises
        `UnknownCommand` or `MalformedFrame`."""
        check_frame(body, GROWTH_MAX * self.frame_bytes_max)
        try:
            message = self._decoder.decode(body)
            # The header is skipped by the decoder above as any unknown field is.
            if body[1 : 1 + len(CONTEXT)] == CONTEXT or type(message) in self._former:
                traceparent = self._header.decode(body).traceparent
                if traceparent is not None and len(traceparent) == CONTEXT_BYTES:
                    return TracedMessage(message, traceparent)
            return message
        except msgspec.ValidationError as error:
            text = str(error)
            # msgspec has no error class of its own for an unknown tag.
            if "Invalid value" in text and "`$.type`" in text:
                raise UnknownCommand(f"unknown message: {text}") from None
            raise MalformedFrame(f"message does not fit: {text}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(f"not a msgpack message: {error}") from None


def _formerly_traced(kind: Any) -> frozenset[type[Any]]:
    """Return the types in a union whose context was a field."""
    configs = {each: getattr(each, "__struct_config__", None) for each in get_args(kind)}
    return frozenset(
        each for each, config in configs.items() if config and config.tag in FORMERLY_TRACED
    )


class FrameBuffer:
    """The bytes of one stream, from the socket to whole frames. With `first_bytes_max` a frame has
    at most so many bytes, and little is kept, until `widen` is called."""

    def __init__(self, codec: FrameCodec[Any], first_bytes_max: int | None = None) -> None:
        self._codec = codec
        self._first_bytes_max = first_bytes_max
        self._block = bytearray(BLOCK_BYTES_MIN)
        self._start = 0
        self._end = 0
        self._body: bytearray | None = None
        """Buffer of the frame that is too large for the block."""
        self._body_bytes = 0
        self._filled = 0

    def widen(self) -> None:
        """Take frames of any size that the codec allows: the peer has proved itself."""
        self._first_bytes_max = None

    # -- bytes in --

    @property
    def room(self) -> int:
        """Return how many bytes may be written now; 0: take frames first (`next`)."""
        if self._body is not None:
            return len(self._body) - self._filled
        return len(self._block) - (self._end - self._start)

    def free_space(self) -> memoryview:
        """Return the memory for the next bytes: `room` bytes. Call `advance` after writing some of
        them."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        if self._start:
            # The rest of a frame moves to the front, so that all other bytes of the block are free.
            left = self._end - self._start
            self._block[:left] = self._block[self._start : self._end]
            self._start, self._end = 0, left
        return memoryview(self._block)[self._end :]

    def advance(self, count: int) -> bool:
        """Take note of `count` written bytes. Return True when `next` may find more than before."""
        if self._body is None:
            self._end += count
            narrow = self._first_bytes_max is not None
            if self._end - self._start == len(self._block) < BLOCK_BYTES and not narrow:
                # Another block, not a longer one: the last body may still be a view of the old one.
                block = bytearray(BLOCK_BYTES)
                block[: self._end - self._start] = self._block[self._start : self._end]
                self._end, self._start, self._block = self._end - self._start, 0, block
            return True
        self._filled += count
        return self._filled == len(self._body)

    # -- frames out --

    @property
    def partial_bytes(self) -> int:
        """Return how many bytes have come of a frame that is not whole yet."""
        if self._body is not None:
            return HEADER.size + self._filled
        return self._end - self._start

    def take(self, count: int) -> bytes | None:
        """Return the next `count` bytes, outside of frames; None while they are not all there."""
        if self._end - self._start < count:
            return None
        taken = bytes(self._block[self._start : self._start + count])
        self._start += count
        return taken

    def next(self) -> memoryview | None:
        """Return the next whole body, valid until the next call of any method; None: more must
        come.

        Keepalives are skipped. Raises `FrameTooLarge`.
        """
        if self._body is not None:
            return self._next_large(self._body)
        while self._end - self._start >= HEADER.size:
            begin = self._start + HEADER.size
            length = self._codec.check_length(self._block[self._start : begin])
            if self._first_bytes_max is not None and length > self._first_bytes_max:
                raise FrameTooLarge(
                    f"a first frame of {length} bytes was announced; the limit is "
                    f"{self._first_bytes_max} (unproven_bytes_max)"
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
        """Give the body a buffer of its own, and move what has come of it there."""
        self._filled = self._end - begin
        # Grows as its bytes come: a peer that announces a large frame and sends no bytes costs one
        # small allocation.
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
