"""Segments kept elsewhere: what is copied and when, what may be removed, and what is read back."""

from __future__ import annotations

import logging
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio
import msgspec
import pytest
from test_wal_command import started  # type: ignore[import-not-found]
from wal_wires import GREETING, TENANT, TIMELINE, VOTE  # type: ignore[import-not-found]

from actors.doors.commands import wal_commands as commands
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.location import BlobStore
from actors.durable.persist.memory_stores import MemoryBlob
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, WalRemoved
from actors.runtime.kernel import SystemClock
from actors.runtime.measurement import MetricDefinition, ValueHistogram
from actors.runtime.metric_table import WAL_BACKUP_LAG, WAL_OFFLOAD_FAILURES, WAL_OFFLOADED
from actors.runtime.settings import Settings
from actors.runtime.tracing.metrics import start
from actors.wal import codec_v3
from actors.wal.acceptor import AppendUnflushed, FlushWal
from actors.wal.archive import SegmentStamp, WalArchive
from actors.wal.control import FileControl
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, dial, start_push
from actors.wal.following import LogReader
from actors.wal.inspection import inspect_bytes
from actors.wal.lsn import SEGMENT_BYTES, lsn_text, segment_name
from actors.wal.messages import (
    WAL_BYTES_MAX,
    AppendRequest,
    AppendResponse,
    ProposerElected,
    TermEntry,
)
from actors.wal.offload import TURNS, SegmentOffload, archive_turn, is_due, next_segment
from actors.wal.segments import NEW_NAME
from actors.wal.timeline import WalTimeline
from actors.wal.timelines import FileTimelineStore, TimelineRegistry
from tests.simulators.wal.made_up import MadeUpLog

R = TypeVar("R")

START = 2 * SEGMENT_BYTES - 98_304 + 0x18
"""Late in segment 1, so that logs of several segments are short."""
LOG = MadeUpLog(START, magic=0xD116, system_id=GREETING.system_id)
while LOG.end_lsn < 3 * SEGMENT_BYTES + 300_000:
    LOG.record(Random(LOG.end_lsn).randbytes(40_000))
ELECTED = ProposerElected(0, 1, START, (TermEntry(1, START),))
SETTINGS = Settings(wal_blob_timeout_ms=600_000, wal_offload_turn_ms=1_000)


class Hands:
    """A clock that stands still until it is put forward."""

    def __init__(self) -> None:
        self.at_ms = 1_000.0

    def now_ms(self) -> int:
        return int(self.at_ms)

    def monotonic_ms(self) -> float:
        return self.at_ms

    async def run_blocking(self, function: Callable[[], R]) -> R:
        return function()

    async def run_blocking_within(self, within_ms: float, function: Callable[[], R]) -> R:
        return function()


class Bucket(MemoryBlob):
    """Counts what is written; hangs or fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(Hands())
        self.written: list[str] = []
        self.asked = 0
        self.hangs = False
        self.fails = False
        self.die_after: str | None = None
        """When a key that ends so was written, the process is gone."""

    async def get(self, key: str) -> bytes | None:
        self.asked += 1
        if self.hangs:
            await anyio.sleep_forever()
        if self.fails:
            raise StorageError("the bucket says no", determinate=True)
        return await super().get(key)

    async def set(self, key: str, data: bytes) -> None:
        self.written.append(key)
        await super().set(key, data)
        if self.die_after is not None and key.endswith(self.die_after):
            raise KeyboardInterrupt


def archive_on(bucket: BlobStore, settings: Settings = SETTINGS) -> WalArchive:
    async def opened(tenant: str) -> BlobStore:
        assert tenant == TENANT
        return bucket

    return WalArchive(opened, settings)


class Node:
    """One acceptor's timelines over files, and its offload."""

    def __init__(
        self,
        folder: Path,
        bucket: BlobStore | WalArchive,
        node_id: int = 1,
        settings: Settings = SETTINGS,
    ) -> None:
        self.clock = Hands()
        self.archive = bucket if isinstance(bucket, WalArchive) else archive_on(bucket, settings)
        self.timelines = TimelineRegistry(
            folder, node_id, FileTimelineStore(), self.clock, settings, self.archive
        )
        self.offload = SegmentOffload(
            lambda: self.timelines.all, node_id, self.archive, self.clock, settings, Random(1)
        )

    async def open(self) -> WalTimeline | None:
        await self.timelines.open()
        return self.timelines.find(TENANT, TIMELINE)

    async def lead(self) -> WalTimeline:
        timeline = await self.timelines.get_or_create(GREETING, may_create=True)
        assert timeline is not None
        told = await timeline.process([GREETING, VOTE, ELECTED])
        assert told.error is None
        return timeline

    async def rounds(self) -> None:
        """More than there are segments, each when whoever comes before has had its time."""
        for _ in range(6):
            self.clock.at_ms += 100_000
            await self.offload.look()

    def close(self) -> None:
        self.timelines.close()


async def pushed(timeline: WalTimeline, end_lsn: int, commit_lsn: int) -> None:
    """The log from where the timeline's ends up to `end_lsn`, and a commit."""
    at = max(timeline.acceptor.flush_lsn, START)
    while at < end_lsn:
        to = min(at + WAL_BYTES_MAX, end_lsn)
        wal = bytes(LOG.wal[at - START : to - START])
        request = AppendRequest(0, 1, at, to, 0, 0, wal)
        assert (await timeline.process([AppendUnflushed(request)])).error is None
        at = to
    assert (await timeline.process([FlushWal()])).error is None
    beat = AppendRequest(0, 1, at, at, commit_lsn, 0)
    assert (await timeline.process([beat])).error is None
    assert timeline.acceptor.commit_lsn == commit_lsn


def ends_before(lsn: int) -> int:
    """Of the last record that ends at `lsn` or before."""
    return max(end for _, end in LOG.records if end <= lsn)


def local_segments(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / TENANT / TIMELINE).glob("0*"))


NAMES = [segment_name(number) for number in range(1, 4)]
SHORT = max(end for _, end in LOG.records if end <= 2 * SEGMENT_BYTES + 300_000)
"""Of a log with one whole segment."""


async def test_what_is_kept_elsewhere_is_removed_and_still_read(tmp_path: Path) -> None:
    bucket = Bucket()
    node = Node(tmp_path, bucket)
    await node.open()
    timeline = await node.lead()
    await pushed(timeline, LOG.end_lsn, LOG.end_lsn)
    await node.rounds()
    assert timeline.acceptor.state.backup_lsn == 3 * SEGMENT_BYTES
    for name in NAMES[:2]:
        kept = bucket.peek(f"{TIMELINE}/{name}")
        assert kept is not None
        assert kept == (tmp_path / TENANT / TIMELINE / name).read_bytes()
        stamp = bucket.peek(f"{TIMELINE}/{name}.json")
        assert msgspec.json.decode(stamp or b"") == {"size": len(kept), "crc32": zlib.crc32(kept)}
    assert len(bucket.keys()) == 4, "the segment that is not full is nowhere else"
    await timeline.run(timeline.acceptor.checkpoint)
    await timeline.remove_old()
    assert local_segments(tmp_path) == [*NAMES[:2], NAMES[2] + ".partial"], "no consumer has it"
    await timeline.remove_old(SEGMENT_BYTES)
    assert local_segments(tmp_path) == [NAMES[1], NAMES[2] + ".partial"]

    asked = bucket.asked
    for at in (START, 2 * SEGMENT_BYTES - 100, 3 * SEGMENT_BYTES - 100, LOG.end_lsn - 200):
        wal = await timeline.read(at, 200, 1)
        assert wal == LOG.wal[at - START : at - START + 200]
    assert bucket.asked == asked + 2, "a segment and its stamp, once"
    with pytest.raises(WalRemoved):
        await timeline.read(100, 200, 1)
    node.close()


async def test_uploads_are_measured(tmp_path: Path) -> None:
    bucket = Bucket()
    node = Node(tmp_path, bucket)
    await node.open()
    timeline = await node.lead()
    served = [timeline]
    offload = SegmentOffload(lambda: served, 1, node.archive, node.clock, SETTINGS, Random(0))
    with start() as metrics:
        metrics.watch(offload.measures)

        def measured() -> dict[MetricDefinition, float]:
            return {
                metric: value
                for metric, value, _ in metrics.measurements()
                if not isinstance(value, ValueHistogram)
            }

        await pushed(timeline, SHORT, SHORT)
        behind = measured()[WAL_BACKUP_LAG]
        assert behind > 300_000
        bucket.fails = True
        node.clock.at_ms += 100_000
        await offload.look()
        assert measured()[WAL_OFFLOAD_FAILURES] == 1
        bucket.fails = False
        while timeline.acceptor.state.backup_lsn < 2 * SEGMENT_BYTES:
            node.clock.at_ms += 100_000
            await offload.look()
        assert measured()[WAL_OFFLOADED] == 1
        assert measured()[WAL_BACKUP_LAG] < behind
        served.clear()
        assert WAL_BACKUP_LAG not in measured(), "a timeline that is gone has no series"
    node.close()


async def test_the_next_segment_is_made_before_it_is_needed(tmp_path: Path) -> None:
    node = Node(tmp_path, Bucket())
    await node.open()
    timeline = await node.lead()
    folder = tmp_path / TENANT / TIMELINE
    async with anyio.create_task_group() as group:
        group.start_soon(node.timelines.run_maintenance)
        await pushed(timeline, LOG.records[0][1], START)
        with anyio.fail_after(60):
            while not (folder / NEW_NAME).exists():
                await anyio.lowlevel.checkpoint()
        made = (folder / NEW_NAME).stat()
        assert made.st_blocks * 512 >= made.st_size == SEGMENT_BYTES, "zeros, not a hole"
        await pushed(timeline, ends_before(2 * SEGMENT_BYTES + 90_000), START)
        group.cancel_scope.cancel()
    assert local_segments(tmp_path) == [NAMES[0], NAMES[1] + ".partial"]
    assert (folder / (NAMES[1] + ".partial")).stat().st_ino == made.st_ino
    assert not (folder / NEW_NAME).exists()
    node.close()


async def test_without_an_archive_nothing_goes(tmp_path: Path) -> None:
    clock = Hands()
    timelines = TimelineRegistry(tmp_path, 1, FileTimelineStore(), clock, SETTINGS)
    await timelines.open()
    timeline = await timelines.get_or_create(GREETING, may_create=True)
    assert timeline is not None
    await timeline.process([GREETING, VOTE, ELECTED])
    await pushed(timeline, SHORT, SHORT)
    await timeline.run(lambda: timeline.acceptor.record_remote_consistent(SHORT))
    clock.at_ms += SETTINGS.wal_control_age_ms
    await timelines._save_and_remove((TENANT, TIMELINE), timeline)
    assert timeline.saved.remote_consistent_lsn == SHORT, "it was saved, and looked at"
    assert len(local_segments(tmp_path)) == 2
    timelines.close()


async def test_what_is_not_committed_is_kept_nowhere(tmp_path: Path) -> None:
    bucket = Bucket()
    node = Node(tmp_path, bucket)
    await node.open()
    timeline = await node.lead()
    assert not await node.offload.look(), "an empty log"
    await pushed(timeline, LOG.end_lsn, ends_before(3 * SEGMENT_BYTES - 1))
    await node.rounds()
    assert timeline.acceptor.state.backup_lsn == 2 * SEGMENT_BYTES
    assert [key for key in bucket.written if "json" not in key] == [f"{TIMELINE}/{NAMES[0]}"]
    node.close()


@pytest.mark.parametrize("died_behind", [NAMES[0], ".json"])
async def test_a_crash_between_keeping_and_saying_so(tmp_path: Path, died_behind: str) -> None:
    bucket = Bucket()
    node = Node(tmp_path, bucket)
    await node.open()
    timeline = await node.lead()
    await pushed(timeline, SHORT, SHORT)
    await timeline.run(timeline.acceptor.checkpoint)
    bucket.die_after = died_behind
    with pytest.raises(KeyboardInterrupt):
        await node.rounds()
    node.close()
    bucket.die_after = None
    written = list(bucket.written)

    node = Node(tmp_path, bucket)
    found = await node.open()
    assert found is not None
    assert found.acceptor.state.backup_lsn == START
    await node.rounds()
    assert found.acceptor.state.backup_lsn == 2 * SEGMENT_BYTES
    again = [] if died_behind == ".json" else ["", ".json"]
    assert bucket.written == written + [f"{TIMELINE}/{NAMES[0]}{end}" for end in again]
    node.close()


async def test_several_acceptors_keep_one_log(tmp_path: Path) -> None:
    """Whoever comes first writes, the others look; one that is behind keeps what it has."""
    bucket = Bucket()
    nodes = [Node(tmp_path / str(number), bucket, number) for number in (1, 2, 3)]
    timelines = []
    for node in nodes:
        await node.open()
        timelines.append(await node.lead())
    for timeline in timelines[:2]:
        await pushed(timeline, SHORT, SHORT)
    await pushed(timelines[2], SHORT, ends_before(2 * SEGMENT_BYTES - 1))
    for _ in range(8):
        for node in nodes:
            node.clock.at_ms += 500
            await node.offload.look()
    kept = [timeline.acceptor.state.backup_lsn for timeline in timelines]
    assert kept == [2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES, START]
    assert len(bucket.written) == len(set(bucket.written)) == 2, "nothing was written twice"
    for node in nodes:
        node.close()


async def test_another_log_is_neither_overwritten_nor_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket()
    theirs = bytes(SEGMENT_BYTES)
    assert await archive_on(bucket).keep(TENANT, TIMELINE, 1, theirs)
    node = Node(tmp_path, bucket)
    await node.open()
    timeline = await node.lead()
    await pushed(timeline, SHORT, SHORT)
    with caplog.at_level(logging.WARNING, "penstock.wal"):
        node.clock.at_ms += 10_000
        assert not await node.offload.look()
    assert "CorruptData: segment" in caplog.text
    assert "one of the two logs is wrong" in caplog.text
    assert timeline.acceptor.state.backup_lsn == START
    assert bucket.peek(f"{TIMELINE}/{NAMES[0]}") == theirs
    node.close()


async def test_what_was_damaged_is_named_and_written_again() -> None:
    bucket = Bucket()
    data = Random(1).randbytes(SEGMENT_BYTES)
    archive = archive_on(bucket)
    assert await archive.keep(TENANT, TIMELINE, 7, data)
    assert await archive.segment(TENANT, TIMELINE, 7) == data
    key = f"{TIMELINE}/{segment_name(7)}"
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], None):
        if damaged is None:
            await bucket.delete(key)
        else:
            await MemoryBlob.set(bucket, key, damaged)
        with pytest.raises(CorruptData, match="was archived with SegmentStamp"):
            await archive_on(bucket).segment(TENANT, TIMELINE, 7)
        assert await archive.keep(TENANT, TIMELINE, 7, data)
        assert await archive_on(bucket).segment(TENANT, TIMELINE, 7) == data
        assert not await archive.keep(TENANT, TIMELINE, 7, data)
    for stamp in (b"{", b'{"size": 5, "crc32": 1}'):
        await MemoryBlob.set(bucket, key + ".json", stamp)
        with pytest.raises(CorruptData, match="json"):
            await archive_on(bucket).segment(TENANT, TIMELINE, 7)
    assert await archive_on(bucket).segment(TENANT, TIMELINE, 8) is None


async def test_what_is_read_back_otherwise_does_not_count() -> None:
    class Rotten(Bucket):
        async def get(self, key: str) -> bytes | None:
            found = await super().get(key)
            return found and found[:-1]

    bucket = Rotten()
    with pytest.raises(CorruptData, match="not read back as it was written"):
        await archive_on(bucket).keep(TENANT, TIMELINE, 7, bytes(SEGMENT_BYTES))
    assert bucket.written == [f"{TIMELINE}/{segment_name(7)}"]


async def test_readers_remember_few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.wal.archive.SEGMENTS_MAX", 2)
    bucket = Bucket()
    archive = archive_on(bucket)
    for number in (1, 2, 3):
        await archive.keep(TENANT, TIMELINE, number, bytes([number]) * SEGMENT_BYTES)
    bucket.asked = 0
    for number in (1, 2, 1, 3, 1, 2):
        found = await archive.segment(TENANT, TIMELINE, number)
        assert found is not None
        assert found[0] == number
    assert bucket.asked == 2 * 4, "1, 2, 3 and 2 again"


async def test_a_store_that_hangs_or_fails_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket()
    # expires: the store hangs
    node = Node(tmp_path, bucket, settings=Settings(wal_blob_timeout_ms=1))
    await node.open()
    timeline = await node.lead()
    await pushed(timeline, SHORT, SHORT)
    bucket.hangs = True
    node.clock.at_ms += 10_000
    assert not await node.offload.look()
    node.clock.at_ms += 100_000
    with caplog.at_level(logging.WARNING, "penstock.wal"):
        assert not await node.offload.look()
    assert "wal_blob_timeout_ms" in caplog.text
    with pytest.raises(StorageError, match="in 1 ms"):
        await node.archive.segment(TENANT, TIMELINE, 1)
    end = ends_before(SHORT + 100_000)
    assert end > SHORT
    await pushed(timeline, end, end)

    bucket.hangs, bucket.fails = False, True
    node.clock.at_ms += 100_000
    assert not await node.offload.look()
    asked = bucket.asked
    assert not await node.offload.look()
    assert bucket.asked == asked, "it waits before it tries again"
    bucket.fails = False
    calm = Node(tmp_path, bucket)  # the same timelines, and time enough
    calm.timelines = node.timelines
    await calm.rounds()
    assert timeline.acceptor.state.backup_lsn == 2 * SEGMENT_BYTES
    node.close()


def test_whose_turn_it_is() -> None:
    for number in range(6):
        assert sorted(archive_turn(node_id, number) for node_id in (4, 5, 6)) == list(range(TURNS))
    assert is_due(0, 0, 0.0, 1_000)
    assert not is_due(1, 1, 999.0, 1_000)
    assert is_due(1, 0, 1_000.0, 1_000)
    assert is_due(1, 2, 0.0, 1_000)
    assert not is_due(2, 3, 1_999.0, 1_000)
    assert is_due(2, 4, 0.0, 1_000)


@pytest.mark.parametrize(
    ("backup", "commit", "number"),
    [
        (0, 9 * SEGMENT_BYTES, None),
        (START, 2 * SEGMENT_BYTES - 8, None),
        (START, 2 * SEGMENT_BYTES, 1),
        (2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES, None),
        (2 * SEGMENT_BYTES, 5 * SEGMENT_BYTES, 2),
    ],
)
def test_which_segment_is_next(backup: int, commit: int, number: int | None) -> None:
    assert next_segment(backup, commit) == number


async def test_two_processes_may_write_one_key_and_a_killed_one_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    ours, theirs = FileBlob(tmp_path, SystemClock()), FileBlob(tmp_path, SystemClock())
    await ours.prepare(exclusive=False)
    left = ours._written_at("a/b")
    left.write_bytes(b"what a killed process wrote")
    await theirs.set("a/b", b"whole")
    assert await ours.get("a/b") == b"whole"
    assert left.exists()


def test_a_stamp_tells_what_it_is_of() -> None:
    assert SegmentStamp.of(b"abc") == SegmentStamp(3, zlib.crc32(b"abc"))


async def dialled(port: int) -> AcceptorConnection:
    address = AcceptorAddress("127.0.0.1", port)
    return await dial(address, TENANT, TIMELINE, timeout_ms=60_000)


async def test_a_killed_process_goes_on_keeping_and_reads_back(tmp_path: Path) -> None:
    """The command: pushed, kept, killed; started again, the segments are removed, and read."""
    store = tmp_path / "store"
    settings = tmp_path / "settings.toml"
    settings.write_text(
        "wal_keep_bytes = 1\nwal_save_ms = 10\nwal_control_age_ms = 10\n"
        "wal_offload_ms = 10\nwal_offload_turn_ms = 10\n"
    )
    flags = ("--blob-url", f"file:{store}", "--config", str(settings))
    folder = tmp_path / "node"
    local = folder / TENANT / TIMELINE
    process, port = await started(folder, *flags)
    try:
        with anyio.fail_after(300):
            connection = await dialled(port)
            await start_push(connection)
            end = ends_before(3 * SEGMENT_BYTES + 90_000)
            said = [GREETING, VOTE, ELECTED]
            await connection.send([codec_v3.encode_proposer(each) for each in said])
            for at in range(START, end, WAL_BYTES_MAX):
                to = min(at + WAL_BYTES_MAX, end)
                wal = bytes(LOG.wal[at - START : to - START])
                request = AppendRequest(0, 1, at, to, end, 0, wal)
                await connection.send([codec_v3.encode_proposer(request)])
            answer = None
            while not isinstance(answer, AppendResponse) or answer.flush_lsn < end:
                answer = codec_v3.decode_acceptor(await connection.receive())
            beat = AppendRequest(0, 1, end, end, end, 0)
            await connection.send([codec_v3.encode_proposer(beat)])
            await connection.receive()
            connection.abort()
            connection = await dialled(port)
            first = store / TENANT / TIMELINE / NAMES[0]
            while not first.exists() or FileControl.open(local).state.commit_lsn < end:
                await connection.query("TIMELINE_STATUS")
            connection.abort()
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            assert first.stat().st_size == SEGMENT_BYTES, "there whole, or not at all"

            process, port = await started(folder, *flags)
            connection = await dialled(port)
            while sorted(path.name for path in local.glob("0*")) != [NAMES[2] + ".partial"]:
                await connection.query("TIMELINE_STATUS")
            reader = LogReader(connection, START)
            await reader.start()
            read = bytearray()
            while len(read) < 3 * SEGMENT_BYTES - START:
                read += await reader.next()
            assert read == LOG.wal[: len(read)]
            reader.abort()
            [found] = commands._of_folder(folder, TENANT, TIMELINE)
            assert found["backup"] == lsn_text(3 * SEGMENT_BYTES)
            [told] = await commands._of_acceptor(f"127.0.0.1:{port}", TENANT, TIMELINE, "")
            assert (told["commit"], told["backup"]) == (lsn_text(end), found["backup"])
            kept = await commands._of_archive(f"file:{store}", TENANT, TIMELINE, NAMES[1])
            assert kept == inspect_bytes(
                (store / TENANT / TIMELINE / NAMES[1]).read_bytes(), 2 * SEGMENT_BYTES, whole=True
            )
            assert kept.records
            with pytest.raises(InvalidUsage, match=f"does not contain segment {NAMES[2]}"):
                await commands._of_archive(f"file:{store}", TENANT, TIMELINE, NAMES[2])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_place_that_is_none_is_told_at_the_start(tmp_path: Path) -> None:
    settings = Settings(
        wal_listen="127.0.0.1:0", wal_dir=str(tmp_path), wal_blob_url="nowhere://at/all"
    )
    with pytest.raises(InvalidUsage, match="unknown kind of store nowhere"):
        await commands._serve(settings)
