"""Internal commands of the storage half: all that renders, in the one order of both halves.

Worker 0 proposes them: for what its client wants, and for what any worker asks it to; every
worker applies them, in the order that the sequencer gives. A render number names one rendering
of an object, the same on all workers: it is given out when a command that renders is applied.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.progress import Frontier, ObjectId, Time
from actors.protocol.storage import (
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    Statistics,
    UpdateConfiguration,
)


class ResumeState(msgspec.Struct, frozen=True, gc=False):
    """Where an ingestion goes on, as its shards say: `uppers` are (id, upper) of each export."""

    remap_since: Time = 0
    remap_upper: Frontier = 0
    uppers: tuple[tuple[ObjectId, Frontier], ...] = ()


class CreateIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders an ingestion, afresh where one of its id runs; `version` is worker 0's number of
    the wish that it fulfils."""

    description: IngestionDescription
    version: int
    resume: ResumeState = ResumeState()


class RunSinkDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a sink, afresh where one of its id runs."""

    description: SinkDescription
    version: int


class RunOneshotIngestionDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a one-shot ingestion."""

    oneshot: RunOneshotIngestion
    version: int


class SuspendAndRestart(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends rendering `number` of an object, if it is still the present one; worker 0 then has it
    rendered again. One that was dropped meanwhile is not."""

    id: ObjectId
    number: int
    reason: str


class DropDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends objects (sources with their exports, single exports, sinks, one-shot ingestions) for
    good. Those that are not rendered are passed over; `forgotten` describes sources among them,
    for what the outside may keep for them."""

    ids: tuple[ObjectId, ...]
    forgotten: tuple[IngestionDescription, ...] = ()


class Measurement(msgspec.Struct, frozen=True, gc=False):
    """What one worker adds to an object's statistics: counts are increments; the rest is as it
    stands in the rendering of that number, the epoch."""

    epoch: int
    statistics: Statistics


class StatisticsUpdate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """One worker's measurements of an interval; worker 0 sums them up."""

    worker: int
    measurements: tuple[Measurement, ...]


InternalCommand: TypeAlias = (
    CreateIngestionDataflow
    | RunSinkDataflow
    | RunOneshotIngestionDataflow
    | SuspendAndRestart
    | DropDataflow
    | UpdateConfiguration
    | StatisticsUpdate
)


class ForStorage(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Names the half of an ordered command; compute's go without a wrapping."""

    command: InternalCommand


class Forwarded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Worker → worker 0: have this ordered. Bounded: one restart an object, one statistics an
    interval."""

    command: SuspendAndRestart | StatisticsUpdate
