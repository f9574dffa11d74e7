"""Seals the tables' shared upper while no client writes, where a view needs that.

A write seals the tables; an idle table costs nothing. Two kinds of views would come to a halt:
those that read tables and a source's table, and those over tables that compare rows with the clock.
For the first, the tables are sealed whenever a source's table was; for the second, up to now every
`clock_tick_ms`. One tick of the table writer seals all tables.
"""

from __future__ import annotations

import logging

import msgspec

from actors.controller.catalog.catalog import CatalogSnapshot
from actors.controller.messages import TickTables
from actors.controller.state import ControllerState
from actors.errors import PenstockError
from actors.progress import Frontier, ObjectId, is_empty

log = logging.getLogger("penstock.controller")


class TablesTicked(msgspec.Struct, frozen=True, gc=False):
    """A tick has ended; `error` is None if the tables were sealed."""

    error: PenstockError | None = None


class ClockDue(msgspec.Struct, frozen=True, gc=False):
    """The timer of the clock views has fired."""


class TableTicks:
    """Ticks the table writer; at most one tick runs at a time."""

    def __init__(self, desk: ControllerState) -> None:
        self._desk = desk
        self._catalog: CatalogSnapshot | None = None
        self._mixed: frozenset[ObjectId] = frozenset()
        self._clocked = False
        self._ticking = False
        self._wanted: Frontier = 0

    def begin(self) -> None:
        """Start the timer of the next clock tick."""
        self._desk.ctx.after(self._desk.settings.clock_tick_ms, ClockDue())

    def clock_due(self) -> None:
        """Seal the tables up to now if a view over them compares rows with the clock."""
        self._look()
        if self._clocked:
            self._wanted = max(self._wanted, self._desk.ctx.now_ms())
            self._tick()
        self.begin()

    def advanced(self, id_: ObjectId) -> None:
        """Seal the tables up to the new upper of a source's table, if a view reads both."""
        desk = self._desk
        self._look()
        if id_ not in self._mixed:
            return
        upper = desk.frontiers.sealed_below(id_)
        if not is_empty(upper):
            self._wanted = max(self._wanted, upper)
            self._tick()

    def tick_ended(self, message: TablesTicked) -> None:
        """Tick again if the wanted time is not sealed yet. A failed tick is retried at the next
        advance."""
        self._ticking = False
        if message.error is not None:
            log.warning("the tables could not be sealed further: %s", message.error)
        else:
            # Sources may have advanced while this tick ran.
            self._tick()

    def _tick(self) -> None:
        desk = self._desk
        writer = desk.writer
        if self._ticking or writer is None or desk.frontiers.tables_upper >= self._wanted:
            return
        self._ticking = True
        desk.ctx.effect(
            lambda: writer.ask(TickTables),
            done=lambda _: TablesTicked(),
            failed=lambda error: TablesTicked(
                error if isinstance(error, PenstockError) else PenstockError(str(error))
            ),
        )

    def _look(self) -> None:
        """Note the source tables that share a dependent with tables, and whether a view over tables
        follows the clock."""
        catalog = self._desk.catalog
        if catalog is self._catalog:
            return
        below = [(entry, catalog.below(entry.id)) for entry in catalog.objects]
        # None stands for the tables that clients write (`CatalogSnapshot.below`).
        on_tables = [(entry, ids) for entry, ids in below if None in ids]
        mixed = [ids for _, ids in on_tables if len(ids) > 1]
        found = frozenset().union(*mixed) - {None}
        self._catalog, self._mixed = catalog, frozenset(id_ for id_ in found if id_)
        self._clocked = any(entry.plan and entry.plan.temporal for entry, _ in on_tables)
