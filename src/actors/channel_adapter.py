"""The channel adapter: connects short-lived client connections to one half of a lasting worker.

Theory of operation. Each worker has one adapter for each of its halves. The adapter tags the
client's commands with the nonce of its connection. The worker's responses carry a nonce too, which
decides what happens to them (`StashRules`, pure):

- The current nonce: forward the response and drop the whole stash, which can only be older.
- A nonce that was current before: drop the response and count it.
- Any other nonce may belong to a later connection: stash the response under its nonce. A new
  connection receives its stash first.

Each connection attaches to each adapter separately, so a worker that hears of a new client through
the common order may answer before its adapter knows the client. A client may also arrive
before its predecessor has left, or leave before it has arrived (`ClientTurns`, pure). The adapter
serves one client at a time, and answers `ConnectClient` when the client's turn has come: only then
may the client send commands.

The stash is bounded, and responses for a nonce not served yet are never evicted. When the stash is
full, the adapter *holds* further responses without acknowledging them, until the worker's window
(one for each nonce) is full. While no client is connected, the adapter drains the worker, so
frontiers advance and memory stays flat.

Flow: ``client → adapter → worker`` waits for room, also on the window of the adapter's half
(`kernel.flow_window`). The worker releases the window when a command is sequenced, so a flood on
one half keeps few commands ahead of the other's. ``worker → adapter → client`` uses room that the
worker's window reserved. The client acknowledges sent responses by serial (`ResponsesAcked`); the
adapter acknowledges to the worker all responses sent, stashed or dropped (`ResponsesForwarded`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from actors.model.protocol.compute import (
    Peek,
    ScheduleDataflow,
    SubscribeBatch,
    SubscribeResponse,
)
from actors.model.protocol.internal import (
    AdapterStatistics,
    AnyCommand,
    AnyResponse,
    Half,
    TaggedCommand,
    TaggedResponse,
    TaggedResponses,
)
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import Actor, ActorAddress, CoalescingOutbox, FlowWindow, ReplySlot
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import ADAPTER_RESPONSES, OUTBOX_MESSAGES, RESPONSES_SENT
from actors.runtime.progress import Nonce
from actors.runtime.spans import span_below
from actors.runtime.telemetry import ADAPTER_COMMAND, ADAPTER_RESPONSE, TRACEPARENT

SERVED_MAX: Final = 1024
"""Number of past nonces to remember. A worker's responses are ordered, so only the last few
matter."""


class ConnectClient(msgspec.Struct, frozen=True, gc=False):
    """A client connected; `client` gets `FromWorker`. Answered when the adapter serves the client,
    which may send commands from then on; fails with `ResourceClosed` if the client left before."""

    nonce: Nonce
    client: ActorAddress[Any]
    reply: ReplySlot[None]


class DisconnectClient(msgspec.Struct, frozen=True, gc=False):
    """The client with this nonce disconnected."""

    nonce: Nonce


class FromClient(msgspec.Struct, frozen=True, gc=False):
    """Client → adapter: one command, or several in a `CommandBatch`, to tag with the nonce."""

    nonce: Nonce
    command: AnyCommand


class ResponsesAcked(msgspec.Struct, frozen=True, gc=False):
    """Client → adapter: acknowledges responses that the client has passed on, by serial."""

    nonce: Nonce
    serials: tuple[int, ...]


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """Adapter → client: a response of worker `worker`, to acknowledge by its `serial`.

    A stashed response has serial 0: it was acknowledged when it was stashed.
    """

    worker: int
    nonce: Nonce
    response: AnyResponse
    serial: int = 0


class ManyFromWorker(msgspec.Struct, frozen=True, gc=False):
    """Adapter → client: several (serial, response) pairs of worker `worker`, in order."""

    worker: int
    nonce: Nonce
    responses: tuple[tuple[int, AnyResponse], ...]


class ResponsesForwarded(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: acknowledges responses that carried this nonce, by serial."""

    nonce: Nonce
    serials: tuple[int, ...]
    half: Half = "compute"


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: the client with this nonce disconnected."""

    nonce: Nonce
    half: Half = "compute"


class InspectAdapter(msgspec.Struct, frozen=True, gc=False):
    """Request for `AdapterStatistics`."""

    reply: ReplySlot[AdapterStatistics]


AdapterMessage: TypeAlias = (
    ConnectClient
    | DisconnectClient
    | FromClient
    | ResponsesAcked
    | TaggedResponse
    | TaggedResponses
    | InspectAdapter
)


class NonceVerdict(enum.Enum):
    """Decision about a response of the worker."""

    FORWARD = "forward"
    DROP = "drop"
    STASH = "stash"
    HOLD = "hold"


class StashRules:
    """Decides which responses to forward, to drop, or to stash for a later client. Pure.

    Invariants (`validate`): the stash contains no served nonce and at most `limit` responses; no
    response is held while the stash has room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stash: dict[Nonce, list[Any]] = {}
        """Responses for nonces not served yet, oldest nonce first. Emptied by `connect` up to the
        new nonce, and by any response of the current one."""
        self._size = 0
        """Number of responses in the stash."""
        self._served: OrderedDict[Nonce, None] = OrderedDict()
        """The last `SERVED_MAX` nonces that were current."""
        self.current: Nonce | None = None
        """Nonce of the latest client, also after it has disconnected; None before the first."""
        self.connected = False
        """True while the client of the current nonce is connected."""
        self.discarded = 0
        """Number of stashed responses that were dropped: their client never came."""

    @property
    def stashed(self) -> int:
        """Return the number of responses in the stash."""
        return self._size

    def connect(self, nonce: Nonce) -> list[Any]:
        """Make `nonce` current. Return the responses stashed for it, to be delivered first."""
        self.current = nonce
        self.connected = True
        self._served[nonce] = None
        self._served.move_to_end(nonce)
        while len(self._served) > SERVED_MAX:
            self._served.popitem(last=False)
        kept: list[Any] = []
        # Nonces stashed before this one are older: drop them. Later ones stay.
        while nonce in self._stash:
            oldest = next(iter(self._stash))
            self.discarded += len(kept)
            kept = self._stash.pop(oldest)
            self._size -= len(kept)
        return kept

    def disconnect(self, nonce: Nonce) -> bool:
        """Record that the client disconnected. Return False if it was not the current one."""
        if nonce != self.current or not self.connected:
            return False
        self.connected = False
        return True

    def judge(self, tagged: TaggedResponse) -> NonceVerdict:
        """Decide what to do with a response. If the verdict is `STASH`, it is in the stash now."""
        if tagged.nonce == self.current:
            self.clear()
            return NonceVerdict.FORWARD if self.connected else NonceVerdict.DROP
        if tagged.nonce in self._served:
            return NonceVerdict.DROP
        if self._size >= self._limit:
            return NonceVerdict.HOLD
        self._stash.setdefault(tagged.nonce, []).append(tagged.response)
        self._size += 1
        return NonceVerdict.STASH

    def clear(self) -> None:
        """Drop the stash. A response of the current nonce proves that everything in it is older."""
        self.discarded += self._size
        self._stash.clear()
        self._size = 0

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._size == sum(len(kept) for kept in self._stash.values())
        assert self._size <= self._limit
        assert not self._served.keys() & self._stash.keys()


class ClientTurns:
    """Decides which client an adapter serves. Pure.

    Clients arrive and leave in any order. One is served at a time; the others wait in the order in
    which they arrived. A client that left before it arrived is never served.
    """

    def __init__(self) -> None:
        self.served: Nonce | None = None
        """The client that is served now."""
        self._waiting: OrderedDict[Nonce, None] = OrderedDict()
        """Clients that arrived before their predecessor left."""
        self._left: OrderedDict[Nonce, None] = OrderedDict()
        """Clients that left before they arrived: the latest `SERVED_MAX`."""

    @property
    def waiting(self) -> int:
        """Return the number of clients that wait."""
        return len(self._waiting)

    def arrive(self, nonce: Nonce) -> Nonce | None:
        """Note that a client arrived; return it if it is served now. It waits if `awaits` says so,
        and has left otherwise."""
        if nonce in self._left:
            del self._left[nonce]
            return None
        self._waiting[nonce] = None
        return self.next()

    def awaits(self, nonce: Nonce) -> bool:
        """Return whether a client waits for its turn."""
        return nonce in self._waiting

    def leave(self, nonce: Nonce) -> bool:
        """Note that a client left; return whether it was served. `next` serves its successor."""
        if nonce == self.served:
            self.served = None
            return True
        if nonce in self._waiting:
            del self._waiting[nonce]
            return False
        self._left[nonce] = None
        if len(self._left) > SERVED_MAX:
            self._left.popitem(last=False)
        return False

    def next(self) -> Nonce | None:
        """Serve the first client that waits, if none is served; return it."""
        if self.served is not None or not self._waiting:
            return None
        self.served, _ = self._waiting.popitem(last=False)
        return self.served

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.served not in self._waiting
        assert not self._waiting.keys() & self._left.keys()
        assert self.served is not None or not self._waiting
        assert len(self._left) <= SERVED_MAX


class ChannelAdapter(Actor[AdapterMessage]):
    """Connects the current client of one half to one worker."""

    def __init__(
        self,
        index: int,
        worker: ActorAddress[Any],
        stash_responses_max: int,
        window: ActorAddress[Any] | None = None,
        half: Half = "compute",
    ) -> None:
        """Create the adapter of worker `index`.

        Commands go through `window`, a `FlowWindow` of the worker; None sends them directly.
        """
        self._index = index
        self._worker = worker
        self._window = worker if window is None else window
        self._half: Half = half
        self._rules = StashRules(stash_responses_max)
        self._turns = ClientTurns()
        self._arrivals: dict[Nonce, ConnectClient] = {}
        """The messages of clients that wait for their turn."""
        self._client: ActorAddress[Any] | None = None
        """The client that is served; None between two clients."""
        self._since_ms = 0
        """When the last client's turn began, in Unix ms."""
        self._held: deque[TaggedResponse] = deque()
        """Unacknowledged responses for which the stash had no room. Judged again when a client
        connects, dropped by a response of the current nonce."""
        self._forwarded = 0
        """Responses passed to the client that was connected, since the start."""
        self._delivered = 0
        """Responses passed from the stash, since the start."""
        self._dropped = 0
        """Responses dropped since the start, without those dropped with the stash."""
        self._commands = 0
        """Commands passed to the worker since the start."""
        self._commands_dropped = 0
        """Commands dropped since the start, because their client was not served."""
        self._stashed = 0
        """Responses that were stashed, since the start."""
        self._kept_back = 0
        """Responses that were held: they are judged again later."""

    async def receive(self, message: AdapterMessage) -> None:
        """Handle one message from the client or the worker."""
        match message:
            case TaggedResponse():
                await self._from_worker(message)
            case TaggedResponses():
                await self._many_from_worker(message)
            case FromClient():
                if message.nonce == self._rules.current and self._rules.connected:
                    self._commands += 1
                    await self._command(message.nonce, message.command)
                else:
                    self._commands_dropped += 1
            case ResponsesAcked():
                await self._acknowledge_sent(message)
            case ConnectClient():
                await self._arrive(message)
            case DisconnectClient():
                await self._leave(message.nonce)
            case InspectAdapter():
                message.reply.set(self._statistics())
            case _:
                assert_never(message)

    async def _arrive(self, message: ConnectClient) -> None:
        nonce = message.nonce
        self._arrivals[nonce] = message
        if (served := self._turns.arrive(nonce)) is not None:
            await self._serve(served)
        elif not self._turns.awaits(nonce):
            self._refuse(nonce)

    async def _leave(self, nonce: Nonce) -> None:
        self._refuse(nonce)
        if not self._turns.leave(nonce):
            return
        self._rules.disconnect(nonce)
        self._client = None
        await self._send_to_worker(ClientGone(nonce, self._half))
        if (successor := self._turns.next()) is not None:
            await self._serve(successor)

    def _refuse(self, nonce: Nonce) -> None:
        """Fail the request of a client that has left before its turn."""
        arrival = self._arrivals.pop(nonce, None)
        if arrival is not None:
            arrival.reply.fail(ResourceClosed(f"client {nonce} has left"))

    async def _serve(self, nonce: Nonce) -> None:
        arrival = self._arrivals.pop(nonce)
        self._client = arrival.client
        self._since_ms = self.ctx.now_ms()
        for response in self._rules.connect(nonce):
            # Without a serial: the response was acknowledged to the worker when it was stashed.
            self._delivered += 1
            self._forward(TaggedResponse(nonce, response))
        arrival.reply.set(None)
        # Held responses may carry the new nonce, so judge them again.
        held, self._held = self._held, deque()
        for tagged in held:
            await self._from_worker(tagged)

    async def _command(self, nonce: Nonce, command: AnyCommand) -> None:
        parent = TRACEPARENT.get() if isinstance(command, Peek | ScheduleDataflow) else None
        with (
            span_below(parent, ADAPTER_COMMAND, nonce, self._index),
            suppress(ResourceClosed, ConnectionBroken),
        ):
            await self._window.send(TaggedCommand(nonce, command, self._half))

    async def _acknowledge_sent(self, message: ResponsesAcked) -> None:
        # Serial 0 is a response from the stash, which was acknowledged when it was stashed.
        serials = tuple(serial for serial in message.serials if serial)
        if serials and message.nonce == self._rules.current:
            await self._acknowledge(message.nonce, serials)

    async def _from_worker(self, tagged: TaggedResponse) -> None:
        match self._rules.judge(tagged):
            case NonceVerdict.FORWARD:
                await self._drop_held()
                self._forwarded += 1
                self._forward(tagged)
            case NonceVerdict.DROP:
                if tagged.nonce == self._rules.current:
                    await self._drop_held()
                self._dropped += 1
                await self._acknowledge(tagged.nonce, (tagged.serial,))
            case NonceVerdict.STASH:
                self._stashed += 1
                await self._acknowledge(tagged.nonce, (tagged.serial,))
            case NonceVerdict.HOLD:
                self._kept_back += 1
                self._held.append(tagged)

    async def _many_from_worker(self, tagged: TaggedResponses) -> None:
        """Forward responses of the current nonce together; judge all others one by one."""
        if tagged.nonce == self._rules.current and self._rules.connected:
            self._rules.clear()
            await self._drop_held()
            self._forwarded += len(tagged.responses)
            self._forward_many(tagged.nonce, tagged.responses)
            return
        for serial, response in tagged.responses:
            await self._from_worker(TaggedResponse(tagged.nonce, response, serial))

    async def _drop_held(self) -> None:
        """Drop the held responses and acknowledge them."""
        # A response of the current nonce proves that those of other nonces are older.
        while self._held:
            stranger = self._held.popleft()
            self._dropped += 1
            await self._acknowledge(stranger.nonce, (stranger.serial,))

    def _forward(self, tagged: TaggedResponse) -> None:
        assert self._client is not None
        nonce, response = tagged.nonce, tagged.response
        with span_below(_parent(response), ADAPTER_RESPONSE, nonce, self._index) as opened:
            if opened is not None:
                assert isinstance(response, SubscribeResponse), "only batches carry a context"
                batch = replace(response.batch, traceparent=opened.traceparent)
                response = SubscribeResponse(response.id, batch)
            self._client.reply(FromWorker(self._index, nonce, response, tagged.serial))

    def _forward_many(self, nonce: Nonce, responses: tuple[tuple[int, AnyResponse], ...]) -> None:
        assert self._client is not None
        if any(_parent(response) is not None for _, response in responses):
            # A traced response gets its own span, so send them one by one.
            for serial, response in responses:
                self._forward(TaggedResponse(nonce, response, serial))
            return
        self._client.reply(ManyFromWorker(self._index, nonce, responses))

    async def _acknowledge(self, nonce: Nonce, serials: tuple[int, ...]) -> None:
        await self._send_to_worker(ResponsesForwarded(nonce, serials, self._half))

    async def _send_to_worker(self, message: ResponsesForwarded | ClientGone) -> None:
        with suppress(ResourceClosed, ConnectionBroken):
            await self._worker.send(message)

    def _statistics(self) -> AdapterStatistics:
        return AdapterStatistics(
            forwarded=self._forwarded,
            delivered=self._delivered,
            dropped=self._dropped + self._rules.discarded,
            stashed=self._rules.stashed,
            holding=len(self._held),
            commands=self._commands,
            commands_in_flight=(
                self._window.under_way if isinstance(self._window, FlowWindow) else 0
            ),
            commands_dropped=self._commands_dropped,
            nonce=self._turns.served,
            since_ms=self._since_ms if self._turns.served is not None else None,
            waiting=self._turns.waiting,
        )

    def measures(self) -> Iterator[Measurement]:
        """Yield how many responses got each verdict."""
        counts = {
            "forward": self._forwarded,
            "deliver": self._delivered,
            "drop": self._dropped + self._rules.discarded,
            "stash": self._stashed,
            "hold": self._kept_back,
        }
        for verdict, count in counts.items():
            yield Measurement(ADAPTER_RESPONSES, count, (self._half, verdict))

    def describe(self) -> str:
        """Describe the client and the sizes of the stash and the held responses, for operators."""
        rules = self._rules
        client = f"client {rules.current}" if rules.connected else "no client"
        return f"{client}, {rules.stashed} stashed, {len(self._held)} held"


def send_responses(outbox: CoalescingOutbox[Any, Any], adapter: ActorAddress[Any]) -> None:
    """Send the responses that fit the window from a worker to its adapter, in one message."""
    nonce, going = outbox.nonce, outbox.take()
    if nonce is None or not going:
        return
    if len(going) == 1:
        ((serial, response),) = going
        adapter.reply(TaggedResponse(nonce, response, serial))
    else:
        # One message for everything that the worker produced in this turn: the adapter then
        # handles it in one turn.
        adapter.reply(TaggedResponses(nonce, tuple(going)))


def outbox_measures(outbox: CoalescingOutbox[Any, Any], half: Half) -> Iterator[Measurement]:
    """Yield the metrics of a worker's outbox."""
    yield Measurement(OUTBOX_MESSAGES, len(outbox), (half, "waiting"))
    yield Measurement(OUTBOX_MESSAGES, outbox.in_flight, (half, "sent"))
    yield Measurement(RESPONSES_SENT, outbox.sent, (half,))


def _parent(response: AnyResponse) -> str | None:
    """Return the trace context of a subscribe's batch; None for any other response."""
    if isinstance(response, SubscribeResponse) and isinstance(response.batch, SubscribeBatch):
        return response.batch.traceparent
    return None
