"""The log on disk: what it keeps, refuses, cuts off; a crash and an error at every call."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from random import Random

import msgspec
import pytest

from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, StoreFull, WalRemoved
from actors.wal.acceptor_stores import ControlState
from actors.wal.lsn import PAGE_BYTES
from actors.wal.storage import FileWal
from tests.simulators.wal.files import MachineCrashed, MemoryFiles
from tests.simulators.wal.made_up import MadeUpLog

SMALL = 1 << 15
START = 3 * SMALL + PAGE_BYTES + 256
FOLDER = Path("/t")
STATE = ControlState("0" * 32, "1" * 32, pg_version=150004, system_id=77)


def state(commit_lsn: int = 0) -> ControlState:
    return msgspec.structs.replace(STATE, commit_lsn=commit_lsn)


def log_of(start: int, sizes: list[int], fill: int = 1) -> MadeUpLog:
    log = MadeUpLog(start, segment_bytes=SMALL, system_id=77)
    for size in sizes:
        log.record(bytes([fill]) * size)
    return log


OLD = log_of(START, [100, 9000, 3000, 700, 20_000, 500, 30_000, 64])
CUT = OLD.records[2][1]
NEW = log_of(CUT, [200, 25_000, 40], fill=9)


def disk() -> MemoryFiles:
    files = MemoryFiles()
    files.make_folder(FOLDER)
    files.sync_folder(Path("/"))
    files.calls = 0
    return files


def opened(files: MemoryFiles, commit_lsn: int = START) -> FileWal:
    return FileWal.open(FOLDER, state(commit_lsn), files, segment_bytes=SMALL)


def begun(files: MemoryFiles, start: int = START) -> FileWal:
    wal = opened(files, 0)
    wal.initialize(start)
    wal.truncate(start)
    return wal


def positions(wal: FileWal) -> tuple[int, int, int, int]:
    return wal.write_lsn, wal.write_record_lsn, wal.flush_lsn, wal.flush_record_lsn


def append(wal: FileWal, log: MadeUpLog, step: int) -> None:
    """All of it, in pieces, each flushed."""
    for at in range(0, len(log.wal), step):
        wal.write(log.start_lsn + at, bytes(log.wal[at : at + step]))
        wal.flush()


def test_an_empty_log_is_at_zero_and_refuses_writing() -> None:
    wal = opened(disk(), 0)
    assert positions(wal) == (0, 0, 0, 0)
    with pytest.raises(InvalidUsage, match="not truncated since"):
        wal.write(START, bytes(OLD.wal[:8]))
    assert wal.segments() == []


def test_positions_follow_records_and_flushes() -> None:
    wal = begun(disk())
    assert positions(wal) == (START, START, START, START)
    (_, first), (_, second) = OLD.records[:2]
    wal.write(START, bytes(OLD.wal[: first - START + 10]))
    assert positions(wal) == (first + 10, first, START, START)
    wal.flush()
    assert positions(wal) == (first + 10, first, first + 10, first)
    wal.write(first + 10, bytes(OLD.wal[first - START + 10 : second - START]))
    assert positions(wal) == (second, second, first + 10, first)
    wal.flush()
    assert positions(wal) == (second, second, second, second)
    assert wal.read(START, second - START) == bytes(OLD.wal[: second - START])


def test_a_flush_without_a_new_record_does_nothing() -> None:
    files = disk()
    wal = begun(files)
    wal.write(START, bytes(OLD.wal[:40]))
    calls = files.calls
    wal.flush()
    assert files.calls == calls
    assert positions(wal) == (START + 40, START, START, START)


def test_what_is_reported_can_be_read_also_where_padding_is_still_to_come() -> None:
    log = log_of(START, [101])
    wal = begun(disk())
    pad = -(24 + 2 + 101) % 8
    assert pad > 0
    assert not any(log.wal[-pad:])
    wal.write(START, bytes(log.wal[:-pad]))
    wal.flush()
    assert wal.write_lsn == log.end_lsn - pad
    assert wal.flush_record_lsn == log.end_lsn
    assert wal.read(START, log.end_lsn - START) == bytes(log.wal)
    with pytest.raises(InvalidUsage, match="ends at"):
        wal.read(START, log.end_lsn - START + 1)


def test_a_full_segment_is_on_disk_and_has_its_name() -> None:
    files = disk()
    wal = begun(files)
    end = 4 * SMALL
    wal.write(START, bytes(OLD.wal[: end - START + 100]))
    whole = max(behind for _, behind in OLD.records if behind <= end)
    assert (wal.flush_lsn, wal.flush_record_lsn) == (end, whole)
    names = [each.path.name for each in wal.segments()]
    assert names == ["000000010000000000000003", "000000010000000000000004.partial"]
    files.restart()
    assert opened(files).flush_record_lsn == whole


@pytest.mark.parametrize(("begin", "why"), [(-8, "rewrite"), (8, "gap")])
def test_gaps_and_rewrites_are_refused(begin: int, why: str) -> None:
    wal = begun(disk())
    append(wal, OLD, 4096)
    with pytest.raises(InvalidUsage, match=why):
        wal.write(OLD.end_lsn + begin, b"")
    with pytest.raises(InvalidUsage, match="ends at"):
        wal.read(OLD.end_lsn - 8, 9)
    with pytest.raises(InvalidUsage, match="is not empty"):
        wal.initialize(START)
    with pytest.raises(InvalidUsage, match="cannot truncate the log at"):
        wal.truncate(OLD.end_lsn + 8)


def test_bytes_that_are_no_records_change_nothing() -> None:
    wal = begun(disk())
    wrong = bytearray(OLD.wal)
    at = OLD.records[5][0] - START + 30  # in the second segment: the first part was right
    wrong[at] ^= 1
    with pytest.raises(CorruptData, match="the CRC of a record of 524 bytes is wrong"):
        wal.write(START, bytes(wrong))
    assert positions(wal) == (START, START, START, START)
    append(wal, OLD, len(OLD.wal))
    assert wal.read(START, len(OLD.wal)) == bytes(OLD.wal)


def test_after_a_switch_the_record_position_runs_ahead() -> None:
    files = disk()
    log = log_of(START, [100])
    log.switch()
    wal = begun(files)
    wal.write(START, bytes(log.wal[:160]))
    wal.flush()
    assert positions(wal) == (START + 160, 4 * SMALL, START + 160, 4 * SMALL)
    # A new leader goes on in the next segment: what is left of this one is zeros already.
    files.restart()
    wal = opened(files)
    assert positions(wal) == (4 * SMALL,) * 4
    wal.truncate(4 * SMALL)
    assert [each.whole for each in wal.segments()] == [True]
    follows = log_of(4 * SMALL, [10])
    append(wal, follows, 1000)
    assert wal.read(START, len(log.wal) + len(follows.wal)) == bytes(log.wal + follows.wal)


def test_reopening_refuses_writing_until_it_is_truncated() -> None:
    files = disk()
    append(begun(files), OLD, 4096)
    wal = opened(files)
    assert wal.pending_truncation
    with pytest.raises(InvalidUsage, match="not truncated since"):
        wal.write(OLD.end_lsn, b"")
    wal.truncate(OLD.end_lsn)
    wal.write(OLD.end_lsn, b"")


@pytest.mark.parametrize("cut", [*(behind for _, behind in OLD.records), START])
def test_what_is_cut_off_is_zeros(cut: int) -> None:
    files = disk()
    wal = begun(files)
    append(wal, OLD, 4096)
    wal.truncate(cut)
    assert positions(wal) == (cut,) * 4
    tail = SMALL - cut % SMALL
    name = f"00000001{cut // SMALL:016X}.partial"
    assert files.open(FOLDER / name).read_at(cut % SMALL, SMALL) == bytes(tail)
    assert max(files.names(FOLDER)) == name
    new = log_of(cut, [30_000, 10], fill=4)
    append(wal, new, 8192)
    files.restart()
    assert opened(files).flush_record_lsn == new.end_lsn


def test_a_log_cut_off_where_a_segment_begins_has_no_later_one() -> None:
    files = disk()
    log = log_of(START, [100])
    log.switch()
    append(wal := begun(files), log, 4096)
    append(wal, log_of(4 * SMALL, [40_000]), 4096)
    wal.truncate(4 * SMALL)
    assert files.names(FOLDER) == ["000000010000000000000003"]
    assert positions(wal) == (4 * SMALL,) * 4


def test_old_segments_are_removed_whole_and_the_last_never() -> None:
    wal = begun(disk())
    append(wal, OLD, 8192)
    assert [each.number for each in wal.segments()] == [3, 4, 5]
    assert wal.remove_before(5 * SMALL - 1)[0].number == 3
    assert wal.remove_before(1 << 60)[0].number == 4
    assert [each.number for each in wal.segments()] == [5]
    with pytest.raises(WalRemoved, match="no longer kept"):
        wal.read(START, 8)


def test_the_segment_where_an_unfinished_record_begins_is_kept() -> None:
    """A log that is opened anew reads that record from its begin on."""
    files = disk()
    log = log_of(START, [100, 3 * SMALL])
    (_, first), _ = log.records
    wal = begun(files)
    wal.write(START, bytes(log.wal[:-8]))
    wal.flush()
    assert wal.flush_lsn // SMALL > first // SMALL + 1
    assert wal.remove_before(1 << 60) == []
    files.restart()
    assert opened(files, first).flush_record_lsn == first


def test_a_log_whose_segments_end_where_it_is_needed_goes_on_without_them() -> None:
    files = disk()
    log = log_of(START, [100])
    log.switch()
    append(wal := begun(files), log, 4096)
    assert [each.number for each in wal.remove_before(4 * SMALL)] == [3]
    assert wal.segments() == []
    files.restart(keep=True)
    wal = opened(files, 4 * SMALL)
    wal.truncate(4 * SMALL)
    assert positions(wal) == (4 * SMALL,) * 4
    after = log_of(4 * SMALL, [40_000])
    append(wal, after, 4096)
    assert wal.read(4 * SMALL, 40_000) == bytes(after.wal[:40_000])


@pytest.mark.parametrize("survives", ["nothing", "some", "everything"])
@pytest.mark.parametrize("call", range(1, 6))
def test_a_crash_between_removals_leaves_a_log_that_opens_and_removes_the_rest(
    call: int, survives: str
) -> None:
    """Names that were removed may be there again, also with a gap between them."""
    files = disk()
    wal = begun(files)
    append(wal, OLD, 8192)
    files.crash_at(call)
    with contextlib.suppress(MachineCrashed):
        wal.remove_before(5 * SMALL)
    rng = Random(call) if survives == "some" else None
    files.restart(keep=survives == "everything", rng=rng)
    wal = opened(files, next(begin for begin, _ in OLD.records if begin >= 5 * SMALL))
    assert wal.flush_record_lsn == OLD.end_lsn
    wal.remove_before(5 * SMALL)
    assert [each.number for each in wal.segments()] == [5]


def test_missing_committed_bytes_are_corrupt() -> None:
    with pytest.raises(CorruptData, match="the end of the committed log, is not in"):
        opened(disk())


def test_segments_of_another_size_are_refused() -> None:
    wrong = msgspec.structs.replace(STATE, segment_bytes=1 << 20)
    with pytest.raises(InvalidUsage, match="expected 16777216"):
        FileWal.open(FOLDER, wrong, disk())


def test_a_first_segment_may_be_made_again_elsewhere() -> None:
    files = disk()
    wal = opened(files, 0)
    wal.initialize(9 * SMALL + 80)
    wal.initialize(START)
    wal.truncate(START)
    assert [each.number for each in wal.segments()] == [3]


def test_a_segment_made_ahead_of_time_is_the_next_one() -> None:
    files = disk()
    wal = begun(files)
    half = log_of(START, [1000] * (SMALL // 2000))
    assert not wal.wants_segment
    append(wal, half, 4000)
    assert wal.wants_segment
    files.fail_at(2)
    with pytest.raises(StorageError, match="prepare a segment") as caught:
        wal.prepare()
    assert caught.value.determinate
    assert wal.wants_segment, "nothing was prepared, and the log goes on"
    wal.prepare()
    assert not wal.wants_segment
    calls = files.calls
    wal.prepare()
    assert files.calls == calls
    rest = log_of(half.end_lsn, [1000] * (SMALL // 1500), fill=2)
    append(wal, rest, 4000)
    assert {each.number for each in wal.segments()} == {START // SMALL, START // SMALL + 1}
    assert wal.read(START, rest.end_lsn - START) == bytes(half.wal + rest.wal)
    while not wal.wants_segment:
        more = log_of(wal.write_lsn, [1000], fill=3)
        append(wal, more, 4000)
    wal.prepare()
    wal.close()
    wal.prepare()
    assert opened(files).flush_record_lsn == more.end_lsn, "what was prepared is no segment"


# -- crashes and errors ------------------------------------------------------------------------


class Life:
    """Performs a whole life of a log, and knows at each instant what may be found after it ends:
    `bytes_now` are those from START on that are being written, `acked` how far they must be
    there, `cutting` whether OLD may be found as well."""

    def __init__(self, files: MemoryFiles, step: int, prepares: bool = False) -> None:
        self.files = files
        self.step = step
        self.prepares = prepares
        self.bytes_now = b""
        self.acked = 0
        self.cutting = False
        self.wal: FileWal | None = None

    def run(self) -> None:
        self.wal = opened(self.files, 0)
        self.wal.initialize(START)
        self.wal.truncate(START)
        self.acked = START
        self._append(OLD)
        self.cutting = True
        self.wal.truncate(CUT)
        self.cutting, self.acked = False, CUT
        self.bytes_now = self.bytes_now[: CUT - START]
        self._append(NEW)

    def _append(self, log: MadeUpLog) -> None:
        assert self.wal is not None
        for at in range(0, len(log.wal), self.step):
            piece = bytes(log.wal[at : at + self.step])
            self.bytes_now += piece
            self.wal.write(log.start_lsn + at, piece)
            self.acked = self.wal.flush_record_lsn
            self.wal.flush()
            self.acked = self.wal.flush_record_lsn
            if self.prepares and self.wal.wants_segment:
                self.wal.prepare()

    def check(self, wal: FileWal) -> None:
        """What was found is what was acknowledged, and then nothing but what was written."""
        end = wal.flush_record_lsn
        assert positions(wal) == (end,) * 4
        found = wal.read(START, end - START)
        assert self.bytes_now.startswith(found), "what is there was written, in this order"
        if self.cutting:
            assert end in (CUT, OLD.end_lsn)
        else:
            assert end >= self.acked


def go_on_from(files: MemoryFiles, wal: FileWal) -> None:
    """The log can be used again: cut off where it ends, it takes more and keeps that."""
    end = wal.flush_record_lsn
    wal.truncate(end)
    more = log_of(end, [5000, 40_000], fill=7)
    append(wal, more, 1 << 17)
    files.restart()
    again = opened(files)
    assert again.flush_record_lsn == more.end_lsn
    assert again.read(end, len(more.wal)) == bytes(more.wal)


@pytest.mark.parametrize("survives", ["nothing", "everything", "some"])
@pytest.mark.parametrize(("step", "prepares"), [(5000, True), (5000, False), (1 << 17, False)])
def test_a_crash_at_every_call(survives: str, step: int, prepares: bool) -> None:
    """Of what was not flushed nothing, everything or some is on disk afterwards."""
    whole = Life(disk(), step, prepares)
    whole.run()
    calls = whole.files.calls
    assert calls > 40
    for call in range(1, calls + 1):
        life = Life(disk(), step, prepares)
        life.files.crash_at(call)
        try:
            life.run()
        except MachineCrashed:
            rng = Random(call) if survives == "some" else None
            life.files.restart(keep=survives == "everything", rng=rng)
        else:
            life.files.restart()
        if not life.acked:
            begun(life.files)  # nothing was ever acknowledged: it begins anew
            continue
        wal = opened(life.files)
        life.check(wal)
        if survives == "some":
            go_on_from(life.files, wal)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_call_breaks_the_log_until_it_is_opened_again(number: int) -> None:
    """What can still be read after a flush that failed is not taken for what is on disk."""
    whole = Life(disk(), 5000)
    whole.run()
    for call in range(1, whole.files.calls + 1):
        life = Life(disk(), 5000)
        life.files.fail_at(call, number)
        # A call before the log has something is of its making; the first raises nothing else.
        with pytest.raises(StorageError) as caught:
            life.run()
        assert isinstance(caught.value, StoreFull) == (number == errno.ENOSPC)
        assert life.wal is None or not caught.value.determinate
        if life.wal is not None:
            with pytest.raises(StorageError, match="must be opened again"):
                life.wal.flush()
            with pytest.raises(StorageError, match="must be opened again"):
                life.wal.truncate(START)
        if not life.acked:
            continue
        wal = opened(life.files)
        life.check(wal)
        end = wal.flush_record_lsn
        life.files.restart()
        again_found = opened(life.files)
        if not life.cutting:
            assert again_found.flush_record_lsn == end, "what it said it had, it has"
        life.check(again_found)
