"""The first half of a proposer: greetings, the campaign and the votes, up to the election. Pure.

`proposer` has the rules, and the second half.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence

from actors.runtime.errors import InvalidUsage
from actors.wal import quorum
from actors.wal.history import last_log_term
from actors.wal.messages import (
    WAL_BYTES_MAX,
    AcceptorGreeting,
    AppendRequest,
    ProposerElected,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from actors.wal.proposer_effects import (
    AcceptorSession,
    DropConnection,
    Effect,
    FetchLog,
    LeadTerm,
    ProposerConfig,
    ProposerPhase,
    SendMessage,
    StopProposer,
    SyncFinished,
)


class LogTail:
    """Holds [begin_lsn, end_lsn) of a log: the newest part, which may still have to be sent.

    Invariants: the pieces are adjacent, ``begin_lsn == pieces[0].begin`` and ``end_lsn - begin_lsn
    == retained_bytes == sum of the pieces``; no piece is empty or longer than `piece_bytes_max`.
    """

    def __init__(self, begin_lsn: int, piece_bytes_max: int = WAL_BYTES_MAX) -> None:
        self.end_lsn = begin_lsn
        self._piece_bytes_max = piece_bytes_max
        self._begins: list[int] = []
        self._pieces: list[bytes] = []
        self._dropped = 0
        """Number of dropped pieces at the front of both lists."""

    @property
    def begin_lsn(self) -> int:
        return self._begins[self._dropped] if self._dropped < len(self._begins) else self.end_lsn

    def append(self, wal: bytes) -> None:
        """Append bytes at `end_lsn`."""
        for at in range(0, len(wal), self._piece_bytes_max):
            piece = wal[at : at + self._piece_bytes_max]
            self._begins.append(self.end_lsn)
            self._pieces.append(piece)
            self.end_lsn += len(piece)

    def read(self, begin_lsn: int, bytes_max: int) -> bytes:
        """Return 1 to `bytes_max` bytes from `begin_lsn` on, which must be inside."""
        assert self.begin_lsn <= begin_lsn < self.end_lsn, (self.begin_lsn, begin_lsn, self.end_lsn)
        index = bisect.bisect_right(self._begins, begin_lsn, self._dropped) - 1
        skipped = begin_lsn - self._begins[index]
        first = self._pieces[index][skipped : skipped + bytes_max]
        if len(first) == bytes_max or index + 1 == len(self._pieces):
            return first
        found = [first]
        room = bytes_max - len(first)
        while room and (index := index + 1) < len(self._pieces):
            found.append(self._pieces[index][:room])
            room -= len(found[-1])
        return b"".join(found)

    def trim(self, needed_lsn: int) -> None:
        """Drop pieces that lie wholly before `needed_lsn`."""
        # Pieces are dropped whole, so that those being sent are shared and never copied.
        dropped = self._dropped
        while (
            dropped < len(self._begins)
            and self._begins[dropped] + len(self._pieces[dropped]) <= needed_lsn
        ):
            self._pieces[dropped] = b""
            dropped += 1
        self._dropped = dropped
        # Seldom, since it moves all that follow.
        if dropped > 64 and dropped * 2 > len(self._begins):
            del self._begins[:dropped], self._pieces[:dropped]
            self._dropped = 0

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant does not hold."""
        at = self.begin_lsn
        for begin, piece in zip(
            self._begins[self._dropped :], self._pieces[self._dropped :], strict=True
        ):
            assert begin == at, (begin, at)
            assert 0 < len(piece) <= self._piece_bytes_max, (begin, len(piece))
            at += len(piece)
        assert at == self.end_lsn, (at, self.end_lsn)


class CandidatePeer:
    """State of one acceptor, as the proposer knows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.node_id: int | None = None
        self.session = AcceptorSession.OFFLINE
        self.term = 0
        """Term in its last greeting."""
        self.vote: VoteResponse | None = None
        self.streaming_at = 0
        self.acked_lsn = 0
        """End of our log that it is known to hold; bounds the window."""
        self.flush_lsn = 0
        """Flushed LSN in its last reply to an append of this term; counts also while it is
        offline."""
        self.commit_lsn = 0
        self.told_commit_lsn = 0
        self.heard_ms = 0
        self.sent_ms = 0
        self.fetching: FetchLog | None = None
        self.waits_for_tick = False
        self.failed_sources: set[int] = set()

    def reset(self, session: AcceptorSession, now_ms: int) -> None:
        """Reset the state of the connection, which began or ended."""
        self.session = session
        self.heard_ms = self.sent_ms = now_ms
        self.vote = None
        self.commit_lsn = 0
        self.fetching = None
        self.waits_for_tick = False
        self.failed_sources.clear()


class ProposerCandidate(ABC):
    """A proposer until it is elected."""

    def __init__(self, config: ProposerConfig, acceptors: Sequence[int]) -> None:
        """Create a proposer for `acceptors`, the caller's numbers (addresses); their node ids are
        learnt from greetings. Raises `InvalidUsage`."""
        if not acceptors or len(set(acceptors)) != len(acceptors):
            raise InvalidUsage(f"acceptors {list(acceptors)}: one at least, and none twice")
        if config.start_lsn <= 0:
            raise InvalidUsage(f"start_lsn {config.start_lsn}: a log begins behind 0")
        if not 0 < config.piece_bytes_max <= WAL_BYTES_MAX:
            raise InvalidUsage(
                f"piece_bytes_max {config.piece_bytes_max}: above 0, at most {WAL_BYTES_MAX}"
            )
        if config.pending_bytes_max < config.piece_bytes_max or config.retained_bytes_max < 0:
            raise InvalidUsage(
                f"pending_bytes_max {config.pending_bytes_max}, retained_bytes_max"
                f" {config.retained_bytes_max}: at least {config.piece_bytes_max} and 0"
            )
        self.config = config
        self.membership = config.membership
        self.phase = ProposerPhase.COLLECTING
        self.term = 0
        """Chosen once, with the campaign; 0 before."""
        self.start_lsn = 0
        """LSN at which the term begins; 0 before the election, and if sync mode finds no log."""
        self.commit_lsn = 0
        self.truncate_lsn = 0
        """LSN up to which all acceptors have flushed."""
        self.history: tuple[TermEntry, ...] = ()
        """History of the log, with this term's entry once elected."""
        self.donor = acceptors[0]
        self.failure = ""
        """Reason why the proposer stopped; empty before."""
        self._peers = {number: CandidatePeer(number) for number in acceptors}
        self._tail = LogTail(0, config.piece_bytes_max)
        self._now_ms = 0
        self._donor_seen_ms = 0
        self._effects: list[Effect] = []
        self._set_voters()

    def _set_voters(self) -> None:
        named = quorum.voters_of(self.membership)
        self._voters = named or (frozenset(self._peers),)

    def _greeted(self, peer: CandidatePeer, greeting: AcceptorGreeting) -> None:
        if not self._knows(peer, greeting.node_id):
            return
        theirs = greeting.membership.generation
        if theirs > self.membership.generation and not self._adopts(peer, greeting):
            return
        if theirs < self.membership.generation:
            self._drop(peer, f"generation {theirs}, and ours is {self.membership.generation}")
            return
        peer.term = greeting.term
        peer.session = AcceptorSession.GREETED
        if self.phase is ProposerPhase.COLLECTING:
            greeted = [
                each for each in self._peers.values() if each.session is AcceptorSession.GREETED
            ]
            if not quorum.has_quorum(self._voters, {self._voter(each) for each in greeted}):
                return
            self.term = max(each.term for each in greeted) + 1
            self.phase = ProposerPhase.CAMPAIGN
            for each in greeted:
                self._ask(each)
        elif greeting.term > self.term:
            self._fail(f"acceptor {peer.number} is in term {greeting.term}, after {self.term}")
        else:
            self._ask(peer)

    def _knows(self, peer: CandidatePeer, node_id: int) -> bool:
        """Return whether the node id fits the earlier greetings; otherwise the proposer fails."""
        # A node that is reached over two addresses would vote twice.
        for other in self._peers.values():
            if other is not peer and other.node_id == node_id:
                self._fail(
                    f"acceptors {other.number} and {peer.number} are both node {node_id}:"
                    " give every acceptor once, and node ids that differ"
                )
                return False
        if peer.node_id not in (None, node_id):
            self._fail(f"acceptor {peer.number} was node {peer.node_id} and is node {node_id} now")
            return False
        peer.node_id = node_id
        return True

    def _adopts(self, peer: CandidatePeer, greeting: AcceptorGreeting) -> bool:
        """Adopt a newer configuration, and return whether that was possible."""
        membership = greeting.membership
        # Votes are of one configuration, so it is fixed when the campaign begins.
        if self.phase is not ProposerPhase.COLLECTING:
            self._fail(
                f"acceptor {peer.number} has generation {membership.generation}, and the campaign"
                f" began with {self.membership.generation}"
            )
            return False
        self.membership = membership
        self._set_voters()
        # The others were greeted with the older configuration: they must be greeted again.
        for other in self._peers.values():
            if other is not peer and other.session is not AcceptorSession.OFFLINE:
                self._drop(other, f"greeted before generation {membership.generation} was known")
        return True

    def _voter(self, peer: CandidatePeer) -> int:
        """Return the acceptor's id in the sets of voters; -1: none yet."""
        # Without a configuration the voters are the given acceptors, by their numbers.
        if not self.membership.generation:
            return peer.number
        return -1 if peer.node_id is None else peer.node_id

    def _ask(self, peer: CandidatePeer) -> None:
        """Ask an acceptor for its vote; one that is no member stays greeted, and is sent nothing
        more."""
        if any(self._voter(peer) in voters for voters in self._voters):
            peer.session = AcceptorSession.VOTING
            self._send(peer, VoteRequest(self.membership.generation, self.term, self._id))

    @property
    def _id(self) -> bytes:
        return self.config.proposer_id

    def _voted(self, peer: CandidatePeer, vote: VoteResponse) -> None:
        name = f"acceptor {peer.number}"
        if vote.generation != self.membership.generation:
            self._fail(f"{name} voted in generation {vote.generation}, not"
                       f" {self.membership.generation}")  # fmt: skip
        # After the election a refusal in this very term is harmless: the acceptor was in the term
        # already when it reconnected.
        elif vote.term > self.term or (
            not vote.vote_given and self.phase is ProposerPhase.CAMPAIGN
        ):
            self._fail(f"{name} refused its vote for term {self.term}: it is in {vote.term}")
        elif vote.term < self.term:
            self._drop(peer, f"a vote of term {vote.term}, asked for in {self.term}")
        else:
            peer.vote = vote
            peer.session = AcceptorSession.VOTED
            if self.phase is ProposerPhase.CAMPAIGN:
                self._count_votes()
            else:
                self._announce(peer)

    def _count_votes(self) -> None:
        votes = {
            each.number: each.vote
            for each in self._peers.values()
            if each.session is AcceptorSession.VOTED and each.vote is not None
        }
        if not quorum.has_quorum(self._voters, {self._voter(self._peers[i]) for i in votes}):
            return

        def rank(number: int) -> tuple[int, int]:
            vote = votes[number]
            return last_log_term(vote.history, vote.flush_lsn), vote.flush_lsn

        # The most advanced log of a quorum holds all that was committed.
        self.donor = max(votes, key=rank)
        donor = votes[self.donor]
        self.phase = ProposerPhase.ELECTED
        self._donor_seen_ms = self._now_ms
        if not donor.flush_lsn and self.config.is_sync:
            self._synced()
            return
        self.start_lsn = donor.flush_lsn or self.config.start_lsn
        kept = tuple(entry for entry in donor.history if entry.lsn <= donor.flush_lsn)
        self.history = (*kept, TermEntry(self.term, self.start_lsn))
        self._tail = LogTail(self.start_lsn, self.config.piece_bytes_max)
        truncate_lsn = max(vote.truncate_lsn for vote in votes.values())
        self._effects.append(LeadTerm(self.term, self.start_lsn, self.donor))
        # Every acceptor has flushed up to `truncate_lsn`: they agree already.
        if self.config.is_sync and truncate_lsn == self.start_lsn:
            self._synced()
            return
        for number in votes:
            self._announce(self._peers[number])

    def _votes(self, peer: CandidatePeer) -> bool:
        return any(self._voter(peer) in voters for voters in self._voters)

    def _synced(self) -> None:
        self.phase = ProposerPhase.SYNCED
        self._effects.append(SyncFinished(self.start_lsn))

    def _fail(self, reason: str) -> None:
        self.phase = ProposerPhase.FAILED
        self.failure = reason
        self._effects.append(StopProposer(reason))

    def _is_over(self) -> bool:
        return self.phase in (ProposerPhase.FAILED, ProposerPhase.SYNCED)

    def _drop(self, peer: CandidatePeer, reason: str) -> None:
        peer.reset(AcceptorSession.OFFLINE, self._now_ms)
        self._effects.append(DropConnection(peer.number, reason))
        self._check_synced()

    def _send(
        self, peer: CandidatePeer, message: VoteRequest | ProposerElected | AppendRequest
    ) -> None:
        peer.sent_ms = self._now_ms
        self._effects.append(SendMessage(peer.number, message))

    def _done(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @abstractmethod
    def _announce(self, peer: CandidatePeer) -> None:
        """Announce the election to an acceptor that has voted."""

    @abstractmethod
    def _check_synced(self) -> None:
        """End sync mode, if the acceptors that are still connected agree."""
