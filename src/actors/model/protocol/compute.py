"""Commands and responses of the replica protocol's compute half.

Stages: Creation (`Hello`, `CreateInstance`) → Initialization (any commands, then
`InitializationComplete`) → Computation. Every connection starts with a `Hello` of a fresh nonce. A
response belongs to the connection whose command it answers; adapters ensure that. New fields come
last, with defaults.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableSchema
from actors.model.protocol.message_parts import ColumnComparison, RowSetFinishing
from actors.runtime.progress import Frontier, Nonce, ObjectId, ShardId, Time


# `gc=False`: messages hold no cycles, and so many live at a time that the collector would spend
# its time on them. A tag stays when a class is renamed: it is the message's name on the wire.
class Hello(msgspec.Struct, frozen=True, gc=False, tag=True):
    """First message of every connection.

    `owner`: process of the controller, by the epoch's document of the stores. A replica in a
    process of its own serves no other than their owner.
    """

    nonce: Nonce
    owner: str = ""


class CreateInstance(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Second message: the instance's configuration; must be compatible with the running one's.

    Compatible: equal, except that `expiration_ms` may be smaller than the running one's.
    """

    workers: int
    version: int = 2
    expiration_ms: int | None = None
    """The instance ends this long after its start; None: never."""
    stash: bool = True
    """True if results beyond `inline_bytes_max` go to the blob store, where the client reads
    them."""


class UpdateConfiguration(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes settings at once and globally; unset means unchanged."""

    result_bytes_max: int | None = None
    inline_bytes_max: int | None = None
    """Size of a peek's result in its response; larger ones are stashed."""
    maintenance_ms: int | None = None


class ShardImport(msgspec.Struct, frozen=True, gc=False):
    """A shard that a dataflow reads; `tables_upper`: its upper is the tables' shared one."""

    shard: ShardId
    schema: TableSchema
    tables_upper: bool = False


class ViewExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A maintained view: its delta plan, output shard, and the shards of its hidden states."""

    plan: DeltaPlan
    shard: ShardId
    hidden_shards: tuple[ShardId, ...] = ()
    rebuilt_at: Time = 0
    """Upper of the output at which the plan was replaced: while it stands there, the hidden shards
    hold no state of the plan, and the view is computed whole. Above 0 the output has contents of an
    earlier plan."""
    target_lag_ms: int = 0
    """Age that the view may have: changes are gathered for one step until then; 0: not at all."""
    owner: ObjectId = ""
    """Name by which it appends to shards that were handed over to it; empty: to none."""
    taken_shard: ShardId = ""
    """A shard with the plan's contents as far as the hidden states go. While the output stands at
    `rebuilt_at`, its contents become these, and nothing is computed."""


class IndexExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An arrangement of the one import by `key`, spread over the workers by key hash."""

    key: tuple[str, ...]
    schema: TableSchema


class SubscribeExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A stream of the one import's changes; `snapshot`: contents at `as_of` come first."""

    schema: TableSchema
    snapshot: bool = True


class CopyToExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The one import's contents at `as_of` as files below `destination`, a manifest last.

    `destination`: a folder, as a path or ``file:`` URL, below the replica's `copy_dir`, or a place
    in a bucket, as a URL at or below one of its `copy_buckets`. Files have at most about
    `file_bytes_max` bytes.
    """

    schema: TableSchema
    destination: str
    format: Literal["parquet", "csv", "json"]
    file_bytes_max: int
    overwrite: bool = False
    """True if this copy replaces an earlier one there, when this one is whole."""


Export: TypeAlias = ViewExport | IndexExport | SubscribeExport | CopyToExport


class DataflowDescription(msgspec.Struct, frozen=True, gc=False):
    """Imports → export. `imports` are in the order of the plan's inputs."""

    id: ObjectId
    name: str
    imports: tuple[ShardImport, ...]
    export: Export
    as_of: Time
    until: Frontier | None = None


class CreateDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a dataflow, suspended until it is scheduled."""

    dataflow: DataflowDescription


class ScheduleDataflow(msgspec.Struct, frozen=True, gc=False, tag="Schedule"):
    """Lets a dataflow run."""

    id: ObjectId


class AllowWrites(msgspec.Struct, frozen=True, gc=False, tag=True):
    """One-way exit from read-only."""


class AllowCompaction(msgspec.Struct, frozen=True, gc=False, tag=True):
    """External readers need nothing below `frontier`; the empty frontier drops the object."""

    id: ObjectId
    frontier: Frontier


class IndexTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Peek an index."""

    id: ObjectId


class ShardTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Peek a shard; one worker reads it, the others answer empty."""

    id: ObjectId
    imported: ShardImport = msgspec.field(name="source")


class LogTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Peek a relation that every worker keeps about itself; `id` is its name, and the peek's time
    is ignored."""

    id: ObjectId


PeekTarget: TypeAlias = IndexTarget | ShardTarget | LogTarget


class Peek(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads `target` at `time`; answered exactly once.

    `keys`: only rows whose `key_columns` equal one of these tuples, as an Arrow IPC stream
    holding the key columns. `filter`: only rows that pass all. `project`: only these columns.
    """

    uuid: str
    target: PeekTarget
    time: Time
    key_columns: tuple[str, ...] = ()
    keys: bytes | None = None
    filter: tuple[ColumnComparison, ...] = ()
    project: tuple[str, ...] | None = None
    finishing: RowSetFinishing | None = None


class CancelPeek(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Cancels a peek; racy by nature: it may have been answered."""

    uuid: str


class InitializationComplete(msgspec.Struct, frozen=True, gc=False, tag=True):
    """End of the replayed state: triggers reconciliation."""


Command: TypeAlias = (
    Hello
    | CreateInstance
    | UpdateConfiguration
    | CreateDataflow
    | ScheduleDataflow
    | AllowWrites
    | AllowCompaction
    | Peek
    | CancelPeek
    | InitializationComplete
)


class Frontiers(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Progress of an object; None means unchanged. Never goes back; nothing after empty."""

    id: ObjectId
    write: Frontier | None = None
    input: Frontier | None = None
    output: Frontier | None = None


class PeekRows(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Rows as an Arrow IPC stream: user columns and ``__diff`` (positive), consolidated."""

    arrow: bytes
    rows: int = -1
    """Number of rows in the stream; -1: not counted. With 0 rows `arrow` may be empty."""


class StashPart(msgspec.Struct, frozen=True, gc=False):
    """A blob with a piece of a result: an Arrow IPC stream as in `PeekRows`, or of a batch: as
    in `SubscribeBatch`."""

    key: str
    rows: int
    size_bytes: int


class PeekStashed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A result that is in the blob store: the rows of all `parts` and of `inline`.

    `rows` and `size_bytes` count all of it. Its reader deletes the parts; unread ones are collected
    after `stash_orphan_ms`.
    """

    parts: tuple[StashPart, ...]
    rows: int
    size_bytes: int
    inline: bytes | None = None
    """Rows of workers that did not stash, as in `PeekRows`."""


class PeekError(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The peek failed; `code` is an error class.

    `limit`: it failed by a limit of this kind, not by the data: "bytes" of the result, or "rows"
    scanned, of which there may be `limit_rows`.
    """

    code: str
    text: str
    limit: Literal["", "bytes", "rows"] = ""
    limit_rows: int | None = None


class PeekCanceled(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The peek was canceled."""


PeekResult: TypeAlias = PeekRows | PeekStashed | PeekError | PeekCanceled


class PeekResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to one peek."""

    uuid: str
    result: PeekResult


class SubscribeBatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All updates with ``lower <= time < upper``: contiguous, consolidated.

    `arrow` is an IPC stream (columns, ``__time``, ``__diff``), None when there are none.
    `error` set: the view holds an error; the subscribe ends.

    Updates that are too many for a response are in `parts`, as those of `PeekStashed` are: the
    batch is all of them, and those of `arrow`.
    """

    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    error: tuple[str, str] | None = None
    traceparent: str | None = None
    """Sampled W3C trace context of a change among them."""
    # Data of the updates, not of the message: batches wait, merge over workers and are cut, so no
    # envelope or header stays with the updates.
    parts: tuple[StashPart, ...] = ()
    """Parts in no order, each consolidated by itself at most. Their reader deletes them; unread
    ones are collected after `stash_orphan_ms`."""


class SubscribeDropped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The subscribe was dropped at the upper of its last batch."""

    frontier: Frontier


class SubscribeResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Progress of one subscribe."""

    id: ObjectId
    batch: SubscribeBatch | SubscribeDropped


class CopyDone(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All files are there; `manifest` names them and was written last. A worker without files to
    copy answers zeros and no manifest."""

    rows: int
    files: int
    manifest: str


class CopyFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """There is no manifest; `code` is an error class."""

    code: str
    text: str


class CopyDropped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy was dropped before it was done."""


CopyResult: TypeAlias = CopyDone | CopyFailed | CopyDropped


class CopyToResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The one answer of a copy."""

    id: ObjectId
    result: CopyResult


class ConnectionRefused(msgspec.Struct, frozen=True, gc=False, tag="Refused"):
    """The last response of a connection that the cluster ends; `code` is an error class."""

    code: str
    text: str


ERROR_STATES: Final = ("errored", "stalled", "frozen", "failed", "quarantined")
"""States of an object that are listed as errors, and whose texts may quote rows."""


class StatusResponse(msgspec.Struct, frozen=True, gc=False, tag="Status"):
    """Informational: what a dataflow is doing, its last step, or why it stalls.

    The dataflow itself makes it, for worker 0; it is the one record of a step's measures.
    """

    id: ObjectId
    state: str
    text: str = ""
    hi: Frontier = 0
    rows_in: int = 0
    rows_out: int = 0
    step_ms: float = 0.0
    spark_ms: float = 0.0
    steps: int = 0
    rows_read: int = 0
    """Rows of state that the last step's lookups returned."""
    prepared: bool = False
    """True if the last step's plans were prepared."""
    recomputed: bool = False
    """True if the view was computed whole instead of stepping."""
    rejected: str = ""
    """The alternative to the last step, and its estimated cost."""
    parts_read: int = 0
    """Parts of the inputs that were read while it hydrates, of `parts_total`; bytes likewise."""
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    wait_ms: float = 0.0
    """Time that the last step waited for the engine, and in it for others' jobs, in ms."""


Response: TypeAlias = (
    Frontiers
    | PeekResponse
    | SubscribeResponse
    | CopyToResponse
    | StatusResponse
    | ConnectionRefused
)


class CommandBatch(msgspec.Struct, frozen=True, gc=False, tag="Lot"):
    """Commands of one connection that had arrived at the same time, in order: sent together, and
    each takes effect as if it had come alone. Inside the cluster only."""

    commands: tuple[Command, ...]
