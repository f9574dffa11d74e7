"""The course of one run: actions among deliveries, then a fault-free end that must be complete.

When the actions are over, nothing fails any more and clients complete their initialization. All
messages are delivered: then exactly the wanted objects run. All objects advance: then clients are
told exactly that. Clients want no object any more: then nothing is left.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence, Sized
from itertools import chain, islice
from typing import Any, Final, TypeAlias, TypeVar

from actors.channel_adapter import ConnectClient, DisconnectClient
from actors.model.protocol import compute, storage
from actors.model.protocol.internal import Half, ProposeCommand, TaggedCommand
from actors.model.protocol.storage_internal import ForwardedCommand
from actors.replica.cluster.sequencer import CommandOrder
from actors.replica.storage import events as e
from actors.runtime.errors import PenstockError
from tests.simulators.halves import schedule as plan
from tests.simulators.halves.checkers import (
    BlameChecker,
    DelayChecker,
    HalvesHoldsChecker,
    HalvesToldChecker,
    OrderChecker,
    WantedChecker,
    nothing_is_left,
    require,
)
from tests.simulators.halves.clients import (
    Client,
    ComputeClient,
    Make,
    StorageClient,
    batch_commands,
    varied,
)
from tests.simulators.halves.nodes import LateCommand, WorkerNode
from tests.simulators.halves.outside import SimulatedConnectors
from tests.simulators.halves.rest import compute_is_told, health_is_told, storage_is_told
from tests.simulators.halves.schedule import HalvesAction, HalvesSchedule
from tests.simulators.halves.wishes import ComputeTruth, StorageTruth
from tests.simulators.service.cluster import RunReport, report_of
from tests.simulators.service.faults import FaultInjector, TraceDigest
from tests.simulators.service.history import CheckerViolation

T = TypeVar("T")
Way: TypeAlias = tuple[Sized, Callable[[], bool]]
"""A queue, and the delivery of one of its items; the delivery returns False if the item must
wait."""

DELIVERIES_MAX: Final = 200_000
"""Most deliveries of one run; the longest need a tenth of it."""
LATER: Final = 1000
"""Time by which all objects advance at the end."""
LAG: Final = 20
"""Number of deliveries for which adapters lag behind a new client."""
VALIDATED: Final = 5
"""Number of events between two checks of a state's invariants; they are checked at rest, too."""
STILL: Final = 0.3
"""Probability that other queues stand still from an action on, and that none does any more."""
LOST_MAX: Final = 3
"""Most commands of a former client that are lost on their way to one worker, or come late."""


class HalvesTrace(TraceDigest):
    """Steps by their number: there is no clock."""

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        self._digest = hashlib.blake2b(digest_size=8)

    def note(self, *what: object) -> None:
        self.steps += 1
        line = " ".join(map(str, what))
        self._digest.update(line.encode())
        if self._kept is not None:
            self._kept.append(f"{self.steps:6} {line}")


class HalvesWorld:
    """The workers, the order, the clients, and the messages under way between them."""

    def __init__(self, schedule: HalvesSchedule, keep_trace: bool) -> None:
        self.schedule = schedule
        self.trace = HalvesTrace(keep_trace)
        self.injector = FaultInjector(schedule.faults, self.trace)
        self.dice = random.Random(schedule.seed)
        self.struck: Counter[str] = Counter()
        count = schedule.setting.workers
        self.outside = SimulatedConnectors(self)
        self.told = HalvesToldChecker(count, self.outside.durable)
        self.holds = HalvesHoldsChecker()
        self.clients: dict[Half, Client | None] = {"compute": None, "storage": None}
        self._histories: dict[Half, list[Any]] = {"compute": [], "storage": []}
        """Histories of the last client of each half."""
        self._nonces = 0
        self.most_delayed = 0
        self._events = 0
        self._lagging: Half | None = None
        """Half whose adapters, but the first, have not received its new client's messages for a
        while."""
        self._begin()

    def _begin(self) -> None:
        """Begin a life of all workers."""
        setting = self.schedule.setting
        self.order = CommandOrder()
        self.proposals: deque[tuple[ProposeCommand, list[Any] | None]] = deque()
        self.forwarded: deque[ForwardedCommand] = deque()
        self.respawns: list[int] = []
        self.logs = OrderChecker()
        self.blame = BlameChecker()
        self.delay = DelayChecker(setting.window)
        self.wants_storage = StorageTruth()
        self.wants_compute = ComputeTruth()
        self.wanted = WantedChecker(self.wants_storage, self.wants_compute)
        self.nodes = [WorkerNode(self, index) for index in range(setting.workers)]
        outside = self.outside
        ways: list[Way] = [
            (self.proposals, self._sequence),
            (self.forwarded, self._forward),
            (self.respawns, self._respawn),
            *outside.ways(),
        ]
        for node in self.nodes:
            ways += node.ways()
        self._ways = self._open = ways

    # -- services for nodes and checkers -----------------------------------------------------------

    def fault(self, site: str) -> bool:
        """Return whether a fault strikes at the site now."""
        return self.injector.draw(site) is not None

    def validates(self) -> bool:
        """Return whether a state checks its invariants after the present event: the check is
        expensive."""
        self._events += 1
        return not self._events % VALIDATED

    def now_ms(self) -> int:
        """Return a clock that advances with every event."""
        return self._events

    def pick(self, those: Sequence[T]) -> T:
        """Return one of the items, drawn by the present dice."""
        return those[int(self.dice.random() * len(those))]

    def hear(self, half: Half, part: int, nonce: str, response: Any) -> None:
        """Pass a response to the connection of that nonce, if it still exists."""
        client = self.clients[half]
        if client is None or client.nonce != nonce:
            return
        if isinstance(client, StorageClient):
            shape = client.shapes.get(getattr(response, "id", ""))
            told: Any = client.hear(part, response)
            self.told.storage_told(nonce, shape, told)
        else:
            told = client.hear(part, response)
            self.told.compute_told(nonce, told)
        if told is not None:
            self.trace.note("told", nonce, type(told).__name__, getattr(told, "id", ""))

    # -- deliveries --------------------------------------------------------------------------------

    def _sequence(self) -> bool:
        proposal, mark = self.proposals.popleft()
        ordered = self.order.propose(proposal)
        require(
            ordered is not None, "order", "{} is dropped, and worker 0 offers in order", proposal
        )
        assert ordered is not None
        self.delay.ordered(mark)
        self.most_delayed = max(self.most_delayed, self.delay.most)
        self.trace.note("ordered", ordered.index, ordered.generation, ordered.command)
        if proposal.half == "compute":
            lot: Any = ordered.command
            for command in lot.commands if isinstance(lot, compute.CommandBatch) else (lot,):
                self.wants_compute.order(command)
        for node in self.nodes:
            node.ordered.append(ordered)
        return True

    def _forward(self) -> bool:
        self.nodes[0].feed(self.forwarded.popleft())
        return True

    def _respawn(self) -> bool:
        self.outside.respawn(self.respawns.pop(0))
        return True

    def step(self) -> bool:
        """Make one delivery; return False when there is none to make."""
        ways = self._open
        first = int(self.dice.random() * len(ways))
        for queue, way in chain(islice(ways, first, None), islice(ways, first)):
            if queue and way():
                return True
        return False

    def _deliver(self, count: int) -> None:
        """Make up to `count` deliveries; now and then some queues stand still, for a few
        actions."""
        dice, which = self.dice, self.dice.random()
        if self._lagging:
            adapters = [node.adapters[self._lagging].down for node in self.nodes[1:]]
            still = set(map(id, adapters))
            self._open = [way for way in self._ways if id(way[0]) not in still]
            self._lagging, count = None, count + LAG
        elif which < STILL:
            share = dice.choice((0.06, 0.5))
            still = {id(queue) for queue, _ in self._ways if dice.random() < share}
            self._open = [way for way in self._ways if id(way[0]) not in still]
        elif which < 2 * STILL:
            self._open = self._ways
        for _ in range(count if self._open else 0):
            if not self.step():
                break

    def settle(self) -> None:
        """Deliver all messages: each queue until it is empty, then the next."""
        count, going = 0, True
        while going:
            going = False
            first = int(self.dice.random() * len(self._ways))
            for queue, way in chain(islice(self._ways, first, None), islice(self._ways, first)):
                while queue and way():
                    count, going = count + 1, True
            if count > DELIVERIES_MAX:
                raise CheckerViolation(f"livelock: more than {DELIVERIES_MAX} deliveries")

    # -- clients -----------------------------------------------------------------------------------

    def say(self, half: Half, commands: Sequence[Any]) -> None:
        """Let the client send commands, as far as the rules allow; without a client, connect one
        first."""
        client = self._client(half)
        to_first: list[Any] = []
        for command in commands:
            for part, split in client.say(command):
                hello = isinstance(split, compute.Hello)
                if isinstance(client, StorageClient):
                    tagged: Any = TaggedCommand(client.nonce, split, half)
                    self.nodes[part].adapters[half].down.append(tagged)
                elif part == 0 and not hello:
                    to_first.append(split)
                else:
                    tagged = TaggedCommand(client.nonce, split)
                    self.nodes[part].adapters[half].down.append(tagged)
        for lot in batch_commands(to_first, self.dice):
            tagged = TaggedCommand(client.nonce, lot)
            self.nodes[0].adapters[half].down.append(tagged)

    def _client(self, half: Half) -> Client:
        """Return the present client; without one, connect one with the former's history."""
        client = self.clients[half]
        return client or self.connect(half, self._histories[half])

    def connect(self, half: Half, first: Sequence[Any] = ()) -> Client:
        """Let a new client take over and send these commands."""
        self._nonces += 1
        nonce = f"n{self._nonces}"
        client = self.clients[half] = Make[half](nonce, len(self.nodes))
        self.trace.note("connect", half, nonce)
        for node in self.nodes:
            to: Any = None
            node.adapters[half].down.append(ConnectClient(nonce, to, to))
        opening: list[Any] = [compute.Hello(nonce)]
        if isinstance(client, ComputeClient):
            opening.append(compute.CreateInstance(len(self.nodes)))
        self.say(half, [*opening, *first])
        return client

    def leave(self, half: Half) -> None:
        """Disconnect the client; its last commands may not arrive at all workers."""
        client = self.clients[half]
        if client is None:
            return
        self._histories[half] = client.history()
        for node in self.nodes:
            down = node.adapters[half].down
            for _ in range(int(self.dice.random() * (LOST_MAX + 1))):
                if down and isinstance(down[-1], TaggedCommand):
                    down.pop()
            if self.dice.random() < 0.7:
                down.append(DisconnectClient(client.nonce))
        self.clients[half] = None

    def displace(self, half: Half) -> None:
        """Let another client take over."""
        former, dice = self.clients[half], self.dice
        self.leave(half)
        history = self._histories[half]
        if (which := dice.random()) < 0.3:
            history = varied(history, dice, self.outside.clock)
        elif which < 0.5:
            history = []
        self.connect(half, history)
        if former is not None and dice.random() < 0.5:
            self._late(half, former)
        self._lagging = half if dice.random() < STILL else None
        self._talk(half, dice.randint(0, 3))
        if dice.random() < 0.6:
            self.say(half, [compute.InitializationComplete()])

    def _talk(self, half: Half, count: int) -> None:
        client = self._client(half)
        said = [each for _ in range(count) for each in client.draw(self.dice, self.outside.clock)]
        self.say(half, said)

    def _late(self, half: Half, former: Client) -> None:
        """Deliver commands of the former client after its successor's Hello."""
        late = [each for each in former.said if not isinstance(each, compute.Hello)]
        for node in self.nodes:
            for command in late[-1 - int(self.dice.random() * LOST_MAX) :]:
                tagged = TaggedCommand(former.nonce, command, half)
                node.adapters[half].down.append(LateCommand(tagged))

    def restart(self) -> None:
        """Kill all workers; messages under way are lost, durable state stays."""
        for half in self.clients:
            client = self.clients[half]
            if client is not None:
                self._histories[half] = client.history()
                self.clients[half] = None
        self.outside.restart()
        self._begin()

    # -- the course --------------------------------------------------------------------------------

    def drive(self) -> None:
        """Drive the whole run. Raises `CheckerViolation`."""
        opening = (compute.InitializationComplete(), compute.AllowWrites())
        for half in self.clients:
            self.connect(half, opening if self.schedule.setting.opened else ())
        for action in self.schedule.operations:
            self.dice.seed(action.dice)
            self.trace.note("act", action.kind)
            self.struck[action.kind] += 1
            self._act(action)
            self._deliver(action.steps)
        self.dice.seed(self.schedule.seed)
        self._calm()
        self._get_on()
        self._leave_nothing()

    def _act(self, action: HalvesAction) -> None:
        kind, dice = action.kind, self.dice
        half = plan.HALF_OF.get(kind)
        if half is not None:
            self._act_on(half, kind)
        elif kind == plan.TASK:
            _ = self.outside.act(dice) or self.outside.flow_acts(dice)
        elif kind == plan.FLOW:
            _ = self.outside.flow_acts(dice) or self.outside.act(dice)
        elif kind == plan.STATISTICS:
            self._statistics()
        elif kind == plan.RESTART:
            self.restart()

    def _act_on(self, half: Half, kind: str) -> None:
        """Act by the client of a half; without a client, connect one first."""
        if kind in (plan.DISPLACE_STORAGE, plan.DISPLACE_COMPUTE):
            self.displace(half)
        elif kind in (plan.LEAVE_STORAGE, plan.LEAVE_COMPUTE):
            self.leave(half)
        elif kind in (plan.COMPLETE_STORAGE, plan.COMPLETE_COMPUTE):
            self._complete(half)
        elif kind in (plan.FLOOD_STORAGE, plan.FLOOD_COMPUTE):
            self.say(half, self._client(half).flood(self.dice))
        else:
            self._talk(half, self.dice.randint(1, 4))

    def _complete(self, half: Half) -> None:
        if not self._client(half).complete:
            self.say(half, [compute.InitializationComplete()])

    def _statistics(self) -> None:
        for node in self.nodes:
            node.feed(e.StatisticsDue())

    # -- the end -----------------------------------------------------------------------------------

    def _calm(self) -> None:
        """Stop the faults, complete the clients' initialization, and deliver all messages."""
        self.trace.note("calm")
        self.injector.active = False
        self.outside.calm()
        self._open = self._ways
        for half in self.clients:
            self._complete(half)
            self.say(half, [compute.AllowWrites()])
        client = self.clients["compute"]
        assert isinstance(client, ComputeClient)
        self.say("compute", [compute.ScheduleDataflow(id_) for id_ in client.exports])
        self.settle()
        self.at_rest()

    def at_rest(self) -> None:
        """Check that all workers agree when all messages are delivered."""
        far = {self.logs.seen[node.index] for node in self.nodes}
        require(len(far) == 1, "order", "workers have come as far as {} entries", far)
        self.wanted.at_rest([(node.compute, node.storage) for node in self.nodes])
        for node in self.nodes:
            node.compute.validate()
            node.storage.validate()
            lanes = [lane.under_way for lane in node.lanes]
            require(
                node.idle(), "delay", "worker {} is not done with commands: {}", node.index, lanes
            )

    def _get_on(self) -> None:
        """Advance all running objects, and check that clients are told exactly that."""
        outside = self.outside
        outside.clock += LATER
        for task in outside.at_work():
            if isinstance(task.what, storage.RunOneshotIngestion):
                outside.done(task, outside.batch())
            else:
                outside.reach(task, outside.clock)
        for flow in outside.living():
            outside.get_on(flow, outside.clock, lambda: True)
        self.settle()
        of_storage, of_compute = self.clients["storage"], self.clients["compute"]
        assert isinstance(of_storage, StorageClient)
        assert isinstance(of_compute, ComputeClient)
        storage_is_told(self, of_storage)
        health_is_told(self, of_storage)
        compute_is_told(self, of_compute)

    def _leave_nothing(self) -> None:
        """Connect clients that want no object, and check that nothing is left."""
        for half in self.clients:
            self.leave(half)
            self.connect(half)
            self._complete(half)
        self.settle()
        self.at_rest()
        for node in self.nodes:
            nothing_is_left(node.compute, node.storage)
        require(not self.outside.kept, "left", "sources {} keep something", self.outside.kept)
        require(not self.outside.tasks, "left", "tasks {} are there", list(self.outside.tasks))


def simulate(schedule: HalvesSchedule, *, keep_trace: bool = False) -> RunReport:
    """Run a schedule once."""
    world = HalvesWorld(schedule, keep_trace)
    violation = ""
    try:
        world.drive()
    except CheckerViolation as found:
        violation = str(found)
    except (PenstockError, AssertionError, LookupError) as error:
        violation = f"{type(error).__name__}: {error}"
    world.trace.note("violation", violation)
    struck = world.struck + Counter(
        f"{fault.site}: {fault.kind}" for fault in world.injector.struck
    )
    if world.most_delayed == schedule.setting.window:
        struck["delayed by a whole window"] = 1
    return report_of(schedule.seed, world.trace, +struck, violation)
