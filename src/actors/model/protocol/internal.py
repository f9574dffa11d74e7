"""Messages between the actors of one replica: inputs, dataflows and workers.

They stay inside the process and pass by reference; Arrow tables in them are immutable.
Directions: commands go down (worker → dataflow → listen and fetch tasks), data and progress
come up in room that a request reserved (`Address.reply`), so no cycle of actors can block.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from actors.model.protocol import storage
from actors.model.protocol.compute import (
    Command,
    CommandBatch,
    CopyDone,
    CopyFailed,
    Response,
    StatusResponse,
    SubscribeBatch,
)
from actors.model.protocol.storage_internal import ForStorage
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ReplySlot
from actors.runtime.progress import Frontier, Nonce, ObjectId, ShardId, Time

C = TypeVar("C")

Half: TypeAlias = Literal["compute", "storage"]
AnyCommand: TypeAlias = Command | CommandBatch | storage.Command
"""A command of either half, or several of the compute half."""
AnyResponse: TypeAlias = Response | storage.Response

# -- channel adapters --------------------------------------------------------------------------


class TaggedCommand(msgspec.Struct, Generic[C], frozen=True, gc=False):
    """A command of a half, with the nonce of its connection."""

    nonce: Nonce
    command: C
    half: Half = "compute"


class TaggedResponse(msgspec.Struct, frozen=True, gc=False):
    """A response with the nonce of its connection; `serial` is its worker's number for it, by which
    it is acknowledged (0: needs no acknowledgement)."""

    nonce: Nonce
    response: AnyResponse
    serial: int = 0


class TaggedResponses(msgspec.Struct, frozen=True, gc=False):
    """Several of a worker's responses for one connection, in order: (serial, response) each, as
    in `TaggedResponse`."""

    nonce: Nonce
    responses: tuple[tuple[int, AnyResponse], ...]


# -- the sequencer: one order of all that renders ----------------------------------------------


# These stay inside a process and pass by reference. `pytest --messages-encoded` sends them as bytes
# all the same, which proves that no two actors share mutable state.
class ProposeCommand(msgspec.Struct, frozen=True, gc=False, tag="Propose"):
    """Worker 0 asks for a command of one half to be ordered; `generation` is the count of that
    half's connections so far: commands of a displaced one are dropped, never applied late."""

    generation: int
    command: Command | CommandBatch | ForStorage

    @property
    def half(self) -> Half:
        """Return the half that the command belongs to."""
        return "storage" if isinstance(self.command, ForStorage) else "compute"


class SequencedCommand(msgspec.Struct, frozen=True, gc=False, tag="Sequenced"):
    """Command number `index` of the one order of both halves; every worker receives every index,
    in order."""

    index: int
    generation: int
    command: Command | CommandBatch | ForStorage


# -- listen and fetch --------------------------------------------------------------------------


class DescribedPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a batch, under a lease of the listen task that described it.

    `lower`/`upper` bound the batch's times; in a snapshot, `upper` is ``as_of + 1``.
    `part` is persist's own `BatchPart`.
    """

    key: str
    shard: ShardId
    part: Any
    lower: Time
    upper: Frontier
    bytes: int
    rows: int
    snapshot: bool = False
    """True for a part of a snapshot: times are to be raised to ``upper - 1``."""


class StartListen(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The start signal: snapshot at `as_of` if wanted, then all later batches, up to `until`."""

    as_of: Time
    snapshot: bool
    until: Frontier | None = None


class GrantDescriptions(msgspec.Struct, frozen=True, gc=False, tag="Grant"):
    """The consumer has taken what was described: describe up to this many more bytes (at least one
    batch). Exactly one Grant for each Described, even one without parts."""

    bytes: int


class ReleaseLeases(msgspec.Struct, frozen=True, gc=False, tag="Release"):
    """The consumer no longer needs these parts: their leases return."""

    keys: tuple[str, ...]


class FilteredParts(msgspec.Struct, frozen=True, gc=False):
    """Parts that a filter by statistics left out (partition pruning), their bytes, and how many of
    them were read to verify it."""

    parts: int
    bytes: int
    audited: int


class PartsDescribed(msgspec.Struct, frozen=True, gc=False, tag="Described"):
    """Listen task → dataflow: parts with times in [lower, upper), and progress to `upper`."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    parts: tuple[DescribedPart, ...]
    lower: Time
    upper: Frontier
    snapshot: bool = False
    filtered: FilteredParts | None = None
    """Parts that were left out since the task began, if there is a filter."""


class ListenFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The listen task's last message: the input freezes."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    error: PenstockError


class FetchPart(msgspec.Struct, frozen=True, gc=False, tag="Fetch"):
    """Dataflow → fetch task: read this part; `time` is returned with the result."""

    time: Frontier
    part: DescribedPart


class PartFetched(msgspec.Struct, frozen=True, gc=False, tag="Fetched"):
    """Fetch task → dataflow: the part's updates, with the time of their `FetchPart`."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    time: Frontier
    key: str
    updates: pa.Table


class FetchFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A part could not be read: the time never completes, the input freezes."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    time: Frontier
    key: str
    error: PenstockError


# -- workers and dataflows ---------------------------------------------------------------------


class StartInputs(msgspec.Struct, frozen=True, gc=False, tag="StartSources"):
    """Dataflow → each worker: start the tasks of this incarnation; answered by one
    `InputStarted` an input. The worker with ``hash(dataflow, input) % N`` starts the listen
    task, every worker a fetch task. Tasks of an earlier incarnation are stopped first."""

    dataflow: ObjectId
    incarnation: int


class StopInputs(msgspec.Struct, frozen=True, gc=False, tag="StopSources"):
    """Dataflow → each worker: the dataflow has ended and reads no more: stop its tasks."""

    dataflow: ObjectId
    incarnation: int


class InputStarted(msgspec.Struct, frozen=True, gc=False, tag="SourceStarted"):
    """Worker → dataflow. `fetch` is an Address; `listen` too, on one worker only."""

    dataflow: ObjectId
    incarnation: int
    worker: int
    input_index: int
    fetch: Any
    listen: Any = None


class DataflowScheduled(msgspec.Struct, frozen=True, gc=False, tag="Scheduled"):
    """Worker 0 → dataflow: the suspension ends."""


class CompactionAllowed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Worker 0 → dataflow: external readers need nothing below `frontier`."""

    frontier: Frontier


class WritesAllowed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Worker 0 → dataflow: read-only ended."""


class InstallUpdates(msgspec.Struct, frozen=True, gc=False, tag="Install"):
    """Dataflow → each worker: its partition of an index's updates in [lower, upper); answered
    by `UpdatesInstalled`. Consolidated. `snapshot`: replaces everything (a fresh incarnation);
    times are already advanced to as_of."""

    dataflow: ObjectId
    incarnation: int
    lower: Time
    upper: Frontier
    updates: pa.Table
    snapshot: bool = False


class UpdatesInstalled(msgspec.Struct, frozen=True, gc=False, tag="Installed"):
    """Worker → dataflow."""

    dataflow: ObjectId
    incarnation: int
    worker: int
    upper: Frontier


class DataflowProgress(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Dataflow → every worker, which reports them: the frontiers to which its inputs have advanced
    (`input`), its output is durable (`write`), and its output is installed (`output`)."""

    dataflow: ObjectId
    write: Frontier
    input: Frontier
    output: Frontier


class EmitBatch(msgspec.Struct, frozen=True, gc=False, tag="Emit"):
    """Dataflow → worker 0: a batch of a subscribe; answered by `BatchEmitted` when the client's
    queue has room again."""

    dataflow: ObjectId
    incarnation: int
    batch: SubscribeBatch


class BatchEmitted(msgspec.Struct, frozen=True, gc=False, tag="Emitted"):
    """Worker 0 → dataflow: the batch was passed on; the next may come."""

    dataflow: ObjectId
    incarnation: int
    upper: Frontier


class InputStatistics(msgspec.Struct, frozen=True, gc=False, tag="SourceStatistics"):
    """Parts and rows of one input of a dataflow that wait for a step; sizes in bytes."""

    dataflow: ObjectId
    input_index: int
    shard: ShardId
    described: Frontier
    """Frontier to which its parts are known."""
    waiting: int
    bytes_waiting: int
    """Parts known and not requested yet."""
    fetching: int
    bytes_fetching: int
    """Parts requested and not received yet."""
    rows_fetched: int
    bytes_fetched: int
    """Rows that wait for their step."""
    parts_filtered: int = 0
    bytes_filtered: int = 0
    """Parts that were left out, as they hold no row for the view."""
    parts_audited: int = 0
    """Parts among them that were read to verify it."""


class InspectInputs(msgspec.Struct, frozen=True, gc=False):
    """Worker 0 → dataflow: asks for `InputStatistics` of all its inputs."""

    reply: ReplySlot[tuple[InputStatistics, ...]]


class CopyFinished(msgspec.Struct, frozen=True, gc=False, tag="Copied"):
    """Dataflow → worker 0: a copy is done, or failed; sent once."""

    dataflow: ObjectId
    result: CopyDone | CopyFailed


DataflowMessage: TypeAlias = (
    DataflowScheduled
    | CompactionAllowed
    | WritesAllowed
    | InputStarted
    | PartsDescribed
    | ListenFailed
    | PartFetched
    | FetchFailed
    | UpdatesInstalled
    | BatchEmitted
    | InspectInputs
)
"""Messages to a dataflow, without the results of its own effects."""

DataflowReport: TypeAlias = (
    StartInputs
    | StopInputs
    | InstallUpdates
    | EmitBatch
    | DataflowProgress
    | StatusResponse
    | CopyFinished
)
"""Messages of dataflows to a worker."""

ListenMessage: TypeAlias = StartListen | GrantDescriptions | ReleaseLeases
FetchMessage: TypeAlias = FetchPart
