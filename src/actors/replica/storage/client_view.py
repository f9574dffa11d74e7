"""Tracks the client of one worker's storage half: the objects it wants and what it was told.

Theory of operation. `ClientView` collects the commands of a connecting client. After that it holds
what the current client *wants* and *knows*. Every response passes through here, so none is sent
while a client initializes or is gone, about an object the client does not know, or twice.

Rules:
- An object is reported from the command that runs it on, however early it was rendered. The owner
  reports its frontier; the other workers report the empty frontier immediately.
- A frontier never goes back and is reported when it advances. It belongs to a shard: after an id
  gets another shard, the old shard's frontier is not reported.
- A drop is reported once, and nothing about the object afterwards.
- A one-shot ingestion is answered once.
"""

from __future__ import annotations

from actors.model.protocol.client_commands import HalfClient
from actors.model.protocol.compute import Hello
from actors.model.protocol.storage import (
    DroppedId,
    FilesStaged,
    FrontierUpper,
    StagedBatches,
    StagingResult,
    StatusUpdate,
)
from actors.replica.storage import events as e
from actors.replica.storage.health_board import HealthBoard
from actors.replica.storage.history import StorageDefinitions, StorageHistory
from actors.replica.storage.renderings import owner_of
from actors.replica.storage.tasks import StorageTaskRunner, upper_scopes
from actors.runtime.progress import EMPTY, Frontier, Nonce, ObjectId


class ClientView(HalfClient[StorageHistory]):
    """State of the client; see the module's docstring.

    The `StorageState` owns `tasks` and `health`; this class only reads them.
    """

    def __init__(
        self, index: int, count: int, tasks: StorageTaskRunner, health: HealthBoard
    ) -> None:
        super().__init__()
        self._index = index
        self._count = count
        self._tasks = tasks
        self._health = health
        self.wanted = StorageDefinitions()
        """Objects that the client wants. Commands update it; `initialized` replaces it."""
        self.known: dict[ObjectId, Frontier] = {}
        """Upper last reported for each id the client knows. For a one-shot ingestion: `EMPTY` once
        it was answered."""
        self.now_ms = 0
        """Unix time of the current event, in ms. `StorageState.handle` sets it."""

    def owns(self, id: ObjectId) -> bool:
        """Return whether this worker runs the task of an object. An export belongs to its source's
        owner."""
        return owner_of(self.wanted.source_of.get(id, id), self._count) == self._index

    # -- connections -------------------------------------------------------------------------------

    def hello(self, command: Hello) -> list[e.Effect]:
        """Switch to a new client, unless it has already disconnected."""
        return [e.SwitchStorageClient(self.begin(command.nonce, StorageHistory()))]

    def lost(self, nonce: Nonce) -> list[e.Effect]:
        """Handle a lost connection, which may be of the current, an earlier or a later client."""
        return [e.SwitchStorageClient(None)] if self.disconnect(nonce) else []

    def initialized(self) -> int:
        """Adopt the client's collected commands, and return how many compactions were skipped."""
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        incoming.reduce()
        self.wanted = StorageDefinitions(incoming.commands())
        self.known = {}
        self._health.forget_reported()
        return incoming.skipped

    # -- reports -----------------------------------------------------------------------------------

    def know(self, ids: tuple[ObjectId, ...]) -> list[e.Effect]:
        """Report these objects from now on, starting with their current frontiers and health."""
        effects: list[e.Effect] = []
        for id in ids:
            if id not in self.known:
                self.known[id] = 0
                effects += self.report(id)
        return effects + self.report_health()

    def report(self, id: ObjectId) -> list[e.Effect]:
        """Report an object's upper if it has advanced since the last report."""
        reported = self.known.get(id)
        if reported is None or self.muted or id in self.wanted.oneshots:
            return []
        # The other workers report the empty frontier, so that the minimum over all workers is the
        # owner's.
        upper = self._upper(id) if self.owns(id) else EMPTY
        if upper is None or upper <= reported:
            return []
        self.known[id] = upper
        return [e.SendStorageResponse(FrontierUpper(id, upper))]

    def _upper(self, id: ObjectId) -> Frontier | None:
        """Return the upper of the shard that the client associates with this id."""
        wanted = self.wanted
        source = wanted.ingestions.get(wanted.source_of.get(id, id))
        scopes = upper_scopes(wanted.sinks[id] if source is None else source)
        return self._tasks.upper(id, scopes[id])

    def dropped(self, id: ObjectId) -> list[e.Effect]:
        """Report the drop of an object. Call this before the object is removed from `wanted`."""
        mine = self.owns(id)
        if self.known.pop(id, None) is None or self.muted:
            return []
        effects: list[e.Effect] = []
        if mine:
            effects.append(e.SendStorageResponse(StatusUpdate(id, "dropped", time_ms=self.now_ms)))
        return [*effects, e.SendStorageResponse(DroppedId(id))]

    def answer(self, uuid: str, result: StagingResult | None = None) -> list[e.Effect]:
        """Answer a one-shot ingestion. Without a result, answer that this worker stages nothing."""
        if self.muted:
            return []
        self.known[uuid] = EMPTY
        return [
            e.SendStorageResponse(StagedBatches(uuid, FilesStaged() if result is None else result))
        ]

    def awaits(self, uuid: str) -> bool:
        """Return whether the client waits for the answer to a one-shot ingestion."""
        return uuid in self.wanted.oneshots and uuid not in self.known

    def report_health(self) -> list[e.Effect]:
        """Report changes in the health of this worker's objects."""
        if self.muted:
            return []
        return [
            e.SendStorageResponse(
                StatusUpdate(id, shown.status, shown.error, shown.hint, self.now_ms)
            )
            for id, shown in self._health.changes(self.known)
        ]

    def stalled(self, id: ObjectId, error: str, hint: str | None = None) -> list[e.Effect]:
        """Report that an object is stalled because it cannot be rendered. Only worker 0 calls
        this."""
        if self.muted or id not in self.known:
            return []
        return [e.SendStorageResponse(StatusUpdate(id, "stalled", error, hint, self.now_ms))]

    def describe(self) -> str:
        """Return the client's nonce as readable text."""
        return f"client {self.nonce}" if self.connected else "no client"

    def validate(self) -> None:
        """Assert the invariants."""
        if self.incoming is not None:
            return
        for id, reported in self.known.items():
            assert self.wanted.knows(id) or id in self.wanted.oneshots, "known and not wanted"
            assert self.owns(id) or reported == EMPTY or not self.connected
