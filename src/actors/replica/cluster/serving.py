"""The cluster's side of a controller's socket, from the opening to the last response.

There is one coroutine for each socket. The first two frames must be a Hello and a CreateInstance,
and come within ``connect_timeout_ms``. Then frames become `ClientCommands`, waiting while the
cluster is busy; the reason of the end is sent to the peer, if it still listens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import anyio

from actors.model.protocol.compute import Command, CreateInstance, Hello, Response
from actors.replica.cluster.connection import (
    LOT_MAX,
    AcceptConnection,
    AcceptorMessage,
    ClientCommands,
    ConnectionMessage,
    ReleaseConnection,
    refusal,
)
from actors.runtime.errors import (
    ConnectionBroken,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context
from actors.runtime.transport.connection import FramedConnection


class WireOutlet:
    """Sends responses as frames; `ended` is set with the reason in `error`."""

    def __init__(self, connection: FramedConnection[Response, Command]) -> None:
        self._connection = connection
        self.error: PenstockError | None = None
        self.ended = anyio.Event()

    async def send(self, response: Response) -> None:
        """Send one response, waiting while the peer is slow."""
        await self._connection.send(response)

    def offer(self, responses: Sequence[Response]) -> int:
        """Send as many of the first responses as possible without waiting; return their number."""
        return self._connection.offer(responses)

    def end(self, error: PenstockError) -> None:
        """End the connection with a reason."""
        if self.error is None:
            self.error = error
            self.ended.set()


class ConversationServer:
    """Serves the conversations of one listener."""

    def __init__(self, acceptor: ActorAddress[AcceptorMessage], settings: Settings) -> None:
        self._acceptor = acceptor
        self._settings = settings

    async def converse(self, connection: FramedConnection[Any, Any]) -> None:
        """Serve one client, from its Hello on. Raises `PenstockError` with the reason of its
        end."""
        outlet = WireOutlet(connection)
        hello: Hello | None = None
        try:
            # Ordered before the acceptor hears of the client: no stranger, silent client or client
            # of another instance displaces the active one.
            introduced, instance = await self._introduced(connection)
            address: ActorAddress[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: AcceptConnection(introduced, instance, outlet, reply)
            )
            hello = introduced
            await self._pump(connection, address, outlet)
        except PenstockError as error:
            # If both sides have a reason, the cluster's own came first.
            reason = outlet.error or error
            await self._last_word(connection, reason)
            raise reason from None
        finally:
            if hello is not None:
                nonce = hello.nonce
                # Shielded: a cancelled conversation must still release its connection.
                with (
                    anyio.CancelScope(shield=True),
                    contextlib.suppress(ResourceClosed, ConnectionBroken),
                ):
                    await self._acceptor.send(ReleaseConnection(nonce))

    async def _introduced(
        self, connection: FramedConnection[Any, Any]
    ) -> tuple[Hello, CreateInstance | None]:
        """Return the first two frames. Raises `RemoteProtocolError` for others, or none in time."""
        limit_ms = self._settings.connect_timeout_ms
        came = ""
        try:
            with anyio.fail_after(limit_ms / 1000):
                hello, _ = split_context(await connection.receive())
                if not isinstance(hello, Hello):
                    raise RemoteProtocolError(f"{type(hello).__name__} came before Hello")
                came = ", only Hello"
                instance, _ = split_context(await connection.receive())
        except TimeoutError:
            raise RemoteProtocolError(
                f"no Hello and CreateInstance in {limit_ms} ms (connect_timeout_ms){came}"
            ) from None
        if not isinstance(instance, CreateInstance):
            raise RemoteProtocolError(f"{type(instance).__name__} came before CreateInstance")
        return hello, instance

    async def _pump(
        self,
        connection: FramedConnection[Any, Any],
        address: ActorAddress[ConnectionMessage],
        outlet: WireOutlet,
    ) -> None:
        """Pass on commands until either side ends the conversation. Raises the reason."""
        failure: PenstockError | None = None

        async def read() -> None:
            nonlocal failure
            try:
                while True:
                    first = await connection.receive()
                    lot = (first, *connection.at_hand(LOT_MAX - 1))
                    await address.send(ClientCommands(lot))
            except PenstockError as error:
                failure = error
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await outlet.ended.wait()
            group.cancel_scope.cancel()
        raise outlet.error or failure or ResourceClosed("the connection was closed")

    async def _last_word(
        self, connection: FramedConnection[Any, Any], error: PenstockError
    ) -> None:
        # Plain Broken: the peer is gone and cannot be told.
        if isinstance(error, ConnectionBroken) and type(error) is ConnectionBroken:
            return
        with (
            contextlib.suppress(PenstockError),
            anyio.move_on_after(self._settings.connect_timeout_ms / 1000),
        ):
            await connection.send(refusal(error))
