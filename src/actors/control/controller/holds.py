"""Retained history: the distance at which each shard's since follows its upper.

Every shard of an object has a durable hold of holder `RETAIN` at ``max(0, upper -
retain_history_ms)``. Reads and dataflows have holds of their own; a shard's since is the least of
all.

A hold never goes back; a shard that is closed (empty upper) keeps its hold. Pure: `move` returns
where a hold should go, its owner moves it and calls `moved`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.runtime.progress import Frontier, ObjectId, ShardId, Time, is_empty

RETAIN: Final = "retain"


def dataflow_holder(id_: ObjectId) -> str:
    """Return the holder of a dataflow on the shards it imports; the dataflow moves it."""
    return f"dataflow/{id_}"


def subscribe_holder(id_: ObjectId) -> str:
    """Return the holder of a running subscribe."""
    return f"subscribe/{id_}"


def copy_holder(id_: ObjectId) -> str:
    """Return the holder of a running copy."""
    return f"copy/{id_}"


def sink_holder(id_: ObjectId) -> str:
    """Return the holder of a sink; its task moves it behind the externally durable frontier."""
    return f"sink/{id_}"


class RetainedHistory(msgspec.Struct):
    """One shard's retained history."""

    retain_ms: int
    since: Time
    wanted: Time = 0
    """Time to which a move was requested: the hold may be there already."""


class RetainHolds:
    """The retain holds of all shards."""

    def __init__(self, grain_ms: int) -> None:
        self._grain_ms = grain_ms
        self._shards: dict[ShardId, RetainedHistory] = {}

    def track(self, shard: ShardId, retain_ms: int, since: Time) -> None:
        """Add a shard with a retain hold at `since`."""
        self._shards[shard] = RetainedHistory(retain_ms, since)

    def forget(self, shard: ShardId) -> None:
        """Remove a shard."""
        self._shards.pop(shard, None)

    def move(self, shard: ShardId, upper: Frontier) -> Time | None:
        """Return the time to which the hold should move, given the shard's upper; None: it
        stays."""
        kept = self._shards.get(shard)
        if kept is None or is_empty(upper):
            return None
        # At least 1, so that the last sealed time stays readable.
        target = max(0, upper - max(1, kept.retain_ms))
        # A move is a compare-and-set on the shard's record: wait until it frees a twentieth of the
        # history, and at least the grain.
        grain = max(1, min(self._grain_ms, kept.retain_ms), kept.retain_ms // 20)
        if target - kept.since < grain:
            return None
        kept.wanted = target
        return target

    def moved(self, shard: ShardId, since: Time) -> None:
        """Note that the hold was moved to `since`."""
        kept = self._shards.get(shard)
        if kept is not None:
            kept.since = max(kept.since, since)

    def keeps(self, shard: ShardId, time: Time) -> bool:
        """Return whether the hold alone makes the shard readable at that time; if False, it may
        still be."""
        kept = self._shards.get(shard)
        return kept is not None and time >= max(kept.since, kept.wanted)

    def since(self, shard: ShardId) -> Time:
        """Return the time of the hold; 0 if unknown."""
        kept = self._shards.get(shard)
        return 0 if kept is None else kept.since
