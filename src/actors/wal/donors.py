"""Bringing an acceptor up to date from another one, without a proposer: the rules. Pure.

Theory of operation. Acceptors ask one another how far they are (`PeerStatus`). One that is behind
may take the log of a *donor*, and for itself plays the leader whose log the donor has: it asks
itself for a vote in the donor's term, announces the donor's history to itself, and appends what it
reads from the donor. Nothing here can do what that leader could not have done:

- The donor's ``term == last_log_term``: the term's leader was elected, and announced itself to the
  donor. So the donor's log is a beginning of that leader's log, and holds all that was committed
  in earlier terms. What that leader would have cut off here is cut off, no more.
- ``donor.term >= own term``: this acceptor has not promised its vote to anybody later. The vote is
  its promise not to take anything from earlier leaders any more.
- ``(last_log_term, flush_lsn)`` of the donor is greater: there is something to gain.
- The log is read for as long as the donor stays in that term (START_REPLICATION with a term).
- Appends say nothing of a commit. A peer's commit counts when the ends of both logs are of one
  term (`Acceptor.record_peer`).

A leader that connects meanwhile goes first: its announcement is of the same log or of a later term,
and either of the two is refused where their positions cross, and begins again.

What it does not do: it makes no timeline that this acceptor has never heard of, and does not help
one whose own term is higher than that of all logs; both wait for a proposer.

Source: Neon's recovery of safekeepers from their peers; the generation is this acceptor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.errors import InvalidUsage, MalformedFrame, WalRefused
from actors.wal.acceptor import Acceptor, Peer
from actors.wal.history import check_history, highest_common_point, visible
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.messages import Entry, ProposerElected, VoteRequest, VoteResponse

_LSNS: Final = ("flush", "commit", "horizon", "consumed", "backup")
COLUMNS: Final = ("node_id", "term", *(f"{name}_lsn" for name in _LSNS), "history")
"""Of the answer to PEER_STATUS, all text: LSNs as X/X, the history as ``term@X/X`` with spaces."""


class PeerStatus(msgspec.Struct, frozen=True):
    """How far an acceptor is. `history` is the visible one."""

    node_id: int
    term: int
    flush_lsn: int
    commit_lsn: int
    horizon_lsn: int
    consumed_lsn: int
    backup_lsn: int
    history: tuple[Entry, ...]

    @property
    def last_log_term(self) -> int:
        """In which the end of its log was written."""
        return self.history[-1].term if self.history else 0

    @property
    def position(self) -> tuple[int, int]:
        """By which logs are compared."""
        return self.last_log_term, self.flush_lsn

    def as_peer(self) -> Peer:
        """What of it an acceptor takes over. Not what is kept elsewhere: each sees for itself."""
        return Peer(
            self.last_log_term,
            self.commit_lsn,
            0,
            self.horizon_lsn,
            self.consumed_lsn,
        )


def status_of(acceptor: Acceptor) -> PeerStatus:
    """Of one's own."""
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
    """As `COLUMNS` has it."""
    lsns = (lsn_text(getattr(status, f"{name}_lsn")) for name in _LSNS)
    history = " ".join(f"{entry.term}@{lsn_text(entry.lsn)}" for entry in status.history)
    return str(status.node_id), str(status.term), *lsns, history


def parse_status(row: Sequence[str | None]) -> PeerStatus:
    """What `status_row` wrote. Raises `MalformedFrame`."""
    try:
        cells = [cell or "" for cell in row]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{len(cells)} columns, there are {len(COLUMNS)}")
        parts = [part.partition("@") for part in cells[-1].split()]
        history = tuple(Entry(int(term), parse_lsn(lsn)) for term, _, lsn in parts)
        check_history(history)
        flush, commit, horizon, consumed, backup = map(parse_lsn, cells[2:-1])
        status = PeerStatus(
            int(cells[0]), int(cells[1]), flush, commit, horizon, consumed, backup, history
        )
        if not 0 <= status.last_log_term <= status.term < 1 << 64 or (
            history and history[-1].lsn > status.flush_lsn
        ):
            raise ValueError(f"{cells} contradicts itself")
        return status
    except (ValueError, InvalidUsage, WalRefused) as error:
        raise MalformedFrame(f"a status of a peer that is none: {error}") from None


def can_give(donor: PeerStatus, own: PeerStatus) -> bool:
    """Whether `own` may take the donor's log, and gains by it."""
    return (
        donor.node_id != own.node_id
        and donor.term == donor.last_log_term >= own.term
        and donor.position > own.position
    )


def vote_request(donor: PeerStatus, generation: int) -> VoteRequest:
    """To oneself, in one's own generation."""
    return VoteRequest(generation, donor.term)


def elected(donor: PeerStatus, vote: VoteResponse) -> ProposerElected | None:
    """To oneself, after that vote; None: there is nothing to gain (any more), or somebody later
    was promised it. Raises `WalRefused` where the two logs cannot be of one timeline."""
    own = vote.history
    last = own[-1].term if own else 0
    if vote.term != donor.term or donor.position <= (last, vote.flush_lsn):
        return None
    point = highest_common_point(donor.history, own, vote.flush_lsn)
    start_lsn = donor.history[0].lsn if point is None else point.lsn
    return ProposerElected(vote.generation, donor.term, start_lsn, donor.history)
