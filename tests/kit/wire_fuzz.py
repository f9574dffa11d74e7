"""Fuzzed bytes for decoders and handshakes: accepted, or rejected with exactly one named error.

Pure, without socket and clock. A `FuzzTarget` reads a peer's bytes: `FuzzTarget.read` gets them in
pieces of any size and returns the outcome. Any error except a `RemoteProtocolError` (or a refusal
of the same kind) is raised and is a bug. `mutated` changes bytes with knowledge of the format:
lengths, kinds and names in msgpack, parts of other messages.

The test suite and ``tests/proof/fuzz_protocol.py`` share this module.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

import msgspec

from actors.model.plan import jobs
from actors.model.protocol.api import ClientMessage, ServiceMessage
from actors.model.protocol.compute import Command, CreateInstance, Hello, Response
from actors.replica.cluster.rules import CommandRules
from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    PenstockError,
    RemoteProtocolError,
    ResourceBusy,
)
from actors.runtime.frames import HEADER, FrameBuffer, FrameCodec
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context
from actors.runtime.transport.handshake import HandshakeOpening, check_token, exchange, send_token

FRAME_BYTES_MAX: Final = 1 << 20
MAGIC: Final = b"PENSFUZZ"
KNOWN_TOKEN: Final = b"t" * 32
EDGES: Final = (0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC4, 0xC6, 0xCA, 0xCB, 0xCF, 0xD3, 0xD7)
"""First bytes of msgpack values; together with `MORE_EDGES`, of all kinds."""
MORE_EDGES: Final = (0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF)


class FuzzOutcome(msgspec.Struct, frozen=True):
    """The outcome of reading some bytes: a number of messages, and the error that followed, if
    any."""

    accepted: int
    error: PenstockError | None = None


class FuzzTarget(msgspec.Struct, frozen=True):
    """A reader of a peer's bytes. `read` raises any error that is not a named one."""

    name: str
    read: Callable[[bytes, int], FuzzOutcome]
    """Reads the bytes in pieces of the given size."""


def _pieces(data: bytes, size: int, buffer: FrameBuffer, took: Callable[[], None]) -> None:
    at = 0
    while at < len(data):
        place = buffer.free_space()
        count = min(len(place), len(data) - at, max(1, size))
        assert count, "no room for the next byte"
        place[:count] = data[at : at + count]
        place.release()
        at += count
        if buffer.advance(count):
            took()


def frames_of(kind: Any, follow: Callable[[], Callable[[Any], None]] | None = None) -> Any:
    """Return a reader of a stream of frames of a type. `follow` makes a check for the messages."""

    def read(data: bytes, size: int) -> FuzzOutcome:
        codec: FrameCodec[Any] = FrameCodec(kind, FRAME_BYTES_MAX)
        buffer = FrameBuffer(codec)
        look = follow() if follow else None
        accepted = 0

        def took() -> None:
            nonlocal accepted
            while (body := buffer.next()) is not None:
                message = codec.decode(body)
                if look is not None:
                    look(split_context(message)[0])
                # a decoded message can be encoded again and decodes to the same
                again = codec.encode(message)
                assert codec.encode(codec.decode(memoryview(again)[HEADER.size :])) == again
                accepted += 1

        try:
            _pieces(data, size, buffer, took)
        except (RemoteProtocolError, InvalidUsage) as error:
            return FuzzOutcome(accepted, error)
        return FuzzOutcome(accepted)

    return read


class _Memory:
    """The part of a connection that a handshake needs, over given bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.written = bytearray()

    async def read_exactly(self, count: int) -> bytes:
        """Return the next bytes."""
        if len(self._data) < count:
            raise ConnectionBroken("the stream ends here")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def write(self, data: bytes) -> None:
        """Keep the bytes."""
        self.written += data


def handshake_of(make: Callable[[_Memory], Coroutine[Any, Any, Any]]) -> Any:
    """Return a reader of one side's handshake."""

    def read(data: bytes, size: int) -> FuzzOutcome:
        steps = make(_Memory(data))
        try:
            steps.send(None)  # never suspends, because all bytes are in memory
        except StopIteration:
            return FuzzOutcome(1)
        except (RemoteProtocolError, ConnectionBroken, ResourceBusy) as error:
            return FuzzOutcome(0, error)
        steps.close()
        raise AssertionError("a handshake waited")

    return read


async def _listener(stream: _Memory) -> None:
    await exchange(stream, HandshakeOpening(MAGIC, 2, "blue"))
    await check_token(stream, lambda token: token == KNOWN_TOKEN)


async def _dialler(stream: _Memory) -> None:
    await exchange(stream, HandshakeOpening(MAGIC, 2, "blue"))
    await send_token(stream, KNOWN_TOKEN)


def _rules() -> Callable[[Any], None]:
    """Return a check of the commands of a client that has introduced itself."""
    rules = CommandRules(CreateInstance(2), Settings())
    for command in (Hello("fuzz"), CreateInstance(2)):
        rules.check(command)
    return rules.check


TARGETS: Final[dict[str, FuzzTarget]] = {
    target.name: target
    for target in (
        FuzzTarget("client to service", frames_of(ClientMessage)),
        FuzzTarget("service to client", frames_of(ServiceMessage)),
        FuzzTarget("controller to cluster", frames_of(Command)),
        FuzzTarget("cluster to controller", frames_of(Response)),
        FuzzTarget("service to engine", frames_of(jobs.Job)),
        FuzzTarget("engine to service", frames_of(jobs.Answer)),
        FuzzTarget("commands by the rules", frames_of(Command, _rules)),
        FuzzTarget("handshake of a listener", handshake_of(_listener)),
        FuzzTarget("handshake of a dialler", handshake_of(_dialler)),
    )
}

HANDSHAKES: Final = (
    HandshakeOpening(MAGIC, 2, "blue").encode() + len(KNOWN_TOKEN).to_bytes(2, "big") + KNOWN_TOKEN,
    HandshakeOpening(MAGIC, 2).encode() + b"\x00",
    HandshakeOpening(MAGIC, 2, "blue").encode() + bytes([5]) + b"never",
    HandshakeOpening(b"PENSBUSY", 2).encode(),
)
"""Complete handshakes: of a connecting side, and of a listener that accepts, refuses, or is
busy."""


def framed(bodies: list[bytes]) -> bytes:
    """Return the bodies as frames."""
    return b"".join(HEADER.pack(len(body)) + body for body in bodies)


def mutated(data: bytes, others: list[bytes], rng: Random) -> bytes:
    """Return the bytes with one change that may break a decoder."""
    if not data:
        return rng.choice(others)[: rng.randint(0, 40)] if others else b"\x00"
    at = rng.randrange(len(data))
    match rng.randrange(9):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + bytes([rng.choice(EDGES + MORE_EDGES)]) + data[at + 1 :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[at + rng.randint(1, 8) :]
        case 4:
            return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        case 5:
            end = min(len(data), at + rng.randint(1, 40))
            return data[:end] + data[at:end] * rng.randint(1, 3) + data[end:]
        case 6 if others:
            other = rng.choice(others)
            start = rng.randrange(len(other)) if other else 0
            return data[:at] + other[start : start + rng.randint(1, 60)] + data[at:]
        case 7:
            depth = rng.choice((1, 3, 60, 5000))
            return data[:at] + bytes([rng.choice((0x81, 0x91))]) * depth + data[at:]
        case _:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice((0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)))
            return data[:at] + number.to_bytes(width, "big") + data[at + width :]
