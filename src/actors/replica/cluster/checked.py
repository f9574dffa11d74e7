"""A client that checks both sides against the rules of the protocol.

A command that breaks a rule is not sent: the caller gets a `LocalProtocolError`, and the connection
continues. A response that breaks a rule ends the conversation: from then on `receive` raises
`RemoteProtocolError`, and the connection is closed.
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
    """Wraps a `ClusterClient` of either kind and checks the rules of its half."""

    def __init__(self, inner: ClusterClient, settings: Settings, half: Half = "compute") -> None:
        self._inner = inner
        self._commands: StageRules = CommandRules(None, settings)
        self._responses: ResponseChecks = ResponseRules()
        if half == "storage":
            self._commands = StorageCommandRules(settings)
            self._responses = StorageResponseRules()
        self._failed: RemoteProtocolError | None = None
        """Violation that ended the conversation, raised by every later call."""
        self._checked_command: Any = None
        """Command that was checked and recorded but not sent for lack of room. Its retry is
        recognized by identity, so that it is not recorded twice."""

    async def send(self, command: Any) -> None:
        """Send a command. Raise `LocalProtocolError` if it breaks a rule, and the same errors as
        `ClusterClient.send`."""
        self._check_command(command)
        self._checked_command = None
        await self._inner.send(command)

    def try_send(self, commands: Sequence[Any]) -> int:
        """Send as many commands as possible without waiting; see `ClusterClient.try_send`.

        Raise `LocalProtocolError` if the first command breaks a rule.
        """
        sent = 0
        for command in commands:
            try:
                self._check_command(command)
                if not self._inner.try_send((command,)):
                    break
            except PenstockError:
                if sent:
                    break  # the next call raises the error, for its first command
                raise
            self._checked_command = None
            sent += 1
        return sent

    def _check_command(self, command: Any) -> None:
        if self._failed is not None:
            raise self._failed
        # Compare by identity: this must be a retry of the same command, not an equal one.
        if command is self._checked_command:
            return
        bare, _ = split_context(command)
        try:
            self._commands.check(bare)
        except (RemoteProtocolError, InvalidUsage) as error:
            raise LocalProtocolError(str(error)) from None
        self._responses.note_command(bare)
        self._checked_command = command

    async def receive(self) -> Any:
        """Return the next response. Raise `RemoteProtocolError` if the cluster broke a rule."""
        if self._failed is None:
            response = await self._inner.receive()
            self._check_response(response)
        if self._failed is not None:
            await self._inner.close()
            raise self._failed
        return response

    def receive_nowait(self, count_max: int) -> list[Any]:
        """Return the responses that have arrived, up to the first that breaks a rule."""
        found: list[Any] = []
        if self._failed is not None:
            return found
        for response in self._inner.receive_nowait(count_max):
            self._check_response(response)
            if self._failed is not None:
                break  # the conversation has ended, so discard the rest
            found.append(response)
        return found

    def _check_response(self, response: Any) -> None:
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
        """End the connection. Idempotent."""
        await self._inner.close()
