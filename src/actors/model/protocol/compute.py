"""The commands and responses of the compute half of the replica protocol.

A connection goes through three stages: Creation (`Hello`, `CreateInstance`), Initialization (any
commands, then `InitializationComplete`), and Computation. Every connection starts with a `Hello`
that has a new nonce. Channel adapters ensure that a response goes to the connection whose command
it answers. New fields come last and have defaults.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableSchema
from actors.model.protocol.message_parts import ColumnComparison, RowSetFinishing
from actors.runtime.progress import Frontier, Nonce, ObjectId, ShardId, Time


# `gc=False`, because messages contain no cycles and so many are alive at a time that the garbage
# collector would be busy with them. A tag does not change when a class is renamed, because it is
# the message's name on the wire.
class Hello(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The first command of every connection.

    `owner` is the controller's process as named in the epoch document of the stores. A replica in a
    process of its own serves only the owner of the stores.
    """

    nonce: Nonce
    owner: str = ""


class CreateInstance(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The second command: the configuration of the instance.

    It must equal that of the running instance, except that `expiration_ms` may be smaller.
    """

    workers: int
    version: int = 2
    expiration_ms: int | None = None
    """The instance ends this long after its start; None means never."""
    stash: bool = True
    """True if results larger than `inline_bytes_max` go to the blob store, where the client reads
    them."""


class UpdateConfiguration(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes settings of all workers immediately. None leaves a setting unchanged."""

    result_bytes_max: int | None = None
    inline_bytes_max: int | None = None
    """Maximum size of a peek's result in its response; larger ones are stashed."""
    maintenance_ms: int | None = None


class ShardImport(msgspec.Struct, frozen=True, gc=False):
    """A shard that a dataflow reads. `tables_upper` is True if its upper is the one that all tables
    share."""

    shard: ShardId
    schema: TableSchema
    tables_upper: bool = False


class ViewExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A maintained view: its delta plan, its output shard, and the shards of its hidden states."""

    plan: DeltaPlan
    shard: ShardId
    hidden_shards: tuple[ShardId, ...] = ()
    rebuilt_at: Time = 0
    """Upper of the output when the plan was replaced. While the upper is still there, the hidden
    shards have no state of this plan, and the view is computed in full. If above 0, the output has
    contents of an earlier plan."""
    target_lag_ms: int = 0
    """Permitted age of the view: changes are batched for this long into one step; 0 does not
    batch."""
    owner: ObjectId = ""
    """Name under which it appends to shards that were handed over to it; "" if there are none."""
    taken_shard: ShardId = ""
    """A shard with contents of this plan, up to the upper of the hidden states. While the output's
    upper is `rebuilt_at`, these contents are copied into the output instead of computed."""


class IndexExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An index: the only import, arranged by `key` and partitioned over the workers by key hash."""

    key: tuple[str, ...]
    schema: TableSchema


class SubscribeExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A stream of the changes of the only import. With `snapshot`, its contents at `as_of` come
    first."""

    schema: TableSchema
    snapshot: bool = True


class CopyToExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A copy of the contents of the only import at `as_of` into files, with a manifest written
    last.

    `destination` is a folder below the replica's `copy_dir` (a path or ``file:`` URL), or a URL at
    or below one of its `copy_buckets`. Files have at most about `file_bytes_max` bytes.
    """

    schema: TableSchema
    destination: str
    format: Literal["parquet", "csv", "json"]
    file_bytes_max: int
    overwrite: bool = False
    """True to replace an existing copy once this one is complete."""


Export: TypeAlias = ViewExport | IndexExport | SubscribeExport | CopyToExport


class DataflowDescription(msgspec.Struct, frozen=True, gc=False):
    """A dataflow: what it reads and what it writes. `imports` are in the order of the plan's
    inputs."""

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
    """Allows a dataflow to run."""

    id: ObjectId


class AllowWrites(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends read-only mode for good."""


class AllowCompaction(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Allows compaction of an object: nobody reads below `frontier` any more. The empty frontier
    drops the object."""

    id: ObjectId
    frontier: Frontier


class IndexTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A peek of an index."""

    id: ObjectId


class ShardTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A peek of a shard. One worker reads it; the others answer without rows."""

    id: ObjectId
    imported: ShardImport = msgspec.field(name="source")


class LogTarget(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A peek of a relation that every worker keeps about itself. `id` is the relation's name; the
    peek's time is ignored."""

    id: ObjectId


PeekTarget: TypeAlias = IndexTarget | ShardTarget | LogTarget


class Peek(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads `target` at `time`. Answered exactly once.

    `keys` limits it to rows whose `key_columns` equal one of these tuples (an Arrow IPC stream with
    the key columns), `filter` to rows that pass all comparisons, and `project` to these columns.
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
    """Cancels a peek. The answer may already be on its way."""

    uuid: str


class InitializationComplete(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends the replay of the controller's state and triggers reconciliation."""


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
    """Progress of an object. None means unchanged. Frontiers never go back, and the empty one is
    final."""

    id: ObjectId
    write: Frontier | None = None
    input: Frontier | None = None
    output: Frontier | None = None


class PeekRows(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Rows as an Arrow IPC stream: user columns and ``__diff`` (positive), consolidated."""

    arrow: bytes
    rows: int = -1
    """Number of rows in the stream, -1 if not counted. With 0 rows `arrow` may be empty."""


class StashPart(msgspec.Struct, frozen=True, gc=False):
    """A blob with a piece of a result, an Arrow IPC stream as in `PeekRows`, or of a batch, as in
    `SubscribeBatch`."""

    key: str
    rows: int
    size_bytes: int


class PeekStashed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A result in the blob store: the rows of all `parts`, and those in `inline`.

    `rows` and `size_bytes` are totals. The reader deletes the parts; unread ones are deleted after
    `stash_orphan_ms`.
    """

    parts: tuple[StashPart, ...]
    rows: int
    size_bytes: int
    inline: bytes | None = None
    """Rows of workers that did not stash, as in `PeekRows`."""


class PeekError(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The peek failed; `code` is an error class.

    `limit` says whether it exceeded a limit: ``bytes`` of the result, or ``rows`` scanned, of which
    at most `limit_rows` are allowed.
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
    """All updates with ``lower <= time < upper``, consolidated. Batches are contiguous.

    `arrow` is an IPC stream (columns, ``__time``, ``__diff``), None if it has no updates. `error`
    is set if the view is in error, which ends the subscribe. Updates that do not fit into a
    response are in `parts`, as in `PeekStashed`; the batch then consists of these and of `arrow`.
    """

    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    error: tuple[str, str] | None = None
    traceparent: str | None = None
    """Sampled W3C trace context of one of the changes."""
    # A field and not an envelope, because it belongs to the updates: batches wait, are merged over
    # workers and are cut.
    parts: tuple[StashPart, ...] = ()
    """Stashed updates in any order; a part may be consolidated, but not across parts. The reader
    deletes the parts; unread ones are deleted after `stash_orphan_ms`."""


class SubscribeDropped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The subscribe was dropped at the upper of its last batch."""

    frontier: Frontier


class SubscribeResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A batch of one subscribe, or its end."""

    id: ObjectId
    batch: SubscribeBatch | SubscribeDropped


class CopyDone(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is complete. `manifest` lists its files and was written last.

    A worker that wrote no files answers zeros and "" as the manifest.
    """

    rows: int
    files: int
    manifest: str


class CopyFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy failed and has no manifest; `code` is an error class."""

    code: str
    text: str


class CopyDropped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy was dropped before it was complete."""


CopyResult: TypeAlias = CopyDone | CopyFailed | CopyDropped


class CopyToResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The only answer of a copy."""

    id: ObjectId
    result: CopyResult


class ConnectionRefused(msgspec.Struct, frozen=True, gc=False, tag="Refused"):
    """The last response on a connection that the replica ends; `code` is an error class."""

    code: str
    text: str


ERROR_STATES: Final = ("errored", "stalled", "frozen", "failed", "quarantined")
"""States of an object that count as errors. Their texts may quote rows."""


class StatusResponse(msgspec.Struct, frozen=True, gc=False, tag="Status"):
    """Informational: the state of a dataflow, its last step, or why it is stalled.

    The dataflow creates it for worker 0. It is the only record of a step's metrics.
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
    """True if the last step used prepared plans."""
    recomputed: bool = False
    """True if the last step recomputed the view in full."""
    rejected: str = ""
    """The alternative to the last step, and its estimated cost."""
    parts_read: int = 0
    """While it hydrates: number of input parts read so far, of `parts_total`; the same for
    bytes."""
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    wait_ms: float = 0.0
    """Time in ms that the last step waited for the engine and for other jobs there."""


Response: TypeAlias = (
    Frontiers
    | PeekResponse
    | SubscribeResponse
    | CopyToResponse
    | StatusResponse
    | ConnectionRefused
)


class CommandBatch(msgspec.Struct, frozen=True, gc=False, tag="Lot"):
    """Commands of one connection that arrived together, in order.

    They have the same effect as if they were sent one by one. Only used within a replica.
    """

    commands: tuple[Command, ...]
