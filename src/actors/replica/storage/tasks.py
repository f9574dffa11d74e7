"""The tasks that one worker owns: running, stopping, or waiting for another to stop.

Rules:
- at most one task of an object runs;
- a failed task stays until its rendering ends; it asks for its restart once, after a delay that
  grows with failures in a row, which progress ends;
- an object's `upper` belongs to its shard: it never goes back, and outlives renderings as long as
  the shard stays the same;
- a dropped source's external resources are removed after its last task, and before the first task
  of the next object with its id. So the removal counts as a stopping task, under a negative number.

Invariants: `validate`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.model.protocol.storage import (
    FilesStaged,
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    StagingResult,
)
from actors.replica.storage.events import (
    CleanUpSource,
    DiscardParts,
    Effect,
    RestartLater,
    StartIngestion,
    StartOneshot,
    StartSink,
    StopTask,
)
from actors.replica.storage.renderings import ObjectRendering
from actors.runtime.progress import EMPTY, Frontier, ObjectId

Shape: TypeAlias = tuple[str, ...]


def shapes_of(
    what: IngestionDescription | SinkDescription | RunOneshotIngestion,
) -> dict[ObjectId, Shape]:
    """Return, by id, the shard or the place that an object's upper belongs to."""
    match what:
        case IngestionDescription():
            found: dict[ObjectId, Shape] = {what.id: ("remap", what.remap_shard)}
            return found | {export.id: ("export", export.shard) for export in what.exports}
        case SinkDescription():
            place = what.configuration
            return {what.id: ("sink", what.input.shard, place.kind, place.encoded.hex())}
    return {}


class StorageTask(msgspec.Struct):
    """A running task."""

    rendering: ObjectRendering
    failed: bool = False
    result: StagingResult | None = None
    """Unreported result of a one-shot ingestion, to be discarded with its rendering."""
    reported: StagingResult | None = None
    """Reported result of a one-shot ingestion, reported again to the next client.

    A client takes the parts over, or leaves them to their lease.
    """


class StorageTaskRunner:
    """All tasks of this worker; see the module's docstring."""

    def __init__(self) -> None:
        self.running: dict[int, StorageTask] = {}
        self.stopping: dict[int, ObjectId] = {}
        self._deferred: dict[ObjectId, ObjectRendering] = {}
        self._forgetting: dict[ObjectId, list[IngestionDescription]] = {}
        """Sources dropped while their tasks were stopping."""
        self._forgets = 0
        self._attempts: dict[ObjectId, int] = {}
        self._uppers: dict[ObjectId, tuple[Shape, Frontier]] = {}

    def begin(self, rendering: ObjectRendering, former: ObjectRendering | None) -> list[Effect]:
        """Start a rendering, now or when its former has stopped."""
        effects = [] if former is None else self.end(former, dropped=False)
        for gone in set(() if former is None else former.ids) - set(rendering.ids):
            self._uppers.pop(gone, None)
        return effects + self._begin(rendering)

    def _begin(self, rendering: ObjectRendering) -> list[Effect]:
        if rendering.complete:
            for id, shape in shapes_of(rendering.what).items():
                self._uppers[id] = (shape, EMPTY)
            return []
        if rendering.id in self.stopping.values():
            # A slot or a lock in the external system is free only when the former task has stopped.
            self._deferred[rendering.id] = rendering
            return []
        return [self._start(rendering)]

    def _start(self, rendering: ObjectRendering) -> Effect:
        self.running[rendering.number] = StorageTask(rendering)
        match rendering.what:
            case IngestionDescription() as description:
                return StartIngestion(rendering.number, description, rendering.resume)
            case SinkDescription() as description:
                return StartSink(rendering.number, description)
            case RunOneshotIngestion() as oneshot:
                return StartOneshot(rendering.number, oneshot)

    def end(self, rendering: ObjectRendering, *, dropped: bool) -> list[Effect]:
        """Stop the task of a rendering that ended."""
        id, number = rendering.id, rendering.number
        if dropped:
            self._attempts.pop(id, None)
            for each in rendering.ids:
                self._uppers.pop(each, None)
        task = self.running.pop(number, None)
        if task is not None:
            self.stopping[number] = id
            stop = StopTask(number, dropped)
            # An unreported result's parts will never be appended.
            result = task.result
            return (
                [DiscardParts(result.batches), stop] if isinstance(result, FilesStaged) else [stop]
            )
        self._deferred.pop(id, None)
        return self.forget(rendering.what) if dropped else []

    def forget(
        self, what: IngestionDescription | SinkDescription | RunOneshotIngestion
    ) -> list[Effect]:
        """Remove the external resources of a dropped object without a task."""
        if not isinstance(what, IngestionDescription):
            return []
        if what.id in self.stopping.values():
            # The stopping task may still use the resources, such as a slot named after the id.
            waiting = self._forgetting.setdefault(what.id, [])
            if what not in waiting:
                waiting.append(what)
            return []
        return [self._forget(what)]

    def _forget(self, what: IngestionDescription) -> Effect:
        self._forgets += 1
        self.stopping[-self._forgets] = what.id
        return CleanUpSource(-self._forgets, what)

    def stopped(self, number: int) -> list[Effect]:
        """Continue with the work that waited for a stopped task."""
        id = self.stopping.pop(number, None)
        # Another task of the object is still stopping.
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
        """Ask for the restart of a task that ended with an error."""
        task = self.running.get(number)
        if task is None or task.failed or isinstance(task.rendering.what, RunOneshotIngestion):
            return []
        task.failed = True
        id, what = task.rendering.id, task.rendering.what
        self._attempts[id] = self._attempts.get(id, 0) + 1
        return [RestartLater(number, self._attempts[id], what.retry)]

    def well(self, number: int) -> None:
        """Note progress of a task: its next failure is the first in a row."""
        task = self.running.get(number)
        if task is not None and not task.failed:
            self._attempts.pop(task.rendering.id, None)

    def reached(self, number: int, id: ObjectId, upper: Frontier) -> None:
        """Advance the upper of a running task's object."""
        task = self.running.get(number)
        shape = None if task is None else shapes_of(task.rendering.what).get(id)
        if shape is None:
            return
        before = self.upper(id, shape)
        self._uppers[id] = (shape, upper if before is None else max(upper, before))

    def upper(self, id: ObjectId, shape: Shape) -> Frontier | None:
        """Return the upper of an object with this shape; None if unknown."""
        found = self._uppers.get(id)
        return None if found is None or found[0] != shape else found[1]

    def oneshot(self, oneshot: RunOneshotIngestion) -> StorageTask | None:
        """Return the task of a one-shot ingestion."""
        for task in self.running.values():
            if task.rendering.what == oneshot:
                return task
        return None

    def validate(self) -> None:
        """Assert the invariants."""
        ids = [task.rendering.id for task in self.running.values()]
        assert len(set(ids)) == len(ids), "two tasks of one object"
        assert not self.running.keys() & self.stopping.keys()
        assert not set(ids) & set(self.stopping.values()), "a task before its former stopped"
        assert self._deferred.keys() <= set(self.stopping.values())
        assert self._forgetting.keys() <= set(self.stopping.values())
        assert all(self._forgetting.values())
