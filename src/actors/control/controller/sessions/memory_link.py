"""A connection within the process: the two ends of a client's link to its session.

It behaves like a framed connection: bounded in both directions, so that a slow side stops the
other, and closed in both when one end closes. Messages sent before the close are still received.
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
    """One end of the connection; `pair` makes both."""

    def __init__(self, peer: str, inbox: BoundedMailbox[Any], outbox: BoundedMailbox[Any]) -> None:
        self.peer = peer
        self._inbox = inbox
        self._outbox = outbox
        self._received: deque[Any] = deque()
        """Messages taken from the inbox and not returned yet."""
        self._ended = False
        """True once the other end has closed."""
        self._closed = False
        """True once this end was closed."""
        self.session: OpenSession | None = None
        """The session behind this connection; set on the client's end."""

    async def send(self, message: S | TracedMessage[S]) -> None:
        """Send a message, optionally with a trace context, waiting while the other side is slow.
        Raises `ResourceClosed` or `ConnectionBroken`."""
        if self._closed:
            raise ResourceClosed(f"the connection to {self.peer} was closed by this side")
        try:
            # Do not attach the sender's own context: a message that needs one brings it.
            with use_context(None):
                await self._outbox.send(message)
        except ResourceClosed:
            raise ConnectionBroken(f"{self.peer} closed the connection") from None

    def try_send(self, messages: Sequence[S | TracedMessage[S]]) -> int:
        """Send as many of the first messages as possible without waiting, and return their number.
        Raises as `send` does."""
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
        """Return the next message, as a `TracedMessage` if it has a context. Raises
        `ResourceClosed`, or `ConnectionBroken` if the other end is closed."""
        while not self._received:
            if self._closed:
                raise ResourceClosed(f"the connection to {self.peer} was closed by this side")
            if self._ended:
                raise ConnectionBroken(f"{self.peer} closed the connection")
            batch = await self._inbox.receive()
            # The messages of this batch were sent before the close, so return them first.
            self._ended = self._ended or self._inbox.urgent is not None
            self._received.extend(batch)
        return self._received.popleft()

    async def aclose(self) -> None:
        """Close both directions. Idempotent."""
        if not self._closed:
            self._closed = True
            # The control lane is unbounded, so a full mailbox cannot delay the close.
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
