"""A bounded mailbox with one receiver, its reply slots, and a flag that is set once.

Senders append, the one receiver takes all waiting messages in one wake-up. The control lane (stop;
supervision only) overtakes, everything else is first in, first out. Three ways in:

- `send` waits for room (backpressure); `send_nowait` raises `WouldBlock`;
- `deliver` uses room reserved by an earlier request (a reply, a timer, the result of an effect): it
  never waits and is not counted against the bound, because requests are.

Cost. A message is appended to a list and taken out with all others: the list itself changes hands.
An idle mailbox allocates no lanes, waiting senders or owed replies.

Invariants: ``len(queue) - delivered + granted <= limit`` at every send (*granted* room belongs to
senders that waited for it and have not run yet, so that no sender overtakes them); a message is
received once or counted as unhandled at the close; after `close` every unanswered `ReplySlot`
opened through this mailbox fails with `ActorDead`. It knows no actors and no time.
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
    """An event that is set once, and stays set. It is smaller than `asyncio.Event`, since most
    flags are never awaited."""

    __slots__ = ("_up", "_waiters")

    def __init__(self) -> None:
        self._up = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._up

    def set(self) -> None:
        """Set it, and wake the waiters."""
        self._up = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set."""
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
    """A mailbox at one moment."""

    depth: int
    depth_max: int
    received: int
    unhandled: int
    limit: int
    senders_waiting: int


class ReplySlot(Generic[R]):
    """The slot for one answer, carried by the request message.

    Answered once, by `set` or `fail`; later answers are ignored, because the asker may have left (a
    deadline, a cancel).
    """

    __slots__ = ("_owner", "future")

    def __init__(self, owner: dict[ReplySlot[Any], None] | None = None) -> None:
        self.future: asyncio.Future[R] = get_running_loop().create_future()
        self._owner = owner
        if owner is not None:
            owner[self] = None

    @property
    def answered(self) -> bool:
        """Return whether an answer was given or the asker has left."""
        return self.future.done()

    def set(self, value: R) -> None:
        """Answer with a value."""
        # The asker may have left, or an earlier answer won.
        if not self.future.done():
            self.future.set_result(value)
        self.forget()

    def fail(self, error: PenstockError) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            # Marks it as retrieved: no warning if the asker never awaits it.
            self.future.exception()
        self.forget()

    async def wait(self) -> R:
        """Wait for the answer; raise the error that it failed with."""
        try:
            return await self.future
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove it from the owed replies."""
        if self._owner is not None:
            self._owner.pop(self, None)


class BoundedMailbox(Generic[M]):
    """A bounded first-in, first-out queue with a control lane."""

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
        """Asks that the receiver waits for, while it handles no other message."""
        self.current: Any = None
        """The message being handled."""
        self.batch: list[M | TracedMessage[M]] = []
        """The batch that was received with it."""
        self.urgent: list[Any] | None = None
        """The control lane."""
        self.windows: tuple[Any, ...] = ()
        """Lanes to this mailbox (`kernel.flow_window`)."""
        self._asks: dict[ReplySlot[Any], None] | None = None
        self._queue: list[M | TracedMessage[M]] = []
        self._senders: deque[asyncio.Future[None]] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._bound = limit
        """Length at which the queue is full; -1 when closed."""
        self._reserved = 0
        self._granted = 0
        self._received = 0
        self._depth_max = 0
        self._unhandled = 0
        self._closed = False
        self._broken: str | None = None

    @property
    def asks(self) -> dict[ReplySlot[Any], None]:
        """Return the replies that the receiver owes."""
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
        """Send, waiting for room. Raises `ResourceClosed` or `ConnectionBroken`."""
        if len(self._queue) >= self._bound:
            await self._room()
        # Checked first: without sampled traces the context lookup is saved.
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(TracedMessage(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    def send_nowait(self, message: M) -> None:
        """Send if there is room. Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`."""
        if len(self._queue) >= self._bound:
            self._check_open()
            raise WouldBlock(f"{self.path} holds {len(self._queue)} messages (limit {self.limit})")
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(TracedMessage(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    @property
    def room(self) -> int:
        """Return the number of messages that can be sent without waiting; a closed mailbox has room
        for an attempt, which raises."""
        return 1 << 30 if self._closed else max(0, self._bound - len(self._queue))

    async def _room(self) -> None:
        """Wait for room, which the caller then owns: no other sender overtakes it."""
        self._check_open()
        waiter: asyncio.Future[None] = get_running_loop().create_future()
        if self._senders is None:
            self._senders = deque()
        self._senders.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # Cancelled right after room was granted: pass it on.
            if waiter.done() and not waiter.cancelled() and not self._closed:
                self._granted -= 1
                self._rebound()
                self._grant()
            raise
        self._check_open()
        self._granted -= 1
        self._rebound()

    def _grant(self) -> None:
        """Grant room to waiting senders, in order."""
        while self._senders and len(self._queue) < self._bound:
            waiter = self._senders.popleft()
            # A cancelled sender is skipped.
            if not waiter.done():
                self._granted += 1
                self._rebound()
                waiter.set_result(None)

    def deliver(self, message: M) -> bool:
        """Put a message into reserved room; return False (and count it) when the mailbox is
        closed."""
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
    """Delivers the result of an effect, which comes from the receiver itself: a mailbox for tests
    that copies messages of other actors leaves it alone."""

    def control(self, message: Any) -> None:
        """Send a control message, which overtakes all others; supervision only."""
        if not self._closed:
            self.urgent = [*(self.urgent or ()), message]
            self._notify()

    async def receive(self) -> list[M | TracedMessage[M]]:
        """Return all waiting messages; wait while there are none and none is `urgent`."""
        while not self._queue and self.urgent is None:
            await self.arrival()
        return self.take()

    def arrival(self) -> asyncio.Future[None]:
        """Return a future to await while there is nothing to `take`."""
        self._wake = wake = get_running_loop().create_future()
        return wake

    def take(self) -> list[M | TracedMessage[M]]:
        """Return all waiting messages, possibly none."""
        # With an empty queue, too, waiting senders may need a grant.
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
        """Close the mailbox; waiting senders and unanswered asks fail."""
        self._closed = True
        self._broken = broken
        self._unhandled += unhandled + len(self._queue)
        self._queue.clear()
        self.urgent = None
        self._rebound()
        while self._senders:
            waiter = self._senders.popleft()
            # Woken without room: `_room` raises `ResourceClosed` or `ConnectionBroken`.
            if not waiter.done():
                waiter.set_result(None)
        for window in self.windows:
            window.closed()
        self.fail_asks(broken)

    def fail_asks(self, broken: str | None) -> None:
        """Fail open asks with `ActorDead`, indeterminate: the request may have been carried out.

        An ask whose message (by its field ``reply``) still waits here is left alone: a restarted
        receiver will answer it.
        """
        why = f"crashed: {broken}" if broken else "stopped"
        if not self._asks:
            return
        # By identity: a field ``reply`` may hold anything.
        bare = (m.message if isinstance(m, TracedMessage) else m for m in self._queue)
        waiting = {id(getattr(message, "reply", None)) for message in bare}
        for reply in list(self._asks):
            if id(reply) in waiting:
                continue
            error = ActorDead(f"{self.path} {why} before it answered")
            error.determinate = False
            reply.fail(error)

    def owes_reply(self, reply: ReplySlot[Any]) -> bool:
        """Return whether the receiver is still to handle the message that carries `reply` (in its
        field of this name), or handles it now."""
        if reply.answered:
            return False
        bare = [
            m.message if isinstance(m, TracedMessage) else m for m in (*self.batch, *self._queue)
        ]
        # Messages before the current one were handled: their answers were deferred.
        places = [i for i, m in enumerate(bare) if getattr(m, "reply", None) is reply]
        now = [i for i, m in enumerate(bare) if m is self.current]
        return bool(places) and (not now or places[0] >= now[0])

    @property
    def has_waiting(self) -> bool:
        """Return whether a message follows the one that is being handled."""
        # A sender with granted room is about to put its message here.
        if self._queue or self._granted:
            return True
        return bool(self.batch) and self.batch[-1] is not self.current

    def put_back(self, messages: Sequence[M | TracedMessage[M]]) -> None:
        """Put messages received but not handled back to the front (the receiver crashed).

        Their room may have been granted meanwhile: they are not counted against the bound.
        """
        self._queue[:0] = messages
        self._reserved += len(messages)
        self._received -= len(messages)
        self._rebound()

    def statistics(self) -> MailboxStatistics:
        """Return depth, high-water mark and counts."""
        return MailboxStatistics(
            depth=len(self._queue),
            depth_max=max(self._depth_max, len(self._queue)),
            received=self._received,
            unhandled=self._unhandled,
            limit=self.limit,
            senders_waiting=len(self._senders or ()),
        )
