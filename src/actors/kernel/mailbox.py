"""A bounded mailbox with one receiver, the envelope it holds, and reply slots.

Theory of operation. One shared record, two thin ends: senders append, the one receiver takes
all that waits in one wake-up. Two lanes: the control lane (stop, inspect; supervision only)
overtakes, everything else is first in, first out. Three ways in:

- `send` waits for room; `send_nowait` raises `WouldBlock`;
- `deliver` uses room reserved by an earlier request (a reply, a timer, the result of an
  effect): it never waits and is not counted against the bound, because requests are.

Invariants: ``len(queue) - delivered <= limit`` at every send; a message is received once or
counted as unhandled at the close; after `close` every unanswered `Reply` opened through this
mailbox fails with `ActorDead`. What it does not do: it knows no actors and no time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from actors.errors import ActorDead, Broken, Closed, PenstockError, WouldBlock
from actors.telemetry import TRACEPARENT

M = TypeVar("M")
R = TypeVar("R")


class Envelope(msgspec.Struct, Generic[M], gc=False):
    """A message on its way, with the trace context of its sender."""

    message: M
    traceparent: str | None = None
    reserved: bool = False


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

    __slots__ = ("_future", "_owner")

    def __init__(self, owner: set[Reply[Any]] | None = None) -> None:
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._owner = owner
        if owner is not None:
            owner.add(self)

    @property
    def answered(self) -> bool:
        """Whether an answer was given or the asker has gone."""
        return self._future.done()

    def set(self, value: R) -> None:
        """Answers."""
        if not self._future.done():
            self._future.set_result(value)
        self._forget()

    def fail(self, error: PenstockError) -> None:
        """Answers with an error."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()
        self._forget()

    async def wait(self) -> R:
        """The answer; raises the error it failed with."""
        try:
            return await self._future
        finally:
            self._forget()

    def _forget(self) -> None:
        if self._owner is not None:
            self._owner.discard(self)


class Mailbox(Generic[M]):
    """A bounded first-in, first-out queue with a control lane."""

    __slots__ = (
        "_broken",
        "_closed",
        "_control",
        "_depth_max",
        "_queue",
        "_received",
        "_reserved",
        "_senders",
        "_unhandled",
        "_wake",
        "asks",
        "limit",
        "path",
    )

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.asks: set[Reply[Any]] = set()
        self._queue: deque[Envelope[M]] = deque()
        self._control: deque[Any] = deque()
        self._senders: deque[asyncio.Future[None]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._reserved = 0
        self._received = 0
        self._depth_max = 0
        self._unhandled = 0
        self._closed = False
        self._broken: str | None = None

    def _check_open(self) -> None:
        if self._broken is not None:
            raise Broken(f"{self.path} crashed: {self._broken}")
        if self._closed:
            raise Closed(f"{self.path} has stopped")

    def _put(self, envelope: Envelope[M]) -> None:
        self._queue.append(envelope)
        self._reserved += envelope.reserved
        if len(self._queue) > self._depth_max:
            self._depth_max = len(self._queue)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def has_room(self) -> bool:
        """Whether `send` would not wait."""
        return len(self._queue) - self._reserved < self.limit

    async def send(self, message: M) -> None:
        """Sends, waiting for room. Raises `Closed` or `Broken`."""
        self._check_open()
        while not self.has_room():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._senders.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_senders()
                raise
            self._check_open()
        self._put(Envelope(message, TRACEPARENT.get()))

    def send_nowait(self, message: M) -> None:
        """Sends if there is room. Raises `WouldBlock`, `Closed` or `Broken`."""
        self._check_open()
        if not self.has_room():
            raise WouldBlock(f"{self.path} holds {len(self._queue)} messages (limit {self.limit})")
        self._put(Envelope(message, TRACEPARENT.get()))

    def deliver(self, message: M) -> bool:
        """Puts a message into reserved room; False (and counted) when nobody will read it."""
        if self._closed:
            self._unhandled += 1
            return False
        self._put(Envelope(message, TRACEPARENT.get(), True))
        return True

    def control(self, message: Any) -> None:
        """Supervision only: overtakes everything."""
        if not self._closed:
            self._control.append(message)
            self._notify()

    async def receive(self) -> tuple[list[Any], list[Envelope[M]]]:
        """All that waits: (control messages, envelopes); waits while there is nothing."""
        while not self._control and not self._queue:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        control = list(self._control)
        self._control.clear()
        batch = list(self._queue)
        self._queue.clear()
        self._reserved = 0
        self._received += len(batch)
        self._wake_senders()
        return control, batch

    def _wake_senders(self) -> None:
        room = self.limit - (len(self._queue) - self._reserved)
        while self._senders and room > 0:
            waiter = self._senders.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1

    def close(self, unhandled: int = 0, broken: str | None = None) -> None:
        """Ends the mailbox; waiting senders and unanswered asks learn of it."""
        self._closed = True
        self._broken = broken
        self._unhandled += unhandled + len(self._queue)
        self._queue.clear()
        self._control.clear()
        while self._senders:
            waiter = self._senders.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self.fail_asks(broken)

    def fail_asks(self, broken: str | None) -> None:
        """Answers open asks with `ActorDead`; what was asked may have happened.

        An ask whose message (by its field ``reply``) still waits here is left alone: a
        restarted receiver will answer it.
        """
        why = f"crashed: {broken}" if broken else "stopped"
        waiting = {id(getattr(envelope.message, "reply", None)) for envelope in self._queue}
        for reply in list(self.asks):
            if id(reply) in waiting:
                continue
            error = ActorDead(f"{self.path} {why} before it answered")
            error.determinate = False
            reply.fail(error)

    def put_back(self, envelopes: Sequence[Envelope[M]]) -> None:
        """Returns messages received but not handled to the front (the receiver crashed)."""
        self._queue.extendleft(reversed(envelopes))
        self._reserved += sum(envelope.reserved for envelope in envelopes)
        self._received -= len(envelopes)

    def statistics(self) -> MailboxStatistics:
        """Depth, high-water mark and counts."""
        return MailboxStatistics(
            depth=len(self._queue),
            depth_max=self._depth_max,
            received=self._received,
            unhandled=self._unhandled,
            limit=self.limit,
            senders_waiting=len(self._senders),
        )
