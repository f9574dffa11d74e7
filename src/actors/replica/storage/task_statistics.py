"""Statistics of sources, sinks and one-shot ingestions: measured by workers, summed on worker 0.

Theory of operation. A task reports gauges, and counts since its start. Its worker
(`LocalStatistics`) turns the counts into increments, and once per interval sends what changed, by
object and *epoch*. Worker 0 (`StatisticsSums`) adds the increments up. The epoch of a measurement
is the number of its rendering, so it grows with every restart. The client gets the full statistics
of each object that changed; a new client gets those of all objects.

Invariants: an object's counts never decrease while it lives, and each measurement is added once.
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
    """Return the sums of both counts, and the newer gauges where they are set."""
    sums = {name: getattr(old, name) + getattr(more, name) for name in COUNTS}
    stands = {name: getattr(more, name) for name in GAUGES if getattr(more, name) is not None}
    return msgspec.structs.replace(old, **sums, **stands)


class LocalStatistics:
    """Measurements of one worker that it has not sent yet."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ObjectId], ObjectStatistics] = {}
        """Last report about each (epoch, object); counts are since the start of the task."""
        self._pending: dict[tuple[int, ObjectId], ObjectStatistics] = {}
        """Increments since the last `take`, by epoch and object."""

    def measure(self, epoch: int, statistics: ObjectStatistics) -> None:
        """Add a task's report about one object."""
        key = (epoch, statistics.id)
        seen = self._seen.get(key, ObjectStatistics(statistics.id))
        self._seen[key] = statistics
        more = {name: max(0, getattr(statistics, name) - getattr(seen, name)) for name in COUNTS}
        news = msgspec.structs.replace(statistics, **more)
        # Skip a report in which neither counts nor gauges have changed.
        if news == msgspec.structs.replace(seen, **dict.fromkeys(COUNTS, 0)):
            return
        self._pending[key] = _added(self._pending.get(key, ObjectStatistics(statistics.id)), news)

    def end(self, epoch: int) -> None:
        """Forget the last reports of a stopped task."""
        for key in [key for key in self._seen if key[0] == epoch]:
            del self._seen[key]

    def take(self) -> tuple[StatisticsMeasurement, ...]:
        """Return the measurements since the last call, and clear them."""
        pending, self._pending = self._pending, {}
        return tuple(StatisticsMeasurement(epoch, one) for (epoch, _), one in pending.items())


class _Entry(msgspec.Struct):
    """Statistics of one object; `birth` is its first epoch and `epoch` its current one."""

    kind: Kind
    birth: int
    epoch: int
    statistics: ObjectStatistics
    changed: bool = True
    """True if the client has not been sent the latest statistics."""


class StatisticsSums:
    """Statistics of all objects, summed over workers and restarts."""

    def __init__(self) -> None:
        self._entries: dict[ObjectId, _Entry] = {}
        """Sum of each object, from its first rendering until it is dropped."""
        self.ignored = 0
        """Number of measurements that were ignored because their object is unknown or was
        replaced."""

    def begin(self, kind: Kind, ids: Iterable[ObjectId], epoch: int) -> None:
        """Start a new epoch for rendered objects."""
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
            # Epochs before the birth belong to an earlier object with the same id.
            if entry is None or measurement.epoch < entry.birth:
                self.ignored += 1
                continue
            more = measurement.statistics
            # Increments of an earlier epoch still count, but its gauges are out of date.
            if measurement.epoch < entry.epoch:
                more = msgspec.structs.replace(more, **dict.fromkeys(GAUGES))
            entry.statistics = _added(entry.statistics, more)
            entry.changed = True

    def of(self, id: ObjectId) -> ObjectStatistics | None:
        """Return the statistics of one object, if it is known."""
        entry = self._entries.get(id)
        return None if entry is None else entry.statistics

    def news(self, known: Container[ObjectId]) -> StatisticsUpdates | None:
        """Return the statistics of known objects that changed, and mark them as reported."""
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

    def forget_reported(self) -> None:
        """Mark all objects as changed, because a new client has connected."""
        for entry in self._entries.values():
            entry.changed = True
