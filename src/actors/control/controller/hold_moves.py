"""Advances holds as uppers advance, at intervals and in one batch.

These are the retain holds of shards (`holds.RetainHolds`), those of indexes, which keep a short
history, and those of subscribes. If a round fails, the next one moves them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from actors.control.controller.catalog.catalog import INDEX, CatalogObject
from actors.control.controller.holds import RETAIN, dataflow_holder
from actors.control.controller.state import ControllerState, to_penstock_error
from actors.model.protocol.compute import AllowCompaction
from actors.runtime.errors import PenstockError, UnknownObject
from actors.runtime.progress import ShardId, Time, is_empty

log = logging.getLogger("penstock.controller")

Move: TypeAlias = tuple[ShardId, str, Time]


class HoldsDue(msgspec.Struct, frozen=True, gc=False):
    """The timer of the next round has fired."""


class HoldsMoved(msgspec.Struct, frozen=True, gc=False):
    """A round has ended; `error` is None if the holds were moved."""

    moves: tuple[Move, ...]
    error: PenstockError | None = None


class HoldMoves:
    """Moves holds, one batch at a time."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._moving = False
        """True while a batch is being made durable."""

    def begin(self) -> None:
        """Start the timer of the next round."""
        self._state.ctx.after(self._state.settings.hold_downgrade_ms, HoldsDue())

    def move(self, others: Iterable[Move]) -> None:
        """Move all holds that lag, and the `others`."""
        self.begin()
        if self._moving:
            return
        state = self._state
        moves = list(others)
        for entry in state.catalog.objects:
            if entry.id in state.catalog.quarantined:
                continue  # its holds do not move
            if entry.kind == INDEX:
                moves += self._compact_index(entry)
            elif entry.shard is not None:
                since = state.retain.move(entry.shard, state.frontiers.upper(entry))
                if since is not None:
                    moves.append((entry.shard, RETAIN, since))
        if not moves:
            return
        self._moving = True
        wanted = tuple(moves)
        state.ctx.effect(
            lambda: state.persist.set_holds(list(wanted)),
            done=lambda _: HoldsMoved(wanted),
            failed=lambda error: HoldsMoved(wanted, to_penstock_error(error)),
        )

    def _compact_index(self, entry: CatalogObject) -> list[Move]:
        """Compact an index to a short history. Return the move of its hold to the time from which
        it would be rebuilt."""
        state = self._state
        upper = state.frontiers.upper(entry)
        since = upper - max(1, state.settings.index_history_ms)
        now = state.frontiers.readable_from(entry.id)
        shard = state.catalog.by_id(entry.depends[0]).shard
        if is_empty(upper) or since - now < state.settings.hold_downgrade_ms or shard is None:
            return []
        # From now on, reads below the new since use the shard (`choose_ways`).
        state.frontiers.compacted(entry.id, since)
        state.command(AllowCompaction(entry.dataflow_id, since))
        return [(shard, dataflow_holder(entry.dataflow_id), since)]

    def moved(self, message: HoldsMoved) -> None:
        """End a round."""
        self._moving = False
        error = message.error
        if isinstance(error, UnknownObject):  # dropped in the meantime; the next round omits it
            log.debug("holds were not moved this time: %s", error)
            return
        if error is not None:
            log.warning("holds were not moved this time: %s: %s", type(error).__name__, error)
            return
        for shard, holder, since in message.moves:
            if holder == RETAIN:
                self._state.retain.moved(shard, since)
