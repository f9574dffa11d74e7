"""A proposer: it campaigns among acceptors, streams a log to them, and tracks the commit LSN.

Pure: events in, effects out; no clock, no socket, no randomness.

- **Term.** Once, it takes ``max(term) + 1`` of a quorum of greetings. An acceptor that has a higher
  term, or that refuses its vote before the election, ends this proposer (`StopProposer`).
- **Election.** With a quorum of votes, the *donor* is the voter with the greatest (last log term,
  flushed LSN). The term starts at the donor's flushed LSN (`start_lsn`); the history is the donor's
  plus this term's entry.
- **Streaming.** Each acceptor gets the log from the highest common point on, in order, at most
  `pending_bytes_max` ahead of what it has flushed. Bytes that are not in memory (`tail`) are read
  from another acceptor, so a proposer has no log of its own on disk.
- **Heartbeats** are empty appends, `heartbeat_ms` after the last message. An acceptor that owes a
  reply for `silence_ms_max` is dropped and repeats the handshake.
- **Commit** is what a quorum of every set of voters has flushed (`quorum.quorum_flush_lsn`). It is
  the end of a record, because acceptors report ends of records.
- **Sync mode** appends nothing. It ends when the connected acceptors agree up to `start_lsn`.

`validate` checks the invariants. A proposer connects only to the given addresses, and does not
parse records (pieces may end anywhere).
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.runtime.errors import InvalidUsage, WalRefused
from actors.wal import quorum
from actors.wal.candidate import CandidatePeer, ProposerCandidate
from actors.wal.history import highest_common_point
from actors.wal.lsn import lsn_text
from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    ProposerElected,
    ProposerGreeting,
    VoteResponse,
)
from actors.wal.proposer_effects import (
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
)

__all__ = [
    "AcceptorSession",
    "CommitMoved",
    "DropConnection",
    "Effect",
    "FetchLog",
    "LeadTerm",
    "ProposerConfig",
    "ProposerPhase",
    "SendMessage",
    "StopProposer",
    "SyncFinished",
    "WalProposer",
]

OWES = (AcceptorSession.GREETING, AcceptorSession.VOTING, AcceptorSession.ACTIVE)
"""States in which an acceptor owes a reply."""


class WalProposer(ProposerCandidate):
    """One proposer for one term. Every event returns effects, which must be performed in order.

    The time is that of the last `tick`, in milliseconds of any steady clock.
    """

    # -- state --

    @property
    def end_lsn(self) -> int:
        """Return the LSN after the last appended byte; 0 before the election."""
        return self._tail.end_lsn

    @property
    def room(self) -> int:
        """Return how many bytes `append` accepts now."""
        if self.phase is not ProposerPhase.ELECTED or self.config.is_sync:
            return 0
        pending = self.end_lsn - max(self.commit_lsn, self.start_lsn)
        return self.config.pending_bytes_max - pending

    # -- events --

    def connected(self, acceptor: int) -> list[Effect]:
        """Greet an acceptor to which a connection was opened."""
        if self._is_over():
            return []
        peer = self._peers[acceptor]
        peer.reset(AcceptorSession.GREETING, self._now_ms)
        config = self.config
        greeting = ProposerGreeting(
            config.tenant,
            config.timeline,
            self.membership,
            config.pg_version,
            config.system_id,
            config.segment_bytes,
            config.proposer_id,
        )
        self._effects.append(SendMessage(acceptor, greeting))
        return self._done()

    def received(self, acceptor: int, message: AcceptorMessage) -> list[Effect]:
        """Handle a message of an acceptor."""
        peer = self._peers[acceptor]
        # Messages of a dropped connection may still arrive.
        if self._is_over() or peer.session is AcceptorSession.OFFLINE:
            return []
        peer.heard_ms = self._now_ms
        match message, peer.session:
            case AcceptorGreeting(), AcceptorSession.GREETING:
                self._greeted(peer, message)
            case VoteResponse(), AcceptorSession.VOTING:
                self._voted(peer, message)
            case AppendResponse(), AcceptorSession.ACTIVE:
                self._append_answered(peer, message)
            case _:
                name = type(message).__name__
                self._drop(peer, f"unexpected {name} while {peer.session.value}")
        return self._done()

    def disconnected(self, acceptor: int) -> list[Effect]:
        """Handle the end of an acceptor's connection."""
        peer = self._peers[acceptor]
        if self._is_over() or peer.session is AcceptorSession.OFFLINE:
            return []
        peer.reset(AcceptorSession.OFFLINE, self._now_ms)
        self._check_synced()
        return self._done()

    def fetched(self, acceptor: int, begin_lsn: int, wal: bytes) -> list[Effect]:
        """Handle the bytes of a `FetchLog` for `acceptor`, which may be fewer than requested."""
        peer = self._peers[acceptor]
        asked = peer.fetching
        # A fetch that was cancelled by a drop may still return.
        if self._is_over() or asked is None or asked.begin_lsn != begin_lsn:
            return []
        if not wal:
            return self.fetch_failed(acceptor, begin_lsn)
        peer.fetching = None
        peer.failed_sources.clear()
        self._append_to(peer, wal[: asked.end_lsn - begin_lsn])
        self._stream(peer)
        return self._done()

    def fetch_failed(self, acceptor: int, begin_lsn: int) -> list[Effect]:
        """Handle a failed `FetchLog` for `acceptor`. A later `tick` retries it, from another source
        if one has the bytes."""
        peer = self._peers[acceptor]
        asked = peer.fetching
        if not self._is_over() and asked is not None and asked.begin_lsn == begin_lsn:
            peer.fetching = None
            peer.waits_for_tick = True
            peer.failed_sources.add(asked.source)
        return []

    def append(self, wal: bytes) -> list[Effect]:
        """Append to the log at `end_lsn`.

        Raise `InvalidUsage` if the proposer is not elected, in sync mode, or if there is not enough
        `room`.
        """
        if len(wal) > self.room:
            raise InvalidUsage(
                f"no room for {len(wal)} bytes of log: the limit is now {self.room}"
                f" ({self.phase.value}{', sync mode' if self.config.is_sync else ''})"
            )
        self._tail.append(wal)
        for peer in self._active():
            self._stream(peer)
        return self._done()

    def tick(self, now_ms: int) -> list[Effect]:
        """Advance the time, drop silent acceptors and send heartbeats.

        Call it several times per heartbeat interval.
        """
        self._now_ms = max(self._now_ms, now_ms)
        if self._is_over():
            return []
        for peer in self._peers.values():
            # A fetch that failed may be retried now.
            peer.waits_for_tick = False
            if peer.session in OWES and self._now_ms - peer.heard_ms >= self.config.silence_ms_max:
                self._drop(peer, f"no message for {self._now_ms - peer.heard_ms} ms")
            if peer.session is AcceptorSession.ACTIVE:
                self._stream(peer)
                if self._now_ms - peer.sent_ms >= self.config.heartbeat_ms:
                    self._append_to(peer, b"")
        self._check_donor()
        return self._done()

    def _announce(self, peer: CandidatePeer) -> None:
        """Announce the election to an acceptor, and where its log continues."""
        vote = peer.vote
        assert vote is not None
        try:
            point = highest_common_point(self.history, vote.history, vote.flush_lsn)
        except WalRefused as refused:
            self._drop(peer, str(refused))
            return
        at = point.lsn if point is not None else self.history[0].lsn
        if at > self.end_lsn:
            # This happens after a switch of segments, until the rest of the segment is appended.
            self._drop(
                peer,
                f"its log extends to {lsn_text(at)}, but ours ends at {lsn_text(self.end_lsn)}",
            )
            return
        peer.streaming_at = peer.acked_lsn = at
        peer.session = AcceptorSession.ACTIVE
        peer.heard_ms = self._now_ms
        generation = self.membership.generation
        self._send(peer, ProposerElected(generation, self.term, at, self.history))
        self._append_to(peer, b"")
        self._stream(peer)

    # -- streaming --

    def _active(self) -> Iterator[CandidatePeer]:
        return (peer for peer in self._peers.values() if peer.session is AcceptorSession.ACTIVE)

    def _append_to(self, peer: CandidatePeer, wal: bytes) -> None:
        begin = peer.streaming_at
        peer.streaming_at = begin + len(wal)
        peer.told_commit_lsn = self.commit_lsn
        self._send(
            peer,
            AppendRequest(
                self.membership.generation,
                self.term,
                begin,
                peer.streaming_at,
                self.commit_lsn,
                self.truncate_lsn,
                wal,
                self._id,
            ),
        )

    def _stream(self, peer: CandidatePeer) -> None:
        """Send the bytes that an acceptor lacks, within its window. Fetch those that are not in
        memory."""
        while peer.streaming_at < self.end_lsn and peer.fetching is None:
            ahead = peer.streaming_at - peer.acked_lsn
            room = min(self.config.piece_bytes_max, self.config.pending_bytes_max - ahead)
            if room <= 0:
                return
            if peer.streaming_at < self._tail.begin_lsn:
                self._fetch(peer, peer.streaming_at + room)
                return
            self._append_to(peer, self._tail.read(peer.streaming_at, room))

    def _fetch(self, peer: CandidatePeer, end_lsn: int) -> None:
        if peer.waits_for_tick:
            return
        begin = peer.streaming_at
        held = {
            each.number: each.flush_lsn
            for each in self._active()
            if each is not peer and each.flush_lsn > begin
        }
        # The donor's log up to the start of the term is this log, even before the donor has
        # reported anything.
        if (
            begin < self.start_lsn
            and self._peers[self.donor].session is not AcceptorSession.OFFLINE
        ):
            held.setdefault(self.donor, self.start_lsn)
        untried = {each: lsn for each, lsn in held.items() if each not in peer.failed_sources}
        if not untried:
            peer.failed_sources.clear()
            # Every source has failed: retry all of them, but not before the next tick.
            peer.waits_for_tick = True
            return
        source = max(untried, key=lambda each: untried[each])
        end = min(end_lsn, untried[source], self._tail.begin_lsn)
        peer.fetching = FetchLog(peer.number, source, begin, end, self.term)
        self._effects.append(peer.fetching)

    def _append_answered(self, peer: CandidatePeer, response: AppendResponse) -> None:
        name = f"acceptor {peer.number}"
        if response.generation != self.membership.generation:
            self._fail(f"{name} answered in generation {response.generation}, not"
                       f" {self.membership.generation}")  # fmt: skip
            return
        if response.term > self.term:
            self._fail(
                f"{name} is in term {response.term}, after {self.term}: another proposer leads"
            )
            return
        if response.term < self.term:
            self._drop(peer, f"its answer is of term {response.term}, but ours is {self.term}")
            return
        # After a switch of segments an acceptor counts the rest of the segment, which was not
        # completely sent yet. An LSN in between is not the end of a record and must not be
        # committed: acceptors would look for a record there after a crash.
        peer.acked_lsn = max(peer.acked_lsn, min(response.flush_lsn, peer.streaming_at))
        if response.flush_lsn <= peer.streaming_at:
            peer.flush_lsn = max(peer.flush_lsn, response.flush_lsn)
        peer.commit_lsn = max(peer.commit_lsn, response.commit_lsn)
        self._stream(peer)
        self._update_commit()
        self._check_synced()

    def _update_commit(self) -> None:
        flushed = {self._voter(peer): peer.flush_lsn for peer in self._peers.values()}

        def of(voter: int) -> int:
            return flushed.get(voter, 0)

        commit_lsn = max(self.commit_lsn, quorum.quorum_flush_lsn(self._voters, of, self.start_lsn))
        lowest = min(of(voter) for voters in self._voters for voter in voters)
        moved = commit_lsn > self.commit_lsn
        self.commit_lsn = commit_lsn
        self.truncate_lsn = max(self.truncate_lsn, min(lowest, commit_lsn))
        kept_lsn = commit_lsn - self.config.retained_bytes_max
        self._tail.trim(max(self.truncate_lsn, kept_lsn))
        if moved:
            self._effects.append(CommitMoved(commit_lsn))
            for peer in self._active():
                # A heartbeat sends the new commit LSN immediately, without waiting for the next
                # append.
                if peer.told_commit_lsn < commit_lsn:
                    self._append_to(peer, b"")

    # -- endings --

    def _check_donor(self) -> None:
        if self._peers[self.donor].session is not AcceptorSession.OFFLINE:
            self._donor_seen_ms = self._now_ms
        gone_ms = self._now_ms - self._donor_seen_ms
        # Only the donor may have the log up to the start of the term. Without it this term cannot
        # commit anything, while the others may elect a new proposer.
        if (
            self.phase is ProposerPhase.ELECTED
            and self.commit_lsn < self.start_lsn
            and gone_ms >= self.config.donor_absent_ms_max
            and quorum.has_quorum(self._voters, {self._voter(peer) for peer in self._active()})
        ):
            self._fail(
                f"the log up to {lsn_text(self.start_lsn)} is only on acceptor {self.donor},"
                f" which has been offline for {gone_ms} ms: the others may elect another proposer"
            )

    def _check_synced(self) -> None:
        if (
            self.config.is_sync
            and self.phase is ProposerPhase.ELECTED
            and self.commit_lsn >= self.start_lsn
            and all(
                peer.commit_lsn >= self.start_lsn
                for peer in self._peers.values()
                if peer.session is not AcceptorSession.OFFLINE and self._votes(peer)
            )
        ):
            self._synced()

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is violated."""
        commit, start, config = self.commit_lsn, self.start_lsn, self.config
        self._tail.validate()
        assert self.truncate_lsn <= commit <= self.end_lsn, (self.truncate_lsn, commit)
        assert not commit or commit >= start, (commit, start)
        known = max(commit, start)
        assert self.end_lsn - known <= config.pending_bytes_max, (self.end_lsn, known)
        assert self._tail.begin_lsn <= known, (self._tail.begin_lsn, known)
        assert known - self._tail.begin_lsn <= config.retained_bytes_max + config.piece_bytes_max
        terms = [entry.term for entry in self.history]
        assert terms == sorted(set(terms)), self.history
        for peer in self._active():
            assert start > 0, peer.number
            assert peer.acked_lsn <= peer.streaming_at <= self.end_lsn, peer.number
            assert peer.streaming_at - peer.acked_lsn <= config.pending_bytes_max, peer.number
            assert peer.flush_lsn <= peer.streaming_at, peer.number
