"""A connection to the storage half: one client's conversation with all workers.

As `connection.Connection`, and simpler: every command goes to every worker, one by one. The
`Acceptor` decides which connection is served; this half has its own, with its own adapters and
nonces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias, assert_never

import msgspec

from actors.channel_adapter import (
    ConnectClient,
    ResponsesAcked,
    StorageFromClient,
    StorageFromWorker,
)
from actors.cluster.connection import ClientCommands, ResponseSink
from actors.cluster.storage_partitioned import StoragePartitioned
from actors.cluster.storage_rules import StorageCommandRules
from actors.errors import ConnectionBroken, PenstockError, ResourceClosed
from actors.kernel import Actor, ActorAddress
from actors.protocol.compute import Hello
from actors.protocol.storage import DroppedId, Response, StagedBatches
from actors.settings import Settings


class _Sent(msgspec.Struct, frozen=True, gc=False):
    count: int


class _OutletFailed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


StorageConnectionMessage: TypeAlias = ClientCommands | StorageFromWorker | _Sent | _OutletFailed


class StorageConnection(Actor[StorageConnectionMessage]):
    """One client's conversation with all workers; see the module."""

    def __init__(
        self,
        hello: Hello,
        adapters: Sequence[ActorAddress[Any]],
        outlet: ResponseSink,
        settings: Settings,
    ) -> None:
        self._hello = hello
        self._adapters = adapters
        self._outlet = outlet
        self._rules = StorageCommandRules(settings)
        self._parts = StoragePartitioned(len(adapters))
        self._queue: deque[tuple[Response, int, int]] = deque()
        """Merged responses, with the worker and the serial of the response that completed them."""
        self._sending = False

    async def on_start(self) -> None:
        """Attach to all adapters, then send Hello to them."""
        for adapter in self._adapters:
            await _send(adapter, ConnectClient(self._hello.nonce, self.ctx.self))
        await self._commands((self._hello,))

    async def receive(self, message: StorageConnectionMessage) -> None:
        """Handle commands of the client or a response of a worker."""
        match message:
            case ClientCommands(commands):
                await self._commands(commands)
            case StorageFromWorker(worker, nonce, response, serial):
                if nonce == self._hello.nonce:
                    await self._response(worker, response, serial)
            case _Sent(count):
                left = [self._queue.popleft() for _ in range(count)]
                self._sending = False
                self._send_next()
                for _, worker, serial in left:
                    # Acknowledged only now: so the workers' windows bound the queue, however slow
                    # the client is.
                    await self._took(worker, serial)
            case _OutletFailed(error):
                self._end(
                    error if isinstance(error, PenstockError) else ConnectionBroken(str(error))
                )
            case _:
                assert_never(message)

    async def _commands(self, commands: Sequence[Any]) -> None:
        for command in commands:
            try:
                self._rules.check(command)
                split = self._parts.split(command)
            except PenstockError as error:
                self._end(error)
                return
            for part, each in split:
                message = StorageFromClient(self._hello.nonce, each)
                await _send(self._adapters[part], message)

    async def _response(self, worker: int, response: Response, serial: int) -> None:
        try:
            merged = self._parts.absorb(worker, response)
        except PenstockError as error:
            self._end(error)
            return
        match merged:
            case None:
                await self._took(worker, serial)
                return
            case DroppedId(id=ended) | StagedBatches(uuid=ended):
                self._rules.ended(ended)
        self._queue.append((merged, worker, serial))
        self._send_next()

    async def _took(self, worker: int, serial: int) -> None:
        if serial:
            await _send(self._adapters[worker], ResponsesAcked(self._hello.nonce, (serial,)))

    def _send_next(self) -> None:
        # One batch at a time keeps the order.
        if self._sending or not self._queue:
            return
        self._sending = True
        batch = list(self._queue)

        async def send() -> None:
            for response, _, _ in batch:
                await self._outlet.send(response)  # type: ignore[arg-type]

        self.ctx.effect(send, done=lambda _: _Sent(len(batch)), failed=_OutletFailed)

    def _end(self, error: PenstockError) -> None:
        self._outlet.end(error)
        self.ctx.stop()

    async def on_stop(self) -> None:
        """End the outlet, so that its waiters wake up."""
        self._outlet.end(ResourceClosed("the connection was closed"))

    def describe(self) -> str:
        """Return the client's nonce and the number of responses to send."""
        return f"storage client {self._hello.nonce}, {len(self._queue)} to send"


async def _send(address: ActorAddress[Any], message: Any) -> None:
    """Send to an adapter; errors are ignored, since a stopping cluster may have none."""
    with suppress(ResourceClosed, ConnectionBroken):
        await address.send(message)
