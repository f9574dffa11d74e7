"""A client that holds both sides to the rules of the protocol.

A command that breaks a rule is not sent: who wanted it gets `LocalProtocolError`, and the
connection goes on. A response that breaks one ends the conversation: `receive` raises
`RemoteProtocolError`, now and ever after, and the connection is closed.
"""

from __future__ import annotations

from actors.cluster.client import ClusterClient
from actors.cluster.response_rules import ResponseRules
from actors.cluster.rules import CommandRules
from actors.errors import InvalidUsage, LocalProtocolError, RemoteProtocolError
from actors.protocol.compute import Command, PeekResponse, Response
from actors.settings import Settings


class CheckedClient:
    """Puts the rules before a client of either kind; see `ClusterClient`."""

    def __init__(self, inner: ClusterClient, settings: Settings) -> None:
        self._inner = inner
        self._commands = CommandRules(None, settings)
        self._responses = ResponseRules()
        self._failed: RemoteProtocolError | None = None

    async def send(self, command: Command) -> None:
        """See `ClusterClient`. Raises `LocalProtocolError` for what may not be said."""
        if self._failed is not None:
            raise self._failed
        try:
            self._commands.check(command)
        except (RemoteProtocolError, InvalidUsage) as error:
            raise LocalProtocolError(str(error)) from None
        self._responses.heard(command)
        await self._inner.send(command)

    async def receive(self) -> Response:
        """See `ClusterClient`. Raises `RemoteProtocolError` when the cluster breaks a rule."""
        if self._failed is not None:
            raise self._failed
        response = await self._inner.receive()
        try:
            self._responses.check(response)
        except RemoteProtocolError as error:
            self._failed = error
            await self._inner.close()
            raise
        if isinstance(response, PeekResponse):
            self._commands.answered(response.uuid)
        for id in self._responses.ended:
            self._commands.ended(id)
        self._responses.ended.clear()
        return response

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._inner.close()
