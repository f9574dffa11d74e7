"""A flow window: an address with its own bound on unfinished messages.

A mailbox bounds its waiting messages over all senders, so a single sender can fill it and delay all
others. A flow window lets at most `limit` of its messages be unfinished. A message is finished when
its receiver calls `done`: not when it was received, but when all work that it causes is complete.
So a flood through one window delays a message of another window by at most the work of `limit`
messages.

Senders wait first in, first out, as with the mailbox itself. When the mailbox closes, they fail as
the mailbox's own senders do. Asks and replies bypass the window.
"""

from __future__ import annotations

import sys
from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from typing import TypeVar

from actors.runtime.errors import WouldBlock
from actors.runtime.kernel.actor import ActorAddress

M = TypeVar("M")


class FlowWindow(ActorAddress[M]):
    """An address that bounds the number of its messages that are not `done`."""

    __slots__ = ("_limit", "_under_way", "_waiting")

    def __init__(self, to: ActorAddress[M], limit: int) -> None:
        super().__init__(to._mailbox)
        self._limit = limit
        """Maximum number of unfinished messages; unlimited once the mailbox has closed."""
        self._under_way = 0
        """Number of messages that were sent, or are being sent, and are not `done`."""
        self._waiting: deque[Future[None]] = deque()
        """Senders that wait for room, first come, first served."""
        to._mailbox.windows = (*to._mailbox.windows, self)

    @property
    def under_way(self) -> int:
        """Return the number of messages that were sent and are not `done`."""
        return self._under_way

    async def send(self, message: M) -> None:
        """Send a message, waiting for room in the window and in the mailbox.

        Raises `ResourceClosed` or `ConnectionBroken`.
        """
        if self._under_way >= self._limit:
            await self._room()
        else:
            self._under_way += 1
        try:
            await self._mailbox.send(message)
        except BaseException:
            # Not sent (cancelled, or the mailbox has closed): pass the room to the next sender.
            self.done()
            raise

    def send_nowait(self, message: M) -> None:
        """Send a message if there is room in the window and in the mailbox.

        Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`.
        """
        if self._under_way >= self._limit:
            raise WouldBlock(
                f"flow window of {self.path} is full: {self._under_way} messages are unfinished"
            )
        self._mailbox.send_nowait(message)
        self._under_way += 1

    async def _room(self) -> None:
        """Wait for room, which then belongs to the caller."""
        waiter: Future[None] = get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except CancelledError:
            # Cancelled right after room was granted: pass the room on.
            if waiter.done() and not waiter.cancelled():
                self.done()
            raise

    def done(self) -> None:
        """Free the room of one message whose work is complete."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)  # inherits the room, so `_under_way` does not change
                return
        self._under_way -= 1

    def closed(self) -> None:
        """Release all waiting senders, because the mailbox has closed."""
        # Without a limit, senders reach the mailbox, which raises `ResourceClosed`.
        self._limit = sys.maxsize
        while self._waiting:
            self.done()
