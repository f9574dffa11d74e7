"""How many dataflows of one connection hydrate at a time: the others' Schedule is withheld. Pure.

Theory of operation. A dataflow *hydrates* from its Schedule until its output is strictly beyond
its `as_of`; that is when it reads most. At most `limit` may do so at once. The Schedules of the
others wait here, in the order in which they came. A connection begins with nothing known: what a
replica has kept tells its frontiers at once and makes room for the next.

Rules:

- transient dataflows (subscribes, copies) bypass it: a client waits for them;
- one that reads the output of a dataflow that has not hydrated waits for that one, and takes no
  place meanwhile;
- a place is freed when the dataflow has hydrated, is dropped, or says that it is stalled or
  frozen: others need not wait for a store that does not answer it.

Invariants: everything but Schedules passes at once and in order; a Schedule passes once, unless
its dataflow is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from actors.progress import ObjectId, ShardId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    Command,
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    Frontiers,
    Response,
    Schedule,
    Status,
    SubscribeExport,
    ViewExport,
)
from actors.threshold_probes import HYDRATION_QUEUE

_STUCK: Final = ("stalled", "frozen")


class Hydrations:
    """The dataflows of one connection that have not hydrated."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dry: dict[ObjectId, DataflowDescription] = {}
        self._made: dict[ShardId, ObjectId] = {}
        """Which of them writes a shard."""
        self._scheduled: dict[ObjectId, Schedule] = {}
        """Withheld."""
        self._queue: OrderedDict[ObjectId, None] = OrderedDict()
        """Of the withheld, those that only wait for a place."""
        self._blocked: dict[ShardId, list[ObjectId]] = {}
        """The others, by what they wait to read."""
        self._taken: set[ObjectId] = set()

    @property
    def waiting(self) -> int:
        """How many Schedules are withheld."""
        return len(self._scheduled)

    @property
    def hydrating(self) -> int:
        """How many places are taken."""
        return len(self._taken)

    def command(self, command: Command) -> list[Command]:
        """What is to be sent now, of this command and of those that waited."""
        match command:
            case CreateDataflow(dataflow) if not isinstance(
                dataflow.export, SubscribeExport | CopyToExport
            ):
                self._dry[dataflow.id] = dataflow
                if isinstance(dataflow.export, ViewExport):
                    self._made[dataflow.export.shard] = dataflow.id
            case Schedule(id) if id in self._dry:
                self._scheduled[id] = command
                self._enqueue(id)
                return self._next()
            case AllowCompaction(id, frontier) if is_empty(frontier):
                self._forget(id)
                return [command, *self._next()]
        return [command]

    def responded(self, response: Response) -> list[Command]:
        """Schedules to be sent, now that the replica has said this."""
        match response:
            case Frontiers(id=id, output=output) if id in self._dry and output is not None:
                if output <= self._dry[id].as_of:
                    return []
                self._forget(id)
            case Status(id=id, state=state) if id in self._taken and state in _STUCK:
                self._taken.discard(id)
            case _:
                return []
        return self._next()

    def _enqueue(self, id: ObjectId) -> None:
        """It waits for what it reads, or else for a place."""
        for source in self._dry[id].imports:
            if source.shard in self._made:
                self._blocked.setdefault(source.shard, []).append(id)
                return
        self._queue[id] = None

    def _forget(self, id: ObjectId) -> None:
        """It is dry no more, or no more at all; who waited for it need not any longer."""
        dry = self._dry.pop(id, None)
        if dry is None:
            return
        self._taken.discard(id)
        self._scheduled.pop(id, None)
        self._queue.pop(id, None)
        if isinstance(dry.export, ViewExport) and self._made.get(dry.export.shard) == id:
            del self._made[dry.export.shard]
            for blocked in self._blocked.pop(dry.export.shard, ()):
                if blocked in self._scheduled:
                    self._enqueue(blocked)

    def _next(self) -> list[Command]:
        """Fills the places that are free."""
        passed: list[Command] = []
        while self._queue and len(self._taken) < self._limit:
            id, _ = self._queue.popitem(last=False)
            self._taken.add(id)
            passed.append(self._scheduled.pop(id))
        HYDRATION_QUEUE.crossed(bool(self._queue))
        return passed
