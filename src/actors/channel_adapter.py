"""The channel adapter: from a client's short-lived channel to a worker's lasting one.

Theory of operation. One adapter a worker. Downwards it tags the client's commands with the
connection's nonce. Upwards it sorts responses by theirs (`StashRules`, pure):

- the current nonce: forward, and drop the whole stash: what it holds can only be older;
- a nonce that was current before: drop and count;
- any other may belong to a connection still to come here: keep it in the stash by nonce; a
  connection gets its stash first.

The stash is bounded. A nonce not yet served is never evicted: at the bound the adapter stops
reading its worker, which is to say that it *holds* responses without telling the worker that
they were taken, until the worker's window (one for each nonce) is full. While no client is
connected the adapter goes on draining, so frontiers advance and memory stays flat.

Flow: ``client → adapter → worker`` waits for room, also on the lane of the adapter's half
(`kernel.lane`): the worker is done with a command when that has its place in the one order, so a
flood on one half keeps few commands before those of the other. ``worker → adapter → client`` uses
room that the worker's window reserved. The client says `Took` when responses have left, each named
by its worker's number for it; the adapter says `Passed` to the worker for everything taken,
stashed or dropped. What was stashed is forwarded without a number: the worker has its receipt
already.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any, Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from actors.errors import Broken, Closed, LocalProtocolError
from actors.kernel import Actor, Address, Reply
from actors.progress import Nonce
from actors.protocol import storage
from actors.protocol.compute import (
    Command,
    Lot,
    Peek,
    Response,
    Schedule,
    SubscribeBatch,
    SubscribeResponse,
    Tagged,
    TaggedResponse,
    TaggedResponses,
)
from actors.protocol.storage import StorageTagged, StorageTaggedResponse
from actors.spans import span_below
from actors.telemetry import ADAPTER_COMMAND, ADAPTER_RESPONSE

SERVED_MAX: Final = 1024
"""Past nonces remembered. A worker's responses arrive in order, so only the last few matter."""


class Connect(msgspec.Struct, frozen=True, gc=False):
    """A client takes over: its `Hello` is the next command. `client` gets `FromWorker`."""

    nonce: Nonce
    client: Address[Any]


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce is gone."""

    nonce: Nonce


class FromClient(msgspec.Struct, frozen=True, gc=False):
    """A command of a connection, or several, to be tagged."""

    nonce: Nonce
    command: Command | Lot


class Took(msgspec.Struct, frozen=True, gc=False):
    """The client has passed on these responses; there is room for as many."""

    nonce: Nonce
    serials: tuple[int, ...]


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """Adapter → client: a response of worker number `worker`; `serial` is for `Took`."""

    worker: int
    nonce: Nonce
    response: Response
    serial: int = 0


class ManyFromWorker(msgspec.Struct, frozen=True, gc=False):
    """Adapter → client: several responses of worker number `worker`, in order: (serial, response)
    each, as in `FromWorker`."""

    worker: int
    nonce: Nonce
    responses: tuple[tuple[int, Response], ...]


class Passed(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: these responses of that nonce are off its hands."""

    nonce: Nonce
    serials: tuple[int, ...]


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: nobody will read responses of this nonce."""

    nonce: Nonce


class AdapterStatistics(msgspec.Struct, frozen=True, gc=False):
    """Counts since the start, and the stash at this moment."""

    forwarded: int
    dropped: int
    stashed: int
    holding: int


class InspectAdapter(msgspec.Struct, frozen=True, gc=False):
    """Asks for `AdapterStatistics`."""

    reply: Reply[AdapterStatistics]


AdapterMessage: TypeAlias = (
    Connect | Disconnect | FromClient | Took | TaggedResponse | TaggedResponses | InspectAdapter
)


class Verdict(enum.Enum):
    """What becomes of a response."""

    FORWARD = "forward"
    DROP = "drop"
    STASH = "stash"
    HOLD = "hold"


class StashRules:
    """Which responses go to the client, which are kept for one to come: no I/O, no actors.

    Invariants (`validate`): the stash holds no served nonce and at most `limit` responses;
    nothing is held while the stash has room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stash: dict[Nonce, list[Any]] = {}
        self._size = 0
        self._served: OrderedDict[Nonce, None] = OrderedDict()
        self.current: Nonce | None = None
        self.connected = False

    @property
    def stashed(self) -> int:
        """Responses in the stash."""
        return self._size

    def connect(self, nonce: Nonce) -> list[Any]:
        """A client takes over; what was kept for it, to be delivered first."""
        self.current = nonce
        self.connected = True
        self._served[nonce] = None
        self._served.move_to_end(nonce)
        while len(self._served) > SERVED_MAX:
            self._served.popitem(last=False)
        kept: list[Any] = []
        while nonce in self._stash:  # what came before is older; what came after is not
            oldest = next(iter(self._stash))
            kept = self._stash.pop(oldest)
            self._size -= len(kept)
        return kept

    def disconnect(self, nonce: Nonce) -> bool:
        """The client is gone; False when it was not the current one."""
        if nonce != self.current or not self.connected:
            return False
        self.connected = False
        return True

    def judge(self, tagged: TaggedResponse | StorageTaggedResponse) -> Verdict:
        """What becomes of a response; a `STASH` is kept here."""
        if tagged.nonce == self.current:
            self.clear()
            return Verdict.FORWARD if self.connected else Verdict.DROP
        if tagged.nonce in self._served:
            return Verdict.DROP
        if self._size >= self._limit:
            return Verdict.HOLD
        self._stash.setdefault(tagged.nonce, []).append(tagged.response)
        self._size += 1
        return Verdict.STASH

    def clear(self) -> None:
        """A response of the current nonce has come: all that is stashed is older."""
        self._stash.clear()
        self._size = 0

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._size == sum(len(kept) for kept in self._stash.values())
        assert self._size <= self._limit
        assert not self._served.keys() & self._stash.keys()


class ChannelAdapter(Actor[AdapterMessage]):
    """Bridges the client of the moment to one worker."""

    def __init__(
        self,
        index: int,
        worker: Address[Any],
        stash_responses_max: int,
        lane: Address[Any] | None = None,
    ) -> None:
        """`lane`: the way of commands to the worker, where they have one of their own."""
        self._index = index
        self._worker = worker
        self._lane = worker if lane is None else lane
        self._rules = StashRules(stash_responses_max)
        self._client: Address[Any] | None = None
        self._held: deque[Any] = deque()
        self._forwarded = 0
        self._dropped = 0

    async def receive(self, message: AdapterMessage) -> None:
        """Handles one message of the client or the worker."""
        match message:
            case TaggedResponse():
                await self._from_worker(message)
            case TaggedResponses():
                await self._many_from_worker(message)
            case FromClient():
                if message.nonce == self._rules.current and self._rules.connected:
                    await self._command(message.nonce, message.command)
            case Took():
                await self._took(message)
            case Connect():
                await self._connect(message)
            case Disconnect():
                if self._rules.disconnect(message.nonce):
                    self._client = None
                    await self._down(ClientGone(message.nonce))
            case InspectAdapter():
                message.reply.set(self._statistics())
            case _:
                assert_never(message)

    async def _connect(self, message: Connect) -> None:
        self._client = message.client
        for response in self._rules.connect(message.nonce):
            self._forward(TaggedResponse(message.nonce, response))
        held, self._held = self._held, deque()
        for tagged in held:
            await self._from_worker(tagged)

    async def _command(self, nonce: Nonce, command: Command | Lot) -> None:
        parent = command.traceparent if isinstance(command, Peek | Schedule) else None
        with span_below(parent, ADAPTER_COMMAND, nonce, self._index) as opened:
            if opened is not None and isinstance(command, Peek | Schedule):
                command = replace(command, traceparent=opened.traceparent)
            await self._send_command(Tagged(nonce, command))

    async def _took(self, message: Took) -> None:
        serials = tuple(serial for serial in message.serials if serial)
        if serials and message.nonce == self._rules.current:
            await self._down(Passed(message.nonce, serials))

    async def _from_worker(self, tagged: Any) -> None:
        match self._rules.judge(tagged):
            case Verdict.FORWARD:
                await self._drop_held()
                self._forward(tagged)
            case Verdict.DROP:
                if tagged.nonce == self._rules.current:
                    await self._drop_held()
                self._dropped += 1
                await self._down(Passed(tagged.nonce, (tagged.serial,)))
            case Verdict.STASH:
                await self._down(Passed(tagged.nonce, (tagged.serial,)))
            case Verdict.HOLD:
                self._held.append(tagged)

    async def _many_from_worker(self, tagged: TaggedResponses) -> None:
        """Those of the current nonce go on together; others are judged one by one."""
        if tagged.nonce == self._rules.current and self._rules.connected:
            self._rules.clear()
            await self._drop_held()
            self._forward_many(tagged.nonce, tagged.responses)
            return
        for serial, response in tagged.responses:
            await self._from_worker(TaggedResponse(tagged.nonce, response, serial))

    async def _drop_held(self) -> None:
        """The first response of the current nonce proves that all strangers are older."""
        while self._held:
            stranger = self._held.popleft()
            self._dropped += 1
            await self._down(Passed(stranger.nonce, (stranger.serial,)))

    def _forward(self, tagged: TaggedResponse) -> None:
        assert self._client is not None
        self._forwarded += 1
        nonce, response = tagged.nonce, tagged.response
        with span_below(_parent(response), ADAPTER_RESPONSE, nonce, self._index) as opened:
            if opened is not None:
                assert isinstance(response, SubscribeResponse), "only these bring a context"
                batch = replace(response.batch, traceparent=opened.traceparent)
                response = SubscribeResponse(response.id, batch)
            self._client.reply(FromWorker(self._index, nonce, response, tagged.serial))

    def _forward_many(self, nonce: Nonce, responses: tuple[tuple[int, Response], ...]) -> None:
        assert self._client is not None
        if any(_parent(response) is not None for _, response in responses):
            for serial, response in responses:
                self._forward(TaggedResponse(nonce, response, serial))
            return
        self._forwarded += len(responses)
        self._client.reply(ManyFromWorker(self._index, nonce, responses))

    async def _send_command(self, tagged: Tagged | StorageTagged) -> None:
        with suppress(Closed, Broken):
            await self._lane.send(tagged)

    async def _down(self, message: Passed | ClientGone) -> None:
        await self._send_down(message)

    async def _send_down(self, message: Any) -> None:
        with suppress(Closed, Broken):
            await self._worker.send(message)

    def _statistics(self) -> AdapterStatistics:
        return AdapterStatistics(
            self._forwarded, self._dropped, self._rules.stashed, len(self._held)
        )

    def describe(self) -> str:
        """Which client it serves."""
        rules = self._rules
        client = f"client {rules.current}" if rules.connected else "no client"
        return f"{client}, {rules.stashed} stashed, {len(self._held)} held"


def _parent(response: Response) -> str | None:
    """The context that a response brings."""
    if isinstance(response, SubscribeResponse) and isinstance(response.batch, SubscribeBatch):
        return response.batch.traceparent
    return None


# -- the storage half --------------------------------------------------------------------------


class StorageFromClient(msgspec.Struct, frozen=True, gc=False):
    """A command of a storage connection, to be tagged."""

    nonce: Nonce
    command: storage.Command


class StorageFromWorker(msgspec.Struct, frozen=True, gc=False):
    """Adapter → client: as `FromWorker`, of the storage half."""

    worker: int
    nonce: Nonce
    response: storage.Response
    serial: int = 0


class StoragePassed(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: as `Passed`, of the storage half."""

    nonce: Nonce
    serials: tuple[int, ...]


class StorageGone(msgspec.Struct, frozen=True, gc=False):
    """Adapter → worker: as `ClientGone`, of the storage half."""

    nonce: Nonce


StorageAdapterMessage: TypeAlias = AdapterMessage | StorageFromClient | StorageTaggedResponse


class StorageAdapter(ChannelAdapter):
    """The same rules for the storage half's own connections: nonces, stash and windows apart."""

    async def receive(self, message: StorageAdapterMessage) -> None:
        """Handles one message of the storage client or of the worker's storage half."""
        match message:
            case StorageTaggedResponse():
                await self._from_worker(message)
            case StorageFromClient(nonce, command):
                if nonce == self._rules.current and self._rules.connected:
                    await self._send_command(StorageTagged(nonce, command))
            case _:
                await super().receive(message)

    def _forward(self, tagged: Any) -> None:
        assert self._client is not None
        self._forwarded += 1
        self._client.reply(
            StorageFromWorker(self._index, tagged.nonce, tagged.response, tagged.serial)
        )

    async def _down(self, message: Passed | ClientGone) -> None:
        match message:
            case Passed(nonce, serials):
                await self._send_down(StoragePassed(nonce, serials))
            case ClientGone(nonce):
                await self._send_down(StorageGone(nonce))

    async def _send_command(self, tagged: Tagged | StorageTagged) -> None:
        if isinstance(tagged, Tagged):
            raise LocalProtocolError("a compute command came to the storage half's adapter")
        await super()._send_command(tagged)
