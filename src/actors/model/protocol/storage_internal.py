"""Internal commands of the storage half, which start and stop the tasks of sources and sinks.

Worker 0 proposes them to reach its client's desired state, and on behalf of other workers. Every
worker applies them in the sequencer's order. Each command that renders an object gives the
rendering a number when it is applied; the number is the same on all workers.
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
    """The position from which an ingestion resumes, taken from its shards. `uppers` are the
    (id, upper) of its exports."""

    remap_since: Time = 0
    remap_upper: Frontier = 0
    uppers: tuple[tuple[ObjectId, Frontier], ...] = ()


class CreateIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders an ingestion, and replaces a running one with the same id. `version` is the number of
    the desired state on worker 0."""

    description: IngestionDescription
    version: int
    resume: ResumeState = ResumeState()


class RunSinkDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a sink, and replaces a running one with the same id."""

    description: SinkDescription
    version: int


class RunOneshotIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a one-shot ingestion."""

    oneshot: RunOneshotIngestion
    version: int


class SuspendAndRestart(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends rendering `number` of an object if it is still the current one. Worker 0 then renders
    the object again, unless it has been dropped."""

    id: ObjectId
    number: int
    reason: str


class DropObjects(msgspec.Struct, frozen=True, gc=False, tag="DropDataflow"):
    """Ends sources with their exports, single exports, sinks, or one-shot ingestions.

    Objects that are not rendered are ignored. `forgotten` describes those sources among them whose
    external resources must be removed.
    """

    ids: tuple[ObjectId, ...]
    forgotten: tuple[IngestionDescription, ...] = ()


class StatisticsMeasurement(msgspec.Struct, frozen=True, gc=False):
    """One worker's contribution to the statistics of an object.

    Counts are increments. The other values are the current state in the rendering `epoch`.
    """

    epoch: int
    statistics: ObjectStatistics


class StatisticsUpdate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The measurements of one worker in an interval; worker 0 adds them up."""

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
    """Marks a sequenced command as one of the storage half; compute commands are not wrapped."""

    command: InternalCommand


class ForwardedCommand(msgspec.Struct, frozen=True, gc=False, tag="Forwarded"):
    """Worker → worker 0: propose this command to the sequencer.

    Their number is bounded: one restart for each object, and one update of statistics for each
    interval.
    """

    command: SuspendAndRestart | StatisticsUpdate
