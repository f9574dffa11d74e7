"""Frames of msgpack: what they decode to is bounded before it is decoded."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from actors.runtime.errors import MalformedFrame
from actors.runtime.frames import FrameCodec
from actors.runtime.msgpack_bounds import COUNTED_BYTES_MIN, DEPTH_MAX, check_frame

LIMIT = 1 << 20


class _Item(msgspec.Struct):
    a: int = 0
    b: str = ""


class _Message(msgspec.Struct, tag_field="type", tag="m"):
    items: list[_Item] = []
    data: bytes = b""


def frame(value: Any) -> bytes:
    return msgspec.msgpack.encode({"type": "m", "items": [], **value})


def array(count: int, body: bytes) -> bytes:
    """A message with an array of `count` values in a field."""
    return frame({"extra": None})[:-1] + b"\xdd" + struct.pack(">I", count) + body


def test_large_frames_of_bytes_and_every_kind_of_value_come_as_they_are() -> None:
    codec: FrameCodec[_Message] = FrameCodec(_Message, LIMIT)
    kinds = [
        None, True, False, 1.5, -1, -200, -70_000, -(1 << 40), 7, 200, 70_000, 1 << 33, "x",
        "x" * 40, "x" * 300, "x" * 70_000, b"x" * 300, b"x" * 70_000, [1] * 20, [1] * 20_000, {},
        {str(n): n for n in range(20)}, msgspec.msgpack.Ext(5, b"x"),
        msgspec.msgpack.Ext(5, b"x" * 16), msgspec.msgpack.Ext(5, b"x" * 300),
    ]  # fmt: skip
    data = frame({"data": b"x" * 500_000, "more": kinds})
    assert codec.decode(data) == _Message(data=b"x" * 500_000)
    check_frame(data, 16 * LIMIT)
    for length in range(COUNTED_BYTES_MIN + 1, len(data), 9973):
        with pytest.raises(MalformedFrame, match=r"truncated|more values"):
            check_frame(data[:length], 16 * LIMIT)


BOMBS = {
    "empty maps that become messages": array(900_000, b"\x80" * 900_000),
    "small integers": array(900_000, b"\x01" * 900_000),
    "an array that announces more than there is": array(0xFFFF_FFFF, b"\x01" * 100_000),
    "a map that announces more than there is": frame({"extra": None})[:-1]
    + b"\xdf\xff\xff\xff\xff"
    + b"\x01" * 100_000,
    "arrays within arrays": array(1, b"\x91" * 500_000 + b"\x01"),
    "maps within maps": array(1, b"\x81\x01" * 100_000 + b"\x01"),
    "arrays of empty arrays": array(900_000, b"\x90" * 900_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    codec: FrameCodec[_Message] = FrameCodec(_Message, LIMIT)
    with pytest.raises(MalformedFrame, match=r"decodes to more|more values|nested deeper"):
        codec.decode(BOMBS[name])


def test_a_small_bomb_is_refused_by_the_decoder() -> None:
    codec: FrameCodec[_Message] = FrameCodec(_Message, LIMIT)
    for body in (array(0xFFFF_FFFF, b"\x01"), array(1, b"\x91" * 60_000 + b"\x01")):
        assert len(body) < COUNTED_BYTES_MIN
        with pytest.raises(MalformedFrame):
            codec.decode(body)


def test_depth_is_counted_and_not_length() -> None:
    codec: FrameCodec[_Message] = FrameCodec(_Message, LIMIT)
    wide = frame({"data": b"x" * 100_000, "extra": [[[1]]] * 1_000})
    assert codec.decode(wide) == _Message(data=b"x" * 100_000)
    deep = b"\x91" * (DEPTH_MAX + 1) + b"\xc6" + struct.pack(">I", 100_000) + b"x" * 100_000
    with pytest.raises(MalformedFrame, match="nested deeper"):
        check_frame(deep, 16 * LIMIT)
