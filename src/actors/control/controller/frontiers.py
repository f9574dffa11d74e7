"""Uppers and statuses of all objects, as the controller knows them. Pure.

Tables share one upper; views, indexes, sources and sinks report theirs. Durable uppers never go
back. An index is in the replicas' memory: its upper goes back when the furthest replica is lost
(`replicas`).
"""

from __future__ import annotations

import bisect
from typing import Final

from actors.control.controller.catalog.catalog import TABLE, CatalogObject
from actors.model.protocol.compute import Frontiers, StatusResponse
from actors.runtime.progress import Frontier, ObjectId, Time

_MOVES_MAX: Final = 4_096
"""Number of the tables' uppers that are remembered at least; twice as many at most."""


class ObjectFrontiers:
    """Uppers of all objects, the as-of from which each index reads, and latest statuses."""

    def __init__(self, tables_upper: Frontier) -> None:
        self.tables_upper: Frontier = tables_upper
        self._moves: list[Frontier] = []
        """The latest uppers of the tables, ascending."""
        self._uppers: dict[ObjectId, Frontier] = {}
        self._readable_from: dict[ObjectId, Time] = {}
        self._statuses: dict[ObjectId, StatusResponse] = {}
        self._began_ms: dict[ObjectId, Time] = {}
        self._behind_ms: dict[ObjectId, int] = {}

    def track(
        self, entry: CatalogObject, upper: Frontier, readable_from: Time = 0, *, now_ms: Time
    ) -> None:
        """Add an object; `readable_from`: an index's first readable time."""
        if entry.kind == TABLE:
            return
        self._began_ms[entry.id] = now_ms
        self._uppers[entry.id] = upper
        self._readable_from[entry.id] = readable_from

    def forget(self, id_: ObjectId) -> None:
        """Remove an object."""
        self._uppers.pop(id_, None)
        self._readable_from.pop(id_, None)
        self._statuses.pop(id_, None)
        self._began_ms.pop(id_, None)
        self._behind_ms.pop(id_, None)

    def tracked_since_ms(self, id_: ObjectId) -> Time:
        """Return the time since which this service has run the object."""
        return self._began_ms[id_]

    def note_behind(self, source: ObjectId, ms: int | None) -> None:
        """Note by how many ms a source is behind its external system; None: unknown."""
        if source in self._uppers:
            self._behind_ms[source] = ms or 0

    def behind_ms(self, source: ObjectId) -> int:
        """Return the last known distance of a source from its external system, in ms."""
        return self._behind_ms.get(source, 0)

    def advance_tables(self, upper: Frontier) -> bool:
        """Seal all tables below `upper`. Return whether that is news."""
        news = upper > self.tables_upper
        if news:
            self.tables_upper = upper
            self._moves.append(upper)
            if len(self._moves) > 2 * _MOVES_MAX:
                # In blocks: deleting one at a time would shift the whole list each time.
                del self._moves[:_MOVES_MAX]
        return news

    def missing_since(self, table: CatalogObject, upper: Frontier) -> Time:
        """Return the time since which an object sealed below `upper` lacks a change of the table;
        `upper` itself for a source's table, which advances without changes."""
        place = bisect.bisect_right(self._moves, upper)
        if table.kind != TABLE or place in (0, len(self._moves)):
            return upper  # the move may be older than those that are remembered
        # The first move beyond `upper` has sealed the first change that is missing, at one less.
        return self._moves[place] - 1

    def report(self, report: Frontiers) -> bool:
        """Take a replica's report. Return whether the object's upper moved."""
        known = self._uppers.get(report.id)
        if known is None or report.write is None or report.write <= known:
            return False
        self._uppers[report.id] = report.write
        return True

    def sealed(self, id_: ObjectId, upper: Frontier) -> bool:
        """Take the upper of a source, its table, or a sink. Return whether it moved."""
        known = self._uppers.get(id_)
        if known is None or upper <= known:
            return False
        self._uppers[id_] = upper
        return True

    def note(self, status: StatusResponse) -> None:
        """Remember a dataflow's status."""
        if status.id in self._uppers:
            self._statuses[status.id] = status

    def status(self, id_: ObjectId) -> StatusResponse | None:
        """Return the latest status of a dataflow."""
        return self._statuses.get(id_)

    def upper(self, entry: CatalogObject) -> Frontier:
        """Return the frontier below which the object is sealed."""
        if entry.kind == TABLE:
            return self.tables_upper
        return self._uppers.get(entry.id, 0)

    def sealed_below(self, id_: ObjectId) -> Frontier:
        """Return the upper of an object that clients do not write."""
        return self._uppers.get(id_, 0)

    def compacted(self, index: ObjectId, since: Time) -> None:
        """Note that an index is readable from `since` on."""
        if index in self._readable_from:
            self._readable_from[index] = max(self._readable_from[index], since)

    def readable_from(self, index: ObjectId) -> Time:
        """Return an index's first readable time."""
        return self._readable_from.get(index, 0)

    def lower_index_upper(self, index: ObjectId, upper: Frontier) -> None:
        """Lower an index's upper to that of the remaining replicas."""
        if index in self._uppers:
            self._uppers[index] = upper
