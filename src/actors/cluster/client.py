"""A controller's end of the replica protocol, in process or over a socket.

Both behave alike: the first command is a Hello with a fresh nonce; responses are merged over the
workers; `receive` raises the reason for which the connection ended (`ConnectionDisplaced`,
`InvalidUsage`, …), `ConnectionBroken` if none was given. A client has one connection and one Hello:
a retry needs another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from actors.cluster.connection import (
    LOT_MAX,
    AcceptConnection,
    AcceptorMessage,
    ClientCommands,
    ConnectionMessage,
    ReleaseConnection,
)
from actors.cluster.shortcut import PeekShortcut
from actors.errors import (
    ConnectionBroken,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    WouldBlock,
    from_wire,
)
from actors.kernel import ActorAddress
from actors.progress import Nonce
from actors.protocol.compute import (
    Command,
    ConnectionRefused,
    CreateInstance,
    Frontiers,
    Hello,
    Peek,
    PeekRows,
    Response,
)
from actors.protocol.internal import Half
from actors.settings import Settings
from actors.transport.address import NetworkAddress as Place
from actors.transport.connection import FramedConnection, dial
from actors.transport.security import for_dialler

REPLICA_MAGIC: Final = b"PENSREPL"
REPLICA_VERSION: Final = 2
LOCAL_QUEUE_MAX: Final = 16
"""Unread responses of an in-process client at which its connection waits."""


class ClusterClient(Protocol):
    """One connection to a cluster."""

    async def send(self, command: Command, /) -> None:
        """Send a command; the first is a Hello. Raises the reason for which the connection has
        ended."""
        ...

    def offer(self, commands: Sequence[Command], /) -> int:
        """Send as many of the first commands as possible without waiting, and return their number.
        0: use `send`, which waits. Raises as `send`, for the first command."""
        ...

    def answer(self, peek: Peek, /) -> PeekRows | None:
        """Return the answer to a peek if it is there already, so that it need not be sent
        (`shortcut`); None: send it."""
        ...

    async def receive(self) -> Response:
        """Return the next response. Raises `ConnectionDisplaced`, `ConnectionBroken`, or the reason
        of a refusal."""
        ...

    def at_hand(self, count_max: int, /) -> list[Response]:
        """Return the responses that have arrived after `receive`'s last one, without waiting. The
        next `receive` raises an error that follows them."""
        ...

    async def close(self) -> None:
        """End the connection. Idempotent."""
        ...


class _LocalOutlet:
    """End of an in-process connection: a bounded queue, and the error with which it ended."""

    def __init__(self) -> None:
        self._queue: deque[Response] = deque()
        self._error: PenstockError | None = None
        self._changed = asyncio.Event()
        """Waiters clear it first, and check the queue again when it is set."""

    @property
    def error(self) -> PenstockError | None:
        """Return the error with which the connection ended."""
        return self._error

    async def send(self, response: Response) -> None:
        while self._error is None and len(self._queue) >= LOCAL_QUEUE_MAX:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        self._queue.append(response)
        self._changed.set()

    def offer(self, responses: Sequence[Response]) -> int:
        """Take the first responses for which there is room, without waiting; return their
        number."""
        if self._error is not None:
            raise self._error
        taken = responses[: max(0, LOCAL_QUEUE_MAX - len(self._queue))]
        if taken:
            self._queue.extend(taken)
            self._changed.set()
        return len(taken)

    async def take(self) -> Response:
        """Return the next response; those before the end are still delivered."""
        while not self._queue:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        response = self._queue.popleft()
        self._changed.set()
        return response

    def at_hand(self, count_max: int) -> list[Response]:
        """Return the first `count_max` of the responses that have arrived."""
        queue = self._queue
        found = [queue.popleft() for _ in range(min(count_max, len(queue)))]
        if found:
            self._changed.set()
        return found

    def end(self, error: PenstockError) -> None:
        if self._error is None:
            self._error = error
            self._changed.set()


class LocalClient:
    """A client in the same process: messages pass by reference.

    The compute half is told of a client only with its CreateInstance, so Hello waits here for it;
    the storage half has no such command. As over a wire, a refusal is raised by `receive`.
    """

    def __init__(
        self,
        acceptor: ActorAddress[AcceptorMessage],
        shortcut: PeekShortcut | None = None,
        half: Half = "compute",
    ) -> None:
        self._acceptor = acceptor
        self._shortcut = shortcut
        """None for a half without peeks."""
        self._half = half
        self._outlet = _LocalOutlet()
        self._connection: ActorAddress[ConnectionMessage] | None = None
        self._hello: Hello | None = None
        self._nonce: Nonce | None = None

    async def send(self, command: Command) -> None:
        """See `ClusterClient`."""
        if self._outlet.error is not None:
            raise self._outlet.error
        if self._connection is not None:
            try:
                await self._connection.send(ClientCommands((command,)))
            except (ResourceClosed, ConnectionBroken):
                raise self._outlet.error or ConnectionBroken("the cluster is gone") from None
            self._heard(command)
            return
        if self._hello is None:
            if not isinstance(command, Hello):
                raise LocalProtocolError(f"{type(command).__name__} came before Hello")
            self._hello = command
            if self._half == "storage":
                await self._introduce(command, None)
            return
        if not isinstance(command, CreateInstance):
            name = type(command).__name__
            self._outlet.end(RemoteProtocolError(f"{name} came before CreateInstance"))
            return
        await self._introduce(self._hello, command)

    def offer(self, commands: Sequence[Command]) -> int:
        """See `ClusterClient`. Returns 0 until the cluster has accepted this client: `send` then
        waits."""
        if self._outlet.error is not None:
            raise self._outlet.error
        if self._connection is None:
            return 0
        lot = tuple(commands)[:LOT_MAX]
        try:
            self._connection.send_nowait(ClientCommands(lot))
        except WouldBlock:
            return 0
        except (ResourceClosed, ConnectionBroken):
            raise self._outlet.error or ConnectionBroken("the cluster is gone") from None
        for command in lot:
            self._heard(command)
        return len(lot)

    def _heard(self, command: Command) -> None:
        if self._shortcut is not None:
            self._shortcut.heard(command)

    def answer(self, peek: Peek) -> PeekRows | None:
        """See `ClusterClient`."""
        # The outlet ends before the workers are told of another client, so the index is still this
        # one's.
        if self._shortcut is None or self._outlet.error is not None:
            return None
        return self._shortcut.answer(peek)

    async def _introduce(self, hello: Hello, instance: CreateInstance | None) -> None:
        self._nonce = hello.nonce
        try:
            accepted: ActorAddress[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: AcceptConnection(hello, instance, self._outlet, reply)
            )
        except PenstockError as error:
            self._nonce = None  # another client may have it: `close` must not release that one
            self._outlet.end(error)
            return
        self._connection = accepted

    async def receive(self) -> Response:
        """See `ClusterClient`. Waits before Hello, too."""
        response = await self._outlet.take()
        self._note_frontiers(response)
        return response

    def at_hand(self, count_max: int) -> list[Response]:
        """See `ClusterClient`."""
        found = self._outlet.at_hand(count_max)
        for response in found:
            self._note_frontiers(response)
        return found

    def _note_frontiers(self, response: Response) -> None:
        if isinstance(response, Frontiers) and self._shortcut is not None:
            self._shortcut.note(response)

    async def close(self) -> None:
        """See `ClusterClient`."""
        self._outlet.end(ResourceClosed("this client was closed"))
        # Cleared first: a second call has nothing left to release.
        nonce, self._nonce = self._nonce, None
        if nonce is not None:
            with contextlib.suppress(ResourceClosed, ConnectionBroken):
                await self._acceptor.ask(lambda reply: ReleaseConnection(nonce, reply))


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

    def offer(self, commands: Sequence[Command]) -> int:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        return self._connection.offer(commands)

    def answer(self, peek: Peek) -> PeekRows | None:
        """See `ClusterClient`: always None; the connection's other end may answer."""
        return None

    async def receive(self) -> Response:
        """See `ClusterClient`."""
        if self._refused is not None:
            raise self._refused
        response = await self._connection.receive()
        self._look(response)
        if self._refused is not None:
            raise self._refused
        return response

    def _look(self, response: Response) -> None:
        if isinstance(response, ConnectionRefused):
            self._refused = from_wire(response.code, response.text, True)

    def at_hand(self, count_max: int) -> list[Response]:
        """See `ClusterClient`."""
        if self._refused is not None:
            return []
        found = self._connection.at_hand(count_max)
        if found:
            self._look(found[-1])  # nothing follows a refusal
        return found if self._refused is None else found[:-1]

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._connection.aclose()


async def connect(address: Place | str, settings: Settings) -> WireClient:
    """Connect to a cluster's listener, ``host:port`` or ``unix:/path``; of the settings,
    `identity`, `tls_…` and `cluster_token_file` count. Raises as `transport.dial`."""
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
