"""Reading a log back, and the upkeep of timelines: in virtual time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from wal_disks import Fault, MemoryControl, MemoryDisk, no_fault  # type: ignore[import-not-found]
from wal_wires import (  # type: ignore[import-not-found]
    ELECTED,
    GREETING,
    START,
    TENANT,
    TIMELINE,
    VOTE,
    Log,
    append,
    timeline_on,
)

from actors.runtime.errors import PenstockError, StorageError, WalRefused
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation
from actors.wal.acceptor_stores import ControlState
from actors.wal.feedback_codec import encode_feedback
from actors.wal.listener import WalSender
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.messages import (
    WAL_BYTES_MAX,
    HotStandbyFeedback,
    PageserverFeedback,
    ProposerElected,
    TermEntry,
    VoteRequest,
)
from actors.wal.receiver import CopyEnd
from actors.wal.registry import ReceiverStage
from actors.wal.startup import StartReplication
from actors.wal.timeline import WalTimeline, horizon
from actors.wal.timelines import TimelineRegistry, must_save


class Reader:
    """A wire to a reader: raw bodies both ways."""

    peer = "a reader"

    def __init__(self) -> None:
        self.said: asyncio.Queue[bytes | CopyEnd] = asyncio.Queue()
        self.heard: list[bytes] = []

    async def next_copy(self) -> bytes | CopyEnd:
        return await self.said.get()

    async def send_copy(self, data: bytes) -> None:
        self.heard.append(data)

    def pieces(self) -> list[tuple[int, int]]:
        """(begin, size) of what came."""
        return [
            (struct.unpack_from("!Q", data, 1)[0], len(data) - 25)
            for data in self.heard
            if data[:1] == b"w"
        ]

    def keepalives(self) -> int:
        return sum(data[:1] == b"k" for data in self.heard)


@asynccontextmanager
async def reading(
    stage: ActorIsolation, timeline: WalTimeline, asked: StartReplication
) -> AsyncIterator[tuple[Reader, asyncio.Task[CopyEnd | None]]]:
    reader = Reader()
    sender = WalSender(reader, timeline, asked, 1, stage.system.clock)
    task = asyncio.get_running_loop().create_task(sender.run())
    await stage.advance(0)
    yield reader, task
    task.cancel()
    await asyncio.wait([task])


async def led(stage: ActorIsolation, size: int) -> WalTimeline:
    """A timeline of so many bytes, of which nothing is committed."""
    timeline, _ = timeline_on(stage)
    done = await timeline.process([GREETING, VOTE, ELECTED])
    assert done.error is None
    for at in range(START, START + size, WAL_BYTES_MAX):
        part = min(WAL_BYTES_MAX, START + size - at)
        assert (await timeline.process([append(at, part)])).error is None
    found: WalTimeline = timeline
    return found


async def test_what_is_committed_comes_in_pieces_that_end_at_pages(stage: ActorIsolation) -> None:
    size = 3 * WAL_BYTES_MAX + 800
    timeline = await led(stage, size)
    begin = START + 8
    async with reading(stage, timeline, StartReplication(begin)) as (reader, task):
        assert reader.pieces() == []
        await timeline.process([append(START + size, 0, commit=START + size)])
        await stage.advance(0)
        pieces = reader.pieces()
        at = begin
        for lsn, piece in pieces:
            assert lsn == at
            assert piece <= WAL_BYTES_MAX
            at += piece
            assert at % PAGE_BYTES == 0 or at == START + size
        assert at == START + size
        assert not task.done()


async def test_a_keepalive_goes_every_idle_second(stage: ActorIsolation) -> None:
    timeline = await led(stage, 64)
    async with reading(stage, timeline, StartReplication(START)) as (reader, task):
        await stage.advance(5_500)
        assert reader.keepalives() == 5
        reader.said.put_nowait(CopyEnd.DONE)
        await stage.advance(0)
        assert task.result() is CopyEnd.DONE


async def test_with_a_term_all_that_is_flushed_comes_while_it_lasts(stage: ActorIsolation) -> None:
    timeline = await led(stage, 64)
    async with reading(stage, timeline, StartReplication(START, 1)) as (reader, task):
        assert reader.pieces() == [(START, 64)]
        await timeline.process([VoteRequest(0, 2)])
        await stage.advance(1_000)
        with pytest.raises(ExceptionGroup) as failed:
            task.result()
        assert isinstance(failed.value.exceptions[0], WalRefused)
        assert reader.pieces() == [(START, 64)]


@pytest.mark.parametrize("stage_of", ReceiverStage)
async def test_a_consumer_that_has_all_is_let_go_when_nobody_is_connected(
    stage: ActorIsolation, stage_of: ReceiverStage
) -> None:
    """A proposer that only votes yet is about to bring more."""
    timeline = await led(stage, 64)
    await timeline.process([append(START + 64, 0, commit=START + 64)])
    guard = timeline.registry.register("a proposer")
    if stage_of is ReceiverStage.STREAMING:
        guard.streaming()
    async with reading(stage, timeline, StartReplication(START)) as (reader, task):
        told = encode_feedback(PageserverFeedback(remote_consistent_lsn=START + 64))
        reader.said.put_nowait(b"z" + struct.pack("!Q", len(told)) + told)
        await stage.advance(3_000)
        assert not task.done()
        assert timeline.acceptor.state.remote_consistent_lsn == START + 64
        guard.release()
        await stage.advance(2_000)
        assert task.result() is None


async def test_a_standby_counts_while_it_is_there(stage: ActorIsolation) -> None:
    timeline = await led(stage, 64)
    async with reading(stage, timeline, StartReplication(START)) as (reader, _):
        reader.said.put_nowait(b"h" + struct.pack("!qIIII", 7, 700, 0, 0, 0))
        await stage.advance(0)
        [answer] = (await timeline.process([append(START + 64, 0)])).replies
        assert answer.hot_standby == HotStandbyFeedback(7, 700, 0)  # type: ignore[union-attr]
    [answer] = (await timeline.process([append(START + 64, 0)])).replies
    assert answer.hot_standby == HotStandbyFeedback()  # type: ignore[union-attr]


# -- upkeep ----------------------------------------------------------------------------------------


def test_when_a_control_file_is_saved() -> None:
    saved = ControlState(TENANT, TIMELINE, segment_bytes=SEGMENT_BYTES, commit_lsn=START)
    ahead = msgspec.structs.replace(saved, commit_lsn=START + SEGMENT_BYTES - 8)
    assert not must_save(saved, saved, aged=True)
    assert not must_save(saved, ahead, aged=False)
    assert must_save(saved, ahead, aged=True)
    far = msgspec.structs.replace(saved, commit_lsn=START + SEGMENT_BYTES)
    assert must_save(saved, far, aged=False)


@pytest.mark.parametrize("least", ["commit_lsn", "backup_lsn", "remote_consistent_lsn", "flush"])
def test_the_horizon_is_what_nobody_needs(least: str) -> None:
    positions = dict.fromkeys(["commit_lsn", "backup_lsn", "remote_consistent_lsn", "flush"], 900)
    positions[least] = 500
    flush = positions.pop("flush")
    saved = msgspec.structs.replace(ControlState(TENANT, TIMELINE), **positions)
    assert horizon(saved, flush) == 500


class MemoryDisks:
    """Timelines in memory."""

    def __init__(self) -> None:
        self.disks: dict[Path, MemoryDisk] = {}
        self.logs: list[Log] = []

    def open(self, folder: Path) -> tuple[MemoryControl, Log]:
        log = Log(self.disks[folder])
        self.logs.append(log)
        return MemoryControl(self.disks[folder]), log

    def create(self, folder: Path, state: ControlState) -> None:
        self.disks[folder] = MemoryDisk(state)


async def test_positions_are_saved_off_the_path_of_appends(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    disks = MemoryDisks()
    settings = Settings(wal_save_ms=300, wal_control_age_ms=300_000)
    timelines = TimelineRegistry(tmp_path, 5, disks, stage.system.clock, settings)
    await timelines.open()
    timeline = await timelines.get_or_create(GREETING, may_create=True)
    assert timeline is not None
    assert await timelines.get_or_create(GREETING, may_create=False) is timeline
    await timeline.process([GREETING, VOTE, ELECTED, append(START, 64)])
    await timeline.process([append(START + 64, 0, commit=START + 64)])
    keeping = asyncio.get_running_loop().create_task(timelines.run_maintenance())
    await stage.advance(299_000)
    assert timeline.saved.commit_lsn == START
    await stage.advance(2_000)
    assert timeline.saved.commit_lsn == START + 64
    assert disks.logs[0].removed_before == START  # where it begins: nobody has told of a backup
    at = START + 64
    while at < START + SEGMENT_BYTES + WAL_BYTES_MAX:
        await timeline.process([append(at, WAL_BYTES_MAX, commit=at)])
        at += WAL_BYTES_MAX
    await stage.advance(300)
    assert timeline.saved.commit_lsn >= START + SEGMENT_BYTES
    keeping.cancel()
    await asyncio.wait([keeping])
    timelines.close()


async def test_a_timeline_whose_disk_failed_is_opened_anew(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    disks = MemoryDisks()
    timelines = TimelineRegistry(tmp_path, 5, disks, stage.system.clock, Settings(wal_save_ms=300))
    await timelines.open()

    async def failed() -> WalTimeline:
        """The timeline, after a flush of it went wrong."""
        timeline = await timelines.get_or_create(GREETING, may_create=True)
        assert timeline is not None
        term = timeline.acceptor.term + 1
        vote = msgspec.structs.replace(VOTE, term=term)
        done = await timeline.process([GREETING, vote])
        begin = timeline.acceptor.flush_lsn or START
        history = (*timeline.acceptor.state.history, TermEntry(term, begin))
        elected = ProposerElected(0, term, begin, history)
        assert (await timeline.process([elected])).error is None
        [disk] = disks.disks.values()
        disk.fault = lambda operation: Fault.LOST if operation == "flush" else Fault.NONE
        request = msgspec.structs.replace(append(begin, 64), term=term)
        done = await timeline.process([request])
        disk.fault = no_fault
        assert isinstance(done.error, StorageError)
        return timeline

    first = await failed()
    async with reading(stage, first, StartReplication(START)) as (_, task):
        await stage.advance(1_500)
        with pytest.raises(ExceptionGroup) as told:
            await task
        assert told.group_contains(StorageError, match="connect again")
    second = await failed()
    assert second is not first
    assert disks.logs[0].closed
    assert not disks.logs[1].closed

    keeping = asyncio.get_running_loop().create_task(timelines.run_maintenance())
    await stage.advance(6_000)  # nobody comes: it is opened all the same
    third = timelines.find(TENANT, TIMELINE)
    assert third is not None
    assert third is not second
    assert third.acceptor.stopped is None
    assert len(disks.logs) == 3
    keeping.cancel()
    await asyncio.wait([keeping])
    timelines.close()


async def test_one_timeline_that_cannot_be_opened_harms_no_other(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    disks = MemoryDisks()
    bad = tmp_path / TENANT / ("0" * 32)
    good = tmp_path / TENANT / TIMELINE
    for folder in (bad, good, tmp_path / TENANT / "notes", tmp_path / "lost+found"):
        folder.mkdir(parents=True)
    disks.create(good, ControlState(TENANT, TIMELINE))
    disks.create(bad, ControlState(TENANT, "1" * 32))  # it says that it is another
    timelines = TimelineRegistry(tmp_path, 5, disks, stage.system.clock, Settings())
    await timelines.open()
    assert [each.name for each in timelines.all] == [TIMELINE]
    greeting = msgspec.structs.replace(GREETING, timeline="0" * 32)
    with pytest.raises(WalRefused, match="is not served"):
        await timelines.get_or_create(greeting, may_create=True)
    with pytest.raises(PenstockError, match="hexadecimal"):
        await timelines.get_or_create(
            msgspec.structs.replace(GREETING, tenant="../" * 10 + "etc"), may_create=True
        )
    timelines.close()
