"""Retained history: how far each shard's since may follow its upper.

Theory of operation. Every shard of an object has a durable hold of holder `RETAIN` at
``max(0, upper - retain_history_ms)``, moved now and then: a move is one compare-and-set on the
shard's record, so it waits until it would free a twentieth of the history kept, or a second.
Reads and dataflows have holds of their own; a shard's since is the least of all.

Rules: a hold never goes back; a shard that is closed (empty upper) keeps its hold. It does not
talk to persist: `moves` says what to do, its owner does it and calls `moved`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.progress import Frontier, ObjectId, ShardId, Time, is_empty

RETAIN: Final = "retain"


def dataflow_holder(id_: ObjectId) -> str:
    """Holder of a dataflow on the shards it imports; the dataflow moves it."""
    return f"dataflow/{id_}"


def subscribe_holder(id_: ObjectId) -> str:
    """Holder of a running subscribe."""
    return f"subscribe/{id_}"


def copy_holder(id_: ObjectId) -> str:
    """Holder of a running copy."""
    return f"copy/{id_}"


def sink_holder(id_: ObjectId) -> str:
    """Holder of a sink; its task moves it behind what is durable outside."""
    return f"sink/{id_}"


class Retained(msgspec.Struct):
    """One shard's retained history."""

    retain_ms: int
    since: Time
    wanted: Time = 0
    """Where the hold may stand already: a move to there was asked for."""


class RetainHolds:
    """The retain holds of all shards."""

    def __init__(self, grain_ms: int) -> None:
        self._grain_ms = grain_ms
        self._shards: dict[ShardId, Retained] = {}

    def track(self, shard: ShardId, retain_ms: int, since: Time) -> None:
        """A shard exists, with a retain hold at `since`."""
        self._shards[shard] = Retained(retain_ms, since)

    def forget(self, shard: ShardId) -> None:
        """The shard is gone."""
        self._shards.pop(shard, None)

    def move(self, shard: ShardId, upper: Frontier) -> Time | None:
        """Where the hold should go now that the upper is `upper`; None: stay."""
        kept = self._shards.get(shard)
        if kept is None or is_empty(upper):
            return None
        target = max(0, upper - max(1, kept.retain_ms))
        grain = max(1, min(self._grain_ms, kept.retain_ms), kept.retain_ms // 20)
        if target - kept.since < grain:
            return None
        kept.wanted = target
        return target

    def moved(self, shard: ShardId, since: Time) -> None:
        """The hold stands at `since`."""
        kept = self._shards.get(shard)
        if kept is not None:
            kept.since = max(kept.since, since)

    def keeps(self, shard: ShardId, time: Time) -> bool:
        """Whether the hold alone makes the shard readable at that time; if not, it may be so."""
        kept = self._shards.get(shard)
        return kept is not None and time >= max(kept.since, kept.wanted)

    def since(self, shard: ShardId) -> Time:
        """Where the hold stands (0 for a stranger)."""
        kept = self._shards.get(shard)
        return 0 if kept is None else kept.since
