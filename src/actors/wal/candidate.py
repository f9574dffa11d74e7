"""The first half of a proposer: greetings, the campaign and the votes, up to the election. Pure.

`proposer` describes the rules, and contains the second half.
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
    == retained_bytes == sum of the pieces``. No piece is empty or longer than `piece_bytes_max`.
    """

    def __init__(self, begin_lsn: int, piece_bytes_max: int = WAL_BYTES_MAX) -> None:
        self.end_lsn = begin_lsn
        """LSN after the last appended byte."""
        self._piece_bytes_max = piece_bytes_max
        self._begins: list[int] = []
        """LSN at which each piece starts."""
        self._pieces: list[bytes] = []
        """The pieces; dropped ones are empty."""
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
        """Return 1 to `bytes_max` bytes from `begin_lsn` on, which must be in the tail."""
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
        """Drop pieces that end at or before `needed_lsn`."""
        # Drop only complete pieces, so that those being sent are shared and never copied.
        dropped = self._dropped
        while (
            dropped < len(self._begins)
            and self._begins[dropped] + len(self._pieces[dropped]) <= needed_lsn
        ):
            self._pieces[dropped] = b""
            dropped += 1
        self._dropped = dropped
        # Do this rarely, because it moves all pieces that follow.
        if dropped > 64 and dropped * 2 > len(self._begins):
            del self._begins[:dropped], self._pieces[:dropped]
            self._dropped = 0

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is violated."""
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
        """Node id from its first greeting."""
        self.session = AcceptorSession.OFFLINE
        """Stage of the connection to it."""
        self.term = 0
        """Term in its last greeting."""
        self.vote: VoteResponse | None = None
        """Its vote in this campaign, on the current connection."""
        self.streaming_at = 0
        """LSN of the next byte to send to it."""
        self.acked_lsn = 0
        """End of the part of our log that this peer is known to have; bounds the window."""
        self.flush_lsn = 0
        """Flushed LSN in its last reply to an append of this term. It also counts while the
        acceptor is offline."""
        self.commit_lsn = 0
        """Commit LSN in its last reply on the current connection."""
        self.told_commit_lsn = 0
        """Commit LSN last sent to it."""
        self.heard_ms = 0
        """Time of its last message, in ms."""
        self.sent_ms = 0
        """Time of the last message to it, in ms."""
        self.fetching: FetchLog | None = None
        """Log that is being fetched from the donor for it."""
        self.waits_for_tick = False
        """True until the next tick, after a fetch failed."""
        self.failed_sources: set[int] = set()
        """Acceptors from which its log could not be fetched, on the current connection."""

    def reset(self, session: AcceptorSession, now_ms: int) -> None:
        """Reset the state of the connection, which was opened or closed."""
        self.session = session
        self.heard_ms = self.sent_ms = now_ms
        self.vote = None
        self.commit_lsn = 0
        self.fetching = None
        self.waits_for_tick = False
        self.failed_sources.clear()


class ProposerCandidate(ABC):
    """A proposer up to its election."""

    def __init__(self, config: ProposerConfig, acceptors: Sequence[int]) -> None:
        """Create a proposer for `acceptors`, which are the caller's numbers (addresses).

        Their node ids are learned from greetings. Raise `InvalidUsage`.
        """
        if not acceptors or len(set(acceptors)) != len(acceptors):
            raise InvalidUsage(
                f"acceptors must be a non-empty list without duplicates: got {list(acceptors)}"
            )
        if config.start_lsn <= 0:
            raise InvalidUsage(f"invalid start_lsn {config.start_lsn}: must be positive")
        if not 0 < config.piece_bytes_max <= WAL_BYTES_MAX:
            raise InvalidUsage(
                f"invalid piece_bytes_max {config.piece_bytes_max}: expected 1 to {WAL_BYTES_MAX}"
            )
        if config.pending_bytes_max < config.piece_bytes_max or config.retained_bytes_max < 0:
            raise InvalidUsage(
                f"invalid pending_bytes_max {config.pending_bytes_max} or retained_bytes_max"
                f" {config.retained_bytes_max}: must be at least {config.piece_bytes_max} and 0"
            )
        self.config = config
        self.membership = config.membership
        """Current membership configuration; a newer one is adopted before the campaign."""
        self.phase = ProposerPhase.COLLECTING
        """Stage of the proposer."""
        self.term = 0
        """Chosen once, for the campaign; 0 before."""
        self.start_lsn = 0
        """LSN at which the term starts; 0 before the election, and if sync mode finds no log."""
        self.commit_lsn = 0
        """LSN before which a quorum has flushed the log."""
        self.truncate_lsn = 0
        """LSN up to which all acceptors have flushed."""
        self.history: tuple[TermEntry, ...] = ()
        """History of the log, including this term's entry once elected."""
        self.donor = acceptors[0]
        """Voter with the furthest log; other acceptors get from it what they lack."""
        self.failure = ""
        """Reason why the proposer stopped, or ""."""
        self._peers = {number: CandidatePeer(number) for number in acceptors}
        """The acceptors, by number."""
        self._tail = LogTail(0, config.piece_bytes_max)
        """The part of the log that may still have to be sent."""
        self._now_ms = 0
        """Time of the current event, in ms."""
        self._donor_seen_ms = 0
        """Time at which the donor was last connected, in ms."""
        self._effects: list[Effect] = []
        """Effects of the current event."""
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
            self._drop(
                peer, f"it is in generation {theirs}, but ours is {self.membership.generation}"
            )
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
        """Return whether the node id fits the earlier greetings. Otherwise the proposer fails."""
        # A node reached over two addresses would vote twice.
        for other in self._peers.values():
            if other is not peer and other.node_id == node_id:
                self._fail(
                    f"acceptors {other.number} and {peer.number} are both node {node_id}:"
                    " list every acceptor once, and give them different node ids"
                )
                return False
        if peer.node_id not in (None, node_id):
            self._fail(f"acceptor {peer.number} was node {peer.node_id} and is now node {node_id}")
            return False
        peer.node_id = node_id
        return True

    def _adopts(self, peer: CandidatePeer, greeting: AcceptorGreeting) -> bool:
        """Adopt a newer configuration, and return whether that was possible."""
        membership = greeting.membership
        # All votes must belong to one configuration, so it is fixed when the campaign starts.
        if self.phase is not ProposerPhase.COLLECTING:
            self._fail(
                f"acceptor {peer.number} has generation {membership.generation}, but the campaign"
                f" started with {self.membership.generation}"
            )
            return False
        self.membership = membership
        self._set_voters()
        # The others were greeted with the older configuration and must be greeted again.
        for other in self._peers.values():
            if other is not peer and other.session is not AcceptorSession.OFFLINE:
                self._drop(other, f"greeted before generation {membership.generation} was known")
        return True

    def _voter(self, peer: CandidatePeer) -> int:
        """Return the acceptor's id in the sets of voters; -1 if it has none yet."""
        # Without a configuration the given acceptors are the voters, by their numbers.
        if not self.membership.generation:
            return peer.number
        return -1 if peer.node_id is None else peer.node_id

    def _ask(self, peer: CandidatePeer) -> None:
        """Ask an acceptor for its vote. One that is not a member stays greeted and is sent nothing
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
        # After the election a refusal in this same term is harmless: the acceptor was already in
        # the term when it reconnected.
        elif vote.term > self.term or (
            not vote.vote_given and self.phase is ProposerPhase.CAMPAIGN
        ):
            self._fail(f"{name} refused to vote for term {self.term}: it is in term {vote.term}")
        elif vote.term < self.term:
            self._drop(peer, f"its vote is of term {vote.term}, but was requested for {self.term}")
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

        # The most advanced log of a quorum contains everything that was committed.
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
        # Every acceptor has flushed up to `truncate_lsn`, so they already agree.
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
        """End sync mode if the acceptors that are still connected agree."""
