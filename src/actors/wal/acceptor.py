"""One acceptor of one log: its votes, the leader it follows, and its commit LSN.

Pure except for its two stores: one message in, at most one reply out; no clock, no socket, no event
loop. The stores block, so callers run them off the event loop, one message at a time. The protocol
is that of Neon's safekeeper; comments mark where this acceptor differs.

- **Terms.** `term` is the highest term in which this acceptor voted or of which it heard. It never
  decreases.
- **Election.** An elected proposer sends its history. The log is truncated where it diverges from
  the proposer's (`history.highest_common_point`), and only there; then the history is replaced.
- **Appends** come from the announced leader of the current term and continue the log exactly at
  `write_lsn`, without gaps or rewrites. The same holds for heartbeats, which are empty appends.
- **Commit** is ``min(max(candidate, commit_lsn), flush_lsn)``. It advances in memory, like the rest
  of the *overlay* (`OVERLAY`, `proposer_id`), and is written along with every persisted change.
- **Membership.** Votes, elections and appends must belong to the acceptor's own generation.

A disk error that is `determinate` (the write did not happen) leaves the acceptor unchanged, and the
message gets no reply. Any other error, and any failure of a flush or a truncation, *stops* the
acceptor: the contents of the disk are unknown, and every call raises `StorageError` until the
timeline is opened again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.runtime.errors import CorruptData, InvalidUsage, StorageError
from actors.wal.acceptor_checks import check_append, check_elected, check_generation, check_greeting
from actors.wal.acceptor_stores import ControlState, ControlStore, WalStore
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

log = logging.getLogger(__name__)

OVERLAY: Final = ("commit_lsn", "backup_lsn", "peer_horizon_lsn", "remote_consistent_lsn")
"""Positions that advance in memory first, in addition to `proposer_id`."""


class AppendUnflushed(msgspec.Struct, frozen=True, gc=False):
    """Appends bytes without flushing them. Never sent on the wire.

    It has a reply only if `flush_lsn` advanced anyway (a segment became full) or the term is over.
    """

    request: AppendRequest


class FlushWal(msgspec.Struct, frozen=True, gc=False):
    """Flushes the bytes that were appended. Always has a reply. Never sent on the wire."""


class AcceptorPeer(msgspec.Struct, frozen=True, gc=False):
    """Positions that another acceptor of the same timeline reports."""

    last_log_term: int
    commit_lsn: int = 0
    backup_lsn: int = 0
    peer_horizon_lsn: int = 0
    remote_consistent_lsn: int = 0


Message: TypeAlias = ProposerMessage | AppendUnflushed | FlushWal


class AcceptorCore:
    """An acceptor over an open control file and log.

    Raises `CorruptData` if the log ends before the control file's commit LSN.
    """

    def __init__(self, node_id: int, control: ControlStore, wal: WalStore) -> None:
        self._node_id = node_id
        self._control = control
        self._wal = wal
        self._state = control.state
        """Current state: that on disk, with a newer overlay."""
        self._term_start_lsn = 0
        """LSN at which the announced leader's term starts; 0 before an announcement."""
        self._elected_term: int | None = None
        """Term of the leader announced since the acceptor was opened, or None."""
        self._stopped: str | None = None
        """Reason why the acceptor has stopped, or None."""
        if self.commit_lsn > self.flush_lsn:
            raise CorruptData(
                f"timeline {self._state.timeline}: the log ends at {lsn_text(self.flush_lsn)}, but"
                f" {lsn_text(self.commit_lsn)} was committed: data is missing; restore it from"
                " another acceptor",
                determinate=True,
            )

    @property
    def node_id(self) -> int:
        """Return this acceptor's node id."""
        return self._node_id

    @property
    def state(self) -> ControlState:
        """Return the acceptor's state, which is on disk except for the overlay."""
        return self._state

    @property
    def term(self) -> int:
        """Return the highest term in which the acceptor voted or of which it heard. It is on
        disk."""
        return self._state.term

    @property
    def flush_lsn(self) -> int:
        """Return the LSN after the last complete record on disk, but at least the timeline's
        start."""
        return max(self._wal.flush_record_lsn, self._state.timeline_start_lsn)

    @property
    def commit_lsn(self) -> int:
        """Return the LSN before which everything is committed, as far as this acceptor knows. It is
        in memory."""
        return self._state.commit_lsn

    @property
    def term_start_lsn(self) -> int:
        """Return the LSN at which the leader's term starts; 0 until a leader announces itself after
        opening."""
        return self._term_start_lsn

    @property
    def last_log_term(self) -> int:
        """Return the term in which the end of the log was written."""
        return last_log_term(self._state.history, self.flush_lsn)

    @property
    def stopped(self) -> str | None:
        """Return why the acceptor has stopped, or None while it works."""
        return self._stopped

    def process(self, message: Message) -> AcceptorMessage | None:
        """Process one message, and return its reply if it has one.

        Raise `WalRefused` if the acceptor cannot continue with that peer (nothing was appended
        then), and `StorageError`.
        """
        self._check_running()
        match message:
            case AppendUnflushed(request=request):
                return self._append(request, flush=False)
            case AppendRequest():
                return self._append(message, flush=True)
            case FlushWal():
                self._call_stopping(self._wal.flush)
                return self._append_response()
            case ProposerGreeting():
                return self._greet(message)
            case VoteRequest():
                return self._vote(message)
            case ProposerElected():
                self._elect(message)
                return None

    def record_peer(self, peer: AcceptorPeer) -> None:
        """Adopt the positions that another acceptor reports."""
        self._check_running()
        # Two logs that end in the same term are from one leader, so the shorter is a prefix of the
        # other.
        if peer.commit_lsn and peer.last_log_term and peer.last_log_term == self.last_log_term:
            self._commit(peer.commit_lsn)
        self._raise_overlay(
            backup_lsn=peer.backup_lsn,
            peer_horizon_lsn=peer.peer_horizon_lsn,
            remote_consistent_lsn=peer.remote_consistent_lsn,
        )

    def record_remote_consistent(self, lsn: int) -> None:
        """Record that a consumer of the log no longer needs anything before `lsn`."""
        self._check_running()
        self._raise_overlay(remote_consistent_lsn=lsn)

    def record_backup(self, lsn: int) -> None:
        """Record that complete segments up to `lsn` are archived."""
        self._check_running()
        self._raise_overlay(backup_lsn=lsn)

    def bump_term(self, term: int | None = None) -> int:
        """Raise the term to `term`, or to the next one, and return the current term.

        A term that is not higher changes nothing. The leader of a lower term cannot append any
        more.
        """
        self._check_running()
        wanted = self.term + 1 if term is None else term
        if wanted > self.term:
            self._persist(replace(self._state, term=wanted))
        return self.term

    def checkpoint(self) -> None:
        """Persist the overlay, if it has advanced."""
        self._check_running()
        if self._state != self._control.state:
            self._persist(self._state)

    def validate(self) -> None:
        """Check the invariants. Raise a `CorruptData` that names the broken one with its
        operands."""
        state, disk, wal = self._state, self._control.state, self._wal
        for name in OVERLAY:
            ours, theirs = getattr(state, name), getattr(disk, name)
            _require(theirs <= ours, f"persisted {name} <= {name}", theirs, ours)
        shown = {name: getattr(disk, name) for name in OVERLAY} | {"proposer_id": disk.proposer_id}
        same = replace(state, **shown) == disk
        _require(same, "everything except the overlay is as on disk", state, disk)
        start = state.timeline_start_lsn
        _require(
            state.commit_lsn <= self.flush_lsn, "commit_lsn <= flush_lsn", state, self.flush_lsn
        )
        written = max(wal.write_record_lsn, start)
        _require(self.flush_lsn <= written, "flush_lsn <= written", self.flush_lsn, written)
        _require(wal.flush_lsn <= wal.write_lsn, "flushed <= written", wal.flush_lsn, wal.write_lsn)
        check_history(state.history)
        last = state.history[-1] if state.history else None
        _require(last is None or last.term <= state.term, "last term <= term", last, state.term)
        if start:
            for name in ("local_start_lsn", "commit_lsn", "backup_lsn", "remote_consistent_lsn"):
                _require(
                    start <= getattr(state, name), f"timeline_start_lsn <= {name}", start, state
                )
        if self._elected_term is not None:
            _require(self._elected_term <= state.term, "elected_term <= term", self._elected_term)
        if self._elected_term == state.term:
            begun = last is not None and last.lsn == self._term_start_lsn
            _require(begun, "the term starts at its entry", last, self._term_start_lsn)

    # -- messages ------------------------------------------------------------------------------

    def _greet(self, message: ProposerGreeting) -> AcceptorGreeting:
        state = self._state
        check_greeting(self._node_id, state, message)
        changed = state
        # As in Neon, a different system id is stored with a warning, not refused.
        if message.system_id and message.system_id != state.system_id:
            if state.system_id:
                log.warning(
                    "timeline %s: the system id of the proposer changed to %d (was %d); storing it",
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
        # `check_greeting` has checked that this node belongs to the newer configuration.
        if message.membership.generation > state.membership.generation:
            changed = replace(changed, membership=message.membership)
        if changed != state:
            self._persist(changed)
        return AcceptorGreeting(self._node_id, self._state.membership, self.term)

    def _vote(self, message: VoteRequest) -> VoteResponse:
        check_generation(self._state, message.generation, "VoteRequest")
        # Flush what the old leader sent, so that the new one starts after it, without an overlap.
        self._call_stopping(self._wal.flush)
        vote_given = self.term < message.term
        if vote_given:
            # Persist it before replying, so that there is at most one vote for each term, even
            # after a crash.
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
            return  # the reply to its next append carries the higher term
        check_elected(self._state, self.flush_lsn, self._wal.write_record_lsn, message)
        if self.term < message.term:
            self._persist(replace(self._state, term=message.term))
        start = message.start_streaming_at
        # Accept no append until the truncation and the history are on disk.
        self._elected_term = None
        if not self._wal.write_lsn:
            self._call_stopping(self._wal.initialize, start)
        self._call_stopping(self._wal.truncate, start)
        state = self._state
        # Truncate before the history changes: entries beyond the log's end are not visible, so a
        # crash in between leaves a valid, shorter log.
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
        # Do not refuse the proposer but inform it: the reply carries the higher term.
        if self.term > request.term:
            return AppendResponse(self._state.membership.generation, self.term)
        check_append(request, self._elected_term, self._wal.write_lsn)
        flushed = self.flush_lsn
        if request.wal:
            self._call(self._wal.write, request.begin_lsn, request.wal)
        if flush:
            self._call_stopping(self._wal.flush)
        if request.commit_lsn:
            self._commit(request.commit_lsn)
        self._raise_overlay(peer_horizon_lsn=request.truncate_lsn)
        if request.proposer_id != self._state.proposer_id:
            self._state = replace(self._state, proposer_id=request.proposer_id)
        # `write` has flushed a segment that became full, so tell the proposer immediately.
        if flush or self.flush_lsn != flushed:
            return self._append_response()
        return None

    def _append_response(self) -> AppendResponse:
        # Report the persisted commit LSN, not the one in memory: a proposer in sync mode ends when
        # it sees it.
        return AppendResponse(
            self._state.membership.generation,
            self.term,
            self.flush_lsn,
            self._control.state.commit_lsn,
        )

    # -- state ---------------------------------------------------------------------------------

    def _commit(self, candidate: int) -> None:
        """Advance the commit LSN. Callers have checked that the log is that of the right leader."""
        commit_lsn = min(max(candidate, self.commit_lsn), self.flush_lsn)
        _require(
            commit_lsn >= self.commit_lsn, "commit_lsn never decreases", commit_lsn, self.commit_lsn
        )
        if commit_lsn != self.commit_lsn:
            self._state = replace(self._state, commit_lsn=commit_lsn)
        # A proposer in sync mode ends once the acceptors report the start of the term as committed.
        if self._control.state.commit_lsn < self._term_start_lsn <= commit_lsn:
            self._persist(self._state)

    def _raise_overlay(self, **lsns: int) -> None:
        """Advance these positions; lower values are ignored."""
        moved = {name: lsn for name, lsn in lsns.items() if lsn > getattr(self._state, name)}
        if moved:
            self._state = replace(self._state, **moved)

    def _persist(self, state: ControlState) -> None:
        self._call(self._control.persist, state)
        self._state = state

    def _call(self, call: Callable[..., None], *args: object) -> None:
        """Make a call whose determinate error leaves the disk unchanged."""
        try:
            call(*args)
        except (StorageError, InvalidUsage) as error:
            if not error.determinate:
                self._stop(call, error)
            raise
        except BaseException as error:
            self._stop(call, error)
            raise

    def _call_stopping(self, call: Callable[..., None], *args: object) -> None:
        """Make a call that leaves the disk in an unknown state if it fails, determinate or not."""
        try:
            call(*args)
        except BaseException as error:
            self._stop(call, error)
            raise

    def _stop(self, call: Callable[..., None], error: BaseException) -> None:
        self._elected_term = None
        self._stopped = f"{getattr(call, '__qualname__', call)} failed: {error!r}"

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise StorageError(
                f"the acceptor of timeline {self._state.timeline} has stopped, because the contents"
                f" of the disk are unknown; open the timeline again: {self._stopped}",
                determinate=True,
            )


def _require(true: bool, rule: str, *operands: object) -> None:
    if not true:
        shown = ", ".join(map(repr, operands))
        raise CorruptData(f"an acceptor violated its rule {rule}: {shown}", determinate=True)
