"""The acceptor's rules, one by one, and each refusal with its text."""

from __future__ import annotations

from typing import Any

import pytest
from acceptor_house import (  # type: ignore[import-not-found]
    NODE,
    SEGMENT,
    START,
    TENANT,
    TIMELINE,
    House,
    greeting,
    members,
)
from msgspec.structs import replace

from actors.runtime.errors import CorruptData, InvalidUsage, WalRefused
from actors.wal.acceptor import AcceptorCore, AcceptorPeer, AppendUnflushed, FlushWal
from actors.wal.acceptor_stores import ControlState
from actors.wal.messages import (
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    MembershipConfig,
    ProposerElected,
    TermEntry,
    VoteRequest,
    VoteResponse,
)

A, B = b"a" * 8, b"b" * 8


# -- greeting ------------------------------------------------------------------------------------


def test_a_greeting_is_answered_with_number_membership_and_term() -> None:
    house = House(term=5)
    assert house.tell(greeting()) == AcceptorGreeting(NODE, MembershipConfig(), 5)
    state = house.disk.state
    assert (state.pg_version, state.system_id, state.segment_bytes) == (170005, 7, SEGMENT)
    persists = house.disk.persists
    house.tell(greeting())
    assert house.disk.persists == persists, "nothing changed, so nothing is written"


@pytest.mark.parametrize(
    ("state", "changes", "text"),
    [
        ({}, {"pg_version": 130000}, "unsupported PostgreSQL 130000: expected 140000 to 179999"),
        ({}, {"pg_version": 180000}, "unsupported PostgreSQL 180000"),
        ({"pg_version": 160001}, {}, "log of PostgreSQL 170005, but this log is of 160001"),
        (
            {"pg_version": 160001},
            {"pg_version": 0},
            "did not send its PostgreSQL version, and this log is of version 160001",
        ),
        ({}, {"tenant": "1" * 32}, f"of tenant {'1' * 32}, but this is tenant {TENANT}"),
        ({}, {"timeline": "1" * 32}, f"of timeline {'1' * 32}, but this is timeline {TIMELINE}"),
        ({"segment_bytes": SEGMENT * 2}, {}, "1048576 bytes: this log has 2097152"),
        ({}, {"segment_bytes": 1000}, "invalid segment size 1000: expected a power of two"),
        (
            {},
            {"membership": MembershipConfig(1, members(1, 3), members(4))},
            "generation 1 has the members [1, 3, 4], without node 2, which is in generation 0",
        ),
        (
            {"membership": MembershipConfig(1, members(1, 2))},
            {"membership": MembershipConfig(1, members(2, 3))},
            "generation 1 has members ([2, 3], []) there, but ([1, 2], []) here",
        ),
    ],
)
def test_greetings_that_are_refused(
    state: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    house = House(**state)
    before = house.disk.state
    with pytest.raises(WalRefused) as raised:
        house.tell(greeting(**changes))
    assert text in str(raised.value)
    assert house.disk.state == before


def test_minor_versions_pass_and_another_system_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(pg_version=170001, system_id=9)
    house.tell(greeting(system_id=0))
    assert (house.disk.state.pg_version, house.disk.state.system_id) == (170001, 9)
    house.tell(greeting())
    assert (house.disk.state.pg_version, house.disk.state.system_id) == (170005, 7)
    assert "the system id of the proposer changed to 7 (was 9)" in caplog.text


@pytest.fixture
def house() -> House:
    return House()


def test_a_higher_generation_is_adopted_and_a_lower_one_answered(house: House) -> None:
    newer = MembershipConfig(3, members(1, 4), members(NODE))
    assert house.tell(greeting(membership=newer)).membership == newer
    assert house.disk.state.membership == newer
    older = MembershipConfig(2, members(1))
    assert house.tell(greeting(membership=older)).membership == newer
    # the same one at another address is the same one
    moved = MembershipConfig(3, members(4, 1), (replace(members(NODE)[0], host="elsewhere"),))
    assert house.tell(greeting(membership=moved)).membership == newer


# -- votes ---------------------------------------------------------------------------------------


def test_one_vote_a_term_and_it_survives_a_restart(house: House) -> None:
    assert house.tell(VoteRequest(0, 1)) == VoteResponse(0, 1, True, 0, 0)
    assert house.disk.state.term == 1
    house.crash()
    assert house.tell(VoteRequest(0, 1)) == VoteResponse(0, 1, False, 0, 0)
    assert house.tell(VoteRequest(0, 0)) == VoteResponse(0, 1, False, 0, 0)
    assert house.tell(VoteRequest(0, 7)) == VoteResponse(0, 7, True, 0, 0)


def test_a_vote_flushes_first_and_tells_what_is_held(house: House) -> None:
    house.lead(1)
    house.tell(AppendUnflushed(replace(house.request(1, A), truncate_lsn=START + 8)))
    assert house.acceptor.flush_lsn == START
    history = (TermEntry(1, START),)
    expected = VoteResponse(0, 2, True, START + 8, START + 8, history)
    assert house.tell(VoteRequest(0, 2)) == expected
    assert house.disk.unflushed_bytes == 0
    # a refused one too
    assert house.tell(VoteRequest(0, 2)) == replace(expected, vote_given=False)


def test_the_history_in_a_vote_is_the_visible_one(house: House) -> None:
    house.lead(1)
    house.append(1, A)
    # the leader of term 5 has a log that is longer, and ours is not there yet
    history = (TermEntry(1, START), TermEntry(3, START + 16), TermEntry(5, START + 24))
    house.tell(ProposerElected(0, 5, START + 8, history))
    assert house.tell(VoteRequest(0, 6)).history == history[:1]
    assert house.acceptor.last_log_term == 1
    assert house.disk.state.history == history


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (VoteRequest(1, 9), "VoteRequest is of generation 1, but this acceptor is in 2"),
        (VoteRequest(3, 9), "VoteRequest is of generation 3, but this acceptor is in 2"),
        (
            ProposerElected(1, 9, START, (TermEntry(9, START),)),
            "ProposerElected is of generation 1",
        ),
        (AppendRequest(0, 9, START, START, 0, 0), "AppendRequest is of generation 0"),
    ],
)
def test_another_generation_is_refused(message: Any, text: str) -> None:
    house = House(membership=MembershipConfig(2, members(NODE)))
    before = house.disk.state
    with pytest.raises(WalRefused, match=text):
        house.tell(message)
    assert house.disk.state == before


# -- elected -------------------------------------------------------------------------------------


def test_the_first_leader_begins_the_timeline(house: House) -> None:
    house.tell(ProposerElected(0, 1, START, (TermEntry(1, START),)))
    state = house.disk.state
    assert state.term == 1, "no vote is needed"
    lsns = (state.timeline_start_lsn, state.local_start_lsn, state.commit_lsn)
    assert lsns == (START, START, START)
    lsns = (state.backup_lsn, state.remote_consistent_lsn, state.peer_horizon_lsn)
    assert lsns == (START, START, START)
    assert house.acceptor.flush_lsn == START
    assert house.acceptor.term_start_lsn == START
    assert house.acceptor.last_log_term == 1, "without a byte written"


def test_a_leader_cuts_off_what_is_not_its_own(house: House) -> None:
    house.lead(1)
    house.append(1, A)
    house.append(1, B)
    house.tell(AppendUnflushed(house.request(1, A)))
    history = (TermEntry(1, START), TermEntry(2, START + 8))
    house.tell(ProposerElected(0, 2, START + 8, history))
    assert house.acceptor.flush_lsn == house.wal.write_lsn == START + 8
    assert bytes(house.disk.wal) == A
    assert house.acceptor.term_start_lsn == START + 8
    state = house.disk.state
    assert (state.timeline_start_lsn, state.local_start_lsn) == (START, START)
    assert (state.history, state.peer_horizon_lsn) == (history, START)
    assert house.append(2, B).flush_lsn == START + 16
    house.crash()
    assert bytes(house.disk.wal) == A + B


def test_the_same_leader_connects_again(house: House) -> None:
    house.lead(3)
    house.append(3, A)
    assert not house.tell(VoteRequest(0, 3)).vote_given
    house.tell(ProposerElected(0, 3, START + 8, (TermEntry(3, START),)))
    assert house.append(3, B).flush_lsn == START + 16


def test_a_leader_whose_term_is_over_is_ignored_until_it_appends(house: House) -> None:
    house.lead(1)
    house.lead(4)
    before = house.acceptor.state
    assert house.tell(ProposerElected(0, 3, START, (TermEntry(3, START),))) is None
    assert house.acceptor.state == before
    assert house.tell(AppendRequest(0, 3, 0, 8, 99, 99, A)) == AppendResponse(0, 4)
    assert house.tell(AppendUnflushed(AppendRequest(0, 3, 0, 0, 0, 0))) == AppendResponse(0, 4)
    assert house.acceptor.state == before


def elected(term: int, start: int, *pairs: tuple[int, int]) -> ProposerElected:
    return ProposerElected(0, term, start, tuple(TermEntry(*pair) for pair in pairs))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (elected(9, START), "elected in term 9 with an empty history"),
        (elected(9, START, (2, START), (1, START)), "terms must ascend and LSNs not decrease"),
        (elected(9, START, (2, START), (9, START - 8)), "terms must ascend and LSNs not decrease"),
        (elected(9, START, (8, START)), "[8@0/100028]: it must start at an LSN and end with that"),
        (elected(9, 0, (9, 0)), "[9@0/0]: it must start at an LSN and end with that term"),
        # another connection wrote since the vote
        (
            elected(9, START + 8, (1, START), (9, START + 16)),
            "starts at 0/100030, but the logs diverge at 0/100038: connect again",
        ),
        (elected(9, START + 8, (1, START + 8), (9, START + 8)), "two leaders had the same term"),
        (elected(9, START, (1, START), (9, START)), "would remove data committed up to 0/100030"),
        (elected(9, START, (2, START), (9, START)), "would remove data committed up to 0/100030"),
        (
            elected(9, START + 24, (2, START + 24), (9, START + 24)),
            "after the end of this log at 0/100038",
        ),
    ],
)
def test_leaders_that_are_refused(house: House, message: ProposerElected, text: str) -> None:
    house.lead(1)
    house.append(1, A)
    house.append(1, B, commit_lsn=START + 8)
    before = house.acceptor.state
    with pytest.raises(WalRefused) as raised:
        house.tell(message)
    assert text in str(raised.value)
    assert house.acceptor.state == before
    assert bytes(house.disk.wal) == A + B
    # whoever leads goes on
    house.append(1, A)


# -- appends -------------------------------------------------------------------------------------


def test_appends_are_answered_with_what_is_on_disk(house: House) -> None:
    house.lead(1)
    assert house.append(1, A) == AppendResponse(0, 1, START + 8, START)
    # half a record is taken, and on disk with a whole one, but not shown
    assert house.append(1, b"half").flush_lsn == START + 8
    assert house.append(1, b"more" + b"half").flush_lsn == START + 16
    assert house.wal.flush_lsn == START + 20
    assert house.append(1, b"more").flush_lsn == START + 24
    house.crash()
    assert bytes(house.disk.wal) == A + b"halfmorehalfmore"


@pytest.mark.parametrize(
    ("begin", "wal", "text"),
    [
        (START, A, "append at 0/100028 would rewrite the log, which ends at 0/100030"),
        (START, b"", "append at 0/100028 would rewrite the log, which ends at 0/100030"),
        (START + 16, A, "append at 0/100038 would leave a gap after 0/100030"),
        (START + 16, b"", "append at 0/100038 would leave a gap after 0/100030"),
    ],
)
def test_no_gap_and_no_rewrite(house: House, begin: int, wal: bytes, text: str) -> None:
    house.lead(1)
    house.append(1, A)
    request = AppendRequest(0, 1, begin, begin + len(wal), START + 8, START + 8, wal)
    before = house.acceptor.state
    for message in (request, AppendUnflushed(request)):
        with pytest.raises(WalRefused, match=text):
            house.tell(message)
    assert house.acceptor.state == before


def test_bytes_and_positions_agree(house: House) -> None:
    house.lead(1)
    with pytest.raises(
        WalRefused, match="append of 8 bytes does not fit its range 0/100028 to 0/100038"
    ):
        house.tell(AppendRequest(0, 1, START, START + 16, 0, 0, A))


def test_nothing_is_appended_before_the_leader_announced_itself(house: House) -> None:
    house.lead(1)
    house.append(1, A)
    house.tell(VoteRequest(0, 2))
    for term in (2, 3):
        with pytest.raises(WalRefused, match=f"append of term {term} before its leader was"):
            house.append(term, A)
    # nor to a new life, though it knows the term: a heartbeat could commit another's bytes
    house.lead(3)
    house.crash()
    heartbeat = house.request(3, b"", commit_lsn=START + 8)
    for message in (house.request(3, A), heartbeat, AppendUnflushed(heartbeat)):
        with pytest.raises(WalRefused, match="append of term 3 before its leader was announced"):
            house.tell(message)
    assert house.acceptor.commit_lsn == START
    with pytest.raises(InvalidUsage, match="not truncated since it was opened"):
        house.wal.write(house.wal.write_lsn, A)
    house.tell(ProposerElected(0, 3, START + 8, (TermEntry(1, START), TermEntry(3, START + 8))))
    assert house.append(3, B).flush_lsn == START + 16


def test_unflushed_appends_are_answered_when_a_segment_is_full(house: House) -> None:
    house.lead(1)
    assert house.tell(AppendUnflushed(house.request(1, A))) is None
    assert house.acceptor.flush_lsn == START
    rest = 2 * SEGMENT - house.wal.write_lsn
    answer = house.tell(AppendUnflushed(house.request(1, bytes(rest + 16))))
    assert answer == AppendResponse(0, 1, 2 * SEGMENT, START)
    assert house.tell(FlushWal()) == AppendResponse(0, 1, 2 * SEGMENT + 16, START)


def test_a_flush_is_always_answered(house: House) -> None:
    assert house.tell(FlushWal()) == AppendResponse(0, 0)
    house.lead(1)
    flushes = house.disk.flushes
    assert house.tell(FlushWal()) == AppendResponse(0, 1, START, START)
    assert house.disk.flushes == flushes
    house.tell(AppendUnflushed(house.request(1, A)))
    assert house.tell(FlushWal()) == AppendResponse(0, 1, START + 8, START)
    assert house.disk.flushes == flushes + 1


def test_answers_carry_the_generation() -> None:
    house = House(membership=MembershipConfig(4, members(NODE)))
    house.lead(1, generation=4)
    request = replace(house.request(1, A), generation=4)
    assert house.tell(request) == AppendResponse(4, 1, START + 8, START)
    house.lead(2, generation=4)
    assert house.tell(request) == AppendResponse(4, 2)


# -- commit and the overlay ----------------------------------------------------------------------


def test_the_commit_is_bounded_by_what_is_flushed_and_never_falls(house: House) -> None:
    house.lead(1)
    house.append(1, A)
    assert house.append(1, B, commit_lsn=START + 99).commit_lsn == START
    assert house.acceptor.commit_lsn == START + 16
    house.append(1, A, commit_lsn=START + 8)
    assert house.acceptor.commit_lsn == START + 16
    house.tell(AppendUnflushed(house.request(1, A, commit_lsn=START + 99)))
    assert house.acceptor.commit_lsn == START + 24
    assert house.disk.state.commit_lsn == START, "in memory until something is persisted"
    house.crash()
    assert house.acceptor.commit_lsn == START


def test_crossing_the_terms_begin_is_persisted_at_once(house: House) -> None:
    house.lead(1)
    house.append(1, A)
    house.append(1, B)
    # the next leader begins where the log ends; what lies before is not committed yet
    house.lead(2)
    assert house.acceptor.term_start_lsn == START + 16
    persists = house.disk.persists
    assert house.append(2, b"", commit_lsn=START + 8).commit_lsn == START
    assert house.disk.persists == persists
    assert house.append(2, b"", commit_lsn=START + 16).commit_lsn == START + 16
    assert house.disk.persists == persists + 1
    # from then on it moves in memory again
    assert house.append(2, A, commit_lsn=START + 24).commit_lsn == START + 16
    assert house.disk.persists == persists + 1


def test_every_persisted_change_writes_the_overlay(house: House) -> None:
    house.lead(1)
    request = replace(house.request(1, A, START + 8), truncate_lsn=START + 3, proposer_id=b"p" * 16)
    house.tell(request)
    house.acceptor.record_backup(START + 1)
    house.acceptor.record_remote_consistent(START + 2)
    house.acceptor.validate()
    assert house.disk.state.backup_lsn == START
    house.tell(VoteRequest(0, 2))
    state = house.disk.state
    assert state == house.acceptor.state
    assert (state.commit_lsn, state.backup_lsn) == (START + 8, START + 1)
    assert (state.remote_consistent_lsn, state.peer_horizon_lsn) == (START + 2, START + 3)
    assert state.proposer_id == b"p" * 16


def test_a_checkpoint_persists_what_moved(house: House) -> None:
    house.lead(1)
    persists = house.disk.persists
    house.acceptor.checkpoint()
    assert house.disk.persists == persists
    house.append(1, A, commit_lsn=START + 8)
    house.acceptor.checkpoint()
    assert house.disk.persists == persists + 1
    assert house.append(1, b"").commit_lsn == START + 8


def test_the_overlay_only_rises(house: House) -> None:
    house.lead(1)
    house.tell(replace(house.request(1, b""), truncate_lsn=START + 8))
    house.tell(replace(house.request(1, b""), truncate_lsn=START))
    house.acceptor.record_backup(1)
    house.acceptor.record_remote_consistent(1)
    state = house.acceptor.state
    assert state.peer_horizon_lsn == START + 8
    assert (state.backup_lsn, state.remote_consistent_lsn) == (START, START)


def test_peers_of_the_same_last_term_move_the_commit(house: House) -> None:
    house.acceptor.record_peer(AcceptorPeer(0, START))
    assert house.acceptor.commit_lsn == 0
    house.lead(2)
    house.append(2, A)
    house.acceptor.record_peer(AcceptorPeer(1, START + 8, START + 1, START + 2, START + 3))
    house.acceptor.record_peer(AcceptorPeer(3, START + 8))
    house.acceptor.validate()
    state = house.acceptor.state
    assert state.commit_lsn == START
    assert (state.backup_lsn, state.peer_horizon_lsn) == (START + 1, START + 2)
    assert state.remote_consistent_lsn == START + 3
    house.acceptor.record_peer(AcceptorPeer(2, START + 99))
    house.acceptor.validate()
    assert house.acceptor.commit_lsn == START + 8


def test_a_bumped_term_ends_the_leader(house: House) -> None:
    house.lead(2)
    assert house.acceptor.bump_term(2) == 2
    assert house.acceptor.bump_term(1) == 2
    assert house.append(2, A).flush_lsn == START + 8
    assert house.acceptor.bump_term() == 3
    assert house.acceptor.bump_term(8) == house.disk.state.term == 8
    assert house.append(2, A) == AppendResponse(0, 8)


def test_a_log_that_lost_committed_bytes_is_not_opened(house: House) -> None:
    house.lead(1)
    house.append(1, A, commit_lsn=START + 8)
    house.acceptor.checkpoint()
    del house.disk.wal[:]
    with pytest.raises(CorruptData, match="the log ends at 0/100028, but 0/100030 was committed"):
        house.crash()


# -- the invariants themselves ---------------------------------------------------------------------


class Disagreeing:
    """A control file that says something else than was persisted."""

    def __init__(self, state: ControlState) -> None:
        self.state = state

    def persist(self, state: ControlState) -> None:
        raise AssertionError("not asked")


@pytest.mark.parametrize(
    ("on_disk", "rule"),
    [
        ({"commit_lsn": START + 9}, "persisted commit_lsn <= commit_lsn"),
        ({"backup_lsn": START + 9}, "persisted backup_lsn <= backup_lsn"),
        ({"term": 2}, "everything except the overlay is as on disk"),
    ],
)
def test_validate_compares_with_the_disk(house: House, on_disk: dict[str, Any], rule: str) -> None:
    house.lead(1)
    house.acceptor._control = Disagreeing(replace(house.disk.state, **on_disk))
    with pytest.raises(CorruptData, match=rule):
        house.acceptor.validate()


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ({"history": (TermEntry(3, START),), "term": 2}, "last term <= term"),
        ({"timeline_start_lsn": START, "local_start_lsn": START - 8}, "<= local_start_lsn"),
        (
            {"timeline_start_lsn": START, "local_start_lsn": START, "commit_lsn": START - 8},
            "timeline_start_lsn <= commit_lsn",
        ),
    ],
)
def test_validate_finds_a_state_that_cannot_be(state: dict[str, Any], rule: str) -> None:
    control = Disagreeing(ControlState(TENANT, TIMELINE, **state))
    with pytest.raises(CorruptData, match=f"an acceptor violated its rule .*{rule}"):
        AcceptorCore(NODE, control, House().wal).validate()
