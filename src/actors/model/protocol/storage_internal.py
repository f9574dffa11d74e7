"""Internal commands of the storage half: all that renders, in the one order of both halves.

Worker 0 proposes them, for its client's desired state and for other workers' requests; every worker
applies them in the sequencer's order. A render number names one rendering of an object, the same on
all workers: it is given out when a command that renders is applied.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    UpdateStorageConfiguration,
)
from actors.runtime.progress import Frontier, ObjectId, Time


class ResumeState(msgspec.Struct, frozen=True, gc=False):
    """Position at which an ingestion resumes, by its shards: `uppers` are (id, upper) of each
    export."""

    remap_since: Time = 0
    remap_upper: Frontier = 0
    uppers: tuple[tuple[ObjectId, Frontier], ...] = ()


class CreateIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders an ingestion, afresh if one of its id runs; `version` is worker 0's number of the
    desired state."""

    description: IngestionDescription
    version: int
    resume: ResumeState = ResumeState()


class RunSinkDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a sink, afresh if one of its id runs."""

    description: SinkDescription
    version: int


class RunOneshotIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a one-shot ingestion."""

    oneshot: RunOneshotIngestion
    version: int


class SuspendAndRestart(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends rendering `number` of an object, if it is still the present one; worker 0 then has it
    rendered again, unless it was dropped meanwhile."""

    id: ObjectId
    number: int
    reason: str


class DropObjects(msgspec.Struct, frozen=True, gc=False, tag="DropDataflow"):
    """Ends objects (sources with their exports, single exports, sinks, one-shot ingestions).
    Objects that are not rendered are ignored; `forgotten` describes sources among them, whose
    external resources are to be removed."""

    ids: tuple[ObjectId, ...]
    forgotten: tuple[IngestionDescription, ...] = ()


class StatisticsMeasurement(msgspec.Struct, frozen=True, gc=False):
    """One worker's contribution to an object's statistics: counts are increments; the rest is the
    state in the rendering of that number, the epoch."""

    epoch: int
    statistics: ObjectStatistics


class StatisticsUpdate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """One worker's measurements of an interval; worker 0 sums them up."""

    worker: int
    measurements: tuple[StatisticsMeasurement, ...]


InternalCommand: TypeAlias = (
    CreateIngestionDataflow
    | RunSinkDataflow
    | RunOneshotIngestionDataflow
    | SuspendAndRestart
    | DropObjects
    | UpdateStorageConfiguration
    | StatisticsUpdate
)


class ForStorage(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Names the half of an ordered command; compute's go without a wrapping."""

    command: InternalCommand


class ForwardedCommand(msgspec.Struct, frozen=True, gc=False, tag="Forwarded"):
    """Worker → worker 0: have this ordered. Bounded: one restart for each object, one statistics
    for each interval."""

    command: SuspendAndRestart | StatisticsUpdate
