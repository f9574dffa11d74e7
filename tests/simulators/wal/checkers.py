"""Invariants of every acceptor, and of a whole run, each checked at the events that may break it.

Source: the specification's checkable properties (1 to 4 of its TLA+ models, 5 to 14 of its code). A
violation begins with the property's number and name.

Over the whole history of a run (`WalTruth`):
 1. *election*: a term is elected at most once.
 3. *committed*: two committed records at one place are the same. A commit that a leader reports was
    on the disks of a quorum, in its own term, and reaches beyond that term's begin; a new leader
    has all records that were committed before its election; a leader's commit never falls.
 4. *membership*: one generation, one configuration.
12. *history*: a term in two histories begins at the same place.
14. *agreement*: any two acceptors hold equal bytes up to the lower of their own commits.

Of each acceptor (`AcceptorTruth`):
 2. *terms*: the terms of its history rise with LSN.
 5. *votes*: its persisted term never falls; one vote a term, on disk before the answer.
 6. *commit*: the commit in memory never falls in one life, and is never beyond the flush LSN.
 7. *flush*: the flush LSN falls only in a truncation by an elected leader, never below its own
    commit.
 8. *durable*: data that it reported as flushed is there after a crash.
 9. *bytes*: the log is the accepted appends, one behind the other; no gaps, no overwriting.
10. *append*: none is accepted of another term or generation, or of a leader that was not announced.
11. *horizon*: never falls; no leader sends one beyond its commit.
13. *truncation*: interrupted anywhere, it shows no byte behind the cut, or the old log; nothing is
    written before the next one.

**Not** checked, as it does not hold: that committed data is never truncated. An acceptor that does
not know of the commit may truncate the data, for a deposed leader that does not know that it is
deposed (`WalTruth.committed_cut` counts it; the tests show how).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from actors.wal.acceptor import AcceptorCore, AppendUnflushed
from actors.wal.acceptor_stores import ControlState, WalStore
from actors.wal.history import check_history
from actors.wal.lsn import ALIGNMENT
from actors.wal.messages import (
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    MembershipConfig,
    ProposerElected,
    TermEntry,
    VoteResponse,
)
from tests.simulators.service.history import CheckerViolation

if TYPE_CHECKING:
    from tests.simulators.wal.acceptors import AcceptorDisk


def require(right: bool, rule: str, *operands: object) -> None:
    """Raise `CheckerViolation` unless `right`."""
    if not right:
        raise CheckerViolation(f"{rule}: {', '.join(map(str, operands))}")


class WalTruth:
    """The facts of a whole run, against which its events are checked."""

    def __init__(self, start_lsn: int) -> None:
        self.start_lsn = start_lsn
        """Begin of the log."""
        self.committed = bytearray()
        """Committed bytes from `start_lsn` on, as the first node that reported each had it."""
        self.commit_lsn = start_lsn
        """Highest commit that any leader reported."""
        self.committed_cut = 0
        """Number of truncations of committed data at some acceptor (which is no violation)."""
        self.durable: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Term → acceptor → its flush LSN in that term, with that leader's log."""
        self.votes: dict[tuple[int, int], bytes] = {}
        """(acceptor, term) → the log with which it voted."""
        self._elected: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        """Term → begin of its leader's own records."""
        self._commits: dict[int, int] = {}
        """Term → highest commit that its leader reported."""
        self._begins: dict[int, int] = {}
        self._memberships: dict[int, MembershipConfig] = {}

    def elected(self, life: int, term: int, start_lsn: int, log: bytes) -> None:
        """Check that life `life` of a proposer may lead `term`; `log` is all before its begin. It
        must have the records committed in lower terms."""
        known = self._elected.setdefault(term, life)
        require(known == life, "1 election: two of a term", term, known, life)
        self._starts[term] = start_lsn
        # A leader may lack commits of higher terms: no acceptor will take its log.
        commits = (lsn for lower, lsn in self._commits.items() if lower < term)
        commit_lsn = max(commits, default=self.start_lsn)
        require(
            start_lsn >= commit_lsn,
            "3 committed: a leader without it",
            term,
            start_lsn,
            commit_lsn,
        )
        self.same(log, 0, commit_lsn - self.start_lsn, "3 committed: a leader has other")

    def led(self, term: int, history: tuple[TermEntry, ...]) -> None:
        """Check a history with which a proposer leads, or which an acceptor persists."""
        for entry in history:
            begin = self._begins.setdefault(entry.term, entry.lsn)
            require(begin == entry.lsn, "12 history: a term begins twice", entry, begin, term)

    def commit(
        self, term: int, start_lsn: int, commit_lsn: int, log: bytearray, quorum: int
    ) -> None:
        """Check a commit that the leader of `term` reports, its log being `log`."""
        require(commit_lsn >= start_lsn, "3 committed: below the term's begin", term, commit_lsn)
        durable = self.durable[term].values()
        having = sum(lsn >= commit_lsn for lsn in durable)
        require(
            having >= quorum,
            "3 committed: not on the disks of a quorum",
            term,
            commit_lsn,
            sorted(durable),
        )
        end = commit_lsn - self.start_lsn
        require(end <= len(log), "3 committed: more than was appended", end, len(log))
        self.hold_committed(log, 0, end, "3 committed: two differ")
        for higher, begin in self._starts.items():
            require(
                higher <= term or begin >= commit_lsn,
                "3 committed: a leader of a higher term lacks it",
                higher,
                begin,
                term,
                commit_lsn,
            )
        self._commits[term] = max(self._commits.get(term, commit_lsn), commit_lsn)
        self.commit_lsn = max(self.commit_lsn, commit_lsn)

    def hold_committed(self, log: bytes | bytearray, begin: int, end: int, rule: str) -> None:
        """Check that `log[begin:end]` (offsets), which is committed, equals the known bytes; add
        new ones."""
        both = min(end, len(self.committed))
        self.same(log, begin, both, rule)
        if end > both:
            require(len(log) >= end, rule, "it is not there", end, len(log))
            self.committed += log[both:end]

    def same(self, log: bytes | bytearray, begin: int, end: int, rule: str) -> None:
        """Check that `log[begin:end]` equals the committed bytes there."""
        if begin < end:
            ours, theirs = bytes(log[begin:end]), bytes(self.committed[begin:end])
            if ours != theirs:
                at = next(
                    (n for n in range(len(theirs)) if ours[n : n + 1] != theirs[n : n + 1]), 0
                )
                raise CheckerViolation(f"{rule}: at {self.start_lsn + begin + at}")

    def member(self, membership: MembershipConfig) -> None:
        """Check a configuration that a node has."""
        known = self._memberships.setdefault(membership.generation, membership)
        require(known == membership, "4 membership: a generation with two", known, membership)


class AcceptorBefore:
    """The state of an acceptor before a message."""

    __slots__ = ("commit_lsn", "flush_lsn", "generation", "term", "write_lsn")

    def __init__(self, acceptor: AcceptorCore, wal: WalStore) -> None:
        self.term = acceptor.term
        self.generation = acceptor.state.membership.generation
        self.flush_lsn = acceptor.flush_lsn
        self.commit_lsn = acceptor.commit_lsn
        self.write_lsn = wal.write_lsn


NOTHING: Final = 0


class AcceptorTruth:
    """Checks one acceptor, over all its lives."""

    def __init__(self, number: int, truth: WalTruth, disk: AcceptorDisk) -> None:
        self._number = number
        self._truth = truth
        self._disk = disk
        self.log = bytearray()
        """Bytes that it accepted, from the truth's begin on, less truncated ones."""
        self._told_flush = NOTHING
        self._voted: set[int] = set()
        self._term = 0
        self._control: ControlState | None = None
        self._horizon = 0
        self._commit = 0
        self._compared = 0
        """Offset up to which its log was compared with the committed bytes."""
        self._announced = 0
        """Term whose leader was announced to this life."""
        self._cutting = NOTHING
        self._writing = b""
        self._writable = False

    # -- the disk --

    def persisted(self, old: ControlState, new: ControlState) -> None:
        """Check a new control file on disk."""
        self._control = new
        who = self._number
        require(new.term >= self._term, "5 votes: a term falls", who, self._term, new.term)
        require(new.commit_lsn >= old.commit_lsn, "6 commit: the persisted one falls", who)
        require(new.peer_horizon_lsn >= old.peer_horizon_lsn, "11 horizon: it falls on disk", who)
        self._term = new.term
        if new.history is not old.history:
            terms = [entry.term for entry in new.history]
            rising = all(a < b for a, b in pairwise(terms))
            lsns = [entry.lsn for entry in new.history]
            require(rising and lsns == sorted(lsns), "2 terms: they do not rise", who, new.history)
            require(not terms or terms[-1] <= new.term, "2 terms: beyond its own", who, new.history)
            self._truth.led(new.term, new.history)
            check_history(new.history)
        if new.membership != old.membership:
            require(
                new.membership.generation > old.membership.generation,
                "4 membership: a generation falls",
                who,
            )
            self._truth.member(new.membership)

    def initialized(self, start_lsn: int) -> None:
        """Check the begin of an empty log."""
        require(
            start_lsn == self._truth.start_lsn,
            "9 bytes: a log begins elsewhere",
            self._number,
            start_lsn,
        )
        self.log.clear()

    def writing(self, wal: bytes) -> None:
        """Note a write before it happens: part of it may be there after a crash."""
        self._writing = wal

    def wrote(self, begin_lsn: int, wal: bytes, handling: Any) -> None:
        """Check bytes that were accepted."""
        request = handling.request if isinstance(handling, AppendUnflushed) else handling
        require(isinstance(request, AppendRequest), "10 append: without a request", self._number)
        require(
            request.term == self._term == self._announced,
            "10 append: of another term",
            self._number,
            request.term,
            self._term,
            self._announced,
        )
        generation = self._control.membership.generation if self._control else 0
        require(request.generation == generation, "10 append: of another generation", generation)
        require(self._writable, "13 truncation: written before it", self._number)
        end = self._truth.start_lsn + len(self.log)
        require(begin_lsn == end, "9 bytes: a gap, or overwritten", self._number, begin_lsn, end)
        require(wal == request.wal, "9 bytes: others than those of the request", self._number)
        self.log += wal
        self._writing = b""

    def truncating(self, end_lsn: int, handling: Any) -> None:
        """Check a truncation before it happens."""
        require(isinstance(handling, ProposerElected), "7 flush: cut by nobody", self._number)
        require(
            end_lsn >= self._commit,
            "7 flush: cut below its commit",
            self._number,
            end_lsn,
            self._commit,
        )
        self._cutting = end_lsn

    def truncated(self, end_lsn: int, flushed_lsn: int) -> None:
        """Note a truncation. Bytes behind `flushed_lsn` (a partial record, or unflushed) were never
        acknowledged."""
        if end_lsn < min(self._truth.commit_lsn, flushed_lsn):
            offset, end = end_lsn - self._truth.start_lsn, len(self._truth.committed)
            if self.log[offset:end] == self._truth.committed[offset : len(self.log)]:
                self._truth.committed_cut += 1
        self._cut(end_lsn)
        self._writable = True

    def _padded(self, end_lsn: int) -> bytearray:
        """Return the log up to `end_lsn`, with the padding of its last record. A record is whole
        without the zeros behind it, but positions are those after the padding, which may not be
        written yet."""
        end = end_lsn - self._truth.start_lsn
        log = self.log[: max(0, end)]
        missing = end - len(log)
        return log + bytes(missing) if 0 < missing < ALIGNMENT else log

    def _cut(self, end_lsn: int) -> None:
        self.log = self._padded(end_lsn)
        self._compared = min(self._compared, len(self.log))
        self._told_flush = min(self._told_flush, end_lsn)
        self._cutting = NOTHING

    # -- lives --

    def opened(self, acceptor: AcceptorCore, wal: WalStore) -> None:
        """Check the state on disk at the begin of a life."""
        who, start = self._number, self._truth.start_lsn
        self._control = acceptor.state
        flush_lsn, end_lsn = acceptor.flush_lsn, wal.write_lsn
        require(acceptor.term >= self._term, "5 votes: a term fell in a crash", who)
        if self._cutting and flush_lsn <= self._cutting:
            self._cut(self._cutting)
        if self._cutting:
            self._writing = b""
            require(
                end_lsn == start + len(self.log) or flush_lsn >= self._told_flush,
                "13 truncation: neither the old log nor the cut one",
                who,
                end_lsn,
                self._cutting,
            )
        require(
            flush_lsn >= self._told_flush,
            "8 durable: what was told to be flushed is gone",
            who,
            flush_lsn,
            self._told_flush,
        )
        if end_lsn:
            found = self._disk.read(start, end_lsn)
            self.log += self._writing
            self.log = self._padded(end_lsn)
            require(
                found == self.log,
                "9 bytes: not what was accepted is there after a crash",
                who,
                len(found),
                len(self.log),
            )
        self._compared = 0
        self._cutting = NOTHING
        self._writing = b""
        self._announced = 0
        self._writable = False
        self._commit = acceptor.commit_lsn
        self._horizon = acceptor.state.peer_horizon_lsn
        self._agree(acceptor)

    def stepped(
        self,
        acceptor: AcceptorCore,
        wal: WalStore,
        message: Any,
        before: AcceptorBefore,
        answer: Any,
    ) -> None:
        """Check the acceptor's state after a message or a call."""
        who, flush_lsn = self._number, acceptor.flush_lsn
        elected = isinstance(message, ProposerElected)
        if elected and acceptor.term == message.term and acceptor.term_start_lsn:
            self._announced = message.term
        if flush_lsn < before.flush_lsn:
            require(elected, "7 flush: it fell", who, before.flush_lsn, flush_lsn)
            require(flush_lsn >= before.commit_lsn, "7 flush: it fell below the commit", who)
        commit_lsn = acceptor.commit_lsn
        require(commit_lsn >= self._commit, "6 commit: it falls", who, self._commit, commit_lsn)
        require(commit_lsn <= flush_lsn, "6 commit: beyond what is flushed", who, commit_lsn)
        self._commit = commit_lsn
        horizon = acceptor.state.peer_horizon_lsn
        require(horizon >= self._horizon, "11 horizon: it falls", who, self._horizon, horizon)
        self._horizon = horizon
        request = message.request if isinstance(message, AppendUnflushed) else message
        if isinstance(request, AppendRequest):
            self._appended(request, wal, before, answer)
        if acceptor.term == self._announced:
            self._truth.durable[self._announced][who] = flush_lsn
        if commit_lsn != before.commit_lsn:
            self._agree(acceptor)

    def _appended(
        self, request: AppendRequest, wal: WalStore, before: AcceptorBefore, answer: Any
    ) -> None:
        right = request.term == before.term and request.generation == before.generation
        if right and request.term == self._announced:
            return
        require(
            wal.write_lsn == before.write_lsn,
            "10 append: of another term or generation",
            self._number,
            request.term,
            before.term,
        )
        if isinstance(answer, AppendResponse):
            require(
                answer.flush_lsn == answer.commit_lsn == 0,
                "10 append: answered in another term",
                self._number,
                request.term,
                answer.term,
            )

    def answered(self, answer: Any) -> None:
        """Check an answer to a proposer."""
        who = self._number
        if isinstance(answer, AcceptorGreeting):
            self._truth.member(answer.membership)
        durable = self._control.term if self._control is not None else 0
        require(answer.term <= durable, "5 votes: told before it is on disk", who, answer.term)
        if isinstance(answer, VoteResponse):
            if answer.vote_given:
                require(answer.term not in self._voted, "5 votes: two in a term", who, answer.term)
                self._voted.add(answer.term)
            self._truth.votes[who, answer.term] = bytes(self._padded(answer.flush_lsn))
        told = isinstance(answer, VoteResponse | AppendResponse)
        if told and answer.flush_lsn > self._truth.start_lsn:  # else: an empty log
            self._told_flush = max(self._told_flush, answer.flush_lsn)

    # -- the log --

    def _agree(self, acceptor: AcceptorCore) -> None:
        """Check its log, up to its commit, against the committed bytes."""
        end = acceptor.commit_lsn - self._truth.start_lsn
        if end <= 0:
            return
        self._truth.hold_committed(
            self._padded(acceptor.commit_lsn),
            self._compared,
            end,
            "14 agreement: acceptors differ below their commits",
        )
        self._compared = end

    def ended(self, acceptor: AcceptorCore, wal: WalStore) -> None:
        """Check the whole log once more at the end of the run."""
        if not wal.write_lsn:
            return
        found = self._disk.read(self._truth.start_lsn, wal.write_lsn)
        require(found == self.log, "9 bytes: not what was accepted is stored", self._number)
        self._compared = 0
        self._agree(acceptor)
