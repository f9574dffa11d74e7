"""Retained history: how far behind its upper each shard keeps its since.

Every shard of an object has a durable hold, with the holder `RETAIN`, at ``max(0, upper -
retain_history_ms)``. Reads and dataflows have holds of their own; a shard's since is the minimum of
all.

A hold never goes back, and a closed shard (empty upper) keeps its hold. Pure: `move` returns where
a hold should go; the owner moves it and calls `moved`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.runtime.progress import Frontier, ObjectId, ShardId, Time, is_empty

RETAIN: Final = "retain"


def dataflow_holder(id_: ObjectId) -> str:
    """Return the holder for a dataflow's holds on the shards it imports; the dataflow moves
    them."""
    return f"dataflow/{id_}"


def subscribe_holder(id_: ObjectId) -> str:
    """Return the holder for a running subscribe."""
    return f"subscribe/{id_}"


def copy_holder(id_: ObjectId) -> str:
    """Return the holder for a running copy."""
    return f"copy/{id_}"


def sink_holder(id_: ObjectId) -> str:
    """Return the holder for a sink, whose task moves the hold after the externally durable
    frontier."""
    return f"sink/{id_}"


class RetainedHistory(msgspec.Struct):
    """The retained history of one shard."""

    retain_ms: int
    """How much history to retain, in ms."""
    since: Time
    """Time of the durable hold, as last confirmed."""
    wanted: Time = 0
    """Time to which a move was requested; the hold may already be there."""


class RetainHolds:
    """The retain holds of all shards."""

    def __init__(self, grain_ms: int) -> None:
        self._grain_ms = grain_ms
        self._shards: dict[ShardId, RetainedHistory] = {}
        """Retained history of each tracked shard."""

    def track(self, shard: ShardId, retain_ms: int, since: Time) -> None:
        """Start tracking a shard with a retain hold at `since`."""
        self._shards[shard] = RetainedHistory(retain_ms, since)

    def forget(self, shard: ShardId) -> None:
        """Stop tracking a shard."""
        self._shards.pop(shard, None)

    def move(self, shard: ShardId, upper: Frontier) -> Time | None:
        """Return the time to which the hold should move, given the shard's upper, or None if it
        stays."""
        kept = self._shards.get(shard)
        if kept is None or is_empty(upper):
            return None
        # At least 1 ms, so that the last sealed time stays readable.
        target = max(0, upper - max(1, kept.retain_ms))
        # A move is a compare-and-set on the shard's document: wait until it frees a twentieth of
        # the history, and at least the grain.
        grain = max(1, min(self._grain_ms, kept.retain_ms), kept.retain_ms // 20)
        if target - kept.since < grain:
            return None
        kept.wanted = target
        return target

    def moved(self, shard: ShardId, since: Time) -> None:
        """Record that the hold was moved to `since`."""
        kept = self._shards.get(shard)
        if kept is not None:
            kept.since = max(kept.since, since)

    def keeps(self, shard: ShardId, time: Time) -> bool:
        """Return whether the hold guarantees that the shard is readable at that time. If not, the
        shard may still be readable."""
        kept = self._shards.get(shard)
        return kept is not None and time >= max(kept.since, kept.wanted)

    def since(self, shard: ShardId) -> Time:
        """Return the time of the hold; 0 if unknown."""
        kept = self._shards.get(shard)
        return 0 if kept is None else kept.since
