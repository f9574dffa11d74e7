"""The cluster's side of a controller's socket: from the opening to the last word.

One coroutine a socket. The first frame must be a Hello; only then the acceptor hears of the
client, so a stranger displaces nobody. Frames become `ClientCommand`s, waiting while the cluster
is busy; whatever ends the conversation is told to the peer, if it still listens.
"""

from __future__ import annotations

import contextlib
from typing import Any

import anyio

from actors.cluster.connection import (
    Accept,
    AcceptorMessage,
    ClientCommand,
    ConnectionMessage,
    Leave,
    refusal,
)
from actors.cluster.transport import FramedConnection
from actors.errors import Broken, Closed, PenstockError, RemoteProtocolError
from actors.kernel import Address
from actors.protocol.compute import Command, Hello, Response
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
            first = await connection.receive()
            if not isinstance(first, Hello):
                raise RemoteProtocolError(f"{type(first).__name__} came before Hello")
            accept = first
            address: Address[ConnectionMessage] = await self._acceptor.ask(
                lambda reply: Accept(accept, outlet, reply)
            )
            hello = first
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
                    await address.send(ClientCommand(await connection.receive()))
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
