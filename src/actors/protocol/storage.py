"""Commands and responses of the replica protocol's storage half: sources in, sinks out.

Its connection stands beside compute's, with a nonce of its own. Stages: `Hello` →
Initialization (any commands, then `InitializationComplete`) → Storage. Every command goes to
every worker; none of them renders: they change what a client wants, and what renders follows as
internal commands (`storage_internal`) in the one order of both halves.

This room stands below the sources and sinks: of a configuration it knows its kind, the rest is
the kind's own encoding (`Configuration`). New fields come last, with defaults.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from actors.plan.schema import Schema
from actors.progress import Frontier, Nonce, ObjectId, ShardId, Time
from actors.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Hello,
    InitializationComplete,
    Refused,
    SourceImport,
)

# -- what is wanted --------------------------------------------------------------------------------


class Configuration(msgspec.Struct, frozen=True, gc=False):
    """Of a source, sink or request: its kind (``postgres``, ``delta``, …), and what that kind
    encodes. It holds no secret: it says where one is to be found."""

    kind: str
    encoded: bytes = b""


class IngestionExport(msgspec.Struct, frozen=True, gc=False):
    """One table that a source fills: `outside` is its name there, `shard` its contents here."""

    id: ObjectId
    outside: str
    schema: Schema
    shard: ShardId
    encoded: bytes = b""
    """What the source's kind adds for this one."""
    name: str = ""
    """Of the table, for people."""


class Retry(msgspec.Struct, frozen=True, gc=False):
    """Delays before what failed is started again: doubled from the first to the last. Unset: as
    the settings say."""

    delay_ms: int | None = None
    delay_ms_max: int | None = None


class IngestionDescription(msgspec.Struct, frozen=True, gc=False):
    """A source, all that it fills, and the shard that maps times to its positions."""

    id: ObjectId
    name: str
    configuration: Configuration
    remap_shard: ShardId
    exports: tuple[IngestionExport, ...] = ()
    retry: Retry = Retry()

    @property
    def ids(self) -> tuple[ObjectId, ...]:
        """The source's own id, then those of its exports."""
        return (self.id, *(export.id for export in self.exports))


class SinkDescription(msgspec.Struct, frozen=True, gc=False):
    """A sink: the object it writes, from `as_of` on, and to where."""

    id: ObjectId
    name: str
    input: SourceImport
    configuration: Configuration
    as_of: Time
    retry: Retry = Retry()


def altered(old: IngestionDescription, new: IngestionDescription) -> tuple[str, ...]:
    """What speaks against `new` as an update of the running `old`, each as a difference; empty:
    it may be.

    Exports may come and go; the name and the delays of retries may change. The configuration,
    the remap shard, and whatever an export is made of may not: positions and contents belong to
    them.
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


def altered_sink(old: SinkDescription, new: SinkDescription) -> tuple[str, ...]:
    """What speaks against `new` in place of the running `old`: only the name, the delays and the
    `as_of` may change."""
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
    if old.schema != new.schema:
        found.append(f"columns ({old.schema.ddl()}) → ({new.schema.ddl()})")
    if old.encoded != new.encoded:
        found.append("what its kind adds for it")
    return found


# -- commands --------------------------------------------------------------------------------------


class UpdateConfiguration(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes settings for all objects, running ones too; unset means unchanged. None of them
    may change what is written, only when."""

    source_tick_ms: int | None = None
    """An idle source's uppers advance so often."""
    statistics_ms: int | None = None
    """Statistics are told so often."""
    source_inflight_bytes_max: int | None = None
    """Of one source: read outside and not durable here yet."""


class RunIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a source, or alters the one that runs under its id (see `altered`)."""

    description: IngestionDescription


class RunSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Runs a sink. Of one that runs only the name, the delays and the `as_of` may differ."""

    description: SinkDescription


class RunOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads something outside once and stages it for `shard`, whose table is `collection`;
    answered by one `StagedBatches`. Who has the answer says `CancelOneshotIngestion`, so that
    histories forget it."""

    uuid: str
    collection: ObjectId
    shard: ShardId
    schema: Schema
    request: Configuration


class CancelOneshotIngestion(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends a one-shot ingestion; racy by nature: it may have been answered."""

    uuid: str


Command: TypeAlias = (
    Hello
    | UpdateConfiguration
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
    """The object is dropped, as was asked: the last that is told of it."""

    id: ObjectId


class StagedBatch(msgspec.Struct, frozen=True, gc=False):
    """A part that is written and in no shard's state yet; `part` is persist's own, encoded."""

    part: bytes
    rows: int
    size_bytes: int


class Staged(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All that was there, to be appended at one time, or not at all."""

    batches: tuple[StagedBatch, ...] = ()
    files: int = 0
    """That were read."""
    bytes: int = 0
    """Of the files."""


class StagingFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Nothing is staged; `code` is an error class (`Canceled` after a cancel)."""

    code: str
    text: str


StagingResult: TypeAlias = Staged | StagingFailed


class StagedBatches(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The one answer of a one-shot ingestion."""

    uuid: str
    result: StagingResult


HealthStatus: TypeAlias = Literal["starting", "running", "paused", "stalled", "ceased", "dropped"]


class StatusUpdate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The health of an object has changed. Informational: nothing depends on it."""

    id: ObjectId
    status: HealthStatus
    error: str | None = None
    hint: str | None = None
    time_ms: int = 0
    """When it was seen (Unix time). Two workers may tell of one object (worker 0 of its look-ups):
    the later one counts."""


class OperatorStatistics(msgspec.Struct, frozen=True, gc=False):
    """What one operator of a running task has done since the task began."""

    operator: str
    text: str
    rows: int = 0
    """That have passed it."""
    ms: float = 0.0
    """Spent in it, waits included."""
    bytes_memory: int = 0
    """That it holds."""
    bytes_mapped: int = 0
    """In files: in memory only as far as they are read."""


class Statistics(msgspec.Struct, frozen=True, gc=False):
    """What an object has done since it was created (counts), and where it stands (the rest; None:
    not known). Of sources, sinks and one-shot ingestions (by their uuid) alike."""

    id: ObjectId
    messages: int = 0
    """Changes received outside; of a sink: commits there; of a one-shot ingestion: files read."""
    bytes: int = 0
    rows_inserted: int = 0
    rows_deleted: int = 0
    rows_staged: int = 0
    """Written into parts, or outside, and not committed at the time."""
    snapshot_rows_known: int | None = None
    """Of the first contents: how many there are, about."""
    snapshot_rows_staged: int | None = None
    position_known: str | None = None
    """The newest outside."""
    position_committed: str | None = None
    """The newest that is durable here; of a sink: its upper outside."""
    lag_ms: int | None = None
    lag_bytes: int | None = None
    restarts: int = 0
    """Since the worker started."""
    files_known: int | None = None
    """Of a one-shot ingestion: files to be read; `messages` were."""
    bytes_known: int | None = None
    """All that it is to read; `bytes` was."""
    operators: tuple[OperatorStatistics, ...] | None = None
    """Of the task that runs now, the last one of the way of rows first."""


class StatisticsUpdates(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Every interval: those that have changed, each whole."""

    sources: tuple[Statistics, ...] = ()
    sinks: tuple[Statistics, ...] = ()
    oneshots: tuple[Statistics, ...] = ()


Response: TypeAlias = (
    FrontierUpper | DroppedId | StagedBatches | StatisticsUpdates | StatusUpdate | Refused
)

# -- inside the cluster ----------------------------------------------------------------------------


class StorageTagged(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A command with the nonce of its connection."""

    nonce: Nonce
    command: Command


class StorageTaggedResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A response with the nonce of the connection it is meant for; `serial` is its worker's
    number for it, by which it is acknowledged (0: it needs none)."""

    nonce: Nonce
    response: Response
    serial: int = 0
