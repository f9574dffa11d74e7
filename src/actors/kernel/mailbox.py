"""A bounded mailbox with one receiver, what it holds, and reply slots.

Theory of operation. One shared record, two thin ends: senders append, the one receiver takes
all that waits in one wake-up. Two lanes: the control lane (stop, inspect; supervision only)
overtakes, everything else is first in, first out. Three ways in:

- `send` waits for room; `send_nowait` raises `WouldBlock`;
- `deliver` uses room reserved by an earlier request (a reply, a timer, the result of an
  effect): it never waits and is not counted against the bound, because requests are.

Cost. A message is appended to a list and taken out with all others: the list itself changes
hands. What an idle mailbox does not need (lanes, waiting senders, owed replies) it does not have.

Invariants: ``len(queue) - delivered + granted <= limit`` at every send (*granted* room belongs
to senders that waited for it and have not run yet, so nobody overtakes them); a message is
received once or counted as unhandled at the close; after `close` every unanswered `Reply` opened
through this mailbox fails with `ActorDead`. What it does not do: it knows no actors and no time.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from actors.errors import ActorDead, Broken, Closed, PenstockError, WouldBlock
from actors.telemetry import HELD, TRACEPARENT

M = TypeVar("M")
R = TypeVar("R")


class Traced(msgspec.Struct, Generic[M], gc=False):
    """A message of a sampled trace, with the context of its sender: others go bare."""

    message: M
    traceparent: str


class MailboxStatistics(msgspec.Struct, frozen=True):
    """A mailbox at one moment."""

    depth: int
    depth_max: int
    received: int
    unhandled: int
    limit: int
    senders_waiting: int


class Reply(Generic[R]):
    """The slot for one answer, carried by the message that asks for it.

    Answered once, by `set` or `fail`; later answers are ignored, because the asker may have
    gone (a deadline, a cancel).
    """

    __slots__ = ("_owner", "future")

    def __init__(self, owner: dict[Reply[Any], None] | None = None) -> None:
        self.future: asyncio.Future[R] = get_running_loop().create_future()
        self._owner = owner
        if owner is not None:
            owner[self] = None

    @property
    def answered(self) -> bool:
        """Whether an answer was given or the asker has gone."""
        return self.future.done()

    def set(self, value: R) -> None:
        """Answers."""
        if not self.future.done():
            self.future.set_result(value)
        self.forget()

    def fail(self, error: PenstockError) -> None:
        """Answers with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()
        self.forget()

    async def wait(self) -> R:
        """The answer; raises the error it failed with."""
        try:
            return await self.future
        finally:
            self.forget()

    def forget(self) -> None:
        """Nobody waits any longer."""
        if self._owner is not None:
            self._owner.pop(self, None)


class Mailbox(Generic[M]):
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
        "lanes",
        "limit",
        "path",
        "urgent",
    )

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.asking: tuple[tuple[Mailbox[Any], Reply[Any]], ...] = ()
        """Whose answers the receiver waits for, handling nothing else."""
        self.current: Any = None
        """The message being handled."""
        self.batch: list[M | Traced[M]] = []
        """What was received with it."""
        self.urgent: list[Any] | None = None
        """The control lane."""
        self.lanes: tuple[Any, ...] = ()
        """Ways here with bounds of their own (`kernel.lane`)."""
        self._asks: dict[Reply[Any], None] | None = None
        self._queue: list[M | Traced[M]] = []
        self._senders: deque[asyncio.Future[None]] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._bound = limit
        """A queue of this length is full; -1 when closed."""
        self._reserved = 0
        self._granted = 0
        self._received = 0
        self._depth_max = 0
        self._unhandled = 0
        self._closed = False
        self._broken: str | None = None

    @property
    def asks(self) -> dict[Reply[Any], None]:
        """Replies that the receiver owes."""
        if self._asks is None:
            self._asks = {}
        return self._asks

    def _check_open(self) -> None:
        if self._broken is not None:
            raise Broken(f"{self.path} crashed: {self._broken}")
        if self._closed:
            raise Closed(f"{self.path} has stopped")

    def _rebound(self) -> None:
        self._bound = -1 if self._closed else self.limit + self._reserved - self._granted

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def send(self, message: M) -> None:
        """Sends, waiting for room. Raises `Closed` or `Broken`."""
        if len(self._queue) >= self._bound:
            await self._room()
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(Traced(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    def send_nowait(self, message: M) -> None:
        """Sends if there is room. Raises `WouldBlock`, `Closed` or `Broken`."""
        if len(self._queue) >= self._bound:
            self._check_open()
            raise WouldBlock(f"{self.path} holds {len(self._queue)} messages (limit {self.limit})")
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(Traced(message, traceparent))
        else:
            self._queue.append(message)
        if self._wake is not None:
            self._notify()

    async def _room(self) -> None:
        """Waits for room, which is the caller's when it returns: nobody overtakes who waits."""
        self._check_open()
        waiter: asyncio.Future[None] = get_running_loop().create_future()
        if self._senders is None:
            self._senders = deque()
        self._senders.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and not self._closed:
                self._granted -= 1
                self._rebound()
                self._grant()
            raise
        self._check_open()
        self._granted -= 1
        self._rebound()

    def _grant(self) -> None:
        """Gives room to who waits for it, in order."""
        while self._senders and len(self._queue) < self._bound:
            waiter = self._senders.popleft()
            if not waiter.done():
                self._granted += 1
                self._rebound()
                waiter.set_result(None)

    def deliver(self, message: M) -> bool:
        """Puts a message into reserved room; False (and counted) when nobody will read it."""
        if self._closed:
            self._unhandled += 1
            return False
        if HELD.blocks and (traceparent := TRACEPARENT.get()) is not None:
            self._queue.append(Traced(message, traceparent))
        else:
            self._queue.append(message)
        self._reserved += 1
        self._bound += 1
        if self._wake is not None:
            self._notify()
        return True

    deliver_own = deliver
    """The same for the result of an effect, which comes from the receiver itself and from no
    other actor: a mailbox that copies what is sent leaves it alone."""

    def control(self, message: Any) -> None:
        """Supervision only: overtakes everything."""
        if not self._closed:
            self.urgent = [*(self.urgent or ()), message]
            self._notify()

    async def receive(self) -> list[M | Traced[M]]:
        """All that waits; waits itself while there is nothing and nothing is `urgent`."""
        while not self._queue and self.urgent is None:
            await self.arrival()
        return self.take()

    def arrival(self) -> asyncio.Future[None]:
        """To be awaited while there is nothing to `take`."""
        self._wake = wake = get_running_loop().create_future()
        return wake

    def take(self) -> list[M | Traced[M]]:
        """All that waits, which may be nothing."""
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
        """Ends the mailbox; waiting senders and unanswered asks learn of it."""
        self._closed = True
        self._broken = broken
        self._unhandled += unhandled + len(self._queue)
        self._queue.clear()
        self.urgent = None
        self._rebound()
        while self._senders:
            waiter = self._senders.popleft()
            if not waiter.done():
                waiter.set_result(None)
        for lane in self.lanes:
            lane.closed()
        self.fail_asks(broken)

    def fail_asks(self, broken: str | None) -> None:
        """Answers open asks with `ActorDead`; what was asked may have happened.

        An ask whose message (by its field ``reply``) still waits here is left alone: a
        restarted receiver will answer it.
        """
        why = f"crashed: {broken}" if broken else "stopped"
        if not self._asks:
            return
        bare = (m.message if isinstance(m, Traced) else m for m in self._queue)
        waiting = {id(getattr(message, "reply", None)) for message in bare}
        for reply in list(self._asks):
            if id(reply) in waiting:
                continue
            error = ActorDead(f"{self.path} {why} before it answered")
            error.determinate = False
            reply.fail(error)

    def owes(self, reply: Reply[Any]) -> bool:
        """Whether the receiver is still to handle the message that carries `reply` (in its field
        of this name), or handles it now."""
        if reply.answered:
            return False
        bare = [m.message if isinstance(m, Traced) else m for m in (*self.batch, *self._queue)]
        places = [i for i, m in enumerate(bare) if getattr(m, "reply", None) is reply]
        now = [i for i, m in enumerate(bare) if m is self.current]
        return bool(places) and (not now or places[0] >= now[0])

    @property
    def more_waits(self) -> bool:
        """Whether something follows the message that is being handled: it waits here, or its
        sender has been given room and is about to put it there."""
        if self._queue or self._granted:
            return True
        return bool(self.batch) and self.batch[-1] is not self.current

    def put_back(self, messages: Sequence[M | Traced[M]]) -> None:
        """Returns messages received but not handled to the front (the receiver crashed).

        Their room may have been given away meanwhile: they have it over the bound.
        """
        self._queue[:0] = messages
        self._reserved += len(messages)
        self._received -= len(messages)
        self._rebound()

    def statistics(self) -> MailboxStatistics:
        """Depth, high-water mark and counts."""
        return MailboxStatistics(
            depth=len(self._queue),
            depth_max=max(self._depth_max, len(self._queue)),
            received=self._received,
            unhandled=self._unhandled,
            limit=self.limit,
            senders_waiting=len(self._senders or ()),
        )
