"""Events of a worker's compute state machine, and the effects it returns.

A render number identifies one rendering of a dataflow and is the same on all workers.
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


# Events and effects never leave the worker's actor, so they need no tags and no fields for
# compatibility with other releases.
class ComputeClientLost(msgspec.Struct, frozen=True, gc=False):
    """The client with this nonce disconnected."""

    nonce: Nonce


class DataflowProgressed(msgspec.Struct, frozen=True, gc=False):
    """The frontiers of a dataflow advanced."""

    number: int
    progress: DataflowProgress


class StatusSeen(msgspec.Struct, frozen=True, gc=False):
    """A dataflow reported its status."""

    number: int
    status: StatusResponse


class IndexSealed(msgspec.Struct, frozen=True, gc=False):
    """This worker's partition of an index is complete below `upper` and readable from `since` on.

    `upper` is 0 while a new incarnation installs its snapshot. After that, `since` is the as_of of
    the snapshot.
    """

    number: int
    upper: Frontier
    since: Time = 0


class SubscribeBatchReady(msgspec.Struct, frozen=True, gc=False):
    """A dataflow emitted a batch for its subscribe."""

    number: int
    emit: EmitBatch


class CopyEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a copy finished or failed."""

    number: int
    result: CopyDone | CopyFailed


class PeekDone(msgspec.Struct, frozen=True, gc=False):
    """A started peek has a result, or None if its arrangement was replaced meanwhile."""

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
    """Send responses to the client with this nonce (None: to nobody), and discard waiting ones."""

    nonce: Nonce | None


class SendComputeResponse(msgspec.Struct, frozen=True, gc=False):
    """Send a response to the client, then acknowledge `receipt` to dataflow `number`."""

    response: Response
    number: int = 0
    receipt: BatchEmitted | None = None


class AcknowledgeBatch(msgspec.Struct, frozen=True, gc=False):
    """Acknowledge a batch to its dataflow without sending it to a client."""

    number: int
    emitted: BatchEmitted


class RenderDataflow(msgspec.Struct, frozen=True, gc=False):
    """Create a dataflow, initially suspended."""

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
    """Allow this worker's partition of the index to be compacted up to `since`."""

    number: int
    since: Time


class StopDataflow(msgspec.Struct, frozen=True, gc=False):
    """Stop a dataflow and its tasks, and remove its state. Answered by `DropCompleted`."""

    number: int


class LogReconciliation(msgspec.Struct, frozen=True, gc=False):
    """Log and count the result of reconciling with a new client."""

    nonce: Nonce
    reused: int
    created: int
    dropped: int
    replaced: tuple[ReplacedDataflow, ...]


class StartPeek(msgspec.Struct, frozen=True, gc=False):
    """Run a peek. Answered by `PeekDone`. `number` is the index's render number, or 0 for a
    shard."""

    ticket: int
    number: int
    peek: Peek
    bytes_max: int
    inline_max: int | None = None
    """Size in bytes above which this worker's part of the answer is stashed. None: the setting's
    value."""


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
