"""A bounded mailbox with one receiver, its reply slots, and a flag that is set once.

Senders append messages; the receiver takes all waiting ones in one wake-up. Messages are first in,
first out, except that a control message (a stop, sent only by supervision) overtakes all others.
There are three ways to send:

- `send` waits for room (backpressure).
- `send_nowait` raises `WouldBlock` if there is no room.
- `deliver` is for a reply, a timer, or the result of an effect. It never waits and does not count
  against the bound, because the request that led to it does.

Cost. A message is appended to a list, and the receiver takes the list itself. An idle mailbox has
no objects for control messages, waiting senders or unanswered asks.

Invariants:

- ``len(queue) - delivered + granted <= limit`` at every send. *Granted* room belongs to senders
  that have waited for it and have not run yet, so no other sender overtakes them.
- A message is received once, or counted as unhandled at the close.
- After `close`, every unanswered `ReplySlot` opened through this mailbox fails with `ActorDead`.

This module knows neither actors nor time.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from actors.runtime.errors import (
    ActorDead,
    ConnectionBroken,
    PenstockError,
    ResourceClosed,
    WouldBlock,
)
from actors.runtime.telemetry import HELD, TRACEPARENT, TracedMessage

M = TypeVar("M")
R = TypeVar("R")


class LatchedFlag:
    """An event that stays set. Smaller than `asyncio.Event`, because most flags are never
    awaited."""

    __slots__ = ("_up", "_waiters")

    def __init__(self) -> None:
        self._up = False
        """True once the flag was set."""
        self._waiters: list[asyncio.Future[None]] | None = None
        """Futures of the tasks that wait; None if none does."""

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._up

    def set(self) -> None:
        """Set the flag and wake all waiters."""
        self._up = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the flag is set."""
        if self._up:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None and waiter in self._waiters:
                self._waiters.remove(waiter)


class MailboxStatistics(msgspec.Struct, frozen=True):
    """Statistics of a mailbox at one moment."""

    depth: int
    """Number of messages that wait."""
    depth_max: int
    """Largest depth so far."""
    received: int
    """Number of messages that the receiver has taken."""
    unhandled: int
    """Number of messages that arrived too late, or were left over, when the mailbox closed."""
    limit: int
    senders_waiting: int


class ReplySlot(Generic[R]):
    """A slot for one answer, carried by the request message.

    The first `set` or `fail` counts. Later answers are ignored, because the asker may be gone
    (deadline or cancel).
    """

    __slots__ = ("_owner", "future")

    def __init__(self, owner: dict[ReplySlot[Any], None] | None = None) -> None:
        self.future: asyncio.Future[R] = get_running_loop().create_future()
        self._owner = owner
        if owner is not None:
            owner[self] = None

    @property
    def answered(self) -> bool:
        """Return whether an answer was given or the asker is gone."""
        return self.future.done()

    def set(self, value: R) -> None:
        """Answer with a value."""
        # The asker may be gone, or an earlier answer came first.
        if not self.future.done():
            self.future.set_result(value)
        self.forget()

    def fail(self, error: PenstockError) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            # Mark the error as retrieved, so that asyncio does not warn if nobody awaits it.
            self.future.exception()
        self.forget()

    async def wait(self) -> R:
        """Wait for the answer. Raises the error given to `fail`."""
        try:
            return await self.future
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove the slot from the unanswered asks of its mailbox."""
        if self._owner is not None:
            self._owner.pop(self, None)


class BoundedMailbox(Generic[M]):
    """A bounded first-in, first-out queue that control messages overtake."""

    __slots__ = (
        "_asks",
        "_bound",
        "_broken",
        "_closed",
        "_depth_max",
        "_granted",
        "_queue",
        "_received",
        "_reserved",
        "_senders",
        "_unhandled",
        "_wake",
        "asking",
        "batch",
        "current",
        "limit",
        "path",
        "urgent",
        "windows",
    )

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.asking: tuple[tuple[BoundedMailbox[Any], ReplySlot[Any]], ...] = ()
        """Asks whose answers the receiver awaits at this moment, handling no other message."""
        self.current: Any = None
        """The message being handled; None between messages."""
        self.batch: list[M | TracedMessage[M]] = []
        """The batch to which that message belongs; empty between batches."""
        self.urgent: list[Any] | None = None
        """Control messages; None if there are none."""
        self.windows: tuple[Any, ...] = ()
        """The flow windows of this mailbox (`kernel.flow_window`), to release at the close."""
        self._asks: dict[ReplySlot[Any], None] | None = None
        """The unanswered asks; None before the first ask."""
        self._queue: list[M | TracedMessage[M]] = []
        """Messages that wait for the receiver."""
        self._senders: deque[asyncio.Future[None]] | None = None
        """Senders that wait for room, first come, first served; None before the first."""
        self._wake: asyncio.Future[None] | None = None
        """The future that the waiting receiver awaits; None while it does not wait."""
        self._bound = limit
        """Length at which the queue is full: the limit, plus delivered messages, minus granted
        room; -1 once closed."""
        self._reserved = 0
        """Number of queued messages that were delivered or put back, which do not count against the
        limit."""
        self._granted = 0
        """Room granted to senders that have not run yet."""
        self._received = 0
        """Messages that the receiver has taken, without those put back."""
        self._depth_max = 0
        """Largest batch taken so far."""
        self._unhandled = 0
        """Messages left over at the close, and those delivered after it."""
        self._closed = False
        """True once `close` was called."""
        self._broken: str | None = None
        """The error with which the receiver crashed; None if it stopped in order, or has not
        ended."""

    @property
    def asks(self) -> dict[ReplySlot[Any], None]:
        """Return the unanswered asks of the receiver, to which a new `ReplySlot` adds itself."""
        if self._asks is None:
            self._asks = {}
        return self._asks

    def _check_open(self) -> None:
        if self._broken is not None:
            raise ConnectionBroken(f"{self.path} crashed: {self._broken}")
        if self._closed:
            raise ResourceClosed(f"{self.path} has stopped")

    def _rebound(self) -> None:
        self._bound = -1 if self._closed else self.limit + self._reserved - self._granted

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def send(self, message: M) -> None:
        """Append a message, waiting for room. Raises `ResourceClosed` or `ConnectionBroken`."""
        if len(self._queue) >= self._bound:
            await self._room()
        # Check `HELD` first: it saves the context lookup while no trace is sampled.
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(TracedMessage(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    def send_nowait(self, message: M) -> None:
        """Append a message if there is room.

        Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`.
        """
        if len(self._queue) >= self._bound:
            self._check_open()
            raise WouldBlock(
                f"mailbox of {self.path} is full: {len(self._queue)} messages (limit {self.limit})"
            )
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(TracedMessage(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    @property
    def room(self) -> int:
        """Return the number of messages that can be sent without waiting.

        Large for a closed mailbox, so that the caller tries to send and gets the error.
        """
        return 1 << 30 if self._closed else max(0, self._bound - len(self._queue))

    async def _room(self) -> None:
        """Wait for room. It then belongs to the caller: no other sender can take it."""
        self._check_open()
        waiter: asyncio.Future[None] = get_running_loop().create_future()
        if self._senders is None:
            self._senders = deque()
        self._senders.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # Cancelled right after room was granted: pass the room on.
            if waiter.done() and not waiter.cancelled() and not self._closed:
                self._granted -= 1
                self._rebound()
                self._grant()
            raise
        self._check_open()
        self._granted -= 1
        self._rebound()

    def _grant(self) -> None:
        """Grant free room to waiting senders, in order."""
        while self._senders and len(self._queue) < self._bound:
            waiter = self._senders.popleft()
            # Skip cancelled senders.
            if not waiter.done():
                self._granted += 1
                self._rebound()
                waiter.set_result(None)

    def deliver(self, message: M) -> bool:
        """Append a message that does not count against the bound.

        Returns False if the mailbox is closed, and counts the message as unhandled.
        """
        if self._closed:
            self._unhandled += 1
            return False
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(TracedMessage(message, traceparent))
        else:
            self._queue.append(message)
        self._reserved += 1
        self._bound += 1
        if self._wake is not None:
            self._notify()
        return True

    deliver_own = deliver
    """Delivers a message from the receiver to itself, such as the result of an effect. A separate
    name, because a test mailbox that copies messages between actors does not copy these."""

    def control(self, message: Any) -> None:
        """Send a control message, which overtakes all others. For supervision only."""
        if not self._closed:
            self.urgent = [*(self.urgent or ()), message]
            self._notify()

    async def receive(self) -> list[M | TracedMessage[M]]:
        """Return all waiting messages, after waiting for a message or a control message."""
        while not self._queue and self.urgent is None:
            await self.arrival()
        return self.take()

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that is done when a message or a control message arrives."""
        self._wake = wake = get_running_loop().create_future()
        return wake

    def take(self) -> list[M | TracedMessage[M]]:
        """Take all waiting messages out of the mailbox; there may be none."""
        # Waiting senders may need a grant even if the queue is empty.
        if not self._queue and not self._senders:
            return []
        batch, self._queue = self._queue, []
        if len(batch) > self._depth_max:
            self._depth_max = len(batch)
        self._received += len(batch)
        if self._reserved:
            self._reserved = 0
            self._rebound()
        if self._senders:
            self._grant()
        return batch

    def close(self, unhandled: int = 0, broken: str | None = None) -> None:
        """Close the mailbox and fail waiting senders and unanswered asks.

        `unhandled` messages of the receiver's batch are counted as unhandled. `broken` is the
        error with which the receiver crashed; None if it stopped in order.
        """
        self._closed = True
        self._broken = broken
        self._unhandled += unhandled + len(self._queue)
        self._queue.clear()
        self.urgent = None
        self._rebound()
        while self._senders:
            waiter = self._senders.popleft()
            # It wakes without room, and `_room` raises `ResourceClosed` or `ConnectionBroken`.
            if not waiter.done():
                waiter.set_result(None)
        for window in self.windows:
            window.closed()
        self.fail_asks(broken)

    def fail_asks(self, broken: str | None) -> None:
        """Fail unanswered asks with `ActorDead`.

        The error is indeterminate, because the request may have been carried out. Asks whose
        message still waits here (in its field ``reply``) are kept: a restarted receiver will
        answer them.
        """
        why = f"crashed: {broken}" if broken else "stopped"
        if not self._asks:
            return
        # Compare by identity, because a field ``reply`` may hold anything.
        bare = (m.message if isinstance(m, TracedMessage) else m for m in self._queue)
        waiting = {id(getattr(message, "reply", None)) for message in bare}
        for reply in list(self._asks):
            if id(reply) in waiting:
                continue
            error = ActorDead(f"{self.path} {why} before it answered")
            error.determinate = False
            reply.fail(error)

    def owes_reply(self, reply: ReplySlot[Any]) -> bool:
        """Return whether the message whose field ``reply`` is `reply` waits, or is being
        handled."""
        if reply.answered:
            return False
        bare = [
            m.message if isinstance(m, TracedMessage) else m for m in (*self.batch, *self._queue)
        ]
        # Messages before the current one have been handled; their answers were deferred.
        places = [i for i, m in enumerate(bare) if getattr(m, "reply", None) is reply]
        now = [i for i, m in enumerate(bare) if m is self.current]
        return bool(places) and (not now or places[0] >= now[0])

    @property
    def has_waiting(self) -> bool:
        """Return whether another message follows the one being handled."""
        # A sender with granted room is about to append its message.
        if self._queue or self._granted:
            return True
        return bool(self.batch) and self.batch[-1] is not self.current

    def put_back(self, messages: Sequence[M | TracedMessage[M]]) -> None:
        """Put messages that were taken but not handled back to the front, after a crash.

        They do not count against the bound, because their room may have been granted since.
        """
        self._queue[:0] = messages
        self._reserved += len(messages)
        self._received -= len(messages)
        self._rebound()

    def statistics(self) -> MailboxStatistics:
        """Return the mailbox's current statistics."""
        return MailboxStatistics(
            depth=len(self._queue),
            depth_max=max(self._depth_max, len(self._queue)),
            received=self._received,
            unhandled=self._unhandled,
            limit=self.limit,
            senders_waiting=len(self._senders or ()),
        )
