"""Seals the tables' shared upper while no client writes, where a view needs it.

A write seals the tables; an idle table costs nothing. But two kinds of views would stop: views that
read both tables and a source's table, and views over tables that compare rows with the clock. For
the first kind, the tables are sealed whenever a source's table was; for the second, up to the
current time every `clock_tick_ms`. In addition, history is retained relative to the upper: if the
upper stopped, the last changes before a pause, and everything that they replaced, would be retained
until the next write. So the tables are also sealed occasionally until the last write is no longer
within the retained history. One tick of the table writer seals all tables.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from actors.control.controller.catalog.catalog import TABLE, CatalogSnapshot
from actors.control.controller.messages import TablesAdvanced, TickTables
from actors.control.controller.state import ControllerState
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Frontier, ObjectId, is_empty

log = logging.getLogger("penstock.controller")

HISTORY_STEPS: Final = 20
"""Maximum number of ticks made after the last write to release retained history."""


class TablesTicked(msgspec.Struct, frozen=True, gc=False):
    """A tick has ended; `error` is None if the tables were sealed."""

    error: PenstockError | None = None


class ClockDue(msgspec.Struct, frozen=True, gc=False):
    """The timer of clock ticks has fired."""


class TableTicks:
    """Ticks the table writer; at most one tick runs at a time."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._catalog: CatalogSnapshot | None = None
        """The catalog that was last inspected by `_look`."""
        self._mixed: frozenset[ObjectId] = frozenset()
        """Source tables with a dependent that also reads clients' tables."""
        self._clocked = False
        """True if a view over clients' tables follows the clock."""
        self._ticking = False
        """True while a tick runs."""
        self._wanted: Frontier = 0
        """Frontier up to which the tables should be sealed."""
        self._kept_ms: int | None = None
        """The longest retained history of any object (ms); None if there are no tables."""
        # Treat the writes of earlier processes as still within the history.
        self._last_write: Frontier = state.frontiers.tables_upper

    def begin(self) -> None:
        """Start the timer of the next clock tick."""
        self._state.ctx.after(self._state.settings.clock_tick_ms, ClockDue())

    def clock_due(self) -> None:
        """Seal the tables up to the current time if a view over them compares rows with the clock,
        or if history is to be released."""
        self._look()
        if self._clocked or self._is_history_due():
            self._wanted = max(self._wanted, self._state.ctx.now_ms())
            self._tick()
        self.begin()

    def tables_advanced(self, message: TablesAdvanced) -> None:
        """Record when rows were last written."""
        if message.wrote:
            self._last_write = max(self._last_write, message.upper)

    def _is_history_due(self) -> bool:
        upper = self._state.frontiers.tables_upper
        if self._kept_ms is None or upper - self._kept_ms > self._last_write:
            return False
        step = max(self._state.settings.reclaim_ms, self._kept_ms // HISTORY_STEPS)
        return self._state.ctx.now_ms() - upper >= step

    def advanced(self, id_: ObjectId) -> None:
        """Seal the tables up to the new upper of a source's table, if a view reads both."""
        state = self._state
        self._look()
        if id_ not in self._mixed:
            return
        upper = state.frontiers.sealed_below(id_)
        if not is_empty(upper):
            self._wanted = max(self._wanted, upper)
            self._tick()

    def tick_ended(self, message: TablesTicked) -> None:
        """Tick again if the wanted time is not sealed yet. A failed tick is retried at the next
        advance."""
        self._ticking = False
        if message.error is not None:
            log.warning("the tables could not be sealed: %s", message.error)
        else:
            # Sources may have advanced while this tick ran.
            self._tick()

    def _tick(self) -> None:
        state = self._state
        writer = state.writer
        if self._ticking or state.frontiers.tables_upper >= self._wanted:
            return
        self._ticking = True
        state.ctx.effect(
            lambda: writer.ask(TickTables),
            done=lambda _: TablesTicked(),
            failed=lambda error: TablesTicked(
                error if isinstance(error, PenstockError) else PenstockError(str(error))
            ),
        )

    def _look(self) -> None:
        """Find the source tables that share a dependent with clients' tables, and whether a view
        over tables follows the clock."""
        catalog = self._state.catalog
        if catalog is self._catalog:
            return
        below = [(entry, catalog.below(entry.id)) for entry in catalog.objects]
        # None stands for the tables that clients write (`CatalogSnapshot.below`).
        on_tables = [(entry, ids) for entry, ids in below if None in ids]
        mixed = [ids for _, ids in on_tables if len(ids) > 1]
        found = frozenset().union(*mixed) - {None}
        self._catalog, self._mixed = catalog, frozenset(id_ for id_ in found if id_)
        self._clocked = any(entry.plan and entry.plan.temporal for entry, _ in on_tables)
        settings = self._state.settings
        kept = [entry.retain_history_ms or settings.retain_history_ms for entry in catalog.objects]
        has_tables = any(entry.kind == TABLE for entry in catalog.objects)
        self._kept_ms = max([settings.index_history_ms, *kept]) if has_tables else None
