"""Connections of controllers: the acceptor, and one connection actor for the active client.

A cluster serves one client at a time. A newer client displaces the active one after it has proved
itself: with a valid opening, a Hello with a fresh nonce, and a CreateInstance that the running
instance can serve.

For a client over a socket, a `ClusterConnection` applies the rules of the conversation
(`conversations`) and passes responses to its `ResponseSink`, one batch at a time. A client in this
process (`client.LocalClient`) applies the rules itself and talks to the adapters without an actor
in between; the cluster's end is then a `LocalConnection`.

Each adapter is told about a client separately (`AdapterWay`): a connection attaches to all adapters
at the same time, and waits only for the one to which its next command goes. A client that leaves is
reported to each adapter in the same manner, so one adapter may serve a new client
while another has not yet heard that its predecessor left.

Flow control: ``client → connection → adapters`` waits for room. Responses are bounded by each
worker's window, which acknowledgements (`ResponsesAcked`) reopen.

A client that breaks a rule gets a final response with the reason (`ConnectionRefused`) and is
disconnected.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, assert_never

import anyio
import msgspec

from actors.channel_adapter import ConnectClient, DisconnectClient, FromWorker, ManyFromWorker
from actors.model.protocol.compute import ConnectionRefused, CreateInstance, Hello, Response
from actors.replica.cluster.conversations import (
    ClientConversation,
    PendingResponse,
    RoutedCommand,
    running_instance,
)
from actors.replica.cluster.rules import check_instance, check_name
from actors.runtime.errors import (
    ConnectionBroken,
    ConnectionDisplaced,
    PenstockError,
    RemoteProtocolError,
    ResourceBusy,
    ResourceClosed,
    to_wire,
)
from actors.runtime.kernel import (
    STOP,
    Actor,
    ActorAddress,
    ActorContext,
    BoundedMailbox,
    ReplySlot,
)
from actors.runtime.progress import Nonce
from actors.runtime.settings import TOKEN_BYTES_MAX, Settings
from actors.runtime.spans import use_context


def refusal(error: PenstockError) -> ConnectionRefused:
    """Return the final response of a connection that is closed because of `error`."""
    code, text, _ = to_wire(error)
    return ConnectionRefused(code, text)


class ResponseSink(Protocol):
    """Destination of a connection's responses."""

    async def send(self, response: Response, /) -> None:
        """Send one response, waiting while the client is slow.

        Raise `ConnectionBroken` or `ResourceClosed`.
        """
        ...

    def try_send(self, responses: Sequence[Response], /) -> int:
        """Send as many of the responses as possible without waiting, and return how many.

        Errors are those of `send`.
        """
        ...

    def end(self, error: PenstockError, /) -> None:
        """End the connection with a reason. Only the first reason counts."""
        ...


WAITING_MAX: Final = 256
"""Limit of messages that wait for an adapter to serve their client."""


class ClientCommands(msgspec.Struct, frozen=True, gc=False):
    """Commands of the client for its half, in order. One with a trace context is a
    `TracedMessage`."""

    commands: tuple[Any, ...]


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """All responses in `_sending` were sent."""


class _SinkFailed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


ConnectionMessage: TypeAlias = ClientCommands | FromWorker | ManyFromWorker | _Sent | _SinkFailed


class AdapterWay:
    """The way of one connection to one adapter: attaches the client, then carries its commands.

    Commands that come before the adapter serves the client wait here, at most `WAITING_MAX`;
    further senders wait with them.
    """

    def __init__(self, adapter: ActorAddress[Any]) -> None:
        self._adapter = adapter
        self._waiting: deque[tuple[Any, str | None]] = deque()
        """Messages with their trace contexts, until the adapter serves the client."""
        self._is_open = False
        """True once messages go to the adapter directly: it serves the client, and none waits."""
        self._opened = anyio.Event()

    async def attach(self, nonce: Nonce, client: ActorAddress[Any]) -> None:
        """Attach the client, and send what waits when the adapter serves it."""
        try:
            await self._adapter.ask(lambda reply: ConnectClient(nonce, client, reply))
            while self._waiting:
                message, traceparent = self._waiting[0]
                with use_context(traceparent):
                    await self._adapter.send(message)
                self._waiting.popleft()
        except (ResourceClosed, ConnectionBroken):
            # A cluster that stops has no adapters, and a displaced client is served by none.
            self._waiting.clear()
        finally:
            # Cancelled, too: nobody may wait for a connection that has ended.
            self._is_open = True
            self._opened.set()

    async def send(self, message: Any, traceparent: str | None) -> None:
        """Send a message in its turn. Raises `ResourceClosed` or `ConnectionBroken`."""
        if not self._is_open:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((message, traceparent))
                return
            await self._opened.wait()
        with use_context(traceparent):
            await self._adapter.send(message)

    @property
    def room(self) -> int:
        """Return how many messages `send_nowait` takes."""
        return self._adapter.room if self._is_open else 0

    def send_nowait(self, message: Any, traceparent: str | None) -> None:
        """Send a message if there is room. Raises `WouldBlock`, and as `send`."""
        with use_context(traceparent):
            self._adapter.send_nowait(message)


def _attach_all(
    actor: ActorContext[Any], ways: Sequence[AdapterWay], nonce: Nonce, client: ActorAddress[Any]
) -> None:
    """Attach a client to every adapter, each beside the actor and by itself."""
    for way in ways:
        actor.effect(partial(way.attach, nonce, client), done=lambda _: None)


class ClusterConnection(Actor[ConnectionMessage]):
    """The conversation of a client over a socket with all workers."""

    def __init__(
        self,
        conversation: ClientConversation,
        adapters: Sequence[ActorAddress[Any]],
        sink: ResponseSink,
    ) -> None:
        self._conversation = conversation
        self._ways = [AdapterWay(adapter) for adapter in adapters]
        self._sink = sink
        self._sending: list[PendingResponse] = []
        """The responses that an effect is sending, one batch at a time."""

    async def on_start(self) -> None:
        """Attach to the adapters, and send the client's first commands."""
        await self._route(self._conversation.open())
        _attach_all(self.ctx, self._ways, self._conversation.nonce, self.ctx.self)

    async def receive(self, message: ConnectionMessage) -> None:
        """Handle commands of the client, responses of a worker, or the end of an effect."""
        match message:
            case ClientCommands(commands=commands):
                # Do not answer a peek here while earlier answers wait for a slow client.
                await self._route(self._conversation.route(commands, answer=not self._sending))
            case FromWorker() | ManyFromWorker():
                self._conversation.absorb(message)
            case _Sent():
                sent, self._sending = self._sending, []
                self._conversation.note_sent(sent)
            case _SinkFailed(error=error):
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
            # A cluster that stops may have no adapters any more.
            with suppress(ResourceClosed, ConnectionBroken):
                await self._ways[part].send(message, traceparent)

    def _send_next(self) -> None:
        """Send what can be sent without waiting in one write, and the rest in an effect."""
        # One batch at a time, to keep the order.
        if self._sending or not self._conversation.waiting:
            return
        batch = self._conversation.take(self._conversation.waiting)
        try:
            count = self._sink.try_send([response for response, _, _ in batch])
        except PenstockError as error:
            self._end(error)
            return
        self._conversation.note_sent(batch[:count])
        self._sending = batch[count:]
        if not self._sending:
            return
        rest = [response for response, _, _ in self._sending]

        async def run() -> None:
            sent = 0
            while sent < len(rest):
                await self._sink.send(rest[sent])
                sent += 1
                sent += self._sink.try_send(rest[sent:])

        self.ctx.effect(run, done=lambda _: _Sent(), failed=_SinkFailed)

    def _end(self, error: PenstockError) -> None:
        self._sink.end(error)
        self.ctx.stop()

    async def on_stop(self) -> None:
        """End the sink, so that tasks waiting for it wake up."""
        self._sink.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce and the number of responses still to be sent."""
        waiting = self._conversation.waiting + len(self._sending)
        return f"client {self._conversation.nonce}, {waiting} to send"


# -- a client in this process ----------------------------------------------------------------------


class LocalInbox:
    """Receives the adapters' responses to a client in this process, and the error that ended its
    connection.

    The workers' windows bound it.
    """

    def __init__(self, adapters: Sequence[ActorAddress[Any]]) -> None:
        self._mailbox: BoundedMailbox[Any] = BoundedMailbox("/local-client", 1)
        self.address: ActorAddress[Any] = ActorAddress(self._mailbox)
        self.ways = [AdapterWay(adapter) for adapter in adapters]
        """The client's ways to the adapters, which the cluster's end attaches."""
        self.error: PenstockError | None = None
        """Reason why the connection ended; None if it has not."""

    def end(self, error: PenstockError) -> None:
        """End the connection with a reason. Only the first reason counts."""
        if self.error is None:
            self.error = error
            # Overtakes the responses and wakes up their reader.
            self._mailbox.control(error)

    def take(self) -> list[Any]:
        """Return the messages that have arrived, without waiting."""
        return self._mailbox.take()

    async def receive(self) -> list[Any]:
        """Return the messages that have arrived. If there are none, wait for one or for the end."""
        return await self._mailbox.receive()


class EndConnection(msgspec.Struct, frozen=True, gc=False):
    """The client has broken a rule, so its connection must end."""


class LocalConnection(Actor[EndConnection]):
    """The cluster's end of a connection in this process.

    It attaches the client to the adapters and tells it when the connection ends. Commands and
    responses do not pass through it.
    """

    def __init__(self, nonce: Nonce, inbox: LocalInbox) -> None:
        self._nonce = nonce
        self._inbox = inbox

    async def on_start(self) -> None:
        """Attach the client to the adapters."""
        _attach_all(self.ctx, self._inbox.ways, self._nonce, self._inbox.address)

    def receive(self, message: EndConnection) -> None:
        """End the connection."""
        self.ctx.stop()

    async def on_stop(self) -> None:
        """Tell the client that the connection has ended."""
        self._inbox.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce."""
        return f"client {self._nonce}, in this process"


async def _send(address: ActorAddress[Any], message: Any) -> None:
    """Send a message to an adapter. Ignore errors, because a stopping cluster may have no adapters
    left."""
    with suppress(ResourceClosed, ConnectionBroken):
        await address.send(message)


# -- the acceptor ----------------------------------------------------------------------------------


class AcceptConnection(msgspec.Struct, frozen=True, gc=False):
    """A client has sent its opening commands: make it the active client if that is allowed.

    The reply is the connection's address. The request fails, and displaces no client, if the nonce
    was used before or the running instance differs from the requested one.
    """

    hello: Hello
    instance: CreateInstance | None
    """None for a client of the storage half."""
    sink: ResponseSink | LocalInbox
    reply: ReplySlot[ActorAddress[Any]]


class ReleaseConnection(msgspec.Struct, frozen=True, gc=False):
    """The client with this nonce has left. Is answered once its connection has stopped."""

    nonce: Nonce
    reply: ReplySlot[None] | None = None


NONCES_MAX: Final = 1024
"""Number of nonces remembered, so that none is reused: adapters and workers identify clients by
nonce."""


LEAVING_MAX: Final = 256
"""Limit of reports of clients that left, on their way to the adapters. It is reached only if an
adapter has had no room for a long time."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    nonce: Nonce


class _LeaveReported(msgspec.Struct, frozen=True, gc=False):
    """An adapter has the report of a client that left."""


class RunListener(msgspec.Struct, frozen=True, gc=False):
    """Run a coroutine, such as a listener, for as long as the acceptor lives."""

    run: Any


AcceptorMessage: TypeAlias = (
    AcceptConnection | ReleaseConnection | RunListener | _Ended | _LeaveReported
)


FollowOwner: TypeAlias = Callable[[str], Awaitable[None]]
"""Adopts the fencing token of an owner, given the name of its process. Raises `WriterFenced` if
that process no longer owns the stores."""


ConversationFactory: TypeAlias = Callable[[Hello, CreateInstance | None], ClientConversation]
"""Creates the conversation of a client. The storage half has no CreateInstance."""


class ConnectionAcceptor(Actor[AcceptorMessage]):
    """Decides which connection is served. `adapters` may be filled after construction."""

    def __init__(
        self,
        adapters: Sequence[ActorAddress[Any]],
        settings: Settings,
        converse: ConversationFactory,
        follow_owner: FollowOwner | None = None,
    ) -> None:
        """Create the acceptor of one half, whose conversations `converse` creates.

        `follow_owner` is set in a replica in a separate process; it checks who commands the
        replica.
        """
        self._adapters = adapters
        self._converse = converse
        self._follow_owner = follow_owner
        self._running = running_instance(settings)
        self._nonces: OrderedDict[Nonce, None] = OrderedDict()
        """Nonces that were used, oldest first."""
        self._current: tuple[Nonce, ActorAddress[Any], ResponseSink | LocalInbox] | None = None
        """The active client: its nonce, connection and sink."""
        self._count = 0
        """Number of connections so far."""
        self._displaced = 0
        self._leaving = 0
        """Reports of clients that left which have not reached their adapter yet."""

    async def receive(self, message: AcceptorMessage) -> None:
        """Handle a new client, a client that left, or a listener to run."""
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
            case _LeaveReported():
                self._leaving -= 1
            case RunListener():
                self.ctx.effect(message.run, done=lambda _: None)
            case _:
                assert_never(message)

    async def _accept(self, message: AcceptConnection) -> None:
        hello, instance, sink = message.hello, message.instance, message.sink
        nonce = hello.nonce
        try:
            check_name(nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            if self._leaving > LEAVING_MAX:
                raise ResourceBusy(
                    f"{self._leaving} reports of earlier clients wait for a worker: try again"
                )
            if nonce in self._nonces:
                raise RemoteProtocolError(f"nonce {nonce} was already used: choose a new one")
            if instance is not None:
                check_instance(self._running, instance)
            if self._follow_owner is not None:
                # Do this within the message's turn. An owner followed earlier is then displaced
                # before a later one is checked, and no former owner can displace its successor.
                await self._follow_owner(hello.owner)
        except PenstockError as error:
            message.reply.fail(error)
            return
        self._nonces[nonce] = None
        if len(self._nonces) > NONCES_MAX:
            self._nonces.popitem(last=False)
        if self._current is not None:
            self._displaced += 1
            await self._release(ConnectionDisplaced(f"a newer connection ({nonce}) took over"))
        self._count += 1
        address = self.ctx.spawn(
            # The closure must not capture the message: the message has gc=False, so a cycle through
            # its sink (an error, its traceback, this connection) would never be freed.
            lambda: self._connection(hello, instance, sink),
            f"connection-{self._count}",
            policy=STOP,
        )
        self._current = (nonce, address, sink)
        self.ctx.watch(address, _Ended(nonce))
        message.reply.set(address)

    def _connection(
        self, hello: Hello, instance: CreateInstance | None, sink: ResponseSink | LocalInbox
    ) -> Actor[Any]:
        if isinstance(sink, LocalInbox):
            return LocalConnection(hello.nonce, sink)
        return ClusterConnection(self._converse(hello, instance), self._adapters, sink)

    async def _release(self, error: PenstockError) -> None:
        """End the active connection, and report to each adapter that it is gone."""
        assert self._current is not None
        nonce, address, sink = self._current
        self._current = None
        sink.end(error)
        # Stop before DisconnectClient: a stopped connection sends nothing more to the adapters.
        await self.ctx.stop_child(address)
        for adapter in self._adapters:
            self._leaving += 1
            self.ctx.effect(
                partial(_send, adapter, DisconnectClient(nonce)), done=lambda _: _LeaveReported()
            )

    async def on_stop(self) -> None:
        """End the active client's sink with the reason."""
        if self._current is not None:
            self._current[2].end(ResourceClosed("the cluster has stopped"))

    def describe(self) -> str:
        """Return the active client and the number of connections as readable text."""
        client = self._current[0] if self._current is not None else "nobody"
        return f"serves {client}; {self._count} connections so far, {self._displaced} displaced"
