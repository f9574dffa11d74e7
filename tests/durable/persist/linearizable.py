"""Whether what clients of a consensus saw at one time can have happened one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.durable.persist.location import CompareAndSet, VersionedData
from tests.simulators.shards.linearizability import is_linearizable as one_order_explains

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
    empty: State = ()
    return one_order_explains(calls, empty, applied)
