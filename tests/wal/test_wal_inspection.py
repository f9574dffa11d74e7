"""What a segment says, told of made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.doors.commands.cli import app
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError
from actors.wal.acceptor_stores import ControlState
from actors.wal.inspection import inspect, lines
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.storage import FileWal
from tests.simulators.wal.made_up import MadeUpLog

STATE = ControlState("0" * 32, "1" * 32, pg_version=150004, system_id=77)
START = SEGMENT_BYTES + 3 * PAGE_BYTES + 1000


def kept(folder: Path, log: MadeUpLog) -> list[Path]:
    wal = FileWal.open(folder, STATE)
    wal.initialize(log.start_lsn)
    wal.truncate(log.start_lsn)
    for at in range(0, len(log.wal), 100_000):
        wal.write(log.start_lsn + at, bytes(log.wal[at : at + 100_000]))
    wal.flush()
    wal.close()
    return [segment.path for segment in wal.segments()]


def test_a_first_segment_begins_where_its_log_does(tmp_path: Path) -> None:
    log = MadeUpLog(START, system_id=77)
    for size in (10, 20_000, 300):
        log.record(bytes(size), manager=10, info=0x20)
    (path,) = kept(tmp_path, log)
    assert path.name == "000000010000000000000001.partial"
    found = inspect(path)
    assert [(each.lsn, each.next_lsn) for each in found.records] == log.records
    assert (found.system_id, found.segment_bytes, found.major) == (77, SEGMENT_BYTES, 15)
    assert (found.whole, found.end_lsn) == (False, log.end_lsn)
    assert found.ends == f"invalid record length 0 at 0/{log.end_lsn:X}"
    text = list(lines(found))
    assert text[1] == "4 pages with a header, 3 complete records"
    assert text[2] == (
        f"0/{START:X} 34 bytes, Heap (10) info 20, transaction 3, previous 0/0, CRC correct"
    )
    assert text[-1].startswith(f"ends at 0/{log.end_lsn:X}: invalid record length 0")


def test_a_record_may_begin_or_end_in_another_segment(tmp_path: Path) -> None:
    log = MadeUpLog(START)
    for size in (10, 2 * SEGMENT_BYTES, 300):
        log.record(bytes(size))
    log.switch()
    first, middle, last = map(inspect, kept(tmp_path, log))
    assert [each.lsn for each in first.records] == [START]
    assert first.ends == f"the file ends within the record at 0/{log.records[1][0]:X}"
    assert middle.ends == "a record of an earlier segment fills the whole segment"
    assert [(each.lsn, each.next_lsn) for each in last.records] == log.records[2:]
    assert last.ends == "the segment ends with a complete record"


def test_damage_is_told_with_its_place(tmp_path: Path) -> None:
    log = MadeUpLog(2 * SEGMENT_BYTES)
    for size in (10, 20, 30):
        log.record(bytes(size))
    (path,) = kept(tmp_path, log)
    data = bytearray(path.read_bytes())
    at = log.records[1][0]
    data[at % SEGMENT_BYTES + 30] ^= 1
    path.write_bytes(data)
    found = inspect(path)
    assert found.ends == f"the CRC of a record of 44 bytes is wrong at 0/{at:X}"
    assert len(found.records) == 1
    path.write_bytes(bytes(len(data)))
    with pytest.raises(CorruptData, match="is zeros"):
        inspect(path)
    path.write_bytes(bytes(12))
    with pytest.raises(InvalidUsage, match="12 bytes; expected a segment"):
        inspect(path)
    with pytest.raises(InvalidUsage, match="invalid segment name"):
        inspect(tmp_path / "x")
    path.unlink()
    with pytest.raises(StorageError, match="could not read"):
        inspect(path)


def test_the_command(tmp_path: Path) -> None:
    log = MadeUpLog(START, system_id=77)
    log.record(bytes(10), manager=10, info=0x20)
    (path,) = kept(tmp_path, log)
    run = CliRunner().invoke
    told = run(app, ["wal", "inspect", str(path)])
    assert told.exit_code == 0
    assert told.output.splitlines() == list(lines(inspect(path)))
    found = json.loads(run(app, ["wal", "inspect", str(path), "--json"]).output)
    assert [record["lsn"] for record in found["records"]] == [log.records[0][0]]
    path.write_bytes(bytes(SEGMENT_BYTES))
    assert isinstance(run(app, ["wal", "inspect", str(path)]).exception, CorruptData)
