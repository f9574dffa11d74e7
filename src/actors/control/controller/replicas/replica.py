"""The link to a replica: keeps it informed of everything that it should run.

It connects with a fresh nonce (forever, with backoff), is given the history by the controller,
replays Hello and the history, sends later commands, and returns responses with the replica's name
and the number of their connection, so that late ones can be told apart. A connection that fails in
any way is given up whole.

It serves one half. A `HydrationTracker` withholds compute's Schedules beyond the number of
dataflows that may hydrate at a time; the history has them all. Of the storage half it withholds
nothing.

A link is a part of the controller and runs in its task: it never waits. What takes time
(connecting, a command without room, the next response) runs in effects, whose results come back as
`LinkTurn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, assert_never

import msgspec

from actors.model.protocol.compute import (
    AllowCompaction,
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    Frontiers,
    Hello,
    Peek,
    Response,
    ScheduleDataflow,
    StatusResponse,
    SubscribeExport,
    ViewExport,
)
from actors.model.protocol.internal import Half
from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.kernel import ActorContext, RunningEffect
from actors.runtime.progress import ObjectId, ShardId, is_empty
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TRACEPARENT, split_context, with_context
from actors.runtime.threshold_probes import HYDRATION_QUEUE

HYDRATION_SLOT_MS: Final = 10_000
"""Time after which a dataflow that still reads its first contents lets one more begin; as many as
`hydrations_max` go on so."""

# Limits how many dataflows of one connection hydrate at a time, by withholding Schedules. Pure
# A dataflow *hydrates* from its Schedule until its output is strictly beyond its `as_of`; that is
# when it reads most. At most `limit` may do so at once; the Schedules of the others wait here,
# first in, first out. A connection begins with nothing known: dataflows that a replica has kept
# report their frontiers at once, and make room for the next.
#
# A dataflow that reads the output of one that has not hydrated waits for that one, without a slot.
# A slot is freed when the dataflow has hydrated, is dropped, or reports that it is stalled or
# frozen. One that hydrates for long frees its slot for a dataflow that waits (`slots_due`), and
# goes on without one: a view that never ends must not keep others from their first contents. At
# most `limit` do so, which bounds the memory that all take.
#
# Hydration is a view's largest job, and its contents are the same for all replicas: so one replica
# at a time has the *turn* of a view (`HydrationTurns`), with the slot, and the others find its
# contents in the store when they are scheduled. The turn ends with the slot, or with the
# connection. A replica whose connection was lost may go on all the same; then two compute, one
# appends, and the other finds out.
#
# Invariants: everything but Schedules passes at once and in order; a Schedule passes once, unless
# its dataflow is dropped first; a view's turn has one holder.


_STUCK: Final = ("stalled", "frozen")


class HydrationTurns:
    """Which replica may compute a view's first contents, for all replicas of an instance.
    `released` is called when a turn has ended."""

    def __init__(self, released: Callable[[], None] = lambda: None) -> None:
        self._released = released
        self._holders: dict[ShardId, HydrationTracker] = {}

    def take(self, shard: ShardId, by: HydrationTracker) -> bool:
        """Take the turn of the view that writes this shard, unless another one has it."""
        return self._holders.setdefault(shard, by) is by

    def release(self, shards: Iterable[ShardId], by: HydrationTracker) -> None:
        """Give back those turns that are this one's."""
        held = [shard for shard in shards if self._holders.get(shard) is by]
        for shard in held:
            del self._holders[shard]
        if held:
            self._released()


class HydrationTracker:
    """The dataflows of one connection that have not hydrated; see above. `turns` are shared with
    the connections of other replicas."""

    def __init__(self, limit: int, turns: HydrationTurns | None = None) -> None:
        self._limit = limit
        self._turns = turns or HydrationTurns()
        self._dry: dict[ObjectId, DataflowDescription] = {}
        self._made: dict[ShardId, ObjectId] = {}
        """Dataflows that have not hydrated, by the shard that they write."""
        self._scheduled: dict[ObjectId, Any] = {}
        """Withheld Schedules, in envelopes if they have a trace context."""
        self._queue: OrderedDict[ObjectId, None] = OrderedDict()
        """Withheld dataflows that wait for a slot only."""
        self._blocked: dict[ShardId, list[ObjectId]] = {}
        """The other withheld dataflows, by the shard that they wait to read."""
        self._taken: dict[ObjectId, bool] = {}
        """Dataflows with a slot; True: since before the last `slots_due`."""
        self._overdue: set[ObjectId] = set()
        """Dataflows that hydrate on after they gave up their slots."""

    @property
    def waiting(self) -> int:
        """Return the number of withheld Schedules."""
        return len(self._scheduled)

    @property
    def hydrating(self) -> int:
        """Return the number of slots in use."""
        return len(self._taken)

    def command(self, command: Any) -> list[Any]:
        """Return the commands to send now: this one, unless it is withheld, and Schedules that it
        releases."""
        match split_context(command)[0]:
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

    def responded(self, response: Response) -> list[Any]:
        """Return the Schedules to send, now that the replica has responded."""
        match response:
            case Frontiers(id=id, output=output) if id in self._dry and output is not None:
                if output <= self._dry[id].as_of:
                    return []
                self._forget(id)
            # The others need not wait for a store that does not answer this one.
            case StatusResponse(id=id, state=state) if state in _STUCK and (
                id in self._taken or id in self._overdue
            ):
                self._free(id)
                self._turns.release(_written(self._dry[id]), self)
            case _:
                return []
        return self._next()

    def resume(self) -> list[Any]:
        """Return the Schedules to send, now that turns were given back."""
        return self._next()

    def slots_due(self) -> list[Any]:
        """Return the Schedules to send, now that one more `HYDRATION_SLOT_MS` has passed."""
        for id, is_old in self._taken.copy().items():
            if is_old and self._queue and len(self._overdue) < self._limit:
                self._free(id)
                self._overdue.add(id)
            else:
                self._taken[id] = True
        return self._next()

    def _free(self, id: ObjectId) -> None:
        self._taken.pop(id, None)
        self._overdue.discard(id)

    def close(self) -> None:
        """Give back all turns: the connection has ended."""
        self._queue.clear()
        self._turns.release(
            [shard for each in self._dry.values() for shard in _written(each)], self
        )

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
        self._free(id)
        self._scheduled.pop(id, None)
        self._queue.pop(id, None)
        self._turns.release(_written(dry), self)
        if isinstance(dry.export, ViewExport) and self._made.get(dry.export.shard) == id:
            del self._made[dry.export.shard]
            for blocked in self._blocked.pop(dry.export.shard, ()):
                # It may have been dropped while it waited.
                if blocked in self._scheduled:
                    self._enqueue(blocked)

    def _next(self) -> list[Any]:
        """Fill the free slots."""
        passed: list[Any] = []
        elsewhere: list[ObjectId] = []
        while self._queue and len(self._taken) < self._limit:
            id, _ = self._queue.popitem(last=False)
            # As many are passed over as the other replicas have slots.
            if not all(self._turns.take(shard, self) for shard in _written(self._dry[id])):
                elsewhere.append(id)
                continue
            self._taken[id] = False
            passed.append(self._scheduled.pop(id))
        for id in reversed(elsewhere):
            self._queue[id] = None
            self._queue.move_to_end(id, last=False)
        HYDRATION_QUEUE.crossed(bool(self._queue))
        return passed


def _written(dataflow: DataflowDescription) -> tuple[ShardId, ...]:
    """Return the shard whose contents the dataflow computes, if it does."""
    export = dataflow.export
    return (export.shard,) if isinstance(export, ViewExport) else ()


log = logging.getLogger("penstock.controller")

RESPONSES_PER_TURN_MAX: Final = 64
"""Number of responses that are taken together."""
TURNS_IN_FLIGHT_MAX: Final = 4
"""Number of such lots on their way from the connection to the controller."""


class ReplicaClient(Protocol):
    """One connection to a half of a cluster; responses are merged over its workers."""

    async def send(self, command: Any, /) -> None:
        """Send a command."""
        ...

    def try_send(self, commands: Sequence[Any], /) -> int:
        """Send as many of the first commands as possible without waiting; return their number.
        Raises as `send`, for the first."""
        ...

    async def receive(self) -> Any:
        """Return the next response. Raises `ConnectionBroken`."""
        ...

    def receive_nowait(self, count_max: int, /) -> list[Any]:
        """Return the responses that have arrived after `receive`'s last one. An error waits for
        `receive`."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[ReplicaClient]]


class ReplicaConnected(msgspec.Struct, frozen=True, gc=False):
    """Connection number `incarnation` is there; answered by `ReplicaLink.replay`."""

    replica: str
    incarnation: int
    half: Half = "compute"


class ReplicaResponse(msgspec.Struct, frozen=True, gc=False):
    """A response on that connection."""

    replica: str
    incarnation: int
    response: Any
    half: Half = "compute"


class ReplicaLost(msgspec.Struct, frozen=True, gc=False):
    """The connection is lost; the link reconnects."""

    replica: str
    incarnation: int
    error: PenstockError
    half: Half = "compute"


LinkNews: TypeAlias = ReplicaConnected | ReplicaResponse | ReplicaLost
"""News of a link for the controller."""


class _Connected(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
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


class _SlotsDue(msgspec.Struct, frozen=True, gc=False):
    """`HYDRATION_SLOT_MS` have passed."""

    incarnation: int


class LinkTurn(msgspec.Struct, frozen=True, gc=False):
    """The controller's own message: the result of an effect of a link, for `ReplicaLink.turn`."""

    link: ReplicaLink
    event: _Connected | _Sent | _Received | ConnectionLost | _Retry | _SlotsDue


class ReplicaLink:
    """Drives the replica `name`. `turn` returns `ReplicaConnected`, which `replay` answers,
    `ReplicaResponse` and `ReplicaLost`."""

    def __init__(
        self,
        ctx: ActorContext[Any],
        name: str,
        connect: Connect,
        settings: Settings,
        first: int = 0,
        half: Half = "compute",
        owner: str = "",
        turns: HydrationTurns | None = None,
    ) -> None:
        """Number connections beyond `first`; no two links of a name and half share numbers.
        `owner`: see `Hello`. `turns`: those of all links to compute halves."""
        self._ctx = ctx
        self._name = name
        self._connect_once = connect
        self._settings = settings
        self._client: ReplicaClient | None = None
        self._dialled: list[ReplicaClient] = []
        """Connected, and not yet told to `turn`, which may never be: the actor may have ended."""
        self._replayed = False
        """True when the present connection was given the history."""
        self.incarnation = first
        """Number of the present connection, or of the one being made."""
        self._half: Half = half
        self._owner = owner
        self._turns = turns
        self._gate = self._new_gate()
        """Gate of the present connection."""
        self._outbox: deque[Any] = deque()
        self._sending: RunningEffect | None = None
        self._receiving: RunningEffect | None = None
        self._room = asyncio.Semaphore(TURNS_IN_FLIGHT_MAX)
        """Room for lots of the present connection."""
        self._attempts = 0
        self._why = ""
        self._closed = False

    def connect(self) -> None:
        """Begin the next attempt to connect."""
        self.incarnation += 1
        incarnation = self.incarnation

        async def dial() -> ReplicaClient:
            client = await self._connect_once()
            self._dialled.append(client)
            return client

        self._ctx.effect(
            dial,
            done=lambda client: LinkTurn(self, _Connected(incarnation, client)),
            failed=lambda error: self._failed(incarnation, error),
        )

    def push(self, command: Any) -> None:
        """Send one more command, in the current trace context."""
        # A command that comes before the replay is in the history, which brings it.
        if not self._replayed:
            return
        if isinstance(command, Peek | ScheduleDataflow):
            command = with_context(command, TRACEPARENT.get())
        self._outbox.extend(self._gate.command(command))
        self._send()

    def replay(self, incarnation: int, commands: Iterable[Any]) -> None:
        """Give connection number `incarnation` the history, with all commands that were pushed
        before."""
        if incarnation != self.incarnation or self._client is None:
            return
        nonce = f"{self._ctx.random.getrandbits(128):032x}"
        self._replayed = True
        self._gate = self._new_gate()
        self._outbox = deque([Hello(nonce, self._owner)])
        for command in commands:
            self._outbox.extend(self._gate.command(command))
        self._send()
        self._time_slots()
        self._receive(self._client)

    def turn(self, turn: LinkTurn) -> Sequence[LinkNews]:
        """Handle the result of an effect; return the news for the controller."""
        match turn.event:
            case _Connected(incarnation, client):
                self._dialled.remove(client)
                # Another attempt has begun, or will: two connections would mix what they sent.
                if self._closed or incarnation != self.incarnation:
                    self._leave(client)
                    return ()
                self._client = client
                return (ReplicaConnected(self._name, self.incarnation, self._half),)
            case _Sent(incarnation):
                if incarnation == self.incarnation:
                    self._sending = None
                    self._send()
            case _Received(incarnation, responses):
                if incarnation == self.incarnation:
                    self._room.release()
                    return [self._note_response(response) for response in responses]
            case ConnectionLost(incarnation, error):
                if incarnation == self.incarnation and not self._closed:
                    return (self._lost(error),)
            case _Retry():
                if not self._closed:
                    self.connect()
            case _SlotsDue(incarnation):
                if incarnation == self.incarnation and not self._closed:
                    self._time_slots()
                    self._release(self._gate.slots_due())
            case _:
                assert_never(turn.event)
        return ()

    async def aclose(self) -> None:
        """End the connection for good."""
        self._closed = True
        # What is still on its way no longer matches.
        self.incarnation += 1
        client = self._forget()
        for each in (*self._dialled, client):
            if each is not None:
                with contextlib.suppress(PenstockError):
                    await each.close()

    def _forget(self) -> ReplicaClient | None:
        """Forget the present connection, and return its client."""
        for effect in (self._sending, self._receiving):
            if effect is not None:
                effect.cancel()
        self._sending = self._receiving = None
        client, self._client = self._client, None
        self._replayed = False
        self._outbox.clear()
        # Last: other links go on, and this one is quiet by now.
        self._gate.close()
        return client

    def _leave(self, client: ReplicaClient) -> None:
        self._ctx.effect(client.close, done=lambda _: None, failed=lambda _: None)

    def _failed(self, incarnation: int, error: Exception) -> LinkTurn:
        return LinkTurn(self, ConnectionLost(incarnation, error))

    def _new_gate(self) -> HydrationTracker:
        return HydrationTracker(self._settings.hydrations_max, self._turns)

    def resume(self) -> None:
        """Send what an event of another link has released."""
        self._release(self._gate.resume())

    def _time_slots(self) -> None:
        if self._half == "compute":
            due = LinkTurn(self, _SlotsDue(self.incarnation))
            self._ctx.after(HYDRATION_SLOT_MS, due)

    def _release(self, commands: Sequence[Any]) -> None:
        """Send what the gate has released."""
        if commands and self._replayed:
            self._outbox.extend(commands)
            self._send()

    def _send(self) -> None:
        """Send what the connection takes without waiting, and of the rest one command in an
        effect."""
        client, incarnation = self._client, self.incarnation
        if client is None or self._sending is not None:
            return
        try:
            for _ in range(client.try_send(self._outbox) if self._outbox else 0):
                self._outbox.popleft()
        except Exception as error:  # noqa: BLE001 (of any kind: the connection is given up)
            # Not handled here: the caller is in the midst of its own work.
            self._ctx.self.reply(self._failed(incarnation, error))
            return
        if not self._outbox:
            return
        command = self._outbox.popleft()
        self._sending = self._ctx.effect(
            lambda: client.send(command),
            done=lambda _: LinkTurn(self, _Sent(incarnation)),
            failed=lambda error: self._failed(incarnation, error),
        )

    def _receive(self, client: ReplicaClient) -> None:
        incarnation = self.incarnation
        room = self._room = asyncio.Semaphore(TURNS_IN_FLIGHT_MAX)

        async def receive() -> None:
            while True:
                # Backpressure: the cluster is held back while the controller has not taken earlier
                # lots.
                await room.acquire()
                first = await client.receive()
                responses = (first, *client.receive_nowait(RESPONSES_PER_TURN_MAX - 1))
                self._ctx.self.reply(LinkTurn(self, _Received(incarnation, responses)))

        self._receiving = self._ctx.effect(
            receive, done=lambda _: None, failed=lambda error: self._failed(incarnation, error)
        )

    def _note_response(self, response: Any) -> ReplicaResponse:
        # Only a response resets the backoff: a replica that accepts and then fails keeps its
        # delays.
        self._attempts = 0
        self._release(self._gate.responded(response))
        return ReplicaResponse(self._name, self.incarnation, response, self._half)

    def _lost(self, error: Exception) -> ReplicaLost:
        self._why = f"{type(error).__name__}: {error}"
        named = error if isinstance(error, PenstockError) else ConnectionBroken(self._why)
        if not isinstance(error, PenstockError):
            log.error("%s: its connection failed by a fault of ours", self._name, exc_info=error)
        client = self._forget()
        if client is not None:
            self._leave(client)
        lost = ReplicaLost(self._name, self.incarnation, named, self._half)
        # Messages of the lost connection that are still on their way no longer match.
        self.incarnation += 1
        self._attempts += 1
        delay = self._settings.retry_delay_ms(self._attempts)
        log.info("replica %s is gone (%s); connecting again in %d ms", self._name, self._why, delay)
        self._ctx.after(delay, LinkTurn(self, _Retry()))
        return lost

    def hydrations(self) -> dict[str, int]:
        """Return how many dataflows hydrate, and how many wait for their turn."""
        return {"hydrating": self._gate.hydrating, "waiting": self._gate.waiting}

    def describe(self) -> str:
        """Return the state of the connection, as text for people."""
        if self._client is None:
            why = self._why or "none"
            return f"{self._name}: connecting, attempt {self._attempts + 1}; last error: {why}"
        return (
            f"{self._name}, {self._half}: connected, {len(self._outbox)} commands to send, "
            f"{self._gate.waiting} held back"
        )
