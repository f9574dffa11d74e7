"""The network in memory: connections of clients and of the controller, and paths to the adapters.

Within a connection messages keep their order; each connection is delayed by itself, so that
messages on different connections may overtake each other. A connection that breaks loses its
messages in flight, in both directions; one that is closed delivers them first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from actors.channel_adapter import ConnectClient
from actors.model.protocol.compute import Command, Response
from actors.model.protocol.internal import TaggedResponse, TaggedResponses
from actors.replica.cluster.client import ClusterClient, LocalClient, WireClient
from actors.replica.cluster.serving import ConversationServer
from actors.runtime.errors import ConnectionBroken, PenstockError, ResourceClosed
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import Nonce
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress as Place
from actors.testing.encoding import carry_by_reference
from tests.simulators.service.faults import DISCONNECT, FaultInjector, InjectedFault

MESSAGES_MAX: Final = 64
"""Most messages in flight in one direction; further senders wait."""
ROUNDING_S: Final = 1e-6
"""Seconds by which a message may be early: the loop's clock is no finer."""


class _Direction:
    """One direction of a connection."""

    def __init__(self, site: str, injector: FaultInjector) -> None:
        self.site = site
        self._injector = injector
        self.queue: deque[tuple[float, Any]] = deque()
        self.changed = asyncio.Event()
        self._last = 0.0

    def put(self, message: Any) -> bool:
        """Send a message; return False if the connection breaks at it."""
        fault = self._injector.draw(self.site)
        self._injector.trace.note(self.site, type(message).__name__)
        now = asyncio.get_running_loop().time()
        if fault is not None and fault.kind == DISCONNECT:
            return False
        delay_s = 0.0 if fault is None else fault.delay_ms / 1000
        self._last = max(self._last, now + delay_s)
        self.queue.append((self._last, message))
        self.changed.set()
        return True


class SimulatedWire:
    """A connection between a client and the service, or of another `name`."""

    def __init__(self, injector: FaultInjector, name: str = "link") -> None:
        self.up = _Direction(f"{name}.up", injector)
        self.down = _Direction(f"{name}.down", injector)
        self.broken = False
        self.ended = False

    def sever(self) -> None:
        """Break the connection."""
        self.broken = self.ended = True
        for way in (self.up, self.down):
            way.queue.clear()
            way.changed.set()

    def close(self) -> None:
        """Close the connection: messages in flight still arrive."""
        self.ended = True
        for way in (self.up, self.down):
            way.changed.set()


class WireEnd:
    """One end of a wire, with the interface that a `Client` or a session needs of a connection."""

    def __init__(self, wire: SimulatedWire, peer: str, out: _Direction, into: _Direction) -> None:
        self.peer = peer
        self._wire = wire
        self._out = out
        self._into = into
        self._closed = False

    async def send(self, message: Any) -> None:
        """Send, waiting while too many messages are in flight. Raises `ResourceClosed` or
        `ConnectionBroken`."""
        while len(self._out.queue) >= MESSAGES_MAX and not self._wire.ended:
            self._out.changed.clear()
            await self._out.changed.wait()
        self._check()
        if self._wire.ended or not self._out.put(message):
            self._wire.sever()
            raise ConnectionBroken(f"{self.peer} is gone")

    def try_send(self, messages: Sequence[Any]) -> int:
        """Send messages without waiting, and return how many were sent. Raises as `send`."""
        self._check()
        for count, message in enumerate(messages):
            if len(self._out.queue) >= MESSAGES_MAX or self._wire.ended:
                return count
            if not self._out.put(message):
                self._wire.sever()
                raise ConnectionBroken(f"{self.peer} is gone")
        return len(messages)

    async def receive(self) -> Any:
        """Return the next message. Raises `ResourceClosed` or `ConnectionBroken`. Cancelling it
        loses nothing."""
        loop = asyncio.get_running_loop()
        while True:
            if self._into.queue:
                wait_s = self._into.queue[0][0] - loop.time()
                if wait_s <= ROUNDING_S:
                    self._into.changed.set()  # wake senders that wait for room
                    return self._into.queue.popleft()[1]
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._ended()
                continue
            self._check()
            if self._wire.ended:
                raise ConnectionBroken(f"{self.peer} is gone")
            self._into.changed.clear()
            await self._into.changed.wait()

    def receive_nowait(self, count_max: int) -> list[Any]:
        """Return messages that have arrived after `receive`'s last one, without waiting."""
        now, found = asyncio.get_running_loop().time(), list[Any]()
        queue = self._into.queue
        while queue and len(found) < count_max and queue[0][0] - now <= ROUNDING_S:
            found.append(queue.popleft()[1])
        if found:
            self._into.changed.set()
        return found

    async def _ended(self) -> None:
        """Wait for the wire to break while a message is in flight."""
        while self._into.queue:
            self._into.changed.clear()
            await self._into.changed.wait()

    def _check(self) -> None:
        if self._closed:
            raise ResourceClosed(f"the connection to {self.peer} was closed by this side")

    async def aclose(self) -> None:
        """Close both directions; idempotent."""
        if not self._closed:
            self._closed = True
            self._wire.close()

    def abort(self) -> None:
        """Break the connection."""
        self._wire.sever()


carry_by_reference(WireEnd)


class MemoryListener:
    """The service's listener: hands each new connection to a session."""

    address = Place(host="memory")

    def __init__(self, injector: FaultInjector) -> None:
        self._injector = injector
        self._arrivals: deque[tuple[SimulatedWire, WireEnd]] = deque()
        self._changed = asyncio.Event()
        self.wires: list[SimulatedWire] = []
        self._closed = False

    def dial(self) -> WireEnd:
        """Return a client's end of a new connection. Raises `ConnectionBroken` after `aclose` or
        `lost`."""
        if self._closed:
            raise ConnectionBroken("nobody listens")
        wire = SimulatedWire(self._injector)
        self.wires = [old for old in self.wires if not old.ended]
        self.wires.append(wire)
        self._arrivals.append((wire, WireEnd(wire, "a client", wire.down, wire.up)))
        self._changed.set()
        return WireEnd(wire, "the service", wire.up, wire.down)

    async def serve(self, converse: Callable[[Any], Awaitable[None]]) -> None:
        """Run `converse` for every connection, until `aclose`."""
        async with asyncio.TaskGroup() as group:
            while not self._closed:
                while self._arrivals:
                    _, end = self._arrivals.popleft()
                    group.create_task(_conversation(converse, end))
                self._changed.clear()
                await self._changed.wait()

    async def aclose(self) -> None:
        """Accept no more connections."""
        self._closed = True
        self._changed.set()
        while self._arrivals:
            self._arrivals.popleft()[0].sever()

    def lost(self) -> None:
        """Break every connection: the process died."""
        self._closed = True
        for wire in self.wires:
            wire.sever()


async def _conversation(converse: Callable[[Any], Awaitable[None]], end: WireEnd) -> None:
    with suppress(ResourceClosed, ConnectionBroken):
        await converse(end)


def over_wire(client: LocalClient, injector: FaultInjector, settings: Settings) -> WireClient:
    """Return a client of the same cluster that is in another process, as it were: its frames go
    over a wire, and the cluster's end is the one of a socket."""
    wire = SimulatedWire(injector, "wire")
    served = WireEnd(wire, "a controller", wire.down, wire.up)
    server = ConversationServer(client.acceptor, settings, client.half)
    conversation = server.converse(cast(Any, served))
    task = asyncio.get_running_loop().create_task(_over(wire, conversation))
    _CONVERSATIONS.add(task)
    task.add_done_callback(_CONVERSATIONS.discard)
    return WireClient(cast(Any, WireEnd(wire, "the cluster", wire.up, wire.down)))


_CONVERSATIONS: Final[set[asyncio.Task[None]]] = set()
"""Keeps the tasks from being collected."""


async def _over(wire: SimulatedWire, conversation: Coroutine[Any, Any, None]) -> None:
    with suppress(PenstockError):
        await conversation
    # As a listener does: what was sent last arrives first.
    wire.close()


class FaultyClusterClient:
    """A connection to the cluster, the controller's or a rival's, delayed and broken by faults at
    the sites ``<name>.up``, ``.down`` and ``.close``. `heard` is called with every command and
    response, and with the error that ends it.

    The cluster does not notice a broken connection before `close` gets through, which may take a
    while: a successor then displaces it.
    """

    def __init__(
        self,
        inner: ClusterClient,
        injector: FaultInjector,
        heard: Callable[[object], None],
        name: str = "replica",
    ) -> None:
        self._name = name
        self._inner = inner
        self._injector = injector
        self._heard = heard
        self._taken: Response | None = None
        self._drawn: tuple[Command, InjectedFault | None] | None = None
        """Command that could not be sent at once, with its fault, which must not be drawn twice."""
        self._broken = asyncio.Event()

    async def _delay(self, site: str, what: object) -> None:
        if self._broken.is_set():
            raise ConnectionBroken("the connection to the cluster is gone")
        await self._suffer(self._draw(site, what))

    def _draw(self, site: str, what: object) -> InjectedFault | None:
        fault = self._injector.draw(site)
        self._injector.trace.note(site, type(what).__name__)
        return fault

    async def _suffer(self, fault: InjectedFault | None) -> None:
        if fault is None:
            return
        if fault.kind == DISCONNECT:
            self._broken.set()
            raise ConnectionBroken("the connection to the cluster is gone")
        await asyncio.sleep(fault.delay_ms / 1000)

    async def send(self, command: Any) -> None:
        """Send a command."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None and drawn[0] is command:
            await self._suffer(drawn[1])
        else:
            await self._delay(f"{self._name}.up", command)
        self._heard(command)
        await self._inner.send(command)

    def try_send(self, commands: Sequence[Any]) -> int:
        """Send commands without waiting, up to one that has a fault or finds no room; return how
        many were sent."""
        for count, command in enumerate(commands):
            if self._broken.is_set():
                raise ConnectionBroken("the connection to the cluster is gone")
            fault = self._draw(f"{self._name}.up", command)
            if fault is not None or not self._inner.try_send((command,)):
                self._drawn = (command, fault)
                return count
            self._heard(command)
        return len(commands)

    async def receive(self) -> Response:
        """Return the next response."""
        if self._taken is None:
            try:
                self._taken = await self._inner.receive()
            except PenstockError as error:
                self._heard(error)
                raise
            await self._delay(f"{self._name}.down", self._taken)
        if self._broken.is_set():
            raise ConnectionBroken("the connection to the cluster is gone")
        response, self._taken = self._taken, None
        self._heard(response)
        return response

    def receive_nowait(self, count_max: int) -> list[Response]:
        """Return no response: each has a fault of its own, which takes time."""
        return []

    async def close(self) -> None:
        """End the connection."""
        fault = self._injector.draw(f"{self._name}.close")
        if fault is not None:
            await asyncio.sleep(fault.delay_ms / 1000)
        await self._inner.close()


class _Way:
    """Delayed messages to one mailbox, in order."""

    def __init__(self, deliver: Callable[[Any], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._waiting: deque[tuple[float, Any]] = deque()
        self._pump: asyncio.Task[None] | None = None

    def take(self, message: Any, delay_s: float) -> bool:
        """Take a message that must be delayed, or come after a delayed one; return False if it need
        not wait."""
        if not delay_s and not self._waiting:
            return False
        loop = asyncio.get_running_loop()
        self._waiting.append((loop.time() + delay_s, message))
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
        return True

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ResourceClosed, ConnectionBroken):
            while self._waiting:
                due, message = self._waiting[0]
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await self._deliver(message)
                self._waiting.popleft()


class DelayedAddress(ActorAddress[Any]):
    """Delayed paths to one adapter, from the cluster's connections and from its worker, as if it
    were remote: each keeps its order, and one may overtake the other."""

    __slots__ = ("_from_worker", "_half", "_injector", "_inner", "_sent", "_ways")

    def __init__(
        self,
        inner: ActorAddress[Any],
        injector: FaultInjector,
        sent: Callable[[str, Nonce, Any], None] = lambda adapter, nonce, response: None,
    ) -> None:
        """Wrap `inner`; `sent` is called with (adapter, nonce, response) for each response of a
        storage worker."""
        super().__init__(inner._mailbox)
        self._injector = injector
        self._sent = sent
        self._half = "storage." if "/storage-" in inner.path else ""

        async def replied(message: Any) -> None:
            inner.reply(message)

        self._inner = inner
        self._ways: dict[Nonce, _Way] = {}
        """One for each connection, so that the messages of two connections overtake each other."""
        self._from_worker = _Way(replied)

    def _delay_s(self, site: str) -> float:
        fault = self._injector.draw(self._half + site)
        return 0.0 if fault is None else fault.delay_ms / 1000

    async def send(self, message: Any) -> None:
        """Send, perhaps delayed."""
        delay_s = self._delay_s("adapter")
        if isinstance(message, ConnectClient):
            delay_s += self._delay_s("connect")
        if not self._way(message).take(message, delay_s):
            await super().send(message)

    def _way(self, message: Any) -> _Way:
        # A request for statistics is of no connection.
        return self._ways.setdefault(getattr(message, "nonce", ""), _Way(self._inner.send))

    def send_nowait(self, message: Any) -> None:
        """Send, perhaps delayed."""
        if not self._way(message).take(message, self._delay_s("adapter")):
            super().send_nowait(message)

    def reply(self, message: Any) -> bool:
        """Answer, perhaps delayed."""
        if self._half and isinstance(message, TaggedResponse):
            self._sent(self.path, message.nonce, message.response)
        elif self._half and isinstance(message, TaggedResponses):
            for _, response in message.responses:
                self._sent(self.path, message.nonce, response)
        if self._from_worker.take(message, self._delay_s("worker.up")):
            return True
        return super().reply(message)
