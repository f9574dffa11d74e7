"""Limits how many dataflows of one connection hydrate at a time, by withholding Schedules. Pure.

A dataflow *hydrates* from its Schedule until its output is strictly beyond its `as_of`; that is
when it reads most. At most `limit` may do so at once; the Schedules of the others wait here, first
in, first out. A connection begins with nothing known: dataflows that a replica has kept report
their frontiers at once, and make room for the next.

A dataflow that reads the output of one that has not hydrated waits for that one, without a slot. A
slot is freed when the dataflow has hydrated, is dropped, or reports that it is stalled or frozen.

Invariants: everything but Schedules passes at once and in order; a Schedule passes once, unless its
dataflow is dropped first.
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
    ScheduleDataflow,
    StatusResponse,
    SubscribeExport,
    ViewExport,
)
from actors.threshold_probes import HYDRATION_QUEUE

_STUCK: Final = ("stalled", "frozen")


class HydrationTracker:
    """The dataflows of one connection that have not hydrated."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dry: dict[ObjectId, DataflowDescription] = {}
        self._made: dict[ShardId, ObjectId] = {}
        """Dataflows that have not hydrated, by the shard that they write."""
        self._scheduled: dict[ObjectId, ScheduleDataflow] = {}
        """Withheld Schedules."""
        self._queue: OrderedDict[ObjectId, None] = OrderedDict()
        """Withheld dataflows that wait for a slot only."""
        self._blocked: dict[ShardId, list[ObjectId]] = {}
        """The other withheld dataflows, by the shard that they wait to read."""
        self._taken: set[ObjectId] = set()

    @property
    def waiting(self) -> int:
        """Return the number of withheld Schedules."""
        return len(self._scheduled)

    @property
    def hydrating(self) -> int:
        """Return the number of slots in use."""
        return len(self._taken)

    def command(self, command: Command) -> list[Command]:
        """Return the commands to send now: this one, unless it is withheld, and Schedules that it
        releases."""
        match command:
            # Subscribes and copies bypass the limit: a client waits for them.
            case CreateDataflow(dataflow) if not isinstance(
                dataflow.export, SubscribeExport | CopyToExport
            ):
                self._dry[dataflow.id] = dataflow
                if isinstance(dataflow.export, ViewExport):
                    self._made[dataflow.export.shard] = dataflow.id
            case ScheduleDataflow(id) if id in self._dry:
                self._scheduled[id] = command
                self._enqueue(id)
                return self._next()
            case AllowCompaction(id, frontier) if is_empty(frontier):
                self._forget(id)
                return [command, *self._next()]
        return [command]

    def responded(self, response: Response) -> list[Command]:
        """Return the Schedules to send, now that the replica has responded."""
        match response:
            case Frontiers(id=id, output=output) if id in self._dry and output is not None:
                if output <= self._dry[id].as_of:
                    return []
                self._forget(id)
            # The others need not wait for a store that does not answer this one.
            case StatusResponse(id=id, state=state) if id in self._taken and state in _STUCK:
                self._taken.discard(id)
            case _:
                return []
        return self._next()

    def _enqueue(self, id: ObjectId) -> None:
        """Let a dataflow wait for an input that has not hydrated, or else for a slot."""
        for source in self._dry[id].imports:
            if source.shard in self._made:
                self._blocked.setdefault(source.shard, []).append(id)
                return
        self._queue[id] = None

    def _forget(self, id: ObjectId) -> None:
        """Remove a dataflow that has hydrated or was dropped, and release those that wait for its
        output."""
        dry = self._dry.pop(id, None)
        if dry is None:
            return
        self._taken.discard(id)
        self._scheduled.pop(id, None)
        self._queue.pop(id, None)
        if isinstance(dry.export, ViewExport) and self._made.get(dry.export.shard) == id:
            del self._made[dry.export.shard]
            for blocked in self._blocked.pop(dry.export.shard, ()):
                # It may have been dropped while it waited.
                if blocked in self._scheduled:
                    self._enqueue(blocked)

    def _next(self) -> list[Command]:
        """Fill the free slots."""
        passed: list[Command] = []
        while self._queue and len(self._taken) < self._limit:
            id, _ = self._queue.popitem(last=False)
            self._taken.add(id)
            passed.append(self._scheduled.pop(id))
        HYDRATION_QUEUE.crossed(bool(self._queue))
        return passed
