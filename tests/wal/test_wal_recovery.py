"""Taking a peer's log: what is flushed when, on a stage, with a donor in memory."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import pytest
from wal_disks import Fault, MemoryDisk  # type: ignore[import-not-found]
from wal_wires import GREETING, START, TIMELINE, append, timeline_on  # type: ignore[import-not-found]

from actors.runtime.errors import ConnectionBroken
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation
from actors.wal.acceptor import AppendUnflushed, Message
from actors.wal.dialling import AcceptorAddress
from actors.wal.messages import TermEntry, VoteRequest
from actors.wal.peer_status import PeerStatus, status_row
from actors.wal.peers import QUERY, PeerExchange
from actors.wal.registry import ReceiverStage, ReceiverState
from actors.wal.replication import keepalive, xlog_data
from actors.wal.timeline import ProcessedMessages, WalTimeline

SETTINGS = Settings(wal_peers="donor:5454")
PIECE = 8
TERM = 3


class Donor:
    """An acceptor that has `size` bytes of log: connections to it, and what they are given."""

    def __init__(self, size: int) -> None:
        history = (TermEntry(TERM, START),)
        self.status = PeerStatus(9, TERM, START + size, START, START, START, START, history)
        self._says: deque[bytes | ConnectionBroken] = deque()
        self._said = asyncio.Event()
        self.asked: list[str] = []
        self._at = START

    def give(self, count: int) -> None:
        """So many pieces more, all there at once."""
        for _ in range(count):
            wal = bytes([self._at // PIECE % 251]) * PIECE
            self._say(xlog_data(self._at, self.status.flush_lsn, 0, wal))
            self._at += PIECE

    def idle(self) -> None:
        """It says that it has no more just now."""
        self._say(keepalive(self._at, 0, wants_reply=True))

    def end(self) -> None:
        """It is gone."""
        self._say(ConnectionBroken("the donor is gone"))

    def _say(self, body: bytes | ConnectionBroken) -> None:
        self._says.append(body)
        self._said.set()

    # what a connection does

    async def dial(self, address: AcceptorAddress, tenant: str, timeline: str) -> Any:
        return self

    async def query(self, text: str) -> list[tuple[str | None, ...]]:
        assert text == QUERY
        return [status_row(self.status)]

    async def command(self, text: str) -> None:
        self.asked.append(text)

    async def receive(self) -> bytes:
        while not self._says:
            self._said.clear()
            await self._said.wait()
        body = self._says.popleft()
        if isinstance(body, ConnectionBroken):
            raise body
        return body

    def abort(self) -> None:
        pass


@asynccontextmanager
async def recovering(
    stage: ActorIsolation, donor: Donor
) -> AsyncIterator[tuple[WalTimeline, MemoryDisk]]:
    """A timeline that has nothing, and asks that donor."""
    timeline, disk = timeline_on(stage)
    await timeline.process([GREETING])
    peers = PeerExchange(lambda: [timeline], 5, donor.dial, stage.system.clock, SETTINGS)
    task = asyncio.create_task(peers.run())
    await stage.advance(0)
    assert donor.asked == [f"START_REPLICATION PHYSICAL 0/1000000 (term='{TERM}')"]
    assert timeline.registry.receivers == [ReceiverState(0, None, ReceiverStage.STREAMING)]
    yield timeline, disk
    task.cancel()
    await asyncio.wait([task])


async def test_a_piece_that_nothing_follows_is_flushed_at_once(stage: ActorIsolation) -> None:
    donor = Donor(10 * PIECE)
    async with recovering(stage, donor) as (timeline, disk):
        for count in range(1, 4):
            donor.give(1)
            await stage.advance(0)
            assert timeline.ends.value.flush_lsn == START + count * PIECE
            assert (disk.flushes, disk.unflushed_bytes) == (count, 0)
        donor.idle()
        await stage.advance(0)
        assert disk.flushes == 3


async def test_a_burst_shares_one_flush(stage: ActorIsolation) -> None:
    donor = Donor(40 * PIECE)
    async with recovering(stage, donor) as (timeline, disk):
        donor.give(40)
        await stage.advance(0)
        assert timeline.ends.value.flush_lsn == START + 40 * PIECE
        assert disk.flushes <= 3
        assert timeline.registry.count == 0


async def test_a_burst_that_never_pauses_is_flushed_every_second(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk so slow that more always waits: each call takes 300 ms."""
    donor = Donor(100 * PIECE)
    flushed_ms: list[float] = []

    def noted(operation: str) -> Fault:
        if operation == "flush":
            flushed_ms.append(stage.system.clock.monotonic_ms())
        return Fault.NONE

    async with recovering(stage, donor) as (timeline, disk):
        process = timeline.process

        async def slow(messages: Sequence[Message]) -> ProcessedMessages:
            await anyio.sleep(0.3)
            return await process(messages)

        monkeypatch.setattr(timeline, "process", slow)
        disk.fault = noted
        began_ms = stage.system.clock.monotonic_ms()
        donor.give(100)
        await stage.advance(60_000)
        assert timeline.ends.value.flush_lsn == START + 100 * PIECE
        gaps_ms = [b - a for a, b in pairwise([began_ms, *flushed_ms])]
        assert max(gaps_ms) <= 1_000 + 3 * 300
        assert len(flushed_ms) < 50


async def test_a_later_promise_ends_it(stage: ActorIsolation) -> None:
    donor = Donor(10 * PIECE)
    async with recovering(stage, donor) as (timeline, _):
        donor.give(1)
        await stage.advance(0)
        await timeline.process([VoteRequest(0, TERM + 1)])
        donor.give(1)
        await stage.advance(0)
        assert timeline.registry.count == 0
        assert timeline.ends.value.flush_lsn == START + PIECE


async def test_what_was_taken_is_flushed_when_the_next_piece_is_refused(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader itself has come, and has gone on where the next piece belongs."""
    donor = Donor(10 * PIECE)
    async with recovering(stage, donor) as (timeline, disk):
        process = timeline.process

        async def overtaken(messages: Sequence[Message]) -> ProcessedMessages:
            done = await process(messages)
            monkeypatch.setattr(timeline, "process", process)
            await process([AppendUnflushed(append(START + PIECE, PIECE, TERM))])
            return done

        monkeypatch.setattr(timeline, "process", overtaken)
        donor.give(3)
        with caplog.at_level(logging.INFO, "penstock.wal"):
            await stage.advance(0)
        assert "append at 0/1000008 would rewrite" in caplog.text
        assert timeline.registry.count == 0
        assert (timeline.ends.value.flush_lsn, disk.unflushed_bytes) == (START + 2 * PIECE, 0)


@pytest.mark.parametrize("ending", ["the donor is gone", "a proposer streams", "it says nothing"])
async def test_what_was_read_is_flushed_however_it_ends(
    stage: ActorIsolation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ending: str,
) -> None:
    donor = Donor(10 * PIECE)
    async with recovering(stage, donor) as (timeline, disk):
        process, turns = timeline.process, anyio.Semaphore(0)

        async def gated(messages: Sequence[Message]) -> ProcessedMessages:
            await turns.acquire()
            return await process(messages)

        monkeypatch.setattr(timeline, "process", gated)
        donor.give(3)
        match ending:
            case "the donor is gone":
                donor.end()
            case "it says nothing":
                await stage.advance(SETTINGS.connect_timeout_ms + 1)
        await stage.advance(0)
        if ending == "a proposer streams":
            timeline.registry.register("a proposer").streaming()
        taken = 1 if ending == "a proposer streams" else 3
        caplog.set_level(logging.INFO, "penstock.wal")
        while any(each.connection is None for each in timeline.registry.receivers):
            turns.release()
            await stage.advance(0)
        assert timeline.ends.value.flush_lsn == START + taken * PIECE
        assert (len(disk.wal), disk.unflushed_bytes) == (taken * PIECE, 0)
        assert ending == "a proposer streams" or f"peer donor:5454 of timeline {TIMELINE}" in (
            caplog.text
        )
