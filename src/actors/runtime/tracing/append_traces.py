"""Carries trace contexts across durable shards, from appends to listeners.

A part holds rows and nothing of a trace, and a listener reads parts. So the process that appends
notes (shard, upper) → context here, and a listener in the same process looks it up by the interval
that it received. Kept are the last `NOTES_MAX` of a shard, of the last `SHARDS_MAX` shards.

A listener in another process, or one that comes to the append after a restart or later than the
bounds allow, finds no context: its step begins no trace and belongs to none.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from actors.runtime.progress import Frontier, ShardId, Time
from actors.runtime.spans import LINKS_MAX

NOTES_MAX: Final = 2 * LINKS_MAX
SHARDS_MAX: Final = 1024


class AppendTraceIndex:
    """The last sampled appends of each shard."""

    def __init__(self) -> None:
        self._by_shard: OrderedDict[ShardId, deque[tuple[Frontier, str]]] = OrderedDict()

    def note(self, shard: ShardId, upper: Frontier, traceparent: str) -> None:
        """Note a sampled append up to `upper`, before it is made; `forget` it when it fails."""
        notes = self._by_shard.setdefault(shard, deque(maxlen=NOTES_MAX))
        # Before the append: a listener that hears of it must find the note.
        notes.append((upper, traceparent))
        self._by_shard.move_to_end(shard)
        while len(self._by_shard) > SHARDS_MAX:
            self._by_shard.popitem(last=False)

    def forget(self, shard: ShardId, upper: Frontier, traceparent: str) -> None:
        """Remove the note of an append that was not made."""
        notes = self._by_shard.get(shard)
        if notes is not None and (upper, traceparent) in notes:
            notes.remove((upper, traceparent))

    def between(self, shard: ShardId, lower: Time, upper: Frontier) -> tuple[str, ...]:
        """Return the contexts of appends whose upper lies in ``lower < upper' <= upper``, oldest
        first."""
        if not self._by_shard:
            return ()
        notes = self._by_shard.get(shard, ())
        return tuple(context for noted, context in notes if lower < noted <= upper)
