"""State of one rendering on a worker, and the messages that concern it.

A dataflow's actor gets a `DataflowLink` for each worker instead of the plain address: it signs
messages with the render number and the sender's address. So a worker can distinguish a dataflow
from a former rendering of the same object, and knows whom to answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from actors.durable.arrangement import Arrangement, SharedStatistics
from actors.durable.persist import PartFilter
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import DataflowDescription, ShardImport
from actors.model.protocol.internal import DataflowReport, StartInputs
from actors.replica.compute.events import Event, PeekDone
from actors.replica.compute.index import IndexInsertion, IndexPartition
from actors.runtime.kernel import Actor, ActorAddress, ActorContext
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings


class ActorFactory(msgspec.Struct, frozen=True, gc=False):
    """Creates the actors that a worker starts. Tests replace it."""

    dataflow: Callable[[DataflowDescription, tuple[ActorAddress[Any], ...], Path], Actor[Any]]
    """Takes (description, workers, scratch). The dataflow is read-only until `WritesAllowed`."""
    listen: Callable[
        [ShardImport, ObjectId, int, int, ActorAddress[Any], PartFilter | None], Actor[Any]
    ]
    """Takes (import, dataflow, incarnation, input number, consumer, filter of wanted parts)."""
    fetch: Callable[[TableSchema, ObjectId, int, int, ActorAddress[Any]], Actor[Any]]
    """Takes (schema, dataflow, incarnation, input number, consumer)."""
    shared: Callable[[], list[SharedStatistics]] = list
    """Returns the arrangements that dataflows share at the moment."""


class FromDataflow(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's message, signed with its render number and the sender's address."""

    number: int
    dataflow: ActorAddress[Any]
    message: DataflowReport


class DataflowStopped(msgspec.Struct, frozen=True, gc=False):
    """Worker 0 → the others: the actor of a dropped dataflow has stopped."""

    number: int


# -- results of a worker's own effects -------------------------------------------------------------


class MaintenanceDue(msgspec.Struct, frozen=True, gc=False):
    """The interval between maintenance runs has passed."""


class PeekFinished(msgspec.Struct, frozen=True, gc=False):
    """A peek has a result."""

    done: PeekDone


class InstallFinished(msgspec.Struct, frozen=True, gc=False):
    """An insertion into an index partition succeeded or failed."""

    number: int
    insertion: IndexInsertion
    result: Arrangement | Exception


class RetryInsertion(msgspec.Struct, frozen=True, gc=False):
    """The delay after a failed insertion has passed."""

    number: int
    insertion: IndexInsertion


class MaintenanceFinished(msgspec.Struct, frozen=True, gc=False):
    """Maintenance of a partition ended, with `error` if it failed."""

    number: int
    error: Exception | None = None


class TasksStopped(msgspec.Struct, frozen=True, gc=False):
    """The tasks of earlier incarnations have stopped."""

    number: int
    serial: int
    start: StartInputs
    dataflow: ActorAddress[Any]


class TaskEnded(msgspec.Struct, frozen=True, gc=False):
    """A listen or fetch task has stopped."""

    number: int
    serial: int
    incarnation: int
    input_index: int
    path: str


class DataflowEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a dataflow's actor has stopped."""

    number: int
    serial: int


class RespawnDue(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: the delay after a crash of a dataflow's actor has passed."""

    number: int
    serial: int


class DataflowRemoved(msgspec.Struct, frozen=True, gc=False):
    """A dropped dataflow has been torn down."""

    number: int


IndexTurn: TypeAlias = InstallFinished | RetryInsertion | MaintenanceFinished
TasksTurn: TypeAlias = TasksStopped | TaskEnded
ChildrenTurn: TypeAlias = DataflowEnded | RespawnDue | DataflowStopped


# -- signed addresses ------------------------------------------------------------------------------


class DataflowOrigin:
    """The sender that a `DataflowLink` signs for. Its address is known once the actor is
    spawned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address: ActorAddress[Any] | None = None
        """Address of the dataflow's actor, once it is spawned."""


class DataflowLink(ActorAddress[Any]):
    """Address under which a dataflow sends to its worker. It adds the sender to each message."""

    __slots__ = ("_origin",)

    def __init__(self, worker: ActorAddress[Any], origin: DataflowOrigin) -> None:
        super().__init__(worker._mailbox)
        self._origin = origin

    def _sign(self, message: Any) -> FromDataflow:
        address = self._origin.address
        assert address is not None, "a dataflow sends messages only after it was spawned"
        return FromDataflow(self._origin.number, address, message)

    async def send(self, message: Any) -> None:
        """Send a signed message like `ActorAddress.send`."""
        await super().send(self._sign(message))

    def send_nowait(self, message: Any) -> None:
        """Send a signed message like `ActorAddress.send_nowait`."""
        super().send_nowait(self._sign(message))

    def reply(self, message: Any) -> bool:
        """Send a signed message like `ActorAddress.reply`."""
        return super().reply(self._sign(message))


# -- state of a rendering --------------------------------------------------------------------------


class DataflowRendering:
    """State of one rendering on one worker."""

    def __init__(self, number: int, description: DataflowDescription) -> None:
        self.number = number
        self.description = description
        self.dataflow: ActorAddress[Any] | None = None
        """Worker 0: the child actor, while it runs. Other workers: the sender of the last
        message."""
        self.dataflow_serial = 0
        """Worker 0: number of times that the actor was started."""
        self.tasks: list[ActorAddress[Any]] = []
        """Listen and fetch tasks of the current incarnation."""
        self.tasks_serial = 0
        """Number of starts and stops of tasks; messages with an earlier serial are stale."""
        self.index: IndexPartition | None = None
        """This worker's partition, if the dataflow maintains an index."""
        self.maintaining = False
        """True while runs of the partition are merged."""
        self.dropping = False
        """True from the drop on."""
        self.tearing_down = False
        """True once tasks are being stopped and files removed."""

    @property
    def id(self) -> ObjectId:
        """Return the id of the object that the dataflow maintains."""
        return self.description.id


class WorkerContext(msgspec.Struct, frozen=True, gc=False):
    """Context that the parts of one worker share."""

    ctx: ActorContext[Any]
    index: int
    count: int
    workers: Sequence[ActorAddress[Any]]
    factory: ActorFactory
    settings: Settings
    scratch: Path
    renderings: dict[int, DataflowRendering]
    feed: Callable[[Event], Awaitable[None]]
    """Feeds an event to the state machine and performs its effects."""
    life: int = 0
    """Number of this cluster among all that the process has started; it keeps names distinct."""
