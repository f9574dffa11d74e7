"""Frames: every kind of bad bytes ends in one named error; every message has a wire form."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import (
    FrameTooLarge,
    LocalProtocolError,
    MalformedFrame,
    RemoteProtocolError,
    UnknownCommand,
)
from actors.protocol import api, compute
from actors.protocol.frames import HEADER, FrameCodec

CODEC: FrameCodec[compute.Command] = FrameCodec(compute.Command, 1024)


def test_round_trip() -> None:
    frame = CODEC.encode(compute.Hello("abc"))
    assert CODEC.check_length(frame[:4]) == len(frame) - 4
    assert CODEC.decode(frame[4:]) == compute.Hello("abc")


def test_golden_bytes() -> None:
    assert CODEC.encode(compute.Hello("n")).hex() == (
        "0000001482a474797065a548656c6c6fa56e6f6e6365a16e"
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


@given(st.binary(max_size=200))
def test_garbage_is_accepted_or_one_named_error(body: bytes) -> None:
    try:
        CODEC.decode(body)
    except RemoteProtocolError:
        return


@pytest.mark.parametrize(
    "union", [compute.Command, compute.Response, api.Request, api.Answer], ids=str
)
def test_unions_have_decoders(union: object) -> None:
    assert msgspec.msgpack.Decoder(union) is not None
