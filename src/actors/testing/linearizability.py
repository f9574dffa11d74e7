"""Whether what callers saw at the same time can have happened one after the other.

The search of Wing and Gong: the first of a history is a call that began before any other has
ended; it must answer what the model answers there; the rest is searched in the same way, and what
was searched once is remembered. A call whose outcome nobody knows may have happened at any instant
from its beginning on, or never. It is exact, and its effort exponential in the calls that overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Timed(Protocol):
    """A call: between which instants it was under way."""

    @property
    def began(self) -> float:
        """When it was made."""
        ...

    @property
    def ended(self) -> float | None:
        """When it was answered; None: nobody knows what came of it."""
        ...


def is_linearizable(
    calls: Sequence[Timed], initial: S, applied: Callable[[S, Any], S | None]
) -> bool:
    """Whether some order explains all answers. `applied` is the model: the state after a call
    that has happened in a state with the answer it got (of an open call: with any); None: it
    cannot have."""
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


def _end(call: Timed) -> float:
    assert call.ended is not None, "only calls that were answered are asked"
    return call.ended
