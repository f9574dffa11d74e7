"""Checks of an acceptor before it changes anything. Pure.

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
"""Versions of PostgreSQL whose log can be read; 0 is unknown."""


def check_greeting(node_id: int, state: ControlState, message: ProposerGreeting) -> None:
    """Refuse another log, and a configuration that this acceptor cannot follow."""
    version = message.pg_version
    if version and not PG_VERSION_MIN <= version <= PG_VERSION_MAX:
        raise PeerRejected(
            f"PostgreSQL {version} is not known here: {PG_VERSION_MIN} to {PG_VERSION_MAX},"
            " or 0 where it is unknown"
        )
    # Refused as by Neon: a log of an unknown version could be of another major one.
    if state.pg_version and not version:
        raise PeerRejected(
            f"the proposer does not tell its version of PostgreSQL, and this log is of"
            f" {state.pg_version}: let it tell the version that it runs"
        )
    if state.pg_version and version // 10_000 != state.pg_version // 10_000:
        raise PeerRejected(
            f"a log of PostgreSQL {version}, this one is of {state.pg_version}: another major"
            " version writes another log"
        )
    for what in ("tenant", "timeline"):
        ours, theirs = getattr(state, what), getattr(message, what)
        if ours != theirs:
            raise PeerRejected(f"a proposer of {what} {theirs}, this is {what} {ours}")
    if state.segment_bytes and message.segment_bytes != state.segment_bytes:
        raise PeerRejected(
            f"segments of {message.segment_bytes} bytes, this log has {state.segment_bytes}"
        )
    try:
        check_segment_bytes(message.segment_bytes)
    except InvalidUsage as error:
        raise PeerRejected(str(error)) from None
    _check_membership(node_id, state.membership, message.membership)


def _check_membership(node_id: int, own: MembershipConfig, offered: MembershipConfig) -> None:
    members, new_members = _sets(offered)
    if offered.generation > own.generation and node_id not in (*members, *new_members):
        raise WalRefused(
            f"generation {offered.generation} has the members {sorted({*members, *new_members})},"
            f" not {node_id}, which is in generation {own.generation}"
        )
    # Stricter than Neon: a generation has one configuration, or two quorums need not intersect.
    if offered.generation == own.generation and (members, new_members) != _sets(own):
        raise WalRefused(
            f"generation {offered.generation} has the members {(members, new_members)} there, and"
            f" {_sets(own)} here"
        )


def check_generation(state: ControlState, generation: int, what: str) -> None:
    """Refuse a vote, election or append of another generation than the acceptor's."""
    own = state.membership.generation
    if generation != own:
        raise WalRefused(f"{what} of generation {generation}, this acceptor is in {own}")


def check_elected(
    state: ControlState, flush_lsn: int, write_record_lsn: int, message: ProposerElected
) -> None:
    """Refuse a malformed history, and a start that is not where the two logs part."""
    history, start = message.history, message.start_streaming_at
    if not history:
        raise WalRefused(f"elected in term {message.term} with an empty history")
    check_history(history)
    if history[-1].term != message.term or not history[0].lsn:
        raise WalRefused(
            f"elected in term {message.term} with the history {history_text(history)}: it must"
            " begin at an LSN and end with that term"
        )
    seen = visible(state.history, flush_lsn)
    point = highest_common_point(history, seen, flush_lsn)
    expected = history[0].lsn if point is None else point.lsn
    where = f"the leader of term {message.term} starts at {lsn_text(start)}"
    # A correct proposer may be refused: another connection of its own wrote since its vote. It
    # connects again.
    if start != expected:
        raise WalRefused(
            f"{where}, but its log and this one part at {lsn_text(expected)}: connect again (here"
            f" {history_text(seen)} up to {lsn_text(flush_lsn)}, there {history_text(history)})"
        )
    if start < state.commit_lsn:
        raise WalRefused(
            f"{where}: that would cut off what was committed up to {lsn_text(state.commit_lsn)}"
        )
    if 0 < write_record_lsn < start:
        raise WalRefused(f"{where}, behind the end of this log at {lsn_text(write_record_lsn)}")


def check_append(request: AppendRequest, elected_term: int | None, write_lsn: int) -> None:
    """Refuse an append or heartbeat of a term without an announced leader, a rewrite, or a gap.

    `elected_term` is that of the last announcement since the acceptor was opened.
    """
    # Stricter than Neon, whose acceptors only compare terms and rely on proposers for the rest:
    # after a start or a vote the log may hold what another leader left.
    if elected_term != request.term:
        raise WalRefused(f"an append of term {request.term} before its leader was announced")
    begin = request.begin_lsn
    if begin < write_lsn:
        raise WalRefused(
            f"an append at {lsn_text(begin)} would rewrite what is there up to"
            f" {lsn_text(write_lsn)}"
        )
    if write_lsn and begin > write_lsn:
        raise WalRefused(
            f"an append at {lsn_text(begin)} would leave a gap behind {lsn_text(write_lsn)}"
        )
    if request.end_lsn - begin != len(request.wal):
        raise WalRefused(
            f"an append of {len(request.wal)} bytes from {lsn_text(begin)} to"
            f" {lsn_text(request.end_lsn)}"
        )


def _sets(membership: MembershipConfig) -> tuple[list[int], list[int]]:
    members = sorted(member.node_id for member in membership.members)
    return members, sorted(member.node_id for member in membership.new_members)
