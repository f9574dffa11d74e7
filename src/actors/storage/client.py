"""The client's side of one worker's storage half: what it wants, and what it was told.

Theory of operation. `ClientView` collects what a connecting client says, then holds what the
present one *wants* and *knows*. Everything that is told goes through here, so nothing is told
while a client initializes or is gone, of an object that it does not know, or twice.

Rules:
- an object is reported from the command on that runs it, never earlier, however early it was
  rendered: by its owner as it is, by the other workers as empty, at once;
- a frontier never goes back and is told when it advances; it belongs to a shard: what another
  shard of the same id has reached is not told;
- a dropped object is told dropped once, and nothing of it afterwards;
- a one-shot ingestion is answered once.

It renders nothing, and performs nothing: what is told is given as effects.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from actors.progress import EMPTY, Frontier, Nonce, ObjectId
from actors.protocol.compute import Hello
from actors.protocol.storage import (
    DroppedId,
    FrontierUpper,
    Staged,
    StagedBatches,
    StagingResult,
    StatusUpdate,
)
from actors.storage import events as e
from actors.storage.health import Health
from actors.storage.history import StorageHistory, Wanted
from actors.storage.renderings import owner_of
from actors.storage.tasks import Tasks, shapes_of

LOST_MAX: Final = 1024
"""Clients remembered that were gone before their Hello came."""


class ClientView:
    """See the module's text. `tasks` and `health` are the state's own."""

    def __init__(self, index: int, count: int, tasks: Tasks, health: Health) -> None:
        self._index = index
        self._count = count
        self._tasks = tasks
        self._health = health
        self.nonce: Nonce | None = None
        self.connected = False
        self.incoming: StorageHistory | None = None
        """What a client says before InitializationComplete."""
        self.wanted = Wanted()
        self.known: dict[ObjectId, Frontier] = {}
        """By id, what it was told of the upper; of a one-shot ingestion: that it was answered."""
        self.now_ms = 0
        self._lost: OrderedDict[Nonce, None] = OrderedDict()

    @property
    def muted(self) -> bool:
        """Whether there is nobody to answer."""
        return not self.connected or self.incoming is not None

    def owns(self, id: ObjectId) -> bool:
        """Whether the task of a source, sink or one-shot ingestion runs here; of an export: its
        source's."""
        return owner_of(self.wanted.source_of.get(id, id), self._count) == self._index

    # -- connections -------------------------------------------------------------------------------

    def hello(self, command: Hello) -> list[e.Effect]:
        """A client is there, unless it is gone already."""
        self.nonce = command.nonce
        self.connected = command.nonce not in self._lost
        self._lost.pop(command.nonce, None)
        self.incoming = StorageHistory()
        return [e.SwitchClient(command.nonce if self.connected else None)]

    def lost(self, nonce: Nonce) -> list[e.Effect]:
        """A client is gone: the present one, a former one, or one whose Hello is to come."""
        if nonce != self.nonce:
            self._lost[nonce] = None
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)
            return []
        if not self.connected:
            return []
        self.connected = False
        return [e.SwitchClient(None)]

    def initialized(self) -> int:
        """Takes over what the client has said so far; compactions of unknown objects in it."""
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        incoming.reduce()
        self.wanted = Wanted(incoming.commands())
        self.known = {}
        self._health.forget_told()
        return incoming.skipped

    # -- what is told ------------------------------------------------------------------------------

    def know(self, ids: tuple[ObjectId, ...]) -> list[e.Effect]:
        """From now on these are reported."""
        effects: list[e.Effect] = []
        for id in ids:
            if id not in self.known:
                self.known[id] = 0
                effects += self.report(id)
        return effects + self.tell_health()

    def report(self, id: ObjectId) -> list[e.Effect]:
        """Tells how far an object is, if that is news."""
        reported = self.known.get(id)
        if reported is None or self.muted or id in self.wanted.oneshots:
            return []
        upper = self._upper(id) if self.owns(id) else EMPTY
        if upper is None or upper <= reported:
            return []
        self.known[id] = upper
        return [e.Respond(FrontierUpper(id, upper))]

    def _upper(self, id: ObjectId) -> Frontier | None:
        """How far the shard is that the client means by that id."""
        wanted = self.wanted
        source = wanted.ingestions.get(wanted.source_of.get(id, id))
        shapes = shapes_of(wanted.sinks[id] if source is None else source)
        return self._tasks.upper(id, shapes[id])

    def dropped(self, id: ObjectId) -> list[e.Effect]:
        """Tells the end of an object, while it is still wanted."""
        mine = self.owns(id)
        if self.known.pop(id, None) is None or self.muted:
            return []
        told: list[e.Effect] = []
        if mine:
            told.append(e.Respond(StatusUpdate(id, "dropped", time_ms=self.now_ms)))
        return [*told, e.Respond(DroppedId(id))]

    def answer(self, uuid: str, result: StagingResult | None = None) -> list[e.Effect]:
        """The answer of a one-shot ingestion; None: this worker has nothing to stage."""
        if self.muted:
            return []
        self.known[uuid] = EMPTY
        return [e.Respond(StagedBatches(uuid, Staged() if result is None else result))]

    def awaits(self, uuid: str) -> bool:
        """Whether a one-shot ingestion is wanted and has no answer yet."""
        return uuid in self.wanted.oneshots and uuid not in self.known

    def tell_health(self) -> list[e.Effect]:
        """Tells what has changed in the health of the tasks here."""
        if self.muted:
            return []
        return [
            e.Respond(StatusUpdate(id, shown.status, shown.error, shown.hint, self.now_ms))
            for id, shown in self._health.changes(self.known)
        ]

    def stalled(self, id: ObjectId, error: str, hint: str | None = None) -> list[e.Effect]:
        """Worker 0: an object is not rendered, and why."""
        if self.muted or id not in self.known:
            return []
        return [e.Respond(StatusUpdate(id, "stalled", error, hint, self.now_ms))]

    def describe(self) -> str:
        """Whom it serves, for people."""
        return f"client {self.nonce}" if self.connected else "no client"

    def validate(self) -> None:
        """Asserts the invariants."""
        if self.incoming is not None:
            return
        for id, reported in self.known.items():
            assert self.wanted.knows(id) or id in self.wanted.oneshots, "known and not wanted"
            assert self.owns(id) or reported == EMPTY or not self.connected
