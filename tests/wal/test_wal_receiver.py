"""Reader, acceptor and writer of one connection, on a stage: time stands still."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import anyio
import pytest
from wal_disks import Fault  # type: ignore[import-not-found]
from wal_wires import ELECTED, GREETING, START, TIMELINE, VOTE, MemoryWire, append, timeline_on  # type: ignore[import-not-found]

from actors.runtime import spans
from actors.runtime.errors import (
    ActorDead,
    ConnectionBroken,
    MalformedFrame,
    StorageError,
    WalRefused,
)
from actors.runtime.kernel import ReplySlot
from actors.runtime.measurement import MetricDefinition
from actors.runtime.metric_table import WAL_QUEUE_BYTES, WAL_QUEUE_DEPTH, WAL_QUEUED, WAL_RECEIVERS
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.wal import codec_v3
from actors.wal.accepting import GATHERED_BYTES_MAX, QueueMeter, gathered_max
from actors.wal.acceptor import AppendUnflushed, Message
from actors.wal.messages import (
    WAL_BYTES_MAX,
    AcceptorGreeting,
    AppendResponse,
    HotStandbyFeedback,
    PageserverFeedback,
    ProposerElected,
    ProposerMessage,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from actors.wal.receiver import ConnectionOutcome, CopyEnd, WalReceiver
from actors.wal.registry import ReceiverStage, ReceiverState
from actors.wal.timeline import ProcessedMessages

SMALL = Settings(wal_messages_max=16, wal_replies_max=4)


class House:
    """A receiver with its wire, its timeline and its disk."""

    def __init__(self, stage: ActorIsolation, settings: Settings = SMALL) -> None:
        self.stage = stage
        self.timeline, self.disk = timeline_on(stage)
        self.settings = settings
        self.wires = 0

    def connect(self) -> tuple[MemoryWire, ReplySlot[ConnectionOutcome], SubjectActor[Any]]:
        wire, outcome = MemoryWire(), ReplySlot[ConnectionOutcome]()
        self.wires += 1
        receiver = self.stage.start(
            lambda: WalReceiver(wire, codec_v3, self.timeline, GREETING, outcome, self.settings),
            f"receiver{self.wires}",
        )
        return wire, outcome, receiver

    def gate(self, monkeypatch: pytest.MonkeyPatch) -> anyio.Semaphore:
        """From now on each call to the disk waits for a turn, which `release` gives."""
        process, turns = self.timeline.process, anyio.Semaphore(0)

        async def gated(messages: Sequence[Message]) -> ProcessedMessages:
            await turns.acquire()
            done: ProcessedMessages = await process(messages)
            return done

        monkeypatch.setattr(self.timeline, "process", gated)
        return turns

    async def lead(self, *more: ProposerMessage) -> tuple[MemoryWire, ReplySlot[ConnectionOutcome]]:
        """A proposer that was elected, and has heard all answers so far."""
        wire, outcome, _ = self.connect()
        wire.say(VOTE, ELECTED, *more)
        await self.stage.advance(0)
        wire.heard.clear()
        self.disk.flushes = 0
        return wire, outcome


async def test_a_proposer_is_greeted_elected_and_answered(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, outcome, _ = house.connect()
    await stage.advance(0)
    assert isinstance(wire.heard.pop(0), AcceptorGreeting)
    assert house.timeline.registry.receivers == [
        ReceiverState(0, "a proposer", ReceiverStage.VOTING)
    ]
    wire.say(VOTE)
    await stage.advance(0)
    vote = wire.heard.pop(0)
    assert isinstance(vote, VoteResponse)
    assert vote.vote_given
    assert house.timeline.registry.streaming == 0
    wire.say(ELECTED, append(START))
    await stage.advance(0)
    assert wire.heard == [AppendResponse(0, 1, START + 8, START)]
    assert house.timeline.registry.streaming == 1
    wire.say(CopyEnd.DONE)
    await stage.advance(0)
    assert await outcome.wait() == ConnectionOutcome(CopyEnd.DONE)
    assert house.timeline.registry.count == 0


async def test_the_queue_is_measured_again_and_again(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []
    clock = stage.system.clock
    monkeypatch.setattr(QueueMeter, "sample", lambda _: measured.append(clock.monotonic_ms()))
    monkeypatch.setattr("actors.wal.receiver.SAMPLE_MS", 70)
    house = House(stage, SMALL)
    began_ms = clock.monotonic_ms()
    house.connect()
    await stage.advance(220)
    assert measured == pytest.approx([began_ms + 70 * n for n in (1, 2, 3)])


async def test_an_election_is_in_the_log(
    stage: ActorIsolation, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(stage)
    wire, _ = await house.lead(append(START))
    with caplog.at_level(logging.INFO, "penstock.wal"):
        wire.say(VoteRequest(0, 2), ELECTED)
        await stage.advance(0)
    ends = f"timeline {TIMELINE} %s: now at %s, flush 0/1000008, commit 0/1000000"
    assert caplog.messages == [
        ends % ("was asked to vote for term 2", "term 2, last log term 1"),
        ends % ("follows the leader of term 1 from 0/1000000", "term 2, last log term 1"),
    ]
    caplog.clear()
    entries = (TermEntry(1, START), TermEntry(2, START + 8))
    with caplog.at_level(logging.INFO, "penstock.wal"):
        wire.say(ProposerElected(0, 2, START + 8, entries))
        await stage.advance(0)
    assert caplog.messages == [
        ends % ("follows the leader of term 2 from 0/1000008", "term 2, last log term 2"),
    ]


async def test_a_lone_append_is_flushed_at_once(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, _ = await house.lead()
    for n in range(3):
        wire.say(append(START + 8 * n))
        await stage.advance(0)
        assert wire.heard[-1] == AppendResponse(0, 1, START + 8 * (n + 1), START)
        assert house.disk.flushes == n + 1
        assert house.disk.unflushed_bytes == 0


async def test_a_heartbeat_is_answered(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, _ = await house.lead(append(START))
    wire.say(append(START + 8, 0))
    await stage.advance(0)
    assert wire.heard == [AppendResponse(0, 1, START + 8, START)]
    assert house.disk.flushes == 0


async def test_a_burst_shares_one_flush(stage: ActorIsolation) -> None:
    """Fewer flushes than messages, whatever the order of what is ready; and all is answered."""
    house = House(stage, Settings())
    wire, _ = await house.lead()
    wire.say(*(append(START + 8 * n) for n in range(40)))
    await stage.advance(0)
    assert wire.heard[-1] == AppendResponse(0, 1, START + 320, START)
    assert house.disk.flushes == len(wire.heard) <= 2


async def test_a_burst_that_never_pauses_is_flushed_every_second(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk so slow that more always waits: each call takes 300 ms."""
    house = House(stage)
    wire, _ = await house.lead()
    calls: list[int] = []
    flushed_ms: list[float] = []
    process = house.timeline.process

    async def slow(messages: Sequence[Message]) -> ProcessedMessages:
        calls.append(len(messages))
        await anyio.sleep(0.3)
        done: ProcessedMessages = await process(messages)
        return done

    def noted(operation: str) -> Fault:
        if operation == "flush":
            flushed_ms.append(stage.system.clock.monotonic_ms())
        return Fault.NONE

    monkeypatch.setattr(house.timeline, "process", slow)
    house.disk.fault = noted
    began_ms = stage.system.clock.monotonic_ms()
    wire.say(*(append(START + 8 * n) for n in range(200)))
    await stage.advance(60_000)
    assert wire.heard[-1] == AppendResponse(0, 1, START + 1600, START)
    assert max(calls) <= house.settings.wal_messages_max // 4 + 1
    gaps_ms = [b - a for a, b in pairwise([began_ms, *flushed_ms])]
    assert max(gaps_ms) <= 1000 + 2 * 300
    assert len(flushed_ms) <= len(calls) / 3


async def test_messages_wait_when_answers_are_not_taken(
    stage: ActorIsolation, caplog: pytest.LogCaptureFixture
) -> None:
    """The chain: a stalled socket, full answers, full messages, an unread socket."""
    house = House(stage)
    wire, _ = await house.lead()
    wire.stall()
    count = 200
    for n in range(count):  # one at a time: each is answered
        wire.say(append(START + 8 * n))
        await stage.advance(1)
    settings = house.settings
    most = settings.wal_messages_max + settings.wal_replies_max + 3
    assert 3 + settings.wal_replies_max < wire.read < 3 + most
    assert wire.heard == []
    read = wire.read
    with caplog.at_level(logging.WARNING, "penstock.wal"):
        await stage.advance(4_000)
        assert caplog.messages == []
        await stage.advance(2_000)
        assert "waited for room" in caplog.messages[0]
        await stage.advance(60_000)
        assert (len(caplog.messages), wire.read) == (1, read)
        wire.resume()
        await stage.advance(0)
    assert "waited 6" in caplog.messages[1]
    assert len(caplog.messages) == 2
    assert wire.read == 2 + count
    assert wire.heard[-1] == AppendResponse(0, 1, START + 8 * count, START)


async def test_what_was_read_is_flushed_before_the_connection_ends(stage: ActorIsolation) -> None:
    """A disconnect behind a burst: whoever asks afterwards sees all of it."""
    house = House(stage)
    wire, outcome = await house.lead()
    wire.say(*(append(START + 8 * n) for n in range(50)), ConnectionBroken("the proposer is gone"))
    ended = await outcome.wait()
    assert isinstance(ended.error, ConnectionBroken)
    assert not ended.from_acceptor
    assert house.timeline.ends.value.flush_lsn == START + 400
    assert house.disk.unflushed_bytes == 0


@pytest.mark.parametrize("waiting", [2, gathered_max(SMALL)])
async def test_what_waits_when_the_connection_ends_is_taken_and_flushed_before_it_does(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """The proposer goes while the disk is at its first append and the rest waits behind that. Who
    asks for the status once the connection has ended must see all of it: the next proposer would
    be elected at a flushed position that this answer did not show (Neon's issue 9259)."""
    house = House(stage)
    wire, outcome = await house.lead()
    turns = house.gate(monkeypatch)
    wire.say(append(START))
    await stage.advance(0)
    wire.say(
        *(append(START + 8 * n) for n in range(1, waiting + 1)), ConnectionBroken("it is gone")
    )
    await stage.advance(0)
    assert (wire.read, house.disk.wal) == (3 + waiting, b"")
    while not outcome.answered:
        assert house.timeline.registry.count == 1
        turns.release()
        await stage.advance(0)
    assert isinstance((await outcome.wait()).error, ConnectionBroken)
    assert house.timeline.ends.value.flush_lsn == START + 8 * (1 + waiting)
    assert house.disk.unflushed_bytes == 0
    assert house.timeline.registry.count == 0


async def test_a_disk_that_fails_at_the_last_flush_is_told(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that the proposer had ended its copy, which happened first."""
    house = House(stage)
    wire, outcome = await house.lead()
    turns = house.gate(monkeypatch)
    wire.say(append(START))
    await stage.advance(0)
    wire.say(append(START + 8), CopyEnd.DONE)
    await stage.advance(0)  # both wait
    turns.release()
    await stage.advance(0)
    house.disk.fault = lambda operation: Fault.LOST if operation == "flush" else Fault.NONE
    turns.release()
    ended = await outcome.wait()
    assert isinstance(ended.error, StorageError)
    assert ended.from_acceptor


async def test_a_call_to_the_disk_takes_so_many_messages_and_bytes(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for messages_max, many in ((8, 2), (256, 64), (4_096, 64)):
        assert gathered_max(Settings(wal_messages_max=messages_max)) == many
    house = House(stage, Settings())
    wire, _ = await house.lead()
    process, sizes = house.timeline.process, []

    async def noted(messages: Sequence[Message]) -> ProcessedMessages:
        sizes.append(sum(len(m.request.wal) for m in messages if isinstance(m, AppendUnflushed)))
        done: ProcessedMessages = await process(messages)
        return done

    monkeypatch.setattr(house.timeline, "process", noted)
    count = 3 * GATHERED_BYTES_MAX // WAL_BYTES_MAX
    wire.say(*(append(START + WAL_BYTES_MAX * n, WAL_BYTES_MAX) for n in range(count)))
    await stage.advance(0)
    assert [size for size in sizes if size] == [GATHERED_BYTES_MAX] * 3


async def test_an_answer_that_cannot_be_sent_stops_the_acceptor(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in hand is flushed, what waits behind it is dropped: nobody would hear of it."""
    house = House(stage)
    wire, outcome = await house.lead()
    turns = house.gate(monkeypatch)
    wire.say(append(START))
    await stage.advance(0)
    wire.say(VOTE, *(append(START + 8 * n) for n in range(1, 6)))
    await stage.advance(0)
    assert (wire.read, house.disk.wal) == (9, b"")
    wire.broken = True
    turns.release()  # the first append's answer is what cannot be sent
    await stage.advance(0)
    assert not outcome.answered
    while not outcome.answered:  # the vote's has nobody to go to
        turns.release()
        await stage.advance(0)
    assert isinstance((await outcome.wait()).error, ConnectionBroken)
    assert house.timeline.ends.value.flush_lsn == START + 8 * 4
    assert len(house.disk.wal) == 8 * 4
    assert house.timeline.registry.count == 0


async def test_answers_that_cannot_be_sent_stop_the_stream_flushed(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, outcome = await house.lead()
    wire.broken = True
    wire.say(append(START))
    await stage.advance(0)
    ended = await outcome.wait()
    assert isinstance(ended.error, ConnectionBroken)
    assert house.disk.unflushed_bytes == 0
    assert house.timeline.registry.count == 0


async def test_a_refusal_is_told_and_ends_the_connection_alone(
    stage: ActorIsolation, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(stage)
    wire, outcome = await house.lead(append(START))
    other, still_open, _ = house.connect()
    with caplog.at_level(logging.INFO, "penstock.wal"):
        wire.say(append(START + 8), append(START + 800))
        ended = await outcome.wait()
    assert isinstance(ended.error, WalRefused)
    assert ended.from_acceptor
    assert "term 1, last log term 1, flush 0/1000010, commit 0/1000000" in caplog.text
    assert house.disk.unflushed_bytes == 0
    await stage.advance(0)
    assert isinstance(other.heard[0], AcceptorGreeting)
    assert not still_open.answered


async def test_a_failed_disk_is_told(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, outcome = await house.lead()
    house.disk.fault = lambda operation: Fault.LOST if operation == "flush" else Fault.NONE
    wire.say(append(START))
    ended = await outcome.wait()
    assert isinstance(ended.error, StorageError)
    assert ended.from_acceptor
    assert wire.heard == []


async def test_an_acceptor_that_crashes_ends_its_own_connection(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(stage)
    wire, outcome = await house.lead()
    other, still_open, _ = house.connect()
    await stage.advance(0)

    def crash(message: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(house.timeline.acceptor, "process", crash)
    wire.say(append(START))
    ended = await outcome.wait()
    assert isinstance(ended.error, ActorDead)
    assert "ZeroDivisionError: a bug of ours" in str(ended.error)
    assert ended.from_acceptor
    monkeypatch.undo()
    other.say(VOTE)
    await stage.advance(0)
    assert not still_open.answered
    assert isinstance(other.heard[-1], VoteResponse)


async def test_bytes_that_are_no_message_end_the_stream_flushed(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, outcome = await house.lead()
    wire.say(append(START), MalformedFrame("no message"))
    ended = await outcome.wait()
    assert isinstance(ended.error, MalformedFrame)
    assert house.disk.unflushed_bytes == 0


class Measured:
    """What was measured: the sum of each, and all values of the queue's depth."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.depths: list[float] = []

    def measure(self, metric: MetricDefinition, value: float, labels: tuple[str, ...], /) -> None:
        self.sums[metric.name] += int(value)
        if metric is WAL_QUEUE_DEPTH:
            self.depths.append(value)


async def test_what_waits_is_measured(
    stage: ActorIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured()
    monkeypatch.setattr(spans, "_instruments", measured)
    house = House(stage)
    wire, outcome, receiver = house.connect()
    wire.say(VOTE, ELECTED)
    await stage.advance(0)

    def queued() -> tuple[int, int]:
        return measured.sums[WAL_QUEUED.name], measured.sums[WAL_QUEUE_BYTES.name]

    assert (measured.sums[WAL_RECEIVERS.name], queued()) == (1, (0, 0))
    turns = house.gate(monkeypatch)
    wire.say(append(START))
    await stage.advance(0)
    wire.say(*(append(START + 8 * n) for n in range(1, 6)))
    await stage.advance(4_999)
    assert (queued(), measured.depths) == ((5, 40), [])
    await stage.advance(1)  # the disk is at work still
    assert measured.depths == [5]
    turns.release()
    await stage.advance(5_000)
    assert (queued(), measured.depths) == ((1, 8), [5, 1])
    stopping = asyncio.create_task(receiver.stop())
    await stage.advance(0)
    turns.release()
    await stopping  # the rest is taken by nobody
    assert outcome.answered
    assert (measured.sums[WAL_RECEIVERS.name], queued()) == (0, (0, 0))


async def test_feedback_goes_on_a_copy_of_the_last_answer(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, _ = await house.lead()
    told = PageserverFeedback(remote_consistent_lsn=START)
    house.timeline.feeds.broadcast(told)
    await stage.advance(0)
    assert wire.heard == []  # no append was answered yet: dropped
    wire.say(append(START))
    await stage.advance(0)
    plain = AppendResponse(0, 1, START + 8, START)
    assert wire.heard == [plain]
    house.timeline.feeds.broadcast(told)
    house.timeline.hot_standby(1, HotStandbyFeedback(9, 500, 0))
    wire.say(append(START + 8, 0))
    await stage.advance(0)
    assert AppendResponse(0, 1, START + 8, START, pageserver=told) in wire.heard
    assert AppendResponse(0, 1, START + 8, START, HotStandbyFeedback(9, 500, 0)) in wire.heard


async def test_a_stopped_receiver_neither_drains_nor_flushes(stage: ActorIsolation) -> None:
    house = House(stage)
    wire, outcome, receiver = house.connect()
    wire.say(VOTE, ELECTED)
    await stage.advance(0)
    await receiver.stop()
    assert (await outcome.wait()).error is not None
    assert house.timeline.registry.count == 0
    wire.say(append(START))
    await stage.advance(0)
    assert house.disk.wal == b""
