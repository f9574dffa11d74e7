"""The control file: bytes by hand from the specification, damage, and its replacement."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import google_crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime.errors import CorruptData, InvalidUsage, StorageError
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import CONTROL_NAME, FileControl, create_timeline, decode, encode
from actors.wal.messages import ConfigMember, MembershipConfig, TermEntry
from suite_lanes import examples  # type: ignore[import-not-found]
from tests.simulators.wal.files import MachineCrashed, MemoryFiles

TENANT, TIMELINE = "0123456789abcdef" * 2, "fedcba9876543210" * 2
FOLDER = Path("/wal/tenant/timeline")

PLAIN = ControlState(
    tenant=TENANT,
    timeline=TIMELINE,
    term=3,
    history=(TermEntry(1, 0x16B9188), TermEntry(3, 0x1700000)),
    pg_version=150004,
    system_id=0x1122334455667788,
    segment_bytes=16 * 1024 * 1024,
    proposer_id=bytes(range(16)),
    timeline_start_lsn=0x16B9188,
    local_start_lsn=0x16B9188,
    commit_lsn=0x1701000,
    backup_lsn=0x16B9188,
    peer_horizon_lsn=0x1700F00,
    remote_consistent_lsn=0x16B9190,
)
MEMBERS = msgspec.structs.replace(
    PLAIN,
    membership=MembershipConfig(
        2,
        (ConfigMember(1, "a.example", 5454), ConfigMember(2, "b", 6000)),
        (ConfigMember(9, "c", 1),),
    ),
    created_at_ms=1_700_000_000_123,
)
IDS = "2000000000000000" + TENANT.encode().hex() + "2000000000000000" + TIMELINE.encode().hex()
# term, two entries; version, system, segment bytes; proposer; six positions.
MIDDLE = (
    "0300000000000000"
    "0200000000000000"
    "0100000000000000 88916b0100000000"
    "0300000000000000 0000700100000000"
    "f4490200 8877665544332211 00000001"
    "2000000000000000" + b"000102030405060708090a0b0c0d0e0f".hex() + "88916b0100000000"
    "88916b0100000000"
    "0010700100000000"
    "88916b0100000000"
    "000f700100000000"
    "90916b0100000000"
)
NINE = "efcefeca 09000000" + IDS + MIDDLE + "0000000000000000" + "0000000000000000" + "00000000"
TEN = (
    "efcefeca 0a000000" + IDS + "02000000"
    "0200000000000000"
    "0100000000000000 0900000000000000 612e6578616d706c65 4e15"
    "0200000000000000 0100000000000000 62 7017"
    "01 0100000000000000 0900000000000000 0100000000000000 63 0100"
    + MIDDLE
    + "0000000000000000 00000000"
    "00f1536500000000 c0d45407"
)


def sealed(text: str) -> bytes:
    data = bytes.fromhex(text.replace(" ", ""))
    crc: int = google_crc32c.value(data)
    return data + crc.to_bytes(4, "little")


@pytest.mark.parametrize(("state", "text"), [(PLAIN, NINE), (MEMBERS, TEN)], ids=["9", "10"])
def test_the_bytes_are_those_of_the_specification(state: ControlState, text: str) -> None:
    assert encode(state).hex() == sealed(text).hex()
    assert decode(sealed(text)) == state


@pytest.mark.parametrize("state", [PLAIN, MEMBERS], ids=["9", "10"])
def test_every_flipped_byte_and_every_truncation_is_corrupt(state: ControlState) -> None:
    data = encode(state)
    for at in range(len(data)):
        for wrong in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]):
            with pytest.raises(CorruptData):
                decode(wrong)


@pytest.mark.parametrize("text", [NINE, TEN], ids=["9", "10"])
def test_wrong_bytes_under_a_right_sum_are_a_state_or_corrupt(text: str) -> None:
    """Who wrote it may be at fault, too. Nothing is allocated for a count without room."""
    data = sealed(text)[:-4]
    for at in range(4, len(data)):
        for value in (0, 0xFF, data[at] ^ 0x80):
            wrong = data[:at] + bytes([value]) + data[at + 1 :]
            wrong += google_crc32c.value(wrong).to_bytes(4, "little")
            with contextlib.suppress(CorruptData):
                decode(wrong)
    for short in (data[:-1], data + b"\0"):
        with pytest.raises(CorruptData):
            decode(short + google_crc32c.value(short).to_bytes(4, "little"))


@pytest.mark.parametrize("tail", ["01" + "00" * 11, "00" * 8 + "01000000" + "00" * 8])
def test_what_is_not_known_here_is_refused(tail: str) -> None:
    text = NINE.replace(" ", "")[: -2 * 12] + tail
    with pytest.raises(CorruptData, match="which this acceptor does not support"):
        decode(sealed(text))


U64 = st.integers(0, 2**64 - 1)
IDENTITY = st.binary(min_size=16, max_size=16).map(bytes.hex)
MEMBER = st.builds(ConfigMember, U64, st.text(max_size=20), st.integers(0, 65535))
GROUP = st.lists(MEMBER, min_size=1, max_size=3).map(tuple)
STATES = st.builds(
    ControlState,
    tenant=IDENTITY,
    timeline=IDENTITY,
    membership=st.one_of(
        st.just(MembershipConfig()),
        st.builds(
            MembershipConfig, st.integers(1, 2**32 - 1), GROUP, st.one_of(st.just(()), GROUP)
        ),
    ),
    term=U64,
    history=st.lists(st.builds(TermEntry, U64, U64), max_size=5).map(tuple),
    pg_version=st.integers(0, 2**32 - 1),
    system_id=U64,
    segment_bytes=st.integers(0, 2**32 - 1),
    proposer_id=st.binary(min_size=16, max_size=16),
    commit_lsn=U64,
    peer_horizon_lsn=U64,
    created_at_ms=st.integers(0, 2**53),
)


@settings(max_examples=examples(30))
@given(STATES)
def test_what_is_written_is_read(state: ControlState) -> None:
    kept = state if state.membership.generation else msgspec.structs.replace(state, created_at_ms=0)
    assert decode(encode(state)) == kept


@pytest.mark.parametrize("wrong", [{"tenant": "x"}, {"term": 2**64}, {"timeline": "A" * 32}])
def test_what_the_format_cannot_hold_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidUsage):
        encode(msgspec.structs.replace(PLAIN, **wrong))


def test_it_is_kept_on_a_real_disk(tmp_path: Path) -> None:
    control = create_timeline(tmp_path / "timeline", PLAIN)
    control.persist(MEMBERS)
    assert control.state == MEMBERS
    assert FileControl.open(tmp_path / "timeline").state == MEMBERS
    assert (tmp_path / "timeline" / CONTROL_NAME).read_bytes() == sealed(TEN)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline"]
    with pytest.raises(InvalidUsage, match="already exists"):
        create_timeline(tmp_path / "timeline", PLAIN)
    with pytest.raises(InvalidUsage, match="already has a control file"):
        FileControl.create(tmp_path / "timeline", PLAIN)
    with pytest.raises(StorageError, match="read the control file"):
        FileControl.open(tmp_path)


def made() -> MemoryFiles:
    files = MemoryFiles()
    for folder in reversed(FOLDER.parents[:-1]):
        files.make_folder(folder)
        files.sync_folder(folder.parent)
    return files


@pytest.mark.parametrize("keep", [False, True])
def test_a_crash_at_every_call_leaves_the_old_or_the_new(keep: bool) -> None:
    """`keep`: what was not flushed happens to be on disk all the same."""
    files = made()
    create_timeline(FOLDER, PLAIN, files)
    seen = set()
    for call in range(1, 100):
        disk = files.copied()
        control = FileControl.open(FOLDER, disk)
        disk.crash_at(call)
        try:
            control.persist(MEMBERS)
        except MachineCrashed:
            disk.restart(keep=keep)
            state = FileControl.open(FOLDER, disk).state
            assert state in (PLAIN, MEMBERS)
            seen.add(state.term if state == PLAIN else "new")
        else:
            disk.restart(keep=keep)
            assert FileControl.open(FOLDER, disk).state == MEMBERS
            assert call > 5
            break
    assert 3 in seen


@pytest.mark.parametrize("keep", [False, True])
def test_a_crash_while_a_timeline_is_made_leaves_all_or_nothing(keep: bool) -> None:
    for call in range(1, 100):
        files = made()
        files.crash_at(call)
        try:
            create_timeline(FOLDER, PLAIN, files)
        except MachineCrashed:
            files.restart(keep=keep)
            if FOLDER.name not in files.names(FOLDER.parent):
                create_timeline(FOLDER, PLAIN, files)
            assert FileControl.open(FOLDER, files).state == PLAIN
            files.restart(keep=False)
            assert FileControl.open(FOLDER, files).state == PLAIN, "durable once it was seen"
        else:
            files.restart(keep=False)
            assert FileControl.open(FOLDER, files).state == PLAIN
            assert call > 8
            break


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_call_says_whether_it_may_have_happened(number: int) -> None:
    files = made()
    create_timeline(FOLDER, PLAIN, files)
    told = []
    for call in range(1, 100):
        disk = files.copied()
        control = FileControl.open(FOLDER, disk)
        disk.fail_at(call, number)
        try:
            control.persist(MEMBERS)
        except StorageError as error:
            told.append(error.determinate)
            assert control.state == PLAIN
            if error.determinate:
                # It did not happen, and the next attempt is one like any other: an acceptor that
                # was told so goes on, and would be refused for ever otherwise.
                control.persist(MEMBERS)
                assert control.state == MEMBERS
                disk.restart()
                assert FileControl.open(FOLDER, disk).state == MEMBERS
                continue
            with pytest.raises(StorageError, match="must be opened again"):
                control.persist(MEMBERS)
            disk.restart(keep=True)
            assert FileControl.open(FOLDER, disk).state in (PLAIN, MEMBERS)
        else:
            break
    assert told == sorted(told, reverse=True)
    assert set(told) == {True, False}
