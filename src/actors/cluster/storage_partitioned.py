"""The storage half of one replica out of N workers: commands are split, responses merged. Pure.

Rules of `absorb`:

- uppers: each worker's is joined (it cannot go back); the meet is emitted when it advances. An
  upper of an untracked object is an error, and so is one after the same worker's `DroppedId`;
- `DroppedId` is emitted when all workers have sent it; one that sends it twice is an error;
- a one-shot ingestion is answered when all workers have answered: Canceled before another error,
  an error before the batches of all;
- statuses and statistics pass through.

Invariants: emitted uppers strictly advance; a drop and an answer are emitted once; with nothing in
flight nothing is kept.
"""

from __future__ import annotations

import msgspec

from actors.errors import OperationCanceled, RemoteProtocolError
from actors.progress import Frontier, ObjectId
from actors.protocol.compute import ConnectionRefused, Hello, InitializationComplete
from actors.protocol.storage import (
    Command,
    DroppedId,
    FilesStaged,
    FrontierUpper,
    Response,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    StagedBatches,
    StagingFailed,
    StagingResult,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.storage.history import StorageDefinitions


class _Object(msgspec.Struct):
    """One object: each worker's upper, the emitted meet, and the workers that have dropped it."""

    uppers: list[Frontier]
    told: Frontier = 0
    dropped: set[int] = msgspec.field(default_factory=set)


class StoragePartitioned:
    """Splits one client's commands over the workers, merges the workers' responses.

    `ended` collects ids and uuids whose end was emitted; its reader clears it.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._complete = False
        self.ended: list[ObjectId] = []
        self._clear()

    def _clear(self) -> None:
        self._wanted = StorageDefinitions()
        self._objects: dict[ObjectId, _Object] = {}
        self._oneshots: dict[str, dict[int, StagingResult]] = {}

    def idle(self) -> bool:
        """Return whether nothing is being merged."""
        return not (self._objects or self._oneshots)

    def split(self, command: Command) -> list[tuple[int, Command]]:
        """Return (worker, command) for every worker that gets the command."""
        if isinstance(command, Hello):
            self._clear()
            self._complete = False
        elif self._complete:
            self._track(command)
        else:
            self._wanted.add(command)
            if isinstance(command, InitializationComplete):
                self._complete = True
                # Nothing ran before: only what is still wanted now will answer.
                for said in self._wanted.commands():
                    self._track(said)
                self._wanted = StorageDefinitions()
        # Every worker gets all commands, so what its responses may be about is known from here.
        return [(part, command) for part in range(self._parts)]

    def _track(self, command: Command) -> None:
        match command:
            case RunIngestion(description=description):
                self._begin(*description.ids)
            case RunSink(description=description):
                self._begin(description.id)
            case RunOneshotIngestion(uuid=uuid):
                self._oneshots.setdefault(uuid, {})

    def _begin(self, *ids: ObjectId) -> None:
        for id in ids:
            if id not in self._objects:
                self._objects[id] = _Object([0] * self._parts)

    def absorb(self, part: int, response: Response) -> Response | None:
        """Return the merged response that this one completes, or None.

        Raises `RemoteProtocolError` if a worker breaks a rule of the module's docstring.
        """
        match response:
            case FrontierUpper():
                return self._upper(part, response)
            case DroppedId():
                return self._dropped(part, response)
            case StagedBatches():
                return self._staged(part, response)
            case StatusUpdate() | StatisticsUpdates() | ConnectionRefused():
                return response

    def _object(self, part: int, id: ObjectId, what: str) -> _Object:
        found = self._objects.get(id)
        if found is None:
            raise RemoteProtocolError(f"worker {part} told {what} of {id}, which nobody runs")
        if part in found.dropped:
            raise RemoteProtocolError(f"worker {part} told {what} of {id} after its drop")
        return found

    def _upper(self, part: int, response: FrontierUpper) -> FrontierUpper | None:
        found = self._object(part, response.id, "an upper")
        found.uppers[part] = max(found.uppers[part], response.upper)
        meet = min(found.uppers)
        if meet <= found.told:
            return None
        found.told = meet
        return FrontierUpper(response.id, meet)

    def _dropped(self, part: int, response: DroppedId) -> DroppedId | None:
        found = self._object(part, response.id, "the drop")
        found.dropped.add(part)
        if len(found.dropped) < self._parts:
            return None
        del self._objects[response.id]
        self.ended.append(response.id)
        return response

    def _staged(self, part: int, response: StagedBatches) -> StagedBatches | None:
        uuid = response.uuid
        answers = self._oneshots.get(uuid)
        if answers is None:
            raise RemoteProtocolError(
                f"worker {part} answered the one-shot ingestion {uuid}, which nobody waits for"
            )
        if part in answers:
            raise RemoteProtocolError(f"worker {part} answered the one-shot ingestion {uuid} twice")
        answers[part] = response.result
        if len(answers) < self._parts:
            return None
        del self._oneshots[uuid]
        self.ended.append(uuid)
        return StagedBatches(uuid, merge_staged([answers[part] for part in sorted(answers)]))


def merge_staged(results: list[StagingResult]) -> StagingResult:
    """Return one result out of all workers', by the precedence in the module's docstring."""
    failed = [result for result in results if isinstance(result, StagingFailed)]
    if failed:
        return min(failed, key=lambda result: result.code != OperationCanceled.__name__)
    staged = [result for result in results if isinstance(result, FilesStaged)]
    return FilesStaged(
        tuple(batch for result in staged for batch in result.batches),
        sum(result.files for result in staged),
        sum(result.bytes for result in staged),
    )
