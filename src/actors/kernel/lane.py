"""A lane: a way to an actor with a bound of its own, until the actor is done with what came by it.

Theory of operation. A mailbox bounds what waits in it, whoever sent it: one sender can fill it, and
all others then wait behind that. Whoever sends by a lane has at most `limit` messages under way,
and a message is under way until its receiver says `done`: not when it was received, but when all
that it leads to has happened, wherever that is. So a flood on one lane delays a message on another
by at most what so many messages lead to.

Rules: first in, first out, like the mailbox itself; when the mailbox closes, waiting senders learn
of it as those of the mailbox do. Asks and replies do not go by lanes.
"""

from __future__ import annotations

import sys
from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from typing import TypeVar

from actors.errors import WouldBlock
from actors.kernel.actor import Address

M = TypeVar("M")


class Lane(Address[M]):
    """See the module's text."""

    __slots__ = ("_limit", "_under_way", "_waiting")

    def __init__(self, to: Address[M], limit: int) -> None:
        super().__init__(to._mailbox)
        self._limit = limit
        self._under_way = 0
        self._waiting: deque[Future[None]] = deque()
        to._mailbox.lanes = (*to._mailbox.lanes, self)

    @property
    def under_way(self) -> int:
        """Messages that were sent and are not done with."""
        return self._under_way

    async def send(self, message: M) -> None:
        """Sends, waiting for room on the lane and in the mailbox. Raises `Closed` or `Broken`."""
        if self._under_way >= self._limit:
            await self._room()
        else:
            self._under_way += 1
        try:
            await self._mailbox.send(message)
        except BaseException:
            # It was not sent (canceled, or nobody is there): the next in line has its room.
            self.done()
            raise

    def send_nowait(self, message: M) -> None:
        """Sends if there is room on the lane and in the mailbox. Raises `WouldBlock`, `Closed` or
        `Broken`."""
        if self._under_way >= self._limit:
            raise WouldBlock(f"{self.path}: {self._under_way} messages of a lane are under way")
        self._mailbox.send_nowait(message)
        self._under_way += 1

    async def _room(self) -> None:
        """Waits for room, which is the caller's when it returns."""
        waiter: Future[None] = get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.done()
            raise

    def done(self) -> None:
        """The receiver is done with one message: there is room for another."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)  # it has the room of the one that is done
                return
        self._under_way -= 1

    def closed(self) -> None:
        """The mailbox has closed: nobody need wait, now or later."""
        self._limit = sys.maxsize
        while self._waiting:
            self.done()
