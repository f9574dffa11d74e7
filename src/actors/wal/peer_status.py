"""The rules by which an acceptor catches up from another one, without a proposer. Pure.

An acceptor that is behind copies the log of a *donor* (`PeerStatus`). It acts towards itself as the
leader whose log the donor has: it asks itself for a vote in the donor's term, announces the donor's
history to itself, and appends what it reads from the donor. It can do nothing that this leader
could not have done (`is_useful_donor`): the log is truncated only where that leader would have
truncated it.

- The log is read for as long as the donor stays in that term (START_REPLICATION with a term).
- Appends carry no commit LSN. A peer's commit LSN counts if both logs end in the same term
  (`AcceptorCore.record_peer`).
- A leader that connects meanwhile takes precedence: if the positions of the two cross, either is
  refused and starts again.

A timeline of which this acceptor has never heard, and an acceptor whose term is higher than that of
all logs, wait for a proposer.

Source: Neon's recovery of safekeepers from their peers; the generation is this acceptor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.runtime.errors import InvalidUsage, MalformedFrame, WalRefused
from actors.wal.acceptor import AcceptorCore, AcceptorPeer
from actors.wal.history import check_history, highest_common_point, visible
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.messages import ProposerElected, TermEntry, VoteRequest, VoteResponse

_LSNS: Final = ("flush", "commit", "horizon", "consumed", "backup")
COLUMNS: Final = ("node_id", "term", *(f"{name}_lsn" for name in _LSNS), "history")
"""Columns of the answer to PEER_STATUS, all text: LSNs as X/X, the history as ``term@X/X``
separated by spaces."""


class PeerStatus(msgspec.Struct, frozen=True):
    """The positions of an acceptor. `history` contains only the visible entries."""

    node_id: int
    term: int
    flush_lsn: int
    commit_lsn: int
    horizon_lsn: int
    consumed_lsn: int
    backup_lsn: int
    history: tuple[TermEntry, ...]

    @property
    def last_log_term(self) -> int:
        """Return the term in which the end of its log was written."""
        return self.history[-1].term if self.history else 0

    @property
    def position(self) -> tuple[int, int]:
        """Return the key by which logs are compared."""
        return self.last_log_term, self.flush_lsn

    def as_peer(self) -> AcceptorPeer:
        """Return the part of the status that another acceptor adopts."""
        return AcceptorPeer(
            self.last_log_term,
            self.commit_lsn,
            # Leave out the backup LSN: each acceptor verifies archived segments itself.
            0,
            self.horizon_lsn,
            self.consumed_lsn,
        )


def peer_status(acceptor: AcceptorCore) -> PeerStatus:
    """Return the status of the local acceptor."""
    state = acceptor.state
    return PeerStatus(
        acceptor.node_id,
        acceptor.term,
        acceptor.flush_lsn,
        state.commit_lsn,
        state.peer_horizon_lsn,
        state.remote_consistent_lsn,
        state.backup_lsn,
        visible(state.history, acceptor.flush_lsn),
    )


def status_row(status: PeerStatus) -> tuple[str, ...]:
    """Return the status as a row of `COLUMNS`."""
    lsns = (lsn_text(getattr(status, f"{name}_lsn")) for name in _LSNS)
    history = " ".join(f"{entry.term}@{lsn_text(entry.lsn)}" for entry in status.history)
    return str(status.node_id), str(status.term), *lsns, history


def parse_status(row: Sequence[str | None]) -> PeerStatus:
    """Parse a row that `status_row` returned. Raise `MalformedFrame`."""
    try:
        cells = [cell or "" for cell in row]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"got {len(cells)} columns: expected {len(COLUMNS)}")
        parts = [part.partition("@") for part in cells[-1].split()]
        history = tuple(TermEntry(int(term), parse_lsn(lsn)) for term, _, lsn in parts)
        check_history(history)
        flush, commit, horizon, consumed, backup = map(parse_lsn, cells[2:-1])
        status = PeerStatus(
            int(cells[0]), int(cells[1]), flush, commit, horizon, consumed, backup, history
        )
        if not 0 <= status.last_log_term <= status.term < 1 << 64 or (
            history and history[-1].lsn > status.flush_lsn
        ):
            raise ValueError(f"{cells} is inconsistent")
        return status
    except (ValueError, InvalidUsage, WalRefused) as error:
        raise MalformedFrame(f"invalid status of a peer: {error}") from None


def is_useful_donor(donor: PeerStatus, own: PeerStatus) -> bool:
    """Return whether `own` may copy the donor's log and gains from it."""
    # The donor's term is that of its log. So that term's leader was elected and announced itself to
    # the donor; this log is a prefix of the leader's and contains everything that was committed in
    # earlier terms. `own` has promised no vote to a later leader.
    return (
        donor.node_id != own.node_id
        and donor.term == donor.last_log_term >= own.term
        and donor.position > own.position
    )


def vote_request(donor: PeerStatus, generation: int) -> VoteRequest:
    """Return the request for the acceptor's own vote, in its own generation."""
    return VoteRequest(generation, donor.term)


def make_announcement(donor: PeerStatus, vote: VoteResponse) -> ProposerElected | None:
    """Return the announcement to send to the acceptor itself after that vote.

    Return None if nothing would be gained (any more), or if it has voted for a later leader. Raise
    `WalRefused` if the logs cannot belong to one timeline.
    """
    own = vote.history
    last = own[-1].term if own else 0
    if vote.term != donor.term or donor.position <= (last, vote.flush_lsn):
        return None
    point = highest_common_point(donor.history, own, vote.flush_lsn)
    start_lsn = donor.history[0].lsn if point is None else point.lsn
    return ProposerElected(vote.generation, donor.term, start_lsn, donor.history)
