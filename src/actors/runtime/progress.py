"""Ids, times and frontiers: the arithmetic of since and upper.

Times are totally ordered: a time is an int64 of milliseconds. A frontier describes the times still
to come. With a total order it is either one time, the earliest still to come, or the empty
frontier `EMPTY`: no more times come. `EMPTY` is greater than every time, so plain comparison,
`min` (meet) and `max` (join) work on frontiers. All intervals are half-open: ``lower <= t <
upper``.

Invariants: ``0 <= t <= TIME_MAX < EMPTY``; frontiers never go back; `EMPTY` is final.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Time: TypeAlias = int
"""Milliseconds since the epoch, an int64."""
Frontier: TypeAlias = int
"""A time, or `EMPTY`."""
ObjectId: TypeAlias = str
"""Id of a table, view, index or subscribe: ``u12`` (user), ``t3`` (transient)."""
ShardId: TypeAlias = str
"""Id of a shard."""
Nonce: TypeAlias = str
"""Name of one client connection to a replica (a hex UUID)."""

TIME_MIN: Final = 0
TIME_MAX: Final = (1 << 62) - 1
EMPTY: Final = 1 << 62
"""The empty frontier: no more times come."""


def format_frontier(frontier: Frontier) -> str:
    """Format a frontier for display: ``[t]`` for a time, ``[]`` for the empty frontier."""
    return "[]" if frontier >= EMPTY else f"[{frontier}]"


def frontier_or_null(frontier: Frontier | None) -> int | None:
    """Return a frontier as relations show it: None if it is unknown (0 or None) or empty."""
    return None if not frontier or is_empty(frontier) else frontier


def ms_behind(ahead: Frontier, behind: Frontier) -> int | None:
    """Return how many milliseconds `behind` is behind `ahead`, at least 0.

    Returns None if a frontier is unknown (0), or if `ahead` is empty and `behind` is not.
    """
    if is_empty(behind):
        return 0
    if is_empty(ahead) or not ahead or not behind:
        return None
    return max(0, ahead - behind)


def is_empty(frontier: Frontier) -> bool:
    """Return whether a frontier is empty: no more times come."""
    return frontier >= EMPTY
