"""A client's connection whose exchanges are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulators.service.checkers import ExchangeChecker
from tests.simulators.service.links import WireEnd

if TYPE_CHECKING:
    from tests.simulators.service.cluster import SimulatedCluster


class ObservedLink:
    """A client's end with an `ExchangeChecker`. It is its own dialler, as `Client.in_process` needs
    one."""

    def __init__(self, end: WireEnd, world: SimulatedCluster) -> None:
        self._end = end
        self.checker = ExchangeChecker(world.history, world.reads)
        self._sent = world.guarded(self.checker.sent)
        self._received = world.guarded(self.checker.received)

    async def connect_in_process(self) -> ObservedLink:
        """Return this link."""
        return self

    async def send(self, message: Any) -> None:
        """Send a message, and check it."""
        self._sent(message)
        await self._end.send(message)

    def try_send(self, messages: Sequence[Any]) -> int:
        """Send messages without waiting, and return how many were sent."""
        count = self._end.try_send(messages)
        for message in messages[:count]:
            self._sent(message)
        return count

    async def receive(self) -> Any:
        """Return the next message, checked."""
        message = await self._end.receive()
        self._received(message)
        return message

    async def aclose(self) -> None:
        """End the connection."""
        await self._end.aclose()
