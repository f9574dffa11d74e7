"""One acceptor of one log: whom it votes for, whose log it takes, and what it calls committed.

Pure but for its two stores: messages in, at most one message out, no clock, no socket, no loop. The
stores block, so whoever drives it does so off the loop, one message at a time. Protocol: Neon's
safekeeper; what it is named after there is said where it differs.

Theory of operation
-------------------
- **Terms.** `term` is the highest in which this acceptor gave its vote or that it was told of. It
  never falls, and is on disk before the answer that shows it: at most one vote for each term, also
  over a crash.
- **Election.** A proposer that was elected sends its history. The acceptor works out itself where
  its log and the proposer's part (`history.highest_common_point`); if the proposer starts elsewhere
  it has an older picture, and is refused. What lies behind that place is cut off, then the
  proposer's history replaces ours, in one persisted change. A log is cut only here.
- **Appends** are taken from the leader of the current term alone, after it announced itself to this
  life of the acceptor: until then the log may still hold what another leader left. They continue
  the log at `write_lsn` exactly: no gap, no rewrite; heartbeats (empty) too.
- **Commit.** ``min(max(candidate, commit_lsn), flush_lsn)``: never falls, never lies behind what is
  on disk here. It lives in memory and reaches the disk with the next persisted change. When it
  crosses the term's begin while the persisted one is below, it is persisted at once: a proposer
  that only brings acceptors to agree ends when it sees that. Answers carry the *persisted* one.
- **Membership.** Votes, elections and appends must be of the acceptor's own generation. A greeting
  with a higher one is adopted if this node belongs to it.
- **The overlay.** `commit_lsn`, `backup_lsn`, `peer_horizon_lsn`, `remote_consistent_lsn` and
  `proposer_id` move in memory; every persisted change writes them too (copy, change, persist, then
  show).

Invariants (`validate`)
-----------------------
``control.state.x <= state.x`` for the four LSNs of the overlay, all else equal on both sides;
``commit_lsn <= flush_lsn <= max(wal.write_record_lsn, timeline_start_lsn)``;
``history`` ascending, its last term ``<= term``; ``timeline_start_lsn <= local_start_lsn,
commit_lsn, backup_lsn, remote_consistent_lsn`` once it is known; ``elected_term <= term``, and when
they are equal ``term_start_lsn`` is the last entry's.

When the disk fails
-------------------
An error that says it surely did not happen (`determinate`) leaves the acceptor as it was; the
message has no answer. Any other, and any failure of a flush or a truncation, *stops* it: it cannot
know what is on disk, so it neither answers nor changes anything any more, and every call raises
`StorageError` until somebody opens the timeline anew from disk. `stopped` says why.

What it does not do: no quorum (the proposer's), no reading of the log, no queues or flush timing
(`receiver`), no removal of old segments, no hot standby feedback (filled in by who knows it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.errors import Corrupt, InvalidUsage, StorageError
from actors.wal.admission import (
    check_append,
    check_elected,
    check_generation,
    check_greeting,
)
from actors.wal.history import check_history, last_log_term, visible
from actors.wal.lsn import lsn_text
from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    VoteRequest,
    VoteResponse,
)
from actors.wal.stores import ControlState, ControlStore, WalStore

log = logging.getLogger(__name__)

OVERLAY: Final = ("commit_lsn", "backup_lsn", "peer_horizon_lsn", "remote_consistent_lsn")
"""What moves in memory first, besides `proposer_id`."""


class AppendUnflushed(msgspec.Struct, frozen=True, gc=False):
    """Take the bytes, do not flush. Answered only where `flush_lsn` moved all the same (a segment
    became full), or the term is over. Never on the wire."""

    request: AppendRequest


class FlushWal(msgspec.Struct, frozen=True, gc=False):
    """Flush what was taken; always answered. Never on the wire."""


class Peer(msgspec.Struct, frozen=True, gc=False):
    """What another acceptor of the same timeline says of itself."""

    last_log_term: int
    commit_lsn: int = 0
    backup_lsn: int = 0
    peer_horizon_lsn: int = 0
    remote_consistent_lsn: int = 0


Message: TypeAlias = ProposerMessage | AppendUnflushed | FlushWal


class Acceptor:
    """An acceptor over a control file and a log that were opened.

    Raises `Corrupt` where the log ends before what the control file calls committed."""

    def __init__(self, node_id: int, control: ControlStore, wal: WalStore) -> None:
        self._node_id = node_id
        self._control = control
        self._wal = wal
        self._state = control.state
        self._term_start_lsn = 0
        self._elected_term: int | None = None
        self._stopped: str | None = None
        if self.commit_lsn > self.flush_lsn:
            raise Corrupt(
                f"timeline {self._state.timeline}: the log ends at {lsn_text(self.flush_lsn)}, but"
                f" {lsn_text(self.commit_lsn)} was committed: some of it is lost; bring it from"
                " another acceptor",
                determinate=True,
            )

    @property
    def node_id(self) -> int:
        """Its own number."""
        return self._node_id

    @property
    def state(self) -> ControlState:
        """What it knows: on disk but for the overlay."""
        return self._state

    @property
    def term(self) -> int:
        """The highest it voted in or was told of; on disk."""
        return self._state.term

    @property
    def flush_lsn(self) -> int:
        """Behind the last whole record on disk; not below the timeline's begin."""
        return max(self._wal.flush_record_lsn, self._state.timeline_start_lsn)

    @property
    def commit_lsn(self) -> int:
        """All before it is committed, as far as this acceptor knows; in memory."""
        return self._state.commit_lsn

    @property
    def term_start_lsn(self) -> int:
        """Where the leader's term begins; 0 before one announced itself to this life."""
        return self._term_start_lsn

    @property
    def last_log_term(self) -> int:
        """The term in which the end of the log was written."""
        return last_log_term(self._state.history, self.flush_lsn)

    @property
    def stopped(self) -> str | None:
        """Why it does nothing any more; None while it works."""
        return self._stopped

    def process(self, message: Message) -> AcceptorMessage | None:
        """What one message does, and the answer to it, if it has one.

        Raises `WalRefused` when it cannot go on with that peer (nothing was appended then), and
        `StorageError`."""
        self._check_going()
        match message:
            case AppendUnflushed(request=request):
                return self._append(request, flush=False)
            case AppendRequest():
                return self._append(message, flush=True)
            case FlushWal():
                self._must(self._wal.flush)
                return self._append_response()
            case ProposerGreeting():
                return self._greet(message)
            case VoteRequest():
                return self._vote(message)
            case ProposerElected():
                self._elect(message)
                return None

    def record_peer(self, peer: Peer) -> None:
        """Takes over how far another acceptor knows things to be. Its `commit_lsn` counts only if
        the ends of both logs are of one term: then one log is the beginning of the other."""
        self._check_going()
        if peer.commit_lsn and peer.last_log_term and peer.last_log_term == self.last_log_term:
            self._commit(peer.commit_lsn)
        self._raise_overlay(
            backup_lsn=peer.backup_lsn,
            peer_horizon_lsn=peer.peer_horizon_lsn,
            remote_consistent_lsn=peer.remote_consistent_lsn,
        )

    def record_remote_consistent(self, lsn: int) -> None:
        """A consumer of the log needs nothing before `lsn` any more."""
        self._check_going()
        self._raise_overlay(remote_consistent_lsn=lsn)

    def record_backup(self, lsn: int) -> None:
        """Whole segments up to `lsn` are kept elsewhere."""
        self._check_going()
        self._raise_overlay(backup_lsn=lsn)

    def bump_term(self, term: int | None = None) -> int:
        """Raises the term, to the next one if none is said, and answers with the current one: a
        leader of a lower one is over. A term that is not higher changes nothing."""
        self._check_going()
        wanted = self.term + 1 if term is None else term
        if wanted > self.term:
            self._persist(replace(self._state, term=wanted))
        return self.term

    def checkpoint(self) -> None:
        """Persists the overlay, if it moved."""
        self._check_going()
        if self._state != self._control.state:
            self._persist(self._state)

    def validate(self) -> None:
        """Checks the invariants. Raises `Corrupt` naming the one that is broken, with operands."""
        state, disk, wal = self._state, self._control.state, self._wal
        for name in OVERLAY:
            ours, theirs = getattr(state, name), getattr(disk, name)
            _hold(theirs <= ours, f"persisted {name} <= {name}", theirs, ours)
        shown = {name: getattr(disk, name) for name in OVERLAY} | {"proposer_id": disk.proposer_id}
        same = replace(state, **shown) == disk
        _hold(same, "all but the overlay is as on disk", state, disk)
        start = state.timeline_start_lsn
        _hold(state.commit_lsn <= self.flush_lsn, "commit_lsn <= flush_lsn", state, self.flush_lsn)
        written = max(wal.write_record_lsn, start)
        _hold(self.flush_lsn <= written, "flush_lsn <= written", self.flush_lsn, written)
        _hold(wal.flush_lsn <= wal.write_lsn, "flushed <= written", wal.flush_lsn, wal.write_lsn)
        check_history(state.history)
        last = state.history[-1] if state.history else None
        _hold(last is None or last.term <= state.term, "last term <= term", last, state.term)
        if start:
            for name in ("local_start_lsn", "commit_lsn", "backup_lsn", "remote_consistent_lsn"):
                _hold(start <= getattr(state, name), f"timeline_start_lsn <= {name}", start, state)
        if self._elected_term is not None:
            _hold(self._elected_term <= state.term, "elected_term <= term", self._elected_term)
        if self._elected_term == state.term:
            begun = last is not None and last.lsn == self._term_start_lsn
            _hold(begun, "the term begins at its entry", last, self._term_start_lsn)

    # -- messages ------------------------------------------------------------------------------

    def _greet(self, message: ProposerGreeting) -> AcceptorGreeting:
        state = self._state
        check_greeting(self._node_id, state, message)
        changed = state
        if message.system_id and message.system_id != state.system_id:
            if state.system_id:
                log.warning(
                    "timeline %s: a proposer of system %d, where %d was before: stored",
                    state.timeline,
                    message.system_id,
                    state.system_id,
                )
            version = message.pg_version or state.pg_version
            changed = replace(changed, system_id=message.system_id, pg_version=version)
        if not state.pg_version:
            changed = replace(changed, pg_version=message.pg_version)
        if not state.segment_bytes:
            changed = replace(changed, segment_bytes=message.segment_bytes)
        if message.membership.generation > state.membership.generation:
            changed = replace(changed, membership=message.membership)
        if changed != state:
            self._persist(changed)
        return AcceptorGreeting(self._node_id, self._state.membership, self.term)

    def _vote(self, message: VoteRequest) -> VoteResponse:
        check_generation(self._state, message.generation, "VoteRequest")
        # what was taken from the old leader is flushed: the new one starts behind it, without an
        # overlap
        self._must(self._wal.flush)
        vote_given = self.term < message.term
        if vote_given:
            self._persist(replace(self._state, term=message.term))
        return VoteResponse(
            generation=self._state.membership.generation,
            term=self.term,
            vote_given=vote_given,
            flush_lsn=self.flush_lsn,
            truncate_lsn=self._state.peer_horizon_lsn,
            history=visible(self._state.history, self.flush_lsn),
        )

    def _elect(self, message: ProposerElected) -> None:
        check_generation(self._state, message.generation, "ProposerElected")
        if self.term > message.term:
            return  # the answer to its next append tells it
        check_elected(self._state, self.flush_lsn, self._wal.write_record_lsn, message)
        if self.term < message.term:
            self._persist(replace(self._state, term=message.term))
        start = message.start_streaming_at
        self._elected_term = None  # until all of it is on disk
        if not self._wal.write_lsn:
            self._must(self._wal.initialize, start)
        self._must(self._wal.truncate, start)
        state = self._state
        timeline_start = state.timeline_start_lsn or message.history[0].lsn
        self._persist(
            replace(
                state,
                timeline_start_lsn=timeline_start,
                peer_horizon_lsn=state.peer_horizon_lsn or timeline_start,
                local_start_lsn=state.local_start_lsn or start,
                commit_lsn=max(state.commit_lsn, timeline_start),
                backup_lsn=max(state.backup_lsn, timeline_start),
                remote_consistent_lsn=max(state.remote_consistent_lsn, timeline_start),
                history=message.history,
            )
        )
        self._term_start_lsn = message.history[-1].lsn
        self._elected_term = message.term

    def _append(self, request: AppendRequest, *, flush: bool) -> AppendResponse | None:
        check_generation(self._state, request.generation, "AppendRequest")
        if self.term > request.term:
            return AppendResponse(self._state.membership.generation, self.term)
        check_append(request, self._elected_term, self._wal.write_lsn)
        flushed = self.flush_lsn
        if request.wal:
            self._do(self._wal.write, request.begin_lsn, request.wal)
        if flush:
            self._must(self._wal.flush)
        if request.commit_lsn:
            self._commit(request.commit_lsn)
        self._raise_overlay(peer_horizon_lsn=request.truncate_lsn)
        if request.proposer_id != self._state.proposer_id:
            self._state = replace(self._state, proposer_id=request.proposer_id)
        if flush or self.flush_lsn != flushed:
            return self._append_response()
        return None

    def _append_response(self) -> AppendResponse:
        return AppendResponse(
            self._state.membership.generation,
            self.term,
            self.flush_lsn,
            self._control.state.commit_lsn,
        )

    # -- state ---------------------------------------------------------------------------------

    def _commit(self, candidate: int) -> None:
        """Moves the commit; that the log is the right leader's was checked before."""
        commit_lsn = min(max(candidate, self.commit_lsn), self.flush_lsn)
        _hold(commit_lsn >= self.commit_lsn, "commit_lsn never falls", commit_lsn, self.commit_lsn)
        if commit_lsn != self.commit_lsn:
            self._state = replace(self._state, commit_lsn=commit_lsn)
        if self._control.state.commit_lsn < self._term_start_lsn <= commit_lsn:
            self._persist(self._state)

    def _raise_overlay(self, **lsns: int) -> None:
        """Raises these to what is given; lower ones are old news."""
        moved = {name: lsn for name, lsn in lsns.items() if lsn > getattr(self._state, name)}
        if moved:
            self._state = replace(self._state, **moved)

    def _persist(self, state: ControlState) -> None:
        self._do(self._control.persist, state)
        self._state = state

    def _do(self, call: Callable[..., None], *args: object) -> None:
        """A call that leaves all as it was when it says so."""
        try:
            call(*args)
        except (StorageError, InvalidUsage) as error:
            if not error.determinate:
                self._stop(call, error)
            raise
        except BaseException as error:
            self._stop(call, error)
            raise

    def _must(self, call: Callable[..., None], *args: object) -> None:
        """A call that is not believed when it failed: nobody knows what is on disk."""
        try:
            call(*args)
        except BaseException as error:
            self._stop(call, error)
            raise

    def _stop(self, call: Callable[..., None], error: BaseException) -> None:
        self._elected_term = None
        self._stopped = f"{getattr(call, '__qualname__', call)} failed: {error!r}"

    def _check_going(self) -> None:
        if self._stopped is not None:
            raise StorageError(
                f"the acceptor of timeline {self._state.timeline} stopped, since it cannot know"
                f" what is on disk; open the timeline again: {self._stopped}",
                determinate=True,
            )


def _hold(true: bool, rule: str, *operands: object) -> None:
    if not true:
        shown = ", ".join(map(repr, operands))
        raise Corrupt(f"an acceptor broke its rule {rule}: {shown}", determinate=True)
