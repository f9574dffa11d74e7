"""Health of the objects whose tasks run on one worker, and the changes to report. Pure.

Theory of operation. Tasks report in rounds; a round is one attempt to make progress. The first
observation of an object in a round replaces the previous one, and later observations in the same
round can only make it worse. The *shown* health also depends on related objects: an export is never
shown as better than its source, and a source is stalled once all of its exports have failed. A
failed export does not affect the other exports of its source.

Rules: every rendering sets an object to `starting`, which is always reported; after that only
changes are reported. Reports belong to one client (`forget_reported`) and end when the object is
dropped.

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
    """Health of one object. `error` is the reason and `hint` says what to do about it."""

    status: HealthStatus
    error: str | None = None
    hint: str | None = None

    @property
    def failed(self) -> bool:
        """Return whether the object is stalled or ceased."""
        return SEVERITY[self.status] >= SEVERITY["stalled"]


STARTING: Final = HealthCondition("starting")
_NO_EXPORTS: Final[Mapping[ObjectId, str]] = {}


class _Object(msgspec.Struct):
    """Last known health of one object. `round` is 0 until its task reports."""

    condition: HealthCondition
    round: int = 0


class HealthBoard:
    """Health of all objects with a task on this worker."""

    def __init__(self) -> None:
        self._objects: dict[ObjectId, _Object] = {}
        """Condition of each object as its task last reported it."""
        self._exports: dict[ObjectId, Mapping[ObjectId, str]] = {}
        """Exports of each source, with their display names."""
        self._source_of: dict[ObjectId, ObjectId] = {}
        """Source of each export."""
        self._reported: dict[ObjectId, HealthCondition] = {}
        """Condition last reported to the current client."""

    def begin(self, id: ObjectId, exports: Mapping[ObjectId, str] = _NO_EXPORTS) -> None:
        """Set a newly rendered object and its exports (id → table name) to `starting`."""
        for gone in self._exports.get(id, _NO_EXPORTS).keys() - exports.keys():
            self._remove(gone)
        self._exports[id] = exports
        self._source_of |= dict.fromkeys(exports, id)
        for each in (id, *exports):
            self._objects[each] = _Object(STARTING)
            self._reported.pop(each, None)

    def observe(self, id: ObjectId, round: int, condition: HealthCondition) -> None:
        """Apply an observation from a task. Ignore it if its round is old or its object unknown."""
        seen = self._objects.get(id)
        if seen is None or round < seen.round:
            return
        worse = SEVERITY[condition.status] > SEVERITY[seen.condition.status]
        if round > seen.round or worse:
            seen.condition = condition
        seen.round = round

    def fail(self, id: ObjectId, error: str, hint: str | None) -> None:
        """Mark an object as stalled because its task ended with an error."""
        seen = self._objects.get(id)
        if seen is not None:
            # Use a new round, so that this replaces every earlier observation.
            self.observe(id, seen.round + 1, HealthCondition("stalled", error, hint))

    def remove(self, id: ObjectId) -> None:
        """Remove a dropped object and its exports."""
        for export in self._exports.pop(id, ()):
            self._remove(export)
        self._remove(id)

    def _remove(self, id: ObjectId) -> None:
        self._objects.pop(id, None)
        self._reported.pop(id, None)
        self._source_of.pop(id, None)

    def shown(self, id: ObjectId) -> HealthCondition | None:
        """Return the health to show for an object, or None if it has no task on this worker."""
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
        # A failed table does not stall its source, unless all of its tables have failed.
        if tables and all(below.failed for _, below in tables):
            name, below = tables[0]
            return HealthCondition("stalled", f"table {name}: {below.error}", below.hint)
        return own

    def changes(self, known: Container[ObjectId]) -> list[tuple[ObjectId, HealthCondition]]:
        """Return the known objects whose shown health changed, and record it as reported."""
        news: list[tuple[ObjectId, HealthCondition]] = []
        for id in self._objects:
            shown = self.shown(id)
            if shown is not None and id in known and self._reported.get(id) != shown:
                self._reported[id] = shown
                news.append((id, shown))
        return news

    def forget_reported(self) -> None:
        """Forget what was reported, because a new client has connected."""
        self._reported.clear()

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._reported.keys() <= self._objects.keys()
        assert self._source_of.keys() <= self._objects.keys()
        for source, exports in self._exports.items():
            assert source in self._objects
            assert all(self._source_of[export] == source for export in exports)
