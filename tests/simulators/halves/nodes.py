"""One worker of the simulated replica: the states of both halves, and the shell around them.

The shell does the work of the worker's actors, one message at a time: a mailbox of which each half
has a lane, the two adapters, the two outboxes, and the delivery of ordered commands. It leaves out
all output for people (relations, measures, logs). An outbox learns at once that a response was
taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Final

import msgspec

from actors.channel_adapter import ConnectClient, DisconnectClient, NonceVerdict, StashRules
from actors.model.protocol import storage_internal as internal
from actors.model.protocol.internal import (
    BatchEmitted,
    Half,
    SequencedCommand,
    TaggedCommand,
    TaggedResponse,
)
from actors.model.protocol.storage import StatusUpdate
from actors.replica.compute import events as ce
from actors.replica.compute.outbox import ResponseOutbox
from actors.replica.compute.state import ComputeState
from actors.replica.storage import events as e
from actors.replica.storage.half import StorageOutbox
from actors.replica.storage.renderings import owner_of
from actors.replica.storage.state import StorageState
from actors.runtime.kernel import ActorAddress, FlowWindow
from actors.runtime.progress import ObjectId
from tests.simulators.halves.checkers import require
from tests.simulators.halves.clients import SETTINGS

if TYPE_CHECKING:
    from tests.simulators.halves.run import HalvesWorld

PEEKS_MAX: Final = 6
"""Most waiting peeks: few, so that a run meets the bound."""


class LateCommand(msgspec.Struct):
    """A former client's command that an adapter lets through, as if it knew of no other client."""

    tagged: Any


class ArrivedCommand(msgspec.Struct):
    """A command in the mailbox, with the record of its arrival."""

    tagged: Any
    half: Half
    mark: list[Any] | None = None


class NodeMailbox:
    """A minimal mailbox for lanes."""

    def __init__(self) -> None:
        self.windows: tuple[Any, ...] = ()
        self.messages: deque[Any] = deque()

    def send_nowait(self, message: Any) -> None:
        """Queue a message; lanes bound their number."""
        self.messages.append(message)


class HalfAdapter:
    """The adapter of one half, by the real rules of the stash."""

    def __init__(self, node: WorkerNode, half: Half, lane: FlowWindow[Any]) -> None:
        self._node = node
        self._half = half
        self._lane = lane
        self.rules = StashRules(SETTINGS.stash_responses_max)
        self.down: deque[Any] = deque()
        self.up: deque[Any] = deque()

    def step_down(self) -> bool:
        """Deliver the next message of a client; return False if its lane has no room."""
        node, rules = self._node, self.rules
        match self.down[0]:
            case ConnectClient(nonce=nonce):
                for response in rules.connect(nonce):
                    node.world.hear(self._half, node.index, nonce, response)
            case DisconnectClient(nonce=nonce):
                if rules.disconnect(nonce):
                    lost = e.StorageClientLost if self._half == "storage" else ce.ComputeClientLost
                    node.mailbox.messages.append(lost(nonce))
            case LateCommand() as late:
                node.mailbox.messages.append(late)
            case tagged if tagged.nonce == rules.current and rules.connected:
                if self._lane.under_way >= node.world.schedule.setting.window:
                    return False
                mark = node.world.delay.came(self._half) if node.index == 0 else None
                self._lane.send_nowait(ArrivedCommand(tagged, self._half, mark))
        self.down.popleft()
        return True

    def step_up(self) -> bool:
        """Deliver the next response of the worker."""
        tagged, node = self.up.popleft(), self._node
        verdict = self.rules.judge(tagged)
        assert verdict is not NonceVerdict.HOLD, "the stash is large enough for every run"
        node.world.struck[f"response: {verdict.value}"] += verdict is not NonceVerdict.FORWARD
        if verdict is NonceVerdict.FORWARD:
            node.world.told.passed(self.rules.current, tagged.nonce)
            node.world.hear(self._half, node.index, tagged.nonce, tagged.response)
        self.rules.validate()
        node.taken(self._half, tagged)
        return True


class WorkerNode:
    """Worker `index`; see the module's docstring."""

    def __init__(self, world: HalvesWorld, index: int) -> None:
        setting = world.schedule.setting
        self.world = world
        self.index = index
        self.compute = ComputeState(
            index, setting.workers, result_bytes_max=1000, peeks_max=PEEKS_MAX
        )
        self.storage = StorageState(index, setting.workers)
        self.mailbox = NodeMailbox()
        self.ordered: deque[SequencedCommand] = deque()
        to: Any = ActorAddress(self.mailbox)  # type: ignore[arg-type]
        self._compute_lane: FlowWindow[Any] = FlowWindow(to, setting.window)
        self._storage_lane: FlowWindow[Any] = FlowWindow(to, setting.window)
        self.adapters: dict[Half, HalfAdapter] = {
            "compute": HalfAdapter(self, "compute", self._compute_lane),
            "storage": HalfAdapter(self, "storage", self._storage_lane),
        }
        self._unordered: deque[int] = deque()
        self._outbox: ResponseOutbox[tuple[int, BatchEmitted]] = ResponseOutbox(
            setting.responses, 1 << 20
        )
        self._storage_outbox = StorageOutbox(setting.responses)
        self._mark: list[Any] | None = None
        """Record of the arrival of the command that is being handled."""
        self.cause: frozenset[ObjectId] = frozenset()
        """Objects that the event or command being handled names."""

    @property
    def lanes(self) -> tuple[FlowWindow[Any], ...]:
        """Return the lanes of both halves."""
        return self._compute_lane, self._storage_lane

    def ways(self) -> list[tuple[Sized, Callable[[], bool]]]:
        """Return the queues with their deliveries. Commands are delivered twice as often as
        responses."""
        found: list[tuple[Sized, Callable[[], bool]]] = [
            (self.mailbox.messages, self.step_mailbox),
            (self.ordered, self.step_ordered),
        ] * 2
        for adapter in self.adapters.values():
            found += [(adapter.down, adapter.step_down)] * 2
            found.append((adapter.up, adapter.step_up))
        return found

    # -- deliveries --------------------------------------------------------------------------------

    def step_mailbox(self) -> bool:
        """Handle the next message of the mailbox."""
        match self.mailbox.messages.popleft():
            case ArrivedCommand(tagged, "compute", mark):
                self._from_compute(tagged, mark)
            case ArrivedCommand(tagged, _, mark):
                self._from_storage(tagged, mark)
                self._unordered.append(self.storage.proposed)
                self._open_window()
            case LateCommand(TaggedCommand(half="compute") as tagged):
                require(not self._offers(tagged, None), "told", "late, and offered: {}", tagged)
            case LateCommand(tagged):
                self._from_storage(tagged, None)
            case ce.ComputeClientLost() as lost:
                self.feed_compute(lost)
            case lost:
                self.feed(lost)
        return True

    def _from_compute(self, tagged: TaggedCommand[Any], mark: list[Any] | None) -> None:
        if not self._offers(tagged, mark):
            self._compute_lane.done()

    def _offers(self, tagged: TaggedCommand[Any], mark: list[Any] | None) -> bool:
        effects = self.compute.handle(tagged)
        self._mark = mark
        self._perform_all(effects)
        self._mark = None
        return bool(effects)

    def _from_storage(self, tagged: TaggedCommand[Any], mark: list[Any] | None) -> None:
        if self.index == 0:
            self.world.wants_storage.hear(tagged.nonce, tagged.command)
        self._mark = mark
        self.feed(tagged)
        self._mark = None

    def step_ordered(self) -> bool:
        """Handle the next command of the one order, in both halves."""
        ordered = self.ordered.popleft()
        place = ordered.index
        for effects in self.compute.steps(ordered):
            self._perform_all(effects, place)
        if isinstance(ordered.command, internal.ForStorage):
            command = ordered.command.command
            self.cause = self._named(command)
            if isinstance(command, internal.DropObjects):
                count = self.world.schedule.setting.workers
                mine = [id_ for id_ in command.ids if owner_of(id_, count) == self.index]
                self.world.outside.dropped_for_good(mine)
            self.feed(ordered, place)
            self.world.logs.applied(self.storage)
            self.cause = frozenset()
        else:
            if self.world.validates():
                self.compute.validate()
            require(not self.storage.handle(ordered), "order", "storage heeds {}", ordered)
            if self.index == 0:
                self._compute_lane.done()
        self._open_window()
        return True

    def _open_window(self) -> None:
        """Free lane room of commands whose proposals are ordered, as `StorageHalf` does."""
        while self._unordered and self._unordered[0] <= self.storage.ordered:
            self._unordered.popleft()
            self._storage_lane.done()

    def _named(self, command: internal.InternalCommand) -> frozenset[ObjectId]:
        """Return the objects that a command names; for an export also its source."""
        match command:
            case internal.CreateIngestionDataflow() | internal.RunSinkDataflow():
                return frozenset((command.description.id,))
            case internal.RunOneshotIngestionDataflow():
                return frozenset((command.oneshot.uuid,))
            case internal.SuspendAndRestart():
                return frozenset((command.id,))
            case internal.DropObjects():
                found = set(command.ids)
                for id_, rendering in self.storage.renderings.current.items():
                    if found & set(rendering.ids):
                        found.add(id_)
                return frozenset(found)
        return frozenset()

    # -- the storage half --------------------------------------------------------------------------

    def feed(self, event: e.Event, place: int = -1) -> None:
        """Handle an event of the storage half, and perform its effects."""
        state = self.storage
        before = state.renderings.log.length
        effects = state.handle(event, self.world.now_ms())
        if self.world.validates():
            state.validate()
        new = state.renderings.log.length - before
        if new:
            for entry in list(state.renderings.log.entries)[-new:]:
                require(entry.index == place, "order", "{} is rendered at {}", entry, place)
                self.world.logs.render(self.index, place, (entry.change, entry.id, entry.number))
                rendering = state.renderings.current.get(entry.id)
                self.world.outside.rendered(None if rendering is None else rendering.what)
        for effect in effects:
            self._perform_storage(effect)
        self.flush()

    def feed_about(self, id_: ObjectId, event: e.Event) -> None:
        """Handle an event that concerns one object."""
        self.cause = frozenset((id_,))
        self.feed(event)
        self.cause = frozenset()

    def _perform_storage(self, effect: e.Effect) -> None:
        world = self.world
        match effect:
            case e.SendStorageResponse(response=response):
                client = self.storage.client
                world.told.answered(
                    client.nonce, self._storage_outbox.nonce, client.muted, response
                )
                if isinstance(response, StatusUpdate):
                    world.blame.status(response)
                world.told.sent(client.nonce or "", self.index, response)
                self._storage_outbox.push(response)
            case e.OfferStorageCommand(propose=propose):
                require(self.index == 0, "order", "worker {} offers {}", self.index, propose)
                assert isinstance(propose.command, internal.ForStorage)
                command = propose.command.command
                world.wanted.offered(command)
                if isinstance(command, internal.SuspendAndRestart):
                    world.blame.suspended(command)
                world.proposals.append((propose, self._mark))
            case e.ForwardCommand(forwarded=forwarded):
                require(self.index != 0, "order", "worker 0 forwards {}", forwarded)
                if isinstance(forwarded.command, internal.SuspendAndRestart):
                    world.blame.suspended(forwarded.command)
                world.forwarded.append(forwarded)
            case e.SwitchStorageClient(nonce=nonce):
                self._storage_outbox.switch(nonce)
            case e.LookUp():
                world.outside.look_up(effect)
            case e.CancelLookUp(ticket=ticket):
                del world.outside.look_ups[ticket]
            case e.StartOneshot(number=number, oneshot=what):
                world.blame.touched(what.uuid, self.cause, "started")
                world.outside.start(self, number, what)
            case e.StartIngestion() | e.StartSink():
                world.blame.touched(effect.description.id, self.cause, "started")
                world.outside.start(self, effect.number, effect.description)
            case e.StopTask(number=number, forget=forget):
                world.blame.touched(world.outside.tasks[number].id, self.cause, "stopped")
                world.outside.stop(number, forget)
            case e.CleanUpSource():
                world.outside.forget(self, effect)
            case e.RestartLater(number=number):
                world.outside.delayed.append(world.outside.tasks[number])
            case e.AllowTaskWrites():
                for task in world.outside.tasks.values():
                    task.at_work |= task.node is self
            case e.LogStorageReconciliation(refused=refused):
                world.struck["update refused"] += len(refused)
            case e.LogRefusedUpdate():
                world.struck["update refused"] += 1
            case e.DiscardParts(batches=batches):
                world.told.discarded(batches)

    # -- the compute half --------------------------------------------------------------------------

    def feed_compute(self, event: ce.Event) -> None:
        """Handle an event of the compute half, and perform its effects."""
        effects = self.compute.handle(event)
        if self.world.validates():
            self.compute.validate()
        self._perform_all(effects)

    def _perform_all(self, effects: list[ce.Effect], place: int = -1) -> None:
        for effect in effects:
            self._perform(effect, place)
        self.flush()

    def _perform(self, effect: ce.Effect, place: int) -> None:
        world = self.world
        match effect:
            case ce.SendComputeResponse(response=response, number=number, receipt=receipt):
                state = self.compute
                world.told.answered(state.nonce, self._outbox.nonce, state.muted, response)
                world.told.reached(world.outside, state, response)
                world.told.sent(state.nonce or "", self.index, response)
                self._outbox.push(response, None if receipt is None else (number, receipt))
            case ce.OfferCommand(propose=propose):
                require(self.index == 0, "order", "worker {} offers {}", self.index, propose)
                world.proposals.append((propose, self._mark))
            case ce.SwitchComputeClient(nonce=nonce):
                self._deliver(self._outbox.switch(nonce))
            case ce.AcknowledgeBatch(number=number, emitted=emitted):
                self._deliver([(number, emitted)])
            case ce.RenderDataflow(number=number, description=description):
                world.logs.render(self.index, place, ("create", description.id, number))
                world.wanted.rendered(self.index, number, description.id)
                world.outside.render(self, effect)
            case ce.StopDataflow(number=number):
                world.logs.render(self.index, place, ("remove", "", number))
                world.wanted.dropped(self.index, number)
                world.outside.dropped(self, number)
            case ce.SendToDataflow(number=number, message=message):
                world.logs.render(self.index, place, (message, "", number))
                if self.index == 0:
                    world.outside.heard(number, message)
            case ce.RespawnDataflow(number=number):
                world.respawns.append(number)
            case ce.CompactIndex():
                world.outside.compacts(self, effect)
            case ce.StartPeek():
                world.outside.read(self, effect)
            case ce.StopPeek(ticket=ticket):
                world.outside.reads.pop((self.index, ticket), None)

    def _deliver(self, receipts: list[tuple[int, BatchEmitted]]) -> None:
        for number, _ in receipts:
            self.world.outside.flows[number].waits = False

    # -- responses ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send responses to the adapters as far as the outboxes admit."""
        nonce = self._outbox.nonce
        if nonce is not None and len(self._outbox):
            up = self.adapters["compute"].up
            up.extend(TaggedResponse(nonce, what, serial) for serial, what in self._outbox.take())
        nonce = self._storage_outbox.nonce
        if nonce is not None and len(self._storage_outbox):
            for serial, response in self._storage_outbox.take():
                self.adapters["storage"].up.append(TaggedResponse(nonce, response, serial))

    def taken(self, half: Half, tagged: Any) -> None:
        """Note that an adapter has taken a response."""
        if half == "storage":
            self._storage_outbox.acknowledge(tagged.nonce, (tagged.serial,))
        else:
            self._deliver(self._outbox.acknowledge(tagged.nonce, (tagged.serial,)))
        self.flush()

    def idle(self) -> bool:
        """Return whether no command or response is under way here."""
        return not (
            len(self._outbox)
            or len(self._storage_outbox)
            or self._unordered
            or any(lane.under_way for lane in self.lanes)
        )
