"""Frames: every kind of bad bytes ends in one named error; every message has a wire form."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.model.plan import jobs
from actors.model.protocol import api, compute
from actors.runtime.errors import (
    FrameTooLarge,
    LocalProtocolError,
    MalformedFrame,
    RemoteProtocolError,
    UnknownCommand,
)
from actors.runtime.frames import (
    BLOCK_BYTES,
    BLOCK_BYTES_MIN,
    GROWTH_BYTES,
    HEADER,
    KEEPALIVE,
    FrameBuffer,
    FrameCodec,
)
from actors.runtime.telemetry import TracedMessage, split_context
from suite_lanes import examples  # type: ignore[import-not-found]

CODEC: FrameCodec[compute.Command] = FrameCodec(compute.Command, 1024)


def test_round_trip() -> None:
    frame = CODEC.encode(compute.Hello("abc"))
    assert CODEC.check_length(frame[:4]) == len(frame) - 4
    assert CODEC.decode(frame[4:]) == compute.Hello("abc")


def test_golden_bytes() -> None:
    assert CODEC.encode(compute.Hello("n")).hex() == (
        "0000001b83a474797065a548656c6c6fa56e6f6e6365a16ea56f776e6572a0"
    )


def test_a_length_over_the_limit_is_refused_before_the_body() -> None:
    with pytest.raises(FrameTooLarge, match="4294967295"):
        CODEC.check_length(HEADER.pack(0xFFFFFFFF))
    with pytest.raises(LocalProtocolError, match="1024"):
        CODEC.encode(compute.Hello("x" * 2000))


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(UnknownCommand, match="Destroy"):
        CODEC.decode(msgspec.msgpack.encode({"type": "Destroy"}))


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(MalformedFrame, match="nonce"):
        CODEC.decode(msgspec.msgpack.encode({"type": "Hello", "nonce": 3}))


@pytest.mark.sampled
def test_garbage_is_accepted_or_one_named_error() -> None:
    seen = set()

    @given(st.binary(max_size=200))
    @example(msgspec.msgpack.encode(compute.Hello("n")))
    @example(msgspec.msgpack.encode({"type": "Destroy"}))
    def decode(body: bytes) -> None:
        try:
            CODEC.decode(body)
            seen.add("accepted")
        except RemoteProtocolError as error:
            seen.add(type(error).__name__)

    decode()
    assert seen == {"accepted", "MalformedFrame", "UnknownCommand"}


@pytest.mark.parametrize(
    "union", [compute.Command, compute.Response, api.Request, api.Answer], ids=str
)
def test_unions_have_decoders(union: object) -> None:
    assert msgspec.msgpack.Decoder(union) is not None


ANY: FrameCodec[Any] = FrameCodec(bytes, 4 * BLOCK_BYTES + 100)
SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from(
        [
            edge + off
            for edge in (BLOCK_BYTES_MIN, BLOCK_BYTES, GROWTH_BYTES)
            for off in (-10, -8, -5, -4, -3, 0, 1)
        ]
    ),
)


def poured(buffer: FrameBuffer, data: bytes, pieces: Callable[[], int]) -> list[bytes]:
    """The bodies found when the data comes in pieces, taken only when there is no more room or
    no more data."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        place = buffer.free_space()
        assert len(place) == buffer.room
        count = min(len(place), len(data) - at, max(1, pieces()))
        place[:count] = data[at : at + count]
        place.release()
        at += count
        buffer.advance(count)
        if buffer.room == 0 or at == len(data) or count % 2:
            while (body := buffer.next()) is not None:
                found.append(bytes(split_context(ANY.decode(body))[0]))
    return found


@settings(max_examples=examples(60))
@given(st.lists(st.one_of(SIZES, st.none()), max_size=8), st.randoms(use_true_random=False))
def test_frames_are_found_however_the_bytes_come(sizes: list[int | None], rng: Random) -> None:
    bodies = [None if size is None else rng.randbytes(size) for size in sizes]
    data = b"".join(KEEPALIVE if body is None else bytes(ANY.encode(body)) for body in bodies)
    most = rng.choice([1, 7, 1000, BLOCK_BYTES, 1 << 20]) if len(data) < 10_000 else 1 << 20
    buffer = FrameBuffer(ANY)
    assert poured(buffer, data, lambda: rng.randint(1, most)) == [
        b for b in bodies if b is not None
    ]
    assert buffer.partial_bytes == 0
    assert buffer.room > 0


def test_a_large_frame_takes_no_more_room_than_twice_what_came() -> None:
    codec: FrameCodec[Any] = FrameCodec(bytes, 1 << 30)
    buffer = FrameBuffer(codec)
    header = HEADER.pack(1 << 30)
    buffer.free_space()[: len(header)] = header
    buffer.advance(len(header))
    assert buffer.next() is None
    came = 0
    while came < 8 << 20:
        assert buffer.room <= max(GROWTH_BYTES, came)
        came += buffer.room
        if buffer.advance(buffer.room):
            assert buffer.next() is None
    assert buffer.partial_bytes == len(header) + came


def test_bytes_before_the_first_frame_are_taken_as_they_are() -> None:
    buffer = FrameBuffer(CODEC)
    data = b"opening" + bytes(CODEC.encode(compute.Hello("n")))
    buffer.free_space()[: len(data)] = data
    buffer.advance(len(data))
    assert buffer.take(4) == b"open"
    assert buffer.take(3) == b"ing"
    body = buffer.next()
    assert body is not None
    assert CODEC.decode(body) == compute.Hello("n")
    assert buffer.take(1) is None


# -- the header: the trace context of a message ----------------------------------------------------

CONTEXT = f"00-{7:032x}-{9:016x}-01"


class PeekBefore(msgspec.Struct, frozen=True, tag="Peek"):
    """A peek as a peer of the release before knows it."""

    uuid: str
    time: int
    traceparent: str | None = None
    project: tuple[str, ...] | None = None


@pytest.mark.parametrize(
    "kind", [api.ClientMessage, api.Answer, compute.Command, jobs.Job], ids=str
)
def test_every_message_leaves_room_for_a_header(kind: Any) -> None:
    for each in get_args(kind):
        # The map has an entry for the message's name, and one for the header.
        assert len(msgspec.structs.fields(each)) + 2 < 16, each.__name__


def test_a_context_is_the_first_entry_of_the_frame() -> None:
    message = compute.CancelPeek("p1")
    codec: FrameCodec[Any] = FrameCodec(compute.Command, 1000)
    body = codec.encode(TracedMessage(message, CONTEXT))[HEADER.size :]
    assert codec.decode(body) == TracedMessage(message, CONTEXT)
    assert codec.decode(memoryview(body)) == TracedMessage(message, CONTEXT)
    assert codec.decode(codec.encode(message)[HEADER.size :]) == message
    assert list(msgspec.msgpack.decode(body)) == ["traceparent", "type", "uuid"]


def test_a_peer_of_the_release_before_reads_the_header_as_its_field() -> None:
    peek = compute.Peek("p1", compute.IndexTarget("i1"), 5, project=("k",))
    frame = FrameCodec(compute.Command, 1000).encode(TracedMessage(peek, CONTEXT))
    found = msgspec.msgpack.decode(frame[HEADER.size :], type=PeekBefore | compute.CancelPeek)
    assert found == PeekBefore("p1", 5, CONTEXT, ("k",))


def test_the_field_of_the_release_before_is_read_as_a_header() -> None:
    codec: FrameCodec[Any] = FrameCodec(compute.Command, 1000)
    peek = compute.Peek("p1", compute.IndexTarget("i1"), 5, project=("k",))
    former = msgspec.msgpack.decode(msgspec.msgpack.encode(peek))
    for context, found in ((CONTEXT, TracedMessage(peek, CONTEXT)), (None, peek), ("no", peek)):
        body = msgspec.msgpack.encode(former | {"traceparent": context})
        assert codec.decode(body) == found
    with pytest.raises(MalformedFrame):
        codec.decode(msgspec.msgpack.encode(former | {"traceparent": 7}))


def test_a_header_counts_in_the_frame() -> None:
    message = compute.CancelPeek("p1")
    size = len(FrameCodec(compute.Command, 1000).encode(message)) - HEADER.size
    codec: FrameCodec[Any] = FrameCodec(compute.Command, size)
    assert len(codec.encode(message)) == size + HEADER.size
    with pytest.raises(LocalProtocolError, match="CancelPeek is too large"):
        codec.encode(TracedMessage(message, CONTEXT))
