"""The client of one worker's storage half: the objects that it wants, and what was reported to it.

Theory of operation. `ClientView` collects the commands of a connecting client, then holds what
the current one *wants* and *knows*. All responses pass through here. So none is sent while a
client initializes or is gone, about an object that it does not know, or twice.

Rules:
- an object is reported from the command on that runs it, however early it was rendered: by its
  owner as it is, by the other workers as empty, at once;
- a frontier never goes back and is reported when it advances; it belongs to a shard, so the
  frontier of another shard of the same id is not reported;
- a drop is reported once, and nothing about the object afterwards;
- a one-shot ingestion is answered once.
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
from actors.replica.storage.tasks import StorageTaskRunner, shapes_of
from actors.runtime.progress import EMPTY, Frontier, Nonce, ObjectId


class ClientView(HalfClient[StorageHistory]):
    """State of the client; see the module's docstring. `tasks` and `health` belong to
    `StorageState`."""

    def __init__(
        self, index: int, count: int, tasks: StorageTaskRunner, health: HealthBoard
    ) -> None:
        super().__init__()
        self._index = index
        self._count = count
        self._tasks = tasks
        self._health = health
        self.wanted = StorageDefinitions()
        self.known: dict[ObjectId, Frontier] = {}
        """Reported upper of each id; for a one-shot ingestion: that it was answered."""
        self.now_ms = 0

    def owns(self, id: ObjectId) -> bool:
        """Return whether this worker runs the task of an object; an export's is its source's."""
        return owner_of(self.wanted.source_of.get(id, id), self._count) == self._index

    # -- connections -------------------------------------------------------------------------------

    def hello(self, command: Hello) -> list[e.Effect]:
        """Switch to a client, unless it disconnected already."""
        return [e.SwitchStorageClient(self.begin(command.nonce, StorageHistory()))]

    def lost(self, nonce: Nonce) -> list[e.Effect]:
        """Note that the current, a former or a future client disconnected."""
        return [e.SwitchStorageClient(None)] if self.disconnect(nonce) else []

    def initialized(self) -> int:
        """Take over the client's collected commands; return how many compactions were skipped."""
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        incoming.reduce()
        self.wanted = StorageDefinitions(incoming.commands())
        self.known = {}
        self._health.forget_told()
        return incoming.skipped

    # -- reports -----------------------------------------------------------------------------------

    def know(self, ids: tuple[ObjectId, ...]) -> list[e.Effect]:
        """Report these objects from now on."""
        effects: list[e.Effect] = []
        for id in ids:
            if id not in self.known:
                self.known[id] = 0
                effects += self.report(id)
        return effects + self.tell_health()

    def report(self, id: ObjectId) -> list[e.Effect]:
        """Report an object's upper, if it advanced."""
        reported = self.known.get(id)
        if reported is None or self.muted or id in self.wanted.oneshots:
            return []
        # Empty on the other workers, so that the meet over all workers is the owner's frontier.
        upper = self._upper(id) if self.owns(id) else EMPTY
        if upper is None or upper <= reported:
            return []
        self.known[id] = upper
        return [e.SendStorageResponse(FrontierUpper(id, upper))]

    def _upper(self, id: ObjectId) -> Frontier | None:
        """Return the upper of the shard that the client means by that id."""
        wanted = self.wanted
        source = wanted.ingestions.get(wanted.source_of.get(id, id))
        shapes = shapes_of(wanted.sinks[id] if source is None else source)
        return self._tasks.upper(id, shapes[id])

    def dropped(self, id: ObjectId) -> list[e.Effect]:
        """Report the drop of an object, while it is still wanted."""
        mine = self.owns(id)
        if self.known.pop(id, None) is None or self.muted:
            return []
        effects: list[e.Effect] = []
        if mine:
            effects.append(e.SendStorageResponse(StatusUpdate(id, "dropped", time_ms=self.now_ms)))
        return [*effects, e.SendStorageResponse(DroppedId(id))]

    def answer(self, uuid: str, result: StagingResult | None = None) -> list[e.Effect]:
        """Answer a one-shot ingestion; with None, that this worker stages nothing."""
        if self.muted:
            return []
        self.known[uuid] = EMPTY
        return [
            e.SendStorageResponse(StagedBatches(uuid, FilesStaged() if result is None else result))
        ]

    def awaits(self, uuid: str) -> bool:
        """Return whether a one-shot ingestion is wanted and not answered yet."""
        return uuid in self.wanted.oneshots and uuid not in self.known

    def tell_health(self) -> list[e.Effect]:
        """Report changes in the health of this worker's tasks."""
        if self.muted:
            return []
        return [
            e.SendStorageResponse(
                StatusUpdate(id, shown.status, shown.error, shown.hint, self.now_ms)
            )
            for id, shown in self._health.changes(self.known)
        ]

    def stalled(self, id: ObjectId, error: str, hint: str | None = None) -> list[e.Effect]:
        """Report on worker 0 why an object is not rendered."""
        if self.muted or id not in self.known:
            return []
        return [e.SendStorageResponse(StatusUpdate(id, "stalled", error, hint, self.now_ms))]

    def describe(self) -> str:
        """Return the client's nonce, as text for people."""
        return f"client {self.nonce}" if self.connected else "no client"

    def validate(self) -> None:
        """Assert the invariants."""
        if self.incoming is not None:
            return
        for id, reported in self.known.items():
            assert self.wanted.knows(id) or id in self.wanted.oneshots, "known and not wanted"
            assert self.owns(id) or reported == EMPTY or not self.connected
