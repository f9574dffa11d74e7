"""Statistics of sources, sinks and one-shot ingestions: measured by workers, summed on worker 0.

Theory of operation. A task reports its counts since its start, and its gauges. Its worker
(`LocalStatistics`) turns counts into increments, and once an interval sends the changes, by
object and *epoch*; worker 0 (`StatisticsSums`) adds them up. The epoch of a measurement is the
number of its rendering, so it grows with every restart. A client is sent changed objects, each
whole; a new client is sent all.

Invariants: counts never go back while an object lives; a measurement is added once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import StatisticsUpdates
from actors.model.protocol.storage_internal import StatisticsMeasurement, StatisticsUpdate
from actors.runtime.progress import ObjectId

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


def _added(old: ObjectStatistics, more: ObjectStatistics) -> ObjectStatistics:
    """Return the counts of both, and the newer gauges where they are set."""
    sums = {name: getattr(old, name) + getattr(more, name) for name in COUNTS}
    stands = {name: getattr(more, name) for name in GAUGES if getattr(more, name) is not None}
    return msgspec.structs.replace(old, **sums, **stands)


class LocalStatistics:
    """Measurements of one worker that were not sent yet."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ObjectId], ObjectStatistics] = {}
        """Counts since the start of the task, as last reported."""
        self._pending: dict[tuple[int, ObjectId], ObjectStatistics] = {}

    def measure(self, epoch: int, statistics: ObjectStatistics) -> None:
        """Add a task's report about one object."""
        key = (epoch, statistics.id)
        seen = self._seen.get(key, ObjectStatistics(statistics.id))
        self._seen[key] = statistics
        more = {name: max(0, getattr(statistics, name) - getattr(seen, name)) for name in COUNTS}
        news = msgspec.structs.replace(statistics, **more)
        # Neither counts nor gauges have changed.
        if news == msgspec.structs.replace(seen, **dict.fromkeys(COUNTS, 0)):
            return
        self._pending[key] = _added(self._pending.get(key, ObjectStatistics(statistics.id)), news)

    def end(self, epoch: int) -> None:
        """Forget a stopped task."""
        for key in [key for key in self._seen if key[0] == epoch]:
            del self._seen[key]

    def take(self) -> tuple[StatisticsMeasurement, ...]:
        """Remove and return the measurements since the last call."""
        pending, self._pending = self._pending, {}
        return tuple(StatisticsMeasurement(epoch, one) for (epoch, _), one in pending.items())


class _Entry(msgspec.Struct):
    """Sum of one object."""

    kind: Kind
    birth: int
    epoch: int
    statistics: ObjectStatistics
    changed: bool = True


class StatisticsSums:
    """Sums of all objects."""

    def __init__(self) -> None:
        self._entries: dict[ObjectId, _Entry] = {}
        self.ignored = 0
        """Number of measurements of unknown or former objects."""

    def begin(self, kind: Kind, ids: Iterable[ObjectId], epoch: int) -> None:
        """Begin a new epoch of rendered objects."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is None or entry.kind != kind:
                self._entries[id] = _Entry(kind, epoch, epoch, ObjectStatistics(id))
            else:
                entry.epoch = epoch

    def restarted(self, ids: Iterable[ObjectId]) -> None:
        """Count a restart of suspended objects."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is not None:
                more = entry.statistics.restarts + 1
                entry.statistics = msgspec.structs.replace(entry.statistics, restarts=more)
                entry.changed = True

    def remove(self, ids: Iterable[ObjectId]) -> None:
        """Remove dropped objects."""
        for id in ids:
            self._entries.pop(id, None)

    def absorb(self, update: StatisticsUpdate) -> None:
        """Add one worker's measurements."""
        for measurement in update.measurements:
            entry = self._entries.get(measurement.statistics.id)
            # Epochs before the birth are of another object that had the id before a drop.
            if entry is None or measurement.epoch < entry.birth:
                self.ignored += 1
                continue
            more = measurement.statistics
            # Increments of an earlier epoch still count, but its gauges are outdated.
            if measurement.epoch < entry.epoch:
                more = msgspec.structs.replace(more, **dict.fromkeys(GAUGES))
            entry.statistics = _added(entry.statistics, more)
            entry.changed = True

    def of(self, id: ObjectId) -> ObjectStatistics | None:
        """Return the sum of one object."""
        entry = self._entries.get(id)
        return None if entry is None else entry.statistics

    def news(self, known: Container[ObjectId]) -> StatisticsUpdates | None:
        """Return the changed objects among the known ones, and note them as reported."""
        found: dict[Kind, list[ObjectStatistics]] = {"source": [], "sink": [], "oneshot": []}
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
        """Forget all reports, for a new client."""
        for entry in self._entries.values():
            entry.changed = True
