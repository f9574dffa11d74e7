"""Commands and responses of the replica protocol's compute half.

Stages: Creation (`Hello`, `CreateInstance`) → Initialization (any commands, then
`InitializationComplete`) → Computation. Every connection starts with a `Hello` of a fresh
nonce. A response belongs to the connection whose command it answers; adapters see to that.
New fields come last, with defaults.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.plan.delta import DeltaPlan
from actors.plan.schema import Schema
from actors.progress import Frontier, Nonce, ObjectId, ShardId, Time


class Hello(msgspec.Struct, frozen=True, gc=False, tag=True):
    """First message of every connection."""

    nonce: Nonce


class CreateInstance(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Second message: the instance's configuration; must equal the running one's."""

    workers: int
    version: int = 1


class UpdateConfiguration(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes settings at once and globally; unset means unchanged."""

    result_bytes_max: int | None = None


class SourceImport(msgspec.Struct, frozen=True, gc=False):
    """A shard that a dataflow reads; `tables_upper`: its upper is the tables' shared one."""

    shard: ShardId
    schema: Schema
    tables_upper: bool = False


class ViewExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A maintained view: its delta plan, output shard, and the shards of its hidden states."""

    plan: DeltaPlan
    shard: ShardId
    hidden_shards: tuple[ShardId, ...] = ()


class IndexExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An arrangement of the one import by `key`, spread over the workers by key hash."""

    key: tuple[str, ...]
    schema: Schema


class SubscribeExport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A stream of the one import's changes; `snapshot`: contents at `as_of` come first."""

    schema: Schema
    snapshot: bool = True


Export: TypeAlias = ViewExport | IndexExport | SubscribeExport


class DataflowDescription(msgspec.Struct, frozen=True, gc=False):
    """Imports → export. `imports` are in the order of the plan's sources."""

    id: ObjectId
    name: str
    imports: tuple[SourceImport, ...]
    export: Export
    as_of: Time
    until: Frontier | None = None


class CreateDataflow(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Renders a dataflow, suspended until it is scheduled."""

    dataflow: DataflowDescription


class Schedule(msgspec.Struct, frozen=True, gc=False, tag=True):
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
    source: SourceImport


class Peek(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads `target` at `time`; answered exactly once.

    `keys`: only rows whose `key_columns` equal one of these tuples, as an Arrow IPC stream
    holding the key columns.
    """

    uuid: str
    target: IndexTarget | ShardTarget
    time: Time
    key_columns: tuple[str, ...] = ()
    keys: bytes | None = None
    traceparent: str | None = None
    """Sampled W3C trace context of who wants it."""


class CancelPeek(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Cancels a peek; racy by nature."""

    uuid: str


class InitializationComplete(msgspec.Struct, frozen=True, gc=False, tag=True):
    """End of the replayed state: triggers reconciliation."""


Command: TypeAlias = (
    Hello
    | CreateInstance
    | UpdateConfiguration
    | CreateDataflow
    | Schedule
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


class PeekError(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The peek failed; `code` is an error class."""

    code: str
    text: str


class PeekCanceled(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The peek was canceled."""


class PeekResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to one peek."""

    uuid: str
    result: PeekRows | PeekError | PeekCanceled


class SubscribeBatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All updates with ``lower <= time < upper``: contiguous, consolidated.

    `arrow` is an IPC stream (columns, ``__time``, ``__diff``), None when there are none.
    `error` set: the view holds an error; the subscribe ends.
    """

    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    error: tuple[str, str] | None = None
    traceparent: str | None = None
    """Sampled W3C trace context of a change among them."""


class SubscribeDropped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The subscribe was dropped at the upper of its last batch."""

    frontier: Frontier


class SubscribeResponse(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Progress of one subscribe."""

    id: ObjectId
    batch: SubscribeBatch | SubscribeDropped


class Status(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Informational: what a dataflow is doing, its last step, or why it stalls."""

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
    """Whether the last step's plans were there already."""
    recomputed: bool = False
    """Whether the view was computed whole instead of stepping."""
    rejected: str = ""
    """The other way of doing the last step, and what it would have taken."""


Response: TypeAlias = Frontiers | PeekResponse | SubscribeResponse | Status


class Tagged(msgspec.Struct, frozen=True, gc=False):
    """A command with the nonce of its connection."""

    nonce: Nonce
    command: Command


class TaggedResponse(msgspec.Struct, frozen=True, gc=False):
    """A response with the nonce of the connection it is meant for."""

    nonce: Nonce
    response: Response
