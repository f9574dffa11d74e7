"""A lane: an address with its own bound on messages under way.

A mailbox bounds its waiting messages over all senders: one sender can fill it, and all others then
wait behind that. A lane has at most `limit` messages under way, and a message is under way until
its receiver says `done`: not when it was received, but when all work that it causes is over. So a
flood on one lane delays a message on another by at most the work of `limit` messages.

Rules: first in, first out, like the mailbox itself; when the mailbox closes, waiting senders fail
as those of the mailbox do. Asks and replies bypass lanes.
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
    """An address whose messages are bounded until they are done."""

    __slots__ = ("_limit", "_under_way", "_waiting")

    def __init__(self, to: ActorAddress[M], limit: int) -> None:
        super().__init__(to._mailbox)
        self._limit = limit
        self._under_way = 0
        self._waiting: deque[Future[None]] = deque()
        to._mailbox.windows = (*to._mailbox.windows, self)

    @property
    def under_way(self) -> int:
        """Return the number of messages that were sent and are not done."""
        return self._under_way

    async def send(self, message: M) -> None:
        """Send, waiting for room on the lane and in the mailbox. Raises `ResourceClosed` or
        `ConnectionBroken`."""
        if self._under_way >= self._limit:
            await self._room()
        else:
            self._under_way += 1
        try:
            await self._mailbox.send(message)
        except BaseException:
            # Not sent (cancelled, or the mailbox closed): its room goes to the next in line.
            self.done()
            raise

    def send_nowait(self, message: M) -> None:
        """Send if there is room on the lane and in the mailbox. Raises `WouldBlock`,
        `ResourceClosed` or `ConnectionBroken`."""
        if self._under_way >= self._limit:
            raise WouldBlock(f"{self.path}: {self._under_way} messages of a lane are under way")
        self._mailbox.send_nowait(message)
        self._under_way += 1

    async def _room(self) -> None:
        """Wait for room, which the caller then owns."""
        waiter: Future[None] = get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except CancelledError:
            # Cancelled right after room was granted: pass it on.
            if waiter.done() and not waiter.cancelled():
                self.done()
            raise

    def done(self) -> None:
        """Free the room of one message whose work is over."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)  # inherits the room: `_under_way` stays as it is
                return
        self._under_way -= 1

    def closed(self) -> None:
        """Release all waiting senders: the mailbox has closed."""
        # Later senders must reach the mailbox, which raises `ResourceClosed`.
        self._limit = sys.maxsize
        while self._waiting:
            self.done()
