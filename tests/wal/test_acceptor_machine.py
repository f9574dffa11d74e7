"""One acceptor under arbitrary messages, restarts, lost bytes and failing disks.

After each step the invariants hold (`Acceptor.validate`) and these, numbered as in the protocol's
list of checkable properties: 5 the persisted term never falls, one vote for each term, on disk
before it is answered; 6 the commit never falls in memory and is flushed; 7 the flushed end falls
only when a leader is elected, never below the commit; 8 an acknowledged end survives a crash; 9 the
bytes are those of the accepted appends, one after the other; 10 none was accepted of another term
or generation; 13 a truncation that was cut short leaves the old log or the new one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from acceptor_house import (  # type: ignore[import-not-found]
    NODE,
    START,
    House,
    greeting,
    members,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from wal_disks import OPERATIONS, Fault  # type: ignore[import-not-found]

from actors.runtime.errors import StorageError, WalRefused
from actors.wal.acceptor import AcceptorPeer, AppendUnflushed, FlushWal
from actors.wal.history import highest_common_point, visible
from actors.wal.messages import (
    AppendRequest,
    AppendResponse,
    MembershipConfig,
    ProposerElected,
    TermEntry,
    VoteRequest,
    VoteResponse,
)

STEPS = st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1, 2])
"""How far a number is from the right one: it mostly is the right one."""
LSNS = st.integers(0, 20).map(lambda count: START + 4 * count)
FAULTS = st.sampled_from(list(Fault)[1:])
BREAKING = st.sampled_from([*OPERATIONS, "persist", "persist", "persist"])


class AcceptorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House()
        self.bytes = b""
        self.votes: Counter[int] = Counter()
        self.acked_lsn = 0
        self.disk_term = 0
        self.number = 0

    @initialize(started=st.booleans())
    def begin(self, started: bool) -> None:
        """Half of the runs start with a leader."""
        if started:
            self.house.lead(1)
            self.votes[1] += 1

    @property
    def alive(self) -> bool:
        return self.house.acceptor.stopped is None

    def tell(self, message: Any) -> Any:
        """Hands it over and judges what became of it."""
        house = self.house
        before, disk_before = house.acceptor.state, bytes(house.disk.wal)
        commit, flush = house.acceptor.commit_lsn, house.acceptor.flush_lsn
        answer, failed = None, False
        try:
            answer = house.acceptor.process(message)
        except WalRefused:
            assert (house.acceptor.state, bytes(house.disk.wal)) == (before, disk_before)
        except StorageError:
            failed = True
        after = house.acceptor
        assert after.commit_lsn >= commit, "6"
        if isinstance(message, ProposerElected):
            if after.flush_lsn < flush:
                assert after.flush_lsn >= commit, "7"
                self.acked_lsn = min(self.acked_lsn, after.flush_lsn)
        else:
            assert after.flush_lsn >= flush, "7"
        if not after.stopped:
            assert after.flush_lsn <= START + len(house.disk.wal)
        self.judge_bytes(message, before, disk_before, failed)
        self.judge_answer(message, answer)
        return answer

    def judge_bytes(self, message: Any, before: Any, disk_before: bytes, failed: bool) -> None:
        now = bytes(self.house.disk.wal)
        assert disk_before == self.bytes, "9"
        request = message.request if isinstance(message, AppendUnflushed) else message
        if isinstance(request, AppendRequest) and len(now) > len(disk_before):
            assert now == disk_before + request.wal, "9"
            assert (request.term, request.generation) == (
                before.term,
                before.membership.generation,
            ), "10"
            assert request.begin_lsn == START + len(disk_before), "9"
        elif isinstance(message, ProposerElected) and now != disk_before:
            assert now == disk_before[: message.start_streaming_at - START], "9, 13"
            self.acked_lsn = min(self.acked_lsn, message.start_streaming_at)
        else:
            assert now == disk_before, "9"
        self.bytes = now

    def judge_answer(self, message: Any, answer: Any) -> None:
        disk = self.house.disk
        if isinstance(answer, VoteResponse) and answer.vote_given:
            assert message.term == answer.term == disk.state.term, "5"
            self.votes[message.term] += 1
            assert self.votes[message.term] == 1, "5"
        if isinstance(answer, VoteResponse | AppendResponse) and answer.flush_lsn:
            assert answer.flush_lsn <= START + disk.flushed_bytes, "8"
            self.acked_lsn = max(self.acked_lsn, answer.flush_lsn)
        if isinstance(answer, AppendResponse) and answer.flush_lsn:
            assert answer.commit_lsn == disk.state.commit_lsn

    def generation(self, step: int) -> int:
        return max(0, int(self.house.acceptor.state.membership.generation) + step)

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(0, 5))
    def lead(self, count: int) -> None:
        """All that makes a leader and lets it write, or the runs would hardly get there."""
        generation = self.generation(0)
        vote = self.tell(VoteRequest(generation, self.house.acceptor.term + 1))
        if vote is None or not self.alive:
            return
        begin = vote.flush_lsn or START
        history = (*vote.history, TermEntry(vote.term, begin))
        self.tell(ProposerElected(generation, vote.term, begin, history))
        if self.alive:
            self.append(count, 0, 0, 0, 0, 0, True)

    @precondition(lambda self: self.alive)
    @rule(generation=st.integers(0, 3), is_member=st.booleans())
    def greet(self, generation: int, is_member: bool) -> None:
        ids = members(1, NODE if is_member else 3) if generation else ()
        self.tell(greeting(membership=MembershipConfig(generation, ids)))

    @precondition(lambda self: self.alive)
    @rule(step=st.integers(-1, 2), wrong=STEPS)
    def vote(self, step: int, wrong: int) -> None:
        term = max(0, self.house.acceptor.term + step)
        self.tell(VoteRequest(self.generation(wrong), term))

    @precondition(lambda self: self.alive)
    @rule(
        step=st.sampled_from([0, 0, 0, 1, -1]),
        kept=st.integers(0, 9),
        cut=st.integers(0, 24).map(lambda count: count // 2 * 4),
        wrong=STEPS,
        wrong_start=STEPS,
    )
    def elect(self, step: int, kept: int, cut: int, wrong: int, wrong_start: int) -> None:
        """A leader whose log has some of our entries, and begins its term somewhere."""
        acceptor = self.house.acceptor
        term = max(1, acceptor.term + step)
        ours = visible(acceptor.state.history, acceptor.flush_lsn)
        older = tuple(entry for entry in ours if entry.term < term)[: kept or None]
        begin = max(acceptor.flush_lsn - cut, older[-1].lsn if older else START)
        history = (*older, TermEntry(term, begin))
        if ours and ours[-1].term == term:
            history = ours  # that very leader connects again
        point = highest_common_point(history, ours, acceptor.flush_lsn)
        start = history[0].lsn if point is None else point.lsn
        generation = self.generation(wrong)
        self.tell(ProposerElected(generation, term, start + 8 * wrong_start, history))

    @precondition(lambda self: self.alive)
    @rule(
        count=st.integers(0, 5),
        step=STEPS,
        wrong=STEPS,
        gap=STEPS,
        commit=st.just(0) | LSNS,
        truncate=LSNS,
        is_flushed=st.booleans(),
    )
    def append(
        self,
        count: int,
        step: int,
        wrong: int,
        gap: int,
        commit: int,
        truncate: int,
        is_flushed: bool,
    ) -> None:
        """Bytes that no other append had, in halves of records."""
        self.number += 1
        wal = (self.number % 2**32).to_bytes(4, "big") * count
        begin = max(0, self.house.wal.write_lsn + 4 * gap)
        term = max(0, self.house.acceptor.term + step)
        request = AppendRequest(
            self.generation(wrong), term, begin, begin + len(wal), commit, truncate, wal
        )
        self.tell(request if is_flushed else AppendUnflushed(request))

    @precondition(lambda self: self.alive)
    @rule()
    def flush(self) -> None:
        self.tell(FlushWal())

    @precondition(lambda self: self.alive)
    @rule(step=STEPS, commit=LSNS, lsn=LSNS)
    def peer(self, step: int, commit: int, lsn: int) -> None:
        acceptor = self.house.acceptor
        before = acceptor.commit_lsn
        term = max(0, acceptor.last_log_term + step)
        try:
            acceptor.record_peer(AcceptorPeer(term, commit, lsn, lsn, lsn))
            acceptor.record_backup(lsn)
            acceptor.record_remote_consistent(lsn)
        except StorageError:
            pass
        assert acceptor.commit_lsn == before or term == acceptor.last_log_term
        assert acceptor.commit_lsn >= before, "6"

    @precondition(lambda self: self.alive)
    @rule(is_bumped=st.booleans())
    def persist(self, is_bumped: bool) -> None:
        acceptor = self.house.acceptor
        try:
            if is_bumped:
                acceptor.bump_term()
            acceptor.checkpoint()
        except StorageError:
            return
        assert acceptor.state == self.house.disk.state

    @rule(kept=st.integers(0, 40))
    def crash(self, kept: int) -> None:
        """Some of what was not flushed is gone; everything that was answered is there."""
        self.house.disk.fault = lambda operation: Fault.NONE
        self.house.crash(kept)
        assert bytes(self.house.disk.wal) == self.bytes[: len(self.house.disk.wal)]
        # half a record at the end is cut off by whoever leads next
        self.bytes = bytes(self.house.disk.wal)
        acceptor = self.house.acceptor
        assert acceptor.flush_lsn >= self.acked_lsn, "8"
        assert acceptor.commit_lsn == self.house.disk.state.commit_lsn

    @precondition(lambda self: self.alive)
    @rule(operation=BREAKING, fault=FAULTS)
    def break_disk(self, operation: str, fault: Fault) -> None:
        """That operation fails once, whenever it comes."""

        def decide(name: str) -> Fault:
            if name != operation:
                return Fault.NONE
            self.house.disk.fault = lambda operation: Fault.NONE
            return fault

        self.house.disk.fault = decide

    @invariant()
    def rules_hold(self) -> None:
        assert self.house.disk.state.term >= self.disk_term, "5"
        self.disk_term = self.house.disk.state.term
        if self.alive:
            self.house.acceptor.validate()
            assert self.house.acceptor.commit_lsn <= self.house.acceptor.flush_lsn, "6"


TestAcceptor = AcceptorMachine.TestCase
# a third of the profile's examples: each is long
TestAcceptor.settings = settings(
    max_examples=(settings.default or settings()).max_examples // 3, stateful_step_count=35
)
