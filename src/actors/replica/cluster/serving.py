"""The cluster's side of a controller's socket, from the opening to the last response.

There is one coroutine for each socket. The first frames must be those that open a conversation with
the half (`HalfWire.opening`), and must arrive within ``connect_timeout_ms``. After that, frames
become `ClientCommands`, waiting while the cluster is busy. When the conversation ends, the reason
is sent to the peer, if the peer still listens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import anyio

from actors.model.protocol.compute import Command, CreateInstance, Hello, Response
from actors.model.protocol.internal import Half
from actors.replica.cluster.client import WIRES
from actors.replica.cluster.connection import (
    AcceptConnection,
    AcceptorMessage,
    ClientCommands,
    ConnectionMessage,
    ReleaseConnection,
    refusal,
)
from actors.replica.cluster.conversations import BATCH_COMMANDS_MAX
from actors.runtime.errors import (
    ConnectionBroken,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import FramedConnection, TransportListener
from actors.runtime.transport.security import for_listener


class WireSink:
    """Sends responses as frames. `ended` is set once `error` has the reason for the end."""

    def __init__(self, connection: FramedConnection[Response, Command]) -> None:
        self._connection = connection
        self.error: PenstockError | None = None
        """Reason for which the connection has ended, or None."""
        self.ended = anyio.Event()
        """Set together with `error`."""

    async def send(self, response: Response) -> None:
        """Send one response, waiting while the peer is slow."""
        await self._connection.send(response)

    def try_send(self, responses: Sequence[Response]) -> int:
        """Send as many of the responses as possible without waiting, and return how many."""
        return self._connection.try_send(responses)

    def end(self, error: PenstockError) -> None:
        """End the connection with a reason. Only the first reason counts."""
        if self.error is None:
            self.error = error
            self.ended.set()


class ConversationServer:
    """Serves the conversations of one half's listener."""

    def __init__(
        self,
        acceptor: ActorAddress[AcceptorMessage],
        settings: Settings,
        half: Half = "compute",
    ) -> None:
        self._acceptor = acceptor
        self._settings = settings
        self._wire = WIRES[half]

    async def converse(self, connection: FramedConnection[Any, Any]) -> None:
        """Serve one client, from its Hello on. Raise a `PenstockError` with the reason of the
        end."""
        sink = WireSink(connection)
        hello: Hello | None = None
        try:
            # Do this before the acceptor hears of the client. An unauthenticated or silent client,
            # or a client of another instance, must not displace the active one.
            opening_hello, instance = await self._read_opening(connection)
            address: ActorAddress[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: AcceptConnection(opening_hello, instance, sink, reply)
            )
            hello = opening_hello
            await self._pump(connection, address, sink)
        except PenstockError as error:
            # If both sides have a reason, the cluster's was first.
            reason = sink.error or error
            await self._send_reason(connection, reason)
            raise reason from None
        finally:
            if hello is not None:
                nonce = hello.nonce
                # Shield this: a cancelled conversation must still release its connection.
                with (
                    anyio.CancelScope(shield=True),
                    contextlib.suppress(ResourceClosed, ConnectionBroken),
                ):
                    await self._acceptor.send(ReleaseConnection(nonce))

    async def _read_opening(
        self, connection: FramedConnection[Any, Any]
    ) -> tuple[Hello, CreateInstance | None]:
        """Return the opening commands. Raise `RemoteProtocolError` if others arrive, or none in
        time."""
        limit_ms, opening = self._settings.connect_timeout_ms, self._wire.opening
        came: list[Any] = []
        try:
            with anyio.fail_after(limit_ms / 1000):
                for kind in opening:
                    command, _ = split_context(await connection.receive())
                    # The acceptor never hears of a client that opens differently.
                    if not isinstance(command, kind):
                        raise RemoteProtocolError(
                            f"got {type(command).__name__} before {kind.__name__}"
                        )
                    came.append(command)
        except TimeoutError:
            wanted = " and ".join(kind.__name__ for kind in opening)
            only = " (got only Hello)" if came else ""
            raise RemoteProtocolError(
                f"no {wanted} within {limit_ms} ms (connect_timeout_ms){only}"
            ) from None
        hello, *rest = came
        return hello, rest[0] if rest else None

    async def _pump(
        self,
        connection: FramedConnection[Any, Any],
        address: ActorAddress[ConnectionMessage],
        sink: WireSink,
    ) -> None:
        """Pass on commands until either side ends the conversation, then raise the reason."""
        failure: PenstockError | None = None

        async def read() -> None:
            nonlocal failure
            try:
                while True:
                    first = await connection.receive()
                    batch = (first, *connection.receive_nowait(BATCH_COMMANDS_MAX - 1))
                    await address.send(ClientCommands(batch))
            except PenstockError as error:
                failure = error
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await sink.ended.wait()
            group.cancel_scope.cancel()
        raise sink.error or failure or ResourceClosed("the connection was closed")

    async def _send_reason(
        self, connection: FramedConnection[Any, Any], error: PenstockError
    ) -> None:
        # With a plain ConnectionBroken the peer is gone, so it cannot be told.
        if isinstance(error, ConnectionBroken) and type(error) is ConnectionBroken:
            return
        with (
            contextlib.suppress(PenstockError),
            anyio.move_on_after(self._settings.connect_timeout_ms / 1000),
        ):
            await connection.send(refusal(error))


async def bind_listener(
    address: Place | str, settings: Settings, half: Half = "compute"
) -> TransportListener:
    """Return a listener for one half on an address, which is not served yet.

    With port 0 a free port is chosen; see `TransportListener.address`. Raise `AddressInUse`, and
    `BadSettings` for an address that needs TLS and tokens but has none.
    """
    wire = WIRES[half]
    place = Place.parse(address, wire.listen) if isinstance(address, str) else address
    return await TransportListener.bind(
        place,
        wire.response,
        wire.command,
        settings,
        wire.magic,
        wire.version,
        identity=settings.identity,
        security=for_listener(wire.listen, place, settings, "cluster_token_file"),
    )
