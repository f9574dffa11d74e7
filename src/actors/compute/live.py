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

from actors.arrangement import Arrangement, SharedStatistics
from actors.compute.events import Event, PeekDone
from actors.compute.index import IndexPartition, Insertion
from actors.kernel import Actor, Address, Context
from actors.persist import PartFilter
from actors.plan.schema import Schema
from actors.progress import ObjectId
from actors.protocol.compute import DataflowDescription, SourceImport
from actors.protocol.internal import DataflowReport, StartSources
from actors.settings import Settings


class Cast(msgspec.Struct, frozen=True, gc=False):
    """Factories of the actors that a worker starts (tests replace them)."""

    dataflow: Callable[[DataflowDescription, tuple[Address[Any], ...], Path], Actor[Any]]
    """Takes (description, workers, scratch). The dataflow is read-only until `WritesAllowed`."""
    listen: Callable[
        [SourceImport, ObjectId, int, int, Address[Any], PartFilter | None], Actor[Any]
    ]
    """Takes (source, dataflow, incarnation, source number, consumer, rows wanted)."""
    fetch: Callable[[Schema, ObjectId, int, int, Address[Any]], Actor[Any]]
    """Takes (schema, dataflow, incarnation, source number, consumer)."""
    shared: Callable[[], list[SharedStatistics]] = list
    """Returns the arrangements that dataflows share now."""


class FromDataflow(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's message, signed with its render number and the sender's address."""

    number: int
    dataflow: Address[Any]
    message: DataflowReport


class DataflowStopped(msgspec.Struct, frozen=True, gc=False):
    """Worker 0 → the others: the dropped dataflow's actor has stopped."""

    number: int


# -- results of a worker's own effects -------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Maintenance is due."""


class Read(msgspec.Struct, frozen=True, gc=False):
    """A peek was answered."""

    done: PeekDone


class Inserted(msgspec.Struct, frozen=True, gc=False):
    """An install succeeded, or failed."""

    number: int
    insertion: Insertion
    result: Arrangement | Exception


class InsertAgain(msgspec.Struct, frozen=True, gc=False):
    """The delay after a failed install has passed."""

    number: int
    insertion: Insertion


class Maintained(msgspec.Struct, frozen=True, gc=False):
    """A partition's maintenance was done, or failed."""

    number: int
    error: Exception | None = None


class TasksStopped(msgspec.Struct, frozen=True, gc=False):
    """The tasks of earlier incarnations have stopped."""

    number: int
    serial: int
    start: StartSources
    dataflow: Address[Any]


class TaskEnded(msgspec.Struct, frozen=True, gc=False):
    """A listen or fetch task has stopped."""

    number: int
    serial: int
    incarnation: int
    source: int
    path: str


class DataflowEnded(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a dataflow's actor has stopped."""

    number: int
    serial: int


class SpawnAgain(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: the delay after a dataflow's crash has passed."""

    number: int
    serial: int


class Gone(msgspec.Struct, frozen=True, gc=False):
    """A dropped dataflow was torn down."""

    number: int


IndexTurn: TypeAlias = Inserted | InsertAgain | Maintained
TasksTurn: TypeAlias = TasksStopped | TaskEnded
ChildrenTurn: TypeAlias = DataflowEnded | SpawnAgain | DataflowStopped


# -- signed addresses ------------------------------------------------------------------------------


class Origin:
    """Sender behind a `DataflowLink`; the address is known once the actor is spawned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address: Address[Any] | None = None


class DataflowLink(Address[Any]):
    """Address of a worker for one dataflow, which signs all messages."""

    __slots__ = ("_origin",)

    def __init__(self, worker: Address[Any], origin: Origin) -> None:
        super().__init__(worker._mailbox)
        self._origin = origin

    def _sign(self, message: Any) -> FromDataflow:
        address = self._origin.address
        assert address is not None, "a dataflow speaks only after it was spawned"
        return FromDataflow(self._origin.number, address, message)

    async def send(self, message: Any) -> None:
        """Send a signed message as `Address.send` does."""
        await super().send(self._sign(message))

    def send_nowait(self, message: Any) -> None:
        """Send a signed message as `Address.send_nowait` does."""
        super().send_nowait(self._sign(message))

    def reply(self, message: Any) -> bool:
        """Send a signed message as `Address.reply` does."""
        return super().reply(self._sign(message))


# -- state of a rendering --------------------------------------------------------------------------


class Live:
    """State of one rendering on one worker."""

    def __init__(self, number: int, description: DataflowDescription) -> None:
        self.number = number
        self.description = description
        self.dataflow: Address[Any] | None = None
        """Worker 0: the child actor, while it runs. Other workers: the last sender."""
        self.dataflow_serial = 0
        self.tasks: list[Address[Any]] = []
        self.tasks_serial = 0
        self.index: IndexPartition | None = None
        self.maintaining = False
        self.dropping = False
        self.tearing_down = False

    @property
    def id(self) -> ObjectId:
        """Return the id of the maintained object."""
        return self.description.id


class Site(msgspec.Struct, frozen=True, gc=False):
    """Context that the parts of one worker share."""

    ctx: Context[Any]
    index: int
    count: int
    workers: Sequence[Address[Any]]
    cast: Cast
    settings: Settings
    scratch: Path
    live: dict[int, Live]
    feed: Callable[[Event], Awaitable[None]]
    """Feeds an event to the state machine and performs its effects."""
    replica: str = ""
    """Name of the cluster among several in one process, whose names must differ."""
