"""The proposer's rules, one by one, without a loop: messages in, effects out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.errors import InvalidUsage
from actors.wal import quorum
from actors.wal.messages import (
    WAL_BYTES_MAX,
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    ConfigMember,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from actors.wal.proposer import (
    AcceptorSession,
    CommitMoved,
    DropConnection,
    Effect,
    FetchLog,
    LeadTerm,
    ProposerConfig,
    ProposerPhase,
    SendMessage,
    StopProposer,
    SyncFinished,
    WalProposer,
)

E = TypeVar("E")
START = 0x100_0028
CHUNK = WAL_BYTES_MAX
NONE = MembershipConfig()


def proposer(count: int = 3, **options: Any) -> WalProposer:
    return WalProposer(
        ProposerConfig("aa" * 16, "bb" * 16, options.pop("start_lsn", START), **options),
        range(count),
    )


def of(kind: type[E], effects: Sequence[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: Sequence[Effect], acceptor: int) -> list[Any]:
    return [effect.message for effect in of(SendMessage, effects) if effect.acceptor == acceptor]


def greet(
    subject: WalProposer, acceptor: int, term: int = 0, membership: MembershipConfig = NONE
) -> list[Effect]:
    first = subject.connected(acceptor)
    [greeting] = sent(first, acceptor)
    assert isinstance(greeting, ProposerGreeting)
    return subject.received(acceptor, AcceptorGreeting(acceptor + 1, membership, term))


def vote(
    subject: WalProposer,
    acceptor: int,
    flush_lsn: int = 0,
    history: tuple[TermEntry, ...] = (),
    **options: Any,
) -> list[Effect]:
    given = options.pop("given", True)
    term = options.pop("term", subject.term)
    truncate_lsn = options.pop("truncate_lsn", 0)
    generation = subject.membership.generation
    response = VoteResponse(generation, term, given, flush_lsn, truncate_lsn, history)
    return subject.received(acceptor, response)


def answer(
    subject: WalProposer, acceptor: int, flush_lsn: int, commit_lsn: int = 0
) -> list[Effect]:
    generation = subject.membership.generation
    effects = subject.received(
        acceptor, AppendResponse(generation, subject.term, flush_lsn, commit_lsn)
    )
    subject.validate()
    return effects


def leader(count: int = 3, voters: int | None = None, **options: Any) -> WalProposer:
    """One that was elected by `voters` of empty acceptors."""
    subject = proposer(count, **options)
    voting = range(count if voters is None else voters)
    for acceptor in voting:
        greet(subject, acceptor)
    for acceptor in voting:
        vote(subject, acceptor)
    assert subject.phase is ProposerPhase.ELECTED
    subject.validate()
    return subject


# -- the campaign --


def test_a_quorum_of_greetings_gives_the_term() -> None:
    subject = proposer()
    assert greet(subject, 0, term=4) == []
    assert subject.phase is ProposerPhase.COLLECTING
    effects = greet(subject, 2, term=7)
    assert subject.term == 8
    assert sent(effects, 0) == sent(effects, 2) == [VoteRequest(0, 8)]
    assert sent(greet(subject, 1, term=8), 1) == [VoteRequest(0, 8)], "late ones are asked too"
    assert subject.term == 8, "fixed from then on"


def test_those_who_left_again_are_no_quorum() -> None:
    subject = proposer()
    greet(subject, 0, term=9)
    subject.disconnected(0)
    assert greet(subject, 1, term=1) == []
    greet(subject, 2, term=2)
    assert subject.term == 3, "who is away said nothing that counts"


def test_a_later_greeting_of_a_higher_term_is_fatal() -> None:
    subject = leader(3, voters=2)
    [fatal] = of(StopProposer, greet(subject, 2, term=subject.term + 1))
    assert "in term 2, after 1" in fatal.reason
    assert subject.phase is ProposerPhase.FAILED
    assert subject.connected(0) == subject.tick(99_999) == [], "nothing has an effect any more"


def test_a_refused_vote_is_fatal_before_the_election() -> None:
    subject = proposer()
    greet(subject, 0)
    greet(subject, 1)
    assert of(StopProposer, vote(subject, 0, given=False)), "even of this very term"


def test_a_refused_vote_of_a_higher_term_is_fatal_after_it_too() -> None:
    subject = leader(3, voters=2)
    greet(subject, 2)
    assert of(StopProposer, vote(subject, 2, given=False, term=5))


def test_a_refused_vote_of_this_term_is_no_harm_after_the_election() -> None:
    subject = leader(3, voters=2)
    subject.disconnected(1)
    greet(subject, 1, term=subject.term)
    history = (TermEntry(1, START),)
    effects = vote(subject, 1, START, history, given=False)
    assert [type(each) for each in sent(effects, 1)] == [ProposerElected, AppendRequest]


def test_the_donor_is_the_highest_in_term_then_position() -> None:
    subject = proposer()
    for acceptor in range(3):
        greet(subject, acceptor, term=6)
    old = (TermEntry(1, START), TermEntry(3, START + 100))
    new = (TermEntry(1, START), TermEntry(5, START + 40), TermEntry(6, START + 999))
    vote(subject, 0, START + 900, old)
    [elected] = of(LeadTerm, vote(subject, 1, START + 80, new))
    assert elected == LeadTerm(7, START + 80, 1)
    assert subject.history == (
        TermEntry(1, START),
        TermEntry(5, START + 40),
        TermEntry(7, START + 80),
    ), "what lies behind the donor's log is not of it"
    late = vote(subject, 2, START + 40, new[:2], given=False)
    assert sent(late, 2)[0] == ProposerElected(0, 7, START + 40, subject.history)


def test_where_each_is_streamed_from() -> None:
    """The point where its history and ours part; the begin for one that holds nothing."""
    subject = proposer(5)
    for acceptor in range(5):
        greet(subject, acceptor, term=4)
    donor = (TermEntry(1, START), TermEntry(4, START + 1000))
    vote(subject, 0, START + 2000, donor)
    vote(subject, 1, START + 1500, (TermEntry(1, START), TermEntry(2, START + 700)))
    effects = vote(subject, 2)
    starts = {each.acceptor: each.message.start_streaming_at for each in of(SendMessage, effects)
              if isinstance(each.message, ProposerElected)}  # fmt: skip
    assert starts == {0: START + 2000, 1: START + 700, 2: START}
    subject.validate()


def test_an_empty_log_begins_where_it_was_told() -> None:
    subject = leader(1)
    assert (subject.start_lsn, subject.end_lsn) == (START, START)
    assert subject.history == (TermEntry(1, START),)


def test_one_node_cannot_vote_twice() -> None:
    subject = proposer()
    greet(subject, 0)
    subject.connected(1)
    [fatal] = of(StopProposer, subject.received(1, AcceptorGreeting(1, NONE, 0)))
    assert "both node 1" in fatal.reason


def test_what_an_acceptor_may_not_say_now_ends_its_connection_only() -> None:
    subject = leader()
    [drop] = of(DropConnection, vote(subject, 1))
    assert drop == DropConnection(1, "unexpected VoteResponse while active")
    assert subject._peers[1].session is AcceptorSession.OFFLINE
    assert answer(subject, 1, START) == [], "nothing of the old connection counts"
    assert subject.phase is ProposerPhase.ELECTED


# -- membership --


def members(*ids: int) -> tuple[ConfigMember, ...]:
    return tuple(ConfigMember(each, f"host-{each}", 5454) for each in ids)


def test_a_newer_membership_is_adopted_before_the_campaign() -> None:
    subject = proposer(membership=MembershipConfig(1, members(1, 2, 3)))
    greet(subject, 0, membership=MembershipConfig(1, members(1, 2, 3)))
    newer = MembershipConfig(2, members(1, 2))
    effects = greet(subject, 1, membership=newer)
    assert [each.acceptor for each in of(DropConnection, effects)] == [0]
    assert subject.membership == newer
    assert sent(subject.connected(0), 0)[0].membership == newer
    subject.received(0, AcceptorGreeting(1, newer, 3))
    assert subject.term == 4
    assert vote(subject, 0) == []
    assert of(LeadTerm, vote(subject, 1))


def test_a_newer_membership_is_fatal_after_it_began() -> None:
    subject = leader(3, voters=2)
    assert of(StopProposer, greet(subject, 2, membership=MembershipConfig(1, members(1, 2, 3))))


def test_one_that_did_not_adopt_ours_is_dropped() -> None:
    subject = proposer(membership=MembershipConfig(2, members(1, 2, 3)))
    assert of(DropConnection, greet(subject, 0, membership=MembershipConfig(1, members(1, 2))))


def test_one_that_is_no_member_is_not_asked() -> None:
    membership = MembershipConfig(1, members(1, 2))
    subject = proposer(membership=membership)
    for acceptor in (2, 0, 1):
        effects = greet(subject, acceptor, membership=membership)
    assert {each.acceptor for each in of(SendMessage, effects)} == {0, 1}


def test_an_answer_of_another_generation_is_fatal() -> None:
    subject = leader()
    assert of(StopProposer, subject.received(0, AppendResponse(3, subject.term, START)))


def test_an_answer_of_a_higher_term_is_fatal() -> None:
    subject = leader()
    [fatal] = of(StopProposer, subject.received(0, AppendResponse(0, subject.term + 1)))
    assert "another proposer leads" in fatal.reason


def test_a_joint_membership_needs_a_quorum_of_both() -> None:
    joint = MembershipConfig(1, members(1, 2, 3), members(3, 4, 5))
    subject = proposer(5, membership=joint)
    for acceptor in (0, 1):
        assert greet(subject, acceptor, membership=joint) == []
    assert greet(subject, 3, membership=joint) == []
    greet(subject, 2, membership=joint)
    assert subject.phase is ProposerPhase.CAMPAIGN
    for acceptor in (0, 1, 3):
        vote(subject, acceptor)
    assert subject.phase is ProposerPhase.CAMPAIGN, "4 alone is no quorum of the new set"
    assert of(LeadTerm, vote(subject, 2))
    subject.append(b"x" * 64)
    for acceptor in (0, 1, 2):
        assert not of(CommitMoved, answer(subject, acceptor, START + 64))
    assert of(CommitMoved, answer(subject, 3, START + 32)) == [CommitMoved(START + 32)]


# -- streaming --


def test_appends_go_to_all_in_pieces_and_in_order() -> None:
    subject = leader()
    wal = bytes(range(256)) * 1024
    effects = subject.append(wal + b"tail")
    for acceptor in range(3):
        requests = sent(effects, acceptor)
        assert [len(each.wal) for each in requests] == [CHUNK, CHUNK, 4]
        assert b"".join(each.wal for each in requests) == wal + b"tail"
        assert [each.begin_lsn for each in requests] == [START, START + CHUNK, START + 2 * CHUNK]
    subject.validate()


def test_heartbeats_are_a_second_after_what_was_sent_last() -> None:
    subject = leader()
    assert subject.tick(999) == []
    beats = subject.tick(1000)
    assert [(each.acceptor, each.message) for each in of(SendMessage, beats)] == [
        (acceptor, AppendRequest(0, 1, START, START, 0, 0)) for acceptor in range(3)
    ]
    subject.append(b"12345678")
    assert subject.tick(1999) == []
    assert len(subject.tick(2000)) == 3


def test_the_silent_are_dropped_and_come_back_by_the_whole_handshake() -> None:
    subject = leader()
    subject.append(bytes(64))
    subject.tick(5000)
    answer(subject, 0, START + 64)
    answer(subject, 1, START + 64)
    drops = of(DropConnection, subject.tick(10_000))
    assert [each.acceptor for each in drops] == [2]
    assert sent(subject.tick(11_000), 2) == []
    assert sent(greet(subject, 2, term=1), 2) == [VoteRequest(0, 1)]
    effects = vote(subject, 2, START + 8, (TermEntry(1, START),), given=False)
    elected, beat, rest = sent(effects, 2)
    assert elected.start_streaming_at == beat.begin_lsn == rest.begin_lsn == START + 8
    assert rest.end_lsn == START + 64


def test_one_that_owes_nothing_is_not_dropped() -> None:
    subject = proposer()
    greet(subject, 0)
    assert of(DropConnection, subject.tick(60_000)) == []
    subject.connected(1)
    assert of(DropConnection, subject.tick(69_999)) == []
    assert [each.acceptor for each in of(DropConnection, subject.tick(70_000))] == [1]


def test_a_new_commit_is_told_at_once() -> None:
    subject = leader()
    subject.append(bytes(64))
    assert answer(subject, 0, START + 64) == []
    effects = answer(subject, 1, START + 64)
    assert of(CommitMoved, effects) == [CommitMoved(START + 64)]
    for acceptor in range(3):
        assert sent(effects, acceptor) == [
            AppendRequest(0, 1, START + 64, START + 64, START + 64, 0)
        ]
    assert answer(subject, 1, START + 64) == []
    answer(subject, 2, START + 40)
    assert subject.truncate_lsn == START + 40
    assert subject.commit_lsn == START + 64, "commit never falls"


def test_within_the_rest_of_a_switched_segment_nothing_is_committed() -> None:
    """An acceptor that has the switch says that it has the segment, though zeros are to come. No
    record ends among them: a commit there would be where a restarted acceptor looks for one."""
    subject = leader()
    subject.append(b"r" * 800)  # of which the last is a switch
    end = START + 5000
    for acceptor in range(3):
        answer(subject, acceptor, START + 400)
    for sent_lsn in (START + 800, START + 2400):
        subject.append(bytes(sent_lsn - subject.end_lsn))
        for acceptor in range(3):
            answer(subject, acceptor, end)
        assert subject.commit_lsn == START + 400
    subject.append(bytes(end - subject.end_lsn))
    answer(subject, 0, end)
    assert of(CommitMoved, answer(subject, 1, end)) == [CommitMoved(end)]


def test_what_lies_before_the_term_counts_as_nothing() -> None:
    subject = proposer()
    history = (TermEntry(1, START),)
    for acceptor in range(3):
        greet(subject, acceptor, term=1)
    vote(subject, 0, START + 500, history)
    vote(subject, 1, START + 100, history)
    answer(subject, 0, START + 500)
    answer(subject, 1, START + 100)
    assert subject.commit_lsn == 0
    subject.fetched(1, START + 100, bytes(400))
    assert of(CommitMoved, answer(subject, 1, START + 500)) == [CommitMoved(START + 500)]


def test_appends_are_bounded_by_what_is_not_committed() -> None:
    subject = leader(pending_bytes_max=2 * CHUNK)
    subject.append(bytes(2 * CHUNK))
    assert subject.room == 0
    with pytest.raises(InvalidUsage, match="limit is now 0"):
        subject.append(b"x")
    answer(subject, 0, START + 4096)
    assert subject.room == 0
    answer(subject, 2, START + 4096)
    assert subject.room == 4096
    assert sent(subject.append(bytes(4096)), 1) == [], "its window is full"
    assert [len(each.wal) for each in sent(answer(subject, 1, START + CHUNK), 1) if each.wal] == [
        4096
    ]


def test_nothing_is_appended_before_the_election() -> None:
    with pytest.raises(InvalidUsage, match="collecting"):
        proposer().append(b"x")


def test_the_recovery_of_what_the_donor_alone_has() -> None:
    """The proposer holds nothing of it: it is read from the donor, in the proposer's term."""
    subject = proposer()
    history = (TermEntry(1, START),)
    for acceptor in range(2):
        greet(subject, acceptor, term=1)
    vote(subject, 0, START + CHUNK + 100, history)
    effects = vote(subject, 1, START + 60, history)
    assert of(FetchLog, effects) == [FetchLog(1, 0, START + 60, START + 60 + CHUNK, 2)]
    subject.append(b"new-")
    effects = subject.fetched(1, START + 60, bytes(CHUNK))
    [request] = sent(effects, 1)
    assert (request.begin_lsn, request.end_lsn) == (START + 60, START + 60 + CHUNK)
    [fetch] = of(FetchLog, effects)
    assert (fetch.begin_lsn, fetch.end_lsn) == (START + 60 + CHUNK, START + CHUNK + 100)
    effects = subject.fetched(1, fetch.begin_lsn, bytes(40))
    assert [each.wal for each in sent(effects, 1)] == [bytes(40), b"new-"]
    subject.validate()


def test_a_fetch_that_fails_is_tried_elsewhere_later() -> None:
    subject = leader(retained_bytes_max=0)
    subject.disconnected(2)
    subject.append(bytes(64))
    answer(subject, 0, START + 64)
    answer(subject, 1, START + 48)
    answer(subject, 1, START + 64)
    greet(subject, 2, term=1)
    [fetch] = of(FetchLog, vote(subject, 2, given=False))
    assert (fetch.source, fetch.begin_lsn, fetch.end_lsn) == (0, START, START + 64)
    assert subject.fetch_failed(2, START) == []
    assert of(FetchLog, subject.append(bytes(8))) == [], "not before time goes by"
    [again] = of(FetchLog, subject.tick(100))
    assert again.source == 1
    subject.fetch_failed(2, START)
    assert of(FetchLog, subject.tick(200)) == []
    assert [each.source for each in of(FetchLog, subject.tick(300))] == [0], "then from the first"


def test_an_answer_to_a_fetch_of_an_older_connection_is_ignored() -> None:
    subject = leader(retained_bytes_max=0)
    subject.disconnected(2)
    subject.append(bytes(64))
    answer(subject, 0, START + 64)
    answer(subject, 1, START + 64)
    greet(subject, 2, term=1)
    assert of(FetchLog, vote(subject, 2, given=False))
    subject.disconnected(2)
    assert subject.fetched(2, START, bytes(64)) == []
    subject.validate()


def test_what_a_laggard_needs_is_kept_for_a_while() -> None:
    subject = leader(retained_bytes_max=CHUNK)
    subject.disconnected(2)
    for _ in range(3):
        subject.append(bytes(CHUNK))
        answer(subject, 0, subject.end_lsn)
        answer(subject, 1, subject.end_lsn)
    greet(subject, 2, term=1)
    effects = vote(subject, 2, START + 2 * CHUNK, (TermEntry(1, START),), given=False)
    assert not of(FetchLog, effects)
    assert sent(effects, 2)[-1].end_lsn == subject.end_lsn


def test_without_the_donor_another_campaign_is_needed() -> None:
    subject = proposer(donor_absent_ms_max=30_000, silence_ms_max=10**9)
    history = (TermEntry(1, START),)
    for acceptor in range(3):
        greet(subject, acceptor, term=1)
    vote(subject, 0, START + 500, history)
    vote(subject, 1, START, history)
    subject.disconnected(0)
    assert not of(StopProposer, subject.tick(40_000)), "one is no quorum that could do without it"
    vote(subject, 2, START, history)
    [fatal] = of(StopProposer, subject.tick(40_001))
    assert "only on acceptor 0" in fatal.reason


# -- sync mode --


def test_sync_of_nothing_ends_with_zero() -> None:
    subject = proposer(is_sync=True)
    for acceptor in range(2):
        greet(subject, acceptor)
    vote(subject, 0)
    assert of(SyncFinished, vote(subject, 1)) == [SyncFinished(0)]


def test_sync_ends_when_all_connected_have_it_committed() -> None:
    subject = proposer(is_sync=True)
    history = (TermEntry(1, START),)
    for acceptor in range(3):
        greet(subject, acceptor, term=1)
    for acceptor in range(3):
        vote(subject, acceptor, START + 64, history)
    with pytest.raises(InvalidUsage, match="sync mode"):
        subject.append(b"x")
    answer(subject, 0, START + 64)
    assert subject.commit_lsn == 0
    answer(subject, 1, START + 64)
    assert subject.commit_lsn == START + 64
    answer(subject, 0, START + 64, START + 64)
    assert not of(SyncFinished, answer(subject, 1, START + 64, START + 64)), (
        "2 is connected and behind"
    )
    assert of(SyncFinished, subject.disconnected(2)) == [SyncFinished(START + 64)]


def test_sync_ends_at_once_when_all_had_it() -> None:
    subject = proposer(is_sync=True)
    history = (TermEntry(1, START),)
    for acceptor in range(2):
        greet(subject, acceptor, term=1)
    vote(subject, 0, START + 64, history)
    effects = vote(subject, 1, START + 64, history, truncate_lsn=START + 64)
    assert of(SyncFinished, effects) == [SyncFinished(START + 64)]


# -- the commit rule --


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 12))
def test_committed_is_the_greatest_that_a_quorum_has(lsns: list[int], start: int) -> None:
    """Against the definition, by trying all subsets."""
    nodes = frozenset(range(len(lsns)))
    candidates = {0} | {lsn for lsn in lsns if lsn >= start}
    expected = max(
        candidate
        for candidate in candidates
        if candidate == 0
        or any(
            all(lsns[node] >= candidate for node in those)
            for those in combinations(nodes, len(lsns) // 2 + 1)
        )
    )
    assert quorum.quorum_flush_lsn((nodes,), lsns.__getitem__, start) == expected


@given(
    st.frozensets(st.integers(0, 6), min_size=1),
    st.frozensets(st.integers(0, 6), min_size=1),
    st.lists(st.integers(0, 12), min_size=7, max_size=7),
)
def test_a_joint_commit_is_one_of_each_set(
    old: frozenset[int], new: frozenset[int], lsns: list[int]
) -> None:
    lsn = quorum.quorum_flush_lsn((old, new), lsns.__getitem__, 3)
    having = [node for node in old | new if lsns[node] >= max(lsn, 3)]
    assert lsn == 0 or quorum.has_quorum((old, new), having)
    higher = {each for each in lsns if each > max(lsn, 2)}
    for candidate in higher:
        having = [node for node in old | new if lsns[node] >= candidate]
        assert not quorum.has_quorum((old, new), having), candidate


def test_nobody_is_no_quorum() -> None:
    assert not quorum.has_quorum((), ())
    assert quorum.quorum_flush_lsn((), lambda _: 5, 1) == 0
