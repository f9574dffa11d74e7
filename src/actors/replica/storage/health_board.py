"""Health of the objects whose tasks run on one worker, and the changes to report. Pure.

Theory of operation. Tasks report in rounds (one attempt to make progress): the first observation
of an object in a round replaces the last, later ones of the round can only make it worse. The
*shown* health also depends on related objects: an export is no better than its source, and a
source is stalled if all of its exports have failed. Other exports of a source are not affected.

Rules: an object is Starting with every rendering, which is reported each time; otherwise only
changes are reported. Reports belong to one client (`forget_told`), and end with the object.

Severity: running < starting < paused < stalled < ceased.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from actors.model.protocol.storage import HealthStatus
from actors.runtime.progress import ObjectId

SEVERITY: Final[Mapping[HealthStatus, int]] = {
    "running": 0,
    "starting": 1,
    "paused": 2,
    "stalled": 3,
    "ceased": 4,
    "dropped": 5,
}


class HealthCondition(msgspec.Struct, frozen=True):
    """Health of one object: `error` is the reason, and `hint` the remedy."""

    status: HealthStatus
    error: str | None = None
    hint: str | None = None

    @property
    def failed(self) -> bool:
        """Return whether the object has failed."""
        return SEVERITY[self.status] >= SEVERITY["stalled"]


STARTING: Final = HealthCondition("starting")
_NO_EXPORTS: Final[Mapping[ObjectId, str]] = {}


class _Object(msgspec.Struct):
    """Known health of one object; `round` is 0 until its task reports."""

    condition: HealthCondition
    round: int = 0


class HealthBoard:
    """Conditions of all objects with a task on this worker."""

    def __init__(self) -> None:
        self._objects: dict[ObjectId, _Object] = {}
        self._exports: dict[ObjectId, Mapping[ObjectId, str]] = {}
        """Exports of each source, with their names for people."""
        self._source_of: dict[ObjectId, ObjectId] = {}
        self._reported: dict[ObjectId, HealthCondition] = {}

    def begin(self, id: ObjectId, exports: Mapping[ObjectId, str] = _NO_EXPORTS) -> None:
        """Start an object that was rendered, and its exports (id → table's name)."""
        for gone in self._exports.get(id, _NO_EXPORTS).keys() - exports.keys():
            self._remove(gone)
        self._exports[id] = exports
        self._source_of |= dict.fromkeys(exports, id)
        for each in (id, *exports):
            self._objects[each] = _Object(STARTING)
            self._reported.pop(each, None)

    def observe(self, id: ObjectId, round: int, condition: HealthCondition) -> None:
        """Apply a task's observation; ignore one of an earlier round or an unknown object."""
        seen = self._objects.get(id)
        if seen is None or round < seen.round:
            return
        worse = SEVERITY[condition.status] > SEVERITY[seen.condition.status]
        if round > seen.round or worse:
            seen.condition = condition
        seen.round = round

    def fail(self, id: ObjectId, error: str, hint: str | None) -> None:
        """Mark an object as stalled: its task ended with an error."""
        seen = self._objects.get(id)
        if seen is not None:
            # A new round, so that this replaces anything observed before.
            self.observe(id, seen.round + 1, HealthCondition("stalled", error, hint))

    def remove(self, id: ObjectId) -> None:
        """Remove a dropped object, with its exports."""
        for export in self._exports.pop(id, ()):
            self._remove(export)
        self._remove(id)

    def _remove(self, id: ObjectId) -> None:
        self._objects.pop(id, None)
        self._reported.pop(id, None)
        self._source_of.pop(id, None)

    def shown(self, id: ObjectId) -> HealthCondition | None:
        """Return the shown health of an object; None if it is unknown here."""
        seen = self._objects.get(id)
        if seen is None:
            return None
        own = seen.condition
        source = self._source_of.get(id)
        if source is not None:
            above = self._objects[source].condition
            # An export is no better than its source.
            return above if SEVERITY[above.status] > SEVERITY[own.status] else own
        if own.failed:
            return own
        tables = [(name, self._objects[e].condition) for e, name in self._exports[id].items()]
        # One failed table does not stall its source, but all of them together do.
        if tables and all(below.failed for _, below in tables):
            name, below = tables[0]
            return HealthCondition("stalled", f"table {name}: {below.error}", below.hint)
        return own

    def changes(self, known: Container[ObjectId]) -> list[tuple[ObjectId, HealthCondition]]:
        """Return the known objects whose shown health changed, and note it as reported."""
        news: list[tuple[ObjectId, HealthCondition]] = []
        for id in self._objects:
            shown = self.shown(id)
            if shown is not None and id in known and self._reported.get(id) != shown:
                self._reported[id] = shown
                news.append((id, shown))
        return news

    def forget_told(self) -> None:
        """Forget all reports, for a new client."""
        self._reported.clear()

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._reported.keys() <= self._objects.keys()
        assert self._source_of.keys() <= self._objects.keys()
        for source, exports in self._exports.items():
            assert source in self._objects
            assert all(self._source_of[export] == source for export in exports)
