"""Ids, times and frontiers: the arithmetic of since and upper.

One total order of times: a time is an int64 of milliseconds. A frontier is the set of times
still to come; with a total order that is one time, or the empty frontier (nothing more will
come), written `EMPTY` and greater than every time, so that plain comparison, `min` (meet) and
`max` (join) are right on frontiers. All intervals are half-open: ``lower <= t < upper``.

Invariants: ``0 <= t <= TIME_MAX < EMPTY``; frontiers never go back; EMPTY is final.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Time: TypeAlias = int
"""Milliseconds, an int64."""
Frontier: TypeAlias = int
"""A time, or `EMPTY`."""
ObjectId: TypeAlias = str
"""Id of a table, view, index or subscribe: ``u12`` (user), ``t3`` (transient)."""
ShardId: TypeAlias = str
Nonce: TypeAlias = str
"""Name of one client connection (a hex UUID)."""

TIME_MIN: Final = 0
TIME_MAX: Final = (1 << 62) - 1
EMPTY: Final = 1 << 62
"""The empty frontier: nothing more will come."""


def format_frontier(frontier: Frontier) -> str:
    """Return ``[t]`` for a time, ``[]`` for the empty frontier."""
    return "[]" if frontier >= EMPTY else f"[{frontier}]"


def frontier_or_null(frontier: Frontier | None) -> int | None:
    """Return a frontier as people see it: None when nothing is known of it (0: no time lies below
    it), or when it is empty."""
    return None if not frontier or is_empty(frontier) else frontier


def ms_behind(ahead: Frontier, behind: Frontier) -> int | None:
    """Return by how much one frontier is behind another; None when one is not known (0), or only
    the one ahead is empty."""
    if is_empty(behind):
        return 0
    if is_empty(ahead) or not ahead or not behind:
        return None
    return max(0, ahead - behind)


def is_empty(frontier: Frontier) -> bool:
    """Return whether nothing more will come."""
    return frontier >= EMPTY
