"""A connection inside the process: the two ends of a client's link to its session.

It behaves as a framed connection does: bounded both ways, so that a slow side stops the other, and
closed for both when one end closes; messages sent before the close are still received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from actors.control.access.open_sessions import OpenSession
from actors.runtime.errors import ConnectionBroken, ResourceClosed, WouldBlock
from actors.runtime.kernel import BoundedMailbox
from actors.runtime.spans import use_context
from actors.runtime.telemetry import TracedMessage

S = TypeVar("S")
R = TypeVar("R")

_END: Final = object()


class MemoryConnection(Generic[S, R]):
    """One end; `pair` makes both."""

    def __init__(self, peer: str, inbox: BoundedMailbox[Any], outbox: BoundedMailbox[Any]) -> None:
        self.peer = peer
        self._inbox = inbox
        self._outbox = outbox
        self._received: deque[Any] = deque()
        self._ended = False
        self._closed = False
        self.session: OpenSession | None = None
        """The session that the client has by this connection, on its end."""

    async def send(self, message: S | TracedMessage[S]) -> None:
        """Send a message, perhaps with a trace context, waiting while the other side is slow.
        Raises `ResourceClosed` or `ConnectionBroken`."""
        if self._closed:
            raise ResourceClosed(f"the connection to {self.peer} was closed by this side")
        try:
            # The sender's own context does not count: a message that has one brings it.
            with use_context(None):
                await self._outbox.send(message)
        except ResourceClosed:
            raise ConnectionBroken(f"{self.peer} closed the connection") from None

    def try_send(self, messages: Sequence[S | TracedMessage[S]]) -> int:
        """Send as many of the first messages as possible without waiting; return their number.
        Raises as `send`."""
        if self._closed:
            raise ResourceClosed(f"the connection to {self.peer} was closed by this side")
        for count, message in enumerate(messages):
            try:
                with use_context(None):
                    self._outbox.send_nowait(message)
            except WouldBlock:
                return count
            except ResourceClosed:
                raise ConnectionBroken(f"{self.peer} closed the connection") from None
        return len(messages)

    async def receive(self) -> Any:
        """Return the next message, in a `TracedMessage` if it has a context. Raises
        `ResourceClosed`, or `ConnectionBroken` when the other end is gone."""
        while not self._received:
            if self._closed:
                raise ResourceClosed(f"the connection to {self.peer} was closed by this side")
            if self._ended:
                raise ConnectionBroken(f"{self.peer} closed the connection")
            batch = await self._inbox.receive()
            # The messages of this batch were sent before the end, and are returned first.
            self._ended = self._ended or self._inbox.urgent is not None
            self._received.extend(batch)
        return self._received.popleft()

    async def aclose(self) -> None:
        """Close both directions. Idempotent."""
        if not self._closed:
            self._closed = True
            # The control lane has no bound: a full mailbox cannot delay the close.
            self._outbox.control(_END)
            self._inbox.control(_END)
            self._inbox.close()


def pair(messages_max: int) -> tuple[MemoryConnection[Any, Any], MemoryConnection[Any, Any]]:
    """Return the client's end and the service's end."""
    up: BoundedMailbox[Any] = BoundedMailbox("/link/up", messages_max)
    down: BoundedMailbox[Any] = BoundedMailbox("/link/down", messages_max)
    return (
        MemoryConnection("the service", down, up),
        MemoryConnection("a client in this process", up, down),
    )
