"""Statistics of sources, sinks and one-shot ingestions: measured by one worker, summed on worker 0.

Theory of operation. A task tells its counts since its start, and how things stand. Its worker
(`LocalStatistics`) turns counts into increments, and gives once an interval what has changed, by
object and *epoch*; worker 0 (`Aggregate`) adds it up. The epoch of a measurement is the number of
the rendering that it was made in: it grows with every restart.

Rules: increments of earlier epochs are added, too, since what was done was done, but none from
before the object's *birth*, its first rendering since it was last dropped: they are of another
object, which had its id before. How things stood in an earlier epoch than the present one is not
looked at. An object that was dropped counts no more. What is told to a client are the objects that
have changed, each whole; a new client is told all.

Invariants: counts never go back while an object lives; a measurement is added once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from actors.progress import ObjectId
from actors.protocol.storage import Statistics, StatisticsUpdates
from actors.protocol.storage_internal import Measurement, StatisticsUpdate

COUNTS: Final = ("messages", "bytes", "rows_inserted", "rows_deleted", "rows_staged")
GAUGES: Final = (
    "snapshot_rows_known",
    "snapshot_rows_staged",
    "position_known",
    "position_committed",
    "lag_ms",
    "lag_bytes",
    "files_known",
    "bytes_known",
    "operators",
)
Kind: TypeAlias = Literal["source", "sink", "oneshot"]


def _added(old: Statistics, more: Statistics) -> Statistics:
    """Counts of both; the rest as the newer says, where it says anything."""
    sums = {name: getattr(old, name) + getattr(more, name) for name in COUNTS}
    stands = {name: getattr(more, name) for name in GAUGES if getattr(more, name) is not None}
    return msgspec.structs.replace(old, **sums, **stands)


class LocalStatistics:
    """One worker's measurements that have not left yet."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ObjectId], Statistics] = {}
        """Counts since the start of the task, as they were told last."""
        self._pending: dict[tuple[int, ObjectId], Statistics] = {}

    def measure(self, epoch: int, statistics: Statistics) -> None:
        """What a task of that rendering says of one object."""
        key = (epoch, statistics.id)
        seen = self._seen.get(key, Statistics(statistics.id))
        self._seen[key] = statistics
        more = {name: max(0, getattr(statistics, name) - getattr(seen, name)) for name in COUNTS}
        news = msgspec.structs.replace(statistics, **more)
        if news == msgspec.structs.replace(seen, **dict.fromkeys(COUNTS, 0)):
            return
        self._pending[key] = _added(self._pending.get(key, Statistics(statistics.id)), news)

    def end(self, epoch: int) -> None:
        """The task has stopped: it says nothing more."""
        for key in [key for key in self._seen if key[0] == epoch]:
            del self._seen[key]

    def take(self) -> tuple[Measurement, ...]:
        """What has come since the last time."""
        pending, self._pending = self._pending, {}
        return tuple(Measurement(epoch, one) for (epoch, _), one in pending.items())


class _Entry(msgspec.Struct):
    """One object's sum."""

    kind: Kind
    birth: int
    epoch: int
    statistics: Statistics
    changed: bool = True


class Aggregate:
    """The sums of all objects."""

    def __init__(self) -> None:
        self._entries: dict[ObjectId, _Entry] = {}
        self.ignored = 0
        """Measurements of objects that are not there, or not any more."""

    def begin(self, kind: Kind, ids: Iterable[ObjectId], epoch: int) -> None:
        """These were rendered: a new epoch."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is None or entry.kind != kind:
                self._entries[id] = _Entry(kind, epoch, epoch, Statistics(id))
            else:
                entry.epoch = epoch

    def restarted(self, ids: Iterable[ObjectId]) -> None:
        """These are suspended, to be rendered again."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is not None:
                more = entry.statistics.restarts + 1
                entry.statistics = msgspec.structs.replace(entry.statistics, restarts=more)
                entry.changed = True

    def remove(self, ids: Iterable[ObjectId]) -> None:
        """These were dropped."""
        for id in ids:
            self._entries.pop(id, None)

    def absorb(self, update: StatisticsUpdate) -> None:
        """Adds one worker's measurements."""
        for measurement in update.measurements:
            entry = self._entries.get(measurement.statistics.id)
            if entry is None or measurement.epoch < entry.birth:
                self.ignored += 1
                continue
            more = measurement.statistics
            if measurement.epoch < entry.epoch:
                more = msgspec.structs.replace(more, **dict.fromkeys(GAUGES))
            entry.statistics = _added(entry.statistics, more)
            entry.changed = True

    def of(self, id: ObjectId) -> Statistics | None:
        """One object's sum."""
        entry = self._entries.get(id)
        return None if entry is None else entry.statistics

    def news(self, known: Container[ObjectId]) -> StatisticsUpdates | None:
        """The objects that have changed, of those that the client knows; taken as told."""
        found: dict[Kind, list[Statistics]] = {"source": [], "sink": [], "oneshot": []}
        for id, entry in self._entries.items():
            if entry.changed and id in known:
                entry.changed = False
                found[entry.kind].append(entry.statistics)
        if not any(found.values()):
            return None
        return StatisticsUpdates(
            tuple(found["source"]), tuple(found["sink"]), tuple(found["oneshot"])
        )

    def forget_told(self) -> None:
        """Another client is there, and knows nothing."""
        for entry in self._entries.values():
            entry.changed = True
