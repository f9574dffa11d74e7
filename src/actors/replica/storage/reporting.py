"""Converts reports from tasks into health, statistics and rows of relations. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from actors.connectors.ingest_task import IngestProgressed
from actors.connectors.oneshot_task import OneshotProgress
from actors.connectors.sinks.messages import SinkProgress
from actors.connectors.sources.source import SourceLag
from actors.durable.arrangement import ArrangementStatistics
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import IngestionDescription, RunOneshotIngestion, SinkDescription
from actors.replica.storage.events import HealthObservation
from actors.runtime.progress import Frontier, ObjectId, format_frontier, frontier_or_null, ms_behind

Described: TypeAlias = IngestionDescription | SinkDescription | RunOneshotIngestion
"""Description of the object that a task works for."""
ObjectUppers: TypeAlias = tuple[Frontier, Frontier]
"""The upper below which an object is durable, and for a sink the known upper of its input (else
0)."""
FailedExports: TypeAlias = Mapping[str, tuple[str, str]]
"""Failed exports: external name → (error, hint)."""


def source_health(
    description: IngestionDescription, broken: FailedExports, lag: SourceLag | None
) -> tuple[HealthObservation, ...]:
    """Return the health of a running source and its exports.

    The source's hint contains the notes of its lag. Exports are `running` unless they have failed.
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


def source_statistics(progress: IngestProgressed, now_ms: int) -> ObjectStatistics:
    """Return a source's statistics since its task started."""
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


def sink_statistics(progress: SinkProgress) -> ObjectStatistics:
    """Return a sink's statistics since its task started."""
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


def oneshot_statistics(uuid: str, message: OneshotProgress) -> ObjectStatistics:
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


def reported_ids(description: Described | None) -> tuple[ObjectId, ...]:
    """Return the ids whose uppers are reported. A one-shot ingestion has none."""
    match description:
        case IngestionDescription(ids=ids):
            return ids
        case SinkDescription(id=id):
            return (id,)
    return ()


def frontier_rows(
    worker: int,
    description: Described,
    reached: Mapping[ObjectId, ObjectUppers],
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `penstock.frontiers` for an object and its exports."""
    if isinstance(description, RunOneshotIngestion):
        return
    exports = description.exports if isinstance(description, IngestionDescription) else ()
    own = (description.id, description.name)
    for id_, name in (own, *((each.id, each.name or each.outside) for each in exports)):
        upper, seen = reached.get(id_, (0, 0))
        known = frontier_or_null(upper)
        # The times of an external system are not comparable with ours, so only a sink knows its
        # input's frontier.
        behind = ms_behind(seen, upper) if seen else None
        yield (worker, id_, name, None, frontier_or_null(seen), known, known, behind)


def arrangement_rows(
    worker: int, description: Described, held: Mapping[str, ArrangementStatistics]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `penstock.arrangements` for the contents that a source keeps of its
    exports.

    `held` contains the sizes of these contents by external name.
    """
    for export in description.exports if isinstance(description, IngestionDescription) else ():
        kept = held.get(export.outside)
        if kept is not None:
            key = ", ".join(export.schema.key)
            sizes = kept.rows, kept.runs, kept.bytes_memory, kept.bytes_mapped
            columns = ", ".join(export.schema.names)
            yield (worker, "upserts", export.id, key, columns, "", *sizes, 1)


def dataflow_rows(worker: int, description: Described, state: str) -> Iterator[tuple[Any, ...]]:
    """Yield the row of `penstock.dataflows`. `state` is running, suspended or dropping."""
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
