"""Health of the objects whose tasks run on one worker: what is shown, and when it is news.

Theory of operation. Tasks tell of their objects in rounds (one attempt to get on): the first
observation of an object in a round replaces what was known, later ones of the round can only
make it worse. What is *shown* of an object also counts what it hangs on: an export is no better
than its source, and one export's failure shows at its source too, by name. Other exports of that
source are not touched by it.

Rules: an object is Starting with every rendering, and that is told each time; otherwise only
changes are told; what was told belongs to one client (`forget_told`). Nothing is told of an
object that was removed. It reads no clock and knows no task.

Severity: running < starting < paused < stalled < ceased.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from actors.progress import ObjectId
from actors.protocol.storage import HealthStatus

SEVERITY: Final[Mapping[HealthStatus, int]] = {
    "running": 0,
    "starting": 1,
    "paused": 2,
    "stalled": 3,
    "ceased": 4,
    "dropped": 5,
}


class Condition(msgspec.Struct, frozen=True):
    """One object's health: `error` and `hint` say why, and what to do."""

    status: HealthStatus
    error: str | None = None
    hint: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something went wrong."""
        return SEVERITY[self.status] >= SEVERITY["stalled"]


STARTING: Final = Condition("starting")
_NO_EXPORTS: Final[Mapping[ObjectId, str]] = {}


class _Object(msgspec.Struct):
    """What is known of one object; `round` 0: nothing since it was rendered."""

    condition: Condition
    round: int = 0


class Health:
    """Conditions of all objects with a task here."""

    def __init__(self) -> None:
        self._objects: dict[ObjectId, _Object] = {}
        self._exports: dict[ObjectId, Mapping[ObjectId, str]] = {}
        """By source: its exports, and how people call them."""
        self._source_of: dict[ObjectId, ObjectId] = {}
        self._told: dict[ObjectId, Condition] = {}

    def begin(self, id: ObjectId, exports: Mapping[ObjectId, str] = _NO_EXPORTS) -> None:
        """The object was rendered, afresh if it was before: it and its exports (id → table's name)
        start."""
        for gone in self._exports.get(id, _NO_EXPORTS).keys() - exports.keys():
            self._remove(gone)
        self._exports[id] = exports
        self._source_of |= dict.fromkeys(exports, id)
        for each in (id, *exports):
            self._objects[each] = _Object(STARTING)
            self._told.pop(each, None)

    def observe(self, id: ObjectId, round: int, condition: Condition) -> None:
        """What a task says; of an earlier round, or an object that is not here: nothing."""
        seen = self._objects.get(id)
        if seen is None or round < seen.round:
            return
        worse = SEVERITY[condition.status] > SEVERITY[seen.condition.status]
        if round > seen.round or worse:
            seen.condition = condition
        seen.round = round

    def fail(self, id: ObjectId, error: str, hint: str | None) -> None:
        """The object's task has ended by an error: worse than anything of its last round."""
        seen = self._objects.get(id)
        if seen is not None:
            self.observe(id, seen.round + 1, Condition("stalled", error, hint))

    def remove(self, id: ObjectId) -> None:
        """The object is dropped, with its exports."""
        for export in self._exports.pop(id, ()):
            self._remove(export)
        self._remove(id)

    def _remove(self, id: ObjectId) -> None:
        self._objects.pop(id, None)
        self._told.pop(id, None)
        self._source_of.pop(id, None)

    def shown(self, id: ObjectId) -> Condition | None:
        """What is shown of an object; None: it is not here."""
        seen = self._objects.get(id)
        if seen is None:
            return None
        own = seen.condition
        source = self._source_of.get(id)
        if source is not None:
            above = self._objects[source].condition
            return above if SEVERITY[above.status] > SEVERITY[own.status] else own
        if own.failed:
            return own
        tables = [(name, self._objects[e].condition) for e, name in self._exports[id].items()]
        if tables and all(below.failed for _, below in tables):
            name, below = tables[0]
            return Condition("stalled", f"table {name}: {below.error}", below.hint)
        return own

    def changes(self, known: Container[ObjectId]) -> list[tuple[ObjectId, Condition]]:
        """What is shown otherwise than was told, of the objects that the client knows; it is
        taken as told."""
        news: list[tuple[ObjectId, Condition]] = []
        for id in self._objects:
            shown = self.shown(id)
            if shown is not None and id in known and self._told.get(id) != shown:
                self._told[id] = shown
                news.append((id, shown))
        return news

    def forget_told(self) -> None:
        """Another client is there, and knows nothing."""
        self._told.clear()

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._told.keys() <= self._objects.keys()
        assert self._source_of.keys() <= self._objects.keys()
        for source, exports in self._exports.items():
            assert source in self._objects
            assert all(self._source_of[export] == source for export in exports)
