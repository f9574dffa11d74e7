"""How far every object is sealed, as the controller knows it, and what it can say of the rest.

Uppers of tables are one shared upper; views and indexes report theirs. What is durable never
goes back; what an index has is in the memory of replicas, and goes back when the one that is
furthest is lost (`replicas`). Pure.
"""

from __future__ import annotations

import bisect
from typing import Final

from actors.controller.catalog import TABLE, CatalogObject
from actors.progress import Frontier, ObjectId, Time
from actors.protocol.compute import Frontiers, Status

_MOVES_MAX: Final = 4_096
"""Limits how many of the tables' uppers are remembered: so many at least, twice as many at most."""


class ObjectFrontiers:
    """Uppers of all objects, the as-of from which each index reads, and latest statuses."""

    def __init__(self, tables_upper: Frontier) -> None:
        self.tables_upper: Frontier = tables_upper
        self._moves: list[Frontier] = []
        """Remembers the tables' uppers of late, ascending."""
        self._uppers: dict[ObjectId, Frontier] = {}
        self._readable_from: dict[ObjectId, Time] = {}
        self._statuses: dict[ObjectId, Status] = {}

    def track(self, entry: CatalogObject, upper: Frontier, readable_from: Time = 0) -> None:
        """An object exists; `readable_from`: an index's first readable time."""
        if entry.kind == TABLE:
            return
        self._uppers[entry.id] = upper
        self._readable_from[entry.id] = readable_from

    def forget(self, id_: ObjectId) -> None:
        """The object is gone."""
        self._uppers.pop(id_, None)
        self._readable_from.pop(id_, None)
        self._statuses.pop(id_, None)

    def advance_tables(self, upper: Frontier) -> bool:
        """Every table is sealed below `upper`; whether that is news."""
        news = upper > self.tables_upper
        if news:
            self.tables_upper = upper
            self._moves.append(upper)
            if len(self._moves) > 2 * _MOVES_MAX:
                del self._moves[:_MOVES_MAX]
        return news

    def missing_since(self, table: CatalogObject, upper: Frontier) -> Time:
        """Return when what is sealed below `upper` began to lack something that a table has; of one
        of a source, which moves on without changes, `upper`."""
        place = bisect.bisect_right(self._moves, upper)
        if table.kind != TABLE or place in (0, len(self._moves)):
            return upper  # or it is not known any more
        return self._moves[place] - 1

    def report(self, report: Frontiers) -> bool:
        """A replica's report; whether the object's upper moved."""
        known = self._uppers.get(report.id)
        if known is None or report.write is None or report.write <= known:
            return False
        self._uppers[report.id] = report.write
        return True

    def sealed(self, id_: ObjectId, upper: Frontier) -> bool:
        """A source or sink came so far; whether the object's upper moved."""
        known = self._uppers.get(id_)
        if known is None or upper <= known:
            return False
        self._uppers[id_] = upper
        return True

    def note(self, status: Status) -> None:
        """What a dataflow is doing."""
        if status.id in self._uppers:
            self._statuses[status.id] = status

    def status(self, id_: ObjectId) -> Status | None:
        """The latest status of a dataflow."""
        return self._statuses.get(id_)

    def upper(self, entry: CatalogObject) -> Frontier:
        """Everything below is sealed."""
        if entry.kind == TABLE:
            return self.tables_upper
        return self._uppers.get(entry.id, 0)

    def sealed_below(self, id_: ObjectId) -> Frontier:
        """The upper of an object that is no table of the clients'."""
        return self._uppers.get(id_, 0)

    def compacted(self, index: ObjectId, since: Time) -> None:
        """An index is readable from `since` on."""
        if index in self._readable_from:
            self._readable_from[index] = max(self._readable_from[index], since)

    def readable_from(self, index: ObjectId) -> Time:
        """An index's first readable time."""
        return self._readable_from.get(index, 0)

    def fell(self, index: ObjectId, upper: Frontier) -> None:
        """The replica on which an index was furthest is gone: others have it up to there."""
        if index in self._uppers:
            self._uppers[index] = upper
