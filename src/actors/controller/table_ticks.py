"""Moving the tables' upper while nobody writes, where something needs it.

Tables seal a time only when one is written: an idle table costs nothing. A view that stands on
tables *and* on a source's table could then go on no further than the last write. So as long as
there is one, the tables are sealed after the sources: when a source has got on, and no write has
moved the tables past it, one tick of the table writer does, for all tables together. And a view
that compares rows with the clock changes without any write: as long as there is one over tables,
they are sealed up to now every `clock_tick_ms`.
"""

from __future__ import annotations

import logging

import msgspec

from actors.controller.catalog import Catalog
from actors.controller.desk import Desk
from actors.controller.messages import Tick
from actors.errors import PenstockError
from actors.progress import Frontier, ObjectId, is_empty

log = logging.getLogger("penstock.controller")


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """A tick is over."""

    error: PenstockError | None = None


class ClockDue(msgspec.Struct, frozen=True, gc=False):
    """Time to seal the tables for views that follow the clock, if there are any."""


class TableTicks:
    """A part of the controller. At most one tick is under way."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._catalog: Catalog | None = None
        self._mixed: frozenset[ObjectId] = frozenset()
        self._clocked = False
        self._ticking = False
        self._wanted: Frontier = 0

    def begin(self) -> None:
        """Looks at the clock, again and again."""
        self._desk.ctx.after(self._desk.settings.clock_tick_ms, ClockDue())

    def clock_due(self) -> None:
        """Seals the tables up to now where a view over them follows the clock."""
        self._look()
        if self._clocked:
            self._wanted = max(self._wanted, self._desk.ctx.now_ms())
            self._tick()
        self.begin()

    def advanced(self, id_: ObjectId) -> None:
        """A source's table is sealed further."""
        desk = self._desk
        self._look()
        if id_ not in self._mixed:
            return
        upper = desk.frontiers.sealed_below(id_)
        if not is_empty(upper):
            self._wanted = max(self._wanted, upper)
            self._tick()

    def ticked(self, message: Ticked) -> None:
        """A tick is over; what failed is tried again when a source gets on."""
        self._ticking = False
        if message.error is not None:
            log.warning("the tables could not be sealed further: %s", message.error)
        else:
            self._tick()

    def _tick(self) -> None:
        desk = self._desk
        writer = desk.writer
        if self._ticking or writer is None or desk.frontiers.tables_upper >= self._wanted:
            return
        self._ticking = True
        desk.ctx.effect(
            lambda: writer.ask(Tick),
            done=lambda _: Ticked(),
            failed=lambda error: Ticked(
                error if isinstance(error, PenstockError) else PenstockError(str(error))
            ),
        )

    def _look(self) -> None:
        """Notes the source tables below objects that stand on tables too, and whether a view over
        tables follows the clock."""
        catalog = self._desk.catalog
        if catalog is self._catalog:
            return
        below = [(entry, catalog.below(entry.id)) for entry in catalog.objects]
        on_tables = [(entry, ids) for entry, ids in below if None in ids]
        mixed = [ids for _, ids in on_tables if len(ids) > 1]
        found = frozenset().union(*mixed) - {None}
        self._catalog, self._mixed = catalog, frozenset(id_ for id_ in found if id_)
        self._clocked = any(entry.plan and entry.plan.temporal for entry, _ in on_tables)
