"""Quorums: whether enough voters agree, and the LSN that enough of them have on disk. Pure.

A configuration is one set of voters, or two that must each agree (a joint configuration). A quorum
of `n` voters is `n // 2 + 1`: any two quorums of one set share a voter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from actors.wal.messages import MembershipConfig

Voters = tuple[frozenset[int], ...]
"""One set of node ids, or two."""


def voters_of(membership: MembershipConfig) -> Voters:
    """Return the sets of voting node ids. Generation 0 has none."""
    sets = (membership.members, membership.new_members)
    return tuple(frozenset(member.node_id for member in members) for members in sets if members)


def quorum_of(count: int) -> int:
    """Return the least number of `count` members such that any two such subsets share one."""
    return count // 2 + 1


def has_quorum(voters: Voters, those: Collection[int]) -> bool:
    """Return whether `those` include a quorum of every set."""
    held = frozenset(those)
    return bool(voters) and all(len(each & held) >= quorum_of(len(each)) for each in voters)


def quorum_flush_lsn(voters: Voters, flushed: Callable[[int], int], term_start_lsn: int) -> int:
    """Return the LSN that a quorum of every set has flushed in this term, or 0 if there is none.

    Source: the protocol's commit rule, which corresponds to Raft's rule that entries of earlier
    terms are not committed by counting.
    """

    def of_set(each: frozenset[int]) -> int:
        # LSNs below the start of the term count as 0: those bytes may be another leader's, or the
        # acceptor may not have the leader's history yet.
        lsns: Sequence[int] = sorted(
            lsn if lsn >= term_start_lsn else 0 for lsn in map(flushed, each)
        )
        # They ascend, so exactly a quorum has flushed at least this much.
        return lsns[len(lsns) - quorum_of(len(lsns))]

    return min((of_set(each) for each in voters), default=0)
