"""The commands and responses of the storage half of the replica protocol: sources and sinks.

The storage half has its own connection, with its own nonce. The stages are: `Hello`, Initialization
(any commands, then `InitializationComplete`), and Storage. Every command goes to every worker and
only changes the client's desired state. The internal commands that start and stop tasks follow from
it, in the total order of both halves (`storage_internal`).

This package does not import the sources and sinks. It knows only the kind of a configuration; the
rest is encoded by that kind (`ConnectorConfiguration`). New fields come last and have defaults.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    ConnectionRefused,
    Hello,
    InitializationComplete,
    ShardImport,
)
from actors.model.protocol.message_parts import ObjectStatistics
from actors.runtime.progress import Frontier, ObjectId, ShardId, Time

# -- descriptions ----------------------------------------------------------------------------------


class ConnectorConfiguration(msgspec.Struct, frozen=True, gc=False):
    """The kind of a source, sink or request (``postgres``, ``delta``, …), and its configuration as
    that kind encodes it. It contains no secret, only where to find it."""

    kind: str
    encoded: bytes = b""


class IngestionExport(msgspec.Struct, frozen=True, gc=False):
    """A table that a source fills. `outside` is its external name, and `shard` has its contents."""

    id: ObjectId
    outside: str
    schema: TableSchema
    shard: ShardId
    encoded: bytes = b""
    """Data that the source's kind adds for this table."""
    name: str = ""
    """Name of the table, for display."""


class RetryDelays(msgspec.Struct, frozen=True, gc=False):
    """Delay before a failed task restarts, which doubles up to a maximum. None uses the service's
    settings."""

    delay_ms: int | None = None
    delay_ms_max: int | None = None


class IngestionDescription(msgspec.Struct, frozen=True, gc=False):
    """A source, its exports, and the shard that maps times to positions."""

    id: ObjectId
    name: str
    configuration: ConnectorConfiguration
    remap_shard: ShardId
    exports: tuple[IngestionExport, ...] = ()
    retry: RetryDelays = RetryDelays()

    @property
    def ids(self) -> tuple[ObjectId, ...]:
        """Return the source's own id, then those of its exports."""
        return (self.id, *(export.id for export in self.exports))


class SinkDescription(msgspec.Struct, frozen=True, gc=False):
    """A sink: its input, read from `as_of` on, and its destination."""

    id: ObjectId
    name: str
    input: ShardImport
    configuration: ConnectorConfiguration
    as_of: Time
    retry: RetryDelays = RetryDelays()


def ingestion_conflicts(old: IngestionDescription, new: IngestionDescription) -> tuple[str, ...]:
    """Return the differences because of which `new` cannot update the running `old`.

    Exports may be added, removed and given new columns, and the source's name and retry delays may
    change. The configuration, the remap shard and everything else about an export may not, because
    positions and contents depend on them.
    """
    found: list[str] = []
    if old.configuration.kind != new.configuration.kind:
        found.append(f"kind {old.configuration.kind} → {new.configuration.kind}")
    elif old.configuration != new.configuration:
        found.append(f"configuration of kind {old.configuration.kind}")
    if old.remap_shard != new.remap_shard:
        found.append(f"remap shard {old.remap_shard} → {new.remap_shard}")
    before = {export.id: export for export in old.exports}
    for export in new.exports:
        former = before.get(export.id)
        if former is not None:
            found += (f"export {export.id}: {text}" for text in _changes(former, export))
    return tuple(found)


def sink_conflicts(old: SinkDescription, new: SinkDescription) -> tuple[str, ...]:
    """Return the differences because of which `new` cannot update the running `old`.

    Only the name, the retry delays and the `as_of` may change.
    """
    found: list[str] = []
    if old.configuration.kind != new.configuration.kind:
        found.append(f"kind {old.configuration.kind} → {new.configuration.kind}")
    elif old.configuration != new.configuration:
        found.append(f"configuration of kind {old.configuration.kind}")
    if old.input.shard != new.input.shard:
        found.append(f"input shard {old.input.shard} → {new.input.shard}")
    elif old.input != new.input:
        found.append(f"columns ({old.input.schema.ddl()}) → ({new.input.schema.ddl()})")
    return tuple(found)


def _changes(old: IngestionExport, new: IngestionExport) -> list[str]:
    found: list[str] = []
    if old.outside != new.outside:
        found.append(f"external name {old.outside} → {new.outside}")
    if old.shard != new.shard:
        found.append(f"shard {old.shard} → {new.shard}")
    if not new.schema.extends(old.schema):
        found.append(f"columns ({old.schema.ddl()}) → ({new.schema.ddl()})")
    if old.encoded != new.encoded:
        found.append("data of its kind")
    return found


# -- commands --------------------------------------------------------------------------------------


class UpdateStorageConfiguration(msgspec.Struct, frozen=True, gc=False, tag="UpdateConfiguration"):
    """Changes settings for all objects, including running ones. None leaves a setting unchanged.

    A setting may affect when something is written, but not what.
    """

    source_tick_ms: int | None = None
    """Interval in ms at which the uppers of an idle source advance."""
    statistics_ms: int | None = None
    """Interval of `StatisticsUpdates` in ms."""
    source_inflight_bytes_max: int | None = None
    """Maximum number of bytes of one source that have been read but are not durable yet."""


class RunIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a source, or updates the running one with its id (see `ingestion_conflicts`)."""

    description: IngestionDescription


class RunSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a sink, or updates the running one with its id (see `sink_conflicts`)."""

    description: SinkDescription


class RunOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads external data once and stages it for `shard`, the shard of the table `collection`.

    Answered by one `StagedBatches`. The client then sends `CancelOneshotIngestion`, so that command
    histories drop the request.
    """

    uuid: str
    collection: ObjectId
    shard: ShardId
    schema: TableSchema
    request: ConnectorConfiguration


class CancelOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends a one-shot ingestion. The answer may already be on its way."""

    uuid: str


Command: TypeAlias = (
    Hello
    | UpdateStorageConfiguration
    | RunIngestion
    | RunSink
    | RunOneshotIngestion
    | CancelOneshotIngestion
    | AllowCompaction
    | AllowWrites
    | InitializationComplete
)

# -- responses -------------------------------------------------------------------------------------


class FrontierUpper(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An export, a remap shard (named by the source's id) or a sink is durable up to `upper`.

    Uppers never go back, and the empty one is final.
    """

    id: ObjectId
    upper: Frontier


class DroppedId(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The object was dropped as requested. This is the last response about it."""

    id: ObjectId


class StagedBatch(msgspec.Struct, frozen=True, gc=False):
    """A written part that no shard's document names yet. `part` is encoded by `persist`."""

    part: bytes
    rows: int
    size_bytes: int


class FilesStaged(msgspec.Struct, frozen=True, gc=False, tag="Staged"):
    """All rows of the request, to be appended at one timestamp or not at all."""

    batches: tuple[StagedBatch, ...] = ()
    files: int = 0
    """Number of files read."""
    bytes: int = 0
    """Total size of the files."""


class StagingFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The request failed, and no part is staged. `code` is an error class (`OperationCanceled` if
    it was canceled)."""

    code: str
    text: str


StagingResult: TypeAlias = FilesStaged | StagingFailed


class StagedBatches(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The only answer of a one-shot ingestion."""

    uuid: str
    result: StagingResult


HealthStatus: TypeAlias = Literal["starting", "running", "paused", "stalled", "ceased", "dropped"]


class StatusUpdate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The health of an object has changed. Informational only."""

    id: ObjectId
    status: HealthStatus
    error: str | None = None
    hint: str | None = None
    time_ms: int = 0
    """Unix time of the observation, in ms. Two workers may report on the same object; the later
    report counts."""


class StatisticsUpdates(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The statistics of all objects for which they changed in an interval."""

    sources: tuple[ObjectStatistics, ...] = ()
    sinks: tuple[ObjectStatistics, ...] = ()
    oneshots: tuple[ObjectStatistics, ...] = ()


Response: TypeAlias = (
    FrontierUpper | DroppedId | StagedBatches | StatisticsUpdates | StatusUpdate | ConnectionRefused
)

# -- inside the cluster ----------------------------------------------------------------------------
