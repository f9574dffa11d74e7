"""The link to a replica: keeps it informed of everything that it should run.

The link connects with a fresh nonce (retrying forever, with backoff), gets the history from the
controller, replays Hello and the history, sends later commands, and returns responses with the
replica's name and the number of their connection, so that late ones can be recognised. A connection
that fails in any way is abandoned completely.

A link serves one half. For compute, a `HydrationTracker` withholds Schedules beyond the number of
dataflows that may hydrate at a time; the history contains them all. For storage nothing is
withheld.

A link is a part of the controller and runs in its task, so it never waits. Whatever takes time
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
"""Time (ms) after which a dataflow that is still hydrating lets another one start; at most
`hydrations_max` dataflows continue that way."""

# Limits how many dataflows of one connection hydrate at a time, by withholding Schedules. Pure.
#
# A dataflow *hydrates* from its Schedule until its output is beyond its `as_of`; that is when it
# reads most. At most `limit` may do so at a time; the Schedules of the others wait here, first in,
# first out. A connection starts without any knowledge: dataflows that a replica has kept report
# their frontiers immediately, and so make room for others.
#
# A dataflow that reads the output of one that has not hydrated waits for that one, without a slot.
# A slot is freed when its dataflow has hydrated, is dropped, or reports that it is stalled or
# frozen. A dataflow that hydrates for long gives its slot to a waiting one (`slots_due`) and
# continues without: a view that never finishes must not keep others from their first contents. At
# most `limit` dataflows do that, which bounds the memory that all take.
#
# Hydration is a view's largest job, and the result is the same on all replicas. So one replica at a
# time has the *turn* of a view (`HydrationTurns`), along with the slot, and the others find its
# contents in the store when they are scheduled. The turn ends with the slot or with the connection.
# A replica whose connection was lost may continue all the same; then two replicas compute, one
# appends, and the other notices.
#
# Invariants: everything but Schedules passes immediately and in order; a Schedule passes once,
# unless its dataflow is dropped first; a view's turn has one holder.


_STUCK: Final = ("stalled", "frozen")


class HydrationTurns:
    """Tracks which replica may compute a view's first contents, for all replicas of an instance.
    Calls `released` when a turn has ended."""

    def __init__(self, released: Callable[[], None] = lambda: None) -> None:
        self._released = released
        self._holders: dict[ShardId, HydrationTracker] = {}
        """The holder of each view's turn, by the shard that the view writes."""

    def take(self, shard: ShardId, by: HydrationTracker) -> bool:
        """Take the turn of the view that writes this shard. Return False if another tracker has
        it."""
        return self._holders.setdefault(shard, by) is by

    def release(self, shards: Iterable[ShardId], by: HydrationTracker) -> None:
        """Release those of the turns that this tracker holds."""
        held = [shard for shard in shards if self._holders.get(shard) is by]
        for shard in held:
            del self._holders[shard]
        if held:
            self._released()


class HydrationTracker:
    """Tracks the dataflows of one connection that have not hydrated; see above. `turns` are shared
    with the connections of other replicas."""

    def __init__(self, limit: int, turns: HydrationTurns | None = None) -> None:
        self._limit = limit
        self._turns = turns or HydrationTurns()
        self._dry: dict[ObjectId, DataflowDescription] = {}
        """Dataflows that have not hydrated, by id."""
        self._made: dict[ShardId, ObjectId] = {}
        """The same dataflows, by the shard that they write."""
        self._scheduled: dict[ObjectId, Any] = {}
        """Withheld Schedules, in envelopes if they have a trace context."""
        self._queue: OrderedDict[ObjectId, None] = OrderedDict()
        """Withheld dataflows that wait only for a slot."""
        self._blocked: dict[ShardId, list[ObjectId]] = {}
        """The other withheld dataflows, by the shard that they wait to read."""
        self._taken: dict[ObjectId, bool] = {}
        """Dataflows with a slot; True if since before the last `slots_due`."""
        self._overdue: set[ObjectId] = set()
        """Dataflows that are still hydrating after giving up their slots."""

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
            # Subscribes and copies bypass the limit, since a client is waiting for them.
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
            # A stalled dataflow frees its slot: the others may use stores that do answer.
            case StatusResponse(id=id, state=state) if state in _STUCK and (
                id in self._taken or id in self._overdue
            ):
                self._free(id)
                self._turns.release(_written(self._dry[id]), self)
            case _:
                return []
        return self._next()

    def resume(self) -> list[Any]:
        """Return the Schedules to send, now that turns were released."""
        return self._next()

    def slots_due(self) -> list[Any]:
        """Return the Schedules to send, now that another `HYDRATION_SLOT_MS` has passed."""
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
        """Release all turns, since the connection has ended."""
        self._queue.clear()
        self._turns.release(
            [shard for each in self._dry.values() for shard in _written(each)], self
        )

    def _enqueue(self, id: ObjectId) -> None:
        """Let a dataflow wait for an input that has not hydrated, or otherwise for a slot."""
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
                # The waiting dataflow may have been dropped in the meantime.
                if blocked in self._scheduled:
                    self._enqueue(blocked)

    def _next(self) -> list[Any]:
        """Fill the free slots."""
        passed: list[Any] = []
        elsewhere: list[ObjectId] = []
        while self._queue and len(self._taken) < self._limit:
            id, _ = self._queue.popitem(last=False)
            # Skip dataflows whose turn another replica has; there are at most as many as its slots.
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
    """Return the shard whose contents the dataflow computes, or None."""
    export = dataflow.export
    return (export.shard,) if isinstance(export, ViewExport) else ()


log = logging.getLogger("penstock.controller")

RESPONSES_PER_TURN_MAX: Final = 64
"""Maximum number of responses that one turn of the controller handles."""
TURNS_IN_FLIGHT_MAX: Final = 4
"""Maximum number of such batches on their way from the connection to the controller."""


class ReplicaClient(Protocol):
    """One connection to a half of a cluster. Its responses are merged over the workers."""

    async def send(self, command: Any, /) -> None:
        """Send a command, waiting for room."""
        ...

    def try_send(self, commands: Sequence[Any], /) -> int:
        """Send as many of the first commands as possible without waiting, and return their number.
        Raises as `send` does, for the first command."""
        ...

    async def receive(self) -> Any:
        """Return the next response. Raises `ConnectionBroken`."""
        ...

    def receive_nowait(self, count_max: int, /) -> list[Any]:
        """Return responses that have already arrived, without waiting. An error is left for
        `receive`."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[ReplicaClient]]


class ReplicaConnected(msgspec.Struct, frozen=True, gc=False):
    """Connection number `incarnation` was made; the controller answers with
    `ReplicaLink.replay`."""

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
    """The connection was lost; the link reconnects."""

    replica: str
    incarnation: int
    error: PenstockError
    half: Half = "compute"


LinkNews: TypeAlias = ReplicaConnected | ReplicaResponse | ReplicaLost
"""Events of a link for the controller."""


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
    """Another `HYDRATION_SLOT_MS` has passed."""

    incarnation: int


class LinkTurn(msgspec.Struct, frozen=True, gc=False):
    """The controller's message to itself with the result of a link's effect, for
    `ReplicaLink.turn`."""

    link: ReplicaLink
    event: _Connected | _Sent | _Received | ConnectionLost | _Retry | _SlotsDue


class ReplicaLink:
    """Keeps the replica `name` connected. `turn` returns `ReplicaConnected` (which `replay`
    answers), `ReplicaResponse` and `ReplicaLost`."""

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
        """Set up the link. Connections are numbered from `first + 1`; no two links of the same name
        and half share numbers. `owner`: see `Hello`. `turns` are those of all links to compute
        halves."""
        self._ctx = ctx
        self._name = name
        self._connect_once = connect
        self._settings = settings
        self._client: ReplicaClient | None = None
        """The current connection; None while there is none."""
        self._dialled: list[ReplicaClient] = []
        """Connections made but not yet reported to `turn`, which may never be called if the actor
        has ended."""
        self._replayed = False
        """True once the current connection was given the history."""
        self.incarnation = first
        """Number of the current connection, or of the one being made."""
        self._half: Half = half
        self._owner = owner
        self._turns = turns
        self._gate = self._new_gate()
        """Gate of the current connection."""
        self._outbox: deque[Any] = deque()
        """Commands waiting for room, in order."""
        self._sending: RunningEffect | None = None
        """The effect that sends one command; None if none is running."""
        self._receiving: RunningEffect | None = None
        """The effect that receives responses; None while there is no connection."""
        self._room = asyncio.Semaphore(TURNS_IN_FLIGHT_MAX)
        """Room for batches of responses of the current connection."""
        self._attempts = 0
        """Failed attempts to connect since the last response; sets the backoff."""
        self._why = ""
        """Text of the last error, for display."""
        self._closed = False
        """True once `aclose` was called."""

    def connect(self) -> None:
        """Start the next attempt to connect."""
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
        """Send a command in the current trace context."""
        # A command that arrives before the replay is in the history, which will contain it.
        if not self._replayed:
            return
        if isinstance(command, Peek | ScheduleDataflow):
            command = with_context(command, TRACEPARENT.get())
        self._outbox.extend(self._gate.command(command))
        self._send()

    def replay(self, incarnation: int, commands: Iterable[Any]) -> None:
        """Send connection number `incarnation` the history, including all commands pushed
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
        """Handle the result of an effect. Return the events for the controller."""
        match turn.event:
            case _Connected(incarnation, client):
                self._dialled.remove(client)
                # Another attempt has started or will: two connections would mix up their messages.
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
        """Close the link permanently."""
        self._closed = True
        # Results that are still on their way no longer match this number.
        self.incarnation += 1
        client = self._forget()
        for each in (*self._dialled, client):
            if each is not None:
                with contextlib.suppress(PenstockError):
                    await each.close()

    def _forget(self) -> ReplicaClient | None:
        """Forget the current connection and return its client."""
        for effect in (self._sending, self._receiving):
            if effect is not None:
                effect.cancel()
        self._sending = self._receiving = None
        client, self._client = self._client, None
        self._replayed = False
        self._outbox.clear()
        # Do this last: it makes other links send, and this one must already be quiet.
        self._gate.close()
        return client

    def _leave(self, client: ReplicaClient) -> None:
        self._ctx.effect(client.close, done=lambda _: None, failed=lambda _: None)

    def _failed(self, incarnation: int, error: Exception) -> LinkTurn:
        return LinkTurn(self, ConnectionLost(incarnation, error))

    def _new_gate(self) -> HydrationTracker:
        return HydrationTracker(self._settings.hydrations_max, self._turns)

    def resume(self) -> None:
        """Send what an event on another link has released."""
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
        """Send what the connection accepts without waiting, then one of the remaining commands in
        an effect."""
        client, incarnation = self._client, self.incarnation
        if client is None or self._sending is not None:
            return
        try:
            for _ in range(client.try_send(self._outbox) if self._outbox else 0):
                self._outbox.popleft()
        except Exception as error:  # noqa: BLE001 (of any kind: the connection is given up)
            # Not handled here: the caller is in the middle of its own work.
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
                # Backpressure: the cluster has to wait until the controller has taken earlier
                # batches.
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
            log.error(
                "%s: its connection failed with an internal error", self._name, exc_info=error
            )
        client = self._forget()
        if client is not None:
            self._leave(client)
        lost = ReplicaLost(self._name, self.incarnation, named, self._half)
        # Messages of the lost connection that are still on their way no longer match this number.
        self.incarnation += 1
        self._attempts += 1
        delay = self._settings.retry_delay_ms(self._attempts)
        log.info("lost replica %s (%s); reconnecting in %d ms", self._name, self._why, delay)
        self._ctx.after(delay, LinkTurn(self, _Retry()))
        return lost

    def hydrations(self) -> dict[str, int]:
        """Return how many dataflows hydrate, and how many wait for their turn."""
        return {"hydrating": self._gate.hydrating, "waiting": self._gate.waiting}

    def describe(self) -> str:
        """Return the state of the connection as readable text."""
        if self._client is None:
            why = self._why or "none"
            return f"{self._name}: connecting, attempt {self._attempts + 1}; last error: {why}"
        return (
            f"{self._name}, {self._half}: connected, {len(self._outbox)} commands to send, "
            f"{self._gate.waiting} held back"
        )
