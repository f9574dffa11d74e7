"""A controller's end of the replica protocol, in process or over a socket.

Both behave alike: the first command is a Hello with a fresh nonce; responses are merged over the
workers; `receive` raises the reason for which the connection ended (`ConnectionDisplaced`,
`InvalidUsage`, …), `ConnectionBroken` if none was given. A client has one connection and one Hello:
a retry needs another.
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
    Converse,
    EndConnection,
    LocalInbox,
    ReleaseConnection,
)
from actors.replica.cluster.conversations import (
    LOT_MAX,
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
    """How a half of a cluster is spoken on a socket."""

    command: Any
    response: Any
    magic: bytes
    version: int
    listen: str
    """Setting with the address of the half's listener."""
    opening: tuple[type[Any], ...]
    """The client's first commands, before which the cluster is not told of it."""


WIRES: Final[Mapping[Half, HalfWire]] = {
    # The magics differ, so that a client of the wrong half fails in the handshake.
    "compute": HalfWire(
        Command, Response, b"PENSREPL", 2, "cluster_listen", (Hello, CreateInstance)
    ),
    # There is no instance to compare: a timely Hello with a fresh nonce displaces a client.
    "storage": HalfWire(
        storage.Command, storage.Response, b"PENSSTOR", 1, "storage_listen", (Hello,)
    ),
}


class ClusterClient(Protocol):
    """One connection to a cluster."""

    async def send(self, command: Command | TracedMessage[Command], /) -> None:
        """Send a command, perhaps with a trace context; the first is a Hello. Raises the reason
        for which the connection has ended."""
        ...

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]], /) -> int:
        """Send as many of the first commands as possible without waiting, and return their number.
        0: use `send`, which waits. Raises as `send`, for the first command."""
        ...

    async def receive(self) -> Response:
        """Return the next response. Raises `ConnectionDisplaced`, `ConnectionBroken`, or the reason
        of a refusal."""
        ...

    def receive_nowait(self, count_max: int, /) -> list[Response]:
        """Return the responses that have arrived after `receive`'s last one, without waiting. The
        next `receive` raises an error that follows them."""
        ...

    async def close(self) -> None:
        """End the connection. Idempotent."""
        ...


class LocalClient:
    """A client in the same process, which speaks to the adapters itself: messages pass by
    reference, and the rules of the conversation run here, in the client's own calls.

    The compute half is told of a client only with its CreateInstance, so Hello waits here for it;
    the storage half has no such command. As over a wire, a refusal is raised by `receive`.
    """

    def __init__(
        self,
        acceptor: ActorAddress[AcceptorMessage],
        adapters: Sequence[ActorAddress[Any]],
        converse: Converse,
        half: Half = "compute",
    ) -> None:
        self.acceptor = acceptor
        self.half = half
        self._converse = converse
        self._checked = False
        self._inbox = LocalInbox(adapters)
        self._connection: ActorAddress[Any] | None = None
        """None until the cluster has accepted this client, and has its first commands."""
        self._conversation: ClientConversation | None = None
        """None before Hello."""
        self._hello: Hello | None = None
        self._nonce: Nonce | None = None

    def trust(self) -> LocalClient:
        """Check no commands here: the caller has checked them by the same rules."""
        self._checked = True
        return self

    async def send(self, command: Command | TracedMessage[Command]) -> None:
        """See `ClusterClient`."""
        if self._inbox.error is not None:
            raise self._inbox.error
        if self._conversation is not None and self._connection is not None:
            await self._route(self._conversation.route((command,)))
            self._end_if_failed()
            return
        command, _ = split_context(command)
        if self._hello is None:
            if not isinstance(command, Hello):
                raise LocalProtocolError(f"{type(command).__name__} came before Hello")
            self._hello = command
            if self.half == "storage":
                await self._introduce(command, None)
            return
        if not isinstance(command, CreateInstance):
            name = type(command).__name__
            self._inbox.end(RemoteProtocolError(f"{name} came before CreateInstance"))
            return
        await self._introduce(self._hello, command)

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]]) -> int:
        """See `ClusterClient`. Returns 0 until the cluster has accepted this client: `send` then
        waits."""
        if self._inbox.error is not None:
            raise self._inbox.error
        if self._conversation is None or self._connection is None:
            return 0
        # An adapter gets one message for each command at most, and one for commands that were
        # collected before.
        room = min(self._inbox.ways[part].room for part in self._conversation.parts) - 1
        lot = tuple(commands)[: max(0, min(LOT_MAX, room))]
        for part, message, traceparent in self._conversation.route(lot):
            try:
                self._inbox.ways[part].send_nowait(message, traceparent)
            except (ResourceClosed, ConnectionBroken):
                raise self._inbox.error or ConnectionBroken("the cluster is gone") from None
        self._end_if_failed()
        return len(lot)

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

    async def _introduce(self, hello: Hello, instance: CreateInstance | None) -> None:
        self._nonce = hello.nonce
        # Before the cluster knows this client: an adapter sends its stash at once.
        conversation = self._conversation = self._converse(hello, instance)
        if self._checked:
            conversation.trust()
        try:
            accepted: ActorAddress[Any] = await self.acceptor.ask(
                lambda reply: AcceptConnection(hello, instance, self._inbox, reply)
            )
        except PenstockError as error:
            self._nonce = None  # another client may have it: `close` must not release that one
            self._inbox.end(error)
            return
        self._connection = accepted
        await self._route(conversation.open())
        self._end_if_failed()

    async def receive(self) -> Response:
        """See `ClusterClient`. Waits before Hello, too."""
        while not (found := self.receive_nowait(1)):
            if self._inbox.error is not None:
                raise self._inbox.error
            if self._conversation is not None:
                await self._route(self._conversation.acknowledgements())
            self._absorb(await self._inbox.receive())
        return found[0]

    def receive_nowait(self, count_max: int) -> list[Response]:
        """See `ClusterClient`."""
        self._absorb(self._inbox.take())
        conversation = self._conversation
        if conversation is None:
            return []
        taken = conversation.take(count_max)
        conversation.left(taken)
        # The rest are sent by `receive`, which can wait for room.
        if all(way.room for way in self._inbox.ways):
            for part, message, _ in conversation.acknowledgements():
                with contextlib.suppress(ResourceClosed, ConnectionBroken):
                    self._inbox.ways[part].send_nowait(message, None)
        return [response for response, _, _ in taken]

    def _absorb(self, messages: Sequence[Any]) -> None:
        if self._conversation is None:
            return
        for each in messages:
            # Nothing counts that comes after a response which breaks a rule.
            if self._conversation.failed is None:
                self._conversation.absorb(split_context(each)[0])
        self._end_if_failed()

    async def close(self) -> None:
        """See `ClusterClient`."""
        self._inbox.end(ResourceClosed("this client was closed"))
        # Cleared first: a second call has nothing left to release.
        nonce, self._nonce = self._nonce, None
        if nonce is not None:
            with contextlib.suppress(ResourceClosed, ConnectionBroken):
                await self.acceptor.ask(lambda reply: ReleaseConnection(nonce, reply))


class WireClient:
    """A client over a socket; see `connect`."""

    def __init__(self, connection: FramedConnection[Command, Response]) -> None:
        self._connection = connection
        self._refused: PenstockError | None = None

    async def send(self, command: Command | TracedMessage[Command]) -> None:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        await self._connection.send(command)

    def try_send(self, commands: Sequence[Command | TracedMessage[Command]]) -> int:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        return self._connection.try_send(commands)

    async def receive(self) -> Response:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        response: Response = split_context(await self._connection.receive())[0]
        self._look(response)
        if self._refused is not None:
            raise self._refused
        return response

    def _look(self, response: Response) -> None:
        if isinstance(response, ConnectionRefused):
            self._refused = from_wire(response.code, response.text, True)

    def receive_nowait(self, count_max: int) -> list[Response]:
        """See `ClusterClient`."""
        if self._refused is not None:
            return []
        found = [split_context(each)[0] for each in self._connection.receive_nowait(count_max)]
        if found:
            self._look(found[-1])  # nothing follows a refusal
        return found if self._refused is None else found[:-1]

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._connection.aclose()


async def connect(address: Place | str, settings: Settings, half: Half = "compute") -> WireClient:
    """Connect to a listener of one half of a cluster, ``host:port`` or ``unix:/path``; of the
    settings, `identity`, `tls_…` and `cluster_token_file` count. Raises as `transport.dial`."""
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
