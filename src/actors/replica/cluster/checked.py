"""A client that checks both sides against the rules of the protocol.

A command that breaks a rule is not sent: its caller gets `LocalProtocolError`, and the connection
goes on. A response that breaks one ends the conversation: `receive` raises `RemoteProtocolError`
from then on, and the connection is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.model.protocol.compute import (
    PeekResponse,
)
from actors.model.protocol.internal import Half
from actors.replica.cluster.client import ClusterClient
from actors.replica.cluster.rules import CommandRules, ResponseChecks, ResponseRules, StageRules
from actors.replica.cluster.storage_rules import StorageCommandRules, StorageResponseRules
from actors.runtime.errors import (
    InvalidUsage,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
)
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context


class CheckedClient:
    """Checks the rules of a half for a client of either kind; see `ClusterClient`."""

    def __init__(self, inner: ClusterClient, settings: Settings, half: Half = "compute") -> None:
        self._inner = inner
        self._commands: StageRules = CommandRules(None, settings)
        self._responses: ResponseChecks = ResponseRules()
        if half == "storage":
            self._commands = StorageCommandRules(settings)
            self._responses = StorageResponseRules()
        self._failed: RemoteProtocolError | None = None
        self._judged: Any = None
        """Command that was checked and noted, but not sent for want of room: it is not noted
        twice."""

    async def send(self, command: Any) -> None:
        """See `ClusterClient`. Raises `LocalProtocolError` for a command that breaks a rule."""
        self._judge(command)
        self._judged = None
        await self._inner.send(command)

    def try_send(self, commands: Sequence[Any]) -> int:
        """See `ClusterClient`."""
        sent = 0
        for command in commands:
            try:
                self._judge(command)
                if not self._inner.try_send((command,)):
                    break
            except PenstockError:
                if sent:
                    break  # the next call raises, for its first command
                raise
            self._judged = None
            sent += 1
        return sent

    def _judge(self, command: Any) -> None:
        if self._failed is not None:
            raise self._failed
        # By identity: a retry of the same command, not an equal one.
        if command is self._judged:
            return
        bare, _ = split_context(command)
        try:
            self._commands.check(bare)
        except (RemoteProtocolError, InvalidUsage) as error:
            raise LocalProtocolError(str(error)) from None
        self._responses.heard(bare)
        self._judged = command

    async def receive(self) -> Any:
        """See `ClusterClient`. Raises `RemoteProtocolError` when the cluster breaks a rule."""
        if self._failed is None:
            response = await self._inner.receive()
            self._hear(response)
        if self._failed is not None:
            await self._inner.close()
            raise self._failed
        return response

    def receive_nowait(self, count_max: int) -> list[Any]:
        """See `ClusterClient`."""
        found: list[Any] = []
        if self._failed is not None:
            return found
        for response in self._inner.receive_nowait(count_max):
            self._hear(response)
            if self._failed is not None:
                break  # the conversation has ended: drop the rest
            found.append(response)
        return found

    def _hear(self, response: Any) -> None:
        try:
            self._responses.check(response)
        except RemoteProtocolError as error:
            self._failed = error
            return
        if isinstance(response, PeekResponse) and isinstance(self._commands, CommandRules):
            self._commands.answered(response.uuid)
        for id in self._responses.ended:
            self._commands.ended(id)
        self._responses.ended.clear()

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._inner.close()
