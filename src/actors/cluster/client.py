"""A controller's end of the replica protocol, in process or over a socket.

Both behave alike: the first command is a Hello with a fresh nonce; responses are merged over
the workers; `receive` raises why the connection ended (`Displaced`, `InvalidUsage`, …), `Broken`
when nobody said. One connection, one Hello: to start afresh, make another client.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

import anyio

from actors.cluster.address import Address as Place
from actors.cluster.connection import (
    Accept,
    AcceptorMessage,
    ClientCommands,
    ConnectionMessage,
    Leave,
)
from actors.cluster.security import for_dialler
from actors.cluster.transport import FramedConnection, dial
from actors.errors import (
    Broken,
    Closed,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
    from_wire,
)
from actors.kernel import Address
from actors.progress import Nonce
from actors.protocol.compute import Command, CreateInstance, Hello, Refused, Response
from actors.settings import Settings

REPLICA_MAGIC: Final = b"PENSREPL"
REPLICA_VERSION: Final = 2
LOCAL_QUEUE_MAX: Final = 16
"""Responses that an in-process client may leave unread before its connection waits."""


class ClusterClient(Protocol):
    """One connection to a cluster."""

    async def send(self, command: Command, /) -> None:
        """Sends a command; the first is a Hello. Raises why the connection has ended."""
        ...

    async def receive(self) -> Response:
        """The next response. Raises `Displaced`, `Broken`, or why the client was refused."""
        ...

    async def close(self) -> None:
        """Ends the connection. Twice is harmless."""
        ...


class _LocalOutlet:
    """The in-process end of a connection: a bounded queue, and why it ended."""

    def __init__(self) -> None:
        self._queue: deque[Response] = deque()
        self._error: PenstockError | None = None
        self._changed = anyio.Event()

    @property
    def error(self) -> PenstockError | None:
        """Why it ended."""
        return self._error

    async def send(self, response: Response) -> None:
        while self._error is None and len(self._queue) >= LOCAL_QUEUE_MAX:
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        self._queue.append(response)
        self._notify()

    def offer(self, responses: Sequence[Response]) -> int:
        """Takes the first so many of them without waiting."""
        if self._error is not None:
            raise self._error
        taken = responses[: max(0, LOCAL_QUEUE_MAX - len(self._queue))]
        if taken:
            self._queue.extend(taken)
            self._notify()
        return len(taken)

    async def take(self) -> Response:
        """The next response; what came before the end is still delivered."""
        while not self._queue:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        response = self._queue.popleft()
        self._notify()
        return response

    def end(self, error: PenstockError) -> None:
        if self._error is None:
            self._error = error
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class LocalClient:
    """A client in the same process: messages pass by reference.

    Hello waits here for CreateInstance: the cluster hears of a client when it has said both. As
    over a wire, who is refused learns of it by `receive`.
    """

    def __init__(self, acceptor: Address[AcceptorMessage]) -> None:
        self._acceptor = acceptor
        self._outlet = _LocalOutlet()
        self._connection: Address[ConnectionMessage] | None = None
        self._hello: Hello | None = None
        self._nonce: Nonce | None = None

    async def send(self, command: Command) -> None:
        """See `ClusterClient`."""
        if self._outlet.error is not None:
            raise self._outlet.error
        if self._connection is not None:
            try:
                await self._connection.send(ClientCommands((command,)))
            except (Closed, Broken):
                raise self._outlet.error or Broken("the cluster is gone") from None
            return
        if self._hello is None:
            if not isinstance(command, Hello):
                raise LocalProtocolError(f"{type(command).__name__} came before Hello")
            self._hello = command
            return
        if not isinstance(command, CreateInstance):
            name = type(command).__name__
            self._outlet.end(RemoteProtocolError(f"{name} came before CreateInstance"))
            return
        await self._introduce(self._hello, command)

    async def _introduce(self, hello: Hello, instance: CreateInstance) -> None:
        self._nonce = hello.nonce
        try:
            accepted: Address[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: Accept(hello, instance, self._outlet, reply)
            )
        except PenstockError as error:
            self._nonce = None  # it may be another's
            self._outlet.end(error)
            return
        self._connection = accepted

    async def receive(self) -> Response:
        """See `ClusterClient`. Waits before Hello too."""
        return await self._outlet.take()

    async def close(self) -> None:
        """See `ClusterClient`."""
        self._outlet.end(Closed("this client was closed"))
        nonce, self._nonce = self._nonce, None
        if nonce is not None:
            with contextlib.suppress(Closed, Broken):
                await self._acceptor.ask(lambda reply: Leave(nonce, reply))


class WireClient:
    """A client over a socket; see `connect`."""

    def __init__(self, connection: FramedConnection[Command, Response]) -> None:
        self._connection = connection
        self._refused: PenstockError | None = None

    async def send(self, command: Command) -> None:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        await self._connection.send(command)

    async def receive(self) -> Response:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        response = await self._connection.receive()
        if isinstance(response, Refused):
            self._refused = from_wire(response.code, response.text, True)
            raise self._refused
        return response

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._connection.aclose()


async def connect(address: Place | str, settings: Settings) -> WireClient:
    """Connects to a cluster's listener, ``host:port`` or ``unix:/path``; of the settings,
    `identity`, `tls_…` and `cluster_token_file` count. Raises what `transport.dial` raises."""
    place = Place.parse(address) if isinstance(address, str) else address
    connection: FramedConnection[Any, Any] = await dial(
        place,
        Command,
        Response,
        settings,
        REPLICA_MAGIC,
        REPLICA_VERSION,
        identity=settings.identity,
        security=for_dialler(place, settings, settings.cluster_token_file),
    )
    return WireClient(connection)
