"""The tasks that one worker owns: which run, which are stopping, which wait for another to stop.

Rules:
- of one object at most one task runs; the next starts when the former has stopped (what the
  outside keeps for it, a slot or a lock, is free only then);
- a task that failed stays until its rendering ends; it asks for its restart once, after a delay
  that grows with failures in a row; a task that gets on ends the row;
- how far an object is (`upper`) belongs to its shard: it never goes back, and outlives
  renderings as long as the shard stays the same;
- when a source is dropped for good, what the outside keeps for it goes after its last task, and
  before the first task of whatever has its id next (a slot is named after the id). So forgetting
  is as a task that stops, under a number below 0.

It performs nothing: what is to be done is given as effects. Invariants: `validate`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.progress import EMPTY, Frontier, ObjectId
from actors.protocol.storage import (
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    Staged,
    StagingResult,
)
from actors.storage.events import (
    Discard,
    Effect,
    Forget,
    RestartLater,
    StartIngestion,
    StartOneshot,
    StartSink,
    Stop,
)
from actors.storage.renderings import Rendering

Shape: TypeAlias = tuple[str, ...]


def shapes_of(
    what: IngestionDescription | SinkDescription | RunOneshotIngestion,
) -> dict[ObjectId, Shape]:
    """By id, what the upper of an object belongs to."""
    match what:
        case IngestionDescription():
            found: dict[ObjectId, Shape] = {what.id: ("remap", what.remap_shard)}
            return found | {export.id: ("export", export.shard) for export in what.exports}
        case SinkDescription():
            place = what.configuration
            return {what.id: ("sink", what.input.shard, place.kind, place.encoded.hex())}
    return {}


class Task(msgspec.Struct):
    """One that runs."""

    rendering: Rendering
    failed: bool = False
    result: StagingResult | None = None
    """Of a one-shot ingestion: told to nobody yet, and to be discarded with its rendering."""
    told: StagingResult | None = None
    """Told to a client, who takes it over or leaves it to its lease; told again to the next one."""


class Tasks:
    """See the module's text."""

    def __init__(self) -> None:
        self.running: dict[int, Task] = {}
        self.stopping: dict[int, ObjectId] = {}
        self._deferred: dict[ObjectId, Rendering] = {}
        self._forgetting: dict[ObjectId, list[IngestionDescription]] = {}
        """Dropped while their tasks were stopping."""
        self._forgets = 0
        self._attempts: dict[ObjectId, int] = {}
        self._uppers: dict[ObjectId, tuple[Shape, Frontier]] = {}

    def begin(self, rendering: Rendering, former: Rendering | None) -> list[Effect]:
        """A rendering is there: it starts, now or when its former has stopped."""
        effects = [] if former is None else self.end(former, dropped=False)
        for gone in set(() if former is None else former.ids) - set(rendering.ids):
            self._uppers.pop(gone, None)
        return effects + self._begin(rendering)

    def _begin(self, rendering: Rendering) -> list[Effect]:
        if rendering.complete:
            for id, shape in shapes_of(rendering.what).items():
                self._uppers[id] = (shape, EMPTY)
            return []
        if rendering.id in self.stopping.values():
            self._deferred[rendering.id] = rendering
            return []
        return [self._start(rendering)]

    def _start(self, rendering: Rendering) -> Effect:
        self.running[rendering.number] = Task(rendering)
        match rendering.what:
            case IngestionDescription() as description:
                return StartIngestion(rendering.number, description, rendering.resume)
            case SinkDescription() as description:
                return StartSink(rendering.number, description)
            case RunOneshotIngestion() as oneshot:
                return StartOneshot(rendering.number, oneshot)

    def end(self, rendering: Rendering, *, dropped: bool) -> list[Effect]:
        """A rendering is gone."""
        id, number = rendering.id, rendering.number
        if dropped:
            self._attempts.pop(id, None)
            for each in rendering.ids:
                self._uppers.pop(each, None)
        task = self.running.pop(number, None)
        if task is not None:
            self.stopping[number] = id
            stop = Stop(number, dropped)
            result = task.result
            return [Discard(result.batches), stop] if isinstance(result, Staged) else [stop]
        self._deferred.pop(id, None)
        return self.forget(rendering.what) if dropped else []

    def forget(
        self, what: IngestionDescription | SinkDescription | RunOneshotIngestion
    ) -> list[Effect]:
        """Something without a task is dropped for good."""
        if not isinstance(what, IngestionDescription):
            return []
        if what.id in self.stopping.values():
            waiting = self._forgetting.setdefault(what.id, [])
            if what not in waiting:
                waiting.append(what)
            return []
        return [self._forget(what)]

    def _forget(self, what: IngestionDescription) -> Effect:
        self._forgets += 1
        self.stopping[-self._forgets] = what.id
        return Forget(-self._forgets, what)

    def stopped(self, number: int) -> list[Effect]:
        """A task has stopped: what waited for it goes on."""
        id = self.stopping.pop(number, None)
        if id is None or id in self.stopping.values():
            return []
        forgotten = self._forgetting.get(id)
        if forgotten:
            first = forgotten.pop(0)
            if not forgotten:
                del self._forgetting[id]
            return [self._forget(first)]
        waiting = self._deferred.pop(id, None)
        return [] if waiting is None else [self._start(waiting)]

    def failed(self, number: int) -> list[Effect]:
        """A task has ended by an error."""
        task = self.running.get(number)
        if task is None or task.failed or isinstance(task.rendering.what, RunOneshotIngestion):
            return []
        task.failed = True
        id, what = task.rendering.id, task.rendering.what
        self._attempts[id] = self._attempts.get(id, 0) + 1
        return [RestartLater(number, self._attempts[id], what.retry)]

    def well(self, number: int) -> None:
        """A task gets on: its next failure is the first of a row."""
        task = self.running.get(number)
        if task is not None and not task.failed:
            self._attempts.pop(task.rendering.id, None)

    def reached(self, number: int, id: ObjectId, upper: Frontier) -> None:
        """How far an object of a running task is."""
        task = self.running.get(number)
        shape = None if task is None else shapes_of(task.rendering.what).get(id)
        if shape is None:
            return
        before = self.upper(id, shape)
        self._uppers[id] = (shape, upper if before is None else max(upper, before))

    def upper(self, id: ObjectId, shape: Shape) -> Frontier | None:
        """How far an object is that has that shape; None: not known."""
        found = self._uppers.get(id)
        return None if found is None or found[0] != shape else found[1]

    def oneshot(self, oneshot: RunOneshotIngestion) -> Task | None:
        """The task of a one-shot ingestion."""
        for task in self.running.values():
            if task.rendering.what == oneshot:
                return task
        return None

    def validate(self) -> None:
        """Asserts the invariants."""
        ids = [task.rendering.id for task in self.running.values()]
        assert len(set(ids)) == len(ids), "two tasks of one object"
        assert not self.running.keys() & self.stopping.keys()
        assert not set(ids) & set(self.stopping.values()), "a task before its former stopped"
        assert self._deferred.keys() <= set(self.stopping.values())
        assert self._forgetting.keys() <= set(self.stopping.values())
        assert all(self._forgetting.values())
