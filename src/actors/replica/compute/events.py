"""Events that a worker's state machine handles, and effects that it returns.

A render number names one rendering of a dataflow, and is the same on all workers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.model.protocol.compute import (
    Command,
    CommandBatch,
    CopyDone,
    CopyFailed,
    DataflowDescription,
    Peek,
    PeekError,
    PeekRows,
    PeekStashed,
    Response,
    StatusResponse,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    CompactionAllowed,
    DataflowProgress,
    DataflowScheduled,
    EmitBatch,
    ProposeCommand,
    SequencedCommand,
    TaggedCommand,
    WritesAllowed,
)
from actors.replica.compute.reconciliation import ReplacedDataflow
from actors.runtime.progress import Frontier, Nonce, Time

PeekResult: TypeAlias = PeekRows | PeekStashed | PeekError

# -- events ----------------------------------------------------------------------------------------


# Events and effects stay within the worker's actor: no tags, and no field for other releases.
class ComputeClientLost(msgspec.Struct, frozen=True, gc=False):
    """The client with that nonce disconnected."""

    nonce: Nonce


class DataflowProgressed(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's frontiers moved."""

    number: int
    progress: DataflowProgress


class StatusSeen(msgspec.Struct, frozen=True, gc=False):
    """A dataflow reported its status."""

    number: int
    status: StatusResponse


class IndexSealed(msgspec.Struct, frozen=True, gc=False):
    """This worker's partition of an index is complete below `upper` and readable from `since`.

    While a fresh incarnation installs its snapshot `upper` is 0; afterwards `since` is its as_of.
    """

    number: int
    upper: Frontier
    since: Time = 0


class SubscribeBatchReady(msgspec.Struct, frozen=True, gc=False):
    """A dataflow emitted a batch of a subscribe."""

    number: int
    emit: EmitBatch


class CopyEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a copy was finished, or failed."""

    number: int
    result: CopyDone | CopyFailed


class PeekDone(msgspec.Struct, frozen=True, gc=False):
    """A started peek has its result; None if its arrangement was replaced."""

    ticket: int
    result: PeekResult | None


class DataflowCrashed(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a dataflow's actor crashed."""

    number: int
    text: str


class DropCompleted(msgspec.Struct, frozen=True, gc=False):
    """A dropped dataflow and all its tasks have stopped."""

    number: int


Event: TypeAlias = (
    TaggedCommand[Command | CommandBatch]
    | SequencedCommand
    | ComputeClientLost
    | DataflowProgressed
    | StatusSeen
    | IndexSealed
    | SubscribeBatchReady
    | CopyEnded
    | PeekDone
    | DataflowCrashed
    | DropCompleted
)

# -- effects ---------------------------------------------------------------------------------------


class OfferCommand(msgspec.Struct, frozen=True, gc=False):
    """Propose a command to the sequencer."""

    propose: ProposeCommand


class SwitchComputeClient(msgspec.Struct, frozen=True, gc=False):
    """Send responses to this nonce (None: nowhere), and drop those that still wait."""

    nonce: Nonce | None


class SendComputeResponse(msgspec.Struct, frozen=True, gc=False):
    """Send a response to the client; then acknowledge `receipt` to dataflow `number`."""

    response: Response
    number: int = 0
    receipt: BatchEmitted | None = None


class AcknowledgeBatch(msgspec.Struct, frozen=True, gc=False):
    """Acknowledge a batch to its dataflow at once."""

    number: int
    emitted: BatchEmitted


class RenderDataflow(msgspec.Struct, frozen=True, gc=False):
    """Create a dataflow, suspended."""

    number: int
    description: DataflowDescription


class RespawnDataflow(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: respawn the crashed actor of a dataflow, after a delay."""

    number: int


class SendToDataflow(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: send a command to the dataflow actor."""

    number: int
    message: DataflowScheduled | CompactionAllowed | WritesAllowed


class CompactIndex(msgspec.Struct, frozen=True, gc=False):
    """Allow compaction of the index's partition up to `since`."""

    number: int
    since: Time


class StopDataflow(msgspec.Struct, frozen=True, gc=False):
    """Stop a dataflow and its tasks, remove its state; answered by `DropCompleted`."""

    number: int


class LogReconciliation(msgspec.Struct, frozen=True, gc=False):
    """Log and count the result of a reconciliation with a new client."""

    nonce: Nonce
    reused: int
    created: int
    dropped: int
    replaced: tuple[ReplacedDataflow, ...]


class StartPeek(msgspec.Struct, frozen=True, gc=False):
    """Run a peek; answered by `PeekDone`. `number` is the index's, 0 for a shard."""

    ticket: int
    number: int
    peek: Peek
    bytes_max: int
    inline_max: int | None = None
    """Size above which this worker's part of the answer is stashed; None: the settings' value."""


class StopPeek(msgspec.Struct, frozen=True, gc=False):
    """Cancel a peek."""

    ticket: int


Effect: TypeAlias = (
    OfferCommand
    | SwitchComputeClient
    | SendComputeResponse
    | AcknowledgeBatch
    | RenderDataflow
    | RespawnDataflow
    | SendToDataflow
    | CompactIndex
    | StopDataflow
    | LogReconciliation
    | StartPeek
    | StopPeek
)
