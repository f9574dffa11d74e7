"""Fuzz targets for the readers of a log's disk: input is accepted, or raises one named error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import google_crc32c

from actors.connectors.sources.relay_server import FirstRecord
from actors.runtime.errors import CorruptData, InvalidUsage
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import decode, encode
from actors.wal.framing import RecordDecoder
from actors.wal.framing import encode as framed
from actors.wal.inspection import inspect_bytes, lines
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.messages import ConfigMember, MembershipConfig, TermEntry
from actors.wal.record_runs import run_of
from actors.wal.records import MAGICS, RECORD_BYTES_MAX, BadRecord, RecordScanner
from tests.simulators.wal.made_up import MadeUpLog

_START: Final = SEGMENT_BYTES - 2 * PAGE_BYTES + 24


def read_records(data: bytes) -> None:
    """Check that records read at once equal those read in pieces, whose size the first byte
    gives."""
    if len(data) < 2:
        return
    step, stream = data[0] + 1, data[1:]
    end_lsn, bad = _scan(stream, len(stream))
    assert (end_lsn, bad) == _scan(stream, step), "the pieces made a difference"
    taken, _ = run_of(stream, 0, _START, MAGICS.values(), SEGMENT_BYTES)
    assert _START + taken <= end_lsn, "a run of records holds one that is wrong"


def _scan(stream: bytes, step: int) -> tuple[int, BadRecord | None]:
    scanner = RecordScanner(_START)
    try:
        for at in range(0, len(stream), step):
            scanner.feed(stream[at : at + step])
    except CorruptData:
        assert scanner.bad is not None
        return scanner.bad.record_lsn, scanner.bad
    assert scanner.record_lsn <= _START + len(stream) + SEGMENT_BYTES
    assert scanner._left <= RECORD_BYTES_MAX
    return scanner.record_lsn, None


def read_frames(data: bytes) -> None:
    """Check that a log of changes reads the same at once and in pieces, and that its first record
    is found as it begins with one."""
    if len(data) < 2:
        return
    step, wal = data[0] + 1, data[1:]
    frames = _frames(wal, len(wal))
    assert frames == _frames(wal, step), "the pieces made a difference"
    assert sum(len(payload) for payload, _ in frames[0]) <= len(wal)
    places = set()
    for size in (len(wal), step):
        first = FirstRecord(SEGMENT_BYTES, 150004)
        pieces = (wal[at : at + size] for at in range(0, len(wal), size))
        try:
            found = next((lsn for piece in pieces if (lsn := first.feed(piece)) is not None), None)
        except CorruptData:
            found = -1
        places.add(found)
    assert len(places) == 1, "the pieces made a difference to where the first record is"


def _frames(wal: bytes, size: int) -> tuple[list[tuple[bytes, int]], bool]:
    decoder, found = RecordDecoder(SEGMENT_BYTES), list[tuple[bytes, int]]()
    try:
        for at in range(0, len(wal), size):
            for framed in decoder.payloads(wal[at : at + size]):
                found.append((framed.payload, framed.end_lsn))
    except CorruptData:
        return found, True
    return found, False


def read_control(data: bytes) -> None:
    """Check that a control file that is accepted survives a round trip, as it is and under a right
    sum."""
    for whole in (data, data + google_crc32c.value(data).to_bytes(4, "little")):
        try:
            state = decode(whole)
        except CorruptData:
            continue
        # A version 10 of generation 0 is refused, so each state has one encoding; only its time
        # of creation is cut to milliseconds.
        assert decode(encode(state)) == state, "it is not what it was when written again"


def read_segment(data: bytes) -> None:
    """Inspect the beginning of one file, as the command for people does."""
    if len(data) < 48:
        return
    try:
        found = inspect_bytes(data, SEGMENT_BYTES, whole=False)
    except (CorruptData, InvalidUsage):
        return
    assert all(lines(found))


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "records": read_records,
    "control": read_control,
    "segment": read_segment,
    "frames": read_frames,
}
"""Targets; an input's first byte selects one."""


def seeds() -> list[bytes]:
    """Return inputs to begin with, one or more of each target."""
    log = MadeUpLog(_START)
    for size in (0, 10, 300, 9_000):
        log.record(bytes(size))
    small = ControlState("0" * 32, "1" * 32, term=2, history=(TermEntry(1, 8), TermEntry(2, 64)))
    member = ConfigMember(1, "host", 5454)
    large = ControlState("0" * 32, "1" * 32, MembershipConfig(3, (member, member), (member,)))
    first = MadeUpLog(SEGMENT_BYTES)
    first.record(bytes(9_000))
    first.record(bytes(100))
    found = [b"\0" + bytes([step]) + bytes(log.wal) for step in (6, 38, 255)]
    found += [b"\1" + encode(state)[:-4] for state in (small, large)]
    changes = b""
    for size in (5, 300, 20_000):
        changes += framed(bytes(size), SEGMENT_BYTES + len(changes))
    found += [b"\3" + bytes([step]) + changes for step in (6, 255)]
    goes_on = b"\3\x28" + bytes(first.wal)
    return [*found, b"\2" + bytes(first.wal), b"\1" + encode(small), goes_on]


def read(data: bytes) -> None:
    """Read one input: raise for anything but acceptance or a named error."""
    if data:
        list(TARGETS.values())[data[0] % len(TARGETS)](data[1:])
