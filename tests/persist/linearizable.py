"""Whether what clients of a consensus saw at the same time can have happened one after the other.

The search of Wing and Gong: the first of a history is an operation that began before any other has
ended; it must answer what the model answers; the rest is searched in the same way, and what was
searched once is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.persist.location import CompareAndSet, VersionedData

State = tuple[tuple[str, VersionedData], ...]
"""Documents by key, in order."""


class Call(msgspec.Struct, frozen=True):
    """One operation: what was asked, what was answered, and between which instants."""

    began: int
    ended: int
    asked: str | tuple[CompareAndSet, ...]
    """A key that was read; or a set."""
    answer: Any


def applied(state: State, call: Call) -> State | None:
    """The state after it; None: it cannot answer that here."""
    documents = dict(state)
    if isinstance(call.asked, str):
        return state if documents.get(call.asked) == call.answer else None
    holds = all(
        (None if (held := documents.get(op.key)) is None else held.seqno) == op.expected
        for op in call.asked
    )
    if holds is not call.answer:
        return None
    if holds:
        for op in call.asked:
            if op.data is None:
                documents.pop(op.key, None)
            else:
                documents[op.key] = VersionedData(op.seqno, op.data)
    return tuple(sorted(documents.items()))


def is_linearizable(calls: Sequence[Call]) -> bool:
    """Whether some order explains all answers."""
    seen: set[tuple[frozenset[int], State]] = set()
    stack: list[tuple[frozenset[int], State]] = [(frozenset(range(len(calls))), ())]
    while stack:
        left, state = stack.pop()
        if not left:
            return True
        if (left, state) in seen:
            continue
        seen.add((left, state))
        first_end = min(calls[number].ended for number in left)
        for number in left:
            if calls[number].began < first_end:
                then = applied(state, calls[number])
                if then is not None:
                    stack.append((left - {number}, then))
    return False
