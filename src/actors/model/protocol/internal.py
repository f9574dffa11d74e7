"""Messages between the actors of one replica: inputs, dataflows and workers.

They stay inside the process and are passed by reference; Arrow tables in them are immutable.
Commands go down (worker → dataflow → listen and fetch tasks) and may wait for room. Data and
progress come up by `ActorAddress.reply`, which never waits, so actors cannot block each other in a
cycle.
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
"""A command of either half, or a batch of commands of the compute half."""
AnyResponse: TypeAlias = Response | storage.Response

# -- channel adapters --------------------------------------------------------------------------


class TaggedCommand(msgspec.Struct, Generic[C], frozen=True, gc=False):
    """A command of a half, with the nonce of its connection."""

    nonce: Nonce
    command: C
    half: Half = "compute"


class TaggedResponse(msgspec.Struct, frozen=True, gc=False):
    """A response with the nonce of its connection.

    It is acknowledged by its `serial`, which its worker assigned; 0 needs no acknowledgement.
    """

    nonce: Nonce
    response: AnyResponse
    serial: int = 0


class TaggedResponses(msgspec.Struct, frozen=True, gc=False):
    """Several responses of a worker for one connection, in order, as (serial, response) pairs."""

    nonce: Nonce
    responses: tuple[tuple[int, AnyResponse], ...]


# -- the sequencer -----------------------------------------------------------------------------


# These messages are passed by reference. `pytest --messages-encoded` encodes them nevertheless, to
# prove that no two actors share mutable state.
class ProposeCommand(msgspec.Struct, frozen=True, gc=False, tag="Propose"):
    """Worker 0 proposes a command of one half to the sequencer.

    `generation` is the number of that half's connections so far. Commands of a displaced connection
    are dropped, never applied late.
    """

    generation: int
    command: Command | CommandBatch | ForStorage

    @property
    def half(self) -> Half:
        """Return the half to which the command belongs."""
        return "storage" if isinstance(self.command, ForStorage) else "compute"


class SequencedCommand(msgspec.Struct, frozen=True, gc=False, tag="Sequenced"):
    """Command number `index` in the total order of both halves. Every worker receives all indices
    in order."""

    index: int
    generation: int
    command: Command | CommandBatch | ForStorage


# -- listen and fetch --------------------------------------------------------------------------


class DescribedPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a batch, leased by the listen task that described it.

    The wanted updates have times in ``[lower, upper)``; in a snapshot `upper` is ``as_of + 1``.
    `part` is the `BatchPart` of `persist`.
    """

    key: str
    shard: ShardId
    part: Any
    lower: Time
    upper: Frontier
    bytes: int
    rows: int
    snapshot: bool = False
    """True for a part of a snapshot, whose times must be advanced to ``upper - 1``."""


class StartListen(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Starts a listen task: the snapshot at `as_of` if wanted, then all later batches up to
    `until`."""

    as_of: Time
    snapshot: bool
    until: Frontier | None = None


class GrantDescriptions(msgspec.Struct, frozen=True, gc=False, tag="Grant"):
    """The consumer has accepted a `PartsDescribed`: the task may describe this many more bytes.

    There is exactly one grant for each `PartsDescribed`, even for one without parts.
    """

    bytes: int


class ReleaseLeases(msgspec.Struct, frozen=True, gc=False, tag="Release"):
    """The consumer no longer needs these parts, so their leases can be released."""

    keys: tuple[str, ...]


class FilteredParts(msgspec.Struct, frozen=True, gc=False):
    """Parts that were skipped by their statistics (partition pruning), their bytes, and how many of
    them were read to verify the filter."""

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
    """Parts skipped since the task started; None without a filter."""


class ListenFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Listen task → dataflow: listing failed for good, so the input freezes. The last message."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    error: PenstockError


class FetchPart(msgspec.Struct, frozen=True, gc=False, tag="Fetch"):
    """Dataflow → fetch task: read this part. `time` comes back with the result."""

    time: Frontier
    part: DescribedPart


class PartFetched(msgspec.Struct, frozen=True, gc=False, tag="Fetched"):
    """Fetch task → dataflow: the updates of a part, with the time of its `FetchPart`."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    time: Frontier
    key: str
    updates: pa.Table


class FetchFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Fetch task → dataflow: a part could not be read. Its time never completes, and the input
    freezes."""

    dataflow: ObjectId
    incarnation: int
    input_index: int
    time: Frontier
    key: str
    error: PenstockError


# -- workers and dataflows ---------------------------------------------------------------------


class StartInputs(msgspec.Struct, frozen=True, gc=False, tag="StartSources"):
    """Dataflow → each worker: start the tasks of this incarnation, after stopping those of an
    earlier one.

    Every worker starts a fetch task for each input, and the worker ``hash(dataflow, input) % N``
    also the listen task. Each worker answers with one `InputStarted` per input.
    """

    dataflow: ObjectId
    incarnation: int


class StopInputs(msgspec.Struct, frozen=True, gc=False, tag="StopSources"):
    """Dataflow → each worker: stop the tasks, because the dataflow reads nothing more."""

    dataflow: ObjectId
    incarnation: int


class InputStarted(msgspec.Struct, frozen=True, gc=False, tag="SourceStarted"):
    """Worker → dataflow: the tasks of an input have started.

    `fetch` is the address of the fetch task. `listen` is that of the listen task, None on all
    workers but one.
    """

    dataflow: ObjectId
    incarnation: int
    worker: int
    input_index: int
    fetch: Any
    listen: Any = None


class DataflowScheduled(msgspec.Struct, frozen=True, gc=False, tag="Scheduled"):
    """Worker 0 → dataflow: the dataflow may run."""


class CompactionAllowed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Worker 0 → dataflow: nobody reads below `frontier` any more."""

    frontier: Frontier


class WritesAllowed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Worker 0 → dataflow: read-only mode has ended."""


class InstallUpdates(msgspec.Struct, frozen=True, gc=False, tag="Install"):
    """Dataflow → each worker: its partition of an index's updates in [lower, upper), consolidated.

    A `snapshot` replaces all contents (a new incarnation); its times are advanced to `as_of`.
    Answered by `UpdatesInstalled`.
    """

    dataflow: ObjectId
    incarnation: int
    lower: Time
    upper: Frontier
    updates: pa.Table
    snapshot: bool = False


class UpdatesInstalled(msgspec.Struct, frozen=True, gc=False, tag="Installed"):
    """Worker → dataflow: this worker's partition of the index is complete up to `upper`."""

    dataflow: ObjectId
    incarnation: int
    worker: int
    upper: Frontier


class DataflowProgress(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Dataflow → every worker, which reports it: the dataflow's frontiers.

    `input` is the progress of its inputs, `write` of its durable output, and `output` of its
    installed output.
    """

    dataflow: ObjectId
    write: Frontier
    input: Frontier
    output: Frontier


class EmitBatch(msgspec.Struct, frozen=True, gc=False, tag="Emit"):
    """Dataflow → worker 0: a batch of a subscribe. Answered by `BatchEmitted` when the next one may
    be sent."""

    dataflow: ObjectId
    incarnation: int
    batch: SubscribeBatch


class BatchEmitted(msgspec.Struct, frozen=True, gc=False, tag="Emitted"):
    """Worker 0 → dataflow: the batch was passed on, and the next one may be sent."""

    dataflow: ObjectId
    incarnation: int
    upper: Frontier


class AdapterStatistics(msgspec.Struct, frozen=True, gc=False):
    """Counts since the start, and what the adapter keeps now."""

    forwarded: int
    """Responses passed to the client that was connected."""
    delivered: int
    """Responses passed from the stash to a client that connected later."""
    dropped: int
    """Responses to clients that were displaced, have left, or never came."""
    stashed: int
    """Responses in the stash now."""
    holding: int
    """Responses held back now, since the stash is full."""
    commands: int
    """Commands passed to the worker."""
    commands_in_flight: int
    """Commands passed to the worker which it has not put into the order yet."""
    commands_dropped: int
    """Commands of clients that were not served any more."""
    nonce: Nonce | None
    """The client that is served now."""
    since_ms: int | None
    """Time since when it is served, in Unix ms."""
    waiting: int
    """Clients that wait for their predecessor to leave."""


class InputStatistics(msgspec.Struct, frozen=True, gc=False, tag="SourceStatistics"):
    """Parts and rows of one input of a dataflow that wait for a step. Sizes are in bytes."""

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
    """Parts that were skipped by their statistics."""
    parts_audited: int = 0
    """How many of these were read to verify the filter."""


class InspectInputs(msgspec.Struct, frozen=True, gc=False):
    """Worker 0 → dataflow: asks for the `InputStatistics` of all its inputs."""

    reply: ReplySlot[tuple[InputStatistics, ...]]


class CopyFinished(msgspec.Struct, frozen=True, gc=False, tag="Copied"):
    """Dataflow → worker 0: a copy is complete or has failed. Sent once."""

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
"""Messages to a dataflow, except the results of its own effects."""

DataflowReport: TypeAlias = (
    StartInputs
    | StopInputs
    | InstallUpdates
    | EmitBatch
    | DataflowProgress
    | StatusResponse
    | CopyFinished
)
"""Messages of a dataflow to a worker."""

ListenMessage: TypeAlias = StartListen | GrantDescriptions | ReleaseLeases
FetchMessage: TypeAlias = FetchPart
