"""Uppers and statuses of all objects, as the controller knows them. Pure.

Tables share one upper; views, indexes, sources and sinks report their own. Durable uppers never go
back. An index is in the memory of the replicas, so its upper goes back when the replica that is
furthest ahead is lost (`replicas`).
"""

from __future__ import annotations

import bisect
from typing import Final

from actors.control.controller.catalog.catalog import TABLE, CatalogObject
from actors.model.protocol.compute import Frontiers, StatusResponse
from actors.runtime.progress import Frontier, ObjectId, Time

_MOVES_MAX: Final = 4_096
"""Minimum number of the tables' uppers to remember; at most twice as many are kept."""


class ObjectFrontiers:
    """Uppers of all objects, the time from which each index is readable, and the latest
    statuses."""

    def __init__(self, tables_upper: Frontier) -> None:
        self.tables_upper: Frontier = tables_upper
        """Shared upper of all tables; `advance_tables` advances it."""
        self._moves: list[Frontier] = []
        """The latest uppers of the tables, ascending."""
        self._uppers: dict[ObjectId, Frontier] = {}
        """Upper of each object except tables."""
        self._readable_from: dict[ObjectId, Time] = {}
        """First readable time of each index; 0 for other objects. Advances with compaction."""
        self._statuses: dict[ObjectId, StatusResponse] = {}
        """Latest status of each object's dataflow."""
        self._began_ms: dict[ObjectId, Time] = {}
        """When this service started to run each object (ms since the epoch)."""
        self._behind_ms: dict[ObjectId, int] = {}
        """By how many ms each source lags behind its external system, as last reported."""

    def track(
        self, entry: CatalogObject, upper: Frontier, readable_from: Time = 0, *, now_ms: Time
    ) -> None:
        """Start tracking an object. `readable_from` is the first readable time of an index."""
        if entry.kind == TABLE:
            return
        self._began_ms[entry.id] = now_ms
        self._uppers[entry.id] = upper
        self._readable_from[entry.id] = readable_from

    def forget(self, id_: ObjectId) -> None:
        """Stop tracking an object."""
        self._uppers.pop(id_, None)
        self._readable_from.pop(id_, None)
        self._statuses.pop(id_, None)
        self._began_ms.pop(id_, None)
        self._behind_ms.pop(id_, None)

    def tracked_since_ms(self, id_: ObjectId) -> Time:
        """Return the time at which this service started to run the object."""
        return self._began_ms[id_]

    def note_behind(self, source: ObjectId, ms: int | None) -> None:
        """Record by how many ms a source lags behind its external system; None if unknown."""
        if source in self._uppers:
            self._behind_ms[source] = ms or 0

    def behind_ms(self, source: ObjectId) -> int:
        """Return by how many ms a source lagged behind its external system when last reported."""
        return self._behind_ms.get(source, 0)

    def advance_tables(self, upper: Frontier) -> bool:
        """Seal all tables below `upper`. Return whether the upper advanced."""
        news = upper > self.tables_upper
        if news:
            self.tables_upper = upper
            self._moves.append(upper)
            if len(self._moves) > 2 * _MOVES_MAX:
                # Delete in blocks: deleting one entry at a time would shift the whole list each
                # time.
                del self._moves[:_MOVES_MAX]
        return news

    def missing_since(self, table: CatalogObject, upper: Frontier) -> Time:
        """Return the time of the first change of the table that an object sealed below `upper` does
        not include. For a source's table, which also advances without changes, that is `upper`."""
        place = bisect.bisect_right(self._moves, upper)
        if table.kind != TABLE or place in (0, len(self._moves)):
            return upper  # the advance may be older than those remembered
        # The first advance beyond `upper` sealed the first missing change, one millisecond below
        # it.
        return self._moves[place] - 1

    def report(self, report: Frontiers) -> bool:
        """Process a replica's report of frontiers. Return whether the object's upper advanced."""
        known = self._uppers.get(report.id)
        if known is None or report.write is None or report.write <= known:
            return False
        self._uppers[report.id] = report.write
        return True

    def sealed(self, id_: ObjectId, upper: Frontier) -> bool:
        """Record the upper of a source, a source's table, or a sink. Return whether it advanced."""
        known = self._uppers.get(id_)
        if known is None or upper <= known:
            return False
        self._uppers[id_] = upper
        return True

    def note(self, status: StatusResponse) -> None:
        """Record a dataflow's latest status."""
        if status.id in self._uppers:
            self._statuses[status.id] = status

    def status(self, id_: ObjectId) -> StatusResponse | None:
        """Return the latest status of a dataflow, or None."""
        return self._statuses.get(id_)

    def upper(self, entry: CatalogObject) -> Frontier:
        """Return the frontier below which the object is sealed."""
        if entry.kind == TABLE:
            return self.tables_upper
        return self._uppers.get(entry.id, 0)

    def sealed_below(self, id_: ObjectId) -> Frontier:
        """Return the upper of an object that is not a table; 0 if unknown."""
        return self._uppers.get(id_, 0)

    def compacted(self, index: ObjectId, since: Time) -> None:
        """Record that an index is readable only from `since` on."""
        if index in self._readable_from:
            self._readable_from[index] = max(self._readable_from[index], since)

    def readable_from(self, index: ObjectId) -> Time:
        """Return the first readable time of an index."""
        return self._readable_from.get(index, 0)

    def lower_index_upper(self, index: ObjectId, upper: Frontier) -> None:
        """Lower an index's upper to that of the remaining replicas."""
        if index in self._uppers:
            self._uppers[index] = upper
