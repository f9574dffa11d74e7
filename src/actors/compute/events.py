"""What happens to a worker's state machine (events) and what it wants done (effects).

A render number names one rendering of a dataflow, the same on all workers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.compute.reconcile import Replaced
from actors.progress import Frontier, Nonce, Time
from actors.protocol.compute import (
    CopyDone,
    CopyFailed,
    DataflowDescription,
    Peek,
    PeekError,
    PeekRows,
    PeekStashed,
    Response,
    Tagged,
)
from actors.protocol.internal import (
    CompactionAllowed,
    DataflowProgress,
    DataflowStatus,
    Emit,
    Emitted,
    Propose,
    Scheduled,
    Sequenced,
    WritesAllowed,
)

PeekResult: TypeAlias = PeekRows | PeekStashed | PeekError

# -- events ----------------------------------------------------------------------------------------


class ClientLost(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce is gone."""

    nonce: Nonce


class Progressed(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's frontiers moved."""

    number: int
    progress: DataflowProgress


class StatusSeen(msgspec.Struct, frozen=True, gc=False):
    """A dataflow says what it does."""

    number: int
    status: DataflowStatus


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """This worker's partition of an index is complete below `upper` and readable from `since`.

    A fresh incarnation installs a snapshot: `upper` 0 while it does, then `since` is its as_of.
    """

    number: int
    upper: Frontier
    since: Time = 0


class Emitting(msgspec.Struct, frozen=True, gc=False):
    """A dataflow has a batch of a subscribe."""

    number: int
    emit: Emit


class CopyEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a copy is done, or failed."""

    number: int
    result: CopyDone | CopyFailed


class PeekDone(msgspec.Struct, frozen=True, gc=False):
    """A started peek has its answer; None: its arrangement was replaced meanwhile."""

    ticket: int
    result: PeekResult | None


class Crashed(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a dataflow's actor failed by its own fault."""

    number: int
    text: str


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """A dropped dataflow and all its tasks have stopped."""

    number: int


Event: TypeAlias = (
    Tagged
    | Sequenced
    | ClientLost
    | Progressed
    | StatusSeen
    | Sealed
    | Emitting
    | CopyEnded
    | PeekDone
    | Crashed
    | Stopped
)

# -- effects ---------------------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, gc=False):
    """Offer a command to the sequencer."""

    propose: Propose


class SwitchClient(msgspec.Struct, frozen=True, gc=False):
    """Responses now go to this nonce (None: nowhere); forget those that still wait."""

    nonce: Nonce | None


class Respond(msgspec.Struct, frozen=True, gc=False):
    """Answer the client; `receipt` is due to dataflow `number` when the client took it."""

    response: Response
    number: int = 0
    receipt: Emitted | None = None


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Tell the dataflow at once that its batch is off its hands."""

    number: int
    emitted: Emitted


class Render(msgspec.Struct, frozen=True, gc=False):
    """Make a dataflow run, suspended."""

    number: int
    description: DataflowDescription


class Respawn(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: start the crashed actor of a dataflow afresh, after a delay."""

    number: int


class Tell(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a command for the dataflow actor."""

    number: int
    message: Scheduled | CompactionAllowed | WritesAllowed


class Compact(msgspec.Struct, frozen=True, gc=False):
    """The index's partition needs nothing below `since`."""

    number: int
    since: Time


class DropDataflow(msgspec.Struct, frozen=True, gc=False):
    """Stop a dataflow and its tasks, remove its state; answer `Stopped`."""

    number: int


class Reconciled(msgspec.Struct, frozen=True, gc=False):
    """What ran was compared with what a new client wants: log it and count it."""

    nonce: Nonce
    reused: int
    created: int
    dropped: int
    replaced: tuple[Replaced, ...]


class StartPeek(msgspec.Struct, frozen=True, gc=False):
    """Read; answer `PeekDone`. `number`: the index's; 0 for a shard."""

    ticket: int
    number: int
    peek: Peek
    bytes_max: int
    inline_max: int | None = None
    """Of this worker's part of the answer in a response, more is stashed; None: as set."""


class StopPeek(msgspec.Struct, frozen=True, gc=False):
    """The answer of that peek is not wanted any more."""

    ticket: int


Effect: TypeAlias = (
    Offer
    | SwitchClient
    | Respond
    | Receipt
    | Render
    | Respawn
    | Tell
    | Compact
    | DropDataflow
    | Reconciled
    | StartPeek
    | StopPeek
)
