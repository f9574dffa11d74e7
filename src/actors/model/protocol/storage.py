"""Commands and responses of the replica protocol's storage half: sources in, sinks out.

Its connection is separate from compute's, with a nonce of its own. Stages: `Hello` → Initialization
(any commands, then `InitializationComplete`) → Storage. Every command goes to every worker; none of
them renders: they change the client's desired state, and what renders follows as internal commands
(`storage_internal`) in the one order of both halves.

This package does not import the sources and sinks: of a configuration it knows the kind, the rest
is the kind's own encoding (`ConnectorConfiguration`). New fields come last, with defaults.
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
    """Kind of a source, sink or request (``postgres``, ``delta``, …), and that kind's own encoding.
    It holds no secret, only the place of one."""

    kind: str
    encoded: bytes = b""


class IngestionExport(msgspec.Struct, frozen=True, gc=False):
    """One table that a source fills: `outside` is its external name, `shard` its contents'
    shard."""

    id: ObjectId
    outside: str
    schema: TableSchema
    shard: ShardId
    encoded: bytes = b""
    """Addition of the source's kind for this table."""
    name: str = ""
    """Name of the table, for people."""


class RetryDelays(msgspec.Struct, frozen=True, gc=False):
    """Delays before a failed task is restarted: doubled from the first to the last. Unset: by the
    settings."""

    delay_ms: int | None = None
    delay_ms_max: int | None = None


class IngestionDescription(msgspec.Struct, frozen=True, gc=False):
    """A source, its exports, and the shard that maps times to its positions."""

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
    """A sink: its input, from `as_of` on, and its destination."""

    id: ObjectId
    name: str
    input: ShardImport
    configuration: ConnectorConfiguration
    as_of: Time
    retry: RetryDelays = RetryDelays()


def ingestion_conflicts(old: IngestionDescription, new: IngestionDescription) -> tuple[str, ...]:
    """Return the differences that forbid `new` as an update of the running `old`; empty: it may be.

    Exports may come and go, and be given further columns; the name and the delays of retries may
    change. The configuration, the remap shard, and whatever else an export is made of may not:
    positions and contents belong to them.
    """
    found: list[str] = []
    if old.configuration.kind != new.configuration.kind:
        found.append(f"kind {old.configuration.kind} → {new.configuration.kind}")
    elif old.configuration != new.configuration:
        found.append(f"the configuration of its kind {old.configuration.kind}")
    if old.remap_shard != new.remap_shard:
        found.append(f"remap shard {old.remap_shard} → {new.remap_shard}")
    before = {export.id: export for export in old.exports}
    for export in new.exports:
        former = before.get(export.id)
        if former is not None:
            found += (f"export {export.id}: {text}" for text in _changes(former, export))
    return tuple(found)


def sink_conflicts(old: SinkDescription, new: SinkDescription) -> tuple[str, ...]:
    """Return the differences that forbid `new` in place of the running `old`: only the name, the
    delays and the `as_of` may change."""
    found: list[str] = []
    if old.configuration.kind != new.configuration.kind:
        found.append(f"kind {old.configuration.kind} → {new.configuration.kind}")
    elif old.configuration != new.configuration:
        found.append(f"the configuration of its kind {old.configuration.kind}")
    if old.input.shard != new.input.shard:
        found.append(f"input shard {old.input.shard} → {new.input.shard}")
    elif old.input != new.input:
        found.append(f"columns ({old.input.schema.ddl()}) → ({new.input.schema.ddl()})")
    return tuple(found)


def _changes(old: IngestionExport, new: IngestionExport) -> list[str]:
    found: list[str] = []
    if old.outside != new.outside:
        found.append(f"outside name {old.outside} → {new.outside}")
    if old.shard != new.shard:
        found.append(f"shard {old.shard} → {new.shard}")
    if not new.schema.extends(old.schema):
        found.append(f"columns ({old.schema.ddl()}) → ({new.schema.ddl()})")
    if old.encoded != new.encoded:
        found.append("what its kind adds for it")
    return found


# -- commands --------------------------------------------------------------------------------------


class UpdateStorageConfiguration(msgspec.Struct, frozen=True, gc=False, tag="UpdateConfiguration"):
    """Changes settings for all objects, running ones too; unset means unchanged. None of them
    may change what is written, only when."""

    source_tick_ms: int | None = None
    """Interval at which an idle source's uppers advance, in ms."""
    statistics_ms: int | None = None
    """Interval of `StatisticsUpdates`, in ms."""
    source_inflight_bytes_max: int | None = None
    """Bytes of one source that were read and are not durable yet."""


class RunIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a source, or alters the one that runs under its id (see `ingestion_conflicts`)."""

    description: IngestionDescription


class RunSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a sink. Of one that runs only the name, the delays and the `as_of` may differ."""

    description: SinkDescription


class RunOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads external data once and stages them for `shard`, whose table is `collection`; answered
    by one `StagedBatches`. After the answer the client sends `CancelOneshotIngestion`, so that
    histories forget the request."""

    uuid: str
    collection: ObjectId
    shard: ShardId
    schema: TableSchema
    request: ConnectorConfiguration


class CancelOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends a one-shot ingestion; racy by nature: it may have been answered."""

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
    """Contents of that export, remap shard (by the source's id) or sink are durable below
    `upper`. Never goes back; nothing after the empty one."""

    id: ObjectId
    upper: Frontier


class DroppedId(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The object is dropped, as requested: the last response about it."""

    id: ObjectId


class StagedBatch(msgspec.Struct, frozen=True, gc=False):
    """A written part that no shard's state names yet; `part` is persist's own, encoded."""

    part: bytes
    rows: int
    size_bytes: int


class FilesStaged(msgspec.Struct, frozen=True, gc=False, tag="Staged"):
    """All rows of the request, to be appended at one time, or not at all."""

    batches: tuple[StagedBatch, ...] = ()
    files: int = 0
    """Number of files that were read."""
    bytes: int = 0
    """Size of the files."""


class StagingFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The request failed, and no part is staged; `code` is an error class (`OperationCanceled`
    after a cancel)."""

    code: str
    text: str


StagingResult: TypeAlias = FilesStaged | StagingFailed


class StagedBatches(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The one answer of a one-shot ingestion."""

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
    """Unix time of the observation. Two workers may report one object (worker 0 its look-ups): the
    later report counts."""


class StatisticsUpdates(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Statistics that have changed in an interval, each whole."""

    sources: tuple[ObjectStatistics, ...] = ()
    sinks: tuple[ObjectStatistics, ...] = ()
    oneshots: tuple[ObjectStatistics, ...] = ()


Response: TypeAlias = (
    FrontierUpper | DroppedId | StagedBatches | StatisticsUpdates | StatusUpdate | ConnectionRefused
)

# -- inside the cluster ----------------------------------------------------------------------------
