"""Converts tasks' reports into health, statistics and rows of relations. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from actors.connectors.ingest_task import IngestProgressed
from actors.connectors.oneshot_task import OneshotProgress
from actors.connectors.sinks.messages import SinkProgress
from actors.connectors.sources.source import SourceLag
from actors.durable.arrangement import ArrangementStatistics
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    HealthStatus,
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    StatisticsUpdates,
)
from actors.model.protocol.storage_internal import StatisticsMeasurement, StatisticsUpdate
from actors.replica.storage.events import HealthObservation
from actors.runtime.progress import Frontier, ObjectId, format_frontier, frontier_or_null, ms_behind

# Statistics of sources, sinks and one-shot ingestions: measured by workers, summed on worker 0
# Theory of operation. A task reports its counts since its start, and its gauges. Its worker
# (`LocalStatistics`) turns counts into increments, and once an interval sends the changes, by
# object and *epoch*; worker 0 (`StatisticsSums`) adds them up. The epoch of a measurement is the
# number of its rendering, so it grows with every restart. A client is sent changed objects, each
# whole; a new client is sent all.
#
# Invariants: counts never go back while an object lives; a measurement is added once.


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


# -- Health of the objects whose tasks run on one worker, and the changes to report ----------------
# Theory of operation. Tasks report in rounds (one attempt to make progress): the first observation
# of an object in a round replaces the last, later ones of the round can only make it worse. The
# *shown* health also depends on related objects: an export is no better than its source, and a
# source is stalled if all of its exports have failed. Other exports of a source are not affected.
#
# Rules: an object is Starting with every rendering, which is reported each time; otherwise only
# changes are reported. Reports belong to one client (`forget_told`), and end with the object.
#
# Severity: running < starting < paused < stalled < ceased.


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


Described: TypeAlias = IngestionDescription | SinkDescription | RunOneshotIngestion
"""Description of a task's object."""
Reached: TypeAlias = tuple[Frontier, Frontier]
"""Upper to which an object is durable; for a sink also the upper known of its input (else 0)."""
Broken: TypeAlias = Mapping[str, tuple[str, str]]
"""Failed exports: external name → (error, hint)."""


def health_of(
    description: IngestionDescription, broken: Broken, lag: SourceLag | None
) -> tuple[HealthObservation, ...]:
    """Return the health of a running source and its exports.

    A source's hint lists the notes of its lag; exports run unless they have failed.
    """
    hint = "" if lag is None else "; ".join(lag.notes)
    found = [HealthObservation(description.id, "running", None, hint or None)]
    for export in description.exports:
        if export.outside in broken:
            error, todo = broken[export.outside]
            found.append(HealthObservation(export.id, "stalled", error, todo or None))
        else:
            found.append(HealthObservation(export.id, "running"))
    return tuple(found)


def of_source(progress: IngestProgressed, now_ms: int) -> ObjectStatistics:
    """Return a source's statistics since its task began."""
    counts, lag = progress.counts, progress.lag
    behind = 0 if lag.ms_behind is None and lag.bytes_behind == 0 else lag.ms_behind
    if behind is None and progress.outside_ms is not None:
        behind = max(0, now_ms - progress.outside_ms)
    return ObjectStatistics(
        progress.id,
        messages=counts.messages,
        bytes=counts.bytes,
        rows_inserted=counts.rows_inserted,
        rows_deleted=counts.rows_deleted,
        rows_staged=progress.rows_staged,
        snapshot_rows_known=lag.snapshot_rows_known,
        snapshot_rows_staged=counts.snapshot_rows or lag.snapshot_rows_staged or None,
        position_known=lag.known or None,
        position_committed=progress.position or None,
        lag_ms=behind,
        lag_bytes=lag.bytes_behind,
        operators=progress.operators,
    )


def of_sink(progress: SinkProgress) -> ObjectStatistics:
    """Return a sink's statistics since its task began."""
    counts, upper = progress.statistics, progress.upper
    return ObjectStatistics(
        progress.id,
        messages=counts.commits,
        bytes=counts.bytes_committed,
        rows_inserted=counts.rows_committed,
        rows_staged=counts.rows_staged,
        position_committed=format_frontier(upper),
        operators=progress.operators,
    )


def of_oneshot(uuid: str, message: OneshotProgress) -> ObjectStatistics:
    """Return a one-shot ingestion's statistics."""
    far = message.progress
    return ObjectStatistics(
        uuid,
        messages=far.files_done,
        bytes=far.bytes_done,
        rows_staged=message.rows_staged,
        files_known=far.files,
        bytes_known=far.bytes,
    )


def ids_of(description: Described | None) -> tuple[ObjectId, ...]:
    """Return the ids whose uppers are reported; none for a one-shot ingestion."""
    match description:
        case IngestionDescription(ids=ids):
            return ids
        case SinkDescription(id=id):
            return (id,)
    return ()


def frontier_rows(
    worker: int,
    description: Described,
    reached: Mapping[ObjectId, Reached],
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `penstock.frontiers` for the object and its exports."""
    if isinstance(description, RunOneshotIngestion):
        return
    exports = description.exports if isinstance(description, IngestionDescription) else ()
    own = (description.id, description.name)
    for id_, name in (own, *((each.id, each.name or each.outside) for each in exports)):
        upper, seen = reached.get(id_, (0, 0))
        known = frontier_or_null(upper)
        # An external system's times are not ours, so only a sink knows its input's frontier.
        behind = ms_behind(seen, upper) if seen else None
        yield (worker, id_, name, None, frontier_or_null(seen), known, known, behind)


def arrangement_rows(
    worker: int, description: Described, held: Mapping[str, ArrangementStatistics]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `penstock.arrangements` for the contents that a source keeps of its
    exports.

    `held` has them by external name.
    """
    for export in description.exports if isinstance(description, IngestionDescription) else ():
        kept = held.get(export.outside)
        if kept is not None:
            key = ", ".join(export.schema.key)
            sizes = kept.rows, kept.runs, kept.bytes_memory, kept.bytes_mapped
            columns = ", ".join(export.schema.names)
            yield (worker, "upserts", export.id, key, columns, "", *sizes, 1)


def dataflow_rows(worker: int, description: Described, state: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `penstock.dataflows`; `state` is running, suspended or dropping."""
    scheduled = state != "suspended"
    if isinstance(description, RunOneshotIngestion):
        own = worker, description.uuid, f"copy into {description.collection}"
        yield (*own, "oneshot", 0, None, None, scheduled, state, "", 0, description.shard)
        return
    own = worker, description.id, description.name
    if isinstance(description, IngestionDescription):
        yield (*own, "ingestion", 0, None, None, scheduled, state, "", 0, "")
        return
    shard = description.input.shard
    yield (*own, "sink", description.as_of, None, None, scheduled, state, "", 0, shard)
