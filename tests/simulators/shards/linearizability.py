"""Checks whether the answers to concurrent calls fit some sequential order of these calls.

The search of Wing and Gong: the first of a history is a call that began before any other has ended;
its answer must be the model's; the rest is searched in the same way, and searched states are
remembered. A call with an unknown outcome may have happened at any instant from its beginning on,
or never. The search is exact, and its effort exponential in the number of overlapping calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class TimedCall(Protocol):
    """A call with the instants of its begin and end."""

    @property
    def began(self) -> float:
        """Return the instant of the call."""
        ...

    @property
    def ended(self) -> float | None:
        """Return the instant of the answer; None if the outcome is indeterminate."""
        ...


def is_linearizable(
    calls: Sequence[TimedCall], initial: S, applied: Callable[[S, Any], S | None]
) -> bool:
    """Return whether some order explains all answers. `applied` is the model: it returns the state
    after a call with its answer (any answer, for an indeterminate call), or None if the call cannot
    have had that answer in that state."""
    sure = frozenset(number for number, call in enumerate(calls) if call.ended is not None)
    seen: set[tuple[frozenset[int], S]] = set()
    stack: list[tuple[frozenset[int], S]] = [(frozenset(range(len(calls))), initial)]
    while stack:
        left, state = stack.pop()
        if not left & sure:
            return True
        if (left, state) in seen:
            continue
        seen.add((left, state))
        first_end = min(_end(calls[number]) for number in left & sure)
        for number in sorted(left):
            if calls[number].began <= first_end:
                then = applied(state, calls[number])
                if then is not None:
                    stack.append((left - {number}, then))
    return False


def _end(call: TimedCall) -> float:
    assert call.ended is not None, "only calls that were answered are asked"
    return call.ended
