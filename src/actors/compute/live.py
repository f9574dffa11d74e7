"""What a worker holds for one render number, and the messages that concern it.

A dataflow's actor gets a `DataflowLink` for each worker instead of the plain address: what goes
through is signed with the render number and the speaker's address. So a worker can tell a
dataflow from a former rendering of the same object, and knows whom to answer.
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
    """How to make the actors that a worker starts (tests put others in their place)."""

    dataflow: Callable[[DataflowDescription, tuple[Address[Any], ...], Path], Actor[Any]]
    """(description, workers, scratch): reads only until `WritesAllowed`."""
    listen: Callable[
        [SourceImport, ObjectId, int, int, Address[Any], PartFilter | None], Actor[Any]
    ]
    """(source, dataflow, incarnation, source number, consumer, rows wanted)."""
    fetch: Callable[[Schema, ObjectId, int, int, Address[Any]], Actor[Any]]
    """(schema, dataflow, incarnation, source number, consumer)."""
    shared: Callable[[], list[SharedStatistics]] = list
    """The arrangements that dataflows share just now."""


class FromDataflow(msgspec.Struct, frozen=True, gc=False):
    """A dataflow's message, with its render number and whom to answer."""

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
    """A peek has its answer."""

    done: PeekDone


class Inserted(msgspec.Struct, frozen=True, gc=False):
    """An install is in, or failed."""

    number: int
    insertion: Insertion
    result: Arrangement | Exception


class InsertAgain(msgspec.Struct, frozen=True, gc=False):
    """The delay after a failed install is over."""

    number: int
    insertion: Insertion


class Maintained(msgspec.Struct, frozen=True, gc=False):
    """A partition's maintenance is done, or failed."""

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
    """Worker 0: the delay after a dataflow's crash is over."""

    number: int
    serial: int


class Gone(msgspec.Struct, frozen=True, gc=False):
    """Nothing of a dropped dataflow is left."""

    number: int


IndexTurn: TypeAlias = Inserted | InsertAgain | Maintained
TasksTurn: TypeAlias = TasksStopped | TaskEnded
ChildrenTurn: TypeAlias = DataflowEnded | SpawnAgain | DataflowStopped


# -- signed addresses ------------------------------------------------------------------------------


class Origin:
    """Who speaks through a `DataflowLink`; the address is known once the actor is spawned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address: Address[Any] | None = None


class DataflowLink(Address[Any]):
    """A worker's address as one dataflow has it: all that goes through says from whom."""

    __slots__ = ("_origin",)

    def __init__(self, worker: Address[Any], origin: Origin) -> None:
        super().__init__(worker._mailbox)
        self._origin = origin

    def _sign(self, message: Any) -> FromDataflow:
        address = self._origin.address
        assert address is not None, "a dataflow speaks only after it was spawned"
        return FromDataflow(self._origin.number, address, message)

    async def send(self, message: Any) -> None:
        """As `Address.send`."""
        await super().send(self._sign(message))

    def send_nowait(self, message: Any) -> None:
        """As `Address.send_nowait`."""
        super().send_nowait(self._sign(message))

    def reply(self, message: Any) -> bool:
        """As `Address.reply`."""
        return super().reply(self._sign(message))


# -- what a worker holds ---------------------------------------------------------------------------


class Live:
    """One rendering on one worker."""

    def __init__(self, number: int, description: DataflowDescription) -> None:
        self.number = number
        self.description = description
        self.dataflow: Address[Any] | None = None
        """Worker 0: the child, while it runs. Elsewhere: who spoke last."""
        self.dataflow_serial = 0
        self.tasks: list[Address[Any]] = []
        self.tasks_serial = 0
        self.index: IndexPartition | None = None
        self.maintaining = False
        self.dropping = False
        self.tearing_down = False

    @property
    def id(self) -> ObjectId:
        """Id of the object it maintains."""
        return self.description.id


class Site(msgspec.Struct, frozen=True, gc=False):
    """Where the parts of one worker work: shared by them, made by the worker."""

    ctx: Context[Any]
    index: int
    count: int
    workers: Sequence[Address[Any]]
    cast: Cast
    settings: Settings
    scratch: Path
    live: dict[int, Live]
    feed: Callable[[Event], Awaitable[None]]
    """Gives an event to the state machine and performs what follows."""
    replica: str = ""
    """Name of the cluster among several in one process, which must share no names."""
