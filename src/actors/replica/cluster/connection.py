"""Connections of controllers: the acceptor, and one connection actor for the active client.

A cluster serves one client at a time. A newer client displaces the active one when it has proved
itself: a valid opening, a Hello with a fresh nonce, and a CreateInstance that the running instance
can serve.

The rules of one client's conversation are pure (`ClientConversation`): commands are checked and
split, responses are merged (`PartitionedState`). For a client over a socket they run in a
`ClusterConnection`, which hands responses to its `ResponseSink`, one batch at a time. A client in
this process (`client.LocalClient`) runs them itself, and speaks to the adapters without an actor in
between; the cluster's end is a `LocalConnection` then.

Flow control: ``client → connection → adapters`` waits for room. Responses are bounded by each
worker's window, which acknowledgements (`ResponsesAcked`) reopen.

A client that breaks a rule gets a last response with the reason (`ConnectionRefused`) and is
disconnected.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, assert_never

import msgspec

from actors.channel_adapter import (
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    ManyFromWorker,
    ResponsesAcked,
)
from actors.model.protocol.compute import (
    Command,
    CommandBatch,
    ConnectionRefused,
    CopyToResponse,
    CreateInstance,
    Frontiers,
    Hello,
    InitializationComplete,
    Peek,
    PeekResponse,
    Response,
    ScheduleDataflow,
    SubscribeResponse,
)
from actors.replica.cluster.partitioned import ConnectionLimits, PartitionedState
from actors.replica.cluster.rules import CommandRules, check_instance, check_name
from actors.replica.cluster.shortcut import PeekShortcut
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.outbox import response_bytes
from actors.runtime.errors import (
    ConnectionBroken,
    ConnectionDisplaced,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    to_wire,
)
from actors.runtime.kernel import STOP, Actor, ActorAddress, BoundedMailbox, ReplySlot
from actors.runtime.progress import Nonce
from actors.runtime.settings import TOKEN_BYTES_MAX, Settings
from actors.runtime.spans import accept, span_below, use_context
from actors.runtime.telemetry import CONNECTION_COMMAND, split_context

# -- Batched acknowledgements of responses to the workers. Pure ------------------------------------
# Each worker allows only so many responses, and so many bytes, in flight (`compute.outbox`).
# Responses that have left are acknowledged in batches of at most a quarter of that window. So at
# least three quarters of each window are open or truly in flight: no worker waits for an
# acknowledgement that is withheld here.


class AcknowledgementWindow:
    """Responses that have left and are not acknowledged yet, by worker. `messages_max` and
    `bytes_max` are those of a worker's window."""

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._left_bytes = [0] * workers
        self._due: set[int] = set()

    def left(self, worker: int, serial: int, response: Response) -> None:
        """Note that a response has left, or that nothing was sent for it. Serial 0: no
        acknowledgement is due."""
        # No worker counts a response that the connection answered itself.
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            # A dataflow or copy waits for the acknowledgement of its batch: it is sent at once.
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def due(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return and forget the (worker, serials) to be acknowledged now."""
        if not self._due:
            return []
        left = [(worker, tuple(self._left[worker])) for worker in sorted(self._due)]
        for worker, _ in left:
            self._left[worker] = []
            self._left_bytes[worker] = 0
        self._due.clear()
        return left


log = logging.getLogger("penstock.cluster")


def refusal(error: PenstockError) -> ConnectionRefused:
    """Return the last response of a connection that is closed because of `error`."""
    code, text, _ = to_wire(error)
    return ConnectionRefused(code, text)


LOT_MAX: Final = 256
"""Limit of commands that are passed on together."""
AT_ONCE_MAX: Final = 64
"""Limit of peeks that are answered in one turn of the connection; each takes far below a
millisecond."""


class ResponseSink(Protocol):
    """Sink of a connection's responses."""

    async def send(self, response: Response, /) -> None:
        """Send one response, waiting while the client is slow. Raises `ConnectionBroken` or
        `ResourceClosed`."""
        ...

    def offer(self, responses: Sequence[Response], /) -> int:
        """Send as many of the first responses as possible without waiting; return their number.
        Raises as `send`."""
        ...

    def end(self, error: PenstockError, /) -> None:
        """End the connection with a reason. The first reason counts."""
        ...


class ClientCommands(msgspec.Struct, frozen=True, gc=False):
    """Commands of the client, in order, for its half; those with a trace context in a
    `TracedMessage`."""

    commands: tuple[Any, ...]


PendingResponse: TypeAlias = tuple[Any, int, int]
"""A merged response, with the worker and the serial of the response that completed it."""


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """All responses of `_sending` were sent."""


class _OutletFailed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


ConnectionMessage: TypeAlias = ClientCommands | FromWorker | ManyFromWorker | _Sent | _OutletFailed


class RoutedCommand(NamedTuple):
    """A message for the adapter of worker `part`, and the trace context that it travels in."""

    part: int
    message: Any
    traceparent: str | None = None


class ClientConversation(ABC):
    """One client's conversation with all workers of a half: checks and splits its commands, merges
    the responses, and says which are to be acknowledged. Pure.

    `failed` is the reason for which the conversation must end; nothing is routed after it.
    """

    def __init__(self, nonce: Nonce, acks: AcknowledgementWindow) -> None:
        self.nonce = nonce
        self.failed: PenstockError | None = None
        self._acks = acks
        self._queue: deque[PendingResponse] = deque()

    @property
    def waiting(self) -> int:
        """Return the number of complete responses that were not taken."""
        return len(self._queue)

    @abstractmethod
    def open(self) -> list[RoutedCommand]:
        """Return the client's first commands, which it has given already."""

    @abstractmethod
    def route(self, commands: Sequence[Any], *, answer: bool = False) -> list[RoutedCommand]:
        """Return the messages for the adapters. `answer`: answer peeks here if that is possible.
        Commands before one that breaks a rule are routed, and `failed` is set."""

    @abstractmethod
    def trust(self) -> None:
        """Check no more commands: the client is in this process and checks them itself."""

    @abstractmethod
    def _merge(self, worker: int, response: Any) -> Any:
        """Return the merged response that this one completes, or None."""

    def absorb(self, message: FromWorker | ManyFromWorker) -> None:
        """Merge responses of a worker; those that are complete can be taken."""
        worker = message.worker
        # A late response to a displaced client.
        if message.nonce != self.nonce:
            return
        if isinstance(message, ManyFromWorker):
            responses: Sequence[tuple[int, Any]] = message.responses
        else:
            responses = ((message.serial, message.response),)
        for serial, response in responses:
            try:
                merged = self._merge(worker, response)
            except PenstockError as error:
                log.error("client %s: %s", self.nonce, error)
                self.failed = error
                return
            # Acknowledged at once; a response that completes a merged one only when that was sent.
            if merged is None:
                self._acks.left(worker, serial, response)
            else:
                self._queue.append((merged, worker, serial))

    def take(self, count_max: int) -> list[PendingResponse]:
        """Return and remove the first complete responses."""
        return [self._queue.popleft() for _ in range(min(count_max, len(self._queue)))]

    def left(self, sent: Sequence[PendingResponse]) -> None:
        """Note responses that the client has got."""
        for response, worker, serial in sent:
            self._acks.left(worker, serial, response)

    def acknowledgements(self) -> list[RoutedCommand]:
        """Return the acknowledgements that are due now."""
        return [
            RoutedCommand(worker, ResponsesAcked(self.nonce, serials))
            for worker, serials in self._acks.due()
        ]


class ComputeConversation(ClientConversation):
    """A conversation with the compute half. Commands ready together travel as one."""

    def __init__(
        self,
        hello: Hello,
        instance: CreateInstance,
        workers: int,
        limits: ConnectionLimits,
        partitions: ClusterPartitions,
        settings: Settings,
    ) -> None:
        acks = AcknowledgementWindow(
            workers, settings.responses_in_flight_max, settings.subscribe_inflight_bytes_max
        )
        super().__init__(hello.nonce, acks)
        self.shortcut = PeekShortcut(partitions, limits)
        self._opening = (hello, instance)
        self._rules: CommandRules | None = CommandRules(running_instance(settings), settings)
        self._parts = PartitionedState(workers, limits)
        self._complete = False
        self._lot: list[Command] = []
        """Commands to be passed on together. Before InitializationComplete nothing takes effect, so
        they may collect; afterwards each call passes them on."""

    def open(self) -> list[RoutedCommand]:
        """See `ClientConversation`."""
        return self.route(self._opening)

    def trust(self) -> None:
        """See `ClientConversation`."""
        self._rules = None

    def route(self, commands: Sequence[Any], *, answer: bool = False) -> list[RoutedCommand]:
        """See `ClientConversation`."""
        routed: list[RoutedCommand] = []
        for each in commands:
            command, traceparent = split_context(each)
            try:
                if self._rules is not None:
                    self._rules.check(command)
            except PenstockError as error:
                self._pass_on(routed)
                self.failed = error
                return routed
            if isinstance(command, InitializationComplete):
                self._complete = True
            # A traced peek takes the long way, so that its spans show it.
            if answer and traceparent is None and self._answers(command):
                continue
            self.shortcut.heard(command)
            if isinstance(command, Peek | ScheduleDataflow) and traceparent is not None:
                self._traced(command, traceparent, routed)
            else:
                self._command(command, routed)
        if self._complete:
            self._pass_on(routed)
        return routed

    def _answers(self, peek: Command) -> bool:
        """Answer a peek here, if its rows are there; return whether it was answered."""
        if not isinstance(peek, Peek):
            return False
        # No worker's window bounds these answers, so the queue must.
        if len(self._queue) >= AT_ONCE_MAX or not self._complete:
            return False
        rows = self.shortcut.answer(peek)
        if rows is None:
            return False
        if self._rules is not None:
            self._rules.answered(peek.uuid)
        self._queue.append((PeekResponse(peek.uuid, rows), 0, 0))
        return True

    def _command(
        self, command: Command, routed: list[RoutedCommand], traceparent: str | None = None
    ) -> None:
        for part, split in self._parts.split(command):
            # Hello goes to every worker, so it is not batched with part 0's commands.
            if part == 0 and not isinstance(split, Hello):
                self._lot.append(split)
            else:
                routed.append(RoutedCommand(part, FromClient(self.nonce, split), traceparent))
        if len(self._lot) >= LOT_MAX:
            self._pass_on(routed, traceparent)

    def _traced(
        self, command: Peek | ScheduleDataflow, traceparent: str, routed: list[RoutedCommand]
    ) -> None:
        """Pass on a command with a trace context; a sampled one goes alone, so that its spans show
        its own way."""
        parent = accept(traceparent)
        if parent is None:
            self._command(command, routed)
            return
        if self._complete:
            self._pass_on(routed)
        with span_below(parent, CONNECTION_COMMAND) as opened:
            if opened is not None:
                if isinstance(command, Peek):
                    opened.describe(self.nonce, command.uuid, command.target.id)
                else:
                    opened.describe(self.nonce, "", command.id)
                parent = opened.traceparent
        self._command(command, routed, parent)
        if self._complete:
            self._pass_on(routed, parent)

    def _pass_on(self, routed: list[RoutedCommand], traceparent: str | None = None) -> None:
        if not self._lot:
            return
        lot, self._lot = self._lot, []
        command = lot[0] if len(lot) == 1 else CommandBatch(tuple(lot))
        routed.append(RoutedCommand(0, FromClient(self.nonce, command), traceparent))

    def _merge(self, worker: int, response: Response) -> Response | None:
        merged = self._parts.absorb(worker, response)
        # Ordered before the response leaves: the client may reuse the ids at once.
        for id in self._parts.ended:
            if self._rules is not None:
                self._rules.ended(id)
        self._parts.ended.clear()
        if isinstance(merged, PeekResponse) and self._rules is not None:
            self._rules.answered(merged.uuid)
        elif isinstance(merged, Frontiers):
            self.shortcut.note(merged)
        return merged


def running_instance(settings: Settings) -> CreateInstance:
    """Return the instance that a cluster with these settings runs."""
    return CreateInstance(settings.workers, expiration_ms=settings.expiration_ms)


class ClusterConnection(Actor[ConnectionMessage]):
    """One client's conversation with all workers, for a client over a socket."""

    def __init__(
        self,
        conversation: ClientConversation,
        adapters: Sequence[ActorAddress[Any]],
        outlet: ResponseSink,
    ) -> None:
        self._conversation = conversation
        self._adapters = adapters
        self._outlet = outlet
        self._sending: list[PendingResponse] = []

    async def on_start(self) -> None:
        """Attach to all adapters, then send the client's first commands to them."""
        # All adapters before Hello: each must know this connection when its worker answers.
        for adapter in self._adapters:
            await _send(adapter, ConnectClient(self._conversation.nonce, self.ctx.self))
        await self._route(self._conversation.open())

    async def receive(self, message: ConnectionMessage) -> None:
        """Handle commands of the client or responses of a worker."""
        match message:
            case ClientCommands(commands=commands):
                # A peek is not answered while earlier answers wait for a slow client.
                await self._route(self._conversation.route(commands, answer=not self._sending))
            case FromWorker() | ManyFromWorker():
                self._conversation.absorb(message)
            case _Sent():
                sent, self._sending = self._sending, []
                self._conversation.left(sent)
            case _OutletFailed(error=error):
                named = error if isinstance(error, PenstockError) else ConnectionBroken(str(error))
                self._end(named)
                return
            case _:
                assert_never(message)
        self._send_next()
        await self._route(self._conversation.acknowledgements())
        if self._conversation.failed is not None:
            self._end(self._conversation.failed)

    async def _route(self, routed: Sequence[RoutedCommand]) -> None:
        for part, message, traceparent in routed:
            with use_context(traceparent):
                await _send(self._adapters[part], message)

    def _send_next(self) -> None:
        """Send the responses that can leave without waiting in one write; the rest in an effect."""
        # One batch at a time keeps the order.
        if self._sending or not self._conversation.waiting:
            return
        batch = self._conversation.take(self._conversation.waiting)
        try:
            count = self._outlet.offer([response for response, _, _ in batch])
        except PenstockError as error:
            self._end(error)
            return
        self._conversation.left(batch[:count])
        self._sending = batch[count:]
        if not self._sending:
            return
        rest = [response for response, _, _ in self._sending]

        async def run() -> None:
            sent = 0
            while sent < len(rest):
                await self._outlet.send(rest[sent])
                sent += 1
                sent += self._outlet.offer(rest[sent:])

        self.ctx.effect(run, done=lambda _: _Sent(), failed=_OutletFailed)

    def _end(self, error: PenstockError) -> None:
        self._outlet.end(error)
        self.ctx.stop()

    async def on_stop(self) -> None:
        """End the outlet, so that its waiters wake up."""
        self._outlet.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce and the number of responses to send."""
        waiting = self._conversation.waiting + len(self._sending)
        return f"client {self._conversation.nonce}, {waiting} to send"


# -- a client in this process ----------------------------------------------------------------------


class LocalInbox:
    """The responses that the adapters send to a client in this process, and the error with which
    its connection ended. The workers' windows bound it."""

    def __init__(self) -> None:
        self._mailbox: BoundedMailbox[Any] = BoundedMailbox("/local-client", 1)
        self.address: ActorAddress[Any] = ActorAddress(self._mailbox)
        self.error: PenstockError | None = None

    def end(self, error: PenstockError) -> None:
        """End the connection with a reason. The first reason counts."""
        if self.error is None:
            self.error = error
            # Overtakes the responses, and wakes their reader.
            self._mailbox.control(error)

    def take(self) -> list[Any]:
        """Return the messages that have arrived."""
        return self._mailbox.take()

    async def receive(self) -> list[Any]:
        """Return the messages that have arrived; wait for one, or for the end."""
        return await self._mailbox.receive()


class AwaitAttached(msgspec.Struct, frozen=True, gc=False):
    """Answered when all adapters know the client."""

    reply: ReplySlot[None]


class EndConnection(msgspec.Struct, frozen=True, gc=False):
    """The client has broken a rule: its connection ends."""


class LocalConnection(Actor[AwaitAttached | EndConnection]):
    """The cluster's end of a connection in this process: attaches the client to the adapters, and
    tells it of the end. Commands and responses do not pass here."""

    def __init__(
        self, nonce: Nonce, adapters: Sequence[ActorAddress[Any]], inbox: LocalInbox
    ) -> None:
        self._nonce = nonce
        self._adapters = adapters
        self._inbox = inbox

    async def on_start(self) -> None:
        """Attach the client to all adapters."""
        for adapter in self._adapters:
            await _send(adapter, ConnectClient(self._nonce, self._inbox.address))

    def receive(self, message: AwaitAttached | EndConnection) -> None:
        """Answer a client that is attached, or end its connection."""
        if isinstance(message, AwaitAttached):
            message.reply.set(None)
        else:
            self.ctx.stop()

    async def on_stop(self) -> None:
        """Tell the client."""
        self._inbox.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce."""
        return f"client {self._nonce}, in this process"


async def _send(address: ActorAddress[Any], message: Any) -> None:
    """Send to an adapter; errors are ignored, since a stopping cluster may have none."""
    with suppress(ResourceClosed, ConnectionBroken):
        await address.send(message)


# -- the acceptor ----------------------------------------------------------------------------------


class AcceptConnection(msgspec.Struct, frozen=True, gc=False):
    """A client has sent its first two commands: make it the active one, if allowed. The reply is
    the connection's address; it fails, and displaces no client, if the nonce was used before or the
    running instance is not the requested one."""

    hello: Hello
    instance: CreateInstance | None
    """None for a client of the storage half."""
    outlet: ResponseSink | LocalInbox
    reply: ReplySlot[ActorAddress[Any]]


class ReleaseConnection(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce has left. Answered when its connection has stopped."""

    nonce: Nonce
    reply: ReplySlot[None] | None = None


NONCES_MAX: Final = 1024
"""Nonces remembered, so that none is used twice: adapters and workers identify clients by them."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    nonce: Nonce


class RunListener(msgspec.Struct, frozen=True, gc=False):
    """Run a coroutine (a listener) for as long as the acceptor lives."""

    run: Any


AcceptorMessage: TypeAlias = AcceptConnection | ReleaseConnection | RunListener | _Ended


FollowOwner: TypeAlias = Callable[[str], Awaitable[None]]
"""Takes the fencing token of an owner, by the name of its process. Raises `WriterFenced` for a
process that owns the stores no more."""


Converse: TypeAlias = Callable[[Hello, CreateInstance | None], ClientConversation]
"""Makes the conversation of a client; without an instance for the storage half."""


class ConnectionAcceptor(Actor[AcceptorMessage]):
    """Decides which connection is served. `adapters` may be filled after construction."""

    def __init__(
        self,
        adapters: Sequence[ActorAddress[Any]],
        settings: Settings,
        converse: Converse,
        follow_owner: FollowOwner | None = None,
    ) -> None:
        """`converse` makes the conversations of this half. `follow_owner`: of a replica in a
        process of its own, checks who commands it."""
        self._adapters = adapters
        self._converse = converse
        self._follow_owner = follow_owner
        self._running = running_instance(settings)
        self._nonces: OrderedDict[Nonce, None] = OrderedDict()
        self._current: tuple[Nonce, ActorAddress[Any], ResponseSink | LocalInbox] | None = None
        self._count = 0
        self._displaced = 0

    async def receive(self, message: AcceptorMessage) -> None:
        """Handle one arrival or departure."""
        match message:
            case AcceptConnection():
                await self._accept(message)
            case ReleaseConnection():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(ResourceClosed("the client closed the connection"))
                if message.reply is not None:
                    message.reply.set(None)
            case _Ended():
                if self._current is not None and self._current[0] == message.nonce:
                    await self._release(ResourceClosed("the connection has ended"))
            case RunListener():
                self.ctx.effect(message.run, done=lambda _: None)
            case _:
                assert_never(message)

    async def _accept(self, message: AcceptConnection) -> None:
        hello, instance, outlet = message.hello, message.instance, message.outlet
        nonce = hello.nonce
        try:
            check_name(nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            if nonce in self._nonces:
                raise RemoteProtocolError(f"nonce {nonce} was used before: choose a fresh one")
            if instance is not None:
                check_instance(self._running, instance)
            if self._follow_owner is not None:
                # In this message's turn: an owner that was followed earlier is displaced before a
                # later one is asked for, and no former owner displaces its successor.
                await self._follow_owner(hello.owner)
        except PenstockError as error:
            message.reply.fail(error)
            return
        self._nonces[nonce] = None
        if len(self._nonces) > NONCES_MAX:
            self._nonces.popitem(last=False)
        if self._current is not None:
            self._displaced += 1
            # Ordered before the newer connection starts: adapters see connections one after the
            # other.
            await self._release(ConnectionDisplaced(f"a newer connection ({nonce}) took over"))
        self._count += 1
        address = self.ctx.spawn(
            # Must not capture the message: it has gc=False, and a cycle through its outlet (an
            # error, its traceback, this connection) would never be freed.
            lambda: self._connection(hello, instance, outlet),
            f"connection-{self._count}",
            policy=STOP,
        )
        self._current = (nonce, address, outlet)
        self.ctx.watch(address, _Ended(nonce))
        message.reply.set(address)

    def _connection(
        self, hello: Hello, instance: CreateInstance | None, outlet: ResponseSink | LocalInbox
    ) -> Actor[Any]:
        if isinstance(outlet, LocalInbox):
            return LocalConnection(hello.nonce, self._adapters, outlet)
        return ClusterConnection(self._converse(hello, instance), self._adapters, outlet)

    async def _release(self, error: PenstockError) -> None:
        """End the active connection and tell the adapters that it is gone."""
        assert self._current is not None
        nonce, address, outlet = self._current
        self._current = None
        outlet.end(error)
        # Ordered before Disconnect: a stopped connection sends nothing more to the adapters.
        await self.ctx.stop_child(address)
        for adapter in self._adapters:
            await _send(adapter, DisconnectClient(nonce))

    async def on_stop(self) -> None:
        """End the client's outlet with the reason."""
        if self._current is not None:
            self._current[2].end(ResourceClosed("the cluster has stopped"))

    def describe(self) -> str:
        """Return the active client and the number of connections."""
        client = self._current[0] if self._current is not None else "nobody"
        return f"serves {client}; {self._count} connections so far, {self._displaced} displaced"
