"""Carries trace contexts across durable shards, from appends to listeners.

Parts contain rows and no trace context, and listeners read parts. So the process that appends
records (shard, upper) → context here, and a listener in the same process looks it up by the
interval that it received. The index keeps the last `NOTES_MAX` appends of each of the last
`SHARDS_MAX` shards.

A listener finds no context if it runs in another process, or reads the append after a restart or
after the index has dropped it. Its step then belongs to no trace.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from actors.runtime.progress import Frontier, ShardId, Time
from actors.runtime.spans import LINKS_MAX

NOTES_MAX: Final = 2 * LINKS_MAX
"""Appends remembered for each shard."""
SHARDS_MAX: Final = 1024
"""Shards remembered."""


class AppendTraceIndex:
    """The last sampled appends of each shard."""

    def __init__(self) -> None:
        self._by_shard: OrderedDict[ShardId, deque[tuple[Frontier, str]]] = OrderedDict()
        """(upper, context) of the last appends to each shard; the latest shard is last."""

    def note(self, shard: ShardId, upper: Frontier, traceparent: str) -> None:
        """Record a sampled append up to `upper`. Call it before the append, and `forget` if the
        append fails."""
        notes = self._by_shard.setdefault(shard, deque(maxlen=NOTES_MAX))
        # Before the append, because a listener that sees the append must find the note.
        notes.append((upper, traceparent))
        self._by_shard.move_to_end(shard)
        while len(self._by_shard) > SHARDS_MAX:
            self._by_shard.popitem(last=False)

    def forget(self, shard: ShardId, upper: Frontier, traceparent: str) -> None:
        """Remove the record of an append that failed."""
        notes = self._by_shard.get(shard)
        if notes is not None and (upper, traceparent) in notes:
            notes.remove((upper, traceparent))

    def between(self, shard: ShardId, lower: Time, upper: Frontier) -> tuple[str, ...]:
        """Return the contexts of the appends with an upper in ``(lower, upper]``, oldest first."""
        if not self._by_shard:
            return ()
        notes = self._by_shard.get(shard, ())
        return tuple(context for noted, context in notes if lower < noted <= upper)
