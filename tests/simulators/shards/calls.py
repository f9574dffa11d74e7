"""Records every append with its answer, and checks that the answers are possible.

Rules (`CheckerViolation` begins with the word):

- *appends*: one that was acknowledged became durable between its beginning and its end, once, with
  just its rows; one that failed determinately, or met another upper, never did; an upper in an
  answer was the shard's at some instant of the call;
- *linearizable*: all answers about one shard together can be explained by one order of its appends
  (the search does not use the truth: a model of a register, `linearizability`).

A call whose process died, or whose failure was indeterminate, may have happened or not, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from tests.simulators.service.history import CheckerViolation
from tests.simulators.shards.linearizability import is_linearizable
from tests.simulators.shards.truth import ShardTruth

OPEN: Final = "open"
DONE: Final = "appended"
OTHER: Final = "mismatch"
NEVER: Final = "failed"


class CallInterval(msgspec.Struct, frozen=True):
    """The part of a call that is for one shard."""

    lower: int
    upper: int
    rows: frozenset[tuple[int, int, int]]


class AppendCall(msgspec.Struct):
    """One append, over one shard or several."""

    process: int
    began: int
    intervals: dict[str, CallInterval]
    ended: int | None = None
    outcome: str = OPEN
    shard: str = ""
    """Shard of a mismatch."""
    current: int = 0
    """Upper in the answer of a mismatch."""

    def done(self, at: int, outcome: str) -> None:
        """Note the answer."""
        self.ended, self.outcome = at, outcome


class _Seen(msgspec.Struct, frozen=True):
    """A call as one shard saw it."""

    began: int
    ended: int | None
    lower: int
    upper: int
    outcome: str
    current: int


def check(calls: Iterable[AppendCall], shards: dict[str, ShardTruth]) -> None:
    """Check all calls, when none is under way any more. Raises `CheckerViolation`."""
    calls = list(calls)
    for call in calls:
        for name, interval in call.intervals.items():
            _check_call(call, name, interval, shards[name])
    for name, shard in shards.items():
        told = [
            _Seen(c.began, c.ended, i.lower, i.upper, c.outcome, c.current)
            for c in calls
            if (i := c.intervals.get(name)) is not None
            and c.outcome in (OPEN, DONE, OTHER)
            and (c.outcome != OTHER or c.shard == name)
        ]
        if not is_linearizable(told, shard.uppers[0][1], _applied):
            raise CheckerViolation(
                f"linearizable: no order of the appends to {name} explains them all"
            )
        _check_once(name, calls, shard)


def _check_call(call: AppendCall, name: str, interval: CallInterval, shard: ShardTruth) -> None:
    found = shard.appends.get(interval.lower)
    mine = found is not None and (found.upper, found.rows) == (interval.upper, interval.rows)
    # An interval without rows may be of another call: its presence proves nothing of this one.
    surely_mine = mine and bool(interval.rows)
    if call.outcome == DONE:
        if found is None or not mine:
            raise CheckerViolation(f"appends: {call} was acknowledged; durable is {found}")
        assert call.ended is not None, "it was answered"
        if not call.began <= found.at <= call.ended:
            raise CheckerViolation(f"appends: {call} was durable at {found.at}, not meanwhile")
    elif call.outcome in (NEVER, OTHER) and surely_mine:
        raise CheckerViolation(f"appends: {call} is durable all the same: {found}")
    if call.outcome == OTHER and call.shard == name and not _was(shard, call):
        raise CheckerViolation(f"appends: {call}: that was not the upper of {name} meanwhile")


def _was(shard: ShardTruth, call: AppendCall) -> bool:
    """Return whether the mismatch's upper was the shard's, at any instant of the call."""
    assert call.ended is not None, "it was answered"
    ends = [at for at, _ in shard.uppers[1:]] + [call.ended + 1]
    for (at, upper), end in zip(shard.uppers, ends, strict=True):
        if upper == call.current and at <= call.ended and end >= call.began:
            return True
    return False


def _check_once(name: str, calls: list[AppendCall], shard: ShardTruth) -> None:
    """Check that each value was appended once, and only as requested."""
    asked = {
        (i.lower, i.upper, i.rows) for call in calls if (i := call.intervals.get(name)) is not None
    }
    for append in shard.appends.values():
        if (append.lower, append.upper, append.rows) not in asked:
            raise CheckerViolation(f"appends: nobody asked for {append} of {name}")
    new = Counter(
        value for append in shard.appends.values() for value, _, n in append.rows if n > 0
    )
    twice = [value for value, count in new.items() if count > 1]
    if twice:
        raise CheckerViolation(f"appends: the rows {twice} of {name} were appended twice")


def _applied(upper: int, call: _Seen) -> int | None:
    if call.outcome == OTHER:
        return upper if upper == call.current != call.lower else None
    return call.upper if upper == call.lower else None
