"""How the stream cuts what comes into pieces, with a server made up."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from actors.connectors.sources import postgres_stream
from actors.connectors.sources.postgres_changes import DecodedChanges
from actors.connectors.sources.postgres_copy import CopyFrames
from actors.connectors.sources.postgres_stream import LATE_MS, ReplicationStream
from actors.connectors.sources.source import PositionMark
from actors.model.pgwire.encoded_values import PAD_BYTES
from actors.runtime.kernel.clock import SystemClock


def transaction(number: int, late_ms: int) -> list[bytes]:
    """An empty one that was sent so long after its commit."""
    committed, end = 1_000_000_000, number * 100
    sent = committed + late_ms * 1000
    begin = b"B" + struct.pack(">QqI", end, committed, number)
    commit = b"C\0" + struct.pack(">QQq", end, end + 1, committed)
    return [b"w" + struct.pack(">QQq", end, end, sent) + body for body in (begin, commit)]


class Told:
    """A copy, and the connection it came on: each poll brings what comes next."""

    def __init__(self, arrivals: list[list[bytes]]) -> None:
        self.arrivals = deque(arrivals)
        self.held: list[bytes] = []
        self.full = self.ended = False
        self.polls = 0

    async def copy(self, sql: str, bytes_max: int) -> Told:
        return self

    def read_ahead(self) -> None:
        pass

    def send(self, payload: bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def poll(self) -> CopyFrames:
        self.polls += 1
        new = self.arrivals.popleft() if self.arrivals else []
        self.held += new
        return framed(new)

    async def fill(self) -> CopyFrames:
        while not self.arrivals:
            await anyio.sleep_forever()
        return self.poll()

    def frames(self) -> CopyFrames:
        return framed(self.held)

    def take(self, count: int) -> None:
        del self.held[:count]


def framed(payloads: list[bytes]) -> CopyFrames:
    ends = np.cumsum([len(each) for each in payloads], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    return CopyFrames(np.frombuffer(b"".join(payloads) + bytes(PAD_BYTES), np.uint8), starts, ends)


@asynccontextmanager
async def streaming(told: Told) -> AsyncIterator[ReplicationStream]:
    changes = DecodedChanges((), {}, {}, 0, str)
    wire: Any = told
    stream = ReplicationStream(wire, changes, SystemClock(), 10_000)
    await stream.begin("slot", "publication")
    yield stream
    stream.close()


async def test_what_is_in_time_is_given_at_once() -> None:
    told = Told([transaction(number, LATE_MS - 1) for number in (1, 2, 3)])
    async with streaming(told) as stream:
        for number in (1, 2, 3):
            (mark,) = await stream.next(0)
            assert isinstance(mark, PositionMark)
            assert mark.position == str(number * 100 + 1)
            assert told.polls == number


async def test_what_is_late_waits_for_a_larger_piece() -> None:
    told = Told([transaction(number, LATE_MS) for number in (1, 2, 3)])
    async with streaming(told) as stream:
        (mark,) = await stream.next(0)
        assert isinstance(mark, PositionMark)
        assert mark.position == "301"
        assert await stream.next(0) == []


@pytest.mark.parametrize("limit", ["frames", "full", "ended"])
async def test_it_does_not_wait_when_there_is_enough(limit: str, monkeypatch: Any) -> None:
    told = Told([transaction(number, LATE_MS) for number in (1, 2)])
    if limit == "frames":
        monkeypatch.setattr(postgres_stream, "_PIECE_FRAMES", 2)
    async with streaming(told) as stream:
        told.full, told.ended = limit == "full", limit == "ended"
        (mark,) = await stream.next(0)
        assert isinstance(mark, PositionMark)
        assert mark.position == "101"
