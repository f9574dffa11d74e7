"""Converts tasks' reports into health, statistics and rows of relations. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from actors.arrangement import ArrangementStatistics
from actors.connectors.ingest_task import IngestProgressed
from actors.connectors.oneshot_task import OneshotProgress
from actors.connectors.sinks.messages import SinkProgress
from actors.connectors.sources.source import SourceLag
from actors.progress import Frontier, ObjectId, format_frontier, frontier_or_null, ms_behind
from actors.protocol.storage import (
    IngestionDescription,
    ObjectStatistics,
    RunOneshotIngestion,
    SinkDescription,
)
from actors.storage.events import HealthObservation

POSITION_SHOWN_MAX: Final = 256
"""Number of characters shown of a position."""

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


def of_source(told: IngestProgressed, now_ms: int) -> ObjectStatistics:
    """Return a source's statistics since its task began."""
    counts, lag = told.counts, told.lag
    behind = 0 if lag.bytes_behind == 0 else lag.ms_behind
    if behind is None and told.outside_ms is not None:
        behind = max(0, now_ms - told.outside_ms)
    return ObjectStatistics(
        told.id,
        messages=counts.messages,
        bytes=counts.bytes,
        rows_inserted=counts.rows_inserted,
        rows_deleted=counts.rows_deleted,
        rows_staged=told.rows_staged,
        snapshot_rows_known=lag.snapshot_rows_known,
        snapshot_rows_staged=counts.snapshot_rows or lag.snapshot_rows_staged or None,
        position_known=lag.known or None,
        position_committed=told.position[:POSITION_SHOWN_MAX] or None,
        lag_ms=behind,
        lag_bytes=lag.bytes_behind,
        operators=told.operators,
    )


def of_sink(told: SinkProgress) -> ObjectStatistics:
    """Return a sink's statistics since its task began."""
    counts, upper = told.statistics, told.upper
    return ObjectStatistics(
        told.id,
        messages=counts.commits,
        bytes=counts.bytes_committed,
        rows_inserted=counts.rows_committed,
        rows_staged=counts.rows_staged,
        position_committed=format_frontier(upper),
        operators=told.operators,
    )


def of_oneshot(uuid: str, told: OneshotProgress) -> ObjectStatistics:
    """Return a one-shot ingestion's statistics."""
    far = told.progress
    return ObjectStatistics(
        uuid,
        messages=far.files_done,
        bytes=far.bytes_done,
        rows_staged=told.rows_staged,
        files_known=far.files,
        bytes_known=far.bytes,
    )


def id_of(description: Described) -> ObjectId:
    """Return the object's id; for a one-shot ingestion its uuid."""
    return description.uuid if isinstance(description, RunOneshotIngestion) else description.id


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
    told = worker, description.id, description.name
    if isinstance(description, IngestionDescription):
        yield (*told, "ingestion", 0, None, None, scheduled, state, "", 0, "")
        return
    shard = description.input.shard
    yield (*told, "sink", description.as_of, None, None, scheduled, state, "", 0, shard)
