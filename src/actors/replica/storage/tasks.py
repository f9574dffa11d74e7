"""The tasks that one worker owns: running, stopping, or waiting for another task to stop.

Rules:
- At most one task of an object runs.
- A failed task stays until its rendering ends. It requests one restart, after a delay that grows
  with consecutive failures; progress resets the count.
- An object's `upper` belongs to its shard. It never goes back, and outlives renderings as long as
  the shard stays the same.
- The external resources of a dropped source are removed after its last task has stopped, and before
  the first task of the next object with its id starts. For this purpose the removal counts as a
  stopping task with a negative number.

`validate` checks the invariants.
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

UpperScope: TypeAlias = tuple[str, ...]


def upper_scopes(
    what: IngestionDescription | SinkDescription | RunOneshotIngestion,
) -> dict[ObjectId, UpperScope]:
    """Map each id of an object to the shard or external target that its upper belongs to."""
    match what:
        case IngestionDescription():
            found: dict[ObjectId, UpperScope] = {what.id: ("remap", what.remap_shard)}
            return found | {export.id: ("export", export.shard) for export in what.exports}
        case SinkDescription():
            place = what.configuration
            return {what.id: ("sink", what.input.shard, place.kind, place.encoded.hex())}
    return {}


class StorageTask(msgspec.Struct):
    """A running task."""

    rendering: ObjectRendering
    failed: bool = False
    """True once the task has ended with an error; its restart is requested then."""
    result: StagingResult | None = None
    """Result of a one-shot ingestion that was not reported; it is discarded with its rendering."""
    reported: StagingResult | None = None
    """Result of a one-shot ingestion that was reported; the next client gets it again.

    A client either adopts the parts or lets their lease expire.
    """


class StorageTaskRunner:
    """All tasks of this worker; see the module's docstring."""

    def __init__(self) -> None:
        self.running: dict[int, StorageTask] = {}
        """Running and failed tasks, by render number."""
        self.stopping: dict[int, ObjectId] = {}
        """Object of each task that is stopping, by render number."""
        self._deferred: dict[ObjectId, ObjectRendering] = {}
        """Rendering of each object whose next task waits for its previous one to stop."""
        self._forgetting: dict[ObjectId, list[IngestionDescription]] = {}
        """Dropped sources whose cleanup waits for tasks to stop, by id."""
        self._forgets = 0
        """Number of cleanups started; its negative numbers the next cleanup."""
        self._attempts: dict[ObjectId, int] = {}
        """Consecutive failures of each object."""
        self._uppers: dict[ObjectId, tuple[UpperScope, Frontier]] = {}
        """Last upper of each object, with the shard or target it belongs to."""

    def begin(self, rendering: ObjectRendering, former: ObjectRendering | None) -> list[Effect]:
        """Start a rendering, after the task of its former rendering has stopped."""
        effects = [] if former is None else self.end(former, dropped=False)
        for gone in set(() if former is None else former.ids) - set(rendering.ids):
            self._uppers.pop(gone, None)
        return effects + self._begin(rendering)

    def _begin(self, rendering: ObjectRendering) -> list[Effect]:
        if rendering.complete:
            for id, scope in upper_scopes(rendering.what).items():
                self._uppers[id] = (scope, EMPTY)
            return []
        if rendering.id in self.stopping.values():
            # The former task may hold a slot or a lock in the external system until it has stopped.
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
            # The parts of a result that was not reported will never be appended.
            result = task.result
            return (
                [DiscardParts(result.batches), stop] if isinstance(result, FilesStaged) else [stop]
            )
        self._deferred.pop(id, None)
        return self.forget(rendering.what) if dropped else []

    def forget(
        self, what: IngestionDescription | SinkDescription | RunOneshotIngestion
    ) -> list[Effect]:
        """Remove the external resources of a dropped object that has no task."""
        if not isinstance(what, IngestionDescription):
            return []
        if what.id in self.stopping.values():
            # The stopping task may still use these resources, such as a slot named after the id.
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
        """Start the work that waited for a task to stop."""
        id = self.stopping.pop(number, None)
        # The object has another task that is still stopping.
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
        """Request the restart of a task that ended with an error."""
        task = self.running.get(number)
        if task is None or task.failed or isinstance(task.rendering.what, RunOneshotIngestion):
            return []
        task.failed = True
        id, what = task.rendering.id, task.rendering.what
        self._attempts[id] = self._attempts.get(id, 0) + 1
        return [RestartLater(number, self._attempts[id], what.retry)]

    def note_progress(self, number: int) -> None:
        """Record that a task made progress, so that its next failure counts as the first."""
        task = self.running.get(number)
        if task is not None and not task.failed:
            self._attempts.pop(task.rendering.id, None)

    def reached(self, number: int, id: ObjectId, upper: Frontier) -> None:
        """Advance the upper of a running task's object."""
        task = self.running.get(number)
        scope = None if task is None else upper_scopes(task.rendering.what).get(id)
        if scope is None:
            return
        before = self.upper(id, scope)
        self._uppers[id] = (scope, upper if before is None else max(upper, before))

    def upper(self, id: ObjectId, scope: UpperScope) -> Frontier | None:
        """Return the upper of an object in this shard or target, or None if it is not known."""
        found = self._uppers.get(id)
        return None if found is None or found[0] != scope else found[1]

    def oneshot(self, oneshot: RunOneshotIngestion) -> StorageTask | None:
        """Return the running task of a one-shot ingestion."""
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
