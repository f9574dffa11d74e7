"""Checks that an acceptor makes before it changes anything. Pure.

They are functions of the acceptor's state and one message. Each raises `WalRefused` with the values
of both sides; after a refusal the connection is closed. A refusal that would recur on every attempt
is a `PeerRejected`.
"""

from __future__ import annotations

from typing import Final

from actors.runtime.errors import InvalidUsage, PeerRejected, WalRefused
from actors.wal.acceptor_stores import ControlState
from actors.wal.history import check_history, highest_common_point, history_text, visible
from actors.wal.lsn import check_segment_bytes, lsn_text
from actors.wal.messages import AppendRequest, MembershipConfig, ProposerElected, ProposerGreeting

PG_VERSION_MIN: Final = 140_000
PG_VERSION_MAX: Final = 179_999
"""Versions of PostgreSQL whose log can be read; 0 means unknown."""


def check_greeting(node_id: int, state: ControlState, message: ProposerGreeting) -> None:
    """Refuse a different log, and a configuration that this acceptor cannot follow."""
    version = message.pg_version
    if version and not PG_VERSION_MIN <= version <= PG_VERSION_MAX:
        raise PeerRejected(
            f"unsupported PostgreSQL {version}: expected {PG_VERSION_MIN} to {PG_VERSION_MAX},"
            " or 0 if it is unknown"
        )
    # Refuse it, as Neon does: a log of an unknown version could be of a different major version.
    if state.pg_version and not version:
        raise PeerRejected(
            f"the proposer did not send its PostgreSQL version, and this log is of version"
            f" {state.pg_version}: configure the proposer to send its version"
        )
    if state.pg_version and version // 10_000 != state.pg_version // 10_000:
        raise PeerRejected(
            f"log of PostgreSQL {version}, but this log is of {state.pg_version}: major versions"
            " have incompatible logs"
        )
    for what in ("tenant", "timeline"):
        ours, theirs = getattr(state, what), getattr(message, what)
        if ours != theirs:
            raise PeerRejected(f"the proposer is of {what} {theirs}, but this is {what} {ours}")
    if state.segment_bytes and message.segment_bytes != state.segment_bytes:
        raise PeerRejected(
            f"segment size {message.segment_bytes} bytes: this log has {state.segment_bytes}"
        )
    try:
        check_segment_bytes(message.segment_bytes)
    except InvalidUsage as error:
        raise PeerRejected(str(error)) from None
    _check_membership(node_id, state.membership, message.membership)


def _check_membership(node_id: int, own: MembershipConfig, offered: MembershipConfig) -> None:
    members, new_members = _voter_sets(offered)
    if offered.generation > own.generation and node_id not in (*members, *new_members):
        raise WalRefused(
            f"generation {offered.generation} has the members {sorted({*members, *new_members})},"
            f" without node {node_id}, which is in generation {own.generation}"
        )
    # Stricter than Neon: a generation has one configuration, because otherwise two quorums need not
    # intersect.
    if offered.generation == own.generation and (members, new_members) != _voter_sets(own):
        raise WalRefused(
            f"generation {offered.generation} has members {(members, new_members)} there, but"
            f" {_voter_sets(own)} here"
        )


def check_generation(state: ControlState, generation: int, what: str) -> None:
    """Refuse a vote, election or append of a generation other than the acceptor's."""
    own = state.membership.generation
    if generation != own:
        raise WalRefused(f"{what} is of generation {generation}, but this acceptor is in {own}")


def check_elected(
    state: ControlState, flush_lsn: int, write_record_lsn: int, message: ProposerElected
) -> None:
    """Refuse a malformed history, and a start that is not where the two logs diverge."""
    history, start = message.history, message.start_streaming_at
    if not history:
        raise WalRefused(f"elected in term {message.term} with an empty history")
    check_history(history)
    if history[-1].term != message.term or not history[0].lsn:
        raise WalRefused(
            f"elected in term {message.term} with history {history_text(history)}: it must"
            " start at an LSN and end with that term"
        )
    seen = visible(state.history, flush_lsn)
    point = highest_common_point(history, seen, flush_lsn)
    expected = history[0].lsn if point is None else point.lsn
    where = f"the leader of term {message.term} starts at {lsn_text(start)}"
    # This may refuse a correct proposer if another of its connections has written since its vote.
    # It then connects again.
    if start != expected:
        raise WalRefused(
            f"{where}, but the logs diverge at {lsn_text(expected)}: connect again (here"
            f" {history_text(seen)} up to {lsn_text(flush_lsn)}, there {history_text(history)})"
        )
    if start < state.commit_lsn:
        raise WalRefused(
            f"{where}, but that would remove data committed up to {lsn_text(state.commit_lsn)}"
        )
    if 0 < write_record_lsn < start:
        raise WalRefused(f"{where}, after the end of this log at {lsn_text(write_record_lsn)}")


def check_append(request: AppendRequest, elected_term: int | None, write_lsn: int) -> None:
    """Refuse an append or heartbeat of a term without an announced leader, a rewrite, or a gap.

    `elected_term` is the term that was last announced since the acceptor was opened.
    """
    # Stricter than Neon, whose acceptors only compare terms and rely on proposers for the rest:
    # after a start or a vote the log may contain data left by another leader.
    if elected_term != request.term:
        raise WalRefused(f"append of term {request.term} before its leader was announced")
    begin = request.begin_lsn
    if begin < write_lsn:
        raise WalRefused(
            f"append at {lsn_text(begin)} would rewrite the log, which ends at"
            f" {lsn_text(write_lsn)}"
        )
    if write_lsn and begin > write_lsn:
        raise WalRefused(
            f"append at {lsn_text(begin)} would leave a gap after {lsn_text(write_lsn)}"
        )
    if request.end_lsn - begin != len(request.wal):
        raise WalRefused(
            f"append of {len(request.wal)} bytes does not fit its range {lsn_text(begin)} to"
            f" {lsn_text(request.end_lsn)}"
        )


def _voter_sets(membership: MembershipConfig) -> tuple[list[int], list[int]]:
    members = sorted(member.node_id for member in membership.members)
    return members, sorted(member.node_id for member in membership.new_members)
