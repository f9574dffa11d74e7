"""The cluster's side of a controller's socket: from the opening to the last word.

One coroutine a socket. The first two frames must be a Hello and a CreateInstance, and come within
``connect_timeout_ms``; only then the acceptor hears of the client, so neither a stranger nor a
client of another instance displaces anybody, and none holds its place by saying nothing. Then
frames become `ClientCommands`, waiting while the cluster is busy; whatever ends the conversation
is told to the peer, if it still listens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import anyio

from actors.cluster.connection import (
    LOT_MAX,
    Accept,
    AcceptorMessage,
    ClientCommands,
    ConnectionMessage,
    Leave,
    refusal,
)
from actors.cluster.transport import FramedConnection
from actors.errors import Broken, Closed, PenstockError, RemoteProtocolError
from actors.kernel import Address
from actors.protocol.compute import Command, CreateInstance, Hello, Response
from actors.settings import Settings


class WireOutlet:
    """Sends responses as frames; `ended` is set with the reason in `error`."""

    def __init__(self, connection: FramedConnection[Response, Command]) -> None:
        self._connection = connection
        self.error: PenstockError | None = None
        self.ended = anyio.Event()

    async def send(self, response: Response) -> None:
        """Sends one, waiting while the peer is slow."""
        await self._connection.send(response)

    def offer(self, responses: Sequence[Response]) -> int:
        """Sends the first so many of them without waiting."""
        return self._connection.offer(responses)

    def end(self, error: PenstockError) -> None:
        """The connection is over, and why."""
        if self.error is None:
            self.error = error
            self.ended.set()


class Server:
    """Conversations of one listener."""

    def __init__(self, acceptor: Address[AcceptorMessage], settings: Settings) -> None:
        self._acceptor = acceptor
        self._settings = settings

    async def converse(self, connection: FramedConnection[Any, Any]) -> None:
        """One client, from its Hello on. Raises `PenstockError` for why it ended."""
        outlet = WireOutlet(connection)
        hello: Hello | None = None
        try:
            introduced, instance = await self._introduced(connection)
            address: Address[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: Accept(introduced, instance, outlet, reply)
            )
            hello = introduced
            await self._pump(connection, address, outlet)
        except PenstockError as error:
            # When both sides have a reason, the cluster's own came first.
            reason = outlet.error or error
            await self._last_word(connection, reason)
            raise reason from None
        finally:
            if hello is not None:
                nonce = hello.nonce
                with anyio.CancelScope(shield=True), contextlib.suppress(Closed, Broken):
                    await self._acceptor.send(Leave(nonce))

    async def _introduced(
        self, connection: FramedConnection[Any, Any]
    ) -> tuple[Hello, CreateInstance | None]:
        """The first two frames. Raises `RemoteProtocolError` for others, or none in time."""
        limit_ms = self._settings.connect_timeout_ms
        came = ""
        try:
            with anyio.fail_after(limit_ms / 1000):
                hello = await connection.receive()
                if not isinstance(hello, Hello):
                    raise RemoteProtocolError(f"{type(hello).__name__} came before Hello")
                came = ", only Hello"
                instance = await connection.receive()
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
        address: Address[ConnectionMessage],
        outlet: WireOutlet,
    ) -> None:
        """Commands in, until either side ends it. Raises why."""
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
        raise outlet.error or failure or Closed("the connection was closed")

    async def _last_word(
        self, connection: FramedConnection[Any, Any], error: PenstockError
    ) -> None:
        if isinstance(error, Broken) and type(error) is Broken:
            return
        with (
            contextlib.suppress(PenstockError),
            anyio.move_on_after(self._settings.connect_timeout_ms / 1000),
        ):
            await connection.send(refusal(error))
