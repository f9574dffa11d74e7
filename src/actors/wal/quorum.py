"""Quorums: who must have agreed, and what so many have on disk. Pure.

A configuration is one set of voters, or two that must each agree (a joint one). A quorum of `n`
voters is `n // 2 + 1`: any two quorums of one set share a voter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from actors.wal.messages import Membership

Voters = tuple[frozenset[int], ...]
"""One set, or two."""


def voters_of(membership: Membership) -> Voters:
    """The node ids that vote; of generation 0: nobody is named."""
    sets = (membership.members, membership.new_members)
    return tuple(frozenset(member.node_id for member in members) for members in sets if members)


def quorum_of(count: int) -> int:
    """The least number of `count` members such that any two such sets share one."""
    return count // 2 + 1


def agrees(voters: Voters, those: Collection[int]) -> bool:
    """Whether `those` hold a quorum of every set."""
    held = frozenset(those)
    return bool(voters) and all(len(each & held) >= quorum_of(len(each)) for each in voters)


def committed(voters: Voters, flushed: Callable[[int], int], term_start_lsn: int) -> int:
    """What a quorum of every set has flushed in this term; 0 when that is nothing.

    What an acceptor has below `term_start_lsn` counts as nothing: it may be another leader's, or
    the leader's history may not have reached it. Source: the protocol's commit rule, which is
    Raft's ban on committing what earlier terms wrote by counting."""

    def of_set(each: frozenset[int]) -> int:
        lsns: Sequence[int] = sorted(
            lsn if lsn >= term_start_lsn else 0 for lsn in map(flushed, each)
        )
        return lsns[len(lsns) - quorum_of(len(lsns))]

    return min((of_set(each) for each in voters), default=0)
