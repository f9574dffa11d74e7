"""The controller's end of the replica protocol, in process or over a socket.

Both kinds of client behave alike. The first command is a Hello with a fresh nonce, and responses
are merged over the workers. Once the connection has ended, `receive` raises the reason
(`ConnectionDisplaced`, `InvalidUsage`, …), or `ConnectionBroken` if none was given. A client has
one connection and one Hello; retrying takes a new client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from actors.model.protocol import storage
from actors.model.protocol.compute import (
    Command,
    ConnectionRefused,
    CreateInstance,
    Hello,
    Response,
)
from actors.model.protocol.internal import Half
from actors.replica.cluster.connection import (
    AcceptConnection,
    AcceptorMessage,
    ConversationFactory,
    EndConnection,
    LocalInbox,
    ReleaseConnection,
)
from actors.replica.cluster.conversations import (
    BATCH_COMMANDS_MAX,
    ClientConversation,
    RoutedCommand,
)
from actors.runtime.errors import (
    ConnectionBroken,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    from_wire,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import Nonce
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage, split_context
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import FramedConnection, dial
from actors.runtime.transport.security import for_dialler


class HalfWire(msgspec.Struct, frozen=True):
    """Wire format of one half of a cluster."""

    command: Any
    response: Any
    magic: bytes
    version: int
    listen: str
    """Name of the setting with the listener's address."""
    opening: tuple[type[Any], ...]
    """Types of the client's first commands. Only after them is the cluster told about the
    client."""


WIRES: Final[Mapping[Half, HalfWire]] = {
    # The magics differ, so that a client of the wrong half fails in the handshake.
    "compute": HalfWire(
        Command, Response, b"PENSREPL", 2, "cluster_listen", (Hello, CreateInstance)
    ),
    # There is no instance to compare, so a Hello with a fresh nonce is enough to displace a client.
    "storage": HalfWire(
        storage.Command, storage.Response, b"PENSSTOR", 1, "storage_listen", (Hello,)
    ),
}


class ClusterClient(Protocol):
    """One connection to a cluster."""

    async def send(self, command: Command | TracedMessage[Command], /) -> None:
        """Send a command, optionally with a trace context. The first command must be a Hello.

        Raise the reason if the connection has ended.
        """
        ...

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]], /) -> int:
        """Send as many of the commands as possible without waiting, and return how many.

        After 0, call `send`, which waits. Errors are those of `send` for the first command.
        """
        ...

    async def receive(self) -> Response:
        """Return the next response. Raise `ConnectionDisplaced`, `ConnectionBroken`, or the reason
        for a refusal."""
        ...

    def receive_nowait(self, count_max: int, /) -> list[Response]:
        """Return up to `count_max` responses that have already arrived, without waiting.

        If an error follows them, the next `receive` raises it.
        """
        ...

    async def close(self) -> None:
        """End the connection. Idempotent."""
        ...


class LocalClient:
    """A client in the same process, which talks to the adapters directly.

    Messages are passed by reference, and the rules of the conversation are applied here, in the
    client's own calls.

    The cluster learns about a client of the compute half only with its CreateInstance, so Hello
    waits here until then. The storage half has no such command. As over a socket, a refusal is
    raised by `receive`.
    """

    def __init__(
        self,
        acceptor: ActorAddress[AcceptorMessage],
        adapters: Sequence[ActorAddress[Any]],
        converse: ConversationFactory,
        half: Half = "compute",
    ) -> None:
        self.acceptor = acceptor
        self.half = half
        self._converse = converse
        self._checked = False
        """True if the caller checks the commands itself; see `trust`."""
        self._inbox = LocalInbox(adapters)
        """Receives the responses, and the error that ended the connection."""
        self._connection: ActorAddress[Any] | None = None
        """The cluster's end. None until the cluster has accepted this client and has its first
        commands."""
        self._conversation: ClientConversation | None = None
        """Rules and state of the conversation. None before Hello."""
        self._hello: Hello | None = None
        """The client's Hello, once it has been sent."""
        self._nonce: Nonce | None = None
        """Nonce under which the cluster knows this client; None before Hello and after `close`."""

    def trust(self) -> LocalClient:
        """Do not check commands: the caller has checked them against the same rules."""
        self._checked = True
        return self

    async def send(self, command: Command | TracedMessage[Command]) -> None:
        """Send a command; see `ClusterClient.send`. The opening commands wait until all adapters
        know the client."""
        if self._inbox.error is not None:
            raise self._inbox.error
        if self._conversation is not None and self._connection is not None:
            await self._route(self._conversation.route((command,)))
            self._end_if_failed()
            return
        command, _ = split_context(command)
        if self._hello is None:
            if not isinstance(command, Hello):
                raise LocalProtocolError(f"got {type(command).__name__} before Hello")
            self._hello = command
            if self.half == "storage":
                await self._open(command, None)
            return
        if not isinstance(command, CreateInstance):
            name = type(command).__name__
            self._inbox.end(RemoteProtocolError(f"got {name} before CreateInstance"))
            return
        await self._open(self._hello, command)

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]]) -> int:
        """Send commands without waiting; see `ClusterClient.try_send`.

        Return 0 until the cluster has accepted this client; until then use `send`.
        """
        if self._inbox.error is not None:
            raise self._inbox.error
        if self._conversation is None or self._connection is None:
            return 0
        # An adapter gets at most one message for each command, plus one for commands collected
        # earlier.
        room = min(self._inbox.ways[part].room for part in self._conversation.parts) - 1
        batch = tuple(commands)[: max(0, min(BATCH_COMMANDS_MAX, room))]
        for part, message, traceparent in self._conversation.route(batch):
            try:
                self._inbox.ways[part].send_nowait(message, traceparent)
            except (ResourceClosed, ConnectionBroken):
                raise self._inbox.error or ConnectionBroken("the cluster is gone") from None
        self._end_if_failed()
        return len(batch)

    async def _route(self, routed: Sequence[RoutedCommand]) -> None:
        for part, message, traceparent in routed:
            try:
                await self._inbox.ways[part].send(message, traceparent)
            except (ResourceClosed, ConnectionBroken):
                raise self._inbox.error or ConnectionBroken("the cluster is gone") from None

    def _end_if_failed(self) -> None:
        if self._conversation is not None and self._conversation.failed is not None:
            self._inbox.end(self._conversation.failed)
            if self._connection is not None:
                self._connection.reply(EndConnection())

    async def _open(self, hello: Hello, instance: CreateInstance | None) -> None:
        self._nonce = hello.nonce
        # Set it before the cluster knows this client, because an adapter sends its stash
        # immediately.
        conversation = self._conversation = self._converse(hello, instance)
        if self._checked:
            conversation.trust()
        try:
            accepted: ActorAddress[Any] = await self.acceptor.ask(
                lambda reply: AcceptConnection(hello, instance, self._inbox, reply)
            )
        except PenstockError as error:
            self._nonce = (
                None  # another client may have the nonce: `close` must not release that one
            )
            self._inbox.end(error)
            return
        self._connection = accepted
        await self._route(conversation.open())
        self._end_if_failed()

    async def receive(self) -> Response:
        """Return the next response; see `ClusterClient.receive`. Also waits if Hello was not sent
        yet."""
        while not (found := self.receive_nowait(1)):
            if self._inbox.error is not None:
                raise self._inbox.error
            if self._conversation is not None:
                await self._route(self._conversation.acknowledgements())
            self._absorb(await self._inbox.receive())
        return found[0]

    def receive_nowait(self, count_max: int) -> list[Response]:
        """Return the responses that have already arrived; see `ClusterClient.receive_nowait`."""
        self._absorb(self._inbox.take())
        conversation = self._conversation
        if conversation is None:
            return []
        taken = conversation.take(count_max)
        conversation.note_sent(taken)
        # If there is no room for the acknowledgements, `receive` sends them later, because it can
        # wait.
        if all(way.room for way in self._inbox.ways):
            for part, message, _ in conversation.acknowledgements():
                with contextlib.suppress(ResourceClosed, ConnectionBroken):
                    self._inbox.ways[part].send_nowait(message, None)
        return [response for response, _, _ in taken]

    def _absorb(self, messages: Sequence[Any]) -> None:
        if self._conversation is None:
            return
        for each in messages:
            # Ignore everything that follows a response that breaks a rule.
            if self._conversation.failed is None:
                self._conversation.absorb(split_context(each)[0])
        self._end_if_failed()

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._inbox.end(ResourceClosed("this client was closed"))
        # Clear it first, so that a second call has nothing left to release.
        nonce, self._nonce = self._nonce, None
        if nonce is not None:
            with contextlib.suppress(ResourceClosed, ConnectionBroken):
                await self.acceptor.ask(lambda reply: ReleaseConnection(nonce, reply))


class WireClient:
    """A client over a socket; see `connect`."""

    def __init__(self, connection: FramedConnection[Command, Response]) -> None:
        self._connection = connection
        self._refused: PenstockError | None = None
        """Reason for the cluster's refusal, once it has arrived."""

    async def send(self, command: Command | TracedMessage[Command]) -> None:
        """Send a command; see `ClusterClient.send`."""
        if self._refused is not None:
            raise self._refused
        await self._connection.send(command)

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]]) -> int:
        """Send commands without waiting; see `ClusterClient.try_send`."""
        if self._refused is not None:
            raise self._refused
        return self._connection.try_send(commands)

    async def receive(self) -> Response:
        """Return the next response; see `ClusterClient.receive`."""
        if self._refused is not None:
            raise self._refused
        response: Response = split_context(await self._connection.receive())[0]
        self._note_refusal(response)
        if self._refused is not None:
            raise self._refused
        return response

    def _note_refusal(self, response: Response) -> None:
        if isinstance(response, ConnectionRefused):
            self._refused = from_wire(response.code, response.text, True)

    def receive_nowait(self, count_max: int) -> list[Response]:
        """Return the responses that have already arrived; see `ClusterClient.receive_nowait`."""
        if self._refused is not None:
            return []
        found = [split_context(each)[0] for each in self._connection.receive_nowait(count_max)]
        if found:
            self._note_refusal(found[-1])  # nothing follows a refusal
        return found if self._refused is None else found[:-1]

    async def close(self) -> None:
        """End the connection. Idempotent."""
        await self._connection.aclose()


async def connect(address: Place | str, settings: Settings, half: Half = "compute") -> WireClient:
    """Connect to a listener of one half of a cluster, at ``host:port`` or ``unix:/path``.

    The settings used are `identity`, `tls_…` and `cluster_token_file`. Raise what `transport.dial`
    raises.
    """
    place = Place.parse(address) if isinstance(address, str) else address
    wire = WIRES[half]
    connection: FramedConnection[Any, Any] = await dial(
        place,
        wire.command,
        wire.response,
        settings,
        wire.magic,
        wire.version,
        identity=settings.identity,
        security=for_dialler(place, settings, settings.cluster_token_file),
    )
    return WireClient(connection)
