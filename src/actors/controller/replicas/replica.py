"""The replica task: keeps one replica informed of everything that it should run.

It connects with a fresh nonce (forever, with backoff), asks the controller for the history, replays
Hello and the history, sends later commands, and hands responses to the controller with the
replica's name and the number of their connection, so that late ones can be told apart. A connection
that fails in any way is given up whole.

It serves one half. A `CommandGate` withholds compute's Schedules beyond the number of dataflows
that may hydrate at a time (`HydrationTracker`); the history has them all. The storage half needs no
gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, assert_never

import msgspec

from actors.controller.messages import (
    PushCommand,
    ReplayHistory,
    ReplicaConnected,
    ReplicaLost,
    ReplicaResponse,
)
from actors.errors import ConnectionBroken, PenstockError, ResourceClosed
from actors.kernel import Actor, ActorAddress, RunningEffect
from actors.progress import ObjectId, ShardId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    Command,
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    Frontiers,
    Hello,
    Peek,
    PeekResponse,
    PeekRows,
    Response,
    ScheduleDataflow,
    StatusResponse,
    SubscribeExport,
    ViewExport,
)
from actors.protocol.internal import Half
from actors.settings import Settings
from actors.threshold_probes import HYDRATION_QUEUE

# Limits how many dataflows of one connection hydrate at a time, by withholding Schedules. Pure
# A dataflow *hydrates* from its Schedule until its output is strictly beyond its `as_of`; that is
# when it reads most. At most `limit` may do so at once; the Schedules of the others wait here,
# first in, first out. A connection begins with nothing known: dataflows that a replica has kept
# report their frontiers at once, and make room for the next.
#
# A dataflow that reads the output of one that has not hydrated waits for that one, without a slot.
# A slot is freed when the dataflow has hydrated, is dropped, or reports that it is stalled or
# frozen.
#
# Invariants: everything but Schedules passes at once and in order; a Schedule passes once, unless
# its dataflow is dropped first.


_STUCK: Final = ("stalled", "frozen")


class HydrationTracker:
    """The dataflows of one connection that have not hydrated."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dry: dict[ObjectId, DataflowDescription] = {}
        self._made: dict[ShardId, ObjectId] = {}
        """Dataflows that have not hydrated, by the shard that they write."""
        self._scheduled: dict[ObjectId, ScheduleDataflow] = {}
        """Withheld Schedules."""
        self._queue: OrderedDict[ObjectId, None] = OrderedDict()
        """Withheld dataflows that wait for a slot only."""
        self._blocked: dict[ShardId, list[ObjectId]] = {}
        """The other withheld dataflows, by the shard that they wait to read."""
        self._taken: set[ObjectId] = set()

    @property
    def waiting(self) -> int:
        """Return the number of withheld Schedules."""
        return len(self._scheduled)

    @property
    def hydrating(self) -> int:
        """Return the number of slots in use."""
        return len(self._taken)

    def command(self, command: Command) -> list[Command]:
        """Return the commands to send now: this one, unless it is withheld, and Schedules that it
        releases."""
        match command:
            # Subscribes and copies bypass the limit: a client waits for them.
            case CreateDataflow(dataflow) if not isinstance(
                dataflow.export, SubscribeExport | CopyToExport
            ):
                self._dry[dataflow.id] = dataflow
                if isinstance(dataflow.export, ViewExport):
                    self._made[dataflow.export.shard] = dataflow.id
            case ScheduleDataflow(id) if id in self._dry:
                self._scheduled[id] = command
                self._enqueue(id)
                return self._next()
            case AllowCompaction(id, frontier) if is_empty(frontier):
                self._forget(id)
                return [command, *self._next()]
        return [command]

    def responded(self, response: Response) -> list[Command]:
        """Return the Schedules to send, now that the replica has responded."""
        match response:
            case Frontiers(id=id, output=output) if id in self._dry and output is not None:
                if output <= self._dry[id].as_of:
                    return []
                self._forget(id)
            # The others need not wait for a store that does not answer this one.
            case StatusResponse(id=id, state=state) if id in self._taken and state in _STUCK:
                self._taken.discard(id)
            case _:
                return []
        return self._next()

    def _enqueue(self, id: ObjectId) -> None:
        """Let a dataflow wait for an input that has not hydrated, or else for a slot."""
        for imported in self._dry[id].imports:
            if imported.shard in self._made:
                self._blocked.setdefault(imported.shard, []).append(id)
                return
        self._queue[id] = None

    def _forget(self, id: ObjectId) -> None:
        """Remove a dataflow that has hydrated or was dropped, and release those that wait for its
        output."""
        dry = self._dry.pop(id, None)
        if dry is None:
            return
        self._taken.discard(id)
        self._scheduled.pop(id, None)
        self._queue.pop(id, None)
        if isinstance(dry.export, ViewExport) and self._made.get(dry.export.shard) == id:
            del self._made[dry.export.shard]
            for blocked in self._blocked.pop(dry.export.shard, ()):
                # It may have been dropped while it waited.
                if blocked in self._scheduled:
                    self._enqueue(blocked)

    def _next(self) -> list[Command]:
        """Fill the free slots."""
        passed: list[Command] = []
        while self._queue and len(self._taken) < self._limit:
            id, _ = self._queue.popitem(last=False)
            self._taken.add(id)
            passed.append(self._scheduled.pop(id))
        HYDRATION_QUEUE.crossed(bool(self._queue))
        return passed


log = logging.getLogger("penstock.controller")

LOT_MAX: Final = 64
"""Number of responses that are taken together."""
LOTS_MAX: Final = 4
"""Number of such lots on their way from the connection to the controller."""


class CommandGate(Protocol):
    """Withholds commands of a connection until its responses release them."""

    @property
    def waiting(self) -> int:
        """Return the number of withheld commands."""
        ...

    def command(self, command: Any, /) -> Iterable[Any]:
        """Return the commands to send now."""
        ...

    def responded(self, response: Any, /) -> Sequence[Any]:
        """Return the commands that a response releases."""
        ...


class OpenGate:
    """A gate that withholds nothing."""

    waiting = 0

    def command(self, command: Any) -> Iterable[Any]:
        """See `CommandGate`."""
        return (command,)

    def responded(self, response: Any) -> Sequence[Any]:
        """See `CommandGate`."""
        return ()


class ReplicaClient(Protocol):
    """One connection to a half of a cluster; responses are merged over its workers."""

    async def send(self, command: Any, /) -> None:
        """Send a command."""
        ...

    def offer(self, commands: Sequence[Any], /) -> int:
        """Send as many of the first commands as possible without waiting; return their number.
        Raises as `send`, for the first."""
        ...

    def answer(self, peek: Peek, /) -> PeekRows | None:
        """Return the answer to a peek if it is there already, so that the peek need not be sent;
        else None."""
        ...

    async def receive(self) -> Any:
        """Return the next response. Raises `ConnectionBroken`."""
        ...

    def at_hand(self, count_max: int, /) -> list[Any]:
        """Return the responses that have arrived after `receive`'s last one. An error waits for
        `receive`."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[ReplicaClient]]


class _Connected(msgspec.Struct, frozen=True, gc=False):
    client: ReplicaClient


class _Sent(msgspec.Struct, frozen=True, gc=False):
    incarnation: int


class _Received(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
    responses: tuple[Any, ...]


class ConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """Connection number `incarnation` failed."""

    incarnation: int
    error: Exception


class _Retry(msgspec.Struct, frozen=True, gc=False):
    """The backoff is over."""


_Message: TypeAlias = (
    PushCommand | ReplayHistory | _Connected | _Sent | _Received | ConnectionLost | _Retry
)


class ReplicaTask(Actor[_Message]):
    """Drives the replica `name`. Sends `controller` `ReplicaConnected` (answered by
    `ReplayHistory`), `ReplicaResponse` and `ReplicaLost`."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        controller: ActorAddress[Any],
        settings: Settings,
        first: int = 0,
        half: Half = "compute",
    ) -> None:
        """Number connections beyond `first`; no two tasks of a name and half share numbers."""
        self._name = name
        self._connect_once = connect
        self._controller = controller
        self._settings = settings
        self._client: ReplicaClient | None = None
        self._replayed = False
        """True when the present connection was given the history."""
        self.incarnation = first
        """Number of the present connection, or of the one being made."""
        self._half: Half = half
        self._gate = self._new_gate()
        """Gate of the present connection."""
        self._outbox: deque[Any] = deque()
        self._sending: RunningEffect | None = None
        self._receiving: RunningEffect | None = None
        self._room = asyncio.Semaphore(LOTS_MAX)
        """Room for lots of the present connection."""
        self._attempts = 0
        self._why = ""

    async def on_start(self) -> None:
        self._connect()

    async def on_stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(PenstockError):
                await client.close()

    async def receive(self, message: _Message) -> None:
        match message:
            case PushCommand(command):
                # A command that comes before the replay is in the history: `ReplayHistory` brings
                # it.
                if self._replayed and not await self._answers(command):
                    self._outbox.extend(self._gate.command(command))
                    self._send()
            case _Connected(client):
                self._client = client
                await self._tell(ReplicaConnected(self._name, self.incarnation, self._half))
            case ReplayHistory(incarnation, commands):
                if incarnation == self.incarnation and self._client is not None:
                    self._start(self._client, commands)
            case _Sent(incarnation):
                if incarnation == self.incarnation:
                    self._sending = None
                    self._send()
            case _Received(incarnation, responses):
                if incarnation == self.incarnation:
                    for response in responses:
                        await self._pass_on(response)
                    self._room.release()
            case ConnectionLost(incarnation, error):
                if incarnation == self.incarnation:
                    await self._lost(error)
            case _Retry():
                self._connect()
            case _:
                assert_never(message)

    def _connect(self) -> None:
        self.incarnation += 1
        incarnation = self.incarnation
        self.ctx.effect(
            self._connect_once,
            done=_Connected,
            failed=lambda error: ConnectionLost(incarnation, error),
        )

    def _new_gate(self) -> CommandGate:
        if self._half == "storage":
            return OpenGate()
        return HydrationTracker(self._settings.hydrations_max)

    def _start(self, client: ReplicaClient, commands: tuple[Any, ...]) -> None:
        nonce = f"{self.ctx.random.getrandbits(128):032x}"
        self._replayed = True
        self._gate = self._new_gate()
        self._outbox = deque([Hello(nonce)])
        for command in commands:
            self._outbox.extend(self._gate.command(command))
        self._send()
        self._receive(client)

    def _send(self) -> None:
        """Send what the connection takes without waiting, and of the rest one command in an
        effect."""
        client, incarnation = self._client, self.incarnation
        if client is None or self._sending is not None:
            return
        try:
            for _ in range(client.offer(self._outbox) if self._outbox else 0):
                self._outbox.popleft()
        except Exception as error:  # noqa: BLE001 (of any kind: the connection is given up)
            self.ctx.self.reply(ConnectionLost(incarnation, error))
            return
        if not self._outbox:
            return
        command = self._outbox.popleft()
        self._sending = self.ctx.effect(
            lambda: client.send(command),
            done=lambda _: _Sent(incarnation),
            failed=lambda error: ConnectionLost(incarnation, error),
        )

    def _receive(self, client: ReplicaClient) -> None:
        incarnation = self.incarnation
        room = self._room = asyncio.Semaphore(LOTS_MAX)

        async def receive() -> None:
            while True:
                # Backpressure: the cluster is held back while the controller has not taken earlier
                # lots.
                await room.acquire()
                first = await client.receive()
                lot = (first, *client.at_hand(LOT_MAX - 1))
                self.ctx.self.reply(_Received(incarnation, lot))

        self._receiving = self.ctx.effect(
            receive, done=lambda _: None, failed=lambda error: ConnectionLost(incarnation, error)
        )

    async def _answers(self, command: Any) -> bool:
        """Answer a peek whose answer is there already. Return whether that was possible."""
        if not isinstance(command, Peek) or self._client is None:
            return False
        rows = self._client.answer(command)
        if rows is None:
            return False
        answer = PeekResponse(command.uuid, rows)
        await self._tell(ReplicaResponse(self._name, self.incarnation, answer))
        return True

    async def _pass_on(self, response: Any) -> None:
        # Only a response resets the backoff: a replica that accepts and then fails keeps its
        # delays.
        self._attempts = 0
        let_go = self._gate.responded(response)
        if let_go:
            self._outbox.extend(let_go)
            self._send()
        await self._tell(ReplicaResponse(self._name, self.incarnation, response, self._half))

    async def _tell(self, message: ReplicaConnected | ReplicaResponse | ReplicaLost) -> None:
        """Send a message to the controller; stop when the controller has stopped."""
        try:
            await self._controller.send(message)
        except (ResourceClosed, ConnectionBroken):
            self.ctx.stop()

    async def _lost(self, error: Exception) -> None:
        self._why = f"{type(error).__name__}: {error}"
        named = error if isinstance(error, PenstockError) else ConnectionBroken(self._why)
        if not isinstance(error, PenstockError):
            log.error("%s: its connection failed by a fault of ours", self._name, exc_info=error)
        for effect in (self._sending, self._receiving):
            if effect is not None:
                effect.cancel()
        self._sending = self._receiving = None
        client, self._client = self._client, None
        self._replayed = False
        self._outbox.clear()
        if client is not None:
            self.ctx.effect(client.close, done=lambda _: None, failed=lambda _: None)
        await self._tell(ReplicaLost(self._name, self.incarnation, named, self._half))
        # Messages of the lost connection that are still on their way no longer match.
        self.incarnation += 1
        self._attempts += 1
        delay = self._settings.retry_delay_ms(self._attempts)
        log.info("replica %s is gone (%s); connecting again in %d ms", self._name, self._why, delay)
        self.ctx.after(delay, _Retry())

    def describe(self) -> str:
        if self._client is None:
            why = self._why or "none"
            return f"{self._name}: connecting, attempt {self._attempts + 1}; last error: {why}"
        return (
            f"{self._name}, {self._half}: connected, {len(self._outbox)} commands to send, "
            f"{self._gate.waiting} held back"
        )
